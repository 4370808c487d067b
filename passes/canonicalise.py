"""Canonicalise: one spelling for what has several, before anything is analysed.

    unbind, split, chunk, tensor_split      ->  select or slice, one for every part that is used
    cat of all parts of one tensor          ->  unflatten, permute, flatten (heads moved into the batch and back)
    einsum with an ellipsis or no result    ->  the same with every letter written out
    type_as                                 ->  to
    torch.tensor(3.0) in the user's code    ->  full
    enable_gqa of fused attention           ->  repeat_interleave of key and value heads
    broadcast_tensors of one shape          ->  its operands
    x.add_(y) on a local tensor             ->  x = x + y, for all later readers

Every rewrite here keeps values, shapes and dtypes exactly.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gemopt.graph.insert import insert
from gemopt.graph.mutation import functionalise, has_side_effect
from gemopt.graph.slots import argument, is_tensor, op_name, shape_of

aten = torch.ops.aten


def canonicalise(gm: fx.GraphModule) -> None:
    """Rewrite ``gm`` in place."""
    functionalise(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.cat.default:
            _joined_parts(gm.graph, node)
        elif node.target is aten.einsum.default:
            _spell_out(node)
        elif node.target is aten.broadcast_tensors.default:
            _broadcast(node)
        elif node.target is aten.scaled_dot_product_attention.default:
            _repeated_heads(gm.graph, node)
        elif node.target is aten.type_as.default:
            _cast(gm.graph, node)
        elif node.target is aten.lift_fresh_copy.default:
            _literal(gm, node)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _PARTS:
            _split_parts(gm.graph, node)
    gm.graph.eliminate_dead_code(lambda n: n.is_impure() or has_side_effect(n))
    gm.recompile()


# ---------------------------------------------------------------- parts of one tensor

_PARTS = (aten.unbind.int, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default)


def _dim_of(node: fx.Node) -> int:
    position = 1 if node.target is aten.unbind.int else 2
    dim = node.kwargs.get("dim", node.args[position] if position < len(node.args) else 0)
    assert isinstance(dim, int)
    return dim % node.args[0].meta["val"].ndim  # type: ignore[union-attr]


def _split_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``getitem(split(x), i)`` by the slice it means."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if any(u.target is not operator.getitem for u in node.users):
        return
    dim = _dim_of(node)
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


def _joined_parts(graph: fx.Graph, node: fx.Node) -> None:
    """``cat(x.chunk(n, a), b)`` is ``x`` with the parts' number moved from in front of dim a to in front of dim b."""
    source = _source_of_parts(node.args[0])
    if source is None or not node.meta["val"].is_contiguous():
        return
    x, count = source.args[0], len(source.meta["val"])
    assert isinstance(x, fx.Node)
    a = _dim_of(source)
    b = argument(node, "dim") % node.meta["val"].ndim
    ndim = x.meta["val"].ndim
    with graph.inserting_before(node):
        if source.target is aten.unbind.int:
            whole, rest = x, [d for d in range(ndim) if d != a]
        else:
            whole = insert(graph, node, aten.unflatten.int, x, a, [count, -1])
            rest = [d for d in range(ndim + 1) if d != a]
        order = [d for j, own in enumerate(rest) for d in ([a, own] if j == b else [own])]
        turned = insert(graph, node, aten.permute.default, whole, order)
        joined = insert(graph, node, aten.flatten.using_ints, turned, b, b + 1)
        new = insert(graph, node, aten.clone.default, joined, memory_format=torch.contiguous_format)  # no alias of x
    if shape_of(new) != shape_of(node):
        return  # parts of different sizes; what was inserted is dead
    node.replace_all_uses_with(new)


