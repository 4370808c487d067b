"""Slots: which element of which operand an element of a result depends on.

A dim of a tensor is a tuple of factors (``[B*H, L]`` after a merge is ``((B, H), (L,))``; a dim of size 1 has none), and a
*slot* is the number of a factor in that flattened order. For every tensor operand of an op, the *access* gives each operand
slot as a term over the result's slots:

    slot(j)          out[.., j=i, ..] depends on the operand only at i: the op is local there
    slot(j) - c      a shifted copy (slice, cat)
    c, read(..)      one position (select, gather, index)
    None             any position may matter (contracted, reduced, mixed, unknown)

Views are decided by the row-major order of factors, never by equal sizes. Facts, demands and values all travel through
accesses (`forward`, `backward`), so an op needs nothing but its access (graph/accesses) to take part in every analysis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from gemopt.graph import terms as t
from gemopt.graph.terms import Term

_SMALLEST_ROW_AXIS = 16

Dims = tuple[tuple[sympy.Expr, ...], ...]
Exprs = tuple[Term | None, ...]


@dataclass(frozen=True)
class Access:
    """How a result reads one operand: a term (or None) for every slot of the operand."""

    operand: fx.Node
    exprs: Exprs


@dataclass(frozen=True)
class Info:
    """Dims of a tensor node, its accesses in operand order, and whether the op is understood."""

    dims: Dims
    accesses: tuple[Access, ...] = ()
    kind: str = "opaque"

    @property
    def sizes(self) -> tuple[sympy.Expr, ...]:
        return tuple(f for dim in self.dims for f in dim)

    def dim_slots(self) -> list[tuple[int, ...]]:
        """The slot numbers of each dim."""
        result, at = [], 0
        for dim in self.dims:
            result.append(tuple(range(at, at + len(dim))))
            at += len(dim)
        return result

    def access(self, operand: fx.Node) -> Access | None:
        found = [a for a in self.accesses if a.operand is operand]
        return found[0] if len(found) == 1 else None


class NotUnderstood(Exception):
    """An op or a form of it whose accesses are not known; the node becomes opaque."""


# ---------------------------------------------------------------- sizes and shapes


def expr_of(value: Any) -> sympy.Expr:
    """A size as a sympy expression, with the shape environment's known equalities applied; never guards."""
    if isinstance(value, torch.SymInt):
        env = value.node.shape_env
        expr = env.replace(value.node.expr)
        return _with_known_quotients(expr, env) if expr.has(FloorDiv) else expr
    return sympy.Integer(int(value))


def _with_known_quotients(expr: sympy.Expr, env: Any) -> sympy.Expr:
    """``L // (L // 4)``, as torch calls the inner size of a view, is 4 where a guard of the shape environment says so."""
    for quotient in expr.atoms(FloorDiv):
        for guard in env.guards:
            if not (isinstance(guard.expr, sympy.Eq) and guard.expr.has(FloorDiv)):
                continue
            known = env.replace(guard.expr)
            if isinstance(known, sympy.Eq) and known.args[0] == quotient and known.args[1].is_Integer:
                expr = expr.xreplace({quotient: known.args[1]})
    return expr


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(expr_of(s) for s in node.meta["val"].shape)


def fresh(shape: Sequence[sympy.Expr]) -> Dims:
    return tuple(() if s == 1 else (s,) for s in shape)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def nodes_in(*values: Any) -> list[fx.Node]:
    """Nodes inside (nested) arguments, in order, as often as they occur."""
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(values, visit)
    return found


