"""Attention on sm_90 by the Gluon kernels: which calls they take, and how a call becomes launches.

Per-head score functions are launched run by run: heads of one function that stand side by side are a view of the packed
tensors, and a launch writes its own heads of the result.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
import triton
from torch import Tensor

from gemopt.kernels.gluon import launch, scores, table
from gemopt.kernels.gluon.launch import Call
from gemopt.kernels.spec import SOFTMAX, AttentionSpec
from gemopt.kernels.tiers import capability, multiprocessors
from gemopt.kernels.triton.split import combine, key_parts
from gemopt.kernels.triton.tiles import sequence_list, tile_list

MAX_ROWS = 1 << 30  # of a ragged descriptor


def refusal(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backward: bool = False) -> str | None:
    """Why these kernels do not take a call; None if they do."""
    return (
        unsupported_device(q, (9, 0))
        or unsupported_form(q, k, spec)
        or unsupported_sizes(q, k, v, spec)
        or _unconfigured(q, spec, backward)
    )


def unsupported_device(q: Tensor, wanted: tuple[int, int]) -> str | None:
    found = capability(q)
    if found is None:
        return f"needs a CUDA device, got {q.device.type}"
    return None if found == wanted else f"needs compute capability {wanted[0]}.{wanted[1]}"


def unsupported_form(q: Tensor, k: Tensor, spec: AttentionSpec) -> str | None:
    """What no kernel here does, on any device."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {q.dtype}"
    if spec.bias is not None or spec.mask is not None:
        return "has no bias and no mask"
    if spec.dropout_p > 0:
        return "has no dropout"
    if spec.masked and (spec.q_positions is not None or spec.k_positions is not None):
        return "counts rows, has no positions"
    if spec.block_size:
        return "has no blocks"
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    sharing = q.shape[1] // max(k.shape[1], 1)
    if any(first % sharing or heads % sharing for _, first, heads in runs(spec, q.shape[1])):
        return "needs one score function for the query heads of one key head"
    return None


