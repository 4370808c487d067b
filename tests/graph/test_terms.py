"""Terms against brute force: every operation of `gemopt.graph.terms` means what it says at every index."""

from __future__ import annotations

import itertools
import pickle

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemopt.graph import terms as t
from gemopt.graph.terms import Term

from .oracle import Evaluator

EXTENT = 3
SLOTS = 3
INDICES = list(itertools.product(range(EXTENT), repeat=SLOTS))
N = sympy.Symbol("n", positive=True, integer=True)
EVALUATE = Evaluator(
    {
        "lengths": torch.tensor([0, 4, 2, 1]),
        "ids": torch.tensor([[0, 1, 2, 0], [3, 0, 0, 5], [1, 1, 1, 1], [-1, 0, 7, 0]]),
        "flags": torch.tensor([True, False, False, True]),
        "small": torch.tensor([0, 3, 255, 1], dtype=torch.uint8),
    },
    {N: EXTENT},
)

slots = st.integers(0, SLOTS - 1).map(t.slot)
numbers = st.integers(-3, 5).map(t.const)
reads = st.one_of(
    slots.map(lambda s: t.read("lengths", [s], True)),
    st.tuples(slots, slots).map(lambda s: t.read("ids", s, True)),
)
narrow = slots.map(lambda s: t.read("small", [s], False))
atoms = st.one_of(slots, numbers, reads, st.just(t.size(N)))


def _grow(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: t.add(*p)),
        pairs.map(lambda p: t.sub(*p)),
        pairs.map(lambda p: t.mul(*p)),
        st.tuples(inner, st.integers(-2, 2)).map(lambda p: t.scale(*p)),
    )


integers = st.recursive(atoms, _grow, max_leaves=4)
comparisons = st.tuples(
    st.sampled_from([t.le, t.lt, t.eq, t.ne]), integers, st.one_of(integers, narrow, st.just(t.const(1.5)))
).map(lambda p: p[0](p[1], p[2]))
flags = slots.map(lambda s: t.call("bool", t.read("flags", [s], False)))


def _grow_predicate(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    lists = st.lists(inner, min_size=0, max_size=3)
    return st.one_of(lists.map(lambda ps: t.and_(*ps)), lists.map(lambda ps: t.or_(*ps)), inner.map(t.not_))


# Few atoms, so that absorption, complements and implication really happen.
pool = [
    t.lt(t.slot(1), t.read("lengths", [t.slot(0)], True)),
    t.le(t.slot(1), t.slot(2)),
    t.ne(t.read("ids", [t.slot(0), t.slot(1)], True), t.const(0)),
    t.call("bool", t.read("flags", [t.slot(2)], False)),
]
predicates = st.recursive(
    st.one_of(st.sampled_from(pool), comparisons, flags, st.just(t.TRUE), st.just(t.FALSE)),
    _grow_predicate,
    max_leaves=6,
)


def at(term: Term, index: tuple[int, ...]):
    return EVALUATE.at(term, index)


def table(term: Term) -> list:
    return [at(term, i) for i in INDICES]


@given(integers, integers, st.integers(-3, 3))
def test_integer_arithmetic(a, b, k):
    for i in INDICES:
        x, y = at(a, i), at(b, i)
        assert at(t.add(a, b), i) == x + y
        assert at(t.sub(a, b), i) == x - y
        assert at(t.mul(a, b), i) == x * y
        assert at(t.scale(a, k), i) == k * x


@given(integers, st.one_of(integers, narrow, st.just(t.const(0.5))))
def test_comparisons(a, b):
    for i in INDICES:
        x, y = at(a, i), at(b, i)
        assert at(t.lt(a, b), i) == (x < y) and at(t.lt(b, a), i) == (y < x)
        assert at(t.le(a, b), i) == (x <= y) and at(t.le(b, a), i) == (y <= x)
        assert at(t.eq(a, b), i) == (x == y) and at(t.ne(a, b), i) == (x != y)


@given(st.lists(predicates, max_size=3))
def test_and_or_not(parts):
    tables = [table(p) for p in parts]
    every, some = table(t.and_(*parts)), table(t.or_(*parts))
    for n in range(len(INDICES)):
        assert bool(every[n]) == all(bool(column[n]) for column in tables)
        assert bool(some[n]) == any(bool(column[n]) for column in tables)
    for p, column in zip(parts, tables, strict=True):
        assert [bool(x) for x in table(t.not_(p))] == [not x for x in column]
        assert t.not_(t.not_(p)) == p or table(t.not_(t.not_(p))) == column
        assert t.and_(p, t.not_(p)) in (t.FALSE,) or not any(table(t.and_(p, t.not_(p))))


@given(predicates, predicates)
def test_implication_is_certain(p, q):
    if t.implies(p, q):
        assert all(bool(y) or not x for x, y in zip(table(p), table(q), strict=True))
    assert t.implies(t.and_(p, q), p) or t.and_(p, q).op != "and"
    assert t.implies(p, p) and t.implies(t.FALSE, p) and t.implies(p, t.TRUE)


@given(predicates, st.frozensets(st.integers(0, SLOTS - 1)))
def test_projection_is_implied_and_forgets(p, keep):
    weaker = t.project(p, keep)
    assert weaker.slots <= keep
    assert all(bool(y) or not x for x, y in zip(table(p), table(weaker), strict=True))
    if p.slots <= keep:
        assert weaker == p


@given(st.one_of(integers, predicates), st.dictionaries(st.integers(0, SLOTS - 1), slots))
def test_substitution_of_slots(term, replace):
    changed = t.substitute(term, replace)
    for i in INDICES:
        moved = tuple(i[replace[s].args[0]] if s in replace else i[s] for s in range(SLOTS))
        assert at(changed, i) == at(term, moved)


@given(st.one_of(integers, predicates), st.integers(0, EXTENT - 1), st.integers(0, SLOTS - 1))
def test_substitution_of_terms(term, c, s):
    """Constants, and values that depend on other slots, stay within the extent here."""
    for value in (t.const(c), t.read("flags_as_int", [t.slot(s)], True)):
        changed = t.substitute(term, {1: value})
        ev = Evaluator({**EVALUATE.leaves, "flags_as_int": torch.tensor([0, 3, 1, 1])}, EVALUATE.sizes)
        for i in INDICES:
            moved = (i[0], ev.at(value, i), i[2])
            assert ev.at(changed, i) == ev.at(term, moved)


@given(st.one_of(integers, predicates))
def test_rebuilding_a_term_gives_it_back(term):
    assert t.substitute(term, {i: t.slot(i) for i in range(SLOTS)}) == term
    assert pickle.loads(pickle.dumps(term)) is term
    assert t.render(term) and str(term)
    assert all(x in EVALUATE.leaves for x in term.leaves)


@given(st.one_of(integers, narrow, predicates))
def test_truth(term):
    assert [bool(x) for x in table(t.truth(term))] == [x != 0 for x in table(term)]


@given(predicates, st.one_of(integers, predicates), st.one_of(integers, predicates))
def test_truth_of_a_choice(p, a, b):
    choice = t.call("where", p, a, b)
    assert [bool(x) for x in table(t.truth(choice))] == [x != 0 for x in table(choice)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 2)), min_size=1, max_size=4), st.randoms())
