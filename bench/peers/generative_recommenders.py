"""The Triton HSTU attention of generative-recommenders as a contestant of `bench/kernels.py`; README.md beside this file
says how to get it.

It computes silu(scale · q·k) / max_q over the keys up to the query's own, times v: ours divided by a constant. Before it
is timed, its output and gradients on the first and the last sequence are compared with plain torch in fp32.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

try:
    from generative_recommenders import common
    from generative_recommenders.ops.triton import triton_hstu_attention as hstu
except ModuleNotFoundError as error:
    raise SystemExit(
        f"bench/peers/generative_recommenders.py: {error}; put a checkout on PYTHONPATH, see bench/peers/README.md"
    ) from error

NAME = "generative-recommenders"
TOLERANCE = 0.03  # of a tensor's norm; its dq is rounded to bf16 after every block of keys

# Its autotuner takes the best launch of one length for every other, and of one form of loads for the other, unless told.
common.set_use_runtime_max_seq_len(True)
for _kernel in (hstu._hstu_attn_fwd, hstu._hstu_attn_bwd):
    if "ENABLE_TMA" not in _kernel.keys:
        _kernel.keys.append("ENABLE_TMA")


def computes(cell: Any, data: Any) -> bool:
    """Causal SiLU attention of packed rows to themselves, no window, and a head that fills a block."""
    return (
        cell.op == "attention"
        and cell.act == "silu"
        and cell.causal
        and not cell.block
        and tuple(cell.window) == (-1, -1)
        and cell.dim >= 16
        and cell.dim & (cell.dim - 1) == 0
        and data.q_lens == data.k_lens
    )


def contestants(cell: Any, data: Any) -> dict[str, dict[str, Any]]:
    """Its kernels with plain loads, its default, and on Hopper also with loads by tensor descriptors."""
    if not computes(cell, data):
        return {}
    hopper = data.q.is_cuda and torch.cuda.get_device_capability(data.q.device)[0] == 9
    found = {}
    for name, descriptors in {NAME: False, f"{NAME}-tma": True}.items():
        if descriptors and not hopper:
            continue
        try:
            found[name] = _contestant(data, descriptors)
        except Exception as error:  # one form that this Triton cannot compile, or that is wrong, does not cost the other
            why = (str(error).strip().splitlines() or [""])[0]
            print(f"    {name}: left out ({type(error).__name__}: {why})", file=sys.stderr)
            continue
        for tuned in (hstu._hstu_attn_fwd, hstu._hstu_attn_bwd):
            print(f"    {name}: {getattr(tuned, 'best_config', 'not tuned')}", file=sys.stderr)
    return found


def _contestant(data: Any, descriptors: bool) -> dict[str, Any]:
    spec = data.spec
    q, k, v = (x.detach().requires_grad_() for x in (data.q, data.k, data.v))
    uneven = min(data.q_lens) < max(data.q_lens)  # longest first, as in its own benchmark

    def forward() -> Tensor:
        return hstu.triton_hstu_mha(
            N=spec.max_q, alpha=spec.scale, q=q, k=k, v=v, seq_offsets=spec.q_offsets,
            sort_by_length=uneven, enable_tma=descriptors,
        )  # fmt: skip

    out = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), data.dout, retain_graph=True)

    _check(data, out, backward())
    return {"forward": forward, "backward": backward}


def _check(data: Any, out: Tensor, grads: tuple[Tensor, ...]) -> None:
    for b in {0, len(data.q_lens) - 1}:
        start = sum(data.q_lens[:b])
        rows = slice(start, start + data.q_lens[b])
        q, k, v = (x[rows].detach().float().requires_grad_() for x in (data.q, data.k, data.v))
        scores = torch.nn.functional.silu(torch.einsum("ihd,jhd->hij", q, k) * data.spec.scale)
        expected = torch.einsum("hij,jhd->ihd", scores.tril() / data.spec.max_q, v)
        wanted = (expected.detach(), *torch.autograd.grad(expected, (q, k, v), data.dout[rows].float()))
        for what, got, want in zip(("output", "dq", "dk", "dv"), (out, *grads), wanted, strict=True):
            error = float((got.detach()[rows].float() - want).norm() / want.norm())
            if not error < TOLERANCE:  # NaN too
                raise RuntimeError(f"its {what} of sequence {b} differs from torch's by {error:.2g} of its norm")
