"""pffn by `pffn.cpp`: norms, attention and sums in one pass over the rows, where everything is fp32.

Results do not depend on the number of threads.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from gemopt.kernels.cpu import native, native_build
from gemopt.kernels.cpu.arguments import Arguments
from gemopt.kernels.cpu.bounds import Bounds, bounds
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.tiers import use_triton

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# Keys and values of all heads as fp32 elements: what a core's second-level cache holds of them and their gradients.
CACHED = 50_000

Weights = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Call(ctypes.Structure):
    """`PffnCall` of pffn.cpp."""

    _fields_ = [
        *((name, _P) for name in ("q", "k", "v", "dout", "out", "ln", "stats", "g", "dq", "dk", "dv")),
        *((name, _P) for name in ("weight", "bias", "rms_weight", "dweight", "dbias", "drms")),
        *((name, _P) for name in ("q_offsets", "k_offsets", "activations", "order", "next")),
        *((name, _I) for name in ("sequences", "parts", "rows", "heads", "kv_heads", "d")),
        *((name, _I * 2) for name in ("k_stride", "v_stride")),
        *((name, _F) for name in ("scale", "post_scale", "eps", "rms_eps")),
    ]


def serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernel takes this call."""
    if use_triton(q) or q.dtype != torch.float32 or {k.dtype, v.dtype} != {torch.float32}:
        return False
    return min(spec.max_k, k.shape[0]) * k.shape[1] * (k.shape[2] + v.shape[2]) <= CACHED and native_build.load() is not None


class _Job(Arguments):
    """Those of one call. Raises ValueError for offsets that do not fit."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, eps: float, rms_eps: float, weights: Weights):
        self.bounds: Bounds = bounds(spec, q.shape[0], k.shape[0])
        call, sequences = _Call(), len(self.bounds.order)
        super().__init__(call, sequences + 1, 4 * q.shape[1] * q.shape[2] * int(self.bounds.work.sum()))
        call.sequences, call.parts = sequences, native.BIAS_PARTS
        call.rows, call.heads, call.kv_heads, call.d = q.shape[0], q.shape[1], k.shape[1], q.shape[2]
        self.array("order", np.append(self.bounds.order, sequences))
        self.array("q_offsets", self.bounds.q)
        self.array("k_offsets", self.bounds.k)
        self.array("activations", native.numbers(spec, q.shape[1]))
        self.rows("k", k)
        self.rows("v", v)
        for name, weight in zip(("weight", "bias", "rms_weight"), weights, strict=True):
            if weight is not None:
                self.point(name, weight.contiguous())
        call.scale, call.post_scale, call.eps, call.rms_eps = spec.scale, spec.post_scale, eps, rms_eps


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, eps: float, rms_eps: float, weights: Weights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q `[T, H, D]`, contiguous; weights `[H·D]` or None → out, ln, the statistics `[2, T]` of LayerNorm, g."""
    library = native_build.load()
    assert library is not None
    job = _Job(q, k, v, spec, eps, rms_eps, weights)
    out, ln, g = (torch.empty(q.shape) for _ in range(3))
    stats = torch.empty((2, q.shape[0]))
    for name, x in (("q", q), ("out", out), ("ln", ln), ("stats", stats), ("g", g)):
        job.point(name, x)
    job.run(library.gemopt_pffn_forward)
    return out, ln, stats, g


def backward(
    dout: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec,
    eps: float,
    rms_eps: float,
    weights: Weights,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """dq, dk, dv and the sums `[H·D]` that are the gradients of the weights; saved: ln, the statistics, g."""
    library = native_build.load()
    assert library is not None
    ln, stats, g = (x.contiguous() for x in saved)
    job = _Job(ln, k, v, spec, eps, rms_eps, weights)
    dq, dk, dv = (torch.empty(x.shape) for x in (ln, k, v))
    used = int(job.bounds.k[-1])
    dk[used:], dv[used:] = 0, 0
    pairs = (("dout", dout), ("ln", ln), ("stats", stats), ("g", g), ("dq", dq), ("dk", dk), ("dv", dv))
    for name, x in pairs:
        job.point(name, x)
    if q is not None:
        job.point("q", q.contiguous())
    parts = [None if w is None else torch.zeros((native.BIAS_PARTS, w.numel())) for w in weights]
    for name, sums in zip(("dweight", "dbias", "drms"), parts, strict=True):
        if sums is not None:
            job.point(name, sums)
    job.run(library.gemopt_pffn_backward)
    return dq, dk, dv, [None if sums is None else sums.sum(0) for sums in parts]
