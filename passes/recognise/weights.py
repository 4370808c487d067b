"""From the weights back to the score function: dropout, masks, normalisation, then a softmax or an activation.

Softmax is met as ``softmax``, ``exp(log_softmax)`` or ``e / e.sum(keys)`` with ``e = exp(..)``; an activation by its op, as
``relu(x) ** 2`` or ``x * sigmoid(x)``. Between it and the product with the values, a factor without a key axis leaves the
product; one that varies over keys and is no mask is refused.
"""

from __future__ import annotations

from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.copies import compose
from gemopt.graph.slots import Access, Exprs, argument, is_tensor, op_name
from gemopt.graph.terms import Term
from gemopt.passes.recognise.heads import step_by_head
from gemopt.passes.recognise.walk import CASTS, MASK_HINT, VIEWS, NoMatch, Walk, is_binary, is_transparent, slots_of

_SOFTMAX = ("aten.softmax", "aten._softmax", "aten.special_softmax")
_LOG_SOFTMAX = ("aten.log_softmax", "aten._log_softmax", "aten.special_log_softmax")
ACTIVATIONS = {
    "aten.relu": "relu",
    "aten.silu": "silu",
    "aten.sigmoid": "sigmoid",
    "aten.hardswish": "hardswish",
    "aten.gelu": "gelu",
    "aten.leaky_relu": "leaky_relu",
    "aten.clamp": "",  # no activation of ours, listed so that the refusal is told
    "aten.clamp_min": "",
}


def step_weights(walk: Walk) -> bool:
    """One step back; sets ``walk.score`` when it passes the score function. False: not a step that weights take."""
    node = walk.at
    if not is_tensor(node):
        return False
    if _score_function(walk) or walk.step_pointwise_view():
        return True
    if walk.known.info(node).kind in ("cat", "stack"):
        step_by_head(walk, step_weights)
        return True
    if walk.known.info(node).kind != "pointwise":
        return False
    name = op_name(node)
    if name == "aten.dropout":
        return _dropout(walk)
    if name == "aten.nan_to_num":  # a row without keys is NaN before and 0 after, as in the op
        if argument(node, "nan") not in (None, 0, 0.0):
            raise NoMatch(node, "NaN weights become a number other than 0")
        walk.move(walk.known.info(node).accesses[0])
        return True
    if name == "aten.masked_fill":
        return _masked(walk, walk.term_of(1), 0, fill_at=2, keep_where=False)
    if name == "aten.where" and len(node.args) == 3:
        kept, fill_at = (1, 2) if walk.number_of(2) is not None else (2, 1)
        return _masked(walk, walk.term_of(0), kept, fill_at, keep_where=kept == 1)
    if name in ("aten.mul", "aten.div"):
        return _multiplied(walk, divide=name == "aten.div")
    return False


def _dropout(walk: Walk) -> bool:
    node = walk.at
    p, training = node.args[1], node.args[2]
    if training and p != 0:
        if walk.dropout:
            raise NoMatch(node, "dropout is applied twice to the attention weights")
        walk.dropout = float(p)  # type: ignore[arg-type]
    walk.move(walk.known.info(node).accesses[0])
    return True


# ---------------------------------------------------------------- masks and factors on weights


def _masked(walk: Walk, condition: Term | None, kept: int, fill_at: int, keep_where: bool) -> bool:
    node = walk.at
    if condition is None:
        raise NoMatch(node, "the mask is not an expression of the graph's inputs that gemopt can follow", MASK_HINT)
    if walk.number_of(fill_at) != 0:
        raise NoMatch(node, "masked weights are set to something other than 0")
    access = walk.access_of(kept)
    if access is None:
        raise NoMatch(node, "the mask replaces constants, not weights")
    allowed = t.truth(condition)
    walk.weight_mask = t.and_(walk.weight_mask, allowed if keep_where else t.not_(allowed))
    walk.move(access)
    return True


def _multiplied(walk: Walk, divide: bool) -> bool:
    node = walk.at
    if argument(node, "rounding_mode") is not None:
        raise NoMatch(node, "weights are rounded")
    if divide and _normalised_exponentials(walk):
        return True
    for position in (0,) if divide else (0, 1):
        access = walk.access_of(position)
        if access is not None and _is_weights(walk, access) and _factor(walk, access, 1 - position, divide):
            return True
    raise NoMatch(node, "weights are multiplied by a tensor that varies over keys and is not a mask")


