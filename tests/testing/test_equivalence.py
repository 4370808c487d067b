"""assert_equivalent accepts a right rewrite and refuses every quietly wrong one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemopt.testing import CASES, EquivalenceError, assert_equivalent

from .wrong import WRONG, Packed, Padded, RaisesOnEmpty, SwallowsErrors, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_right_rewrite_passes_every_case(dtype):
    model = Padded().to(dtype)
    result = assert_equivalent(model, inputs, compiled=Packed(model), cases=CASES)
    assert [case.name for case in result.cases] == list(CASES)
    assert result.ok and result.skipped == 0
    for case in result.cases:
        assert {c.name for c in case.comparisons} >= {"output", "grad items.weight", "grad q.bias"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewrite_is_caught_in_the_case_that_shows_it(name):
    make, case = WRONG[name]
    model = Padded()
    with pytest.raises(EquivalenceError) as caught:
        assert_equivalent(model, inputs, compiled=make(model), cases=(case,), max_len=9)
    assert caught.value.result.cases[0].name == case
    assert not caught.value.result.cases[0].ok


def test_offset_plus_position_passes_without_holes_so_the_case_is_needed():
    model = Padded()
    make, _ = WRONG["offset_plus_position"]
    assert assert_equivalent(model, inputs, compiled=make(model), cases=("given", "ones", "full")).ok


def test_the_message_names_tensor_values_and_rows():
    model = Padded()
    with pytest.raises(EquivalenceError) as caught:
        assert_equivalent(model, inputs, compiled=WRONG["zeroes_one_length_ones"][0](model), cases=("skewed",))
    message = str(caught.value)
    lengths = [int(n) for n in message.split("args[1] = [")[1].split("]")[0].split(",")]
    assert "output: RMS error" in message and "gemopt 0, eager" in message and "fp64" in message
    ones = [i for i, n in enumerate(lengths) if n == 1]
    assert f"{len(ones)} of {len(lengths)} rows differ: " + ", ".join(f"[{i}]" for i in ones) in message


def test_lost_gradients_are_named():
    model = Padded()
    with pytest.raises(EquivalenceError) as caught:
        assert_equivalent(model, inputs, compiled=WRONG["drops_key_gradient"][0](model), cases=("given",))
    names = {c.name for c in caught.value.result.cases[0].failures}
    assert names == {"grad k.weight", "grad k.bias", "grad items.weight"} or names >= {"grad k.weight"}
    assert "eager has a tensor here, gemopt has None" in str(caught.value)


def test_eager_raising_alone_is_a_difference():
    model = RaisesOnEmpty()
    with pytest.raises(EquivalenceError, match=r"eager raises IndexError.*returns a result"):
        assert_equivalent(model, inputs, compiled=SwallowsErrors(model), cases=("given", "zeros"))
    result = assert_equivalent(model, inputs, compiled=model, cases=("given", "zeros"))
    assert "IndexError" in result.cases[1].error


def test_the_compiled_model_raising_alone_is_a_difference():
    model = Padded()

    def broken(ids, lengths):
        raise RuntimeError("no kernel")

    with pytest.raises(EquivalenceError, match="compiled model raises RuntimeError: no kernel; eager does not"):
        assert_equivalent(model, inputs, compiled=broken, cases=("given",))


class MeanByLength(nn.Module):
    """0 / 0 for an empty sequence: NaN in eager, nothing to compare there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, lengths):
        valid = torch.arange(x.size(1)) < lengths[:, None]
        return (self.linear(x) * valid[..., None]).sum(1) / lengths[:, None]


def test_undefined_rows_are_skipped_and_counted():
    model = MeanByLength()

    def make(lengths, max_len, generator):
        return torch.randn(len(lengths), max_len, 4, generator=generator), lengths

    def zero_for_nan(x, lengths):
        return model(x, lengths).nan_to_num(nan=0.0)

    result = assert_equivalent(model, make, compiled=zero_for_nan, cases=("zeros",))
    empty = sum(n == 0 for n in eval(result.cases[0].inputs.split("args[1] = ")[1]))
    output = result.cases[0].comparisons[0]
    assert output.skipped == 4 * empty and output.compared == 4 * (7 - empty)


def test_nothing_compared_is_an_error():
    model = MeanByLength()

    def make(lengths, max_len, generator):
        return torch.randn(len(lengths), max_len, 4, generator=generator) * math.nan, lengths

    def forward_only(x, lengths):
        return model(x, lengths).detach()

    with pytest.raises(EquivalenceError, match="nothing could be compared"):
        assert_equivalent(forward_only, make, compiled=forward_only, cases=("given",))


def test_a_reference_that_judges_nothing_is_an_error():
    def rounds(x):
        return (x * 1e8).sin()  # fp32 has no digits left here

    with pytest.raises(EquivalenceError, match="judges nothing"):
        assert_equivalent(rounds, (torch.rand(99, 2),), compiled=rounds, cases=("given",))


