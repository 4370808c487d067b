"""jagged_attention and gdpa on the CPU.

Short sequences run in a C++ kernel (`native`). Everything else, and everything where there is no C++
compiler, runs on PyTorch's operators in dense batches of sequences of like length, one plan per set of offsets: FLOPs
4·H·D·Σ qᵢkᵢ forward and 2.5 times that backward (plus the rounding of lengths to the group's); bytes are those of q, k, v,
out once, plus one gather and one scatter where a group is no strided view. Half types are computed in fp32.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gemopt.kernels.cpu import flash_path, gdpa_path, math_path, native, single_query, tables, workers
from gemopt.kernels.cpu.bounds import Bounds, bounds
from gemopt.kernels.cpu.plan import Group, Plan, SingleQueries, plan
from gemopt.kernels.spec import AttentionSpec
from gemopt.ops import dropout as generator


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _simplify(spec: AttentionSpec, bounds: Bounds) -> AttentionSpec:
    """Drop positions that change nothing: unused ones, and equal, ascending ones under a causal mask alone."""
    q_pos, k_pos = spec.q_positions, spec.k_positions
    if q_pos is None and k_pos is None:
        return spec
    needless = not spec.uses_positions
    if spec.bias is not None or spec.mask is not None:
        return spec
    if spec.causal and spec.window == (-1, -1) and q_pos is not None and k_pos is not None:
        needless = bounds.square and torch.equal(q_pos, k_pos) and bounds.ascending(q_pos)
    return replace(spec, q_positions=None, k_positions=None) if needless else spec


def _mask(group: Group, spec: AttentionSpec) -> math_path.Mask:
    q_pos, k_pos = torch.arange(group.q.length)[None], torch.arange(group.k.length)[None]
    if spec.q_positions is not None:
        q_pos = group.q.take(spec.q_positions).to(torch.int64)
    elif spec.bottom_right and not group.square:
        q_pos = q_pos + (group.k.lens - group.q.lens)[:, None]
    if spec.k_positions is not None:
        k_pos = group.k.take(spec.k_positions).to(torch.int64)
    by_row = spec.q_positions is None and spec.k_positions is None and (group.square or not spec.bottom_right)
    hidden = spec.causal and by_row and group.causal_hides_padding
    valid = group.k.valid if group.k.ragged and not hidden else None
    return math_path.Mask(q_pos, k_pos, valid, spec.causal, spec.window, by_row, tables.table(spec.mask, group, spec))


def _flash_mask(group: Group, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """The additive mask of the flash kernel and its causal flag."""
    plain = spec.window == (-1, -1) and spec.q_positions is None and spec.k_positions is None and spec.mask is None
    if spec.causal and plain and group.causal_hides_padding and (group.square or not spec.bottom_right):
        return None, True
    seen = _mask(group, spec).block(0, group.q.length, group.k.length)
    if seen is None:
        return None, False
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf")), False


def _row_words(spec: AttentionSpec, the_plan: Plan, rows: int, heads: int) -> tuple[Tensor, ...]:
    """The generator's two words of every query row, int32 `[Tq, H]`, once for all groups; empty without dropout."""
    if spec.dropout_p == 0.0 or not the_plan.groups:
        return ()
    assert spec.seed is not None
    return tuple(w.T.contiguous() for w in generator.row_keys(spec.seed, heads, torch.arange(rows)))


def _dropout(group: Group, words: tuple[Tensor, ...], p: float) -> math_path.Dropout | None:
    if not words:
        return None
    a, b = (group.q.take(w).transpose(1, 2).unsqueeze(-1) for w in words)  # [n, H, Lq, 1]
    k_rows = torch.arange(group.k.length, dtype=torch.int32)

    def keep(first: int, last: int, keys: int) -> Tensor:
        return generator.keep_mask(a[:, :, first:last], b[:, :, first:last], k_rows[:keys], p)

    return math_path.Dropout(keep, generator.multiplier(p))


