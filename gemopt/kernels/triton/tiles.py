"""Tile lists: the work of a launch, longest first, written on the device without a host read.

A list has room for `rows // block + batch + 1` tiles, which Σ ceil(len / block) never passes; how many there are stands
in device memory, where the kernels read it. Record (8 int32): first row of the tile inside its sequence, start and
length of the stationary rows, start and length of the streamed rows, sequence. Longest first means by the length of the
streamed side, then by sequence, then from the last tile to the first (the order of falling work under a causal mask).
Programs take every n-th tile of the list, or draw the next (Hopper, `gluon.queue`), so any two differ by at most one
tile's work (Graham's bound for sorted lists). Rows after the last offset belong to one more sequence with nothing to
stream: its tiles write zeros. On a GPU one list serves all layers and directions of a batch (`gemopt.kernels.memo`).

Streamed rows may be split into parts (`split.key_parts`): every tile then stands as often as there are parts, with the start
and length of that part's rows, and the number of the part as the seventh word. The last part has what is left.

A number in place of offsets says that every sequence has as many rows (queries that all sequences share).

A list of whole sequences has one record for each that has any rows, ordered by the product of both lengths. Its seventh
word counts the streamed rows that meet no stationary row (all of them, in a sequence without any; those after the last
offset), whose results are nobody else's to write.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemopt.kernels.memo import remembered

OWN = 16  # sequences of one program of the builder
SORTED_BATCH = 1 << 15  # ranks are counted pair by pair; above this many sequences the order stays as it is


@dataclass(frozen=True)
class TileList:
    """A list serves one launch at a time, since programs may draw from a counter beside it."""

    records: Tensor  # int32 [capacity, 8]
    count: Tensor  # int32 [2]: number of tiles, and 0 between launches (`gluon.queue` counts there)
    block: int


@triton.jit
def _extent(offsets_ptr, b, batch, rows):
    """Start and length of sequences `b`; sequence `batch` is the rows after the last offset, later ones are empty."""
    start = tl.load(offsets_ptr + b, mask=b <= batch, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=b < batch, other=0).to(tl.int64)
    end = tl.where(b == batch, rows, end)
    return start.to(tl.int32), tl.maximum(end - start, 0).to(tl.int32)


@triton.jit
def _tiles(x_len, y_len, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Records of a sequence."""
    if WHOLE:
        return tl.where((x_len > 0) | (y_len > 0), 1, 0)
    else:
        return tl.cdiv(x_len, BLOCK)


@triton.jit
def _key(x_len, y_len, WHOLE: tl.constexpr):
    """What the order falls in. fp32: a product of lengths may pass 2^31, and its last digits do not matter."""
    if WHOLE:
        return x_len.to(tl.float32) * y_len.to(tl.float32)
    else:
        return y_len


