"""Norms of the PFFN block that autocast runs (gemopt/ops/pffn_mixed.py): a and dlow in 16 bits, the rest in fp32.

    n = (q - mean) · rstd,   ln = n w + b,   g = a + ln,   m = g r,   r = 1/sqrt(mean g² + eps),   out = m u + q
    dm = dout u,   c = mean(dm m),   dg = (dm - m c) r,   dln = dlow + dg,   dn = dln w
    dq = (dn - mean dn - n mean(dn n)) · rstd + dout

Every kernel makes n, ln, g and m anew from a, q and the statistics of the row, in registers: none of them is stored.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemopt.kernels.triton.norms import launch_rows, row_tile, sum_columns, weight_row


class Rows(NamedTuple):
    """What g is made of: a `[T, H, D]`, q `[T, H, D]`, both contiguous, and stats fp32 `[2, T]` of `layer_norm`.

    norm: has rms_eps and, each fp32 `[H·D]` or None, weight, bias and rms_weight.
    """

    a: Tensor
    q: Tensor
    stats: Tensor
    norm: Any


@triton.jit
def _normed(
    a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, first, rows,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """n, g, q and rstd of some rows; 0 where there is no column."""
    r = first + tl.arange(0, ROWS)
    mean = tl.load(stats_ptr + r, mask=r < rows, other=0.0)
    rstd = tl.load(stats_ptr + rows + r, mask=r < rows, other=0.0)
    at, mask = row_tile(q_ptr, first, rows, N, BLOCK_N, ROWS)
    q = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = row_tile(a_ptr, first, rows, N, BLOCK_N, ROWS)
    g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    n = tl.where(mask, (q - mean[:, None]) * rstd[:, None], 0.0)
    if WEIGHT:
        g += n * weight_row(weight_ptr, N, BLOCK_N)
    else:
        g += n
    if BIAS:
        g += weight_row(bias_ptr, N, BLOCK_N)
    return n, g, q, rstd


@triton.jit
def mixed_rms_forward(
    a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, rms_weight_ptr, out_ptr, rows, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RMS_WEIGHT: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    _n, g, q, _rstd = _normed(
        a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, first, rows, WEIGHT, BIAS, N, BLOCK_N, ROWS
    )  # fmt: skip
    out = g / tl.sqrt(tl.sum(g * g, 1) / N + eps)[:, None]
    if RMS_WEIGHT:
        out = out * weight_row(rms_weight_ptr, N, BLOCK_N)
    at, mask = row_tile(out_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, out + q, mask=mask)


@triton.jit
def mixed_rms_backward(
    a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, rms_weight_ptr, dout_ptr, da_ptr, rms_stats_ptr, rows, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RMS_WEIGHT: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """da = dg, rounded; rms_stats fp32 `[2, T]`: r and c, of which `mixed_layer_norm_backward` makes dg anew."""
    first = tl.program_id(0) * ROWS
    _n, g, _q, _rstd = _normed(
        a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, first, rows, WEIGHT, BIAS, N, BLOCK_N, ROWS
    )  # fmt: skip
    at, mask = row_tile(dout_ptr, first, rows, N, BLOCK_N, ROWS)
    dm = tl.load(at, mask=mask, other=0.0)
    if RMS_WEIGHT:
        dm = dm * weight_row(rms_weight_ptr, N, BLOCK_N)
    r = 1.0 / tl.sqrt(tl.sum(g * g, 1) / N + eps)
    m = g * r[:, None]
    c = tl.sum(dm * m, 1) / N
    at, _ = row_tile(da_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, ((dm - m * c[:, None]) * r[:, None]).to(da_ptr.dtype.element_ty), mask=mask)
    row = first + tl.arange(0, ROWS)
    tl.store(rms_stats_ptr + row, r, mask=row < rows)
    tl.store(rms_stats_ptr + rows + row, c, mask=row < rows)


@triton.jit
def mixed_layer_norm_backward(
    a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, rms_weight_ptr, rms_stats_ptr, dout_ptr, dlow_ptr, dq_ptr, rows,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RMS_WEIGHT: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    n, g, _q, rstd = _normed(
        a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, first, rows, WEIGHT, BIAS, N, BLOCK_N, ROWS
    )  # fmt: skip
    row = first + tl.arange(0, ROWS)
    r = tl.load(rms_stats_ptr + row, mask=row < rows, other=0.0)[:, None]
    c = tl.load(rms_stats_ptr + rows + row, mask=row < rows, other=0.0)[:, None]
    at, mask = row_tile(dout_ptr, first, rows, N, BLOCK_N, ROWS)
    dout = tl.load(at, mask=mask, other=0.0)
    dm = dout
    if RMS_WEIGHT:
        dm = dm * weight_row(rms_weight_ptr, N, BLOCK_N)
    at, _ = row_tile(dlow_ptr, first, rows, N, BLOCK_N, ROWS)
    dn = tl.load(at, mask=mask, other=0.0).to(tl.float32) + (dm - g * (r * c)) * r
    if WEIGHT:
        dn = dn * weight_row(weight_ptr, N, BLOCK_N)
    dq = dn - (tl.sum(dn, 1) / N)[:, None] - n * (tl.sum(dn * n, 1) / N)[:, None]
    at, _ = row_tile(dq_ptr, first, rows, N, BLOCK_N, ROWS)
    tl.store(at, (dq * rstd[:, None] + dout).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mixed_column_sums(
    a_ptr, q_ptr, stats_ptr, weight_ptr, bias_ptr, rms_weight_ptr, rms_stats_ptr, dout_ptr, dlow_ptr, sums_ptr, rows, each,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RMS_WEIGHT: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """sums fp32 `[3, parts, N]`: of dln n, dln and dout m, over rows `part * each` and on. Grid (parts, column blocks)."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < N
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    rms_weight = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + c, mask=inside, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + c, mask=inside, other=0.0)
    if RMS_WEIGHT:
        rms_weight = tl.load(rms_weight_ptr + c, mask=inside, other=0.0)
    scaled = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    outer = tl.zeros((BLOCK,), tl.float32)
    begin = part.to(tl.int64) * each
    end = tl.minimum(begin + each, rows)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        at = row[:, None] * N + c[None, :]
        mean = tl.load(stats_ptr + row, mask=row < end, other=0.0)[:, None]
        rstd = tl.load(stats_ptr + rows + row, mask=row < end, other=0.0)[:, None]
        r = tl.load(rms_stats_ptr + row, mask=row < end, other=0.0)[:, None]
        rc = r * tl.load(rms_stats_ptr + rows + row, mask=row < end, other=0.0)[:, None]
        n = (tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
        g = a + n * weight[None, :] + bias[None, :]
        dout = tl.load(dout_ptr + at, mask=mask, other=0.0)
        dlow = tl.load(dlow_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dln = dlow + (dout * rms_weight[None, :] - g * rc) * r  # 0 beyond the end, where r is
        scaled += tl.sum(dln * n, 0)
        plain += tl.sum(dln, 0)
        outer += tl.sum(dout * g * r, 0)
    parts = tl.num_programs(0)
    to = sums_ptr + part.to(tl.int64) * N + c
    tl.store(to, scaled, mask=inside)
    tl.store(to + parts * N, plain, mask=inside)
    tl.store(to + 2 * parts * N, outer, mask=inside)


def _given(rows: Rows) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """The first arguments of every kernel, and which weights there are; q stands where there is none."""
    norm = rows.norm
    weights = {"WEIGHT": norm.weight, "BIAS": norm.bias, "RMS_WEIGHT": norm.rms_weight}
    pointers = (rows.q if w is None else w for w in weights.values())
    return (rows.a, rows.q, rows.stats, *pointers), {name: w is not None for name, w in weights.items()}


def rms_add(rows: Rows) -> Tensor:
    """out, fp32 `[T, H, D]`."""
    out = torch.empty(rows.q.shape, dtype=torch.float32, device=rows.q.device)
    count, (given, flags) = rows.q.shape[0], _given(rows)
    launch_rows(mixed_rms_forward, count, rows.q.shape[1:].numel(), *given, out, count, rows.norm.rms_eps, **flags)
    return out


def rms_gradient(rows: Rows, dout: Tensor) -> tuple[Tensor, Tensor]:
    """da in the dtype of a, and fp32 `[2, T]`: 1/sqrt(mean g² + eps) and mean(dm m). dout: contiguous, fp32."""
    count, (given, flags) = rows.q.shape[0], _given(rows)
    da, stats = torch.empty_like(rows.a), torch.empty_like(rows.stats)
    launch_rows(
        mixed_rms_backward, count, rows.q.shape[1:].numel(), *given, dout, da, stats, count, rows.norm.rms_eps, **flags
    )  # fmt: skip
    return da, stats


def layer_norm_gradient(
    rows: Rows, rms_stats: Tensor, dout: Tensor, dlow: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dq in the dtype of q, and fp32 `[H·D]`, the gradients of weight, bias and rms_weight where there are such.

    Args:
        rms_stats: of `rms_gradient`. dlow: what the attention gives for its queries, contiguous.
    """
    count, columns, (given, flags) = rows.q.shape[0], rows.q.shape[1:].numel(), _given(rows)
    dq = torch.empty_like(rows.q)
    given = (*given, rms_stats, dout, dlow)
    launch_rows(mixed_layer_norm_backward, count, columns, *given, dq, count, **flags)
    if not any(flags.values()):
        return dq, None, None, None
    sums = sum_columns(mixed_column_sums, 3, count, columns, *given, **flags)
    found = (x if there else None for x, there in zip(sums, flags.values(), strict=True))
    return dq, *found
