"""Block-diagonal attention in Triton: one program for a block and a key head.

A block of at most 128 rows fits one tile, so there is no online softmax: one product for the scores, one for the output.
The backward recomputes P from the saved lse and makes delta = rowsum(P ∘ dP) itself, so it does not read the output.

    S = scale Q Kᵀ, P = softmax(S), O = P V
    dP = dO Vᵀ, dS = P ∘ (dP - delta), dV = Pᵀ dO, dQ = scale dS K, dK = scale dSᵀ Q

Limited by bytes: 4 tensors forward, 7 backward (B200 figures of the same idea: pytorch.org/blog, TLX block attention, 2026).
One short program for every block beats persistent programs here: the block scheduler overlaps the loads of one with the
arithmetic of others.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton.tiles import TileList, tile_list

LOG2E = tl.constexpr(1.4426950408889634)
MAX_BLOCK = 128
MAX_HEAD_DIM = 128


@triton.jit
def _load(base, rows, keep, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    mask = keep[:, None]
    if D != BLOCK_D:
        mask = mask & (cols < D)[None, :]
    return tl.load(base + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, rows, keep, row_stride, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    mask = keep[:, None]
    if D != BLOCK_D:
        mask = mask & (cols < D)[None, :]
    tl.store(base + rows[:, None] * row_stride + cols[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _block(tiles_ptr, t, block, ROWS: tl.constexpr):
    """Packed rows of tile t (int64), which of them exist, and whether they belong to a sequence."""
    at = tiles_ptr + t.to(tl.int64) * 8
    first = tl.load(at)
    length = tl.minimum(tl.load(at + 2) - first, block)
    r = tl.arange(0, ROWS)
    return tl.load(at + 1).to(tl.int64) + first + r, r < length, tl.load(at + 4) > 0


@triton.jit
def block_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    count_ptr,
    heads,
    sharing,
    block,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    out_stride,
    out_head_stride,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Grid: key heads × tiles, heads innermost."""
    kv_heads = heads // sharing
    t = tl.program_id(0) // kv_heads
    if t < tl.load(count_ptr):
        kv_head = tl.program_id(0) % kv_heads
        rows, keep, owned = _block(tiles_ptr, t, block, ROWS)
        k = _load(k_ptr + kv_head.to(tl.int64) * k_head_stride, rows, keep, k_stride, D, BLOCK_D)
        v = _load(v_ptr + kv_head.to(tl.int64) * v_head_stride, rows, keep, v_stride, DV, BLOCK_DV)
        r = tl.arange(0, ROWS)
        seen = (keep & owned)[None, :]
        if CAUSAL:
            seen = seen & (r[None, :] <= r[:, None])
        for g in tl.range(sharing if SHARED else 1, num_stages=1):
            head = kv_head * sharing + g
            q = _load(q_ptr + head.to(tl.int64) * q_head_stride, rows, keep, q_stride, D, BLOCK_D)
            s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
            top = tl.max(s, 1)
            p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v)
            out = tl.where(owned, out / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
            _store(out_ptr + head.to(tl.int64) * out_head_stride, rows, keep, out_stride, out, DV, BLOCK_DV)
            tl.store(lse_ptr + rows * heads + head, (top + tl.log2(total)) / LOG2E, mask=keep)


@triton.jit
def block_backward(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    count_ptr,
    heads,
    sharing,
    block,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    scale,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Grid as the forward's. Works on the transposed scores K Qᵀ; gradients are contiguous."""
    kv_heads = heads // sharing
    t = tl.program_id(0) // kv_heads
    if t < tl.load(count_ptr):
        kv_head = tl.program_id(0) % kv_heads
        rows, keep, owned = _block(tiles_ptr, t, block, ROWS)
        k = _load(k_ptr + kv_head.to(tl.int64) * k_head_stride, rows, keep & owned, k_stride, D, BLOCK_D)
        v = _load(v_ptr + kv_head.to(tl.int64) * v_head_stride, rows, keep & owned, v_stride, DV, BLOCK_DV)
        r = tl.arange(0, ROWS)
        seen = (keep & owned)[:, None] & (keep & owned)[None, :]
        if CAUSAL:
            seen = seen & (r[:, None] <= r[None, :])
        if SHARED:
            dk = tl.zeros((ROWS, BLOCK_D), tl.float32)
            dv = tl.zeros((ROWS, BLOCK_DV), tl.float32)
        for g in tl.range(sharing if SHARED else 1, num_stages=1):
            head = kv_head * sharing + g
            q = _load(q_ptr + head.to(tl.int64) * q_head_stride, rows, keep & owned, q_stride, D, BLOCK_D)
            dout = _load(dout_ptr + head.to(tl.int64) * dout_head_stride, rows, keep & owned, dout_stride, DV, BLOCK_DV)
            lse = tl.load(lse_ptr + rows * heads + head, mask=keep & owned, other=0.0) * LOG2E
            p = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]), 0.0)
            dp = tl.dot(v, tl.trans(dout))
            ds = (p * (dp - tl.sum(p * dp, 0)[None, :]) * scale).to(q.dtype)
            _store(dq_ptr + head.to(tl.int64) * D, rows, keep, heads * D, tl.dot(tl.trans(ds), k), D, BLOCK_D)
            if SHARED:
                dv = tl.dot(p.to(dout.dtype), dout, dv)
                dk = tl.dot(ds, q, dk)
            else:
                dv_row = kv_heads * DV
                _store(dv_ptr + kv_head.to(tl.int64) * DV, rows, keep, dv_row, tl.dot(p.to(dout.dtype), dout), DV, BLOCK_DV)
                _store(dk_ptr + kv_head.to(tl.int64) * D, rows, keep, kv_heads * D, tl.dot(ds, q), D, BLOCK_D)
        if SHARED:
            _store(dv_ptr + kv_head.to(tl.int64) * DV, rows, keep, kv_heads * DV, dv, DV, BLOCK_DV)
            _store(dk_ptr + kv_head.to(tl.int64) * D, rows, keep, kv_heads * D, dk, D, BLOCK_D)


