"""Recognise softmax attention by what it computes.

A site is found from its softmax. Backward from it, pointwise steps are read as facts (a scale, a mask, a cast) until a
contraction is met whose two operands share every batch axis and contract one feature axis: Q and K, told apart by which of
them owns the softmax axis. Forward from it, through dropout, casts and views, the contraction over that axis gives V.
Axes are slots, carried by accesses, so matmul, bmm, einsum, merged batch-and-head dims and any layout of K are one case,
and a permutation that contracts the wrong axis is not a match.

Every softmax and every fused attention call ends as a `Site` or as a `Miss` that names the node and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.attention import Site, additive_mask
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Access, Exprs, Info, argument, broadcast, forward, is_tensor, nodes_in, op_name
from gemopt.graph.terms import Term

_SOFTMAX = ("aten.softmax", "aten._softmax", "aten.special_softmax")
_VIEWS = ("view", "expand")
_SMALLEST_FILL = -9984.0  # -1e4 in bfloat16


@dataclass(frozen=True)
class Miss:
    """A candidate that is not rewritten: the node where the match ended, and why."""

    node: fx.Node
    reason: str
    hint: str = ""


class NoMatch(Exception):
    def __init__(self, node: fx.Node, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.miss = Miss(node, reason, hint)


def recognise(graph: fx.Graph, known: Analysis) -> tuple[list[Site], list[Miss]]:
    """All softmax attentions of a graph, and the candidates that are not one."""
    sites: list[Site] = []
    misses: list[Miss] = []
    for node in graph.nodes:
        name = op_name(node)
        try:
            if name in _SOFTMAX:
                site = _from_softmax(node, known)
            elif name == "aten.scaled_dot_product_attention":
                site = _from_fused(node, known)
            else:
                continue
        except NoMatch as failure:
            misses.append(failure.miss)
            continue
        if site is not None:
            sites.append(site)
    return sites, misses


# ---------------------------------------------------------------- explicit softmax


@dataclass
class _Scores:
    """State of the walk from the softmax back to the scores: ``at`` and its slots over the softmax's."""

    at: fx.Node
    exprs: Exprs
    count: int
    mask: Term = t.TRUE
    scale: float = 1.0
    fill: float = -float("inf")
    interior: list[fx.Node] = field(default_factory=list)


def _from_softmax(softmax: fx.Node, known: Analysis) -> Site | None:
    info = known.info(softmax)
    dim = argument(softmax, "dim") % len(info.dims)
    slots = info.dim_slots()[dim]
    x = softmax.args[0]
    assert isinstance(x, fx.Node)
    if len(slots) != 1:
        return None  # a softmax over one element, or over a merged axis: not attention over tokens
    weighted = _weights_to_output(softmax, known, slots[0])
    if weighted is None:
        return None  # no contraction with values follows: an ordinary softmax
    count = len(info.sizes)
    scores = _Scores(x, tuple(t.slot(i) for i in range(count)), count)
    while not _is_contraction(scores.at, known):
        if not _step_back(scores, known):
            if scores.mask == t.TRUE and known.info(scores.at).kind not in ("pointwise",):
                return None  # a softmax of something that is not a product of queries and keys: pooling weights
            raise NoMatch(scores.at, f"scores come from {op_name(scores.at) or scores.at.op}, which is not understood")
    q, k, query = _queries_and_keys(scores, known, slots[0])
    out, v, v_exprs, out_slots, dropout, after = weighted
    _check_escapes((softmax, *scores.interior, scores.at, *after), out, known)
    batch = set(range(count)) - {query, slots[0]}
    if {s for s in out_slots if s is not None} != batch | {query}:
        raise NoMatch(out, "the result lacks an axis of the scores")
    if {e.args[0] for e in v_exprs if e is not None} != batch | {slots[0]}:
        raise NoMatch(out, "queries, keys and values do not share every batch axis")
    return Site(
        out=out, q=q.operand, k=k.operand, v=v,
        q_exprs=q.exprs, k_exprs=k.exprs, v_exprs=v_exprs, out_slots=out_slots,
        query=query, key=slots[0], mask=scores.mask, scale=scores.scale, dropout=dropout, fill=scores.fill,
        spelling=f"{op_name(scores.at)} -> {op_name(softmax)} -> {op_name(out)}",
        score_dtype=scores.at.meta["val"].dtype,
        interior=(softmax, *scores.interior, scores.at, *after),
    )  # fmt: skip


