"""Launches the Triton kernels of jagged attention and gdpa.

Nothing here reads a device value: grids come from `max_q`, `max_k` and the batch size. The batch lies on the one grid
axis without a practical limit; the tiles of a sequence, which a program may stride over, on a short one.
"""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from gemopt.kernels.cpu import attention as host_kernels
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.tiers import capability
from gemopt.kernels.triton.attention_backward import attention_backward_kv, attention_backward_q, attention_delta
from gemopt.kernels.triton.attention_backward_bias import attention_backward_bias
from gemopt.kernels.triton.attention_forward import attention_forward
from gemopt.kernels.triton.configs import Blocks, block_of, config, constants, is_heavy
from gemopt.kernels.triton.split import combine, key_parts, programs
from gemopt.ops import dropout as generator

MAX_HEAD_DIM = 256
LOG2E = math.log2(math.e)
NO_LIMIT = 2**31 - 1
# Programs that keep a large GPU busy; the gradient of a shared bias splits the batch until it has as many.
WANTED_PROGRAMS = 1024


def is_interpreted() -> bool:
    return not isinstance(attention_forward, triton.runtime.JITFunction)


def _has_tcgen05(x: Tensor) -> bool:
    return (capability(x) or (0, 0))[0] == 10


def _needs_host(q: Tensor, v: Tensor) -> bool:
    """fp64 is for verification: no tensor cores worth a kernel."""
    if max(q.shape[2], v.shape[2]) > MAX_HEAD_DIM and q.dtype != torch.float64:
        raise ValueError(
            f"jagged_attention: head_dim on {q.device.type} must be at most {MAX_HEAD_DIM}, "
            f"got {q.shape[2]} (q, k) and {v.shape[2]} (v)"
        )
    return q.dtype == torch.float64


def _to_host(spec: AttentionSpec) -> AttentionSpec:
    moved = {name: value.cpu() for name, value in vars(spec).items() if isinstance(value, Tensor)}
    return replace(spec, **moved)


