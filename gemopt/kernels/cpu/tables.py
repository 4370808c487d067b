"""Bias and mask of attention: `[B or 1, H or 1, Lq or 1, Lk or 1]` tensors read at (sequence, head, position, position).

A dense group reads a block of queries at a time. Where positions are row numbers the block is a slice, and with one table
for all sequences it is a view; otherwise it is one gather.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gemopt.kernels.cpu.bounds import Bounds
from gemopt.kernels.cpu.plan import Group
from gemopt.kernels.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Table:
    """One group's way of reading a table. seqs: int64 `[n]`; q_pos, k_pos: int64 `[n, L]`, None for row numbers."""

    tensor: Tensor
    seqs: Tensor
    q_pos: Tensor | None
    k_pos: Tensor | None
    q_len: int
    k_len: int

    @property
    def shared(self) -> bool:
        """All sequences read the same numbers."""
        return self.tensor.shape[0] == 1

    def _by_rows(self, tensor: Tensor, a: int, b: int, keys: int) -> Tensor:
        tensor = tensor[:, :, a:b] if tensor.shape[2] > 1 else tensor
        return tensor[..., :keys] if tensor.shape[3] > 1 else tensor

    def _index(self, a: int, b: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices that broadcast to `[n, b - a, keys]`."""
        q = torch.arange(self.q_len)[None] if self.q_pos is None else self.q_pos
        k = torch.arange(self.k_len)[None] if self.k_pos is None else self.k_pos
        batch, _, rows, cols = self.tensor.shape
        return (
            self.seqs[:, None, None] if batch > 1 else torch.zeros_like(self.seqs)[:, None, None],
            (q if rows > 1 else torch.zeros_like(q))[:, a:b, None],
            (k if cols > 1 else torch.zeros_like(k))[:, None, :keys],
        )

    def block(self, a: int, b: int, keys: int) -> Tensor:
        """Broadcastable to `[n, H, b - a, keys]`: what the queries a..b read for the first `keys` keys."""
        if self.q_pos is None and self.k_pos is None:
            rows = self._by_rows(self.tensor, a, b, keys)
            return rows if self.shared else rows.index_select(0, self.seqs)
        return self.tensor.permute(0, 2, 3, 1)[self._index(a, b, keys)].permute(0, 3, 1, 2)

    def add(self, grad: Tensor, a: int, b: int, values: Tensor) -> None:
        """Add `values` `[n, H, b - a, keys]` to the elements of `grad` (of the table's shape) that were read."""
        keys = values.shape[-1]
        if self.tensor.shape[1] == 1:
            values = values.sum(1, keepdim=True)
        if self.q_pos is not None or self.k_pos is not None:
            where = torch.broadcast_tensors(*self._index(a, b, keys))
            grad.permute(0, 2, 3, 1).index_put_(where, values.permute(0, 2, 3, 1), accumulate=True)
            return
        sizes = ((0, self.shared), (2, grad.shape[2] == 1), (3, grad.shape[3] == 1))
        dims = [dim for dim, reduced in sizes if reduced]
        if dims:
            values = values.sum(dims, keepdim=True)
        target = self._by_rows(grad, a, b, keys)
        if self.shared:
            target.add_(values)
        else:
            target.index_add_(0, self.seqs, values)


def table(tensor: Tensor | None, group: Group, spec: AttentionSpec) -> Table | None:
    """How `group` reads `tensor`."""
    if tensor is None:
        return None
    q_pos, k_pos = spec.q_positions, spec.k_positions
    return Table(
        tensor,
        group.seqs,
        None if q_pos is None else group.q.take(q_pos).to(torch.int64),
        None if k_pos is None else group.k.take(k_pos).to(torch.int64),
        group.q.length,
        group.k.length,
    )


def check(spec: AttentionSpec, bounds: Bounds) -> None:
    """Raise ValueError if a position lies outside a table."""
    if spec.bias is None and spec.mask is None:
        return
    sides = (
        ("q", spec.q_positions, bounds.q[-1], bounds.q_lengths, 2),
        ("k", spec.k_positions, bounds.k[-1], bounds.k_lengths, 3),
    )
    for name, positions, rows, lengths, dim in sides:
        if rows == 0:
            continue
        low, high = (0, int(lengths.max()) - 1) if positions is None else map(int, positions[: int(rows)].aminmax())
        for what, tensor in (("bias", spec.bias), ("mask", spec.mask)):
            if tensor is None or tensor.shape[dim] == 1:
                continue
            size = tensor.shape[dim]
            if low < 0 or high >= size:
                of = "the longest sequence" if positions is None else f"{name}_positions"
                raise ValueError(
                    f"jagged_attention: {what} must hold every {'query' if name == 'q' else 'key'} position, got size "
                    f"{size} in dim {dim} but {of} needs positions {low} to {high}"
                )