def _is_contraction(node: fx.Node, known: Analysis) -> bool:
    return is_tensor(node) and known.info(node).kind == "contraction"


def _compose(access: Access, outer: Exprs) -> Exprs:
    """Operand slots over the softmax's slots, given the node's own."""
    composed: list[Term | None] = []
    for expr in access.exprs:
        if expr is None or any(outer[s] is None for s in expr.slots):
            composed.append(None)
        else:
            composed.append(t.substitute(expr, {s: outer[s] for s in expr.slots}))  # type: ignore[misc]
    return tuple(composed)


def _step_back(scores: _Scores, known: Analysis) -> bool:
    """Read one pointwise step or view as a fact; False when the node is neither."""
    node = scores.at
    if not is_tensor(node):
        return False
    info, name = known.info(node), op_name(node)
    if info.kind in _VIEWS:
        _move_to(scores, info.accesses[0])
        return True
    if info.kind != "pointwise":
        return False
    if name in ("aten.to", "aten._to_copy", "aten.clone", "aten.contiguous", "aten.detach", "aten.alias", "aten.type_as"):
        if name == "aten.detach":
            raise NoMatch(node, "scores are detached from the graph")
        _move_to(scores, info.accesses[0])
        return True
    if name == "aten.masked_fill":
        return _step_masked(scores, known, node, 0, _operand_term(scores, known, 1), fill_at=2, keep_where=False)
    if name == "aten.where" and len(node.args) == 3:
        condition = _operand_term(scores, known, 0)
        for kept, fill_at, keep_where in ((1, 2, True), (2, 1, False)):
            fill = _operand_term(scores, known, fill_at)
            if fill is not None and t.constant_value(fill) is not None:
                return _step_masked(scores, known, node, kept, condition, fill_at, keep_where)
        raise NoMatch(node, "neither side of the where is a constant")
    if name in ("aten.mul", "aten.div"):
        return _step_scale(scores, known, node, divide=name == "aten.div")
    if name in ("aten.add", "aten.sub"):
        return _step_add(scores, known, node)
    return False


def _move_to(scores: _Scores, access: Access) -> None:
    if scores.at is not access.operand:
        scores.interior.append(scores.at)
    scores.exprs = _compose(access, scores.exprs)
    scores.at = access.operand


def _access_of_argument(node: fx.Node, known: Analysis, position: int) -> Access | None:
    tensors = [n for n in nodes_in(node.args, node.kwargs) if is_tensor(n)]
    value = node.args[position]
    if not isinstance(value, fx.Node) or not is_tensor(value):
        return None
    return known.info(node).accesses[tensors.index(value)]


def _operand_term(scores: _Scores, known: Analysis, position: int) -> Term | None:
    """The value of an argument of the current node, over the softmax's slots."""
    term = known.values.operand(scores.at, position)
    if term is None or any(scores.exprs[s] is None for s in term.slots):
        return None
    return t.substitute(term, {s: scores.exprs[s] for s in term.slots})  # type: ignore[misc]


def _step_masked(
    scores: _Scores, known: Analysis, node: fx.Node, kept: int, condition: Term | None, fill_at: int, keep_where: bool
) -> bool:
    if condition is None:
        raise NoMatch(
            node,
            "the mask is not an expression of the graph's inputs that gemopt can follow",
            "build the mask from lengths, ids or a boolean input inside the compiled function",
        )
    fill_term = _operand_term(scores, known, fill_at)
    fill = None if fill_term is None else t.constant_value(fill_term)
    if fill is None:
        raise NoMatch(node, "the value that masks the scores is not a constant")
    _apply_fill(scores, node, float(fill))
    predicate = t.truth(condition)
    scores.mask = t.and_(scores.mask, predicate if keep_where else t.not_(predicate))
    access = _access_of_argument(node, known, kept)
    if access is None:
        raise NoMatch(node, "the mask replaces constants, not scores")
    _move_to(scores, access)
    return True


