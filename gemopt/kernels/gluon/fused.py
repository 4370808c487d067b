"""Warp-specialised backward on sm_90 in one kernel: five products.

As `key_side` of backward.py, a tile owns 128 keys, 64 for each of two warpgroups, and walks over the queries:

    Sᵀ = K Qᵀ,  dPᵀ = V dOᵀ,  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ_tile = dS K

dQ_tile needs the dS of both warpgroups. Each stores its half in shared memory and, one step later, multiplies both
halves with its own half of K's columns, which gives its half of dQ_tile's columns. The product for dV is issued as soon as
the weights are there, the one for dK last: dS is stored during the first, dQ_tile during the second. Where dQ is summed has
two forms:

- tile by tile: each dQ_tile is added to an fp32 tensor in global memory (zeros, or dO where the op adds Q) with TMA's
  reduction, and the caller casts the sum. The order of the additions is not fixed, so where more than two tiles are added to a
  row (with dO: more than one; of shared queries the tiles of all sequences count) its last bits may differ from run to run;
  those of dK and dV do not.
  If every program has zeros of its own (OWN_SUMS) and lets an addition end before the next begins, each sum has one order:
  the same bits in every run, once the caller has added them up, for as many times the memory: only where queries are few. SHARED_Q: the sums of all sequences
  are one, since their queries are.
- OWNER: a program owns all keys of a sequence and head and visits their tiles in order. It stores the first partial sum,
  adds the middle ones, and completes the last in registers, in the dtype of dQ: no zeros, no cast, and the same bits in
  every run. One key tile needs no fp32 sum at all. For batches of many sequences, without window or causal mask.

dS lives in a ring of four slots without `empty` barriers: a warpgroup that stores dS of step i has seen the other's dS
of step i - 2, and the other may still read that of step i - 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemopt.kernels.gluon.backward import produce, weights_and_slopes
from gemopt.kernels.gluon.parts import (
    Band,
    as_matrix,
    new_barriers,
    new_columns,
    new_ring,
    placed,
    store_rows,
    zero_if_empty,
)
from gemopt.kernels.gluon.queue import new_queue
from gemopt.kernels.gluon.scores import SOFTMAX
from gemopt.kernels.gluon.sums import Sum, settle

M = gl.constexpr(64)
SLOTS = gl.constexpr(4)


@gluon.jit
def start_query_gradient(part: gl.constexpr, keys, slots, ready, turn, step, zero):
    """Start dQ of step `step`, this warpgroup's half of the columns: dS of both halves of the keys times K."""
    HALF: gl.constexpr = zero.shape[1]
    slot = step % SLOTS
    mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
    upper = as_matrix(keys.box_anew(turn, 0)).slice(part * HALF, HALF, dim=1)
    lower = as_matrix(keys.box_anew(turn, 1)).slice(part * HALF, HALF, dim=1)
    started = warpgroup_mma(slots.index(slot * 2).permute([1, 0]), upper, zero, use_acc=False, is_async=True)
    return warpgroup_mma(slots.index(slot * 2 + 1).permute([1, 0]), lower, started, is_async=True)