def test_normal_form_forgets_the_order(summands, random):
    """A sum of reads and slots is one term, in whatever order it is added up."""
    parts = [t.scale((t.slot(i), t.read("lengths", [t.slot(i)], True))[i % 2], k) for i, k in summands]
    shuffled = parts[:]
    random.shuffle(shuffled)
    left, right = t.const(0), t.const(0)
    for x in parts:
        left = t.add(left, x)
    for x in shuffled:
        right = t.add(x, right)
    assert left == right
    assert t.le(left, t.const(1)) == t.not_(t.lt(t.const(1), right)) == t.lt(right, t.const(2))
    assert t.eq(left, t.const(1)) == t.eq(t.const(1), right)
    assert t.ne(left, t.const(1)) == t.not_(t.eq(t.const(1), right))


@given(st.lists(predicates, min_size=1, max_size=4), st.randoms())
def test_joins_forget_the_order_and_absorb(parts, random):
    shuffled = [*parts, random.choice(parts)]
    random.shuffle(shuffled)
    assert t.and_(*parts) == t.and_(*shuffled) and t.or_(*parts) == t.or_(*shuffled)
    assert t.and_(parts[0], t.or_(*parts)) == parts[0] or table(t.and_(parts[0], t.or_(*parts))) == table(parts[0])


def test_nested_joins_of_one_predicate():
    p, q, r = pool[:3]
    assert t.and_(p, t.or_(p, q)) == p and t.or_(p, t.and_(p, q)) == p
    assert t.and_(p, t.and_(q, r)) == t.and_(t.and_(r, p), q)
    assert t.or_(p, t.not_(p)) == t.TRUE and t.and_(p, t.not_(p)) == t.FALSE
    assert t.and_() == t.TRUE and t.or_() == t.FALSE


def test_not_a_number_is_neither_less_nor_more():
    """``not (x < y)`` is not ``y <= x`` for floats, and ``x == x`` is not certain."""
    x = t.read("f", [t.slot(0)], False)
    ev = Evaluator({"f": torch.tensor([float("nan"), 1.0])})
    less = t.lt(x, t.const(0.5))
    assert ev.at(t.not_(less), (0,)) is True and ev.at(t.le(t.const(0.5), x), (0,)) is False
    assert t.not_(less) != t.le(t.const(0.5), x)
    assert t.eq(x, x) != t.TRUE and t.ne(x, x) != t.FALSE
    assert ev.at(t.truth(x), (0,)) is True


@pytest.mark.parametrize("value", [0, 1, -7, 2**40, 1.5, True, False, float("inf")])
def test_constants(value):
    term = t.const(value)
    found = t.constant_value(term)
    assert found == value and isinstance(found, bool) == isinstance(value, bool)
    assert not term.slots and not term.leaves


def test_sizes_are_compared_as_expressions():
    b, l = sympy.symbols("b l", positive=True, integer=True)
    assert t.size(b * l) == t.size(l * b) and t.size(sympy.Integer(3)) == t.const(3)
    assert t.size(b) != t.size(l)
    assert t.sub(t.size(b + 1), t.size(b + 1)) == t.const(0)


def test_conjuncts_and_disjuncts_put_a_predicate_together_again():
    p = t.and_(pool[0], t.or_(pool[1], pool[2]))
    assert t.and_(*t.conjuncts(p)) == p and t.or_(*t.disjuncts(t.not_(p))) == t.not_(p)
    assert t.conjuncts(t.TRUE) == () and t.disjuncts(t.FALSE) == ()