def _apply_fill(scores: _Scores, node: fx.Node, fill: float) -> None:
    effective = fill * scores.scale
    if not effective <= _SMALLEST_FILL:
        raise NoMatch(
            node,
            f"masked scores are set to {fill:g}, which still leaves weight on padding",
            "use -inf, torch.finfo(dtype).min or a value of -1e4 or less",
        )
    scores.fill = max(scores.fill, effective)


def _step_scale(scores: _Scores, known: Analysis, node: fx.Node, divide: bool) -> bool:
    if argument(node, "rounding_mode") is not None:
        raise NoMatch(node, "scores are rounded")
    for position in (0, 1) if not divide else (0,):
        other = node.args[1 - position]
        access = _access_of_argument(node, known, position)
        term = _operand_term(scores, known, 1 - position)
        number = other if isinstance(other, int | float) else None if term is None else t.constant_value(term)
        if access is not None and number is not None:
            factor = float(number)
            if factor == 0:
                raise NoMatch(node, "scores are multiplied or divided by zero")
            scores.scale = scores.scale / factor if divide else scores.scale * factor
            _move_to(scores, access)
            return True
    raise NoMatch(node, "scores are scaled by something that is not a constant")


def _step_add(scores: _Scores, known: Analysis, node: fx.Node) -> bool:
    for position in (0, 1):
        term = _operand_term(scores, known, 1 - position)
        access = _access_of_argument(node, known, position)
        if term is None or access is None:
            continue
        mask = additive_mask(term)
        if mask is not None and op_name(node) == "aten.add" and argument(node, "alpha", 1) == 1:
            if mask[0] != t.TRUE:
                _apply_fill(scores, node, mask[1])
            scores.mask = t.and_(scores.mask, mask[0])
            _move_to(scores, access)
            return True
    raise NoMatch(
        node,
        "something is added to the scores that gemopt cannot read as a mask",
        "an additive bias is not supported yet; a mask must come from lengths, ids or a boolean input",
    )


def _queries_and_keys(scores: _Scores, known: Analysis, key: int) -> tuple[Access, Access, int]:
    node = scores.at
    operands = [Access(a.operand, _compose(a, scores.exprs)) for a in known.info(node).accesses]
    if op_name(node) in ("aten.baddbmm", "aten.addmm"):
        operands = _read_added(scores, known, node, operands)
    if len(operands) != 2:
        raise NoMatch(node, "scores are not a product of two tensors")
    used = [frozenset().union(*(e.slots for e in a.exprs if e is not None)) for a in operands]
    _check_pairs(node)
    if sum(key in u for u in used) != 1:
        raise NoMatch(node, "the softmax axis does not come from exactly one operand of the product")
    k, q = (0, 1) if key in used[0] else (1, 0)
    if used[q] | used[k] != set(range(scores.count)):
        raise NoMatch(node, "an axis of the scores comes from neither queries nor keys")
    own = used[q] - used[k]
    if len(own) != 1 or used[k] - used[q] != {key}:
        raise NoMatch(node, "queries and keys do not share every batch axis, or there is one query only")
    for a in operands:
        if any(e is not None and e.op != "slot" for e in a.exprs):
            raise NoMatch(node, "the operands of the product are not plainly laid out")
        if sum(e is None for e in a.exprs) == 0:
            raise NoMatch(node, "the product contracts nothing")
    return operands[q], operands[k], next(iter(own))


def _check_pairs(node: fx.Node) -> None:
    """einsum may sum an axis of one operand alone, or pair contracted axes in another order; a product does neither."""
    if op_name(node) != "aten.einsum":
        return
    inputs, output = str(node.args[0]).replace(" ", "").split("->")
    contracted = [[c for c in word if c not in output] for word in inputs.split(",")]
    if contracted[0] != contracted[-1]:
        raise NoMatch(node, "the operands do not contract the same axes in the same order")


