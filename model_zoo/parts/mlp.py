"""The multi-layer perceptron that every recommendation paper uses, and two of its relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_choice

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    check_choice("activation", name, tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """Linear maps from ``sizes[0]`` to ``sizes[-1]`` over the last axis, with an activation between them."""

    def __init__(self, sizes: Sequence[int], act: str = "silu") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"sizes: got {list(sizes)}; allowed: two or more widths")
        self.act = activation(act)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x)


class TokenMix(nn.Module):
    """Linear map over the *token* axis: ``Y = W X``, [B, n_in, d] to [B, n_out, d].

    Wukong calls it linear compression (LCB, arXiv:2403.02545), InterFormer LCE (arXiv:2411.09852).
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)
