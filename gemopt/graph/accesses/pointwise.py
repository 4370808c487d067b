"""Ops that act element by element: operands are broadcast, every slot is local."""

from __future__ import annotations

import torch
from torch import fx

from gemopt.graph.accesses.context import Context
from gemopt.graph.slots import (
    Access,
    Info,
    NotUnderstood,
    argument,
    broadcast,
    fresh,
    is_tensor,
    nodes_in,
    op_name,
    shape_of,
)

# Composite ops that act element by element but carry no pointwise tag before decomposition.
_UNTAGGED_POINTWISE = frozenset(
    "aten." + n
    for n in [
        "dropout",
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
        "leaky_relu",
        "elu",
        "hardtanh",
        "hardsigmoid",
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
        "hardswish",
        "floor_divide",
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


def elementwise_loss(node: fx.Node, ctx: Context) -> Info:
    """Losses between two tensors of one shape: pointwise when nothing is reduced."""
    if argument(node, "reduction") != 0:
        raise NotUnderstood("a loss reduced over every row")
    return pointwise(node, ctx)
