"""The Gluon kernels for sm_100, which no GPU here can run: their source on threads, and what ptxas says of them.

On threads (gluon_threads.py), with parts of 16 rows and tiles of 16, so that short sequences have many: results against the
fp64 reference for several orders of events. The compiled kernels are bounded in spills, shared memory and tensor memory.
GEMOPT_TEST_SWEEP=1 runs more orders, all cases and all configurations. On a GPU of compute capability 10.0, the cases run as
they are.
"""

import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs compiled triton", allow_module_level=True)

from gemopt.kernels.gluon import aot, scores
from gemopt.kernels.gluon.blackwell import attention, launch
from gemopt.kernels.gluon.blackwell.backward import attention_backward
from gemopt.kernels.gluon.blackwell.forward import attention_forward
from gemopt.kernels.gluon.launch import Call
from gemopt.kernels.spec import ACTIVATIONS, AttentionSpec
from gemopt.kernels.triton.tiles import TileList
from gemopt.ops import attention as ops
from gemopt.ops import dispatch
from tests.hostile.common import SWEEPING, sweep
from tests.kernels import gluon_threads
from tests.ops.attention_cases import OPS, Case, assert_close, check, draw, run

ROWS = 16  # of a part, in place of 128
BF16, FP16 = torch.bfloat16, torch.float16
ORDERS = range(8 if SWEEPING else 1)  # seeds of the order of events
EDGES = (1, 0, 15, 16, 17, 31, 32, 33, 0, 70, 0)
OTHER = (16, 3, 0, 1, 33, 31, 0, 17, 0, 40, 17)
FORWARD = launch.ForwardConfig(keys=16, stages=2, q_stages=1)
SIDE = launch.SideConfig(rows=16, stages=2, x_stages=1)


def gdpa(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"op": "gdpa", "kwargs": {"activation": name, "scale": 0.2, **kwargs}}


CASES = {
    "self": Case((1, 0, 16, 33, 70, 0), d=32, heads=1, kv_heads=1, spare=3),
    "cross, GQA": Case((1, 33, 0, 31, 5), (40, 3, 5, 0, 33), heads=2, kv_heads=1, d=32, spare=1),
    "causal": Case((1, 0, 70, 33), d=32, heads=1, kv_heads=1, kwargs={"causal": True}),
    "window": Case((70, 5), d=32, heads=1, kv_heads=1, kwargs={"window": (20, 3)}),
    "GELU": Case((5, 0, 40, 33), (33, 0, 0, 70), d=32, heads=1, kv_heads=1, spare=17, **gdpa("gelu", post_scale=0.5)),
    # Bases grow after the first tile.
    "large scores": Case((40, 3), (70, 20), d=32, heads=1, kv_heads=1, kwargs={"scale": 3.0}),
    "no keys": Case((3, 20), (0, 0), d=32, spare=20),
    "no queries": Case((0, 0), (3, 20), d=32, spare=2),
}
MORE = {
    "edges": Case(EDGES, d=32, spare=3),
    "edges, cross, GQA": Case(EDGES, OTHER, heads=4, kv_heads=2, d=32, spare=1),
    **{name: Case(EDGES, OTHER, d=32, **gdpa(name)) for name in ACTIVATIONS},
    "causal, bottom right": Case(EDGES, OTHER, d=32, kwargs={"causal": True, "causal_align": "bottom_right"}),
    "window left": Case(EDGES, OTHER, d=32, kwargs={"window": (25, -1)}),
    "window right": Case(EDGES, OTHER, d=32, kwargs={"window": (-1, 3), "causal_align": "bottom_right"}),
    "window zero": Case(EDGES, d=32, kwargs={"window": (0, 0)}),
    "identity, window": Case(EDGES, d=32, **gdpa("identity", window=(20, 0))),
    "silu, causal, GQA": Case(EDGES, d=32, heads=4, kv_heads=1, **gdpa("silu", causal=True)),
    "per head": Case(EDGES, OTHER, d=32, heads=4, kv_heads=2, **gdpa("gelu", activation=["gelu", "gelu", "relu", "relu"])),
    "all empty but one": Case((0, 0, 5, 0), (0, 7, 0, 0), d=32, spare=1),
}


