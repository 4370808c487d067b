"""A convolution over tokens with a kernel of one token is a linear layer, and mixes no rows.

    conv1d(x, W, b) with x [B, C, L], W [O, C, 1]    ->    linear(x.transpose(1, 2), W[:, :, 0], b).transpose(1, 2).clone()

    out[b, o, l] = sum_c W[o, c, 0] x[b, c, l] + b[o]

The feed-forward of SASRec (Kang and McAuley, 2018) and of its many ports is written that way. Values are the same up to
rounding; the packed graph alone is built from it, the padded one keeps the convolution.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from gemopt.graph.insert import insert
from gemopt.graph.slots import argument

aten = torch.ops.aten


def pointwise_convolutions(gm: fx.GraphModule) -> None:
    """Rewrite ``gm`` in place."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is aten.conv1d.default and _is_pointwise(node):
            _as_linear(gm.graph, node)
    gm.recompile()


def _is_pointwise(node: fx.Node) -> bool:
    x, weight = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    shape = weight.meta["val"].shape
    if x.meta["val"].ndim not in (2, 3) or not isinstance(shape[2], int) or shape[2] != 1:
        return False
    if not node.meta["val"].is_contiguous():
        return False
    one = all(_first(argument(node, name, 1)) == 1 for name in ("stride", "groups"))
    return one and _first(argument(node, "padding", 0)) == 0


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _as_linear(graph: fx.Graph, node: fx.Node) -> None:
    x, weight = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    bias = argument(node, "bias")

    add = partial(insert, graph, node)
    with graph.inserting_before(node):
        rows = add(aten.transpose.int, x, -1, -2)
        matrix = add(aten.select.int, weight, 2, 0)
        operands = (rows, matrix) if bias is None else (rows, matrix, bias)
        turned = add(aten.transpose.int, add(aten.linear.default, *operands), -1, -2)
        new = add(aten.clone.default, turned, memory_format=torch.contiguous_format)  # laid out as the convolution's result
    node.replace_all_uses_with(new)
    graph.erase_node(node)