def _read_added(scores: _Scores, known: Analysis, node: fx.Node, operands: list[Access]) -> list[Access]:
    """baddbmm(mask, q, k): the added tensor is a mask like any other."""
    if node.kwargs.get("beta", 1) != 1:
        raise NoMatch(node, "baddbmm with a beta")
    added = operands[2]
    value = known.value(added.operand)
    term = None if value is None else forward(value, added)
    mask = None if term is None else additive_mask(term)
    if mask is None:
        raise NoMatch(node, "the tensor that baddbmm adds to the scores is not a mask")
    if mask[0] != t.TRUE:
        _apply_fill(scores, node, mask[1])
    scores.mask = t.and_(scores.mask, mask[0])
    scores.scale *= float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    return operands[:2]


_Weighted = tuple[fx.Node, fx.Node, Exprs, tuple[int | None, ...], float, list[fx.Node]]


def _weights_to_output(softmax: fx.Node, known: Analysis, key: int) -> _Weighted | None:
    """Forward from the softmax to the contraction over its axis; None when none follows."""
    node = softmax
    scores: tuple[int | None, ...] = tuple(range(len(known.info(softmax).sizes)))  # softmax slot of each slot
    dropout, passed = 0.0, []
    while True:
        users = list(node.users)
        contractions = [u for u in users if _is_contraction(u, known)]
        if contractions:
            if len(users) > 1:
                others = [u for u in users if u is not contractions[0]]
                raise NoMatch(
                    others[0],
                    "the attention weights are used elsewhere as well",
                    "do not return the attention weights (need_weights=False)",
                )
            break
        if len(users) != 1 or not is_tensor(users[0]):
            return None
        user = users[0]
        info, name = known.info(user), op_name(user)
        if name == "aten.dropout":
            dropout = _dropout_rate(user, dropout)
        elif info.kind not in _VIEWS and name not in (
            "aten.to",
            "aten._to_copy",
            "aten.clone",
            "aten.contiguous",
            "aten.type_as",
        ):
            return None
        access = info.access(node)
        if access is None:
            return None
        scores = _slots_of_result(scores, access, len(info.sizes))
        passed.append(user)
        node = user
    out = contractions[0]
    accesses = known.info(out).accesses
    if len(accesses) != 2 or accesses[0].operand is accesses[1].operand:
        return None
    p, v = (accesses[0], accesses[1]) if accesses[0].operand is node else (accesses[1], accesses[0])
    if p.exprs[scores.index(key)] is not None if key in scores else True:
        return None
    return _values(out, p, v, scores, key, dropout, passed, len(known.info(out).sizes))


def _dropout_rate(node: fx.Node, before: float) -> float:
    p, training = node.args[1], node.args[2]
    if not training or p == 0:
        return before
    if before:
        raise NoMatch(node, "dropout is applied twice to the attention weights")
    return float(p)  # type: ignore[arg-type]


def _slots_of_result(scores: tuple[int | None, ...], access: Access, count: int) -> tuple[int | None, ...]:
    """Softmax slot of each slot of a result that reads its operand by a plain renaming."""
    result: list[int | None] = [None] * count
    for i, expr in enumerate(access.exprs):
        if expr is not None and expr.op == "slot":
            result[expr.args[0]] = scores[i]
    return tuple(result)


def _values(
    out: fx.Node, p: Access, v: Access, scores: tuple[int | None, ...], key: int, dropout: float,
    passed: list[fx.Node], count: int,
) -> _Weighted:  # fmt: skip
    _check_pairs(out)
    if sum(e is None for e in p.exprs) != 1:
        raise NoMatch(out, "the product with the values contracts more than the softmax axis")
    out_slots = _slots_of_result(scores, p, count)
    exprs: list[Term | None] = []
    for expr in v.exprs:
        if expr is None:
            exprs.append(t.slot(key))
        elif expr.op == "slot":
            s = out_slots[expr.args[0]]
            exprs.append(None if s is None else t.slot(s))
        else:
            raise NoMatch(out, "the values are not plainly laid out")
    batch = {s for s in out_slots if s is not None}
    if sum(e == t.slot(key) for e in exprs) != 1:
        raise NoMatch(out, "the values do not have one key axis")
    seen = {e.args[0] for e in exprs if e is not None} - {key}
    if not seen <= batch or sum(s is None for s in out_slots) == 0:
        raise NoMatch(out, "the values do not match the weights axis by axis")
    return out, v.operand, tuple(exprs), out_slots, dropout, passed


