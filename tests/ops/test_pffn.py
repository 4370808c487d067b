"""pffn against its formula in fp64, on the CPU and on a GPU."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, pad, rms_norm

from gemopt.ops import pffn, reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def formula(q, k, v, *rest, eps=1e-5, rms_eps=1e-5, dtype=None, **kwargs):  # type: ignore[no-untyped-def]
    """As a model writes it; dtype: that of the norms, where it is not that of k and v."""
    *weights, qo, ko = rest
    w, b, u = weights or (None, None, None)
    wide = list(q.shape[1:])
    ln = layer_norm(q.to(dtype or q.dtype), wide, w, b, eps=eps)
    g = reference.gdpa(ln.to(k.dtype), k, v, qo, ko, **kwargs) + ln
    return rms_norm(g, wide, u, eps=rms_eps) + q


def check(
    q_lens: list[int], k_lens: list[int], heads: int, d: int, dtype: torch.dtype, device: str, weighted: bool = False,
    low: torch.dtype | None = None, q_dtype: torch.dtype | None = None, size: float = 1.0, **norms: float | None,
) -> None:  # fmt: skip
    """pffn against fp64, allowed twice the error of eager. low: dtype of k and v; size: of v."""
    gen = torch.Generator().manual_seed(0)
    offsets = [pad(torch.tensor(x).cumsum(0), (1, 0)) for x in (q_lens, k_lens)]
    low, q_dtype = low or dtype, q_dtype or dtype
    dtypes = [q_dtype, low, low, dtype]
    q, k, v, dout = (
        torch.randn(n, heads, d, generator=gen, dtype=FP64).to(of)
        for n, of in zip((sum(q_lens), sum(k_lens), sum(k_lens), sum(q_lens)), dtypes, strict=True)
    )
    v = v * size
    weights = [torch.randn(heads, d, generator=gen, dtype=FP64).to(dtype) for _ in range(3 * weighted)]
    kwargs: dict[str, Any] = {"activation": "gelu", "scale": 0.3, "post_scale": 0.5, **norms}

    def run(function, device, *extra, exact=False):  # type: ignore[no-untyped-def]
        leaves = [x.to(device, FP64 if exact else x.dtype).requires_grad_() for x in (q, k, v, *weights)]
        at, own = [o.to(device) for o in offsets], {} if q_dtype == dtype or exact else {"dtype": dtype}
        if function is pffn:
            named: dict[str, Any] = dict(zip(("ln_weight", "ln_bias", "rms_weight"), leaves[3:], strict=False))
            out = pffn(*leaves[:3], *at, *extra, **kwargs, **named, **own)
        else:
            out = function(*leaves, *at, **kwargs, **own)
        assert exact or out.dtype == dtype
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout.to(out)))]

    exact, eager = run(formula, "cpu", exact=True), run(formula, "cpu")
    got = run(pffn, device, max(q_lens), max(k_lens))
    names = ("out", "dq", "dk", "dv", *("d_ln_weight", "d_ln_bias", "d_rms_weight")[: len(weights)])
    ulps = dict(zip(names, (dtype, q_dtype, low, low), strict=False))
    for name, x, less, want in zip(names, got, eager, exact, strict=True):
        error, bound = (x - want).norm(), 2 * (less - want).norm() + 4 * torch.finfo(ulps.get(name, dtype)).eps * want.norm()
        assert error <= bound, f"{name}: {error:.3g} exceeds {bound:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cpu(dtype: torch.dtype) -> None:
    check([5, 0, 1, 20], [8, 8, 8, 8], 2, 16, dtype, "cpu")
    check([3, 4], [0, 5], 1, 8, dtype, "cpu")
    check([5, 0, 1, 20], [8, 8, 0, 8], 2, 16, dtype, "cpu", weighted=True, eps=1e-3, rms_eps=1e-2)
    check([3, 4], [2, 5], 1, 8, dtype, "cpu", rms_eps=None)


@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("stream", ["fp32", "low"])
def test_mixed_cpu(low: torch.dtype, stream: str) -> None:
    """As autocast has it. The smaller the attention beside ln, the less of ln may be rounded."""
    for size in (1.0, 0.01):
        forms: dict[str, Any] = {"low": low, "q_dtype": FP32 if stream == "fp32" else low, "size": size}
        check([5, 0, 1, 20], [8, 8, 8, 8], 2, 16, FP32, "cpu", **forms)
        check([3, 4], [0, 5], 1, 8, FP32, "cpu", **forms, rms_eps=None)
        check([5, 0, 1, 20], [8, 8, 0, 8], 2, 16, FP32, "cpu", weighted=True, eps=1e-3, rms_eps=1e-2, **forms)


@pytest.mark.parametrize("given", ["ln_weight", "ln_bias", "rms_weight"])
def test_one_weight(given: str) -> None:
    """Each weight alone, and its gradient, against the formula with ones or zeros for the others."""
    q, k, o = torch.randn(6, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64), torch.tensor([0, 6])
    ko = torch.tensor([0, 3])
    weight = torch.randn(8, dtype=torch.float64).requires_grad_()
    named: dict[str, Any] = {given: weight}
    got = pffn(q, k, k, o, ko, 6, 3, activation="gelu", **named)
    parts = {"ln_weight": torch.ones(2, 4), "ln_bias": torch.zeros(2, 4), "rms_weight": torch.ones(2, 4)}
    parts = {name: x.double() for name, x in parts.items()} | {given: weight.view(2, 4)}
    want = formula(q, k, k, *parts.values(), o, ko, activation="gelu")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), weight)[0] for x in (got, want)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_gpu(dtype: torch.dtype, d: int) -> None:
    check([130, 0, 1, 65, 300], [128] * 5, 3, d, dtype, "cuda")
    check([130, 0, 1, 65, 300], [128] * 5, 3, d, dtype, "cuda", weighted=True)
    check([70, 3], [300, 257], 4, d, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("stream", ["fp32", "low"])
@pytest.mark.parametrize("d", [64, 128])
def test_mixed_gpu(low: torch.dtype, stream: str, d: int) -> None:
    for size in (1.0, 0.01):
        forms: dict[str, Any] = {"low": low, "q_dtype": FP32 if stream == "fp32" else low, "size": size}
        check([130, 0, 1, 65, 300], [128] * 5, 3, d, FP32, "cuda", **forms)
        check([130, 0, 1, 65, 300], [128, 0, 7, 0, 300], 3, d, FP32, "cuda", weighted=True, **forms)
        check([70, 3], [300, 257], 4, d, FP32, "cuda", **forms, rms_eps=None)
        check([70, 3], [30, 25], 2, 40, FP32, "cuda", weighted=True, **forms)


def test_mixed_is_seen_from_the_dtypes() -> None:
    """What autocast would give: fp32 unless all is low."""
    o, x = torch.tensor([0, 3]), torch.randn(3, 1, 8)
    low = x.bfloat16()
    assert pffn(x, low, low, o, o, 3, 3).dtype == FP32
    assert pffn(low, low, low, o, o, 3, 3, dtype=FP32).dtype == FP32
    assert pffn(low, low, low, o, o, 3, 3).dtype == BF16
    with torch.autocast("cpu", BF16):
        assert pffn(x, x, x, o, o, 3, 3).dtype == FP32


def test_bad_arguments() -> None:
    q, o = torch.zeros(3, 1, 8), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="eps must be positive"):
        pffn(q, q, q, o, o, 3, 3, eps=0.0)
    with pytest.raises(ValueError, match="rms_eps must be positive"):
        pffn(q, q, q, o, o, 3, 3, rms_eps=-1.0)
    with pytest.raises(ValueError, match=r"ln_bias must be \[8\] or \[1, 8\], got \[4\]"):
        pffn(q, q, q, o, o, 3, 3, ln_bias=torch.zeros(4))
    with pytest.raises(ValueError, match=r"rms_weight must be torch.float32 on cpu beside this q and k, got torch.float64"):
        pffn(q, q, q, o, o, 3, 3, rms_weight=torch.zeros(8, dtype=torch.float64))
    with pytest.raises(TypeError, match="ln_weight must be a tensor"):
        pffn(q, q, q, o, o, 3, 3, ln_weight=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim of q"):
        pffn(q, q, torch.zeros(3, 1, 4), o, o, 3, 3)
    low = q.bfloat16()
    with pytest.raises(ValueError, match=r"v is torch.float32 but k is torch.bfloat16"):
        pffn(q, low, q, o, o, 3, 3)
    with pytest.raises(ValueError, match=r"k is torch.bfloat16 but q is torch.float64"):
        pffn(q.double(), low, low, o, o, 3, 3)
    with pytest.raises(ValueError, match=r"k is torch.float16 but q is torch.bfloat16"):
        pffn(low, q.half(), q.half(), o, o, 3, 3, dtype=FP32)
    with pytest.raises(ValueError, match=r"dtype must be None, torch.float32 where q is torch.float32, got torch.bfloat16"):
        pffn(q, low, low, o, o, 3, 3, dtype=BF16)
    with pytest.raises(ValueError, match=r"ln_bias must be torch.float32 or torch.bfloat16 on cpu beside this q and k"):
        pffn(q, low, low, o, o, 3, 3, ln_bias=torch.zeros(8).half())
