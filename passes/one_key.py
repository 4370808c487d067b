"""Attention over one key, written out element by element.

An axis of one key has no slot, so ``q kᵀ`` and ``w v`` over it look like products that contract nothing or lead to nothing,
and the packed graph has no form for them. What they compute is local in the rows of the queries:

    q kᵀ      (q * k).sum(features)          w v      w * v
    scaled_dot_product_attention             the weight of the only key is 1 where it is visible and 0 where it is not

As such, the key and the value of a sample are gathered for each of its rows like any term of the sample, and no kernel is
needed. Products in 16 bits are multiplied and summed in fp32 and rounded once, as a product is, forward and backward; where
autocast rounds operands, they are rounded first.

The softmax is left to be computed where the user wrote one: over one score it is 1, or NaN where that is infinite. In the
fused form eager gives 0 to a query whose key is hidden and no gradient to anything, and so does what is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gemopt.graph.attention import Site
from gemopt.graph.emit import stride_order
from gemopt.graph.facts import Analysis
from gemopt.graph.insert import insert
from gemopt.graph.slots import Access, argument, is_tensor, op_name, shape_of
from gemopt.passes.canonicalise import spelled_out
from gemopt.passes.recognise.products import behind, is_weight, only_product, product
from gemopt.passes.recognise.walk import slots_of

aten = torch.ops.aten

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OneKey:
    """An attention over one key: its result and its products, as they are written now."""

    out: fx.Node
    products: tuple[fx.Node, ...]
    spelling: str


def write_out_one_key(gm: fx.GraphModule, known: Analysis, sites: Sequence[Site]) -> tuple[list[OneKey], bool]:
    """Rewrite ``gm`` in place: the attentions over one key that were found, and whether the graph is another one now.

    What belongs to one of ``sites`` is left as it is.
    """
    taken = {n for s in sites for n in (s.out, *s.interior)}
    found = [x for node in gm.graph.nodes if node not in taken for x in _find(node, known, taken)]
    if not found:
        return [], False
    written: dict[fx.Node, fx.Node] = {}
    done: list[OneKey] = []
    for site in found:
        nodes = (*site.products, site.out)
        if not all(map(_writable, nodes)):
            continue
        for node in nodes:
            if node not in written:
                written[node] = _written_out(gm.graph, node)
                node.replace_all_uses_with(written[node])
        done.append(OneKey(written[site.out], tuple(written[n] for n in site.products), site.spelling))
    changed = [n for n, new in written.items() if n is not new]
    for node in reversed(changed):
        gm.graph.erase_node(node)
    if changed:
        gm.recompile()
    return done, bool(changed)


# ---------------------------------------------------------------- finding


def _find(node: fx.Node, known: Analysis, taken: set[fx.Node]) -> list[OneKey]:
    if op_name(node) == "aten.scaled_dot_product_attention":
        k = node.args[1]
        if not isinstance(k, fx.Node) or known.info(node).kind != "attention" or shape_of(k)[-2] != 1:
            return []
        return [OneKey(node, (), op_name(node))] if shape_of(k)[-1].is_Integer else []
    for weights, values in _orders(node, known):
        if not _share_sequences(weights, values):
            continue
        products = ((n, product(n, known)) for n in behind(weights.operand, known) if n not in taken)
        inner = [n for n, found in products if found is not None and _share_sequences(*found.operands)]
        if inner:
            return [OneKey(node, tuple(inner), f"{op_name(inner[0])} -> {op_name(node)}")]
    return []


def _share_sequences(a: Access, b: Access) -> bool:
    """Whether the operands have an axis in common that the result keeps; a matrix of weights has none."""
    return bool(slots_of(a.exprs) & slots_of(b.exprs)) and not is_weight(a.operand) and not is_weight(b.operand)


def _orders(node: fx.Node, known: Analysis) -> list[tuple[Access, Access]]:
    """The operands of a product that contracts nothing but an axis of size 1, both ways round."""
    if not is_tensor(node) or node not in known.infos:
        return []
    info = known.info(node)
    pair: tuple[Access, ...] = ()
    if info.kind == "contraction":
        found = product(node, known)
        pair = found.operands if found is not None and only_product(found, known) else ()
    elif op_name(node) == "aten.sum" and all(e is not None for e in info.accesses[0].exprs):
        inner = info.accesses[0].operand
        pair = known.info(inner).accesses if op_name(inner) == "aten.mul" else ()
    if len(pair) != 2 or pair[0].operand is pair[1].operand or any(e is None for a in pair for e in a.exprs):
        return []
    return [(pair[0], pair[1]), (pair[1], pair[0])]


# ---------------------------------------------------------------- writing


_FIRST_OPERAND = {"aten.matmul": 0, "aten.bmm": 0, "aten.mm": 0, "aten.baddbmm": 1}


def _writable(node: fx.Node) -> bool:
    return op_name(node) in ("aten.sum", "aten.einsum", "aten.scaled_dot_product_attention", *_FIRST_OPERAND)


def _written_out(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same result by element-wise ops and a sum, in front of ``node``; ``node`` where it is that already."""
    if op_name(node) == "aten.sum":
        return node
    fused = op_name(node) == "aten.scaled_dot_product_attention"
    with graph.inserting_before(node):
        result = _only_key(graph, node) if fused else _multiplied(graph, node)
        result = _laid_out(graph, node, _cast(graph, node, result, node.meta["val"].dtype))
    assert shape_of(result) == shape_of(node)
    return result


