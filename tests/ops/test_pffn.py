"""pffn against its formula in fp64, on the CPU and on a GPU."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, pad, rms_norm

from gemopt.ops import pffn, reference


def formula(q, k, v, *rest, eps=1e-5, rms_eps=1e-5, **kwargs):  # type: ignore[no-untyped-def]
    *weights, qo, ko = rest
    w, b, u = weights or (None, None, None)
    wide = list(q.shape[1:])
    ln = layer_norm(q, wide, w, b, eps=eps)
    g = reference.gdpa(ln, k, v, qo, ko, **kwargs) + ln
    return rms_norm(g, wide, u, eps=rms_eps) + q


def check(
    q_lens: list[int], k_lens: list[int], heads: int, d: int, dtype: torch.dtype, device: str, weighted: bool = False,
    **norms: float | None,
) -> None:  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    offsets = [pad(torch.tensor(x).cumsum(0), (1, 0)) for x in (q_lens, k_lens)]
    q, k, v, dout = (
        torch.randn(n, heads, d, generator=gen, dtype=torch.float64).to(dtype)
        for n in (sum(q_lens),) + 2 * (sum(k_lens),) + (sum(q_lens),)
    )
    weights = [torch.randn(heads, d, generator=gen, dtype=torch.float64).to(dtype) for _ in range(3 * weighted)]
    kwargs: dict[str, Any] = {"activation": "gelu", "scale": 0.3, "post_scale": 0.5, **norms}

    def run(function, dtype, device, *extra):  # type: ignore[no-untyped-def]
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v, *weights)]
        at = [o.to(device) for o in offsets]
        if function is pffn:
            named: dict[str, Any] = dict(zip(("ln_weight", "ln_bias", "rms_weight"), leaves[3:], strict=False))
            out = pffn(*leaves[:3], *at, *extra, **kwargs, **named)
        else:
            out = function(*leaves, *at, **kwargs)
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout.to(device, dtype)))]

    exact, eager = run(formula, torch.float64, "cpu"), run(formula, dtype, "cpu")
    got = run(pffn, dtype, device, max(q_lens), max(k_lens))
    names = ("out", "dq", "dk", "dv", *("d_ln_weight", "d_ln_bias", "d_rms_weight")[: len(weights)])
    for name, x, low, want in zip(names, got, eager, exact, strict=True):
        error, bound = (x - want).norm(), 2 * (low - want).norm() + 4 * torch.finfo(dtype).eps * want.norm()
        assert error <= bound, f"{name}: {error:.3g} exceeds {bound:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cpu(dtype: torch.dtype) -> None:
    check([5, 0, 1, 20], [8, 8, 8, 8], 2, 16, dtype, "cpu")
    check([3, 4], [0, 5], 1, 8, dtype, "cpu")
    check([5, 0, 1, 20], [8, 8, 0, 8], 2, 16, dtype, "cpu", weighted=True, eps=1e-3, rms_eps=1e-2)
    check([3, 4], [2, 5], 1, 8, dtype, "cpu", rms_eps=None)


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


def test_bad_arguments() -> None:
    q, o = torch.zeros(3, 1, 8), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="eps must be positive"):
        pffn(q, q, q, o, o, 3, 3, eps=0.0)
    with pytest.raises(ValueError, match="rms_eps must be positive"):
        pffn(q, q, q, o, o, 3, 3, rms_eps=-1.0)
    with pytest.raises(ValueError, match=r"ln_bias must be \[8\] or \[1, 8\], got \[4\]"):
        pffn(q, q, q, o, o, 3, 3, ln_bias=torch.zeros(4))
    with pytest.raises(ValueError, match=r"rms_weight must be torch.float32 on cpu as q is, got torch.float64"):
        pffn(q, q, q, o, o, 3, 3, rms_weight=torch.zeros(8, dtype=torch.float64))
    with pytest.raises(TypeError, match="ln_weight must be a tensor"):
        pffn(q, q, q, o, o, 3, 3, ln_weight=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim of q"):
        pffn(q, q, torch.zeros(3, 1, 4), o, o, 3, 3)
