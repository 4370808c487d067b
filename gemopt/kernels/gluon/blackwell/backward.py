"""Warp-specialised backward on sm_100 in two kernels, without atomics: equal gradients in every run. Not yet run on hardware.

As gluon/backward.py, whose formulas, statistics and sides these are: `query_side` has stationary x = (Q, dO), streamed
y = (K, V) and makes dQ; the key side has x = (K, V), y = (Q, dO), works on K Qᵀ and makes dK and dV, for every query head
that shares the key head. For a tile of 128 stationary rows, over streamed tiles of ROWS_Y rows,

    S = x1 y1ᵀ,  dP = x2 y2ᵀ,   P, dS of both,    query side: dQ += dS K        key side: dV += P dO,  dK += dS Q

One warp copies, one issues all products, two warpgroups turn (S, dP) into (P, dS), each in a *slot* of tensor memory of its
own, P over S and dS over dP. Streamed tiles are numbered over the life of the program; tile g is for warpgroup g mod 2.
The gradients stay in tensor memory: 4·ROWS_Y + D columns, and DV more on the key side, of 512.

The multiplying warp takes step i = 0 ... n of a tile with n streamed tiles: S and dP of streamed tile i, then the gradient
products of streamed tile i - 1. Barriers, of one arrival a phase but for `free`; u = g div 2 counts a slot's tiles, t the
stationary tiles:

    barrier      arrives                                     waits
    x1, x2 full  TMA, a stationary tile                      multiplier, before its first product
    x1, x2 empty commit after the last S, dP of the tile     producer
    y1, y2 full  TMA, a streamed tile                        multiplier, its step i
    y1, y2 empty commit after its gradient products          producer
    columns.full producer, statistics of a streamed tile     its warpgroup
    made[slot]   commit with dP, phase u                     warpgroup, before it reads S and dP
    ready[slot]  warpgroup, P and dS written, phase u        multiplier, before the gradient products
    done         commit with the tile's last products        both warpgroups, before they read gradients
    free         both warpgroups, gradients read             multiplier, before the next tile's first gradient product

*Nobody misses a phase*: made u + 1 is committed in a later step than the wait for ready u, which arrives after its
warpgroup's wait for made u; ready u + 1 after made u + 1; done t + 1 after the wait for free t, which both warpgroups give
after they have waited for done t; free t + 1 after done t + 1, which is after the wait for free t.

*Nothing is overwritten early*: S and dP of tile g + 2 are issued behind the gradient products of tile g (one step before),
which read P and dS, and whose wait for ready g comes after S and dP were read. The first gradient product of a tile waits
for free. y and x are read by products only; the statistics beside y (`columns`) by its warpgroup before ready, hence before
y's commit. Boxes of the output as in forward.py.

*Nobody waits for ever*: n >= 1. Step i needs y full i and ready i - 1, which needs made i - 1 of the step before; the
producer waits for y empty i - STAGES, given in step i - STAGES + 1, which needs y full i - STAGES + 1: with two buffers or
more it is in flight by then. A warpgroup without a streamed tile in this turn waits for done alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)
from triton.language.core import _aggregate as aggregate

from gemopt.kernels.gluon.backward import weights_and_slopes
from gemopt.kernels.gluon.blackwell.memory import M, narrow, store_columns
from gemopt.kernels.gluon.parts import Band, as_matrix, load_tile, new_barriers, new_columns, new_ring
from gemopt.kernels.gluon.scores import SOFTMAX


@aggregate
class Slots:
    """Tensor memory of scores and gradients, and the barriers between the multiplying warp and the warpgroups."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor
    d1: tensor_memory_descriptor
    d2: tensor_memory_descriptor
    made: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    dtype: gl.constexpr
    ROWS_Y: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, s, dp, d1, d2, made, ready, done, free, dtype, ROWS_Y):
        self.s = s
        self.dp = dp
        self.d1 = d1
        self.d2 = d2
        self.made = made
        self.ready = ready
        self.done = done
        self.free = free
        self.dtype = gl.constexpr(dtype)
        self.ROWS_Y = gl.constexpr(ROWS_Y)


@gluon.jit
def new_slots(dtype: gl.constexpr, ROWS_Y: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, KEY_SIDE: gl.constexpr):
    s_layout: gl.constexpr = TensorMemoryLayout((M, ROWS_Y), 1)
    s = allocate_tensor_memory(gl.float32, [2, M, ROWS_Y], s_layout)
    dp = allocate_tensor_memory(gl.float32, [2, M, ROWS_Y], s_layout)
    d1 = allocate_tensor_memory(gl.float32, [M, D], TensorMemoryLayout((M, D), 1))
    d2 = d1
    if KEY_SIDE:
        d2 = allocate_tensor_memory(gl.float32, [M, DV], TensorMemoryLayout((M, DV), 1))
    made = new_barriers(2, 1)
    ready = new_barriers(2, 1)
    done = new_barriers(1, 1)
    free = new_barriers(1, 2)
    return Slots(s, dp, d1, d2, made, ready, done, free, dtype, ROWS_Y)


