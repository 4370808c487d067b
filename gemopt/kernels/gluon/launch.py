"""Launches the Gluon kernels: descriptors, tile lists, configurations.

The calls here take packed tensors and an `AttentionSpec`-like description reduced to what the kernels know (`Call`).
Nothing reads a device value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemopt.kernels.gluon import scores
from gemopt.kernels.gluon.backward import attention_backward, row_statistics
from gemopt.kernels.gluon.forward import attention_forward
from gemopt.kernels.gluon.fused import attention_backward_fused
from gemopt.kernels.tiers import multiprocessors
from gemopt.kernels.triton.tiles import TileList

LOG2E = math.log2(math.e)
NAMES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
M = 64


@dataclass(frozen=True)
class Call:
    """What an attention call means to these kernels.

    act: a code of `scores`; 0 is softmax. left, right: the window, -1 unlimited; a causal mask is right = 0.
    shared_q: the rows of q serve every sequence.
    add_q: the output is attention + q, and dq gains dO (the residual inside a PFFN block).
    """

    act: int
    scale: float
    post_scale: float = 1.0
    left: int = -1
    right: int = -1
    bottom_right: bool = False
    add_q: bool = False
    shared_q: bool = False

    def band(self, keys_stationary: bool = False) -> dict[str, Any]:
        before, after = (self.right, self.left) if keys_stationary else (self.left, self.right)
        return {"before": max(before, 0), "after": max(after, 0), "BEFORE": before >= 0, "AFTER": after >= 0} | {
            "BOTTOM_RIGHT": self.bottom_right
        }


@dataclass(frozen=True)
class ForwardConfig:
    """parts·64 queries and `keys` keys a tile, `stages` key tiles and `q_stages` query tiles in flight.

    A work item is `group` query tiles, whose keys stay in shared memory if they fit (only without a window or causal mask).
    q_registers keeps the queries of a tile in registers instead of reading them from shared memory for every product.
    """

    parts: int = 2
    keys: int = 64
    stages: int = 4
    q_stages: int = 2
    early_wait: bool = True
    q_registers: bool = False
    registers: int = 240
    group: int = 1


@dataclass(frozen=True)
class SideConfig:
    """One kernel of the backward: 128 stationary rows, `rows` streamed rows, tiles in flight of either."""

    rows: int = 64
    stages: int = 2
    x_stages: int = 1
    early_wait: bool = True
    registers: int = 240


def box_layout(columns: int, bits: int = 16) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, columns * bits // 8), bits, 4)


_CHECKED: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes of descriptors that passed Triton's checks, base left out


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Ragged descriptor of `[rows, columns]` boxes over x `[T, H, D]`, heads side by side in the columns.

    Triton checks one of each form; the checks cost more than the launch.
    """
    width, stride = x.shape[1] * x.shape[2], x.stride(0)
    form = (width, stride, rows, columns, x.dtype)
    checked = _CHECKED.get(form)
    if checked is None or x.data_ptr() % 16:
        new = TensorDescriptor(
            x,
            [0x7FFF0000, 0x7FFF0000, 1 << 30, width],
            [2**34 - stride, stride, stride, 1],
            [1, 1, rows, columns],
            box_layout(columns, x.element_size() * 8),
        )
        _CHECKED[form] = {name: value for name, value in vars(new).items() if name != "base"}
        return new
    new = object.__new__(TensorDescriptor)
    vars(new).update(checked, base=x)
    return new