def _is_weights(walk: Walk, access: Access) -> bool:
    """Whether an operand has the key axis; of two that have it, `_factor` takes neither as a plain factor."""
    return walk.key in slots_of(compose(access, walk.exprs))


def _factor(walk: Walk, kept: Access, other: int, divide: bool) -> bool:
    node = walk.at
    number = walk.number_of(other)
    if number is not None:
        if divide and number == 0:
            raise NoMatch(node, "weights are divided by zero")
        walk.post_scale = walk.post_scale / number if divide else walk.post_scale * number
        walk.move(kept)
        return True
    term = walk.term_of(other)
    if not divide and term is not None and is_binary(term) and walk.key in term.slots:
        walk.weight_mask = t.and_(walk.weight_mask, t.truth(term))
        walk.move(kept)
        return True
    joined = walk.joined(other, divide=divide)
    if joined is None or walk.key in slots_of(joined.exprs):
        return False
    if kept.operand.meta["val"].dtype != node.meta["val"].dtype:
        raise NoMatch(node, "a factor changes the dtype of the weights")
    walk.factors.append(joined)
    walk.move(kept)
    return True


# ---------------------------------------------------------------- the score function


def _score_function(walk: Walk) -> bool:
    node, name = walk.at, op_name(walk.at)
    if name in _SOFTMAX:
        _check_over_keys(walk, node)
        walk.score = "softmax"
        walk.pass_through()
        return True
    if name == "aten.exp":
        return _exponential(walk)
    activation = ACTIVATIONS.get(name) or None
    if name == "aten.gelu" and argument(node, "approximate") == "tanh":
        activation = "gelu_tanh"
    if name == "aten.leaky_relu":
        activation, walk.slope = "leaky_relu", float(argument(node, "negative_slope"))
    if name in ("aten.clamp", "aten.clamp_min") and argument(node, "min") == 0 and argument(node, "max") is None:
        raise NoMatch(node, "at a score of 0, clamp(min=0) passes the gradient and relu does not", "write relu")
    if activation is not None:
        walk.score = activation
        walk.move(walk.known.info(node).accesses[0])
        return True
    return _composed_activation(walk)


def _check_over_keys(walk: Walk, softmax: fx.Node) -> None:
    info = walk.known.info(softmax)
    slots = info.dim_slots()[argument(softmax, "dim") % len(info.dims)]
    if [walk.exprs[s] for s in slots] != [t.slot(walk.key)]:
        raise NoMatch(softmax, "the softmax is not over the keys that the product with the values contracts")


def _exponential(walk: Walk) -> bool:
    """``exp(log_softmax(x))``; an ``exp`` that was divided by its sum ends here too."""
    node = walk.at
    inner = walk.known.info(node).accesses[0].operand
    passed = [node]
    while op_name(inner) in CASTS and is_transparent(inner, walk.known):
        passed.append(inner)
        inner = walk.known.info(inner).accesses[0].operand
    if op_name(inner) in _LOG_SOFTMAX:
        for n in passed:
            walk.move(walk.known.info(n).accesses[0])
        _check_over_keys(walk, inner)
        walk.score = "softmax"
        walk.pass_through()
        return True
    if op_name(inner) == "aten.sub" and _minus_logsumexp(walk, inner):
        for n in passed:
            walk.move(walk.known.info(n).accesses[0])
        walk.score = "softmax"
        walk.move(walk.known.info(inner).accesses[0])
        return True
    raise NoMatch(node, "exponentials of scores that are not divided by their sum over the keys")


def _minus_logsumexp(walk: Walk, node: fx.Node) -> bool:
    """``x - logsumexp(x, keys)``."""
    if len(walk.known.info(node).accesses) != 2 or argument(node, "alpha", 1) != 1:
        return False
    x, total = walk.known.info(node).accesses
    below, exprs = _behind_views(walk, total)
    return op_name(below) == "aten.logsumexp" and _over_keys_of(walk, below, exprs, x)


def _behind_views(walk: Walk, access: Access) -> tuple[fx.Node, Exprs]:
    """What an operand is a view or copy of, and its slots over the score slots."""
    below, exprs = access.operand, compose(access, walk.exprs)
    while is_transparent(below, walk.known):
        access = walk.known.info(below).accesses[0]
        below, exprs = access.operand, compose(access, exprs)
    return below, exprs


