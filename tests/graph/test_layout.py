"""Layout: the row set of a packed tensor is what it needs, and packed attention allows exactly what the mask allows."""

from __future__ import annotations

import itertools

import pytest
import torch

from gemopt.graph import terms as t
from gemopt.graph.layout import Layout
from gemopt.graph.live import Live

from .oracle import Evaluator, Traced, Undefined
from .sites import mask_of, score_sizes
from .test_live import Weights, data, prepare, program

PROGRAMS = {
    "last_of_causal": (["position", "causal_sdpa_lengths", "mlp"], "last_index"),
    "mean_of_masked": (["mlp", "attend_bmm_lengths", "norm", "mlp"], "mean"),
    "merged": (["mlp", "attend_merged_given", "swapped", "flat"], "sum_given"),
    "two_masks": (["attend_additive_ids", "causal_einsum_both"], "both"),
    "window": (["window", "mlp"], "last_gather"),
    "causal_alone": (["causal_only", "mlp"], "last_index"),
    "next_item": (["position", "causal_einsum_both", "mlp"], "loss_next"),
    "cross": (["cross", "gate", "cat"], "loss_where"),
    "shifts": (["shift", "shift_back", "difference", "mlp"], "mean"),
    "everything": (["attend_bmm_lengths", "mlp"], "everything"),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def planned(request) -> tuple[Traced, Live, Layout]:
    steps, end = PROGRAMS[request.param]
    run, live = prepare(program(steps, end), (*data(1), *Weights(1).tensors))
    return run, live, Layout(live, live.sites.values())


def test_rows_are_the_need(planned):
    run, live, layout = planned
    for node, rows in layout.rows.items():
        sizes = run.slot_sizes(node)
        assert rows.set.sizes == tuple(run.known.info(node).sizes[s] for s in rows.slots)
        need = live.need(node)
        over = {i: t.slot(s) for i, s in enumerate(rows.slots)}
        found = run.evaluator.mask(t.substitute(rows.set.predicate, over), sizes, undefined=False)
        assert torch.equal(found, run.evaluator.mask(need, sizes, undefined=False)), node


def holds(evaluator: Evaluator, predicate: t.Term, index: list[int]) -> bool:
    """A predicate that reads past its leaf (a shifted label of the last position) holds nowhere that anybody reads."""
    try:
        return bool(evaluator.at(predicate, index))
    except Undefined:
        return False


def test_packed_attention_sees_what_the_mask_allows(planned):
    """For every query that is read: mask(q, k) is "k is a packed key of the same sequence, and the band allows it"."""
    run, _live, layout = planned
    for out, sides in layout.sides.items():
        site, queries, keys = layout.sites[out], sides.queries, sides.keys
        key_axes, query_axes = keys.axes, queries.axes
        assert key_axes[-1] == site.key and query_axes[-1] == site.query
        assert key_axes[:-1] == query_axes[:-1]
        mask, ev, band = mask_of(run, site), run.evaluator, site.parts.band
        for index in itertools.product(*map(range, score_sizes(run, site))):
            if not holds(ev, queries.set.predicate, [index[s] for s in query_axes]):
                continue
            distance = index[site.key] - index[site.query]
            inside = (band.left is None or -band.left <= distance) and (band.right is None or distance <= band.right)
            packed = holds(ev, keys.set.predicate, [index[s] for s in key_axes])
            dense = holds(ev, sides.dense, index)
            assert bool(mask[index]) == (packed and inside and dense), (out, index)


def test_packed_nodes_are_closed_under_reading(planned):
    _run, live, layout = planned
    for choose in (Layout.cut, lambda x: set(), lambda x: set(x.rows), lambda x: set(list(x.rows)[::3])):
        packed = Layout(live, live.sites.values(), choose).packed
        assert packed <= set(layout.rows)
        for node in layout.rows:
            if any(operand in packed for operand in layout.operands(node)):
                assert node in packed


def test_every_site_is_packed_or_refused_with_a_reason(planned):
    _, live, layout = planned
    for out in live.sites:
        assert (out in layout.sides) != (out in layout.refused)
        assert out in layout.sides or layout.refused[out]


def test_rows_are_never_cut_or_lengthened(planned):
    """A packable slice or cat leaves the row axes alone."""
    run, _, layout = planned
    for node, rows in layout.rows.items():
        info = run.known.info(node)
        for access in info.accesses:
            plain = {e.args[0]: i for i, e in enumerate(access.exprs) if e is not None and e.op == "slot"}
            for s in rows.slots:
                if s in plain and info.kind not in ("pointwise", "expand"):
                    own = run.slot_sizes(access.operand)[plain[s]]
                    assert own == run.slot_sizes(node)[s], node.format_node()


def test_what_packs():
    """Not a check of soundness: the programs here are ones that must not fall back to padded."""
    for name in ("last_of_causal", "mean_of_masked", "merged", "next_item"):
        steps, end = PROGRAMS[name]
        _, live = prepare(program(steps, end), (*data(1), *Weights(1).tensors))
        layout = Layout(live, live.sites.values())
        assert all(out in layout.packed for out in live.sites), (name, layout.refused)
