"""Gradient of the bias of jagged attention in Triton, without atomics, where its positions are row numbers.

dbias[b, h, i, j] = dS of query i and key j, summed over the axes in which the bias has size 1. A program owns one tile of
one slice of the bias and walks over everything that reads it: sequences (a share of them, `parts`), heads, and query or key
tiles if the bias has one row or column. It recomputes S and dO Vᵀ as `attention_backward_q` does: two products more. The
parts are summed afterwards; everything happens in one fixed order.
"""

import triton
import triton.language as tl

from gemopt.kernels.triton.activations import code_of, derivative
from gemopt.kernels.triton.attention_backward import load_lse
from gemopt.kernels.triton.attention_tiles import (
    dropped,
    extent,
    key_range,
    load_rows,
    query_extent,
    row_positions,
    scores_of,
)
from gemopt.kernels.triton.dropout import row_keys


@triton.jit
def attention_backward_bias(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dbias_ptr,
    tiles,
    key_tiles,
    parts,
    q_offsets_ptr,
    k_offsets_ptr,
    q_pos_ptr,
    k_pos_ptr,
    seed_ptr,
    bias_ptr,
    bias_batch,
    bias_head,
    bias_row,
    bias_col,
    bias_rows,
    bias_cols,
    mask_ptr,
    mask_batch,
    mask_head,
    mask_row,
    mask_col,
    mask_rows,
    mask_cols,
    q_rows,
    k_rows,
    batch,
    heads,
    sharing,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    grad_scale,
    score_scale,
    post_scale,
    threshold,
    multiplier,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_Q_POS: tl.constexpr,
    HAS_K_POS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ACTS: tl.constexpr,
    CODES: tl.constexpr,
    CODE_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARED_Q: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ONE_COL: tl.constexpr,
    ALL_HEADS: tl.constexpr,
):
    """Grid (parts x query tiles x key tiles, heads of the bias); dbias fp32 `[parts, heads of the bias, rows, cols]`, dense.

    Part p serves the sequences p, p + parts, ...: one each where every sequence has a bias of its own.
    """
    part, own_head = tl.program_id(0) // tiles, tl.program_id(1)
    own_q, own_k = tl.program_id(0) % tiles // key_tiles, tl.program_id(0) % tiles % key_tiles
    size_q, size_k = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    wide = tl.full((), 0, tl.int64)  # makes an index 64 bits wide, be it a number or a tensor
    head_count = 1
    if ALL_HEADS:
        head_count = heads
    for b in range(part, batch, parts):
        q_start, q_len, q_first = query_extent(q_offsets_ptr, b, batch, q_rows, SHARED_Q)
        k_start, k_len = extent(k_offsets_ptr, b, batch, k_rows)
        shift = 0
        if BOTTOM_RIGHT:
            shift = k_len - q_len
        first_q, end_q = own_q * BLOCK_Q, tl.minimum(own_q * BLOCK_Q + BLOCK_Q, q_len)
        if ONE_ROW:
            first_q, end_q = 0, q_len
        for q_from in range(first_q, end_q, BLOCK_Q):
            rows = q_from + size_q
            q_pos = row_positions(q_pos_ptr, q_first, rows, q_len, shift, False)
            low, high = key_range(q_from, q_from + BLOCK_Q - 1, shift, q_len, k_len, CAUSAL, LEFT, RIGHT, True, BLOCK_K)
            if not ONE_COL:
                low, high = tl.maximum(low, own_k * BLOCK_K), tl.minimum(high, own_k * BLOCK_K + BLOCK_K)
            for k_from in range(low, high, BLOCK_K):
                keys = k_from + size_k
                k_pos = row_positions(k_pos_ptr, k_start, keys, k_len, 0, False)
                for step in range(head_count):
                    head = wide + own_head + step
                    kv_head = head // sharing
                    q = load_rows(q_ptr + head * q_head_stride, q_first, rows, q_len, q_stride, D, BLOCK_D)
                    k = load_rows(k_ptr + kv_head * k_head_stride, k_start, keys, k_len, k_stride, D, BLOCK_D)
                    v = load_rows(v_ptr + kv_head * v_head_stride, k_start, keys, k_len, v_stride, DV, BLOCK_DV)
                    dout = load_rows(dout_ptr + head * dout_head_stride, q_start, rows, q_len, dout_stride, DV, BLOCK_DV)
                    bias_base = bias_ptr + (wide + b) * bias_batch + head * bias_head
                    mask_base = mask_ptr + (wide + b) * mask_batch + head * mask_head
                    scores, seen = scores_of(
                        tl.dot(q, tl.trans(k), input_precision=PRECISION),
                        (rows[:, None] < q_len) & (keys[None, :] < k_len),
                        q_pos[:, None],
                        k_pos[None, :],
                        shift,
                        score_scale,
                        bias_base,
                        bias_row,
                        bias_col,
                        bias_rows,
                        bias_cols,
                        mask_base,
                        mask_row,
                        mask_col,
                        mask_rows,
                        mask_cols,
                        CAUSAL,
                        LEFT,
                        RIGHT,
                        HAS_BIAS,
                        HAS_MASK,
                        ACTS == 0,
                    )
                    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                    if DROPOUT:
                        a, c = row_keys(seed_ptr, head, q_start + rows)
                        dp = dropped(dp, a[:, None], c[:, None], keys[None, :], threshold.to(tl.uint32), multiplier)
                    if ACTS == 0:
                        lse = load_lse(lse_ptr, q_start, rows, q_len, heads, head)
                        delta = tl.load(delta_ptr + (q_start + rows) * heads + head, mask=rows < q_len, other=0.0)
                        acc += tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0) * (dp - delta[:, None])
                    else:
                        code = code_of(head, CODES, CODE_HEADS)
                        acc += tl.where(seen, dp * derivative(scores, code, ACTS), 0.0)
    acc = acc * post_scale
    rows, cols = own_q * BLOCK_Q + size_q, own_k * BLOCK_K + size_k
    dbias_rows, dbias_cols = bias_rows, bias_cols
    if ONE_ROW:
        acc = tl.where(size_q[:, None] == 0, tl.sum(acc, 0)[None, :], 0.0)
        dbias_rows = 1
    if ONE_COL:
        acc = tl.where(size_k[None, :] == 0, tl.sum(acc, 1)[:, None], 0.0)
        dbias_cols = 1
    slot = (part.to(tl.int64) * tl.num_programs(1) + own_head) * dbias_rows + rows
    inside = (rows[:, None] < dbias_rows) & (cols[None, :] < dbias_cols)
    tl.store(dbias_ptr + slot[:, None] * dbias_cols + cols[None, :], acc, mask=inside)
