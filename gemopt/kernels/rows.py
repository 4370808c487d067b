"""Rows read and written by number. A number that is the size of the padded tensor names no row: zeros are read, or the first
row once more, and nothing is written. Numbers ascend, so that those come last.

Bytes: every row that there is once in and once out, and the rows that are written by nobody once out.
"""

import torch
from torch import Tensor

from gemopt.kernels.tiers import use_triton


def read(x: Tensor, index: Tensor, repeat: bool = False) -> Tensor:
    """`x[index]`, `[T, ...]`, for x `[N, ...]` and index int64 `[T]` in `[0, N]`, ascending.

    repeat: the row `index[0]`, if it is one, stands where none is named.
    """
    if _by_kernel(x):
        from gemopt.kernels.triton import rows as portable

        return portable.read(x, index, repeat)
    there = _named(index, x.shape[0])
    if there == index.shape[0]:
        return x.index_select(0, index)
    if there and repeat:
        return x.index_select(0, torch.where(index < x.shape[0], index, index[0]))
    out = x.new_zeros((index.shape[0], *x.shape[1:]))
    if there:
        torch.index_select(x, 0, index[:there], out=out[:there])
    return out


def write(values: Tensor, index: Tensor, rows: int, fill: float) -> Tensor:
    """`[rows, ...]` with `values[t]` at `index[t]`, `fill` elsewhere; index int64 `[T]` in `[0, rows]`, ascending."""
    out = values.new_full((rows, *values.shape[1:]), fill)
    if _by_kernel(values):
        from gemopt.kernels.triton import rows as portable

        return portable.write_into(out, values, index)
    there = _named(index, rows)
    if there:
        out.index_copy_(0, index[:there], values[:there])
    return out


def _by_kernel(x: Tensor) -> bool:
    return use_triton(x) and not x.is_complex()


def _named(index: Tensor, rows: int) -> int:
    """How many numbers name a row. Raises: IndexError, the last is larger than it may be."""
    last = int(index[-1]) if index.shape[0] else -1
    if last > rows:
        raise IndexError(f"index: got {last}; allowed: numbers up to {rows}, the number of rows")
    if last < rows:
        return index.shape[0]
    return int(torch.searchsorted(index, rows))
