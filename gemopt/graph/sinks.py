"""Readers that take a packed tensor and give a padded result: sums over tokens, gathers, token losses.

Each function answers with the new node, or None when it does not apply: the reader then gets an unpacked tensor.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from gemopt import ops
from gemopt.graph import terms as t
from gemopt.graph.prologue import writable
from gemopt.graph.rowsets import Rows, RowSet
from gemopt.graph.slots import argument, is_tensor, op_name
from gemopt.graph.units import Unit, kept_dims, kept_units, plain_slots

if TYPE_CHECKING:
    from gemopt.graph.emit import Emitter

aten = torch.ops.aten


def absorb(emitter: Emitter, node: fx.Node) -> fx.Node | None:
    """The node on packed operands, if there is a form of it."""
    if not is_tensor(node):
        return None
    kind = emitter.known.info(node).kind
    if kind == "boolean_index":
        return _boolean_index(emitter, node)
    operands = [a.operand for a in emitter.known.operands(node)]
    if not operands or operands[0] not in emitter.phys:
        return None
    if kind == "reduction":
        return _reduction(emitter, node)
    if kind in ("gather", "select"):
        return _gather(emitter, node)
    if kind == "loss" and argument(node, "reduction") != 0:
        return _loss(emitter, node)
    return None


def _reduction(emitter: Emitter, node: fx.Node) -> fx.Node | None:
    """Sum or mean over the token axis (per sequence) or over all rows, of a tensor that is 0 on the other rows."""
    name, x = op_name(node), node.args[0]
    assert isinstance(x, fx.Node)
    fact = emitter.known.facts.get(x)
    if name not in ("aten.sum", "aten.mean") or fact is None or fact.value != 0 or argument(node, "dtype") is not None:
        return None
    rows, info = emitter.layout.rows[x], emitter.known.info(x)
    access = emitter.known.operands(node)[0]
    result_slot = {i: s for s, i in plain_slots(access).items()}
    gone = [i for i, s in enumerate(rows.slots) if s not in result_slot]
    if gone != [rows.set.token] and gone != list(range(len(rows.slots))):
        return None
    kept = kept_dims(info, rows.slots)
    dim_slots = info.dim_slots()
    dims = argument(node, "dim")
    ndim = len(info.dims)
    reduced = range(ndim) if not dims and dims != 0 else [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]
    inner = [1 + kept.index(d) for d in kept if d in reduced]
    whole = gone == list(range(len(rows.slots)))
    tensor = emitter.phys[x]
    dtype = node.meta["val"].dtype
    wide = name == "aten.mean" and dtype == torch.float16  # a sum may be larger than fp16 where its mean is not
    summed = torch.float32 if wide else dtype
    if summed != x.meta["val"].dtype:  # the dtype of the result, where it is another: autocast on CUDA sums in fp32
        tensor = emitter.call(aten._to_copy.default, tensor, dtype=summed)
    if whole and emitter.spare:
        tensor = emitter.call(aten.where.ScalarOther, _is_row(emitter, rows.set, len(kept)), tensor, 0.0)
    if whole or inner:
        tensor = emitter.call(aten.sum.dim_IntList, tensor, ([0] if whole else []) + inner)
    units: list[Unit] = []
    if not whole:
        tensor = emitter.call(ops.segment_sum, tensor, emitter.extras.offsets(rows.set), emitter.extras.sequence(rows.set))
        units += [result_slot[s] for s in rows.slots[:-1]]
    for d in kept:
        if d not in reduced:
            units += [result_slot[s] for s in dim_slots[d] if s not in rows.slots] or [
                ("one", _result_dim(node, d, reduced))
            ]
    if name == "aten.mean":
        count = sympy.prod([s for d in reduced for s in info.dims[d]])
        tensor = emitter.call(operator.truediv, tensor, emitter.sizes[count])
    if wide:
        tensor = emitter.call(aten._to_copy.default, tensor, dtype=dtype)
    return emitter.spread(tensor, units, node)


def _is_row(emitter: Emitter, s: RowSet, features: int) -> fx.Node:
    """Bool `[T, 1, ...]`: False for spare rows."""
    there = emitter.call(aten.lt.Scalar, emitter.extras.index(s), emitter.sizes[sympy.prod(s.sizes)])
    return emitter.reshape(there, [-1, *[1] * features])


def _result_dim(node: fx.Node, dim: int, reduced: Any) -> int:
    return dim if argument(node, "keepdim", False) else dim - sum(r < dim for r in reduced)


def _gather(emitter: Emitter, node: fx.Node) -> fx.Node | None:
    """Rows at given positions: ``h[arange(B), length - 1]``, ``gather``, ``select``."""
    access = emitter.known.operands(node)[0]
    rows = emitter.layout.rows[access.operand]
    info, x_info = emitter.known.info(node), emitter.known.info(access.operand)
    at = [access.exprs[s] for s in rows.slots]
    positions = [p for p in at if p is not None]
    if len(positions) != len(at) or not all(writable(p) for p in positions):
        return None
    axes = sorted(frozenset().union(*(p.slots for p in positions)))
    result_slot = {i: s for s, i in plain_slots(access).items()}
    units: list[Unit] = list(axes)
    for unit in kept_units(x_info, rows.slots):
        if isinstance(unit, tuple):
            continue  # size 1: `spread` restores it
        if unit not in result_slot or result_slot[unit] in axes or info.sizes[result_slot[unit]] != x_info.sizes[unit]:
            return None  # `gather` may take fewer features than there are
        units.append(result_slot[unit])
    if len(units) != len(info.sizes):
        return None
    renamed = {a: t.slot(i) for i, a in enumerate(axes)}
    selection = emitter.extras.gather(
        rows.set, tuple(t.substitute(p, renamed) for p in positions), tuple(info.sizes[a] for a in axes)
    )
    row = emitter.call(aten.clamp_min.default, selection, 0)
    tensor = emitter.call(aten.index_select.default, emitter.phys[access.operand], 0, row)
    fact = emitter.known.facts.get(access.operand)
    if fact is not None:  # a position under the fact is no row of the set: what stands there is the fact's value
        inside = emitter.call(aten.ge.Scalar, selection, 0)
        inside = emitter.reshape(inside, [-1, *[1] * len(kept_dims(x_info, rows.slots))])
        tensor = emitter.call(aten.where.ScalarOther, inside, tensor, fact.value)
    return emitter.spread(tensor, units, node)


def _boolean_index(emitter: Emitter, node: fx.Node) -> fx.Node | None:
    """``x[mask]`` is a packed tensor. Every such index by one mask becomes rows of one set: all stay of one size."""
    source, by = emitter.known.operands(node)
    mask = emitter.known.value(by.operand)
    if mask is None or not writable(t.truth(mask)):
        return None
    info = emitter.known.info(source.operand)
    covered = tuple(range(len(emitter.known.info(by.operand).sizes)))
    rows = emitter.layout.sets.of(t.truth(mask), info.sizes, token=covered[-1])
    if rows is None or rows.slots != covered:
        return None
    return emitter.rows_of(source.operand, rows.slots, rows.set)


def _loss(emitter: Emitter, node: fx.Node) -> fx.Node | None:
    """A token loss over its non-ignored rows, those where the input is a constant included."""
    access = emitter.known.operands(node)[0]
    x, rows = access.operand, emitter.layout.rows[access.operand]
    counted = emitter.live.loss_rows(node, access)
    if counted is None:
        return None
    inside = t.substitute(rows.set.predicate, {i: t.slot(s) for i, s in enumerate(rows.slots)})
    if not t.implies(counted, inside):
        if not writable(counted):
            return None
        sizes = emitter.known.info(x).sizes
        found = emitter.layout.sets.of(counted, sizes, rows.slots[rows.set.token], set(rows.slots))
        if found is None:
            return None
        rows = found
    return token_loss(emitter, node, rows)


def token_loss(emitter: Emitter, node: fx.Node, rows: Rows) -> fx.Node | None:
    """The same call on ``[T, C]`` and ``[T]``; ``rows`` speaks of the input's slots."""
    x, target = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(target, fx.Node)
    info = emitter.known.info(x)
    labels = emitter.known.info(target)
    slots = info.dim_slots()
    outer = [s for d in (0, *range(2, len(slots))) for s in slots[d]]
    if set(outer) != set(rows.slots) or len(slots[1]) != 1:
        return None
    own = [s for dim in labels.dim_slots() for s in dim]
    if len(own) != len(outer):
        return None
    to_label = dict(zip(outer, own, strict=True))
    targets = emitter.rows_of(target, tuple(to_label[s] for s in rows.slots), rows.set)
    targets = emitter.reshape(targets, [-1])
    if emitter.spare:
        ignored = argument(node, "ignore_index", -100)
        targets = emitter.call(aten.where.ScalarOther, _is_row(emitter, rows.set, 0), targets, ignored)
    rest = fx.node.map_arg((node.args[2:], dict(node.kwargs)), emitter.padded)
    logits = emitter.reshape(emitter.rows_of(x, rows.slots, rows.set), [-1, emitter.sizes[info.sizes[slots[1][0]]]])
    return emitter.call(node.target, logits, targets, *rest[0], **rest[1])