def tile_list(x_offsets: Tensor, y_offsets: Tensor, rows: int, block: int) -> TileList:
    """See kernels/triton/tiles.py; here sequence by sequence."""
    x, y = x_offsets.tolist(), y_offsets.tolist()
    sequences = [(x[b], x[b + 1] - x[b], y[b], y[b + 1] - y[b]) for b in range(len(x) - 1)]
    sequences.append((x[-1], rows - x[-1], y[-1], 0))
    records = [[first, *s, 0, 0, 0] for s in sequences for first in range(0, s[1], block)]
    return TileList(torch.tensor(records or [[0] * 8], dtype=torch.int32), torch.tensor([len(records)]), block)


def statistics(out: Tensor, dout: Tensor, lse: Tensor, scale: float) -> Tensor:
    """See gluon/backward.py, `row_statistics`."""
    delta = (out.float() * dout.float()).sum(2)
    return torch.stack([torch.where(lse == -torch.inf, lse, -lse / scale).T, -delta.T])


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The ops run these kernels on threads; attributes may be changed between calls."""
    options = SimpleNamespace(programs=2, seed=0)
    plain = gluon_threads.Plain(M=ROWS)

    def runs(kernel: Any, arguments: Any) -> Any:
        return lambda *args: gluon_threads.launch(plain(kernel), arguments(*args), options.programs, options.seed)

    empty = torch.empty
    monkeypatch.setattr(launch, "M", ROWS)
    monkeypatch.setattr(launch, "OUT_COLUMNS", 16)
    monkeypatch.setattr(launch, "FORWARDS", {32: FORWARD})
    monkeypatch.setattr(launch, "SIDES", {32: SIDE})
    monkeypatch.setattr(launch, "run_forward", runs(attention_forward, launch.forward_arguments))
    monkeypatch.setattr(launch, "run_side", runs(attention_backward, launch.side_arguments))
    monkeypatch.setattr(attention, "tile_list", tile_list)
    monkeypatch.setattr(attention, "statistics", statistics)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))

    def backward(*args: Any) -> Any:
        return *attention.backward(*args[:-1]), None

    monkeypatch.setattr(ops, "attention_kernels", lambda q: (attention.forward, backward))
    return options


def compare(case: Case, dtype: torch.dtype, options: SimpleNamespace) -> None:
    inputs = draw(case, dtype)
    op, eager_op = OPS[case.op]
    exact, eager = run(eager_op, inputs, torch.float64), run(eager_op, inputs, dtype)
    for options.seed in ORDERS:
        assert_close(run(op, inputs, dtype), eager, exact, dtype)


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(c, marks=sweep) for c in MORE.values())], ids=[*CASES, *MORE]
)
def test_on_threads(case: Case, on_threads: SimpleNamespace) -> None:
    compare(case, BF16, on_threads)


@pytest.mark.parametrize("dtype", [FP16, pytest.param(BF16, marks=sweep)], ids=str)
def test_more_buffers_on_threads(dtype: torch.dtype, on_threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles in flight, two query tiles, one program."""
    on_threads.programs = 1
    monkeypatch.setattr(launch, "FORWARDS", {32: launch.ForwardConfig(keys=16, stages=3, q_stages=2)})
    monkeypatch.setattr(launch, "SIDES", {32: launch.SideConfig(rows=8, stages=3, x_stages=2)})
    compare(Case((33, 1, 0, 70), d=32, heads=1, kv_heads=1), dtype, on_threads)


