"""Row sets: one set for one predicate, however the tensor that asks for it is laid out, and never one for two."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemopt.graph import terms as t
from gemopt.graph.rowsets import RowSets
from gemopt.graph.terms import Term

from .oracle import Evaluator

B, L, H = sympy.symbols("B L H", positive=True, integer=True)
NUMBERS = {B: 3, L: 4, H: 2}


def valid(b: int, pos: int) -> Term:
    return t.lt(t.slot(pos), t.read("lengths", [t.slot(b)], True))


def listed(b: int, pos: int) -> Term:
    return t.ne(t.read("ids", [t.slot(b), t.slot(pos)], True), t.const(0))


def test_transposed_layouts_share_a_set():
    sets = RowSets()
    batch_first = sets.of(valid(0, 1), [B, L, H])
    length_first = sets.of(valid(1, 0), [L, B, H])
    by_head = sets.of(valid(0, 2), [B, H, L])
    assert batch_first.set is length_first.set is by_head.set
    assert batch_first.slots == (0, 1) and length_first.slots == (1, 0) and by_head.slots == (0, 2)
    assert batch_first.set.sizes == (B, L) and batch_first.set.predicate == valid(0, 1)


def test_the_token_axis_comes_last_whoever_names_it():
    sets = RowSets()
    first = sets.of(valid(1, 0), [L, B], token=0)
    assert first.slots == (1, 0) and first.set.sizes == (B, L)
    assert sets.of(valid(0, 1), [B, L]).slots == (0, 1)
    assert sets.of(valid(0, 1), [B, L], token=1).set is first.set
    assert sets.of(valid(0, 1), [B, L], token=0) is None  # another token axis than the set has


def test_sizes_and_predicates_tell_sets_apart():
    sets = RowSets()
    a = sets.of(listed(0, 1), [B, L])
    assert sets.of(listed(0, 1), [B, H]).set is not a.set
    assert sets.of(valid(0, 1), [B, L]).set is not a.set
    assert sets.of(t.or_(valid(0, 1), listed(0, 1)), [B, L]).set is not a.set
    assert len({r.set.name for r in (a, sets.of(valid(0, 1), [B, L]), sets.of(listed(0, 1), [B, H]))}) == 3


@pytest.mark.parametrize(
    "predicate",
    [t.TRUE, t.FALSE, t.lt(t.slot(0), t.const(3)), t.ne(t.read("x", [t.slot(i) for i in range(4)], True), t.const(0))],
)
def test_what_is_no_set_of_sequences_and_positions(predicate):
    assert RowSets().of(predicate, [B, L, H, L]) is None


def test_symmetric_predicates():
    """The numbering of the axes is arbitrary; the answer must still be a right one."""
    sets = RowSets()
    both = t.and_(*(t.ne(t.read("m", [t.slot(i), t.slot(j)], True), t.const(0)) for i, j in ((0, 1), (1, 0))))
    first, second = sets.of(both, [L, L]), sets.of(both, [L, L], token=0)
    assert sorted(first.slots) == [0, 1]
    assert second is None or second.slots[-1] == 0
    three = t.and_(valid(0, 1), valid(0, 2))
    rows = RowSets().of(three, [B, L, L], token=1)
    assert rows is not None and rows.slots[-1] == 1 and sorted(rows.slots) == [0, 1, 2]


LEAVES = {
    "lengths": torch.tensor([0, 4, 2, 1]),
    "ids": torch.tensor([[0, 1, 0, 2], [1, 1, 1, 1], [0, 0, 0, 0], [5, 0, 0, 1]]),
    "cube": (torch.arange(64).view(4, 4, 4) * 7 % 3),
}


def _predicates() -> st.SearchStrategy[Term]:
    three = st.permutations([0, 1, 2])
    parts = st.one_of(
        three.map(lambda s: valid(s[0], s[1])),
        three.map(lambda s: listed(s[0], s[1])),
        three.map(lambda s: t.ne(t.read("cube", [t.slot(i) for i in s], True), t.const(0))),
        three.map(lambda s: t.le(t.slot(s[0]), t.slot(s[1]))),
        st.integers(0, 2).map(lambda i: t.eq(t.slot(i), t.const(1))),
    )
    return st.lists(parts, min_size=1, max_size=3).flatmap(lambda ps: st.sampled_from([t.and_(*ps), t.or_(*ps)]))


@given(_predicates(), st.permutations([0, 1, 2, 3]), st.sampled_from([[B, L, H], [L, L, L], [B, L, L]]), st.booleans())
def test_any_layout_of_any_predicate(predicate, places, sizes, named):
    """Slot i of the predicate sits at place ``places[i]`` of another tensor: same set, same rows."""
    sets = RowSets()
    first = sets.of(predicate, sizes)
    if first is None:
        assert not 2 <= len(predicate.slots) <= 3
        return
    moved = t.substitute(predicate, {i: t.slot(places[i]) for i in predicate.slots})
    moved_sizes = [L] * 4
    for i in range(3):
        moved_sizes[places[i]] = sizes[i]
    second = sets.of(moved, moved_sizes, token=places[first.slots[-1]] if named else None)
    if second is None:
        assert named  # a symmetric predicate may have been numbered the other way round
        return
    assert second.set is first.set
    ev = Evaluator(LEAVES, NUMBERS)
    for rows, own, own_sizes in ((first, predicate, sizes), (second, moved, moved_sizes)):
        assert rows.set.sizes == tuple(own_sizes[s] for s in rows.slots)
        for axes in itertools.product(*(range(NUMBERS[s]) for s in rows.set.sizes)):
            assert ev.at(rows.set.predicate, axes) == ev.at(own, dict(zip(rows.slots, axes, strict=True)))
