"""Gradients where scores are large: a saturated softmax has gradients near 0, which rounding of the saved statistics must
not swamp. Bound as everywhere: twice the fp32 reference's own error plus 4 ulp of the tensor's RMS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemopt.ops import jagged_attention, reference

LENGTHS = {"mixed": ([6, 2, 0, 1, 4], [6, 2, 0, 1, 4]), "single queries": ([1, 1, 1, 1], [7, 3, 1, 5])}


def results(
    op: Any, dtype: torch.dtype, tensors: tuple[Tensor, ...], cotangent: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    out = op(*leaves, *args, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))]


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("size", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_keep_their_digits(lengths: str, kind: str, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q_lengths, k_lengths = map(torch.tensor, LENGTHS[lengths])
    offsets = [torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (q_lengths, k_lengths)]
    rows = [int(o[-1]) for o in offsets]
    q = size * torch.randn(rows[0], 4, 3, generator=generator)
    k = size * torch.randn(rows[1], 4, 3, generator=generator)
    v = torch.randn(rows[1], 4, 5, generator=generator)
    cotangent = torch.randn(rows[0], 4, 5, generator=generator)
    near = torch.arange(8)[:, None] // 2 == torch.arange(8)[None] // 2
    options: dict[str, Any] = {"all": {}, "causal": {"causal": True}, "mask": {"mask": near[None, None]}}[kind]
    given = ((q, k, v), cotangent, *offsets, 8, 8)
    exact = results(reference.jagged_attention, torch.float64, *given, **options)
    plain = results(reference.jagged_attention, torch.float32, *given, **options)
    ours = results(jagged_attention, torch.float32, *given, **options)
    eps = torch.finfo(torch.float32).eps
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        assert rms(x - z) <= 2 * rms(y - z) + 4 * eps * rms(z), name