def _dense_features(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _prepare(spec: AttentionSpec, rows: int) -> AttentionSpec:
    """Blocks as sequences, unused positions dropped."""
    spec = spec.split_blocks(rows)
    return spec if spec.uses_positions else replace(spec, q_positions=None, k_positions=None)


def _table_args(table: Tensor | None, stand_in: Tensor) -> list[Any]:
    """Pointer, strides and bounds of a bias or mask; an axis of size 1 has stride 0 and no bound."""
    if table is None:
        return [stand_in, 0, 0, 0, 0, 0, 0]
    if table.dtype == torch.bool:
        table = table.view(torch.uint8)
    strides = [0 if size == 1 else step for size, step in zip(table.shape, table.stride(), strict=True)]
    if sum(max(size - 1, 0) * step for size, step in zip(table.shape[2:], strides[2:], strict=True)) > NO_LIMIT:
        raise ValueError(
            f"attention: the elements of one sequence and head of bias or mask must lie within 2^31 of each other, "
            f"got shape {list(table.shape)} with strides {list(table.stride())}"
        )
    return [table, *strides, *(NO_LIMIT if size == 1 else size for size in table.shape[2:])]


def _shared_args(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> list[Any]:
    """Offsets to strides, as every kernel takes them; a kernel never reads through a stand-in."""
    return [
        spec.k_offsets if spec.q_offsets is None else spec.q_offsets,
        spec.k_offsets,
        *(q if x is None else x for x in (spec.q_positions, spec.k_positions, spec.seed)),
        *_table_args(spec.bias, q),
        *_table_args(spec.mask, q),
        q.shape[0],
        k.shape[0],
        spec.batch,
        q.shape[1],
        q.shape[1] // k.shape[1],
        *(x.stride(dim) for x in (q, k, v) for dim in (0, 1)),
    ]


def _numbers(spec: AttentionSpec) -> list[Any]:
    """Scale of the scores (base 2 for a softmax), post scale, dropout threshold as the int32 of its bits, multiplier."""
    limit = generator.threshold(spec.dropout_p)
    return [
        spec.scale * LOG2E if spec.softmax else spec.scale,
        spec.post_scale,
        limit - (1 << 32) if limit >= 1 << 31 else limit,
        generator.multiplier(spec.dropout_p),
    ]


def _tiles(longest: int, block: int) -> int:
    return min(max(1, triton.cdiv(longest, block)), 65_535)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """q `[Tq, H, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]` → out `[Tq, H, Dv]`, lse fp32 `[Tq, H]` (softmax) or `[0, H]`."""
    if _needs_host(q, v):
        out, lse = host_kernels.forward(q.cpu(), k.cpu(), v.cpu(), _to_host(spec))
        return out.to(q.device), lse.to(q.device)
    spec = _prepare(spec, q.shape[0])
    q, k, v = (_dense_features(x) for x in (q, k, v))
    rows, (_, heads, d), dv = spec.out_rows(q), q.shape, v.shape[2]
    out = q.new_empty((rows, heads, dv))
    lse = q.new_empty((rows if spec.softmax else 0, heads), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    blocks = config(max(d, dv), q.dtype, is_heavy(spec), is_interpreted(), _has_tcgen05(q)).forward
    tiles = _tiles(spec.max_q, blocks.q)
    parts, step = key_parts(spec.batch * heads * tiles, _splittable(spec, k), programs(q.device), blocks.k)
    to, part_lse = out, lse
    if parts > 1:
        to, part_lse = (torch.empty((parts, *x.shape), dtype=torch.float32, device=q.device) for x in (out, lse))
    attention_forward[((spec.batch + 1) * parts, heads, tiles)](
        q,
        k,
        v,
        to,
        part_lse,
        *_shared_args(q, k, v, spec),
        to.stride(-3),
        to.stride(-2),
        *_numbers(spec),
        parts,
        step,
        **constants(heads, d, dv, spec, blocks, q.dtype),
        SPLIT=parts > 1,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if parts > 1:
        combine(to, part_lse, out, lse, spec.softmax)
    return out, lse


def _splittable(spec: AttentionSpec, k: Tensor) -> int:
    """The most keys that a query walks over, as far as shapes tell; 0 where a band by row numbers leaves out most parts."""
    by_row = spec.q_positions is None and spec.k_positions is None
    return 0 if spec.masked and by_row else min(spec.max_k, k.shape[0])


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
    if _needs_host(q, v):
        dout_, q_, k_, v_ = (x.cpu() for x in (dout, q, k, v))
        out_, lse_ = (None if x is None else x.cpu() for x in (out, lse))
        *grads, bias = host_kernels.backward(dout_, q_, k_, v_, out_, lse_, _to_host(spec), bias_grad)
        dq, dk, dv = (x.to(q.device) for x in grads)
        return dq, dk, dv, None if bias is None else bias.to(q.device)
    spec = _prepare(spec, q.shape[0])
    dout, q, k, v = (_dense_features(x) for x in (dout, q, k, v))
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    # Of shared queries a gradient for each sequence, unrounded, to be summed in order.
    rows, dtype = spec.out_rows(q), torch.float32 if spec.shared else q.dtype
    dq = torch.empty((rows, *q.shape[1:]), dtype=dtype, device=q.device)
    if spec.softmax:
        assert out is not None and lse is not None
        lse = lse.contiguous()
        delta = _delta(_dense_features(out), dout)
    else:
        lse = delta = q  # stand-ins: rows do not know of each other
    cfg = config(max(q.shape[2], v.shape[2]), q.dtype, is_heavy(spec), is_interpreted(), _has_tcgen05(q))
    inputs = (q, k, v, dout, lse, delta)
    shared = [
        *_shared_args(q, k, v, spec),
        dout.stride(0),
        dout.stride(1),
        spec.scale * spec.post_scale,
        *_numbers(spec),
    ]
    if dk.numel() + dv.numel():
        blocks = cfg.backward_kv
        attention_backward_kv[spec.batch + 1, k.shape[1], _tiles(spec.max_k, blocks.k)](
            *inputs, dk, dv, *shared, **_options(q, v, spec, blocks)
        )
    atomic = bias_grad and not (spec.q_positions is None and spec.k_positions is None)
    dbias = _empty_dbias(spec) if atomic else None
    if dq.numel():
        blocks = cfg.backward_q
        attention_backward_q[spec.batch + 1, q.shape[1], _tiles(spec.max_q, blocks.q)](
            *inputs,
            dq,
            *_table_args(dbias, q)[:5],
            *shared,
            ADD_DBIAS=atomic,
            **_options(q, v, spec, blocks),
        )
    if bias_grad and not atomic:
        dbias = _bias_gradient(inputs, shared, spec, cfg.backward_bias)
    return (spec.gathered(dq, q) if spec.shared else dq), dk, dv, dbias


def _options(q: Tensor, v: Tensor, spec: AttentionSpec, blocks: Blocks) -> dict[str, Any]:
    fixed = constants(q.shape[1], q.shape[2], v.shape[2], spec, blocks, q.dtype)
    return {**fixed, "num_warps": blocks.warps, "num_stages": blocks.stages}


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    """rowsum(dO * O), fp32 `[Tq, H]`."""
    rows, heads, dv = out.shape
    delta = out.new_empty((rows, heads), dtype=torch.float32)
    if rows and heads:
        attention_delta[(triton.cdiv(rows, 64), heads)](
            out,
            dout,
            delta,
            rows,
            heads,
            out.stride(0),
            out.stride(1),
            dout.stride(0),
            dout.stride(1),
            DV=dv,
            BLOCK_DV=block_of(dv),
            BLOCK_Q=64,
        )
    return delta


def _empty_dbias(spec: AttentionSpec) -> Tensor:
    """fp32 zeros for atomic sums, whose order is nobody's choice."""
    assert spec.bias is not None
    if torch.are_deterministic_algorithms_enabled():
        message = (
            "attention: the gradient of a bias read at given positions is summed by atomics on the GPU, which has no "
            "deterministic form; torch.use_deterministic_algorithms(True) forbids it"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)
    return torch.zeros(spec.bias.shape, dtype=torch.float32, device=spec.bias.device)


def _bias_gradient(inputs: tuple[Tensor, ...], shared: list[Any], spec: AttentionSpec, blocks: Blocks) -> Tensor:
    """The gradient where positions are row numbers: fp32, in the shape of the bias, deterministic."""
    assert spec.bias is not None
    q, _, v = inputs[:3]
    own_batch, own_heads, rows, cols = spec.bias.shape
    batch = spec.batch
    q_tiles, k_tiles = triton.cdiv(rows, blocks.q), triton.cdiv(cols, blocks.k)
    tiles = q_tiles * k_tiles
    if own_batch == 1:
        parts = max(1, min(batch, WANTED_PROGRAMS // max(1, tiles * own_heads)))
    else:
        parts = own_batch
    dbias = torch.empty((parts, own_heads, rows, cols), dtype=torch.float32, device=q.device)
    if dbias.numel():
        attention_backward_bias[parts * tiles, own_heads](
            *inputs,
            dbias,
            tiles,
            k_tiles,
            parts,
            *shared,
            ONE_ROW=rows == 1,
            ONE_COL=cols == 1,
            ALL_HEADS=own_heads == 1,
            **_options(q, v, spec, blocks),
        )
    return dbias if own_batch == parts else dbias.sum(0, keepdim=True)
