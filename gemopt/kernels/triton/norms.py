"""Row norms of the PFFN block in Triton, with optional elementwise weights; statistics in fp32.

    layer_norm:  y = n w + b,   n = (x - mean x) · rstd,   rstd = 1/sqrt(var x + eps)
    rms_add:     y = n w + residual,   n = x / sqrt(mean x² + eps)

Each reads its inputs once and writes its outputs once: the byte floor. A program owns a few rows of N columns. Gradients of
weights are sums over rows, made in a second pass (`column_sums`): PARTS partial sums, then their sum, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 8192
PARTS = 264  # two programs for each multiprocessor of a large GPU


@triton.jit
def row_tile(base, first, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Pointers and mask of ROWS contiguous rows."""
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_N)
    mask = (r < rows)[:, None] & (c < N)[None, :]
    return base + r.to(tl.int64)[:, None] * N + c[None, :], mask


@triton.jit
def weight_row(ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    c = tl.arange(0, BLOCK_N)
    return tl.load(ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def layer_norm_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, rows, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """stats fp32 `[2, T]`: means, then rstd."""
    first = tl.program_id(0) * ROWS
    at, mask = row_tile(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / N + eps)
    y = centred * rstd[:, None]
    if WEIGHT:
        y = y * weight_row(weight_ptr, N, BLOCK_N)
    if BIAS:
        y = y + weight_row(bias_ptr, N, BLOCK_N)
    out, _ = row_tile(y_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)
    r = first + tl.arange(0, ROWS)
    tl.store(stats_ptr + r, mean, mask=r < rows)
    tl.store(stats_ptr + rows + r, rstd, mask=r < rows)


@triton.jit
def layer_norm_backward(
    x_ptr, stats_ptr, dy_ptr, residual_ptr, weight_ptr, dx_ptr, rows,
    NORMED: tl.constexpr, WEIGHT: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = rstd (dn - mean dn - n mean(dn n)) + residual, dn = dy w. x is n already if NORMED."""
    first = tl.program_id(0) * ROWS
    at, mask = row_tile(x_ptr, first, rows, N, BLOCK_N, ROWS)
    n = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = row_tile(dy_ptr, first, rows, N, BLOCK_N, ROWS)
    dn = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = row_tile(residual_ptr, first, rows, N, BLOCK_N, ROWS)
    residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    r = first + tl.arange(0, ROWS)
    rstd = tl.load(stats_ptr + rows + r, mask=r < rows, other=0.0)
    if not NORMED:
        mean = tl.load(stats_ptr + r, mask=r < rows, other=0.0)
        n = tl.where(mask, (n - mean[:, None]) * rstd[:, None], 0.0)
    if WEIGHT:
        dn = dn * weight_row(weight_ptr, N, BLOCK_N)
    dx = dn - (tl.sum(dn, 1) / N)[:, None] - n * (tl.sum(dn * n, 1) / N)[:, None]
    at, _ = row_tile(dx_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, (dx * rstd[:, None] + residual).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_add_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, rows, eps,
    WEIGHT: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    at, mask = row_tile(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = row_tile(residual_ptr, first, rows, N, BLOCK_N, ROWS)
    residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    if WEIGHT:
        y = y * weight_row(weight_ptr, N, BLOCK_N)
    at, _ = row_tile(y_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, (y + residual).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_backward(
    x_ptr, dy_ptr, weight_ptr, dx_ptr, stats_ptr, rows, eps,
    WEIGHT: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = r (dn - n mean(dn n)), dn = dy w, n = x r, r = 1/sqrt(mean x² + eps); stats, if WEIGHT: 0 and r."""
    first = tl.program_id(0) * ROWS
    at, mask = row_tile(x_ptr, first, rows, N, BLOCK_N, ROWS)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = row_tile(dy_ptr, first, rows, N, BLOCK_N, ROWS)
    dn = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / N + eps)
    n = x * r[:, None]
    if WEIGHT:
        dn = dn * weight_row(weight_ptr, N, BLOCK_N)
        row = first + tl.arange(0, ROWS)
        tl.store(stats_ptr + row, r * 0.0, mask=row < rows)
        tl.store(stats_ptr + rows + row, r, mask=row < rows)
    dx = (dn - n * (tl.sum(dn * n, 1) / N)[:, None]) * r[:, None]
    at, _ = row_tile(dx_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def column_sums(x_ptr, stats_ptr, dy_ptr, sums_ptr, rows, each, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """sums fp32 `[2, parts, N]`: of dy n and of dy, over rows `part * each` and on. Grid (parts, column blocks)."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    begin = part.to(tl.int64) * each
    end = tl.minimum(begin + each, rows)
    for first in range(begin, end, ROWS):
        r = first + tl.arange(0, ROWS)
        mask = (r < end)[:, None] & (c < N)[None, :]
        at = r[:, None] * N + c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + r, mask=r < end, other=0.0)
        rstd = tl.load(stats_ptr + rows + r, mask=r < end, other=0.0)
        scaled += tl.sum(dy * (x - mean[:, None]) * rstd[:, None], 0)
        plain += tl.sum(dy, 0)
    to = sums_ptr + part.to(tl.int64) * N + c
    tl.store(to, scaled, mask=c < N)
    tl.store(to + tl.num_programs(0) * N, plain, mask=c < N)


def launch_rows(kernel: triton.runtime.JITFunction, rows: int, columns: int, *arguments: object, **flags: bool) -> None:
    block = triton.next_power_of_2(columns)
    at_once = max(1, 4096 // block)
    if rows:
        kernel[(triton.cdiv(rows, at_once),)](*arguments, **flags, N=columns, BLOCK_N=block, ROWS=at_once, num_warps=8)


def sum_columns(
    kernel: triton.runtime.JITFunction, count: int, rows: int, columns: int, x: Tensor, *arguments: Tensor, **flags: bool
) -> Tensor:
    """fp32 `[count, N]`: what a kernel sums over rows, in parts `[count, parts, N]` that are added in a fixed order."""
    parts = max(1, min(PARTS, triton.cdiv(rows, 16)))
    sums = torch.empty((count, parts, columns), dtype=torch.float32, device=x.device)
    grid, each = (parts, triton.cdiv(columns, 256)), triton.cdiv(rows, parts)
    kernel[grid](x, *arguments, sums, rows, each, **flags, N=columns, BLOCK=256, ROWS=16, num_warps=8)
    return sums.sum(1)


def _sums(x: Tensor, stats: Tensor, dy: Tensor) -> Tensor:
    """fp32 `[2, N]`: Σ dy n and Σ dy over the rows of `[T, ...]`, n made of x and stats."""
    return sum_columns(column_sums, 2, x.shape[0], x.shape[1:].numel(), x, stats, dy)


def layer_norm(
    x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Contiguous `[T, ...]`, normalised over all but the first axis, in ``dtype`` or that of x; and its statistics fp32
    `[2, T]`, means and rstd."""
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    stats = torch.empty((2, x.shape[0]), dtype=torch.float32, device=x.device)
    flags = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    given = (x if weight is None else weight, x if bias is None else bias)
    launch_rows(layer_norm_forward, x.shape[0], x.shape[1:].numel(), x, *given, y, stats, x.shape[0], eps, **flags)
    return y, stats


def layer_norm_gradient(
    x: Tensor, stats: Tensor, dy: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of x plus `residual`, and of the weights. x is `layer_norm`'s result if it had no weights, else its input."""
    dx, plain = torch.empty_like(x), weight is None and bias is None
    flags = {"NORMED": plain, "WEIGHT": weight is not None}
    given = x if weight is None else weight
    launch_rows(
        layer_norm_backward, x.shape[0], x.shape[1:].numel(), x, stats, dy, residual, given, dx, x.shape[0], **flags
    )  # fmt: skip
    if plain:
        return dx, None, None
    scaled, summed = _sums(x, stats, dy)
    return dx, None if weight is None else scaled, None if bias is None else summed


def rms_add(x: Tensor, residual: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x)
    given = x if weight is None else weight
    launch_rows(
        rms_add_forward, x.shape[0], x.shape[1:].numel(), x, residual, given, y, x.shape[0], eps, WEIGHT=weight is not None
    )  # fmt: skip
    return y


def rms_gradient(x: Tensor, dy: Tensor, eps: float, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight."""
    dx, given = torch.empty_like(x), x if weight is None else weight
    stats = torch.empty((2, x.shape[0] if weight is not None else 0), dtype=torch.float32, device=x.device)
    launch_rows(
        rms_backward, x.shape[0], x.shape[1:].numel(), x, dy, given, dx, stats, x.shape[0], eps, WEIGHT=weight is not None
    )  # fmt: skip
    return dx, None if weight is None else _sums(x, stats, dy)[0]
