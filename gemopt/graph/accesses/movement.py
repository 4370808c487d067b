"""Views, permutations, slices, cat, stack, repeats: a result element is one operand element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.accesses.context import Context, Handler
from gemopt.graph.accesses.pointwise import pointwise
from gemopt.graph.slots import (
    Access,
    Dims,
    Exprs,
    Info,
    NotUnderstood,
    argument,
    broadcast,
    expr_of,
    fresh,
    identity,
    is_tensor,
    reshape,
    shape_of,
)
from gemopt.graph.terms import Term


def triangle(node: fx.Node, ctx: Context) -> Info:
    """tril and triu: element by element, but which elements stay depends on where they are."""
    info = pointwise(node, ctx)
    return Info(info.dims, info.accesses, "triangle")


def view(node: fx.Node, ctx: Context) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if x.meta["val"].dtype != node.meta["val"].dtype:
        raise NotUnderstood("bits read as another dtype")
    dims, exprs = reshape(ctx.info(x).sizes, shape_of(node))
    return Info(dims, (Access(x, exprs),), "view")


def expand(node: fx.Node, ctx: Context) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dims, exprs = broadcast([ctx.info(x)], shape_of(node))
    return Info(dims, (Access(x, exprs[0]),), "expand")


def permute(order: Callable[[fx.Node, int], Sequence[int]]) -> Handler:
    def handler(node: fx.Node, ctx: Context) -> Info:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        info = ctx.info(x)
        perm = [p % len(info.dims) for p in order(node, len(info.dims))]
        dims: Dims = tuple(info.dims[p] for p in perm)
        old = info.dim_slots()
        exprs: list[Term | None] = [None] * len(info.sizes)
        for j, s in enumerate(s for p in perm for s in old[p]):
            exprs[s] = t.slot(j)
        return Info(dims, (Access(x, tuple(exprs)),), "view")

    return handler


def swapped(a: int, b: int, n: int) -> list[int]:
    order = list(range(n))
    order[a], order[b] = order[b], order[a]
    return order


def moved_dims(source: Any, destination: Any, n: int) -> list[int]:
    src = [source] if isinstance(source, int) else list(source)
    dst = [destination] if isinstance(destination, int) else list(destination)
    moved = {d % n: s % n for s, d in zip(src, dst, strict=True)}
    rest = iter(i for i in range(n) if i not in moved.values())
    return [moved[i] if i in moved else next(rest) for i in range(n)]


def _without_dim(node: fx.Node, ctx: Context, dim: int, index: Term) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    info = ctx.info(x)
    dims = info.dims[:dim] + info.dims[dim + 1 :]
    at, exprs = 0, []
    for d, slots in enumerate(info.dim_slots()):
        if d == dim:
            if len(slots) > 1:
                raise NotUnderstood("select on a merged dim")
            exprs += [index] * len(slots)
        else:
            exprs += [t.slot(at + k) for k in range(len(slots))]
            at += len(slots)
    return Info(dims, (Access(x, tuple(exprs)),), "select")


def select(node: fx.Node, ctx: Context) -> Info:
    x, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    shape = shape_of(x)
    dim %= len(shape)
    i = _size_argument(index)
    position = t.size(i + shape[dim]) if i.is_negative else t.size(i)
    if not (i.is_negative or i.is_nonnegative):
        raise NotUnderstood("select at an index of unknown sign")
    return _without_dim(node, ctx, dim, position)


def _size_argument(value: Any) -> sympy.Expr:
    if isinstance(value, fx.Node) and is_tensor(value):
        raise NotUnderstood("a position that a tensor holds")
    return expr_of(value.meta["val"] if isinstance(value, fx.Node) else value)


def slice_(node: fx.Node, ctx: Context) -> Info:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dim, start, step = argument(node, "dim"), argument(node, "start"), argument(node, "step", 1)
    info, old, new = ctx.info(x), shape_of(x), shape_of(node)
    dim %= len(old)
    if new[dim] == old[dim]:
        return Info(info.dims, (Access(x, identity(info.dims)),), "view")
    first = sympy.Integer(0) if start is None else _size_argument(start)
    if first.is_negative:
        first = old[dim] + first
    if not isinstance(step, int) or len(info.dims[dim]) > 1 or not first.is_nonnegative:
        raise NotUnderstood("slice with a step of unknown size or over a merged dim")
    dims = tuple(fresh([new[d]])[0] if d == dim else f for d, f in enumerate(info.dims))
    exprs = aligned(info, dims, dim, lambda j: t.add(t.scale(j, step), t.size(first)))
    return Info(dims, (Access(x, exprs),), "slice")


def aligned(info: Info, dims: Dims, dim: int, index: Callable[[Term], Term]) -> Exprs:
    """Identity on all dims but ``dim``, where the operand's index is ``index`` of the result's."""
    out = Info(dims).dim_slots()
    exprs: list[Term | None] = []
    for d, slots in enumerate(info.dim_slots()):
        if d != dim:
            exprs += [t.slot(j) for j in out[d]]
        elif slots:
            exprs.append(index(t.slot(out[d][0]) if out[d] else t.const(0)))
    return tuple(exprs)


def cat(node: fx.Node, ctx: Context) -> Info:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    shape = shape_of(node)
    dim = argument(node, "dim") % len(shape)
    infos = [ctx.info(p) for p in parts]  # type: ignore[arg-type]
    if any(len(i.dims) != len(shape) for i in infos):
        raise NotUnderstood("cat with an empty 1-D operand")
    dims, _ = broadcast([Info((*i.dims[:dim], (), *i.dims[dim + 1 :])) for i in infos], shape)
    offset: sympy.Expr = sympy.Integer(0)
    accesses = []
    for p, info in zip(parts, infos, strict=True):
        if len(info.dims[dim]) > 1 or any(len(info.dims[d]) != len(dims[d]) for d in range(len(shape)) if d != dim):
            raise NotUnderstood("cat over a merged dim")
        start = t.size(offset)
        accesses.append(Access(p, aligned(info, dims, dim, lambda j, s=start: t.sub(j, s))))  # type: ignore[misc]
        offset = offset + shape_of(p)[dim]  # type: ignore[arg-type]
    return Info(dims, tuple(accesses), "cat")


def stack(node: fx.Node, ctx: Context) -> Info:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    shape = shape_of(node)
    dim = argument(node, "dim") % len(shape)
    inner = [ctx.info(p) for p in parts]  # type: ignore[arg-type]
    dims, _ = broadcast([Info((*i.dims[:dim], (), *i.dims[dim:])) for i in inner], shape)
    out = Info(dims).dim_slots()
    rest = [s for d, slots in enumerate(out) if d != dim for s in slots]
    accesses = []
    for p, info in zip(parts, inner, strict=True):
        if len(info.sizes) != len(rest):
            raise NotUnderstood("stack of tensors whose dims are merged differently")
        accesses.append(Access(p, tuple(t.slot(j) for j in rest)))  # type: ignore[arg-type]
    return Info(dims, tuple(accesses), "stack")


def repeat(node: fx.Node, ctx: Context) -> Info:
    """Tiling: a repeated dim gets the repeat count as a leading factor."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    info, shape, old = ctx.info(x), shape_of(node), shape_of(x)
    lead = len(shape) - len(info.dims)
    return _repeated(x, info, [fresh([s])[0] for s in shape[:lead]], [shape[lead + d] / s for d, s in enumerate(old)])


