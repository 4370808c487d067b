"""Accesses against brute force: change one element of an operand, see which elements of the result change.

The access says which operand element a result element may read; every change that happens must be one that it allows.
Each case runs with sizes that all differ and again with sizes that are all equal, where the answer must be the same.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gemopt.graph import terms as t
from gemopt.graph.facts import Analysis
from gemopt.graph.slots import Access, Info, backward, forward
from gemopt.graph.terms import Term
from tests.hostile.common import sweep

from .oracle import Evaluator, Traced, capture, static, trace

DIFFERENT = {"B": 2, "L": 5, "D": 4, "E": 3, "H": 2, "d": 2}
EQUAL = {"B": 4, "L": 4, "D": 4, "E": 4, "H": 4, "d": 4}


@dataclass(frozen=True)
class Case:
    """``fn`` on inputs such as ``BLD`` (float), ``BL:int`` (below the size that follows), ``BL:bool``, ``DE:weight``."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    opaque: bool = False  # not every op of it needs to be understood

    def __str__(self) -> str:
        return self.name

    def make(self, sizes: dict[str, int]) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        made = []
        for spec in self.inputs:
            letters, _, kind = spec.partition(":")
            shape = [int(c) if c.isdigit() else sizes[c] for c in letters]
            if kind.startswith("int"):
                high = sizes[kind[3:]] if kind[3:] in sizes else int(kind[3:])
                made.append(torch.randint(0, high, shape, generator=g))
            elif kind == "bool":
                made.append(torch.rand(shape, generator=g) > 0.5)
            else:
                value = torch.randn(shape, generator=g, dtype=torch.float64)
                made.append(static(value) if kind == "weight" else value)
        return tuple(made)


def case(name: str, fn: Callable[..., Any], *inputs: str, opaque: bool = False) -> Case:
    return Case(name, fn, inputs, opaque)


def _heads(x: Tensor) -> Tensor:
    return x.view(x.size(0), x.size(1), 2, 2).transpose(1, 2)


def _split_heads_merged(x: Tensor) -> Tensor:
    return _heads(x).reshape(x.size(0) * 2, x.size(1), 2)


VIEWS = [
    case("view_split", lambda x: x.view(x.size(0), x.size(1), 2, 2), "BLD"),
    case("view_merge", lambda x: x.view(x.size(0) * x.size(1), 4), "BLD"),
    case("view_merge_split", lambda x: x.view(-1, 4).view(x.size(0), x.size(1), 4), "BLD"),
    case("view_merge_tail", lambda x: x.reshape(x.size(0), x.size(1) * 4), "BLD"),
    case("view_all", lambda x: x.reshape(-1), "BLD"),
    case("view_regroup", lambda x: x.reshape(x.size(0), x.size(1) * 2, 2), "BLD"),
    case("view_static", lambda w: w.view(2, 2, 3) * 2, "43:weight"),
    case("flatten_unflatten", lambda x: x.flatten(0, 1).unflatten(1, (2, 2)), "BLD"),
    case("squeeze_unsqueeze", lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(-1), "BLD"),
    case("expand", lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1), "BLD"),
    case("expand_new_dim", lambda w: w.expand(3, 4, w.size(1)) + 0, "DE:weight"),
    case("expand_as", lambda x, y: x.unsqueeze(2).expand_as(y), "BL", "BLD"),
    case("permute", lambda x: x.permute(2, 0, 1), "BLD"),
    case("permute_negative", lambda x: x.permute(-1, 0, -2), "BLD"),
    case("transpose", lambda x: x.transpose(-1, 1), "BLD"),
    case("t", lambda x: x.t(), "BL"),
    case("mT", lambda x: x.mT, "BLD"),
    case("movedim", lambda x: x.movedim(0, -1), "BLD"),
    case("movedim_many", lambda x: torch.movedim(x, (0, 2), (1, 0)), "BLDE"),
    case("merged_heads", _split_heads_merged, "BLD"),
    case("merged_heads_back", lambda x: _split_heads_merged(x).view(x.size(0), 2, x.size(1), 2), "BLD"),
    case("length_first_merged", lambda x: x.transpose(0, 1).reshape(x.size(1) * x.size(0), 4), "BLD"),
    case("two_merged_added", lambda x, y: x.flatten(0, 1) + y.flatten(0, 1), "BLD", "BLD", opaque=True),
    case("merged_added", lambda x, y: (x + y).flatten(0, 1) + (x * y).flatten(0, 1), "BLD", "BLD"),
    case("merged_plus_single", lambda x, w: x.flatten(0, 1) * w, "BLD", "D:weight"),
    case("broadcast_ones", lambda x, y: x.unsqueeze(2) + y.unsqueeze(1), "BD", "BD"),
    case("repeat_of_one", lambda x: x.unsqueeze(1).repeat(1, 3, 1, 1), "BLD"),
    case("repeat_of_many", lambda x: x.repeat(2, 1, 3), "BLD"),
    case("repeat_of_merged", lambda x: x.flatten(1).repeat(2, 1, 2), "BLD"),
    case("tile", lambda x: x.tile(2, 1), "BLD"),
    case("repeat_interleave", lambda x: x.repeat_interleave(2, dim=0), "BLD"),
    case("repeat_interleave_of_merged", lambda x: x.flatten(0, 1).repeat_interleave(3, dim=0), "BLD"),
    case("zeros_like", lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0), "BLD"),
]

