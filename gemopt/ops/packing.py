"""pack and unpack: move rows between the padded and the packed layout.

    pack(x, index)[t]            = x[index[t]]
    unpack(values, index, n)[i]  = values[t] if index[t] == i else fill

`index` holds distinct rows in ascending order, so the two are inverse on those rows and each is the other's backward:
no atomics, deterministic, one read and one write per element. Both are differentiable any number of times.

After its rows an index may name *no row*, as the number of padded rows, any number of times: `pack` repeats its first row
there (zeros if it has none), nothing is unpacked from it, and its gradient is zeros. So a packed tensor may have more rows
than there are (graph/spare.py).
"""

import math
from typing import Any

import torch
from torch import Tensor

from gemopt.kernels import rows as kernel
from gemopt.ops.checks import check, check_index, check_same_device, check_tensor, same_size
from gemopt.ops.define import op


@op("pack", "(Tensor x, Tensor index, bool repeat) -> Tensor")
def _pack(x: Tensor, index: Tensor, repeat: bool) -> Tensor:
    return kernel.read(x, index, repeat)


@_pack.fake
def _(x: Tensor, index: Tensor, repeat: bool) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


@op("unpack", "(Tensor values, Tensor index, SymInt rows, float fill) -> Tensor")
def _unpack(values: Tensor, index: Tensor, rows: int, fill: float) -> Tensor:
    check(
        values.shape[0] == index.shape[0],
        lambda: f"unpack: values has {values.shape[0]} rows but index has {index.shape[0]}",
    )
    return kernel.write(values, index, rows, fill)


@_unpack.fake
def _(values: Tensor, index: Tensor, rows: int, fill: float) -> Tensor:
    return values.new_empty((rows, *values.shape[1:]))


def _pack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, _ = inputs
    ctx.save_for_backward(index)
    ctx.rows = x.shape[0]


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return _unpack(grad, index, ctx.rows, 0.0), None, None


def _unpack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (index,) = ctx.saved_tensors
    return _pack(grad, index, False), None, None, None


_pack.autograd(_pack_backward, _pack_setup)
_unpack.autograd(_unpack_backward, _unpack_setup)


def pack(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` that `index` names, `[T, ...]`.

    Args:
        x: `[N, ...]`, any dtype.
        index: int64 `[T]`, distinct, ascending, in `[0, N)`; then N any number of times, for copies of the first row
            that have no gradient.
    Raises:
        ValueError, TypeError: wrong rank, dtype or device.
    """
    check_tensor("pack", "x", x)
    check_index("pack", "index", index, (torch.int64,))
    check(x.dim() >= 1, "pack: x must have at least one dim, got 0-D")
    check_same_device("pack", "index", index, "x", x)
    return _pack(x, index, True)


def unpack(values: Tensor, index: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """`[rows, ...]` with `values[t]` at row `index[t]` and `fill` in every other row.

    Args:
        values: `[T, ...]`, any dtype.
        index: int64 `[T]`, distinct, ascending, in `[0, rows)`; then `rows` any number of times, for values to leave out.
        rows: number of rows of the result; may be symbolic.
        fill: value of the other rows; finite unless `values` is floating.
    Raises:
        ValueError, TypeError: wrong rank, size, dtype or device.
    """
    check_tensor("unpack", "values", values)
    check_index("unpack", "index", index, (torch.int64,))
    check(values.dim() >= 1, "unpack: values must have at least one dim, got 0-D")
    check_same_device("unpack", "index", index, "values", values)
    check(
        same_size(values.shape[0], index.shape[0]),
        lambda: f"unpack: values has {values.shape[0]} rows but index has {index.shape[0]}",
    )
    check(type(rows) is not int or rows >= 0, lambda: f"unpack: rows must be at least 0, got {rows}")
    check(
        values.dtype.is_floating_point or values.dtype.is_complex or math.isfinite(fill),
        lambda: f"unpack: fill must be finite for {values.dtype}, got {fill}",
    )
    return _unpack(values, index, rows, float(fill))


for _public in (pack, unpack):
    _public.__module__ = "gemopt.ops"  # where users and printed graphs find them