def _buffer(like: Tensor, shape: tuple[int, ...], covered: bool) -> Tensor:
    """One row more than asked: the dump row of padding."""
    shape = (shape[0] + 1, *shape[1:])
    return like.new_empty(shape) if covered else like.new_zeros(shape)


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, L, H, D]` → `[n, H, L, D]` in `dtype`, features dense."""
    x = x.to(dtype).transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _use_flash(q: Tensor, v: Tensor, spec: AttentionSpec, group: Group) -> bool:
    """Not where a query sees one key only: its gradients are exactly 0 in eager, and rounding noise in flash."""
    plain = spec.softmax and spec.bias is None and spec.mask is None and spec.dropout_p == 0.0
    return plain and q.shape[-1] == v.shape[-1] and 1 not in group.k.lengths


def _plan(spec: AttentionSpec, q_rows: int, k_rows: int) -> Plan:
    assert spec.q_offsets is not None
    dense = not spec.softmax or spec.bias is not None or spec.mask is not None
    return plan(spec.q_offsets, spec.k_offsets, q_rows, k_rows, dense)


def _read(spec: AttentionSpec, q_rows: int, k_rows: int, shared: bool) -> tuple[AttentionSpec, Bounds]:
    """The call in its simplest form, and where its sequences lie. Raises ValueError for what does not fit."""
    spec = spec.split_blocks(q_rows)
    its_bounds = bounds(spec, q_rows, k_rows, shared)
    tables.check(spec, its_bounds)
    return _simplify(spec, its_bounds), its_bounds


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]` → out `[Tq, H, Dv]`, lse `[Tq, H]`.

    A row without a visible key has out 0; its lse means nothing. lse is `[0, H]` unless the weights are a softmax.
    """
    shared = spec.shared
    q, spec = spec.spread(q)
    rows, heads, dtype = q.shape[0], q.shape[1], _compute_dtype(q.dtype)
    spec, its_bounds = _read(spec, rows, k.shape[0], shared)
    if native.serves(q, v, spec, its_bounds):
        return native.forward(q, k, v, spec, its_bounds)
    the_plan = _plan(spec, rows, k.shape[0])
    words = _row_words(spec, the_plan, rows, heads)
    out = _buffer(q, (rows, heads, v.shape[2]), the_plan.q_covered)
    lse_rows = rows if spec.softmax else 0
    lse = _buffer(q.new_empty(0, dtype=dtype), (lse_rows, heads), the_plan.q_covered)

    def one_group(group: Group) -> None:
        o, l = _group_forward(q, k, v, group, spec, words, dtype)
        group.q.put(out, o.transpose(1, 2))
        if l is not None:
            group.q.put(lse, l.transpose(1, 2))

    def one_single(single: SingleQueries) -> None:
        o, l = single_query.forward(q, k, v, single, spec, dtype)
        out.index_copy_(0, single.q_rows, o.to(out.dtype))
        lse.index_copy_(0, single.q_rows, l)

    workers.run(
        [
            *(partial(one_group, group) for group in the_plan.groups),
            *(partial(one_single, single) for single in the_plan.single),
        ]
    )
    return out[:rows], lse[:lse_rows]


def _group_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    spec: AttentionSpec,
    words: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    qd, kd, vd = (_heads_first(side.take(x), dtype) for side, x in ((group.q, q), (group.k, k), (group.k, v)))
    if _use_flash(q, v, spec, group):
        mask, causal = _flash_mask(group, spec, dtype)
        return flash_path.forward(qd, kd, vd, mask, causal, spec.scale)
    sharing = q.shape[1] // k.shape[1]
    kd, vd = (x.repeat_interleave(sharing, dim=1) for x in (kd, vd))
    bias, dropped = tables.table(spec.bias, group, spec), _dropout(group, words, spec.dropout_p)
    if spec.softmax:
        return math_path.forward(qd, kd, vd, _mask(group, spec), bias, spec.scale, dropped)
    acts = spec.activations
    return gdpa_path.forward(qd, kd, vd, _mask(group, spec), bias, spec.scale, spec.post_scale, acts, dropped), None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    spec: AttentionSpec,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if `bias_grad`, of the bias. `out` and `lse` are those of a softmax, else None."""
    dtype = _compute_dtype(q.dtype)
    if spec.shared:  # each sequence's gradient unrounded
        wide, spread = spec.spread(q.to(dtype))
        grads = _backward(dout, wide, k, v, out, lse, spread, bias_grad, shared=True)
        return spec.gathered(grads[0], q), *grads[1:]
    return _backward(dout, q, k, v, out, lse, spec, bias_grad, shared=False)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    spec: AttentionSpec,
    bias_grad: bool,
    shared: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dtype = _compute_dtype(q.dtype)
    spec, its_bounds = _read(spec, q.shape[0], k.shape[0], shared)
    if native.serves(q, v, spec, its_bounds):
        return native.backward(dout, q, k, v, lse, spec, its_bounds, bias_grad)
    the_plan = _plan(spec, q.shape[0], k.shape[0])
    words = _row_words(spec, the_plan, q.shape[0], q.shape[1])
    dq = _buffer(q, tuple(q.shape), the_plan.q_covered)
    dk, dv = (_buffer(x, tuple(x.shape), the_plan.k_covered) for x in (k, v))
    dbias: Tensor | None = None
    if bias_grad:
        assert spec.bias is not None
        dbias = torch.zeros(spec.bias.shape, dtype=dtype)

    def one_group(group: Group) -> None:
        gq, gk, gv = _group_backward(dout, q, k, v, out, lse, group, spec, words, dtype, dbias)
        group.q.put(dq, gq.transpose(1, 2))
        group.k.put(dk, gk.transpose(1, 2))
        group.k.put(dv, gv.transpose(1, 2))

    def one_single(single: SingleQueries) -> None:
        assert out is not None and lse is not None
        gq, gk, gv = single_query.backward(dout, q, k, v, out, lse, single, spec, dtype)
        dq.index_copy_(0, single.q_rows, gq.to(dq.dtype))
        single.put_k(dk, gk)
        single.put_k(dv, gv)

    pieces = [
        *(partial(one_group, group) for group in the_plan.groups),
        *(partial(one_single, single) for single in the_plan.single),
    ]
    if dbias is not None and dbias.shape[0] == 1:  # all add to the same numbers: one after the other, in one order
        for piece in pieces:
            piece()
    else:
        workers.run(pieces)
    return dq[: q.shape[0]], dk[: k.shape[0]], dv[: k.shape[0]], dbias