CUTS = [
    case("select", lambda x: x.select(1, 1), "BLD"),
    case("select_last", lambda x: x[:, -1], "BLD"),
    case("select_size_minus_one", lambda x: x.select(1, x.size(1) - 1), "BLD"),
    case("select_minus_two_of_head", lambda x: _heads(x)[:, -2], "BLD"),
    case("slice_start", lambda x: x[:, 1:], "BLD"),
    case("slice_end", lambda x: x[:, :-1], "BLD"),
    case("slice_first", lambda x: x[:, :2], "BLD"),
    case("slice_feature", lambda x: x[..., 1:3], "BLD"),
    case("slice_from_end", lambda x: x[..., -2:], "BLD"),
    case("slice_of_one", lambda x: x[:, :1], "BLD"),
    case("slice_step", lambda x: x[..., ::2], "BLD", opaque=True),
    case("slice_of_slice", lambda x: x[:, 1:][:, :-1] * x[:, :-2], "BL"),
    case("slice_whole", lambda x: x[:, 0:10_000], "BLD"),
    case("narrow", lambda x: x.narrow(-1, 1, 2), "BLD"),
    case("slice_merged", lambda x: x.flatten(0, 1)[1:], "BLD", opaque=True),
    case("cat", lambda x, y: torch.cat([x, y], 2), "BLD", "BLE"),
    case("cat_negative_dim", lambda x, y: torch.cat([x, y, x], dim=-1), "BLD", "BLE"),
    case("cat_tokens", lambda x, y: torch.cat([x, y], dim=1), "BLD", "BED"),
    case("cat_token_in_front", lambda x, w: torch.cat([w.expand(x.size(0), 1, 4), x], 1), "BLD", "11D:weight"),
    case("cat_heads", lambda x: torch.cat([x[..., :2], x[..., 2:]], 0), "BLD"),
    case("stack", lambda x, y: torch.stack([x, y], 1), "BLD", "BLD"),
    case("stack_last", lambda x, y: torch.stack([x, y], dim=-1), "BLD", "BLD"),
    case("flip", lambda x: x.flip(1), "BLD"),
]

