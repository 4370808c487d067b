"""Terms: canonical expressions for index-like values and the predicates made of them.

A term describes one element of a tensor as a function of the tensor's slot indices:

    slot(i)            the index along slot i
    const(c)           a number or a bool
    size(e)            a symbolic size (a sympy expression of the capture's shape symbols)
    read(leaf, ...)    an element of a leaf tensor (a graph input, or an integer tensor whose formula is not followed)
    linear             c + sum(coefficient * term), integers only
    le0 / eq0 / ne0    comparisons of an integer linear term with zero
    and / or / not     flattened, sorted, absorbed
    op(name, ...)      any other scalar function, compared structurally

Terms are hash-consed and kept in a normal form, so equality of terms is ``==`` and implies equality of values; the converse
does not hold, and nothing here relies on it. Integer arithmetic is exact (int32 overflow is not modelled; narrower types
are never followed), hence ``pos < n``, ``pos <= n - 1`` and ``not (pos >= n)`` are one term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, reduce
from typing import Any, ClassVar

import sympy


class Term:
    """One node of a term, hash-consed: equal terms are the same object. Build it with the functions of this module."""

    __slots__ = ("__dict__", "args", "integer", "op")
    _table: ClassVar[dict[tuple[Any, ...], Term]] = {}

    op: str
    args: tuple[Any, ...]
    integer: bool

    def __new__(cls, op: str, args: tuple[Any, ...] = (), integer: bool = False) -> Term:
        key = (op, args, integer)
        known = cls._table.get(key)
        if known is None:
            known = object.__new__(cls)
            known.op, known.args, known.integer = op, args, integer
            known = cls._table.setdefault(key, known)
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        return Term, (self.op, self.args, self.integer)

    def __repr__(self) -> str:
        return f"Term<{self.key}>"

    @cached_property
    def key(self) -> str:
        """A total order for commutative operands; equal keys mean equal terms."""
        inner = ",".join(a.key if isinstance(a, Term) else repr(a) for a in self.args)
        return f"{self.op}{'#' if self.integer else ''}({inner})"

    @cached_property
    def slots(self) -> frozenset[int]:
        """The slots the value depends on."""
        if self.op == "slot":
            return frozenset((self.args[0],))
        found: frozenset[int] = frozenset()
        for arg in self.args:
            if isinstance(arg, Term):
                found |= arg.slots
            elif isinstance(arg, tuple):
                found = found.union(*(t.slots for t in arg if isinstance(t, Term)))
        return found

    @cached_property
    def leaves(self) -> frozenset[Any]:
        """The leaf tensors the value reads."""
        if self.op == "read":
            inner: frozenset[Any] = frozenset((self.args[0],))
        else:
            inner = frozenset()
        for arg in self.args:
            if isinstance(arg, Term):
                inner |= arg.leaves
            elif isinstance(arg, tuple):
                inner = inner.union(*(t.leaves for t in arg if isinstance(t, Term)))
        return inner

    def __str__(self) -> str:
        return render(self)


# ---------------------------------------------------------------- constructors


def slot(i: int) -> Term:
    return Term("slot", (i,), True)


def const(value: Any) -> Term:
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        return _linear({}, value)
    return Term("const", (float(value),))


def size(expr: Any) -> Term:
    expr = sympy.sympify(expr)
    if expr.is_Integer:
        return _linear({}, int(expr))
    return Term("size", (expr,), True)


def read(leaf: Any, indices: Iterable[Term], integer: bool) -> Term:
    return Term("read", (leaf, tuple(indices)), integer)


TRUE = Term("true")
FALSE = Term("false")


def call(name: str, *args: Any, integer: bool = False) -> Term:
    """A scalar function without a normal form of its own."""
    return Term(name, args, integer)


# ---------------------------------------------------------------- integer arithmetic


def _linear(terms: Mapping[Term, int], constant: int) -> Term:
    kept = {t: c for t, c in terms.items() if c}
    if not constant and len(kept) == 1:
        (only, coefficient), *_ = kept.items()
        if coefficient == 1:
            return only
    ordered = tuple(x for t in sorted(kept, key=lambda t: t.key) for x in (t, kept[t]))
    return Term("linear", (constant, *ordered), True)


def as_linear(t: Term) -> tuple[dict[Term, int], int]:
    """Coefficients and constant of an integer term."""
    if t.op == "linear":
        pairs = t.args[1:]
        return dict(zip(pairs[::2], pairs[1::2], strict=True)), t.args[0]
    return {t: 1}, 0


def constant_value(t: Term) -> int | float | bool | None:
    """The number a term stands for, if it is one."""
    if t.op == "linear" and len(t.args) == 1:
        return t.args[0]
    if t.op == "const":
        return t.args[0]
    if t in (TRUE, FALSE):
        return t == TRUE
    return None


def add(a: Term, b: Term) -> Term:
    if not (a.integer and b.integer):
        return call("add", *sorted((a, b), key=lambda t: t.key))
    left, c = as_linear(a)
    right, d = as_linear(b)
    total = dict(left)
    for t, k in right.items():
        total[t] = total.get(t, 0) + k
    return _linear(total, c + d)


def scale(a: Term, factor: int) -> Term:
    parts, c = as_linear(a)
    return _linear({t: k * factor for t, k in parts.items()}, c * factor)


def sub(a: Term, b: Term) -> Term:
    if a.integer and b.integer:
        return add(a, scale(b, -1))
    return call("sub", a, b)


def mul(a: Term, b: Term) -> Term:
    for x, y in ((a, b), (b, a)):
        value = constant_value(x)
        if a.integer and b.integer and isinstance(value, int) and not isinstance(value, bool):
            return scale(y, value)
    return call("mul", *sorted((a, b), key=lambda t: t.key), integer=a.integer and b.integer)


# ---------------------------------------------------------------- predicates


def le(a: Term, b: Term) -> Term:
    if not (a.integer and b.integer):
        return call("le", a, b)
    return _compare("le0", sub(a, b))


def lt(a: Term, b: Term) -> Term:
    if not (a.integer and b.integer):
        return call("lt", a, b)
    return _compare("le0", add(sub(a, b), const(1)))


def eq(a: Term, b: Term) -> Term:
    if a == b and a.op in ("true", "false"):
        return TRUE
    if not (a.integer and b.integer):
        return call("eq", *sorted((a, b), key=lambda t: t.key))
    return _compare("eq0", _sign(sub(a, b)))


def ne(a: Term, b: Term) -> Term:
    if not (a.integer and b.integer):
        return call("ne", *sorted((a, b), key=lambda t: t.key))
    return _compare("ne0", _sign(sub(a, b)))


def _sign(t: Term) -> Term:
    """Equality is symmetric: make the first coefficient positive."""
    parts, _ = as_linear(t)
    first = min(parts, key=lambda x: x.key, default=None)
    return scale(t, -1) if first is not None and parts[first] < 0 else t


def _compare(op: str, t: Term) -> Term:
    parts, c = as_linear(t)
    if op == "le0" and len(parts) == 1:
        (only, k), *_ = parts.items()
        if only.op == "abs" and abs(k) == 1:  # |x| <= -c, or |x| >= c
            x = only.args[0]
            if k == 1:
                return and_(_compare(op, add(x, const(c))), _compare(op, add(scale(x, -1), const(c))))
            return or_(_compare(op, add(scale(x, -1), const(c))), _compare(op, add(x, const(c))))
    value = constant_value(t)
    if value is not None:
        return const({"le0": value <= 0, "eq0": value == 0, "ne0": value != 0}[op])
    if op == "le0" and all(x.op == "slot" for x in parts):  # positions are never negative
        if c <= 0 and all(k < 0 for k in parts.values()):
            return TRUE
        if c > 0 and all(k > 0 for k in parts.values()):
            return FALSE
    return Term(op, (t,))


def plain_comparison(op: str, t: Term) -> tuple[Term, Term | int, bool] | None:
    """What ``t <= 0`` (or ``== 0``) compares, if it compares two things, of which the second may be a number.

    ``(x, y, strict)`` with terms is ``x <= y`` or ``x < y``; with a number ``x <= y``, or ``x >= y`` if strict.
    """
    parts, c = as_linear(t)
    if len(parts) == 1:
        ((x, k),) = parts.items()
        return (x, -k * c, op == "le0" and k == -1) if abs(k) == 1 else None
    if len(parts) != 2 or c not in ((0, 1) if op == "le0" else (0,)):
        return None
    (x, k), (y, m) = parts.items()
    if {k, m} != {1, -1}:
        return None
    return (x, y, c == 1) if k == 1 else (y, x, c == 1)


def summed_reads(p: Term) -> dict[str, int]:
    """The leaves whose elements ``p`` adds up before it compares the sum, each with the sum of its coefficients' sizes."""
    found: dict[str, int] = {}
    for x in _parts(p):
        if x.op in ("le0", "eq0", "ne0") and plain_comparison(x.op, x.args[0]) is None:
            for part, k in as_linear(x.args[0])[0].items():
                for leaf in part.leaves:
                    found[leaf] = found.get(leaf, 0) + abs(k)
    return found


