"""A padded model, a correct packed rewrite of it by hand, and rewrites that are wrong in one quiet way each.

The wrong ones are errors that an unpadding compiler really makes: a packed index computed as offset +
position, a mask and a gather taken for the same thing, rows of a gradient that nobody scattered back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, VOCAB = 8, 31


class Padded(nn.Module):
    """Embedding, one attention layer masked by `ids != 0`, MLP, last item by `length - 1`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(VOCAB, DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.mlp, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.items(ids)
        scores = self.q(x) @ self.k(x).mT / DIM**0.5
        scores = scores.masked_fill((ids == 0)[:, None, :], -1e9)
        x = self.norm(x + scores.softmax(-1) @ self.v(x))
        x = x + F.relu(self.mlp(x))
        return x[torch.arange(len(ids)), (lengths - 1).clamp(min=0)]


class Packed(nn.Module):
    """The same by rows: rank of a position in the row set, union of the mask's rows and the gathered ones."""

    def __init__(self, padded: Padded) -> None:
        super().__init__()
        self.m = [padded]  # not registered twice

    def live(self, ids: Tensor, lengths: Tensor) -> Tensor:
        last = (lengths - 1).clamp(min=0)
        return (ids != 0) | (torch.arange(ids.size(1)) == last[:, None])

    def index(self, live: Tensor, lengths: Tensor) -> Tensor:
        """Packed row of the gathered position: its rank in the mask."""
        rank = live.flatten().long().cumsum(0).view(live.shape) - 1
        return rank[torch.arange(len(live)), (lengths - 1).clamp(min=0)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, live: Tensor) -> Tensor:
        batch, position = live.nonzero(as_tuple=True)
        keep = (ids != 0)[batch, position][None, :] & (batch[:, None] == batch[None, :])
        keep |= ~keep.any(1, keepdim=True) & (batch[:, None] == batch[None, :])
        return (q @ k.T / DIM**0.5).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def rows(self, ids: Tensor, live: Tensor) -> Tensor:
        return self.m[0].items(ids[live])

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        m = self.m[0]
        live = self.live(ids, lengths)
        x = self.rows(ids, live)
        x = m.norm(x + self.attend(m.q(x), m.k(x), m.v(x), ids, live))
        x = x + F.relu(m.mlp(x))
        return x[self.index(live, lengths)]


class OffsetPlusPosition(Packed):
    """Right for prefixes, the neighbour's row where the ids have a hole."""

    def index(self, live, lengths):
        counts = live.sum(1)
        return (counts.cumsum(0) - counts + (lengths - 1).clamp(min=0)).clamp(max=int(counts.sum()) - 1)


class MaskTakenForLengths(Packed):
    """Takes `position < length` for `ids != 0`: the same rows but for holes."""

    def live(self, ids, lengths):
        return torch.arange(ids.size(1)) < lengths.clamp(min=1)[:, None]

    def attend(self, q, k, v, ids, live):
        batch = live.nonzero(as_tuple=True)[0]
        keep = batch[:, None] == batch[None, :]
        return (q @ k.T / DIM**0.5).masked_fill(~keep, float("-inf")).softmax(-1) @ v


class LeaksFirstNeighbour(Packed):
    """The first key of the next sequence is attended to: an off-by-one of the sequence's end."""

    def attend(self, q, k, v, ids, live):
        batch, position = live.nonzero(as_tuple=True)
        keep = (ids != 0)[batch, position][None, :] & (batch[:, None] == batch[None, :])
        first = torch.cat([torch.ones(1, dtype=torch.bool), batch[1:] != batch[:-1]])[: len(batch)]
        keep |= first[None, :] & (batch[None, :] == batch[:, None] + 1)
        keep |= ~keep.any(1, keepdim=True) & (batch[:, None] == batch[None, :])
        return (q @ k.T / DIM**0.5).masked_fill(~keep, float("-inf")).softmax(-1) @ v


class WrongScale(Packed):
    """The scale of another head_dim, off by half a percent."""

    def attend(self, q, k, v, ids, live):
        return super().attend(q * 1.005, k, v, ids, live)


class DropsKeyGradient(Packed):
    """Forward right, no gradient reaches K."""

    def attend(self, q, k, v, ids, live):
        return super().attend(q, k.detach(), v, ids, live)


class DropsLastRowGradient(Packed):
    """Forward right, the gradient of the last packed row is lost (a scatter one row short)."""

    def rows(self, ids, live):
        x = super().rows(ids, live)
        return torch.cat([x[:-1], x[-1:].detach()])


class DoublesGradient(Packed):
    """Forward right, the gradient of V is counted twice (an accumulation that ran twice)."""

    def attend(self, q, k, v, ids, live):
        return super().attend(q, k, v + (v - v.detach()), ids, live)


class Patched(Packed):
    """Changes the finished output."""

    def patch(self, out: Tensor) -> Tensor:
        return out

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.patch(super().forward(ids, lengths))


class WrongStride(Patched):
    def patch(self, out):
        return out.t().contiguous().t()


class WrongDtype(Patched):
    def patch(self, out):
        return out.double()


class HalfPrecision(Patched):
    """The right dtype, but computed in bfloat16 somewhere."""

    def patch(self, out):
        return out.to(torch.bfloat16).to(out.dtype)


class Detached(Patched):
    def patch(self, out):
        return out.detach()


class NanInOneRow(Patched):
    def patch(self, out):
        return out.masked_fill(torch.arange(len(out))[:, None] == len(out) - 1, float("nan"))


class AnotherStructure(Patched):
    def patch(self, out):
        return (out,)  # type: ignore[return-value]


class SwallowsErrors(Packed):
    """Gives a neighbour's row where eager would raise: paired with `RaisesOnEmpty`."""


class RaisesOnEmpty(Padded):
    def forward(self, ids, lengths):
        if bool((lengths == 0).any()):
            raise IndexError("index -1 is out of bounds")
        return super().forward(ids, lengths)


class ZeroesOneLengthOnes(Packed):
    """Sequences of one token are treated as empty (`length > 1` for `length > 0`)."""

    def forward(self, ids, lengths):
        return super().forward(ids, lengths) * (lengths != 1)[:, None]


WRONG: dict[str, tuple[Callable[[Padded], nn.Module], str]] = {
    "offset_plus_position": (OffsetPlusPosition, "holes"),
    "mask_taken_for_lengths": (MaskTakenForLengths, "holes"),
    "leaks_first_neighbour": (LeaksFirstNeighbour, "given"),
    "wrong_scale": (WrongScale, "given"),
    "drops_key_gradient": (DropsKeyGradient, "given"),
    "drops_last_row_gradient": (DropsLastRowGradient, "given"),
    "doubles_gradient": (DoublesGradient, "given"),
    "wrong_stride": (WrongStride, "given"),
    "wrong_dtype": (WrongDtype, "given"),
    "half_precision": (HalfPrecision, "given"),
    "detached": (Detached, "given"),
    "nan_in_one_row": (NanInOneRow, "given"),
    "another_structure": (AnotherStructure, "given"),
    "zeroes_one_length_ones": (ZeroesOneLengthOnes, "ones"),
}


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCAB, (len(lengths), max_len), generator=generator)
    return ids * (torch.arange(max_len) < lengths[:, None]), lengths