@dataclass(frozen=True)
class Launch:
    """What forward and backward share."""

    tiles: TileList
    programs: int
    constants: dict[str, Any]


def refusal(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Why these kernels do not take a block attention; None if they do."""
    if not 0 < spec.block_size <= MAX_BLOCK:
        return f"needs blocks of 1 to {MAX_BLOCK} rows, got {spec.block_size}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {q.dtype}"
    if max(q.shape[2], v.shape[2]) > MAX_HEAD_DIM or min(q.shape[2], v.shape[2]) < 1:
        return f"needs head dims of 1 to {MAX_HEAD_DIM}, got {q.shape[2]} and {v.shape[2]}"
    if not spec.softmax or spec.bias is not None or spec.mask is not None or spec.dropout_p > 0:
        return "has softmax without bias, mask and dropout alone"
    if spec.window != (-1, -1) or spec.q_positions is not None or spec.k_positions is not None:
        return "has no windows and no positions"
    if q.numel() == 0 or v.numel() == 0:
        return "needs rows and heads"
    return None


def _launch(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Launch:
    (rows, _, d), (_, kv_heads, dv) = q.shape, v.shape
    tiles = tile_list(spec.k_offsets, spec.k_offsets, rows, spec.block_size, in_order=True)
    constants = {
        "D": d,
        "DV": dv,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(dv)),
        "ROWS": max(16, triton.next_power_of_2(spec.block_size)),
        "CAUSAL": spec.causal,
        "SHARED": q.shape[1] != kv_heads,
        "num_warps": 8 if spec.block_size > 64 or (q.shape[1] != kv_heads and max(d, dv) > 64) else 4,
    }
    return Launch(tiles, tiles.records.shape[0] * kv_heads, constants)


def _dense_features(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out `[T, H, Dv]`, lse fp32 `[T, H]`. Ask `refusal` first."""
    q, k, v = (_dense_features(x) for x in (q, k, v))
    rows, heads, _ = q.shape
    out, lse = q.new_empty((rows, heads, v.shape[2])), q.new_empty((rows, heads), dtype=torch.float32)
    work = _launch(q, k, v, spec)
    block_forward[(work.programs,)](
        q,
        k,
        v,
        out,
        lse,
        work.tiles.records,
        work.tiles.count,
        heads,
        heads // k.shape[1],
        spec.block_size,
        *(s for x in (q, k, v, out) for s in x.stride()[:2]),
        spec.scale * LOG2E.value,
        **work.constants,
    )
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the same bits in every run."""
    dout, q, k, v = (_dense_features(x) for x in (dout, q, k, v))
    heads, sharing = q.shape[1], q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    work = _launch(q, k, v, spec)
    if work.constants["BLOCK_D"] > 64 and work.constants["num_warps"] == 4 and torch.version.cuda is not None:
        work.constants["maxnreg"] = 168  # three programs on a multiprocessor; ptxas would take 200, and two fit
    block_backward[(work.programs,)](
        q,
        k,
        v,
        dout,
        lse,
        dq,
        dk,
        dv,
        work.tiles.records,
        work.tiles.count,
        heads,
        sharing,
        spec.block_size,
        *(s for x in (q, k, v, dout) for s in x.stride()[:2]),
        spec.scale,
        spec.scale * LOG2E.value,
        **work.constants,
    )
    return dq, dk, dv