def test_a_barrier_less_is_seen(on_threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run on threads can fail: without waiting for what is to be read, some order reads too early."""
    waits = gluon_threads.mbarrier.wait
    case = Case((33, 70), d=32, heads=1, kv_heads=1)
    left_out = []

    def careless(bar: Any, parity: Any) -> None:
        name = gluon_threads.current.role.name
        if name != left_out[0]:
            waits(bar, parity)

    monkeypatch.setattr(gluon_threads.mbarrier, "wait", staticmethod(careless))
    for role in ("0 score", "1 score", "2 multiply", "3 produce"):
        left_out[:] = [role]
        with pytest.raises(AssertionError):
            for on_threads.seed in range(10):
                inputs = draw(case, BF16)
                OPS[case.op][0](*(x.to(BF16) for x in (inputs.q, inputs.k, inputs.v)), **inputs.kwargs)


SHARED_MEMORY = 232_448  # bytes a program may use on sm_100
COLUMNS = 512  # of tensor memory
# Bytes of spill stores and loads together, all roles. The key side keeps P, its slope and a mask of 64 columns; so does the
# query side without P.
SPILLS = {"forward": 64, "query_side": 160, "key_side": 400}
# (kernel, head dim, score function, window)
COMPILED = [("forward", 128, "softmax", True)]
SWEPT = [(k, d, n, w) for k in SPILLS for d in (32, 64, 128) for n in ("softmax", *ACTIVATIONS) for w in (False, True)]


def arguments(kernel: str, d: int, call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """A launch of `kernel`, with tensors of the CPU."""
    q, k, v, dout = (torch.zeros(256, 2, d, dtype=dtype) for _ in range(4))
    floats = torch.zeros(256, 2)
    tiles = TileList(torch.zeros(8, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 128)
    if kernel == "forward":
        return launch.forward_arguments(q, k, v, dout, floats, tiles, call, launch.FORWARDS[d])
    key_side = kernel == "key_side"
    x, y = ((k, v), (q, dout)) if key_side else ((q, dout), (k, v))
    return launch.side_arguments(x, y, x, floats, tiles, call, launch.SIDES[d], key_side)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d", "name", "window"),
    [*COMPILED, *(pytest.param(*c, marks=sweep) for c in SWEPT if c not in COMPILED)],
)
def test_compiles(kernel: str, d: int, name: str, window: bool) -> None:
    for dtype in (BF16, FP16) if SWEEPING else (BF16,):
        left, right = (3, 0) if window else (-1, -1)
        call = Call(scores.code(name, dtype), 0.1, left=left, right=right, bottom_right=window)
        function = attention_forward if kernel == "forward" else attention_backward
        found = aot.compile_kernel(function, arguments(kernel, d, call, dtype), 100)
        assert found.spilled <= SPILLS[kernel], f"{found.spilled} bytes spilled"
        assert found.shared <= SHARED_MEMORY and found.tensor_memory <= COLUMNS
        assert not found.warnings, found.warnings
        assert "tcgen05.mma" in found.ptx and "setmaxnreg" in found.ptx and "mma.sync" not in found.ptx


def spec_of(**changes: Any) -> AttentionSpec:
    offsets = torch.tensor([0, 4, 10])
    return replace(
        AttentionSpec(offsets, offsets, 6, 6, 0.1, False, False, (-1, -1), None, None, 0.0, None), **changes
    )  # fmt: skip


def test_refusals() -> None:
    def reason(d: int = 64, dtype: torch.dtype = BF16, dv: int | None = None, **changes: Any) -> str | None:
        q, k = (torch.zeros(10, heads, d, dtype=dtype) for heads in (4, 2))
        v = torch.zeros(10, 2, d if dv is None else dv, dtype=dtype)
        return attention.unsupported(q, k, v, spec_of(**changes))

    assert reason() is None and reason(activations=("gelu",)) is None and reason(causal=True, window=(3, -1)) is None
    assert "bf16 or fp16" in str(reason(dtype=torch.float32))
    assert "head dim 256" in str(reason(d=256)) and "head dim 48" in str(reason(d=48))
    assert "equal head dims" in str(reason(dv=32))
    assert "dropout" in str(reason(dropout_p=0.1))
    assert "positions" in str(reason(causal=True, q_positions=torch.arange(10)))
    assert "bias" in str(reason(bias=torch.zeros(1, 1, 1, 1)))
    assert "blocks" in str(reason(block_size=4))
    assert "one score function" in str(reason(activations=("gelu", "relu", "gelu", "relu")))
    cpu = torch.zeros(10, 2, 64, dtype=BF16)
    assert "CUDA device" in str(attention.refusal(cpu, cpu, cpu, spec_of()))


def test_only_who_asks_for_them_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = SimpleNamespace(device=torch.device("cuda"))
    for tier in (None, "portable", "blackwell"):
        monkeypatch.delenv("GEMOPT_TIER", raising=False)
        if tier:
            monkeypatch.setenv("GEMOPT_TIER", tier)
        for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            assert dispatch.is_blackwell(x) == (tier == "blackwell" and capability == (10, 0))
            assert dispatch.is_hopper(x) == (tier != "portable" and capability == (9, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_on_hardware(d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases, and lengths around the tiles of 128 rows."""
    if torch.cuda.get_device_capability() != (10, 0):
        pytest.skip("needs compute capability 10.0")
    monkeypatch.setenv("GEMOPT_TIER", "blackwell")
    for case in (*CASES.values(), *MORE.values()):
        lens = tuple(8 * n - n % 3 for n in case.q_lens)
        keys = None if case.k_lens is None else tuple(8 * n - n % 3 for n in case.k_lens)
        inputs = draw(replace(case, d=d, q_lens=lens, k_lens=keys), dtype)
        assert attention.unsupported(inputs.q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype), spec_of()) is None
        check(replace(case, d=d, q_lens=lens, k_lens=keys), dtype, "cuda")
