"""Attentions whose operands, factors, masks and results are laid out in ways that only some readers meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from tests.hostile.common import compiled, sweep

D, B, L, H = 8, 3, 6, 2
Program = Callable[..., Tensor]


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.items = nn.Embedding(20, D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.seeds = nn.Parameter(torch.randn(4, D))
        self.register_buffer("low", torch.tensor(-1e9))

    def forward(self, *args: Tensor) -> Tensor:
        return self.program(self, *args)


def agree(program: Program, *batches: tuple[Tensor, ...], **options: Any) -> gemopt.report.Report:
    """Outputs, their strides, and gradients."""
    torch.manual_seed(0)
    model = Model(program).double()
    rewritten = compiled(model, **options)
    for args in batches:
        found = []
        for run in (model, rewritten):
            model.zero_grad()
            out = run(*args)
            out.square().sum().backward()
            found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
            strides = out.stride()
            if run is model:
                expected_strides = strides
        assert strides == expected_strides
        for expected, got in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    return rewritten.report


def seen(length: int, n: Tensor) -> Tensor:
    return torch.arange(length) < n[:, None]


IDS = torch.randint(1, 20, (B, L), generator=torch.Generator().manual_seed(0))
LENGTHS = (torch.tensor([5, 1, 3]), torch.tensor([2, 6, 1]))


# ---------------------------------------------------------------- lengths that are a column

COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda n: n[:, 1],
    "select": lambda n: n.select(1, 1),
    "kept": lambda n: n[:, 1:].squeeze(1),
    "transposed": lambda n: n.T[1],
}


@pytest.mark.parametrize(
    ("column", "inner"), [*((c, "eager") for c in COLUMNS), pytest.param("last", "inductor", marks=sweep)]
)
def test_lengths_in_a_column(column: str, inner: str) -> None:
    def program(m: Model, ids: Tensor, n: Tensor) -> Tensor:
        valid = seen(ids.shape[1], COLUMNS[column](n))
        return (m.out(m.q(m.items(ids)).relu()) * valid[..., None]).sum(1)

    batches = [(IDS, torch.stack([n.flip(0), n], 1)) for n in LENGTHS]
    assert agree(program, *batches, inner=inner).steps_packed == 2


def test_dense_masks_that_read_a_column() -> None:
    def program(m: Model, ids: Tensor, n: Tensor) -> Tensor:
        h = m.items(ids)
        valid, at = seen(ids.shape[1], n[:, 0]), torch.arange(ids.shape[1])
        near = (at[:, None] - at).abs() < n[:, 1, None, None]
        weights = F.relu(m.q(h) @ m.k(h).mT) * (near & valid[:, None])
        return ((weights @ m.v(h)) * valid[..., None]).sum(1)

    agree(program, *[(IDS, torch.stack([n, n.flip(0)], 1)) for n in LENGTHS])


# ---------------------------------------------------------------- batch and heads in one axis


def _weights(m: Model, q: Tensor, k: Tensor, valid: Tensor, spelling: str, factor: Tensor) -> Tensor:
    scores = torch.bmm(q, k.mT)
    if spelling == "scale":
        scores = scores * factor
    scores = scores.view(-1, H, L, L)
    if spelling == "softmax":
        return scores.softmax(-1)
    if spelling == "masked":
        return scores.masked_fill(~valid[:, None, None], -torch.inf).softmax(-1)
    weights = F.silu(scores) * valid[:, None, None]
    return (weights.flatten(0, 1) * factor).view(-1, H, L, L) if spelling == "factor" else weights


READERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all": lambda o, v, n: (o * v[:, None, :, None]).sum()[None],
    "over samples": lambda o, v, n: (o * v[:, None, :, None]).sum((0, 2)),
    "over time": lambda o, v, n: (o * v[:, None, :, None]).sum(2),
    "last": lambda o, v, n: o.transpose(1, 2)[torch.arange(len(n)), n - 1],
    "selected": lambda o, v, n: o.transpose(1, 2)[v].relu().sum(0),
}


@pytest.mark.parametrize("spelling", ["softmax", "masked", "activation", "factor", "scale"])
@pytest.mark.parametrize("reader", [r if r in ("all", "last") else pytest.param(r, marks=sweep) for r in READERS])
def test_batch_and_heads_in_one_axis(reader: str, spelling: str) -> None:
    """``[B * H, L, D]`` operands and factors, of scores that are viewed as ``[B, H, L, L]``."""

    def program(m: Model, x: Tensor, n: Tensor, factor: Tensor) -> Tensor:
        valid = seen(L, n)
        weights = _weights(m, m.q(x), m.k(x), valid, spelling, factor)
        return READERS[reader](weights @ m.v(x).view(-1, H, L, D), valid, n)

    x = torch.randn(B * H, L, D, dtype=torch.float64)
    for shape in ((B * H, 1, 1), (B * H, L, 1))[: 1 + (spelling in ("factor", "scale"))]:
        factor = torch.rand(shape, dtype=torch.float64) + 0.5
        agree(program, *[(x, n, factor) for n in (*LENGTHS, torch.tensor([1, 1, 1]))])


# ---------------------------------------------------------------- low numbers beside a finite fill


def _lifted(m: Model, scores: Tensor, valid: Tensor, given: Tensor) -> Tensor:
    return (scores + ((1 - given) * -1e9)[:, :, None]).masked_fill(~valid[:, None], -1e9)


LOW: dict[str, Callable[[Model, Tensor, Tensor, Tensor], Tensor]] = {
    "for a query": _lifted,
    "a number": lambda m, s, v, g: (s - 2e4).masked_fill(~v[:, None], -1e4),
    "cat": lambda m, s, v, g: (s + torch.cat([torch.where(g[:, :3] > 0, 0.0, -1e9), torch.where(g[:, 3:] > 0, 0.0, -1e9)], -1)[:, None]).masked_fill(~v[:, None], -1e9),  # noqa: E501
    "a buffer": lambda m, s, v, g: (s + ((1 - g) * m.low)[:, None]).masked_fill(~v[:, None], -1e9),
    "a logarithm": lambda m, s, v, g: (s + torch.log(g)[:, None]).masked_fill(~v[:, None], -1e9),
    "a small divisor": lambda m, s, v, g: (s + ((g - 1) / 1e-9)[:, None]).masked_fill(~v[:, None], -1e9),
}  # fmt: skip


@pytest.mark.parametrize("low", LOW)
def test_low_numbers_beside_a_finite_fill(low: str) -> None:
    """Where all that the mask leaves is as low as the fill, eager shares the weight out among padding too."""

    def program(m: Model, ids: Tensor, n: Tensor, given: Tensor) -> Tensor:
        h, valid = m.items(ids), seen(ids.shape[1], n)
        scores = LOW[low](m, m.q(h) @ m.k(h).mT, valid, given)
        return ((scores.softmax(-1) @ m.v(h)) * valid[..., None]).sum(1)

    given = torch.zeros(B, L, dtype=torch.float64)
    given[1:, 0] = 1
    if low == "a logarithm":
        given[0, 5] = 1  # of the first sequence, a hidden one
    agree(program, *[(IDS, n, given) for n in LENGTHS])


# ---------------------------------------------------------------- rounded denominators

ROUNDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda s, v: (lambda e: e / e.sum(-1, keepdim=True).long())((s * 0.2 + 2).exp().masked_fill(~v[:, None], 0)),
    "logsumexp": lambda s, v: (lambda x: (x - x.logsumexp(-1, True).long()).exp())((s * 2).masked_fill(~v[:, None], -1e9)),
    "exponent": lambda s, v: s.masked_fill(~v[:, None], -1e9).log_softmax(-1).long().double().exp(),
}


@pytest.mark.parametrize("rounded", ROUNDED)
def test_rounded_denominators(rounded: str) -> None:
    def program(m: Model, ids: Tensor, n: Tensor) -> Tensor:
        h, valid = m.items(ids), seen(ids.shape[1], n)
        return ((ROUNDED[rounded](m.q(h) @ m.k(h).mT, valid) @ m.v(h)) * valid[..., None]).sum(1)

    agree(program, *[(IDS, n) for n in LENGTHS])


# ---------------------------------------------------------------- strides, and forms that were internal errors


def _seeds(m: Model, ids: Tensor, n: Tensor) -> Tensor:
    h, valid = m.items(ids), seen(ids.shape[1], n)
    q = m.q(m.seeds).view(4, H, -1).transpose(0, 1)
    k, v = (x.view(*ids.shape, H, -1).transpose(1, 2) for x in (m.k(h), m.v(h)))
    return (F.silu(q @ k.mT) * valid[:, None, None]) @ v


FORMS: dict[str, Program] = {
    "seeds returned": _seeds,
    "seeds turned": lambda m, ids, n: _seeds(m, ids, n).transpose(1, 2),
    "a head of seeds": lambda m, ids, n: _seeds(m, ids, n)[:, 1],
    "an integer bias": lambda m, ids, n: (lambda h, v: ((F.relu(m.q(h) @ m.k(h).mT + torch.tensor(2)) * v[:, None]) @ m.v(h) * v[..., None]).sum(1))(m.items(ids), seen(L, n)),  # noqa: E501
    "a size as bias": lambda m, ids, n: (lambda h, v: ((F.relu(m.q(h) @ m.k(h).mT + ids.shape[1]) * v[:, None]) @ m.v(h) * v[..., None]).sum(1))(m.items(ids), seen(L, n)),  # noqa: E501
    "sessions": lambda m, ids, n: (lambda h, v: (F.scaled_dot_product_attention(m.q(h).flatten(0, 1), m.k(h).flatten(0, 1), m.v(h).flatten(0, 1), attn_mask=v.flatten(0, 1)[:, None]).nan_to_num() * v.flatten(0, 1)[..., None]).sum(1))(m.items(ids.view(B, 2, -1)), (ids > 4).view(B, 2, -1) | (torch.arange(3) == 0)),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    agree(FORMS[form], *[(IDS, n) for n in LENGTHS])


def test_norms_around_activations_by_head() -> None:
    """The fused block knows one activation."""

    def program(m: Model, ids: Tensor, n: Tensor) -> Tensor:
        h, valid = m.items(ids), seen(ids.shape[1], n)
        x = F.layer_norm(h, (D,))
        q, k, v = (y.view(*ids.shape, H, -1).transpose(1, 2) for y in (x, m.k(h), m.v(h)))
        scores = q @ k.mT
        weights = torch.cat([F.relu(scores[:, :1]), F.silu(scores[:, 1:])], 1) * valid[:, None, None]
        g = (weights @ v).transpose(1, 2).flatten(2) + x
        return ((F.rms_norm(g, (D,)) + h) * valid[..., None]).sum(1)

    agree(program, *[(IDS, n) for n in LENGTHS])