@gluon.jit
def produce(
    x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, tiles, count, heads, sharing, band,
    KEY_SIDE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The copying warp. `heads` are those of x; y has `sharing` times as many on the key side, as many fewer else."""
    ROWS_Y: gl.constexpr = y1_desc.block_type.shape[2]
    groups = sharing if KEY_SIDE else sharing * 0 + 1
    item = 0
    turn = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        head = t % heads
        first, x_start, x_len, y_start, y_len = load_tile(tiles, t // heads)
        x1.load(x1_desc, turn, x_start, x_len, first, head * D)
        x2.load(x2_desc, turn, x_start, x_len, first, head * DV)
        turn += 1
        low, n = band.span(first, M, x_len, y_len, ROWS_Y)
        for step in range(n * groups):
            y_head = head * sharing + step // n if KEY_SIDE else head // sharing
            row = low + (step % n) * ROWS_Y
            y1.load(y1_desc, item, y_start, y_len, row, y_head * D)
            y2.load(y2_desc, item, y_start, y_len, row, y_head * DV)
            if KEY_SIDE and ACT == SOFTMAX:
                lse = stats + y_head.to(gl.int64) * q_rows + y_start
                columns.fill(item, lse, lse + (heads * sharing).to(gl.int64) * q_rows, row, y_len, float("-inf"))
            item += 1


@gluon.jit
def multiply(x1, x2, y1, y2, slots, tiles, count, heads, sharing, band, KEY_SIDE: gl.constexpr):
    """The multiplying warp. Only it reads x and y, so its commits give them back."""
    groups = sharing if KEY_SIDE else sharing * 0 + 1
    item = 0
    turn = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        first, _, x_len, _, y_len = load_tile(tiles, t // heads)
        _, tiles_y = band.span(first, M, x_len, y_len, slots.ROWS_Y)
        n = tiles_y * groups
        x1.wait_full(turn)
        x2.wait_full(turn)
        for i in range(n + 1):
            g = item + i
            if i < n:
                y1.wait_full(g)
                y2.wait_full(g)
                tcgen05_mma(
                    as_matrix(x1.box(turn)), as_matrix(y1.box(g)).permute([1, 0]), slots.s.index(g % 2), use_acc=False
                )
                tcgen05_mma(
                    as_matrix(x2.box(turn)), as_matrix(y2.box(g)).permute([1, 0]), slots.dp.index(g % 2), use_acc=False
                )
                tcgen05_commit(slots.made.index(g % 2))
            if i == n - 1:
                tcgen05_commit(x1.empty.index(turn % x1.STAGES))
                tcgen05_commit(x2.empty.index(turn % x2.STAGES))
            if i > 0:
                old = g - 1
                mbarrier.wait(slots.ready.index(old % 2), (old // 2) & 1)
                if i == 1:
                    mbarrier.wait(slots.free.index(0), (turn & 1) ^ 1)
                ds = narrow(slots.dp.index(old % 2), slots.dtype)
                tcgen05_mma(ds, as_matrix(y1.box(old)), slots.d1, use_acc=i > 1)
                if KEY_SIDE:
                    p = narrow(slots.s.index(old % 2), slots.dtype)
                    tcgen05_mma(p, as_matrix(y2.box(old)), slots.d2, use_acc=i > 1)
                tcgen05_commit(y1.empty.index(old % y1.STAGES))
                tcgen05_commit(y2.empty.index(old % y2.STAGES))
            if i == n:
                tcgen05_commit(slots.done.index(0))
        item += n
        turn += 1


@gluon.jit
def differentiate(
    own: gl.constexpr, d1_desc, d2_desc, out, stats, q_rows, columns, slots, tiles, count, heads, sharing, scale, prescale,
    ds_scale, dv_scale, band, KEY_SIDE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Warpgroup `own`: P and dS of every second streamed tile, then its share of the gradients."""
    ROWS_Y: gl.constexpr = slots.ROWS_Y
    dtype: gl.constexpr = slots.dtype
    tmem_layout: gl.constexpr = TensorMemoryLayout((M, ROWS_Y), 1)
    s_layout: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, ROWS_Y], tmem_layout, gl.num_warps())
    p_layout: gl.constexpr = get_tmem_reg_layout(dtype, [M, ROWS_Y], tmem_layout, gl.num_warps())
    groups = sharing if KEY_SIDE else sharing * 0 + 1
    s_slot = slots.s.index(own)
    dp_slot = slots.dp.index(own)
    box = out.index(own)
    item = 0
    turn = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        head = t % heads
        first, x_start, x_len, _, y_len = load_tile(tiles, t // heads)
        low, n = band.span(first, M, x_len, y_len, ROWS_Y)
        lse = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
        delta = lse
        if ACT == SOFTMAX and not KEY_SIDE:
            r = first + gl.arange(0, M, layout=gl.SliceLayout(1, s_layout))
            row = stats + head.to(gl.int64) * q_rows + x_start + r
            lse = gl.load(row, mask=r < x_len, other=float("-inf"))
            delta = gl.load(row + heads.to(gl.int64) * q_rows, mask=r < x_len, other=0.0)
        end = item + n * groups
        for g in range(item + ((item + own) & 1), end, 2):
            mbarrier.wait(slots.made.index(own), (g // 2) & 1)
            s = s_slot.load(s_layout)
            if ACT == SOFTMAX:
                if KEY_SIDE:
                    lse_y, delta_y = columns.read(g, gl.SliceLayout(0, s_layout))
                    s = s + lse_y[None, :]
                else:
                    s = s + lse[:, None]
            y = low + (g - item) % n * ROWS_Y
            p, slope = weights_and_slopes(s, first, y, x_len, y_len, scale, prescale, band, ACT)
            if KEY_SIDE:
                narrow(s_slot, dtype).store(gl.convert_layout(p.to(dtype), p_layout))
            dp = dp_slot.load(s_layout)  # not before P is out of the registers
            if ACT == SOFTMAX:
                if KEY_SIDE:
                    dp = dp + delta_y[None, :]
                else:
                    dp = dp + delta[:, None]
            narrow(dp_slot, dtype).store(gl.convert_layout((slope * dp).to(dtype), p_layout))
            mbarrier.arrive(slots.ready.index(own), count=1)
        item = end
        mbarrier.wait(slots.done.index(0), turn & 1)
        if not KEY_SIDE:
            HALF: gl.constexpr = D // 2
            store_columns(
                slots.d1, box, d1_desc, x_start, x_len, first, head * D, ds_scale, y_len, dtype, own * HALF, (own + 1) * HALF
            )  # fmt: skip
        elif own == 0:
            store_columns(slots.d1, box, d1_desc, x_start, x_len, first, head * D, ds_scale, y_len, dtype, 0, D)
        else:
            store_columns(slots.d2, box, d2_desc, x_start, x_len, first, head * DV, dv_scale, y_len, dtype, 0, DV)
        mbarrier.arrive(slots.free.index(0), count=1)
        turn += 1
    tma.store_wait(0)


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
    D: gl.constexpr,
    DV: gl.constexpr,
    ACT: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One side of the backward; `heads` are the heads of x. Grid: one program per multiprocessor."""
    gl.static_assert(STAGES > 1, "a streamed tile stays until the next one's scores are issued")
    x1 = new_ring(x1_desc, X_STAGES, 1, 1)
    x2 = new_ring(x2_desc, X_STAGES, 1, 1)
    y1 = new_ring(y1_desc, STAGES, 1, 1)
    y2 = new_ring(y2_desc, STAGES, 1, 1)
    columns = new_columns(STAGES, y1_desc.block_type.shape[2])
    out = gl.allocate_shared_memory(d1_desc.dtype, [2] + d1_desc.block_type.shape, d1_desc.layout)
    slots = new_slots(x1_desc.dtype, y1_desc.block_type.shape[2], D, DV, KEY_SIDE)
    fence_async_shared()
    # Streamed queries past the end have -lse = -inf and dO = 0, which makes their columns zero; streamed keys need the mask.
    band = Band(before, after, BEFORE, AFTER, BOTTOM_RIGHT, ACT == SOFTMAX and not KEY_SIDE, False)
    # fmt: off
    gl.warp_specialize([
        (differentiate, (gl.constexpr(0), d1_desc, d2_desc, out, stats, q_rows, columns, slots, tiles, count, heads, sharing, scale, prescale, ds_scale, dv_scale, band, KEY_SIDE, D, DV, ACT)),
        (differentiate, (gl.constexpr(1), d1_desc, d2_desc, out, stats, q_rows, columns, slots, tiles, count, heads, sharing, scale, prescale, ds_scale, dv_scale, band, KEY_SIDE, D, DV, ACT)),
        (multiply, (x1, x2, y1, y2, slots, tiles, count, heads, sharing, band, KEY_SIDE)),
        (produce, (x1_desc, x2_desc, y1_desc, y2_desc, x1, x2, y1, y2, columns, stats, q_rows, tiles, count, heads, sharing, band, KEY_SIDE, D, DV, ACT)),
    ], [4, 1, 1], [REGISTERS, 24, 24])
    # fmt: on
