"""Warp-specialised backward on sm_90 in two kernels, without atomics: equal gradients in every run.

With S = Q Kᵀ, dP = dO Vᵀ and P the forward's weights,

    softmax: dS = P ∘ (dP - delta),  delta_i = dO_i·O_i      gdpa: dS = act'(scale·S) ∘ dP
    dQ = scale · dS K      dK = scale · dSᵀ Q      dV = Pᵀ dO

Stationary rows x come in pairs (x1, x2), streamed rows y likewise: `query_side` has x = (Q, dO), y = (K, V) and makes dQ;
`key_side` has x = (K, V), y = (Q, dO), works on the transposed scores K Qᵀ and makes dK and dV, for every query head that
shares the key head. Seven products in place of the forward's two.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemopt.kernels.gluon.parts import (
    Band,
    as_matrix,
    new_columns,
    new_ring,
    placed,
    skip_items,
    store_rows,
    zero_if_empty,
)
from gemopt.kernels.gluon.queue import new_queue
from gemopt.kernels.gluon.scores import FAR, SOFTMAX, units_and_slope, vanishes

M = gl.constexpr(64)


@triton.jit
def row_statistics(
    out_ptr,
    dout_ptr,
    lse_ptr,
    stats_ptr,
    rows,
    heads,
    out_stride,
    dout_stride,
    scale,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """stats fp32 [2, H, Tq]: -lse / scale and -delta, the values the accumulators of S and dP start from.

    A row that sees nothing has lse = -inf; it gets -inf here as well, which makes its weights 0.
    Grid (row blocks, heads). Head by head, so that the columns of a transposed score tile are contiguous.
    """
    head = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = head * DV + tl.arange(0, DV)
    keep = r < rows
    out = tl.load(out_ptr + r[:, None] * out_stride + c[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + r[:, None] * dout_stride + c[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + r * heads + head, mask=keep, other=0.0)
    lse = tl.where(lse == float("-inf"), lse, -lse / scale)
    tl.store(stats_ptr + head * rows + r, lse, mask=keep)
    tl.store(stats_ptr + (heads + head) * rows + r, -tl.sum(out * dout, 1), mask=keep)


@gluon.jit
def weights_and_slopes(s, x, y, x_len, y_len, scale, prescale, band, ACT: gl.constexpr):
    """P and dS/dP of a tile, each in its units; under softmax S started from -lse / scale, and dP from -delta."""
    layout: gl.constexpr = s.type.layout
    ROWS_X: gl.constexpr = s.shape[0]
    ROWS_Y: gl.constexpr = s.shape[1]
    if ACT == SOFTMAX:
        if band.MASKED:
            if band.cuts(x, ROWS_X, y, ROWS_Y, x_len, y_len):
                s = gl.where(band.sees(x, ROWS_X, y, ROWS_Y, x_len, y_len, layout), s, float("-inf"))
        p = gl.exp2(s * scale)
        return p, p
    else:
        if prescale != 1.0:
            s = s * prescale
        if band.MASKED and vanishes(ACT):
            if band.cuts(x, ROWS_X, y, ROWS_Y, x_len, y_len):
                s = gl.where(band.sees(x, ROWS_X, y, ROWS_Y, x_len, y_len, layout), s, FAR / scale)
        p, slope = units_and_slope(s, scale, ACT)
        if band.MASKED and not vanishes(ACT):
            if band.cuts(x, ROWS_X, y, ROWS_Y, x_len, y_len):
                seen = band.sees(x, ROWS_X, y, ROWS_Y, x_len, y_len, layout)
                p = gl.where(seen, p, 0.0)
                slope = gl.where(seen, slope, 0.0)
        return p, slope


@gluon.jit
def produce(
    x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band,
    KEY_SIDE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr, SHARED_Q: gl.constexpr,
):  # fmt: skip
    """The copying warp. The heads of items are those of x; y has `sharing` times as many on the key side, as many fewer else.

    SHARED_Q: all sequences read the first rows of Q.
    """
    ROWS_Y: gl.constexpr = y1_desc.block_type.shape[2]
    groups = sharing if KEY_SIDE else sharing * 0 + 1
    item = 0
    turn = 0
    t = queue.first()
    while t >= 0:
        head, first, x_start, x_len, y_start, y_len = queue.tile(t)
        x1_start = x_start
        y1_start = y_start
        if SHARED_Q:
            if KEY_SIDE:
                y1_start = y_start * 0
            else:
                x1_start = x_start * 0
        x1.load(x1_desc, turn, x1_start, x_len, first, head * D)
        x2.load(x2_desc, turn, x_start, x_len, first, head * DV)
        low, n = band.span(first, x1.PARTS * M, x_len, y_len, ROWS_Y)
        for step in range(n * groups):
            y_head = head * sharing + step // n if KEY_SIDE else head // sharing
            row = low + (step % n) * ROWS_Y
            y1.load(y1_desc, item, y1_start, y_len, row, y_head * D)
            y2.load(y2_desc, item, y_start, y_len, row, y_head * DV)
            if KEY_SIDE and ACT == SOFTMAX:
                lse = stats + y_head.to(gl.int64) * q_rows + y_start
                columns.fill(item, lse, lse + (queue.heads * sharing).to(gl.int64) * q_rows, row, y_len, float("-inf"))
            item += 1
        t = queue.draw(turn, t)
        turn += 1


@gluon.jit
def query_gradient(
    q, dout, y1, y2, item, low, n, s0, dp0, x, q_len, k_len, scale, prescale, ds_scale, band, D: gl.constexpr,
    ACT: gl.constexpr, ADD: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries, left in their buffer; s0 and dp0 are what the accumulators of S and dP start from.

    dS_{j-1} K_{j-1} runs while dS_j is made.
    """
    dtype: gl.constexpr = q.dtype
    ROWS_K: gl.constexpr = y1.data.shape[3]
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    acc = gl.zeros([M, D], gl.float32, o_layout)
    y1.wait_full(item)
    y2.wait_full(item)
    s_ = warpgroup_mma(q, as_matrix(y1.box(item)).permute([1, 0]), s0, use_acc=ACT == SOFTMAX, is_async=True)
    dp_ = warpgroup_mma(dout, as_matrix(y2.box(item)).permute([1, 0]), dp0, use_acc=ACT == SOFTMAX, is_async=True)
    s, dp = warpgroup_mma_wait(0, [s_, dp_])
    y2.release(item)
    _, slope = weights_and_slopes(s, x, low, q_len, k_len, scale, prescale, band, ACT)
    ds = gl.convert_layout((slope * dp).to(dtype), p_layout)
    for j in range(1, n):
        y1.wait_full(item + 1)
        y2.wait_full(item + 1)
        s_ = warpgroup_mma(q, as_matrix(y1.box(item + 1)).permute([1, 0]), s0, use_acc=ACT == SOFTMAX, is_async=True)
        dp_ = warpgroup_mma(dout, as_matrix(y2.box(item + 1)).permute([1, 0]), dp0, use_acc=ACT == SOFTMAX, is_async=True)
        adding = warpgroup_mma(ds, as_matrix(y1.box(item)), acc, is_async=True)
        s, dp = warpgroup_mma_wait(1, [s_, dp_])
        y2.release(item + 1)
        _, slope = weights_and_slopes(s, x, low + j * ROWS_K, q_len, k_len, scale, prescale, band, ACT)
        next_ds = gl.convert_layout((slope * dp).to(dtype), p_layout)
        if EARLY_WAIT:
            y1.wait_full(item + 1)  # completed: ends the basic block (see forward.py)
        acc, ds = warpgroup_mma_wait(0, [adding, ds])
        y1.release(item)
        ds = next_ds
        item += 1
    adding = warpgroup_mma(ds, as_matrix(y1.box(item)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [adding])
    y1.release(item)
    acc = zero_if_empty(acc * ds_scale, k_len)
    if ADD:
        acc = acc + dout.load(o_layout).to(gl.float32)
    q.store(acc.to(dtype))


@gluon.jit
def query_side(
    part: gl.constexpr, dq_desc, stats, q_rows, x1, x2, y1, y2, queue, sharing, scale, prescale, ds_scale, band,
    D: gl.constexpr, ACT: gl.constexpr, ADD: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """A warpgroup that makes dQ of query rows `part * 64` and on of each tile."""
    ROWS_K: gl.constexpr = y1.data.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_K, 16])
    zero = gl.zeros([M, ROWS_K], gl.float32, s_layout)
    item = 0
    turn = 0
    t = queue.first()
    while t >= 0:
        head, first, q_start, q_len, _, k_len = queue.tile(t)
        x = first + part * M
        low, n = band.span(first, x1.PARTS * M, q_len, k_len, ROWS_K)
        x1.wait_full(turn)
        x2.wait_full(turn)
        if x < q_len:
            s0 = zero
            dp0 = zero
            if ACT == SOFTMAX:
                r = x + gl.arange(0, M, layout=gl.SliceLayout(1, s_layout))
                lse = stats + head.to(gl.int64) * q_rows + q_start + r
                s0 = zero + gl.load(lse, mask=r < q_len, other=float("-inf"))[:, None]
                dp0 = zero + gl.load(lse + queue.heads.to(gl.int64) * q_rows, mask=r < q_len, other=0.0)[:, None]
            q_box = x1.box(turn, part)
            passed, own_n = band.share(x, M, low, n, q_len, k_len, ROWS_K)
            skip_items(y1, y2, item, passed)
            query_gradient(
                as_matrix(q_box), as_matrix(x2.box(turn, part)), y1, y2, item + passed, low + passed * ROWS_K, own_n, s0, dp0, x,
                q_len, k_len, scale, prescale, ds_scale, band, D, ACT, ADD, EARLY_WAIT,
            )  # fmt: skip
            fence_async_shared()
            store_rows(dq_desc, q_box, q_start, q_len, x, head * D)
            skip_items(y1, y2, item + passed + own_n, n - passed - own_n)
            tma.store_wait(0)
        else:
            skip_items(y1, y2, item, n)
        item += n
        x1.release(turn)
        x2.release(turn)
        t = queue.take(turn)
        turn += 1


