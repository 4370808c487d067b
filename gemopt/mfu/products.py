"""Useful multiplications of a graph: for every contraction, which ones are needed and have no factor known to be zero.

    out[o] = sum_c A[o, c] B[o, c]       useful(o, c) = need(out)(o) and not zero(A)(o, c) and not zero(B)(o, c)
    FLOPs  = 2 * (number of (o, c) for which useful holds)

``need`` is the live-row analysis (graph/live.py), ``zero`` the row facts (graph/facts.py): padding, masked scores and
queries that nobody reads cost nothing, in whatever way the model was spelled. An attention that was recognised as one
(graph/attention.py) counts ``2 (Dqk + Dv)`` for every pair of a wanted query and a key that its mask allows, so windows,
blocks, causal masks and jagged lengths are counted pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from gemopt.graph import cost
from gemopt.graph import terms as t
from gemopt.graph.accesses.contractions import contracts_pairs
from gemopt.graph.attention import Site
from gemopt.graph.facts import Analysis
from gemopt.graph.live import Live
from gemopt.graph.slots import Access, is_tensor, op_name, shape_of
from gemopt.graph.terms import Term


@dataclass(frozen=True)
class Product:
    """``2 * factor`` FLOPs for every index over ``sizes`` where ``useful`` holds.

    ``padded`` is what the op costs over all rows. ``note`` says why a count is an upper bound, if it is.
    """

    node: fx.Node
    layer: str
    useful: Term
    sizes: tuple[sympy.Expr, ...]
    factor: sympy.Expr
    padded: sympy.Expr
    note: str = ""


def products(graph: fx.Graph, live: Live) -> list[Product]:
    """The contractions of a captured graph; ops that a recognised attention covers count as part of it."""
    inside = {n for site in live.sites.values() for n in site.interior} - set(live.sites)
    found = []
    for node in graph.nodes:
        if not is_tensor(node) or node in inside:
            continue
        site = live.sites.get(node)
        made = _attention(site, live) if site is not None else _product(node, live)
        if made is not None:
            found.append(made)
    return found


def _attention(site: Site, live: Live) -> Product:
    useful = t.and_(live.wanted(site), site.mask)
    padded = 2 * sympy.prod(site.sizes) * site.widths
    return Product(site.out, layer_of(site.out), useful, site.sizes, site.widths, padded)


def _product(node: fx.Node, live: Live) -> Product | None:
    known = live.known
    info, name = known.info(node), op_name(node)
    if info.kind == "linear":
        depth = cost.contracted(node, known)
        return Product(node, layer_of(node), live.need(node), info.sizes, depth, cost.flops(node, known))
    if info.kind == "contraction":
        return _contraction(node, live)
    if name in _OUTRIGHT or info.kind == "attention":
        try:
            padded = _OUTRIGHT.get(name, _sdpa)(node)
        except (KeyError, ValueError):
            padded = sympy.Integer(0)
        return Product(node, layer_of(node), t.TRUE, (), padded / 2, padded, f"{name} counted over all rows")
    return None


def _contraction(node: fx.Node, live: Live) -> Product:
    known = live.known
    info, operands = known.info(node), known.operands(node)[:2]
    inner = [[s for e, s in zip(a.exprs, known.info(a.operand).sizes, strict=True) if e is None] for a in operands]
    paired = contracts_pairs(node) and len(operands) == 2 and len(inner[0]) == len(inner[1])
    useful, extra = live.need(node), inner[0] if paired else []
    for access in operands:
        useful = t.and_(useful, t.not_(_zero(access, known, len(info.sizes), paired)))
    depth = sympy.prod([]) if paired else _depth(node, inner)
    padded = 2 * sympy.prod(info.sizes) * (sympy.prod(extra) if paired else depth)
    return Product(node, layer_of(node), useful, (*info.sizes, *extra), depth, padded)


def _depth(node: fx.Node, inner: Sequence[Sequence[sympy.Expr]]) -> sympy.Expr:
    """Contracted positions of a product whose axes the analysis could not pair."""
    if op_name(node) == "aten.einsum":
        letters = _letters(node)
        output = str(node.args[0]).replace(" ", "").split("->")[1]
        return sympy.prod([s for c, s in letters.items() if c not in output])
    return sympy.prod(max(inner, key=len))


def _zero(access: Access, known: Analysis, count: int, paired: bool) -> Term:
    """Over the slots of the result, and after them the contracted ones: where an operand is known to be zero."""
    fact, value = known.facts.get(access.operand), known.value(access.operand)
    zero = fact.where if fact is not None and fact.value == 0 else t.FALSE
    if value is not None:
        zero = t.or_(zero, t.not_(t.truth(value)))
    renamed: dict[int, Term] = {}
    contracted = count
    for i, expr in enumerate(access.exprs):
        if expr is not None:
            renamed[i] = expr
        elif paired:
            renamed[i] = t.slot(contracted)
            contracted += 1
    return t.substitute(zero, renamed) if zero.slots <= set(renamed) else t.FALSE


# ---------------------------------------------------------------- ops that the analyses do not follow


def _letters(node: fx.Node) -> dict[str, sympy.Expr]:
    inputs = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    operands: Any = node.args[1]
    return {c: s for word, x in zip(inputs, operands, strict=True) for c, s in zip(word, shape_of(x), strict=True)}


def _einsum(node: fx.Node) -> sympy.Expr:
    return 2 * sympy.prod(list(_letters(node).values()))


def _matmul(node: fx.Node) -> sympy.Expr:
    a: Any = node.args[0]
    return 2 * sympy.prod(shape_of(node)) * shape_of(a)[-1]


def _sdpa(node: fx.Node) -> sympy.Expr:
    q, k, v = (shape_of(x) for x in node.args[:3])  # type: ignore[arg-type]
    return 2 * sympy.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _convolution(node: fx.Node) -> sympy.Expr:
    weight: Any = node.args[1]
    return 2 * sympy.prod(shape_of(node)) * sympy.prod(shape_of(weight)[1:])


_OUTRIGHT = {
    "aten.einsum": _einsum,
    "aten.scaled_dot_product_attention": _sdpa,
    **{f"aten.{name}": _matmul for name in ("matmul", "mm", "bmm", "mv", "linear")},
    **{f"aten.{name}": _convolution for name in ("conv1d", "conv2d", "conv3d", "convolution")},
}


def layer_of(node: fx.Node) -> str:
    """The module path of an op below the model's root; empty for ops of the root itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    root, path = str(stack[0][0]), str(stack[-1][0])
    return path[len(root) :].lstrip(".") if path.startswith(root) else path