def test_buffers_count():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.lie = False

        def forward(self, x):
            y = self.norm(x)
            return y

    model = Counting()

    def twice(x):
        model(x)
        return model(x)

    x = torch.randn(5, 4)
    assert assert_equivalent(model, (x,), compiled=model, cases=("given",)).ok
    with pytest.raises(EquivalenceError, match=r"buffer norm\.running_mean"):
        assert_equivalent(model, (x,), compiled=twice, cases=("given",))


def test_state_is_left_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert_equivalent(model, (torch.randn(5, 4),), compiled=model, cases=("given",), train=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training and model[2].p == 0.5 and model[1].weight.grad is None
    assert model[1].weight.dtype == torch.float32


def test_functions_and_their_closures_and_losses():
    model, target = Padded(), torch.randn(7, 8)

    def step(ids, lengths):
        return F.mse_loss(model(ids, lengths), target)

    def step_without_norm_gradient(ids, lengths):
        with torch.no_grad():
            scale = model.norm.weight.clone()
        out = torch.func.functional_call(model, {"norm.weight": scale}, (ids, lengths))
        return F.mse_loss(out, target)

    assert assert_equivalent(step, inputs, compiled=step, cases=("given", "ones")).ok
    with pytest.raises(EquivalenceError, match=r"grad norm\.weight"):
        assert_equivalent(step, inputs, compiled=step_without_norm_gradient, cases=("given",))
    result = assert_equivalent(model, inputs, loss=lambda out: out.square().mean(), compiled=Packed(model))
    assert result.ok


def test_gradients_of_float_inputs_and_their_strides():
    linear = nn.Linear(4, 3)
    x = torch.randn(6, 5, 4).transpose(0, 1).requires_grad_()
    result = assert_equivalent(linear, (x,), compiled=linear, cases=("given",))
    assert "grad args[0]" in {c.name for c in result.cases[0].comparisons}
    with pytest.raises(EquivalenceError, match=r"grad args\[0\]"):
        assert_equivalent(linear, (x,), compiled=lambda x: linear(x.detach()), cases=("given",))


def test_fp64_reference_ignores_casts_inside_the_model():
    """A reference that cast to float32 like eager would call eager exact and everything else wrong."""

    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            y = (x @ self.weight).float() * torch.full((4,), 0.1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = y @ self.weight
            return y.to(torch.float32) / 3

    model = Casts()
    result = assert_equivalent(model, (torch.randn(50, 4),), compiled=model, cases=("given",))
    output = result.cases[0].comparisons[0]
    assert output.rms_eager > 1e-4  # the rounding of bfloat16, seen because the reference does not share it
    assert result.cases[0].comparisons[0].ratio <= 0.5


def test_ambient_autocast():
    model = Padded()
    result = assert_equivalent(model, inputs, compiled=Packed(model), autocast=torch.bfloat16)
    assert result.ok and result.cases[0].comparisons[0].rms_eager > 1e-5


def test_random_models_need_to_say_so():
    model = nn.Sequential(nn.Linear(4, 4))

    def noisy(x):
        return F.dropout(model(x), 0.5)

    with pytest.raises(ValueError, match="differs between seeds"):
        assert_equivalent(noisy, (torch.randn(8, 4),), compiled=noisy, cases=("given",))


class Dropping(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(F.relu(self.linear(x))).sum(1)


def test_dropout_in_distribution():
    torch.manual_seed(0)
    model = Dropping(0.4)
    x = torch.randn(4, 5, 6)

    def same(x):
        keep = torch.rand(4, 5, 6) >= 0.4  # other random numbers, the same distribution
        return (F.relu(model.linear(x)) * keep / 0.6).sum(1)

    def without(x):
        return F.relu(model.linear(x)).sum(1)

    def unscaled(x):
        return (F.relu(model.linear(x)) * (torch.rand(4, 5, 6) >= 0.4)).sum(1)

    def another_p(x):  # the right mean, the wrong variance
        return (F.relu(model.linear(x)) * (torch.rand(4, 5, 6) >= 0.8) / 0.2).sum(1)

    def check(compiled):
        return assert_equivalent(model, (x,), compiled=compiled, cases=("given",), dropout="distribution", runs=200)

    assert check(same).ok
    for wrong in (without, unscaled, another_p):
        with pytest.raises(EquivalenceError, match=r"\|z\| ="):
            check(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cases": ("nope",)}, "cases: got 'nope'; allowed: given, zeros"),
        ({"cases": "given"}, "cases: got the string"),
        ({"dropout": "on"}, "dropout: got 'on'; allowed"),
        ({"runs": 3}, "runs: got 3"),
        ({"lengths": ["nope"]}, "lengths: got 'nope'; allowed: argument names"),
        ({"lengths": 3}, "lengths: got 3"),
    ],
)
def test_bad_arguments(arguments, message):
    model = Padded()
    example = inputs(torch.tensor([3, 1]), 4, torch.Generator())
    with pytest.raises((ValueError, TypeError), match=message):
        assert_equivalent(model, example, compiled=model, **arguments)


def test_bad_inputs():
    with pytest.raises(TypeError, match="inputs: got int; allowed: a tuple"):
        assert_equivalent(Padded(), 3, compiled=Padded())