def _source_of_parts(parts: Any) -> fx.Node | None:
    """The split whose parts, all of them and in order, are listed."""
    if not isinstance(parts, list | tuple) or not parts:
        return None
    if any(not isinstance(p, fx.Node) or p.target is not operator.getitem for p in parts):
        return None
    source = parts[0].args[0]
    if source.target not in _PARTS or [p.args for p in parts] != [(source, i) for i in range(len(source.meta["val"]))]:
        return None
    if source.target is aten.unbind.int:
        return source
    shapes = {tuple(map(str, p.meta["val"].shape)) for p in parts}
    return source if len(shapes) == 1 else None


def _broadcast(node: fx.Node) -> None:
    """Operands that have the common shape already (losses broadcast input and target)."""
    operands = node.args[0]
    assert isinstance(operands, list | tuple)
    for user in node.users:
        x = operands[user.args[1]] if user.target is operator.getitem else None  # type: ignore[index, call-overload]
        if isinstance(x, fx.Node) and shape_of(x) == shape_of(user):
            user.replace_all_uses_with(x)


def _repeated_heads(graph: fx.Graph, node: fx.Node) -> None:
    """``enable_gqa`` repeats key and value heads; written out, the analyses see which query head reads which."""
    if not argument(node, "enable_gqa", False):
        return
    q, *pair = node.args[:3]
    heads = [x.meta["val"].shape[-3] if is_tensor(x) else None for x in (q, *pair)]  # type: ignore[union-attr]
    if not all(isinstance(h, int) for h in heads) or (len(node.args) > 3 and any(node.args[6:])):
        return
    with graph.inserting_before(node):
        repeated = [
            x if h == heads[0] else insert(graph, node, aten.repeat_interleave.self_int, x, int(heads[0]) // int(h), -3)  # type: ignore[arg-type]
            for x, h in zip(pair, heads[1:], strict=True)
        ]
    node.args = (q, *repeated, *node.args[3:])
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}


# ---------------------------------------------------------------- einsum and literals


def _spell_out(node: fx.Node) -> None:
    """Ellipses become letters, a missing result is written down (letters that occur once, in alphabetical order)."""
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    ranks = [n.meta["val"].ndim if is_tensor(n) else -1 for n in operands]  # type: ignore[union-attr]
    node.args = (spelled_out(equation, ranks), *node.args[1:])


def spelled_out(equation: str, ranks: Sequence[int]) -> str:
    """An einsum equation without ellipsis and with its result, for operands of these ranks."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    words = inputs.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    extents = [rank - len(word.replace("...", "")) if "..." in word else 0 for word, rank in zip(words, ranks, strict=True)]
    if max(extents) > len(free):
        return equation
    shared = "".join(free[: max(extents)])
    words = [w.replace("...", shared[len(shared) - n :]) for w, n in zip(words, extents, strict=True)]
    letters = "".join(words)
    if not arrow:
        output = shared + "".join(c for c in sorted(set(letters) - set(shared)) if letters.count(c) == 1)
    return f"{','.join(words)}->{output.replace('...', shared)}"


def _cast(graph: fx.Graph, node: fx.Node) -> None:
    """``x.type_as(y)`` reads nothing of y but its dtype."""
    x, like = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(like, fx.Node)
    if x.meta["val"].device != like.meta["val"].device:
        return
    with graph.inserting_before(node):
        new = graph.call_function(aten.to.dtype, (x, like.meta["val"].dtype))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _literal(gm: fx.GraphModule, node: fx.Node) -> None:
    """A number that the user wrapped in a tensor."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "get_attr" or op_name(node) == "":
        return
    held: Any = gm
    for name in str(source.target).split("."):
        held = getattr(held, name)
    if not isinstance(held, torch.Tensor) or held.ndim != 0 or held.requires_grad or isinstance(held, torch.nn.Parameter):
        return
    value = node.meta["val"]
    with gm.graph.inserting_before(node):
        full = gm.graph.call_function(
            aten.full.default, ([], held.item()), {"dtype": value.dtype, "device": value.device}
        )  # fmt: skip
        full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
