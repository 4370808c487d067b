"""The activations of GDPA and their derivatives, on scores `[n, H, Lq, Lk]`, through PyTorch's own kernels.

Over the scores s:

    identity s    relu max(s, 0)    relu2 max(s, 0)²    leaky_relu max(s, 0) + 0.01 min(s, 0)    sigmoid 1 / (1 + e⁻ˢ)
    gelu s Φ(s)   gelu_tanh s (1 + tanh(√(2/π) (s + 0.044715 s³))) / 2    silu s sigmoid(s)    hardswish s relu6(s + 3) / 6
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten
LEAK = 0.01

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda s: s.clone(),
    "relu": aten.relu.default,
    "relu2": lambda s: aten.relu.default(s).square_(),
    "leaky_relu": lambda s: aten.leaky_relu.default(s, LEAK),
    "gelu": aten.gelu.default,
    "gelu_tanh": lambda s: aten.gelu.default(s, approximate="tanh"),
    "silu": aten.silu.default,
    "hardswish": aten.hardswish.default,
    "sigmoid": aten.sigmoid.default,
}

# (gradient, scores) -> gradient * derivative
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda g, s: g.clone(),
    "relu": lambda g, s: aten.threshold_backward.default(g, s, 0),
    "relu2": lambda g, s: aten.relu.default(s).mul_(2).mul_(g),
    "leaky_relu": lambda g, s: aten.leaky_relu_backward.default(g, s, LEAK, False),
    "gelu": aten.gelu_backward.default,
    "gelu_tanh": lambda g, s: aten.gelu_backward.default(g, s, approximate="tanh"),
    "silu": aten.silu_backward.default,
    "hardswish": aten.hardswish_backward.default,
    "sigmoid": lambda g, s: aten.sigmoid_backward.default(g, aten.sigmoid.default(s)),
}


def _heads_of(names: Sequence[str]) -> dict[str, list[int]]:
    heads: dict[str, list[int]] = {}
    for head, name in enumerate(names):
        heads.setdefault(name, []).append(head)
    return heads


def value(scores: Tensor, names: Sequence[str]) -> Tensor:
    """A new tensor: the one activation in `names` of all scores, or one per head (dim 1)."""
    groups = _heads_of(names)
    if len(groups) == 1:
        return VALUES[names[0]](scores)
    out = torch.empty_like(scores)
    for name, heads in groups.items():
        out[:, heads] = VALUES[name](scores[:, heads])
    return out


def gradient(grad: Tensor, scores: Tensor, names: Sequence[str]) -> Tensor:
    """A new tensor: `grad` times the derivative of the activation at `scores`."""
    groups = _heads_of(names)
    if len(groups) == 1:
        return GRADIENTS[names[0]](grad, scores)
    out = torch.empty_like(scores)
    for name, heads in groups.items():
        out[:, heads] = GRADIENTS[name](grad[:, heads], scores[:, heads])
    return out
