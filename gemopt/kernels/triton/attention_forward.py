"""Forward of jagged attention in Triton: online softmax over key tiles (Milakov & Gimelshein 2018; Dao et al. 2022).

For one query tile, over key tiles, in base 2 with c = scale / ln 2:

    S = c Q Kᵀ + bias / ln 2
    m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + drop(P) V

then out = O / l and lse = (m + log2 l) ln 2. A row that sees nothing ends with l = 0: out 0, lse -inf. With an activation
in place of the softmax it is O = O + drop(act(scale Q Kᵀ + bias)) V and out = post_scale O.
FLOPs 2·H·(D + Dv)·Σ q_i k_i (half under a causal mask); bytes: q, k, v, out once, k and v again for every query tile.
"""

import triton
import triton.language as tl

from gemopt.kernels.triton.activations import activate, code_of
from gemopt.kernels.triton.attention_tiles import (
    dropped,
    extent,
    key_range,
    load_rows,
    query_extent,
    row_positions,
    scores_of,
    store_rows,
)
from gemopt.kernels.triton.dropout import row_keys

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["parts", "step"])
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    out_stride,
    out_head_stride,
    score_scale,
    post_scale,
    threshold,
    multiplier,
    parts,
    step,
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
    SPLIT: tl.constexpr,
):
    """Grid (batch + 1, heads, query tiles). ACTS is 0 for a softmax; see `activations`.

    SPLIT: the first axis has a program for each of `parts` parts of `step` keys (a multiple of BLOCK_K; the last has what is
    left), whose outputs and log-sums `split.combine` puts together: then out and lse have `parts` as their first dim.
    """
    b, head = tl.program_id(0), tl.program_id(1)
    part = b * 0
    if SPLIT:
        part = b % parts
        b = b // parts
    q_start, q_len, q_first = query_extent(q_offsets_ptr, b, batch, q_rows, SHARED_Q)
    k_start, k_len = extent(k_offsets_ptr, b, batch, k_rows)
    if b == batch:
        k_len = 0
    q_base = q_ptr + head.to(tl.int64) * q_head_stride
    k_base = k_ptr + (head // sharing).to(tl.int64) * k_head_stride
    v_base = v_ptr + (head // sharing).to(tl.int64) * v_head_stride
    out_base = out_ptr + head.to(tl.int64) * out_head_stride
    bias_base = bias_ptr + b.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head
    mask_base = mask_ptr + b.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
    code = code_of(head, CODES, CODE_HEADS)
    out_start = q_start
    if SPLIT:
        rows_of_part = tl.full((), 0, tl.int64) + q_rows
        if SHARED_Q:
            rows_of_part = rows_of_part * batch
        out_start = q_start + part * rows_of_part
    shift = 0
    if BOTTOM_RIGHT:
        shift = k_len - q_len

    for tile in range(tl.program_id(2), tl.cdiv(q_len, BLOCK_Q), tl.num_programs(2)):
        rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q = load_rows(q_base, q_first, rows, q_len, q_stride, D, BLOCK_D)
        q_pos = row_positions(q_pos_ptr, q_first, rows, q_len, shift, HAS_Q_POS)
        if DROPOUT:
            word_a, word_b = row_keys(seed_ptr, head, q_start + rows)
        top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, BLOCK_DV), tl.float32)
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
        if SPLIT:
            low = tl.maximum(low, part * step)
            if part < parts - 1:
                high = tl.minimum(high, (part + 1) * step)
        for first in range(low, high, BLOCK_K):
            keys = first + tl.arange(0, BLOCK_K)
            k = load_rows(k_base, k_start, keys, k_len, k_stride, D, BLOCK_D)
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
            if ACTS == 0:
                scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1))
                # A row that has seen nothing yet keeps top = -inf; 0 stands in so that 2^(-inf - top) is 0, not NaN.
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                p = tl.exp2(scores - safe[:, None])
                decay = tl.exp2(top - safe)
                total = total * decay + tl.sum(p, 1)
                acc = acc * decay[:, None]
                top = new_top
            else:
                p = tl.where(seen, activate(scores, code, ACTS), 0.0)
            if DROPOUT:
                p = dropped(p, word_a[:, None], word_b[:, None], keys[None, :], threshold.to(tl.uint32), multiplier)
            v = load_rows(v_base, k_start, keys, k_len, v_stride, DV, BLOCK_DV)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        if ACTS == 0:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            lse = (top + tl.log2(total)) * LN2
            tl.store(lse_ptr + (out_start + rows) * heads + head, lse, mask=rows < q_len)
        else:
            acc = acc * post_scale
        store_rows(out_base, out_start, rows, q_len, out_stride, acc, DV, BLOCK_DV)