@gluon.jit
def produce_owned(
    x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band,
    D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The copying warp of OWNER: for every key tile of a sequence and key head, all its queries."""
    ROWS_Y: gl.constexpr = y1_desc.block_type.shape[2]
    item = 0
    turn = 0
    drawn = 0
    t = queue.first()
    while t >= 0:
        head, _, x_start, x_len, y_start, y_len = queue.tile(t)
        _, n = band.span(0, x1.PARTS * M, x_len, y_len, ROWS_Y)
        for first in range(0, x_len, x1.PARTS * M):
            x1.load(x1_desc, turn, x_start, x_len, first, head * D)
            x2.load(x2_desc, turn, x_start, x_len, first, head * DV)
            turn += 1
            for step in range(n * sharing):
                y_head = head * sharing + step // n
                row = (step % n) * ROWS_Y
                y1.load(y1_desc, item, y_start, y_len, row, y_head * D)
                y2.load(y2_desc, item, y_start, y_len, row, y_head * DV)
                if ACT == SOFTMAX:
                    lse = stats + y_head.to(gl.int64) * q_rows + y_start
                    columns.fill(item, lse, lse + (queue.heads * sharing).to(gl.int64) * q_rows, row, y_len, float("-inf"))
                item += 1
        t = queue.draw(drawn, t)
        drawn += 1


@gluon.jit
def consume(
    part: gl.constexpr, sums, dk_desc, dv_desc, x1, x2, y1, y2, columns, slots, ready, queue, sharing, sum_rows,
    scale, prescale, ds_scale, dv_scale, band, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr,
    EARLY_WAIT: gl.constexpr, SHARED_Q: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    ROWS_Q: gl.constexpr = y1.data.shape[3]
    dtype: gl.constexpr = x1.data.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_Q, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    zero = gl.zeros([M, ROWS_Q], gl.float32, s_layout)
    zero_q = gl.zeros([ROWS_Q, D // 2], gl.float32, q_layout)
    half: gl.constexpr = part * (D // 2)
    item = 0
    turn = 0
    loads = 0
    drawn = 0  # items; under OWNER one has a turn for every key tile
    t = queue.first()
    while t >= 0:
        head, begin, k_start, k_len, q_start, q_len = queue.tile(t)
        if SHARED_Q:
            q_start = q_start * 0  # dQ's rows from here on
        if sums.OWN_SUMS:
            q_start += gl.program_id(0) * sum_rows
        end = begin + 1
        if sums.OWNER:
            end = k_len
            unseen = queue.seventh(t)
            if unseen > 0:
                loads += sums.blank(part, loads, q_start, unseen, sharing, head * sharing * D + half, D, q_layout)
        for first in range(begin, end, x1.PARTS * M):
            first_sum = first == 0
            last_sum = first + x1.PARTS * M >= k_len
            x = first + part * M
            low, n = band.span(first, x1.PARTS * M, k_len, q_len, ROWS_Q)
            dk = gl.zeros([M, D], gl.float32, k_layout)
            dv = gl.zeros([M, DV], gl.float32, v_layout)
            v_box = x2.box(turn, part)
            x1.wait_full(turn)
            x2.wait_full(turn)
            y = low - ROWS_Q
            q_head = head * sharing
            for step in range(n * sharing):
                last_y = y
                last_head = q_head
                y += ROWS_Q
                if GROUPED:
                    if y == low + n * ROWS_Q:
                        y = low
                        q_head += 1
                if step > 0:
                    loads += sums.fetch(part, first_sum, last_sum, q_start, q_len, last_y, last_head * D + half)
                s0 = zero
                dp0 = zero
                if ACT == SOFTMAX:
                    lse, delta = columns.read(item, gl.SliceLayout(0, s_layout))
                    s0 = placed(lse[None, :], zero)
                    dp0 = placed(delta[None, :], zero)
                k = as_matrix(x1.box_anew(turn, part))
                v = as_matrix(x2.box_anew(turn, part))
                y1.wait_full(item)
                y2.wait_full(item)
                s_ = warpgroup_mma(k, as_matrix(y1.box(item)).permute([1, 0]), s0, use_acc=ACT == SOFTMAX, is_async=True)
                dp_ = warpgroup_mma(v, as_matrix(y2.box(item)).permute([1, 0]), dp0, use_acc=ACT == SOFTMAX, is_async=True)
                # dV needs no dS: its product runs while dS is made and stored.
                if EARLY_WAIT:
                    s = warpgroup_mma_wait(1, [s_])
                else:
                    s, dp = warpgroup_mma_wait(0, [s_, dp_])
                p32, slope = weights_and_slopes(s, x, y, k_len, q_len, scale, prescale, band, ACT)
                p = gl.convert_layout(p32.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
                dv_ = warpgroup_mma(p, as_matrix(y2.box(item)), dv, is_async=True)
                if EARLY_WAIT:
                    y2.wait_full(item)  # completed: ends the basic block (see forward.py)
                    dp = warpgroup_mma_wait(1, [dp_])
                ds16 = (slope * dp).to(dtype)
                slots.index((item % SLOTS) * 2 + part).store(ds16)
                fence_async_shared()
                mbarrier.arrive(ready.index(item % SLOTS), count=1)
                ds = gl.convert_layout(ds16, gl.DotOperandLayout(0, k_layout, 2))
                # The last step's dQ goes first: while it is stored, dK is computed.
                if step > 0:
                    started = start_query_gradient(part, x1, slots, ready, turn, item - 1, zero_q)
                    dk_ = warpgroup_mma(ds, as_matrix(y1.box(item)), dk, is_async=True)
                    dq = warpgroup_mma_wait(1, [started]) * ds_scale
                    sums.put(part, dq, first_sum, last_sum, loads, q_start, q_len, last_y, last_head * D + half)
                    dv, dk, p, ds = warpgroup_mma_wait(0, [dv_, dk_, p, ds])
                else:
                    dk_ = warpgroup_mma(ds, as_matrix(y1.box(item)), dk, is_async=True)
                    dv, dk, p, ds = warpgroup_mma_wait(0, [dv_, dk_, p, ds])
                y1.release(item)
                y2.release(item)
                item += 1
            loads += sums.fetch(part, first_sum, last_sum, q_start, q_len, y, q_head * D + half)
            started = start_query_gradient(part, x1, slots, ready, turn, item - 1, zero_q)
            dq = warpgroup_mma_wait(0, [started]) * ds_scale
            x1.release(turn)
            sums.put(part, dq, first_sum, last_sum, loads, q_start, q_len, y, q_head * D + half)
            # K is read by both warpgroups until their last dQ; V's box is this warpgroup's own, so both gradients leave by it.
            as_matrix(v_box).store(zero_if_empty(dv * dv_scale, q_len).to(dtype))
            fence_async_shared()
            store_rows(dv_desc, v_box, k_start, k_len, x, head * DV)
            tma.store_wait(0)
            as_matrix(v_box).store(zero_if_empty(dk * ds_scale, q_len).to(dtype))
            fence_async_shared()
            store_rows(dk_desc, v_box, k_start, k_len, x, head * D)
            tma.store_wait(0)
            x2.release(turn)
            turn += 1
            if sums.OWNER:
                turn = settle(turn)
        t = queue.take(drawn if sums.OWNER else turn - 1)  # equal unless OWNER: a register less
        drawn += 1


@gluon.jit(do_not_specialize=["heads", "sharing", "sum_rows", "before", "after", "q_rows"])
def attention_backward_fused(
    x1_desc,
    x2_desc,
    y1_desc,
    y2_desc,
    d1_desc,
    d2_desc,
    dq_desc,
    final_desc,
    base_desc,
    stats,
    q_rows,
    tiles,
    count,
    heads,
    sharing,
    sum_rows,
    before,
    after,
    scale,
    prescale,
    ds_scale,
    dv_scale,
    SHARED_Q: gl.constexpr,
    OWN_SUMS: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ACT: gl.constexpr,
    OWNER: gl.constexpr,
    ADD: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY_WAIT: gl.constexpr,
    GROUPED: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """x = (K, V), y = (Q, dO), d = (dK, dV); `heads` are the key heads; D == DV.

    dq_desc is over an fp32 sum of `sum_rows` rows (zeros or dO at first, unless OWNER), or one of them for each program (OWN_SUMS); final_desc
    is over dQ and base_desc over dO (OWNER with ADD).
    """
    PARTS: gl.constexpr = 2
    ROWS_Q: gl.constexpr = y1_desc.block_type.shape[2]
    x1 = new_ring(x1_desc, X_STAGES, PARTS, PARTS)
    x2 = new_ring(x2_desc, X_STAGES, PARTS, PARTS)
    y1 = new_ring(y1_desc, STAGES, 1, PARTS)
    y2 = new_ring(y2_desc, STAGES, 1, PARTS)
    columns = new_columns(STAGES, ROWS_Q)
    slots = gl.allocate_shared_memory(x1_desc.dtype, [SLOTS * 2, M, ROWS_Q], gl.NVMMASharedLayout(2 * ROWS_Q, 16, 2))
    stage = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    loaded = new_barriers(2, 1)
    sums = Sum(dq_desc, final_desc, base_desc, stage, loaded, OWNER, ADD, OWN_SUMS)
    gl.static_assert(not OWNER or not (BEFORE or AFTER), "every key tile meets all queries")
    gl.static_assert(not OWNER or not (SHARED_Q or OWN_SUMS), "an owner's sums are its sequence's")
    gl.static_assert(OWNER or not ADD, "the caller starts the sum from dO")
    ready = new_barriers(SLOTS, PARTS)
    queue = new_queue(tiles, count, heads, PARTS, OWN_SUMS)  # a program's own sums have the order of its own turns
    fence_async_shared()
    # Keys past the end have weights exp2(0 - lse), which may be inf and would meet K's zeros in dQ.
    band = Band(before, after, BEFORE, AFTER, BOTTOM_RIGHT, False, ACT == SOFTMAX)
    # fmt: off
    if OWNER:
        gl.warp_specialize([
            (consume, (gl.constexpr(0), sums, d1_desc, d2_desc, x1, x2, y1, y2, columns, slots, ready, queue, sharing, sum_rows, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT, SHARED_Q, GROUPED)),
            (consume, (gl.constexpr(1), sums, d1_desc, d2_desc, x1, x2, y1, y2, columns, slots, ready, queue, sharing, sum_rows, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT, SHARED_Q, GROUPED)),
            (produce_owned, (x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band, D, DV, ACT)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (consume, (gl.constexpr(0), sums, d1_desc, d2_desc, x1, x2, y1, y2, columns, slots, ready, queue, sharing, sum_rows, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT, SHARED_Q, GROUPED)),
            (consume, (gl.constexpr(1), sums, d1_desc, d2_desc, x1, x2, y1, y2, columns, slots, ready, queue, sharing, sum_rows, scale, prescale, ds_scale, dv_scale, band, D, DV, ACT, EARLY_WAIT, SHARED_Q, GROUPED)),
            (produce, (x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, queue, sharing, band, gl.constexpr(True), D, DV, ACT, SHARED_Q)),
        ], [4, 1], [REGISTERS, 24])
    # fmt: on
