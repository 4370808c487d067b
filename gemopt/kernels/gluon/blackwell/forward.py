"""Warp-specialised forward on sm_100, for softmax and for score functions. Compiled in tests, not yet run on hardware.

For a tile of 2·128 queries, two *parts* of 128 rows, over key tiles j of KEYS rows:

    S_j = Q K_jᵀ,   softmax: P_j = 2^(c S_j - m),  l = Σ P,  O = Σ P_j V_j / l
                    gdpa:    P_j = act(scale·S_j),           O = post_scale · Σ P_j V_j

One warp copies Q, K and V by TMA; one warp issues all products; a warpgroup for each part turns S into P, one row a thread,
and writes the output. S, P and O are in tensor memory, P over the first half of its S: 2·(KEYS + DV) columns of 512. While
one part's scores are worked on, the tensor cores have the other's products. For softmax, m is not the running maximum but
a base that follows it once a score passes it by 2^8 (weights stay below 2^8, and lse and the quotient are those of the
same base), so O is rescaled in a few tiles instead of all; the warpgroup does that itself.
FLOPs 4·H·D·Σ q_i·k_i; bytes as in gluon/forward.py.

The multiplying warp takes step j = 0 ... n of a tile with n key tiles, for each part that sees them: P_{j-1} V_{j-1}, then
Q K_jᵀ. A part of no rows (in the last tile of a sequence), and key tiles that a part does not see under a window, are left
out by both sides, which compute the same `reach`. The tensor cores finish one thread's products in the order of issue, and
a commit arrives once all products before it are finished. Barriers, all of one arrival a phase; i counts a part's key
tiles and t its query tiles, over the life of the program, so phase i has parity i mod 2:

    barrier      arrives                                     waits
    q.full       TMA, a query tile                           multiplier, before its first product
    q.empty      commit after the tile's last Q Kᵀ           producer, before it fills the buffer again
    k.full       TMA, a key tile                             multiplier, step j
    k.empty      commit after Q K_jᵀ of both parts           producer
    v.full       TMA, a key tile                             multiplier, step j + 1
    v.empty      commit after P_j V_j of both parts          producer
    made[part]   commit with Q Kᵀ, phase i                   warpgroup, before it reads S
    ready[part]  warpgroup, P written and O rescaled         multiplier, before P V
    done[part]   commit with the last P V of a tile, phase t warpgroup, before it reads O

*Nobody misses a phase*, for nobody is two ahead: made i + 1 comes after the multiplier's wait for ready i, which arrives
after the warpgroup's wait for made i; ready i + 1 after made i + 1, hence after the wait for ready i; done t + 1 after a
ready of tile t + 1, which its warpgroup gives after it has read O of tile t. Rings are counted as in parts.py.

*Nothing is overwritten early.* S_{j+1} and P_j share columns: Q K_{j+1}ᵀ is issued behind P_j V_j, which reads P_j, and
comes after the wait for ready j, which arrives after S_j has been read. O is written by the warpgroup between made j and
ready j: made j is committed behind P_{j-1} V_{j-1}, and P_j V_j waits for ready j. The first P V of a tile starts O anew,
after a ready that comes after O of the tile before has been read. Buffers of Q, K and V are read by products only, whose
commits give them back. The output's box is stored to again when its last TMA store has read it (`store_wait`).

*Nobody waits for ever.* A sequence without keys has one tile of zeros (`Band.span`), so n >= 1 and each part with rows has
at least one key tile. All roles walk over the same list. The producer fills Q, K_0, V_0, K_1, ... and never waits for
anything that depends on a later item: k.empty j needs k.full j, v.full j - 1 and the warpgroups, v.empty j needs
k.full j + 1 or the end of the tile, which come before V_{j+1} in its order; so one buffer a ring is enough.

tests/kernels/test_blackwell.py runs this source on threads, in random order, and compares the numbers.
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

from gemopt.kernels.gluon.blackwell.memory import M, narrow, store_columns
from gemopt.kernels.gluon.forward import score_units
from gemopt.kernels.gluon.parts import Band, as_matrix, load_tile, new_barriers, new_ring
from gemopt.kernels.gluon.scores import SOFTMAX

PARTS = gl.constexpr(2)
LN2 = gl.constexpr(0.6931471805599453)
SLACK = gl.constexpr(8.0)  # weights may pass 1 by this power of two before their base follows


@aggregate
class Link:
    """Tensor memory of the parts, and the barriers between the multiplying warp and their warpgroups."""

    s: tensor_memory_descriptor
    o: tensor_memory_descriptor
    made: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    dtype: gl.constexpr
    KEYS: gl.constexpr
    DV: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, s, o, made, ready, done, dtype, KEYS, DV):
        self.s = s
        self.o = o
        self.made = made
        self.ready = ready
        self.done = done
        self.dtype = gl.constexpr(dtype)
        self.KEYS = gl.constexpr(KEYS)
        self.DV = gl.constexpr(DV)

    @gluon.jit
    def p(self, part: gl.constexpr):
        """The weights of a part, in the place of its scores."""
        return narrow(self.s.index(part), self.dtype)

    @gluon.jit
    def reach(self, part: gl.constexpr, band, first, low, n, q_len, k_len):
        """The first of the `n` key tiles that a part of the query tile at row `first` sees, and the one behind the last."""
        x = first + part * M
        passed, own = band.share(x, M, low, n, q_len, k_len, self.KEYS)
        return passed, passed + gl.where(x < q_len, own, 0)


@gluon.jit
def new_link(dtype: gl.constexpr, KEYS: gl.constexpr, DV: gl.constexpr):
    s = allocate_tensor_memory(gl.float32, [PARTS, M, KEYS], TensorMemoryLayout((M, KEYS), 1))
    o = allocate_tensor_memory(gl.float32, [PARTS, M, DV], TensorMemoryLayout((M, DV), 1))
    made = new_barriers(PARTS, 1)
    ready = new_barriers(PARTS, 1)
    done = new_barriers(PARTS, 1)
    return Link(s, o, made, ready, done, dtype, KEYS, DV)


@gluon.jit
def produce(q_desc, k_desc, v_desc, q, k, v, tiles, count, heads, sharing, band, D: gl.constexpr, DV: gl.constexpr):
    """The copying warp: the queries of each tile, then its keys and values."""
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    item = 0
    turn = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        head = t % heads
        first, q_start, q_len, k_start, k_len = load_tile(tiles, t // heads)
        low, n = band.span(first, PARTS * M, q_len, k_len, KEYS)
        q.load(q_desc, turn, q_start, q_len, first, head * D)
        turn += 1
        for j in range(n):
            k.load(k_desc, item, k_start, k_len, low + j * KEYS, head // sharing * D)
            v.load(v_desc, item, k_start, k_len, low + j * KEYS, head // sharing * DV)
            item += 1


@gluon.jit
def step(part: gl.constexpr, q, k, v, link, turn, item, scored, begin, end, j):
    """Products of a part in step j of its tile: P V of key tile j - 1, then Q Kᵀ of key tile j, each if the part sees it."""
    if (j > begin) & (j <= end):
        mbarrier.wait(link.ready.index(part), (scored + j - 1 - begin) & 1)
        tcgen05_mma(
            link.p(part),
            as_matrix(v.box(item + j - 1)),
            link.o.index(part),
            use_acc=j - 1 > begin,
            mbarriers=[link.done.index(part)],
            mbarrier_preds=[j == end],
        )
    if (j >= begin) & (j < end):
        tcgen05_mma(
            as_matrix(q.box(turn, part)),
            as_matrix(k.box(item + j)).permute([1, 0]),
            link.s.index(part),
            use_acc=False,
            mbarriers=[link.made.index(part)],
        )


@gluon.jit
def multiply(q, k, v, link, tiles, count, heads, band):
    """The multiplying warp. Only it reads Q, K and V, so its commits give them back."""
    item = 0
    turn = 0
    scored0 = 0
    scored1 = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        first, _, q_len, _, k_len = load_tile(tiles, t // heads)
        low, n = band.span(first, PARTS * M, q_len, k_len, link.KEYS)
        begin0, end0 = link.reach(0, band, first, low, n, q_len, k_len)
        begin1, end1 = link.reach(1, band, first, low, n, q_len, k_len)
        q.wait_full(turn)
        for j in range(n + 1):
            if j < n:
                k.wait_full(item + j)
            if j > 0:
                v.wait_full(item + j - 1)
            step(0, q, k, v, link, turn, item, scored0, begin0, end0, j)
            step(1, q, k, v, link, turn, item, scored1, begin1, end1, j)
            if j < n:
                tcgen05_commit(k.empty.index((item + j) % k.STAGES))
            if j == n - 1:
                tcgen05_commit(q.empty.index(turn % q.STAGES))
            if j > 0:
                tcgen05_commit(v.empty.index((item + j - 1) % v.STAGES))
        scored0 += end0 - begin0
        scored1 += end1 - begin1
        item += n
        turn += 1


@gluon.jit
def softmax_weights(s, top, total, x, y, q_len, k_len, scale, band):
    """Weights of a score tile, the new base and sum of its rows, which bases grew, and the factor of the old output.

    Scores are in base 2 (`scale` holds log2 e); `top` is the base, in unscaled scores.
    """
    layout: gl.constexpr = s.type.layout
    KEYS: gl.constexpr = s.shape[1]
    if band.cuts(x, M, y, KEYS, q_len, k_len):
        s = gl.where(band.sees(x, M, y, KEYS, q_len, k_len, layout), s, float("-inf"))
    highest = gl.max(s, 1)
    grew = highest * scale > top * scale + SLACK
    new_top = gl.where(grew, highest, top)
    # A row that has seen nothing keeps -inf; 0 stands in, so that 2^(-inf - top) is 0 and not NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top) * scale
    p = gl.exp2(s * scale - base[:, None])
    decay = gl.where(grew, gl.exp2(top * scale - base), 1.0)
    return p, new_top, total * decay + gl.sum(p, 1), grew, decay


@gluon.jit
def rescale(o, decay, COLUMNS: gl.constexpr):
    """o *= decay, COLUMNS at a time."""
    layout: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, COLUMNS], TensorMemoryLayout((M, COLUMNS), 1), gl.num_warps())
    factor = gl.convert_layout(decay, gl.SliceLayout(1, layout))[:, None]
    for c in gl.static_range(o.shape[1] // COLUMNS):
        columns = o.slice(c * COLUMNS, COLUMNS)
        columns.store(columns.load(layout) * factor)


@gluon.jit
def attend(
    part: gl.constexpr, link, scored, begin, end, x, low, q_len, k_len, scale, prescale, band, ACT: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Weights of 128 queries over their key tiles; under softmax the base and the sum of each row."""
    s_layout: gl.constexpr = get_tmem_reg_layout(
        gl.float32, [M, link.KEYS], TensorMemoryLayout((M, link.KEYS), 1), gl.num_warps()
    )
    p_layout: gl.constexpr = get_tmem_reg_layout(
        link.dtype, [M, link.KEYS], TensorMemoryLayout((M, link.KEYS), 1), gl.num_warps()
    )
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
    for j in range(begin, end):
        mbarrier.wait(link.made.index(part), (scored + j - begin) & 1)
        s = link.s.index(part).load(s_layout)
        if prescale != 1.0:
            s = s * prescale
        y = low + j * link.KEYS
        if ACT == SOFTMAX:
            p, top, total, grew, decay = softmax_weights(s, top, total, x, y, q_len, k_len, scale, band)
            link.p(part).store(gl.convert_layout(p.to(link.dtype), p_layout))
            if j > begin:
                if gl.max(grew.to(gl.int32), 0) > 0:
                    rescale(link.o.index(part), decay, COLUMNS)
        else:
            p = score_units(s, x, y, q_len, k_len, scale, band, ACT)
            link.p(part).store(gl.convert_layout(p.to(link.dtype), p_layout))
        mbarrier.arrive(link.ready.index(part), count=1)
    return top, total


