"""The CPU's C++ kernels: building them, and the widths of vectors this machine does not choose by itself."""

import logging
import platform
from pathlib import Path

import pytest
import torch

from gemopt.kernels.cpu import arguments, native_build, native_pffn
from gemopt.kernels.spec import ACTIVATIONS
from gemopt.ops import gdpa, jagged_attention, pffn
from tests.ops.attention_cases import CASES, Case, check, offsets_of
from tests.ops.test_gdpa import EAGER
from tests.ops.test_pffn import formula

needs_compiler = pytest.mark.skipif(native_build.load() is None, reason="needs a C++ compiler")


def attend() -> torch.Tensor:
    q, offsets = torch.randn(6, 1, 8), offsets_of((2, 4))
    return jagged_attention(q, q, q, offsets, offsets, 4, 4)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMOPT_CPU_NATIVE", "0")
    assert native_build.load.__wrapped__() is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert native_build.load.__wrapped__() is None
    monkeypatch.setattr(native_build, "load", native_build.load.__wrapped__)
    assert attend().isfinite().all()


@pytest.mark.skipif(platform.system() == "Windows", reason="needs a shell script")
def test_a_failing_compiler_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such header >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert native_build.load.__wrapped__() is None
    assert "did not build: no such header" in caplog.text


@needs_compiler
def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "cache_dir", lambda: str(tmp_path))
    compiler = native_build._compiler()
    assert compiler is not None
    first = native_build.build(compiler, native_build._native())
    made = first.stat().st_mtime_ns
    assert native_build.build(compiler, native_build._native()) == first
    assert first.stat().st_mtime_ns == made and list(first.parent.iterdir()) == [first]


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instructions")
def test_with_narrow_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four floats at a time, as on machines without AVX."""
    monkeypatch.setattr(native_build, "cache_dir", lambda: str(tmp_path))
    compiler = native_build._compiler()
    assert compiler is not None
    library = native_build.bind(native_build.build(compiler, "-march=x86-64"))
    monkeypatch.setattr(native_build, "load", lambda: library)
    for name in ("plain", "causal", "GQA", "odd head_dim", "bias shared, causal", "dropout causal GQA", "long window"):
        check(CASES[name], torch.float32)
    gelu = {"activation": "gelu", "scale": 0.7, "post_scale": 0.3}
    check(Case((5, 0, 1, 20), (9, 3, 0, 17), heads=4, kv_heads=2, op="gdpa", kwargs=gelu), torch.float32)
    check_pffn(heads=4, kv_heads=2, d=6, weighted=True)


@needs_compiler
@pytest.mark.skipif(platform.system() == "Windows", reason="needs a shell script")
def test_a_compiler_without_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers bring the threads."""
    monkeypatch.setattr(native_build, "cache_dir", lambda: str(tmp_path))
    compiler = native_build._compiler()
    plain = tmp_path / "plain"
    plain.write_text(f'#!/bin/sh\nfor x in "$@"; do [ "$x" = -fopenmp ] && exit 1; done\nexec {compiler} "$@" -O0\n')
    plain.chmod(0o755)
    library = native_build.bind(native_build.build(str(plain), native_build._native()))
    assert not library.gemopt_has_threads()
    monkeypatch.setattr(native_build, "load", lambda: library)
    monkeypatch.setattr(native_build, "has_threads", lambda: False)
    monkeypatch.setattr(arguments, "FLOPS_PER_THREAD", 1)
    check(CASES["causal"], torch.float32)
    check_pffn(heads=2, kv_heads=2, d=8, weighted=True)


