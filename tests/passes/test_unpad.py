"""The packed graph equals the captured one in fp64, whatever subset of the packable nodes is packed.

The minimum cut decides what is fast; it must not decide what is right. So every model of the registry is captured once,
random subsets of its packable nodes are packed, and outputs and all gradients are compared on lengths with zeros, ones and
full rows. The packed graph runs by interpretation: nothing of the inner compilers hides or helps.

Models that differ from a plain one in one spelling only are for GEMOPT_TEST_SWEEP=1: MIXED holds the same spellings, several
to a model.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from gemopt.graph.capture import Captured, capture
from gemopt.graph.facts import Analysis
from gemopt.graph.layout import Layout
from gemopt.passes.canonicalise import canonicalise
from gemopt.passes.unpad import draft, find_sites
from tests.hostile.common import sequence_model, sweep
from tests.models import CASES
from tests.models.registry import ids_and_lengths

LENGTHS = ([3, 12, 7, 20], [1, 20, 1, 2], [4, 0, 9, 5])
# Their graphs hold active dropout, a data-dependent size or nothing to pack: other tests run them.
SKIPPED_TAGS = {"dropout", "nothing", "unbacked"}
ONE_SPELLING = {"pool", "mask", "causal", "fill", "attend", "norm", "position"}
# Models with a near relation that runs always.
RELATED = {
    *("encoder_post_lbd_eval", "encoder_post_bld_train", "encoder_pre_lbd_train", "encoder_pre_bld_eval"),
    *("encoder_pre_bld_train", "encoder_post_bld_eval", "encoder_pre_lbd_eval", "mha_weights", "mha_length_first"),
    *("loss_ignore_index_transposed", "loss_and_detached_hidden", "loss_bce", "loss_times_mask", "plain_mean"),
    *("masked_bias_fill", "odd_tied_head", "odd_batch_norm", "din_softmax"),
}
# Every spelling of tests/models/spelled.py that its three mixtures and the refused models leave out.
MIXED: dict[str, dict[str, Any]] = {
    "mixed_1": {
        "valid": "lengths_gt", "fill": "finfo_min", "attend": "scale_first", "pool": "mean_lengths", "position": "none",
    },
    "mixed_2": {
        "valid": "not_ge", "causal": "not_triu", "fill": "where_inf", "attend": "single_bmm", "pool": "last_gather",
        "position": "sinusoidal",
    },
    "mixed_3": {"valid": "le_minus_one", "fill": "1e9", "attend": "merged_bmm", "pool": "sum_bmm"},
    "mixed_4": {
        "valid": "expand_lt", "causal": "triu_eq_0", "fill": "additive_finfo", "attend": "einsum", "pool": "last_index",
    },
    "mixed_5": {"valid": "ids_bool", "fill": "additive_inf", "attend": "mul_sum", "pool": "sum_where", "pre_norm": False},
    "mixed_6": {"valid": "ids_not_eq", "attend": "exp_sum", "pool": "max"},
    "mixed_7": {"fill": "inf", "attend": "sdpa_float", "pool": "first"},
    "mixed_8": {"attend": "sdpa_is_causal", "pool": "last_counted", "position": "parameter"},
    "mixed_9": {"valid": "arange_lt", "fill": "inplace", "attend": "matmul", "pool": "mean"},
}  # fmt: skip


def captures(model: Any, args: tuple[Any, ...]) -> list[Captured]:
    """Every graph that Dynamo makes of a call, under the settings gemopt compiles with."""
    found: list[Captured] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(capture(gm, inputs))
        return gm.forward

    import torch.fx.experimental._config as shapes

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True), shapes.patch(use_duck_shape=False):
        compiled = torch.compile(model, backend=backend, dynamic=True)
        compiled(**args) if isinstance(args, dict) else compiled(*args)
    return found


def batch(make_inputs: Any, lengths: list[int], seed: int) -> tuple[Any, ...]:
    args = make_inputs(torch.tensor(lengths), 20, torch.Generator().manual_seed(seed))
    return args if isinstance(args, tuple | dict) else (args,)


def run(gm: fx.GraphModule, inputs: list[Any]) -> list[Tensor]:
    """Outputs, then gradients of every float input, in fp64."""
    inputs = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    out = torch.utils._pytree.tree_leaves(fx.Interpreter(gm).run(*inputs))
    floats = [o for o in out if isinstance(o, Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in floats]
    trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(floats, trained, weights, allow_unused=True) if floats and trained else ()
    return [o.detach() for o in out if isinstance(o, Tensor)] + [
        torch.zeros_like(x) if g is None else g for x, g in zip(trained, gradients, strict=False)
    ]


def choices(layout: Layout, rng: random.Random) -> set[fx.Node]:
    keep = rng.choice([0.3, 0.7, 1.0])
    return {n for n in layout.rows if rng.random() < keep}


def by_name(captured: Captured, model: torch.nn.Module, args: tuple[Any, ...], like: tuple[Any, ...]) -> list[Any] | None:
    """The graph's inputs for another batch: weights by identity, user inputs by position of the tensor they were."""
    old = [x for x in torch.utils._pytree.tree_leaves(like) if isinstance(x, Tensor)]
    new = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    swap = {id(a): b for a, b in zip(old, new, strict=True)}
    owned = {id(p) for p in [*model.parameters(), *model.buffers()]}
    inputs: list[Any] = []
    for x in captured.real_inputs:
        if isinstance(x, torch.SymInt):
            inputs.append(None)
        elif id(x) in swap or id(x) in owned:
            inputs.append(swap.get(id(x), x))
        else:
            return None  # made by an earlier graph of the same call
    sizes = symbol_values(captured, inputs)
    return [
        sizes[str(x.node.expr)] if isinstance(x, torch.SymInt) else y
        for x, y in zip(captured.real_inputs, inputs, strict=True)
    ]


