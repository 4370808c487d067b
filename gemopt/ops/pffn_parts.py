"""What the two forms of pffn share: their arguments after q, k and v, the norms, and how they are differentiated."""

from collections.abc import Callable, Sequence
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


def wide(x: Tensor) -> Tensor:
    """`[T, H·D]` in fp32, or fp64 if x is."""
    return x.flatten(1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def centred(x: Tensor, mean: Tensor) -> Tensor:
    """`wide` x less the mean of its rows, twice: what rounding leaves of it is divided by a deviation that may be 0."""
    x = x - mean[:, None]
    return x - x.mean(1, keepdim=True)


def layer_norm(x: Tensor, norm: Norms) -> tuple[Tensor, Tensor]:
    """LayerNorm of the rows of `wide` x, and its statistics `[2, T]` (mean, 1/deviation)."""
    mean = x.mean(1)
    x = centred(x, mean)
    rstd = (x.square().mean(1) + norm.eps).rsqrt()
    return affine(x * rstd[:, None], norm.weight, norm.bias), torch.stack([mean, rstd])


def rms_scale(x: Tensor, norm: Norms) -> Tensor:
    """1/sqrt(mean x² + eps) of the rows of `wide` x, `[T, 1]`."""
    return (x.square().mean(1, keepdim=True) + norm.rms_eps).rsqrt()


def layer_norm_gradient(dy: Tensor, n: Tensor, rstd: Tensor, norm: Norms) -> Tensor:
    """Gradient of what LayerNorm read, for that of its result; n is normalised, all `wide`, rstd `[T, 1]`."""
    dn = affine(dy, norm.weight, None)
    return (dn - dn.mean(1, keepdim=True) - n * (dn * n).mean(1, keepdim=True)) * rstd


def like_weights(sums: Sequence[Tensor | None], args: tuple[Any, ...], like: Tensor) -> list[Tensor]:
    """Gradients of the three weights as an op returns them: shaped and rounded as these, empty where there is none."""
    return [
        like.new_empty(0) if d is None else d.to(w.dtype).view(w.shape) for d, w in zip(sums, args[WEIGHTS:], strict=True)
    ]


def fake_gradients(like: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the backward of either form returns, without values; `like` is what dq is like."""
    weights = (like.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[WEIGHTS:])
    return like.new_empty(like.shape), k.new_empty(k.shape), v.new_empty(v.shape), *weights


def differentiate(form: Any, backward_op: Callable[..., Any], keeps_q: Callable[[Sequence[Tensor | None]], bool]) -> None:
    """Make `backward_op` the backward of `form`. keeps_q: whether it wants q, given the three weights."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, q_offsets, k_offsets, *rest = inputs
        _, *saved = output  # ln, stats, and the attention or its sum with ln
        weights = rest[WEIGHTS - 2 :]
        ctx.save_for_backward(q if keeps_q(weights) else None, k, v, *saved, q_offsets, k_offsets, *weights)
        ctx.rest = rest[: WEIGHTS - 2]
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * WEIGHTS
        if dout is None:
            return (None, None, None, *nothing, None, None, None)
        *tensors, w, b, u = ctx.saved_tensors
        *grads, dw, db, du = backward_op(dout, *tensors, *ctx.rest, w, b, u)
        given = (None if x is None else d for d, x in ((dw, w), (db, b), (du, u)))
        return (*grads, *nothing, *given)

    form.autograd(backward, setup)
