"""The CPU's C++ kernel: building it, and the widths of vectors this machine does not choose by itself."""

import logging
import platform
from pathlib import Path

import pytest
import torch

from gemopt.kernels.cpu import native, native_build
from gemopt.ops import jagged_attention
from tests.ops.attention_cases import CASES, Case, check, offsets_of

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
    assert native.FLOPS_PER_THREAD * 12 < 4 * 4 * 32 * 80 * 50 * 50
