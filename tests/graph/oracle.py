"""Brute force for the tests of the analyses: graphs by make_fx, terms evaluated one index at a time.

Nothing here uses the code under test except to read what it answers: the evaluator below is the definition of
what a term means, in plain Python numbers, with out-of-range reads as an explicit `Undefined`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gemopt.graph.facts import Analysis
from gemopt.graph.terms import Term

Index = tuple[int, ...]


class Undefined(Exception):
    """The term reads a leaf outside its bounds at this index."""


# ---------------------------------------------------------------- terms


@dataclass
class Evaluator:
    """The value of a term at an index.

    leaves: by name, tensors already shaped as their slots. sizes: the numbers of the size symbols.
    """

    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[Any, int] = field(default_factory=dict)
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def at(self, term: Term, index: Mapping[int, int] | Sequence[int]) -> int | float | bool:
        key = (term, *(index[s] for s in sorted(term.slots)))
        if key not in self._memo:
            try:
                self._memo[key] = self._at(term, index)
            except Undefined as error:
                self._memo[key] = error
        if isinstance(self._memo[key], Undefined):
            raise self._memo[key]
        return self._memo[key]

    def _at(self, term: Term, index: Mapping[int, int] | Sequence[int]) -> int | float | bool:
        op, args = term.op, term.args
        if op == "slot":
            return index[args[0]]
        if op in ("true", "false"):
            return op == "true"
        if op == "const":
            return args[0]
        if op == "size":
            return int(sympy.sympify(args[0]).subs(dict(self.sizes)))
        if op == "read":
            return self._read(args[0], [self.at(a, index) for a in args[1]])
        if op == "linear":
            pairs = args[1:]
            return args[0] + sum(k * self.at(t, index) for t, k in zip(pairs[::2], pairs[1::2], strict=True))
        if op in ("and", "or"):
            return self._join(op, args, index)
        if op == "where":
            return self.at(args[1] if self.at(args[0], index) else args[2], index)
        if op == "clamp":
            return self._clamp(args, index)
        return _SCALAR[op](*(self.at(a, index) if isinstance(a, Term) else a for a in args))

    def _read(self, leaf: str, where: Sequence[Any]) -> Any:
        tensor = self.leaves[leaf]
        assert tensor.ndim == len(where), (leaf, tensor.shape, where)
        if any(not 0 <= i < n for i, n in zip(where, tensor.shape, strict=True)):
            raise Undefined(f"{leaf}{list(where)} of {list(tensor.shape)}")
        return tensor[tuple(int(i) for i in where)].item()

    def _join(self, op: str, args: Sequence[Term], index: Any) -> bool:
        """``and``/``or`` are false/true if one operand is, even where another is undefined."""
        zero, missing = op == "or", None
        for a in args:
            try:
                if bool(self.at(a, index)) == zero:
                    return zero
            except Undefined as error:
                missing = error
        if missing is not None:
            raise missing
        return not zero

    def _clamp(self, args: Sequence[Any], index: Any) -> Any:
        value = self.at(args[0], index)
        if args[1] is not None:
            value = max(value, self.at(args[1], index))
        return value if args[2] is None else min(value, self.at(args[2], index))

    def everywhere(self, term: Term, sizes: Sequence[int], undefined: Any = None) -> Tensor:
        """The term at all indices, float64 (bools as 0 and 1); `undefined` stands for out-of-range reads."""
        used = sorted(term.slots)
        result = torch.empty([sizes[s] for s in used], dtype=torch.float64)
        for index in itertools.product(*(range(sizes[s]) for s in used)):
            try:
                result[index] = float(self.at(term, dict(zip(used, index, strict=True))))
            except Undefined:
                if undefined is None:
                    raise
                result[index] = undefined
        return result.reshape([n if s in used else 1 for s, n in enumerate(sizes)]).expand(tuple(sizes))

    def mask(self, predicate: Term, sizes: Sequence[int], undefined: bool | None = None) -> Tensor:
        return self.everywhere(predicate, sizes, undefined) != 0


def _ieee(f: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda a, b: bool(f(a, b))


_SCALAR: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "floordiv": lambda a, n: a // n,
    "le0": lambda a: a <= 0,
    "eq0": lambda a: a == 0,
    "ne0": lambda a: a != 0,
    "not": lambda a: not a,
    "bool": bool,
    "le": _ieee(lambda a, b: a <= b),
    "lt": _ieee(lambda a, b: a < b),
    "eq": _ieee(lambda a, b: a == b),
    "ne": _ieee(lambda a, b: a != b),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "wrap": lambda a, n: a + n if a < 0 else a,
}


# ---------------------------------------------------------------- graphs


@dataclass
class Traced:
    """A captured graph with the real value of every node, and the analysis under test."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    symbols: dict[Any, int]
    values: dict[fx.Node, Any]
    known: Analysis

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def numbers(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        return tuple(int(sympy.sympify(s).subs(self.symbols)) for s in sizes)

    def slot_sizes(self, node: fx.Node) -> tuple[int, ...]:
        return self.numbers(self.known.info(node).sizes)

    def slotted(self, node: fx.Node) -> Tensor:
        """The node's real value, one dim per slot."""
        return self.values[node].detach().reshape(self.slot_sizes(node))

    @cached_property
    def evaluator(self) -> Evaluator:
        leaves = {n.name: self.slotted(n) for n in self.known.values.leaf_nodes.values()}
        return Evaluator(leaves, self.symbols)

    def mask(self, node: fx.Node, predicate: Term, undefined: bool | None = None) -> Tensor:
        """A predicate over the node's slots, in the node's shape."""
        mask = self.evaluator.mask(predicate, self.slot_sizes(node), undefined)
        return mask.reshape(self.values[node].shape)

    def find(self, name: str, number: int = 0) -> fx.Node:
        """The number-th call of ``aten.<name>``."""
        return [n for n in self.graph.nodes if _opname(n) == name][number]

    def tensors(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if isinstance(n.meta.get("val"), Tensor)]


def _opname(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "") if node.op == "call_function" else ""


def static(x: Tensor) -> Tensor:
    """Marks a weight: all its sizes are numbers. Other inputs have symbols for their first two dims."""
    x._all_static = True  # type: ignore[attr-defined]
    return x


def capture(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Pre-dispatch ATen as the backend sees it; equal sizes of different dims have different symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
    fakes = [_fake(x, mode, i) if isinstance(x, Tensor) else x for i, x in enumerate(inputs)]
    with mode:
        return make_fx(fn, pre_dispatch=True)(*fakes)


def _fake(x: Tensor, mode: FakeTensorMode, i: int) -> Tensor:
    fixed = getattr(x, "_all_static", False)
    dims = [DimDynamic.STATIC if fixed or d > 1 or s < 2 else DimDynamic.DYNAMIC for d, s in enumerate(x.shape)]
    context = StatelessSymbolicContext(dynamic_sizes=dims)
    fake = mode.from_tensor(x, symbolic_context=context, source=ConstantSource(f"input{i}"))
    return fake.detach().requires_grad_(x.requires_grad)


def trace(fn: Callable[..., Any], *inputs: Any) -> Traced:
    return analyse(capture(fn, *inputs), *inputs)


def analyse(gm: fx.GraphModule, *inputs: Any) -> Traced:
    symbols: dict[Any, int] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, Tensor):
            for fake, real in zip(node.meta["val"].shape, value.shape, strict=True):
                if isinstance(fake, torch.SymInt):
                    symbols[fake.node.expr] = real
    recorder = Recorder(gm)
    recorder.run(*inputs)
    for node, value in recorder.seen.items():  # sizes that depend on data
        if isinstance(value, Tensor) and node.op == "call_function":
            for fake, real in zip(node.meta["val"].shape, value.shape, strict=True):
                if isinstance(fake, torch.SymInt) and fake.node.expr.is_Symbol:
                    symbols.setdefault(fake.node.expr, real)
    return Traced(gm, inputs, symbols, recorder.seen, Analysis(gm.graph))


class Recorder(fx.Interpreter):
    """Runs a graph and keeps a copy of every tensor; `override` may change one after it is computed."""

    def __init__(self, gm: fx.GraphModule, override: Callable[[fx.Node, Tensor], Tensor] | None = None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}
        self.override = override

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            if self.override is not None:
                result = self.override(n, result)
            self.seen[n] = result.detach().clone()
        else:
            self.seen[n] = result
        return result


def same(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> Tensor:
    """Elementwise equality, with NaN equal to NaN and infinities to themselves."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    close = ((a - b).abs() <= tolerance * (1 + b.abs())) & b.isfinite()
    return close | (a == b) | (a.isnan() & b.isnan())
