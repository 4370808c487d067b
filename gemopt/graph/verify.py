"""Compile-time verification: the rewritten graph against the captured one, on generated inputs, forward and backward.

``Recipe(verify=True)`` runs this for every attention on its matched subgraph (random queries, keys and values, and inputs
of the mask drawn anew from the values the real ones hold) and once for the whole graph. Both sides are compared with the
captured graph in fp64 under the contract of design: RMS error at most twice the original's plus 4 ulp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from gemopt.graph.attention import Site
from gemopt.graph.capture import Captured, trace_copy
from gemopt.graph.emit import placeholders_first
from gemopt.graph.facts import Analysis
from gemopt.graph.plan import Plan
from gemopt.graph.prologue import Sizes, TermWriter, copy_inputs, copy_leaf
from gemopt.graph.slots import shape_of
from gemopt.graph.terms import Term

CASES = 4


@dataclass(frozen=True)
class Mismatch:
    """What differed: tensor name, RMS error of the rewrite, the RMS error it was allowed."""

    what: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.what} is off by {self.error:.3g} RMS, {self.allowed:.3g} allowed"


def verify_plan(captured: Captured, plan: Plan, seed: int = 0) -> tuple[int, list[Mismatch]]:
    """Compare the whole packed graph with the captured one. Returns the cases compared and what differed."""
    generator = torch.Generator().manual_seed(seed)
    compared, found = 0, []
    for case in range(CASES):
        inputs = [_redrawn(x, generator, keep=case == 0) for x in captured.real_inputs]
        try:
            result = _compare(captured.gm, plan, inputs, generator)
        except (IndexError, RuntimeError):  # inputs that eager refuses too
            continue
        if result is not None:
            compared += 1
            found += result
    return compared, found


def verify_site(captured: Captured, part: fx.GraphModule, plan: Plan, seed: int = 0) -> tuple[int, list[Mismatch]]:
    """Compare one matched subgraph with its rewrite. ``part`` takes the captured inputs, then the attention's operands."""
    generator = torch.Generator().manual_seed(seed)
    operands = list(part.graph.find_nodes(op="placeholder"))[len(captured.real_inputs) :]
    compared, found = 0, []
    for case in range(CASES):
        inputs = [_redrawn(x, generator, keep=case == 0) for x in captured.real_inputs]
        inputs += [_random(n.meta["val"], generator) for n in operands]
        result = _compare(part, plan, inputs, generator)
        if result is not None:
            compared += 1
            found += result
    return compared, found


def _random(example: Tensor, generator: torch.Generator) -> Tensor:
    shape = [s.node.hint if isinstance(s, torch.SymInt) else s for s in example.shape]
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.to(example.dtype).to(example.device).requires_grad_()


def matched_part(captured: Captured, site: Site, need: Term, known: Analysis) -> fx.GraphModule:
    """The subgraph of a site alone: its operands are inputs, and its result is 0 outside the rows that are read."""
    graph, env = copy_inputs(captured.gm.graph)
    sizes = Sizes(graph, list(env.values()))
    for i, x in enumerate((site.q, site.k, site.v)):
        if x not in env or x.op != "placeholder":
            env[x] = graph.placeholder(f"operand_{i}")
            env[x].meta = dict(x.meta)
    copy_leaf(graph, site.out, env)
    leaves = {n: copy_leaf(graph, known.values.leaf_nodes[n], env) for n in need.leaves}
    info = known.info(site.out)
    writer = TermWriter(graph, leaves, sizes, site.out.meta["val"].device)
    mask = writer.expanded(need, info.sizes)
    if len(info.sizes) != len(info.dims):
        mask = writer.call(torch.ops.aten.reshape.default, mask, [sizes[e] for e in shape_of(site.out)])
    dead = writer.call(torch.ops.aten.logical_not.default, mask)
    graph.output((writer.call(torch.ops.aten.masked_fill.Scalar, env[site.out], dead, 0.0),))
    placeholders_first(graph)
    part = fx.GraphModule(captured.gm, graph, "Matched")
    _propagate(part, captured)
    return part


def _propagate(part: fx.GraphModule, captured: Captured) -> None:
    """Fill in ``meta["val"]`` of new nodes."""
    values: dict[fx.Node, Any] = {}
    inputs = map(trace_copy, captured.example_inputs)
    with captured.fake_mode, enable_python_dispatcher():
        for node in part.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs, node.meta["val"])
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                node.meta["val"] = values[node]
            elif node.op == "get_attr":
                values[node] = node.meta["val"]


