"""The prologue: one small graph that turns lengths, ids and masks into row indices, sizes and assumption bits.

Terms are written back as torch calls on tensors whose dims are the row axes, leaves as the graph inputs (or the small
integer subgraphs) they name. The result ``(stats, *tensors)`` has everything the host must know in ``stats``: the bits,
then the number of rows of every set. It is the only device-to-host transfer of a step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from gemopt.graph import terms as t
from gemopt.graph.slots import expr_of, is_tensor, shifted_slot
from gemopt.graph.terms import Term

aten = torch.ops.aten


# Sizes by way of floats: ``arange(0, n, 1.0)`` has ``ceil(float(n) / 1.0)`` elements.
_FLOATS: dict[Any, Callable[..., Any]] = {
    ToFloat: torch.sym_float,
    FloatTrueDiv: operator.truediv,
    IntTrueDiv: operator.truediv,
    CeilToInt: math.ceil,
    FloorToInt: math.floor,
    TruncToInt: math.trunc,
}


class UnknownSize(Exception):
    """A size that does not follow from the sizes of the inputs: the number of elements that a mask selects."""


class Sizes:
    """Symbolic sizes as nodes of a graph under construction, taken from the shapes of its placeholders."""

    def __init__(self, graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
        self._graph = graph
        self._placeholders = placeholders
        self._last = placeholders[-1]
        self._shape_env = _shape_env(placeholders)
        self._known: dict[sympy.Expr, fx.Node | int] = {}

    def __getitem__(self, expr: sympy.Expr) -> fx.Node | int:
        """Raises: UnknownSize."""
        expr = self._canonical(sympy.sympify(expr))
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float:
            return float(expr)  # type: ignore[return-value]  # a part of a size
        if expr not in self._known:
            self._known[expr] = self._build(expr)
        return self._known[expr]

    def _canonical(self, expr: sympy.Expr) -> sympy.Expr:
        """Symbols that were found equal after ``expr`` was written are one."""
        return expr if self._shape_env is None else self._shape_env.replace(expr)

    def _build(self, expr: sympy.Expr) -> fx.Node:
        for p in self._placeholders:
            value = p.meta.get("val")
            if isinstance(value, torch.SymInt) and expr_of(value) == expr:
                return p
            if isinstance(value, torch.Tensor):
                for d, s in enumerate(value.shape):
                    if expr_of(s) == expr:
                        return self._call(aten.sym_size.int, p, d)
        if isinstance(expr, Max | Min):
            bound = torch.sym_max if isinstance(expr, Max) else torch.sym_min
            return reduce(lambda a, b: self._call(bound, a, b), [self[a] for a in expr.args])  # type: ignore[return-value]
        if expr.is_Mul or expr.is_Add:
            op = operator.mul if expr.is_Mul else operator.add
            parts = [self[a] for a in expr.args]
            result: Any = parts[0]
            for part in parts[1:]:
                result = self._call(op, result, part)
            return result
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 1:
            return self._call(operator.mul, self[expr.base], self[expr.base ** (expr.exp - 1)])
        if isinstance(expr, FloorDiv):  # CleanDiv too
            return self._call(operator.floordiv, self[expr.args[0]], self[expr.args[1]])
        if isinstance(expr, PythonMod | Mod):
            return self._call(operator.mod, self[expr.args[0]], self[expr.args[1]])
        if expr.func in _FLOATS:
            return self._call(_FLOATS[expr.func], *(self[a] for a in expr.args))
        raise UnknownSize(f"no input tells the size {expr}")

    def _call(self, target: Any, *args: Any) -> fx.Node:
        """Sizes stand before the first call, so that every later node may use them."""
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args)
        return self._last


def _shape_env(placeholders: Sequence[fx.Node]) -> Any:
    """The environment of the inputs' symbols; None where all sizes are numbers."""
    values = [p.meta.get("val") for p in placeholders]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)


