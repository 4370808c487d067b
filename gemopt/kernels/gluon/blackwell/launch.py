"""Launches the kernels for sm_100: as gluon/launch.py, whose descriptors, scales and `Call` they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemopt.kernels.gluon.blackwell.backward import attention_backward
from gemopt.kernels.gluon.blackwell.forward import attention_forward
from gemopt.kernels.gluon.launch import Call, backward_scales, descriptor, forward_scales, programs
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
    (_, heads, d), (_, kv_heads, dv) = q.shape, v.shape
    scale, prescale, out_scale = forward_scales(call, q.dtype)
    return {
        "q_desc": descriptor(q, M, d),
        "k_desc": descriptor(k, cfg.keys, d),
        "v_desc": descriptor(v, cfg.keys, dv),
        "out_desc": descriptor(out, M, min(dv, OUT_COLUMNS)),
        "lse_ptr": lse,
        "tiles": tiles.records,
        "count": tiles.count,
        "heads": heads,
        "sharing": heads // kv_heads,
        "scale": scale,
        "prescale": prescale,
        "out_scale": out_scale,
        **call.band(),
        "D": d,
        "DV": dv,
        "ACT": call.act,
        "STAGES": cfg.stages,
        "Q_STAGES": cfg.q_stages,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig
) -> None:
    """Fill out `[Tq, H, Dv]` and, for softmax, lse fp32 `[Tq, H]`."""
    attention_forward[(programs(q.device.index or 0),)](**forward_arguments(q, k, v, out, lse, tiles, call, cfg))


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
    """Arguments of `attention_backward`; x, y and grads are (Q, dO), (K, V), (dQ, dQ) or (K, V), (Q, dO), (dK, dV)."""
    (x1, x2), (y1, y2) = x, y
    d, dv = x1.shape[2], x2.shape[2]
    heads, others = x1.shape[1], y1.shape[1]
    scale, prescale, ds_scale, dv_scale = backward_scales(call, x1.dtype)
    columns = min(d, OUT_COLUMNS) if key_side else d // 2
    return {
        "x1_desc": descriptor(x1, M, d),
        "x2_desc": descriptor(x2, M, dv),
        "y1_desc": descriptor(y1, cfg.rows, d),
        "y2_desc": descriptor(y2, cfg.rows, dv),
        "d1_desc": descriptor(grads[0], M, columns),
        "d2_desc": descriptor(grads[1], M, columns),
        "stats": stats,
        "q_rows": (y1 if key_side else x1).shape[0],
        "tiles": tiles.records,
        "count": tiles.count,
        "heads": heads,
        "sharing": max(heads, others) // min(heads, others),
        "scale": scale,
        "prescale": prescale,
        "ds_scale": ds_scale,
        "dv_scale": dv_scale,
        **call.band(key_side),
        "KEY_SIDE": key_side,
        "D": d,
        "DV": dv,
        "ACT": call.act,
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
    attention_backward[(programs(x[0].device.index or 0),)](**arguments)
