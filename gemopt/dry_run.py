"""`gemopt.explain`: what would be rewritten, and what that saves, without compiling and without a trace left
behind.

Dynamo runs with a backend that captures every graph and plans it, runs the plan's prologue once (for the
sizes and the assumptions at the given inputs), and then the graph as it is, on aliases of its inputs: tensors
that the graph may write are cloned, and the autograd graph ends at aliases of the parameters. State outside
the graphs is put back.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch._dynamo.eval_frame import OptimizedModule

from gemopt import dynamo
from gemopt.backend import GemoptBackend, Host, size_symbols
from gemopt.graph.capture import Captured
from gemopt.recipe import Recipe

if TYPE_CHECKING:
    from gemopt.report import Report


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """The report of ``model(*inputs, **kwargs)``: rewrites, rejections, FLOPs and bytes at these inputs.

    Nothing is compiled by an inner compiler. The call runs once, padded; afterwards parameters, buffers,
    gradients, attributes of the modules and the state of the random generators are what they were.

    Args:
        model: a module, or a function such as a whole training step. One made by :func:`gemopt.compile` is
            explained with its own recipe.
        inputs, kwargs: what it is called with.
        recipe: as for :func:`gemopt.compile`.

    Raises:
        TypeError: ``model`` cannot be called.
        ValueError: ``model`` has lazy parameters that no call has initialised yet.
    """
    from gemopt.report import Report

    if not callable(model):
        raise TypeError(f"model: got {type(model).__name__}; allowed: a module or a function")
    if recipe is None:
        recipe = vars(model).get("_gemopt_settings", {}).get("recipe") if hasattr(model, "__dict__") else None
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    model = getattr(model, "_torchdynamo_orig_callable", model)
    report = Report(getattr(model, "__name__", type(model).__name__))
    backend = _ExplainBackend(Recipe.of(recipe), report, inner=_never)
    with _state_kept(_modules_of(model, inputs, kwargs)):
        dynamo.optimize(model, backend, dynamic=True)(*inputs, **kwargs)
    return report


class _ExplainBackend(GemoptBackend):
    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report = self.new_report(example_inputs)
        return _Explained(gm, self.plan(gm, example_inputs, report), report)


class _Explained:
    """Runs the prologue at the first call, and the graph, on shielded inputs, at every call."""

    def __init__(self, gm: fx.GraphModule, planned: tuple[Captured, Any] | None, report: Any) -> None:
        self._gm = gm
        self._planned = planned
        self._report = report
        self._mutates = planned is None or any(map(_writes, planned[0].gm.graph.nodes))

    def __call__(self, *args: Any) -> Any:
        if self._planned is not None:
            captured, plan = self._planned
            self._planned = None
            sizes = size_symbols(captured)
            Host(plan.prologue.forward, _never, _never, plan, self._report, sizes).admit(args)
        return self._gm.forward(*(self._shield(x) for x in args))

    def _shield(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        alias = x.detach()
        if self._mutates or not x.requires_grad:  # batch_norm writes, its schema is silent
            alias = alias.clone()
        return alias.requires_grad_(x.requires_grad)


def _never(*args: Any) -> Any:
    raise AssertionError("explain runs no compiled graph")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# ---------------------------------------------------------------------------------------------- state


def _modules_of(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """The modules a call of ``model`` is seen to reach: itself, arguments, closure and globals."""
    roots: list[Any] = [model, getattr(model, "__self__", None), *inputs, *kwargs.values()]
    while hasattr(model, "func"):  # functools.partial
        roots += [*model.args, *model.keywords.values(), model.func]
        model = model.func
    function = inspect.unwrap(getattr(model, "__func__", model))
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        roots += [*names.nonlocals.values(), *names.globals.values()]
    found: dict[int, nn.Module] = {}
    for root in roots:
        if isinstance(root, nn.Module):
            found.update((id(m), m) for m in root.modules())
    return list(found.values())


@contextmanager
def _state_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    if any(nn.parameter.is_lazy(p) for p in parameters.values()):
        raise ValueError("model: has lazy parameters that are not initialised; allowed: a model that has run once")
    with ExitStack() as stack:
        stack.enter_context(_generators_kept())
        for module in modules:
            stack.enter_context(_attributes_kept(module))
        stack.enter_context(_gradients_kept(list(parameters.values())))
        yield


@contextmanager
def _generators_kept() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put back a module's attributes, its tables of parameters and buffers, and its buffers' content."""
    attributes = dict(vars(module))
    tables = {key: dict(attributes[key]) for key in ("_parameters", "_buffers", "_modules")}
    buffers = [(b, b._version, b.detach().clone()) for b in module._buffers.values() if b is not None]
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        for key, table in tables.items():
            attributes[key].clear()
            attributes[key].update(table)
        with torch.no_grad():
            for buffer, version, content in buffers:
                if buffer._version != version:
                    buffer.copy_(content)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the gradients away and put them back: an optimizer that steps inside then has nothing to apply."""
    gradients = [p.grad for p in parameters]
    versions = [p._version for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if any(p._version != version for p, version in zip(parameters, versions, strict=True)):
            warnings.warn("gemopt.explain: the call wrote to a parameter outside of its graphs", stacklevel=2)