def _redrawn(x: Any, generator: torch.Generator, keep: bool) -> Any:
    """Integer inputs resampled from their own values, float inputs and weights as they are; fresh leaves of autograd."""
    if not isinstance(x, Tensor):
        return x.node.hint if isinstance(x, torch.SymInt) else x
    value = x.detach().clone()
    if not keep and x.numel() and not x.is_floating_point() and not x.is_complex():
        chosen = torch.randint(x.numel(), x.shape, generator=generator)
        value = x.detach().reshape(-1)[chosen.to(x.device)].clone()
    return value.requires_grad_(x.requires_grad)


def _compare(gm: fx.GraphModule, plan: Plan, inputs: list[Any], generator: torch.Generator) -> list[Mismatch] | None:
    extra = _extra_inputs(plan, inputs)
    if extra is None or has_randomness(gm.graph):
        return None
    shape_of = _run(gm, inputs, None)
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in shape_of.outputs]
    exact = _run(gm, [_double(x) for x in inputs], cotangents, double=True)
    theirs = _run(gm, inputs, cotangents)
    ours = _run(plan.packed, [*inputs, *extra], cotangents)
    names = [f"output[{i}]" for i in range(len(exact.outputs))] + [f"gradient[{i}]" for i in range(len(exact.gradients))]
    pairs = zip(
        names, [*exact.outputs, *exact.gradients], [*theirs.outputs, *theirs.gradients],
        [*ours.outputs, *ours.gradients], strict=True,
    )  # fmt: skip
    # A gradient that is zero in exact arithmetic (the bias of keys) is rounding noise of the others in both graphs.
    noise = torch.finfo(torch.float32).eps * max([_rms(g) for g in exact.gradients], default=0.0)
    return [m for m in (_difference(*p, noise) for p in pairs) if m is not None]


def _extra_inputs(plan: Plan, inputs: Sequence[Any]) -> tuple[Tensor, ...] | None:
    with torch.no_grad():
        stats, *tensors = plan.prologue(*inputs)
    return plan.fill_if_sound(stats.tolist(), tensors)


@dataclass
class _Result:
    outputs: list[Tensor]
    gradients: list[Tensor]


def _run(gm: fx.GraphModule, inputs: Sequence[Any], cotangents: Sequence[Tensor] | None, double: bool = False) -> _Result:
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    runner = _InDouble(gm) if double else fx.Interpreter(gm)
    given = [x.clone() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]  # may be written in place
    leaves = torch.utils._pytree.tree_leaves(runner.run(*given))
    outputs = [o for o in leaves if isinstance(o, Tensor) and o.is_floating_point()]
    if cotangents is None:
        return _Result([o.detach() for o in outputs], [])
    wanted = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Any] = [None] * len(trained)
    if wanted and trained:
        gradients = list(torch.autograd.grad([o for o, _ in wanted], trained, [c for _, c in wanted], allow_unused=True))
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(trained, gradients, strict=True)]
    return _Result([o.detach() for o in outputs], filled)


class _InDouble(fx.Interpreter):
    """Runs a graph with every float dtype argument read as fp64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        low = (torch.float32, torch.float16, torch.bfloat16)

        def up(value: Any) -> Any:
            return torch.float64 if value in low else value

        args = tuple(up(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: up(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def _double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x


def _difference(name: str, exact: Tensor, theirs: Tensor, ours: Tensor, noise: float) -> Mismatch | None:
    finite = torch.isfinite(exact) & torch.isfinite(theirs)
    if not bool(finite.any()):
        return None
    reference = exact[finite]
    rms = _rms(reference)
    allowed = 2 * _rms(theirs[finite].double() - reference) + 4 * torch.finfo(theirs.dtype).eps * rms + noise
    error = _rms(ours[finite].double() - reference)
    return None if error <= allowed else Mismatch(name, error, allowed)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def has_randomness(graph: fx.Graph) -> bool:
    """Active dropout or another random op: the two graphs draw different numbers, so they cannot be compared."""
    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            if target._opname == "dropout" and node.args[2] and node.args[1]:
                return True
            if target._opname != "dropout" and torch.Tag.nondeterministic_seeded in target.tags:
                return target._opname != "scaled_dot_product_attention" or float(node.kwargs.get("dropout_p", 0.0)) > 0
    return False
