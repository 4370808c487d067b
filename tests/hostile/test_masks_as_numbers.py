"""Masks whose numbers are not those of the integers or the reals: they overflow, are rounded, or are written in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from tests.hostile.common import compiled

D, IDS = 4, 20
LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
Mask = Callable[["Masked", Tensor, Tensor, Tensor], Tensor]


class Masked(nn.Module):
    """A masked sum. ``mask(model, ids [B, L], valid [B, L], data [B, L])`` says of which rows."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.items, self.out = nn.Embedding(IDS, D), nn.Linear(D, D)
        self.register_buffer("limit", torch.full((6,), 2))

    def forward(self, ids: Tensor, lengths: Tensor, data: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        h = self.out(F.relu(self.items(ids)))
        return (h * self.mask(self, ids, valid, data)[..., None]).sum(1)


def agree(model: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> gemopt.report.Report:
    """Outputs and gradients of two runs in a row."""
    model = model.to(dtype)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rewritten = compiled(model)
    found = []
    for run in (model, rewritten):
        model.load_state_dict(state)
        for _ in range(2):
            model.zero_grad()
            given = [a.clone() for a in args]
            out = run(*given)
            out.float().square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([out.detach(), *grads, *model.buffers(), *given])
    for expected, got in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9 if dtype == torch.float64 else 5e-2, atol=1e-9)
    return rewritten.report


def ids_and_lengths() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, IDS, (3, 6), generator=torch.Generator().manual_seed(0))
    return ids, torch.tensor([5, 0, 3])


# ---------------------------------------------------------------- integers that overflow

