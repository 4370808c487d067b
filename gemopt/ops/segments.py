"""segment_sum: one sum per sequence.

    segment_sum(values, offsets, row_to_seq)[b] = sum of values[offsets[b] : offsets[b + 1]]

Accumulates half types in fp32, is deterministic, gives 0 for an empty sequence; the backward copies each sequence's
gradient to its rows, which is `pack` without distinctness: out[t] = grad[row_to_seq[t]], and zeros where that is B.
"""

from typing import Any

import torch
from torch import Tensor

from gemopt.kernels import rows
from gemopt.kernels import segments as kernel
from gemopt.ops.checks import check, check_index, check_same_device, check_tensor, same_size
from gemopt.ops.define import op


@op("segment_sum", "(Tensor values, Tensor offsets, Tensor row_to_seq) -> Tensor")
def _segment_sum(values: Tensor, offsets: Tensor, row_to_seq: Tensor) -> Tensor:
    check(
        values.shape[0] == row_to_seq.shape[0],
        lambda: f"segment_sum: values has {values.shape[0]} rows but row_to_seq has {row_to_seq.shape[0]}",
    )
    return kernel.segment_sum(values, offsets)


@_segment_sum.fake
def _(values: Tensor, offsets: Tensor, row_to_seq: Tensor) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, *values.shape[1:]))


@op("segment_spread", "(Tensor grad, Tensor offsets, Tensor row_to_seq) -> Tensor")
def _segment_spread(grad: Tensor, offsets: Tensor, row_to_seq: Tensor) -> Tensor:
    return rows.read(grad, row_to_seq)


@_segment_spread.fake
def _(grad: Tensor, offsets: Tensor, row_to_seq: Tensor) -> Tensor:
    return grad.new_empty((row_to_seq.shape[0], *grad.shape[1:]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _segment_spread(grad, *ctx.saved_tensors), None, None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _segment_sum(grad, *ctx.saved_tensors), None, None


_segment_sum.autograd(_sum_backward, _setup)
_segment_spread.autograd(_spread_backward, _setup)


def segment_sum(values: Tensor, offsets: Tensor, row_to_seq: Tensor) -> Tensor:
    """Sum of each sequence's rows, `[B, ...]`.

    Args:
        values: `[T, ...]`, floating.
        offsets: int32 or int64 `[B + 1]`, from 0, not decreasing, ending at T or before.
        row_to_seq: int64 `[T]`, the sequence of every row: `repeat_interleave(arange(B), diff(offsets))`, and B for the rows
            after the last offset, which count for nothing and have a gradient of zeros.
    Raises:
        ValueError, TypeError: wrong rank, size, dtype or device.
    """
    check_tensor("segment_sum", "values", values)
    check_index("segment_sum", "offsets", offsets)
    check_index("segment_sum", "row_to_seq", row_to_seq, (torch.int64,))
    check(values.dim() >= 1, "segment_sum: values must have at least one dim, got 0-D")
    check(values.dtype.is_floating_point, lambda: f"segment_sum: values must be floating, got {values.dtype}")
    check_same_device("segment_sum", "offsets", offsets, "values", values)
    check_same_device("segment_sum", "row_to_seq", row_to_seq, "values", values)
    check(
        type(offsets.shape[0]) is not int or offsets.shape[0] >= 1,
        "segment_sum: offsets must have at least one element, got 0",
    )
    check(
        same_size(values.shape[0], row_to_seq.shape[0]),
        lambda: f"segment_sum: values has {values.shape[0]} rows but row_to_seq has {row_to_seq.shape[0]}",
    )
    return _segment_sum(values, offsets, row_to_seq)


segment_sum.__module__ = "gemopt.ops"
