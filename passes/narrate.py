"""What the unpad pass tells the report: every site as a rewrite or a rejection, with source line, reason and hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from gemopt.graph import cost
from gemopt.graph import terms as t
from gemopt.graph.attend import kernel_of
from gemopt.graph.capture import Captured
from gemopt.graph.layout import Layout
from gemopt.graph.live import Live
from gemopt.graph.plan import Plan
from gemopt.graph.slots import nodes_in, op_name, shape_of
from gemopt.passes.one_key import OneKey
from gemopt.passes.recognise import Miss


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


def report_misses(report: Any, misses: Sequence[Miss]) -> None:
    for miss in misses:
        report.reject(
            miss.node.name, "attention", source=source_of(miss.node), node=miss.node.name, reason=miss.reason, hint=miss.hint
        )


def report_sites(report: Any, captured: Captured, layout: Layout) -> None:
    """Sites that are recognised but stay as they are."""
    for site in layout.sites.values():
        if not layout.attended(site.out):
            reason = layout.refused.get(site.out, "packing this attention would not pay")
            _left_alone(report, captured, layout, site.out, reason)


def report_one_key(report: Any, captured: Captured, layout: Layout, single: Sequence[OneKey]) -> None:
    """Attentions over one key: a rewrite where all of it runs on packed rows."""
    for site in single:
        if layout.packed >= {site.out, *site.products}:
            report.rewrite(
                site=site.out.name, rule="unpad attention", kernel=None, source=source_of(site.out),
                before=f"{site.spelling} over one key on {list(map(str, shape_of(site.out)))}",
                after=f"element by element where {layout.rows[site.out].set}: one key needs no kernel",
                exactness="rounding", reason="the other rows reach no output",
            )  # fmt: skip
            continue
        whole = layout.live.need(site.out) == t.TRUE
        reason = "every row of the queries is live" if whole else "packing this attention over one key would not pay"
        _left_alone(report, captured, layout, site.out, reason)


def _left_alone(report: Any, captured: Captured, layout: Layout, out: fx.Node, reason: str) -> None:
    blame = holding_output(captured, layout.live, out) if reason.startswith("every row") else ""
    hint = ""
    if not blame and reason.startswith("every row"):
        reason += reading_all(layout.live, out)
    if blame:
        reason = f"{reason}: {blame} is returned with its padding"
        hint = 'compile the step together with its loss, return the masked or pooled value, or pass padded_outputs="zero"'
    report.reject(out.name, "unpad", source=source_of(out), node=out.name, reason=reason, hint=hint)


def holding_output(captured: Captured, live: Live, out: fx.Node) -> str:
    """The output through which every row of an attention is live, if a chain of full demands leads there."""
    (output,) = [n for n in captured.gm.graph.nodes if n.op == "output"]
    names = dict(zip(nodes_in(output.args), captured.output_names, strict=False))
    stack, seen = [out], set()
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


def reading_all(live: Live, out: fx.Node) -> str:
    """Who makes every row of an attention live: the first operation that asks for more rows than are asked of itself."""
    stack, seen = [out], set()
    while stack:
        node = stack.pop(0)
        if node in seen:
            continue
        seen.add(node)
        for reader, rows in live.readers.get(node, ()):
            if rows != t.TRUE or reader.op == "output":
                continue
            if live.need(reader) != t.TRUE:
                where = source_of(reader)
                return f": {op_name(reader)} ({reader.name}{', ' + where if where else ''}) reads them all"
            stack.append(reader)
    return ""


def report_plan(report: Any, captured: Captured, layout: Layout, plan: Plan, verified: bool | None) -> None:
    """Costs, row sets and one rewrite for every attention and for the region around them."""
    report.set_cost(**cost.totals(captured.gm.graph, layout, captured.is_training_graph), symbols=cost.meanings(layout))
    for s in plan.sets:
        known = ""
        if plan.capacity:
            known = f"; room for {plan.capacity[s]}"
        elif plan.expected:
            known = f"; expected to be {plan.expected[s.name]}, known before the device counts"
        report.row_set(s.name, f"{s}{known}")
    assumptions = tuple(b.text for b in plan.bits)
    for site in (s for o, s in layout.sites.items() if layout.attended(o)):
        sides = layout.sides[site.out]
        kernel = kernel_of(site, sides)
        blocks = f", in blocks of {sides.block}" if sides.block else ""
        notes = [*assumptions, *(["rows without a visible key give 0 and no gradient"] if site.score == "softmax" else [])]
        if site.fill > -float("inf"):
            notes.append(f"scores stay above {site.fill:g} + 104, so that masked keys get no weight")
        report.rewrite(
            site=site.out.name, rule="unpad attention", kernel=kernel, source=source_of(site.out),
            before=f"{site.spelling} on {list(map(str, shape_of(site.out)))}",
            after=f"{kernel}: queries where {sides.queries.set}, keys where {sides.keys.set}{blocks}",
            assumptions=tuple(notes), exactness="rounding" if not site.dropout else "distribution",
            reason="the other rows reach no output", verified=verified,
        )  # fmt: skip
    kinds: dict[str, int] = {}
    for node in layout.packed:
        if node not in layout.sites and layout.known.info(node).kind not in ("view", "expand"):
            kinds[op_name(node)] = kinds.get(op_name(node), 0) + 1
    if kinds:
        text = ", ".join(f"{n} {k.removeprefix('aten.')}" for k, n in sorted(kinds.items()))
        report.rewrite(
            site="region", rule="unpad region", kernel=None, source="", before=f"{text} on padded rows",
            after=f"the same on {', '.join(s.name for s in plan.sets)}", assumptions=assumptions, exactness="rounding",
            reason="the other rows reach no output", verified=verified,
        )  # fmt: skip