def _check_escapes(interior: tuple[fx.Node, ...], out: fx.Node, known: Analysis) -> None:
    inside = {*interior, out}
    for node in interior:
        for user in node.users:
            if user not in inside and not (user in known.infos and known.info(user).kind == "like"):
                raise NoMatch(
                    user, f"an intermediate of the attention ({node.name}) is used elsewhere",
                    "do not return or reuse scores or weights",
                )  # fmt: skip


# ---------------------------------------------------------------- fused attention


def _from_fused(node: fx.Node, known: Analysis) -> Site:
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    if argument(node, "enable_gqa", False):
        raise NoMatch(node, "grouped heads inside the fused call are not supported yet")
    info = known.info(node)
    if info.kind != "attention":
        raise NoMatch(node, "the operands' axes are not understood")
    qi, ki, vi = known.info(q), known.info(k), known.info(v)
    if not len(qi.dims[-2]) == len(ki.dims[-2]) == len(vi.dims[-2]) == 1:
        raise NoMatch(node, "one query or one key only, or a merged token axis")
    batch = info.dims[:-2]
    count = sum(map(len, batch))
    query, key = count, count + 1
    scores = Info((*batch, qi.dims[-2], ki.dims[-2]))

    def leading(operand: Info) -> Exprs:
        shape = [sympy.prod(d) for d in batch]
        return broadcast([Info(operand.dims[:-2]), Info(batch)], shape)[1][0]

    q_exprs = (*leading(qi), t.slot(query), *((None,) * len(qi.dims[-1])))
    k_exprs = (*leading(ki), t.slot(key), *((None,) * len(ki.dims[-1])))
    v_exprs = (*leading(vi), t.slot(key), *((None,) * len(vi.dims[-1])))
    if any(len({*leading(o)}) != count for o in (qi, ki, vi)):
        raise NoMatch(node, "queries, keys and values do not share every batch axis")
    mask, fill = _fused_mask(node, known, scores)
    if argument(node, "is_causal", False):
        mask = t.and_(mask, t.le(t.slot(key), t.slot(query)))
    scale = argument(node, "scale")
    width = q.meta["val"].shape[-1]
    if scale is None:
        if not isinstance(width, int):
            raise NoMatch(node, "head_dim is not known at compile time")
        scale = width**-0.5
    features: tuple[int | None, ...] = (None,) * len(info.dims[-1])
    return Site(
        out=node, q=q, k=k, v=v, q_exprs=q_exprs, k_exprs=k_exprs, v_exprs=v_exprs,
        out_slots=(*range(count), query, *features), query=query, key=key, mask=mask, scale=float(scale),
        dropout=float(argument(node, "dropout_p", 0.0)), fill=fill, spelling=op_name(node),
        score_dtype=node.meta["val"].dtype,
    )  # fmt: skip


def _fused_mask(node: fx.Node, known: Analysis, scores: Info) -> tuple[Term, float]:
    mask = argument(node, "attn_mask")
    if mask is None:
        return t.TRUE, -float("inf")
    value = known.value(mask)
    shape = [sympy.prod(d) for d in scores.dims]
    exprs = broadcast([known.info(mask), scores], shape)[1][0]
    if value is None or any(exprs[s] is None for s in value.slots):
        raise NoMatch(
            node, "the mask is not an expression of the graph's inputs that gemopt can follow",
            "build the mask from lengths, ids or a boolean input inside the compiled function",
        )  # fmt: skip
    term = t.substitute(value, {s: exprs[s] for s in value.slots})  # type: ignore[misc]
    if mask.meta["val"].dtype == torch.bool:
        return t.truth(term), -float("inf")
    read = additive_mask(term)
    if read is None:
        raise NoMatch(node, "the float mask is not 0 and a large negative constant")
    if read[1] > _SMALLEST_FILL:
        raise NoMatch(node, f"masked scores are lowered by {read[1]:g} only, which leaves weight on padding")
    return read
