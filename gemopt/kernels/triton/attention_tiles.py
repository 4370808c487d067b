"""What the jagged attention kernels share: where a sequence lies, what a tile sees, how rows are loaded.

A program works on one sequence, one head and one tile of rows, and strides over further tiles when a sequence is longer
than the launch expected. Sequence number B stands for the rows after the last offset: it has no keys (or queries), so
the same code fills its outputs with zeros. Row numbers are int64 before they meet a stride.
"""

import triton
import triton.language as tl

from gemopt.kernels.triton.dropout import keep_mask

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def extent(offsets_ptr, b, batch, rows):
    """First row and length of sequence `b`; the rows after the last offset if `b == batch`."""
    start = tl.load(offsets_ptr + b).to(tl.int64)
    end = rows.to(tl.int64)
    if b < batch:
        end = tl.load(offsets_ptr + b + 1).to(tl.int64)
    return start, (end - start).to(tl.int32)


@triton.jit
def query_extent(offsets_ptr, b, batch, rows, SHARED: tl.constexpr):
    """`extent` of the queries of sequence `b` among the rows of the output, and their first row in q.

    SHARED: the `rows` queries serve every sequence; then there are no rows after the last sequence's.
    """
    if SHARED:
        wide = tl.full((), 0, tl.int64)  # makes an index 64 bits wide, be it a number or a tensor
        length = tl.where(wide + b == batch, 0, wide + rows).to(tl.int32)
        return (wide + rows) * b, length, wide
    else:
        start, length = extent(offsets_ptr, b, batch, rows)
        return start, length, start


@triton.jit
def load_rows(base_ptr, start, rows, length, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[rows, BLOCK_D]` of one head; zeros past the sequence and past D."""
    cols = tl.arange(0, BLOCK_D)
    mask = rows[:, None] < length
    if D != BLOCK_D:
        mask = mask & (cols[None, :] < D)
    return tl.load(base_ptr + (start + rows)[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base_ptr, start, rows, length, stride, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    mask = rows[:, None] < length
    if D != BLOCK_D:
        mask = mask & (cols[None, :] < D)
    tl.store(base_ptr + (start + rows)[:, None] * stride + cols[None, :], values.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_positions(pos_ptr, start, rows, length, shift, HAS_POS: tl.constexpr):
    """Position of each row: loaded, or its number plus `shift`."""
    if HAS_POS:
        return tl.load(pos_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)
    else:
        return (rows + shift).to(tl.int64)


@triton.jit
def visible(q_pos, k_pos, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which of the broadcast positions see each other; call only if CAUSAL or a side of the window is limited."""
    seen = q_pos == q_pos
    if CAUSAL:
        seen = k_pos <= q_pos
    if LEFT >= 0:
        seen = seen & (k_pos >= q_pos - LEFT)
    if RIGHT >= 0:
        seen = seen & (k_pos <= q_pos + RIGHT)
    return seen


@triton.jit
def key_range(
    first_q,
    last_q,
    shift,
    q_len,
    k_len,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Keys `[low, high)` that the queries `first_q ..= last_q` can see; `low` is the start of a tile."""
    low = 0
    high = k_len
    if BY_ROW:
        top = tl.minimum(last_q, q_len - 1) + shift
        if CAUSAL:
            high = tl.minimum(high, top + 1)
        if RIGHT >= 0:
            high = tl.minimum(high, top + RIGHT + 1)
        if LEFT >= 0:
            low = tl.maximum(first_q + shift - LEFT, 0) // BLOCK_K * BLOCK_K
    return low, high


@triton.jit
def query_range(
    first_k,
    last_k,
    shift,
    q_len,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Queries `[low, high)` that can see the keys `first_k ..= last_k`; `low` is the start of a tile."""
    low = 0
    high = q_len
    if BY_ROW:
        if CAUSAL:
            low = tl.maximum(first_k - shift, 0)
        if RIGHT >= 0:
            low = tl.maximum(low, first_k - shift - RIGHT)
        if LEFT >= 0:
            high = tl.minimum(high, last_k - shift + LEFT + 1)
        low = low // BLOCK_Q * BLOCK_Q
    return low, high


@triton.jit
def dropped(values, a, b, k_rows, threshold, multiplier):
    """Dropout of `values`: zero, or times 1 / (1 - p)."""
    return tl.where(keep_mask(a, b, k_rows, threshold), values * multiplier, 0.0)


@triton.jit
def table_index(positions, size, stride):
    """Element offsets of positions along one axis of a bias or mask, int32; -1 outside of it."""
    return tl.where((positions >= 0) & (positions < size), positions * stride, -1).to(tl.int32)


@triton.jit
def read_table(base_ptr, q_pos, k_pos, row_stride, col_stride, rows, cols, wanted):
    """Elements of one sequence's and head's bias or mask at broadcast positions; 0 outside of it and where not wanted."""
    i, j = table_index(q_pos, rows, row_stride), table_index(k_pos, cols, col_stride)
    return tl.load(base_ptr + (i + j), mask=wanted & (i >= 0) & (j >= 0), other=0)


@triton.jit
def scores_of(
    products,
    seen,
    q_pos,
    k_pos,
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
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """Scores (in base 2 for a softmax) from the products of queries and keys, and which of them are visible.

    Positions broadcast against `products`, in either orientation. Those of queries carry `shift`, which bias and mask do
    not: it is 0 where positions are given.
    """
    if CAUSAL or LEFT >= 0 or RIGHT >= 0:
        seen = seen & visible(q_pos, k_pos, CAUSAL, LEFT, RIGHT)
    if HAS_MASK:
        seen = seen & (read_table(mask_base, q_pos - shift, k_pos, mask_row, mask_col, mask_rows, mask_cols, seen) != 0)
    scores = products * score_scale
    if HAS_BIAS:
        bias = read_table(bias_base, q_pos - shift, k_pos, bias_row, bias_col, bias_rows, bias_cols, seen).to(tl.float32)
        if SOFTMAX:
            bias = bias * LOG2E
        scores += bias
    return scores, seen