def _parts(p: Term) -> Iterator[Term]:
    """``p`` and every term in it, indices of reads included; one that stands twice comes twice."""
    stack: list[Any] = [p]
    while stack:
        x = stack.pop()
        if isinstance(x, tuple):
            stack += x
        elif isinstance(x, Term):
            yield x
            stack += x.args


def not_(p: Term) -> Term:
    if p == TRUE:
        return FALSE
    if p == FALSE:
        return TRUE
    if p.op == "not":
        return p.args[0]
    if p.op == "le0":  # not(t <= 0)  <=>  1 - t <= 0
        return _compare("le0", sub(const(1), p.args[0]))
    if p.op == "eq0":
        return Term("ne0", p.args)
    if p.op == "ne0":
        return Term("eq0", p.args)
    if p.op == "and":
        return or_(*(not_(a) for a in p.args))
    if p.op == "or":
        return and_(*(not_(a) for a in p.args))
    return Term("not", (p,))


def _join(op: str, parts: Iterable[Term], unit: Term, zero: Term) -> Term:
    dual = "or" if op == "and" else "and"
    flat: set[Term] = set()
    for p in parts:
        flat.update(p.args if p.op == op else (p,))
    flat.discard(unit)
    if zero in flat or any(not_(p) in flat for p in flat):
        return zero
    # Absorption: a and (a or b) is a; a or (a and b) is a.
    flat = {p for p in flat if not (p.op == dual and any(q in flat for q in p.args))}
    flat = {
        p for p in flat if not (p.op == dual and any(q != p and q.op == dual and set(q.args) < set(p.args) for q in flat))
    }
    if not flat:
        return unit
    if len(flat) == 1:
        return next(iter(flat))
    return Term(op, tuple(sorted(flat, key=lambda t: t.key)))


