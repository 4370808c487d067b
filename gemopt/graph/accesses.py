"""The access of every operator gemopt understands: one small function per kind of op, one table at the end.

An op that is not in the table, or is used in a form its handler does not know (`NotUnderstood`), is opaque: it gets fresh
dims, and everything it reads is live. That is always sound, so the table may grow one op at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from gemopt.graph import terms as t
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
    nodes_in,
    op_name,
    reshape,
    shape_of,
)
from gemopt.graph.terms import Term


class Context(Protocol):
    """What a handler may ask about operands: their dims, and the value of integer ones."""

    def info(self, node: fx.Node) -> Info: ...
    def value(self, node: fx.Node) -> Term | None: ...


Handler = Callable[[fx.Node, Context], Info]


def info_of(node: fx.Node, ctx: Context) -> Info:
    """`Info` of a tensor node, opaque where its op is not understood."""
    name = op_name(node)
    handler = TABLE.get(name)
    if handler is None and is_pointwise(node):
        handler = pointwise
    try:
        if handler is not None:
            info = handler(node, ctx)
            if len(info.dims) == len(shape_of(node)):
                return info
    except NotUnderstood:
        pass
    return opaque(node, ctx)


def opaque(node: fx.Node, ctx: Context) -> Info:
    """Fresh dims; every operand may matter everywhere."""
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    accesses = tuple(Access(n, (None,) * len(ctx.info(n).sizes)) for n in operands)
    return Info(fresh(shape_of(node)), accesses, "opaque" if operands else "source")


# Composite ops that act element by element but carry no pointwise tag before decomposition.
_UNTAGGED_POINTWISE = frozenset(
    "aten." + n
    for n in [
        "dropout",
        "feature_alpha_dropout",
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "alias",
        "lift_fresh_copy",
        "masked_fill",
        "where",
        "relu6",
        "selu",
        "celu",
        "softplus",
        "mish",
        "rsub",
        "nan_to_num",
        "square",
        "clip",
        "bernoulli",
        "__and__",
        "__or__",
        "__xor__",
        "log_sigmoid",
        "rand_like",
        "randn_like",
    ]
)


def is_pointwise(node: fx.Node) -> bool:
    if op_name(node) in _UNTAGGED_POINTWISE:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def pointwise(node: fx.Node, ctx: Context) -> Info:
    operands = [n for n in nodes_in(node.args, node.kwargs) if is_tensor(n)]
    shape = shape_of(node)
    if not operands:
        return Info(fresh(shape), (), "source")
    dims, exprs = broadcast([ctx.info(n) for n in operands], shape)
    return Info(dims, tuple(Access(n, e) for n, e in zip(operands, exprs, strict=True)), "pointwise")


# ---------------------------------------------------------------- movement


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


def _swap(a: int, b: int, n: int) -> list[int]:
    order = list(range(n))
    order[a], order[b] = order[b], order[a]
    return order


def _move(source: Any, destination: Any, n: int) -> list[int]:
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
    if step != 1 or len(info.dims[dim]) > 1 or not first.is_nonnegative:
        raise NotUnderstood("slice with a step or over a merged dim")
    dims = tuple(fresh([new[d]])[0] if d == dim else f for d, f in enumerate(info.dims))
    exprs = _aligned(info, dims, dim, lambda j: t.add(j, t.size(first)))
    return Info(dims, (Access(x, exprs),), "slice")


def _aligned(info: Info, dims: Dims, dim: int, index: Callable[[Term], Term]) -> Exprs:
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
        accesses.append(Access(p, _aligned(info, dims, dim, lambda j, s=start: t.sub(j, s))))  # type: ignore[misc]
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


# ---------------------------------------------------------------- lookups


def embedding(node: fx.Node, ctx: Context) -> Info:
    weight, ids = node.args[0], node.args[1]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
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

    exprs = _aligned(info, dims, dim, position)  # type: ignore[arg-type]
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


# ---------------------------------------------------------------- reductions and contractions


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
            known = letters.get(letter, ())
            if known and dim and known != dim:
                raise NotUnderstood("einsum over dims merged differently")
            letters[letter] = known or dim
    dims = tuple(letters[c] for c in output)
    out = dict(zip(output, Info(dims).dim_slots(), strict=True))
    accesses = []
    for word, n in zip(subscripts, operands, strict=True):
        exprs: list[Term | None] = []
        for letter, dim in zip(word, ctx.info(n).dims, strict=True):  # type: ignore[arg-type]
            if dim:
                exprs += [t.slot(j) for j in out[letter]] if letter in out else [None] * len(dim)
        accesses.append(Access(n, tuple(exprs)))  # type: ignore[arg-type]
    return Info(dims, tuple(accesses), "contraction")


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


def elementwise_loss(node: fx.Node, ctx: Context) -> Info:
    """Losses between two tensors of one shape: pointwise when nothing is reduced."""
    if argument(node, "reduction") != 0:
        raise NotUnderstood("a loss reduced over every row")
    return pointwise(node, ctx)


def _table() -> dict[str, Handler]:
    groups: list[tuple[str, Handler]] = [
        ("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as", view),
        ("expand expand_as broadcast_to", expand),
        ("permute", permute(lambda n, k: argument(n, "dims"))),
        ("transpose swapaxes swapdims", permute(lambda n, k: _swap(n.args[1], n.args[2], k))),  # type: ignore[arg-type]
        ("t numpy_T", permute(lambda n, k: list(range(k))[::-1])),
        ("mT adjoint matrix_H mH", permute(lambda n, k: _swap(-1, -2, k))),
        ("movedim moveaxis", permute(lambda n, k: _move(n.args[1], n.args[2], k))),
        ("select", select),
        ("slice narrow", slice_),
        ("cat concat concatenate", cat),
        ("stack", stack),
        ("tril triu", triangle),
        ("zeros_like ones_like full_like", like),
        ("repeat tile", repeat),
        ("repeat_interleave", repeat_interleave),
        ("embedding", embedding),
        ("gather", gather),
        ("index_select", index_select),
        ("index", index),
        ("sum mean amax amin prod any all logsumexp var std nansum argmax argmin count_nonzero", reduction),
        (
            "softmax _softmax special_softmax log_softmax _log_softmax special_log_softmax cumsum cumprod logcumsumexp flip",
            along("dim"),
        ),
        ("layer_norm rms_norm", normalisation),
        ("linear", linear),
        ("matmul mm bmm", matmul),
        ("baddbmm addmm", baddbmm),
        ("einsum", einsum),
        ("scaled_dot_product_attention", attention),
        ("cross_entropy_loss nll_loss_nd nll_loss", token_loss),
        (
            "binary_cross_entropy_with_logits binary_cross_entropy mse_loss l1_loss smooth_l1_loss huber_loss",
            elementwise_loss,
        ),
    ]
    return {f"aten.{name}": handler for names, handler in groups for name in names.split()}


TABLE: dict[str, Handler] = _table()
