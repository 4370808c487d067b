"""pffn against its formula in fp64, on the CPU and on a GPU."""

import pytest
import torch
from torch.nn.functional import layer_norm, pad, rms_norm

from gemopt.ops import pffn, reference


def formula(q, k, v, qo, ko, eps=1e-5, **kwargs):  # type: ignore[no-untyped-def]
    wide = list(q.shape[1:])
    ln = layer_norm(q, wide, eps=eps)
    g = reference.gdpa(ln, k, v, qo, ko, **kwargs) + ln
    return rms_norm(g, wide, eps=eps) + q


def check(q_lens: list[int], k_lens: list[int], heads: int, d: int, dtype: torch.dtype, device: str) -> None:
    gen = torch.Generator().manual_seed(0)
    offsets = [pad(torch.tensor(x).cumsum(0), (1, 0)) for x in (q_lens, k_lens)]
    q, k, v, dout = (
        torch.randn(n, heads, d, generator=gen, dtype=torch.float64).to(dtype)
        for n in (sum(q_lens),) + 2 * (sum(k_lens),) + (sum(q_lens),)
    )
    kwargs = {"activation": "gelu", "scale": 0.3, "post_scale": 0.5}

    def run(function, dtype, device, *extra):  # type: ignore[no-untyped-def]
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves, *(o.to(device) for o in offsets), *extra, **kwargs)
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout.to(device, dtype)))]

    exact, eager = run(formula, torch.float64, "cpu"), run(formula, dtype, "cpu")
    got = run(pffn, dtype, device, max(q_lens), max(k_lens))
    for name, x, low, want in zip(("out", "dq", "dk", "dv"), got, eager, exact, strict=True):
        error, bound = (x - want).norm(), 2 * (low - want).norm() + 4 * torch.finfo(dtype).eps * want.norm()
        assert error <= bound, f"{name}: {error:.3g} exceeds {bound:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cpu(dtype: torch.dtype) -> None:
    check([5, 0, 1, 20], [8, 8, 8, 8], 2, 16, dtype, "cpu")
    check([3, 4], [0, 5], 1, 8, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_gpu(dtype: torch.dtype, d: int) -> None:
    check([130, 0, 1, 65, 300], [128] * 5, 3, d, dtype, "cuda")
    check([70, 3], [300, 257], 4, d, dtype, "cuda")


def test_bad_arguments() -> None:
    q, o = torch.zeros(3, 1, 8), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="eps must be positive"):
        pffn(q, q, q, o, o, 3, 3, eps=0.0)
    with pytest.raises(ValueError, match="head_dim of q"):
        pffn(q, q, torch.zeros(3, 1, 4), o, o, 3, 3)
