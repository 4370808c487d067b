"""Attention where every sequence has at most one query, as after pruning to the last item: no dense batch at all.

With o(t) the query that owns key row t, everything is elementwise over key rows or a sum per sequence:

    s_t = scale * q_o(t)·k_t     p_t = exp(s_t - lse_o(t))     out_r = Σ_{o(t)=r} p_t drop_t v_t
    dp_t = drop_t * dout_o(t)·v_t     ds_t = scale * p_t * (dp_t - dout_o(t)·out_o(t))
    dq_r = Σ_{o(t)=r} ds_t k_t        dk_t = ds_t q_o(t)       dv_t = p_t drop_t dout_o(t)

Bytes: q, k, v, out and their products once per pass; the work is linear in the number of key rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gemopt.kernels.cpu.plan import SingleQueries
from gemopt.kernels.segments import segment_sum
from gemopt.kernels.spec import AttentionSpec
from gemopt.ops import dropout as generator


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """`[R, H, D]` → `[R, Hkv, H / Hkv, D]`."""
    return q.unflatten(1, (kv_heads, -1))


def _visible(single: SingleQueries, spec: AttentionSpec) -> Tensor | None:
    """bool `[S]`: whether the owner of a key row sees it; None when all are seen."""
    if not spec.masked:
        return None
    if spec.q_positions is not None:
        q_pos = spec.q_positions[single.q_rows].to(torch.int64)
    else:
        q_pos = single.lengths - 1 if spec.bottom_right else torch.zeros_like(single.lengths)
    k_pos = single.local if spec.k_positions is None else single.take_k(spec.k_positions)
    reach = k_pos - q_pos[single.owner]
    left, right = spec.window
    right = min(right, 0) if spec.causal and right >= 0 else 0 if spec.causal else right
    seen = torch.ones_like(reach, dtype=torch.bool) if right < 0 else reach <= right
    return seen if left < 0 else seen & (reach >= -left)


def _drop(single: SingleQueries, spec: AttentionSpec, heads: int, dtype: torch.dtype) -> Tensor | None:
    """`[S, H]`: 0 or 1/(1-p)."""
    if spec.dropout_p == 0.0:
        return None
    assert spec.seed is not None
    a, b = (w.T[single.owner] for w in generator.row_keys(spec.seed, heads, single.q_rows))
    keep = generator.keep_mask(a, b, single.local[:, None], spec.dropout_p)
    return keep.to(dtype).mul_(generator.multiplier(spec.dropout_p))


@dataclass(frozen=True, eq=False)
class _Dense:
    q: Tensor  # [S, Hkv, G, D], each key row's query
    k: Tensor  # [S, Hkv, 1, D]
    v: Tensor  # [S, Hkv, 1, Dv]
    scores: Tensor  # [S, Hkv, G], -inf where not visible


def _scores(q: Tensor, k: Tensor, v: Tensor, single: SingleQueries, spec: AttentionSpec, dtype: torch.dtype) -> _Dense:
    qs = _grouped(q[single.q_rows].to(dtype), k.shape[1]).index_select(0, single.owner)
    ks, vs = (single.take_k(x).to(dtype).unsqueeze(2) for x in (k, v))
    scores = (qs * ks).sum(-1).mul_(spec.scale)
    seen = _visible(single, spec)
    if seen is not None:
        scores.masked_fill_(~seen[:, None, None], float("-inf"))
    return _Dense(qs, ks, vs, scores)


def _lse(scores: Tensor, single: SingleQueries) -> Tensor:
    """log Σ exp per query: `[S, Hkv, G]` → `[R, Hkv, G]`."""
    shape = (single.lengths.shape[0], *scores.shape[1:])
    index = single.owner[:, None, None].expand_as(scores)
    top = scores.new_full(shape, float("-inf")).scatter_reduce_(0, index, scores, "amax")
    safe = top.masked_fill(top == float("-inf"), 0.0)
    return segment_sum((scores - safe[single.owner]).exp_(), single.offsets).log_().add_(safe)


def forward(
    q: Tensor, k: Tensor, v: Tensor, single: SingleQueries, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out `[R, H, Dv]` and lse `[R, H]` of the queries in `single`."""
    dense = _scores(q, k, v, single, spec, dtype)
    lse = _lse(dense.scores, single)
    p = (dense.scores - lse.masked_fill(lse == float("-inf"), 0.0)[single.owner]).exp_()
    drop = _drop(single, spec, q.shape[1], dtype)
    if drop is not None:
        p.mul_(drop.view_as(p))
    out = segment_sum(p.unsqueeze(-1) * dense.v, single.offsets)
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    single: SingleQueries,
    spec: AttentionSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq `[R, H, D]`, dk `[S, Hkv, D]`, dv `[S, Hkv, Dv]` of the rows in `single`."""
    dense, owner = _scores(q, k, v, single, spec, dtype), single.owner
    do, l = (_grouped(x[single.q_rows].to(dtype), k.shape[1]) for x in (dout, lse))
    p = (dense.scores - l.masked_fill(l == float("-inf"), 0.0)[owner]).exp_()
    total = segment_sum(p, single.offsets)  # 1, but for the rounding of lse, which grows with the scores
    p.div_(total.masked_fill_(total == 0, 1.0)[owner])
    do = do.index_select(0, owner)
    dp = (do * dense.v).sum(-1)
    weights = p
    drop = _drop(single, spec, q.shape[1], dtype)
    if drop is not None:
        dp.mul_(drop.view_as(dp))
        weights = p * drop.view_as(p)
    weighted = p * dp
    delta = segment_sum(weighted, single.offsets)
    ds = weighted.sub_(p * delta[owner]).mul_(spec.scale).unsqueeze(-1)
    dq = segment_sum(ds * dense.k, single.offsets).flatten(1, 2)
    return dq, _sum_sharing(dense.q.mul_(ds)), _sum_sharing(do.mul_(weights.unsqueeze(-1)))


def _sum_sharing(x: Tensor) -> Tensor:
    """`[S, Hkv, G, D]` → `[S, Hkv, D]`."""
    return x.squeeze(2) if x.shape[2] == 1 else x.sum(2)
