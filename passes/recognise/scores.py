"""From the score function back to the product of queries and keys: scales, masks and biases.

The softmax does not change when a tensor without a key axis is added to its scores, so such a tensor (the row maximum, a
bias per query) drops out. A scale without a key axis moves to the queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Joined, activate, additive_mask
from gemopt.graph.copies import owned
from gemopt.graph.facts import HIDING_FILL, Analysis, constants
from gemopt.graph.slots import argument, is_tensor, op_name
from gemopt.graph.terms import Term
from gemopt.graph.values import lift
from gemopt.passes.recognise.added import over_scores, read_added
from gemopt.passes.recognise.walk import MASK_HINT, NoMatch, Walk, is_binary, maskings, slots_of

_BOUNDING = ("aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.remainder")
_UNBOUNDED = ("aten.log", "aten.log2", "aten.log10", "aten.reciprocal", "aten.rsqrt")
_MADE_OF_OPERANDS = (
    ["pointwise", "view", "expand", "select", "slice", "gather"] + ["cat", "stack", "repeat", "index", "triangle"]
)  # fmt: skip
SMALLEST_SCALED_FILL = -1000.0  # the same, divided by sqrt(head_dim) together with the scores


def step_scores(walk: Walk) -> bool:
    """Read one step as a fact; False when the node is not a step that scores take."""
    if walk.step_pointwise_view():
        return True
    node, name = walk.at, op_name(walk.at)
    if walk.known.info(node).kind != "pointwise":
        return False
    choices = maskings(node)
    for condition, kept, fill_at, keep_where in choices:
        if len(choices) == 1 or walk.number_of(fill_at) is not None:
            return _masked(walk, walk.term_of(condition), kept, fill_at, keep_where)
    if choices:
        raise NoMatch(node, "neither side of the where is a constant")
    if name in ("aten.mul", "aten.div"):
        return _scaled(walk, divide=name == "aten.div")
    if name == "aten.neg":
        walk.scale = -walk.scale
        walk.move(walk.known.info(node).accesses[0])
        return True
    if name in ("aten.add", "aten.sub"):
        return _added(walk)
    return False


# ---------------------------------------------------------------- masks


def _masked(walk: Walk, condition: Term | None, kept: int, fill_at: int, keep_where: bool) -> bool:
    node = walk.at
    if condition is None:
        raise NoMatch(node, "the mask is not an expression of the graph's inputs that gemopt can follow", MASK_HINT)
    fill = walk.number_of(fill_at)
    if fill is None:
        raise NoMatch(node, "the value that masks the scores is not a constant")
    access = walk.access_of(kept)
    if access is None:
        raise NoMatch(node, "the mask replaces constants, not scores")
    apply_fill(walk, node, fill)
    allowed = t.truth(condition)
    walk.mask = t.and_(walk.mask, allowed if keep_where else t.not_(allowed))
    walk.move(access)
    return True


def apply_fill(walk: Walk, node: fx.Node, fill: float) -> None:
    """Check that a fill hides a score from the score function."""
    if walk.unknown_scale:
        raise NoMatch(node, "masked scores are scaled by a tensor afterwards, so that their value is not known")
    effective = fill * walk.scale + sum(map(_largest, [(walk, b) for b in walk.biases]))
    if walk.score != "softmax":
        if walk.biases or not _vanishes(walk, effective):
            raise NoMatch(node, f"masked scores are set to {fill:g}, which does not become 0 by {walk.score}")
        return
    if not _hides(fill, effective):
        raise NoMatch(
            node, f"masked scores are set to {fill:g}, which still leaves weight on padding",
            "use -inf, torch.finfo(dtype).min or a value of -1e4 or less",
        )  # fmt: skip
    walk.fill = max(walk.fill, effective)


def _hides(fill: float, effective: float) -> bool:
    """Whether scores set to ``fill``, ``effective`` once scaled, get no weight beside others."""
    return effective <= HIDING_FILL or (fill <= HIDING_FILL and effective <= SMALLEST_SCALED_FILL)


def _largest(added: tuple[Walk, Joined]) -> float:
    """The most that a bias of known values raises a score by. Others are trusted to be of the size of scores."""
    walk, bias = added
    term = over_scores(walk.known, bias.node, bias.exprs)
    found = [bias.coefficient * c for c in constants(term)] if term is not None else []
    return max([0.0, *found])


def check_fill(node: fx.Node, known: Analysis, fill: float, biases: Sequence[Joined]) -> None:
    """Refuse a finite fill beside a bias that may be as low: a mask of unknown values (one of data, say) that is filled with
    such a number too. Where it hides what the other one leaves, eager shares the weight out among all hidden keys."""
    if fill == -math.inf:
        return
    for bias in biases:
        if isinstance(bias.node, fx.Node) and is_tensor(bias.node) and _may_be_low(bias.node, known):
            raise NoMatch(
                node, f"masked scores are set to {fill:g}, and a mask that gemopt cannot follow makes others as low",
                "use -inf for one of the two masks, or join them before they fill",
            )  # fmt: skip


def _may_be_low(bias: fx.Node, known: Analysis) -> bool:
    """Whether a number as large as a fill, or a logarithm, takes part in what is added to the scores. What layers compute,
    and the elements of inputs, are trusted to be of the size of scores."""
    stack, seen = [bias], set()
    while stack:
        node = stack.pop()
        if node in seen or node not in known.infos or not is_tensor(node):
            continue
        seen.add(node)
        value = known.value(node)
        if any(abs(x) >= -SMALLEST_SCALED_FILL for x in (_numbers_in(node, known) if value is None else constants(value))):
            return True
        if value is None and known.info(node).kind in _MADE_OF_OPERANDS:
            stack += [a.operand for a in known.operands(node)]
    return False


def _numbers_in(node: fx.Node, known: Analysis) -> set[float]:
    """Sizes that the op of ``node`` may give to what it computes from numbers of the size of 1."""
    name, info = op_name(node), known.info(node)
    if name == "aten.constant_pad_nd":
        return {float(argument(node, "value") or 0)}
    if info.kind != "pointwise" or name in _BOUNDING:
        return set()
    if name == "aten.div":
        given = [a for a in node.args[1:2] if isinstance(a, int | float)]
        return {1 / abs(a) if a else math.inf for a in given} | _scalars(node)
    if name in _UNBOUNDED and not _at_least_one(node.args[0]):
        return {math.inf}
    given = [*node.args, *node.kwargs.values()]  # type: ignore[list-item]
    return {float(a) for a in given if isinstance(a, int | float) and not isinstance(a, bool)} | _scalars(node)


def _scalars(node: fx.Node) -> set[float]:
    """A buffer of one element that multiplies may hold any number."""
    if op_name(node) not in ("aten.mul", "aten.div"):
        return set()
    inputs = [n for n in node.all_input_nodes if is_tensor(n) and n.op in ("placeholder", "get_attr")]
    return {math.inf for n in inputs if n.meta["val"].ndim == 0 and not n.meta["val"].requires_grad}


def _at_least_one(node: object) -> bool:
    """``x + 1`` of a distance, say: its logarithm is no mask."""
    if not isinstance(node, fx.Node) or op_name(node) != "aten.add":
        return False
    return any(isinstance(a, int | float) and a >= 1 for a in node.args)


def _vanishes(walk: Walk, score: float) -> bool:
    """Whether a score becomes the weight 0, in fp64 too, which is what numbers are compared with."""
    dtypes = (walk.at.meta["val"].dtype, torch.float64)
    return all(float(activate(name, torch.tensor(score, dtype=d))) == 0 for name in walk.scores for d in dtypes)


# ---------------------------------------------------------------- scales


def _scaled(walk: Walk, divide: bool) -> bool:
    node = walk.at
    if argument(node, "rounding_mode") is not None:
        raise NoMatch(node, "scores are rounded")
    for position in (0,) if divide else (0, 1):
        access, factor = walk.access_of(position), walk.number_of(1 - position)
        if access is not None and factor is not None:
            if factor == 0:
                raise NoMatch(node, "scores are multiplied or divided by zero")
            walk.scale = walk.scale / factor if divide else walk.scale * factor
            walk.move(access)
            return True
    if not divide and walk.score != "softmax" and _masked_product(walk):
        return True
    for position in (0,) if divide else (0, 1):
        access, scale = walk.access_of(position), walk.joined(1 - position, divide=divide)
        if access is None or scale is None or walk.key in slots_of(scale.exprs):
            continue
        if access.operand.meta["val"].dtype != node.meta["val"].dtype:
            raise NoMatch(node, "a scale changes the dtype of the scores")
        walk.q_factors.append(scale)
        walk.unknown_scale = True
        walk.move(access)
        return True
    raise NoMatch(node, "scores are scaled by a tensor that varies over keys")


def _masked_product(walk: Walk) -> bool:
    """``act(scores * mask)`` is ``act(scores) * mask`` where ``act(0) == 0``."""
    for position in (0, 1):
        term, access = walk.term_of(1 - position), walk.access_of(position)
        if term is None or access is None or not is_binary(term) or walk.key not in term.slots or walk.biases:
            continue
        if not _vanishes(walk, 0.0):
            continue
        walk.mask = t.and_(walk.mask, t.truth(term))
        walk.move(access)
        return True
    return False


# ---------------------------------------------------------------- sums


def _added(walk: Walk) -> bool:
    node = walk.at
    if argument(node, "alpha", 1) != 1:
        raise NoMatch(node, "something is added to the scores with a factor of its own")
    subtract = op_name(node) == "aten.sub"
    for position in (0,) if subtract else (0, 1):
        if walk.access_of(position) is None:
            continue
        if _mask_added(walk, position, subtract) or _constant_added(walk, position):
            return True
    if walk.joined(0) is not None and walk.joined(1) is not None:
        return _bias_added(walk, subtract)
    raise NoMatch(node, "something is added to the scores that is neither a mask nor a bias over queries and keys")


def _mask_added(walk: Walk, position: int, subtract: bool) -> bool:
    term, access = walk.term_of(1 - position), walk.access_of(position)
    if subtract and term is not None:
        term = lift(lambda a, _: -a, term, t.const(0))
    mask = None if term is None else additive_mask(term)
    if mask is None or access is None or not _hides(mask[1], mask[1] * walk.scale):
        return False
    if mask[0] != t.TRUE:
        apply_fill(walk, walk.at, mask[1])
    walk.mask = t.and_(walk.mask, mask[0])
    walk.move(access)
    return True


def _constant_added(walk: Walk, position: int) -> bool:
    """What does not vary over keys leaves a softmax as it is."""
    access = walk.access_of(position)
    if access is None or walk.score != "softmax":
        return False
    number = walk.number_of(1 - position)
    if number is not None and walk.fill > -math.inf and -abs(number * walk.scale) <= SMALLEST_SCALED_FILL:
        raise NoMatch(walk.at, f"{number:g} is added to scores of which masked ones are set to {walk.fill:g} afterwards")
    if number is None:
        joined = walk.joined(1 - position)
        if joined is None or walk.key in slots_of(joined.exprs):
            return False
        own = walk.joined(position)
        if own is None or walk.key not in slots_of(own.exprs):
            return False
        if walk.fill > -math.inf:
            walk.lifted.append(joined)
    walk.move(access)
    return True


def _bias_added(walk: Walk, subtract: bool) -> bool:
    """Of two summands, the scores are the one that comes from a product of queries and keys."""
    node = walk.at
    scores = _scores_side(walk)
    if scores is None:
        raise NoMatch(node, "of two tensors that are added, none or both are a product of queries and keys")
    if walk.unknown_scale:
        raise NoMatch(node, "a bias is scaled by a tensor together with the scores")
    if not all(is_tensor(a) for a in node.args[:2] if isinstance(a, fx.Node)):
        raise NoMatch(node, "a size is added to the scores")
    access, bias = walk.access_of(scores), walk.joined(1 - scores)
    assert access is not None and bias is not None
    join_added(walk, bias, -1.0 if subtract and scores == 0 else 1.0)
    if subtract and scores == 1:
        walk.scale = -walk.scale
    walk.move(access)
    return True


def join_added(walk: Walk, added: Joined, factor: float) -> None:
    """Masks and biases of a tensor that is added to the scores ``factor`` times."""
    positive = walk.scale * factor > 0
    largest = max(HIDING_FILL / walk.scale, min(HIDING_FILL, SMALLEST_SCALED_FILL / walk.scale)) if positive else -math.inf
    read = read_added(walk.known, added.node, added.exprs, largest)
    if read.allowed != t.TRUE:
        apply_fill(walk, walk.at, read.fill)
        walk.mask = t.and_(walk.mask, read.allowed)
    for node, exprs in read.biases:
        term = over_scores(walk.known, node, exprs)
        if term is not None and any(map(math.isinf, constants(term))):
            raise NoMatch(walk.at, "an infinite value is added to scores that it does not mask")
        if owned(exprs, walk.sizes) is None or any(e is None for e in exprs):
            raise NoMatch(walk.at, "a bias is not laid out over queries and keys")
        walk.biases.append(Joined(node, exprs, factor * walk.scale))


def _scores_side(walk: Walk) -> int | None:
    from gemopt.passes.recognise.products import leads_to_product

    found = [p for p in (0, 1) if _full(walk, p) and leads_to_product(walk.at.args[p], walk.known)]  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else None


def _full(walk: Walk, position: int) -> bool:
    joined = walk.joined(position)
    return joined is not None and walk.key in slots_of(joined.exprs)
