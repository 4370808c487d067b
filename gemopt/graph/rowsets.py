"""Row sets: the sets of (sequence, position) pairs that tensors are stored on when packed.

A row set is a predicate over ordered row axes, sequence axes first and the token axis last, with the sizes of those axes.
Two tensors share a row set only if their predicates are one term after their own slots are renamed to the axes. The rows
of a packed tensor are ordered by sequence, then position: a row's number is the *rank* of its position in the predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import sympy

from gemopt.graph import terms as t
from gemopt.graph.terms import Term

_MAX_AXES = 3


@dataclass(frozen=True)
class RowSet:
    """``predicate`` over slots 0..k-1 (the row axes, token axis last) and the axes' sizes."""

    predicate: Term
    sizes: tuple[sympy.Expr, ...]
    name: str

    @property
    def token(self) -> int:
        return len(self.sizes) - 1

    @property
    def full(self) -> bool:
        """Every position of every sequence: row numbers are positions, and nothing has to be counted."""
        return self.predicate == t.TRUE

    @property
    def prefix(self) -> bool:
        """Whether every sequence has its first rows, so that a row's number in its sequence is its position."""
        parts = [c for c in t.conjuncts(self.predicate) if self.token in c.slots]
        return all(
            c.op == "le0" and t.as_linear(c.args[0])[0].get(t.slot(self.token), 0) > 0 and _alone(c, self.token)
            for c in parts
        )

    def __str__(self) -> str:
        if self.full:
            return "all"
        letters = [*(["b"] if len(self.sizes) == 2 else [f"b{i}" for i in range(self.token)]), "pos"]
        return t.render(self.predicate, dict(enumerate(letters)))


@dataclass(frozen=True)
class Rows:
    """A node's relation to a row set: ``slots[i]`` is the node's slot of row axis i."""

    set: RowSet
    slots: tuple[int, ...]


def _alone(comparison: Term, slot: int) -> bool:
    """Whether nothing but the slot itself varies with it."""
    return all(x == t.slot(slot) or slot not in x.slots for x in t.as_linear(comparison.args[0])[0])


class RowSets:
    """Interns row sets. The first caller that names the token axis of a predicate decides it."""

    def __init__(self, told: Callable[[Iterable[sympy.Expr]], bool] = lambda sizes: True) -> None:
        """``told``: whether the host can know these sizes before the step runs."""
        self._told = told
        self._known: dict[tuple[Term, tuple[sympy.Expr, ...]], tuple[RowSet, tuple[int, ...]]] = {}

    def of(
        self, predicate: Term, sizes: Sequence[sympy.Expr], token: int | None = None, also: Collection[int] = ()
    ) -> Rows | None:
        """The row set of a predicate over a node's slots (``sizes``); None if it is not one, or names another token axis.

        ``also`` lists axes that belong to the set although the predicate does not speak of them (sequences, where every
        sequence has the same rows).
        """
        slots = sorted({*predicate.slots, *also})
        if not 2 <= len(slots) <= _MAX_AXES or (token is not None and token not in slots):
            return None
        if not self._told(sizes[s] for s in slots):
            return None
        form, order = _canonical(predicate, sizes, slots)
        if form not in self._known:
            axes = [s for s in order if s != token] + ([token] if token is not None else [])
            if token is None:
                axes = slots
            self._known[form] = (self._make(predicate, sizes, axes), tuple(order.index(a) for a in axes))
        row_set, axes_in_order = self._known[form]
        own = tuple(order[i] for i in axes_in_order)
        if token is not None and own[-1] != token:
            return None
        return Rows(row_set, own)

    def full(self, sizes: Sequence[sympy.Expr]) -> RowSet:
        """All rows of axes with these sizes, token axis last."""
        return RowSet(t.TRUE, tuple(sizes), "all")

    def _make(self, predicate: Term, sizes: Sequence[sympy.Expr], axes: Sequence[int]) -> RowSet:
        renamed = t.substitute(predicate, {s: t.slot(i) for i, s in enumerate(axes)})
        return RowSet(renamed, tuple(sizes[a] for a in axes), f"rows{len(self._known)}")


def _canonical(
    predicate: Term, sizes: Sequence[sympy.Expr], slots: list[int]
) -> tuple[tuple[Term, tuple[sympy.Expr, ...]], tuple[int, ...]]:
    """The least form over all numberings of the slots, and the slots in that numbering."""
    best: tuple[str, tuple[Term, tuple[sympy.Expr, ...]], tuple[int, ...]] | None = None
    for order in permutations(slots):
        form = t.substitute(predicate, {s: t.slot(i) for i, s in enumerate(order)})
        own = tuple(sizes[s] for s in order)
        key = f"{form.key}|{own}"
        if best is None or key < best[0]:
            best = (key, (form, own), order)
    assert best is not None
    return best[1], best[2]