def unsupported_sizes(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Sizes that no kernel here takes, on any device."""
    if q.shape[2] != v.shape[2]:
        return f"needs equal head dims, got {q.shape[2]} and {v.shape[2]}"
    if 0 in q.shape or 0 in k.shape or spec.batch < 1:
        return "needs rows and sequences"
    if max(spec.out_rows(q), k.shape[0]) >= MAX_ROWS:
        return f"needs fewer than 2^30 rows, got {max(spec.out_rows(q), k.shape[0])}"
    return None


def _unconfigured(q: Tensor, spec: AttentionSpec, backward: bool) -> str | None:
    shape = shape_of(q, spec)
    if table.forward_config(shape) is None or (backward and table.backward_form(shape, False, False) is None):
        return f"has no configuration for {shape}"
    return None


def shape_of(q: Tensor, spec: AttentionSpec) -> table.Shape:
    left, right = spec.window
    right = 0 if spec.causal else right
    visible = spec.max_k if left < 0 or right < 0 else min(spec.max_k, left + right + 1)
    return table.Shape(q.shape[2], spec.softmax, spec.masked, spec.max_q, visible)


def runs(spec: AttentionSpec, heads: int) -> list[tuple[str, int, int]]:
    """(score function, first head, heads) of neighbouring heads with one function."""
    if len(spec.activations) == 1:
        return [(spec.activations[0], 0, heads)]
    found, first = [], 0
    for name, group in groupby(spec.activations):
        size = len(list(group))
        found.append((name, first, size))
        first += size
    return found


def call_of(name: str, spec: AttentionSpec, dtype: torch.dtype, add_q: bool = False) -> Call:
    left, right = spec.window
    if spec.causal:
        right = 0
    post_scale = 1.0 if name == SOFTMAX else spec.post_scale
    return Call(scores.code(name, dtype), spec.scale, post_scale, left, right, spec.bottom_right, add_q, spec.shared)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, add_q: bool = False) -> tuple[Tensor, Tensor]:
    """out `[Tq, H, D]`, lse fp32 `[Tq, H]` (`[0, H]` unless softmax). Ask `refusal` first. add_q: out + q instead."""
    q, k, v = (launch.rows_of(x) for x in (q, k, v))
    heads, sharing, rows = q.shape[1], q.shape[1] // k.shape[1], spec.out_rows(q)
    split = None if add_q else split_of(q, k, spec)
    cfg = table.forward_config(shape_of(q, spec)) if split is None else split.cfg
    assert cfg is not None
    out = torch.empty((rows, *q.shape[1:]), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows if spec.softmax else 0, heads), dtype=torch.float32, device=q.device)
    parts = (1, 0) if split is None else (split.parts, split.step)
    tiles = tile_list(_queries(q, spec), spec.k_offsets, rows, cfg.parts * launch.M * cfg.group, split=parts)
    for name, first, size in runs(spec, heads):
        own, shared = slice(first, first + size), slice(first // sharing, (first + size) // sharing)
        arguments = (q[:, own], k[:, shared], v[:, shared], out[:, own])
        call = call_of(name, spec, q.dtype, add_q)
        if split is None:
            launch.run_forward(*arguments, lse, tiles, call, cfg)
            continue
        partial = torch.empty((split.parts, rows, size, q.shape[2]), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((split.parts, *lse.shape), dtype=torch.float32, device=q.device)
        launch.run_forward(*arguments, part_lse, tiles, call, cfg, partial)
        combine(partial, part_lse, out[:, own], lse, spec.softmax)
    return out, lse


@dataclass(frozen=True)
class Split:
    """Each sequence's keys in `parts` parts of `step` keys."""

    parts: int
    step: int
    cfg: launch.ForwardConfig


def split_of(q: Tensor, k: Tensor, spec: AttentionSpec) -> Split | None:
    """How the keys are split among programs; None: they are not."""
    cfg = table.forward_config(shape_of(q, spec), split=True)
    if cfg is None or spec.masked:
        return None
    tiles = spec.batch * q.shape[1] * triton.cdiv(spec.max_q, cfg.parts * launch.M * cfg.group)
    parts, step = key_parts(tiles, min(spec.max_k, k.shape[0]), multiprocessors(q.device.index or 0), cfg.keys)
    return Split(parts, step, cfg) if parts > 1 else None


def _queries(q: Tensor, spec: AttentionSpec) -> Tensor | int:
    """What a tile list knows of the queries."""
    return q.shape[0] if spec.q_offsets is None else spec.q_offsets


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    spec: AttentionSpec,
    add_q: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; add_q as in the forward.

    `torch.use_deterministic_algorithms` leaves out the form that adds dQ in any order.
    """
    dout, q, k, v = (launch.rows_of(x) for x in (dout, q, k, v))
    heads, sharing = q.shape[1], q.shape[1] // k.shape[1]
    shape = shape_of(q, spec)
    form = form_of(q, k, spec, shape)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dq = grads[0]
    if spec.shared and form == "two":  # one for each sequence
        dq = torch.empty(dout.shape, dtype=q.dtype, device=q.device)
    stats = dout  # a pointer that nobody reads, unless softmax
    if spec.softmax:
        assert out is not None and lse is not None
        stats = launch.statistics(launch.rows_of(out), dout, lse, spec.scale)
    sums = dq  # fp32 where dQ is summed in memory
    if form == "owner":
        sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        assert spec.q_offsets is not None
        q_tiles = k_tiles = sequence_list(spec.k_offsets, spec.q_offsets, k.shape[0], q.shape[0])
    else:
        q_tiles = k_tiles = tile_list(spec.k_offsets, _queries(q, spec), k.shape[0], 2 * launch.M)
        if form == "two":
            q_tiles = tile_list(_queries(q, spec), spec.k_offsets, dout.shape[0], 2 * launch.M)
        elif form == "ordered":
            shaped = (multiprocessors(q.device.index or 0), *q.shape)
            sums = torch.zeros(shaped, dtype=torch.float32, device=q.device)
            if add_q:
                sums[0] = dout
        else:
            sums = dout.float() if add_q else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for name, first, size in runs(spec, heads):
        own, shared = slice(first, first + size), slice(first // sharing, (first + size) // sharing)
        call = call_of(name, spec, q.dtype, add_q)
        x, y = (k[:, shared], v[:, shared]), (q[:, own], dout[:, own])
        dkdv = grads[1][:, shared], grads[2][:, shared]
        if form == "two":
            launch.run_side(y, x, (dq[:, own], dq[:, own]), stats, q_tiles, call, _side("query_side", shape), False)
            launch.run_side(x, y, dkdv, stats, k_tiles, call, _side("key_side", shape), True)
        else:
            target = dq[:, own] if form == "owner" else None
            launch.run_fused(x, y, dkdv, sums[..., own, :], target, stats, k_tiles, call, _side("fused", shape))
    if form in ("fused", "ordered"):
        dq = (sums.sum(0) if form == "ordered" else sums).to(q.dtype)
    elif spec.shared:
        dq = spec.gathered(dq, q)
    return dq, grads[1], grads[2]


def form_of(q: Tensor, k: Tensor, spec: AttentionSpec, shape: table.Shape) -> str:
    """ "owner", "fused", "two", or "ordered": the fused form with a sum of dQ for each program, made in order.

    The gradient of shared queries is one sum for all sequences, which the fused forms make in place.
    """
    # Sums for each program take no more than keys do.
    few = multiprocessors(q.device.index or 0) * q.shape[0] <= k.shape[0]
    deterministic = torch.are_deterministic_algorithms_enabled()
    form = table.backward_form(shape, deterministic, balanced(q, k, spec), few, spec.shared)
    assert form is not None
    return form


def balanced(q: Tensor, k: Tensor, spec: AttentionSpec) -> bool:
    """Whether whole sequences are fine enough a division of the work: at least four a program, the longest at most a quarter
    of a program's share. Sums of products are not known here; the product of mean lengths stands in for their mean."""
    sequences = spec.batch
    rounds = sequences * k.shape[1] / multiprocessors(q.device.index or 0)
    mean = spec.out_rows(q) * k.shape[0] / max(sequences, 1) ** 2
    return rounds >= 4 and spec.max_q * spec.max_k <= rounds * mean / 4


def _side(kernel: str, shape: table.Shape) -> launch.SideConfig:
    cfg = table.side_config(kernel, shape)
    assert cfg is not None
    return cfg