LOOKUPS = [
    case("embedding", lambda w, i: F.embedding(i, w), "ED:weight", "BL:intE"),
    case("embedding_of_merged", lambda w, i: F.embedding(i.view(-1), w), "ED:weight", "BL:intE"),
    case("gather", lambda x, i: x.gather(1, i), "BL", "BE:intL"),
    case("gather_last", lambda x, i: x.gather(1, i.view(-1, 1, 1).expand(-1, 1, 4)), "BLD", "B:intL"),
    case("gather_feature", lambda x, i: x.gather(-1, i), "BLD", "BL3:intD"),
    case("gather_smaller", lambda x, i: x.gather(2, i[:, :2]), "BLD", "BL3:intD"),
    case("gather_one", lambda x, i: x.gather(2, i[:, :1]), "BLD", "BL3:intD"),
    case(
        "gather_merged_otherwise",
        lambda x, i: x.view(12, 2).gather(0, (i * 1).view(12, 2)[:, :1]) * x.view(12, 2).gather(1, (i % 2).view(12, 2)),
        "342:weight",
        "432:int12",
        opaque=True,
    ),
    case("index_pair", lambda x, i: x[torch.arange(x.size(0)), i], "BLD", "B:intL"),
    case("index_minus_one", lambda x, i: x[torch.arange(x.size(0)), i - 1], "BLD", "B:intL"),
    case("index_rows", lambda x, i: x[i], "BLD", "E:intB"),
    case("index_table", lambda w, i: w[i], "ED:weight", "BL:intE"),
    case("index_pair_broadcast", lambda x, i: x[torch.arange(x.size(0))[:, None], i], "BLD", "B2:intL"),
    case("index_column", lambda x, i: x[:, i], "BLD", "E:intL", opaque=True),
    case("index_select", lambda x, i: x.index_select(1, i), "BLD", "E:intL"),
    case("index_select_first", lambda x, i: x.index_select(0, i), "BLD", "E:intB"),
    case("index_bool", lambda x, m: x[m], "BLD", "BL:bool", opaque=True),
]

REDUCTIONS = [
    case("sum_all", lambda x: x.sum(), "BLD"),
    case("sum", lambda x: x.sum(1), "BLD"),
    case("sum_keepdim", lambda x: x.sum(1, keepdim=True), "BLD"),
    case("sum_two", lambda x: x.sum((0, -1)), "BLD"),
    case("mean_negative", lambda x: x.mean(-2), "BLD"),
    case("mean_keepdim_two", lambda x: x.mean(dim=[0, 1], keepdim=True), "BLD"),
    case("sum_empty_dims", lambda x: torch.sum(x, dim=[]), "BLD"),
    case("sum_of_merged", lambda x: x.flatten(0, 1).sum(0), "BLD"),
    case("amax", lambda x: x.amax(1), "BLD"),
    case("amin_all", lambda x: x.amin(), "BLD"),
    case("prod", lambda x: x.prod(1), "BLD"),
    case("prod_all", lambda x: x.prod(), "BLD"),
    case("any", lambda x: (x > 0).any(1), "BLD"),
    case("all_keepdim", lambda x: (x > 0).all(-1, keepdim=True), "BLD"),
    case("any_of_many", lambda x: torch.any(x > 0, dim=(0, 2)), "BLD"),
    case("any_of_no_dims", lambda x: torch.ops.aten.any.dims(x > 0, []), "BL", opaque=True),
    case("all_of_no_dims", lambda x: torch.ops.aten.all.dims(x > 0, []), "BL", opaque=True),
    case("logsumexp", lambda x: x.logsumexp(1), "BLD"),
    case("var", lambda x: x.var(1), "BLD"),
    case("std_all", lambda x: x.std(), "BLD"),
    case("var_keepdim", lambda x: x.var(-1, keepdim=True, unbiased=False), "BLD"),
    case("argmax", lambda x: x.argmax(1), "BLD"),
    case("argmin_all", lambda x: x.argmin(), "BLD"),
    case("argmax_keepdim", lambda x: x.argmax(-1, keepdim=True), "BLD"),
    case("count_nonzero", lambda x: (x > 0).count_nonzero(1), "BLD"),
    case("nansum", lambda x: x.nansum(0), "BLD"),
    case("softmax", lambda x: x.softmax(1), "BLD"),
    case("softmax_of_merged", lambda x: x.flatten(0, 1).softmax(-1), "BLD"),
    case("log_softmax", lambda x: F.log_softmax(x, dim=-1), "BLD"),
    case("cumsum", lambda x: x.cumsum(1), "BLD"),
    case("cumprod", lambda x: x.cumprod(-1), "BLD"),
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), "BLD", "D:weight", "D:weight"),
    case("layer_norm_two", lambda x: F.layer_norm(x, (3, 4)), "BL34"),
    case("layer_norm_by_itself", lambda x: F.layer_norm(x, (4,), x), "D:weight"),
    case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), "BLD", "D:weight"),
    case("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), "BLD", opaque=True),
    case("max_pair", lambda x: x.max(1).values, "BLD", opaque=True),
]

