"""The arguments of jagged attention that are not packed tensors, shared by the kernels of all devices."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """See `gemopt.ops.jagged_attention` for the meaning of each field; `bottom_right` is its `causal_align`."""

    q_offsets: Tensor
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

    @property
    def masked(self) -> bool:
        """Positions decide what a query sees."""
        return self.causal or self.window != (-1, -1)
