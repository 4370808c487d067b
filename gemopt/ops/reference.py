"""What the ops mean, written from their formulas: one sequence at a time, dense masks, autograd for gradients.

Used by tests as the independent oracle, in fp64; shares nothing with the kernels but the dropout generator.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from gemopt.ops.dropout import keep_mask, row_keys


def pack(x: Tensor, index: Tensor) -> Tensor:
    return torch.stack([x[i] for i in index.tolist()]) if len(index) else x[:0]


def unpack(values: Tensor, index: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    where = {i: t for t, i in enumerate(index.tolist())}
    filler = torch.full(values.shape[1:], fill, dtype=values.dtype)
    if rows == 0:
        return values[:0]
    return torch.stack([values[where[i]] if i in where else filler for i in range(rows)])


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    bounds = offsets.tolist()
    sums = [values[a:b].sum(0) for a, b in pairwise(bounds)]
    return torch.stack(sums) if sums else values.new_zeros((0, *values.shape[1:]))


def visible(
    lq: int, lk: int, causal: bool, causal_align: str, window: tuple[int, int], q_pos: Tensor | None, k_pos: Tensor | None
) -> Tensor:
    """bool `[lq, lk]`: which key each query of one sequence sees."""
    shift = lk - lq if causal_align == "bottom_right" else 0
    rows = [i + shift for i in range(lq)] if q_pos is None else q_pos.tolist()
    cols = list(range(lk)) if k_pos is None else k_pos.tolist()
    left, right = window

    def sees(i: int, j: int) -> bool:
        return (not causal or j <= i) and (left < 0 or j >= i - left) and (right < 0 or j <= i + right)

    return torch.tensor([[sees(i, j) for j in cols] for i in rows], dtype=torch.bool).view(lq, lk)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int = 0,
    max_k: int = 0,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """As `gemopt.ops.jagged_attention`, for CPU tensors, differentiable to any order."""
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    qo, ko = q_offsets.tolist(), k_offsets.tolist()
    outs = []
    for b in range(len(qo) - 1):
        qs, ks = slice(qo[b], qo[b + 1]), slice(ko[b], ko[b + 1])
        lq, lk = qo[b + 1] - qo[b], ko[b + 1] - ko[b]
        mask = visible(
            lq,
            lk,
            causal,
            causal_align,
            window,
            None if q_positions is None else q_positions[qs],
            None if k_positions is None else k_positions[ks],
        )
        keys, values = (x[ks].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[qs], keys) * scale
        # exp(s - max) over visible keys by hand: torch.softmax would give NaN for a row that sees none.
        top = scores.detach().masked_fill(~mask, -math.inf).amax(-1, keepdim=True) if lk else scores.new_zeros(heads, lq, 1)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.where(mask, (scores - top).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
        if dropout_p > 0:
            assert seed is not None
            a, c = row_keys(seed, heads, torch.arange(qo[b], qo[b + 1]))
            keep = keep_mask(a[..., None], c[..., None], torch.arange(lk, dtype=torch.int32), dropout_p)
            weights = weights * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        outs.append(torch.einsum("hij,jhd->ihd", weights, values))
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # ties the result to its inputs even without sequences
    outs.append(nothing.expand(q.shape[0] - qo[-1], heads, v.shape[2]))  # rows of nobody
    return torch.cat(outs)
