"""What real code also does: checkpoints, autocast, no_grad parts, statistics over padding, in-place ops,
shared parameters; and models with nothing to unpad at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .parts import Block, SequenceModel
from .registry import DIM, FF, MAX_LEN, VOCAB, ids_and_lengths, ids_and_mask, register


class Odd(nn.Module):
    """A two-layer encoder with one oddity, chosen by name."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.oddity, shared = oddity, Block("matmul", "inf", True, 0.0)
        self.items, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LEN, DIM)
        self.blocks = nn.ModuleList([shared, shared if oddity == "shared" else Block("matmul", "inf", True, 0.0)])
        self.batch_norm = nn.BatchNorm1d(DIM) if oddity.startswith("batch_norm") else None
        self.head = nn.Linear(DIM, DIM)
        if oddity == "tied_head":
            self.head.weight = self.blocks[0].o.weight

    def _layer(self, block: nn.Module, x: Tensor, valid: Tensor) -> Tensor:
        if self.oddity == "checkpoint":
            return checkpoint(block, x, valid, None, use_reentrant=False)
        if self.oddity == "autocast_inside":
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return block(x, valid, None)
        if self.oddity == "no_grad" and block is self.blocks[0]:
            with torch.no_grad():
                return block(x, valid, None)
        return block(x, valid, None)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.size(1), device=ids.device)[None, :] < lengths[:, None]
        x = self.items(ids)
        if self.oddity == "inplace":
            x += self.positions.weight[: ids.size(1)]
            x.mul_(0.7)
            x[:, 0] = 0.25
        else:
            x = x + self.positions.weight[: ids.size(1)]
        if self.oddity == "inplace_rows":
            x = x.clone()
            x[~valid] = 0.0
        for block in self.blocks:
            x = self._layer(block, x, valid)
        if self.oddity == "batch_norm":
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.oddity == "batch_norm_flat":
            x = self.batch_norm(x.reshape(-1, DIM)).view_as(x)
        if self.oddity == "dead_branch":
            self.unused = x.sum(1).detach().mean(0)  # a side effect on the module: observed
        if self.oddity == "length_norm":
            x = x - x.mean(1, keepdim=True)  # over padding too
        return self.head((x * valid.unsqueeze(-1).to(x.dtype)).sum(1))


def _file(oddity: str, expected, why: str, *tags: str) -> None:
    def make(seed: int):
        torch.manual_seed(seed)
        return Odd(oddity), ids_and_lengths

    register(expected, why, "odd", *tags, name=f"odd_{oddity}")(make)


_file("checkpoint", "rewritten", "checkpointed layers", "checkpoint")
_file("autocast_inside", "rewritten", "autocast around each layer", "autocast")
_file("no_grad", "rewritten", "the first layer frozen by no_grad", "no_grad")
_file("shared", "rewritten", "one layer used twice", "tied")
_file("tied_head", "rewritten", "the head shares a weight with the first layer", "tied")
_file("inplace", "rewritten", "in-place add, mul and a row write", "inplace")
_file("inplace_rows", "any", "padding zeroed by index_put_ with a bool mask", "inplace")
_file("batch_norm", "refused", "BatchNorm over [B, D, L] reads padding", "batch_norm", "refused")
_file("batch_norm_flat", "refused", "BatchNorm over [B * L, D] reads padding", "batch_norm", "refused")
_file("length_norm", "refused", "subtracts the mean over padded tokens", "refused")


class GraphBreak(nn.Module):
    """Two graphs: the mask crosses a graph break and arrives in the second as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block("matmul", "inf", True, 0.0), Block("matmul", "inf", True, 0.0)
        self.items = nn.Embedding(VOCAB, DIM)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.size(1), device=ids.device)[None, :] < lengths[:, None]
        x = self.first(self.items(ids), valid, None)
        torch._dynamo.graph_break()
        x = self.second(x, valid, None)
        return x.masked_fill(~valid[..., None], 0.0).sum(1)


@register("any", "a graph break between two layers", "odd", "graph_break")
def odd_graph_break(seed: int):
    torch.manual_seed(seed)
    return GraphBreak(), ids_and_lengths


@register("rewritten", "dropout inside and after attention, p > 0", "odd", "dropout")
def odd_dropout(seed: int):
    torch.manual_seed(seed)
    return SequenceModel(dropout=0.2, pool="mean"), ids_and_lengths


class AttentionDropout(nn.Module):
    """Dropout on the attention weights, as in BERT."""

    def __init__(self, sdpa: bool) -> None:
        super().__init__()
        self.items, self.qkv, self.sdpa, self.p = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 3 * DIM), sdpa, 0.3
        self.dropout = nn.Dropout(self.p)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        q, k, v = self.qkv(self.items(ids)).chunk(3, dim=-1)
        if self.sdpa:
            p = self.dropout.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], valid[:, None, None], p)[:, 0]
        else:
            scores = (q @ k.mT / DIM**0.5).masked_fill(~valid[:, None], float("-inf"))
            x = self.dropout(scores.softmax(-1)) @ v
        return (x * valid[..., None]).sum(1)


@register("rewritten", "dropout on attention weights", "odd", "dropout")
def odd_attention_dropout(seed: int):
    torch.manual_seed(seed)
    return AttentionDropout(sdpa=False), ids_and_mask


@register("rewritten", "dropout inside SDPA", "odd", "dropout")
def odd_sdpa_dropout(seed: int):
    torch.manual_seed(seed)
    return AttentionDropout(sdpa=True), ids_and_mask


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.lstm = nn.Embedding(VOCAB, DIM), nn.LSTM(DIM, FF, batch_first=True)
        self.head = nn.Linear(FF, 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x, _ = self.lstm(self.items(ids))
        return self.head(x[torch.arange(len(x), device=x.device), lengths - 1])


class CNNModel(nn.Module):
    """TextCNN over the whole padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCAB, DIM)
        self.convolutions = nn.ModuleList(nn.Conv1d(DIM, FF, width, padding="same") for width in (1, 3, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids).transpose(1, 2)
        return torch.cat([F.relu(c(x)).amax(-1) for c in self.convolutions], dim=1)


class MLPModel(nn.Module):
    """A DLRM-like model: no token axis at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(VOCAB, DIM, mode="sum", padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(DIM, FF), nn.ReLU(), nn.LayerNorm(FF), nn.Linear(FF, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.table(ids))


@register("nothing", "an LSTM", "nothing")
def lstm(seed: int):
    torch.manual_seed(seed)
    return LSTMModel(), ids_and_lengths


@register("nothing", "a CNN over padded text", "nothing")
def cnn(seed: int):
    torch.manual_seed(seed)
    return CNNModel(), lambda lengths, max_len, g: ids_and_lengths(lengths, max_len, g)[:1]


@register("nothing", "embedding bag and MLP", "nothing")
def mlp(seed: int):
    torch.manual_seed(seed)
    return MLPModel(), lambda lengths, max_len, g: ids_and_lengths(lengths, max_len, g)[:1]