def op_name(node: fx.Node) -> str:
    """``aten.view`` for any overload; empty for what is not an operator."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return f"{node.target.namespace}.{node.target._opname}"
    return ""


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an aten call by its schema name."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, a in enumerate(node.target._schema.arguments):
        if a.name == name:
            if not a.kwarg_only and i < len(node.args):
                return node.args[i]
            return a.default_value if a.has_default_value() else default
    return default


# ---------------------------------------------------------------- travelling through an access


def forward(term: Term, access: Access) -> Term | None:
    """A term over the operand's slots as a term over the result's; None where it reads an unknown position."""
    replace: dict[int, Term] = {}
    for s in term.slots:
        expr = access.exprs[s]
        if expr is None:
            return None
        replace[s] = expr
    return t.substitute(term, replace)


def backward(p: Term, access: Access, out_sizes: Sequence[sympy.Expr], in_sizes: Sequence[sympy.Expr] | None = None) -> Term:
    """The operand elements that the result elements in ``p`` can read, as a predicate over the operand's slots."""
    if p == t.FALSE:
        return p
    inverse: dict[int, Term] = {}
    guards: list[Term] = []
    pending: list[tuple[int, Term]] = []
    for i, expr in enumerate(access.exprs):
        if expr is None:
            continue
        shift = shifted_slot(expr)
        if shift is not None and shift[0] not in inverse:
            j, c = shift
            inverse[j] = t.sub(t.slot(i), t.const(c))
            if c > 0:
                guards.append(t.le(t.const(0), inverse[j]))
            room = None if in_sizes is None else out_sizes[j] - (in_sizes[i] - c)
            if c and (room is None or not room.is_nonnegative):
                guards.append(t.lt(inverse[j], t.size(out_sizes[j])))
        else:
            pending.append((i, expr))
    for j, (outer, inner, position) in _joined_axes(pending).items():
        inverse[j] = position
        pending = [x for x in pending if x[0] not in (outer, inner)]
    for i, expr in pending:
        parts = _split_axis(expr, out_sizes)
        if parts is not None and not set(parts) & set(inverse):
            outer, inner, width = *parts, int(out_sizes[parts[1]])
            inverse[outer] = t.call("floordiv", t.slot(i), width, integer=True)
            inverse[inner] = t.sub(t.slot(i), t.scale(inverse[outer], width))
    known = frozenset(inverse)
    for i, expr in pending:
        if t.constant_value(expr) is not None and in_sizes is not None and _is_stack(in_sizes[i]):
            continue
        if expr.slots <= known:
            guards.append(t.eq(t.slot(i), t.substitute(expr, inverse)))
    return t.and_(t.substitute(t.project(p, known), inverse), *guards)


def _joined_axes(pending: Sequence[tuple[int, Term]]) -> dict[int, tuple[int, int, Term]]:
    """slot j: (n, i, ``width * n + i``) where the operand's slots n and i are ``j // width`` and its remainder."""
    found: dict[int, tuple[int, int, Term]] = {}
    at = {expr: i for i, expr in pending}
    for expr, outer in at.items():
        if expr.op == "floordiv" and expr.args[0].op == "slot":
            inner = at.get(t.sub(expr.args[0], t.scale(expr, expr.args[1])))
            if inner is not None:
                position = t.add(t.scale(t.slot(outer), expr.args[1]), t.slot(inner))
                found[expr.args[0].args[0]] = outer, inner, position
    return found


def _split_axis(expr: Term, sizes: Sequence[sympy.Expr]) -> tuple[int, int] | None:
    """The slots (n, i) of ``width * n + i``: an axis of unknown size in pieces of a fixed one."""
    parts, constant = t.as_linear(expr)
    if constant != 0 or len(parts) != 2 or any(x.op != "slot" for x in parts):
        return None
    (inner, one), (outer, width) = sorted(((x.args[0], k) for x, k in parts.items()), key=lambda part: part[1])
    fixed = one == 1 and width > 1 and sizes[inner] == width and not sizes[outer].is_Integer
    return (outer, inner) if fixed else None


def _is_stack(size: sympy.Expr) -> bool:
    """A fixed, small axis is a stack of tensors (q, k, v of one projection), not an axis of rows: do not tell apart."""
    return bool(size.is_Integer) and size < _SMALLEST_ROW_AXIS


