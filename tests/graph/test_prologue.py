"""The prologue against brute force: written terms, row indices, offsets, gathered rows and assumption bits."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from gemopt import backend
from gemopt.graph import terms as t
from gemopt.graph.extras import Extras
from gemopt.graph.live import Subset
from gemopt.graph.plan import Plan, likely_rows
from gemopt.graph.prologue import Sizes, TermWriter, copy_inputs, copy_leaf, writable
from gemopt.graph.rowsets import RowSet, RowSets
from gemopt.graph.terms import Term

from .oracle import Evaluator, Traced, analyse, capture

# ---------------------------------------------------------------- writing terms

B, L = 3, 4
N = torch.tensor([0, 4, 2])
IDS = torch.tensor([[0, 1, 2, 0], [3, 0, 0, 5], [1, 1, -1, 1]])
FLAGS = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
SMALL = torch.tensor([0, 3, 255, 1], dtype=torch.uint8)


@pytest.fixture(scope="module")
def source() -> Traced:
    inputs = (N, IDS, FLAGS, SMALL, IDS.int().unsqueeze(1))
    gm = capture(lambda n, ids, flags, small, wide: (n[:, None] + ids) * flags + small + wide[:, 0], *inputs)
    return analyse(gm, *inputs)


def names(run: Traced) -> dict[str, str]:
    placeholders = run.graph.find_nodes(op="placeholder")
    return dict(zip(("n", "ids", "flags", "small", "wide"), (p.name for p in placeholders), strict=True))


b, pos, other = t.slot(0), t.slot(1), t.slot(2)
rows = st.sampled_from([pos, other])
shift = st.integers(-2, 2)


def _integers(name: dict[str, str]) -> st.SearchStrategy[Term]:
    def ids(row: Term, c: int) -> Term:
        return t.read(name["ids"], [b, t.add(row, t.const(c))], True)

    atoms = st.one_of(
        st.sampled_from([b, pos, other, t.read(name["n"], [b], True)]),
        st.integers(-3, 5).map(t.const),
        st.builds(ids, rows, shift),
        rows.map(lambda r: t.read(name["wide"], [b, r], True)),
        st.just(t.read(name["ids"], [b, t.call("clamp", t.read(name["n"], [b], True), t.const(0), t.const(3), integer=True)], True)),  # noqa: E501
    )  # fmt: skip
    pairs = st.tuples(atoms, atoms)
    return st.one_of(
        atoms,
        pairs.map(lambda p: t.add(*p)),
        pairs.map(lambda p: t.sub(*p)),
        pairs.map(lambda p: t.mul(*p)),
        atoms.map(lambda x: t.scale(x, -2)),
        atoms.map(lambda x: t.call("clamp", x, t.const(0), None, integer=True)),
        atoms.map(lambda x: t.call("wrap", x, t.const(4), integer=True)),
    )


def _predicates(name: dict[str, str]) -> st.SearchStrategy[Term]:
    compare = st.tuples(st.sampled_from([t.le, t.lt, t.eq, t.ne]), _integers(name), _integers(name))
    atoms = st.one_of(
        compare.map(lambda p: p[0](p[1], p[2])),
        rows.map(lambda r: t.call("bool", t.read(name["flags"], [b, r], False))),
        rows.map(lambda r: t.ne(t.read(name["small"], [r], False), t.const(0))),
        st.sampled_from([t.TRUE, t.FALSE]),
    )
    lists = st.lists(atoms, min_size=1, max_size=3)
    flat = st.one_of(lists.map(lambda ps: t.and_(*ps)), lists.map(lambda ps: t.or_(*ps)))
    chosen = st.tuples(flat, flat, flat).map(
        lambda p: t.eq(t.call("where", p[0], t.const(1), t.const(2), integer=True), t.const(1))
    )
    return st.one_of(flat, flat.map(t.not_), chosen)


def written(run: Traced, term: Term) -> Tensor:
    """The term as the prologue computes it, `[B, L, L]`."""
    graph, env = copy_inputs(run.graph)
    sizes = Sizes(graph, list(env.values()))
    leaves = {n: copy_leaf(graph, run.known.values.leaf_nodes[n], env) for n in term.leaves}
    writer = TermWriter(graph, leaves, sizes, torch.device("cpu"))
    batch, length = run.known.info(run.graph.find_nodes(op="placeholder")[1]).sizes
    graph.output(writer.full(term, (batch, length, length)))
    return fx.GraphModule(run.gm, graph)(*run.inputs).view(B, L, L)


def test_written_terms(source):
    name = names(source)

    @settings(max_examples=60)
    @given(st.one_of(_integers(name), _predicates(name)))
    def check(term):
        assert writable(term)
        expected = source.evaluator.everywhere(term, (B, L, L), undefined=float("nan"))
        found = written(source, term).double()
        defined = ~expected.isnan()  # what is read outside is free, but must not fail
        assert torch.equal(found[defined], expected[defined]), t.render(term)

    check()


def test_unwritable_terms_say_so():
    assert not writable(t.call("div", t.slot(0), t.const(2)))
    assert not writable(t.and_(t.TRUE, t.call("bool", t.call("unknown", t.slot(0)))))


# ---------------------------------------------------------------- plans


Masks = Callable[..., tuple[Tensor, ...]]


def plan_of(
    masks: Masks, inputs: tuple[Tensor, ...], *, gathers: Sequence[Term] = (), subset: bool = False
) -> tuple[Plan, Traced]:
    """A plan that asks for every extra of the row sets of ``masks(*inputs)``, all `[B, L]`."""
    gm = capture(masks, *inputs)
    run = analyse(gm, *inputs)
    (output,) = gm.graph.find_nodes(op="output")
    graph, env = copy_inputs(gm.graph)
    extras = Extras(graph, list(env.values())[-1])
    sets = RowSets()
    predicates = [run.known.value(x) for x in output.args[0]]
    found = [sets.of(p, run.known.info(x).sizes, token=1).set for p, x in zip(predicates, output.args[0], strict=True)]
    nodes = []
    for s in found:
        nodes += [extras.index(s), extras.offsets(s), extras.sequence(s), extras.axis(s, 0), extras.axis(s, 1)]
        nodes += [extras.repack(s, r) for r in found if r is not s]
    nodes += [extras.gather(found[0], (t.slot(0), p), found[0].sizes[:1]) for p in gathers]
    graph.output(tuple(graph.call_function(torch.ops.aten.clone.default, (n,)) for n in nodes))
    assumptions = []
    if subset:
        point = t.eq(t.slot(1), gathers[0])
        assumptions.append(Subset(point, found[0].predicate, found[0].sizes, "the last row"))
    fake_mode = env[next(iter(env))].meta["val"].fake_mode
    packed = fx.GraphModule(gm, graph)
    return Plan(packed, gm, extras, assumptions, run.known.values, fake_mode, lambda counts, totals: True), run


def filled(plan: Plan, inputs: tuple[Tensor, ...]) -> dict[Any, Tensor] | None:
    stats, *tensors = plan.prologue(*inputs)
    assert stats.dtype == torch.int64 and stats.ndim == 1
    extra = plan.admit(stats.tolist(), tensors)
    return None if extra is None else dict(zip(plan.extras, extra, strict=True))


def brute(mask: Tensor) -> dict[str, list[int]]:
    """Index, offsets and coordinates of the true elements, one at a time."""
    batch, length = mask.shape
    where = [(i, j) for i, j in itertools.product(range(batch), range(length)) if bool(mask[i, j])]
    return {
        "index": [i * length + j for i, j in where],
        "offsets": [sum(i < stop for i, _ in where) for stop in range(batch + 1)],
        "sequence": [i for i, _ in where],
        "position": [j for _, j in where],
    }


def check_plan(plan: Plan, extra: dict[Any, Tensor], masks: Sequence[Tensor]) -> None:
    by_set = dict(zip(plan.sets, masks, strict=True))
    for e, tensor in extra.items():
        own = brute(by_set[e.set])
        if e.kind == "repack":
            rank = {flat: i for i, flat in enumerate(own["index"])}
            target = brute(by_set[e.target])["index"]
            for row, flat in zip(tensor.tolist(), target, strict=True):
                assert row == rank.get(flat, row)  # a row that the source lacks is never asked for
        elif e.kind != "gather":
            key = {"axis": ("sequence", "position")[e.axis]}.get(e.kind, e.kind)
            assert tensor.dtype == torch.int64 and tensor.tolist() == own[key], e
    assert [plan.last_counts[s.name] for s in plan.sets] == [int(by_set[s].sum()) for s in plan.sets]


def ids_and_lengths(ids: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return ids != 0, torch.arange(ids.shape[1]) < n[:, None]


@pytest.fixture(scope="module")
def two_sets() -> Plan:
    return plan_of(ids_and_lengths, (torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 3])))[0]


@given(st.data())
def test_rows_of_any_batch(two_sets, data):
    batch, length = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, 1), min_size=batch * length, max_size=batch * length)), dtype=torch.int64
    ).view(batch, length)
    n = torch.tensor(data.draw(st.lists(st.integers(-1, length + 2), min_size=batch, max_size=batch)), dtype=torch.int64)
    extra = filled(two_sets, (ids, n))
    assert extra is not None
    by_name = dict(zip(two_sets.sets, ids_and_lengths(ids, n), strict=True))
    check_plan(two_sets, extra, [by_name[s] for s in two_sets.sets])


def _last(run_name: str) -> Term:
    n = t.read(run_name, [t.slot(0)], True)
    return t.call("wrap", t.sub(n, t.const(1)), t.const(4), integer=True)


@pytest.mark.parametrize("subset", [False, True], ids=["free", "assumed"])
def test_gathered_rows_and_bits(subset):
    """Lengths from -5 to 6 on sequences of 4: rows of live positions, and the bits that must fail."""
    inputs = (torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 3]))
    lengths_name = capture(ids_and_lengths, *inputs).graph.find_nodes(op="placeholder")[1].name
    plan, _ = plan_of(ids_and_lengths, inputs, gathers=[_last(lengths_name)], subset=subset)
    ids = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]])
    for lengths in itertools.product((-5, -3, 0, 1, 3, 4, 6), repeat=3):
        n = torch.tensor(lengths)
        last = [x - 1 + 4 if x - 1 < 0 else x - 1 for x in lengths]
        inside = all(0 <= p < 4 for p in last)
        alive = inside and all(bool(ids[i, p]) for i, p in enumerate(last))
        extra = filled(plan, (ids, n))
        if not inside or (subset and not alive):
            assert extra is None and "assumption" in plan.last_reason, (lengths, plan.last_reason)
            continue
        assert extra is not None, (lengths, plan.last_reason)
        index = brute(ids != 0)["index"]
        (gathered,) = (v for e, v in extra.items() if e.kind == "gather")
        for i, (row, p) in enumerate(zip(gathered.tolist(), last, strict=True)):
            assert index[row] == i * 4 + p if bool(ids[i, p]) else row == -1


def test_gather_from_nothing_runs_padded():
    inputs = (torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 3]))
    name = capture(ids_and_lengths, *inputs).graph.find_nodes(op="placeholder")[1].name
    plan, _ = plan_of(ids_and_lengths, inputs, gathers=[_last(name)])
    assert filled(plan, (torch.zeros(3, 4, dtype=torch.int64), torch.tensor([1, 1, 1]))) is None
    assert plan.last_reason


def test_two_gathers_from_one_set_are_two_inputs():
    inputs = (torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 3]))
    name = capture(ids_and_lengths, *inputs).graph.find_nodes(op="placeholder")[1].name
    first = t.const(0)
    plan, _ = plan_of(ids_and_lengths, inputs, gathers=[_last(name), first])
    extra = filled(plan, inputs)
    gathered = [v.tolist() for e, v in extra.items() if e.kind == "gather"]
    assert gathered == [[0, 5, 10], [0, 4, 8]]
    results = plan.packed(*inputs, *extra.values())
    assert [x.tolist() for x in results[-2:]] == gathered


def test_masks_that_are_sliced_and_shifted():
    """The demand of `h[:, :-1]` under `ids[:, 1:] != 0`, and under a mask input that is one shorter."""

    def shifted(ids: Tensor, short: Tensor) -> tuple[Tensor, ...]:
        return (ids != 0)[:, 1:], short

    inputs = (torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool))
    gm = capture(shifted, *inputs)
    run = analyse(gm, *inputs)
    (output,) = gm.graph.find_nodes(op="output")
    whole = run.known.info(gm.graph.find_nodes(op="placeholder")[0]).sizes
    graph, env = copy_inputs(gm.graph)
    sizes = Sizes(graph, list(env.values()))
    predicates = [run.known.value(x) for x in output.args[0]]
    leaves = {n: copy_leaf(graph, run.known.values.leaf_nodes[n], env) for p in predicates for n in p.leaves}
    writer = TermWriter(graph, leaves, sizes, torch.device("cpu"))
    graph.output(tuple(writer.expanded(p, whole) for p in predicates))
    prologue = fx.GraphModule(gm, graph)
    for length in (2, 5, 7):
        ids = torch.randint(0, 2, (3, length))
        short = torch.rand(3, length - 1) > 0.5
        first, second = prologue(ids, short)
        assert torch.equal(first[:, :-1], ids[:, 1:] != 0) and torch.equal(second[:, :-1], short)
        assert first.shape == second.shape == (3, length)


def test_leaves_are_computed_once_and_from_inputs_alone():
    plan, _ = plan_of(
        lambda ids, n: (ids % 3 == 1, (ids % 3 == 1) & (torch.arange(ids.shape[1]) < n[:, None])),
        (torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 3])),
    )
    remainders = [n for n in plan.prologue.graph.nodes if "remainder" in n.name]
    assert len(remainders) == 1
    ids, n = torch.randint(0, 4, (5, 6)), torch.tensor([0, 6, 3, 1, 2])
    masks = dict(zip(plan.sets, (ids % 3 == 1, (ids % 3 == 1) & (torch.arange(6) < n[:, None])), strict=True))
    check_plan(plan, filled(plan, (ids, n)), [masks[s] for s in plan.sets])


def test_evaluator_reads_nothing_outside():
    """The oracle itself: out-of-range reads are an error, unless a conjunct decides."""
    ev = Evaluator({"x": torch.tensor([1, 0])})
    outside = t.ne(t.read("x", [t.slot(0)], True), t.const(0))
    guarded = t.and_(t.lt(t.slot(0), t.const(2)), outside)
    assert ev.at(guarded, (5,)) is False
    with pytest.raises(Exception, match="x"):
        ev.at(outside, (5,))


def test_likely_rows():
    """Half of the padded rows; one for each sequence where a row's position is given; nothing where a size is unknown."""
    batch, length = sympy.symbols("batch length", integer=True)
    n = t.read("n", [t.slot(0)], True)
    valid, last = t.lt(t.slot(1), n), t.eq(t.slot(1), t.sub(n, t.const(1)))
    hints = {batch: 6, length: 10}
    assert likely_rows(RowSet(valid, (batch, length), "rows"), hints) == 30
    assert likely_rows(RowSet(valid, (sympy.Integer(6), length), "rows"), hints) == 30
    assert likely_rows(RowSet(t.and_(valid, last), (batch, length), "rows"), hints) == 6
    assert likely_rows(RowSet(valid, (sympy.Integer(1), sympy.Integer(1)), "rows"), {}) == 2
    assert likely_rows(RowSet(valid, (batch, length), "rows"), {batch: 6}) is None


@pytest.mark.parametrize(("rows", "split"), [((), 16), ((2, 20_000), 16), ((200_000, 40_000), 128), ((70_000,), 64)])
def test_reductions_of_packed_graphs_are_split_by_a_number(rows, split):
    """As finely as inductor splits those of static sizes; what the user asks for goes first."""
    option = "triton.mix_order_reduction_split_size"
    plan = types.SimpleNamespace(likely_rows=rows)
    inner = backend.inner_compiler("inductor", options={"max_autotune": True})
    assert backend._for_packed(inner, plan).config == {**inner.config, option: split}
    assert option not in inner.config
    asked = backend.inner_compiler("inductor", options={option: 32})
    assert backend._for_packed(asked, plan).config[option] == 32
    assert backend._for_packed(str, plan) is str
