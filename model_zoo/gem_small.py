"""GEMSmall: click-through prediction from several event histories, a small relative of Meta's GEM.

Each kind of event (liked, neutral, disliked) has its own history and its own transformer, as in InterFormer
(arXiv:2411.09852). The pooled histories, the candidate item and the user are tokens of a Wukong interaction
stack (arXiv:2403.02545), and an MLP gives the logit.

Plain padded PyTorch: every history is padded to the longest in the batch and every slot is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

USER_FEATURES = ("user_id", "user_age", "user_gender", "user_occupation")


@dataclass(frozen=True)
class GEMSmallConfig:
    """Sizes. ``vocabulary`` maps each id space (``item_id``, ``item_year``, ``genre``, ``gap`` and the user
    features) to its size, padding id 0 included."""

    vocabulary: dict[str, int]
    histories: tuple[str, ...] = ("liked", "neutral", "disliked")
    max_len: int = 200
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 2
    d_ffn: int = 256
    dropout: float = 0.0
    pooling: Literal["mean", "last"] = "mean"
    n_interactions: int = 2
    fm_rank: int = 8

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {self.d_model} and {self.n_heads}")
        if self.pooling not in ("mean", "last"):
            raise ValueError(f"pooling must be 'mean' or 'last', got {self.pooling!r}")
        if not self.histories:
            raise ValueError("histories must name at least one history, got none")


class EventLayer(nn.Module):
    """Pre-norm transformer layer on ``x`` [B, L, d]; ``visible`` [B, 1, 1, L] is True at real events."""

    def __init__(self, config: GEMSmallConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads, self.p = config.n_heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ffn = nn.Sequential(nn.Linear(d, config.d_ffn), nn.GELU(), nn.Linear(config.d_ffn, d))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, n, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=p)
        x = x + self.dropout(self.out(h.transpose(1, 2).reshape(b, n, d)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class HistoryEncoder(nn.Module):
    """Transformer over one history, pooled: ``x`` [B, L, d] and ``lengths`` [B] to [B, d]; empty gives 0."""

    def __init__(self, config: GEMSmallConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.position = nn.Embedding(config.max_len, config.d_model)
        self.layers = nn.ModuleList(EventLayer(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = positions[None, :] < lengths[:, None]
        x = x + self.position(positions)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        x = self.norm(x)
        if self.pooling == "mean":
            return (x * mask.unsqueeze(-1)).sum(1) / lengths.clamp(min=1).unsqueeze(-1)
        last = (lengths - 1).clamp(min=0)
        x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
        return x * (lengths > 0).unsqueeze(-1)


class WukongLayer(nn.Module):
    """``LN([FMB(X), LCB(X)] + X)`` on tokens X [B, n, d]: one half of the tokens from each block.

    FMB: the interactions ``X (Xᵀ Y)`` [n, k] with a learned projection Y [n, k], flattened, through an MLP.
    LCB: a linear map over the token axis.
    """

    def __init__(self, n_tokens: int, d_model: int, rank: int) -> None:
        super().__init__()
        self.n_fm = n_tokens // 2
        self.project = nn.Parameter(torch.randn(n_tokens, rank) / n_tokens**0.5)
        self.fm_norm = nn.LayerNorm(n_tokens * rank)
        self.fm = nn.Sequential(nn.Linear(n_tokens * rank, 128), nn.ReLU(), nn.Linear(128, self.n_fm * d_model))
        self.lcb = nn.Linear(n_tokens, n_tokens - self.n_fm, bias=False)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        products = x @ (x.transpose(1, 2) @ self.project)
        fm = self.fm(self.fm_norm(products.flatten(1))).view(b, self.n_fm, d)
        lcb = self.lcb(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(torch.cat([fm, lcb], dim=1) + x)


class GEMSmall(nn.Module):
    """``forward(batch)`` gives the click logits [B].

    ``batch`` holds the user features [B], ``item_id`` and ``item_year`` [B], ``item_genres`` [B, G], and for
    every history h ``h_item``, ``h_genre``, ``h_gap`` [B, L] (0 is padding) and ``h_length`` [B]; all int64.
    L may differ between histories.
    """

    def __init__(self, config: GEMSmallConfig) -> None:
        super().__init__()
        self.config = config
        d, sizes = config.d_model, config.vocabulary
        self.item = nn.Embedding(sizes["item_id"], d, padding_idx=0)
        self.genre = nn.Embedding(sizes["genre"], d, padding_idx=0)
        self.gap = nn.Embedding(sizes["gap"], d, padding_idx=0)
        self.year = nn.Embedding(sizes["item_year"], d, padding_idx=0)
        self.user = nn.ModuleDict({f: nn.Embedding(sizes[f], d, padding_idx=0) for f in USER_FEATURES})
        self.encoders = nn.ModuleDict({name: HistoryEncoder(config) for name in config.histories})
        n_tokens = len(config.histories) + 3 + len(USER_FEATURES)
        self.interactions = nn.ModuleList(WukongLayer(n_tokens, d, config.fm_rank) for _ in range(config.n_interactions))
        self.head = nn.Sequential(nn.Linear(n_tokens * d, 128), nn.ReLU(), nn.Linear(128, 1))
        self.apply(_init)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = [self.history(batch, name) for name in self.config.histories]
        genres = batch["item_genres"]
        n_genres = (genres != 0).sum(1, keepdim=True).clamp(min=1)
        tokens += [self.item(batch["item_id"]), self.year(batch["item_year"])]
        tokens += [self.genre(genres).sum(1) / n_genres]
        tokens += [self.user[name](batch[name]) for name in USER_FEATURES]
        x = torch.stack(tokens, dim=1)
        for layer in self.interactions:
            x = layer(x)
        return self.head(x.flatten(1)).squeeze(1)

    def history(self, batch: dict[str, Tensor], name: str) -> Tensor:
        """Summary [B, d] of one history."""
        item, genre, gap = batch[f"{name}_item"], batch[f"{name}_genre"], batch[f"{name}_gap"]
        events = self.item(item) + self.genre(genre) + self.gap(gap)
        return self.encoders[name](events, batch[f"{name}_length"])


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
