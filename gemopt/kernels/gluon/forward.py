"""Warp-specialised forward on sm_90, for softmax and for score functions.

For a tile of PARTS·64 queries, over key tiles j of ROWS_K rows:

    S_j = Q K_jᵀ,   softmax: P_j = 2^(c S_j - m),  l = Σ P,  O = Σ P_j V_j / l
                    gdpa:    P_j = act(scale·S_j),           O = post_scale · Σ P_j V_j  (+ Q if ADD_Q, the residual of a PFFN)

The producer warp copies Q, K, V; each consumer warpgroup owns 64 query rows and keeps S (ROWS_K columns) and O (DV
columns) in registers. Q K_jᵀ is issued before P_{j-1} V_{j-1}, so the tensor cores work on the older product while the
score function is applied to the newer scores. The output is staged in the query buffer and stored by TMA.

A work item is GROUP consecutive query tiles of one sequence. Where its keys fit the ring (at most STAGES tiles, as in a PFFN),
they are loaded once and stay for all of them: consumers release them in the last one. Under a window or causal mask each
consumer walks over the keys that its own 64 queries see, and lets the tile's others pass.
SHARED_Q: the same queries serve every sequence; they are read from the first rows of q, and nobody copies them.
SPLIT: a tile sees a part of its sequence's keys (`split.key_parts`) and leaves its output, in fp32, and its log-sum in rows
of its own, to be put together by `split.combine`.
FLOPs 4·H·D·Σ q_i·k_i; bytes: q, k, v and out once, k and v again for every further query tile (from L2 as a rule).
"""

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
    new_ring,
    skip_items,
    store_rows,
    zero_if_empty,
)
from gemopt.kernels.gluon.queue import new_queue
from gemopt.kernels.gluon.scores import FAR, SOFTMAX, units, vanishes

M = gl.constexpr(64)  # query rows of one warpgroup: one wgmma tile
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def query_tiles(first, q_len, ROWS_Q: gl.constexpr, GROUP: gl.constexpr):
    """Query tiles of a work item that starts at row `first`: GROUP, or those that are left."""
    return gl.minimum((q_len - first + ROWS_Q - 1) // ROWS_Q, GROUP)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q, k, v, queue, sharing, band, D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr,
    SHARED_Q: gl.constexpr,
):  # fmt: skip
    """The copying warp: the queries of each tile, then its keys and values, unless they are there already."""
    ROWS_K: gl.constexpr = k_desc.block_type.shape[2]
    item = 0
    turn = 0
    drawn = 0
    t = queue.first()
    while t >= 0:
        head, first, q_start, q_len, k_start, k_len = queue.tile(t)
        if SHARED_Q:
            q_start = q_start * 0
        low, n = band.span(first, q.PARTS * M, q_len, k_len, ROWS_K)
        kv_head = head // sharing
        if GROUP == 1:
            q.load(q_desc, turn, q_start, q_len, first, head * D)
            turn += 1
            for j in range(n):
                k.load(k_desc, item, k_start, k_len, low + j * ROWS_K, kv_head * D)
                v.load(v_desc, item, k_start, k_len, low + j * ROWS_K, kv_head * DV)
                item += 1
        else:
            groups = query_tiles(first, q_len, q.PARTS * M, GROUP)
            for g in range(groups):
                q.load(q_desc, turn, q_start, q_len, first + g * (q.PARTS * M), head * D)
                turn += 1
                for j in range(gl.where((g > 0) & (n <= k.STAGES), 0, n)):
                    k.load(k_desc, item, k_start, k_len, low + j * ROWS_K, kv_head * D)
                    v.load(v_desc, item, k_start, k_len, low + j * ROWS_K, kv_head * DV)
                    item += 1
        t = queue.draw(drawn, t)
        drawn += 1


@gluon.jit
def score_units(s, x, y, q_len, k_len, scale, band, ACT: gl.constexpr):
    """The score function of a tile in its units, 0 where a query does not see a key."""
    layout: gl.constexpr = s.type.layout
    ROWS_Q: gl.constexpr = s.shape[0]
    ROWS_K: gl.constexpr = s.shape[1]
    if band.MASKED and vanishes(ACT):
        if band.cuts(x, ROWS_Q, y, ROWS_K, q_len, k_len):
            s = gl.where(band.sees(x, ROWS_Q, y, ROWS_K, q_len, k_len, layout), s, FAR / scale)
    p = units(s, scale, ACT)
    if band.MASKED and not vanishes(ACT):
        if band.cuts(x, ROWS_Q, y, ROWS_K, q_len, k_len):
            p = gl.where(band.sees(x, ROWS_Q, y, ROWS_K, q_len, k_len, layout), p, 0.0)
    return p