@triton.jit
def build_tiles(
    x_offsets_ptr,
    y_offsets_ptr,
    records_ptr,
    count_ptr,
    batch,
    x_rows,
    y_rows,
    capacity,
    BLOCK: tl.constexpr,
    SORT: tl.constexpr,
    WHOLE: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: cdiv(batch + 1, OWN). Each program ranks OWN sequences against all and writes their tiles."""
    b = tl.program_id(0) * OWN + tl.arange(0, OWN)
    x_start, x_len = _extent(x_offsets_ptr, b, batch, x_rows)
    y_start, y_len = _extent(y_offsets_ptr, b, batch, y_rows if WHOLE else 0)
    mine = _tiles(x_len, y_len, BLOCK, WHOLE)
    key = _key(x_len, y_len, WHOLE)
    place = tl.zeros((OWN,), tl.int32)  # tiles before mine
    everything = tl.zeros((), tl.int32)
    for low in range(0, batch + 1, CHUNK):
        other = low + tl.arange(0, CHUNK)
        _, other_x = _extent(x_offsets_ptr, other, batch, x_rows)
        _, other_y = _extent(y_offsets_ptr, other, batch, y_rows if WHOLE else 0)
        tiles = _tiles(other_x, other_y, BLOCK, WHOLE)
        before = other[None, :] < b[:, None]
        if SORT:
            other_key = _key(other_x, other_y, WHOLE)
            longer = other_key[None, :] > key[:, None]
            before = longer | ((other_key[None, :] == key[:, None]) & before)
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
        if WHOLE:
            unseen = tl.where((b == batch) | (x_len == 0), y_len, 0)
            tl.store(to + 4, tl.where(b == batch, 0, y_len), mask=keep)
            tl.store(to + 6, unseen, mask=keep)
        else:
            tl.store(to + 4, y_len, mask=keep)
        tl.store(to + 5, b, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.minimum(everything, capacity))
        tl.store(count_ptr + 1, 0)


@triton.jit
def split_tiles(records_ptr, count_ptr, to_ptr, to_count_ptr, parts, step, BLOCK: tl.constexpr):
    """Grid: cdiv(tiles * parts, BLOCK). Tile t becomes the tiles t * parts and on, each with `step` streamed rows."""
    count = tl.load(count_ptr)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile, part = t // parts, t % parts
    keep = tile < count
    source, to = records_ptr + tile.to(tl.int64) * 8, to_ptr + t.to(tl.int64) * 8
    for word in tl.static_range(6):
        if word < 3 or word == 5:
            tl.store(to + word, tl.load(source + word, mask=keep), mask=keep)
    start, length = tl.load(source + 3, mask=keep, other=0), tl.load(source + 4, mask=keep, other=0)
    passed = tl.minimum(part * step, length)
    own = tl.where(part == parts - 1, length - passed, tl.minimum(length - passed, step))
    tl.store(to + 3, start + passed, mask=keep)
    tl.store(to + 4, own, mask=keep)
    tl.store(to + 6, part, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(to_count_ptr, count * parts)
        tl.store(to_count_ptr + 1, 0)


def tile_list(
    x_offsets: Tensor | int,
    y_offsets: Tensor | int,
    x_rows: int,
    block: int,
    in_order: bool = False,
    split: tuple[int, int] = (1, 0),
) -> TileList:
    """Tiles of `block` stationary rows. Offsets int32 or int64 `[B + 1]`; `x_rows` is the size of the packed axis.

    Of the two offsets one may be a number: the rows of every sequence.

    `in_order` lists sequence by sequence, for work that is equal in all tiles. `split`: parts of the streamed rows, and how
    many of them a part has.
    """
    return _kept(x_offsets, y_offsets, x_rows, 0, block, in_order, False, *split)


def sequence_list(x_offsets: Tensor, y_offsets: Tensor, x_rows: int, y_rows: int) -> TileList:
    """Whole sequences, with the sizes of both packed axes; `block` of the result is 0."""
    return _kept(x_offsets, y_offsets, x_rows, y_rows, 0, False, True, 1, 0)


def _kept(x_offsets: Tensor | int, y_offsets: Tensor | int, *form: int) -> TileList:
    """`_build`, once for a batch on a GPU."""
    make = partial(_build, x_offsets, y_offsets, *form)
    given = _tensors(x_offsets, y_offsets)
    # A graph that is captured keeps addresses for longer than a step, and may be replayed beside others.
    if not given[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return make()
    # What one stream wrote, another may not see yet; and launches that draw from a list's counter must not run side by side.
    stream = torch.cuda.current_stream(given[0].device).cuda_stream
    numbers = (x if isinstance(x, int) else None for x in (x_offsets, y_offsets))
    return remembered(given[0], given[-1], (stream, *numbers, *form), make)


def _tensors(*offsets: Tensor | int) -> list[Tensor]:
    return [x for x in offsets if isinstance(x, Tensor)]


def _build(
    x: Tensor | int,
    y: Tensor | int,
    x_rows: int,
    y_rows: int,
    block: int,
    in_order: bool,
    whole: bool,
    parts: int,
    step: int,
) -> TileList:
    like = _tensors(x, y)[0]
    x_offsets, y_offsets = (o if isinstance(o, Tensor) else torch.arange(len(like), device=like.device) * o for o in (x, y))
    batch = like.shape[0] - 1
    capacity = batch + 1 if whole else x_rows // block + batch + 1
    records = torch.empty((capacity, 8), dtype=torch.int32, device=x_offsets.device)
    count = torch.empty(2, dtype=torch.int32, device=x_offsets.device)
    build_tiles[(triton.cdiv(batch + 1, OWN),)](
        x_offsets,
        y_offsets,
        records,
        count,
        batch,
        x_rows,
        y_rows,
        capacity,
        BLOCK=block,
        SORT=batch <= SORTED_BATCH and not in_order,
        WHOLE=whole,
        OWN=OWN,
        CHUNK=256,
        num_warps=4,
    )
    found = TileList(records, count, block)
    return found if parts == 1 else _split(found, parts, step)


def _split(tiles: TileList, parts: int, step: int) -> TileList:
    """Every tile as often as there are parts of its streamed rows."""
    records, count = tiles.records.new_empty((len(tiles.records) * parts, 8)), torch.empty_like(tiles.count)
    grid = (triton.cdiv(len(records), 128),)
    split_tiles[grid](tiles.records, tiles.count, records, count, parts, step, BLOCK=128, num_warps=4)
    return TileList(records, count, tiles.block)
