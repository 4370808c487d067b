"""Unpad: compute only the rows that somebody reads.

Padding is dead code at the granularity of rows. The pass asks the live-row analysis which rows of every tensor are needed,
turns those predicates into row sets, lets a minimum cut choose the tensors worth storing packed, and writes the packed
graph. It knows no model and no layer: whatever leads from a mask, a gather or a loss back through row-local ops is packed.

Legality rests on three facts. A row outside ``need`` reaches no output and no gradient. A packed tensor holds exactly the
rows of its predicate, in the order of their positions, so causal order is row order. Everything assumed on the way
(`Live.assumptions`) is tested by the prologue at every step, and the padded graph runs where a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from gemopt.graph import cost
from gemopt.graph import terms as t
from gemopt.graph.attention import Site
from gemopt.graph.capture import Captured, regions
from gemopt.graph.emit import Emitter
from gemopt.graph.facts import Analysis
from gemopt.graph.layout import Layout
from gemopt.graph.live import Live
from gemopt.graph.plan import Plan
from gemopt.graph.slots import op_name, shape_of
from gemopt.graph.terms import Term
from gemopt.passes.recognise import Miss, recognise

# Packed work costs this much more than the same padded work (gathers, indirect attention): measured in bench/unpad.py.
_PACKED_OVERHEAD = 1.2


def unpad(captured: Captured, recipe: Any, report: Any) -> Plan | None:
    """Plan the packed form of a captured graph; None where there is nothing to gain."""
    graph = captured.gm.graph
    known = Analysis(graph)
    region = regions(captured.gm)
    sites, misses = recognise(graph, known)
    sites, split = _in_one_region(sites, region)
    _report_misses(report, [*misses, *split])
    if recipe.empty_rows == "eager":
        for site in sites:
            report.reject(
                site.out.name, "attention", source=source_of(site.out), node=site.out.name,
                reason='a row without visible keys would give 0, and empty_rows="eager" asks for eager\'s value',
                hint='use empty_rows="zero"',
            )  # fmt: skip
        sites = []
    outputs = governed_outputs(graph, known, sites, recipe, captured) if recipe.padded_outputs else {}
    live = Live(graph, known, sites, outputs)
    layout = Layout(live, sites)
    _report_sites(report, captured, layout, sites, outputs)
    if not layout.packed:
        return None
    emitter = Emitter(captured.gm, layout, region)
    packed = emitter.run()
    pairs = [(layout.rows[o].set, layout.key_rows[o].set) for o in layout.sites if o in layout.packed]
    plan = Plan(
        packed, captured.gm, emitter.extras, live.assumptions, known.values, captured.fake_mode, _cost_rule(layout), pairs
    )
    check_outputs(captured, plan)
    _report_plan(report, graph, layout, plan, live, captured.is_training_graph)
    return plan


def _in_one_region(sites: Sequence[Site], region: dict[fx.Node, Any]) -> tuple[list[Site], list[Miss]]:
    """An attention whose parts differ in grad mode or autocast has no single op that means the same."""
    kept, refused = [], []
    for site in sites:
        if len({region.get(n) for n in (*site.interior, site.out)}) == 1:
            kept.append(site)
        else:
            refused.append(Miss(site.out, "the attention spans a change of grad mode or autocast"))
    return kept, refused


def _cost_rule(layout: Layout) -> Callable[[Mapping[str, int], Mapping[str, int]], bool]:
    """Packed where the work on live rows, with its overhead, is less than the work on all rows."""
    weights: dict[str, float] = {}
    for node in layout.packed:
        name = layout.rows[node].set.name
        weights[name] = weights.get(name, 0.0) + layout.work(node)

    def pays(counts: Mapping[str, int], totals: Mapping[str, int]) -> bool:
        padded = sum(w * totals.get(n, 0) for n, w in weights.items())
        packed = sum(w * counts.get(n, 0) for n, w in weights.items())
        return packed * _PACKED_OVERHEAD <= padded

    return pays


def check_outputs(captured: Captured, plan: Plan) -> None:
    """The packed graph's outputs must be, as fakes, what the captured graph's are: shape, dtype, device, stride."""
    with captured.fake_mode:
        made = fx.Interpreter(plan.packed).run(*captured.example_inputs, *plan.extra_examples)
    (expected,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
    old: list[Any] = []
    fx.node.map_arg(expected.args, lambda n: old.append(n.meta.get("val")) or n)
    new = [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor | torch.SymInt)]
    if len(old) != len(new):
        raise AssertionError(f"the packed graph returns {len(new)} values instead of {len(old)}")
    for before, after in zip(old, new, strict=True):
        if isinstance(before, torch.Tensor):
            _check_like(before, after)


def _check_like(before: torch.Tensor, after: torch.Tensor) -> None:
    same = before.dtype == after.dtype and before.device == after.device and before.ndim == after.ndim
    if not same:
        raise AssertionError(f"the packed graph returns {after} instead of {before}")


# ---------------------------------------------------------------- outputs


def governed_outputs(
    graph: fx.Graph, known: Analysis, sites: Sequence[Site], recipe: Any, captured: Captured
) -> dict[fx.Node, Term]:
    """``padded_outputs``: outputs governed by exactly one mask ask for that mask's rows only."""
    from gemopt.graph.governing import governing_masks

    return governing_masks(graph, known, sites, recipe.padded_outputs, captured.output_names)