def shifted_slot(expr: Term) -> tuple[int, int] | None:
    """(j, c) of ``slot(j) + c``."""
    parts, c = t.as_linear(expr)
    if len(parts) == 1:
        (only, k), *_ = parts.items()
        if only.op == "slot" and k == 1:
            return only.args[0], c
    return None


# ---------------------------------------------------------------- factors under views


def identity(dims: Dims) -> Exprs:
    return tuple(t.slot(i) for i in range(sum(map(len, dims))))


def reshape(sizes: Sequence[sympy.Expr], shape: Sequence[sympy.Expr]) -> tuple[Dims, Exprs]:
    """Row-major view of factors as ``shape``: the new dims, and each old factor over the new slots."""
    try:
        dims, exprs = _row_major(sizes, shape)
    except NotUnderstood:
        known = _known_by_count(sizes, shape)
        if not known:
            raise
        dims, exprs = _row_major([s.xreplace(known) for s in sizes], [s.xreplace(known) for s in shape])
        # The stand-ins for quotients are spelled out again; equal symbols stay one.
        quotients = {name: quotient for quotient, name in known.items() if isinstance(name, sympy.Dummy)}
        dims = tuple(tuple(f.xreplace(quotients) for f in dim) for dim in dims)
    return _rejoined(dims, exprs)


def _rejoined(dims: Dims, exprs: Exprs) -> tuple[Dims, Exprs]:
    """An axis of unknown size that was cut into pieces of a fixed one is one axis again once they are merged."""
    joined: list[tuple[sympy.Expr, ...]] = []
    replace: dict[int, Term] = {}
    at = new = 0
    for dim in dims:
        if len(dim) == 2 and dim[0].has(FloorDiv) and dim[1].is_Integer:
            width, position = int(dim[1]), t.slot(new)
            outer = t.call("floordiv", position, width, integer=True)
            replace |= {at: outer, at + 1: t.sub(position, t.scale(outer, width))}
            joined.append((dim[0] * width,))
        else:
            replace |= {at + k: t.slot(new + k) for k in range(len(dim))}
            joined.append(dim)
        at, new = at + len(dim), new + len(joined[-1])
    return tuple(joined), tuple(None if e is None else t.substitute(e, replace) for e in exprs)


def _known_by_count(sizes: Sequence[sympy.Expr], shape: Sequence[sympy.Expr]) -> dict[sympy.Expr, sympy.Expr]:
    """What a view tells of sizes, since it keeps the number of elements: ``L`` and ``L // 4`` are ``4 n`` and ``n`` where it
    is only possible if 4 divides L, and two symbols are one where it is only possible if they are equal."""
    ratio = sympy.cancel(sympy.prod(sizes) / sympy.prod(shape))
    numerator, denominator = ratio.as_numer_denom()
    found = {numerator: denominator} if numerator.is_Symbol and denominator.is_Symbol else {}
    for quotient in {q for s in (*sizes, *shape) for q in s.atoms(FloorDiv)}:
        whole, divisor = quotient.args
        missing = whole / (divisor * quotient)
        if divisor.is_Integer and 0 in (sympy.cancel(ratio - missing), sympy.cancel(ratio * missing - 1)):
            name = sympy.Dummy("n", integer=True, positive=True)
            found |= {quotient: name, whole: divisor * name}
    return found