PRODUCTS = [
    case("linear", lambda x, w, b: F.linear(x, w, b), "BLD", "ED:weight", "E:weight"),
    case("linear_to_one", lambda x, w: F.linear(x, w), "BLD", "1D:weight"),
    case("linear_vector", lambda x, w: F.linear(x, w), "BLD", "D:weight"),
    case("linear_by_itself", lambda x: F.linear(x, x), "DD:weight"),
    case("linear_merged", lambda x, w: F.linear(x.reshape(-1, 4), w), "BLD", "ED:weight"),
    case(
        "linear_merged_features",
        lambda x, w: F.linear(_heads(x).transpose(1, 2).flatten(2), w),
        "BLD",
        "ED:weight",
    ),
    case("mm", lambda a, b: a @ b, "LD", "DE"),
    case("matmul_3_2", lambda a, b: a @ b, "BLD", "DE:weight"),
    case("matmul_2_3", lambda a, b: a @ b, "LD", "BD5"),
    case("matmul_4_4", lambda a, b: a @ b.mT, "BHLD", "BHED"),
    case("matmul_broadcast", lambda a, b: a @ b, "B1LD", "HDE"),
    case("matmul_broadcast_both", lambda a, b: a @ b, "B1LD", "1HDE"),
    case("matmul_self", lambda a: a @ a.mT, "BLD"),
    case("matmul_twice_the_same", lambda a: a @ a, "DD"),
    case("matmul_vector", lambda a, b: a @ b, "BLD", "D:weight"),
    case("matmul_vector_left", lambda a, b: a @ b, "D", "DE", opaque=True),
    case("matmul_merged_rows", lambda a, b: a.flatten(1, 2) @ b, "BLHD", "BDE"),
    case("bmm", lambda a, b: torch.bmm(a, b), "BLD", "BD5"),
    case("bmm_merged", lambda x, y: torch.bmm(_split_heads_merged(x), _split_heads_merged(y).mT), "BLD", "BLD"),
    case("baddbmm", lambda m, a, b: torch.baddbmm(m, a, b), "BLE", "BLD", "BDE"),
    case("baddbmm_row", lambda m, a, b: torch.baddbmm(m, a, b, alpha=2), "1LE", "BLD", "BDE"),
    case("addmm", lambda m, a, b: torch.addmm(m, a, b), "E:weight", "LD", "DE"),
    case("einsum_qk", lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), "BLHD", "BEHD"),
    case("einsum_qk_other", lambda q, k: torch.einsum("b h q d, b h k d -> b q k h", q, k), "BHLD", "BHED"),
    case("einsum_k_first", lambda q, k: torch.einsum("kbd,bqd->bqk", k.transpose(0, 1), q), "BED", "BLD"),
    case("einsum_pv", lambda p, v: torch.einsum("bhqk,bkhd->bqhd", p, v), "BHLE", "BEHD"),
    case("einsum_outer", lambda a, b: torch.einsum("bi,bj->bij", a, b), "BL", "BE"),
    case("einsum_pointwise", lambda a, b: torch.einsum("bld,bl->bld", a, b), "BLD", "BL"),
    case("einsum_sums_one", lambda a, b: torch.einsum("bqd,bke->bqk", a, b), "BLD", "BED"),
    case("einsum_one", lambda a: torch.einsum("bld->lb", a), "BLD"),
    case("einsum_equal_letters", lambda a, b: torch.einsum("ij,ji->ij", a, b), "BL", "LB"),
    case("einsum_diagonal", lambda a: torch.einsum("ii->i", a), "DD", opaque=True),
    case("einsum_ellipsis", lambda a, b: torch.einsum("...d,ed->...e", a, b), "BLD", "ED:weight", opaque=True),
    case("einsum_three", lambda a, b, c: torch.einsum("bd,bd,bd->b", a, b, c), "BD", "BD", "BD", opaque=True),
    case("einsum_implicit", lambda a, b: torch.einsum("ik,kj", a, b), "LD", "DE", opaque=True),
]

