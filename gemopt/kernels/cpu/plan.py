"""Group plan: which sequences run together as one dense batch.

A plan depends on the offsets alone, so it is cached by their *content*: every layer of a step, and the backward of
each, finds the plan that the first layer made. A group holds sequences whose lengths round up to the same size. Its
rows are a strided view of the packed tensor where that is possible (equal lengths, next to each other; a single
sequence always is), and a gather otherwise. Padding rows of a gather repeat the last row of their own sequence, so a
NaN elsewhere never reaches them; what they produce is written to a dump row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gemopt.kernels.cpu.bounds import check_offsets

Offsets = tuple[int, ...]

# Shorter sequences share groups with padding; longer ones only with their like, so that none is added.
EXACT_FROM = 256
# Rows of a group: its working set then stays in a core's cache, and there are enough groups for all cores.
GROUP_ROWS = 2048


@dataclass(frozen=True, eq=False)
class Rows:
    """One side (queries or keys) of a group: `n` sequences as `[n, length, ...]`."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    length: int
    total: int  # rows of the packed tensor; also the index of the dump row

    @property
    def n(self) -> int:
        return len(self.starts)

    @cached_property
    def ragged(self) -> bool:
        return any(n != self.length for n in self.lengths)

    @cached_property
    def strided(self) -> bool:
        """The group is one contiguous block of the packed tensor."""
        return not self.ragged and all(b == a + self.length for a, b in pairwise(self.starts))

    @cached_property
    def lens(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int64)

    @cached_property
    def valid(self) -> Tensor:
        """bool `[n, length]`."""
        return torch.arange(self.length) < self.lens[:, None]

    @cached_property
    def gather(self) -> Tensor:
        """int64 `[n * length]`: packed row of every dense row, padding clamped to its sequence's last row."""
        local = torch.minimum(torch.arange(self.length), self.lens[:, None] - 1)
        return (local + torch.tensor(self.starts, dtype=torch.int64)[:, None]).view(-1)

    @cached_property
    def scatter(self) -> Tensor:
        """int64 `[n * length]`: packed row of every dense row, padding sent to the dump row."""
        return torch.where(self.valid.view(-1), self.gather, self.total) if self.ragged else self.gather

    @cached_property
    def padding(self) -> Tensor:
        """int64: the dense rows that are padding."""
        return (~self.valid.view(-1)).nonzero().view(-1)

    def _block(self, packed: Tensor) -> Tensor:
        rows = packed.narrow(0, self.starts[0], self.n * self.length)
        return rows.view(self.n, self.length, *packed.shape[1:])

    def take(self, packed: Tensor) -> Tensor:
        """`[T, ...]` → `[n, length, ...]`, a view where possible."""
        if self.strided:
            return self._block(packed)
        return packed.index_select(0, self.gather).view(self.n, self.length, *packed.shape[1:])

    def take_zeroed(self, packed: Tensor) -> Tensor:
        """As `take`, with zeros in padding rows."""
        if not self.ragged:
            return self.take(packed)
        rows = packed.index_select(0, self.gather).index_fill_(0, self.padding, 0)
        return rows.view(self.n, self.length, *packed.shape[1:])

    def put(self, out: Tensor, dense: Tensor) -> None:
        """Write `[n, length, ...]` to its rows of `out` `[T + 1, ...]`."""
        if self.strided:
            self._block(out).copy_(dense)
        else:
            # index_put_ is at its best on whole rows as one dim, and faster there than index_copy_.
            rows = dense.to(out.dtype).reshape(self.n * self.length, -1)
            out.view(out.shape[0], -1).index_put_((self.scatter,), rows)


@dataclass(frozen=True, eq=False)
class Group:
    q: Rows
    k: Rows
    members: tuple[int, ...]  # the numbers of its sequences

    @cached_property
    def seqs(self) -> Tensor:
        """int64 `[n]`: the numbers of its sequences."""
        return torch.tensor(self.members, dtype=torch.int64)

    @cached_property
    def causal_hides_padding(self) -> bool:
        """Under top-left causality no query sees a padding key: none stands past its sequence's keys."""
        return not self.k.ragged or all(a <= b for a, b in zip(self.q.lengths, self.k.lengths, strict=True))

    @cached_property
    def square(self) -> bool:
        return self.q.lengths == self.k.lengths


@dataclass(frozen=True, eq=False)
class SingleQueries:
    """R sequences of one query each: they need no dense batch, every key row belongs to one query."""

    q_rows: Tensor  # int64 [R]
    k_start: int
    k_rows: Tensor | None  # int64 [S]; None: the S rows from k_start on
    owner: Tensor  # int64 [S]: which of the R queries reads the key row
    offsets: Tensor  # int64 [R + 1]: the key rows of each query
    local: Tensor  # int32 [S]: row of the key inside its sequence
    lengths: Tensor  # int64 [R]

    def take_k(self, packed: Tensor) -> Tensor:
        if self.k_rows is None:
            return packed.narrow(0, self.k_start, self.owner.shape[0])
        return packed.index_select(0, self.k_rows)

    def put_k(self, out: Tensor, rows: Tensor) -> None:
        if self.k_rows is None:
            out.narrow(0, self.k_start, rows.shape[0]).copy_(rows)
        else:
            out.index_copy_(0, self.k_rows, rows.to(out.dtype))


