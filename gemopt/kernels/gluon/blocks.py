"""Backward of block-diagonal softmax attention on sm_90, for blocks of at most 64 rows and equal numbers of heads.

For the rows of one block and head, with the forward's lse,

    Sᵀ = K Qᵀ,  P = exp(scale S - lse),  dPᵀ = V dOᵀ,  dS = P ∘ (dP - delta),  delta_i = Σ_j P_ij dP_ij
    dV = Pᵀ dO,  dK = scale dSᵀ Q,  dQ = scale dS K

Seven tensors of bytes and 5·2·64·64·D FLOPs a block: the memory is the limit, at 23 FLOPs a byte. So a producer warp keeps a
ring of three blocks full (Q, K, V, dO by TMA, 64 KB at head_dim 128) and two warpgroups take blocks in turn, each on its own.
The gradients leave by TMA from the boxes of V, dO and Q. Equal bits in every run.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemopt.kernels.gluon import launch, table
from gemopt.kernels.gluon.parts import as_matrix, load_tile, new_ring, store_rows
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.tiers import multiprocessors
from gemopt.kernels.triton.tiles import tile_list

M = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
MAX_BLOCK = 64
HEAD_DIMS = (32, 64, 128)
STAGES = 3


@gluon.jit
def _block(tiles, t, heads, block):
    """Packed row where a block starts, its rows, and how many of them belong to a sequence (all or none)."""
    first, start, length, _, owned = load_tile(tiles, t // heads)
    rows = gl.minimum(length - first, block)
    return start + first, rows, gl.where(owned > 0, rows, 0)


@gluon.jit
def produce(q_desc, k_desc, v_desc, dout_desc, q, k, v, dout, tiles, count, heads, block, D: gl.constexpr):
    item = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        start, _, owned = _block(tiles, t, heads, block)
        column = (t % heads) * D
        k.load(k_desc, item, start, owned, 0, column)
        q.load(q_desc, item, start, owned, 0, column)
        v.load(v_desc, item, start, owned, 0, column)
        dout.load(dout_desc, item, start, owned, 0, column)
        item += 1


@gluon.jit
def consume(
    part: gl.constexpr, dq_desc, dk_desc, dv_desc, lse_ptr, q, k, v, dout, slots, tiles, count, heads, block, scale,
    D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A warpgroup: every second block of the program's."""
    dtype: gl.constexpr = q.data.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    zero = gl.zeros([M, M], gl.float32, s_layout)
    zero_d = gl.zeros([M, D], gl.float32, d_layout)
    keys = gl.arange(0, M, layout=gl.SliceLayout(1, s_layout))
    queries = gl.arange(0, M, layout=gl.SliceLayout(0, s_layout))
    slot = slots.index(part)
    item = part
    programs = gl.num_programs(0)
    for t in range(gl.program_id(0) + part * programs, gl.load(count) * heads, 2 * programs):
        start, rows, owned = _block(tiles, t, heads, block)
        head = t % heads
        at = (start + queries).to(gl.int64) * heads + head
        lse = gl.load(lse_ptr + at, mask=queries < owned, other=0.0) * LOG2E
        q_box, k_box, v_box = q.box(item), k.box(item), v.box(item)
        k.wait_full(item)
        q.wait_full(item)
        s_ = warpgroup_mma(as_matrix(k_box), as_matrix(q_box).permute([1, 0]), zero, use_acc=False, is_async=True)
        v.wait_full(item)
        dout.wait_full(item)
        dout_box = as_matrix(dout.box(item))
        dp_ = warpgroup_mma(as_matrix(v_box), dout_box.permute([1, 0]), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, [s_, dp_])
        seen = (keys < owned)[:, None] & (queries < owned)[None, :]
        if CAUSAL:
            seen = seen & (keys[:, None] <= queries[None, :])
        p32 = gl.where(seen, gl.exp2(s * (scale * LOG2E) - lse[None, :]), 0.0)
        delta = gl.sum(p32 * dp, 0)
        ds16 = (p32 * (dp - delta[None, :]) * scale).to(dtype)
        slot.store(ds16)
        fence_async_shared()
        p = gl.convert_layout(p32.to(dtype), p_layout)
        ds = gl.convert_layout(ds16, p_layout)
        dv_ = warpgroup_mma(p, dout_box, zero_d, use_acc=False, is_async=True)
        dq_ = warpgroup_mma(slot.permute([1, 0]), as_matrix(k_box), zero_d, use_acc=False, is_async=True)
        dv, p = warpgroup_mma_wait(1, [dv_, p])
        as_matrix(v_box).store(dv.to(dtype))
        fence_async_shared()
        store_rows(dv_desc, v_box, start, rows, 0, head * D)
        # Not before dV is gone: three such products are more than the registers hold (C7512).
        dk_ = warpgroup_mma(ds, as_matrix(q_box), zero_d, use_acc=False, is_async=True)
        dq, dk, ds = warpgroup_mma_wait(0, [dq_, dk_, ds])
        # One warp may be done with its part of a product before another: until all have met at a barrier, which comes with
        # a copy out, only a box that no product in flight reads may be written. dO's is one, since dV's copy.
        dout_box.store(dk.to(dtype))
        fence_async_shared()
        store_rows(dk_desc, dout.box(item), start, rows, 0, head * D)
        as_matrix(q_box).store(dq.to(dtype))
        fence_async_shared()
        store_rows(dq_desc, q_box, start, rows, 0, head * D)
        k.release(item)
        tma.store_wait(0)
        q.release(item)
        v.release(item)
        dout.release(item)
        item += 2


