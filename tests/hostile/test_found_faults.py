"""Faults that generated programs have found, each in its smallest form: the numbers must be eager's, packed or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt

D = 8


class Parts:
    """What a program is made of: tokens x `[B, L, D]`, queries, keys, values, and the validity of the tokens."""

    def __init__(self, model: Model, ids: Tensor, valid: Tensor) -> None:
        self.model, self.ids, self.valid = model, ids, valid
        self.x = model.embed(ids)
        self.q, self.k, self.v = model.qkv(self.x).chunk(3, -1)
        self.length = ids.shape[1]

    @property
    def scores(self) -> Tensor:
        return self.q @ self.k.mT

    @property
    def keys(self) -> Tensor:
        return self.valid[:, None, :]

    @property
    def causal(self) -> Tensor:
        return torch.ones(self.length, self.length, dtype=torch.bool).tril()

    def pooled(self, y: Tensor) -> Tensor:
        return (y * self.valid[..., None]).sum(1)


Program = Callable[[Parts], Tensor]


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Embedding(40, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        return self.program(Parts(self, ids, valid))


def unread_batch_norm(p: Parts) -> Tensor:
    """Running statistics are a result that nobody returns."""
    p.model.norm(p.x.transpose(1, 2))
    return p.pooled(p.scores.masked_fill(~p.keys, -torch.inf).softmax(-1) @ p.v)


def softmax_over_queries(p: Parts) -> Tensor:
    """A softmax row over queries may be filled altogether, and is uniform then."""
    weights = p.scores.masked_fill(~(p.keys & p.causal), -1e9).softmax(-2)
    return p.pooled((weights.unsqueeze(-1) * p.v.unsqueeze(-3)).sum(-2))


def softmax_twice(p: Parts) -> Tensor:
    """Unpacked with -inf, a dead row would be NaN after the first softmax."""
    return p.pooled(p.scores.masked_fill(~(p.keys & p.causal), -torch.inf).softmax(-1).softmax(-1) @ p.v)


def einsum_sums_apart(p: Parts) -> Tensor:
    """``l`` and ``m`` are summed on their own: the zeros of one say nothing of the other."""
    return torch.einsum("bld,bme->bde", p.x * p.valid[..., None], p.v).flatten(1)


def fill_undone(p: Parts) -> Tensor:
    """What is added later lifts the masked scores again."""
    scores = p.scores.masked_fill(~p.keys, -1e4) + 1e4 * (1.0 - p.keys.float())
    return p.pooled(scores.softmax(-1) @ p.v)


def two_fills(p: Parts) -> Tensor:
    """Where the query is masked lower than the keys, all weight is on padded keys."""
    scores = p.scores.masked_fill(~p.valid[..., None], -1e9).masked_fill(~p.keys, -1e4)
    return (scores.softmax(-1) @ p.v).mean(1)


def padded_queries_observed(p: Parts) -> Tensor:
    """Padded queries see nothing in their window, and every second sample reads them."""
    near = (torch.arange(p.length)[:, None] - torch.arange(p.length)).abs() < 1
    y = p.scores.masked_fill(~(p.keys & near), -1e9).softmax(-1) @ p.v
    odd = (torch.arange(p.ids.shape[0]) % 2 == 1)[:, None]
    return (y * (p.valid ^ odd)[..., None]).sum(1)


def dtype_of_another(p: Parts) -> Tensor:
    """``type_as`` reads no element of its second operand, whose shape is another."""
    weights = p.scores.masked_fill(~p.keys, -1e4).softmax(-1).type_as(p.v)
    return p.pooled((weights * torch.arange(1, p.length + 1)) @ p.v)


def masked_queries_of_activation(p: Parts) -> Tensor:
    """A gather reads a query that the mask has made 0."""
    weights = F.silu(p.scores).masked_fill(~(p.keys & p.valid[..., None]), 0.0)
    return (weights @ p.v)[torch.arange(p.ids.shape[0]), p.valid.sum(1) - 1]


def padding_by_default(p: Parts) -> Tensor:
    """Pooling weights under a finite fill."""
    votes = p.x.sum(-1).masked_fill(~p.valid, -1e9).softmax(1)
    return (votes.unsqueeze(1) @ p.x).squeeze(1)


def fill_subtracted(p: Parts) -> Tensor:
    """The second fill is a large number that is taken away: in a block without valid keys it meets the first."""
    block = torch.arange(p.length) // 2
    apart = (block[:, None] != block[None, :]).to(p.scores.dtype)
    least = torch.finfo(p.scores.dtype).min
    scores = (p.scores - apart * -least).masked_fill(~p.keys, least)
    return ((p.x + scores.softmax(-1) @ p.v) * (p.valid[..., None] * 0.9 + 0.1)).sum(1)


def padding_by_addition(p: Parts) -> Tensor:
    """The same with a number that is added."""
    votes = (p.x.sum(-1) + (1.0 - p.valid.to(p.x.dtype)) * -1e9).softmax(1)
    return (votes.unsqueeze(1) @ p.x).squeeze(1)


def added_fill_observed(p: Parts) -> Tensor:
    """The filled votes are read once more: what was added to is not the fill."""
    votes = p.x.sum(-1) + (1.0 - p.valid.to(p.x.dtype)) * -1e4
    return (votes.softmax(1).unsqueeze(1) @ p.x).squeeze(1) + votes.amin(1, keepdim=True) * 1e-3


PROGRAMS = [
    unread_batch_norm, softmax_over_queries, softmax_twice, einsum_sums_apart, fill_undone, two_fills,
    padded_queries_observed, dtype_of_another, masked_queries_of_activation, padding_by_default,
    fill_subtracted, padding_by_addition, added_fill_observed,
]  # fmt: skip


@pytest.mark.parametrize("holes", [False, True], ids=["prefix", "holes"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_numbers_are_eagers(program: Program, holes: bool) -> None:
    torch.manual_seed(0)
    model = Model(program)
    compiled = gemopt.compile(model, inner="eager", strict=True)
    generator = torch.Generator().manual_seed(1)
    for batch, length in ((5, 9), (4, 7)):
        lengths = torch.randint(1, length + 1, (batch,), generator=generator)
        ids = torch.randint(1, 40, (batch, length), generator=generator)
        valid = torch.arange(length) < lengths[:, None]
        if holes:
            valid &= (torch.rand(valid.shape, generator=generator) < 0.6) | (torch.arange(length) == 0)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            model.norm.reset_running_stats()
            out = run(ids, valid)
            out.square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([out.detach(), *gradients, *(b.clone() for b in model.norm.buffers())])
        for expected, found in zip(*results, strict=True):
            largest = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * largest)
