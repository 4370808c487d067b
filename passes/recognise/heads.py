"""Heads with score functions of their own: ``cat([act_0(s[:, :a]), act_1(s[:, a:])], 1)``, or a stack of ``act_h(s[:, h])``.

Each part is walked on its own until it leaves the slice of the scores that it takes. The parts are one score function where
they take their own places of the same tensor, and agree in all but the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import LEAK, ByHead
from gemopt.graph.copies import compose, owned
from gemopt.graph.slots import Access, Exprs, argument, op_name, shape_of
from gemopt.passes.recognise.walk import NoMatch, Walk

_PARTS = ("slice", "select")
Step = Callable[[Walk], bool]


def step_by_head(walk: Walk, step: Step) -> None:
    """Past parts of the heads that are joined; ``step`` is a step of weights."""
    joined = walk.at
    axis = _axis(walk)
    if axis is None:
        raise NoMatch(joined, "weights are joined over an axis that is not one of heads of fixed number")
    names: list[str] = []
    parts: list[Walk] = []
    exprs: list[Exprs] = []
    for access, first, count in _places(walk):
        part = replace(
            walk, at=access.operand, exprs=compose(access, walk.exprs), factors=[], interior=[],
            biases=[], lifted=[], q_factors=[],
        )  # fmt: skip
        _to_scores(part, step)
        names += [part.score] * count
        parts.append(part)
        exprs.append(_over_all_heads(part.exprs, axis, first, count))
    if any(p.at is not parts[0].at or e != exprs[0] for p, e in zip(parts, exprs, strict=True)):
        raise NoMatch(joined, "heads are joined that do not come from their own places of the same scores")
    if not _whole(parts[0].at, exprs[0], walk):
        raise NoMatch(joined, "parts of the scores are cut on another axis than that of the heads, or do not cover it")
    if any(_else(p) != _else(parts[0]) for p in parts):
        raise NoMatch(joined, "heads differ in more than their activation")
    one = parts[0]
    walk.score, walk.slope, walk.by_head = ", ".join(dict.fromkeys(names)), one.slope, ByHead(axis, tuple(names))
    if len(set(names)) == 1:
        walk.by_head = None
    walk.mask, walk.weight_mask, walk.post_scale, walk.dropout = one.mask, one.weight_mask, one.post_scale, one.dropout
    walk.factors += one.factors
    walk.interior += [joined, *(n for p in parts for n in p.interior)]
    walk.at, walk.exprs = one.at, exprs[0]


def _axis(walk: Walk) -> int | None:
    """The score slot of fixed size that the joined dim is, other than the keys."""
    info, node = walk.known.info(walk.at), walk.at
    slots = info.dim_slots()[argument(node, "dim") % len(info.dims)]
    expr = walk.exprs[slots[0]] if len(slots) == 1 else None
    if expr is None or expr.op != "slot" or expr.args[0] == walk.key:
        return None
    return expr.args[0] if walk.sizes[expr.args[0]].is_Integer else None


def _places(walk: Walk) -> Iterator[tuple[Access, int, int]]:
    """The access of each part, its first head, and how many it has."""
    node, at = walk.at, 0
    info = walk.known.info(node)
    dim = argument(node, "dim") % len(info.dims)
    for access in info.accesses:
        count = 1 if info.kind == "stack" else int(shape_of(access.operand)[dim])
        yield access, at, count
        at += count


def _to_scores(part: Walk, step: Step) -> None:
    """Over the activation (or none) to the tensor that the part is a slice of."""

    def sliced(n: fx.Node) -> bool:
        return part.known.info(n).kind in _PARTS

    while not part.score:
        if sliced(part.at):
            part.score = "identity"
        elif not step(part):
            name = op_name(part.at) or part.at.op
            raise NoMatch(part.at, f"weights of some heads come from {name}, which is not understood")
    if part.by_head is not None:
        raise NoMatch(part.at, "heads are joined twice")
    while True:
        if sliced(part.at):
            part.move(part.known.info(part.at).accesses[0])
        elif not part.step_pointwise_view():
            return


def _over_all_heads(exprs: Exprs, axis: int, first: int, count: int) -> Exprs:
    """A part of one head reads a constant place: that of its head, if the part is in its own place."""
    if count > 1:
        return exprs
    return tuple(t.slot(axis) if e is not None and t.constant_value(e) == first else e for e in exprs)


def _whole(scores: fx.Node, exprs: Exprs, walk: Walk) -> bool:
    """Whether the scores that the parts are slices of are as large as the joined ones."""
    sizes = [walk.sizes[s] for s in owned(exprs, walk.sizes) or ()]
    return sympy.prod(sizes) == sympy.prod(walk.known.info(scores).sizes)


def _else(part: Walk) -> tuple[object, ...]:
    """What a part of the heads says besides its activation."""
    slope = part.slope if part.score == "leaky_relu" else LEAK
    told = (part.mask, part.weight_mask, part.post_scale, part.dropout, tuple(part.factors))
    return (*told, slope, part.score == "softmax")
