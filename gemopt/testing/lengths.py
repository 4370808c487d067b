"""Lengths for the cases that break padded models: empty sequences, one token, no padding, one long row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[int, int, torch.Generator], Tensor]


def _uniform(batch: int, max_len: int, generator: torch.Generator, low: int = 1) -> Tensor:
    return torch.randint(min(low, max_len), max_len + 1, (batch,), generator=generator)


def _zeros(batch: int, max_len: int, generator: torch.Generator) -> Tensor:
    """First, last and about every third sequence empty, so that an empty one has neighbours on both sides."""
    lengths = _uniform(batch, max_len, generator)
    empty = torch.rand(batch, generator=generator) < 1 / 3
    empty[:1] = True
    empty[-1:] = True
    if batch > 2:
        empty[1] = False
    return lengths.masked_fill(empty, 0)


def _skewed(batch: int, max_len: int, generator: torch.Generator) -> Tensor:
    """One full row, the others at most an eighth of it."""
    lengths = _uniform(batch, max(1, max_len // 8), generator)
    if batch:
        lengths[int(torch.randint(batch, (), generator=generator))] = max_len
    return lengths


#: case -> lengths [B] int64 in 0..max_len, from (batch, max_len, generator)
LENGTHS: dict[str, Draw] = {
    "given": _uniform,
    "zeros": _zeros,
    "ones": lambda batch, max_len, g: torch.ones(batch, dtype=torch.int64).clamp(max=max_len),
    "full": lambda batch, max_len, g: torch.full((batch,), max_len, dtype=torch.int64),
    "skewed": _skewed,
    "empty_batch": lambda batch, max_len, g: torch.zeros(0, dtype=torch.int64),
    "one_sequence": lambda batch, max_len, g: _uniform(1, max_len, g),
    "all_padding": lambda batch, max_len, g: torch.zeros(batch, dtype=torch.int64),
    "holes": _uniform,
}

CASES = tuple(LENGTHS)


def draw_lengths(case: str, batch: int, max_len: int, generator: torch.Generator) -> Tensor:
    """Lengths `[B]`, int64, in 0..max_len, for one of `CASES`.

    Raises:
        ValueError: no such case.
    """
    if case not in LENGTHS:
        raise ValueError(f"cases: got {case!r}; allowed: {', '.join(CASES)}")
    return LENGTHS[case](batch, max_len, generator)
