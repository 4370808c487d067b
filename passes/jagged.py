"""Jagged inputs made padded: `jagged_to_padded_dense` in plain ATen, as the analyses know it.

    x = jagged_to_padded_dense(values, [offsets], [L], pad)
    x[b, p] = values[offsets[b] + p]  where p < offsets[b + 1] - offsets[b], else pad            p = 0 .. L - 1

becomes ``masked_fill(embedding(values, position), not mask, pad)``, ``values[position]`` where values are 1-D: an embedding
by token with a table of T rows, and a fact about the rows that hold no token. Positions are clamped into the table, so rows
that are filled anyway read something.

Offsets and lengths say the same, and a mask must be one term whichever of them the user took it from. Where the
offsets are the cumulative sum of lengths inside the graph (`KeyedJaggedTensor.offsets()`), differences of offsets are
those lengths; ``diff`` is the difference of two slices.

If the lengths are what they say they are, and the offsets start at 0, the mask holds in exactly T places, and T is the size
of an input: `row_totals` lists such masks for the plan, which then need not wait for a count (graph/totals.py).

Known ops: fbgemm's ``jagged_to_padded_dense`` (also ``_forward``), ``jagged_2d_to_dense`` and ``jagged_1d_to_dense``, and
``aten._jagged_to_padded_dense_forward``, with one ragged dim. Only the packed graph is made from this form; a padded step
runs the op itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from gemopt.graph.insert import insert
from gemopt.graph.mutation import functionalise, tainted
from gemopt.graph.slots import argument, expr_of, is_tensor, op_name
from gemopt.graph.totals import Total
from gemopt.graph.values import Values

aten = torch.ops.aten

_LISTED = frozenset(
    ("fbgemm.jagged_to_padded_dense", "fbgemm.jagged_to_padded_dense_forward", "aten._jagged_to_padded_dense_forward")
)
_SINGLE = frozenset(("fbgemm.jagged_2d_to_dense", "fbgemm.jagged_1d_to_dense"))
_INTEGERS = (torch.int32, torch.int64)
_END = 2**63 - 1


def jagged_inputs(gm: fx.GraphModule) -> None:
    """Rewrite ``gm`` in place. Writes are made functional first: a length may be read later than its sum was made."""
    functionalise(gm)
    sums = _Sums(tainted(gm.graph))
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        name = op_name(node)
        if name in _LISTED | _SINGLE:
            _padded(gm.graph, node, sums)
        elif name == "aten.diff" or node.target is aten.sub.Tensor:
            _difference(gm.graph, node, sums)
    gm.recompile()


def row_totals(graph: fx.Graph, values: Values) -> list[Total]:
    """For every mask of a jagged input: its term over (sequence, position), its sizes, and how often it should hold."""
    found = []
    for node in graph.nodes:
        if "jagged_values" in node.meta:
            term, (rows, name, whole) = values[node], node.meta["jagged_values"]
            if term is not None:
                sizes = tuple(expr_of(s) for s in node.meta["val"].shape)
                found.append(Total(term, sizes, expr_of(rows), f"the rows of {name}", whole))
    return found


Add = Callable[..., fx.Node]

# ---------------------------------------------------------------- the padded form


def _padded(graph: fx.Graph, node: fx.Node, sums: _Sums) -> None:
    values, offsets, length, fill = _arguments(node)
    if not is_tensor(values) or not is_tensor(offsets) or values.meta["val"].ndim not in (1, 2):
        return
    x, dtype = values.meta["val"], offsets.meta["val"].dtype
    if dtype not in _INTEGERS or offsets.meta["val"].ndim != 1 or x.dtype != node.meta["val"].dtype or x.is_complex():
        return
    with graph.inserting_before(node):
        add = partial(insert, graph, node)
        starts = add(aten.slice.Tensor, offsets, 0, 0, -1)
        tokens = add(aten.arange.default, length, device=x.device, pin_memory=False)
        across = add(aten.unsqueeze.default, tokens, 0)
        mask = add(aten.lt.Tensor, across, add(aten.unsqueeze.default, sums.lengths(add, offsets), 1))
        mask.meta["jagged_values"] = (x.shape[0], values.name, sums.are_whole(offsets))
        position = add(aten.add.Tensor, add(aten.unsqueeze.default, starts, 1), across)
        last = add(operator.sub, add(aten.sym_size.int, values, 0), 1)
        position = add(aten.clamp.default, position, 0, last)
        other = add(aten.bitwise_not.default, mask)
        if x.ndim == 2:
            rows = add(aten.embedding.default, values, position)
            other = add(aten.unsqueeze.default, other, -1)
        else:
            rows = add(aten.index.Tensor, values, [position])
        new = add(aten.masked_fill.Scalar, rows, other, fill if x.is_floating_point() else int(fill))
    if tuple(map(expr_of, new.meta["val"].shape)) != tuple(map(expr_of, node.meta["val"].shape)):
        return  # what was inserted is dead
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    """Values, the offsets (None where there are several ragged dims), L and the fill."""
    values = node.args[0]
    if op_name(node) in _SINGLE:
        return values, node.args[1], argument(node, "max_sequence_length"), argument(node, "padding_value", 0)
    offsets, lengths = node.args[1], argument(node, "max_lengths")
    if not isinstance(offsets, list | tuple) or len(offsets) != 1:
        return values, None, None, None
    return values, offsets[0], lengths[0], argument(node, "padding_value", 0.0)


# ---------------------------------------------------------------- lengths and offsets


def _difference(graph: fx.Graph, node: fx.Node, sums: _Sums) -> None:
    """``offsets.diff()`` and ``offsets[1:] - offsets[:-1]``, in the one spelling that every mask shares."""
    offsets = _differenced(node)
    if offsets is None or offsets.meta["val"].dtype not in _INTEGERS or offsets.meta["val"].ndim != 1:
        return
    if node.target is aten.sub.Tensor and sums.of(offsets) is None:
        return  # is that spelling
    with graph.inserting_before(node):
        new = sums.lengths(partial(insert, graph, node), offsets)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _differenced(node: fx.Node) -> fx.Node | None:
    """The tensor of whose neighbours ``node`` is the difference, later minus earlier."""
    x = node.args[0]
    if not isinstance(x, fx.Node):
        return None
    if op_name(node) == "aten.diff":
        plain = argument(node, "n", 1) == 1 and argument(node, "dim", -1) in (-1, 0)
        return x if plain and argument(node, "prepend") is None and argument(node, "append") is None else None
    y = node.args[1]
    if not isinstance(y, fx.Node) or argument(node, "alpha", 1) != 1:
        return None
    later, earlier = _bounds(x), _bounds(y)
    if later is None or earlier is None or later[0] is not earlier[0]:
        return None
    return later[0] if later[1:] == (1, _END) and earlier[1:] == (0, -1) else None


def _bounds(x: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """Source, start and end of a slice of a 1-D tensor with step 1."""
    if x.target is not aten.slice.Tensor or argument(x, "step", 1) != 1 or not is_tensor(x.args[0]):
        return None
    return x.args[0], argument(x, "start", None) or 0, argument(x, "end", None)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Sums:
    """Which tensors are cumulative sums of lengths. What is ``written`` has another value when it is read again."""

    written: Collection[fx.Node]

    def lengths(self, add: Add, offsets: fx.Node) -> fx.Node:
        """``offsets[1:] - offsets[:-1]``, or the lengths whose cumulative sum the offsets are."""
        summed = self.of(offsets)
        dtype = offsets.meta["val"].dtype
        if summed is None:
            later = add(aten.slice.Tensor, offsets, 0, 1, _END)
            return add(aten.sub.Tensor, later, add(aten.slice.Tensor, offsets, 0, 0, -1))
        return summed if summed.meta["val"].dtype == dtype else add(aten.to.dtype, summed, dtype)

    def of(self, offsets: fx.Node) -> fx.Node | None:
        """The lengths, where ``offsets`` is certainly 0 followed by their cumulative sum."""
        if offsets in self.written:
            return None
        name, x = op_name(offsets), offsets.args[0] if offsets.args else None
        if name == "fbgemm.asynchronous_complete_cumsum":
            return self._followed(x)
        if name in ("aten.to", "aten._to_copy", "aten.contiguous", "aten.clone", "aten.detach") and isinstance(x, fx.Node):
            return self.of(x) if offsets.meta["val"].dtype in _INTEGERS and x.meta["val"].dtype in _INTEGERS else None
        if name in ("aten.constant_pad_nd", "aten.pad"):
            pads, mode = argument(offsets, "pad"), argument(offsets, "mode", "constant")
            zero = not argument(offsets, "value", None)
            return self._cumulative(x) if list(pads) == [1, 0] and mode == "constant" and zero else None
        if name in ("aten.cat", "aten.concat", "aten.concatenate") and isinstance(x, list | tuple) and len(x) == 2:
            return self._cumulative(x[1]) if _is_one_zero(x[0]) and x[0] not in self.written else None
        return None

    def are_whole(self, offsets: fx.Node) -> bool:
        """Whether these should be all the offsets of their values: an input or a cumulative sum, and not a part of one (the
        sequences of one key among several)."""
        return offsets.op == "placeholder" or self.of(offsets) is not None

    def _cumulative(self, x: Any) -> fx.Node | None:
        if not isinstance(x, fx.Node) or op_name(x) != "aten.cumsum" or x.meta["val"].dtype not in _INTEGERS:
            return None
        return None if x in self.written else self._followed(x.args[0])

    def _followed(self, x: Any) -> fx.Node | None:
        """``x`` if its values can be followed: a vector of int32 or int64 that nothing writes."""
        plain = is_tensor(x) and x.meta["val"].ndim == 1 and x.meta["val"].dtype in _INTEGERS
        return x if plain and x not in self.written else None


def _is_one_zero(x: Any) -> bool:
    if not is_tensor(x) or tuple(x.meta["val"].shape) != (1,):
        return False
    name = op_name(x)
    return name in ("aten.zeros", "aten.new_zeros") or (
        name in ("aten.full", "aten.new_full") and argument(x, "fill_value") == 0
    )
