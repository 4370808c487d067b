"""In-place ops mean what they mean in eager: no history where grad mode is off, and the dtype of what is written.

And embeddings whose gradient depends on ids that only padding holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemopt.testing import assert_equivalent

from .common import compiled, sweep
from .programs import inputs

WRITES = {
    "mul": lambda h, v: h.mul_(v[..., None]),
    "masked_fill": lambda h, v: h.masked_fill_(~v[..., None], 0.5),
    "round": lambda h, v: h.round_(),
    "clamp": lambda h, v: h.clamp_(min=0.0),
    "copy": lambda h, v: h.copy_(v[..., None].expand_as(h)),
    "twice": lambda h, v: h.mul_(2.0).add_(v[..., None]),
    "a view": lambda h, v: h.view(-1, 8).mul_(2.0),
}
# name: (made of the valid entries `v [B, L]` and ids, written in place, used twice so that its dtype shows)
DTYPES = {
    "float.gt_": lambda ids, v: (v.float() * 3).gt_(1.0),
    "int.ne_": lambda ids, v: (ids * v).ne_(0),
    "uint8.add_(int64)": lambda ids, v: v.to(torch.uint8).add_(ids * 7),
    "int32.mul_(int64)": lambda ids, v: v.to(torch.int32).mul_(ids * 2**30),
    "bool.logical_or_(float)": lambda ids, v: (v & (ids < 20)).logical_or_(v.float()),
    "bf16.mul_(fp32)": lambda ids, v: v.bfloat16().mul_((ids / 3).float()),
    "fp32.add_(fp64)": lambda ids, v: (v.float() / 3).add_(ids.double() * 1e-9),
}


class Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(40, 8)
        self.linear = nn.Linear(8, 8)


class Written(Model):
    """Its projection is written under no_grad, by `WRITES[kind]`, after a mask or before it."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        h = self.linear(self.embed(ids))
        with torch.no_grad():
            WRITES[self.kind](h, valid)
        return (h * valid[..., None]).sum(1) + h[:, 0] + self.embed.weight[0]


class Kept(Model):
    """Weights of a sum that an in-place op has left in their dtype."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        w = DTYPES[self.kind](ids, valid)
        h = self.linear(self.embed(ids)) * valid[..., None]
        return (h * (w + w)[..., None]).sum(1) / (1 + (w + w).float().abs().sum(1, keepdim=True))


class Counted(Model):
    """Its ids are looked up with the option `kind`."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = F.embedding(ids, self.embed.weight, **{self.kind: True})
        return (self.linear(x) * valid[..., None]).sum(1)


def quick(table: Iterable[str], *always: str) -> list[Any]:
    return [name if name in always else pytest.param(name, marks=sweep) for name in table]


def check(model: nn.Module) -> None:
    """Equal gradients; a parameter that gets none in eager gets none here."""
    generator = torch.Generator().manual_seed(0)
    subject = compiled(model)
    for lengths, size in (([3, 5, 2, 7, 16, 4], 16), ([0, 1, 9], 12), ([4, 4, 4, 4, 4], 9)):
        ids = torch.randint(1, 40, (len(lengths), size), generator=generator)
        found = []
        for run in (model, subject):
            model.zero_grad()
            out = run(ids, torch.tensor(lengths))
            (out * torch.arange(1.0, 9.0)).sum().backward()
            found.append((out.detach(), *(p.grad for p in model.parameters())))
        assert [None if g is None else g.is_sparse for g in found[0]] == [
            None if g is None else g.is_sparse for g in found[1]
        ]
        for expected, got in zip(*found, strict=True):
            if expected is not None and expected.is_sparse:
                expected, got = expected.coalesce(), got.coalesce()
                assert torch.equal(expected.indices(), got.indices())
                expected, got = expected.values(), got.values()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", quick(WRITES, "mul", "masked_fill", "twice"))
