"""Row norms of the PFFN block in Triton, without elementwise weights; statistics in fp32.

    layer_norm:  y = (x - mean x) · rstd,   rstd = 1/sqrt(var x + eps)
    rms_add:     y = x / sqrt(mean x² + eps) + residual

Each reads its inputs once and writes its outputs once: the byte floor. A program owns a few rows of N columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 8192


@triton.jit
def _rows(base, first, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Pointers and mask of ROWS contiguous rows."""
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_N)
    mask = (r < rows)[:, None] & (c < N)[None, :]
    return base + r.to(tl.int64)[:, None] * N + c[None, :], mask


@triton.jit
def layer_norm_forward(x_ptr, y_ptr, rstd_ptr, rows, eps, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    at, mask = _rows(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - (tl.sum(x, 1) / N)[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / N + eps)
    out, _ = _rows(y_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(out, (centred * rstd[:, None]).to(y_ptr.dtype.element_ty), mask=mask)
    r = first + tl.arange(0, ROWS)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)


@triton.jit
def layer_norm_backward(
    y_ptr, rstd_ptr, dy_ptr, residual_ptr, dx_ptr, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):
    """dx = rstd (dy - mean dy - y mean(dy y)) + residual."""
    first = tl.program_id(0) * ROWS
    at, mask = _rows(y_ptr, first, rows, N, BLOCK_N, ROWS)
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = _rows(dy_ptr, first, rows, N, BLOCK_N, ROWS)
    dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = _rows(residual_ptr, first, rows, N, BLOCK_N, ROWS)
    residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    r = first + tl.arange(0, ROWS)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    dx = dy - (tl.sum(dy, 1) / N)[:, None] - y * (tl.sum(dy * y, 1) / N)[:, None]
    at, _ = _rows(dx_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, (dx * rstd[:, None] + residual).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_add_forward(x_ptr, residual_ptr, y_ptr, rows, eps, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    at, mask = _rows(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = _rows(residual_ptr, first, rows, N, BLOCK_N, ROWS)
    residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1) / N + eps)[:, None] + residual
    at, _ = _rows(y_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_backward(x_ptr, dy_ptr, dx_ptr, rows, eps, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """dx = r (dy - n mean(dy n)), n = x r, r = 1/sqrt(mean x² + eps)."""
    first = tl.program_id(0) * ROWS
    at, mask = _rows(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = _rows(dy_ptr, first, rows, N, BLOCK_N, ROWS)
    dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / N + eps)
    n = x * r[:, None]
    dx = (dy - n * (tl.sum(dy * n, 1) / N)[:, None]) * r[:, None]
    at, _ = _rows(dx_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _launch(kernel: triton.runtime.JITFunction, rows: int, columns: int, *arguments: object) -> None:
    block = triton.next_power_of_2(columns)
    at_once = max(1, 4096 // block)
    if rows:
        kernel[(triton.cdiv(rows, at_once),)](*arguments, N=columns, BLOCK_N=block, ROWS=at_once, num_warps=8)


def layer_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contiguous `[T, ...]`, normalised over all but the first axis; and rstd fp32 `[T]`."""
    y, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _launch(layer_norm_forward, x.shape[0], x[:1].numel(), x, y, rstd, x.shape[0], eps)
    return y, rstd


def layer_norm_gradient(y: Tensor, rstd: Tensor, dy: Tensor, residual: Tensor) -> Tensor:
    """Gradient of x plus `residual`; y and rstd are `layer_norm`'s."""
    dx = torch.empty_like(y)
    _launch(layer_norm_backward, y.shape[0], y[:1].numel(), y, rstd, dy, residual, dx, y.shape[0])
    return dx


def rms_add(x: Tensor, residual: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    _launch(rms_add_forward, x.shape[0], x[:1].numel(), x, residual, y, x.shape[0], eps)
    return y


def rms_gradient(x: Tensor, dy: Tensor, eps: float) -> Tensor:
    dx = torch.empty_like(x)
    _launch(rms_backward, x.shape[0], x[:1].numel(), x, dy, dx, x.shape[0], eps)
    return dx
