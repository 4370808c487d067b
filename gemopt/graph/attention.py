"""The semantic attention record: what a piece of graph computes, whatever it was spelled with.

    out = post_scale * factors * dropout(score(scale * Q K^T + biases, where mask)) V

``score`` is a softmax over the keys that the mask allows, or an activation times the mask. Everything is expressed over the
*score slots*: the slots of the weights, of which ``query`` and ``key`` are the token axes and the others are batch axes
(samples, heads). An operand need not have every batch axis: a key head may serve several query heads, and learned queries
serve every sample. `Site.mask` is a predicate over the score slots; `Site.parts` sorts its conjuncts into a key mask, a
query mask, a band ``-left <= key - query <= right``, blocks that see themselves alone, and a rest that only a dense mask
can express.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gemopt.graph import terms as t
from gemopt.graph.slots import Exprs
from gemopt.graph.terms import Term

# exp() of anything 104 below the row maximum is 0 in fp32, so a finite fill acts as -inf while scores stay this far above.
EXP_UNDERFLOW = 104.0

LEAK = 0.01  # the slope of leaky_relu that kernels have

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
}


def activate(name: str, scores: Tensor) -> Tensor:
    """The activation of a score function that is not a softmax, as torch computes it."""
    return _ACTIVATIONS[name](scores)


@dataclass(frozen=True)
class Band:
    """``-left <= key - query <= right`` in original positions; None is unbounded."""

    left: int | None = None
    right: int | None = None

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def unbounded(self) -> bool:
        return self.left is None and self.right is None


@dataclass(frozen=True)
class MaskParts:
    """The conjuncts of a mask by the token axes they speak of; ``rest`` is what none of the others can say."""

    key: Term
    query: Term
    band: Band
    rest: Term = t.TRUE
    block: int | None = None  # ⌊query / block⌋ = ⌊key / block⌋


@dataclass(frozen=True)
class Joined:
    """A tensor that joins the scores or the weights, with its slots over the score slots.

    As a bias it is multiplied by ``coefficient`` and added to the scaled scores. As a factor it multiplies (or, with
    ``divide``, divides) the weights and has no key axis; a factor may also be a size (a SymInt node).
    """

    node: fx.Node
    exprs: Exprs
    coefficient: float = 1.0
    divide: bool = False


@dataclass(frozen=True)
class ByHead:
    """Activations that differ along one axis of heads: a name for each index of a score slot."""

    slot: int
    names: tuple[str, ...]

    def over(self, heads: Sequence[int], sizes: Sequence[sympy.Expr]) -> list[str]:
        """A name for each head of these axes, row-major."""
        inner = math.prod(int(sizes[h]) for h in heads[heads.index(self.slot) + 1 :])
        outer = math.prod(int(sizes[h]) for h in heads[: heads.index(self.slot)])
        return [name for _ in range(outer) for name in self.names for _ in range(inner)]


@dataclass(frozen=True)
class Site:
    """One attention. ``*_exprs`` give operand slots over score slots (None: the contracted feature axis).

    ``query`` is None where every sequence has a single query. ``q_factors`` scale the queries before the product.
    """

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    q_exprs: Exprs
    k_exprs: Exprs
    v_exprs: Exprs
    out_slots: tuple[int | None, ...]  # score slot of each slot of ``out``; None: a value feature
    query: int | None
    key: int
    mask: Term
    scale: float
    dropout: float
    fill: float
    spelling: str
    score_dtype: torch.dtype
    interior: tuple[fx.Node, ...] = field(default=())
    sizes: tuple[sympy.Expr, ...] = ()  # of the score slots
    widths: sympy.Expr = sympy.S.Zero  # Dqk + Dv
    score: str = "softmax"  # with ``by_head``, its names joined
    by_head: ByHead | None = None
    slope: float = LEAK  # of a leaky_relu
    post_scale: float = 1.0
    biases: tuple[Joined, ...] = ()
    factors: tuple[Joined, ...] = ()
    q_factors: tuple[Joined, ...] = ()

    @property
    def batch(self) -> frozenset[int]:
        return frozenset(s for s in self.out_slots if s is not None) - {self.query, self.key}

    @property
    def parts(self) -> MaskParts:
        return split_mask(self.mask, self.query, self.key)

    @property
    def joined(self) -> tuple[Joined, ...]:
        return (*self.biases, *self.factors, *self.q_factors)


def score_slots(exprs: Exprs) -> dict[int, int]:
    """Score slot -> operand slot, where an operand slot is one score slot."""
    return {e.args[0]: i for i, e in enumerate(exprs) if e is not None and e.op == "slot"}


def atoms(expr: Term, sizes: Sequence[sympy.Expr]) -> list[int] | None:
    """The score slots that an operand slot consists of, row-major: one, or several where the scores split it (query heads
    into key heads and their share); None for any other term."""
    if expr.op == "slot":
        return [expr.args[0]]
    coefficients, c = t.as_linear(expr)
    if c != 0 or not coefficients or any(x.op != "slot" for x in coefficients):
        return [] if t.constant_value(expr) == 0 else None
    ordered = sorted(coefficients.items(), key=lambda item: -item[1])
    slots = [x.args[0] for x, _ in ordered]
    stride: sympy.Expr = sympy.Integer(1)
    for s, (_, k) in zip(reversed(slots), reversed(ordered), strict=True):
        if stride != k:
            return None
        stride = stride * sizes[s]
    return slots


def split_mask(mask: Term, query: int | None, key: int) -> MaskParts:
    keys: list[Term] = []
    queries: list[Term] = []
    rest: list[Term] = []
    left: int | None = None
    right: int | None = None
    block: int | None = None
    for part in t.conjuncts(mask):
        if query not in part.slots:
            keys.append(part)
        elif key not in part.slots:
            queries.append(part)
        else:
            assert query is not None
            side, width = _band(part, query, key) or _block(part, query, key) or ("rest", 0)
            if side == "right":
                right = width if right is None else min(right, width)
            elif side == "left":
                left = width if left is None else min(left, width)
            elif side == "block" and block in (None, width):
                block = width
            else:
                rest.append(part)
    return MaskParts(t.and_(*keys), t.and_(*queries), Band(left, right), t.and_(*rest), block)


def same_block(query: int, key: int, block: int) -> Term:
    """``⌊query / block⌋ = ⌊key / block⌋``."""
    return t.eq(*(t.call("floordiv", t.slot(s), block, integer=True) for s in (query, key)))


def _block(part: Term, query: int, key: int) -> tuple[str, int] | None:
    """``⌊query / size⌋ = ⌊key / size⌋``: queries see keys inside blocks of that size alone."""
    if part.op != "eq0":
        return None
    sizes = [x.args[1] for x in t.as_linear(part.args[0])[0] if x.op == "floordiv"]
    found = sizes and isinstance(sizes[0], int) and sizes[0] > 0 and part == same_block(query, key, sizes[0])
    return ("block", sizes[0]) if found else None


def _band(part: Term, query: int, key: int) -> tuple[str, int] | None:
    """``key - query <= right`` or ``query - key <= left``, with a bound that is a number >= 0."""
    if part.op != "le0":
        return None
    coefficients, c = t.as_linear(part.args[0])
    q, k = coefficients.get(t.slot(query)), coefficients.get(t.slot(key))
    if len(coefficients) != 2 or q is None or k is None or q + k != 0 or abs(k) != 1 or c > 0:
        return None
    return ("right", -c) if k == 1 else ("left", -c)


def additive_mask(value: Term) -> tuple[Term, float] | None:
    """(allowed, largest fill) of a term that is 0 where allowed and very negative elsewhere."""
    number = t.constant_value(value)
    if number is not None:
        return (t.TRUE, -float("inf")) if number == 0 else None
    if value.op == "add":
        parts = [additive_mask(a) for a in value.args]
        if any(p is None for p in parts):
            return None
        known = [p for p in parts if p is not None]
        return t.and_(*(p for p, _ in known)), max(f for _, f in known)
    if value.op != "where":
        return None
    p, a, b = value.args
    for allowed, zero, fill in ((p, a, b), (t.not_(p), b, a)):
        number = t.constant_value(fill)
        inner = additive_mask(zero)
        if inner is not None and number is not None and number < 0:
            return t.and_(allowed, inner[0]), max(float(number), inner[1])
    return None
