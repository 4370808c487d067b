"""The attention op behind jagged_attention, gdpa and block_attention, and jagged_attention itself.

For sequence b with queries i and keys j (rows counted from the sequence's start), with s_ij = scale·q_i·k_j + bias_ij:

    softmax     out[i] = Σ_j w_ij v_j,   w_ij = drop_ij · exp(s_ij) / Σ_visible exp(s_ij)
    activation  out[i] = post_scale · Σ_j drop_ij · act(s_ij) v_j

over the keys that query i sees; a query that sees none (or whose sequence has no keys) gives 0 and has no gradient. With a
softmax the forward also returns the log of the denominator, from which the backward recomputes the weights (Dao et al.,
"FlashAttention", 2022). The backward is an op of its own, so that a compiled graph holds one node per direction.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemopt.kernels.spec import SOFTMAX, AttentionSpec
from gemopt.ops.attention_checks import check_align, check_call, check_sizes
from gemopt.ops.define import op
from gemopt.ops.dispatch import attention_kernels

_SPEC_SCHEMA = (
    "Tensor? q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, float scale, bool causal, bool bottom_right, "
    "int window_left, int window_right, Tensor? q_positions, Tensor? k_positions, float dropout_p, Tensor? seed, "
    "Tensor? bias, Tensor? mask, str activations, float post_scale, int block_size"
)
_BIAS, _MASK, _ACTIVATIONS = 13, 14, 15  # where these stand among the arguments after q, k, v
_TENSORS = (0, 1, 9, 10, 12, _BIAS, _MASK)


def _spec(args: tuple[Any, ...]) -> AttentionSpec:
    q_offsets, k_offsets, max_q, max_k, scale, causal, bottom_right, left, right, q_pos, k_pos, p, seed, *more = args
    bias, mask, activations, post_scale, block_size = more
    return AttentionSpec(
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        scale,
        causal,
        bottom_right,
        (left, right),
        q_pos,
        k_pos,
        p,
        seed,
        bias,
        mask,
        tuple(activations.split(",")),
        post_scale,
        block_size,
    )


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@op(
    "jagged_attention",
    f"(Tensor q, Tensor k, Tensor v, {_SPEC_SCHEMA}) -> (Tensor, Tensor)",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    spec = _spec(args)
    check_sizes("jagged_attention", q, k, v, spec)
    forward, _ = attention_kernels(q)
    with torch._C._DisableAutocast():  # the caller's autocast is about the op's inputs, not about its arithmetic
        return forward(q, k, v, spec)


@_attention.fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    rows, heads = _spec(args).out_rows(q), q.shape[1]
    lse_rows = rows if args[_ACTIVATIONS] == SOFTMAX else 0
    return q.new_empty((rows, heads, v.shape[2])), q.new_empty((lse_rows, heads), dtype=_lse_dtype(q))


@op(
    "jagged_attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse, bool bias_grad, {_SPEC_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, bias_grad: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, backward = attention_kernels(q)
    with torch._C._DisableAutocast():
        dq, dk, dv, dbias = backward(dout, q, k, v, out, lse, _spec(args), bias_grad)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias.to(args[_BIAS].dtype)


@_attention_backward.fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, bias_grad: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = args[_BIAS].new_empty(args[_BIAS].shape) if bias_grad else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *args = inputs
    softmax = args[_ACTIVATIONS] == SOFTMAX
    ctx.save_for_backward(q, k, v, *(output if softmax else (None, None)), *(args[i] for i in _TENSORS))
    ctx.rest = [None if i in _TENSORS else x for i, x in enumerate(args)]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    rest: list[Any] = [None] * len(ctx.rest)
    if dout is None:
        return (None, None, None, *rest)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    args = list(ctx.rest)
    for i, tensor in zip(_TENSORS, tensors, strict=True):
        args[i] = tensor
    bias_grad = ctx.needs_input_grad[3 + _BIAS]
    dq, dk, dv, dbias = _attention_backward(dout, q, k, v, out, lse, bias_grad, *args)
    rest[_BIAS] = dbias if bias_grad else None
    needed = (g if n else None for g, n in zip((dq, dk, dv), ctx.needs_input_grad, strict=False))
    return (*needed, *rest)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError(
        "gemopt.ops.jagged_attention can be differentiated once; its gradient has no gradient. "
        "Use gemopt.ops.reference.jagged_attention for second derivatives."
    )


_attention.autograd(_backward, _setup)
_attention_backward.autograd(_no_double_backward, None)


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Check the arguments in the name of the public function `op`, then call the op: `[Tq, H, Dv]`."""
    check_call(op, q, k, v, spec)
    if spec.shared:
        spec = replace(spec, max_q=q.shape[0])
    out, _ = _attention(
        q,
        k,
        v,
        spec.q_offsets,
        spec.k_offsets,
        spec.max_q,
        spec.max_k,
        float(spec.scale),
        bool(spec.causal),
        spec.bottom_right,
        *spec.window,
        spec.q_positions,
        spec.k_positions,
        float(spec.dropout_p),
        spec.seed if spec.dropout_p > 0.0 else None,
        spec.bias,
        spec.mask,
        ",".join(spec.activations),
        float(spec.post_scale),
        spec.block_size,
    )
    return out


def default_scale(op: str, q: Tensor, scale: float | None) -> float:
    """`1 / sqrt(head_dim)` unless a scale is given."""
    if scale is not None:
        return scale
    if isinstance(q, Tensor) and q.dim() == 3 and q.shape[2] == 0:
        raise ValueError(f"{op}: head_dim must be at least 1 when scale is not given, got 0")
    return 1.0 / math.sqrt(q.shape[2]) if isinstance(q, Tensor) and q.dim() == 3 else 1.0


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
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
    bias: Tensor | None = None,
    mask: Tensor | None = None,
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
            q_offsets None: all rows of q, and `q_positions`, serve every sequence. The output is then `[B * Tq, H, Dv]`,
            sequence by sequence; the gradient of q is summed over the sequences in fp32 (fp64 for fp64), in a fixed order
            under `torch.use_deterministic_algorithms`. max_q is not looked at. Dropout differs between sequences.
        max_q, max_k: bounds on the lengths, from padded shapes. They size launches; a longer sequence is still right.
        scale: factor of QKᵀ; default `1 / sqrt(D)`.
        causal: query i sees key j only if `pos(j) <= pos(i)`.
        causal_align: "top_left" counts positions from both starts; "bottom_right" aligns the ends, so that
            `pos(i) = i + len_k - len_q`. It shifts the window as well.
        window: `(left, right)`: only keys with `pos(i) - left <= pos(j) <= pos(i) + right`; -1 is unlimited.
        q_positions, k_positions: int32 or int64 `[Tq]`, `[Tk]`, positions in place of the row numbers, for masks with
            holes and pruned queries. A missing one counts rows.
        bias: `[B or 1, H or 1, Lq or 1, Lk or 1]`, floating, any strides; added to the scaled scores at (sequence, head,
            position of the query, position of the key), positions being row numbers, unshifted, where none are given.
            Differentiable; its gradient is summed in fp32 (fp64 for fp64).
        mask: bool, shaped and read like `bias`; False hides a key from a query, on top of `causal` and `window`.
        dropout_p: probability of dropping a weight; the others are multiplied by `1 / (1 - dropout_p)`.
        seed: int64, one element, needed when `dropout_p > 0`. Equal seeds drop equal weights (`gemopt.ops.dropout`).
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value; on the CPU also offsets that
            decrease or pass the rows, and positions outside `bias` or `mask` (elsewhere these read no bias, and hidden).
    """
    check_align("jagged_attention", causal_align)
    spec = AttentionSpec(
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        default_scale("jagged_attention", q, scale),
        causal,
        causal_align == "bottom_right",
        window,
        q_positions,
        k_positions,
        dropout_p,
        seed,
        bias,
        mask,
    )
    return attend("jagged_attention", q, k, v, spec)


jagged_attention.__module__ = "gemopt.ops"