ATTENTION = [
    case("sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "BHLd", "BHEd", "BHE3"),
    case("sdpa_3d", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "BLD", "BED", "BED"),
    case(
        "sdpa_mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        "BHLd", "BHEd", "BHEd", "LE",
    ),
    case(
        "sdpa_mask_keys",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        "BHLd", "BHEd", "BHEd", "B11E",
    ),
    case(
        "sdpa_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "BHLd", "BHLd", "BHLd",
    ),
    case(
        "sdpa_shared_kv",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "BHLd", "1HEd", "B1Ed",
    ),
    case(
        "sdpa_grouped",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "B4Ld", "B2Ld", "B2Ld", opaque=True,
    ),
    case("sdpa_self", lambda x: F.scaled_dot_product_attention(x, x, x), "BLD"),
]  # fmt: skip

LOSSES = [
    case("ce_none", lambda x, y: F.cross_entropy(x, y, reduction="none"), "BD", "B:intD"),
    case("ce_mean", lambda x, y: F.cross_entropy(x, y), "BD", "B:intD"),
    case("ce_sum_ignore", lambda x, y: F.cross_entropy(x, y, ignore_index=0, reduction="sum"), "BD", "B:intD"),
    case("ce_images", lambda x, y: F.cross_entropy(x, y, reduction="none"), "BD3", "B3:intD"),
    case(
        "ce_merged",
        lambda x, y: F.cross_entropy(x.view(-1, 4), y.view(-1), reduction="none"),
        "BLD",
        "BL:intD",
    ),
    case(
        "ce_smoothed",
        lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1),
        "BD",
        "B:intD",
    ),
    case("ce_weighted", lambda x, y, w: F.cross_entropy(x, y, w, reduction="none"), "BD", "B:intD", "D:weight"),
    case(
        "ce_probabilities",
        lambda x, y: F.cross_entropy(x, y.softmax(1), reduction="none"),
        "BD",
        "BD",
        opaque=True,
    ),
    case("nll", lambda x, y: F.nll_loss(x, y, reduction="none"), "BD", "B:intD"),
]

POINTWISE = [
    case("add_broadcast", lambda x, y: x + y, "BLD", "D:weight"),
    case("add_itself", lambda x: x + x, "BLD"),
    case("scalar_ops", lambda x: 1 - x * 2 / 3, "BLD"),
    case("where", lambda m, x, y: torch.where(m[..., None], x, y), "BL:bool", "BLD", "D:weight"),
    case("where_scalar", lambda m, x: torch.where(m, x, 0.0), "BL:bool", "BL"),
    case("masked_fill", lambda x, m: x.masked_fill(m.unsqueeze(-1), 1.0), "BLD", "BL:bool"),
    case("masked_fill_wider", lambda x, m: x.unsqueeze(1).masked_fill(m.unsqueeze(0), 1.0), "BL", "EL:bool"),
    case("activations", lambda x: F.gelu(x) + F.silu(x) + x.relu() + x.sigmoid() + x.tanh() + x.exp(), "BL"),
    case("clamp", lambda x: x.clamp(-1, 1) + x.clamp_min(0), "BL"),
    case("compare", lambda x, y: (x > y) & (x < 1) | ~(y >= 0), "BLD", "BL1"),
    case("pow", lambda x, y: x.abs() ** 2 + x**y, "BLD", "BLD"),
    case("casts", lambda x: x.float().to(torch.float64).type_as(x) + x.clone().contiguous(), "BL"),
    case("dropout_off", lambda x: F.dropout(x, 0.5, training=False), "BL"),
    case("maximum", lambda x, y: torch.maximum(x, y), "BL", "BL"),
    case("addcmul", lambda x, y, z: torch.addcmul(x, y, z) + torch.lerp(x, y, 0.3), "BL", "BL", "BL"),
    case("tril", lambda x: x.tril() + x.triu(1), "BLD", opaque=True),
    case("bce_none", lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), "BL", "BL"),
    case(
        "bce_weighted",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w, reduction="none"),
        "BLD", "BLD", "D:weight",
    ),
    case("bce_mean", lambda x, y: F.binary_cross_entropy_with_logits(x, y), "BL", "BL", opaque=True),
    case("mse_none", lambda x, y: F.mse_loss(x, y, reduction="none") + F.smooth_l1_loss(x, y, reduction="none"), "BL", "BL"),
]  # fmt: skip

