"""Rotary position and time encoding (RoPE and ROTE).

    angle[b, t, i] = t · θ_i + τ[b, t] · φ_i,     τ = log(1 + age / t_scale)
    (x_2i, x_2i+1) → (x_2i cos − x_2i+1 sin,  x_2i sin + x_2i+1 cos)

RoPE: arXiv:2104.09864, θ_i = base^(−2i/head_dim), pairs interleaved. ROTE is Kunlun's extension by the age of an event
(arXiv:2602.10016), so that scores depend on how many events *and* how much time lie between two events.

The public record has neither t_scale nor φ. Chosen: t_scale = one day, as a public digest of Kunlun has it; φ_i = θ_i
with a base of 100, because τ stays below 6 for ages of a year, where base 10,000 would leave most pairs unturned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

DAY = 86_400.0


class Rotation(NamedTuple):
    """Cosines and sines of the angles, [B, L, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """``forward(age [B, L])`` in seconds gives the :class:`Rotation` that all layers of a stack apply with ``rotate``.

    Angles are computed in fp32 (fp64 for fp64 ages), whatever the model's dtype: positions do not fit into bf16.

    Args:
        time: False for positions only (plain RoPE).
    """

    def __init__(
        self, head_dim: int, base: float = 10_000.0, time_base: float = 100.0, t_scale: float = DAY, time: bool = True
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim: got {head_dim}; allowed: even numbers")
        if not t_scale > 0:
            raise ValueError(f"t_scale: got {t_scale}; allowed: positive seconds")
        self.head_dim, self.base, self.time_base, self.t_scale, self.time = head_dim, base, time_base, t_scale, time

    def angles(self, age: Tensor) -> Tensor:
        """[B, L, head_dim / 2]."""
        dtype = torch.float64 if age.dtype == torch.float64 else torch.float32
        pair = torch.arange(0, self.head_dim, 2, device=age.device, dtype=dtype) / self.head_dim
        position = torch.arange(age.shape[1], device=age.device, dtype=dtype)
        angles = (position[:, None] * self.base**-pair).expand(age.shape[0], -1, -1)
        if not self.time:
            return angles
        tau = torch.log1p(age.clamp(min=0).to(dtype) / self.t_scale)
        return angles + tau[..., None] * self.time_base**-pair

    def forward(self, age: Tensor) -> Rotation:
        angles = self.angles(age)
        return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn interleaved pairs of ``x`` [B, L, H, head_dim]; the dtype of x stays."""
    cos, sin = (t[:, :, None].to(x.dtype) for t in rotation)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
