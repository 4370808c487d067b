"""The registry's models under gemopt, at tiny size: equal to eager, packed, every attention site rewritten."""

import pytest
import torch

import gemopt
from gemopt.model_zoo import zoo
from gemopt.model_zoo.example import example_batch, example_schema
from gemopt.testing import assert_equivalent

# Attention sites by kernel: two histories, two layers. GEM: HSP in layer 0 and PMA in the read-out, PFFN in layer 0, block
# attention in layer 1. Kunlun: HSP in layer 0 and in the read-out. InterFormer: PMA before, between and after two layers.
SITES = {
    "gem": {"jagged_attention": 4, "gdpa": 2, "block_attention": 2},
    "kunlun": {"jagged_attention": 6, "gdpa": 2},
    "interformer": {"jagged_attention": 10},
    "hstu": {"gdpa": 4},
    "bst": {"jagged_attention": 2},
    "sasrec": {"jagged_attention": 4},
    "wukong": {},
}
KERNELS = ("jagged_attention", "gdpa", "block_attention")
SCHEMA = example_schema()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(lengths, max_len, generator):
    n = lengths.tolist()
    drawn = {"event0": n, "event1": n[::-1]}
    return (example_batch(SCHEMA, lengths=drawn, widths=dict.fromkeys(SCHEMA.events, max_len)),)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_equal_to_eager_with_every_site_rewritten(name):
    torch.manual_seed(0)
    model = zoo.build(name, SCHEMA, "tiny")
    result = assert_equivalent(model, make, cases=("zeros", "skewed"), inner="eager")
    assert all(case.path.startswith("packed") for case in result.cases), result
    kernels = [(rewrite.kernel or "").split("(")[0] for rewrite in result.report.rewrites]
    assert {k: kernels.count(k) for k in KERNELS if k in kernels} == SITES[name]
    refused = [r for r in result.report.rejections if "heads.py" not in str(r)]  # no attention there: towers of weights
    assert not refused


def test_wukong_losses_equal_eager():
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
