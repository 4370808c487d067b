"""Where the time of a step goes: device time by kernel family from torch.profiler, and the gaps between kernels."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# The first family whose pattern is found in the lower-case name of a kernel or, on a CPU, of an operator.
FAMILIES: dict[str, str] = {
    "attention": r"attention|attn|fmha|flash|gdpa|pffn|jagged|block_fwd|block_bwd",
    "embeddings": r"embedding|adagrad",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|::mm|addmm|::bmm|linear|matmul|mkldnn|einsum",
    "optimizer": r"adam|multi_tensor|foreach|clip_grad",
    "norms": r"norm",
    "gathers and scatters": r"gather|scatter|index|nonzero|cumsum|scan|pack",
    "copies": r"memcpy|memset|copy|::cat|fill",
    "softmax and sums": r"softmax|reduce|::sum|::mean",
    "fused pointwise": r"triton_|elementwise|vectorized|::mul|::add|silu|sigmoid|gelu",
}


def family(name: str) -> str:
    """The family of a kernel, ``other`` if none fits. A fused Triton kernel is named after all it fuses: a reduction or a
    norm inside it decides."""
    low = name.lower()
    if low.startswith("triton_"):
        if "norm" in low:
            return "norms"
        return "softmax and sums" if low.startswith(("triton_red", "triton_per")) else "fused pointwise"
    return next((label for label, pattern in FAMILIES.items() if re.search(pattern, low)), "other")


def of_step(step: Callable[[], Any], device: str, steps: int = 2) -> dict[str, float]:
    """Seconds of one step by family; ``gaps`` is the time in which the device ran nothing. Mean over ``steps``."""
    cuda = device.startswith("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    step()
    if cuda:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    total: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        total[family(event.key)] += spent / 1e6 / steps
    if cuda:
        total["gaps"] = max(wall / steps - sum(total.values()), 0.0)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def plot(records: Sequence[Mapping[str, Any]], names: Mapping[str, str], path: Path) -> Path:
    """One bar per contestant and record, its families stacked. Returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (f"{record['config']['config']}, max {record['config']['max_len']}\n{names[name]}", row["breakdown_s"])
        for record in records
        for name, row in record.get("timing", {}).items()
        if "breakdown_s" in row
    ]
    families = [*FAMILIES, "other", "gaps"]
    colours = dict(zip(families, plt.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(bars) + 1.8), constrained_layout=True)
    for place, (_, parts) in enumerate(bars):
        left = 0.0
        for label in families:
            width = 1e3 * parts.get(label, 0.0)
            axes.barh(place, width, left=left, color=colours[label], label=label if place == 0 else None)
            left += width
    axes.set_yticks(range(len(bars)), [title for title, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel="ms per training step", title="Where the time of a step goes")
    axes.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
