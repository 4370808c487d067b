"""PFFN: a feed-forward layer whose weights are generated from the sample's features, written as attention (GDPA).

    K_h = w1_h(X_sum),  V_h = w2_h(X_sum)          [B, dff, H, head_dim], generated
    ln  = LayerNorm(S)                             over H · head_dim, no affine
    g_h = act(scale · ln_h K_hᵀ) V_h               no softmax: dff is the hidden width of the layer
    out = RMSNorm(g + ln) + S                      over H · head_dim, no affine

Sources: generated weights and GDPA, "Kunlun" (arXiv:2602.10016), after InterFormer's PFFN (arXiv:2411.09852); norms and
residuals as in production, PyTorch blog "Towards free normalization" (2026-07-10); "keys" of length dff as in
facebookresearch/ads_model_kernel_library.

Choices where the public record contradicts itself or is silent:
- Scale. The paper divides scores by the longest sequence length, the kernel library multiplies *after* the activation and
  by 1 by default, the blog's block has no scale. Default here: 1/√head_dim before the activation, which keeps the scores of
  normalised rows near 1; ``scale`` takes any number, 1.0 for the blog's block, 1/max_len for the paper's.
- Generator. w1, w2: a linear map over tokens from n_sum to dff, an activation, then a linear map over features, each. The
  values start smaller by √dff, as the second layer of an ordinary feed-forward layer does.
- Activation: one for all heads, GELU (benchmarks use it; SiLU is mentioned too).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_heads, check_positive
from .mlp import TokenMix, activation

EPS = 1e-5


class PFFN(nn.Module):
    """``forward(s [B, L, d], x_sum [B, n_sum, d_sum])`` gives [B, L, d]; every position is treated alone.

    Args:
        dff: hidden width per head. scale: factor of the scores, None for 1/√head_dim.
    """

    def __init__(
        self, d: int, n_heads: int, n_sum: int, d_sum: int, dff: int, act: str = "gelu", scale: float | None = None
    ) -> None:
        super().__init__()
        check_heads(d, n_heads)
        check_positive(n_sum=n_sum, d_sum=d_sum, dff=dff)
        self.d, self.n_heads, self.head_dim = d, n_heads, d // n_heads
        self.act, self.scale = activation(act), self.head_dim**-0.5 if scale is None else scale
        self.key_tokens, self.value_tokens = TokenMix(n_sum, dff), TokenMix(n_sum, dff)
        self.key, self.value = nn.Linear(d_sum, d), nn.Linear(d_sum, d)
        with torch.no_grad():
            self.value.weight.mul_(dff**-0.5)
            self.value.bias.zero_()

    def generate(self, x_sum: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, H, dff, head_dim] of each sample."""
        k = self.key(F.silu(self.key_tokens(x_sum)))
        v = self.value(F.silu(self.value_tokens(x_sum)))
        shape = (self.n_heads, self.head_dim)
        return k.unflatten(-1, shape).transpose(1, 2), v.unflatten(-1, shape).transpose(1, 2)

    def forward(self, s: Tensor, x_sum: Tensor) -> Tensor:
        k, v = self.generate(x_sum)
        ln = F.layer_norm(s, (self.d,), eps=EPS)
        q = ln.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        g = self.act(q @ k.transpose(-1, -2) * self.scale) @ v
        g = g.transpose(1, 2).flatten(-2) + ln
        return F.rms_norm(g, (self.d,), eps=EPS) + s


class LinearPFFN(nn.Module):
    """InterFormer's linear form (arXiv:2411.09852, appendix): ``out = S W``, ``W = X_sumᵀ A`` [B, d, d].

    ``A`` [n_sum, d] is learned and starts with variance 1/(n_sum · d): for features of size 1,
    the result has the size of S.
    """

    def __init__(self, d: int, n_sum: int) -> None:
        super().__init__()
        check_positive(d=d, n_sum=n_sum)
        self.mix = nn.Parameter(torch.randn(n_sum, d) * (n_sum * d) ** -0.5)

    def forward(self, s: Tensor, x_sum: Tensor) -> Tensor:
        return s @ (x_sum.transpose(1, 2) @ self.mix)
