"""Which kernel runs an op: by the device of its first tensor.

`GEMOPT_FORCE_TRITON=1` sends CPU tensors to the Triton kernels; with `TRITON_INTERPRET=1` these then run under Triton's
interpreter, which is how the kernels are tested without a GPU.
"""

import os
from collections.abc import Callable

from torch import Tensor

from gemopt.kernels.cpu import attention as cpu

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def use_triton(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels."""
    return x.device.type != "cpu" or os.environ.get("GEMOPT_FORCE_TRITON") == "1"


def attention_kernels(q: Tensor) -> tuple[Forward, Backward]:
    """Forward and backward of attention for the device of `q`.

    forward(q, k, v, spec) -> out, lse                    lse `[Tq, H]`, or `[0, H]` unless the weights are a softmax
    backward(dout, q, k, v, out, lse, spec, bias_grad) -> dq, dk, dv, dbias or None
    """
    if not use_triton(q):
        return cpu.forward, cpu.backward
    from gemopt.kernels.triton import jagged_attention as kernels  # triton is absent on some CPU installs

    return kernels.forward, kernels.backward
