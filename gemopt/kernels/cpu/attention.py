"""jagged_attention on the CPU: dense batches of sequences of like length, one plan per set of offsets.

FLOPs 4·H·D·Σ qᵢkᵢ forward and 2.5 times that backward (plus the rounding of lengths to the group's); bytes are those of
q, k, v, out once, plus one gather and one scatter where a group is no strided view.
"""
import torch
from torch import Tensor

from gemopt.kernels.cpu import math_path
from gemopt.kernels.cpu.plan import Group, plan
from gemopt.kernels.spec import AttentionSpec
from gemopt.ops import dropout as generator


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _heads_first(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[n, L, h, D]` → `[n, heads, L, D]` in `dtype`; key heads are repeated for their query heads."""
    x = x.to(dtype).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_query_heads(grad: Tensor, heads: int) -> Tensor:
    """`[n, H, L, D]` → `[n, L, heads, D]`."""
    if grad.shape[1] != heads:
        grad = grad.unflatten(1, (heads, -1)).sum(2)
    return grad.transpose(1, 2)


def _mask(group: Group, spec: AttentionSpec) -> math_path.Mask:
    q_pos, k_pos = torch.arange(group.q.length)[None], torch.arange(group.k.length)[None]
    if spec.q_positions is not None:
        q_pos = group.q.take(spec.q_positions).to(torch.int64)
    elif spec.bottom_right:
        q_pos = q_pos + (group.k.lens - group.q.lens)[:, None]
    if spec.k_positions is not None:
        k_pos = group.k.take(spec.k_positions).to(torch.int64)
    valid = group.k.valid if group.k.ragged else None
    return math_path.Mask(q_pos, k_pos, valid, spec.causal, spec.window)


def _dropout(group: Group, spec: AttentionSpec, heads: int, dtype: torch.dtype) -> math_path.Dropout | None:
    if spec.dropout_p == 0.0:
        return None
    assert spec.seed is not None
    rows = group.q.gather.view(group.q.n, group.q.length)
    a, b = (w.transpose(0, 1) for w in generator.row_keys(spec.seed, heads, rows))  # [n, H, Lq]
    k_rows = torch.arange(group.k.length, dtype=torch.int32)

    def block(first: int, last: int) -> Tensor:
        keep = generator.keep_mask(a[:, :, first:last, None], b[:, :, first:last, None], k_rows, spec.dropout_p)
        return keep.to(dtype).mul_(generator.multiplier(spec.dropout_p))

    return block


def _buffer(like: Tensor, shape: tuple[int, ...], covered: bool) -> Tensor:
    """One row more than asked: the dump row of padding."""
    shape = (shape[0] + 1, *shape[1:])
    return like.new_empty(shape) if covered else like.new_zeros(shape)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]` → out `[Tq, H, Dv]`, lse `[Tq, H]` (-inf: no visible key)."""
    the_plan = plan(spec.q_offsets, spec.k_offsets, q.shape[0], k.shape[0])
    rows, heads, dtype = q.shape[0], q.shape[1], _compute_dtype(q.dtype)
    out = _buffer(q, (rows, heads, v.shape[2]), the_plan.q_covered)
    lse = q.new_full((rows + 1, heads), float("-inf"), dtype=dtype)
    for group in the_plan.groups:
        dense = (_heads_first(side.take(x), heads, dtype) for side, x in ((group.q, q), (group.k, k), (group.k, v)))
        o, l = math_path.forward(*dense, _mask(group, spec), spec.scale, _dropout(group, spec, heads, dtype))
        group.q.put(out, o.transpose(1, 2).to(q.dtype))
        group.q.put(lse, l.transpose(1, 2))
    return out[:rows], lse[:rows]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    the_plan = plan(spec.q_offsets, spec.k_offsets, q.shape[0], k.shape[0])
    heads, kv_heads, dtype = q.shape[1], k.shape[1], _compute_dtype(q.dtype)
    dq = _buffer(q, tuple(q.shape), the_plan.q_covered)
    dk, dv = (_buffer(x, tuple(x.shape), the_plan.k_covered) for x in (k, v))
    for group in the_plan.groups:
        qd, od, do = (_heads_first(group.q.take(x), heads, dtype) for x in (q, out, dout))
        kd, vd = (_heads_first(group.k.take(x), heads, dtype) for x in (k, v))
        if group.q.ragged:
            do = do.masked_fill(~group.q.valid[:, None, :, None], 0.0)
        l = group.q.take(lse).transpose(1, 2)
        gq, gk, gv = math_path.backward(
            do, qd, kd, vd, od, l, _mask(group, spec), spec.scale, _dropout(group, spec, heads, dtype))
        group.q.put(dq, gq.transpose(1, 2).to(q.dtype))
        group.k.put(dk, _sum_query_heads(gk, kv_heads).to(k.dtype))
        group.k.put(dv, _sum_query_heads(gv, kv_heads).to(v.dtype))
    return dq[: q.shape[0]], dk[: k.shape[0]], dv[: k.shape[0]]