def and_(*parts: Term) -> Term:
    return _join("and", parts, TRUE, FALSE)


def or_(*parts: Term) -> Term:
    return _join("or", parts, FALSE, TRUE)


def conjuncts(p: Term) -> tuple[Term, ...]:
    if p == TRUE:
        return ()
    return p.args if p.op == "and" else (p,)


def disjuncts(p: Term) -> tuple[Term, ...]:
    if p == FALSE:
        return ()
    return p.args if p.op == "or" else (p,)


def implies(p: Term, q: Term) -> bool:
    """Whether p => q is certain from the form of the two alone."""
    if p in (q, FALSE) or q == TRUE:
        return True
    if q.op == "and":
        return all(implies(p, part) for part in q.args)
    if p.op == "or":
        return all(implies(part, q) for part in p.args)
    if q.op == "or" and any(implies(p, part) for part in q.args):
        return True
    return p.op == "and" and any(implies(part, q) for part in p.args)


def truth(t: Term) -> Term:
    """The predicate ``t != 0`` of a bool or number term."""
    if t.op in _BOOLEAN:
        return t
    if t.op == "where":
        chosen, a, b = t.args
        return or_(and_(chosen, truth(a)), and_(not_(chosen), truth(b)))
    if t.integer:
        return ne(t, const(0))
    value = constant_value(t)
    if value is not None:
        return const(value != 0)
    return call("ne", *sorted((t, const(0.0)), key=lambda x: x.key))


_BOOLEAN = frozenset(("true", "false", "and", "or", "not", "le0", "eq0", "ne0", "le", "lt", "eq", "ne", "bool"))


def is_predicate(t: Term) -> bool:
    return t.op in _BOOLEAN or (t.op == "where" and is_predicate(t.args[1]) and is_predicate(t.args[2]))


# ---------------------------------------------------------------- substitution


def substitute(t: Term, replace: Mapping[int, Term]) -> Term:
    """``t`` with every slot i in ``replace`` exchanged for a term, in normal form again."""
    return rebuild(t, lambda i: replace.get(i, slot(i)))


