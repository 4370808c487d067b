"""Backward of jagged attention in Triton: two kernels, so gradients of q, k, v are the same in every run.

With P = exp(S - lse), delta_i = dO_i · O_i and drop as in the forward:

    dV = drop(P)ᵀ dO     dS = P * (drop(dO Vᵀ) - delta)     dQ = scale dS K     dK = scale dSᵀ Q

and for an activation P = act(S), dS = act'(S) * drop(dO Vᵀ), with post_scale on all three gradients.

`attention_backward_kv` owns a key tile and walks over the queries that see it, for every query head that shares the key
head; it computes the transposed scores K Qᵀ directly, so no product is transposed in registers. `attention_backward_q`
owns a query tile and walks over its keys. Seven products in place of the forward's two. The bias, whose gradient is dS,
has a kernel of its own (`attention_backward_bias`); only where positions are given does `attention_backward_q` add dS to it
by atomics, in any order.
"""

import triton
import triton.language as tl

from gemopt.kernels.triton.activations import activate, code_of, derivative
from gemopt.kernels.triton.attention_tiles import (
    LOG2E,
    dropped,
    extent,
    key_range,
    load_rows,
    query_extent,
    query_range,
    row_positions,
    scores_of,
    store_rows,
    table_index,
)
from gemopt.kernels.triton.dropout import row_keys


