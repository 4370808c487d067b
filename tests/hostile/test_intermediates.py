"""Rows that the live-row analysis calls dead are dead: interpret the padded graph, overwrite them, see no change.

The claim under test is `Live.demand`, a predicate over the elements of every tensor. It is evaluated index by index by
the brute-force evaluator of the analysis tests, the elements outside it are overwritten in all float intermediates at
once, and every output has to stay as it was, bit for bit. The inside of an attention (scores, weights) is one node to
the analysis and is left alone. The value is large and finite: 0 · NaN in a padded matrix product is NaN by arithmetic,
not because anybody reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx

from gemopt.graph.capture import Captured, capture
from gemopt.graph.facts import Analysis
from gemopt.graph.live import Live
from gemopt.graph.terms import Term
from gemopt.passes.canonicalise import canonicalise
from gemopt.passes.unpad import find_sites

from ..graph.oracle import Evaluator
from ..models import CASES
from .common import sweep

B, L = 5, 11
LENGTHS = torch.tensor([3, 11, 2, 1, 7])
QUICK = [
    *("last_one_hot", "masked_max", "attend_merged_bmm", "sasrec", "encoder_post_lbd_train", "loss_ignore_index"),
    *("several_histories", "mask_ids_gather_length", "joined_histories", "plain_mean"),
]
# One call is one graph without random numbers and data-dependent sizes.
OTHERS = [n for n, c in CASES.items() if not c.tags & {"dropout", "graph_break", "unbacked", "nothing"} and n not in QUICK]


def captured_call(model: Any, args: Any) -> tuple[Captured, tuple[Any, ...]]:
    """The (only) graph of a call, captured, and the real inputs it ran with."""
    graphs: list[Captured] = []
    calls: list[tuple[Any, ...]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(capture(gm, inputs))

        def run(*real: Any) -> Any:
            calls.append(real)
            return gm.forward(*real)

        return run

    from torch.fx.experimental import _config as shapes

    with torch._dynamo.config.patch(specialize_float=True), shapes.patch(use_duck_shape=False):
        subject = torch.compile(model, backend=backend, dynamic=True)
        subject(**args) if isinstance(args, dict) else subject(*args)
    assert len(graphs) == len(calls) == 1
    return graphs[0], calls[0]


class Recorder(fx.Interpreter):
    """Keeps every node's value; overwrites the nodes in `dead` where told."""

    def __init__(self, gm: fx.GraphModule, dead: dict[str, Tensor] | None = None, value: float = 0.0) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.dead, self.value, self.values = dead or {}, value, {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.dead:
            # a clone keeps the strides: another layout takes another BLAS kernel, which rounds differently
            result = result.clone().masked_fill_(self.dead[n.name].reshape(result.shape), self.value)
        self.values[n.name] = result
        return result


def slots_in(term: Any) -> set[int]:
    if isinstance(term, Term):
        return {term.args[0]} if term.op == "slot" else set().union(*map(slots_in, term.args), set())
    return set().union(*map(slots_in, term), set()) if isinstance(term, tuple) else set()


class Claims:
    """What `Live` says of one captured call, as bool tensors."""

    def __init__(self, captured: Captured, inputs: tuple[Any, ...]) -> None:
        canonicalise(captured.gm)
        self.gm = captured.gm
        self.known = Analysis(self.gm.graph)
        sites, _ = find_sites(self.gm, self.known)
        self.live = Live(self.gm.graph, self.known, sites)
        self.inside = {n for site in sites for n in site.interior if n is not site.out}
        self.inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        recorder = Recorder(self.gm)
        self.outputs = recorder.run(*self.inputs)
        self.values = recorder.values
        places = self.gm.graph.find_nodes(op="placeholder")
        symbols = {
            p.meta["val"].node.expr: x
            for p, x in zip(places, self.inputs, strict=True)
            if isinstance(p.meta["val"], torch.SymInt)
        }
        self.symbols = {s: v for s, v in symbols.items() if isinstance(s, sympy.Symbol)}
        leaves = {
            name: self.values[node.name].reshape(self.sizes(node)) for name, node in self.known.values.leaf_nodes.items()
        }
        self.evaluator = Evaluator(leaves, self.symbols)

    def sizes(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(int(sympy.sympify(s).subs(self.symbols)) for s in self.known.info(node).sizes)

    def dead(self, node: fx.Node) -> Tensor | None:
        """Elements nobody demands, over the slots of the node; None where that is none or all."""
        value = self.values[node.name]
        if not isinstance(value, Tensor) or not value.is_floating_point() or node in self.inside:
            return None
        demand, sizes = self.live.demand(node), self.sizes(node)
        used = slots_in(demand)
        if not used:
            return None
        short = [n if i in used else 1 for i, n in enumerate(sizes)]
        return ~self.evaluator.mask(demand, short, undefined=True).expand(sizes)

    def masks(self) -> dict[str, Tensor]:
        found = {n.name: self.dead(n) for n in self.gm.graph.nodes if n in self.known.infos}
        return {name: mask for name, mask in found.items() if mask is not None and bool(mask.any())}

    def run(self, dead: dict[str, Tensor], value: float) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(Recorder(self.gm, dead, value).run(*self.inputs))
        return [x for x in leaves if isinstance(x, Tensor)]


def claims_of(name: str) -> Claims:
    model, inputs = CASES[name].make(0)
    args = inputs(LENGTHS, L, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return Claims(*captured_call(model, args))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=sweep) for n in OTHERS)])
def test_dead_elements_change_nothing(name):
    claims = claims_of(name)
    masks = claims.masks()
    before = [x for x in torch.utils._pytree.tree_leaves(claims.outputs) if isinstance(x, Tensor)]
    if CASES[name].expected == "rewritten":
        assert len(masks) >= 5, f"only {sorted(masks)} have dead elements"
    for value in (1e6, -1e6):
        after = claims.run(masks, value)
        assert len(before) == len(after)
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(a, b), (i, _culprits(claims, masks, value, before))


def _culprits(claims: Claims, masks: dict[str, Tensor], value: float, before: list[Tensor]) -> list[str]:
    """The nodes whose dead elements alone change an output."""
    return [
        name
        for name, mask in masks.items()
        if not all(torch.equal(a, b) for a, b in zip(before, claims.run({name: mask}, value), strict=True))
    ]


@pytest.mark.parametrize("name", ["last_gather", "masked_mean"])
def test_the_check_can_fail(name):
    """Overwriting what is alive does change the outputs, node by node."""
    claims = claims_of(name)
    before = torch.utils._pytree.tree_leaves(claims.outputs)
    observed = 0
    for node, dead in claims.masks().items():
        after = torch.utils._pytree.tree_leaves(claims.run({node: ~dead}, 1e6))
        observed += not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert observed >= 8
