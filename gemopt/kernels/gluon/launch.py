"""Launches the Gluon kernels: descriptors, tile lists, configurations.

The calls here take packed tensors and an `AttentionSpec`-like description reduced to what the kernels know (`Call`).
Nothing reads a device value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemopt.kernels.gluon import scores
from gemopt.kernels.gluon.forward import attention_forward
from gemopt.kernels.gluon.tiles import TileList, tile_list

LOG2E = math.log2(math.e)
NAMES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
M = 64


@dataclass(frozen=True)
class Call:
    """What an attention call means to these kernels.

    act: a code of `scores`; 0 is softmax. left, right: the window, -1 unlimited; a causal mask is right = 0.
    """

    act: int
    scale: float
    post_scale: float = 1.0
    left: int = -1
    right: int = -1
    bottom_right: bool = False

    def band(self, keys_stationary: bool = False) -> dict[str, Any]:
        before, after = (self.right, self.left) if keys_stationary else (self.left, self.right)
        return {"before": max(before, 0), "after": max(after, 0), "BEFORE": before >= 0, "AFTER": after >= 0} | {
            "BOTTOM_RIGHT": self.bottom_right
        }


@dataclass(frozen=True)
class ForwardConfig:
    """parts·64 queries and `keys` keys a tile, `stages` key tiles and `q_stages` query tiles in flight."""

    parts: int = 2
    keys: int = 64
    stages: int = 4
    q_stages: int = 2
    early_wait: bool = True
    registers: int = 240


def box_layout(columns: int, bits: int = 16) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, columns * bits // 8), bits, 4)


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Ragged descriptor of `[rows, columns]` boxes over x `[T, H, D]`, heads side by side in the columns."""
    width, stride = x.shape[1] * x.shape[2], x.stride(0)
    bits = x.element_size() * 8
    return TensorDescriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, 1 << 30, width],
        [2**34 - stride, stride, stride, 1],
        [1, 1, rows, columns],
        box_layout(columns, bits),
    )


def rows_of(x: Tensor) -> Tensor:
    """x with heads side by side in each row, rows and start aligned to 16 bytes, as TMA wants it."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) and aligned and x.stride(0) >= x.shape[1] * x.shape[2]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def programs(device: int) -> int:
    """Multiprocessors: the kernels are persistent, one program on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def softmax_scales(call: Call, dtype: torch.dtype) -> tuple[float, float, float]:
    """scale and prescale of the scores, factor of the output.

    fp16 has no room for units that lack their factor (relu² of a raw score overflows), so there the scores are scaled
    first and the units are those of scale 1.
    """
    if call.act == 0:
        return call.scale * LOG2E, 1.0, 1.0
    if dtype == torch.float16:
        return 1.0, call.scale, call.post_scale * scores.unit_factor(call.act, 1.0)
    return call.scale, 1.0, call.post_scale * scores.unit_factor(call.act, call.scale)


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: TileList, call: Call, cfg: ForwardConfig
) -> dict[str, Any]:
    (_, heads, d), (_, kv_heads, dv) = q.shape, v.shape
    scale, prescale, out_scale = softmax_scales(call, q.dtype)
    return {
        "q_desc": descriptor(q, M, d),
        "k_desc": descriptor(k, cfg.keys, d),
        "v_desc": descriptor(v, cfg.keys, dv),
        "out_desc": descriptor(out, M, dv),
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
        "PARTS": cfg.parts,
        "STAGES": cfg.stages,
        "Q_STAGES": cfg.q_stages,
        "EARLY_WAIT": cfg.early_wait,
        "REGISTERS": cfg.registers,
        "num_warps": 4,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, call: Call, cfg: ForwardConfig
) -> tuple[Tensor, Tensor]:
    """out `[Tq, H, Dv]`, and lse fp32 `[Tq, H]` (empty unless softmax)."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty(out.shape[:2] if call.act == 0 else (1,), dtype=torch.float32, device=q.device)
    tiles = tile_list(q_offsets, k_offsets, q.shape[0], cfg.parts * M)
    attention_forward[(programs(q.device.index or 0),)](**forward_arguments(q, k, v, out, lse, tiles, call, cfg))
    return out, lse
