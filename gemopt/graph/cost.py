"""Cost formulas: FLOPs and bytes of one step as sympy expressions in the graph's sizes and the packed row counts.

    linear, matmul    2 * elements(out) * contracted        attention, packed    2 * pairs * H * (Dqk + Dv)
    anything else     0 FLOPs                               every op but views   bytes read + bytes written, as in eager

Only contractions count as FLOPs, the convention of MFU; the backward of a contraction is two contractions. ``pairs`` is the
sum over sequences of live queries times visible keys (half of it, with the diagonal, under a causal mask).
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from torch import fx

from gemopt.graph.attention import Site
from gemopt.graph.facts import Analysis
from gemopt.graph.layout import Layout, Sides
from gemopt.graph.rowsets import Rows, RowSet
from gemopt.graph.slots import Info, is_tensor

_FREE = frozenset(("view", "expand", "source", "select", "slice"))


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def pairs_name(q: RowSet, k: RowSet, block: int | None = None) -> str:
    return f"pairs_{q.name}_{k.name}" + (f"_block{block}" if block else "")


def elements(info: Info, rows: Rows | None) -> sympy.Expr:
    """Elements of a tensor, its row axes counted by the row set where it is packed."""
    gone = set(rows.slots) if rows is not None else set()
    count = sympy.prod([s for i, s in enumerate(info.sizes) if i not in gone])
    return count * symbol(rows.set.name) if rows is not None else count


def contracted(node: fx.Node, known: Analysis) -> sympy.Expr:
    """Size of the contracted axis: what the first operand does not pass on."""
    first = known.operands(node)[0]
    return sympy.prod([s for e, s in zip(first.exprs, known.info(first.operand).sizes, strict=True) if e is None])


def flops(node: fx.Node, known: Analysis, rows: Rows | None = None) -> sympy.Expr:
    info = known.info(node)
    if info.kind in ("linear", "contraction"):
        return 2 * elements(info, rows) * contracted(node, known)
    if info.kind == "attention":
        q, k = known.operands(node)[:2]
        q_info, k_info = known.info(q.operand), known.info(k.operand)
        keys = sympy.prod(k_info.dims[-2])
        return 2 * keys * (elements(q_info, None) + elements(info, None))
    return sympy.Integer(0)


def moved(node: fx.Node, known: Analysis, rows: Rows | None = None) -> sympy.Expr:
    """Bytes an unfused run of the op reads and writes."""
    info = known.info(node)
    if info.kind in _FREE:
        return sympy.Integer(0)
    total = elements(info, rows) * node.meta["val"].element_size()
    for access in known.operands(node):
        x = known.info(access.operand)
        whole = elements(x, None)
        if rows is not None:
            own = {e.args[0] for e in access.exprs if e is not None and e.op == "slot"}
            if set(rows.slots) <= own:
                inner = [s for e, s in zip(access.exprs, x.sizes, strict=True) if e is None or e.args[0] not in rows.slots]
                whole = symbol(rows.set.name) * sympy.prod(inner)
        total += whole * access.operand.meta["val"].element_size()
    return total


def attention_flops(site: Site, sides: Sides) -> sympy.Expr:
    """2 * pairs * heads * (Dqk + Dv), pairs counted by sequence."""
    tokens = {a for a in (*sides.queries.axes, site.key) if a is not None}
    heads = sympy.prod([n for s, n in enumerate(site.sizes) if s not in tokens])
    return 2 * pairs(site, sides) * heads * site.widths


def pairs(site: Site, sides: Sides) -> sympy.Expr:
    """Query-key pairs over all sequences; half of them, with the diagonal, under a causal mask of one row set."""
    q, k = sides.queries.set, sides.keys.set
    if q.full:
        return q.sizes[-1] * symbol(k.name)
    if k.full:
        return k.sizes[-1] * symbol(q.name)
    count = symbol(pairs_name(q, k, sides.block))
    return (count + symbol(q.name)) / 2 if site.parts.band.causal and q is k else count


def totals(graph: fx.Graph, layout: Layout, training: bool) -> dict[str, sympy.Expr]:
    """Formulas for ``GraphReport.set_cost``: one step, forward and (if training) backward."""
    known = layout.known
    replaced = {n for o, s in layout.sites.items() if layout.attended(o) for n in (*s.interior, o)}
    nodes = [n for n in graph.nodes if n.op == "call_function" and is_tensor(n)]
    after_flops, after_bytes = sympy.Integer(0), sympy.Integer(0)
    for node in nodes:
        site = layout.sites.get(node)
        if site is not None and layout.attended(node):
            after_flops += attention_flops(site, layout.sides[node])
            after_bytes += _site_bytes(site, layout)
        elif node not in replaced:
            rows = layout.rows.get(node) if node in layout.packed else None
            after_flops += flops(node, known, rows)
            after_bytes += moved(node, known, rows)
    factor = 3 if training else 1
    return {
        "flops_before": factor * _sum(flops(n, known) for n in nodes),
        "flops_after": factor * after_flops,
        "bytes_before": factor * _sum(moved(n, known) for n in nodes),
        "bytes_after": factor * after_bytes,
    }


def _site_bytes(site: Site, layout: Layout) -> sympy.Expr:
    sides, known = layout.sides[site.out], layout.known
    size = site.out.meta["val"].element_size()
    total = sympy.Integer(0)
    for x, s in (
        (site.out, sides.queries.set),
        (site.q, sides.queries.set),
        (site.k, sides.keys.set),
        (site.v, sides.keys.set),
    ):
        rows = sympy.prod(s.sizes) if s.full else symbol(s.name)
        total += rows * _rest(known.info(x), s) * size
    return total


def _rest(info: Info, s: RowSet) -> sympy.Expr:
    """Elements per row of a tensor that has the row axes of ``s`` among its own."""
    sizes = list(info.sizes)
    for extent in s.sizes:
        if extent in sizes:
            sizes.remove(extent)
    return sympy.prod(sizes)


def _sum(parts: Iterable[sympy.Expr]) -> sympy.Expr:
    return sympy.Add(*parts)


def meanings(layout: Layout) -> dict[str, str]:
    """What the symbols of the formulas stand for, sizes of the padded graph excepted."""
    found: dict[str, str] = {}
    sets = {layout.rows[n].set for n in layout.packed}
    for out, sides in layout.sides.items():
        if layout.attended(out):
            q, k = sides.queries.set, sides.keys.set
            sets |= {q, k}
            groups = f"blocks of {sides.block}" if sides.block else "sequences"
            found[pairs_name(q, k, sides.block)] = f"sum over {groups} of {q.name} times {k.name}"
    return {s.name: f"rows where {s}" for s in sets if not s.full} | found
