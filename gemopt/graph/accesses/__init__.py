"""The access of every operator gemopt understands: one small function per kind of op, one table at the end.

An op that is not in the table, or is used in a form its handler does not know (`NotUnderstood`), is opaque: it gets fresh
dims, and everything it reads is live. That is always sound, so the table may grow one op at a time.
"""

from __future__ import annotations

from torch import fx

from gemopt.graph.accesses.context import Context, Handler
from gemopt.graph.accesses.contractions import (
    along,
    attention,
    baddbmm,
    einsum,
    extremum,
    is_extremum,
    linear,
    matmul,
    normalisation,
    reduction,
    token_loss,
)
from gemopt.graph.accesses.lookups import embedding, gather, index, index_select, take_along_dim
from gemopt.graph.accesses.movement import (
    cat,
    expand,
    like,
    moved_dims,
    permute,
    repeat,
    repeat_interleave,
    select,
    slice_,
    stack,
    swapped,
    triangle,
    view,
)
from gemopt.graph.accesses.pointwise import elementwise_loss, is_pointwise, pointwise
from gemopt.graph.slots import (
    Access,
    Info,
    NotUnderstood,
    argument,
    fresh,
    is_tensor,
    op_name,
    shape_of,
)


def info_of(node: fx.Node, ctx: Context) -> Info:
    """`Info` of a tensor node, opaque where its op is not understood."""
    name = op_name(node)
    handler = TABLE.get(name)
    if handler is None and is_pointwise(node):
        handler = pointwise
    if is_extremum(node):
        handler = extremum
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


def _table() -> dict[str, Handler]:
    groups: list[tuple[str, Handler]] = [
        ("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as", view),
        ("expand expand_as broadcast_to", expand),
        ("permute", permute(lambda n, k: argument(n, "dims"))),
        ("transpose swapaxes swapdims", permute(lambda n, k: swapped(n.args[1], n.args[2], k))),  # type: ignore[arg-type]
        ("t numpy_T", permute(lambda n, k: list(range(k))[::-1])),
        ("mT adjoint matrix_H mH", permute(lambda n, k: swapped(-1, -2, k))),
        ("movedim moveaxis", permute(lambda n, k: moved_dims(n.args[1], n.args[2], k))),
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
        ("take_along_dim", take_along_dim),
        ("index_select", index_select),
        ("index", index),
        ("sum mean amax amin prod any all logsumexp var std nansum argmax argmin count_nonzero", reduction),
        (
            "softmax _softmax special_softmax log_softmax _log_softmax special_log_softmax cumsum cumprod logcumsumexp",
            along("dim"),
        ),
        ("flip", along("dims")),
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
