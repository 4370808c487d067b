"""Reductions, norms, products, attention and token losses: some axes are mixed."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.accesses.context import Context, Handler
from gemopt.graph.slots import (
    Access,
    Dims,
    Info,
    NotUnderstood,
    argument,
    broadcast,
    finer,
    fresh,
    identity,
    is_tensor,
    nodes_in,
    op_name,
    regrouped,
    shape_of,
)
from gemopt.graph.terms import Term


def _normal_dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(ndim))
    return [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]


def reduction(node: fx.Node, ctx: Context) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    info = ctx.info(x)
    ndim = len(info.dims)
    reduced = _normal_dims(argument(node, "dim"), ndim)
    keepdim = bool(argument(node, "keepdim", False))
    dims: list[tuple[sympy.Expr, ...]] = []
    exprs: list[Term | None] = []
    at = 0
    for d, dim in enumerate(info.dims):
        if d in reduced:
            exprs += [None] * len(dim)
            if keepdim:
                dims.append(())
        else:
            exprs += [t.slot(at + k) for k in range(len(dim))]
            at += len(dim)
            dims.append(dim)
    return Info(tuple(dims), (Access(x, tuple(exprs)),), "reduction")


def extremum(node: fx.Node, ctx: Context) -> Info:
    """One result of ``max(x, dim)``: values or indices, which look at the same elements."""
    info = reduction(node.args[0], ctx)  # type: ignore[arg-type]
    return Info(info.dims, info.accesses, "extremum")


def is_extremum(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in (torch.ops.aten.max.dim, torch.ops.aten.min.dim)


def along(*names: str) -> Handler:
    """Ops that keep the shape and mix one or more dims (softmax, cumsum, norms over a dim)."""

    def handler(node: fx.Node, ctx: Context) -> Info:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        info = ctx.info(x)
        mixed = {d for n in names for d in _normal_dims(argument(node, n), len(info.dims))}
        return _mixing(node, ctx, info, mixed)

    return handler


def _mixing(node: fx.Node, ctx: Context, info: Info, mixed: set[int]) -> Info:
    slots = {s for d in mixed for s in info.dim_slots()[d]}
    exprs = tuple(None if s in slots else t.slot(s) for s in range(len(info.sizes)))
    x = node.args[0]
    assert isinstance(x, fx.Node)
    others = [n for n in nodes_in(node.args, node.kwargs)[1:] if is_tensor(n)]
    accesses = [Access(x, exprs)] + [Access(n, (None,) * len(ctx.info(n).sizes)) for n in others]
    return Info(info.dims, tuple(accesses), "mixing")


def normalisation(node: fx.Node, ctx: Context) -> Info:
    """layer_norm and rms_norm: the trailing ``normalized_shape`` dims are mixed."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    info = ctx.info(x)
    count = len(argument(node, "normalized_shape"))
    return _mixing(node, ctx, info, set(range(len(info.dims) - count, len(info.dims))))


def linear(node: fx.Node, ctx: Context) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    info = ctx.info(x)
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    feature: Dims = fresh([shape_of(node)[-1]]) if len(shape_of(weight)) == 2 else ()
    kept = info.dims[:-1]
    count = sum(map(len, kept))
    exprs = tuple(t.slot(i) for i in range(count)) + (None,) * len(info.dims[-1])
    others = [n for n in nodes_in(node.args, node.kwargs)[1:] if is_tensor(n)]
    accesses = [Access(x, exprs)] + [Access(n, (None,) * len(ctx.info(n).sizes)) for n in others]
    return Info(kept + feature, tuple(accesses), "linear")