def check_pffn(heads: int, kv_heads: int, d: int, weighted: bool, spare: int = 3) -> None:
    """Against the formula in fp64, with empty sides, spare rows, and NaN in them and in one sequence."""
    offsets, k_offsets = offsets_of((5, 0, 1, 60, 7)), offsets_of((8, 8, 0, 9, 16))
    rows, used = int(offsets[-1]) + spare, int(offsets[-1])
    q, dout = torch.randn(rows, heads, d), torch.randn(rows, heads, d)
    k, v = (torch.randn(int(k_offsets[-1]) + 2, kv_heads, d) for _ in range(2))
    weights = [torch.randn(heads * d) for _ in range(3 * weighted)]
    names, scales = ["gelu", "silu"] * (heads // 2), {"scale": 0.3, "post_scale": 0.5}
    assert not native_build.load() or 16 * kv_heads * 2 * d < native_pffn.CACHED

    def run(poison: bool) -> list[torch.Tensor]:
        x = q.clone()
        if poison:
            x[used:], x[:5] = float("nan"), float("nan")  # spare rows and the first sequence
        leaves = [t.clone().requires_grad_() for t in (x, k, v, *weights)]
        named = dict(zip(("ln_weight", "ln_bias", "rms_weight"), leaves[3:], strict=False))
        out = pffn(*leaves[:3], offsets, k_offsets, 60, 16, activation=",".join(names), **scales, **named)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    leaves = [t.double().requires_grad_() for t in (q[:used], k, v, *(w.view(heads, d) for w in weights))]
    exact = formula(*leaves, offsets, k_offsets, activation=names, **scales)
    grads = torch.autograd.grad(exact, leaves, dout[:used].double())
    got, poisoned = run(False), run(True)
    for x, want in zip(got[:4], (exact, *grads[:3]), strict=True):
        torch.testing.assert_close(x[: len(want)].double(), want, rtol=1e-4, atol=2e-5)
    assert not spare or not got[1][used:].isnan().any()
    assert (got[2][-2:] == 0).all() and (got[3][-2:] == 0).all()  # keys of nobody
    for x, y in zip(got[:2], poisoned[:2], strict=True):
        assert torch.equal(x[5:used], y[5:used])
    for x, y in zip(got[2:4], poisoned[2:4], strict=True):
        assert torch.equal(x[8:], y[8:])
    if weighted and not spare:
        for x, want in zip(got[4:], grads[3:], strict=True):
            torch.testing.assert_close(x.double(), want.flatten(), rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(2, 2, 32), (4, 2, 5), (2, 1, 12)])
def test_pffn(heads: int, kv_heads: int, d: int) -> None:
    for weighted, spare in ((False, 3), (True, 3), (True, 0)):
        check_pffn(heads, kv_heads, d, weighted, spare)


