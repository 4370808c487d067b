"""Operands of an attention over its score slots, and what they are copies of."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import atoms
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Access, Exprs, op_name
from gemopt.graph.terms import Term


def compose(access: Access, outer: Exprs) -> Exprs:
    """Operand slots over the score slots, given the node's own."""
    composed: list[Term | None] = []
    for expr in access.exprs:
        if expr is None or any(outer[s] is None for s in expr.slots):
            composed.append(None)
        else:
            composed.append(t.substitute(expr, {s: outer[s] for s in expr.slots}))  # type: ignore[misc]
    return tuple(composed)


def owned(exprs: Exprs, sizes: Sequence[sympy.Expr]) -> list[int] | None:
    """The score slots of an operand, each once; None where a slot is something else."""
    found: list[int] = []
    for expr in exprs:
        if expr is not None:
            parts = atoms(expr, sizes)
            if parts is None:
                return None
            found += parts
    return found if len(set(found)) == len(found) else None


def through_copies(node: fx.Node, exprs: Exprs, known: Analysis, sizes: tuple[sympy.Expr, ...]) -> tuple[fx.Node, Exprs]:
    """Look through ``expand`` and ``repeat_interleave``: a key head that serves several query heads is stored once, as are
    queries that serve every sequence."""
    best = node, exprs
    at, over = node, exprs
    while known.info(at).kind in ("view", "expand", "repeat") or op_name(at) in ("aten.clone", "aten.contiguous"):
        access = known.info(at).accesses[0]
        inner = compose(access, over)
        if not _keeps_features(access, over, known.info(at).sizes):
            break
        if owned(inner, sizes) is None or sum(e is None for e in inner) != sum(e is None for e in exprs):
            break
        at, over = access.operand, inner
        if len(owned(over, sizes) or ()) < len(owned(best[1], sizes) or ()):
            best = at, over
    return best


def _keeps_features(access: Access, over: Exprs, sizes: tuple[sympy.Expr, ...]) -> bool:
    """Whether the features of what ``access`` reads are those of its result, in one order, and no slot holds heads too."""
    before = [e for e in access.exprs if e is not None and any(over[s] is None for s in e.slots)]
    return before == [t.slot(s) for s, e in enumerate(over) if e is None and sizes[s] != 1]
