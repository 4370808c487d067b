"""Where the fused backward puts dQ, tile by tile: sums in global memory, made by TMA (the forms are described in fused.py)."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from gemopt.kernels.gluon.parts import ROWS, as_matrix, load_rows, store_rows


@builtin
def _reduce_add(desc, coordinates, source, _semantic=None):
    """TMA addition of a shared-memory box to global memory; the compiler has it, Gluon does not export it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle)


@aggregate
class Sum:
    """Where dQ goes: `total` is the fp32 sum, or (OWN_SUMS) those of all programs, each of which adds in order.

    `final` (in dQ's dtype) and `base` (dO, if ADD) are for OWNER alone.
    """

    total: tma.tensor_descriptor
    final: tma.tensor_descriptor
    base: tma.tensor_descriptor
    stage: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
    OWNER: gl.constexpr
    ADD: gl.constexpr
    OWN_SUMS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, total, final, base, stage, loaded, OWNER, ADD, OWN_SUMS):
        self.total = total
        self.final = final
        self.base = base
        self.stage = stage
        self.loaded = loaded
        self.OWNER = gl.constexpr(OWNER)
        self.ADD = gl.constexpr(ADD)
        self.OWN_SUMS = gl.constexpr(OWN_SUMS)

    @gluon.jit
    def wide(self, part: gl.constexpr):
        return self.stage.index(part)

    @gluon.jit
    def narrow(self, part: gl.constexpr):
        """The same memory as a box of `final`."""
        return self.stage.index(part)._reinterpret(self.final.dtype, self.final.block_type.shape, self.final.layout)

    @gluon.jit
    def fetch(self, part: gl.constexpr, first, last, start, length, row, column):
        """Start loading what the next `put` adds to, if anything. Returns how many loads that makes."""
        loads = 0
        if self.OWNER:
            bar = self.loaded.index(part)
            if last and not first:
                tma.store_wait(0)
                mbarrier.expect(bar, self.total.block_type.nbytes)
                load_rows(self.total, self.wide(part), bar, start, length, row, column)
                loads = 1
            if self.ADD:
                if first:
                    tma.store_wait(0)
                    mbarrier.expect(bar, self.base.block_type.nbytes)
                    load_rows(self.base, self.narrow(part), bar, start, length, row, column)
                    loads = 1
        return loads

    @gluon.jit
    def put(self, part: gl.constexpr, dq, first, last, loads, start, length, row, column):
        """dQ_tile at rows `row` and on; `loads` counts all of this warpgroup's `fetch`, this one's included."""
        if self.OWN_SUMS:
            row = settle(row)  # the last addition has ended, which fixes its place in the order
        tma.store_wait(0)  # the box has been read
        if self.OWNER:
            bar = self.loaded.index(part)
            if last and not first:
                mbarrier.wait(bar, (loads - 1) & 1)
                dq = dq + as_matrix(self.wide(part)).load(dq.type.layout)
            if self.ADD:
                if first:
                    mbarrier.wait(bar, (loads - 1) & 1)
                    dq = dq + as_matrix(self.narrow(part)).load(dq.type.layout).to(gl.float32)
            if last:
                as_matrix(self.narrow(part)).store(dq.to(self.final.dtype))
                fence_async_shared()
                store_rows(self.final, self.narrow(part), start, length, row, column)
            else:
                as_matrix(self.wide(part)).store(dq)
                fence_async_shared()
                if first:
                    store_rows(self.total, self.wide(part), start, length, row, column)
                else:
                    _reduce_add(self.total, [ROWS, start + length, ROWS - length + row, column], self.wide(part))
        else:
            as_matrix(self.wide(part)).store(dq)
            fence_async_shared()
            _reduce_add(self.total, [ROWS, start + length, ROWS - length + row, column], self.wide(part))

    @gluon.jit
    def blank(self, part: gl.constexpr, loads, start, length, heads, column, width, layout: gl.constexpr):
        """dQ of `length` rows that see no key: dO if ADD, else 0. Returns how many loads that made."""
        rows: gl.constexpr = self.final.block_type.shape[2]
        columns: gl.constexpr = self.final.block_type.shape[3]
        box = self.narrow(part)
        tma.store_wait(0)
        if not self.ADD:
            as_matrix(box).store(gl.zeros([rows, columns], self.final.dtype, layout))
            fence_async_shared()
        n = (length + rows - 1) // rows
        for i in range(n * heads):
            row = (i % n) * rows
            at = column + (i // n) * width
            if self.ADD:
                tma.store_wait(0)
                bar = self.loaded.index(part)
                mbarrier.expect(bar, self.base.block_type.nbytes)
                load_rows(self.base, box, bar, start, length, row, at)
                mbarrier.wait(bar, (loads + i) & 1)
                fence_async_shared()
            store_rows(self.final, box, start, length, row, at)
        return n * heads if self.ADD else n * 0


@gluon.jit
def settle(x):
    """Wait until this thread's bulk stores and additions are in global memory, where its next loads find them. Gives x."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
