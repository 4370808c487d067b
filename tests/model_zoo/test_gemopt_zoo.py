"""The registry's models under gemopt, at tiny size: equal to eager, packed, every attention site rewritten."""

import pytest
import torch

import gemopt
from gemopt.model_zoo import zoo
from gemopt.model_zoo.example import example_batch, example_schema
from gemopt.model_zoo.parts.embeddings import torchrec_available
from gemopt.testing import assert_equivalent
from tests.hostile.common import sweep

# Attention sites of one history by kernel, two layers. GEM: HSP in layer 0 and PMA in the read-out, PFFN in layer 0, block
# attention in layer 1. Kunlun: HSP in layer 0 and in the read-out. InterFormer: PMA before, between and after two layers.
SITES = {
    "gem": {"jagged_attention": 2, "gdpa": 1, "block_attention": 1},
    "kunlun": {"jagged_attention": 3, "gdpa": 1},
    "interformer": {"jagged_attention": 5},
    "hstu": {"gdpa": 2},
    "bst": {"jagged_attention": 1},
    "sasrec": {"jagged_attention": 2},
    "wukong": {},
}
TWO_HISTORIES = ("gem", "wukong")  # GEMOPT_TEST_SWEEP=1: two for the others, and Kunlun, whose layers are also GEM's
KERNELS = ("jagged_attention", "gdpa", "block_attention")
SCHEMA = example_schema(n_events=2)
ONE_HISTORY = example_schema(n_events=1)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def cases():
    always = [
        pytest.param(name, SCHEMA if name in TWO_HISTORIES else ONE_HISTORY, marks=() if name in ("gem", "hstu") else sweep)
        for name in zoo.MODELS
        if name != "kunlun"
    ]
    swept = [pytest.param(name, SCHEMA, marks=sweep) for name in zoo.MODELS if name not in TWO_HISTORIES]
    return [*always, *swept]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schema"), cases(), ids=lambda x: x if isinstance(x, str) else str(len(x.events)))
def test_equal_to_eager_with_every_site_rewritten(name, schema):
    def make(lengths, max_len, generator):
        n = lengths.tolist()
        drawn = {"event0": n, "event1": n[::-1]}
        return (example_batch(schema, lengths=drawn, widths=dict.fromkeys(schema.events, max_len)),)

    torch.manual_seed(0)
    model = zoo.build(name, schema, "tiny")
    result = assert_equivalent(model, make, cases=("zeros", "skewed"), inner="eager")
    assert all(case.path.startswith("packed") for case in result.cases), result
    kernels = [(rewrite.kernel or "").split("(")[0] for rewrite in result.report.rewrites]
    expected = {kernel: count * len(schema.events) for kernel, count in SITES[name].items()}
    assert {k: kernels.count(k) for k in KERNELS if k in kernels} == expected
    refused = [r for r in result.report.rejections if "heads.py" not in str(r)]  # no attention there: towers of weights
    assert not refused


def test_wukong_outputs_equal_eager():
    """The cheapest model to compile: mean-pooled histories, packed."""
    torch.manual_seed(0)
    model = zoo.build("wukong", SCHEMA, "tiny")
    compiled = gemopt.compile(model, inner="eager", strict=True, recipe=gemopt.Recipe(min_saving=0.0))
    for seed in range(2):
        batch = example_batch(SCHEMA, 5, fill=0.4, seed=seed)
        expected, found = model(batch), compiled(batch)
        for task in SCHEMA.tasks:
            torch.testing.assert_close(found[task], expected[task], rtol=1e-5, atol=1e-6)
    assert compiled.report.steps_packed == 2


@pytest.mark.skipif(not torchrec_available(), reason="needs torchrec")
@pytest.mark.parametrize("name", ["hstu", pytest.param("gem", marks=sweep), pytest.param("sasrec", marks=sweep)])
def test_torchrec_tables_under_gemopt(name):
    """In fp32 against eager alone: fbgemm's CPU kernels have no fp64, which `assert_equivalent` compares with."""
    torch.manual_seed(0)
    model = zoo.build(name, ONE_HISTORY, "tiny", embeddings="torchrec")
    compiled = gemopt.compile(model, inner="eager", strict=True, recipe=gemopt.Recipe(min_saving=0.0))
    trained = [p for p in model.parameters() if p.requires_grad]
    for seed in range(2):
        batch = example_batch(ONE_HISTORY, 5, fill=0.4, seed=seed)
        outs = [function(batch) for function in (model, compiled)]
        grads = [torch.autograd.grad(sum(x.sum() for x in out.values()), trained, allow_unused=True) for out in outs]
        for task in ONE_HISTORY.tasks:
            torch.testing.assert_close(outs[1][task], outs[0][task], rtol=1e-5, atol=1e-6)
        for eager, packed in zip(*grads, strict=True):
            assert (eager is None) == (packed is None)
            if eager is not None:
                torch.testing.assert_close(packed, eager, rtol=1e-3, atol=1e-5)
    assert compiled.report.steps_packed > 0 and compiled.report.rewrites
