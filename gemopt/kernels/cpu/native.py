"""Attention of packed sequences by `attention.cpp`, a softmax or GDPA: fills its Call and shares its tasks among threads.

No plan: the kernel reads the offsets. fp32; half types are converted on the way in and out. Results do not depend on the
number of threads.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemopt.kernels.cpu import native_build
from gemopt.kernels.cpu.arguments import Arguments
from gemopt.kernels.cpu.bounds import Bounds
from gemopt.kernels.spec import ACTIVATIONS, AttentionSpec
from gemopt.ops import dropout as generator

# Keys and values of a head as fp32 elements: while they stay in a core's cache this kernel is the fastest, and from there on
# the matrix products of a tuned library are.
CACHED = 50_000
# A shared bias is summed in this many parts, whatever the number of threads, so that its gradient is always the same.
BIAS_PARTS = 8

_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Call(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = [
        *((name, _P) for name in ("q", "k", "v", "dout", "lse_in", "out", "lse", "dq", "dk", "dv")),
        *((name, _P) for name in ("q_offsets", "k_offsets", "q_pos", "k_pos", "bias", "mask", "dbias")),
        *((name, _P) for name in ("activations", "order", "next")),
        *((name, _I) for name in ("sequences", "parts", "heads", "kv_heads", "d", "dv_size")),
        *((name, _I * 2) for name in ("q_stride", "k_stride", "v_stride", "dout_stride")),
        *((name, _I * 4) for name in ("bias_stride", "mask_stride", "dbias_stride")),
        ("dbias_size", _I),
        ("left", _I),
        ("right", _I),
        *((name, ctypes.c_int32) for name in ("causal", "bottom_right", "dropout")),
        *((name, ctypes.c_float) for name in ("scale", "multiplier", "post_scale")),
        *((name, ctypes.c_uint32) for name in ("threshold", "seed_low", "seed_high")),
    ]


class Job(Arguments):
    """Those of an attention."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bounds: Bounds) -> None:
        call = _Call()
        flops = 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * int(bounds.work.sum())
        super().__init__(call, len(bounds.order) * k.shape[1], flops)
        call.sequences, call.heads, call.kv_heads = len(bounds.order), q.shape[1], k.shape[1]
        call.d, call.dv_size, call.parts = q.shape[2], v.shape[2], BIAS_PARTS
        for name, array in (("order", bounds.order), ("q_offsets", bounds.q), ("k_offsets", bounds.k)):
            self.array(name, array)
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.rows(name, x)
        for name, index in (("q_pos", spec.q_positions), ("k_pos", spec.k_positions)):
            if index is not None:
                self.point(name, index.to(torch.int64).contiguous())
        self._tables(spec)
        call.left, call.right = spec.window
        call.causal, call.bottom_right = spec.causal, spec.bottom_right
        call.scale, call.post_scale = spec.scale, spec.post_scale
        if not spec.softmax:
            self.array("activations", numbers(spec, q.shape[1]))
        call.dropout = spec.dropout_p > 0
        if spec.dropout_p > 0:
            assert spec.seed is not None
            seed = int(spec.seed)
            call.seed_low, call.seed_high = seed & generator.MASK32, (seed >> 32) & generator.MASK32
            call.threshold, call.multiplier = generator.threshold(spec.dropout_p), generator.multiplier(spec.dropout_p)

    def _tables(self, spec: AttentionSpec) -> None:
        bias = None if spec.bias is None else spec.bias.to(torch.float32)
        for name, table in (("bias", bias), ("mask", spec.mask)):
            if table is not None:
                self.point(name, table)
                setattr(self.call, f"{name}_stride", _strides(table))

    def bias_gradient(self, bias: Tensor) -> Tensor:
        """Where the kernel sums it: `[parts or 1, *bias.shape]`, zeros."""
        parts = BIAS_PARTS if bias.shape[0] == 1 else 1
        dbias = torch.zeros((parts, *bias.shape), dtype=torch.float32)
        self.point("dbias", dbias)
        self.call.dbias_stride = _strides(dbias[0])
        self.call.dbias_size = dbias[0].numel() if parts > 1 else 0
        return dbias


def numbers(spec: AttentionSpec, heads: int) -> np.ndarray:
    """The activation of every head as `activations.h` numbers them, int32."""
    names = spec.activations * (1 if len(spec.activations) > 1 else heads)
    return np.array([ACTIVATIONS.index(name) for name in names], dtype=np.int32)


def _strides(table: Tensor) -> Any:
    """Strides of a bias or mask; an axis of size 1 is read again and again."""
    return (_I * 4)(*(0 if size == 1 else step for size, step in zip(table.shape, table.stride(), strict=True)))


def serves(q: Tensor, v: Tensor, spec: AttentionSpec, bounds: Bounds) -> bool:
    """Whether the kernel takes this call: at most fp32, and most of its work in short sequences."""
    if q.dtype == torch.float64:
        return False
    long = bounds.k_lengths * (q.shape[2] + v.shape[2]) > CACHED
    if long.any() and 2 * bounds.work[long].sum() > bounds.work.sum():
        return False
    return native_build.load() is not None


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """As `attention.forward`."""
    library = native_build.load()
    assert library is not None
    job = Job(q, k, v, spec, bounds)
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]))
    lse = torch.empty((q.shape[0] if spec.softmax else 0, q.shape[1]))
    used = int(bounds.q[-1])
    out[used:], lse[used:] = 0, 0
    job.point("out", out)
    job.point("lse", lse)
    job.run(library.gemopt_forward)
    return out.to(q.dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, spec: AttentionSpec, bounds: Bounds, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `attention.backward`."""
    library = native_build.load()
    assert library is not None
    job = Job(q, k, v, spec, bounds)
    job.rows("dout", dout)
    if lse is not None:
        job.point("lse_in", lse.contiguous())
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    used_q, used_k = int(bounds.q[-1]), int(bounds.k[-1])
    dq[used_q:], dk[used_k:], dv[used_k:] = 0, 0, 0
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        job.point(name, x)
    dbias: Tensor | None = None
    if bias_grad:
        assert spec.bias is not None
        dbias = job.bias_gradient(spec.bias)
    job.run(library.gemopt_backward)
    if dbias is not None:
        dbias = dbias.sum(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias
