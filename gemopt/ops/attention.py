"""jagged_attention: softmax(scale·QKᵀ)V inside each sequence of a packed batch.

For sequence b with queries i and keys j (rows counted from the sequence's start):

    out[i] = Σ_j w_ij v_j,   w_ij = drop_ij · exp(scale·q_i·k_j) / Σ_visible exp(scale·q_i·k_j)

over the keys that query i sees; a query that sees none (or whose sequence has no keys) gives 0 and has no gradient. The
forward also returns the log of the denominator, from which the backward recomputes the weights (Dao et al.,
"FlashAttention", 2022). The backward is an op of its own, so that a compiled graph holds one node per direction.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gemopt.kernels.spec import AttentionSpec
from gemopt.ops.checks import check_index, check_same_device, check_tensor, same_size
from gemopt.ops.dispatch import attention_kernels
from gemopt.ops.naming import op_name

_SPEC_SCHEMA = (
    "Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, float scale, bool causal, bool bottom_right, "
    "int window_left, int window_right, Tensor? q_positions, Tensor? k_positions, float dropout_p, Tensor? seed"
)
OP = "jagged_attention"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _spec(args: tuple[Any, ...]) -> AttentionSpec:
    q_offsets, k_offsets, max_q, max_k, scale, causal, bottom_right, left, right, q_pos, k_pos, p, seed = args
    return AttentionSpec(
        q_offsets, k_offsets, max_q, max_k, scale, causal, bottom_right, (left, right), q_pos, k_pos, p, seed
    )


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op(
    op_name("jagged_attention"),
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SPEC_SCHEMA}) -> (Tensor, Tensor)",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, *spec: Any) -> tuple[Tensor, Tensor]:
    _check_sizes(q, k, v, spec[9], spec[10])
    forward, _ = attention_kernels(q)
    with torch._C._DisableAutocast():  # the caller's autocast is about the op's inputs, not about its arithmetic
        return forward(q, k, v, _spec(spec))


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *spec: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    return q.new_empty((rows, heads, v.shape[2])), q.new_empty((rows, heads), dtype=_lse_dtype(q))


@torch.library.custom_op(
    op_name("jagged_attention_backward"),
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SPEC_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *spec: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = attention_kernels(q)
    with torch._C._DisableAutocast():
        return backward(dout, q, k, v, out, lse, _spec(spec))


@_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, *numbers, q_pos, k_pos, p, seed = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets, q_pos, k_pos, seed)
    ctx.numbers, ctx.p = numbers, p
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 13
    if dout is None:
        return (None, None, None, *rest)
    q, k, v, out, lse, q_offsets, k_offsets, q_pos, k_pos, seed = ctx.saved_tensors
    grads = _attention_backward(dout, q, k, v, out, lse, q_offsets, k_offsets, *ctx.numbers, q_pos, k_pos, ctx.p, seed)
    needed = (g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False))
    return (*needed, *rest)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError(
        "gemopt.ops.jagged_attention can be differentiated once; its gradient has no gradient. "
        "Use gemopt.ops.reference.jagged_attention for second derivatives."
    )


_attention.register_autograd(_backward, setup_context=_setup)
_attention_backward.register_autograd(_no_double_backward)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None, k_pos: Tensor | None) -> None:
    """Sizes against each other, as far as they are plain ints: all of them when the kernel runs."""
    if not same_size(k.shape[0], v.shape[0]):
        raise ValueError(f"{OP}: k has {k.shape[0]} rows but v has {v.shape[0]}")
    if not same_size(k.shape[1], v.shape[1]):
        raise ValueError(f"{OP}: k has {k.shape[1]} heads but v has {v.shape[1]}")
    if not same_size(q.shape[2], k.shape[2]):
        raise ValueError(f"{OP}: q has head_dim {q.shape[2]} but k has {k.shape[2]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if type(heads) is int and type(kv_heads) is int and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{OP}: the heads of q must be a multiple of the heads of k, got {heads} and {kv_heads}")
    for name, pos, of, rows in (("q_positions", q_pos, "q", q), ("k_positions", k_pos, "k", k)):
        if pos is not None and not same_size(pos.shape[0], rows.shape[0]):
            raise ValueError(f"{OP}: {name} has {pos.shape[0]} rows but {of} has {rows.shape[0]}")


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_pos: Tensor | None, k_pos: Tensor | None
) -> None:
    """Ranks, dtypes and devices."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(OP, name, x)
        if x.dim() != 3:
            raise ValueError(f"{OP}: {name} must be [rows, heads, head_dim], got {x.dim()}-D")
        if x.dtype not in DTYPES:
            raise ValueError(f"{OP}: {name} must be floating (fp64, fp32, bf16, fp16), got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{OP}: {name} is {x.dtype} but q is {q.dtype}")
    for name, index in (("q_offsets", q_offsets), ("k_offsets", k_offsets), ("q_positions", q_pos), ("k_positions", k_pos)):
        if index is not None:
            check_index(OP, name, index)
            check_same_device(OP, name, index, "q", q)
    check_same_device(OP, "k", k, "q", q)
    check_same_device(OP, "v", v, "q", q)
    if not same_size(q_offsets.shape[0], k_offsets.shape[0]):
        raise ValueError(f"{OP}: q_offsets has {q_offsets.shape[0]} elements but k_offsets has {k_offsets.shape[0]}")


def _check_options(
    q: Tensor, causal_align: str, positions: bool, window: tuple[int, int], dropout_p: float, seed: Tensor | None
) -> None:
    if causal_align not in ("top_left", "bottom_right"):
        raise ValueError(f'{OP}: causal_align must be "top_left" or "bottom_right", got {causal_align!r}')
    if causal_align == "bottom_right" and positions:
        raise ValueError(f'{OP}: causal_align must be "top_left" when positions are given, got {causal_align!r}')
    if len(window) != 2 or not all(type(w) is int and w >= -1 for w in window):
        raise ValueError(f"{OP}: window must be two ints of at least -1, got {window!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{OP}: dropout_p must be in [0, 1], got {dropout_p}")
    if dropout_p > 0.0:
        if seed is None:
            raise ValueError(f"{OP}: seed must be given when dropout_p > 0")
        check_tensor(OP, "seed", seed)
        if seed.dtype != torch.int64 or seed.dim() > 1 or not same_size(seed.numel(), 1):
            raise ValueError(f"{OP}: seed must be one int64 element, got {seed.dtype} {list(seed.shape)}")
        check_same_device(OP, "seed", seed, "q", q)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
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
    """Softmax attention within each sequence of a packed batch, `[Tq, H, Dv]`.

    Args:
        q: `[Tq, H, D]`, fp64, fp32, bf16 or fp16.
        k: `[Tk, Hkv, D]`; H is a multiple of Hkv, and query head h reads key head `h // (H / Hkv)`.
        v: `[Tk, Hkv, Dv]`.
        q_offsets, k_offsets: int32 or int64 `[B + 1]`, from 0, not decreasing; sequence b owns rows
            `offsets[b] : offsets[b + 1]`. Rows after the last offset belong to nobody: output and gradient 0.
        max_q, max_k: bounds on the lengths, from padded shapes. They size launches; a longer sequence is still right.
        scale: factor of QKᵀ; default `1 / sqrt(D)`.
        causal: query i sees key j only if `pos(j) <= pos(i)`.
        causal_align: "top_left" counts positions from both starts; "bottom_right" aligns the ends, so that
            `pos(i) = i + len_k - len_q`. It shifts the window as well.
        window: `(left, right)`: only keys with `pos(i) - left <= pos(j) <= pos(i) + right`; -1 is unlimited.
        q_positions, k_positions: int32 or int64 `[Tq]`, `[Tk]`, positions in place of the row numbers, for masks with
            holes and pruned queries. A missing one counts rows.
        dropout_p: probability of dropping a weight; the others are multiplied by `1 / (1 - dropout_p)`.
        seed: int64, one element, needed when `dropout_p > 0`. Equal seeds drop equal weights (`gemopt.ops.dropout`).
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value; on the CPU also offsets that
            decrease or pass the rows.
    """
    _check_tensors(q, k, v, q_offsets, k_offsets, q_positions, k_positions)
    _check_sizes(q, k, v, q_positions, k_positions)
    positions = q_positions is not None or k_positions is not None
    _check_options(q, causal_align, positions, window, dropout_p, seed)
    if scale is None:
        if q.shape[2] == 0:
            raise ValueError(f"{OP}: head_dim must be at least 1 when scale is not given, got 0")
        scale = 1.0 / math.sqrt(q.shape[2])
    out, _ = _attention(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        float(scale),
        bool(causal),
        causal_align == "bottom_right",
        window[0],
        window[1],
        q_positions,
        k_positions,
        float(dropout_p),
        seed if dropout_p > 0.0 else None,
    )
    return out


jagged_attention.__module__ = "gemopt.ops"
