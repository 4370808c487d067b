"""The recorder gives every node what a plain run on fakes gives it, and runs repeated calls once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext

from gemopt import dynamo
from gemopt.graph.recorder import Recorder
from tests.graph.test_capture import captured_of


def layers(x: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Equal calls on equal and on other shapes, strides, dtypes and under autocast."""
    for _ in range(3):
        x = F.layer_norm(torch.relu(x @ w), [w.shape[1]])
    y = F.layer_norm(torch.relu(other @ w), [w.shape[1]])
    with torch.autocast("cpu", torch.bfloat16):
        z = torch.relu(x @ w)
    turned = torch.relu(x.transpose(0, 1))
    return x, y, z, turned, x + 1, x + 1.0, (x > 0) + 1, (x > 0) + True


def chosen(x: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Two selections of the same look have sizes of their own."""
    return x[x > 0] * 2, x[x < 0] * 2, other @ w


def renamed(x: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """A fake that is changed in its shape must not be another node's too."""
    a, b = x * 2, x * 2
    a.transpose_(0, 1)
    return a, b, other @ w


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Sizes that depend on data have new names in every run.
        sizes = [str(s) if not str(s).startswith("u") else "u" for s in (*value.shape, *value.stride())]
        return value.dtype, value.device, sizes
    return type(value)


@pytest.mark.parametrize("function", [layers, chosen, renamed])
def test_like_a_plain_run(function: Any) -> None:
    captured = captured_of(function, torch.randn(6, 4, requires_grad=True), torch.randn(4, 4), torch.randn(7, 4))
    expected: dict[fx.Node, Any] = {}

    class Plain(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            expected[n] = super().run_node(n)
            return expected[n]

    recorder = Recorder(captured.gm)
    given = [x.detach() if isinstance(x, Tensor) else x for x in captured.example_inputs]
    shape_env = captured.fake_mode.shape_env
    with captured.fake_mode, shape_env.ignore_fresh_unbacked_symbols(), enable_python_dispatcher():
        Plain(captured.gm).run(*given)
        recorder.run(*given)
    assert recorder.values.keys() == expected.keys()
    for node, value in expected.items():
        assert described(recorder.values[node]) == described(value), node
    if function is layers:
        results = [v for v in recorder.values.values() if isinstance(v, Tensor)]
        assert len({id(v) for v in results}) <= len(results) - 6  # two layers of three calls
    if function is chosen:
        sizes = [x.shape[0] for x in recorder.values[captured.gm.graph.output_node()][:2]]
        assert sizes[0].node.expr != sizes[1].node.expr


@pytest.mark.parametrize("depth", [1, 200])
def test_large_graphs_share_fakes(depth: int) -> None:
    """Under dynamic shapes the cache of fake tensors is on for a large graph, for its compilation alone."""
    before, seen = torch._dynamo.config.fake_tensor_cache_enabled, []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        dynamo.share_fakes(gm)
        seen.append(TracingContext.get().fake_mode.cache_enabled)
        return gm.forward

    def function(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = torch.relu(x + 1) * 2
        return x

    torch.compiler.reset()
    dynamo.optimize(function, backend, dynamic=True)(torch.randn(5))
    assert seen == [depth == 200]
    assert torch._dynamo.config.fake_tensor_cache_enabled == before