@gluon.jit(do_not_specialize=["heads", "block"])
def block_backward(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    lse_ptr,
    tiles,
    count,
    heads,
    block,
    scale,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: one program per multiprocessor. `tiles` are blocks of `block` rows, in any order."""
    q = new_ring(q_desc, STAGES, 1, 1)
    k = new_ring(k_desc, STAGES, 1, 1)
    v = new_ring(v_desc, STAGES, 1, 1)
    dout = new_ring(dout_desc, STAGES, 1, 1)
    slots = gl.allocate_shared_memory(q_desc.dtype, [2, M, M], gl.NVMMASharedLayout(128, 16, 2))
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (consume, (gl.constexpr(0), dq_desc, dk_desc, dv_desc, lse_ptr, q, k, v, dout, slots, tiles, count, heads, block, scale, D, CAUSAL)),
        (consume, (gl.constexpr(1), dq_desc, dk_desc, dv_desc, lse_ptr, q, k, v, dout, slots, tiles, count, heads, block, scale, D, CAUSAL)),
        (produce, (q_desc, k_desc, v_desc, dout_desc, q, k, v, dout, tiles, count, heads, block, D)),
    ], [4, 1], [240, 24])
    # fmt: on


def refusal(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Why this kernel does not take a call that `triton.block_attention` takes; None if it does."""
    if spec.block_size > MAX_BLOCK:
        return f"needs blocks of at most {MAX_BLOCK} rows, got {spec.block_size}"
    if q.shape != k.shape or q.shape[2] != v.shape[2]:
        return "needs as many key heads as query heads, and one head_dim"
    if q.shape[2] not in HEAD_DIMS:
        return f"needs a head_dim of {HEAD_DIMS}, got {q.shape[2]}"
    shape = table.Shape(q.shape[2], True, spec.causal, spec.block_size, spec.block_size)
    return None if table.lookup("block_backward", shape) is not None else f"is not chosen for {shape}"


def backward_arguments(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grads: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec,
    tiles: Tensor, count: Tensor,
) -> dict[str, object]:  # fmt: skip
    """Arguments of `block_backward`; grads are dq, dk and dv."""
    d = q.shape[2]
    named = zip(("q", "k", "v", "dout", "dq", "dk", "dv"), (q, k, v, dout, *grads), strict=True)
    return {
        **{f"{name}_desc": launch.descriptor(x, MAX_BLOCK, d) for name, x in named},
        "lse_ptr": lse,
        "tiles": tiles,
        "count": count,
        "heads": q.shape[1],
        "block": spec.block_size,
        "scale": spec.scale,
        "D": d,
        "CAUSAL": spec.causal,
        "STAGES": STAGES,
        "num_warps": 4,
    }


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Ask `refusal` first, and that of `triton.block_attention` before it."""
    dout, q, k, v = (launch.rows_of(x) for x in (dout, q, k, v))
    tiles = tile_list(spec.k_offsets, spec.k_offsets, q.shape[0], spec.block_size, in_order=True)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    arguments = backward_arguments(dout, q, k, v, lse, (dq, dk, dv), spec, tiles.records, tiles.count)
    block_backward[(multiprocessors(q.device.index or 0),)](**arguments)
    return dq, dk, dv
