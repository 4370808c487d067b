"""Attention on sm_100: which calls these kernels take, and how a call becomes launches.

Not yet run on hardware, therefore opt-in (`gemopt.kernels.tiers.is_blackwell`).
"""

import torch
from torch import Tensor

from gemopt.kernels.gluon import attention as hopper
from gemopt.kernels.gluon.blackwell import launch
from gemopt.kernels.gluon.launch import rows_of, statistics
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton.tiles import tile_list


def refusal(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Why these kernels do not take a call; None if they do."""
    return hopper.unsupported_device(q, (10, 0)) or unsupported(q, k, v, spec)


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """`refusal`, the device left out."""
    if spec.shared:
        return "has no queries of its own for every sequence"
    reason = hopper.unsupported_form(q, k, spec) or hopper.unsupported_sizes(q, k, v, spec)
    if reason is None and q.shape[2] not in launch.FORWARDS:
        reason = f"has no configuration for head dim {q.shape[2]}"
    return reason


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out `[Tq, H, D]`, lse fp32 `[Tq, H]` (`[0, H]` unless softmax). Ask `refusal` first."""
    q, k, v = (rows_of(x) for x in (q, k, v))
    heads, sharing = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0] if spec.softmax else 0, heads), dtype=torch.float32, device=q.device)
    tiles = tile_list(spec.q_offsets, spec.k_offsets, q.shape[0], launch.PARTS * launch.M)
    for name, first, size in hopper.runs(spec, heads):
        own, shared = slice(first, first + size), slice(first // sharing, (first + size) // sharing)
        call = hopper.call_of(name, spec, q.dtype)
        cfg = launch.FORWARDS[q.shape[2]]
        launch.run_forward(q[:, own], k[:, shared], v[:, shared], out[:, own], lse, tiles, call, cfg)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, the same bits in every run."""
    dout, q, k, v = (rows_of(x) for x in (dout, q, k, v))
    heads, sharing = q.shape[1], q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    stats = dout  # a pointer that nobody reads, unless softmax
    if spec.softmax:
        assert out is not None and lse is not None
        stats = statistics(rows_of(out), dout, lse, spec.scale)
    q_tiles = tile_list(spec.q_offsets, spec.k_offsets, q.shape[0], launch.M)
    k_tiles = tile_list(spec.k_offsets, spec.q_offsets, k.shape[0], launch.M)
    cfg = launch.SIDES[q.shape[2]]
    for name, first, size in hopper.runs(spec, heads):
        own, shared = slice(first, first + size), slice(first // sharing, (first + size) // sharing)
        call = hopper.call_of(name, spec, q.dtype)
        x, y = (k[:, shared], v[:, shared]), (q[:, own], dout[:, own])
        launch.run_side(y, x, (dq[:, own], dq[:, own]), stats, q_tiles, call, cfg, False)
        launch.run_side(x, y, (dk[:, shared], dv[:, shared]), stats, k_tiles, call, cfg, True)
    return dq, dk, dv