def test_writes_under_no_grad_keep_the_history(kind: str) -> None:
    check(Written(kind))


@pytest.mark.parametrize("kind", quick(DTYPES, "float.gt_", "int.ne_", "uint8.add_(int64)", "bf16.mul_(fp32)"))
def test_writes_keep_the_dtype(kind: str) -> None:
    check(Kept(kind))


def test_writes_keep_the_dtype_under_autocast() -> None:
    class Scores(Model):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            valid = torch.arange(ids.shape[1]) < lengths[:, None]
            q = self.linear(self.embed(ids))
            scores = torch.zeros(len(ids), ids.shape[1], ids.shape[1]).baddbmm_(q.float(), q.float().mT)
            weights = scores.masked_fill(~valid[:, None], -1e9).softmax(-1)
            return ((weights @ q) * valid[..., None]).sum(1).float()

    model = Scores()
    with torch.autocast("cpu", torch.bfloat16):
        assert_equivalent(model, inputs, compiled=compiled(model), cases=("given", "skewed"))


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_embeddings_whose_gradient_sees_the_ids_of_padding(option: str) -> None:
    check(Counted(option))


LENGTHS_WRITTEN = {
    "lengths": lambda n, offsets: n.clamp_(min=1),
    "lengths set": lambda n, offsets: n.__setitem__(0, 2),
    "offsets": lambda n, offsets: offsets.clamp_(max=8),
    "a part of the offsets": lambda n, offsets: offsets[1:].sub_(offsets[1:] % 2),
    "nothing": lambda n, offsets: None,
}


class Jagged(Model):
    """A mask of the differences of offsets, whose lengths or themselves are written after the sum, before or after it."""

    def __init__(self, kind: str, when: str) -> None:
        super().__init__(kind)
        self.when = when

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.clone()
        offsets = F.pad(n.cumsum(0), (1, 0))
        if self.when == "before":
            LENGTHS_WRITTEN[self.kind](n, offsets)
        differences = offsets.diff()
        if self.when == "after":
            LENGTHS_WRITTEN[self.kind](n, offsets)
        seen = torch.arange(ids.shape[1]) < differences[:, None]
        return (self.linear(self.linear(self.embed(ids)).relu()) * seen[..., None]).sum(1) / (n[:, None] + 1)


@pytest.mark.parametrize("kind", LENGTHS_WRITTEN)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lengths_and_offsets_that_are_written(kind, when):
    model = Jagged(kind, when).double()
    subject = compiled(model)
    assert_equivalent(model, inputs, max_len=9, cases=("zeros", "skewed"), compiled=subject)
    assert subject.report.steps_packed or kind in ("lengths set", "a part of the offsets")  # a part that stays written


COPIES = {
    "a copy": lambda y, h: torch.empty_like(h).copy_(h),
    "a copy that is written": lambda y, h: torch.empty_like(h).copy_(h).mul_(3),
    "a row": lambda y, h: torch.empty_like(h).copy_(h[0, 0]),
    "another dtype": lambda y, h: torch.empty(h.shape, dtype=torch.int64).copy_(h * 10) * y,
    "into a part": lambda y, h: torch.zeros_like(h).copy_(y)[..., 1:].copy_(h[..., 1:]).sum(-1, keepdim=True) * y,
    "over what was computed": lambda y, h: y.copy_(h),
    "set": lambda y, h: torch.ones_like(h).index_put_((torch.tensor([0]),), h[:1]),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=sweep)])
def test_copies_have_a_derivative(copy, inner):
    class Copying(Model):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            h = self.embed(ids)
            y = COPIES[copy](self.linear(h), h.sin())
            return (self.linear(y.relu()) * (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]).sum(1)

    model = Copying().double()
    subject = compiled(model, inner)
    assert_equivalent(model, inputs, max_len=9, cases=("zeros", "skewed"), compiled=subject)
    assert subject.report.steps_packed
