"""Which tiers of kernels tensors may run on: by their device, its compute capability and two environment variables.

`GEMOPT_TIER=portable` leaves the Gluon kernels out. `GEMOPT_TIER=blackwell` asks for those for compute capability 10.0, none
of which have run on a device. `GEMOPT_FORCE_TRITON=1` sends CPU tensors to the Triton kernels.
"""

import os
from functools import cache

import torch
from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels."""
    return x.device.type != "cpu" or os.environ.get("GEMOPT_FORCE_TRITON") == "1"


def capability(x: Tensor) -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU that has `x`; None elsewhere."""
    if x.device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(x.device)


def is_hopper(x: Tensor) -> bool:
    """Whether ops on `x` may run as Gluon kernels."""
    return capability(x) == (9, 0) and os.environ.get("GEMOPT_TIER") != "portable"


def is_blackwell(x: Tensor) -> bool:
    """Whether ops on `x` may run as the Gluon kernels that are untested on hardware: only if asked to."""
    return os.environ.get("GEMOPT_TIER") == "blackwell" and capability(x) == (10, 0)


@cache
def multiprocessors(device: int) -> int:
    """Of a GPU, by its index."""
    return torch.cuda.get_device_properties(device).multi_processor_count