@gluon.jit
def weights(s, top, total, x, y, q_len, k_len, scale, band, ACT: gl.constexpr):
    """Weights of a score tile in fp32, the new running maximum and sum, and the factor of the old output.

    softmax scores are in base 2 (`scale` holds log2 e); `top` is the maximum of unscaled scores.
    """
    layout: gl.constexpr = s.type.layout
    ROWS_K: gl.constexpr = s.shape[1]
    if ACT == SOFTMAX:
        if band.cuts(x, M, y, ROWS_K, q_len, k_len):
            s = gl.where(band.sees(x, M, y, ROWS_K, q_len, k_len, layout), s, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1))
        # A row that has seen nothing keeps -inf; 0 stands in, so that 2^(-inf - top) is 0 and not NaN.
        base = gl.where(new_top == float("-inf"), 0.0, new_top) * scale
        p = gl.exp2(s * scale - base[:, None])
        decay = gl.exp2(top * scale - base)
        return p, new_top, total * decay + gl.sum(p, 1), decay
    else:
        return score_units(s, x, y, q_len, k_len, scale, band, ACT), top, total, total


@gluon.jit
def give_back(q, turn, SPLIT: gl.constexpr):
    """Release the queries of a turn, whose buffer its output leaves by."""
    if not SPLIT:
        tma.store_wait(0)
    q.release(turn)


@gluon.jit
def give_back_last(q, turn, SPLIT: gl.constexpr):
    """The same of the turn before, where there is another buffer: its store has had the time of the first scores.

    The last turn of a program is not released: nobody needs its buffer, and its store is waited for at the end.
    """
    if q.STAGES > 1:
        if turn > 0:
            give_back(q, turn - 1, SPLIT)


