"""Unpad: compute only the rows that somebody reads.

Padding is dead code at the granularity of rows. The pass asks the live-row analysis which rows of every tensor are needed,
turns those predicates into row sets, lets a minimum cut choose the tensors worth storing packed, and writes the packed
graph. It knows no model and no layer: whatever leads from a mask, a gather or a loss back through row-local ops is packed.

Legality rests on three facts. A row outside ``need`` reaches no output and no gradient. A packed tensor holds exactly the
rows of its predicate, in the order of their positions, so causal order is row order. Everything assumed on the way
(`Live.assumptions`) is tested by the prologue at every step, and the padded graph runs where a test fails. One thing is not:
that scores stay 104 above a finite fill, which the report says of the softmax in question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from gemopt.graph.attention import Site
from gemopt.graph.capture import Captured, regions
from gemopt.graph.emit import Emitter
from gemopt.graph.facts import Analysis
from gemopt.graph.governing import candidate_masks, governing_masks
from gemopt.graph.gradients import keep_gradients
from gemopt.graph.layout import Layout
from gemopt.graph.live import Live
from gemopt.graph.plan import Plan, Room, impossible
from gemopt.graph.prologue import UnknownSize
from gemopt.graph.recorder import Recorder
from gemopt.graph.slots import nodes_in
from gemopt.graph.spare import obstacle
from gemopt.graph.terms import Term
from gemopt.graph.verify import matched_part, verify_plan, verify_site
from gemopt.passes.jagged import row_totals
from gemopt.passes.narrate import report_misses, report_one_key, report_plan, report_sites, source_of
from gemopt.passes.one_key import write_out_one_key
from gemopt.passes.recognise import Miss, recognise

# Packed work is taken to cost this much more than the same padded work (gathers, indirect attention): an estimate.
_PACKED_OVERHEAD = 1.2


def unpad(captured: Captured, recipe: Any, report: Any) -> Plan | None:
    """Plan the packed form of a captured graph; None where there is nothing to gain."""
    try:
        return _planned(captured, recipe, report)
    except UnknownSize as error:
        report.reject("graph", "unpad", reason=f"the packed graph would need a size beforehand, and {error}")
        return None


def _planned(captured: Captured, recipe: Any, report: Any) -> Plan | None:
    graph = captured.gm.graph
    known = Analysis(graph, finite_fills=recipe.empty_rows != "eager")
    sites, misses = find_sites(captured.gm, known)
    as_captured = replace(captured, gm=_twin(captured.gm)) if recipe.verify else captured
    single, changed = write_out_one_key(captured.gm, known, sites)
    if changed:
        known = Analysis(graph, finite_fills=recipe.empty_rows != "eager")
        sites, misses = find_sites(captured.gm, known)
    if recipe.empty_rows == "eager":
        _refuse_empty_rows(report, sites)
        sites = []
    outputs: dict[fx.Node, Term] = {}
    if recipe.padded_outputs:
        outputs = governing_masks(graph, known, sites, recipe.padded_outputs, captured.output_names)
    room, no_room = _room(captured, recipe)

    def drafted() -> Draft:
        return draft(captured.gm, captured.fake_mode, known, sites, outputs, min_saving=recipe.min_saving, room=room)

    made = drafted()
    if made.plan is not None and known.finite_fills and any(b.some is not None and impossible(b) for b in made.plan.bits):
        known = Analysis(graph, finite_fills=False)  # some softmax has rows that are filled altogether
        sites, misses = find_sites(captured.gm, known)
        made = drafted()
    report_misses(report, misses)
    if recipe.verify and made.plan is not None:
        bad = _failing_sites(captured, made, report)
        if bad:
            sites = [s for s in sites if s not in bad]
            made = drafted()
    report_sites(report, captured, made.layout)
    report_one_key(report, captured, made.layout, single)
    _report_blind(report, made.live, made.blind)
    if made.plan is None or _never_runs(report, captured, made.plan):
        return None
    check_outputs(captured, made.plan)
    keep_gradients(captured, made.plan.packed, fakes_of(captured, made.plan))
    verified = _verified(as_captured, made.plan, report) if recipe.verify else None
    if verified is False:
        return None
    report_plan(report, captured, made.layout, made.plan, verified)
    _report_room(report, captured, recipe, made.plan, no_room or made.no_room)
    return made.plan


def _room(captured: Captured, recipe: Any) -> tuple[Room | None, str]:
    """What capacities are chosen from, or why there are none."""
    if recipe.row_slack is None:
        return None, ""
    sizes = [n for x in captured.example_inputs for n in (x.shape if isinstance(x, torch.Tensor) else (x,))]
    if any(isinstance(n, torch.SymInt) for n in sizes):
        return None, "sizes of the inputs are symbols (dynamic=False makes them numbers)"
    if any(isinstance(x, FakeTensor) for x in captured.real_inputs):
        return None, "the inputs have no data to count rows in"
    return Room([x.detach() if isinstance(x, torch.Tensor) else x for x in captured.real_inputs], recipe.row_slack), ""


def _report_room(report: Any, captured: Captured, recipe: Any, plan: Plan, why_not: str) -> None:
    if recipe.row_slack is None or plan.capacity:
        return
    (output,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
    reason = f"packed sizes change from step to step: {why_not or 'packing would not pay with room for that many rows'}"
    hint = "" if why_not else "ask for less slack"
    report.reject("graph", "row_slack", source=source_of(output), reason=reason, hint=hint)


def _twin(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that stays what the graph is now."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


@dataclass
class Draft:
    """The layout of a graph and, where it packs anything, the plan."""

    live: Live
    layout: Layout
    plan: Plan | None
    blind: Sequence[Site] = ()  # left alone: a query that is read may see no key
    no_room: str = ""  # why row sets have no capacity, where the recipe asks for them


def find_sites(gm: fx.GraphModule, known: Analysis) -> tuple[list[Site], list[Miss]]:
    sites, misses = recognise(gm.graph, known)
    region = regions(gm)
    kept = []
    for site in sites:
        if len({region.get(n) for n in (*site.interior, site.out)}) == 1:
            kept.append(site)
        else:  # no single op means the same
            misses.append(Miss(site.out, "the attention spans a change of grad mode or autocast"))
    return kept, misses


def draft(
    gm: fx.GraphModule, fake_mode: Any, known: Analysis, sites: Sequence[Site], outputs: dict[fx.Node, Term],
    choose: Callable[[Layout], set[fx.Node]] | None = None, min_saving: float = 0.0, room: Room | None = None,
) -> Draft:  # fmt: skip
    """Analyse, lay out and write one graph. ``outputs``: the rows that are wanted of outputs that may lose some.
    ``choose`` overrides the cut. ``room``: row sets get capacities, if the graph can have spare rows."""
    seeing = list(sites)

    def masks() -> Mapping[fx.Node, frozenset[Term]]:
        return candidate_masks(gm.graph, known, seeing)

    live = Live(gm.graph, known, seeing, outputs, masks)
    while not all(map(live.sees_a_key, seeing)):
        seeing = [s for s in seeing if live.sees_a_key(s)]
        live = Live(gm.graph, known, seeing, outputs, masks)
    blind = [s for s in sites if s not in seeing]
    layout = Layout(live, seeing, choose)
    if not layout.packed:
        return Draft(live, layout, None, blind)
    no_room = "" if room is None else obstacle(layout)
    if no_room:
        room = None
    emitter = Emitter(gm, layout, regions(gm), spare=room is not None)
    packed = emitter.run()
    pairs = [(s.queries.set, s.keys.set, s.block) for o, s in layout.sides.items() if layout.attended(o)]
    inside = {n for s in seeing for n in s.interior}  # there, `Live.sees_a_key` has settled it
    exists = [e for n, e in known.exists.items() if n not in inside]
    totals = row_totals(gm.graph, known.values)
    plan = Plan(
        packed,
        gm,
        emitter.extras,
        live.assumptions,
        known.values,
        fake_mode,
        _cost_rule(layout, min_saving),
        pairs,
        exists,
        totals,
        emitter.masks,
        room,
    )
    return Draft(live, layout, plan, blind, no_room)


def _refuse_empty_rows(report: Any, sites: Sequence[Site]) -> None:
    for site in sites:
        report.reject(
            site.out.name, "attention", source=source_of(site.out), node=site.out.name,
            reason='a row without visible keys would give 0, and empty_rows="eager" asks for eager\'s value',
            hint='use empty_rows="zero"',
        )  # fmt: skip


def _report_blind(report: Any, live: Live, sites: Sequence[Site]) -> None:
    for site in sites:
        never = live.never_itself(site)
        which = "the mask hides its own position from every query: one" if never else "a query"
        report.reject(
            site.out.name, "attention", source=source_of(site.out), node=site.out.name,
            reason=f"{which} whose result is read may see no key, where eager's value is not that of the rewritten op",
            hint="let every query see itself" if never else "mask or ignore the results of padded queries",
        )  # fmt: skip


def _never_runs(report: Any, captured: Captured, plan: Plan) -> bool:
    """Whether an assumption is false whatever the inputs are; the report gets it as the reason."""
    false = next(filter(impossible, plan.bits), None)
    if false is not None:
        (output,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
        reason = f"the packed graph could never run, for it needs what never holds: {false.text}"
        report.reject("graph", "unpad", source=source_of(output), reason=reason)
    return false is not None


def _cost_rule(layout: Layout, min_saving: float) -> Callable[[Mapping[str, int], Mapping[str, int]], bool]:
    """Packed where the work on live rows, with its overhead, is less than that on all rows, by the share asked for."""
    weights: dict[str, float] = {}
    for node in layout.packed:
        name = layout.rows[node].set.name
        weights[name] = weights.get(name, 0.0) + layout.work(node)

    def pays(counts: Mapping[str, int], totals: Mapping[str, int]) -> bool:
        padded = sum(w * totals.get(n, 0) for n, w in weights.items())
        packed = sum(w * counts.get(n, 0) for n, w in weights.items())
        return packed * _PACKED_OVERHEAD <= padded and packed <= (1 - min_saving) * padded

    return pays


# ---------------------------------------------------------------- checks


def check_outputs(captured: Captured, plan: Plan) -> None:
    """The packed graph's outputs must be, as fakes, what the captured graph's are: number of dims, dtype, device."""
    (output,) = [n for n in plan.packed.graph.nodes if n.op == "output"]
    made = fakes_of(captured, plan)[output]
    (expected,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
    old = [n.meta.get("val") for n in nodes_in(expected.args)]
    new = [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor | torch.SymInt)]
    if len(old) != len(new):
        raise AssertionError(f"the packed graph returns {len(new)} values instead of {len(old)}")
    for before, after in zip(old, new, strict=True):
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            _check_like(before, after)


def fakes_of(captured: Captured, plan: Plan) -> dict[fx.Node, Any]:
    """What every node of the packed graph gives, as fake tensors and symbolic sizes; kept until the graph has new nodes."""
    if plan.fakes.keys() >= set(plan.packed.graph.nodes):
        return plan.fakes
    sizes = captured.fake_mode.shape_env
    assert sizes is not None
    # Sizes that depend on data are made anew here; not ignored, the inner compiler would report them as never bound.
    # Without the Python dispatcher torch 2.11 turns symbolic sizes into numbers. Nothing here asks for an autograd history.
    with captured.fake_mode, sizes.ignore_fresh_unbacked_symbols(), enable_python_dispatcher():
        recorder = Recorder(plan.packed)
        recorder.run(*map(_without_history, captured.example_inputs), *plan.extra_examples)
    plan.fakes = recorder.values
    return plan.fakes


def _without_history(x: Any) -> Any:
    """An alias of a fake input that autograd does not follow."""
    wrapped_float = getattr(x, "item_memo", None) is not None  # the memo is its symbol
    return x.detach() if isinstance(x, torch.Tensor) and not wrapped_float else x


def _check_like(before: torch.Tensor, after: torch.Tensor) -> None:
    same = before.dtype == after.dtype and before.device == after.device and before.ndim == after.ndim
    if not same:
        raise AssertionError(f"the packed graph returns {after} instead of {before}")


def _failing_sites(captured: Captured, made: Draft, report: Any) -> list[Site]:
    """Sites whose rewrite, alone, does not equal the matched subgraph on generated inputs."""
    bad = []
    for out, site in made.layout.sites.items():
        if not made.layout.attended(out) or site.dropout:
            continue
        part = matched_part(captured, site, made.live.need(out), made.live.known)
        known = Analysis(part.graph)
        alone = draft(part, captured.fake_mode, known, find_sites(part, known)[0], {})
        mismatches = verify_site(captured, part, alone.plan)[1] if alone.plan is not None else []
        if mismatches:
            bad.append(site)
            _reject_mismatch(report, site.out, mismatches)
    return bad


def _verified(captured: Captured, plan: Plan, report: Any) -> bool | None:
    """Whether the whole packed graph equals the captured one; None where nothing could be compared."""
    compared, mismatches = verify_plan(captured, plan)
    if mismatches:
        (output,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
        _reject_mismatch(report, output, mismatches)
        return False
    return True if compared else None


def _reject_mismatch(report: Any, node: fx.Node, mismatches: Sequence[Any]) -> None:
    report.reject(
        node.name, "verify", source=source_of(node), node=node.name,
        reason=f"the rewrite differs from the original on generated inputs: {mismatches[0]}",
        hint="please report this as a bug of gemopt; the original runs instead",
    )  # fmt: skip
