"""One forward and backward of a model, everything observable written down: in its own dtype, or in fp64.

Observable are the outputs, the gradients of parameters and of float inputs, and buffers the call changed. The
fp64 run converts parameters, buffers and inputs, and maps every request for a smaller float type inside the
model to fp64, so that `mask.float()` or an autocast block does not spoil the reference.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemopt.testing.inputs import Batch

SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Observed:
    """What one run showed. `tensors` maps `"output"`, `"grad layer.weight"`, `"buffer bn.mean"`, … to
    values.
    """

    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    structure: str = ""
    error: Exception | None = None
    path: str = ""  # "packed" | "padded: reason" | ""


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """The modules whose parameters a call can use: the module itself, or those a function closes over."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        parts = [model.func, *model.args, *model.keywords.values()]
        return [m for part in parts if callable(part) for m in modules_of(part)]
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner]
    function = inspect.unwrap(model)
    if not inspect.isfunction(function):
        return []
    scope = inspect.getclosurevars(function)
    found = [v for v in (*scope.nonlocals.values(), *scope.globals.values()) if isinstance(v, nn.Module)]
    return list(dict.fromkeys(found))


class State:
    """Parameters and buffers of some modules, to look at and to put back."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        prefixes = [f"{i}." if len(modules) > 1 else "" for i in range(len(modules))]
        pairs = list(zip(prefixes, modules, strict=True))
        self.parameters = {p + n: t for p, m in pairs for n, t in m.named_parameters()}
        self.buffers = {p + n: t for p, m in pairs for n, t in m.named_buffers()}
        self._saved = {t: t.detach().clone() for t in (*self.parameters.values(), *self.buffers.values())}

    def restore(self) -> None:
        """Values as they were, gradients gone."""
        with torch.no_grad():
            for tensor, value in self._saved.items():
                if not torch.equal(tensor, value) or tensor.is_floating_point():
                    tensor.copy_(value)
        for parameter in self.parameters.values():
            parameter.grad = None

    def changed_buffers(self) -> dict[str, Tensor]:
        now = {n: b for n, b in self.named_buffers_now().items() if n in self.buffers}
        return {n: b.detach().clone() for n, b in now.items()}

    def named_buffers_now(self) -> dict[str, Tensor]:
        prefixes = [f"{i}." if len(self.modules) > 1 else "" for i in range(len(self.modules))]
        return {p + n: b for p, m in zip(prefixes, self.modules, strict=True) for n, b in m.named_buffers()}


@contextlib.contextmanager
def in_double(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters and buffers of the modules as fp64 inside the block, exactly as before afterwards."""
    parts = {id(m): m for root in modules for m in root.modules()}.values()
    parameters = {id(p): p for m in parts for p in m._parameters.values() if p is not None}.values()
    saved = [(p, p.data) for p in parameters]
    buffers = [(m, name, b) for m in parts for name, b in m._buffers.items() if b is not None]
    try:
        for p, data in saved:
            if data.is_floating_point():
                p.grad, p.data = None, data.double()
        for m, name, b in buffers:
            m._buffers[name] = b.double() if b.is_floating_point() else b.clone()
        yield
    finally:
        for p, data in saved:
            p.grad, p.data = None, data
        for m, name, b in buffers:
            m._buffers[name] = b


class PromoteToDouble(TorchFunctionMode):
    """Inside the block every torch function computes in fp64, whatever smaller float type the code asks
    for.
    """

    _METHODS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in self._METHODS:
            return args[0].double()
        in_place = getattr(func, "__name__", "").rstrip("_") != getattr(func, "__name__", "")
        if not in_place or "out" in kwargs:
            args, kwargs = pytree.tree_map(_promoted, (args, kwargs))
        return func(*args, **kwargs)


def _promoted(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in SMALL_FLOATS else value
    if type(value) is Tensor and value.dtype in SMALL_FLOATS:
        return value.double()
    return value


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def no_dropout(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Dropout of every module at 0 inside the block, `nn.MultiheadAttention`'s own included."""
    changed: list[tuple[nn.Module, str, float]] = []
    for m in {id(m): m for root in modules for m in root.modules()}.values():
        name = "p" if isinstance(m, nn.modules.dropout._DropoutNd) else "dropout"
        value = getattr(m, name, None)
        if isinstance(value, float) and value > 0:
            changed.append((m, name, value))
            setattr(m, name, 0.0)
    try:
        yield
    finally:
        for m, name, value in changed:
            setattr(m, name, value)


# --- one run


@dataclass
class Objective:
    """What is differentiated: `loss(output)`, or the outputs against fixed random cotangents.

    The first run (eager) draws the cotangents in its own dtypes; the fp64 run and the compiled one use those
    values. `mute` marks output elements that get no cotangent (bool, by output name): those that are not
    finite in fp64.
    """

    loss: Callable[[Any], Tensor] | None
    seed: int
    mute: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, output: Any, named: dict[str, Tensor]) -> Tensor | None:
        if self.loss is not None:
            value = self.loss(output)
            return value if value.requires_grad else None
        terms = [(t * self._cotangent(n, t)).sum().double() for n, t in named.items() if t.requires_grad]
        return torch.stack(terms).sum() if terms else None

    def _cotangent(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.cotangents:
            generator = torch.Generator().manual_seed(self.seed + len(self.cotangents))
            drawn = torch.randn(tensor.shape, generator=generator) if tensor.dim() else torch.ones(())
            drawn = drawn.to(tensor.device).to(tensor.dtype)
            self.cotangents[name] = drawn.masked_fill(self.mute[name], 0.0) if name in self.mute else drawn
        cotangent = self.cotangents[name]
        return cotangent.to(tensor.dtype) if cotangent.shape == tensor.shape else torch.ones_like(tensor)


def named_outputs(output: Any) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves_with_path(output)
    return {"output" + pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def observe(
    function: Callable[..., Any],
    batch: Batch,
    state: State,
    objective: Objective,
    *,
    seed: int,
    autocast: tuple[str, torch.dtype] | None = None,
) -> Observed:
    """Run once, forward and backward. An exception of the model is recorded, not raised."""
    batch, seen = batch.fresh(), Observed()
    torch.manual_seed(seed)
    context = torch.autocast(autocast[0], autocast[1]) if autocast else contextlib.nullcontext()
    try:
        with context:
            output = function(*batch.args, **batch.kwargs)
        named = named_outputs(output)
        seen.structure = str(pytree.tree_structure(output))
        seen.tensors.update({n: _kept(t) for n, t in named.items()})
        total = objective(output, named)
        if total is not None:
            total.backward()
            inputs = {n: t for n, t in batch.tensors().items() if t.requires_grad}
            leaves = {**state.parameters, **inputs}
            seen.tensors.update({f"grad {n}": t.grad for n, t in leaves.items() if t.requires_grad})
    except Exception as error:
        seen.error = error
    seen.tensors.update({f"buffer {n}": b for n, b in state.changed_buffers().items()})
    return seen


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor.detach()


def observe_double(
    model: Callable[..., Any],
    batch: Batch,
    state: State,
    objective: Objective,
    *,
    seed: int,
) -> Observed:
    """The fp64 reference run."""
    double = batch.map(lambda t: _double_like(t))
    with in_double(state.modules), default_dtype(torch.float64), PromoteToDouble():
        return observe(model, double, state, objective, seed=seed)


def _double_like(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)