def rebuild(t: Term, at_slot: Callable[[int], Term]) -> Term:
    if not t.slots:
        return t
    if t.op == "slot":
        return at_slot(t.args[0])
    if t.op == "read":
        return Term("read", (t.args[0], tuple(rebuild(a, at_slot) for a in t.args[1])), t.integer)
    if t.op == "linear":
        parts, c = as_linear(t)
        start: Term = const(c)
        return reduce(add, (scale(rebuild(x, at_slot), k) for x, k in parts.items()), start)
    args = tuple(rebuild(a, at_slot) if isinstance(a, Term) else a for a in t.args)
    if t.op in ("le0", "eq0", "ne0"):
        inner = args[0]
        return _compare(t.op, inner if t.op == "le0" else _sign(inner))
    if t.op == "and":
        return and_(*args)
    if t.op == "or":
        return or_(*args)
    if t.op == "not":
        return not_(args[0])
    if t.op in ("eq", "ne", "add", "mul"):
        args = tuple(sorted(args, key=lambda x: x.key))
    return Term(t.op, args, t.integer)


def reads_at(p: Term, i: int) -> list[tuple[str, int]]:
    """The reads in ``p`` that have slot ``i`` as an index: leaf and position of the index."""
    reads = (x for x in _parts(p) if x.op == "read")
    return [(x.args[0], k) for x in reads for k, index in enumerate(x.args[1]) if index == slot(i)]


def project(p: Term, keep: frozenset[int]) -> Term:
    """A weakest predicate over ``keep`` alone that ``p`` implies (sound over-approximation of 'there is')."""
    if p.slots <= keep:
        return p
    if p.op == "and":
        return and_(*(project(part, keep) for part in p.args))
    if p.op == "or":
        return or_(*(project(part, keep) for part in p.args))
    return TRUE


# ---------------------------------------------------------------- printing


_INFIX = {"le": "<=", "lt": "<", "eq": "==", "ne": "!=", "and": "and", "or": "or", "add": "+", "sub": "-", "mul": "*"}


def render(t: Term, names: Mapping[int, str] | None = None) -> str:
    """Readable form, e.g. ``pos < lengths[b]``."""

    def go(x: Any) -> str:
        if not isinstance(x, Term):
            return str(x)
        if x.op == "slot":
            return (names or {}).get(x.args[0], f"i{x.args[0]}")
        if x.op in ("true", "false"):
            return x.op
        if x.op in ("const", "size"):
            return str(x.args[0])
        if x.op == "read":
            leaf, index = x.args
            return f"{leaf}[{', '.join(map(go, index))}]" if index else str(leaf)
        if x.op == "linear":
            return _render_sum(x, go)
        if x.op in ("le0", "eq0", "ne0"):
            return _render_comparison(x, go)
        if x.op in ("and", "or"):
            return "(" + f" {x.op} ".join(map(go, x.args)) + ")"
        if x.op == "not":
            return f"not {go(x.args[0])}"
        if x.op == "bool":
            return go(x.args[0])
        if x.op in _INFIX:
            return f"({go(x.args[0])} {_INFIX[x.op]} {go(x.args[1])})"
        return f"{x.op}({', '.join(map(go, x.args))})"

    return go(t)


def _render_sum(t: Term, go: Callable[[Any], str]) -> str:
    parts, c = as_linear(t)
    text = " + ".join(go(x) if k == 1 else f"{k}*{go(x)}" for x, k in parts.items())
    if not text:
        return str(c)
    return text if not c else f"{text} {'+' if c > 0 else '-'} {abs(c)}"


def _render_comparison(t: Term, go: Callable[[Any], str]) -> str:
    """``a - b + c <= 0`` reads better as ``a + c <= b``; ``+1`` becomes a strict sign."""
    parts, c = as_linear(t.args[0])
    sign = {"le0": "<=", "eq0": "==", "ne0": "!="}[t.op]
    left = {x: k for x, k in parts.items() if k > 0}
    right = {x: -k for x, k in parts.items() if k < 0}
    if t.op == "le0" and c > 0:
        sign, c = "<", c - 1
    lhs, rhs = _linear(left, max(c, 0)), _linear(right, max(-c, 0))
    return f"{go(lhs)} {sign} {go(rhs)}"