class TermWriter:
    """Writes terms as tensors over ordered axes: slot i of a term is dim i of the tensor."""

    def __init__(self, graph: fx.Graph, leaves: dict[str, fx.Node], sizes: Sizes, device: torch.device) -> None:
        self.graph, self.leaves, self.sizes, self.device = graph, leaves, sizes, device
        self._memo: dict[Any, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def write(self, term: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        """A tensor that broadcasts to ``axes``."""
        key = (term, tuple(axes))
        if key not in self._memo:
            self._memo[key] = self._write(term, axes)
        return self._memo[key]

    def _write(self, term: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        op, args = term.op, term.args
        if op in ("true", "false"):
            return self._constant(op == "true", torch.bool)
        if op == "const":
            return self._constant(args[0], torch.float64)
        if op == "size":
            return self._constant(self.sizes[args[0]], torch.int64)
        if op == "slot":
            index = self.call(aten.arange.default, self.sizes[axes[args[0]]], device=self.device)
            return self._place(index, [args[0]], len(axes))
        if op == "read":
            return self._read(args[0], args[1], axes)
        if op == "linear":
            return self._linear(term, axes)
        if op in ("le0", "eq0", "ne0"):
            return self._comparison(op, args[0], axes)
        if op in ("and", "or"):
            return self._fold(aten.logical_and.default if op == "and" else aten.logical_or.default, args, axes)
        if op == "not":
            return self.call(aten.logical_not.default, self.write(args[0], axes))
        if op == "bool":
            return self.write(args[0], axes)
        if op == "where":
            return self.call(aten.where.self, *(self.write(a, axes) for a in args))
        if op == "abs":
            return self.call(aten.abs.default, self.write(args[0], axes))
        if op == "floordiv":
            return self.call(aten.div.Scalar_mode, self.write(args[0], axes), args[1], rounding_mode="floor")
        if op == "wrap":
            return self._wrap(args, axes)
        if op == "clamp":
            return self._clamp(args, axes)
        if op in _BINARY:
            return self.call(_BINARY[op], *(self.write(a, axes) for a in args))
        raise KeyError(f"no way to compute {op}")

    def _comparison(self, op: str, total: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        """``total <= 0`` and its kin, without a sum where two things are compared: it might overflow."""
        scalar, tensor = _COMPARISONS[op]
        plain = t.plain_comparison(op, total)
        if plain is None:
            return self.call(scalar, self.write(total, axes), 0)
        x, y, strict = plain
        if isinstance(y, Term):
            if strict:
                tensor = aten.lt.Tensor
            return self.call(tensor, self.write(x, axes), self.write(y, axes))
        if not -(2**63) <= y < 2**63:
            return self._constant({"le0": y > 0, "eq0": False, "ne0": True}[op] != strict, torch.bool)
        if strict:  # y <= x
            scalar = aten.ge.Scalar
        return self.call(scalar, self.write(x, axes), y)

    def _constant(self, value: Any, dtype: torch.dtype) -> fx.Node:
        return self.call(aten.full.default, [], value, dtype=dtype, device=self.device)

    def _place(self, tensor: fx.Node, dims: Sequence[int], ndim: int) -> fx.Node:
        """Dims of ``tensor`` (one per entry of ``dims``) moved to those positions of an ``ndim``-dim tensor."""
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        if order != list(range(len(dims))):
            tensor = self.call(aten.permute.default, tensor, order)
        for d in range(ndim):
            if d not in dims:
                tensor = self.call(aten.unsqueeze.default, tensor, d)
        return tensor

    def _read(self, leaf: str, indices: Sequence[Term], axes: Sequence[sympy.Expr]) -> fx.Node:
        node = self.leaves[leaf]
        value = node.meta["val"]
        present = [d for d, s in enumerate(value.shape) if expr_of(s) != 1]
        if len(present) != value.ndim:
            node = self.call(aten.squeeze.dims, node, [d for d in range(value.ndim) if d not in present])
        if value.dtype in (torch.int32,):
            node = self.call(aten._to_copy.default, node, dtype=torch.int64)
        extents = [expr_of(value.shape[d]) for d in present]
        shifts = [shifted_slot(i) for i in indices]
        plain = [s for s in shifts if s is not None]
        if len(plain) == len(indices) == len({j for j, _ in plain}):
            node = self._shifted(node, plain, extents, axes)
            return self._place(node, [j for j, _ in plain], len(axes))
        return self.call(aten.index.Tensor, node, [self._inside(*x, axes) for x in zip(indices, extents, strict=True)])

    def _shifted(
        self, node: fx.Node, shifts: Sequence[tuple[int, int]], extents: Sequence[sympy.Expr], axes: Sequence[sympy.Expr]
    ) -> fx.Node:
        """``node[j + c, ..]`` for every j of the axes. A demand that went back through a slice may ask for positions
        outside (nobody reads the rows in question): they read 0."""
        pads: list[fx.Node | int] = []
        for (j, c), extent in zip(reversed(shifts), reversed(extents), strict=True):
            pads += [-c, self.sizes[axes[j] + c - extent]]
        return self.call(aten.constant_pad_nd.default, node, pads) if any(p != 0 for p in pads) else node

    def _inside(self, index: Term, extent: sympy.Expr, axes: Sequence[sympy.Expr]) -> fx.Node:
        """An index that the term itself makes stays inside; one that is data may raise, as in eager."""
        position = self.write(index, axes)
        if not index.slots and axes:  # torch 2.13 infers a wrong shape for an index without dims behind one that has some
            position = self.call(aten.reshape.default, position, [1] * len(axes))
        if index.leaves:
            return position
        last = self.call(aten.add.Tensor, self._constant(self.sizes[extent], torch.int64), -1)
        return self.call(aten.minimum.default, self.call(aten.clamp_min.default, position, 0), last)

    def _linear(self, term: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        parts, constant = t.as_linear(term)
        total: fx.Node | None = None
        for part, k in parts.items():
            piece = self.write(part, axes)
            if k != 1:
                piece = self.call(aten.mul.Scalar, piece, k)
            total = piece if total is None else self.call(aten.add.Tensor, total, piece)
        if total is None:
            return self._constant(constant, torch.int64)
        return self.call(aten.add.Scalar, total, constant) if constant else total

    def _fold(self, target: Any, parts: Sequence[Term], axes: Sequence[sympy.Expr]) -> fx.Node:
        total = self.write(parts[0], axes)
        for part in parts[1:]:
            total = self.call(target, total, self.write(part, axes))
        return total

    def _wrap(self, args: Sequence[Any], axes: Sequence[sympy.Expr]) -> fx.Node:
        position, extent = self.write(args[0], axes), self.write(args[1], axes)
        negative = self.call(aten.lt.Scalar, position, 0)
        return self.call(aten.where.self, negative, self.call(aten.add.Tensor, position, extent), position)

    def _clamp(self, args: Sequence[Any], axes: Sequence[sympy.Expr]) -> fx.Node:
        value = self.write(args[0], axes)
        for bound, target in ((args[1], aten.maximum.default), (args[2], aten.minimum.default)):
            if bound is not None:
                value = self.call(target, value, self.write(bound, axes))
        return value

    def expanded(self, term: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        """The term at every index: a tensor with exactly these axes."""
        return self.call(aten.expand.default, self.write(term, axes), [self.sizes[a] for a in axes])

    def flat(self, tensor: fx.Node) -> fx.Node:
        return self.call(aten.reshape.default, tensor, [-1])

    def full(self, term: Term, axes: Sequence[sympy.Expr]) -> fx.Node:
        """The term at every index, flattened row-major: ``[prod(axes)]``."""
        return self.flat(self.expanded(term, axes))


_COMPARISONS = {
    "le0": (aten.le.Scalar, aten.le.Tensor),
    "eq0": (aten.eq.Scalar, aten.eq.Tensor),
    "ne0": (aten.ne.Scalar, aten.ne.Tensor),
}

_BINARY = {
    "le": aten.le.Tensor,
    "lt": aten.lt.Tensor,
    "eq": aten.eq.Tensor,
    "ne": aten.ne.Tensor,
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
}


def writable(term: Term) -> bool:
    """Whether `TermWriter` can write a term."""
    if term.op not in _WRITABLE and term.op not in _BINARY:
        return False
    for arg in term.args:
        if isinstance(arg, Term) and not writable(arg):
            return False
        if isinstance(arg, tuple) and not all(writable(a) for a in arg if isinstance(a, Term)):
            return False
    return True


_WRITABLE = frozenset(
    [
        "true",
        "false",
        "const",
        "size",
        "slot",
        "read",
        "linear",
        "le0",
        "eq0",
        "ne0",
        "and",
        "or",
        "not",
        "bool",
        "where",
        "wrap",
        "clamp",
        "abs",
        "floordiv",
    ]
)


def copy_inputs(source: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A new graph with the placeholders of ``source``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.target)
            env[node].meta = dict(node.meta)
    return graph, env


def copy_leaf(graph: fx.Graph, leaf: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy the pure subgraph that computes ``leaf``."""
    for node in _ancestors(leaf):
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    return env[leaf]


def _ancestors(leaf: fx.Node) -> list[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [leaf]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return [n for n in leaf.graph.nodes if n in seen]


def device_of(leaves: Sequence[fx.Node], fallback: torch.device) -> torch.device:
    for leaf in leaves:
        if is_tensor(leaf):
            return leaf.meta["val"].device
    return fallback