@gluon.jit
def score(
    part: gl.constexpr, out_desc, lse_ptr, out, link, tiles, count, heads, scale, prescale, out_scale, band,
    ACT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the scores and the output of query rows `part * 128` and on of each tile."""
    COLUMNS: gl.constexpr = out_desc.block_type.shape[3]  # of the output, at a time
    o_layout: gl.constexpr = get_tmem_reg_layout(
        gl.float32, [M, COLUMNS], TensorMemoryLayout((M, COLUMNS), 1), gl.num_warps()
    )
    box = out.index(part)
    scored = 0
    turn = 0
    for t in range(gl.program_id(0), gl.load(count) * heads, gl.num_programs(0)):
        head = t % heads
        first, q_start, q_len, _, k_len = load_tile(tiles, t // heads)
        x = first + part * M
        if x < q_len:
            low, n = band.span(first, PARTS * M, q_len, k_len, link.KEYS)
            begin, end = link.reach(part, band, first, low, n, q_len, k_len)
            top, total = attend(
                part, link, scored, begin, end, x, low, q_len, k_len, scale, prescale, band, ACT, COLUMNS
            )  # fmt: skip
            scored += end - begin
            factor = gl.full([M], 1.0, gl.float32, gl.SliceLayout(1, o_layout)) * out_scale
            if ACT == SOFTMAX:
                row_layout: gl.constexpr = total.type.layout
                rows = x + gl.arange(0, M, layout=row_layout)
                lse = (top * scale + gl.log2(total)) * LN2  # -inf where nothing is seen
                gl.store(lse_ptr + (q_start + rows).to(gl.int64) * heads + head, lse, mask=rows < q_len)
                factor = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, o_layout))
            mbarrier.wait(link.done.index(part), turn & 1)
            store_columns(
                link.o.index(part), box, out_desc, q_start, q_len, x, head * link.DV, factor[:, None], k_len, link.dtype,
                0, link.DV,
            )  # fmt: skip
            turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "sharing", "before", "after"])
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    tiles,
    count,
    heads,
    sharing,
    before,
    after,
    scale,
    prescale,
    out_scale,
    D: gl.constexpr,
    DV: gl.constexpr,
    ACT: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: one program per multiprocessor. `count` holds the number of tiles; every tile stands for all heads."""
    q = new_ring(q_desc, Q_STAGES, PARTS, 1)
    k = new_ring(k_desc, STAGES, 1, 1)
    v = new_ring(v_desc, STAGES, 1, 1)
    out = gl.allocate_shared_memory(out_desc.dtype, [PARTS] + out_desc.block_type.shape, out_desc.layout)
    link = new_link(q_desc.dtype, k_desc.block_type.shape[2], DV)
    fence_async_shared()
    band = Band(before, after, BEFORE, AFTER, BOTTOM_RIGHT, ACT == SOFTMAX, False)
    # fmt: off
    gl.warp_specialize([
        (score, (gl.constexpr(0), out_desc, lse_ptr, out, link, tiles, count, heads, scale, prescale, out_scale, band, ACT)),
        (score, (gl.constexpr(1), out_desc, lse_ptr, out, link, tiles, count, heads, scale, prescale, out_scale, band, ACT)),
        (multiply, (q, k, v, link, tiles, count, heads, band)),
        (produce, (q_desc, k_desc, v_desc, q, k, v, tiles, count, heads, sharing, band, D, DV)),
    ], [4, 1, 1], [REGISTERS, 24, 24])
    # fmt: on