def rows_of(x: Tensor) -> Tensor:
    """x with heads side by side in each row, rows and start aligned to 16 bytes, as TMA wants it."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if (
        x.stride(2) == 1
        and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
        and aligned
        and x.stride(0) >= x.shape[1] * x.shape[2]
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def forward_scales(call: Call, dtype: torch.dtype) -> tuple[float, float, float]:
    """scale and prescale of the scores, factor of the output.

    fp16 has no room for units that lack their factor (relu² of a raw score overflows), so there the scores are scaled
    first and the units are those of scale 1.
    """
    if call.act == 0:
        return call.scale * LOG2E, 1.0, 1.0
    if dtype == torch.float16:
        return 1.0, call.scale, call.post_scale * scores.unit_factor(call.act, 1.0)
    return call.scale, 1.0, call.post_scale * scores.unit_factor(call.act, call.scale)


def forward_operands(
    qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, tiles: TileList, call: Call, rows: int, keys: int,
    columns: int,
) -> dict[str, Any]:  # fmt: skip
    """What the forwards for all devices take: boxes of `rows` queries, `keys` keys and `columns` columns of the output."""
    q, k, v = qkv
    (_, heads, d), (_, kv_heads, dv) = q.shape, v.shape
    scale, prescale, out_scale = forward_scales(call, q.dtype)
    return {
        "q_desc": descriptor(q, rows, d),
        "k_desc": descriptor(k, keys, d),
        "v_desc": descriptor(v, keys, dv),
        "out_desc": descriptor(out, rows, columns),
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
    }


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig,
    partial: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `attention_forward`; see `run_forward`."""
    return forward_operands((q, k, v), out, lse, tiles, call, M, cfg.keys, v.shape[2]) | {
        "part_ptr": lse if partial is None else partial,
        "rows": out.shape[0],
        "ADD_Q": call.add_q,
        "SHARED_Q": call.shared_q,
        "SPLIT": partial is not None,
        "PARTS": cfg.parts,
        "GROUP": cfg.group,
        "STAGES": cfg.stages,
        "Q_STAGES": cfg.q_stages,
        "EARLY_WAIT": cfg.early_wait,
        "Q_REGISTERS": cfg.q_registers,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig,
    partial: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill out `[Tq, H, Dv]` and, for softmax, lse fp32 `[Tq, H]`.

    With `partial`, fp32 `[parts, Tq, H, Dv]`, fill that and lse fp32 `[parts, Tq, H]` instead; `tiles` are those of
    `split.key_parts`.
    """
    attention_forward[(multiprocessors(q.device.index or 0),)](
        **forward_arguments(q, k, v, out, lse, tiles, call, cfg, partial)
    )


def backward_scales(call: Call, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """scale and prescale of the scores, factors of dS (for dQ and dK) and of dV."""
    if call.act == 0:
        return call.scale * LOG2E, 1.0, call.scale, 1.0
    if dtype == torch.float16:
        ds_scale = call.post_scale * call.scale * scores.slope_factor(call.act, 1.0)
        return 1.0, call.scale, ds_scale, call.post_scale * scores.unit_factor(call.act, 1.0)
    ds_scale, dv_scale = scores.slope_factor(call.act, call.scale), scores.unit_factor(call.act, call.scale)
    return call.scale, 1.0, call.post_scale * ds_scale, call.post_scale * dv_scale


def side_operands(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], stats: Tensor, tiles: TileList,
    call: Call, rows_x: int, rows_y: int, columns: tuple[int, int], key_side: bool,
) -> dict[str, Any]:  # fmt: skip
    """What one side of the backward takes on all devices: boxes of stationary and streamed rows, and columns of gradients.

    x, y and grads are (Q, dO), (K, V), (dQ, dQ) or (K, V), (Q, dO), (dK, dV).
    """
    (x1, x2), (y1, y2) = x, y
    d, dv = x1.shape[2], x2.shape[2]
    heads, others = x1.shape[1], y1.shape[1]
    scale, prescale, ds_scale, dv_scale = backward_scales(call, x1.dtype)
    return {
        "x1_desc": descriptor(x1, rows_x, d),
        "x2_desc": descriptor(x2, rows_x, dv),
        "y1_desc": descriptor(y1, rows_y, d),
        "y2_desc": descriptor(y2, rows_y, dv),
        "d1_desc": descriptor(grads[0], rows_x, columns[0]),
        "d2_desc": descriptor(grads[1], rows_x, columns[1]),
        "stats": stats,
        "q_rows": (y2 if key_side else x2).shape[0],
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
    }


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
    """Arguments of `attention_backward`; see `side_operands`."""
    columns = grads[0].shape[2], grads[1].shape[2]
    return side_operands(x, y, grads, stats, tiles, call, M, cfg.rows, columns, key_side) | {
        "SHARED_Q": call.shared_q,
        "ADD": call.add_q,
        "X_STAGES": cfg.x_stages,
        "STAGES": cfg.stages,
        "EARLY_WAIT": cfg.early_wait,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def statistics(out: Tensor, dout: Tensor, lse: Tensor, scale: float) -> Tensor:
    """fp32 `[2, H, Tq]`, see `row_statistics`."""
    rows, heads, dv = out.shape
    stats = torch.empty((2, heads, rows), dtype=torch.float32, device=out.device)
    block = 32
    row_statistics[(triton.cdiv(rows, block), heads)](
        out, dout, lse, stats, rows, heads, out.stride(0), dout.stride(0), scale, DV=dv, BLOCK=block, num_warps=4
    )
    return stats


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
    """One side of the two-kernel backward: fills the gradients of x. See `side_arguments`."""
    arguments = side_arguments(x, y, grads, stats, tiles, call, cfg, key_side)
    attention_backward[(multiprocessors(x[0].device.index or 0),)](**arguments)


def fused_arguments(
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    dq32: Tensor,
    dq: Tensor | None,
    stats: Tensor,
    tiles: TileList,
    call: Call,
    cfg: SideConfig,
) -> dict[str, Any]:
    """Arguments of `attention_backward_fused`; see `run_fused`."""
    arguments = side_arguments(x, y, grads, stats, tiles, call, cfg, True)
    del arguments["KEY_SIDE"]
    half, owner = dq32.shape[-1] // 2, dq is not None
    final = y[0] if dq is None else dq
    return arguments | {
        "dq_desc": descriptor(dq32.flatten(0, 1) if dq32.dim() == 4 else dq32, cfg.rows, half),
        "final_desc": descriptor(final, cfg.rows, half),
        "base_desc": descriptor(y[1], cfg.rows, half),
        "sum_rows": dq32.shape[-3],
        "OWN_SUMS": dq32.dim() == 4,
        "GROUPED": arguments["sharing"] > 1,
        "OWNER": owner,
        "ADD": owner and call.add_q,
    }


def run_fused(
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    dq32: Tensor,
    dq: Tensor | None,
    stats: Tensor,
    tiles: TileList,
    call: Call,
    cfg: SideConfig,
) -> None:
    """The fused backward: fills grads (dK, dV).

    Without dq it adds to dq32, fp32 `[Tq, H, D]` (shared queries: `[Lq, H, D]`), whose last bits may differ between
    runs; `tiles` are key tiles. Those of the shape `[programs, Tq, H, D]` are sums of the programs, and the same in every
    run. With dq it fills that, by way of dq32, the same bits in every run; `tiles` are whole sequences.
    """
    arguments = fused_arguments(x, y, grads, dq32, dq, stats, tiles, call, cfg)
    attention_backward_fused[(multiprocessors(x[0].device.index or 0),)](**arguments)