@needs_compiler
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_every_size(name: str) -> None:
    """Values and derivatives from far below 0 to far above, kinks included, and NaN."""
    s = torch.cat([torch.linspace(-100, 100, 2001), torch.linspace(-6, 6, 2001), torch.tensor([0.0, -3.0, 3.0])])
    offsets, one = offsets_of((len(s),)), torch.ones(1, 1, 1)
    x = s.view(-1, 1, 1).clone().requires_grad_()
    got = gdpa(x, one, one, offsets, offsets_of((1,)), len(s), 1, activation=name)
    exact = s.double().requires_grad_()
    want = EAGER[name](exact)
    torch.testing.assert_close(got.flatten().double(), want, rtol=1e-6, atol=1e-6)
    (slope,), (steep,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(slope.flatten().double(), steep, rtol=1e-6, atol=2e-6)
    nan = gdpa(torch.full((1, 1, 1), float("nan")), one, one, offsets_of((1,)), offsets_of((1,)), 1, 1, activation=name)
    assert nan.isnan().all()


@needs_compiler
@pytest.mark.parametrize("d", [1, 3, 8, 9, 17, 33])
def test_any_head_dim(d: int) -> None:
    case = Case((5, 1, 0, 33, 8), (7, 0, 2, 16, 31), d=d, dv=34 - d, heads=4, kv_heads=2, spare=1, kwargs={"causal": True})
    check(case, torch.float32)


@needs_compiler
def test_large_and_infinite_scores() -> None:
    """Scores far apart: the weight of one key, and exact zeros elsewhere; an infinite score is NaN as in eager."""
    q = torch.tensor([[[100.0]], [[-100.0]]])
    k, v = torch.tensor([[[10.0]], [[-10.0]]]), torch.tensor([[[3.0]], [[5.0]]])
    offsets = offsets_of((2,))
    out = jagged_attention(q, k, v, offsets, offsets, 2, 2, scale=1.0)
    assert out.flatten().tolist() == [3.0, 5.0]
    assert jagged_attention(q * float("inf"), k, v, offsets, offsets, 2, 2, scale=1.0).isnan().all()


@needs_compiler
def test_more_threads_than_workers_of_the_other_paths() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(12)
    try:
        q, offsets = torch.randn(4000, 4, 32), offsets_of((50,) * 80)
        many = jagged_attention(q, q, q, offsets, offsets, 50, 50)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(many, jagged_attention(q, q, q, offsets, offsets, 50, 50))
    assert arguments.FLOPS_PER_THREAD * 12 < 4 * 4 * 32 * 80 * 50 * 50


@pytest.mark.parametrize("heads", [1100, 3000])
def test_pffn_of_very_many_heads(heads: int) -> None:
    """Scratch memory has room for the ends of lines of every head."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 1])
    q, k, v = (torch.randn(1, heads, 5, requires_grad=True) for _ in range(3))
    out = pffn(q, k, v, offsets, offsets, 1, 1)
    with torch.no_grad():
        ln = torch.nn.functional.layer_norm(q.double().flatten(1), [5 * heads]).view_as(q)
        g = torch.nn.functional.gelu((ln * k.double()).sum(2, keepdim=True)) * v.double() + ln
        want = torch.nn.functional.rms_norm(g.flatten(1), [5 * heads], eps=1e-5).view_as(q) + q.double()
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("value", "width"), [(0.1, 2048), (3.3, 512), (100.1, 96)])
def test_pffn_of_constant_rows(value: float, width: int, dtype: torch.dtype) -> None:
    """Variance 0: LayerNorm is 0, and rounding of the mean must not be divided by the deviation."""
    offsets = torch.tensor([0, 3])
    q = torch.full((3, 8, width // 8), value, dtype=dtype)
    k, v = (torch.randn(3, 8, width // 8, dtype=dtype) for _ in range(2))
    out = pffn(q, k, v, offsets, offsets, 3, 3)
    torch.testing.assert_close(out, q, rtol=0, atol=2e-3 if dtype != torch.bfloat16 else value / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_pffn_without_queries(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(n, 8, 256, dtype=dtype, requires_grad=True) for n in (0, 60, 60))
    out = pffn(q, k, v, torch.tensor([0, 0]), torch.tensor([0, 60]), 0, 60)
    assert out.shape == q.shape
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq.shape == q.shape and not dk.any() and not dv.any()


@pytest.mark.parametrize("window", [(-1, 2**63 - 1), (2**63 - 1, -1), (2**63 - 1, 2**63 - 1)])
def test_windows_as_wide_as_integers(window: tuple[int, int]) -> None:
    q = torch.ones(3, 1, 8)
    offsets = torch.tensor([0, 3])
    for activation in ("relu", "silu"):
        wide, none = (gdpa(q, q, q, offsets, offsets, 3, 3, activation=activation, window=w) for w in (window, (-1, -1)))
        torch.testing.assert_close(wide, none)
    wide, none = (jagged_attention(q, q, q, offsets, offsets, 3, 3, window=w) for w in (window, (-1, -1)))
    torch.testing.assert_close(wide, none)


def test_pffn_needs_offsets() -> None:
    q = torch.ones(3, 1, 8)
    with pytest.raises(TypeError, match="q_offsets must be a Tensor, got NoneType"):
        pffn(q, q, q, None, torch.tensor([0, 3]), 3, 3)  # type: ignore[arg-type]
