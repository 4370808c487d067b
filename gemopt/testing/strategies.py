"""Hypothesis strategies for padded batches: lengths, masks with holes, left padding, whole batches.

Needs the `hypothesis` package. Every strategy puts the awkward values first, so that they come up often and
shrinking ends at them: an empty batch, a batch of one, empty sequences, one token, no padding, one long row
among short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from gemopt.testing.lengths import CASES, draw_lengths

T = TypeVar("T")
_SEEDS = st.integers(0, 2**31 - 1)


def sizes(smallest: int = 1, largest: int = 12) -> st.SearchStrategy[int]:
    """A size in smallest..largest, its ends and 1 and 2 more often than others."""
    ends = sorted({n for n in (smallest, 1, 2, largest) if smallest <= n <= largest})
    return st.one_of(st.sampled_from(ends), st.integers(smallest, largest))


@st.composite
def lengths(draw: Any, batch: int | None = None, max_len: int = 12, cases: Sequence[str] = CASES) -> Tensor:
    """Lengths `[B]`, int64, in 0..max_len, from a named case or element by element.

    Args:
        batch: B; drawn from 0..8 if None. The cases `empty_batch` and `one_sequence` take their own.
        max_len: largest length, the padded size.
        cases: the names of `gemopt.testing.CASES` to draw from.
    """
    size = draw(sizes(0, 8)) if batch is None else batch
    if batch is not None:
        cases = [c for c in cases if c not in ("empty_batch", "one_sequence")]
    if cases and draw(st.booleans()):
        return draw_lengths(draw(st.sampled_from(list(cases))), size, max_len, _generator(draw(_SEEDS)))
    one = st.one_of(st.sampled_from([0, min(1, max_len), max_len]), st.integers(0, max_len))
    return torch.tensor(draw(st.lists(one, min_size=size, max_size=size)), dtype=torch.int64)


@st.composite
def masks(
    draw: Any,
    batch: int | None = None,
    max_len: int = 12,
    kinds: Sequence[str] = ("right", "left", "holes", "full", "empty"),
) -> Tensor:
    """Validity masks `[B, max_len]`, bool: right- or left-padded, with holes, all true, all false."""
    kind = draw(st.sampled_from(list(kinds)))
    n = draw(lengths(batch, max_len))
    mask = torch.arange(max_len)[None, :] < n[:, None]
    if kind == "left":
        return mask.flip(1)
    if kind == "holes":
        bits = st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel())
        return torch.tensor(draw(bits), dtype=torch.bool).view(mask.shape)
    if kind == "full":
        return torch.ones_like(mask)
    return torch.zeros_like(mask) if kind == "empty" else mask


@dataclass(frozen=True)
class Padded:
    """A padded batch. `lengths` counts from the mask where the mask has holes or pads left.

    Attributes:
        ids: `[B, L]` int64, `pad` where invalid.
        lengths: `[B]` int64.
        mask: `[B, L]` bool, true where valid.
        tokens: `[B, L, dim]` float; padding is noise, not zero.
    """

    ids: Tensor
    lengths: Tensor
    mask: Tensor
    tokens: Tensor


@st.composite
def padded_batches(
    draw: Any,
    *,
    max_len: int | st.SearchStrategy[int] = 12,
    vocabulary: int = 50,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = ("right", "left", "holes", "full", "empty"),
) -> Padded:
    """Ids, lengths, mask and float tokens that agree with each other."""
    length = max_len if isinstance(max_len, int) else draw(max_len)
    mask = draw(masks(None, length, kinds))
    generator = _generator(draw(_SEEDS))
    ids = torch.randint(1, vocabulary, mask.shape, generator=generator) * mask
    tokens = torch.randn(*mask.shape, dim, generator=generator).to(dtype)
    return Padded(ids, mask.sum(1), mask, tokens)


@st.composite
def batches(
    draw: Any,
    inputs: Callable[[Tensor, int, torch.Generator], T],
    *,
    smallest: int = 2,
    max_len: int = 12,
    cases: Sequence[str] = CASES,
) -> T:
    """Arguments from `inputs(lengths, max_len, generator)`, the form `assert_equivalent` takes."""
    padded = draw(sizes(min(smallest, max_len), max_len))
    drawn = draw(lengths(None, padded, cases))
    return inputs(drawn, padded, _generator(draw(_SEEDS)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
