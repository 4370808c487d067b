"""The Triton kernels of jagged attention, on CUDA or, without one, under Triton's interpreter.

The interpreter must be switched on before Triton defines a kernel, so `test_interpreter.py` runs this file in a process
of its own. It multiplies bf16 wrongly, hence fp32 and fp16 there.
"""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from gemopt.kernels.cpu import attention as cpu_kernels
from gemopt.kernels.spec import ACTIVATIONS, AttentionSpec
from gemopt.ops import dropout as host
from gemopt.ops import gdpa, jagged_attention, reference
from tests.ops.attention_cases import CASES, Case, assert_close, check, draw, run

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl

from gemopt.kernels.triton import jagged_attention as launch
from gemopt.kernels.triton.dropout import keep_mask, row_keys
from tests.hostile.common import SWEEPING

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GEMOPT_FORCE_TRITON") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


# The interpreter takes seconds for a few tiles, of 32 queries and 64 keys there: cases that fill many are cut, and what is
# compiled code's alone (races, one kernel for each dtype) is left to a GPU.
_LONGEST = 70


def case_of(name: str) -> Case:
    case = CASES[name]
    if not INTERPRETED:
        return case
    cut = lambda lens: tuple(min(n, _LONGEST) for n in lens)  # noqa: E731
    return replace(case, q_lens=cut(case.q_lens), k_lens=None if case.k_lens is None else cut(case.k_lens))


HALF_CASES = [
    "causal",
    "zeros and ones",
    "positions both",
    "window",
    "narrow values",
    "dropout causal GQA",
    "bias shared, causal",
    "mask and bias, single query",
    "gdpa, per head",
    "gdpa, positions, bias, mask",
    "block, causal",
]


# What the interpreter leaves to a sweep: forms of these that run by themselves there, and on a GPU.
ENOUGH_ONCE = ["shared, one sequence", "shared, positions", "shared, bias of sequences, positions", "shared, no keys"]
HALF_ACTIVATIONS = ("relu2", "gelu")  # all at once below; they are computed in fp32, whatever the dtype of the operands


@pytest.mark.parametrize(
    "name", [c for c in CASES if c not in (*HALF_CASES, *ENOUGH_ONCE)] if INTERPRETED and not SWEEPING else CASES
)
def test_matches_reference(name: str) -> None:
    check(case_of(name), torch.float32, DEVICE)


@pytest.mark.parametrize("name", HALF_CASES if INTERPRETED else CASES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_matches_reference_in_half(name: str, dtype: torch.dtype) -> None:
    check(case_of(name), dtype, DEVICE)


@pytest.mark.parametrize("d", [16, 136] if INTERPRETED else range(16, 257, 8))
def test_head_dims(d: int) -> None:
    """Every multiple of 8, values of another size, shared key heads."""
    dv = 264 - d if d < 256 else 16
    check(Case((37, 0, 5), d=d, dv=dv, heads=2, kv_heads=1, kwargs={"causal": True}), DTYPES[-1], DEVICE)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(d, n) for d in DTYPES for n in (HALF_ACTIVATIONS if INTERPRETED else ACTIVATIONS)],
    ids=str,
)
def test_activations(dtype: torch.dtype, name: str) -> None:
    kwargs = {"activation": name, "scale": 0.7, "post_scale": 0.3}
    check(Case((35, 0, 1), (9, 3, 0), heads=4, kv_heads=2, d=24, dv=16, op="gdpa", kwargs=kwargs), dtype, DEVICE)


def test_all_activations_at_once() -> None:
    """One per head, under shared key heads, with dropout, bias and mask."""
    kwargs = {"activation": [*ACTIVATIONS, "relu"], "scale": 0.5, "dropout_p": 0.2, "window": (9, 5)}
    lens = (18 if INTERPRETED else 35, 4)
    check(Case(lens, heads=10, kv_heads=2, op="gdpa", bias="HQK", mask="BQK", kwargs=kwargs), torch.float32, DEVICE)