WIDE = torch.tensor([[3, LEAST, MOST, -1, 0, LEAST], [MOST, MOST, 5, LEAST, 2, 1], [-7, 1, LEAST + 1, MOST - 1, 4, 0]])
NARROW = torch.tensor([[2**30, -(2**30), 7, 2**31 - 1, -(2**31), 0]] * 3, dtype=torch.int32)
OVERFLOWING: dict[str, tuple[Mask, Tensor]] = {
    "more than the least": (lambda m, ids, v, x: x > LEAST, WIDE),
    "less than the most": (lambda m, ids, v, x: x < MOST, WIDE),
    "at most the most": (lambda m, ids, v, x: x <= MOST, WIDE),
    "not the least": (lambda m, ids, v, x: x != LEAST, WIDE),
    "positive": (lambda m, ids, v, x: x > 0, WIDE),
    "two hashes": (lambda m, ids, v, x: x > x.roll(1, 1), WIDE),
    "two hashes, not less": (lambda m, ids, v, x: ~(x < x.roll(2, 1)), WIDE),
    "a difference": (lambda m, ids, v, x: x - x.roll(1, 1) > 0, WIDE),
    "a sum": (lambda m, ids, v, x: x + x.roll(1, 1) > ids, WIDE),
    "a multiple": (lambda m, ids, v, x: x * 3 > 0, WIDE),
    "an absolute value": (lambda m, ids, v, x: x.abs() < 7, WIDE),
    "three times int32": (lambda m, ids, v, x: x * 3 > 0, NARROW),
    "twice int32": (lambda m, ids, v, x: x + x > 0, NARROW),
    "int32 beside ids": (lambda m, ids, v, x: x + x.roll(1, 1) < ids, NARROW),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_integers_that_overflow(name):
    mask, data = OVERFLOWING[name]
    agree(Masked(lambda m, ids, v, x: mask(m, ids, v, x) & v), (*ids_and_lengths(), data))
    agree(Masked(mask), (*ids_and_lengths(), data))


def test_ordinary_sums_of_data_are_followed():
    """Two lengths, a left padding: the numbers are small, and that is looked at in every step."""
    for mask in (
        lambda m, ids, v, x: torch.arange(6) < (x[:, :1] + x[:, 1:2]),
        lambda m, ids, v, x: torch.arange(6) >= 6 - x[:, :1],
    ):
        data = torch.tensor([[1, 2], [0, 0], [3, 2]])
        assert agree(Masked(mask), (*ids_and_lengths(), data)).steps_packed == 2
        assert not agree(Masked(mask), (*ids_and_lengths(), data + 2**61)).steps_packed


# ---------------------------------------------------------------- floats that are rounded

TIMES = torch.tensor([[1_700_000_000 + k for k in (-70, -1, 0, 1, 63, 65)]] * 3)
ROUNDED: dict[str, tuple[Mask, Tensor]] = {
    "times beside a float": (lambda m, ids, v, x: x < 1.7e9, TIMES),
    "times beside another": (lambda m, ids, v, x: x >= 1_700_000_001.0, TIMES),
    "times as float32": (lambda m, ids, v, x: x.float() > 1_700_000_000, TIMES),
    "ids beside a half": (lambda m, ids, v, x: ids > 3.5, TIMES),
    "ids beside nearly three": (lambda m, ids, v, x: ids <= 2.99999999999, TIMES),
    "a tenth": (lambda m, ids, v, x: torch.where(v, 0.1, 0.0) > 0.1, TIMES),
    "a fifth": (lambda m, ids, v, x: (torch.where(v, 0.9, 0.2) <= 0.2) | (ids > 15), TIMES),
    "equal": (lambda m, ids, v, x: torch.where(v, 0.3, 0.7) == 0.3, TIMES),
    "bfloat16": (lambda m, ids, v, x: torch.where(v, 0.7, 0.0).bfloat16() < 0.7, TIMES),
    "a sum of two": (lambda m, ids, v, x: (torch.where(v, 0.1, 0.0) + torch.where(ids > 9, 0.2, 0.0)) > 0.3, TIMES),
    "two masks": (lambda m, ids, v, x: torch.where(v, 0.1, 0.0) >= torch.where(ids > 9, 0.1, 0.2).double(), TIMES),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_floats_that_are_rounded(name):
    mask, data = ROUNDED[name]
    agree(Masked(mask), (*ids_and_lengths(), data))


class Constants(nn.Module):
    """Padding that holds numbers, of which something is left after a few steps, or nothing."""

    def __init__(self, program: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.program = program
        self.items, self.out = nn.Embedding(IDS, D), nn.Linear(D, D)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
        return self.program(self.out(self.items(ids)), valid)


def _cancelled(large: float, small: float) -> Callable[[Tensor, Tensor], Tensor]:
    def program(h: Tensor, valid: Tensor) -> Tensor:
        a = torch.where(valid, h, large)
        return ((a + torch.where(valid, h, small)) - a).sum(1)

    return program


PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "lost in bfloat16": (_cancelled(256.0, 0.7), torch.bfloat16),
    "lost in float32": (_cancelled(1e8, 1.3), torch.float32),
    "a tenth twice": (lambda h, v: (torch.where(v, h, 0.1) - torch.where(v, h, 0.1).bfloat16()).sum(1), torch.float32),
    "infinite in float16": (lambda h, v: torch.where(v, h, -1e9).amax(1).clamp(min=-9.0), torch.float16),
    "a mean of large ones": (lambda h, v: ((h.cos() + 20000) * v).mean(1), torch.float16),
    "a double beside": (lambda h, v: ((h * torch.tensor(0.1, dtype=torch.float64)) * v).sum(1), torch.float32),
    "full of a size": (lambda h, v: ((h * torch.full_like(h, h.shape[1])) * v).sum(1), torch.float64),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_are_those_of_the_dtype(name):
    program, dtype = PROGRAMS[name]
    agree(Constants(program), ids_and_lengths(), dtype)


# ---------------------------------------------------------------- masks that are written


def _written(start: Callable[[Tensor, Tensor], Tensor], write: Callable[[Tensor, Tensor], object]) -> Mask:
    def mask(m: Masked, ids: Tensor, valid: Tensor, data: Tensor) -> Tensor:
        made = start(ids, valid)
        write(made, ids)
        return made

    return mask


def _counted(m: Masked, ids: Tensor, valid: Tensor, data: Tensor) -> Tensor:
    m.limit[:1].add_(1)
    return valid & (torch.arange(6) < m.limit)


def _data_written(m: Masked, ids: Tensor, valid: Tensor, data: Tensor) -> Tensor:
    flat = data.view(-1)
    data.add_(1)
    return (flat % 3 != 0).view(ids.shape) & valid


def _set(index: object, value: object) -> Callable[[Tensor, Tensor], object]:
    return lambda made, ids: made.__setitem__(index, value)  # type: ignore[index]


WRITTEN: dict[str, Mask] = {
    "a column": _written(lambda ids, v: v.clone(), _set((slice(None), 0), True)),
    "a range": _written(lambda ids, v: torch.zeros(ids.shape, dtype=torch.bool), _set((slice(None), slice(2, 5)), True)),
    "a row each": _written(lambda ids, v: v.long(), lambda made, ids: made.__setitem__((torch.arange(3), 1), 0)),
    "a list": _written(lambda ids, v: v.long(), lambda made, ids: torch._foreach_add_([made], 1)),
    "a buffer": _counted,
    "an input": _data_written,
}
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "itself": lambda made, v: made,
    "beside": lambda made, v: (made != 0) & v,
    "not": lambda made, v: ~(made != 0) & v,
    "rolled": lambda made, v: made.roll(1, 1),
    "summed up": lambda made, v: made.cumsum(1) > 1,
    "remainder": lambda made, v: made.long() % 2 == 0,
}


@pytest.mark.parametrize("written", WRITTEN)
def test_masks_that_are_written(written):
    """The prologue runs before the graph: it cannot see what the graph writes."""
    for read in READ.values():
        model = Masked(lambda m, ids, v, x, read=read: read(WRITTEN[written](m, ids, v, x), v))
        agree(model, (*ids_and_lengths(), torch.arange(18).view(3, 6)))


def test_rows_that_are_written_in_a_list():
    def program(h: Tensor, valid: Tensor) -> Tensor:
        masked = h * valid
        torch._foreach_add_([masked], 1.0)
        return masked.sum(1)

    agree(Constants(program), ids_and_lengths())
