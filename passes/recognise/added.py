"""What a tensor that is added to the scores consists of: masks (0 or very negative) and biases.

A mask may be added to a bias once and the sum to the scores of every layer: sums are looked into.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import additive_mask
from gemopt.graph.copies import compose
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Exprs, argument, op_name
from gemopt.graph.terms import Term
from gemopt.passes.recognise.walk import is_transparent, maskings, renamed

_MOST_SUMMANDS = 8
Summand = tuple[fx.Node, Exprs]


@dataclass(frozen=True)
class Added:
    """``allowed`` and ``fill`` of the masks among the summands, and the summands that are biases."""

    allowed: Term
    fill: float
    biases: tuple[Summand, ...]


def read_added(known: Analysis, node: fx.Node, exprs: Exprs, largest_fill: float) -> Added:
    """Split ``node`` where that separates a mask whose fill is at most ``largest_fill``; else it is one bias."""
    parts, filled = _summands(known, node, exprs, largest_fill)
    masks = [_mask_of(known, part, largest_fill) for part in parts]
    found = [*filled, *(m for m in masks if m is not None)]
    if not found:
        return Added(t.TRUE, -float("inf"), ((node, exprs),))
    return Added(
        t.and_(*(allowed for allowed, _ in found)), max(fill for _, fill in found),
        tuple(part for part, m in zip(parts, masks, strict=True) if m is None),
    )  # fmt: skip


def _mask_of(known: Analysis, part: Summand, largest_fill: float) -> tuple[Term, float] | None:
    term = over_scores(known, *part)
    mask = None if term is None else additive_mask(term)
    return mask if mask is not None and mask[1] <= largest_fill else None


def over_scores(known: Analysis, node: fx.Node, exprs: Exprs) -> Term | None:
    """The value of a tensor over the score slots."""
    return renamed(known.value(node), exprs)


def _summands(
    known: Analysis, node: fx.Node, exprs: Exprs, largest_fill: float
) -> tuple[list[Summand], list[tuple[Term, float]]]:
    """The tensors that ``node`` is a sum of, and the masks that fill such a sum with very negative numbers."""
    parts: list[Summand] = []
    filled: list[tuple[Term, float]] = []
    stack: list[Summand] = [(node, exprs)]
    while stack and len(parts) + len(stack) < _MOST_SUMMANDS:
        at, over = stack.pop()
        info, name = known.info(at), op_name(at)
        if known.value(at) is not None:  # a mask as it is
            parts.append((at, over))
        elif name == "aten.add" and argument(at, "alpha", 1) == 1 and len(info.accesses) == 2:
            stack += [(a.operand, compose(a, over)) for a in info.accesses]
        elif is_transparent(at, known):
            (access,) = info.accesses[:1]
            stack.append((access.operand, compose(access, over)))
        elif masked := _masked(known, at, over):
            allowed, fill, kept = masked
            if fill > largest_fill:
                parts.append((at, over))
            else:
                filled.append((allowed, fill))
                stack.append(kept)
        else:
            parts.append((at, over))
    return parts + stack, filled


def _masked(known: Analysis, at: fx.Node, over: Exprs) -> tuple[Term, float, Summand] | None:
    """(where it is kept, what it is elsewhere, the tensor) of ``masked_fill`` and ``where`` with a constant."""
    for condition_at, kept_at, fill_at, keep_where in maskings(at):
        condition, fill = renamed(known.values.operand(at, condition_at), over), known.values.operand(at, fill_at)
        number = None if fill is None else t.constant_value(fill)
        access = next((a for a in known.info(at).accesses if a.operand is at.args[kept_at]), None)
        if condition is not None and number is not None and access is not None:
            chosen = t.truth(condition)
            return chosen if keep_where else t.not_(chosen), float(number), (access.operand, compose(access, over))
    return None
