"""Tile sizes and compile-time arguments of the attention kernels, by head_dim, dtype and what the call asks for."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.triton import activations


@dataclass(frozen=True)
class Blocks:
    """Tile sizes and launch options of one kernel."""

    q: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    forward: Blocks
    backward_kv: Blocks
    backward_q: Blocks
    backward_bias: Blocks


def _config(forward: Blocks, backward_kv: Blocks, backward_q: Blocks) -> Config:
    """The kernel for the bias holds what the one for the queries holds, a tile of the bias in place of dQ."""
    return Config(forward, backward_kv, backward_q, replace(backward_q, k=min(backward_q.k, 32)))


def config(
    head_dim: int, dtype: torch.dtype, heavy: bool = False, interpreted: bool = False, blackwell: bool = False
) -> Config:
    """Tiles that fit without register spills on sm_90 and sm_100 (tests/kernels/test_aot.py).

    `heavy`: positions, windows, dropout, tables and mixed activations need registers too. fp32 products are exact, made of
    scalar multiply-adds; above head_dim 128 their backward spills.

    `blackwell`: tcgen05 takes products of 64 rows and more, Triton else falls back to the mma.sync of older devices. So a
    tile has at least 64 of the rows that its kernel owns (but for biases above head_dim 128). Compiled, not measured.
    """
    if blackwell and not interpreted and dtype != torch.float32:
        found = config(head_dim, dtype, heavy)
        if head_dim <= 128:
            return replace(
                found, backward_kv=Blocks(32 if heavy or head_dim > 64 else 64, 64, 4 if head_dim <= 64 else 8, 2)
            )
        return replace(found, backward_kv=Blocks(32, 64, 8, 1), backward_q=Blocks(64, 16, 8, 1))
    if interpreted:
        blocks = Blocks(32, 64, 4, 1)  # the interpreter's time goes by tiles
        return Config(blocks, blocks, blocks, blocks)
    if dtype == torch.float32:
        if head_dim <= 64:
            return _config(Blocks(32, 32, 4, 2), Blocks(16, 32, 8, 1), Blocks(32, 32, 4, 1))
        return _config(Blocks(32, 32, 8, 1), Blocks(16, 16, 8, 1), Blocks(32, 16, 8, 1))
    if head_dim <= 64:
        if heavy:
            return _config(Blocks(64, 64, 4, 2), Blocks(32, 32, 4, 2), Blocks(64, 64, 8, 2))
        return _config(Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 2))
    if head_dim <= 128:
        if heavy:
            return _config(Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2))
        return _config(Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 64, 8, 2))
    return _config(Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 1))


def is_heavy(spec: AttentionSpec) -> bool:
    """Whether scores are more than a product and a causal mask."""
    tables = (spec.q_positions, spec.k_positions, spec.bias, spec.mask)
    mixed = len(set(spec.activations)) > 1
    return spec.dropout_p > 0 or spec.window != (-1, -1) or mixed or any(x is not None for x in tables)


def block_of(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def constants(heads: int, d: int, dv: int, spec: AttentionSpec, blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    """The constexpr arguments that all attention kernels share."""
    acts, codes, code_heads = (0, 0, 1) if spec.softmax else activations.encode(spec.activations, heads)
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": block_of(d),
        "BLOCK_DV": block_of(dv),
        "BLOCK_Q": blocks.q,
        "BLOCK_K": blocks.k,
        "CAUSAL": spec.causal,
        "BOTTOM_RIGHT": spec.bottom_right,
        "LEFT": spec.window[0],
        "RIGHT": spec.window[1],
        "HAS_Q_POS": spec.q_positions is not None,
        "HAS_K_POS": spec.k_positions is not None,
        "DROPOUT": spec.dropout_p > 0,
        "HAS_BIAS": spec.bias is not None,
        "HAS_MASK": spec.mask is not None,
        "ACTS": acts,
        "CODES": codes,
        "CODE_HEADS": code_heads,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "SHARED_Q": spec.shared,
    }
