"""The semantic attention record: what a piece of graph computes, whatever it was spelled with.

    out = dropout(softmax(scale * Q K^T + [0 where mask else -inf])) V

Everything is expressed over the *score slots*: the slots of the softmax, of which ``query`` and ``key`` are the two token
axes and the others are batch axes (samples, heads). `Site.mask` is a predicate over them; `Site.parts` sorts its conjuncts
into a key mask, a query mask and a band ``-left <= key - query <= right``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.slots import Exprs
from gemopt.graph.terms import Term

# exp() of anything 104 below the row maximum is 0 in fp32, so a finite fill acts as -inf while scores stay this far above.
EXP_UNDERFLOW = 104.0


@dataclass(frozen=True)
class Band:
    """``-left <= key - query <= right`` in original positions; None is unbounded."""

    left: int | None = None
    right: int | None = None

    @property
    def causal(self) -> bool:
        return self.right == 0


@dataclass(frozen=True)
class MaskParts:
    """The conjuncts of a mask by the token axes they speak of."""

    key: Term
    query: Term
    band: Band
    unknown: Term | None = None


@dataclass(frozen=True)
class Site:
    """One softmax attention. ``*_exprs`` give operand slots over score slots (None: the contracted feature axis)."""

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    q_exprs: Exprs
    k_exprs: Exprs
    v_exprs: Exprs
    out_slots: tuple[int | None, ...]  # score slot of each slot of ``out``; None: a value feature
    query: int
    key: int
    mask: Term
    scale: float
    dropout: float
    fill: float
    spelling: str
    score_dtype: torch.dtype
    interior: tuple[fx.Node, ...] = field(default=())

    @property
    def batch(self) -> frozenset[int]:
        return frozenset(s for s in self.out_slots if s is not None) - {self.query, self.key}

    @property
    def parts(self) -> MaskParts:
        return split_mask(self.mask, self.query, self.key)


def split_mask(mask: Term, query: int, key: int) -> MaskParts:
    keys: list[Term] = []
    queries: list[Term] = []
    left: int | None = None
    right: int | None = None
    for part in t.conjuncts(mask):
        if query not in part.slots:
            keys.append(part)
        elif key not in part.slots:
            queries.append(part)
        else:
            bound = _band(part, query, key)
            if bound is None:
                return MaskParts(t.TRUE, t.TRUE, Band(), part)
            side, width = bound
            if side == "right":
                right = width if right is None else min(right, width)
            else:
                left = width if left is None else min(left, width)
    return MaskParts(t.and_(*keys), t.and_(*queries), Band(left, right))


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
