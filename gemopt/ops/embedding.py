"""embedding: `aten.embedding` on a CPU, with a gradient that is summed without atomics.

Compiled graphs get `aten.embedding` itself, which fuses with what reads it, and for the gradient

    dweight[n] = sum of grad[t] over index[t] == n, without the row padding_idx

an op of its own: inductor's has every thread add atomically to all rows, and the frequent ids of a batch make them wait for
each other (4,235 ids of 512, 64 features, two cores: 1.6 ms; this one, on one thread and in the order of rows, 0.15).
"""

from typing import Any

import torch
from torch import Tensor

from gemopt.ops.define import op


@op("embedding", "(Tensor weight, Tensor index, int padding_idx) -> Tensor", through=torch.ops.aten.embedding.default)
def _embedding(weight: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    return torch.ops.aten.embedding.default(weight, index, padding_idx)


@_embedding.fake
def _(weight: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty((*index.shape, weight.shape[1]))


@op("embedding_gradient", "(Tensor grad, Tensor index, SymInt rows, int padding_idx) -> Tensor")
def _gradient(grad: Tensor, index: Tensor, rows: int, padding_idx: int) -> Tensor:
    wide = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
    out = torch.zeros((rows, grad.shape[-1]), dtype=wide, device=grad.device)
    out.index_add_(0, index.reshape(-1), grad.reshape(index.numel(), grad.shape[-1]).to(wide))
    if padding_idx >= 0:
        out[padding_idx] = 0
    return out.to(grad.dtype)


@_gradient.fake
def _(grad: Tensor, index: Tensor, rows: int, padding_idx: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, index, ctx.padding_idx = inputs
    ctx.save_for_backward(index)
    ctx.rows = weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return _gradient(grad, index, ctx.rows, ctx.padding_idx), None, None


def _gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, _, ctx.padding_idx = inputs
    ctx.save_for_backward(index)


def _gradient_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (index,) = ctx.saved_tensors
    rows = grad[index]
    if ctx.padding_idx >= 0:
        rows = rows.masked_fill((index == ctx.padding_idx).unsqueeze(-1), 0)
    return rows, None, None, None


_embedding.autograd(_backward, _setup)
_gradient.autograd(_gradient_backward, _gradient_setup)


def embedding(weight: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    """`weight[index]`, `[*index.shape, D]`; weight `[N, D]`. The row `padding_idx` gets no gradient; -1: all rows do."""
    return _embedding(weight, index, padding_idx)  # type: ignore[no-any-return]
