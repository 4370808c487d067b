"""Group plan: which sequences run together as one dense batch.

A plan depends on the offsets alone, so it is cached by their *content*: every layer of a step, and the backward of each,
finds the plan the first layer made. A group holds sequences whose lengths round up to the same size. Its rows are a
strided view of the packed tensor where that is possible (equal lengths, next to each other; a single sequence always
is), and a gather otherwise. Padding rows of a gather repeat the last row of their own sequence, so a NaN elsewhere
never reaches them; what they produce is written to a dump row.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

Offsets = tuple[int, ...]
LONG = 256  # sequences at least this long run alone, on views


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
    def strided(self) -> bool:
        """The group is one contiguous block of the packed tensor."""
        step = self.length
        return all(n == step for n in self.lengths) and all(
            b == a + step for a, b in zip(self.starts, self.starts[1:], strict=False))

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
        return torch.where(self.valid.view(-1), self.gather, self.total)

    @cached_property
    def padding(self) -> Tensor:
        """int64: the dense rows that are padding."""
        return (~self.valid.view(-1)).nonzero().view(-1)

    @cached_property
    def ragged(self) -> bool:
        return any(n != self.length for n in self.lengths)

    def take(self, packed: Tensor) -> Tensor:
        """`[T, ...]` → `[n, length, ...]`, a view where possible."""
        if self.strided:
            block = packed[self.starts[0]: self.starts[0] + self.n * self.length]
            return block.unflatten(0, (self.n, self.length))
        return packed.index_select(0, self.gather).unflatten(0, (self.n, self.length))

    def put(self, out: Tensor, dense: Tensor) -> None:
        """Write `[n, length, ...]` to its rows of `out` `[T + 1, ...]`."""
        if self.strided:
            out[self.starts[0]: self.starts[0] + self.n * self.length].unflatten(0, (self.n, self.length)).copy_(dense)
        else:
            out.index_copy_(0, self.scatter, dense.reshape(self.n * self.length, *dense.shape[2:]))


@dataclass(frozen=True, eq=False)
class Group:
    q: Rows
    k: Rows

    @cached_property
    def keys_below_queries(self) -> bool:
        """No query of a sequence stands past its keys: top-left causality then hides the padding keys."""
        return all(a <= b for a, b in zip(self.q.lengths, self.k.lengths, strict=True))


@dataclass(frozen=True, eq=False)
class Plan:
    groups: tuple[Group, ...]
    q_covered: bool  # every query row lies in a group; otherwise outputs start as zeros
    k_covered: bool


def _round_up(n: int) -> int:
    """Group size of a length: multiples of 16 below `LONG`."""
    return n if n >= LONG else -(-n // 16) * 16


def _check(name: str, offsets: Offsets, rows: int, rows_name: str) -> None:
    if not offsets or offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:], strict=False)) or offsets[-1] > rows:
        shown = list(offsets[:8]) + (["..."] if len(offsets) > 8 else [])
        raise ValueError(f"jagged_attention: {name} must start at 0, never decrease and end at or before the "
                         f"{rows} rows of {rows_name}, got {shown} ending at {offsets[-1] if offsets else None}")


@lru_cache(maxsize=64)
def _build(q_offsets: Offsets, k_offsets: Offsets, q_rows: int, k_rows: int) -> Plan:
    _check("q_offsets", q_offsets, q_rows, "q")
    _check("k_offsets", k_offsets, k_rows, "k")
    members: dict[tuple[int, int, int], list[int]] = {}
    q_seen = k_seen = 0
    for b in range(len(q_offsets) - 1):
        lq, lk = q_offsets[b + 1] - q_offsets[b], k_offsets[b + 1] - k_offsets[b]
        if lq == 0 or lk == 0:
            continue
        q_seen += lq
        k_seen += lk
        members.setdefault((_round_up(lq), _round_up(lk), 0), []).append(b)
    groups = tuple(_group(seqs, q_offsets, k_offsets, q_rows, k_rows) for seqs in members.values())
    return Plan(groups, q_seen == q_rows, k_seen == k_rows)


def _group(seqs: Sequence[int], q_offsets: Offsets, k_offsets: Offsets, q_rows: int, k_rows: int) -> Group:
    def side(offsets: Offsets, rows: int) -> Rows:
        starts = tuple(offsets[b] for b in seqs)
        lengths = tuple(offsets[b + 1] - offsets[b] for b in seqs)
        return Rows(starts, lengths, max(lengths), rows)

    q = side(q_offsets, q_rows)
    same = q_offsets == k_offsets and q_rows == k_rows
    return Group(q, q if same else side(k_offsets, k_rows))


def plan(q_offsets: Tensor, k_offsets: Tensor, q_rows: int, k_rows: int) -> Plan:
    """The plan of these offsets (int32 or int64 `[B + 1]`), built once per content.

    Raises:
        ValueError: offsets that do not start at 0, decrease, pass the rows they index, or disagree in B.
    """
    q = tuple(q_offsets.tolist())
    k = q if k_offsets is q_offsets else tuple(k_offsets.tolist())
    if len(q) != len(k):
        raise ValueError(f"jagged_attention: q_offsets has {len(q) - 1} sequences but k_offsets has {len(k) - 1}")
    return _build(q, k, q_rows, k_rows)
