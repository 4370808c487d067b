"""Keys split among programs, where there are fewer query tiles than multiprocessors (few queries, long keys, a small batch).

Every part of the keys gives an output O_p of its own, in fp32, and with a softmax its log-sum L_p. They are put together as

    softmax: L = log Σ_p exp L_p,  O = Σ_p exp(L_p - L) O_p        gdpa: O = Σ_p O_p

in the order of the parts: the same bits in every run. A choice from shapes alone; a part may be empty (L_p = -inf, O_p = 0).
Bytes: the parts once out and once in, 8·parts·Tq·H·Dv.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemopt.kernels.tiers import multiprocessors

SHORTEST = 256  # keys of a part
OVERHEAD = 192  # keys that take about as long as the start and the end of a tile
MOST = 128


def programs(device: torch.device) -> int:
    """Among how many keys may be split: a GPU's multiprocessors; one elsewhere."""
    return multiprocessors(device.index or 0) if device.type == "cuda" else 1


def key_parts(tiles: int, keys: int, programs: int, step: int) -> tuple[int, int]:
    """(parts, keys of a part) for `tiles` query tiles (of all sequences and heads), each over up to `keys` keys.

    The keys of a part are a multiple of `step`. Chosen is what makes the last of `programs` programs end first, all tiles
    being as long as the longest; (1, 0) where that saves less than a tenth.
    """
    if tiles == 0 or tiles >= programs or keys < 2 * SHORTEST:
        return 1, 0

    def length(parts: int) -> int:
        return triton.cdiv(triton.cdiv(keys, parts), step) * step

    def time(parts: int) -> int:
        own = length(parts)
        return triton.cdiv(tiles * triton.cdiv(keys, own), programs) * (own + OVERHEAD)

    best = min(range(1, min(keys // SHORTEST, MOST) + 1), key=time)
    return (triton.cdiv(keys, length(best)), length(best)) if time(best) <= 0.9 * time(1) else (1, 0)


@triton.jit
def combine_parts(
    partial_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    parts,
    rows,
    heads,
    out_stride,
    out_head_stride,
    SOFTMAX: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (row blocks, heads). partial `[parts, rows, heads, DV]`, log-sums `[parts, rows, heads]`."""
    head = tl.program_id(1)
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_DV)
    keep, inside = r < rows, (r < rows)[:, None] & (c < DV)[None, :]
    row, step = r * heads + head, (tl.full((), 0, tl.int64) + rows) * heads
    acc = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    if SOFTMAX:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        for p in range(parts):
            top = tl.maximum(top, tl.load(part_lse_ptr + p * step + row, mask=keep, other=float("-inf")))
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros((BLOCK,), tl.float32)
        for p in range(parts):
            weight = tl.exp(tl.load(part_lse_ptr + p * step + row, mask=keep, other=float("-inf")) - top)
            total += weight
            own = tl.load(partial_ptr + ((p * step + row) * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            acc += weight[:, None] * own
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(lse_ptr + row, top + tl.log(total), mask=keep)
    else:
        for p in range(parts):
            acc += tl.load(partial_ptr + ((p * step + row) * DV)[:, None] + c[None, :], mask=inside, other=0.0)
    to = out_ptr + r[:, None] * out_stride + head * out_head_stride + c[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine(partial: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, softmax: bool) -> None:
    """Fill out `[Tq, H, Dv]` (features dense) and, for a softmax, lse fp32 `[Tq, H]`.

    partial: fp32 `[parts, Tq, H, Dv]`; part_lse: fp32 `[parts, Tq, H]`, not read unless softmax.
    """
    parts, rows, heads, dv = partial.shape
    block = 8
    combine_parts[(triton.cdiv(rows, block), heads)](
        partial,
        part_lse,
        out,
        lse,
        parts,
        rows,
        heads,
        out.stride(0),
        out.stride(1),
        SOFTMAX=softmax,
        DV=dv,
        BLOCK_DV=max(16, triton.next_power_of_2(dv)),
        BLOCK=block,
        num_warps=4,
    )