def _words(node: fx.Node) -> tuple[list[fx.Node], str]:
    """A product as operands and an einsum equation."""
    name = op_name(node)
    if name == "aten.einsum":
        return list(node.args[1]), str(node.args[0]).replace(" ", "")  # type: ignore[arg-type]
    at = _FIRST_OPERAND[name]
    operands: list[fx.Node] = list(node.args[at : at + 2])  # type: ignore[arg-type]
    ranks = [x.meta["val"].ndim for x in operands]
    return operands, spelled_out("...ik,k->...i" if ranks[1] == 1 else "...ik,...kj->...ij", ranks)


def _multiplied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    operands, equation = _words(node)
    inputs, out = equation.split("->")
    words = inputs.split(",")
    sizes: dict[str, set[bool]] = {}
    for word, x in zip(words, operands, strict=True):
        for letter, n in zip(word, shape_of(x), strict=True):
            sizes.setdefault(letter, set()).add(n == 1)
    gone = [c for c in sizes if c not in out and sizes[c] == {True}]
    summed = [c for c in sizes if c not in out and c not in gone]
    order = out + "".join(summed)
    factors = [_factor(graph, node, x, word, gone, order) for x, word in zip(operands, words, strict=True)]
    result = insert(graph, node, aten.mul.Tensor, *factors)
    if summed:
        result = insert(graph, node, aten.sum.dim_IntList, result, list(range(len(out), len(order))))
    if op_name(node) == "aten.baddbmm":
        alpha, beta = argument(node, "alpha"), argument(node, "beta")
        result = result if alpha == 1 else insert(graph, node, aten.mul.Tensor, result, alpha)
        if beta != 0:  # with 0, eager does not look at what is added
            added = _cast(graph, node, node.args[0], result.meta["val"].dtype)  # type: ignore[arg-type]
            result = insert(graph, node, aten.add.Tensor, result, added, alpha=beta)
    return result


def _factor(graph: fx.Graph, node: fx.Node, x: fx.Node, word: str, gone: Sequence[str], order: str) -> fx.Node:
    """An operand in the dtype it is multiplied in, its dims in this order."""
    x = _wide(graph, node, x)
    for letter in gone:
        if letter in word:
            x = insert(graph, node, aten.squeeze.dim, x, word.index(letter))
            word = word.replace(letter, "")
    turned = [word.index(c) for c in order if c in word]
    if turned != list(range(len(word))):
        x = insert(graph, node, aten.permute.default, x, turned)
    for i, letter in enumerate(order):
        if letter not in word:
            x = insert(graph, node, aten.unsqueeze.default, x, i)
    return x


def _only_key(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Fused attention over one key."""
    q, k, v = (_wide(graph, node, x) for x in node.args[:3])  # type: ignore[arg-type]
    scores = insert(graph, node, aten.sum.dim_IntList, insert(graph, node, aten.mul.Tensor, q, k), [-1], True)
    scale = argument(node, "scale")
    scores = insert(graph, node, aten.mul.Tensor, scores, q.meta["val"].shape[-1] ** -0.5 if scale is None else scale)
    mask = argument(node, "attn_mask")
    hidden = None
    if is_tensor(mask) and mask.meta["val"].dtype == torch.bool:
        hidden = insert(graph, node, aten.logical_not.default, mask)
    elif is_tensor(mask):
        hidden = insert(graph, node, aten.eq.Scalar, mask, -float("inf"))
        added = insert(graph, node, aten.masked_fill.Scalar, mask, hidden, 0.0)
        scores = insert(graph, node, aten.add.Tensor, scores, _cast(graph, node, added, scores.meta["val"].dtype))
    weights = insert(graph, node, aten.softmax.int, scores, -1)
    if hidden is not None:
        weights = insert(graph, node, aten.masked_fill.Scalar, weights, hidden, 0.0)
    rate = argument(node, "dropout_p", 0.0)
    if rate:
        weights = insert(graph, node, aten.dropout.default, weights, rate, True)
    return insert(graph, node, aten.mul.Tensor, weights, v)


def _wide(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """An operand rounded as the product rounds it, in the dtype that the product sums in."""
    dtype = node.meta["val"].dtype
    x = _cast(graph, node, x, dtype)
    return _cast(graph, node, x, torch.float32) if dtype in _LOW else x


def _cast(graph: fx.Graph, node: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else insert(graph, node, aten.to.dtype, x, dtype)


def _laid_out(graph: fx.Graph, node: fx.Node, result: fx.Node) -> fx.Node:
    """With the strides of ``node``, which the caller may see."""
    want, have = node.meta["val"], result.meta["val"]
    pairs = zip(want.shape, want.stride(), have.stride(), strict=True)
    if all(statically_known_true(n == 1) or statically_known_true(a == b) for n, a, b in pairs):
        return result
    order = stride_order(want)
    turned = insert(graph, node, aten.permute.default, result, order)
    dense = insert(graph, node, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return insert(graph, node, aten.permute.default, dense, [order.index(d) for d in range(want.ndim)])
