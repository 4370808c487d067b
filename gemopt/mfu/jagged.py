"""FLOPs of gemopt's own attention ops, for models that call them: pairs are counted from the real offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gemopt.kernels.spec import AttentionSpec
from gemopt.ops.attention import _spec

Record = Callable[[fx.Node, float, str], None]


def calls_ops(graph: fx.Graph) -> bool:
    """Whether a graph calls an op of gemopt that multiplies matrices."""
    return any(_is_attention(n) or _is_unknown(n) for n in graph.nodes)


def _name(node: fx.Node) -> str:
    target = node.target
    ours = node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target.namespace == "gemopt"
    return str(target._opname) if ours else ""  # type: ignore[union-attr]


def _is_attention(node: fx.Node) -> bool:
    return _name(node).startswith("jagged_attention") and "backward" not in _name(node)


def _is_unknown(node: fx.Node) -> bool:
    return _name(node).startswith(("pffn", "mx_linear"))


class CountingInterpreter(fx.Interpreter):
    """Runs a captured graph on real inputs and reports the FLOPs of every attention op that it calls."""

    def __init__(self, gm: fx.GraphModule, record: Record) -> None:
        super().__init__(gm)
        self._record = record

    def run_node(self, n: fx.Node) -> Any:
        if _is_attention(n):
            args, _ = self.fetch_args_kwargs_from_env(n)
            self._record(n, *attention_flops(args))
        elif _is_unknown(n):
            self._record(n, 0.0, f"{n.name}: FLOPs of {_name(n)} are not counted")
        return super().run_node(n)


def attention_flops(args: Sequence[Any]) -> tuple[float, str]:
    """``2 * pairs * H * (Dqk + Dv)`` of one call, and a note where positions or a mask may hide more."""
    q, k, v = args[:3]
    spec = _spec(tuple(args[3:]))
    note = ""
    if spec.mask is not None or spec.q_positions is not None or spec.k_positions is not None:
        note = "an attention op with positions or a mask: pairs that they hide are counted"
    return 2.0 * visible_pairs(spec) * q.shape[1] * (k.shape[-1] + v.shape[-1]), note


def visible_pairs(spec: AttentionSpec) -> int:
    """Query-key pairs that offsets, causal order, window and blocks leave, positions being row numbers."""
    k_ends = spec.k_offsets.long()
    shared = torch.arange(len(k_ends), device=k_ends.device) * spec.max_q
    q_ends = shared if spec.q_offsets is None else spec.q_offsets.long()
    q_len, k_len = q_ends.diff(), k_ends.diff()
    sequence = torch.repeat_interleave(torch.arange(len(q_len), device=q_len.device), q_len)
    row = torch.arange(len(sequence), device=q_len.device) - q_ends[sequence]
    keys = k_len[sequence]
    position = row + (keys - q_len[sequence] if spec.bottom_right else 0)
    low, high = torch.zeros_like(row), keys - 1
    left, right = spec.window
    if left >= 0:
        low = torch.maximum(low, position - left)
    if right >= 0:
        high = torch.minimum(high, position + right)
    if spec.causal:
        high = torch.minimum(high, position)
    if spec.block_size:
        first: Tensor = row.div(spec.block_size, rounding_mode="floor") * spec.block_size
        low, high = torch.maximum(low, first), torch.minimum(high, first + spec.block_size - 1)
    return int((high - low + 1).clamp_min(0).sum())
