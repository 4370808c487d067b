"""Launches the Triton kernels of jagged attention.

Nothing here reads a device value: grids come from `max_q`, `max_k` and the batch size. The batch lies on the one grid
axis without a practical limit; the tiles of a sequence, which a program may stride over, on a short one.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from gemopt.kernels.cpu import attention as host_kernels
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton.attention_backward import attention_backward_kv, attention_backward_q, attention_delta
from gemopt.kernels.triton.attention_forward import attention_forward
from gemopt.ops import dropout as generator

MAX_HEAD_DIM = 256
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Blocks:
    """Tile sizes and launch options of one kernel."""

    q: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    forward: Blocks
    backward_kv: Blocks
    backward_q: Blocks


def config(head_dim: int, dtype: torch.dtype, heavy: bool = False, interpreted: bool = False) -> Config:
    """Tiles that fit without register spills on sm_90 and sm_100 (tests/kernels/test_aot.py).

    `heavy`: positions, windows and dropout need registers too. fp32 products are exact, made of scalar multiply-adds; above
    head_dim 128 their backward spills.
    """
    if interpreted:
        blocks = Blocks(32, 64, 4, 1)  # the interpreter's time goes by tiles
        return Config(blocks, blocks, blocks)
    if dtype == torch.float32:
        if head_dim <= 64:
            return Config(Blocks(32, 32, 4, 2), Blocks(16, 32, 8, 1), Blocks(32, 32, 4, 1))
        return Config(Blocks(32, 32, 8, 1), Blocks(16, 16, 8, 1), Blocks(32, 16, 8, 1))
    if head_dim <= 64:
        if heavy:
            return Config(Blocks(64, 64, 4, 2), Blocks(32, 32, 4, 2), Blocks(64, 64, 8, 2))
        return Config(Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 2))
    if head_dim <= 128:
        if heavy:
            return Config(Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2))
        return Config(Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 64, 8, 2))
    return Config(Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 1))


def is_heavy(spec: AttentionSpec) -> bool:
    return spec.dropout_p > 0 or spec.window != (-1, -1) or spec.q_positions is not None or spec.k_positions is not None


def is_interpreted() -> bool:
    return not isinstance(attention_forward, triton.runtime.JITFunction)


def block_of(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def constants(d: int, dv: int, spec: AttentionSpec, blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    """The constexpr arguments the forward and both backward kernels share."""
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": block_of(d),
        "BLOCK_DV": block_of(dv),
        "BLOCK_Q": blocks.q,
        "BLOCK_K": blocks.k,
        "CAUSAL": spec.causal,
        "BOTTOM_RIGHT": spec.bottom_right,
        "LEFT": spec.window[0],
        "RIGHT": spec.window[1],
        "HAS_Q_POS": spec.q_positions is not None,
        "HAS_K_POS": spec.k_positions is not None,
        "DROPOUT": spec.dropout_p > 0,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def _needs_host(q: Tensor, v: Tensor) -> bool:
    """fp64 is for verification: no tensor cores worth a kernel."""
    if max(q.shape[2], v.shape[2]) > MAX_HEAD_DIM and q.dtype != torch.float64:
        raise ValueError(
            f"jagged_attention: head_dim on {q.device.type} must be at most {MAX_HEAD_DIM}, "
            f"got {q.shape[2]} (q, k) and {v.shape[2]} (v)"
        )
    return q.dtype == torch.float64


def _to_host(spec: AttentionSpec) -> AttentionSpec:
    moved = {name: value.cpu() for name, value in vars(spec).items() if isinstance(value, Tensor)}
    return replace(spec, **moved)


def _dense_features(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _pointers(spec: AttentionSpec, q: Tensor) -> list[Tensor]:
    """Offsets, positions and seed; a kernel never reads through a stand-in."""
    return [
        spec.q_offsets,
        spec.k_offsets,
        *(q if x is None else x for x in (spec.q_positions, spec.k_positions, spec.seed)),
    ]


def _numbers(spec: AttentionSpec) -> tuple[float, int, float]:
    """scale in base 2, dropout threshold as the int32 of the same bits, multiplier."""
    limit = generator.threshold(spec.dropout_p)
    return spec.scale * LOG2E, limit - (1 << 32) if limit >= 1 << 31 else limit, generator.multiplier(spec.dropout_p)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]` → out `[Tq, H, Dv]`, lse fp32 `[Tq, H]`."""
    if _needs_host(q, v):
        out, lse = host_kernels.forward(q.cpu(), k.cpu(), v.cpu(), _to_host(spec))
        return out.to(q.device), lse.to(q.device)
    spec = _supported(spec.split_blocks(q.shape[0]))
    q, k, v = (_dense_features(x) for x in (q, k, v))
    (rows, heads, d), dv = q.shape, v.shape[2]
    out, lse = q.new_empty((rows, heads, dv)), q.new_empty((rows, heads), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    spec = _drop_unused(spec)
    blocks = config(max(d, dv), q.dtype, is_heavy(spec), is_interpreted()).forward
    batch = spec.q_offsets.shape[0] - 1
    scale_log2, threshold, multiplier = _numbers(spec)
    grid = (batch + 1, heads, _tiles(spec.max_q, blocks.q))
    attention_forward[grid](
        q,
        k,
        v,
        out,
        lse,
        *_pointers(spec, q),
        rows,
        k.shape[0],
        batch,
        heads,
        heads // k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        scale_log2,
        threshold,
        multiplier,
        **constants(d, dv, spec, blocks, q.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out, lse


def _supported(spec: AttentionSpec) -> AttentionSpec:
    if not spec.softmax or spec.bias is not None or spec.mask is not None:
        raise NotImplementedError("attention in Triton: activations, bias and mask are not there yet")
    return spec


def _tiles(longest: int, block: int) -> int:
    return min(max(1, triton.cdiv(longest, block)), 65_535)


def _drop_unused(spec: AttentionSpec) -> AttentionSpec:
    return spec if spec.masked else replace(spec, q_positions=None, k_positions=None)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    spec: AttentionSpec,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if `bias_grad`, of the bias. `out` and `lse` are those of a softmax, else None."""
    if _needs_host(q, v):
        on_host = (None if x is None else x.cpu() for x in (dout, q, k, v, out, lse))
        grads = host_kernels.backward(*on_host, _to_host(spec), bias_grad)
        dq, dk, dv_, dbias = (None if x is None else x.to(q.device) for x in grads)
        return dq, dk, dv_, dbias
    spec = _supported(spec.split_blocks(q.shape[0]))
    assert out is not None and lse is not None
    dout, q, k, v, out = (_dense_features(x) for x in (dout, q, k, v, out))
    lse = lse.contiguous()
    (rows, heads, d), kv_heads, dv = q.shape, k.shape[1], v.shape[2]
    dq, dk, dv_ = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    spec = _drop_unused(spec)
    cfg = config(max(d, dv), q.dtype, is_heavy(spec), is_interpreted())
    batch = spec.q_offsets.shape[0] - 1
    scale_log2, threshold, multiplier = _numbers(spec)
    delta = torch.empty_like(lse)
    if rows and heads:
        attention_delta[(triton.cdiv(rows, 64), heads)](
            out,
            dout,
            delta,
            rows,
            heads,
            out.stride(0),
            out.stride(1),
            dout.stride(0),
            dout.stride(1),
            DV=dv,
            BLOCK_DV=block_of(dv),
            BLOCK_Q=64,
        )
    shared = (
        *_pointers(spec, q),
        rows,
        k.shape[0],
        batch,
        heads,
        heads // kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        dout.stride(0),
        dout.stride(1),
        spec.scale,
        scale_log2,
        threshold,
        multiplier,
    )
    if dk.numel() + dv_.numel():
        blocks = cfg.backward_kv
        grid = (batch + 1, kv_heads, _tiles(spec.max_k, blocks.k))
        attention_backward_kv[grid](
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dk,
            dv_,
            *shared,
            **constants(d, dv, spec, blocks, q.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    if dq.numel():
        blocks = cfg.backward_q
        grid = (batch + 1, heads, _tiles(spec.max_q, blocks.q))
        attention_backward_q[grid](
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            *shared,
            **constants(d, dv, spec, blocks, q.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return dq, dk, dv_, None
