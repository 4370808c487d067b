"""Embedding, gather, index: positions come from the value of an integer operand."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.accesses.context import Context
from gemopt.graph.accesses.movement import aligned
from gemopt.graph.slots import (
    Access,
    Exprs,
    Info,
    NotUnderstood,
    argument,
    broadcast,
    fresh,
    identity,
    is_tensor,
    shape_of,
)
from gemopt.graph.terms import Term


def embedding(node: fx.Node, ctx: Context) -> Info:
    weight, ids = node.args[0], node.args[1]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    if argument(node, "scale_grad_by_freq", False):
        raise NotUnderstood("an embedding whose gradient counts every id, those of padding too")
    if argument(node, "sparse", False):
        raise NotUnderstood("an embedding whose sparse gradient names every id, those of padding too")
    info = ctx.info(ids)
    feature = fresh([shape_of(node)[-1]])
    count = len(info.sizes)
    table = ctx.info(weight)
    weight_exprs: list[Term | None] = [None] * len(table.sizes)
    if table.sizes and feature[0]:
        weight_exprs[-1] = t.slot(count)
    return Info(
        info.dims + feature,
        (Access(weight, tuple(weight_exprs)), Access(ids, identity(info.dims))),
        "embedding",
    )


def gather(node: fx.Node, ctx: Context) -> Info:
    x, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    info, idx = ctx.info(x), ctx.info(index)
    dim %= len(info.dims)
    exprs: list[Term | None] = []
    out = idx.dim_slots()
    for d, slots in enumerate(info.dim_slots()):
        if d == dim:
            exprs += [ctx.value(index) if len(slots) == 1 else None] * len(slots)
        elif len(slots) == len(out[d]) and (len(slots) == 1 or info.dims[d] == idx.dims[d]):
            exprs += [t.slot(j) for j in out[d]]
        elif not out[d]:  # the index has size 1 here: position 0 is read
            exprs += [t.const(0)] * len(slots)
        else:
            raise NotUnderstood("gather with an index merged differently")
    return Info(idx.dims, (Access(x, tuple(exprs)), Access(index, identity(idx.dims))), "gather")


def take_along_dim(node: fx.Node, ctx: Context) -> Info:
    """gather whose operands are broadcast against each other outside ``dim``."""
    x, index, dim = node.args[0], node.args[1], argument(node, "dim")
    assert isinstance(x, fx.Node) and isinstance(index, fx.Node)
    info, shape = ctx.info(x), shape_of(node)
    if not isinstance(dim, int) or len(info.dims[dim % len(shape)]) > 1:
        raise NotUnderstood("take_along_dim over all dims or a merged one")
    dim %= len(shape)
    others = Info((*info.dims[:dim], (), *info.dims[dim + 1 :]))
    dims, (rest, own) = broadcast([others, ctx.info(index)], shape)
    value = ctx.value(index)
    position = None if value is None else forward_value(value, own)
    at = sum(map(len, info.dims[:dim]))
    exprs = (*rest[:at], *([position] * len(info.dims[dim])), *rest[at:])
    return Info(dims, (Access(x, exprs), Access(index, own)), "gather")


def index_select(node: fx.Node, ctx: Context) -> Info:
    x, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    info, shape = ctx.info(x), shape_of(node)
    dim %= len(shape)
    if len(info.dims[dim]) > 1:
        raise NotUnderstood("index_select on a merged dim")
    value = ctx.value(index)
    dims = tuple(fresh([shape[d]])[0] if d == dim else f for d, f in enumerate(info.dims))
    out = Info(dims).dim_slots()[dim]

    def position(j: Term) -> Term | None:
        return None if value is None else t.substitute(value, {0: j} if out else {})

    exprs = aligned(info, dims, dim, position)  # type: ignore[arg-type]
    index_exprs = tuple(t.slot(out[0]) if out else t.const(0) for _ in ctx.info(index).sizes)
    return Info(dims, (Access(x, exprs), Access(index, index_exprs)), "gather")


def index(node: fx.Node, ctx: Context) -> Info:
    """Advanced indexing by integer tensors on adjacent leading dims (``h[arange(B), length - 1]``)."""
    x, indices = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(indices, list | tuple)
    info, shape = ctx.info(x), shape_of(node)
    while indices and indices[-1] is None:
        indices = indices[:-1]
    if len(indices) == 1 and is_tensor(indices[0]) and indices[0].meta["val"].dtype == torch.bool:  # type: ignore[union-attr]
        return _boolean_index(node, ctx, x, indices[0])  # type: ignore[arg-type]
    if not indices or any(not is_tensor(i) or i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices):  # type: ignore[union-attr]
        raise NotUnderstood("index by a boolean mask or with gaps")
    tensors: list[fx.Node] = list(indices)  # type: ignore[arg-type]
    lead = len(shape) - (len(info.dims) - len(tensors))
    lead_dims, lead_exprs = broadcast([ctx.info(i) for i in tensors], shape[:lead])
    tail = info.dims[len(tensors) :]
    dims = lead_dims + tail
    exprs: list[Term | None] = []
    full = shape_of(x)
    for d, (i, e) in enumerate(zip(tensors, lead_exprs, strict=True)):
        if len(info.dims[d]) > 1:
            raise NotUnderstood("index on a merged dim")
        if info.dims[d]:
            value = ctx.value(i)
            moved = None if value is None else forward_value(value, e)
            exprs.append(None if moved is None else wrap(moved, full[d]))
    at = sum(map(len, lead_dims))
    exprs += [t.slot(at + k) for k in range(sum(map(len, tail)))]
    accesses = [Access(x, tuple(exprs))]
    accesses += [Access(i, e) for i, e in zip(tensors, lead_exprs, strict=True)]
    return Info(dims, tuple(accesses), "gather")


def _boolean_index(node: fx.Node, ctx: Context, x: fx.Node, mask: fx.Node) -> Info:
    """``x[mask]``: one axis of the rows where the mask holds, in row-major order, then the dims the mask does not cover."""
    info, own = ctx.info(x), ctx.info(mask)
    covered = len(own.dims)
    if info.dims[:covered] != own.dims:
        raise NotUnderstood("a boolean index whose dims are merged differently")
    tail = info.dims[covered:]
    first = sum(map(len, own.dims))
    lead = fresh([shape_of(node)[0]])
    exprs = (None,) * first + tuple(t.slot(len(lead[0]) + k) for k in range(sum(map(len, tail))))
    accesses = (Access(x, exprs), Access(mask, (None,) * first))
    return Info(lead + tail, accesses, "boolean_index")


def forward_value(value: Term, exprs: Exprs) -> Term | None:
    if any(exprs[s] is None for s in value.slots):
        return None
    return t.substitute(value, {s: exprs[s] for s in value.slots})  # type: ignore[misc]


def wrap(position: Term, extent: sympy.Expr) -> Term:
    """Python's negative indexing. A bare slot is an arange, hence never negative."""
    if position.op == "slot":
        return position
    known = t.constant_value(position)
    if isinstance(known, int) and known >= 0:
        return position
    return t.call("wrap", position, t.size(extent), integer=True)