CASES = [*VIEWS, *CUTS, *LOOKUPS, *REDUCTIONS, *PRODUCTS, *ATTENTION, *LOSSES, *POINTWISE]


# ---------------------------------------------------------------- the oracle


def changes(run: Traced, node: fx.Node, operand: fx.Node) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """For every element of the operand: its index over slots, and which elements of the result it changes."""
    before = run.values[node].reshape(-1)
    original = run.values[operand]
    for flat, index in enumerate(itertools.product(*map(range, run.slot_sizes(operand)))):
        changed = torch.zeros(before.shape, dtype=torch.bool)
        for value in _other_values(original.reshape(-1)[flat].item(), original.dtype):
            poisoned = original.clone().reshape(-1)
            poisoned[flat] = value
            after = _again(run, node, operand, poisoned.reshape(original.shape))
            if after is not None and after.shape == before.shape:
                changed |= ~((after == before) | (after.isnan() & before.isnan()))
        yield index, changed


def _other_values(old: Any, dtype: torch.dtype) -> list[Any]:
    if dtype == torch.bool:
        return [not old]
    return [old + 31.7, old - 31.7, math.nan] if dtype.is_floating_point else [old + 1, old - 1]


def _again(run: Traced, node: fx.Node, operand: fx.Node, value: Tensor) -> Tensor | None:
    def real(n: fx.Node) -> Any:
        return value if n is operand else run.values[n]

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), real)
    try:
        return node.target(*args, **kwargs).reshape(-1)
    except (IndexError, RuntimeError):  # an index that left its range
        return None


class Allowed:
    """Which operand elements each result element may read, by the access, as a table over the result."""

    def __init__(self, run: Traced, node: fx.Node, access: Access) -> None:
        ev, sizes = run.evaluator, run.slot_sizes(node)
        self.columns = [None if e is None else ev.everywhere(e, sizes, undefined=math.nan).reshape(-1) for e in access.exprs]
        self.count = math.prod(sizes)

    def readers_of(self, index: tuple[int, ...]) -> Tensor:
        """Result elements that may read this operand element."""
        allowed = torch.ones(self.count, dtype=torch.bool)
        for i, column in zip(index, self.columns, strict=True):
            if column is not None:
                allowed &= column == i
        return allowed


def nodes_with_operands(run: Traced) -> Iterator[tuple[fx.Node, fx.Node, list[Access]]]:
    for node in run.tensors():
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        accesses = run.known.operands(node)
        operands = dict.fromkeys(n for n in node.all_input_nodes if isinstance(run.values[n], Tensor))
        assert {a.operand for a in accesses} <= set(operands), (node, accesses)
        for operand in operands:
            yield node, operand, [a for a in accesses if a.operand is operand]


def check_dependencies(run: Traced, rng: torch.Generator) -> None:
    for node, operand, accesses in nodes_with_operands(run):
        tables = [Allowed(run, node, a) for a in accesses]
        wanted = [random_predicate(run, node, rng) for _ in range(2)]
        masks = [ev.mask(p, run.slot_sizes(node)).reshape(-1) for ev, p in wanted]
        demands = [demand_on(run, node, operand, accesses, ev, p) for ev, p in wanted]
        for index, changed in changes(run, node, operand):
            allowed = torch.zeros(changed.shape, dtype=torch.bool)  # no access: only its shape matters
            for table in tables:
                allowed |= table.readers_of(index)
            assert not bool((changed & ~allowed).any()), (
                f"{node.format_node()}: element {index} of {operand} changes {changed.nonzero().tolist()}, "
                f"allowed {allowed.nonzero().tolist()} by {accesses}"
            )
            for (_, p), mask, demand in zip(wanted, masks, demands, strict=True):
                assert bool(demand[index]) or not bool((changed & mask).any()), (
                    f"{node.format_node()}: {operand}{index} is read where {p}"
                )


