"""jagged_attention on the CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from gemopt.kernels.cpu import native, native_build
from gemopt.kernels.spec import ACTIVATIONS
from gemopt.ops import gdpa, jagged_attention, reference
from tests.ops.attention_cases import CASES, Case, assert_close, check, draw, offsets_of, run


@pytest.fixture(params=["native", "operators"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel in C++ and without."""
    if request.param == "operators":
        monkeypatch.setattr(native, "serves", lambda *_: False)
    elif native_build.load() is None:
        pytest.skip("needs a C++ compiler")
    return request.param


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_reference(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("name", CASES)
def test_matches_reference_without_a_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves", lambda *_: False)
    check(CASES[name], torch.float32)


def test_the_kernel_serves_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 and half types use the kernel if there is a compiler, fp64 and long sequences do not."""
    if native_build.load() is None:
        pytest.skip("needs a C++ compiler")
    calls: list[torch.dtype] = []
    forward = native.forward
    monkeypatch.setattr(native, "forward", lambda q, *rest: (calls.append(q.dtype), forward(q, *rest))[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q = torch.zeros(6, 1, 8, dtype=dtype)
        jagged_attention(q, q, q, offsets_of((6,)), offsets_of((6,)), 6, 6)
    long = torch.zeros(4000, 1, 8)
    jagged_attention(long, long, long, offsets_of((4000,)), offsets_of((4000,)), 4000, 4000)
    assert calls == [torch.float32, torch.bfloat16, torch.float16]


LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.sampled_from([127, 128, 129, 160])), max_size=6)


@given(q_lens=LENGTHS, data=st.data())
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_any_lengths(op: str, dtype: torch.dtype, q_lens: list[int], data: st.DataObject) -> None:
    self_attention = data.draw(st.booleans())
    k_lens = (
        None
        if self_attention
        else tuple(data.draw(st.lists(st.integers(0, 40), min_size=len(q_lens), max_size=len(q_lens))))
    )
    kv_heads = data.draw(st.integers(1, 2))
    positions = data.draw(st.sampled_from(["", "", "q", "k", "both"]))
    kwargs = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.sampled_from([(-1, -1), (-1, -1), (0, -1), (3, 2), (10, 0)])),
        "dropout_p": data.draw(st.sampled_from([0.0, 0.0, 0.2])),
    }
    if not positions:
        kwargs["causal_align"] = data.draw(st.sampled_from(["top_left", "bottom_right"]))
    if op == "gdpa":
        kwargs |= {
            "activation": data.draw(st.sampled_from(ACTIVATIONS)),
            "scale": data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        }
    tables = st.sampled_from(["", "", "BHQK", "HQK", "BK", "K", "HQx"])
    case = Case(
        tuple(q_lens),
        k_lens,
        op=op,
        bias=data.draw(tables),
        mask=data.draw(tables),
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        d=data.draw(st.sampled_from([1, 8, 12])),
        dv=data.draw(st.sampled_from([None, 4])),
        spare=data.draw(st.integers(0, 2)),
        positions=positions,
        kwargs=kwargs,
    )
    check(case, dtype, seed=data.draw(st.integers(0, 3)))


def test_bias_with_minus_infinity_hides(path: str) -> None:
    inputs = draw(Case((5, 9, 3), bias="HQK", mask="HQK"), torch.float32)
    masked = run(jagged_attention, inputs, torch.float32)
    inputs.kwargs["bias"] = inputs.kwargs["bias"].masked_fill(~inputs.kwargs.pop("mask"), -math.inf)
    biased = run(jagged_attention, inputs, torch.float32)
    for name, want in masked.items():
        torch.testing.assert_close(biased[name], want, rtol=0, atol=1e-6, msg=name)


def test_one_key_gives_no_gradient(path: str) -> None:
    """Weights that cannot move: gradients of q and k are exactly 0, as in eager."""
    for case in (Case((1, 7, 3), (1, 1, 1)), Case((1, 5, 1), kwargs={"window": (0, 0)}), Case((3, 1), (9, 1))):
        got = run(jagged_attention, draw(case, torch.float32), torch.float32)
        rows = slice(3, None) if case.q_lens == (3, 1) else slice(None)
        assert (got["dq"][rows] == 0).all()


def test_bias_gradient_is_the_same_for_any_number_of_threads(path: str) -> None:
    inputs = draw(Case((5, 30, 0, 17, 9, 1, 22), bias="HQK", kwargs={"causal": True}), torch.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(jagged_attention, inputs, torch.float32)["dbias"])
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_reference_equals_sdpa() -> None:
    """The oracle itself, against PyTorch on sequences of one length."""
    q, k, v = (torch.randn(12, 2, 8, dtype=torch.float64) for _ in range(3))
    out = reference.jagged_attention(q, k, v, offsets_of((6, 6)), offsets_of((6, 6)), causal=True)
    dense = [x.view(2, 6, 2, 8).transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True)
    torch.testing.assert_close(out.view(2, 6, 2, 8).transpose(1, 2), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"window": (2, 2)}, {"dropout_p": 0.2}], ids=str)
def test_neighbours_do_not_leak(value: float, kwargs: dict, path: str) -> None:
    inputs = draw(Case((5, 9, 7, 1, 12), spare=2, kwargs=kwargs), torch.float32)
    clean = run(jagged_attention, inputs, torch.float32)
    poisoned = [slice(5, 14), slice(21, 22), slice(34, 36)]  # sequences 1 and 3, and the spare rows
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        for rows in poisoned:
            x[rows] = value
    dirty = run(jagged_attention, inputs, torch.float32)
    keep = torch.ones(36, dtype=torch.bool)
    for rows in poisoned:
        keep[rows] = False
    for name, want in clean.items():
        torch.testing.assert_close(dirty[name][keep], want[keep], rtol=0, atol=0, msg=name)
        assert (dirty[name][34:] == 0).all(), f"{name}: spare rows"


def test_single_query_neighbours_do_not_leak(path: str) -> None:
    inputs = draw(Case((1, 1, 1), (5, 9, 7), kwargs={"causal": True}, positions="q"), torch.float32)
    clean = run(jagged_attention, inputs, torch.float32)
    for x, rows in ((inputs.q, slice(1, 2)), (inputs.dout, slice(1, 2)), (inputs.k, slice(5, 14)), (inputs.v, slice(5, 14))):
        x[rows] = float("nan")
    dirty = run(jagged_attention, inputs, torch.float32)
    for name, want in clean.items():
        keep = torch.ones(len(want), dtype=torch.bool)
        keep[slice(1, 2) if name in ("out", "dq") else slice(5, 14)] = False
        torch.testing.assert_close(dirty[name][keep], want[keep], rtol=0, atol=0, msg=name)


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    inputs = draw(Case((9, 30, 2), kwargs={"causal": True}), torch.float64)
    together = run(jagged_attention, inputs, torch.float64)
    start = 0
    for n in (9, 30, 2):
        rows = slice(start, start + n)
        alone = draw(Case((n,), kwargs={"causal": True}), torch.float64)
        alone.q, alone.k, alone.v, alone.dout = (x[rows] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        got = run(jagged_attention, alone, torch.float64)
        assert_close(got, got, {name: x[rows] for name, x in together.items()}, torch.float64)
        start += n


def test_strided_inputs() -> None:
    """q, k and v as slices of one projection, values transposed, gradient expanded."""
    inputs = draw(Case((5, 9, 9, 130), heads=2, d=8), torch.float64)
    fused = torch.stack([inputs.q, inputs.k, inputs.v], 1).flatten(1).requires_grad_()
    q, k, v = (x.unflatten(1, (2, 8)) for x in fused.chunk(3, 1))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert not q.is_contiguous() and not v.is_contiguous()
    out = jagged_attention(q, k, v, **inputs.kwargs)
    (grad,) = torch.autograd.grad(out.sum(), fused)
    inputs.dout = torch.ones_like(inputs.dout)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    torch.testing.assert_close(out, exact["out"])
    torch.testing.assert_close(grad, torch.stack([exact[n] for n in ("dq", "dk", "dv")], 1).flatten(1))
    assert out.is_contiguous()


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)], ids=str
)
def test_requires_grad_subsets(needed: tuple[bool, ...]) -> None:
    inputs = draw(Case((5, 9)), torch.float64)
    leaves = [x.clone().requires_grad_(n) for x, n in zip((inputs.q, inputs.k, inputs.v), needed, strict=True)]
    jagged_attention(*leaves, **inputs.kwargs).backward(inputs.dout)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    for leaf, n, name in zip(leaves, needed, ("dq", "dk", "dv"), strict=True):
        assert (leaf.grad is not None) == n
        if n:
            torch.testing.assert_close(leaf.grad, exact[name])


def test_longer_than_max_is_still_right() -> None:
    inputs = draw(Case((5, 40)), torch.float64)
    exact = run(reference.jagged_attention, inputs, torch.float64)
    inputs.kwargs.update(max_q=3, max_k=3)
    assert_close(run(jagged_attention, inputs, torch.float64), exact, exact, torch.float64)


@pytest.mark.parametrize("name", ["causal", "dropout", "single query, dropout"])
def test_modes(name: str) -> None:
    """Inference mode and deterministic algorithms change nothing."""
    inputs = draw(CASES[name], torch.float32)
    plain = run(jagged_attention, inputs, torch.float32)
    with torch.inference_mode():
        out = jagged_attention(inputs.q.float(), inputs.k.float(), inputs.v.float(), **inputs.kwargs)
    assert torch.equal(out.double(), plain["out"])
    torch.use_deterministic_algorithms(True)
    try:
        again = run(jagged_attention, inputs, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(again[n], plain[n]) for n in plain)


def test_double_backward_says_no() -> None:
    inputs = draw(Case((5, 9)), torch.float64)
    q = inputs.q.requires_grad_()
    (grad,) = torch.autograd.grad(
        jagged_attention(q, inputs.k, inputs.v, **inputs.kwargs).square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()


# Dropout


def test_dropout_gradient_by_finite_differences() -> None:
    inputs = draw(Case((3, 1, 4), d=4, kwargs={"dropout_p": 0.4}), torch.float64)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    assert torch.autograd.gradcheck(lambda *x: jagged_attention(*x, **inputs.kwargs), (q, k, v), fast_mode=False)


def _weights(p: float, seed: int, length: int = 64, sequences: int = 4, heads: int = 2) -> torch.Tensor:
    """Attention weights `[sequences, length, heads, length]`: values are the identity, scores are all equal."""
    rows = sequences * length
    q = torch.zeros(rows, heads, 4)
    v = torch.eye(length).repeat(sequences, 1)[:, None].expand(rows, heads, length)
    offsets = offsets_of((length,) * sequences)
    out = jagged_attention(q, q, v, offsets, offsets, length, length, dropout_p=p, seed=torch.tensor(seed))
    return out.view(sequences, length, heads, length) * length


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    kept = _weights(p, 5) != 0
    n = kept.numel()
    spread = math.sqrt(p * (1 - p) / n)
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * spread
    # Rows, columns, heads and sequences each drop at the rate, and neighbours along each axis are independent.
    for axis in range(4):
        rest = [a for a in range(4) if a != axis]
        rates = kept.double().mean(rest)
        assert ((rates - (1 - p)).abs() < 5 * spread * math.sqrt(len(rates))).all(), f"axis {axis}"
        both = (kept.narrow(axis, 1, kept.shape[axis] - 1) & kept.narrow(axis, 0, kept.shape[axis] - 1)).double().mean()
        assert abs(both.item() - (1 - p) ** 2) < 8 * spread, f"neighbours on axis {axis}"
    torch.testing.assert_close(_weights(p, 5)[kept], torch.full((int(kept.sum()),), 1 / (1 - p)))


def test_dropout_is_a_function_of_the_seed() -> None:
    assert torch.equal(_weights(0.5, 1), _weights(0.5, 1))
    agree = (_weights(0.5, 1) != 0) == (_weights(0.5, 2) != 0)
    assert abs(agree.double().mean().item() - 0.5) < 0.02


def test_dropout_mean_is_no_dropout() -> None:
    inputs = draw(Case((6, 3), kwargs={"dropout_p": 0.3}), torch.float32)
    total = torch.zeros_like(inputs.q)
    for seed in range(100):
        inputs.kwargs["seed"] = torch.tensor([seed])
        total += run(jagged_attention, inputs, torch.float32)["out"]
    inputs.kwargs.update(dropout_p=0.0, seed=None)
    plain = run(jagged_attention, inputs, torch.float32)["out"]
    assert ((total / 100 - plain).abs() < 6 * 0.65 / math.sqrt(100) * plain.abs().max()).all()


# Errors


def _call(**changes: object) -> torch.Tensor:
    offsets = offsets_of((2, 3))
    arguments: dict = {
        "q": torch.zeros(5, 4, 8),
        "k": torch.zeros(5, 2, 8),
        "v": torch.zeros(5, 2, 8),
        "q_offsets": offsets,
        "k_offsets": offsets,
        "max_q": 3,
        "max_k": 3,
    }
    return jagged_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(5, 8)}, "q must be"),
        ({"q": torch.zeros(5, 4, 8).int()}, "q must be floating"),
        ({"k": torch.zeros(5, 2, 8).double()}, "k is torch.float64 but q is torch.float32"),
        ({"q": torch.zeros(5, 3, 8)}, "multiple of the heads of k, got 3 and 2"),
        ({"q": torch.zeros(5, 4, 16)}, "q has head_dim 16 but k has 8"),
        ({"v": torch.zeros(6, 2, 8)}, "k has 5 rows but v has 6"),
        ({"v": torch.zeros(5, 4, 8)}, "k has 2 heads but v has 4"),
        ({"q_offsets": torch.tensor([0.0, 2.0, 5.0])}, "q_offsets must be int32 or int64"),
        ({"q_offsets": torch.tensor([[0, 5]])}, "q_offsets must be 1-D"),
        ({"q_offsets": torch.tensor([0, 5])}, "q_offsets has 2 elements but k_offsets has 3"),
        ({"q_offsets": torch.tensor([0, 4, 3])}, "q_offsets must start at 0"),
        ({"k_offsets": torch.tensor([0, 4, 6])}, "no more than the 5 rows of k"),
        ({"k_offsets": torch.tensor([1, 4, 5])}, "k_offsets must start at 0"),
        (
            {"q_offsets": torch.tensor([], dtype=torch.int64), "k_offsets": torch.tensor([], dtype=torch.int64)},
            "q_offsets must have at least one element",
        ),
        ({"q_positions": torch.zeros(4, dtype=torch.int64)}, "q_positions has 4 rows but q has 5"),
        ({"k_positions": torch.zeros(5)}, "k_positions must be int32 or int64"),
        ({"causal_align": "middle"}, "causal_align must be"),
        ({"causal_align": "bottom_right", "q_positions": torch.zeros(5, dtype=torch.int64)}, "when positions are given"),
        ({"window": (-2, 0)}, "window must be two ints"),
        ({"dropout_p": 1.5}, "dropout_p must be in"),
        ({"dropout_p": 0.5}, "seed must be given"),
        ({"dropout_p": 0.5, "seed": torch.tensor(1.0)}, "seed must be one int64 element"),
        ({"q": torch.zeros(5, 4, 8, device="meta")}, "is on cpu but q is on meta"),
        ({"bias": torch.zeros(1, 4, 3)}, r"bias must be \[B or 1"),
        ({"bias": torch.zeros(1, 1, 3, 3).long()}, "bias must be floating"),
        ({"bias": torch.zeros(3, 1, 3, 3)}, r"bias must have 1 or 2 in dim 0 \(sequences\), got 3"),
        ({"mask": torch.zeros(2, 2, 3, 3, dtype=torch.bool)}, r"mask must have 1 or 4 in dim 1 \(heads\), got 2"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "mask must be bool"),
        ({"bias": torch.zeros(1, 1, 2, 3)}, "bias must hold every query position, got size 2 in dim 2"),
        ({"mask": torch.ones(1, 1, 3, 2, dtype=torch.bool)}, "mask must hold every key position, got size 2 in dim 3"),
        (
            {"bias": torch.zeros(1, 1, 3, 3), "q_positions": torch.arange(5)},
            "q_positions needs positions 0 to 4",
        ),
        ({"bias": [[0.0]]}, "bias must be a Tensor"),
        ({"q_offsets": None, "k_offsets": torch.zeros(0, dtype=torch.int64)}, "k_offsets must have at least one element"),
        ({"q_offsets": None, "q_positions": torch.zeros(10, dtype=torch.int64)}, "q_positions has 10 rows but q has 5"),
    ],
)
def test_bad_arguments(changes: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _call(**changes)


def test_good_arguments() -> None:
    assert _call().shape == (5, 4, 8)
    assert _call(q_offsets=None, max_q=0).shape == (10, 4, 8), "max_q is not looked at"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_shared_queries_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """4,000 equal gradients: a sum in a half type stops growing long before."""
    batch = 4000
    q, kv, offsets = torch.ones(1, 1, 4), torch.zeros(batch, 1, 4), torch.arange(batch + 1)
    q, kv = q.to(dtype).requires_grad_(), kv.to(dtype)
    kv[:] = torch.tensor([1.0, 0.5, 0.0, -1.0])
    out = gdpa(q, kv, kv, None, offsets, 1, 1, activation="identity")
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.flatten().tolist() == [2000.0, 1000.0, 0.0, -2000.0]  # sum of v, times k


def test_shared_queries_in_one_graph_for_all_sizes() -> None:
    def step(q: torch.Tensor, kv: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return jagged_attention(q, kv, kv, None, offsets, q.shape[0], kv.shape[0]).square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(specialize_float=True):
        compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
        for rows, lens in ((3, (4, 0, 2)), (5, (1, 7))):
            q, kv = torch.randn(rows, 2, 8, requires_grad=True), torch.randn(sum(lens), 2, 8, requires_grad=True)
            grads = [torch.autograd.grad(f(q, kv, offsets_of(lens)), (q, kv)) for f in (step, compiled)]
            torch.testing.assert_close(*grads)
    assert counter.frame_count == 1
