"""bench/kernels.py without a GPU: its pictures, and the adapter to generative-recommenders against a stand-in."""

import importlib
import json
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gemopt.kernels.spec import AttentionSpec


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    module = importlib.import_module("bench.kernels")
    monkeypatch.setattr(module._harness, "RESULTS", tmp_path)
    return module


def record(kernels, cell, direction, **tflops):
    shape = vars(kernels.grid()[cell])
    intensity = 30 if "block" in cell else 700
    return {
        "config": {"cell": cell, "direction": direction},
        "shape": dict(shape),
        "flops": intensity * 1e9,
        "bytes": 1e9,
        "tflops": {"cublas-8192": 700.0, **{k.replace("_", "-"): v for k, v in tflops.items()}},
        "machine": {"gpu": "a GPU"},
        "versions": {"torch": "2.11", "triton": "3.6"},
    }


@pytest.fixture
def records(kernels):
    return [
        record(kernels, "gdpa-jagged", "forward", gemopt=540.0, flash_2_varlen=298.0),
        record(kernels, "gdpa-jagged", "backward", gemopt=397.0, flash_2_varlen=261.0, gemopt_deterministic=330.0),
        record(kernels, "block-64", "forward", gemopt=113.0),
        record(kernels, "hstu", "forward", gemopt=507.0, someone_else=300.0),
    ]


def test_pictures(kernels, records, tmp_path, capsys):
    results = tmp_path / "kernels-a-gpu.json"
    results.write_text(json.dumps({"bench": "kernels", "records": records}))
    kernels.main(["--plot-only", "--plots", str(tmp_path / "docs")])
    pictures = [tmp_path / "docs" / name for name in ("kernels.png", "roofline.png")]
    assert capsys.readouterr().out.split() == [str(picture) for picture in pictures]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    (tmp_path / "kernels-another.json").write_text("{}")
    with pytest.raises(SystemExit, match="needs a path, 2 files"):
        kernels.main(["--plot-only"])


def test_what_pictures_say(kernels, records):
    plots = kernels._kernel_plots
    assert list(plots.colours(records)) == ["gemopt", "gemopt-deterministic", "flash-2-varlen", "someone-else"]
    assert list(plots.by_cell(records)) == ["gdpa-jagged", "hstu", "block-64"], "D = 128 first"
    assert plots.describe(vars(kernels.grid()["gdpa-pffn"])) == "GELU, 2048 over 256"
    assert plots.describe(vars(kernels.grid()["hstu"])) == "SiLU, 2048, causal"
    assert plots.describe(vars(kernels.grid()["block"])) == "softmax, U[1..2048], blocks of 64"
    assert plots.bandwidth(records) == plots.ASSUMED_TB_S
    assert plots.bandwidth([{**r, "terabytes_per_second": {"copy-1gib": 4.1}} for r in records]) == 4.1


def test_records_have_both_ceilings(kernels, data, monkeypatch, capsys):
    times = {"cublas-8192": [1.0, 2.0], "gemopt": [0.5, 0.5], "copy-1gib": [1.0, 1.0]}
    monkeypatch.setattr(kernels, "draw", lambda cell: data)
    monkeypatch.setattr(kernels, "contestants", lambda *_: {"gemopt": {"forward": None, "backward": None}})
    monkeypatch.setattr(kernels, "measure", lambda runs, *_: ({name: times[name] for name in runs}, [], []))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    forward, backward = kernels.run_cell("hstu", kernels.grid()["hstu"], [], 1.0, 2)
    assert set(forward["tflops"]) == {"cublas-8192", "gemopt"} and set(forward["milliseconds"]) == set(times)
    assert forward["tflops"]["cublas-8192"] == pytest.approx(2 * 8192**3 / 1.5e9, abs=0.1)
    assert forward["terabytes_per_second"] == backward["terabytes_per_second"] == {"copy-1gib": 2.147}
    assert kernels._kernel_plots.bandwidth([forward, backward]) == 2.147
    assert "copy" not in capsys.readouterr().out, "no contestant"


@pytest.mark.parametrize("breaks, code", [("someone-else", 0), ("gemopt", 1)])
def test_one_that_fails_is_recorded_and_the_others_go_on(kernels, data, monkeypatch, capsys, breaks, code):
    calls = []

    def peer(cell, data):
        raise KeyError("no such shape")

    def source(name):
        return lambda cell, data: {name: {"forward": lambda: name, "backward": lambda: name}}

    def timed(run, milliseconds):
        calls.append(who := run())
        if who == breaks and calls.count(who) > 2:  # a warm-up and the first round
            raise RuntimeError("retain_graph=True\nand more")
        return 1.0

    monkeypatch.setattr(kernels, "draw", lambda cell: data)
    monkeypatch.setattr(kernels, "ours", source("gemopt"))
    monkeypatch.setattr(kernels, "flash", source("flash-2-varlen"))
    monkeypatch.setattr(kernels, "load_peer", lambda path: peer if path == "bad" else source("someone-else"))
    monkeypatch.setattr(kernels, "graphed", lambda run: (run, True))
    monkeypatch.setattr(kernels, "timed", timed)
    monkeypatch.setattr(kernels, "board", lambda: "")
    monkeypatch.setattr(kernels, "plot", lambda *_: None)
    monkeypatch.setattr(kernels._harness, "machine", lambda device: {"gpu": "a GPU"})
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.eye(2))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.eye(2))
    arguments = ["--cells", "hstu,window", "--peers", "none", "--peer", "bad", "--peer", "good", "--milliseconds", "1"]
    assert kernels.main(arguments) == code
    (path,) = kernels._harness.RESULTS.glob("kernels-*.json")
    records = json.loads(path.read_text())["records"]
    assert len(records) == 4
    for record in records:
        assert record["failed"]["peer"] == "KeyError: 'no such shape'"
        assert record["failed"][breaks] == "RuntimeError: retain_graph=True"
        assert set(record["tflops"]) == {"cublas-8192", "gemopt", "flash-2-varlen", "someone-else"} - {breaks}
    assert ("window backward: gemopt" in capsys.readouterr().err) == bool(code)


