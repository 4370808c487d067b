"""What every node of a graph gives, as fake tensors, at little cost: layers repeat.

A call that was made before under the same grad mode and autocast, with arguments that nothing tells apart but their
content, gives the fake that it gave then. torch's own cache of fake tensors is slower for symbolic sizes, from which it
builds every result anew, and it passes over custom ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from gemopt.graph.capture import regions
from gemopt.graph.mutation import has_side_effect


class _Distinct(Exception):
    """An argument that is more than its description."""


class Recorder(fx.Interpreter):
    """Runs a graph on fakes without an autograd history; ``values`` has the result of every node.

    Results of equal calls are one object: read their shapes, strides and dtypes, not what aliases what.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self._regions = regions(gm)
        self._seen: dict[Any, Any] = {}
        self._shares = not any(torch.Tag.inplace_view in getattr(n.target, "tags", ()) for n in gm.graph.nodes)

    def run_node(self, n: fx.Node) -> Any:
        key = self._key(n) if self._shares and _repeatable(n) else None
        if key is None or key not in self._seen:
            result = super().run_node(n)
            if key is not None:
                self._seen[key] = result
        else:
            result = self._seen[key]
        self.values[n] = result
        return result

    def _key(self, n: fx.Node) -> Any:
        try:
            args, kwargs = (_described(x, self.values) for x in (n.args, n.kwargs))
        except _Distinct:
            return None
        return n.target, args, kwargs, self._regions[n]


def _repeatable(n: fx.Node) -> bool:
    """A call whose fake result follows from what `_described` says of its arguments."""
    if n.op != "call_function":
        return False
    if isinstance(n.target, torch._ops.OpOverload):
        makes_sizes = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(n.target.tags)
        return not has_side_effect(n) and not makes_sizes
    return getattr(n.target, "__module__", "") == "gemopt.ops"


def _described(x: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(x, fx.Node):
        return _described(values[x], values)
    if isinstance(x, torch.Tensor):
        return _described_tensor(x)
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(x), x.node.expr
    if isinstance(x, list | tuple):
        return "sequence", *(_described(v, values) for v in x)
    if isinstance(x, dict):
        return "dict", *((k, _described(v, values)) for k, v in x.items())
    return type(x), x  # 1, 1.0 and True are equal


def _described_tensor(x: torch.Tensor) -> Any:
    memos = ("constant", "item_memo", "nonzero_memo")
    if not isinstance(x, FakeTensor) or any(getattr(x, m, None) is not None for m in memos) or x.layout != torch.strided:
        raise _Distinct
    sizes = tuple(_described(s, {}) for s in (*x.shape, *x.stride(), x.storage_offset()))
    return x.dtype, x.device, x.ndim, sizes, x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()
