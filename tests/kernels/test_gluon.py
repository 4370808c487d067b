"""The Gluon kernels and the block kernel on a GPU: the feature matrix against the fp64 reference.

Outputs are poisoned: what a kernel allocates starts as NaN. Each case also says which tier took it, so that a silent
fallback does not pass for a tested kernel.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.attention_cases import OPS, Case, check, draw, run
from tests.ops.test_pffn import check as check_pffn

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from gemopt.kernels.gluon import attention as hopper
from gemopt.kernels.gluon import blocks as hopper_blocks
from gemopt.kernels.gluon import table
from gemopt.kernels.spec import ACTIVATIONS
from gemopt.kernels.triton import block_attention as blocks
from gemopt.ops import gdpa, jagged_attention

pytestmark = pytest.mark.gpu

EDGES = (1, 0, 63, 64, 65, 127, 128, 129, 0, 200, 5, 0)
OTHER = (64, 3, 0, 1, 129, 127, 0, 65, 0, 130, 70, 17)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def hopper_only() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, and -7 for integers."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the launches of these kernels during the test."""
    calls: list[str] = []

    def note(module: Any, name: str, called: str = "") -> None:
        original: Callable[..., Any] = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(called or name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    for name in ("run_forward", "run_side", "run_fused"):
        note(hopper.launch, name)
    note(blocks, "forward")
    note(blocks, "backward")
    note(hopper_blocks, "backward", "hopper backward")
    yield calls


@pytest.fixture(params=["owner", "fused", "two", "ordered"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every form of the backward, whatever the table says; "owner" has no windows and no shared queries."""

    def chosen(shape: table.Shape, deterministic: bool, balanced: bool, few: bool = False, shared: bool = False) -> str:
        return "fused" if request.param == "owner" and (shape.band or shared) else request.param

    monkeypatch.setattr(hopper.table, "backward_form", chosen)
    return request.param


SOFTMAX_CASES = {
    "self": Case(EDGES, d=128, spare=3),
    "cross": Case(EDGES, OTHER, d=128, spare=3),
    "cross, swapped": Case(OTHER, EDGES, d=64),
    "causal": Case(EDGES, d=128, spare=2, kwargs={"causal": True}),
    "cross causal": Case(EDGES, OTHER, d=64, kwargs={"causal": True}),
    "cross causal, bottom right": Case(EDGES, OTHER, d=128, kwargs={"causal": True, "causal_align": "bottom_right"}),
    "window": Case(EDGES, d=128, kwargs={"window": (40, 7)}),
    "window left": Case(EDGES, OTHER, d=64, kwargs={"window": (100, -1)}),
    "window right": Case(EDGES, OTHER, d=64, kwargs={"window": (-1, 3), "causal_align": "bottom_right"}),
    "window zero": Case(EDGES, d=64, kwargs={"window": (0, 0)}),
    "GQA": Case(EDGES, OTHER, heads=6, kv_heads=2, d=64, kwargs={"causal": True}),
    "MQA": Case(EDGES, heads=3, kv_heads=1, d=128),
    "head_dim 32": Case(EDGES, d=32, kwargs={"causal": True}),
    "int32 offsets": Case(EDGES, d=64, offsets_dtype=torch.int32),
    "all empty but one": Case((0, 0, 5, 0), (0, 7, 0, 0), d=64, spare=1),
    "no keys": Case((3, 2), (0, 0), d=64, spare=2),
    "no queries": Case((0, 0), (3, 2), d=64, spare=2),
    "many key tiles": Case((70, 700, 300, 0), (700, 300, 64, 40), d=128, spare=70),
    "shared": Case((70,) * 6, (5, 0, 64, 65, 300, 700), d=128, spare=3, shared=True),
    "shared, many tiles": Case((200,) * 3, (300, 1, 129), d=64, shared=True),
    "shared, GQA, one query": Case((1,) * 4, (5, 0, 64, 300), heads=4, kv_heads=2, d=64, shared=True),
    "shared, bottom right": Case(
        (70,) * 3, (300, 5, 129), d=128, shared=True, kwargs={"causal": True, "causal_align": "bottom_right"}
    ),
    "shared, window": Case((200,) * 3, (300, 5, 129), d=32, spare=1, shared=True, kwargs={"window": (40, 7)}),
    "shared, no keys": Case((3,) * 2, (0, 0), d=64, spare=2, shared=True),
    "many key tiles, GQA": Case((70, 700, 300, 0), (700, 300, 64, 40), heads=4, kv_heads=2, d=64, spare=1),
}
GDPA_CASES = {
    **{f"{name}": Case(EDGES, OTHER, d=64, op="gdpa", kwargs={"activation": name, "scale": 0.2}) for name in ACTIVATIONS},
    "self": Case(EDGES, d=128, op="gdpa", spare=3, kwargs={"activation": "gelu", "scale": 0.1, "post_scale": 0.5}),
    "causal silu": Case(EDGES, d=128, op="gdpa", kwargs={"activation": "silu", "scale": 0.1, "causal": True}),
    "window": Case(EDGES, OTHER, d=128, op="gdpa", kwargs={"activation": "gelu", "scale": 0.1, "window": (30, 50)}),
    "sigmoid window": Case(EDGES, d=64, op="gdpa", spare=2, kwargs={"activation": "sigmoid", "window": (30, 0)}),
    "GQA": Case(EDGES, heads=4, kv_heads=2, d=64, op="gdpa", kwargs={"activation": "relu"}),
    "per head": Case(
        EDGES,
        OTHER,
        heads=4,
        kv_heads=2,
        d=64,
        op="gdpa",
        kwargs={"activation": ["gelu", "gelu", "relu", "relu"], "scale": 0.2},
    ),
    "short keys": Case((130, 5, 64), (128, 128, 128), d=128, op="gdpa", kwargs={"activation": "gelu", "scale": 0.1}),
    "head_dim 32": Case(EDGES, d=32, op="gdpa", kwargs={"activation": "gelu_tanh", "scale": 0.2}),
    "shared": Case((70,) * 4, (5, 0, 64, 300), d=128, op="gdpa", shared=True, kwargs={"activation": "gelu", "scale": 0.1}),
    "shared, per head": Case(
        (130,) * 3,
        (300, 5, 70),
        d=64,
        op="gdpa",
        spare=2,
        shared=True,
        kwargs={"activation": ["gelu", "sigmoid"], "scale": 0.2},
    ),
    "many key tiles": Case(
        (70, 700, 300, 0), (700, 300, 64, 40), d=128, op="gdpa", spare=70, kwargs={"activation": "gelu", "scale": 0.1}
    ),
}
FORWARDS = {
    "two tiles": {"parts": 2, "keys": 64, "stages": 4, "group": 2, "q_registers": True},
    "four tiles": {"parts": 3, "keys": 64, "stages": 4, "group": 4, "registers": 160},
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", SOFTMAX_CASES)
def test_softmax(name: str, dtype: torch.dtype, form: str, taken: list[str]) -> None:
    check(SOFTMAX_CASES[name], dtype, "cuda")
    expected = ["run_forward", "run_fused"] if form != "two" else ["run_forward", "run_side", "run_side"]
    assert taken == expected


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", GDPA_CASES)
def test_gdpa(name: str, dtype: torch.dtype, form: str, taken: list[str]) -> None:
    check(GDPA_CASES[name], dtype, "cuda")
    assert "run_forward" in taken and ("run_fused" if form != "two" else "run_side") in taken


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("config", FORWARDS)
def test_forward_forms(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of query tiles whose keys fit the ring (at most 256) and whose keys do not, and consumers in turn."""
    chosen = hopper.launch.ForwardConfig(**FORWARDS[config])
    monkeypatch.setattr(hopper.table, "forward_config", lambda shape, split=False: None if split else chosen)
    lengths = ((700, 1, 500, 0, 385, 128, 384), (256, 200, 300, 5, 0, 64, 1000))
    for d in (64, 128):
        check(Case(*lengths, d=d, spare=3, op="gdpa", kwargs={"activation": "gelu", "scale": 0.1}), BF16, "cuda")
        check(Case(*lengths, d=d, spare=3), BF16, "cuda")


SPLIT_CASES = {
    "softmax": Case((3, 0, 70, 129, 64), (700, 300, 0, 65, 513), d=128, spare=3),
    "head_dim 64, GQA": Case((3, 1, 130), (700, 5, 64), heads=4, kv_heads=2, d=64),
    "shared": Case((32,) * 4, (700, 0, 64, 300), d=128, spare=2, shared=True),
    "gdpa": Case((3, 0, 70, 129), (700, 300, 0, 65), d=128, op="gdpa", spare=3, kwargs={"activation": "gelu", "scale": 0.1}),
    "gdpa, per head, shared": Case(
        (70,) * 3, (700, 0, 65), d=64, op="gdpa", shared=True, kwargs={"activation": ["sigmoid", "gelu"], "scale": 0.2}
    ),
}


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of every combination of split keys."""
    calls: list[int] = []
    combine = hopper.combine
    monkeypatch.setattr(hopper, "combine", lambda partial, *rest: (calls.append(len(partial)), combine(partial, *rest)))
    return calls


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("step", [64, 192])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_keys(name: str, dtype: torch.dtype, step: int, combined: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In more parts than some sequences have keys; the last part has what is left."""
    monkeypatch.setattr(hopper, "key_parts", lambda *unused: (5, step))
    check(SPLIT_CASES[name], dtype, "cuda")
    assert combined and set(combined) == {5}


def test_few_queries_over_long_keys_are_split(combined: list[int]) -> None:
    case = Case((32,) * 2, (9000, 5000), d=128, shared=True)
    check(case, BF16, "cuda")
    inputs = draw(case, BF16)
    first, again = (run(jagged_attention, inputs, BF16, "cuda")["out"] for _ in range(2))
    assert torch.equal(first, again)
    assert combined and min(combined) > 8
    combined.clear()
    check(Case((32,) * 2, (9000, 5000), d=128, kwargs={"window": (3, -1)}), BF16, "cuda")
    check(Case((5,) * 200, d=64), BF16, "cuda")
    assert not combined, "a window, and enough tiles"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_pffn(dtype: torch.dtype, form: str, taken: list[str]) -> None:
    """The residuals inside the block, in every form of the backward, with sequences that have no keys."""
    check_pffn([130, 0, 1, 65, 300], [128, 7, 0, 0, 300], 3, 128, dtype, "cuda")
    check_pffn([70, 3], [300, 257], 4, 64, dtype, "cuda")
    assert taken.count("run_forward") == 2


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("stream", [torch.float32, BF16], ids=str)
def test_mixed_pffn(stream: torch.dtype, form: str, taken: list[str]) -> None:
    """As autocast has it: the attention alone is Gluon's, the residuals are the norms'."""
    lengths = [130, 0, 1, 65, 300], [128, 7, 0, 0, 300]
    check_pffn(*lengths, 3, 128, torch.float32, "cuda", low=BF16, q_dtype=stream)
    check_pffn(*lengths, 3, 128, torch.float32, "cuda", low=BF16, q_dtype=stream, weighted=True, size=0.01)
    assert taken.count("run_forward") == 2


@pytest.mark.usefixtures("poison")
def test_head_dim_256_forward(taken: list[str]) -> None:
    check(Case(EDGES, d=256, kwargs={"causal": True}), BF16, "cuda")
    check(Case(EDGES, d=256, op="gdpa", kwargs={"activation": "gelu", "scale": 0.1}), BF16, "cuda")
    assert taken == ["run_forward"] * 2  # the backward is the portable tier's


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("block", [16, 48, 64, 100, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks(block: int, causal: bool, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ({"kernel": "block_backward", "config": {}}, *table.rows())
    monkeypatch.setattr(table, "rows", lambda: rows)
    for case in (
        Case(EDGES, d=128, op="block_attention", spare=3),
        Case(EDGES, d=64, dv=40, heads=4, kv_heads=2, op="block_attention", kwargs={}),
        Case((*EDGES, 700), d=32, heads=3, kv_heads=3, op="block_attention", spare=70),
    ):
        check(replace(case, kwargs={"block_size": block, "causal": causal}), BF16, "cuda")
    own = "hopper backward" if block <= 64 else "backward"
    assert taken == ["forward", own, "forward", "backward", "forward", own]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form_of", ["two", "owner", "fused", "ordered"])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_reruns_are_equal_bit_by_bit(op: str, form_of: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shared and form_of == "owner":
        pytest.skip("shared queries have no owner")
    monkeypatch.setattr(hopper.table, "backward_form", lambda *unused: form_of)
    kwargs: dict[str, Any] = {"causal": True} if form_of != "owner" else {}
    if op == "gdpa":
        kwargs = {"activation": "gelu", "scale": 0.1}
    lens = ((64,) * 60, tuple(range(0, 1200, 20))) if shared else ((700, 0, 300, 64), None)
    inputs = draw(Case(*lens, d=128, op=op, shared=shared, kwargs=kwargs), BF16)
    function = gdpa if op == "gdpa" else jagged_attention
    first = run(function, inputs, BF16, "cuda")
    for _ in range(10):
        again = run(function, inputs, BF16, "cuda")
        for name in first:
            if form_of != "fused" or name != "dq":
                assert torch.equal(first[name], again[name]), name


def test_deterministic_algorithms_choose_the_form_without_atomics(taken: list[str]) -> None:
    inputs = draw(Case((700, 300), d=64), BF16)
    torch.use_deterministic_algorithms(True)
    try:
        run(jagged_attention, inputs, BF16, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "run_side" in taken and "run_fused" not in taken


def test_deterministic_gradients_of_few_queries(taken: list[str]) -> None:
    """A sum for each program where that is little memory, one for each sequence where it is not."""
    torch.use_deterministic_algorithms(True)
    try:
        for lens, launches in ((300, ["run_forward", "run_fused"]), (5, ["run_forward", "run_side", "run_side"])):
            taken.clear()
            check(Case((9,) * 7, (lens,) * 7, d=64, shared=True), BF16, "cuda")
            assert taken == launches
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa", "block_attention"])
def test_neighbours_do_not_leak(value: float, op: str) -> None:
    kwargs = {"gdpa": {"activation": "gelu", "scale": 0.1}, "block_attention": {"block_size": 64}}.get(op, {})
    inputs = draw(Case((5, 9, 137, 1, 70), d=64, spare=2, op=op, kwargs=kwargs), BF16)
    function = OPS[op][0]
    clean = run(function, inputs, BF16, "cuda")
    keep = torch.ones(224, dtype=torch.bool)
    for rows in (slice(5, 14), slice(151, 152), slice(222, 224)):
        keep[rows] = False
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
            x[rows] = value
    dirty = run(function, inputs, BF16, "cuda")
    for name, want in clean.items():
        tolerance = 1e-4 if name == "dq" else 0.0  # the fused form adds dq in any order
        torch.testing.assert_close(dirty[name][keep], want[keep], rtol=tolerance, atol=tolerance, msg=name)
        assert (dirty[name][222:] == 0).all(), f"{name}: spare rows"


def test_fused_projection_views() -> None:
    """q, k and v as strided views of one projection, as `chunk` gives them."""
    inputs = draw(Case((50, 130), d=64), BF16)
    want = run(jagged_attention, inputs, BF16, "cuda")
    fused = torch.stack([inputs.q, inputs.k, inputs.v], 1).to("cuda", BF16)
    offsets = inputs.kwargs["q_offsets"].cuda()
    out = jagged_attention(fused[:, 0], fused[:, 1], fused[:, 2], offsets, offsets, 130, 130)
    assert torch.equal(out.double().cpu(), want["out"])


@pytest.mark.parametrize("lens", [(700, 1, 300, 0, 64), (3,), (64,) * 600], ids=["few", "one", "many"])
def test_a_tile_list_serves_many_launches(lens: tuple[int, ...]) -> None:
    """Programs draw from a counter beside the list, back at 0 after each: launched in turns, replayed as a graph."""
    inputs = draw(Case(lens, d=64), BF16)
    q, k, v = (x.cuda() for x in (inputs.q, inputs.k, inputs.v))
    offsets = torch.tensor([0, *lens]).cumsum(0).cuda()
    tiles = hopper.tile_list(offsets, offsets, q.shape[0], 2 * hopper.launch.M)
    call, config = hopper.launch.Call(hopper.scores.code("gelu", BF16), 0.1), hopper.launch.ForwardConfig()

    def run_once() -> torch.Tensor:
        out = torch.full_like(q, float("nan"))
        hopper.launch.run_forward(q, k, v, out, out.new_empty(0, q.shape[1]).float(), tiles, call, config)
        return out

    first = run_once()
    count = int(tiles.count[0])
    assert count == sum(-(-n // (2 * hopper.launch.M)) for n in lens) and not first.isnan().any()
    for _ in range(5):
        assert torch.equal(run_once(), first)
        assert tiles.count.tolist() == [count, 0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run_once()
    for _ in range(5):
        again.zero_()
        graph.replay()
        assert torch.equal(again, first)