def test_without_a_yardstick_nothing_is_measured(kernels):
    with pytest.raises(ZeroDivisionError):
        kernels.attempt("cublas-8192", lambda: 1 / 0, {})


LENGTHS = [5, 3, 9]


@pytest.fixture
def data(kernels):
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    spec = AttentionSpec(
        offsets, offsets, 9, 9, 0.3, True, False, (-1, -1), None, None, 0.0, None, activations=("silu",)
    )  # fmt: skip
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sum(LENGTHS), 2, 16) for _ in range(4))
    return kernels.Data(q, k, v, dout, spec, LENGTHS, LENGTHS)


@pytest.fixture
def stand_in(monkeypatch):
    """A module of the package's name whose attention is plain torch; `seen` has the arguments of its calls."""

    def triton_hstu_mha(*, N, alpha, q, k, v, seq_offsets, sort_by_length, enable_tma):
        hstu.seen.append((N, alpha, sort_by_length, enable_tma))
        ends = seq_offsets.tolist()
        outputs = []
        for start, end in pairwise(ends):
            scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end]) * alpha
            outputs.append(
                torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores).tril() / hstu.divisor, v[start:end])
            )
        return torch.cat(outputs)

    names = ["generative_recommenders", "generative_recommenders.ops", "generative_recommenders.ops.triton"]
    package, ops, triton = (ModuleType(name) for name in names)
    hstu = SimpleNamespace(
        triton_hstu_mha=triton_hstu_mha, seen=[], divisor=9.0, _hstu_attn_fwd=SimpleNamespace(keys=["H"]),
        _hstu_attn_bwd=SimpleNamespace(keys=["H"]),
    )  # fmt: skip
    package.common = SimpleNamespace(set_use_runtime_max_seq_len=lambda on: None)
    package.ops, ops.triton, triton.triton_hstu_attention = ops, triton, hstu
    for name, module in zip(names, (package, ops, triton), strict=True):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return hstu


PEER = "bench/peers/generative_recommenders.py"


def test_peer_computes_its_cells(kernels, data, stand_in):
    contestants = kernels.load_peer(str(kernels._harness.ROOT / PEER))
    cell = kernels.Cell(("U", 9), act="silu", causal=True, heads=2, dim=16, batch=3)
    (runs,) = contestants(cell, data).values()
    assert set(stand_in.seen) == {(9, 0.3, True, False)}, "longest first, and no descriptors without a Hopper GPU"
    assert stand_in._hstu_attn_bwd.keys == ["H", "ENABLE_TMA"]
    assert runs["forward"]().shape == data.v.shape
    assert [g.shape for g in runs["backward"]()] == [data.q.shape, data.k.shape, data.v.shape]


def test_peer_that_differs_is_left_out(kernels, data, stand_in, capsys):
    stand_in.divisor = 10.0
    contestants = kernels.load_peer(str(kernels._harness.ROOT / PEER))
    assert contestants(kernels.Cell(9, act="silu", causal=True, dim=16), data) == {}
    assert "left out (RuntimeError: its output of sequence 0 differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"act": "softmax"},
        {"act": "gelu"},
        {"causal": False},
        {"window": (50, 50)},
        {"block": 64},
        {"op": "pffn"},
        {"dim": 96},
    ],
)
def test_peer_refuses_other_cells(kernels, data, stand_in, change):
    contestants = kernels.load_peer(str(kernels._harness.ROOT / PEER))
    cell = kernels.Cell(**{**vars(kernels.grid()["hstu"]), **change})
    assert contestants(cell, data) == {} and stand_in.seen == []


def test_peer_refuses_other_keys(kernels, data, stand_in):
    contestants = kernels.load_peer(str(kernels._harness.ROOT / PEER))
    data.k_lens = [2, 3, 9]
    assert contestants(kernels.grid()["hstu"], data) == {} and stand_in.seen == []


def test_peer_without_its_package(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "generative_recommenders", None)
    with pytest.raises(SystemExit, match=r"on PYTHONPATH, see bench/peers/README\.md"):
        kernels.load_peer(str(kernels._harness.ROOT / PEER))


@pytest.mark.parametrize("mixed", [False, True])
def test_contestants_of_the_block_agree(kernels, data, monkeypatch, mixed):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    low = [x.bfloat16() for x in (data.q, data.k, data.v, data.dout)]
    found = kernels._pffn(kernels.Data(*low, data.spec, LENGTHS, LENGTHS), mixed)
    outs = {name: ways["forward"]() for name, ways in found.items()}
    close = {"rtol": 0.02, "atol": 0.02 if mixed else 0.06}
    for name, out in outs.items():
        assert out.dtype == (torch.float32 if mixed else torch.bfloat16)
        torch.testing.assert_close(out, outs["gemopt"], **close)
        for got, want in zip(found[name]["backward"](), found["gemopt"]["backward"](), strict=True):
            assert (got - want).norm() <= 0.02 * want.norm()