def symbol_values(captured: Captured, inputs: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for example, real in zip(captured.example_inputs, inputs, strict=True):
        if isinstance(example, Tensor) and real is not None:
            for s, n in zip(example.shape, real.shape, strict=True):
                if isinstance(s, torch.SymInt):
                    found[str(s.node.expr)] = n
    return found


def model_of(name: str) -> tuple[torch.nn.Module, Any]:
    if name in MIXED:
        return sequence_model(**MIXED[name]).double(), ids_and_lengths
    model, make_inputs = CASES[name].make(0)
    if not isinstance(model, torch.nn.Module):
        pytest.skip("a plain function: no weights to name")
    return model.double(), make_inputs


def in_double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return torch.utils._pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, args)


def names() -> list[Any]:
    swept = {n for n, c in CASES.items() if c.tags & ONE_SPELLING and "refused" not in c.tags} | RELATED
    run = [n for n, c in CASES.items() if not c.tags & SKIPPED_TAGS]
    swept |= set(run[1::2])  # every other of what remains: a run has minutes
    return [*MIXED, *(pytest.param(n, marks=sweep) if n in swept else n for n in run)]


@pytest.mark.parametrize("name", names())
def test_any_subset_of_packable_nodes_may_be_packed(name: str) -> None:
    model, make_inputs = model_of(name)
    first = in_double(batch(make_inputs, LENGTHS[0], 0))
    try:
        graphs = captures(model, first)
    except RuntimeError as error:
        pytest.skip(f"the model casts to fp32 itself: {error}")
    if any(reads_low_mask(n) for g in graphs for n in g.gm.graph.nodes):
        pytest.skip("the model makes an fp32 mask, which torch's fp64 attention reads as fp64")
    rng = random.Random(name)
    for captured in graphs:
        canonicalise(captured.gm)
        known = Analysis(captured.gm.graph)
        sites, _ = find_sites(captured.gm, known)
        for _ in range(3):
            made = draft(captured.gm, captured.fake_mode, known, sites, {}, lambda layout: choices(layout, rng))
            if made.plan is not None:
                compare(captured, made.plan, model, make_inputs, first)


def reads_low_mask(node: fx.Node) -> bool:
    mask = (
        node.args[3] if node.target is torch.ops.aten.scaled_dot_product_attention.default and len(node.args) > 3 else None
    )
    return isinstance(mask, fx.Node) and mask.meta["val"].dtype not in (torch.bool, torch.float64)


def compare(captured: Captured, plan: Any, model: torch.nn.Module, make_inputs: Any, first: tuple[Any, ...]) -> None:
    for seed, lengths in enumerate(LENGTHS):
        args = in_double(batch(make_inputs, list(lengths), seed)) if seed else first
        inputs = by_name(captured, model, args, first)
        if inputs is None:
            return
        try:
            expected = run(captured.gm, inputs)
        except (IndexError, RuntimeError):
            continue  # eager refuses these lengths
        stats, *tensors = plan.prologue(*inputs)
        extra = plan.fill_if_sound(stats.tolist(), tensors)
        if extra is None:
            continue  # a failed assumption: the padded graph runs
        for i, (want, got) in enumerate(zip(expected, run(plan.packed, [*inputs, *extra]), strict=True)):
            finite = torch.isfinite(want)
            assert got.shape == want.shape and got.dtype == want.dtype, (lengths, i)
            torch.testing.assert_close(
                got[finite], want[finite], rtol=1e-7, atol=1e-9, msg=lambda m, i=i: f"tensor {i}: {m}"
            )


def test_angles_of_packed_rows_are_kept_for_the_backward() -> None:
    """On a CPU computing cosines again costs more than reading them."""

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor, age: Tensor, length: Tensor) -> Tensor:
            real = (torch.arange(x.shape[1]) < length[:, None]).unsqueeze(-1)
            return ((self.linear(x) * age.log1p().cos().unsqueeze(-1)) * real).sum(1)

    (captured,) = captures(Turned(), (torch.randn(3, 20, 8), torch.rand(3, 20), torch.tensor([3, 7, 20])))
    canonicalise(captured.gm)
    known = Analysis(captured.gm.graph)
    made = draft(captured.gm, captured.fake_mode, known, find_sites(captured.gm, known)[0], {})
    assert made.plan is not None
    (cosine,) = [n for n in made.plan.packed.graph.nodes if n.target is torch.ops.aten.cos.default]
    assert cosine.meta["recompute"] is CheckpointPolicy.MUST_SAVE
