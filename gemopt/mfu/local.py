"""Local MFU: every layer alone on one device, forward and backward, without recomputation and without communication.

The definition is that of Meta's report on GEM (engineering.fb.com, 3 August 2026): local MFU is the average over layers,
weighted by their time; E2E MFU = local MFU x scaling ratio. The FLOPs are useful ones (counting.py), so padding that a layer
computes lowers its figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gemopt.mfu.counting import count
from gemopt.mfu.peaks import datasheet_peak, matmul_ceiling


def mfu(flops: float, seconds: float, peak: float) -> float:
    """``flops / seconds / peak``. Raises ValueError unless time and peak are positive."""
    if not (seconds > 0 and peak > 0 and flops >= 0):
        raise ValueError(f"flops, seconds, peak: got {flops}, {seconds}, {peak}; allowed: >= 0, > 0, > 0")
    return flops / seconds / peak


def end_to_end(local: float, scaling_ratio: float) -> float:
    """E2E MFU of many devices: the local MFU times the share of it that survives communication and imbalance."""
    for name, value in (("local", local), ("scaling_ratio", scaling_ratio)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: got {value}; allowed: a share in [0, 1]")
    return local * scaling_ratio


@dataclass(frozen=True)
class LayerTime:
    """One layer: useful FLOPs of forward and backward, and the median seconds of both."""

    name: str
    flops: float
    seconds: float


@dataclass(frozen=True)
class Utilisation:
    """Layers with both denominators. ``peak`` is None for devices without a datasheet figure."""

    layers: list[LayerTime]
    peak: float | None
    ceiling: float
    notes: list[str] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(x.flops for x in self.layers)

    @property
    def seconds(self) -> float:
        return sum(x.seconds for x in self.layers)

    def local(self, peak: float | None = None) -> float:
        """Local MFU over all layers, against ``peak`` (the datasheet's, or the measured ceiling where there is none)."""
        return mfu(self.flops, self.seconds, peak or self.peak or self.ceiling)

    def __str__(self) -> str:
        head = f"{'layer':40} {'GFLOP':>10} {'ms':>9} {'TFLOP/s':>9} {'of datasheet':>13} {'of matmul':>10}"
        rows = [*self.layers, LayerTime("all", self.flops, self.seconds)]
        return "\n".join([head, *(self._row(x) for x in rows), *self.notes])

    def _row(self, x: LayerTime) -> str:
        sheet = f"{mfu(x.flops, x.seconds, self.peak):13.1%}" if self.peak else f"{'-':>13}"
        rate = x.flops / x.seconds / 1e12
        share = mfu(x.flops, x.seconds, self.ceiling)
        return f"{x.name:40} {x.flops / 1e9:10.3f} {x.seconds * 1e3:9.3f} {rate:9.3f} {sheet} {share:10.1%}"


def measure_layers(
    model: nn.Module,
    *inputs: Any,
    layers: Sequence[str],
    compile: Callable[[nn.Module], Callable[..., Any]] = lambda module: module,
    dtype: torch.dtype = torch.float32,
    repeats: int = 5,
) -> Utilisation:
    """Time each of ``layers`` (paths of submodules that do not contain each other) on what it is called with.

    Args:
        compile: how a layer runs, ``torch.compile`` or ``gemopt.compile`` for instance; as it is if left out.
        dtype: float32, or what autocast computes in: it decides the peaks.
        repeats: timed runs, of which the median counts.

    Raises:
        ValueError: a path is no submodule, or a layer was not called.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in layers if name not in modules]
    if unknown:
        raise ValueError(f"layers: got {unknown}; allowed: paths of submodules, such as {list(modules)[1:4]}")
    nested = [a for a in layers for b in layers if a != b and a.startswith(b + ".")]
    if nested:
        raise ValueError(f"layers: {nested} lie inside others of the list, and would count twice")
    calls = _record_calls(model, inputs, {name: modules[name] for name in layers})
    device = next((x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)), torch.device("cpu"))
    found, notes = [], []
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    for name in layers:
        args, kwargs = calls[name]
        with autocast:
            counted = count(modules[name], *args, **kwargs)
            seconds = _time(compile(modules[name]), args, kwargs, device, repeats)
        found.append(LayerTime(name, counted.training, seconds))
        notes += [f"{name}: {note}" for note in counted.notes]
    return Utilisation(found, datasheet_peak(device, dtype), matmul_ceiling(device, dtype), notes)


def _record_calls(
    model: nn.Module, inputs: Sequence[Any], layers: dict[str, nn.Module]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    handles = []
    for name, module in layers.items():

        def hook(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.setdefault(name, (args, kwargs))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in layers if name not in calls]
    if missing:
        raise ValueError(f"layers: {missing} were not called by the model")
    return calls


def _time(function: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, repeats: int) -> float:
    """Median seconds of forward and backward, gradients to the inputs included."""
    args, kwargs = tree_map(_leaf, (args, kwargs))
    times = []
    for _ in range(repeats + 2):  # compilation and warm-up
        began = time.perf_counter()
        outputs = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