@gluon.jit
def key_gradients(
    k, v, y1, y2, columns, item, low, n, sharing, x, k_len, q_len, scale, prescale, ds_scale, dv_scale, band,
    D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, left in their buffers, from the transposed scores."""
    ROWS_Q: gl.constexpr = y1.data.shape[3]
    dtype: gl.constexpr = k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_Q, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    zero = gl.zeros([M, ROWS_Q], gl.float32, s_layout)
    dk = gl.zeros([M, D], gl.float32, k_layout)
    dv = gl.zeros([M, DV], gl.float32, v_layout)
    passed, own_n = band.share(x, M, low, n, k_len, q_len, ROWS_Q)
    for step in range(own_n * sharing):
        if band.BEFORE or band.AFTER:  # others of the tile see these queries, those of this warpgroup do not
            unseen = gl.where(step % own_n == 0, gl.where(step == 0, passed, n - own_n), 0)
            skip_items(y1, y2, item, unseen)
            item += unseen
        y = low + (passed + step % own_n) * ROWS_Q
        s0 = zero
        dp0 = zero
        if ACT == SOFTMAX:
            lse, delta = columns.read(item, gl.SliceLayout(0, s_layout))
            s0 = placed(lse[None, :], zero)
            dp0 = placed(delta[None, :], zero)
        y1.wait_full(item)
        y2.wait_full(item)
        s_ = warpgroup_mma(k, as_matrix(y1.box(item)).permute([1, 0]), s0, use_acc=ACT == SOFTMAX, is_async=True)
        dp_ = warpgroup_mma(v, as_matrix(y2.box(item)).permute([1, 0]), dp0, use_acc=ACT == SOFTMAX, is_async=True)
        if EARLY_WAIT:
            s = warpgroup_mma_wait(1, [s_])
            p32, slope = weights_and_slopes(s, x, y, k_len, q_len, scale, prescale, band, ACT)
            p = gl.convert_layout(p32.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
            y2.wait_full(item)  # completed: ends the basic block (see forward.py)
            dp = warpgroup_mma_wait(0, [dp_])
        else:
            s, dp = warpgroup_mma_wait(0, [s_, dp_])
            p32, slope = weights_and_slopes(s, x, y, k_len, q_len, scale, prescale, band, ACT)
            p = gl.convert_layout(p32.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
        ds = gl.convert_layout((slope * dp).to(dtype), gl.DotOperandLayout(0, k_layout, 2))
        dv_ = warpgroup_mma(p, as_matrix(y2.box(item)), dv, is_async=True)
        dk_ = warpgroup_mma(ds, as_matrix(y1.box(item)), dk, is_async=True)
        dv, dk, p, ds = warpgroup_mma_wait(0, [dv_, dk_, p, ds])
        y1.release(item)
        y2.release(item)
        item += 1
    skip_items(y1, y2, item, n - passed - own_n)
    k.store(zero_if_empty(dk * ds_scale, q_len).to(dtype))
    v.store(zero_if_empty(dv * dv_scale, q_len).to(dtype))


@gluon.jit
def key_side(
    part: gl.constexpr, dk_desc, dv_desc, x1, x2, y1, y2, columns, queue, sharing, scale, prescale, ds_scale,
    dv_scale, band, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """A warpgroup that makes dK and dV of key rows `part * 64` and on of each tile."""
    item = 0
    turn = 0
    t = queue.first()
    while t >= 0:
        head, first, k_start, k_len, _, q_len = queue.tile(t)
        x = first + part * M
        low, n = band.span(first, x1.PARTS * M, k_len, q_len, y1.data.shape[3])
        x1.wait_full(turn)
        x2.wait_full(turn)
        if x < k_len:
            k_box = x1.box(turn, part)
            v_box = x2.box(turn, part)
            key_gradients(
                as_matrix(k_box), as_matrix(v_box), y1, y2, columns, item, low, n, sharing, x, k_len, q_len, scale, prescale,
                ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT,
            )  # fmt: skip
            fence_async_shared()
            store_rows(dk_desc, k_box, k_start, k_len, x, head * D)
            store_rows(dv_desc, v_box, k_start, k_len, x, head * DV)
            tma.store_wait(0)
        else:
            skip_items(y1, y2, item, n * sharing)
        item += n * sharing
        x1.release(turn)
        x2.release(turn)
        t = queue.take(turn)
        turn += 1


@gluon.jit(do_not_specialize=["heads", "sharing", "before", "after", "q_rows"])
def attention_backward(
    x1_desc,
    x2_desc,
    y1_desc,
    y2_desc,
    d1_desc,
    d2_desc,
    stats,
    q_rows,
    tiles,
    count,
    heads,
    sharing,
    before,
    after,
    scale,
    prescale,
    ds_scale,
    dv_scale,
    KEY_SIDE: gl.constexpr,
    SHARED_Q: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ACT: gl.constexpr,
    ADD: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY_WAIT: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One side of the backward; `heads` are the heads of x. Grid: one program per multiprocessor, two consumers each."""
    PARTS: gl.constexpr = 2
    x1 = new_ring(x1_desc, X_STAGES, PARTS, PARTS)
    x2 = new_ring(x2_desc, X_STAGES, PARTS, PARTS)
    y1 = new_ring(y1_desc, STAGES, 1, PARTS)
    y2 = new_ring(y2_desc, STAGES, 1, PARTS)
    columns = new_columns(STAGES, y1_desc.block_type.shape[2])
    queue = new_queue(tiles, count, heads, PARTS, False)
    fence_async_shared()
    # A skipped item's columns are not waited for: that they are full follows from the next item, in another buffer.
    gl.static_assert(STAGES > 1 or not (BEFORE or AFTER), "a ring of one buffer cannot skip items")
    # Streamed queries past the end have -lse = -inf and dO = 0, which makes their columns zero; streamed keys need the mask.
    band = Band(before, after, BEFORE, AFTER, BOTTOM_RIGHT, ACT == SOFTMAX and not KEY_SIDE, False)
    # fmt: off
    if KEY_SIDE:
        gl.warp_specialize([
            (key_side, (gl.constexpr(0), d1_desc, d2_desc, x1, x2, y1, y2, columns, queue, sharing, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT)),
            (key_side, (gl.constexpr(1), d1_desc, d2_desc, x1, x2, y1, y2, columns, queue, sharing, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT)),
            (produce, (x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band, KEY_SIDE, D, DV, ACT, SHARED_Q)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (query_side, (gl.constexpr(0), d1_desc, stats, q_rows, x1, x2, y1, y2, queue, sharing, scale, prescale, ds_scale, band, D, ACT, ADD, EARLY_WAIT)),
            (query_side, (gl.constexpr(1), d1_desc, stats, q_rows, x1, x2, y1, y2, queue, sharing, scale, prescale, ds_scale, band, D, ACT, ADD, EARLY_WAIT)),
            (produce, (x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band, KEY_SIDE, D, DV, ACT, SHARED_Q)),
        ], [4, 1], [REGISTERS, 24])
    # fmt: on
