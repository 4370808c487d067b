"""Rotary position and time encoding (RoPE and ROTE).

    angle[b, t, i] = t · θ_i + τ[b, t] · φ_i,     τ = log(1 + age / t_scale)
    (x_2i, x_2i+1) → (x_2i cos − x_2i+1 sin,  x_2i sin + x_2i+1 cos)

RoPE: arXiv:2104.09864, θ_i = base^(−2i/head_dim), pairs interleaved. ROTE is Kunlun's extension by the age of an event
(arXiv:2602.10016), so that scores depend on how many events *and* how much time lie between two events.

The public record has neither t_scale nor φ. Chosen: t_scale = one day, as a public digest of Kunlun has it; φ_i = θ_i
with a base of 100, because τ stays below 6 for ages of a year, where base 10,000 would leave most pairs unturned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DAY = 86_400.0


class Rotary(nn.Module):
    """``forward(age [B, L])`` in seconds gives the angles [B, L, head_dim / 2]; ``rotate`` applies them.

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
        self.t_scale, self.time = t_scale, time
        pair = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("theta", base**-pair, persistent=False)
        self.register_buffer("phi", time_base**-pair, persistent=False)
        self.theta: Tensor
        self.phi: Tensor

    def forward(self, age: Tensor) -> Tensor:
        position = torch.arange(age.shape[1], device=age.device, dtype=self.theta.dtype)
        angles = (position[:, None] * self.theta).expand(age.shape[0], -1, -1)
        if not self.time:
            return angles
        tau = torch.log1p(age.clamp(min=0).to(self.theta.dtype) / self.t_scale)
        return angles + tau[..., None] * self.phi


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn interleaved pairs of ``x`` [B, L, H, head_dim] by ``angles`` [B, L, head_dim / 2]; the dtype of x stays."""
    cos, sin = angles.cos()[:, :, None].to(x.dtype), angles.sin()[:, :, None].to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