def random_predicate(run: Traced, node: fx.Node, rng: torch.Generator) -> tuple[Evaluator, Term]:
    """A predicate over the node's slots: single positions, bands and a leaf mask of the node's own sizes."""
    sizes = run.slot_sizes(node)
    leaf = torch.rand(sizes, generator=rng) > 0.4
    lengths = torch.randint(0, 4, sizes[:1], generator=rng)
    ev = Evaluator({**run.evaluator.leaves, "mask": leaf, "lengths": lengths}, run.symbols)
    every = [t.slot(i) for i in range(len(sizes))]
    parts = [t.call("bool", t.read("mask", every, False))]
    for s in every:
        c = t.const(int(torch.randint(0, 3, (), generator=rng)))
        parts += [t.eq(s, c), t.lt(s, c), t.ne(s, c)]
        parts.append(t.lt(s, t.read("lengths", every[:1], True)))
    for a, b in itertools.combinations(every, 2):
        parts.append(t.le(a, b))

    def pick() -> Term:
        return parts[int(torch.randint(0, len(parts), (), generator=rng))]

    return ev, t.or_(t.and_(pick(), pick()), t.and_(pick(), t.not_(pick())))


def demand_on(run: Traced, node: fx.Node, operand: fx.Node, accesses: list[Access], ev: Evaluator, p: Term) -> Tensor:
    """`backward` of a predicate through all accesses to one operand, evaluated; what it reads outside is free."""
    out_sizes, in_sizes = run.known.info(node).sizes, run.known.info(operand).sizes
    result = torch.zeros(run.slot_sizes(operand), dtype=torch.bool)
    for a in accesses:
        result |= ev.mask(backward(p, a, out_sizes, in_sizes), run.slot_sizes(operand), undefined=False)
    return result


def check_forward(run: Traced, rng: torch.Generator) -> None:
    """``forward(term)`` at a result element is the term at the operand element that it reads."""
    for node, operand, accesses in nodes_with_operands(run):
        ev, p = random_predicate(run, operand, rng)
        for access in accesses:
            moved = forward(p, access)
            if moved is None:
                assert any(access.exprs[s] is None for s in p.slots)
                continue
            for index in itertools.product(*map(range, run.slot_sizes(node))):
                where = {i: ev.at(e, index) for i, e in enumerate(access.exprs) if e is not None}
                sizes = run.slot_sizes(operand)
                if all(0 <= v < sizes[i] for i, v in where.items()):
                    assert bool(ev.at(moved, index)) == bool(ev.at(p, where)), (node, p, moved, index)


@pytest.mark.parametrize("case", [pytest.param(c, marks=sweep) if i % 2 else c for i, c in enumerate(CASES)], ids=str)
def test_access(case):
    """Sound by brute force; and the same, slot by slot, whatever the sizes happen to be."""
    run = trace(case.fn, *case.make(DIFFERENT))
    rng = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    check_dependencies(run, rng)
    check_forward(run, rng)
    infos = [run.known.info(n) for n in run.tensors()]
    assert case.opaque or not any(i.kind == "opaque" for i in infos), [i.kind for i in infos]
    gm = capture(case.fn, *case.make(EQUAL))
    known = Analysis(gm.graph)
    others = [known.info(n) for n in gm.graph.nodes if n in known.infos]
    assert [_form(i) for i in infos] == [_form(i) for i in others]


def _form(info: Info) -> Any:
    """Factors per dim, and the slots that each expression depends on; None for what may read any position."""
    reads = [[None if e is None else sorted(e.slots) for e in a.exprs] for a in info.accesses]
    return [len(dim) for dim in info.dims], reads
