"""canonicalise keeps values exactly, makes local in-place ops functional, and leaves others alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gemopt.graph.mutation import mutated_arguments, tainted
from gemopt.passes.canonicalise import canonicalise


def captured(f: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    return make_fx(f, pre_dispatch=True, tracing_mode="symbolic")(*args)


def local_fill(x: Tensor, m: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    mask.masked_fill_(m, float("-inf"))
    return torch.softmax(x + mask, -1)


def chain(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    y.relu_()
    y *= m
    return y + y.sum()


def read_before_and_after(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    before = y.sin()
    y.add_(1)
    return before + y


def view_read_later(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    y.add_(1)
    return row + y.sum()


def written_through_a_view(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y + 1


def parts(x: Tensor, m: Tensor) -> Tensor:
    a, b = (x * 2).unbind(0)[:2]
    c, d = x.split([2, x.shape[1] - 2], 1) if False else x.chunk(2, 1)
    return a + b + c.sum() * d.mean()


@pytest.mark.parametrize("f", [local_fill, chain, read_before_and_after, view_read_later, written_through_a_view, parts])
def test_values_are_kept(f: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, m = torch.randn(3, 4, generator=generator), torch.tensor([True, False, True, True])
    gm = captured(f, x, m)
    want = gm(x.clone(), m)
    canonicalise(gm)
    assert torch.equal(gm(x.clone(), m), want)
    assert torch.equal(want, f(x.clone(), m))


@pytest.mark.parametrize("f", [local_fill, chain, read_before_and_after])
def test_local_writes_become_functional(f: Callable[..., Tensor]) -> None:
    gm = captured(f, torch.randn(3, 4), torch.tensor([True, False, True, True]))
    canonicalise(gm)
    assert not [n for n in gm.graph.nodes if mutated_arguments(n)]
    assert not tainted(gm.graph)


@pytest.mark.parametrize("f", [view_read_later, written_through_a_view])
def test_writes_seen_through_views_stay_and_taint(f: Callable[..., Tensor]) -> None:
    gm = captured(f, torch.randn(3, 4), torch.tensor([True, False, True, True]))
    canonicalise(gm)
    assert [n for n in gm.graph.nodes if mutated_arguments(n)]
    assert {"mul"} <= {n.name for n in tainted(gm.graph)}


def test_written_inputs_are_left_alone() -> None:
    def count(x: Tensor, m: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    gm = captured(count, torch.randn(3, 4), torch.ones(4))
    canonicalise(gm)
    x = torch.zeros(3, 4)
    gm(x, torch.ones(4))
    assert torch.equal(x, torch.ones(3, 4))


def test_parts_become_slices() -> None:
    gm = captured(lambda x, m: sum(x.unbind(0)) + m, torch.randn(3, 4), torch.ones(4))
    canonicalise(gm)
    names = {getattr(n.target, "_opname", "") for n in gm.graph.nodes if n.op == "call_function"}
    assert "unbind" not in names