def repeat_interleave(node: fx.Node, ctx: Context) -> Info:
    """Each element ``repeats`` times along ``dim``: the count is a trailing factor of that dim."""
    x, repeats, dim = node.args[0], node.args[1], argument(node, "dim")
    assert isinstance(x, fx.Node)
    if not isinstance(repeats, int) or dim is None:
        raise NotUnderstood("repeat_interleave by a tensor or over all dims")
    info = ctx.info(x)
    counts = [sympy.Integer(repeats if d == dim % len(info.dims) else 1) for d in range(len(info.dims))]
    return _repeated(x, info, [], counts, trailing=True)


def _repeated(
    x: fx.Node, info: Info, lead: list[tuple[sympy.Expr, ...]], counts: Sequence[sympy.Expr], trailing: bool = False
) -> Info:
    dims = list(lead)
    exprs: list[Term | None] = []
    at = sum(map(len, lead))
    for dim, count in zip(info.dims, counts, strict=True):
        count = sympy.simplify(count)
        extra = fresh([count])[0]
        first = at if trailing else at + len(extra)
        exprs += [t.slot(first + k) for k in range(len(dim))]
        dims.append((*dim, *extra) if trailing else (*extra, *dim))
        at += len(dim) + len(extra)
    return Info(tuple(dims), (Access(x, tuple(exprs)),), "repeat")


def like(node: fx.Node, ctx: Context) -> Info:
    """zeros_like and its kin take a shape and read no element."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return Info(ctx.info(x).dims, (), "like")
