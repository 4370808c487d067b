"""block_attention: softmax attention inside blocks of `block_size` rows that restart at each sequence.

Block c of a sequence holds its rows `c * block_size` up to the next block or the sequence's end:

    out[i] = Σ_j softmax_j(scale·q_i·k_j) v_j    over the keys j of the block of query i (up to i if causal)

Equal to jagged_attention with every block a sequence of its own, which is how devices without a kernel for it compute it.
"""

from torch import Tensor

from gemopt.kernels.spec import AttentionSpec
from gemopt.ops.attention import attend, default_scale

OP = "block_attention"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    block_size: int,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Block-diagonal softmax self-attention, `[T, H, Dv]`.

    Args:
        q: `[T, H, D]`; k `[T, Hkv, D]`; v `[T, Hkv, Dv]`, as in `gemopt.ops.jagged_attention`.
        offsets: int32 or int64 `[B + 1]`.
        max_seqlen: bound on the lengths, sizes launches.
        block_size: rows of a block, at least 1; the last block of a sequence may be shorter.
        scale: factor of QKᵀ; default `1 / sqrt(D)`.
        causal: a query sees the keys of its block up to its own row.
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value.
    """
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"{OP}: block_size must be an int of at least 1, got {block_size!r}")
    spec = AttentionSpec(
        offsets,
        offsets,
        max_seqlen,
        max_seqlen,
        default_scale(OP, q, scale),
        causal,
        False,
        (-1, -1),
        None,
        None,
        0.0,
        None,
        block_size=block_size,
    )
    return attend(OP, q, k, v, spec)


block_attention.__module__ = "gemopt.ops"
