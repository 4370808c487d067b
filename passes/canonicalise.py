"""Canonicalise: one spelling for what has several, before anything is analysed.

    unbind, split, chunk, tensor_split    ->  select or slice, one for every part that is used
    x.add_(y) on a local tensor           ->  x = x + y, for all later readers
    x @ W, addmm(b, x, W), W a parameter  ->  linear(x, W.t(), b): rows of x times a weight, not two tensors with rows

Every rewrite here keeps values (the last one up to rounding), shapes and dtypes.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from gemopt.graph.mutation import functionalise

aten = torch.ops.aten


def canonicalise(gm: fx.GraphModule) -> None:
    """Rewrite ``gm`` in place."""
    functionalise(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _PARTS:
            _split_parts(gm.graph, node)
        elif node.op == "call_function" and node.target in _PRODUCTS:
            _weight_product(gm.graph, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


_PARTS = (aten.unbind.int, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default)


def _split_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``getitem(split(x), i)`` by the slice it means."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if any(u.target is not operator.getitem for u in node.users):
        return
    dim = node.kwargs.get("dim", node.args[-1] if _dim_position(node) < len(node.args) else 0)
    assert isinstance(dim, int)
    dim %= x.meta["val"].ndim
    parts = node.meta["val"]
    if node.target is not aten.unbind.int and not all(isinstance(p.shape[dim], int) for p in parts):
        return
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + (1 if node.target is aten.unbind.int else int(part.shape[dim])))
    for user in list(node.users):
        i = user.args[1]
        assert isinstance(i, int)
        i %= len(parts)
        with graph.inserting_before(user):
            if node.target is aten.unbind.int:
                new = graph.call_function(aten.select.int, (x, dim, i))
            else:
                new = graph.call_function(aten.slice.Tensor, (x, dim, starts[i], starts[i + 1]))
        new.meta = dict(user.meta)
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def _dim_position(node: fx.Node) -> int:
    return 1 if node.target is aten.unbind.int else 2


_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)
_WEIGHT_VIEWS = (
    aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.detach.default,
    aten.mT.default, aten.to.dtype, aten._to_copy.default,
)  # fmt: skip


def _weight_product(graph: fx.Graph, node: fx.Node) -> None:
    """Write a product whose right operand is a parameter as the linear layer it is."""
    bias, x, weight = node.args if node.target is aten.addmm.default else (None, *node.args)
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if x.meta["val"].ndim < 2 or weight.meta["val"].ndim != 2 or not _is_parameter(weight):
        return
    if isinstance(bias, fx.Node) and bias.meta["val"].ndim != 1:
        return
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or "out_dtype" in node.kwargs:
        return
    with graph.inserting_before(node):
        turned = graph.call_function(aten.t.default, (weight,))
        new = graph.call_function(aten.linear.default, (x, turned) if bias is None else (x, turned, bias))
    turned.meta = {**node.meta, "val": weight.meta["val"].t()}
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node is a view or cast of an input that Dynamo knows as a module's own tensor."""
    while node.op == "call_function" and node.target in _WEIGHT_VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
