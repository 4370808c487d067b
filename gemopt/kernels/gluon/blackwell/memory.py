"""Tensor memory of the kernels for sm_100: what forward and backward do with it in the same way."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    fence_async_shared,
    get_tmem_reg_layout,
    tma,
)

from gemopt.kernels.gluon.parts import as_matrix, store_rows, zero_if_empty

M = gl.constexpr(128)  # rows of a tile: the lanes of tensor memory


@gluon.jit
def narrow(scores, dtype: gl.constexpr):
    """What replaces a tile of scores, 16 bits each, in the first half of its columns."""
    COLUMNS: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = TensorMemoryLayout((M, COLUMNS), 1)
    return scores._reinterpret(dtype, [M, 2 * COLUMNS], layout).slice(0, COLUMNS)


@gluon.jit
def store_columns(
    source, box, desc, start, length, x, column, factor, y_len, dtype: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """Columns FIRST to LAST of a result in tensor memory, times `factor`, by way of a box of shared memory.

    Zeros if nothing was streamed. The last store may still read the box: `tma.store_wait` before anything else goes there.
    """
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    layout: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, COLUMNS], TensorMemoryLayout((M, COLUMNS), 1), gl.num_warps())
    for c in gl.static_range(FIRST, LAST, COLUMNS):
        values = zero_if_empty(source.slice(c, COLUMNS).load(layout) * factor, y_len)
        tma.store_wait(0)  # the box has been read
        as_matrix(box).store(values.to(dtype))
        fence_async_shared()
        store_rows(desc, box, start, length, x, column + c)
