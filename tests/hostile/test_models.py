"""Every registered model: right over generated lengths, and rewritten or refused as expected.

The quick set is one model for each mechanism; GEMOPT_TEST_SWEEP=1 runs them all, and more mixtures.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gemopt
from gemopt.testing import assert_equivalent

from ..models import CASES, ModelCase
from ..models import parts as spelled
from ..models.registry import ids_and_lengths
from .common import SWEEPING, compiled, gradients, sweep

QUICK = {
    *("masked_mean", "padded_hidden", "valid_not_ge", "fill_additive_1e4", "fill_inplace", "attend_einsum", "sasrec"),
    *("encoder_pre_bld_train", "din", "loss_ignore_index", "side_features", "odd_graph_break", "mask_after_softmax"),
    *("lstm", "float_mask_pooling", "candidate_behind_history", "written_view", "scaled_additive_mask"),
}
LENGTH_CASES = ("given", "zeros", "ones", "full", "skewed", "holes", "all_padding")


def swept_unless_quick(case: ModelCase) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in QUICK else sweep)


@pytest.mark.parametrize("case", [swept_unless_quick(c) for c in CASES.values()])
def test_model(case):
    model, inputs = case.make(0)
    subject = compiled(model)
    result = assert_equivalent(model, inputs, compiled=subject, cases=LENGTH_CASES)
    report = subject.report
    if case.expected == "rewritten":
        assert report.rewrites, [r.reason for r in report.rejections]
        assert any(c.path == "packed" for c in result.cases), [c.path for c in result.cases]
    elif case.expected == "refused":
        assert report.rejections and all(r.reason for r in report.rejections)
    elif case.expected == "nothing":
        assert not report.rewrites


@sweep
@pytest.mark.parametrize("name", ["sasrec", "several_histories"])
def test_through_aot_autograd_and_all_sizes(name):
    model, inputs = CASES[name].make(0)
    cases = ("given", "zeros", "empty_batch", "one_sequence")
    assert_equivalent(model, inputs, compiled=compiled(model, "aot_eager"), cases=cases)


@sweep  # tests/test_backend.py trains through inductor always
@pytest.mark.parametrize("name", ["sasrec", "several_histories"])
def test_through_inductor(name):
    model, inputs = CASES[name].make(0)
    assert_equivalent(model, inputs, compiled=compiled(model, "inductor"), cases=("given", "zeros", "skewed"))


def choices(quick: bool) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {
            "valid": st.sampled_from(sorted(spelled.VALID)),
            "causal": st.sampled_from(sorted(spelled.CAUSAL)),
            "fill": st.sampled_from(sorted(spelled.FILL)),
            "attend": st.sampled_from(sorted(spelled.ATTEND)),
            "pool": st.sampled_from(sorted(spelled.POOL)),
            "position": st.sampled_from(["learned", "parameter", "sinusoidal", "none"]),
            "pre_norm": st.booleans(),
            "layers": st.just(1) if quick else st.integers(1, 2),
        }
    )


def check_choices(chosen, seed):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = spelled.SequenceModel(**chosen)
    assert_equivalent(model, ids_and_lengths, compiled=compiled(model), cases=("given", "zeros", "ones", "holes"), seed=seed)


QUIETLY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@settings(max_examples=30 if SWEEPING else 1, deadline=None, derandomize=True, suppress_health_check=QUIETLY, database=None)
@given(choices(quick=True), st.integers(0, 99))
def test_any_mixture_of_spellings(chosen, seed):
    check_choices(chosen, seed)


@sweep
@settings(max_examples=80, deadline=None, suppress_health_check=QUIETLY, database=None)
@given(choices(quick=False), st.integers(0, 99))
def test_many_mixtures_of_spellings(chosen, seed):
    check_choices(chosen, seed)


def test_padded_hidden_states_are_refused_by_name_and_offered_back():
    """The refusal names the output and what to do; with `padded_outputs="zero"` the rows outside the mask are zero and
    have no gradient, the others are eager's."""
    model, inputs = CASES["padded_hidden"].make(0)
    lengths = torch.tensor([3, 11, 1, 7])
    batch = inputs(lengths, 11, torch.Generator().manual_seed(0))
    refused = gemopt.explain(model, *batch)
    assert not any(r.kernel == "jagged_attention" for r in refused.rewrites)
    reasons = [r for r in refused.rejections if "output" in r.reason]
    assert reasons and any("padded_outputs" in r.hint for r in reasons)

    subject = compiled(model, padded_outputs="zero")
    out, expected = subject(*batch), model(*batch)
    valid = torch.arange(11) < lengths[:, None]
    assert subject.report.steps_packed == 1
    assert torch.equal(out[~valid], torch.zeros_like(out[~valid]))
    torch.testing.assert_close(out[valid], expected[valid])
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    mine = gradients(model)
    model.zero_grad()
    (expected * weights * valid[..., None]).sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_default_compile_of_assert_equivalent():
    model, inputs = CASES["masked_mean"].make(0)
    result = assert_equivalent(model, inputs, cases=("given", "zeros"))
    assert result.report.rewrites and [c.path for c in result.cases] == ["packed", "packed"]
    assert "ran packed" in str(result)