@dataclass(frozen=True, eq=False)
class Plan:
    groups: tuple[Group, ...]
    single: tuple[SingleQueries, ...]  # instead of groups where no sequence has more than one query
    q_covered: bool  # every query row is written; otherwise outputs start as zeros
    k_covered: bool
    q_offsets: Offsets
    k_offsets: Offsets


def _round_up(length: int) -> int:
    """The size of the group of a length. Coarser steps make fewer groups and more padding."""
    if length >= EXACT_FROM:
        return length
    return -(-length // 16) * 16


@lru_cache(maxsize=64)
def _build(q_offsets: Offsets, k_offsets: Offsets, q_rows: int, k_rows: int, dense: bool) -> Plan:
    check_offsets("q_offsets", np.array(q_offsets), q_rows)
    check_offsets("k_offsets", np.array(k_offsets), k_rows)
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(q_offsets), pairwise(k_offsets), strict=True)]
    active = [b for b, (lq, lk) in enumerate(lengths) if lq and lk]
    q_covered = sum(lengths[b][0] for b in active) == q_rows
    k_covered = sum(lengths[b][1] for b in active) == k_rows
    groups: tuple[Group, ...] = ()
    single: tuple[SingleQueries, ...] = ()
    if not dense and all(lengths[b][0] == 1 for b in active):
        single = tuple(_single(seqs, q_offsets, k_offsets) for seqs in _by_rows(active, [k for _, k in lengths]))
    else:
        members: dict[tuple[int, int], list[int]] = {}
        for b in active:
            members.setdefault((_round_up(lengths[b][0]), _round_up(lengths[b][1])), []).append(b)
        # Most work first, so that no worker is left with a large group at the end.
        sized = sorted(members.items(), key=lambda item: -item[0][0] * item[0][1])
        groups = tuple(
            _group(seqs[i : i + step], q_offsets, k_offsets, q_rows, k_rows)
            for (lq, lk), seqs in sized
            for step in (max(1, GROUP_ROWS // max(lq, lk)),)
            for i in range(0, len(seqs), step)
        )
    return Plan(groups, single, q_covered, k_covered, q_offsets, k_offsets)


def _by_rows(seqs: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Neighbouring sequences together, about two groups' worth of rows at a time."""
    parts: list[list[int]] = []
    room = 0
    for b in seqs:
        if room <= 0:
            parts.append([])
            room = 2 * GROUP_ROWS  # these groups pad nothing and use each row once
        parts[-1].append(b)
        room -= rows[b]
    return parts


def _group(seqs: Sequence[int], q_offsets: Offsets, k_offsets: Offsets, q_rows: int, k_rows: int) -> Group:
    def side(offsets: Offsets, rows: int) -> Rows:
        starts = tuple(offsets[b] for b in seqs)
        lengths = tuple(offsets[b + 1] - offsets[b] for b in seqs)
        return Rows(starts, lengths, max(lengths), rows)

    q = side(q_offsets, q_rows)
    same = q_offsets == k_offsets and q_rows == k_rows
    return Group(q, q if same else side(k_offsets, k_rows), tuple(seqs))


def _single(seqs: Sequence[int], q_offsets: Offsets, k_offsets: Offsets) -> SingleQueries:
    starts = [k_offsets[b] for b in seqs]
    lengths = [k_offsets[b + 1] - k_offsets[b] for b in seqs]
    lens = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    owner = torch.arange(len(seqs)).repeat_interleave(lens)
    local = torch.arange(owner.shape[0]) - offsets[owner]
    adjacent = all(b == a + n for a, b, n in zip(starts, starts[1:], lengths, strict=False))
    return SingleQueries(
        q_rows=torch.tensor([q_offsets[b] for b in seqs]),
        k_start=starts[0],
        k_rows=None if adjacent else local + torch.tensor(starts)[owner],
        owner=owner,
        offsets=offsets,
        local=local.to(torch.int32),
        lengths=lens,
    )


def plan(q_offsets: Tensor, k_offsets: Tensor, q_rows: int, k_rows: int, dense: bool = False) -> Plan:
    """The plan of these offsets (int32 or int64 `[B + 1]`), built once per content.

    `dense` asks for groups even where no sequence has more than one query.

    Raises:
        ValueError: offsets that do not start at 0, decrease, pass the rows they index, or disagree in B.
    """
    q = tuple(q_offsets.tolist())
    k = q if k_offsets is q_offsets else tuple(k_offsets.tolist())
    if len(q) != len(k):
        raise ValueError(f"jagged_attention: q_offsets has {len(q) - 1} sequences but k_offsets has {len(k) - 1}")
    return _build(q, k, q_rows, k_rows, dense)


def clear_cache() -> None:
    """Forget every plan."""
    _build.cache_clear()
