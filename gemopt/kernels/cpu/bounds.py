"""Offsets of one call as numpy arrays, checked: what every CPU path needs to know about the sequences."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from gemopt.kernels.memo import remembered
from gemopt.kernels.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Bounds:
    """int64 `[B + 1]` offsets of queries and keys."""

    q: np.ndarray
    k: np.ndarray

    @cached_property
    def q_lengths(self) -> np.ndarray:
        return np.diff(self.q)

    @cached_property
    def k_lengths(self) -> np.ndarray:
        return self.q_lengths if self.k is self.q else np.diff(self.k)

    @cached_property
    def work(self) -> np.ndarray:
        """Scores of each sequence."""
        return self.q_lengths * self.k_lengths

    @cached_property
    def order(self) -> np.ndarray:
        """int64 `[B]`: the sequences, those with most work first."""
        return np.argsort(-self.work, kind="stable").astype(np.int64)

    @cached_property
    def square(self) -> bool:
        """Queries and keys lie alike."""
        return self.k is self.q or np.array_equal(self.q, self.k)

    def ascending(self, positions: Tensor) -> bool:
        """Whether `positions` grow strictly inside every sequence of queries."""
        used = positions[: int(self.q[-1])].numpy()
        if len(used) < 2:
            return True
        grows = used[1:] > used[:-1]
        first = self.q[1:-1] - 1  # the step into a sequence says nothing
        grows[first[(first >= 0) & (first < len(grows))]] = True
        return bool(grows.all())


def bounds(spec: AttentionSpec, q_rows: int, k_rows: int, shared: bool = False) -> Bounds:
    """Read and check the offsets. shared: those of the queries follow from `q_rows`, for they are shared and were spread.

    Raises:
        ValueError: offsets that do not start at 0, decrease, pass the rows they index, or disagree in B.
    """
    own = spec.k_offsets if shared else spec.q_offsets
    assert own is not None  # shared queries have been spread
    return remembered(own, spec.k_offsets, ("cpu bounds", shared, q_rows, k_rows), partial(_bounds, spec, q_rows, k_rows))


def _bounds(spec: AttentionSpec, q_rows: int, k_rows: int) -> Bounds:
    assert spec.q_offsets is not None
    q = _read("q_offsets", spec.q_offsets, q_rows)
    same = spec.k_offsets is spec.q_offsets and q_rows == k_rows
    k = q if same else _read("k_offsets", spec.k_offsets, k_rows)
    if len(q) != len(k):
        raise ValueError(f"jagged_attention: q_offsets has {len(q) - 1} sequences but k_offsets has {len(k) - 1}")
    return Bounds(q, k)


def _read(name: str, offsets: Tensor, rows: int) -> np.ndarray:
    array: np.ndarray = offsets.detach().to(torch.int64).numpy().copy()  # what is remembered must not keep the offsets alive
    check_offsets(name, array, rows)
    return array


def check_offsets(name: str, array: np.ndarray, rows: int) -> None:
    """Raise ValueError unless offsets start at 0, never decrease and end within the rows they index."""
    if len(array) == 0:
        raise ValueError(f"jagged_attention: {name} must have at least one element, got 0")
    if array[0] != 0 or array[-1] > rows or (np.diff(array) < 0).any():
        shown = ", ".join(map(str, array[:8])) + (", ..." if len(array) > 8 else "")
        raise ValueError(
            f"jagged_attention: {name} must start at 0, never decrease and end at no more than the "
            f"{rows} rows of {name[0]}, got [{shown}] ending at {array[-1]}"
        )