# ---------------------------------------------------------------- counting a predicate


def factors(useful: Term, n_slots: int) -> tuple[list[tuple[Term, tuple[int, ...]]], list[int]]:
    """A predicate as a product of predicates over fewer slots, and the slots that it says nothing about.

    The count of a conjunction is a tensor contraction: sum over (b, q, k) of A[b, q] B[b, k] C[q, k] needs no array over all
    three. Conjuncts over the slots of another are joined with it.
    """
    groups: dict[frozenset[int], list[Term]] = {}
    for part in sorted(t.conjuncts(useful), key=lambda p: -len(p.slots)):
        home = next((s for s in groups if part.slots <= s), part.slots)
        groups.setdefault(home, []).append(part)
    free = sorted(set(range(n_slots)) - set(useful.slots))
    return [(t.and_(*parts), tuple(sorted(slots))) for slots, parts in groups.items()], free


def equation(groups: Sequence[tuple[Term, tuple[int, ...]]]) -> str:
    """The einsum that counts: every slot is summed."""
    used = sorted({s for _, slots in groups for s in slots})
    letter = {s: chr(ord("a") + i) for i, s in enumerate(used)}
    if len(used) > 26:
        raise ValueError(f"a predicate over {len(used)} slots")
    return ",".join("".join(letter[s] for s in slots) for _, slots in groups) + "->"


def renumbered(term: Term, slots: Sequence[int]) -> Term:
    """The term over slots 0, 1, ... in the order given."""
    return t.substitute(term, {s: t.slot(i) for i, s in enumerate(slots)})


def number(expr: sympy.Expr, values: dict[str, float]) -> float:
    """A formula in size symbols at their values."""
    found = float(sympy.sympify(expr).subs({s: values[str(s)] for s in sympy.sympify(expr).free_symbols}))
    return found if math.isfinite(found) else 0.0