def _over_keys_of(walk: Walk, reduced: fx.Node, exprs: Exprs, of: Access) -> bool:
    """Whether ``reduced`` is a reduction of ``of.operand`` over the key axis alone, aligned with it."""
    total = walk.known.info(reduced).accesses[0]
    own = compose(of, walk.exprs)
    without_keys = [None if e == t.slot(walk.key) else e for e in own]
    return total.operand is of.operand and walk.key in slots_of(own) and without_keys == list(compose(total, exprs))


def _normalised_exponentials(walk: Walk) -> bool:
    """``e / e.sum(keys)`` with ``e = exp(..)``, masked or not before it is summed."""
    numerator, denominator = walk.access_of(0), walk.access_of(1)
    if numerator is None or denominator is None or walk.key not in slots_of(compose(numerator, walk.exprs)):
        return False
    below, exprs = _behind_views(walk, denominator)
    if op_name(below) != "aten.sum":
        return False
    if walk.known.info(below).accesses[0].operand is not numerator.operand:
        return False
    if not _over_keys_of(walk, below, exprs, numerator):
        raise NoMatch(below, "weights are divided by a sum that is not over the keys alone")
    walk.move(numerator)
    after, walk.weight_mask = walk.weight_mask, t.TRUE
    while op_name(walk.at) != "aten.exp":
        if not walk.step_pointwise_view() and not _mask_of_exponentials(walk):
            raise NoMatch(walk.at, "weights are normalised by their sum, but are not exponentials of scores")
    walk.mask, walk.weight_mask = t.and_(walk.mask, walk.weight_mask), after  # summed exponentials were masked before
    walk.score = "softmax"
    walk.move(walk.known.info(walk.at).accesses[0])
    return True


def _mask_of_exponentials(walk: Walk) -> bool:
    node, name = walk.at, op_name(walk.at)
    if name == "aten.masked_fill":
        return _masked(walk, walk.term_of(1), 0, fill_at=2, keep_where=False)
    if name == "aten.where" and len(node.args) == 3:
        kept, fill_at = (1, 2) if walk.number_of(2) is not None else (2, 1)
        return _masked(walk, walk.term_of(0), kept, fill_at, keep_where=kept == 1)
    if name == "aten.mul":
        for position in (0, 1):
            term, access = walk.term_of(1 - position), walk.access_of(position)
            if term is not None and access is not None and is_binary(term):
                walk.weight_mask = t.and_(walk.weight_mask, t.truth(term))
                walk.move(access)
                return True
    return False


def _composed_activation(walk: Walk) -> bool:
    """``relu(x) ** 2``, ``relu(x) * relu(x)``, ``x * sigmoid(x)``."""
    node, name = walk.at, op_name(walk.at)
    operands = walk.known.info(node).accesses if is_tensor(node) else ()
    squared = name == "aten.square" or (name == "aten.pow" and node.args[1] in (2, 2.0))
    if name == "aten.mul" and len(operands) == 2 and operands[0] == operands[1]:
        squared = True
    if squared and op_name(operands[0].operand) == "aten.relu":
        walk.score = "relu2"
        walk.move(operands[0])
        walk.move(walk.known.info(walk.at).accesses[0])
        return True
    if name == "aten.mul" and len(operands) == 2:
        for x, gate in (operands, operands[::-1]):
            if op_name(gate.operand) != "aten.sigmoid":
                continue
            (inner,) = walk.known.info(gate.operand).accesses
            own, path = _source(walk, x)
            other, gate_path = _source(walk, Access(inner.operand, compose(inner, gate.exprs)))
            if own == other:
                walk.interior += [gate.operand, *(n for n in gate_path if n not in path)]
                walk.score = "silu"
                walk.move(x)
                return True
    return False


def _source(walk: Walk, access: Access) -> tuple[Access, list[fx.Node]]:
    """The tensor behind views and slices, and these: a slice may be written twice."""
    path: list[fx.Node] = []
    while walk.known.info(access.operand).kind in (*VIEWS, "slice", "select"):
        path.append(access.operand)
        (behind,) = walk.known.info(access.operand).accesses
        access = Access(behind.operand, compose(behind, access.exprs))
    return access, path
