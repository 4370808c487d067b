"""Tile lists: the work of a launch, longest first, written on the device without a host read.

A list has room for `rows // block + batch + 1` tiles, which Σ ceil(len / block) never passes; how many there are stands
in device memory, where the kernels read it. Record (8 int32): first row of the tile inside its sequence, start and
length of the stationary rows, start and length of the streamed rows, sequence. Longest first means by the length of the
streamed side, then by sequence, then from the last tile to the first (the order of falling work under a causal mask).
Programs take every n-th tile of the list, so any two differ by at most one tile's work (Graham's bound for sorted
lists). Rows after the last offset belong to one more sequence with nothing to stream: its tiles write zeros.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OWN = 16  # sequences of one program of the builder
SORTED_BATCH = 1 << 15  # ranks are counted pair by pair; above this many sequences the order stays as it is


@dataclass(frozen=True)
class TileList:
    records: Tensor  # int32 [capacity, 8]
    count: Tensor  # int32 [1]
    block: int


@triton.jit
def _extent(offsets_ptr, b, batch, rows):
    """Start and length of sequences `b`; sequence `batch` is the rows after the last offset, later ones are empty."""
    start = tl.load(offsets_ptr + b, mask=b <= batch, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=b < batch, other=0).to(tl.int64)
    end = tl.where(b == batch, rows, end)
    return start.to(tl.int32), tl.maximum(end - start, 0).to(tl.int32)


@triton.jit
def build_tiles(
    x_offsets_ptr,
    y_offsets_ptr,
    records_ptr,
    count_ptr,
    batch,
    x_rows,
    capacity,
    BLOCK: tl.constexpr,
    SORT: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: cdiv(batch + 1, OWN). Each program ranks OWN sequences against all and writes their tiles."""
    b = tl.program_id(0) * OWN + tl.arange(0, OWN)
    x_start, x_len = _extent(x_offsets_ptr, b, batch, x_rows)
    y_start, y_len = _extent(y_offsets_ptr, b, batch, 0)
    mine = tl.cdiv(x_len, BLOCK)
    place = tl.zeros((OWN,), tl.int32)  # tiles before mine
    everything = tl.zeros((), tl.int32)
    for low in range(0, batch + 1, CHUNK):
        other = low + tl.arange(0, CHUNK)
        _, other_x = _extent(x_offsets_ptr, other, batch, x_rows)
        _, other_y = _extent(y_offsets_ptr, other, batch, 0)
        tiles = tl.cdiv(other_x, BLOCK)
        before = other[None, :] < b[:, None]
        if SORT:
            longer = other_y[None, :] > y_len[:, None]
            before = longer | ((other_y[None, :] == y_len[:, None]) & before)
        place += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        everything += tl.sum(tiles)
    for m in range(tl.max(mine)):
        at = place + mine - 1 - m
        keep = (m < mine) & (at < capacity)
        to = records_ptr + at.to(tl.int64) * 8
        tl.store(to, tl.full((OWN,), 0, tl.int32) + m * BLOCK, mask=keep)
        tl.store(to + 1, x_start, mask=keep)
        tl.store(to + 2, x_len, mask=keep)
        tl.store(to + 3, y_start, mask=keep)
        tl.store(to + 4, y_len, mask=keep)
        tl.store(to + 5, b, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.minimum(everything, capacity))


def tile_list(x_offsets: Tensor, y_offsets: Tensor, x_rows: int, block: int, in_order: bool = False) -> TileList:
    """Tiles of `block` stationary rows. Offsets int32 or int64 `[B + 1]`; `x_rows` is the size of the packed axis.

    `in_order` lists sequence by sequence, for work that is equal in all tiles.
    """
    batch = x_offsets.shape[0] - 1
    capacity = x_rows // block + batch + 1
    records = torch.empty((capacity, 8), dtype=torch.int32, device=x_offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=x_offsets.device)
    build_tiles[(triton.cdiv(batch + 1, OWN),)](
        x_offsets,
        y_offsets,
        records,
        count,
        batch,
        x_rows,
        capacity,
        BLOCK=block,
        SORT=batch <= SORTED_BATCH and not in_order,
        OWN=OWN,
        CHUNK=256,
        num_warps=4,
    )
    return TileList(records, count, block)
