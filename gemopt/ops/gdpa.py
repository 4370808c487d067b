"""gdpa: attention with an activation in place of the softmax, as in personalised feed-forward layers and HSTU.

    out[i] = post_scale · Σ_j drop_ij · act(scale·q_i·k_j + bias_ij) v_j    over the keys j that query i sees

Public definitions disagree on the scale: "Kunlun" (arXiv:2602.10016) divides the scores by a length before the activation,
HSTU (arXiv:2402.17152) and Meta's ads_model_kernel_library scale the activated scores. Both scales are explicit here.
Rows of scores do not know of each other, so the backward needs neither the output nor a log-sum.
"""

from collections.abc import Sequence

from torch import Tensor

from gemopt.kernels.spec import ACTIVATIONS, AttentionSpec
from gemopt.ops.attention import attend
from gemopt.ops.attention_checks import check_align

OP = "gdpa"


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str | Sequence[str],
    scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Generalised dot-product attention within each sequence of a packed batch, `[Tq, H, Dv]`.

    Args:
        activation: "identity", "relu", "relu2" (squared), "leaky_relu" (slope 0.01), "gelu" (erf), "gelu_tanh", "silu",
            "hardswish" or "sigmoid"; a sequence of H names gives one per query head.
        scale, post_scale: factors before and after the activation.
        the rest: as in `gemopt.ops.jagged_attention`. A hidden key adds 0, whatever the activation of 0 is.
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value.
    """
    check_align(OP, causal_align)
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{OP}: activation must be a name or a sequence of names, got {type(name).__name__}")
        if name not in ACTIVATIONS:
            raise ValueError(f"{OP}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if not names:
        raise ValueError(f"{OP}: activation must be one name or one per head of q, got none")
    if len(set(names)) == 1:
        names = names[:1] if isinstance(q, Tensor) and q.dim() == 3 and len(names) == q.shape[1] else names
    spec = AttentionSpec(
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        scale,
        causal,
        causal_align == "bottom_right",
        window,
        q_positions,
        k_positions,
        dropout_p,
        seed,
        bias,
        mask,
        names,
        post_scale,
    )
    return attend(OP, q, k, v, spec)


gdpa.__module__ = "gemopt.ops"