# ---------------------------------------------------------------- report


def source_of(node: fx.Node) -> str:
    """``file:line: code`` of the innermost user frame."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not frames:
        return ""
    head = lines[frames[-1]].split('"')
    number = lines[frames[-1]].split("line ")[1].split(",")[0]
    code = lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return f"{head[1]}:{number}: {code}"


def _report_misses(report: Any, misses: Sequence[Miss]) -> None:
    for miss in misses:
        report.reject(
            miss.node.name, "attention", source=source_of(miss.node), node=miss.node.name, reason=miss.reason, hint=miss.hint
        )


def _report_sites(
    report: Any, captured: Captured, layout: Layout, sites: Sequence[Site], outputs: dict[fx.Node, Term]
) -> None:
    for site in sites:
        if site.out in layout.packed:
            continue
        reason = layout.refused.get(site.out, "packing this attention would not pay")
        blame = holding_output(captured, layout.live, site) if reason.startswith("every row") else ""
        hint = ""
        if blame:
            reason = f"{reason}: {blame} is returned with its padding"
            hint = (
                'compile the step together with its loss, return the masked or pooled value, or pass padded_outputs="zero"'
            )
        report.reject(site.out.name, "unpad", source=source_of(site.out), node=site.out.name, reason=reason, hint=hint)


def holding_output(captured: Captured, live: Live, site: Site) -> str:
    """The output through which every row of a site is live, if a chain of full demands leads there."""
    (output,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
    flat: list[fx.Node] = []
    fx.node.map_arg(output.args, lambda n: flat.append(n) or n)
    names = dict(zip(flat, captured.output_names, strict=False))
    stack, seen = [site.out], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for reader, rows in live.readers.get(node, ()):
            if rows == t.TRUE:
                if reader is output:
                    return names.get(node, node.name)
                stack.append(reader)
    return ""


def _report_plan(report: Any, graph: fx.Graph, layout: Layout, plan: Plan, live: Live, training: bool) -> None:
    report.set_cost(**cost.totals(graph, layout, training), symbols=cost.meanings(layout))
    for s in plan.sets:
        report.row_set(s.name, str(s))
    assumptions = tuple(b.reason.removeprefix("assumption failed: ") for b in plan.bits)
    for site in (s for o, s in layout.sites.items() if o in layout.packed):
        notes = [*assumptions, "rows without a visible key give 0 and no gradient"]
        if site.fill > -float("inf"):
            notes.append(f"scores stay above {site.fill:g} + 104, so that masked keys get no weight")
        report.rewrite(
            site=site.out.name, rule="unpad attention", kernel="jagged_attention", source=source_of(site.out),
            before=f"{site.spelling} on {list(map(str, shape_of(site.out)))}",
            after=f"jagged_attention: queries where {layout.rows[site.out].set}, keys where {layout.key_rows[site.out].set}",
            assumptions=tuple(notes), exactness="rounding" if not site.dropout else "distribution",
            reason="the other rows reach no output",
        )  # fmt: skip
    kinds: dict[str, int] = {}
    for node in layout.packed:
        if node not in layout.sites and live.known.info(node).kind not in ("view", "expand"):
            kinds[op_name(node)] = kinds.get(op_name(node), 0) + 1
    if kinds:
        text = ", ".join(f"{n} {k.removeprefix('aten.')}" for k, n in sorted(kinds.items()))
        report.rewrite(
            site="region", rule="unpad region", kernel=None, source="", before=f"{text} on padded rows",
            after=f"the same on {', '.join(s.name for s in plan.sets)}", assumptions=assumptions, exactness="bitwise per row",
            reason="the other rows reach no output",
        )  # fmt: skip
