"""Block-diagonal attention from a mask: blocks that restart at each sequence become sequences of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from gemopt.testing import DEFAULT_CASES, assert_equivalent
from tests.hostile.common import SWEEPING, sweep

D, HEADS, IDS, MAX_LEN = 12, 2, 37, 21
# An empty batch is compiled apart: only some tests have one, all of them in the sweep.
CASES = tuple(case for case in DEFAULT_CASES if case != "empty_batch" or SWEEPING)


class Blocks(nn.Module):
    """One layer of attention inside blocks, then a masked mean."""

    def __init__(self, block: int, spelling: str = "sdpa", holes: bool = False, extra: str = "", layers: int = 1) -> None:
        super().__init__()
        self.block, self.spelling, self.holes, self.extra = block, spelling, holes, extra
        self.items = nn.Embedding(IDS, D)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(layers))
        self.relative = nn.Embedding(2 * MAX_LEN, HEADS)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        position = torch.arange(ids.size(1), device=ids.device)
        valid = ids != 0 if self.holes else position[None, :] < lengths[:, None]
        i, j = position[:, None], position[None, :]
        allowed = valid[:, None, None, :] & (torch.div(i, self.block, rounding_mode="floor") == j // self.block)
        if self.extra == "causal":
            allowed = allowed & (j <= i)
        if self.extra == "window":
            allowed = allowed & ((i - j).abs() <= 2)
        x = self.items(ids)
        for qkv in self.qkv:
            q, k, v = qkv(x).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            bias = None
            if self.extra == "bias":
                bias = self.relative(i - j + MAX_LEN).permute(2, 0, 1)[None]
            x = x + self.attend(q, k, v, allowed, bias).transpose(1, 2).flatten(2)
        return (x * valid[..., None]).sum(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
        if self.spelling == "sdpa" and bias is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        if self.spelling == "silu":
            return (F.silu(scores) * allowed) @ v
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, IDS, (len(lengths), max_len), generator=generator)
    return ids * (torch.arange(max_len) < lengths[:, None]), lengths


def holed(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids, lengths = inputs(lengths, max_len, generator)
    kept = torch.rand(ids.shape, generator=generator) < 0.6
    return ids * kept, lengths


@pytest.mark.parametrize(
    ("block", "spelling", "holes", "extra", "kernel"),
    [
        (4, "sdpa", False, "", "block_attention"),
        (4, "softmax", False, "causal", "block_attention"),
        (1, "sdpa", False, "", "block_attention"),
        (64, "sdpa", False, "", "block_attention"),  # one block holds every sequence
        (4, "sdpa", True, "", "jagged_attention"),  # rows are not positions where there are holes
        (5, "softmax", False, "window", "jagged_attention"),
        (4, "softmax", False, "bias", "jagged_attention"),  # a dense mask
        (4, "silu", False, "", "gdpa(silu)"),
        (4, "silu", True, "causal", "gdpa(silu)"),
    ],
)
def test_blocks(block, spelling, holes, extra, kernel):
    torch.manual_seed(0)
    model = Blocks(block, spelling, holes, extra)
    compiled = gemopt.compile(model, recipe=gemopt.Recipe(inner="eager", strict=True, min_saving=0.0))
    result = assert_equivalent(model, holed if holes else inputs, compiled=compiled, cases=CASES, max_len=MAX_LEN)
    assert {r.kernel for r in compiled.report.rewrites if r.kernel} == {kernel}
    assert any(c.path == "packed" for c in result.cases)


def test_pruned_queries_of_two_layers():
    torch.manual_seed(0)
    model = Blocks(4, layers=2)
    compiled = gemopt.compile(model, recipe=gemopt.Recipe(inner="aot_eager", strict=True))
    assert_equivalent(model, inputs, compiled=compiled, max_len=MAX_LEN)
    assert [r.kernel for r in compiled.report.rewrites if r.kernel] == ["block_attention"] * 2


def test_blocks_of_other_sizes_are_not_one():
    """Queries in blocks of 4 and keys in blocks of 3 are no blocks at all."""

    class Skewed(Blocks):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            position = torch.arange(ids.size(1), device=ids.device)
            valid = position[None, :] < lengths[:, None]
            allowed = valid[:, None, None, :] & (position[:, None] // 4 == position[None, :] // 3)
            x = self.items(ids)
            q, k, v = self.qkv[0](x).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = self.attend(q, k, v, allowed | (position[:, None] == position[None, :]), None)
            return ((x + y.transpose(1, 2).flatten(2)) * valid[..., None]).sum(1)

    torch.manual_seed(0)
    model = Skewed(4)
    compiled = gemopt.compile(model, recipe=gemopt.Recipe(inner="eager", strict=True))
    assert_equivalent(model, inputs, compiled=compiled, cases=CASES, max_len=MAX_LEN)
    assert "block_attention" not in {r.kernel for r in compiled.report.rewrites}


class Reshaped(nn.Module):
    """The other spelling: ``[B, L / block, block, D]``. ``pads`` rounds L up first, inside the model."""

    def __init__(self, block: int, score: str = "softmax", pads: bool = False) -> None:
        super().__init__()
        self.block, self.score, self.pads = block, score, pads
        self.items = nn.Embedding(IDS, D)
        self.qkv, self.mlp = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        length = ids.size(1)
        valid = torch.arange(length, device=ids.device)[None, :] < lengths[:, None]
        x = self.items(ids)
        y, keys = x, valid
        if self.pads:
            y, keys = F.pad(x, (0, 0, 0, -length % self.block)), F.pad(valid, (0, -length % self.block))
        q, k, v = self.qkv(y).view(len(ids), -1, self.block, 3, HEADS, D // HEADS).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        allowed = keys.view(len(ids), -1, self.block)[:, :, None, None, :]
        if self.score == "softmax":
            weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        else:
            weights = F.gelu(scores) * allowed
        y = (weights @ v).transpose(2, 3).reshape(len(ids), -1, D)[:, :length]
        x = x + y
        x = x + self.mlp(x).relu()
        return (x * valid[..., None]).sum(1)


@pytest.mark.parametrize(
    ("block", "score", "pads"),
    [
        (4, "softmax", False),
        pytest.param(2, "gelu", False, marks=sweep),
        pytest.param(4, "gelu", True, marks=sweep),
    ],
)
def test_reshaped(block, score, pads):
    torch.manual_seed(0)
    model = Reshaped(block, score, pads)
    compiled = gemopt.compile(model, recipe=gemopt.Recipe(inner="eager", strict=True, min_saving=0.0))
    result = assert_equivalent(model, inputs, compiled=compiled, max_len=21 if pads else 20)
    kernels = {r.kernel for r in compiled.report.rewrites if r.kernel}
    assert pads or kernels == {"jagged_attention" if score == "softmax" else "gdpa(gelu)"}
    assert pads or any(c.path == "packed" for c in result.cases)