def _group_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    group: Group,
    spec: AttentionSpec,
    words: tuple[Tensor, ...],
    dtype: torch.dtype,
    dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    qd = _heads_first(group.q.take(q), dtype)
    kd, vd = (_heads_first(group.k.take(x), dtype) for x in (k, v))
    do = _heads_first(group.q.take_zeroed(dout), dtype)
    if _use_flash(q, v, spec, group):
        assert out is not None and lse is not None
        od, l = _heads_first(group.q.take(out), dtype), group.q.take(lse).transpose(1, 2)
        mask, causal = _flash_mask(group, spec, dtype)
        return flash_path.backward(do, qd, kd, vd, od, l, mask, causal, spec.scale)
    heads, kv_heads = q.shape[1], k.shape[1]
    kd, vd = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (kd, vd))
    bias, dropped = tables.table(spec.bias, group, spec), _dropout(group, words, spec.dropout_p)
    seen = _mask(group, spec)
    if spec.softmax:
        assert lse is not None
        l = group.q.take(lse).transpose(1, 2)
        gq, gk, gv = math_path.backward(do, qd, kd, vd, l, seen, bias, spec.scale, dropped, dbias)
    else:
        gq, gk, gv = gdpa_path.backward(
            do, qd, kd, vd, seen, bias, spec.scale, spec.post_scale, spec.activations, dropped, dbias
        )
    if heads != kv_heads:
        gk, gv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (gk, gv))
    return gq, gk, gv
