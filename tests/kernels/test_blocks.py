"""Block attention, tile lists and norm kernels in Triton, under the interpreter or on a GPU (see test_interpreter.py)."""

import importlib.util
import os

import pytest
import torch

from tests.ops.attention_cases import Case, check
from tests.ops.test_pffn import check as check_pffn

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from gemopt.kernels.triton import mixed_norms, norms
from gemopt.kernels.triton.tiles import tile_list
from gemopt.ops.pffn_parts import Norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GEMOPT_FORCE_TRITON") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 0, 1, 33), d=16, op="block_attention", spare=3, kwargs={"block_size": 32}),
        Case((70, 5), heads=4, kv_heads=2, d=24, dv=8, op="block_attention", kwargs={"block_size": 24, "causal": True}),
    ],
    ids=["plain", "grouped, causal, odd sizes"],
)
def test_blocks(case: Case) -> None:
    check(case, torch.float16, DEVICE)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("lens", [[0, 70, 3, 64, 128, 0, 129], [0], [5], [0, 0], [1] * 40])
def test_tile_list(lens: list[int], in_order: bool) -> None:
    """Every row of every sequence, and the rows after the last, lie in one tile; longest streams come first."""
    spare, block = 9, 64
    x = torch.tensor([0, *lens]).cumsum(0)
    streams = [(7 * i) % 5 for i in range(len(lens))]
    y = torch.tensor([0, *streams]).cumsum(0)
    rows = int(x[-1]) + spare
    tiles = tile_list(x.to(DEVICE), y.to(DEVICE, torch.int32), rows, block, in_order)
    records = tiles.records[: int(tiles.count[0])].tolist()
    assert len(records) == sum(-(-n // block) for n in [*lens, spare])
    covered = sorted(start + i for first, start, length, *_ in records for i in range(first, min(first + block, length)))
    assert covered == list(range(rows))
    for _, start, length, y_start, y_len, b, *_ in records:
        if b == len(lens):
            assert (start, length, y_len) == (int(x[-1]), spare, 0)
        else:
            assert (start, length, y_start, y_len) == (int(x[b]), lens[b], int(y[b]), streams[b])
    order = [record[5] for record in records] if in_order else [-record[4] for record in records]
    assert order == sorted(order)


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("weighted", ["", "w", "b", "wb"])
def test_norms(weighted: str, rows: int) -> None:
    gen = torch.Generator().manual_seed(0)
    x, dy, residual = (torch.randn(rows, 3, 40, generator=gen) for _ in range(3))
    wide = [3, 40]
    weight, bias = (torch.randn(wide, generator=gen).requires_grad_() if name in weighted else None for name in "wb")
    x.requires_grad_()
    y = torch.nn.functional.layer_norm(x, wide, weight, bias)
    leaves = [z for z in (weight, bias) if z is not None]
    dx, *dwb = torch.autograd.grad(y, [x, *leaves], dy)
    n = torch.nn.functional.rms_norm(x, wide, weight, eps=1e-5)
    dn, *dw = torch.autograd.grad(n, [x, *leaves[: len(weighted.strip("b"))]], dy)
    x = x.detach().to(DEVICE)
    own = [None if z is None else z.detach().to(DEVICE).reshape(-1) for z in (weight, bias)]
    got, stats = norms.layer_norm(x, 1e-5, *own)
    torch.testing.assert_close(got.cpu(), y.detach(), rtol=1e-5, atol=1e-5)
    back, *sums = norms.layer_norm_gradient(x if weighted else got, stats, dy.to(DEVICE), residual.to(DEVICE), *own)
    torch.testing.assert_close(back.cpu(), dx + residual, rtol=1e-4, atol=1e-5)
    added = norms.rms_add(x, residual.to(DEVICE), 1e-5, own[0])
    torch.testing.assert_close(added.cpu(), (n + residual).detach(), rtol=1e-5, atol=1e-5)
    back, total = norms.rms_gradient(x, dy.to(DEVICE), 1e-5, own[0])
    torch.testing.assert_close(back.cpu(), dn, rtol=1e-4, atol=1e-5)
    for found, want in zip([s for s in (*sums, total) if s is not None], [*dwb, *dw], strict=True):
        torch.testing.assert_close(found.cpu().view(wide), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("weighted", ["", "w", "b", "u", "wbu"])
@pytest.mark.parametrize("stream", [torch.float32, torch.float16], ids=str)
def test_mixed_norms(weighted: str, rows: int, stream: torch.dtype) -> None:
    """The passes around an attention in 16 bits against torch, with dlow = da: an attention that is the identity."""
    gen = torch.Generator().manual_seed(0)
    wide = [3, 40]
    q, a = (torch.randn(rows, *wide, generator=gen).to(dtype) for dtype in (stream, torch.float16))
    dout = torch.randn(rows, *wide, generator=gen)
    w, b, u = (torch.randn(wide, generator=gen) if name in weighted else None for name in "wbu")
    leaves = [x.double().requires_grad_() for x in (q, a, w, b, u) if x is not None]
    given = dict(zip([n for n, x in zip("qawbu", (q, a, w, b, u), strict=True) if x is not None], leaves, strict=True))
    ln = torch.nn.functional.layer_norm(given["q"], wide, given.get("w"), given.get("b"), eps=1e-5)
    g = given["a"] + ln
    out = torch.nn.functional.rms_norm(g, wide, given.get("u"), eps=1e-3) + given["q"]
    da, *rest = torch.autograd.grad(out, [given["a"], *leaves], dout.double(), retain_graph=True)

    own = [None if x is None else x.reshape(-1).to(DEVICE) for x in (w, b, u)]
    low, stats = norms.layer_norm(q.to(DEVICE), 1e-5, *own[:2], torch.float16)
    assert low.dtype == torch.float16
    torch.testing.assert_close(low.cpu().double(), ln.detach(), rtol=2e-3, atol=1e-3)
    block = mixed_norms.Rows(a.to(DEVICE), q.to(DEVICE), stats, Norms(1e-5, 1e-3, *own))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mixed_norms.rms_add(block).cpu().double(), out.detach(), **close)
    got, rms_stats = mixed_norms.rms_gradient(block, dout.to(DEVICE))
    torch.testing.assert_close(got.cpu().double(), da, rtol=2e-3, atol=1e-3)
    dq, *sums = mixed_norms.layer_norm_gradient(block, rms_stats, dout.to(DEVICE), got)
    through = torch.autograd.grad(ln, leaves, got.cpu().double(), allow_unused=True)
    wants = {n: x if y is None else x + y for n, x, y in zip(given, rest, through, strict=True)}
    torch.testing.assert_close(dq.cpu(), wants["q"].to(stream), **close if stream == torch.float32 else {})
    assert [x is not None for x in sums] == [x is not None for x in (w, b, u)]
    for name, x in zip("wbu", sums, strict=True):
        if x is not None:
            torch.testing.assert_close(x.cpu().double().view(wide), wants[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", [torch.float32, torch.float16], ids=str)
def test_mixed_pffn(stream: torch.dtype) -> None:
    """The whole op: these norms around the portable attention."""
    forms = {"low": torch.float16, "q_dtype": stream}
    check_pffn([5, 0, 1, 20], [8, 8, 0, 8], 2, 16, torch.float32, DEVICE, **forms, weighted=True)  # type: ignore[arg-type]
    check_pffn([5, 0], [8, 3], 2, 16, torch.float32, DEVICE, **forms, size=0.01)  # type: ignore[arg-type]
