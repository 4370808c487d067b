"""What the two forms of pffn share: their arguments after q, k and v, and the norms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemopt.kernels.spec import AttentionSpec

SCHEMA = (
    "Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, str activation, float scale, float post_scale, "
    "float eps, float? rms_eps, Tensor? ln_weight, Tensor? ln_bias, Tensor? rms_weight"
)
WEIGHTS = 9  # where the weights stand among the arguments after q, k, v


class Norms(NamedTuple):
    """The last arguments: of LayerNorm and RMSNorm, weights as `[H·D]` in the dtype of the arithmetic, or None."""

    eps: float
    rms_eps: float
    weight: Tensor | None
    bias: Tensor | None
    rms_weight: Tensor | None


def spec_of(args: tuple[Any, ...]) -> AttentionSpec:
    q_offsets, k_offsets, max_q, max_k, activation, scale, post_scale, *_ = args
    names = tuple(activation.split(","))
    return AttentionSpec(
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        scale,
        False,
        False,
        (-1, -1),
        None,
        None,
        0.0,
        None,
        None,
        None,
        names,
        post_scale,
    )


def norms_of(args: tuple[Any, ...], dtype: torch.dtype) -> Norms:
    """torch takes the machine epsilon of the dtype it computes in where RMSNorm is given none."""
    eps, rms_eps, *weights = args[WEIGHTS - 2 :]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if rms_eps is None:
        rms_eps = torch.finfo(wide).eps
    return Norms(eps, rms_eps, *(None if w is None else w.reshape(-1).to(wide) for w in weights))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
