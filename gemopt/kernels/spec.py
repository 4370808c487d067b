"""The arguments of jagged attention that are not packed tensors, shared by the kernels of all devices."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SOFTMAX = "softmax"
ACTIVATIONS = (
    "identity",
    "relu",
    "relu2",
    "leaky_relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "hardswish",
    "sigmoid",
)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """See `gemopt.ops.jagged_attention` and `gemopt.ops.gdpa` for the meaning of each field.

    `bottom_right` is their `causal_align`. `activations` is `("softmax",)`, one name of `ACTIVATIONS`, or one name per
    query head. `q_offsets` is None where the queries are shared: the `max_q` rows of q, with their positions, serve every
    sequence, and the rows of the output are those of the first sequence, then those of the second, and so on; a kernel
    without a form of its own for that calls `spread` first. `block_size` cuts every sequence into blocks that attend within
    themselves (0: it does not); a kernel without a form of its own for that calls `split_blocks` first.
    """

    q_offsets: Tensor | None
    k_offsets: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    bottom_right: bool
    window: tuple[int, int]
    q_positions: Tensor | None
    k_positions: Tensor | None
    dropout_p: float
    seed: Tensor | None
    bias: Tensor | None = None
    mask: Tensor | None = None
    activations: tuple[str, ...] = (SOFTMAX,)
    post_scale: float = 1.0
    block_size: int = 0

    @property
    def masked(self) -> bool:
        """Positions decide what a query sees."""
        return self.causal or self.window != (-1, -1)

    @property
    def softmax(self) -> bool:
        return self.activations == (SOFTMAX,)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.k_offsets.shape[0] - 1

    @property
    def shared(self) -> bool:
        """Every sequence has the same queries."""
        return self.q_offsets is None

    def out_rows(self, q: Tensor) -> int:
        """Rows of the output for `q`."""
        return self.batch * q.shape[0] if self.shared else q.shape[0]

    @property
    def uses_positions(self) -> bool:
        """Positions decide anything at all."""
        return self.masked or self.bias is not None or self.mask is not None

    def split_blocks(self, rows: int) -> "AttentionSpec":
        """The same computation with every block a sequence of its own; `rows` is a bound on `q_offsets[-1]`.

        Made of device operators only. There are at most `rows // block_size + B` blocks; those that do not exist are empty
        sequences at the end.
        """
        if self.block_size == 0:
            return self
        offsets = block_offsets(self.k_offsets, self.block_size, rows)
        longest = min(self.block_size, max(self.max_q, 1))
        return replace(self, q_offsets=offsets, k_offsets=offsets, max_q=longest, max_k=longest, block_size=0)

    def spread(self, q: Tensor) -> tuple[Tensor, "AttentionSpec"]:
        """The same computation with a copy of shared queries for every sequence: `[B * Lq, H, D]`, and the spec for that."""
        if not self.shared:
            return q, self
        rows, batch = q.shape[0], self.batch
        positions = None if self.q_positions is None else self.q_positions.repeat(batch)
        offsets = torch.arange(batch + 1, device=q.device) * rows
        return q.repeat(batch, 1, 1), replace(self, q_offsets=offsets, q_positions=positions, max_q=rows)

    def gathered(self, dq: Tensor, like: Tensor) -> Tensor:
        """Gradient of the shared queries `like` from those of the sequences, summed in fp32 (fp64 for fp64)."""
        wide = torch.float64 if dq.dtype == torch.float64 else torch.float32
        return dq.view(self.batch, *like.shape).sum(0, dtype=wide).to(like.dtype)


def block_offsets(offsets: Tensor, block_size: int, rows: int) -> Tensor:
    """int64 `[rows // block_size + B + 1]`: first rows of all blocks, then `offsets[-1]` for blocks that do not exist.

    Args:
        offsets: `[B + 1]`; block j of sequence b starts at `offsets[b] + j * block_size`.
        rows: at least `offsets[-1]`.
    """
    offsets = offsets.to(torch.int64)
    batch = offsets.shape[0] - 1
    if batch == 0:
        return offsets
    counts = (offsets.diff() + block_size - 1) // block_size
    ends = counts.cumsum(0)
    block = torch.arange(rows // block_size + batch + 1, device=offsets.device)
    owner = torch.searchsorted(ends, block, right=True).clamp_(max=batch - 1)
    first = offsets[owner] + (block - (ends - counts)[owner]) * block_size
    return torch.where(block < ends[-1], first, offsets[-1])