def matmul(node: fx.Node, ctx: Context) -> Info:
    a, b = node.args[0], node.args[1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return contraction(node, ctx, a, b)


def baddbmm(node: fx.Node, ctx: Context) -> Info:
    added, a, b = node.args[:3]
    assert isinstance(added, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node)
    info = contraction(node, ctx, a, b)
    _, exprs = broadcast([ctx.info(added), Info(info.dims)], shape_of(node))
    return Info(info.dims, (*info.accesses, Access(added, exprs[0])), "contraction")


def contraction(node: fx.Node, ctx: Context, a: fx.Node, b: fx.Node) -> Info:
    """``a @ b``: batch dims broadcast, a keeps its row dim, b its column dim, the inner dim is contracted."""
    left, right = ctx.info(a), ctx.info(b)
    if len(left.dims) < 2 or len(right.dims) < 2:
        return _matmul_vector(node, ctx, a, b)
    shape = shape_of(node)
    batch, exprs = broadcast([Info(left.dims[:-2]), Info(right.dims[:-2])], shape[:-2])
    count = sum(map(len, batch))
    row, column = left.dims[-2], right.dims[-1]
    rows = [t.slot(count + i) for i in range(len(row))]
    columns = [t.slot(count + len(row) + i) for i in range(len(column))]
    a_exprs = (*exprs[0], *rows, *((None,) * len(left.dims[-1])))
    b_exprs = (*exprs[1], *((None,) * len(right.dims[-2])), *columns)
    return Info((*batch, row, column), (Access(a, a_exprs), Access(b, b_exprs)), "contraction")


def _matmul_vector(node: fx.Node, ctx: Context, a: fx.Node, b: fx.Node) -> Info:
    left, right = ctx.info(a), ctx.info(b)
    if len(right.dims) == 1 and len(left.dims) >= 2:
        kept = left.dims[:-1]
        count = sum(map(len, kept))
        exprs = tuple(t.slot(i) for i in range(count)) + (None,) * len(left.dims[-1])
        return Info(kept, (Access(a, exprs), Access(b, (None,) * len(right.sizes))), "contraction")
    raise NotUnderstood("matmul with a 1-D left operand")


def einsum(node: fx.Node, ctx: Context) -> Info:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation or len(operands) > 2:
        raise NotUnderstood("einsum with an ellipsis or an implicit result")
    inputs, output = equation.split("->")
    letters: dict[str, tuple[sympy.Expr, ...]] = {}
    subscripts = inputs.split(",")
    for word, n in zip(subscripts, operands, strict=True):
        if len(set(word)) != len(word):
            raise NotUnderstood("einsum over a diagonal")
        for letter, dim in zip(word, ctx.info(n).dims, strict=True):  # type: ignore[arg-type]
            letters[letter] = finer(letters.get(letter, ()), dim)
    dims = tuple(letters[c] for c in output)
    result = Info(dims)
    out = dict(zip(output, result.dim_slots(), strict=True))
    accesses = []
    for word, n in zip(subscripts, operands, strict=True):
        exprs: list[Term | None] = []
        for letter, dim in zip(word, ctx.info(n).dims, strict=True):  # type: ignore[arg-type]
            exprs += regrouped(dim, out[letter], result.sizes) if letter in out else [None] * len(dim)
        accesses.append(Access(n, tuple(exprs)))  # type: ignore[arg-type]
    return Info(dims, tuple(accesses), "contraction")


def contracts_pairs(node: fx.Node) -> bool:
    """einsum may sum an axis of one operand alone, broadcast one of size 1, or pair contracted axes in another order; other
    products do none of these."""
    if op_name(node) != "aten.einsum":
        return True
    inputs, output = str(node.args[0]).replace(" ", "").split("->")
    contracted = [
        [(c, n) for c, n in zip(word, shape_of(x), strict=True) if c not in output]
        for word, x in zip(inputs.split(","), node.args[1], strict=True)  # type: ignore[arg-type]
    ]
    return contracted[0] == contracted[-1]


def attention(node: fx.Node, ctx: Context) -> Info:
    """scaled_dot_product_attention seen from outside: queries are local, keys and values mix."""
    if argument(node, "enable_gqa", False):
        raise NotUnderstood("several query heads share one key head")
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    shape = shape_of(node)
    qi, ki, vi = ctx.info(q), ctx.info(k), ctx.info(v)
    batch, exprs = broadcast([Info(i.dims[:-2]) for i in (qi, ki, vi)], shape[:-2])
    count = sum(map(len, batch))
    row, feature = qi.dims[-2], vi.dims[-1]
    q_exprs = (*exprs[0], *(t.slot(count + i) for i in range(len(row))), *((None,) * len(qi.dims[-1])))
    k_exprs = (*exprs[1], *((None,) * (len(ki.dims[-2]) + len(ki.dims[-1]))))
    at = count + len(row)
    v_exprs = (*exprs[2], *((None,) * len(vi.dims[-2])), *(t.slot(at + i) for i in range(len(feature))))
    accesses = [Access(q, q_exprs), Access(k, k_exprs), Access(v, v_exprs)]
    mask = argument(node, "attn_mask")
    if is_tensor(mask):
        mask_info = ctx.info(mask)
        lead = len(shape) - len(mask_info.dims)
        _, mask_exprs = broadcast([Info(mask_info.dims[:-2])], shape[: len(shape) - 2][max(lead, 0) :])
        own = mask_info.dims[-2]
        tail = tuple(t.slot(count + i) for i in range(len(own))) if len(own) == len(row) else (None,) * len(own)
        accesses.append(Access(mask, (*mask_exprs[0], *tail, *((None,) * len(mask_info.dims[-1])))))
    return Info((*batch, row, feature), tuple(accesses), "attention")


def token_loss(node: fx.Node, ctx: Context) -> Info:
    """cross_entropy and nll: ``input [N, C, ...]`` and ``target [N, ...]``; local in rows when nothing is reduced."""
    x, target = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(target, fx.Node)
    info, labels = ctx.info(x), ctx.info(target)
    if len(labels.dims) != len(info.dims) - 1 or len(info.dims) < 2:
        raise NotUnderstood("cross entropy with class probabilities or without a batch")
    others = tuple(Access(n, (None,) * len(ctx.info(n).sizes)) for n in nodes_in(node.args, node.kwargs)[2:] if is_tensor(n))
    if argument(node, "reduction") != 0:
        accesses = (Access(x, (None,) * len(info.sizes)), Access(target, (None,) * len(labels.sizes)))
        return Info((), accesses + others, "loss")
    slots = labels.dim_slots()
    rows = [info.dims[0], *info.dims[2:]]
    if any(len(a) != len(b) for a, b in zip(rows, labels.dims, strict=True)):
        raise NotUnderstood("cross entropy whose input and target are merged differently")
    exprs = [t.slot(j) for j in slots[0]] + [None] * len(info.dims[1])
    exprs += [t.slot(j) for dim in slots[1:] for j in dim]
    return Info(labels.dims, (Access(x, tuple(exprs)), Access(target, identity(labels.dims)), *others), "loss")
