"""The sequence side of a Kunlun layer: what happens to one history in one layer.

    CompSkip      even layers: pool the history afresh, PFFN, no self-attention
                  odd layers:  self-attention, no PFFN, the pooled tokens of the layer before are used again
    without it    every layer: pool, PFFN, self-attention

"Kunlun" (arXiv:2602.10016). Secondary accounts agree on this parity in words; one has it swapped in its pseudo-code.
Event-level personalisation: width, heads, window, seeds, tokens and number of layers are those of the event type. A history
whose layers are used up keeps its last state and its last pooled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .checks import check_choice, check_heads, check_positive
from .hstu import HSTUBlock
from .inputs import History
from .pffn import PFFN
from .rotary import Rotary, Rotation
from .seed_pooling import SeedPooling
from .self_attention import SelfAttention

ATTENTIONS = ("window", "block", "full", "hstu")


@dataclass(frozen=True)
class EventConfig:
    """Sizes of the stack of one event type.

    ``attention``: "window" (``window`` keys to both sides), "block" (``block`` tokens), "full", or "hstu" (causal SiLU
    attention with gating). ``n_seeds`` are pooled and compressed to ``n_tokens`` by ``kron_rank`` Kronecker products.
    """

    d: int = 64
    n_heads: int = 2
    n_layers: int = 2
    attention: str = "window"
    window: int = 50
    block: int = 64
    n_seeds: int = 16
    n_tokens: int = 8
    kron_rank: int = 4
    dff: int = 64
    act: str = "gelu"

    def __post_init__(self) -> None:
        check_heads(self.d, self.n_heads)
        check_choice("attention", self.attention, ATTENTIONS)
        check_positive(n_layers=self.n_layers, window=self.window, block=self.block, dff=self.dff)
        check_positive(n_tokens=self.n_tokens, kron_rank=self.kron_rank)


def pools(layer: int, comp_skip: bool) -> bool:
    """Whether a layer pools histories afresh and applies the PFFN."""
    return not comp_skip or layer % 2 == 0


def attends(layer: int, comp_skip: bool) -> bool:
    """Whether a layer has self-attention."""
    return not comp_skip or layer % 2 == 1


def attention_of(config: EventConfig, max_len: int) -> nn.Module:
    if config.attention == "hstu":
        return HSTUBlock(config.d, config.n_heads, max_len)
    window = config.window if config.attention == "window" else None
    block = config.block if config.attention == "block" else None
    # The fused kernel of the block form turns values as well (PyTorch blog "TLX block attention", 2026-05-26).
    return SelfAttention(config.d, config.n_heads, window, block, rotate_values=block is not None)


class SequenceLayer(nn.Module):
    """One history in one layer.

    ``pool(history)`` gives tokens [B, n_tokens, d_out], or None in a layer that reuses them; ``forward(history, x_sum,
    rotation)`` gives the history after this layer, [B, L, d] as before.
    """

    def __init__(
        self, config: EventConfig, layer: int, comp_skip: bool, n_sum: int, d_sum: int, d_out: int, max_len: int
    ) -> None:
        super().__init__()
        self.pffn = self.seeds = self.attention = None
        if pools(layer, comp_skip):
            self.seeds = SeedPooling(config.d, config.n_heads, config.n_seeds, config.n_tokens, config.kron_rank)
            self.project = nn.Identity() if config.d == d_out else nn.Linear(config.d, d_out, bias=False)
            self.pffn = PFFN(config.d, config.n_heads, n_sum, d_sum, config.dff, config.act)
        if attends(layer, comp_skip):
            self.attention = attention_of(config, max_len)

    def pool(self, history: History) -> Tensor | None:
        return None if self.seeds is None else self.project(self.seeds(history.s, history.mask))

    def forward(self, history: History, x_sum: Tensor, rotation: Rotation) -> History:
        s = history.s
        if self.pffn is not None:
            s = self.pffn(s, x_sum)
        if self.attention is not None:
            s = self.attention(s, history.mask, rotation)
        return history._replace(s=s)


class SequenceStack(nn.Module):
    """All layers of one event type; ``rotation(history)`` serves all of them."""

    def __init__(
        self, config: EventConfig, n_layers: int, comp_skip: bool, n_sum: int, d_sum: int, d_out: int, max_len: int
    ) -> None:
        super().__init__()
        self.rotary = Rotary(config.d // config.n_heads)
        self.layers = nn.ModuleList(
            SequenceLayer(config, layer, comp_skip, n_sum, d_sum, d_out, max_len)
            for layer in range(min(n_layers, config.n_layers))
        )

    def rotation(self, history: History) -> Rotation:
        return self.rotary(history.age)
