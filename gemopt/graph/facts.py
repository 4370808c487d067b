"""Row facts, forward: ``(value, where)`` says that a tensor equals the constant ``value`` wherever ``where`` holds.

    masked_fill(x, m, v)        (v, m)                     where(c, x, v)      (v, not c)
    x * m                       (0, m == 0)                x + m               (-inf, m == -inf)
    f(x), f pointwise, pure     (f(v), w)                  x + y               (v + v', w and w')
    x @ W, no bias              (0, w) if v == 0           views               renamed
    softmax                     (0, w) if v == -inf or very negative

The last four need nothing but the operand's fact; the second row assumes that padding is finite (``x * 0 == 0``), which is
what the packed graph computes in any case. The gradient of a constant is zero, so a row under a fact asks nothing of what
it was computed from: the mask itself is never trained (`values.computable` refuses leaves that require a gradient).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from gemopt.graph import accesses
from gemopt.graph import terms as t
from gemopt.graph.mutation import tainted
from gemopt.graph.prologue import writable
from gemopt.graph.slots import Access, Info, argument, forward, is_tensor, op_name, shape_of
from gemopt.graph.terms import Term
from gemopt.graph.values import Values, rounded

_LOW = -100.0
HIDING_FILL = -9984.0  # -1e4 in bfloat16: exp() of it is 0 beside any score that a model makes


@dataclass(frozen=True)
class Fact:
    """The tensor equals ``value`` wherever ``where`` (over its slots) holds."""

    value: float
    where: Term


@dataclass(frozen=True)
class Exists:
    """Every softmax over ``slot`` meets an entry where ``predicate`` holds: then those filled with ``fill`` get weight 0."""

    predicate: Term
    sizes: tuple[sympy.Expr, ...]
    slot: int
    fill: float


class Analysis:
    """Dims, values and facts of every tensor of a captured graph: one forward walk.

    With ``finite_fills``, a very negative fill hides a score from a softmax as -inf does.
    """

    def __init__(self, graph: fx.Graph, finite_fills: bool = True) -> None:
        self.finite_fills = finite_fills
        self.exists: dict[fx.Node, Exists] = {}  # what the fact of a softmax over a finite fill assumes
        self.infos: dict[fx.Node, Info] = {}
        self.tainted: set[fx.Node] = tainted(graph)
        self.facts: dict[fx.Node, Fact] = {}
        self.values = Values(self.info, self.tainted)
        for node in graph.nodes:
            if node in self.tainted:
                self.infos[node] = accesses.opaque(node, self)
            elif is_tensor(node):
                self.infos[node] = accesses.info_of(node, self)
                self.values.visit(node)
                fact = _fact(node, self)
                if fact is not None and fact.where != t.FALSE and not math.isnan(fact.value):
                    self.facts[node] = replace(fact, value=rounded(fact.value, node.meta["val"].dtype))

    def info(self, node: fx.Node) -> Info:
        return self.infos[node]

    def value(self, node: fx.Node) -> Term | None:
        return self.values[node]

    def operands(self, node: fx.Node) -> list[Access]:
        return list(self.infos[node].accesses)


Rule = Callable[[fx.Node, Analysis], "Fact | None"]


def _fact(node: fx.Node, known: Analysis) -> Fact | None:
    if not node.meta["val"].dtype.is_floating_point:
        return None
    rule = _TABLE.get(op_name(node))
    if rule is not None:
        return rule(node, known)
    info = known.info(node)
    if info.kind in ("view", "expand", "repeat", "select", "slice", "gather") and info.accesses:
        return _renamed(info.accesses[0], known)
    if info.kind == "pointwise" and len(info.accesses) == 1:
        return _mapped(node, known)
    return None


def _renamed(access: Access, known: Analysis) -> Fact | None:
    fact = known.facts.get(access.operand)
    if fact is None:
        return None
    where = forward(fact.where, access)
    return None if where is None else Fact(fact.value, where)


def _mapped(node: fx.Node, known: Analysis) -> Fact | None:
    """A pure function of one tensor and constants: apply it to the constant."""
    (access,) = known.operands(node)
    fact = _renamed(access, known)
    target = node.target
    if fact is None or not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or any(
        isinstance(a, fx.Node) and a is not access.operand for a in (*node.args, *node.kwargs.values())
    ):
        return None
    sample = torch.tensor(fact.value, dtype=access.operand.meta["val"].dtype)
    args = fx.node.map_arg(node.args, lambda n: sample)
    kwargs = {k: v for k, v in fx.node.map_arg(dict(node.kwargs), lambda n: sample).items() if k != "device"}
    try:
        with torch.no_grad():
            value = target(*args, **kwargs)
    except Exception:  # a form that needs more than a scalar: no fact, which is always sound
        return None
    return Fact(float(value), fact.where) if value.ndim == 0 else None


def _masked_fill(node: fx.Node, known: Analysis) -> Fact | None:
    mask, value = known.values.operand(node, 1), node.args[2]
    constant = known.values[value] if isinstance(value, fx.Node) and is_tensor(value) else None
    if constant is not None:
        value = t.constant_value(constant)
    if mask is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _extended(node, known, float(value), t.truth(mask), 0)


def _where(node: fx.Node, known: Analysis) -> Fact | None:
    if len(node.args) != 3:
        return None
    mask = known.values.operand(node, 0)
    if mask is None:
        return None
    for position, where in ((1, t.truth(mask)), (2, t.not_(t.truth(mask)))):
        term = known.values.operand(node, position)
        value = None if term is None else t.constant_value(term)
        if value is not None:
            return _extended(node, known, float(value), where, 3 - position)
    return None


def _extended(node: fx.Node, known: Analysis, value: float, where: Term, kept: int) -> Fact:
    """Join with the fact of the operand that shows through where the mask does not apply."""
    x = node.args[kept]
    if isinstance(x, fx.Node) and is_tensor(x):
        access = known.info(node).access(x)
        old = None if access is None else _renamed(access, known)
        if old is not None and old.value == value:
            return Fact(value, t.or_(where, old.where))
    return Fact(value, where)


def _mul(node: fx.Node, known: Analysis) -> Fact | None:
    zeros = []
    for position, access in enumerate(known.operands(node)):
        value = known.values.through(access)
        fact = _renamed(access, known)
        if not all(map(math.isfinite, constants(value, fact))):
            return None  # inf * 0 is NaN
        if value is not None and node.args[position] is access.operand:
            zero = t.not_(t.truth(value))
            zeros += [zero] if zero.leaves else []  # not data: a shape (a triangle, a distance of 0), which is no padding
        if fact is not None and fact.value == 0:
            zeros.append(fact.where)
    if zeros:
        where = t.or_(*zeros)
        return None if where == t.FALSE else Fact(0.0, where)
    return _mapped(node, known) if len(known.operands(node)) == 1 else None


def _add(node: fx.Node, known: Analysis) -> Fact | None:
    operands = known.operands(node)
    if len(operands) == 1:
        return _mapped(node, known)
    if len(operands) != 2 or argument(node, "alpha", 1) != 1:
        return None
    signs = (1, -1 if op_name(node) == "aten.sub" else 1)
    facts = [_renamed(access, known) for access in operands]
    infinite, opposite = [], False
    for sign, access, fact in zip(signs, operands, facts, strict=True):
        value = known.values.through(access)
        opposite |= sign * math.inf in constants(value, fact)
        if value is not None and sign == 1:
            infinite.append(minus_infinity(value))
    if t.or_(*infinite) != t.FALSE:
        return None if opposite else Fact(-math.inf, t.or_(*infinite))  # inf - inf is NaN
    a, b = facts
    if a is None or b is None:
        return None
    return Fact(a.value + signs[1] * b.value, t.and_(a.where, b.where))


def constants(value: Term | None, fact: Fact | None = None) -> set[float]:
    """The constants that a tensor is known to hold somewhere."""
    found = {fact.value} if fact is not None else set()
    if value is None:
        return found
    if value.op in ("where", "add") and not t.is_predicate(value):
        branches = value.args[1:] if value.op == "where" else value.args
        return found.union(*(constants(a) for a in branches))
    number = t.constant_value(value)
    return found if number is None else found | {float(number)}


def minus_infinity(value: Term) -> Term:
    """Where an additive mask is -inf."""
    if value.op == "where":
        p, a, b = value.args
        return t.or_(t.and_(p, minus_infinity(a)), t.and_(t.not_(p), minus_infinity(b)))
    if value.op == "add":
        return t.or_(*(minus_infinity(a) for a in value.args))
    return t.const(t.constant_value(value) == -math.inf)


def _linear(node: fx.Node, known: Analysis) -> Fact | None:
    if len(node.args) > 2 and node.args[2] is not None:
        return None
    return _kept_zero(node, known)


def _kept_zero(node: fx.Node, known: Analysis) -> Fact | None:
    """Zero rows of the first operand stay zero rows."""
    fact = _renamed(known.operands(node)[0], known)
    return fact if fact is not None and fact.value == 0 else None


def _dropout(node: fx.Node, known: Analysis) -> Fact | None:
    return _kept_zero(node, known)


def _fills(node: fx.Node, known: Analysis) -> int:
    """How many steps behind a softmax may put a low number in some of its entries."""
    stack, seen, count = [node], set(), 0
    while stack:
        n = stack.pop()
        if n in seen or not is_tensor(n) or known.value(n) is not None:
            continue
        seen.add(n)
        info = known.info(n)
        if info.kind not in ("pointwise", "view", "expand"):
            continue
        numbers = [float(a) for a in n.args if isinstance(a, int | float) and not isinstance(a, bool)]
        for access in info.accesses:
            numbers += constants(known.values.through(access))
        count += any(abs(x) >= -_LOW for x in numbers)  # a large number may be subtracted
        stack += [a.operand for a in info.accesses]
    return count


def _lowered(node: fx.Node, known: Analysis) -> Fact | None:
    """Where a very negative number is added to what a softmax reads: as good as filled with it."""
    found, fill = [], -math.inf
    for access in known.operands(node):
        value = known.values.through(access)
        if value is not None and argument(node, "alpha", 1) == 1:
            hidden, largest = _hidden(value)
            found.append(hidden)
            fill = max(fill, largest)
    where = t.or_(*found)
    return None if where == t.FALSE else Fact(fill, where)


def _hidden(value: Term) -> tuple[Term, float]:
    """Where an additive mask is very negative, and the largest such number."""
    if value.op != "where" or t.is_predicate(value):
        number = t.constant_value(value)
        low = number is not None and number <= HIDING_FILL
        return (t.TRUE, float(number)) if low and number is not None else (t.FALSE, -math.inf)
    p, a, b = value.args
    (x, low_x), (y, low_y) = _hidden(a), _hidden(b)
    return t.or_(t.and_(p, x), t.and_(t.not_(p), y)), max(low_x, low_y)


def _softmax(node: fx.Node, known: Analysis) -> Fact | None:
    x = node.args[0]
    fact = known.facts.get(x) if isinstance(x, fx.Node) else None
    if fact is None and isinstance(x, fx.Node) and op_name(x) == "aten.add":
        fact = _lowered(x, known)
    if fact is None or argument(node, "dim") is None:
        return None
    slots = known.info(node).dim_slots()[argument(node, "dim") % len(shape_of(node))]
    if fact.value == -math.inf and "log" in op_name(node):
        return Fact(-math.inf, fact.where)
    if "log" in op_name(node) or not fact.where.slots & set(slots):
        return None
    if fact.value == -math.inf:
        return Fact(0.0, fact.where)
    if fact.value > HIDING_FILL or not known.finite_fills:
        return None
    if len(slots) != 1 or not writable(fact.where) or _fills(x, known) != 1:  # type: ignore[arg-type]
        return None  # of two fills, the lower one hides what the other leaves
    known.exists[node] = Exists(t.not_(fact.where), known.info(node).sizes, slots[0], fact.value)
    if len(x.users) == 1:  # type: ignore[union-attr]  # nobody else can tell what is added to the fill from the fill itself
        known.facts.setdefault(x, fact)  # type: ignore[arg-type]
    return Fact(0.0, fact.where)


def _loss(node: fx.Node, known: Analysis) -> Fact | None:
    """An ignored target contributes 0 to the unreduced loss."""
    if argument(node, "reduction") != 0 or known.info(node).kind != "loss":
        return None
    where = ignored_targets(node, known)
    return None if where is None else Fact(0.0, where)


def ignored_targets(node: fx.Node, known: Analysis) -> Term | None:
    """Over the target's slots: where a token loss ignores the row."""
    target = node.args[1]
    value = known.value(target) if isinstance(target, fx.Node) else None
    ignore = argument(node, "ignore_index")
    if value is None or not isinstance(ignore, int):
        return None
    if value.op == "where":  # where(mask, ids, -100): ignored where either branch is
        p, a, b = value.args
        return t.or_(t.and_(p, t.eq(a, t.const(ignore))), t.and_(t.not_(p), t.eq(b, t.const(ignore))))
    return t.eq(value, t.const(ignore))


_TABLE: dict[str, Rule] = {
    "aten." + name: rule
    for names, rule in (
        ("masked_fill", _masked_fill),
        ("where", _where),
        ("mul", _mul),
        ("add sub", _add),
        ("linear", _linear),
        ("dropout", _dropout),
        ("softmax _softmax special_softmax log_softmax _log_softmax", _softmax),
        ("cross_entropy_loss nll_loss_nd nll_loss", _loss),
        ("matmul mm bmm", _kept_zero),
    )
    for name in names.split()
}
