"""Launches the kernels for sm_100: as gluon/launch.py, whose operands and `Call` they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemopt.kernels.gluon.blackwell.backward import attention_backward
from gemopt.kernels.gluon.blackwell.forward import attention_forward
from gemopt.kernels.gluon.launch import Call, forward_operands, side_operands
from gemopt.kernels.tiers import multiprocessors
from gemopt.kernels.triton.tiles import TileList

M = 128  # rows of a part
PARTS = 2
OUT_COLUMNS = 64  # of a part's output, in shared memory at a time


@dataclass(frozen=True)
class ForwardConfig:
    """`keys` keys a tile, `stages` key tiles and `q_stages` query tiles (of 256) in flight. Chosen to fit, not measured."""

    keys: int = 128
    stages: int = 2
    q_stages: int = 1
    registers: int = 240


FORWARDS = {32: ForwardConfig(stages=4, q_stages=2), 64: ForwardConfig(stages=3, q_stages=2), 128: ForwardConfig()}


@dataclass(frozen=True)
class SideConfig:
    """One kernel of the backward: 128 stationary rows, `rows` streamed rows, tiles in flight of either."""

    rows: int = 64
    stages: int = 3
    x_stages: int = 1
    registers: int = 240


SIDES = {32: SideConfig(stages=4, x_stages=2), 64: SideConfig(stages=4, x_stages=2), 128: SideConfig()}


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig
) -> dict[str, Any]:
    columns = min(v.shape[2], OUT_COLUMNS)
    return forward_operands((q, k, v), out, lse, tiles, call, M, cfg.keys, columns) | {
        "STAGES": cfg.stages,
        "Q_STAGES": cfg.q_stages,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig
) -> None:
    """Fill out `[Tq, H, Dv]` and, for softmax, lse fp32 `[Tq, H]`."""
    attention_forward[(multiprocessors(q.device.index or 0),)](**forward_arguments(q, k, v, out, lse, tiles, call, cfg))


def side_arguments(
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    stats: Tensor,
    tiles: TileList,
    call: Call,
    cfg: SideConfig,
    key_side: bool,
) -> dict[str, Any]:
    """Arguments of `attention_backward`; see `launch.side_operands`."""
    d = x[0].shape[2]
    columns = min(d, OUT_COLUMNS) if key_side else d // 2
    return side_operands(x, y, grads, stats, tiles, call, M, cfg.rows, (columns, columns), key_side) | {
        "X_STAGES": cfg.x_stages,
        "STAGES": cfg.stages,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def run_side(
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    stats: Tensor,
    tiles: TileList,
    call: Call,
    cfg: SideConfig,
    key_side: bool,
) -> None:
    """One side of the backward: fills the gradients of x. See `side_arguments`."""
    arguments = side_arguments(x, y, grads, stats, tiles, call, cfg, key_side)
    attention_backward[(multiprocessors(x[0].device.index or 0),)](**arguments)
