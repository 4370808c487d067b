"""Argument checks that jagged_attention, gdpa and block_attention share. `op` is the public function at fault."""

import torch
from torch import Tensor

from gemopt.kernels.spec import ACTIVATIONS, AttentionSpec
from gemopt.ops.checks import check, check_index, check_same_device, check_tensor, same_size

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_call(op: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, mixed: bool = False) -> None:
    """Everything that can be told before the kernels run. mixed: q has a dtype of its own."""
    _check_packed(op, q, k, v, mixed)
    _check_indices(op, q, spec)
    for name, table in (("bias", spec.bias), ("mask", spec.mask)):
        if table is not None:
            _check_table(op, name, table, q)
    check_sizes(op, q, k, v, spec)
    _check_options(op, q, spec)


def check_sizes(op: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """Sizes against each other, as far as they are plain ints: all of them when the kernel runs."""
    if not same_size(k.shape[0], v.shape[0]):
        raise ValueError(f"{op}: k has {k.shape[0]} rows but v has {v.shape[0]}")
    if not same_size(k.shape[1], v.shape[1]):
        raise ValueError(f"{op}: k has {k.shape[1]} heads but v has {v.shape[1]}")
    if not same_size(q.shape[2], k.shape[2]):
        raise ValueError(f"{op}: q has head_dim {q.shape[2]} but k has {k.shape[2]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if type(heads) is int and type(kv_heads) is int and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{op}: the heads of q must be a multiple of the heads of k, got {heads} and {kv_heads}")
    for name, pos, of, rows in (("q_positions", spec.q_positions, "q", q), ("k_positions", spec.k_positions, "k", k)):
        if pos is not None and not same_size(pos.shape[0], rows.shape[0]):
            raise ValueError(f"{op}: {name} has {pos.shape[0]} rows but {of} has {rows.shape[0]}")
    for name, table in (("bias", spec.bias), ("mask", spec.mask)):
        if table is not None:
            _check_table_sizes(op, name, table, spec.batch, heads)


def _check_packed(op: str, q: Tensor, k: Tensor, v: Tensor, mixed: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, x)
        if x.dim() != 3:
            raise ValueError(f"{op}: {name} must be [rows, heads, head_dim], got {x.dim()}-D")
        if x.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} must be floating (fp64, fp32, bf16, fp16), got {x.dtype}")
        other, like = ("k", k) if mixed and name == "v" else ("q", q)
        if x.dtype != like.dtype and not (mixed and name == "k"):
            raise ValueError(f"{op}: {name} is {x.dtype} but {other} is {like.dtype}")
        check_same_device(op, name, x, "q", q)


def _check_indices(op: str, q: Tensor, spec: AttentionSpec) -> None:
    indices = (
        ("q_offsets", spec.q_offsets),
        ("k_offsets", spec.k_offsets),
        ("q_positions", spec.q_positions),
        ("k_positions", spec.k_positions),
    )
    for name, index in indices:
        if index is not None:
            check_index(op, name, index)
            check_same_device(op, name, index, "q", q)
    q_offsets, k_offsets = spec.q_offsets, spec.k_offsets
    if q_offsets is None:
        elements = k_offsets.shape[0]
        check(type(elements) is not int or elements > 0, f"{op}: k_offsets must have at least one element, got 0")
    elif not same_size(q_offsets.shape[0], k_offsets.shape[0]):
        raise ValueError(f"{op}: q_offsets has {q_offsets.shape[0]} elements but k_offsets has {k_offsets.shape[0]}")


def _check_table(op: str, name: str, table: Tensor, q: Tensor) -> None:
    check_tensor(op, name, table)
    if name == "bias":
        check(table.dtype in DTYPES, lambda: f"{op}: bias must be floating (fp64, fp32, bf16, fp16), got {table.dtype}")
    else:
        check(table.dtype == torch.bool, lambda: f"{op}: mask must be bool, got {table.dtype}")
    check(table.dim() == 4, lambda: f"{op}: {name} must be [B or 1, H or 1, Lq, Lk], got {table.dim()}-D")
    check_same_device(op, name, table, "q", q)


def _check_table_sizes(op: str, name: str, table: Tensor, batch: object, heads: object) -> None:
    for dim, of, size in ((0, "sequences", batch), (1, "heads", heads)):
        given = table.shape[dim]
        if type(given) is int and given != 1 and not same_size(given, size):
            raise ValueError(f"{op}: {name} must have 1 or {size} in dim {dim} ({of}), got {given}")


def check_align(op: str, causal_align: str) -> None:
    if causal_align not in ("top_left", "bottom_right"):
        raise ValueError(f'{op}: causal_align must be "top_left" or "bottom_right", got {causal_align!r}')


def _check_options(op: str, q: Tensor, spec: AttentionSpec) -> None:
    if spec.bottom_right and not (spec.q_positions is None and spec.k_positions is None):
        raise ValueError(f'{op}: causal_align must be "top_left" when positions are given, got "bottom_right"')
    window = spec.window
    if len(window) != 2 or not all(type(w) is int and w >= -1 for w in window):
        raise ValueError(f"{op}: window must be two ints of at least -1, got {window!r}")
    _check_activations(op, q.shape[1], spec)
    seed, dropout_p = spec.seed, spec.dropout_p
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], got {dropout_p}")
    if dropout_p > 0.0:
        if seed is None:
            raise ValueError(f"{op}: seed must be given when dropout_p > 0")
        check_tensor(op, "seed", seed)
        if seed.dtype != torch.int64 or seed.dim() > 1 or not same_size(seed.numel(), 1):
            raise ValueError(f"{op}: seed must be one int64 element, got {seed.dtype} {list(seed.shape)}")
        check_same_device(op, "seed", seed, "q", q)


def _check_activations(op: str, heads: object, spec: AttentionSpec) -> None:
    if spec.softmax:
        return
    for name in spec.activations:
        if name not in ACTIVATIONS:
            raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if len(spec.activations) != 1 and not same_size(len(spec.activations), heads):
        raise ValueError(
            f"{op}: activation must be one name or one per head of q, got {len(spec.activations)} names for {heads} heads"
        )
