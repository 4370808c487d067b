"""What the warp-specialised kernels share: rings of buffers, ragged TMA, tile records and visible ranges.

A *ring* is a circle of shared-memory buffers with two barriers each: `full` completes when TMA has filled a buffer,
`empty` when every consumer has released it. Producer and consumers count the same items; item i lives in buffer
i mod STAGES, and the parity of its turn is (i div STAGES) mod 2.

A ragged descriptor bounds one sequence in hardware (triton.tools.ragged_tma): with the strides 2^34 - r, r, r of three
leading axes, the coordinates (2^30, start + length, 2^30 - length + row) address row `start + row`, and rows of
`length` and more fall off the third axis. A load gives zeros there and a store writes nothing, so a tail tile never
reads or touches a neighbour.

Every kernel has *stationary* rows x, which a tile owns, and *streamed* rows y, over which it walks: queries and keys in
the forward and for dQ, keys and queries for dK and dV. Query i sees key j iff `i + shift - left <= j <= i + shift +
right`; solved for i this is the same band with left and right exchanged and the shift negated, and the shift is
`y_len - x_len` (or 0) from both sides. So one `Band` serves all kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(1 << 30)
RECORD = gl.constexpr(8)  # int32 words of a tile record: first row, x_start, x_len, y_start, y_len, sequence, seventh


@gluon.jit
def uniform(x):
    """x, of which every lane has the same. From here on the compilers know that, and know nothing else of it."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class Ring:
    """STAGES items of PARTS boxes each."""

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, data, full, empty, STAGES, PARTS):
        self.data = data
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)
        self.PARTS = gl.constexpr(PARTS)

    @gluon.jit
    def box(self, i, part: gl.constexpr = 0):
        """Buffer of part `part` of item i, in the descriptor's rank."""
        return self.data.index((i % self.STAGES) * self.PARTS + part)

    @gluon.jit
    def box_anew(self, i, part: gl.constexpr = 0):
        """The same, with its address computed where this stands.

        Of a box that stays during a loop the compilers compute all wgmma descriptors beforehand (one for every 16 columns) and
        keep them in two vector registers each: 24 that the score function then lacks.
        """
        return self.data.index(uniform((i % self.STAGES) * self.PARTS + part))

    @gluon.jit
    def wait_full(self, i):
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, i):
        mbarrier.wait(self.empty.index(i % self.STAGES), ((i // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, i, free=True):
        """Give item i back, if `free`."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1, pred=free)

    @gluon.jit
    def load(self, desc, i, start, length, row, column):
        """Producer: fill item i with the boxes at `row`, `row + rows of a box`, ..."""
        self.wait_empty(i)
        rows: gl.constexpr = desc.block_type.shape[2]
        full = self.full.index(i % self.STAGES)
        mbarrier.expect(full, self.PARTS * desc.block_type.nbytes)
        for part in gl.static_range(self.PARTS):
            load_rows(desc, self.box(i, part), full, start, length, row + part * rows, column)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """An allocation of its own for every array: a shared one makes the compiler insert a CTA barrier at every wait."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, PARTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of boxes of `desc`; an item is free again after CONSUMERS releases."""
    data = gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_type.shape, desc.layout)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, CONSUMERS)
    return Ring(data, full, empty, STAGES, PARTS)


@gluon.jit
def skip_items(first, second, item, n):
    """Release `n` items of two rings unread: for a warpgroup whose rows lie past the end of the sequence."""
    for i in range(item, item + n):
        first.wait_full(i)
        first.release(i)
        second.wait_full(i)
        second.release(i)


@aggregate
class Columns:
    """Two fp32 numbers for every streamed row, beside the boxes of a ring and released with them."""

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, first, second, full, STAGES):
        self.first = first
        self.second = second
        self.full = full
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def fill(self, i, first_ptr, second_ptr, row, length, first_other):
        """Producer (one warp): rows `row` and on of a sequence that starts at the pointers; `first_other`, 0 past it."""
        ROWS_Y: gl.constexpr = self.first.shape[1]
        r = row + gl.arange(0, ROWS_Y, layout=gl.BlockedLayout([ROWS_Y // 32], [32], [1], [0]))
        first = gl.load(first_ptr + r, mask=r < length, other=first_other)
        second = gl.load(second_ptr + r, mask=r < length, other=0.0)
        slot = i % self.STAGES
        self.first.index(slot).store(first)
        self.second.index(slot).store(second)
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def read(self, i, layout: gl.constexpr):
        slot = i % self.STAGES
        mbarrier.wait(self.full.index(slot), (i // self.STAGES) & 1)
        return self.first.index(slot).load(layout), self.second.index(slot).load(layout)


@gluon.jit
def new_columns(STAGES: gl.constexpr, ROWS_Y: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS_Y], plain)
    second = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS_Y], plain)
    full = new_barriers(STAGES, 1)
    return Columns(first, second, full, STAGES)


@gluon.jit
def load_rows(desc, box, barrier, start, length, row, column):
    tma.async_copy_global_to_shared(desc, [ROWS, start + length, ROWS - length + row, column], barrier, box)


@gluon.jit
def store_rows(desc, box, start, length, row, column):
    tma.async_copy_shared_to_global(desc, [ROWS, start + length, ROWS - length + row, column], box)


@gluon.jit
def zero_if_empty(values, y_len):
    """`values`, or zeros if nothing was streamed: a sum over nothing is 0 also where the stationary rows hold NaN."""
    if y_len <= 0:
        values = gl.zeros_like(values)
    return values


@gluon.jit
def placed(values, like):
    """`values` broadcast to `like`, in registers of their own from here on.

    An accumulator that starts from repeated values is otherwise copied just before its product starts; between two
    asynchronous products that copy makes ptxas wait for the first (C7517).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [like + values], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def as_matrix(box):
    """A rank-4 box as the matrix [rows, columns] that it is."""
    return box.reshape([box.shape[2], box.shape[3]])


@aggregate
class Band:
    """Which streamed rows a stationary row sees; BEFORE and AFTER say whether that side is limited."""

    before: gl.tensor
    after: gl.tensor
    BEFORE: gl.constexpr
    AFTER: gl.constexpr
    BOTTOM_RIGHT: gl.constexpr
    TAIL: gl.constexpr  # streamed rows past y_len must be masked: their zeros would count
    X_TAIL: gl.constexpr  # likewise stationary rows past x_len
    MASKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, before, after, BEFORE, AFTER, BOTTOM_RIGHT, TAIL, X_TAIL):
        self.before = before
        self.after = after
        self.BEFORE = gl.constexpr(BEFORE)
        self.AFTER = gl.constexpr(AFTER)
        self.BOTTOM_RIGHT = gl.constexpr(BOTTOM_RIGHT)
        self.TAIL = gl.constexpr(TAIL)
        self.X_TAIL = gl.constexpr(X_TAIL)
        self.MASKED = gl.constexpr(BEFORE or AFTER or TAIL or X_TAIL)

    @gluon.jit
    def span(self, first, ROWS_X: gl.constexpr, x_len, y_len, ROWS_Y: gl.constexpr):
        """First streamed row and number of streamed tiles of the stationary rows `first : first + ROWS_X`.

        At least one tile: one without a visible row gives zeros by itself, and no loop has to be empty.
        """
        low = first * 0
        high = y_len
        shift = self.shift(x_len, y_len)
        if self.AFTER:
            high = gl.minimum(high, gl.minimum(first + ROWS_X, x_len) + shift + self.after)
        if self.BEFORE:
            low = gl.maximum(first + shift - self.before, 0) // ROWS_Y * ROWS_Y
        return low, gl.maximum((high - low + ROWS_Y - 1) // ROWS_Y, 1)

    @gluon.jit
    def share(self, x, ROWS_X: gl.constexpr, low, n, x_len, y_len, ROWS_Y: gl.constexpr):
        """Of the `n` streamed tiles from row `low` on, how many the rows `x : x + ROWS_X` do not reach yet, and the number of
        those that they see: at least one, as in `span`."""
        if self.BEFORE or self.AFTER:
            own_low, own_n = self.span(x, ROWS_X, x_len, y_len, ROWS_Y)
            passed = gl.minimum((own_low - low) // ROWS_Y, n - 1)
            return passed, gl.minimum(own_n, n - passed)
        else:
            return n * 0, n

    @gluon.jit
    def shift(self, x_len, y_len):
        if self.BOTTOM_RIGHT:
            return y_len - x_len
        else:
            return y_len * 0

    @gluon.jit
    def cuts(self, x, ROWS_X: gl.constexpr, y, ROWS_Y: gl.constexpr, x_len, y_len):
        """Whether some pair of the tile at rows x, y does not see each other."""
        cut = y < 0
        shift = self.shift(x_len, y_len)
        if self.BEFORE:
            cut = cut | (y < x + (ROWS_X - 1) + shift - self.before)
        if self.AFTER:
            cut = cut | (y + (ROWS_Y - 1) > x + shift + self.after)
        if self.TAIL:
            cut = cut | (y + ROWS_Y > y_len)
        if self.X_TAIL:
            cut = cut | (x + ROWS_X > x_len)
        return cut

    @gluon.jit
    def sees(self, x, ROWS_X: gl.constexpr, y, ROWS_Y: gl.constexpr, x_len, y_len, layout: gl.constexpr):
        """bool [ROWS_X, ROWS_Y] of the tile at rows x, y."""
        xs = (x + gl.arange(0, ROWS_X, layout=gl.SliceLayout(1, layout)))[:, None]
        ys = (y + gl.arange(0, ROWS_Y, layout=gl.SliceLayout(0, layout)))[None, :]
        seen = ys < y_len
        if self.X_TAIL:
            seen = seen & (xs < x_len)
        xs += self.shift(x_len, y_len)
        if self.BEFORE:
            seen = seen & (ys >= xs - self.before)
        if self.AFTER:
            seen = seen & (ys <= xs + self.after)
        return seen


@gluon.jit
def load_tile(tiles, t):
    """first row, x_start, x_len, y_start, y_len of tile t."""
    at = tiles + t * RECORD
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