@triton.jit
def attention_delta(
    out_ptr,
    dout_ptr,
    delta_ptr,
    rows,
    heads,
    out_stride,
    out_head_stride,
    dout_stride,
    dout_head_stride,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """delta `[Tq, H]` = rowsum(dO * O). Grid (row tiles, heads)."""
    head = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    out = load_rows(out_ptr + head * out_head_stride, 0, r, rows, out_stride, DV, BLOCK_DV).to(tl.float32)
    dout = load_rows(dout_ptr + head * dout_head_stride, 0, r, rows, dout_stride, DV, BLOCK_DV).to(tl.float32)
    tl.store(delta_ptr + r * heads + head, tl.sum(out * dout, 1), mask=r < rows)


@triton.jit
def load_lse(lse_ptr, start, rows, length, heads, head):
    """lse in base 2; 0 for rows that saw nothing, whose weights the mask makes 0."""
    lse = tl.load(lse_ptr + (start + rows) * heads + head, mask=rows < length, other=0.0) * LOG2E
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def attention_backward_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
):
    """Grid (batch + 1, key heads, key tiles)."""
    b, kv_head = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    q_start, q_len, q_first = query_extent(q_offsets_ptr, b, batch, q_rows, SHARED_Q)
    k_start, k_len = extent(k_offsets_ptr, b, batch, k_rows)
    if b == batch:
        q_len = 0
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride
    shift = 0
    if BOTTOM_RIGHT:
        shift = k_len - q_len

    for tile in range(tl.program_id(2), tl.cdiv(k_len, BLOCK_K), tl.num_programs(2)):
        keys = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        k = load_rows(k_base, k_start, keys, k_len, k_stride, D, BLOCK_D)
        v = load_rows(v_base, k_start, keys, k_len, v_stride, DV, BLOCK_DV)
        k_pos = row_positions(k_pos_ptr, k_start, keys, k_len, 0, HAS_K_POS)
        dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_K, BLOCK_DV), tl.float32)
        low, high = query_range(
            tile * BLOCK_K,
            tile * BLOCK_K + BLOCK_K - 1,
            shift,
            q_len,
            CAUSAL,
            LEFT,
            RIGHT,
            not (HAS_Q_POS or HAS_K_POS),
            BLOCK_Q,
        )
        tiles = tl.maximum(tl.cdiv(high - low, BLOCK_Q), 0)
        for step in range(tiles * sharing):  # all query tiles of the first sharing head, then the next head's
            head = kv_head * sharing + step // tiles
            first = low + (step % tiles) * BLOCK_Q
            rows = first + tl.arange(0, BLOCK_Q)
            q = load_rows(q_ptr + head.to(tl.int64) * q_head_stride, q_first, rows, q_len, q_stride, D, BLOCK_D)
            q_pos = row_positions(q_pos_ptr, q_first, rows, q_len, shift, HAS_Q_POS)
            bias_base = bias_ptr + b.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head
            mask_base = mask_ptr + b.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
            scores, seen = scores_of(
                tl.dot(k, tl.trans(q), input_precision=PRECISION),
                (rows[None, :] < q_len) & (keys[:, None] < k_len),
                q_pos[None, :],
                k_pos[:, None],
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
            dout = load_rows(
                dout_ptr + head.to(tl.int64) * dout_head_stride, q_start, rows, q_len, dout_stride, DV, BLOCK_DV
            )
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            code = code_of(head, CODES, CODE_HEADS)
            if ACTS == 0:
                lse = load_lse(lse_ptr, q_start, rows, q_len, heads, head)
                p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            else:
                p = tl.where(seen, activate(scores, code, ACTS), 0.0)
            weights = p
            if DROPOUT:
                word_a, word_b = row_keys(seed_ptr, head, q_start + rows)
                limit = threshold.to(tl.uint32)
                weights = dropped(p, word_a[None, :], word_b[None, :], keys[:, None], limit, multiplier)
                dp = dropped(dp, word_a[None, :], word_b[None, :], keys[:, None], limit, multiplier)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
            if ACTS == 0:
                delta = tl.load(delta_ptr + (q_start + rows) * heads + head, mask=rows < q_len, other=0.0)
                ds = p * (dp - delta[None, :])
            else:
                ds = tl.where(seen, dp * derivative(scores, code, ACTS), 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        dk = dk * grad_scale
        dv = dv * post_scale
        store_rows(dk_ptr + kv_head.to(tl.int64) * D, k_start, keys, k_len, kv_heads * D, dk, D, BLOCK_D)
        store_rows(dv_ptr + kv_head.to(tl.int64) * DV, k_start, keys, k_len, kv_heads * DV, dv, DV, BLOCK_DV)


@triton.jit
def attention_backward_q(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dbias_ptr,
    dbias_batch,
    dbias_head,
    dbias_row,
    dbias_col,
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
    ADD_DBIAS: tl.constexpr,
):
    """Grid (batch + 1, heads, query tiles). With ADD_DBIAS it adds dS to the fp32 gradient of the bias, atomically."""
    b, head = tl.program_id(0), tl.program_id(1)
    q_start, q_len, q_first = query_extent(q_offsets_ptr, b, batch, q_rows, SHARED_Q)
    k_start, k_len = extent(k_offsets_ptr, b, batch, k_rows)
    if b == batch:
        k_len = 0
    k_base = k_ptr + (head // sharing).to(tl.int64) * k_head_stride
    v_base = v_ptr + (head // sharing).to(tl.int64) * v_head_stride
    bias_base = bias_ptr + b.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head
    mask_base = mask_ptr + b.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
    dbias_base = dbias_ptr + b.to(tl.int64) * dbias_batch + head.to(tl.int64) * dbias_head
    code = code_of(head, CODES, CODE_HEADS)
    shift = 0
    if BOTTOM_RIGHT:
        shift = k_len - q_len

    for tile in range(tl.program_id(2), tl.cdiv(q_len, BLOCK_Q), tl.num_programs(2)):
        rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q = load_rows(q_ptr + head.to(tl.int64) * q_head_stride, q_first, rows, q_len, q_stride, D, BLOCK_D)
        dout = load_rows(dout_ptr + head.to(tl.int64) * dout_head_stride, q_start, rows, q_len, dout_stride, DV, BLOCK_DV)
        q_pos = row_positions(q_pos_ptr, q_first, rows, q_len, shift, HAS_Q_POS)
        if ACTS == 0:
            lse = load_lse(lse_ptr, q_start, rows, q_len, heads, head)
            delta = tl.load(delta_ptr + (q_start + rows) * heads + head, mask=rows < q_len, other=0.0)
        if DROPOUT:
            word_a, word_b = row_keys(seed_ptr, head, q_start + rows)
        dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        low, high = key_range(
            tile * BLOCK_Q,
            tile * BLOCK_Q + BLOCK_Q - 1,
            shift,
            q_len,
            k_len,
            CAUSAL,
            LEFT,
            RIGHT,
            not (HAS_Q_POS or HAS_K_POS),
            BLOCK_K,
        )
        for first in range(low, high, BLOCK_K):
            keys = first + tl.arange(0, BLOCK_K)
            k = load_rows(k_base, k_start, keys, k_len, k_stride, D, BLOCK_D)
            v = load_rows(v_base, k_start, keys, k_len, v_stride, DV, BLOCK_DV)
            k_pos = row_positions(k_pos_ptr, k_start, keys, k_len, 0, HAS_K_POS)
            scores, seen = scores_of(
                tl.dot(q, tl.trans(k), input_precision=PRECISION),
                keys[None, :] < k_len,
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
                dp = dropped(dp, word_a[:, None], word_b[:, None], keys[None, :], threshold.to(tl.uint32), multiplier)
            if ACTS == 0:
                ds = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0) * (dp - delta[:, None])
            else:
                ds = tl.where(seen, dp * derivative(scores, code, ACTS), 0.0)
            if ADD_DBIAS:
                i = table_index(q_pos - shift, bias_rows, dbias_row)[:, None]
                j = table_index(k_pos, bias_cols, dbias_col)[None, :]
                inside = seen & (rows[:, None] < q_len) & (i >= 0) & (j >= 0)
                tl.atomic_add(dbias_base + (i + j), ds * post_scale, mask=inside)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        dq = dq * grad_scale
        store_rows(dq_ptr + head.to(tl.int64) * D, q_start, rows, q_len, heads * D, dq, D, BLOCK_D)
