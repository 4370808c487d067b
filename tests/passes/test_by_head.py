"""Activations that differ by head: parts of the scores, each with its own, joined again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gemopt
from gemopt.testing import DEFAULT_CASES, assert_equivalent
from tests.hostile.common import SWEEPING, compiled

D, HEADS, IDS, MAX_LEN = 16, 4, 37, 9
CASES = DEFAULT_CASES if SWEEPING else ("zeros", "skewed")
ACTIVATIONS = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "identity": lambda x: x,
    "relu2": lambda x: F.relu(x).square(),
}
SPELLED_OUT = {"silu": lambda x: x() * torch.sigmoid(x()), "relu2": lambda x: F.relu(x()).square()}
# (first head taken, how many, activation): parts in the order in which they are joined
Part = tuple[int, int, str]


class ByHead(nn.Module):
    """One layer over a sum of valid positions. ``shape`` are the axes of heads, ``axis`` the one that is cut in parts."""

    def __init__(self, parts: list[Part], spelling: str = "cat", shape: tuple[int, ...] = (HEADS,), axis: int = 0) -> None:
        super().__init__()
        self.parts, self.spelling, self.shape, self.axis = parts, spelling, shape, axis
        self.items, self.qkv = nn.Embedding(IDS, D), nn.Linear(D, 3 * D)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.size(1), device=ids.device) < lengths[:, None]
        qkv = self.qkv(self.items(ids)).view(*ids.shape, 3, *self.shape, -1)
        q, k, v = (x.movedim(1, -2) for x in qkv.unbind(2))
        scores = q @ k.transpose(-1, -2) / 2
        mask = valid[:, *[None] * (len(self.shape) + 1), :]
        weights = self.activated(scores, 1 + self.axis) * mask
        out = (weights @ v).movedim(-2, 1).flatten(2)
        return (out * valid[..., None]).sum(1)

    def activated(self, scores: Tensor, dim: int) -> Tensor:
        if self.spelling == "cat":
            return torch.cat([ACTIVATIONS[a](scores.narrow(dim, i, n)) for i, n, a in self.parts], dim)
        if self.spelling == "split":
            pieces = scores.split([n for _, n, _ in self.parts], dim)
            return torch.cat([ACTIVATIONS[a](x) for x, (_, _, a) in zip(pieces, self.parts, strict=True)], dim)
        if self.spelling == "sliced twice":
            return torch.cat([SPELLED_OUT[a](partial(scores.narrow, dim, i, n)) for i, n, a in self.parts], dim)
        return torch.stack([ACTIVATIONS[a](scores.select(dim, i)) for i, _, a in self.parts], dim)


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(1, IDS, (len(lengths), max_len), generator=generator), lengths


def check(model: nn.Module) -> gemopt.report.Report:
    """Right on every draw of lengths; what became of it."""
    rewritten = compiled(model)
    assert_equivalent(model, inputs, max_len=MAX_LEN, cases=CASES, compiled=rewritten)
    return rewritten.report


def kernels(model: ByHead) -> list[str | None]:
    return [r.kernel for r in check(model).rewrites if r.rule == "unpad attention"]


@st.composite
def partitions(draw: st.DrawFn, heads: int = HEADS) -> list[Part]:
    ends = sorted({*draw(st.sets(st.integers(1, heads - 1), min_size=1)), heads})
    names = st.sampled_from(sorted(ACTIVATIONS))
    return [(first, end - first, draw(names)) for first, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=60 if SWEEPING else 4, deadline=None)
@given(parts=partitions(), spelling=st.sampled_from(["cat", "split", "stack"]))
def test_parts_in_their_places_are_one_attention(parts, spelling):
    if spelling == "stack":
        parts = [(i, 1, a) for first, n, a in parts for i in range(first, first + n)]
    names = dict.fromkeys(a for _, _, a in parts)
    assert kernels(ByHead(parts, spelling)) == [f"gdpa({', '.join(names)})"]


def test_parts_that_are_sliced_twice():
    assert kernels(ByHead([(0, 1, "silu"), (1, 3, "relu2")], "sliced twice")) == ["gdpa(silu, relu2)"]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_several_axes_of_heads(axis):
    """The list of activations is over all heads, row-major."""
    parts = [(0, 1, "gelu"), (1, 1, "relu")]
    assert kernels(ByHead(parts, "cat", (2, 2, 2), axis)) == ["gdpa(gelu, relu)"]


@pytest.mark.parametrize(
    ("spelling", "parts"),
    [
        pytest.param("cat", [(2, 2, "gelu"), (0, 2, "relu")], id="swapped"),
        pytest.param("cat", [(0, 2, "gelu"), (0, 2, "relu")], id="the same twice"),
        pytest.param("cat", [(0, 2, "gelu"), (1, 2, "relu")], id="overlapping"),
        pytest.param("cat", [(1, 1, "gelu"), (0, 1, "relu"), (2, 2, "silu")], id="swapped singles"),
        pytest.param("stack", [(1, 1, "gelu"), (0, 1, "relu"), (2, 1, "gelu"), (3, 1, "silu")], id="swapped in a stack"),
        pytest.param("stack", [(0, 1, "gelu")] * HEADS, id="one head everywhere"),
    ],
)
def test_parts_from_other_places_are_refused(spelling, parts):
    report = check(ByHead(parts, spelling))
    assert [r for r in report.rewrites if r.rule == "unpad attention"] == []
    assert any("own places" in r.reason for r in report.rejections)


class Different(ByHead):
    """Parts that are not one attention: of other scores, with other factors, or normalised by themselves."""

    def activated(self, scores: Tensor, dim: int) -> Tensor:
        first, second = scores.chunk(2, dim)
        if self.spelling == "factor":
            return torch.cat([F.gelu(first) * 2, F.relu(second)], dim)
        if self.spelling == "scores":
            return torch.cat([F.gelu(first), F.relu((scores + 1).chunk(2, dim)[1])], dim)
        if self.spelling == "softmax":
            return torch.cat([F.softmax(first, -1), F.relu(second)], dim)
        return torch.cat([F.gelu(first) * torch.arange(first.shape[-1]), F.relu(second)], dim)


@pytest.mark.parametrize("spelling", ["factor", "scores", "softmax", "positions"])
def test_parts_that_differ_in_more_are_refused(spelling):
    report = check(Different([], spelling))
    assert [r for r in report.rewrites if r.rule == "unpad attention"] == []
    assert report.rejections


class Cut(nn.Module):
    """Parts that are cut on the axis of queries or keys too, so that the weights are smaller than the scores."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut, self.items, self.qkv = cut, nn.Embedding(IDS, D), nn.Linear(D, 3 * D)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        q, k, v = self.qkv(self.items(ids)).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if self.cut == "keys":
            weights = torch.cat([F.gelu(scores[:, :2, :, :3]), F.relu(scores[:, 2:, :, :3])], 1) * valid[:, None, None, :3]
            return ((weights @ v[:, :, :3]) * valid[:, None, :, None]).sum(2).flatten(1)
        if self.cut == "fewer heads":
            weights = torch.cat([F.gelu(scores[:, :1]), F.relu(scores[:, 1:2])], 1) * valid[:, None, None]
            return ((weights @ v[:, :2]) * valid[:, None, :, None]).sum(2).flatten(1)
        if self.cut == "queries":
            weights = torch.stack([ACTIVATIONS[a](scores[:, h, :2]) for h, a in enumerate(list(ACTIVATIONS)[:HEADS])], 1)
        else:
            weights = torch.stack([ACTIVATIONS[a](scores[:, h, h]) for h, a in enumerate(list(ACTIVATIONS)[:HEADS])], 1)
            weights = weights[:, :, None]
        return ((weights * valid[:, None, None]) @ v).sum(2).flatten(1)


@pytest.mark.parametrize("cut", ["keys", "queries", "diagonal", "fewer heads"])
def test_parts_that_are_cut_on_another_axis_are_refused(cut):
    report = check(Cut(cut))
    assert [r for r in report.rewrites if r.rule == "unpad attention"] == []
    assert report.rejections