def test_bias_gradient_at_positions_is_refused_where_determinism_is_asked_for() -> None:
    """Its sums are atomic; where positions are row numbers there is a deterministic kernel."""
    torch.use_deterministic_algorithms(True)
    try:
        check(Case((5, 9), bias="HQK"), torch.float32, DEVICE)
        with pytest.raises(RuntimeError, match="at given positions is summed by atomics"):
            check(Case((5, 9), bias="HQK", positions="both"), torch.float32, DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bias", ["HQK"] if INTERPRETED else ["HQK", "BHQK", "K"])
def test_bias_gradients_are_equal_bit_by_bit(bias: str) -> None:
    lens = (5, 40) if INTERPRETED else (70, 5, 40)
    inputs = draw(Case(lens, kv_heads=1, bias=bias), DTYPES[-1])
    first, second = (run(jagged_attention, inputs, DTYPES[-1], DEVICE) for _ in range(2))
    assert torch.equal(first["dbias"], second["dbias"])


def test_a_bias_too_far_apart_is_refused() -> None:
    """Offsets inside one sequence and head are 32 bits wide: larger ones are an error, never wrapped."""
    bias = torch.empty(1, 1, 3, 2, device="meta").as_strided((1, 1, 3, 2), (0, 0, 2**30, 1))
    with pytest.raises(ValueError, match=r"within 2\^31 of each other"):
        launch._table_args(bias, bias)


def test_same_numbers_as_the_cpu_kernel() -> None:
    """Dropout included: both devices drop the same weights."""
    inputs = draw(Case((5, 40, 0, 17), heads=2, kv_heads=1, kwargs={"causal": True, "dropout_p": 0.3}), torch.float32)
    triton_run = run(jagged_attention, inputs, torch.float32, DEVICE)
    kw = inputs.kwargs
    spec = AttentionSpec(kw["q_offsets"], kw["k_offsets"], 40, 40, 0.25, True, False, (-1, -1), None, None, 0.3, kw["seed"])
    q, k, v, dout = (x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = cpu_kernels.forward(q, k, v, spec)
    grads = cpu_kernels.backward(dout, q, k, v, out, lse, spec)[:3]
    for name, want in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(triton_run[name].float(), want, rtol=1e-4, atol=1e-5, msg=name)


@triton.jit
def dropout_bits(seed_ptr, out_ptr, head, threshold, ROWS: tl.constexpr, KEYS: tl.constexpr):
    a, b = row_keys(seed_ptr, tl.full((), 0, tl.int32) + head, tl.arange(0, ROWS) + 70000)
    keep = keep_mask(a[:, None], b[:, None], tl.arange(0, KEYS)[None, :], threshold.to(tl.uint32))
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :], keep.to(tl.int32))


def test_dropout_bits() -> None:
    for seed in (0, 1, -5, 2**62 + 12345, -(2**63)):
        for p in (0.1, 0.5, 0.9):
            seed_tensor, limit = torch.tensor([seed], device=DEVICE), host.threshold(p)
            out = torch.empty(16, 64, dtype=torch.int32, device=DEVICE)
            dropout_bits[(1,)](seed_tensor, out, 3, limit - 2**32 if limit >= 2**31 else limit, 16, 64)
            a, b = host.row_keys(seed_tensor.cpu(), 4, torch.arange(70000, 70016))
            want = host.keep_mask(a[3, :, None], b[3, :, None], torch.arange(64, dtype=torch.int32), p)
            assert torch.equal(out.cpu().bool(), want)


