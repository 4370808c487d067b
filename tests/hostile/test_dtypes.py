"""Dtypes, strides, autocast, and inputs of which only some require gradients."""

from __future__ import annotations

import pytest
import torch

from ..models import CASES
from ..models.registry import DIM, valid_mask
from ..models.towers import FloatTokens
from .common import batch_of, compiled, path, same, sequence_model, sweep


@pytest.mark.parametrize(
    ("dtype", "attend"),
    [(torch.float16, "matmul"), (torch.bfloat16, "matmul"), (torch.bfloat16, "sdpa_bool"), (torch.float64, "einsum")],
)
def test_dtypes(dtype, attend):
    model = sequence_model(attend=attend, fill="finfo_min", pool="mean").to(dtype)
    result = same(model, batch_of([3, 11, 1, 5, 8]))
    assert path(result) == "packed"


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=sweep)])
def test_ambient_autocast(inner):
    model = sequence_model(fill="inf", pool="last_gather")
    subject = compiled(model, inner)
    result = same(model, batch_of([3, 11, 1, 5, 8]), subject, autocast=torch.bfloat16)
    assert path(result) == "packed"
    same(model, batch_of([4, 2, 7]), subject)  # and without it, from the same compiled model


def test_autocast_entered_and_left_between_steps():
    model = sequence_model(fill="1e9", pool="mean")
    subject = compiled(model)
    batch = batch_of([3, 11, 1, 5])
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        same(model, batch, subject, autocast=dtype)


def tokens(grad: bool = True) -> torch.Tensor:
    return torch.randn(5, 11, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


LENGTHS = torch.tensor([3, 11, 0, 1, 7])


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "channels"])
def test_non_contiguous_inputs(view):
    torch.manual_seed(0)
    model = FloatTokens(fill="1e9")
    x = tokens(False)
    if view == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif view == "sliced":
        x = torch.cat([x, x], dim=2)[:, :, ::2]
    elif view == "expanded":
        x = x[:, :1].expand(-1, 11, -1)
    else:
        x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not x.is_contiguous()
    x = x.detach().requires_grad_(view != "expanded")
    result = same(model, (x, LENGTHS))
    assert path(result) == "packed"


@pytest.mark.parametrize("which", ["input only", "parameters only", "one parameter", "neither"])
def test_requires_grad_on_some_only(which):
    torch.manual_seed(0)
    model = FloatTokens("sdpa_bool", fill="1e9")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(which == "parameters only" or (which == "one parameter" and name == "block.k.weight"))
    result = same(model, (tokens(which == "input only"), LENGTHS))
    names = {c.name for c in result.cases[0].comparisons if c.name.startswith("grad")}
    assert ("grad args[0]" in names) == (which == "input only")
    assert ("grad block.k.weight" in names) == (which in ("parameters only", "one parameter"))


def test_inference_mode_and_no_grad():
    model = sequence_model(fill="1e9").eval()
    ids, n = batch_of([3, 11, 1, 5])
    subject = compiled(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(subject(ids, n), model(ids, n), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["odd_autocast_inside"])
def test_autocast_inside(name):
    model, inputs = CASES[name].make(0)
    n = torch.tensor([3, 11, 1, 7])
    result = same(model, inputs(n, 11, torch.Generator().manual_seed(0)))
    assert path(result) == "packed"


def test_gradient_of_padding_is_zero_not_missing():
    torch.manual_seed(0)
    model = FloatTokens(fill="inf")
    subject = compiled(model)
    x = tokens()
    subject(x, LENGTHS).square().sum().backward()
    dead = ~valid_mask(LENGTHS, 11)
    assert torch.equal(x.grad[dead], torch.zeros_like(x.grad[dead]))
    assert bool((x.grad[~dead] != 0).any())
