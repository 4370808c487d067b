"""Counts the useful FLOPs of a model at given inputs: capture, analyses, and predicates evaluated on the real lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.utils.flop_counter import FlopCounterMode

from gemopt import dynamo
from gemopt.backend import size_symbols
from gemopt.graph.capture import Captured, CaptureError, capture
from gemopt.graph.facts import Analysis
from gemopt.graph.governing import candidate_masks
from gemopt.graph.live import Live
from gemopt.graph.prologue import Sizes, TermWriter, copy_inputs, copy_leaf, device_of, writable
from gemopt.graph.values import Values
from gemopt.mfu.jagged import CountingInterpreter, calls_ops
from gemopt.mfu.products import Product, equation, factors, layer_of, number, products, renumbered


@dataclass
class Count:
    """FLOPs of one forward pass.

    Attributes:
        flops: useful ones, at the real lengths.
        padded: what the padded model computes.
        layers: useful FLOPs by module path ("" for the root's own).
        notes: ops whose count is an upper bound, with the reason.
    """

    flops: float = 0.0
    padded: float = 0.0
    layers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def training(self) -> float:
        """Forward and backward without recomputation: three times the forward pass."""
        return 3 * self.flops

    @property
    def useful_share(self) -> float:
        """Useful over computed FLOPs; 1 where nothing is padded."""
        return self.flops / self.padded if self.padded else 1.0

    def by_depth(self, depth: int) -> dict[str, float]:
        """``layers`` summed over paths cut to ``depth`` names, largest first."""
        total: dict[str, float] = defaultdict(float)
        for path, flops in self.layers.items():
            total[".".join(path.split(".")[:depth])] += flops
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def within(self, path: str) -> float:
        """Useful FLOPs of a module and everything in it."""
        return sum(f for p, f in self.layers.items() if path == "" or p == path or p.startswith(path + "."))

    def _add(self, layer: str, useful: float, padded: float, note: str) -> None:
        self.flops += useful
        self.padded += padded
        self.layers[layer] = self.layers.get(layer, 0.0) + useful
        if note and note not in self.notes:
            self.notes.append(note)


def count(model: Callable[..., Any] | fx.GraphModule, *inputs: Any, **kwargs: Any) -> Count:
    """FLOPs of ``model(*inputs, **kwargs)``, forward, at the lengths that these inputs hold.

    The model (a module, a function or a graph module) runs once, padded and without gradients. Padding, masked pairs and
    rows that no output reads count nothing; what cannot be proven unneeded counts as needed.

    Raises:
        TypeError: ``model`` cannot be called.
    """
    return Counter(model)(*inputs, **kwargs)


class Counter:
    """`count` for many inputs: the graph is captured and analysed once per set of shapes that Dynamo tells apart."""

    def __init__(self, model: Callable[..., Any]) -> None:
        if not callable(model):
            raise TypeError(f"model: got {type(model).__name__}; allowed: a module, a function or a graph module")
        if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        self._tally = Count()
        if isinstance(model, nn.Module):  # called, not traced as a frame of its own: paths then start at the model

            def target(*inputs: Any, **kwargs: Any) -> Any:
                return model(*inputs, **kwargs)
        else:
            target = model
        self._run = dynamo.optimize(target, self._backend, dynamic=True)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Count:
        self._tally = Count()
        with torch.no_grad():
            self._run(*inputs, **kwargs)
        return self._tally

    def _backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        try:
            counted: _Graph | None = _Graph(capture(gm, example_inputs))
            reason = ""
        except CaptureError as error:
            counted, reason = None, str(error)
        except (RestartAnalysis, SkipFrame):
            raise  # Dynamo's own control flow
        except Exception as error:  # a figure must not end the run that it describes
            counted, reason = None, f"internal error, {type(error).__name__}: {error}"

        def run(*args: Any) -> Any:
            if counted is not None:
                counted.add_to(self._tally, args)
                return counted.run(args, self._tally) if counted.calls_ops else gm.forward(*args)
            with FlopCounterMode(display=False) as counter:
                result = gm.forward(*args)
            flops = float(counter.get_total_flops())
            self._tally._add("", flops, flops, f"a graph counted as it ran, padded: {reason}")
            return result

        return run


class _Graph:
    """The products of one captured graph, and a small graph that evaluates their predicates."""

    def __init__(self, captured: Captured) -> None:
        self._symbols, self._gm = size_symbols(captured), captured.gm
        self.calls_ops = calls_ops(captured.gm.graph)
        live = analyse(captured)
        self._products = [self._countable(p) for p in products(captured.gm.graph, live)]
        self._predicates = _Predicates(captured.gm, live.known.values)
        self._counts = [self._predicates.add(p) for p in self._products]
        self._predicates.finish()

    @staticmethod
    def _countable(p: Product) -> Product:
        if writable(p.useful):
            return p
        from gemopt.graph import terms as t

        return Product(p.node, p.layer, t.TRUE, p.sizes, p.factor, p.padded, f"{p.node.name}: its rows cannot be counted")

    def run(self, args: Sequence[Any], tally: Count) -> Any:
        """The graph itself, on real inputs, for models that call gemopt's ops."""

        def record(node: fx.Node, flops: float, note: str) -> None:
            tally._add(layer_of(node), flops, flops, note)

        return CountingInterpreter(self._gm, record).run(*args)

    def add_to(self, tally: Count, args: Sequence[Any]) -> None:
        values = {name: float(args[i] if dim is None else args[i].shape[dim]) for name, i, dim in self._symbols}
        totals = self._predicates.evaluate(args)
        for p, (key, free) in zip(self._products, self._counts, strict=True):
            rows = totals[key] if key is not None else 1.0
            for s in free:
                rows *= number(p.sizes[s], values)
            tally._add(p.layer, 2 * rows * number(p.factor, values), number(p.padded, values), p.note)


class _Predicates:
    """Counts of predicates, each over the sizes of its own slots, evaluated on the inputs' device."""

    def __init__(self, source: fx.GraphModule, values: Values) -> None:
        self._source, self._values = source, values
        self._graph, self._env = copy_inputs(source.graph)
        self._sizes = Sizes(self._graph, list(self._env.values()))
        self._leaves: dict[str, fx.Node] = {}
        self._equations: list[tuple[str, list[int]]] = []
        self._known: dict[Any, int] = {}
        self._outputs: list[fx.Node] = []
        self._module: fx.GraphModule | None = None

    def add(self, p: Product) -> tuple[int | None, list[int]]:
        """Which count to multiply with, and the slots that the predicate leaves free."""
        groups, free = factors(p.useful, len(p.sizes))
        if not groups:
            return None, free
        key = tuple((renumbered(g, s), tuple(p.sizes[i] for i in s), s) for g, s in groups)
        if key not in self._known:
            self._known[key] = len(self._equations)
            self._equations.append((equation(groups), [self._write(g, sizes) for g, sizes, _ in key]))
        return self._known[key], free

    def _write(self, term: Any, sizes: tuple[Any, ...]) -> int:
        nodes = {name: self._values.leaf_nodes[name] for name in sorted(term.leaves)}
        for name, node in nodes.items():
            if name not in self._leaves:
                self._leaves[name] = copy_leaf(self._graph, node, self._env)
        inputs = [
            n for n in self._source.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)
        ]
        device = device_of([*nodes.values(), *inputs], torch.device("cpu"))
        writer = TermWriter(self._graph, self._leaves, self._sizes, device)
        self._outputs.append(writer.expanded(term, sizes))
        return len(self._outputs) - 1

    def finish(self) -> None:
        self._graph.output(tuple(self._outputs))
        self._module = fx.GraphModule(self._source, self._graph, "Predicates")

    def evaluate(self, args: Sequence[Any]) -> list[float]:
        assert self._module is not None
        masks = [m.to(torch.float64) for m in self._module.forward(*args)]
        totals = [torch.einsum(e, *(masks[i] for i in which)) for e, which in self._equations]
        return [float(x) for x in totals]


def analyse(captured: Captured) -> Live:
    """The analyses that unpadding makes, of a captured graph, which is canonicalised in place."""
    from gemopt.passes.canonicalise import canonicalise  # as api.py does: passes are loaded where they are needed
    from gemopt.passes.convolutions import pointwise_convolutions
    from gemopt.passes.jagged import jagged_inputs
    from gemopt.passes.unpad import find_sites

    pointwise_convolutions(captured.gm)
    jagged_inputs(captured.gm)
    canonicalise(captured.gm)
    graph = captured.gm.graph
    known = Analysis(graph)
    seeing = list(find_sites(captured.gm, known)[0])

    def masks() -> Mapping[fx.Node, frozenset[Any]]:
        return candidate_masks(graph, known, seeing)

    live = Live(graph, known, seeing, {}, masks)
    while not all(map(live.sees_a_key, seeing)):
        seeing = [s for s in seeing if live.sees_a_key(s)]
        live = Live(graph, known, seeing, {}, masks)
    return live