@pytest.mark.parametrize(
    ("value", "kwargs"),
    [
        (float("nan"), {}),
        (float("inf"), {"causal": True, "window": (4, -1)}),
        (float("nan"), {"dropout_p": 0.2}),
        (float("nan"), {"activation": "sigmoid", "causal": True}),
    ],
    ids=str,
)
def test_neighbours_do_not_leak(value: float, kwargs: dict) -> None:
    op = gdpa if "activation" in kwargs else jagged_attention
    inputs = draw(Case((5, 9, 37, 1, 12), spare=2, kwargs=kwargs), torch.float32)
    clean = run(op, inputs, torch.float32, DEVICE)
    poisoned = [slice(5, 14), slice(51, 52), slice(64, 66)]  # sequences 1 and 3, and the spare rows
    keep = torch.ones(66, dtype=torch.bool)
    for rows in poisoned:
        keep[rows] = False
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
            x[rows] = value
    dirty = run(op, inputs, torch.float32, DEVICE)
    for name, want in clean.items():
        torch.testing.assert_close(dirty[name][keep], want[keep], rtol=0, atol=0, msg=name)
        assert (dirty[name][64:] == 0).all(), f"{name}: spare rows"


def test_longer_than_max_is_still_right() -> None:
    inputs = draw(Case((5, 100), kwargs={"causal": True}), torch.float32)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    eager = run(reference.jagged_attention, inputs, torch.float32)
    inputs.kwargs.update(max_q=3, max_k=3)
    assert_close(run(jagged_attention, inputs, torch.float32, DEVICE), eager, exact, torch.float32)


def test_runs_are_equal_bit_by_bit() -> None:
    lens = (40 if INTERPRETED else 70, 5)
    inputs = draw(Case(lens, kv_heads=1, kwargs={"causal": True, "dropout_p": 0.1}), DTYPES[-1])
    first, second = (run(jagged_attention, inputs, DTYPES[-1], DEVICE) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_strided_inputs() -> None:
    inputs = draw(Case((5, 40), d=16), torch.float32)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    fused = torch.stack([inputs.q, inputs.k, inputs.v], 1).flatten(1).float().to(DEVICE).requires_grad_()
    q, k, v = (x.unflatten(1, (2, 16)) for x in fused.chunk(3, 1))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    kwargs = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in inputs.kwargs.items()}
    out = jagged_attention(q, k, v, **kwargs)
    (grad,) = torch.autograd.grad(out, fused, inputs.dout.float().to(DEVICE))
    want = torch.stack([exact[n] for n in ("dq", "dk", "dv")], 1).flatten(1)
    torch.testing.assert_close(out.cpu().double(), exact["out"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad.cpu().double(), want, rtol=1e-4, atol=1e-5)


def test_head_dim_too_large() -> None:
    q = torch.zeros(3, 1, 264, device=DEVICE)
    offsets = torch.tensor([0, 3], device=DEVICE)
    with pytest.raises(ValueError, match="at most 256"):
        jagged_attention(q, q, q, offsets, offsets, 3, 3)


@pytest.mark.gpu
@pytest.mark.slow
def test_element_offsets_past_2_to_31() -> None:
    """The last sequence of tensors with more than 2^31 elements, and its gradients."""
    heads, d, length, batch = 32, 128, 300, 1800
    rows = length * batch
    assert rows * heads * d > 2**31
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(rows, heads, d, dtype=torch.bfloat16, device="cuda", generator=gen) for _ in range(4))
    offsets = torch.arange(batch + 1, device="cuda") * length
    for x in (q, k, v):
        x.requires_grad_()
    out = jagged_attention(q, k, v, offsets, offsets, length, length, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    last = [x[-length:].detach().cpu().double() for x in (q, k, v)]
    for x in last:
        x.requires_grad_()
    one = torch.tensor([0, length])
    want = reference.jagged_attention(*last, one, one, causal=True)
    want_grads = torch.autograd.grad(want, last, dout[-length:].cpu().double())
    for got, exact in zip((out, *grads), (want, *want_grads), strict=True):
        error = (got[-length:].detach().cpu().double() - exact).norm() / exact.norm()
        assert error < 1e-2


@pytest.mark.gpu
def test_batch_past_65535() -> None:
    lens = torch.randint(0, 3, (70_000,))
    offsets = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    q = torch.randn(int(offsets[-1]), 1, 16)
    want = jagged_attention(q, q, q, offsets, offsets, 2, 2)
    got = jagged_attention(q.cuda(), q.cuda(), q.cuda(), offsets.cuda(), offsets.cuda(), 2, 2)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
