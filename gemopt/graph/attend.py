"""Writing an attention of the packed graph: operands as ``[rows, heads, features]``, one op, the result back in shape.

The row axis of an operand is a row set (packed) or all positions of all sequences (whole); the head axis holds the batch
axes that do not tell sequences apart, those of the keys first, so that query head ``h`` reads key head ``h // share``.
An operand without an axis (a key head that serves several query heads) is repeated along it, except that the ops take fewer
key heads as they are, and queries without an axis of sequences (learned seeds, also behind an ``expand``) as shared by all.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from gemopt import ops
from gemopt.graph.attention import LEAK, Joined, Site, atoms, score_slots
from gemopt.graph.copies import owned, through_copies
from gemopt.graph.layout import Side, Sides
from gemopt.graph.prologue import TermWriter
from gemopt.graph.slots import Exprs, Info, expr_of, is_tensor
from gemopt.graph.terms import TRUE
from gemopt.graph.units import Unit, all_units, kept_units

if TYPE_CHECKING:
    from gemopt.graph.emit import Emitter

aten = torch.ops.aten
Group = Sequence[int]  # score slots that one dim of a result holds, row-major


def attend(emitter: Emitter, site: Site) -> fx.Node:
    """The result of a site, packed if its queries are, else in its original shape."""
    return _Attention(emitter, site).write()


def in_blocks(site: Site, sides: Sides) -> bool:
    """Whether `block_attention` says it: its blocks are counted in rows, so rows must be positions."""
    band, rows = site.parts.band, sides.keys.set
    same = sides.block is not None and sides.queries.set is rows and rows.prefix
    return same and site.score == "softmax" and not site.dropout and band.left is None and band.right in (None, 0)


def kernel_of(site: Site, sides: Sides) -> str:
    """What a site becomes, for people."""
    if in_blocks(site, sides):
        return "block_attention"
    return "jagged_attention" if site.score == "softmax" else f"gdpa({site.score})"


def _owned(exprs: Exprs, site: Site) -> set[int]:
    return {a for e in exprs if e is not None for a in atoms(e, site.sizes) or ()}


class _Attention:
    def __init__(self, emitter: Emitter, site: Site) -> None:
        self.e, self.site = emitter, site
        sides = emitter.layout.sides[site.out]
        self.queries, self.keys, self.dense, self.block = sides.queries, sides.keys, sides.dense, sides.block
        sequences = {a for a in self.queries.axes[:-1] if a is not None}
        heads = sorted(site.batch - sequences)
        k_axes, v_axes = _owned(site.k_exprs, site), _owned(site.v_exprs, site)
        self.sequences = [a for a in self.queries.axes[:-1] if a is not None]
        shared = [h for h in heads if h in k_axes & v_axes]
        self.heads = shared + [h for h in heads if h not in shared]
        either = any(h in k_axes | v_axes for h in heads if h not in shared)
        self.kv_heads = self.heads if either else shared
        self.one_set_of_queries = False  # for all sequences: known when they are written
        self.dtype = torch.promote_types(site.score_dtype, site.out.meta["val"].dtype)

    def write(self) -> fx.Node:
        site, e = self.site, self.e
        shared = self._shared_queries()
        self.one_set_of_queries = shared is not None
        q = shared if shared is not None else self._rows(site.q, site.q_exprs, self.queries, self.heads, always=True)
        for factor in site.q_factors:
            q = self._times(q, factor)
        k = self._rows(site.k, site.k_exprs, self.keys, self.kv_heads, always=True)
        v = self._rows(site.v, site.v_exprs, self.keys, self.kv_heads, always=True)
        q, k, v = (self._cast(x, o) for x, o in ((q, site.q), (k, site.k), (v, site.v)))
        options = self._options()
        if in_blocks(site, e.layout.sides[site.out]):
            offsets, longest = e.extras.offsets(self.keys.set), e.sizes[self.keys.set.sizes[-1]]
            out = e.call(ops.block_attention, q, k, v, offsets, longest, self.block, **options)
        elif site.score == "softmax":
            out = e.call(ops.jagged_attention, q, k, v, *self._bounds(), **options)
        elif site.score == "leaky_relu" and site.slope != LEAK:
            out = self._leaky(q, k, v, options)
        else:
            names = site.score if site.by_head is None else site.by_head.over(self.heads, site.sizes)
            out = e.call(ops.gdpa, q, k, v, *self._bounds(), activation=names, post_scale=site.post_scale, **options)
        if site.score == "softmax" and site.post_scale != 1.0:
            out = e.call(aten.mul.Tensor, out, site.post_scale)
        for factor in site.factors:
            out = self._times(out, factor)
        value = site.out.meta["val"].dtype
        if value != self.dtype or site.factors:
            out = e.call(aten._to_copy.default, out, dtype=value)
        return self._shaped(out)

    def _leaky(self, q: fx.Node, k: fx.Node, v: fx.Node, options: dict[str, Any]) -> fx.Node:
        """A slope that no kernel has: ``leaky(s) = (1 - slope) relu(s) + slope s``."""
        site, e = self.site, self.e
        parts = [
            e.call(ops.gdpa, q, k, v, *self._bounds(), activation=name, post_scale=site.post_scale * share, **options)
            for name, share in (("relu", 1 - site.slope), ("identity", site.slope))
        ]
        return e.call(aten.add.Tensor, *parts)

    # ------------------------------------------------------------ operands

    def _rows(self, x: fx.Node, exprs: Exprs, side: Side, heads: Group, always: bool) -> fx.Node:
        """``[rows, heads, features]`` of an operand; without ``always`` a dim that it lacks has size 1."""
        e, info, own = self.e, self.e.known.info(x), score_slots(exprs)
        slots = tuple(own[a] for a in side.axes if a in own)
        if not side.set.full and len(slots) == len(side.axes):
            return self._grouped(e.rows_of(x, slots, side.set), kept_units(info, slots), info, exprs, [heads], always, 1)
        token = side.axes[-1]
        owned = _owned(exprs, self.site) & set(side.axes)  # those that are merged with heads, too
        if not side.set.full and owned == {token} and token in own:
            packed = e.axis_of(x, own[token], side.set.token, side.set)
            return self._grouped(packed, kept_units(info, slots), info, exprs, [heads], always, 1)
        groups = [[a for a in side.axes if a is not None], heads]
        if not owned and not always:
            return self._grouped(e.padded(x), all_units(info), info, exprs, groups, False, 0)
        whole = self._grouped(e.padded(x), all_units(info), info, exprs, groups, always, 0, fill={0})
        if side.set.full:
            return whole
        return e.call(ops.pack, whole, e.extras.index(side.set))

    def _shared_queries(self) -> fx.Node | None:
        """``[queries, heads, features]`` where all sequences have the same; None where they do not, or it is not known.

        The copies that are looked through are views of one region, of storage that nobody writes to.
        """
        e, site = self.e, self.site
        if not self.queries.set.full or self.block is not None or site.q_factors or not self.sequences:
            return None
        x, exprs = through_copies(site.q, site.q_exprs, e.known, site.sizes)
        own = owned(exprs, site.sizes)
        if own is None or not set(own).isdisjoint(self.sequences):
            return None
        at = site.q
        while at is not x:
            if at in e.known.tainted or e.regions.get(at) != e.regions.get(site.out):
                return None
            at = e.known.info(at).accesses[0].operand
        if x in e.known.tainted:
            return None
        info, queries = e.known.info(x), [] if site.query is None else [site.query]
        return self._grouped(e.padded(x), all_units(info), info, exprs, [queries, self.heads], True, 0)

    def _grouped(
        self, tensor: fx.Node, units: Sequence[Unit], info: Info, exprs: Exprs, groups: Sequence[Group], always: bool,
        lead: int, fill: set[int] = frozenset(),  # type: ignore[assignment]
    ) -> fx.Node:  # fmt: skip
        """``tensor`` with one dim a group, then one for all features. Its dims are ``lead`` leading ones, then ``units``.

        A group that the operand has in part or (``always``, or listed in ``fill``) not at all is repeated.
        """
        have: list[int | None] = []  # score slot of every atom; None: features
        sizes: list[sympy.Expr] = []
        for unit in units:
            if isinstance(unit, tuple):
                continue
            expr = exprs[unit]
            parts = None if expr is None else atoms(expr, self.site.sizes)
            if parts is None:
                have.append(None)
                sizes.append(info.sizes[unit])
            else:
                have += parts
                sizes += [self.site.sizes[s] for s in parts]
        wanted: list[list[int]] = []
        for i, group in enumerate(groups):
            present = any(s in have for s in group)
            wanted.append(list(group) if present or always or i in fill else [])
        return self._arranged(tensor, have, sizes, wanted, lead)

    def _arranged(
        self, tensor: fx.Node, have: list[int | None], sizes: list[sympy.Expr], groups: list[list[int]], lead: int
    ) -> fx.Node:
        """Split into atoms, permute, repeat what is missing, merge."""
        e = self.e
        features = [i for i, s in enumerate(have) if s is None]
        order = [s for g in groups for s in g]
        expanded = [have.index(s) if s in have else None for s in order] + features
        present = [i for i in expanded if i is not None]
        first = [-1] * lead
        tensor = e.reshape(tensor, [*first, *(e.sizes[s] for s in sizes)])
        if present != sorted(present):
            tensor = e.call(aten.permute.default, tensor, [*range(lead), *(lead + i for i in present)])
        if None in expanded:
            for at, i in enumerate(expanded):
                if i is None:
                    tensor = e.call(aten.unsqueeze.default, tensor, lead + at)
            grown = [-1 if i is not None else e.sizes[self.site.sizes[order[at]]] for at, i in enumerate(expanded)]
            tensor = e.call(aten.expand.default, tensor, [*[-1] * lead, *grown])
        merged = [e.sizes[sympy.prod([self.site.sizes[s] for s in g])] for g in groups]
        width = e.sizes[sympy.prod([sizes[i] for i in features])]
        return e.reshape(tensor, [*first, *merged, width])

    def _cast(self, x: fx.Node, operand: fx.Node) -> fx.Node:
        if operand.meta["val"].dtype == self.dtype and not (operand is self.site.q and self.site.q_factors):
            return x
        return self.e.call(aten._to_copy.default, x, dtype=self.dtype)

    def _times(self, x: fx.Node, factor: Joined) -> fx.Node:
        """``x [rows, heads, features]`` times (or over) a tensor without features and keys."""
        if not is_tensor(factor.node):
            size = self.e.sizes[expr_of(factor.node.meta["val"])]
            return self.e.call(operator.truediv if factor.divide else operator.mul, x, size)
        other = self._rows(factor.node, factor.exprs, self.queries, self.heads, always=False)
        return self.e.call(aten.div.Tensor if factor.divide else aten.mul.Tensor, x, other)

    # ------------------------------------------------------------ options

    def _bounds(self) -> list[Any]:
        e = self.e
        if self.block is not None:
            return [*(e.extras.blocks(s.set, self.block) for s in (self.queries, self.keys)), self.block, self.block]
        return [
            None if self.one_set_of_queries else self._offsets(self.queries), self._offsets(self.keys),
            e.sizes[self.queries.set.sizes[-1]], e.sizes[self.keys.set.sizes[-1]],
        ]  # fmt: skip

    def _offsets(self, side: Side) -> fx.Node:
        e = self.e
        if not side.set.full:
            return e.extras.offsets(side.set)
        return e.extras.regular(side.set)

    def _options(self) -> dict[str, Any]:
        e, site, band = self.e, self.site, self.site.parts.band
        options: dict[str, Any] = {"scale": site.scale}
        if band.causal:
            options["causal"] = True
        left = -1 if band.left is None else band.left
        right = -1 if band.right is None or band.causal else band.right
        if (left, right) != (-1, -1):
            options["window"] = (left, right)
        mask, bias = self._mask(), self._bias()
        if mask is not None:
            options["mask"] = mask
        if bias is not None:
            options["bias"] = bias
        by_position = mask is not None or bias is not None or "window" in options
        if by_position or (band.causal and self.queries.set is not self.keys.set):
            for name, side in (("q_positions", self.queries), ("k_positions", self.keys)):
                if not side.set.full:
                    options[name] = e.extras.axis(side.set, side.set.token)
        if site.dropout:
            options["dropout_p"] = site.dropout
            device = site.out.meta["val"].device
            options["seed"] = e.call(aten.randint.low, 0, 2**62, [1], dtype=torch.int64, device=device)
        return options

    def _score_groups(self) -> list[list[int]]:
        """sequences, heads, queries, keys: the dims of a dense mask or bias."""
        query = [] if self.site.query is None else [self.site.query]
        return [self.sequences, self.heads, query, [self.site.key]]

    def _mask(self) -> fx.Node | None:
        if self.dense == TRUE:
            return None
        return self.e._cached(
            self.e._key("mask", self.dense, self.site.sizes, tuple(map(tuple, self._score_groups()))), self._written_mask
        )

    def _written_mask(self) -> fx.Node:
        e, sizes = self.e, self.site.sizes
        e.masks.append(self.dense)
        leaves = {name: e.padded(e.known.values.leaf_nodes[name]) for name in self.dense.leaves}
        writer = TermWriter(e.graph, leaves, e.sizes, self.site.out.meta["val"].device)
        written = writer.write(self.dense, sizes)
        have: list[int | None] = sorted(self.dense.slots)  # type: ignore[assignment]
        return self._dense_form(written, have, [sizes[s] for s in have if s is not None])

    def _dense_form(self, tensor: fx.Node, have: list[int | None], sizes: list[sympy.Expr]) -> fx.Node:
        """``[sequences or 1, heads or 1, queries, keys]``."""
        groups = [g if i >= 2 or any(s in have for s in g) else [] for i, g in enumerate(self._score_groups())]
        tensor = self._arranged(tensor, have, sizes, groups, 0)
        return self.e.call(aten.squeeze.dim, tensor, -1)

    def _bias(self) -> fx.Node | None:
        e, total = self.e, None
        for bias in self.site.biases:
            have: list[int | None] = []
            for expr in bias.exprs:
                assert expr is not None  # `Walk.joined` takes nothing else
                have += atoms(expr, self.site.sizes) or []
            tensor = self._dense_form(e.padded(bias.node), have, [self.site.sizes[s] for s in have if s is not None])
            if not bias.node.meta["val"].dtype.is_floating_point:
                tensor = e.call(aten._to_copy.default, tensor, dtype=self.dtype)
            if bias.coefficient != 1.0:
                tensor = e.call(aten.mul.Tensor, tensor, bias.coefficient)
            total = tensor if total is None else e.call(aten.add.Tensor, total, tensor)
        return total

    # ------------------------------------------------------------ the result

    def _shaped(self, out: fx.Node) -> fx.Node:
        """``[rows, heads, features]`` in the order of the original's dims."""
        e, site = self.e, self.site
        info = e.known.info(site.out)
        slot_of = {s: j for j, s in enumerate(site.out_slots) if s is not None}
        inner: list[Unit] = [slot_of[h] for h in self.heads]
        inner += [j for j, s in enumerate(site.out_slots) if s is None]
        if self.queries.set.full:
            rows = [slot_of[a] for a in self.queries.axes if a is not None]
            return e.spread(out, [*rows, *inner], site.out)
        slots = tuple(slot_of[a] for a in self.queries.axes if a is not None)
        kept = e._kept_sizes(info, slots)
        want = [u for u in kept_units(info, slots) if u in inner]
        order = [inner.index(u) for u in want]
        if order != list(range(len(order))):
            out = e.reshape(out, [-1, *[e._unit_size(u, info) for u in inner]])
            out = e.call(aten.permute.default, out, [0, *[1 + i for i in order]])
        elif len(inner) == 2 == len(kept):
            return out
        return e.reshape(out, [-1, *kept])
