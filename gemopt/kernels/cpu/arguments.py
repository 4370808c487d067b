"""Fills the structures that the C++ kernels take, and shares their tasks among threads."""

import ctypes
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemopt.kernels.cpu import native_build, workers

# A thread is worth waking for a tenth of a millisecond, at 20 GFLOP/s.
FLOPS_PER_THREAD = 2_000_000


class Arguments:
    """Arguments of one call of a C++ kernel, with what they point into; `next` counts the tasks that threads have taken."""

    def __init__(self, call: ctypes.Structure, tasks: int, flops: int) -> None:
        self.call, self.tasks, self.flops = call, tasks, flops
        self.next = ctypes.c_int64(0)
        call.next = ctypes.addressof(self.next)  # type: ignore[attr-defined]
        self.keep: list[Any] = []

    def array(self, name: str, array: np.ndarray) -> None:
        self.keep.append(array := np.ascontiguousarray(array))
        setattr(self.call, name, array.ctypes.data)

    def point(self, name: str, x: Tensor) -> None:
        self.keep.append(x)
        setattr(self.call, name, x.data_ptr())

    def rows(self, name: str, x: Tensor) -> None:
        """A `[rows, heads, features]` input: fp32, features dense."""
        x = x.to(torch.float32)
        if x.stride(2) != 1 and x.shape[2] > 1:
            x = x.contiguous()
        self.point(name, x)
        setattr(self.call, f"{name}_stride", (ctypes.c_int64 * 2)(x.stride(0), x.stride(1)))

    def run(self, function: Any) -> None:
        """Call `function` until the tasks are done, once: here, or on threads if there is enough to do for two."""
        threads = max(1, min(torch.get_num_threads(), self.tasks, self.flops // FLOPS_PER_THREAD))
        address = ctypes.addressof(self.call)
        if threads == 1:
            function(address, 1)
        elif native_build.has_threads():
            function(address, torch.get_num_threads())  # all: OpenMP takes long to make a team of another size
        else:
            workers.run([partial(function, address, 1)] * threads, limit=torch.get_num_threads())
