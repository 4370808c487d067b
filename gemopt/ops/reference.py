"""What the ops mean, written from their formulas: one sequence at a time, dense masks, autograd for gradients.

Used by tests as the independent oracle, in fp64; shares nothing with the kernels but the dropout generator.
"""

import math
from collections.abc import Callable, Sequence
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


def table_block(table: Tensor, b: int, heads: int, rows: list[int], cols: list[int]) -> Tensor:
    """`[heads, len(rows), len(cols)]` of a `[B or 1, H or 1, Lq or 1, Lk or 1]` tensor."""
    whole = table[b if table.shape[0] > 1 else 0]
    whole = whole.expand(heads, *whole.shape[1:])
    i = [r if table.shape[2] > 1 else 0 for r in rows]
    j = [c if table.shape[3] > 1 else 0 for c in cols]
    return whole[:, i][:, :, j]


def softmax_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """exp(s - max) over visible keys by hand: torch.softmax would give NaN for a row that sees none."""
    if scores.shape[-1] == 0:
        return scores
    hidden = scores.masked_fill(~mask, -math.inf)
    top = hidden.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.where(mask, (hidden - top).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def activated(scores: Tensor, name: str) -> Tensor:
    """The activations of gdpa, from their formulas; derivatives at kinks as PyTorch has them."""
    s = scores
    if name == "identity":
        return s
    if name == "relu":
        return torch.where(s > 0, s, 0.0)
    if name == "relu2":
        return torch.where(s > 0, s * s, 0.0)
    if name == "leaky_relu":
        return torch.where(s > 0, s, 0.01 * s)
    if name == "gelu":
        return s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * s * (1 + torch.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3)))
    if name == "sigmoid":
        return 0.5 * (1 + torch.tanh(0.5 * s))
    if name == "silu":
        return s * activated(s, "sigmoid")
    if name == "hardswish":
        return torch.where(s >= 3, s, torch.where(s <= -3, 0.0, s * (s + 3) / 6))
    raise ValueError(name)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    weigh: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float,
    causal: bool,
    causal_align: str,
    window: tuple[int, int],
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """One sequence after the other; `weigh(scores, seen)` makes weights of both, `[H, Lq, Lk]`."""
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    if q_offsets is None:
        batch = k_offsets.shape[0] - 1
        q_offsets = torch.tensor([b * q.shape[0] for b in range(batch + 1)])
        q = torch.cat([q] * batch) if batch else q[:0]
        q_positions = None if q_positions is None else torch.cat([q_positions] * batch) if batch else q_positions[:0]
    qo, ko = q_offsets.tolist(), k_offsets.tolist()
    outs = []
    for b in range(len(qo) - 1):
        qs, ks = slice(qo[b], qo[b + 1]), slice(ko[b], ko[b + 1])
        lq, lk = qo[b + 1] - qo[b], ko[b + 1] - ko[b]
        q_pos = None if q_positions is None else q_positions[qs]
        k_pos = None if k_positions is None else k_positions[ks]
        seen = visible(lq, lk, causal, causal_align, window, q_pos, k_pos).expand(heads, lq, lk)
        rows = list(range(lq)) if q_pos is None else q_pos.tolist()
        cols = list(range(lk)) if k_pos is None else k_pos.tolist()
        keys, values = (x[ks].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[qs], keys) * scale
        if bias is not None and lq and lk:
            scores = scores + table_block(bias, b, heads, rows, cols)
        if mask is not None and lq and lk:
            seen = seen & table_block(mask, b, heads, rows, cols)
        weights = weigh(scores, seen)
        if dropout_p > 0:
            assert seed is not None
            a, c = row_keys(seed, heads, torch.arange(qo[b], qo[b + 1]))
            keep = keep_mask(a[..., None], c[..., None], torch.arange(lk, dtype=torch.int32), dropout_p)
            weights = weights * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        outs.append(torch.einsum("hij,jhd->ihd", weights.to(values.dtype), values))
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # ties the result to its inputs even without sequences
    if bias is not None:
        nothing = nothing + bias[:0].sum().to(q.dtype)
    outs.append(nothing.expand(q.shape[0] - qo[-1], heads, v.shape[2]))  # rows of nobody
    return torch.cat(outs)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
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
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """As `gemopt.ops.jagged_attention`, for CPU tensors, differentiable to any order."""
    return _attention(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        softmax_weights,
        scale=1.0 / math.sqrt(q.shape[2]) if scale is None else scale,
        causal=causal,
        causal_align=causal_align,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        bias=bias,
        mask=mask,
        dropout_p=dropout_p,
        seed=seed,
    )


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int = 0,
    max_k: int = 0,
    *,
    activation: str | Sequence[str],
    scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """As `gemopt.ops.gdpa`, for CPU tensors, differentiable to any order."""
    names = [activation] * q.shape[1] if isinstance(activation, str) else list(activation)

    def weigh(scores: Tensor, seen: Tensor) -> Tensor:
        shown = torch.where(seen, scores, 0.0)
        weights = torch.stack([activated(shown[h], name) for h, name in enumerate(names)])
        return torch.where(seen, weights, 0.0) * post_scale

    return _attention(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        weigh,
        scale=scale,
        causal=causal,
        causal_align=causal_align,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        bias=bias,
        mask=mask,
        dropout_p=dropout_p,
        seed=seed,
    )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    block_size: int,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """As `gemopt.ops.block_attention`, for CPU tensors: whole sequences under a block-diagonal mask."""
    longest = max((b - a for a, b in pairwise(offsets.tolist())), default=0)
    block = torch.arange(longest) // block_size
    mask = (block[:, None] == block)[None, None]
    return jagged_attention(q, k, v, offsets, offsets, scale=scale, causal=causal, mask=mask)
