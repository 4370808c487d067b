"""What is not a number in a result: strides, aliases, dtypes, gradients that are zeros and not None, assertions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemopt.testing import assert_equivalent

from .common import compiled, gradients, sweep
from .programs import Program, equal, inputs, pooled, valid

RESULTS = {
    "convolution": lambda m, h, v: m.conv(h.mT),
    "view of a convolution": lambda m, h, v: m.conv(h.mT).mT,
    "relu of a convolution": lambda m, h, v: m.conv(h.mT).relu(),
    "parts joined as they were": lambda m, h, v: torch.cat(h.chunk(2, -1), -1),
    "parts of images joined": lambda m, h, v: torch.cat(
        h.view(*h.shape[:2], 2, 4).to(memory_format=torch.channels_last).chunk(2, -2), 0
    ),
    "parts joined elsewhere": lambda m, h, v: torch.cat(h.chunk(2, -1), 0),
    "expanded over tokens": lambda m, h, v: pooled(h, v)[:, None].expand(-1, v.shape[1], -1),
    "expanded at the end": lambda m, h, v: pooled(h, v)[..., None].expand(-1, -1, 3),
    "expanded in front": lambda m, h, v: pooled(h, v).expand(2, -1, -1),
    "expanded and cut": lambda m, h, v: pooled(h, v)[:, None, 1:3].expand(-1, 4, -1),
}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=sweep)])
def test_strides_of_results(result, inner):
    def program(m: Program, ids: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        v = valid(ids, n)
        return RESULTS[result](m, m.encoded(ids), v), pooled(m.q(m.encoded(ids)).relu(), v)

    equal(program, inner)


@pytest.mark.parametrize("dim", [0, -1])
def test_joined_parts_are_no_alias(dim):
    def program(m: Program, ids: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat(m.token.view(2, 4).chunk(2, dim), dim), pooled(m.encoded(ids), valid(ids, n))

    model = Program(program)
    before = model.token.detach().clone()
    subject = compiled(model)
    joined, _ = subject(*inputs(torch.tensor([1, 0, 3]), 5, torch.Generator().manual_seed(0)))
    assert subject.report.steps_packed == 1
    joined.detach().fill_(7.0)
    assert torch.equal(model.token, before)


@pytest.mark.parametrize("parameter", ["number", "one element"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_tensor_of_one_element_has_a_say_in_the_dtype(parameter, autocast):
    """fp16 ``[B, L]`` times fp32 ``[1]`` is fp32; times a 0-d tensor it is fp16."""

    class Model(Program):
        def forward(self, ids: Tensor, n: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                by = self.scale if parameter == "one element" else self.scale[0]
                scores = self.score(self.encoded(ids)).squeeze(-1) * by
                return torch.where(valid(ids, n), scores, 0.0).sum(1)

    model = Model(lambda: None, torch.float32 if autocast else torch.float16)
    model.scale = nn.Parameter(torch.full((1,), 3.3))
    subject = compiled(model)
    assert_equivalent(model, inputs, max_len=7, cases=("skewed", "full"), compiled=subject)
    assert subject.report.steps_packed


LOSING: dict[str, Any] = {
    "a bias that the softmax cancels": lambda m, h, v: (
        ((m.q(h) @ m.k(h).mT) + m.score(h)).masked_fill(~v[:, None], -torch.inf).softmax(-1).nan_to_num() @ m.v(h)
    ),
    "a fill of padding": lambda m, h, v: m.q(h).masked_fill(~v[..., None], m.number),
    "a token for padding": lambda m, h, v: torch.where(v[..., None], m.q(h), m.token),
    "overwritten": lambda m, h, v: m.q(h).copy_(m.k(h)),
    "overwritten by a row": lambda m, h, v: m.q(h).copy_(m.token),
    "zeroed": lambda m, h, v: m.q(h).zero_() + m.k(h),
    "filled": lambda m, h, v: m.q(h).fill_(m.number) + m.k(h),
}


@pytest.mark.parametrize("losing", LOSING)
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=sweep)])
def test_gradients_of_zeros_are_no_none(losing, inner):
    equal(lambda m, ids, n: pooled(LOSING[losing](m, m.encoded(ids), valid(ids, n)), valid(ids, n)), inner)


def test_gradients_that_eager_does_not_give_stay_none():
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        h = m.encoded(ids) + m.k(m.items(ids)).detach() + (m.token > 0) * 1.0
        with torch.no_grad():
            h2 = m.v(m.items(ids))
        return pooled(m.q(h + h2), valid(ids, n))

    model = Program(program)
    equal(program)
    compiled(model)(*inputs(torch.tensor([1, 0, 3]), 5, torch.Generator().manual_seed(0))).sum().backward()
    assert [n for n, g in gradients(model).items() if g is None and n.split(".")[0] in ("k", "v", "token")] == [
        "token", "k.weight", "k.bias", "v.weight", "v.bias",
    ]  # fmt: skip


def test_an_assertion_about_data_stays():
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        torch._assert_async((n > 0).all(), "an empty history")
        return pooled(m.q(m.encoded(ids)), valid(ids, n))

    subject = compiled(Program(program))
    ids, n = inputs(torch.tensor([1, 2, 1]), 7, torch.Generator().manual_seed(0))
    subject(ids, n)
    assert subject.report.steps_packed == 1
    with pytest.raises(RuntimeError, match="an empty history"):
        subject(ids, torch.tensor([1, 0, 1]))


def test_a_function_differentiated_inside():
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        v = valid(ids, n)
        inner = torch.func.grad(lambda x: ((x**3) * v[..., None]).sum())(m.encoded(ids))
        return pooled(m.q(inner), v)

    subject = equal(program, packed=False)
    assert any("torch.func" in r.reason for r in subject.report.rejections)


def test_sizes_of_data_beside_a_check_of_the_outputs():
    """`x[mask]` that stays as it is: its size is made anew each time the packed graph runs on fakes."""

    def program(m: Program, ids: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        h = m.encoded(ids)
        return pooled(m.q(h), valid(ids, n)), m.k(h)[ids.float().sin() > 0].sum()

    equal(program, "aot_eager")


def test_backward_hooks_of_a_submodule():
    model = Program(lambda m, ids, n: pooled(m.q(m.encoded(ids)), valid(ids, n)))
    model.q.register_full_backward_hook(lambda module, before, after: tuple(None if x is None else x * 2 for x in before))
    subject = compiled(model, "aot_eager")
    assert_equivalent(model, inputs, max_len=7, cases=("skewed",), compiled=subject)
    assert subject.report.steps_packed


def test_a_first_padded_step_is_no_recompilation():
    model = Program(lambda m, ids, n: pooled(m.q(m.encoded(ids)), valid(ids, n)))
    subject = compiled(model)
    ids, n = inputs(torch.tensor([1, 2, 1]), 7, torch.Generator().manual_seed(0))
    subject(ids, n)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.allclose(subject(ids, torch.tensor([7, 7, 7])), model(ids, torch.tensor([7, 7, 7])))
    longer, n = inputs(torch.tensor([1, 2, 1]), 9, torch.Generator().manual_seed(0))
    subject(longer, n)  # the frame is dynamic from here on
    with torch.compiler.set_stance("fail_on_recompile"):
        full = torch.tensor([9, 9, 9])
        assert torch.allclose(subject(longer, full), model(longer, full))
    assert sum(subject.report.steps_padded.values()) == 2


ASKING = {
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "logsumexp of -inf": lambda x: x.masked_fill(x < x.mean(), -torch.inf).logsumexp(-1),
    "logsumexp of two dims": lambda x: x.unflatten(-1, (2, 4)).logsumexp((-1, -2)),
    "logsigmoid": lambda x: nn.functional.logsigmoid(x * 60),
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
}


@pytest.mark.parametrize(
    "asking", [a if a in ("logsumexp", "logsigmoid", "cumsum") else pytest.param(a, marks=sweep) for a in ASKING]
)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=sweep)])
def test_ops_that_ask_whether_there_are_rows(asking, dtype):
    """The derivatives of these ask for the number of elements, which a packed tensor does not know when it is compiled."""

    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        v, x = valid(ids, n), ASKING[asking](m.q(m.encoded(ids)))
        return torch.where(v.view(*v.shape, *[1] * (x.ndim - 2)), x, 0.0).sum(1)

    equal(program, "aot_eager", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [False, True])
def test_sums_under_autocast_on_cuda_are_fp32(mean):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            h = m.q(m.encoded(ids)).masked_fill(~(torch.arange(ids.shape[1], device=ids.device) < n[:, None])[..., None], 0)
            return h.mean(1) if mean else h.sum(1)

    model = Program(program, torch.float32).cuda()
    subject = compiled(model)
    ids, n = (x.cuda() for x in inputs(torch.tensor([1, 2, 1, 5]), 7, torch.Generator().manual_seed(0)))
    wanted, got = model(ids, n), subject(ids, n)
    assert subject.report.steps_packed == 1
    assert got.dtype == wanted.dtype == (torch.bfloat16 if mean else torch.float32)
    close = 2e-2 if mean else 1e-5
    assert torch.allclose(got, wanted, rtol=close, atol=close)
