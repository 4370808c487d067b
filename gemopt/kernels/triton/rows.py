"""Rows read and written by number on a GPU (see gemopt/kernels/rows.py): one pass, a tile of rows and columns a program."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program
COLUMNS = 1024


@triton.jit
def _read_rows(
    x_ptr, index_ptr, out_ptr, rows, count, width, x_stride, ROWS: tl.constexpr, COLS: tl.constexpr, REPEAT: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(index_ptr + t, mask=t < count, other=0)
    if REPEAT:
        row = tl.where(row < rows, row, tl.load(index_ptr))
    inside = (t < count)[:, None] & (c < width)[None, :]
    there = inside & ((row >= 0) & (row < rows))[:, None]
    values = tl.load(x_ptr + row[:, None] * x_stride + c[None, :], mask=there, other=0)
    tl.store(out_ptr + t[:, None] * width + c[None, :], values, mask=inside)


@triton.jit
def _write_rows(values_ptr, index_ptr, out_ptr, rows, count, width, v_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(index_ptr + t, mask=t < count, other=rows)
    inside = ((row >= 0) & (row < rows))[:, None] & (c < width)[None, :]
    values = tl.load(values_ptr + t[:, None] * v_stride + c[None, :], mask=inside, other=0)
    tl.store(out_ptr + row[:, None].to(tl.int64) * width + c[None, :], values, mask=inside)


def read(x: Tensor, index: Tensor, repeat: bool) -> Tensor:
    """`x[index]` with zeros (repeat: the row `index[0]`) where index is `x.shape[0]`; x `[N, ...]`, index int64 `[T]`."""
    out = x.new_empty((index.shape[0], *x.shape[1:]))
    if out.numel():
        _launch(_read_rows, _flat(x), index, out, x.shape[0], REPEAT=repeat)
    return out


def write_into(out: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """`out[index] = values`, without the values whose index is `out.shape[0]`; out is contiguous."""
    if values.numel() and out.numel():
        _launch(_write_rows, _flat(values), index, out, out.shape[0])
    return out


def _flat(x: Tensor) -> Tensor:
    """`[rows, width]` with features side by side."""
    width = x[:1].numel() if x.shape[0] else 1
    return x.reshape(x.shape[0], width)


def _launch(kernel, source: Tensor, index: Tensor, out: Tensor, rows: int, **options: bool) -> None:
    source = source if source.stride(1) == 1 else source.contiguous()
    count, width = index.shape[0], source.shape[1]
    columns = min(triton.next_power_of_2(width), COLUMNS)
    tile = TILE // columns
    grid = (triton.cdiv(count, tile), triton.cdiv(width, columns))
    stride = source.stride(0)
    kernel[grid](
        source, index.contiguous(), out, rows, count, width, stride, ROWS=tile, COLS=columns, num_warps=4, **options
    )