def _row_major(sizes: Sequence[sympy.Expr], shape: Sequence[sympy.Expr]) -> tuple[Dims, Exprs]:
    queue = [(s, i) for i, s in enumerate(sizes)]
    dims: list[tuple[sympy.Expr, ...]] = []
    pieces: dict[int, list[tuple[int, sympy.Expr]]] = {i: [] for i in range(len(queue))}
    at = 0
    for want in shape:
        dim: list[sympy.Expr] = []
        left = want
        while left != 1:
            if not queue:
                raise NotUnderstood("view with sizes that do not divide")
            factor, source = queue.pop(0)
            ratio = _divide(left, factor)
            if ratio is None:  # the factor is larger than what is left of this dim: split it
                rest = _divide(factor, left)
                if rest is None:
                    raise NotUnderstood("view whose sizes are not multiples of each other")
                queue.insert(0, (rest, source))
                factor, ratio = left, sympy.Integer(1)
            dim.append(factor)
            pieces[source].append((at, factor))
            at += 1
            left = ratio
        dims.append(tuple(dim))
    if queue:
        raise NotUnderstood("view that drops elements")
    return tuple(dims), tuple(combine(pieces[i]) for i in range(len(sizes)))


def _divide(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b if it is certainly a whole number: monomials only, so the sizes of symbols never matter."""
    ratio = sympy.cancel(a / b)
    numerator, denominator = ratio.as_numer_denom()
    if denominator != 1:
        return None
    return numerator


def combine(parts: Sequence[tuple[int, sympy.Expr]]) -> Term | None:
    """Index of an old factor from the indices of its pieces, row-major."""
    total: Term = t.const(0)
    for s, size in parts:
        if total == t.const(0):
            total = t.slot(s)
        elif size.is_Integer:
            total = t.add(t.scale(total, int(size)), t.slot(s))
        else:
            return None
    return total


def broadcast(operands: Sequence[Info], shape: Sequence[sympy.Expr]) -> tuple[Dims, list[Exprs]]:
    """Pointwise alignment from the right: the result's dims, and each operand's slots over the result's."""
    ndim = len(shape)
    dims: list[tuple[sympy.Expr, ...]] = []
    for d in range(ndim):
        best: tuple[sympy.Expr, ...] = () if shape[d] == 1 else (shape[d],)
        for info in operands:
            k = d - (ndim - len(info.dims))
            if k >= 0 and len(info.dims[k]) > 1:
                best = finer(best, info.dims[k])
        dims.append(best)
    result = Info(tuple(dims))
    out_slots = result.dim_slots()
    exprs: list[Exprs] = []
    for info in operands:
        own: list[Term | None] = []
        for k, dim in enumerate(info.dims):
            own += regrouped(dim, out_slots[k + ndim - len(info.dims)], result.sizes)
        exprs.append(tuple(own))
    return result.dims, exprs


def finer(a: tuple[sympy.Expr, ...], b: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """Of two ways in which one dim was merged, the one whose factors the other's consist of: ``[B, 2, 2]`` of it and
    ``[B, 4]`` (query heads beside key heads and their share). A single factor consists of any."""
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    if len(short) > 1 and _groups(long, short) is None:
        raise NotUnderstood("operands whose dims were merged from different factors")
    return long


def _groups(fine: Sequence[sympy.Expr], coarse: Sequence[sympy.Expr]) -> list[int] | None:
    """How many consecutive factors of ``fine`` make up each one of ``coarse``."""
    counts: list[int] = []
    at = 0
    for factor in coarse:
        start, product = at, sympy.Integer(1)
        while at < len(fine) and (at == start or product != factor):
            product, at = product * fine[at], at + 1
        if product != factor:
            return None
        counts.append(at - start)
    return counts if at == len(fine) else None


def regrouped(dim: Sequence[sympy.Expr], target: Sequence[int], sizes: Sequence[sympy.Expr]) -> list[Term | None]:
    """The factors of an operand's dim over the slots ``target`` of the result's, which are as many or `finer`."""
    if not dim:
        return []
    if len(dim) == 1:
        counts: list[int] | None = [len(target)]
    else:
        counts = [1] * len(dim) if len(dim) == len(target) else _groups([sizes[j] for j in target], dim)
    if counts is None:
        raise NotUnderstood("operands whose dims were merged from different factors")
    exprs: list[Term | None] = []
    at = 0
    for count in counts:
        exprs.append(combine([(j, sizes[j]) for j in target[at : at + count]]))
        at += count
    return exprs
