"""Tiles handed out one by one: a program that is done early takes the next tile, whoever it would have been for.

An item is a tile and a head. The copying warp of a program draws the number of an item from a counter in device memory and
passes it to the consumers through a small ring in shared memory; each reads the tile's record for itself. Programs so work on
neighbours in the list at any time, which shares the streamed rows of a sequence in L2, and nobody waits at the end for the
one with the longest turns (ARCHITECTURE.md has the figures).

A program starts with the item of its own number, if there is one, and after each item draws the next, so a launch draws
exactly as often as there are items. Who draws last sets the counter back for the next launch with this list: a list serves
one launch at a time.
FIXED: program p takes the items p, p + programs and on instead, for sums whose order must not change from run to run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from gemopt.kernels.gluon.parts import RECORD, load_tile, new_barriers, uniform

SLOTS = gl.constexpr(4)


@builtin
def _barrier(_semantic=None):
    """Waits for all threads of a partition: gl.thread_barrier of triton 3.6, gl.barrier of 3.7."""
    return _semantic.debug_barrier()


@aggregate
class Queue:
    """`count` holds the number of tiles and the counter; each tile stands for `heads` items."""

    tiles: gl.tensor
    count: gl.tensor
    heads: gl.tensor
    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FIXED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, count, heads, slots, full, empty, FIXED):
        self.tiles = tiles
        self.count = count
        self.heads = heads
        self.slots = slots
        self.full = full
        self.empty = empty
        self.FIXED = gl.constexpr(FIXED)

    @gluon.jit
    def items(self):
        """How many there are. An item is a tile and a head."""
        return gl.load(self.count) * self.heads

    @gluon.jit
    def first(self):
        """The first item of this program; -1: there is none."""
        t = gl.program_id(0)
        return gl.where(t < self.items(), t, -1)

    @gluon.jit
    def tile(self, t):
        """Head, and first row, x_start, x_len, y_start, y_len of item t."""
        first, x_start, x_len, y_start, y_len = load_tile(self.tiles, t // self.heads)
        return (
            t % self.heads, uniform(first), uniform(x_start), uniform(x_len), uniform(y_start), uniform(y_len)
        )  # fmt: skip

    @gluon.jit
    def seventh(self, t):
        """The seventh word of the record of item t: which part of the keys, or how many rows are unseen."""
        return gl.load(self.tiles + (t // self.heads) * RECORD + 6)

    @gluon.jit
    def draw(self, i, t):
        """Producer (one warp): the item after t, or -1, passed on to the consumers as the i-th."""
        items = self.items()
        if self.FIXED:
            t += gl.num_programs(0)
        else:
            drawn = gl.atomic_add(self.count + 1, 1, sem="relaxed")
            if drawn == items - 1:
                gl.store(self.count + 1, 0)
            t = gl.num_programs(0) + drawn
        t = gl.where(t < items, t, -1)
        slot = i % SLOTS
        mbarrier.wait(self.empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.slots.index(slot).store(gl.full([1], t, gl.int32, layout))
        mbarrier.arrive(self.full.index(slot), count=1)
        return t

    @gluon.jit
    def take(self, i):
        """Consumer: the item that was passed on as the i-th."""
        slot = i % SLOTS
        mbarrier.wait(self.full.index(slot), (i // SLOTS) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        t = gl.sum(self.slots.index(slot).load(layout), 0)
        _barrier()  # one thread releases for all
        mbarrier.arrive(self.empty.index(slot), count=1)
        return uniform(t)


@gluon.jit
def new_queue(tiles, count, heads, CONSUMERS: gl.constexpr, FIXED: gl.constexpr):
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(tiles, count, heads, slots, new_barriers(SLOTS, 1), new_barriers(SLOTS, CONSUMERS), FIXED)
