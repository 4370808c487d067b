"""The plan of one graph: prologue, packed graph, and the host's decision between packed and padded.

The prologue's result is ``(stats, *tensors)``: the assumption bits, row counts and query-key pair counts in ``stats``,
then for every row set
its mask, and ranks, offsets and gathered row numbers where the packed graph asks for them. Once the host knows the counts
it fills the extra inputs with a few index operations; nothing else waits for the device. Row sets with a capacity
(graph/spare.py) have extra inputs of one size for every step, which needs no counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._sympy.functions import FloorDiv

from gemopt.graph import terms as t
from gemopt.graph.cost import pairs_name
from gemopt.graph.extras import Extra, Extras
from gemopt.graph.facts import Exists
from gemopt.graph.live import Subset
from gemopt.graph.mutation import has_side_effect
from gemopt.graph.prologue import Sizes, TermWriter, copy_inputs, copy_leaf, device_of
from gemopt.graph.rowsets import RowSet
from gemopt.graph.spare import capacity
from gemopt.graph.terms import Term
from gemopt.graph.totals import Total, expected_count
from gemopt.graph.values import Values
from gemopt.kernels import memo

aten = torch.ops.aten

_OFFSETS = ("offsets", "blocks", "regular")


@dataclass(frozen=True)
class Room:
    """What capacities are chosen from: a first batch, and how many more rows later ones may have, as a share."""

    inputs: Sequence[Any]
    slack: float


@dataclass(frozen=True)
class Bit:
    """A condition that must hold for every index of ``sizes``; ``text`` is how the report words it.

    With ``some``, it must hold for some index of that axis, whatever the others are.
    """

    predicate: Term
    sizes: tuple[sympy.Expr, ...]
    text: str
    some: int | None = None


def exists_bit(exists: Exists) -> Bit:
    """Over the slots that the predicate speaks of, and the one that is searched."""
    used = sorted({*exists.predicate.slots, exists.slot})
    over_used = t.substitute(exists.predicate, {s: t.slot(i) for i, s in enumerate(used)})
    text = f"every softmax over a fill of {exists.fill:g} meets an entry where {t.render(exists.predicate)}"
    text += f", with a score above {exists.fill:g} + 104 (which is not checked)"
    return Bit(over_used, tuple(exists.sizes[s] for s in used), text, used.index(exists.slot))


def subset_bit(subset: Subset) -> Bit:
    """Tested over the slots that the two predicates speak of; the others (heads, say) would only repeat it."""
    holds = t.or_(t.not_(subset.small), subset.big)
    used = sorted(holds.slots)
    over_used = t.substitute(holds, {s: t.slot(i) for i, s in enumerate(used)})
    return Bit(over_used, tuple(subset.sizes[s] for s in used), str(subset))


def impossible(bit: Bit) -> bool:
    """Whether a bit is 0 whatever the inputs are: it fails at the first or the last index of some axis."""
    ends = [{}, *({i: end} for i, n in enumerate(bit.sizes) if i != bit.some for end in (t.const(0), t.size(n - 1)))]
    if bit.some is None:
        return any(t.substitute(bit.predicate, at) == t.FALSE for at in ends)
    return any(_nowhere(t.substitute(bit.predicate, at), bit.some, bit.sizes[bit.some]) for at in ends)


def _nowhere(p: Term, slot: int, size: sympy.Expr) -> bool:
    """Whether no position of ``slot`` fulfils ``p``: it would lie before the first or behind the last."""
    if p.op in ("and", "or"):
        return (any if p.op == "and" else all)(_nowhere(x, slot, size) for x in p.args)
    if p.op != "le0":
        return p == t.FALSE
    parts, least = t.as_linear(p.args[0])
    k = parts.pop(t.slot(slot), 0)
    if any(x.op != "size" for x in parts):
        return False
    value = sympy.sympify(least) + sum(x.args[0] * c for x, c in parts.items()) + (k * (size - 1) if k < 0 else 0)
    return bool(sympy.expand(value).is_positive)


def blocks_of(s: RowSet, block: int) -> sympy.Expr:
    """Blocks of a sequence, the last one perhaps shorter."""
    return FloorDiv(s.sizes[-1] + (block - 1), sympy.Integer(block))


def range_bits(extras: Sequence[Extra]) -> list[Bit]:
    """Every position that a gather reads lies inside the padded tensor."""
    bits = []
    for e in extras:
        if e.kind == "gather":
            for position, size in zip(e.positions, e.set.sizes, strict=True):
                inside = t.and_(t.le(t.const(0), position), t.lt(position, t.size(size)))
                if position.op != "slot" and inside != t.TRUE:
                    bits.append(Bit(inside, e.sizes, "every gathered position lies inside the padded tensor"))
    return bits


def overflow_bits(predicates: Iterable[Term], values: Values) -> list[Bit]:
    """Data that are summed before they are compared are not so large that eager's sum, or the prologue's, wraps."""
    sizes: dict[str, int] = {}
    for p in predicates:
        for leaf, k in t.summed_reads(p).items():
            sizes[leaf] = max(sizes.get(leaf, 0), k)
    bits = []
    for leaf, k in sizes.items():
        dtype = values.leaf_nodes[leaf].meta["val"].dtype
        if dtype not in (torch.int32, torch.int64):
            continue
        bound = 2 ** (30 if dtype == torch.int32 else 60) // k
        extents = values.extents(leaf)
        element = t.read(leaf, [t.slot(i) for i in range(len(extents))], integer=True)
        inside = t.and_(t.le(element, t.const(bound)), t.le(t.const(-bound), element))
        bits.append(Bit(inside, tuple(extents), f"{leaf} lies between -{bound} and {bound}"))
    return bits


def table_bits(totals: Sequence[Total]) -> list[Bit]:
    """A jagged input is read at clamped positions, of which an input without rows has none."""
    texts = {total.count: f"{total.text} are more than 0" for total in totals}
    return [Bit(t.lt(t.const(0), t.size(count)), (), text) for count, text in texts.items()]


class Plan:
    """What the backend compiles and runs for one graph (interface in ARCHITECTURE.md).

    Attributes:
        prologue, packed: graph modules. The first takes the captured inputs, the second also ``extra_examples``.
        sets: the row sets, in the order of the counts in ``stats``.
        bits: the assumptions, in the order of the bits in ``stats``.
        last_reason: why the last `admit` said no.
        last_counts: row counts of the last step by row set name.
        likely_rows: what the row counts are taken for where kernels are chosen.
        fakes: what the nodes of the packed graph give, as fakes, once a pass has asked for it.
        expected: where the host knows every row count before the device does (graph/totals.py), or they have capacities:
            what each is, in words.
        vouches: whether what kernels work out from the extra inputs is kept for the step (kernels/memo.py). Not under CUDA
            graphs, which allow no tensors of their memory to outlive a replay.
        capacity: how many rows the packed tensors of each row set have room for; empty: as many as there are, each step.
    """

    def __init__(
        self,
        packed: fx.GraphModule,
        source: fx.GraphModule,
        extras: Extras,
        assumptions: Sequence[Subset],
        values: Values,
        fake_mode: Any,
        pays: Callable[[Mapping[str, int], Mapping[str, int]], bool],
        pairs: Sequence[tuple[RowSet, RowSet, int | None]] = (),
        exists: Sequence[Exists] = (),
        totals: Sequence[Total] = (),
        masks: Sequence[Term] = (),
        room: Room | None = None,
    ) -> None:
        """``masks``: predicates that the packed graph computes. ``room``: give the row sets capacities."""
        used = {n.target for n in packed.graph.nodes if n.op == "placeholder" and n.users}
        for node in list(packed.graph.nodes):
            if node.op == "placeholder" and node in extras.nodes.values() and node.target not in used:
                packed.graph.erase_node(node)
        packed.recompile()
        self.packed = packed
        self.extras = [e for e, n in extras.nodes.items() if n.target in used]
        self.sets = list(
            dict.fromkeys(s for e in self.extras if e.kind != "regular" for s in (e.set, e.target) if s is not None)
        )
        bits = [*map(subset_bit, assumptions), *map(exists_bit, exists), *range_bits(self.extras), *table_bits(totals)]
        bits += overflow_bits([*(b.predicate for b in bits), *(s.predicate for s in self.sets), *masks], values)
        self.bits = [b for b in dict.fromkeys(bits) if b.predicate != t.TRUE]
        self._expected = self._expectations(totals)
        self.expected = {s.name: text for s, (_, text) in self._expected.items()}
        self._pays = pays
        self._pairs = [p for p in dict.fromkeys(pairs) if p[0] in self.sets and p[1] in self.sets]
        self.fakes: dict[fx.Node, Any] = {}
        self.likely_rows: list[int] = []
        self.vouches = True
        self.last_reason = ""
        self.last_counts: dict[str, int] = {}
        self._slots: dict[Any, int] = {}
        self.prologue = self._build_prologue(source, values)
        self.capacity: dict[RowSet, int] = {}
        if room is not None:
            self.capacity = self._capacities(room)
        if self.capacity and not any(map(has_side_effect, self.packed.graph.nodes)):
            self.expected = {s.name: f"at most {n}" for s, n in self.capacity.items()}
        self.extra_examples = self._examples(fake_mode)

    def _expectations(self, totals: Sequence[Total]) -> dict[RowSet, tuple[sympy.Expr, str]]:
        """The count of every row set, if all are known beforehand and running the packed graph twice does no harm."""
        known = {s: expected_count(s, totals) for s in self.sets}
        if None in known.values() or any(map(has_side_effect, self.packed.graph.nodes)):
            return {}
        return {s: e for s, e in known.items() if e is not None}

    # ------------------------------------------------------------ building

    def _capacities(self, room: Room) -> dict[RowSet, int]:
        """Room for the rows of the first batch and some more; none where packing that many would not pay."""
        with unset_fake_temporarily(), torch.no_grad():
            stats, *tensors = self.prologue(*room.inputs)
            _, counts = self._read(stats.tolist())
        totals = {s: tensors[self._slots["mask", s]].numel() for s in self.sets}
        found = {s: capacity(n, totals[s], room.slack) for s, n in counts.items()}
        by_name = {s.name: n for s, n in found.items()}
        return found if self._pays(by_name, {s.name: n for s, n in totals.items()}) else {}

    def _build_prologue(self, source: fx.GraphModule, values: Values) -> fx.GraphModule:
        graph, env = copy_inputs(source.graph)
        sizes = Sizes(graph, list(env.values()))
        names = self._leaves()
        leaf_nodes = [values.leaf_nodes[n] for n in names]
        leaves = {n: copy_leaf(graph, node, env) for n, node in zip(names, leaf_nodes, strict=True)}
        self._device = device_of(leaf_nodes, torch.device("cpu"))
        writer = TermWriter(graph, leaves, sizes, self._device)
        outputs: list[fx.Node] = []
        stats: list[fx.Node] = []

        def keep(key: Any, node: fx.Node) -> fx.Node:
            self._slots[key] = len(outputs)
            outputs.append(node)
            return node

        for bit in self.bits:
            holds = writer.expanded(bit.predicate, bit.sizes)
            if bit.some is not None:
                holds = writer.call(aten.any.dim, holds, bit.some)
            held = writer.call(aten.all.default, holds)
            stats.append(writer.call(aten._to_copy.default, held, dtype=torch.int64))
        flat_masks: dict[RowSet, fx.Node] = {}
        ranks = {e.set for e in self.extras if e.kind in ("repack", "gather")}
        for s in self.sets:
            mask = writer.flat(keep(("mask", s), writer.expanded(s.predicate, s.sizes)))
            flat_masks[s] = mask
            stats.append(writer.call(aten.sum.default, mask))
            if s in ranks:
                counted = writer.call(aten.cumsum.default, mask, 0)
                keep(("rank", s), writer.call(aten.sub.Tensor, counted, 1))
        for e in self.extras:
            if e.kind in ("offsets", "blocks"):
                keep(e, self._offsets(writer, flat_masks[e.set], e.set, e.axis if e.kind == "blocks" else None))
            elif e.kind == "regular":
                keep(e, self._regular(writer, e.set))
            elif e.kind == "gather":
                keep(e, self._gathered(writer, flat_masks[e.set], outputs[self._slots["rank", e.set]], e))
        for s, (count, _) in self._expected.items():
            self._slots["count", s] = len(outputs)
            outputs.append(sizes[count])  # type: ignore[arg-type]  # a number, known without the device
        for q, k, block in self._pairs:
            lengths = [self._lengths(writer, flat_masks[s], s, block) for s in (q, k)]
            stats.append(writer.call(aten.sum.default, writer.call(aten.mul.Tensor, *lengths)))
        graph.output((writer.call(aten.stack.default, stats), *outputs))
        graph.eliminate_dead_code()
        return fx.GraphModule(source, graph, "Prologue")

    def _leaves(self) -> list[str]:
        terms = [b.predicate for b in self.bits] + [s.predicate for s in self.sets]
        terms += [p for e in self.extras for p in e.positions]
        return sorted(frozenset().union(*(x.leaves for x in terms)))

    def _lengths(self, writer: TermWriter, mask: fx.Node, s: RowSet, block: int | None = None) -> fx.Node:
        """Rows of every sequence, or of every block of ``block`` positions of every sequence."""
        by_sequence = writer.call(aten.reshape.default, mask, [-1, writer.sizes[s.sizes[-1]]])
        if block is not None:
            missing = writer.sizes[blocks_of(s, block) * block - s.sizes[-1]]
            by_sequence = writer.call(aten.constant_pad_nd.default, by_sequence, [0, missing])
            by_sequence = writer.call(aten.reshape.default, by_sequence, [-1, block])
        return writer.call(aten.sum.dim_IntList, by_sequence, [1])

    def _offsets(self, writer: TermWriter, mask: fx.Node, s: RowSet, block: int | None = None) -> fx.Node:
        ends = writer.call(aten.cumsum.default, self._lengths(writer, mask, s, block), 0)
        return writer.call(aten.constant_pad_nd.default, ends, [1, 0])

    def _regular(self, writer: TermWriter, s: RowSet) -> fx.Node:
        *sequences, tokens = s.sizes
        first = writer.call(aten.arange.default, writer.sizes[sympy.prod(sequences) + 1], device=self._device)
        return writer.call(aten.mul.Tensor, first, writer.sizes[tokens])

    def _gathered(self, writer: TermWriter, mask: fx.Node, rank: fx.Node, e: Extra) -> fx.Node:
        """Row numbers of the gathered positions, -1 outside the set."""
        flat: fx.Node | None = None
        for position, size in zip(e.positions, e.set.sizes, strict=True):
            step = writer.full(position, e.sizes)
            if flat is not None:
                flat = writer.call(aten.add.Tensor, writer.call(aten.mul.Tensor, flat, writer.sizes[size]), step)
            else:
                flat = step
        total = writer.sizes[sympy.prod(e.set.sizes)]
        last = writer.call(aten.add.Tensor, writer._constant(total, torch.int64), -1)
        flat = writer.call(aten.minimum.default, writer.call(aten.clamp_min.default, flat, 0), last)
        inside, rows = (writer.call(aten.index.Tensor, x, [flat]) for x in (mask, rank))
        return writer.call(aten.where.ScalarOther, inside, rows, -1)

    def _examples(self, fake_mode: Any) -> list[Any]:
        """Fakes for the extra inputs; each row set has one unbacked size."""
        env = fake_mode.shape_env
        counts: dict[RowSet, Any] = {}
        examples = []
        with fake_mode, env.ignore_fresh_unbacked_symbols():
            for e in self.extras:
                s = e.target or e.set
                if e.kind in ("offsets", "regular"):
                    count: Any = _symint(env, sympy.prod(s.sizes[:-1]) + 1)
                elif e.kind == "blocks":
                    count = _symint(env, sympy.prod(s.sizes[:-1]) * blocks_of(s, e.axis) + 1)
                elif e.kind == "gather":
                    count = _symint(env, sympy.prod(e.sizes))
                else:
                    if s in self.capacity:
                        counts[s] = self.capacity[s]
                        self.likely_rows.append(counts[s])
                    elif s not in counts:
                        counts[s] = env.create_unbacked_symint()
                        # No lower bound above 0: 2 would answer what shape functions of torch 2.11 ask, but then its
                        # inductor fused reductions on a GPU that it could not size (not tried since the backend tells it
                        # how to split them).
                        torch._check(counts[s] >= 0)
                        likely = likely_rows(s, env.backed_var_to_val)
                        if likely is not None:
                            env.var_to_hint_override[counts[s].node.expr] = likely
                            self.likely_rows.append(likely)
                    count = counts[s]
                examples.append(torch.empty(count, dtype=torch.int64, device=self._device))
        return examples

    # ------------------------------------------------------------ running

    def admit(self, stats: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """The extra inputs of the packed graph, or None where it must not or need not run."""
        sound, counts = self._read(stats)
        if not sound:
            return None
        if self.capacity:  # whether it pays was asked when they were chosen
            return self._fill(self.capacity, tensors)
        totals = {s.name: tensors[self._slots["mask", s]].numel() for s in self.sets}
        if not self._pays(self.last_counts, totals):
            self.last_reason = "packing does not pay at this fill"
            return None
        return self._fill(counts, tensors)

    def expect(self, tensors: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """The extra inputs for the counts that are expected, before anything is read; None where only a read can tell.

        What the packed graph makes of them is right if `confirm` says so afterwards.
        """
        if self.capacity:
            return self._fill(self.capacity, tensors, clamped=True)
        counts = {s: int(tensors[self._slots["count", s]]) for s in self._expected}
        if not counts or 0 in counts.values():
            return None
        totals = {s.name: tensors[self._slots["mask", s]].numel() for s in self.sets}
        if any(n > totals[s.name] for s, n in counts.items()):
            return None
        if not self._pays({s.name: n for s, n in counts.items()}, totals):
            return None
        return self._fill(counts, tensors, clamped=True)

    def confirm(self, stats: Sequence[int], tensors: Sequence[Any]) -> bool:
        """Whether `expect` was right: every bit holds, and every count is the one expected, or has room."""
        sound, counts = self._read(stats)
        if self.capacity:
            return sound
        return sound and all(n == int(tensors[self._slots["count", s]]) for s, n in counts.items())

    def fill_if_sound(self, stats: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """As `admit`, without asking whether it pays."""
        sound, counts = self._read(stats)
        return self._fill(self.capacity or counts, tensors) if sound else None

    def _read(self, stats: Sequence[int]) -> tuple[bool, dict[RowSet, int]]:
        """Check the bits and split off the counts; `last_reason` says what failed."""
        first, last = len(self.bits), len(self.bits) + len(self.sets)
        by_set = dict(zip(self.sets, stats[first:last], strict=True))
        self.last_counts = {s.name: c for s, c in by_set.items()}
        self.last_counts |= {pairs_name(*p): n for p, n in zip(self._pairs, stats[last:], strict=True)}
        for held, bit in zip(stats[:first], self.bits, strict=True):
            if not held:
                self.last_reason = f"assumption failed: {bit.text}"
                return False, by_set
        if self.capacity and 0 in by_set.values():
            self.last_reason = "a row set with room has no rows to fill it with"
            return False, by_set
        over = next((s for s, n in self.capacity.items() if by_set[s] > n), None)
        if over is not None:
            self.last_reason = f"{by_set[over]} rows where {over}, and there is room for {self.capacity[over]}"
            return False, by_set
        empty = next((e.set for e in self.extras if e.kind == "gather" and not by_set[e.set]), None)
        if empty is not None:
            self.last_reason = f"rows are gathered where {empty}, and no sequence has one"
            return False, by_set
        return True, by_set

    def _fill(self, counts: Mapping[RowSet, int], tensors: Sequence[Tensor], clamped: bool = False) -> tuple[Tensor, ...]:
        """The extra inputs. ``clamped``: the counts may be wrong, and nothing may point outside all the same."""

        def inside(x: Tensor, last: int, first: int = 0) -> Tensor:
            return x.clamp(first, last) if clamped else x

        index: dict[RowSet, Tensor] = {}
        spare: dict[RowSet, Tensor] = {}  # bool, where a set has a capacity
        some: dict[RowSet, Tensor] = {}  # the index, the first row's in place of spare rows
        coordinates: dict[RowSet, tuple[Tensor, ...]] = {}
        filled = []
        for s in self.sets:
            mask = tensors[self._slots["mask", s]]
            total = mask.numel()
            index[s] = aten.nonzero_static(mask.reshape(-1), size=counts[s], fill_value=total).squeeze(1)
            some[s] = index[s]
            if s in self.capacity:
                spare[s] = index[s] == total
                some[s] = torch.where(spare[s], index[s][:1].clamp_max(total - 1), index[s])

        def but_spare(x: Tensor, s: RowSet, number: int) -> Tensor:
            return x.masked_fill(spare[s], number) if s in spare else x

        for e in self.extras:
            if e.kind == "index":
                filled.append(index[e.set])
            elif e.kind == "repack":
                assert e.target is not None
                rank = inside(tensors[self._slots["rank", e.set]][some[e.target]], counts[e.set] - 1)
                filled.append(but_spare(rank, e.target, counts[e.set]))
            elif e.kind == "regular":
                filled.append(tensors[self._slots[e]])
            elif e.kind == "gather":
                filled.append(inside(tensors[self._slots[e]], counts[e.set] - 1, first=-1))
            elif e.kind in ("offsets", "blocks"):
                filled.append(inside(tensors[self._slots[e]], counts[e.set]))
            else:
                if e.set not in coordinates:
                    coordinates[e.set] = self._coordinates(some[e.set], e.set, tensors)
                where = coordinates[e.set][e.axis if e.kind == "axis" else -1]
                filled.append(where if e.kind == "axis" else but_spare(where, e.set, self._sequences(e.set, tensors)))
        if self.vouches:
            memo.vouch_for(*(x for e, x in zip(self.extras, filled, strict=True) if e.kind in _OFFSETS))
        return tuple(filled)

    def _sequences(self, s: RowSet, tensors: Sequence[Tensor]) -> int:
        return math.prod(tensors[self._slots["mask", s]].shape[:-1])

    def _coordinates(self, index: Tensor, s: RowSet, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The row axes' coordinates of every row, then its sequence number."""
        rest, found = index, []
        for extent in reversed(tensors[self._slots["mask", s]].shape[1:]):
            quotient = torch.div(rest, max(extent, 1), rounding_mode="floor")
            found.append(rest - quotient * extent)
            rest = quotient
        found.append(rest)
        extent = tensors[self._slots["mask", s]].shape[-1]
        sequence = rest if len(found) == 2 else torch.div(index, max(extent, 1), rounding_mode="floor")
        return (*reversed(found), sequence)


def likely_rows(s: RowSet, hints: Mapping[sympy.Symbol, Any]) -> int | None:
    """How many rows to choose kernels for: half of the padded ones, or one for each sequence where only one can be meant.

    Without a figure inductor assumes 8192 and splits reductions over rows for that. It is no promise: any number is right.
    """
    one_each = any(c.op == "eq0" and s.token in c.slots for c in t.conjuncts(s.predicate))
    sizes = [sympy.sympify(size.xreplace(dict(hints))) for size in (s.sizes[: s.token] if one_each else s.sizes)]
    if not all(size.is_Integer for size in sizes):
        return None
    rows = math.prod(int(size) for size in sizes)
    return max(rows if one_each else rows // 2, 2)


def _symint(env: Any, expr: sympy.Expr) -> Any:
    if expr.is_Integer:
        return int(expr)
    return env.create_symintnode(expr, hint=None)