@gluon.jit
def attend(
    part: gl.constexpr, q, turn, k, v, item, free, low, n, x, q_start, q_len, k_len, part_ptr, lse_ptr, heads, head, scale,
    prescale, out_scale, band, D: gl.constexpr, DV: gl.constexpr, ACT: gl.constexpr, ADD_Q: gl.constexpr,
    EARLY_WAIT: gl.constexpr, Q_REGISTERS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Output of 64 queries (part `part` of item `turn` of q), left in their buffer.

    Reads the key tiles `item : item + n`, and uses them up if `free`.
    SPLIT: the output goes to rows `q_start + x` and on of `part_ptr` instead.
    """
    ROWS_K: gl.constexpr = k.data.shape[3]
    dtype: gl.constexpr = q.data.dtype
    q_box = q.box(turn, part)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.zeros([M, ROWS_K], gl.float32, s_layout)
    # A product of 64 columns with both operands in shared memory takes all of its bandwidth (128 bytes a clock).
    queries = as_matrix(q_box)
    if Q_REGISTERS:
        queries = queries.load(gl.DotOperandLayout(0, s_layout, 2))
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([M, DV], gl.float32, o_layout)
    k.wait_full(item)
    started = warpgroup_mma(queries, as_matrix(k.box(item)).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [started])
    k.release(item, free)
    if prescale != 1.0:
        s = s * prescale
    p32, top, total, decay = weights(s, top, total, x, low, q_len, k_len, scale, band, ACT)
    p = gl.convert_layout(p32.to(dtype), p_layout)
    give_back_last(q, turn, SPLIT)
    for j in range(1, n):
        k.wait_full(item + 1)
        started = warpgroup_mma(queries, as_matrix(k.box(item + 1)).permute([1, 0]), zero, use_acc=False, is_async=True)
        v.wait_full(item)
        adding = warpgroup_mma(p, as_matrix(v.box(item)), acc, is_async=True)
        s = warpgroup_mma_wait(1, [started])
        k.release(item + 1, free)
        if prescale != 1.0:
            s = s * prescale
        p32, top, total, decay = weights(s, top, total, x, low + j * ROWS_K, q_len, k_len, scale, band, ACT)
        next_p = gl.convert_layout(p32.to(dtype), p_layout)
        if EARLY_WAIT:
            # A wait on a barrier that has completed: it ends the basic block. Without it ptxas moves the wait for
            # the product above most of the score function, which then no longer overlaps with it.
            v.wait_full(item)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        v.release(item, free)
        if ACT == SOFTMAX:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, o_layout))[:, None]
        p = next_p
        item += 1
    v.wait_full(item)
    adding = warpgroup_mma(p, as_matrix(v.box(item)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [adding])
    v.release(item, free)
    if ACT == SOFTMAX:
        sums = gl.where(total == 0.0, 1.0, total)
        acc = acc / gl.convert_layout(sums, gl.SliceLayout(1, o_layout))[:, None]
        rows = x + gl.arange(0, M, layout=gl.SliceLayout(1, s_layout))
        lse = (top * scale + gl.log2(total)) * LN2  # -inf where nothing is seen
        gl.store(lse_ptr + (q_start + rows).to(gl.int64) * heads + head, lse, mask=rows < q_len)
    else:
        acc = zero_if_empty(acc * out_scale, k_len)
    if ADD_Q:
        acc = acc + as_matrix(q_box).load(o_layout).to(gl.float32)
    if SPLIT:
        own = x + gl.arange(0, M, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, DV, layout=gl.SliceLayout(0, o_layout))
        at = ((q_start + own).to(gl.int64) * heads + head) * DV
        gl.store(part_ptr + (at[:, None] + columns[None, :]), acc, mask=(own < q_len)[:, None])
    else:
        as_matrix(q_box).store(acc.to(dtype))


@gluon.jit
def consume(
    part: gl.constexpr, out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D: gl.constexpr,
    DV: gl.constexpr, ACT: gl.constexpr, ADD_Q: gl.constexpr, EARLY_WAIT: gl.constexpr,
    Q_REGISTERS: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: query rows `part * 64` and on of each tile."""
    ROWS_K: gl.constexpr = k.data.shape[3]
    item = 0
    turn = 0
    drawn = 0
    t = queue.first()
    while t >= 0:
        head, first, q_start, q_len, _, k_len = queue.tile(t)
        if SPLIT:
            q_start += queue.seventh(t) * rows
        low, n = band.span(first, q.PARTS * M, q_len, k_len, ROWS_K)
        groups = query_tiles(first, q_len, q.PARTS * M, GROUP)
        for g in range(groups):
            x = first + (g * q.PARTS + part) * M
            last = (g == groups - 1) | (n > k.STAGES)
            q.wait_full(turn)
            if x < q_len:
                passed, own_n = band.share(x, M, low, n, q_len, k_len, ROWS_K)
                own_low = low + passed * ROWS_K
                skip_items(k, v, item, passed)
                attend(
                    part, q, turn, k, v, item + passed, last, own_low, own_n, x, q_start, q_len, k_len, part_ptr, lse_ptr,
                    queue.heads, head, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, SPLIT,
                )  # fmt: skip
                if not SPLIT:
                    fence_async_shared()
                    store_rows(out_desc, q.box(turn, part), q_start, q_len, x, head * DV)
                skip_items(k, v, item + passed + own_n, n - passed - own_n)
            else:  # only in the last tile of a sequence
                skip_items(k, v, item, n)
                give_back_last(q, turn, SPLIT)
            item += gl.where(last, n, 0)
            if q.STAGES == 1:
                give_back(q, turn, SPLIT)
            turn += 1
        t = queue.take(drawn)
        drawn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "sharing", "rows", "before", "after"])
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    part_ptr,
    lse_ptr,
    tiles,
    count,
    heads,
    sharing,
    rows,
    before,
    after,
    scale,
    prescale,
    out_scale,
    D: gl.constexpr,
    DV: gl.constexpr,
    ACT: gl.constexpr,
    ADD_Q: gl.constexpr,
    SHARED_Q: gl.constexpr,
    SPLIT: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    EARLY_WAIT: gl.constexpr,
    Q_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: one program per multiprocessor. `count` holds the number of tiles; every tile stands for all heads.

    part_ptr fp32 `[parts, rows, heads, DV]` and lse_ptr `[parts, rows, heads]` with SPLIT; else part_ptr is not used, and
    lse_ptr is `[rows, heads]`.
    """
    q = new_ring(q_desc, Q_STAGES, PARTS, PARTS)
    k = new_ring(k_desc, STAGES, 1, PARTS)
    v = new_ring(v_desc, STAGES, 1, PARTS)
    queue = new_queue(tiles, count, heads, PARTS, False)
    fence_async_shared()
    gl.static_assert(not SPLIT or not (BEFORE or AFTER or ADD_Q), "a part of the keys sees no band and adds no residual")
    gl.static_assert(GROUP == 1 or not (BEFORE or AFTER), "the tiles of a group share their keys")
    band = Band(before, after, BEFORE, AFTER, BOTTOM_RIGHT, ACT == SOFTMAX, False)
    # fmt: off
    if PARTS == 2:
        gl.warp_specialize([
            (consume, (gl.constexpr(0), out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, GROUP, SPLIT)),
            (consume, (gl.constexpr(1), out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, GROUP, SPLIT)),
            (produce, (q_desc, k_desc, v_desc, q, k, v, queue, sharing, band, D, DV, GROUP, SHARED_Q)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (consume, (gl.constexpr(0), out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, GROUP, SPLIT)),
            (consume, (gl.constexpr(1), out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, GROUP, SPLIT)),
            (consume, (gl.constexpr(2), out_desc, part_ptr, lse_ptr, q, k, v, queue, rows, scale, prescale, out_scale, band, D, DV, ACT, ADD_Q, EARLY_WAIT, Q_REGISTERS, GROUP, SPLIT)),
            (produce, (q_desc, k_desc, v_desc, q, k, v, queue, sharing, band, D, DV, GROUP, SHARED_Q)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
