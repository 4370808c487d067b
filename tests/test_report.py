"""The report: records, totals, text, JSON, HTML, and graphs as Python that runs."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
import threading
from html.parser import HTMLParser
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gemopt.report import Change, Cost, GraphReport, Rejection, Report, Rewrite
from gemopt.report.html import pass_views
from gemopt.report.source import MAX_LITERAL, readable
from gemopt.report.text import change_text, plain, si

VOID = {"meta", "rect", "br", "link", "img"}


def filled() -> Report:
    report = Report("SequenceCTR")
    graph = report.new_graph("main")
    graph.rewrite(
        "layers.0.attention",
        "softmax-attention",
        kernel="jagged_attention",
        source="model.py:42",
        before="softmax(q kᵀ) v",
        after="jagged_attention(q, k, v, offsets)",
        assumptions=["0 <= lengths <= 200", "a < b & <i>tags</i>"],
        exactness="same up to rounding",
        verified=True,
        reason="masked keys weigh nothing",
    )
    graph.rewrite("mlp", "unpad-region", exactness="exact")
    graph.reject(
        "pool",
        "unpad",
        reason="output 'hidden' keeps all rows",
        hint="return the pool",
        node="add_7",
        source="m.py:7",
    )
    graph.row_set("events", "pos < lengths[b]")
    graph.set_cost(
        flops_before="B*L*100",
        flops_after="T*100",
        bytes_before="B*L*4",
        bytes_after="T*4",
        symbols={"B": "batch size", "T": "valid positions"},
        bind=lambda lengths: {"B": len(lengths), "T": sum(lengths)},
    )
    graph.saw({"B": 2, "L": 10, "T": 5})
    graph.count_step(True)
    graph.count_step(False, "fill 0.97")
    graph.count_step(False, "fill 0.97")
    report.new_graph("main", "inference").nothing("no mask over a token axis")
    return report


# ---- records and totals ----


def test_records_keep_order_and_are_frozen() -> None:
    report = filled()
    assert [r.site for r in report.rewrites] == ["layers.0.attention", "mlp"]
    assert report.rewrites[0].assumptions == ("0 <= lengths <= 200", "a < b & <i>tags</i>")
    assert report.rejections == (
        Rejection("pool", "unpad", "m.py:7", "output 'hidden' keeps all rows", "return the pool", "add_7"),
    )
    with pytest.raises(AttributeError):
        report.rewrites[0].site = "x"  # type: ignore[misc]
    assert [g.name for g in report] == ["main", "main.2"]
    assert len(report) == 2 and report[1].mode == "inference"


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode .*'train', 'inference'.*got 'eval'"):
        Report().new_graph("g", mode="eval")


def test_an_empty_report_is_truthy_and_says_what_to_do() -> None:
    report = Report()
    assert report and len(report) == 0
    assert "Call the model once" in str(report) and "Call the model once" in report.to_html()
    assert report.flops is None and report.bytes is None


def test_costs_at_the_last_step_seen() -> None:
    report = filled()
    assert report.flops == Change(2000.0, 500.0) and report.bytes == Change(80.0, 20.0)
    assert report.flops.ratio == 4.0 and report.flops.saved == 1500.0
    report[0].saw({"T": 20})
    assert report.flops == Change(2000.0, 2000.0)


def test_costs_at_given_values_and_lengths() -> None:
    report = filled()
    flops, moved = report.evaluate(T=10) or pytest.fail("no cost")
    assert flops == Change(2000.0, 1000.0) and moved == Change(80.0, 40.0)
    flops, _ = report.evaluate(lengths=[1, 2, 3]) or pytest.fail("no cost")
    assert flops == Change(3000.0, 600.0)  # B = 3, T = 6, L = 10 as last seen
    flops, _ = report[0].evaluate([0]) or pytest.fail("no cost")
    assert flops == Change(1000.0, 0.0) and flops.ratio == float("inf")


def test_totals_add_graphs_and_skip_those_without_a_cost() -> None:
    report = filled()
    second = report.new_graph("other")
    second.set_cost(flops_before="n*3", flops_after="n")
    assert report.flops == Change(2000.0, 500.0)  # n is not known yet
    second.saw({"n": 10})
    assert report.flops == Change(2030.0, 510.0)


def test_missing_values_are_named() -> None:
    graph = Report().new_graph()
    assert graph.evaluate() is None
    graph.set_cost(flops_before="B*L", flops_after=0)
    assert graph.evaluate() is None
    with pytest.raises(ValueError, match=r"flops_before needs values for \['L'\]"):
        graph.evaluate(B=2)
    with pytest.raises(ValueError, match=r"no binding for \['lengths'\]"):
        graph.evaluate(lengths=[1])


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["S", "N", "E", "I", "Q", "O", "T", "s0", "zoo"]),
)
def test_formulas_survive_json_whatever_their_symbols_are_called(a: int, b: int, name: str) -> None:
    x = sympy.Symbol(name, integer=True, positive=True)  # sympify would read S, N, E, I, Q, O as its own objects
    cost = Cost.of(flops_before=a * x**2 + b, flops_after=sympy.floor(x / 2), bytes_before=sympy.Max(x, 3))
    back = Cost.from_dict(json.loads(json.dumps(cost.to_dict())))
    at = {name: 7.0}
    assert back.flops(at) == cost.flops(at) == Change(a * 49 + b, 3)
    assert back.bytes(at) == Change(7, 0)


def test_verification_replaces_the_record() -> None:
    report = filled()
    marked = report[0].verify(report.rewrites[1], False)
    assert marked.verified is False and report.rewrites[1] == marked
    assert "FAILED VERIFICATION" in str(report)
    with pytest.raises(ValueError, match="not in graph"):
        report[0].verify(Rewrite("elsewhere", "rule"), True)


def test_steps_and_reasons() -> None:
    report = filled()
    assert report.steps_packed == 1 and report.steps_padded == {"fill 0.97": 2}
    assert "1 step packed, 2 padded (fill 0.97, 2 times)" in str(report)


def test_nothing_to_rewrite_is_one_clear_sentence() -> None:
    report = Report()
    report.new_graph("a").nothing("it has no mask over a token axis")
    report.new_graph("b")
    report.new_graph("c").reject("pool", "unpad", reason="all rows are returned")
    text = str(report)
    assert "a runs exactly as under torch.compile: it has no mask over a token axis." in text
    assert "b runs exactly as under torch.compile: no padding" in text
    assert "c runs exactly as under torch.compile: every site" in text
    assert filled()[0].plain_sentence() is None


def test_appends_from_many_threads_are_all_kept() -> None:
    report = Report()
    graph = report.new_graph()

    def work(i: int) -> None:
        for j in range(200):
            graph.rewrite(f"{i}.{j}", "rule")
            graph.count_step(j % 2 == 0, "odd")
        report.new_graph()

    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(previous)
    assert len(set(graph.rewrites)) == 1600
    assert graph.steps_packed == 800 and graph.steps_padded == {"odd": 800}
    assert len({g.name for g in report}) == 9


def test_copies_are_independent_and_usable() -> None:
    report = filled()
    for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other.to_dict() == report.to_dict()
        other[0].count_step(True)
        other[0].rewrite("new", "rule")
    assert report.steps_packed == 1 and len(report.rewrites) == 2
    deep = copy.deepcopy(report)
    assert deep.evaluate(lengths=[1]) == report.evaluate(lengths=[1])


# ---- text, JSON, HTML ----


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.7, "1 kB"),
        (1234, "1.23 kB"),
        (12345678, "12.3 MB"),
        (2e15, "2 PB"),
    ],
)
def test_si(value: float, text: str) -> None:
    assert si(value, "B") == text


def test_change_text() -> None:
    assert change_text(Change(3e9, 1e9), "FLOP") == "3 GFLOP -> 1 GFLOP (3.00x less)"
    assert "2.00x more" in change_text(Change(1, 2), "B")
    assert "the same" in change_text(Change(0, 0), "B")


def test_print_says_the_same_with_and_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = filled()
    monkeypatch.setenv("COLUMNS", "200")
    report.print()
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.print()
    assert capsys.readouterr().out == plain(report) + "\n"
    assert re.sub(r"\s+", " ", with_rich) == re.sub(r"\s+", " ", plain(report) + "\n")
    assert "[node add_7]" in with_rich  # brackets are text, no markup


def test_json_round_trip(tmp_path: Any) -> None:
    report = filled()
    path = report.save_json(tmp_path / "deep" / "report.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["schema"], data["schema_version"]) == ("gemopt-report", 1)
    assert data["summary"]["flops"] == {"before": 2000.0, "after": 500.0}
    assert data["summary"]["steps"] == {"packed": 1, "padded": {"fill 0.97": 2}}
    back = Report.load_json(path)
    assert back.to_dict() == report.to_dict() and str(back) == str(report)


@pytest.mark.parametrize("data", [{}, {"schema": "other", "schema_version": 1}, {"schema": "gemopt-report"}])
def test_other_json_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a report this version reads"):
        Report.from_dict(data)
    with pytest.raises(ValueError, match="up to version 1"):
        Report.from_dict({"schema": "gemopt-report", "schema_version": 2, "graphs": []})


class _Balanced(HTMLParser):
    """Collects the tags that stay open, and everything that would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.external: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.external += [v for k, v in attrs if k in ("src", "href") or "//" in (v or "")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_whole_escaped_and_self_contained(tmp_path: Any) -> None:
    report = filled()
    gm = traced()
    for name in ("capture", "canonicalise"):
        report[0].record_graph(name, gm)
    report[0].record_graph("unpad", traced(scale=2.0))
    page = report.to_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page
    parser = _Balanced()
    parser.feed(page)
    assert parser.stack == [] and parser.external == [] and "<script" not in page
    text = " ".join(" ".join(parser.text).split())
    for expected in (
        "SequenceCTR",
        "a < b & <i>tags</i>",
        "jagged_attention",
        "return the pool",
        "4.00x less",
        "runs exactly as under torch.compile: no mask over a token axis.",
        "T = 5",
        "unchanged",
        "batch size",
    ):
        assert expected in text, expected
    assert "<i>tags" not in page


def test_diffs_between_passes_show_the_change_alone() -> None:
    graph = GraphReport("g")
    graph.record_graph("capture", traced())
    graph.record_graph("same", traced())
    graph.record_graph("scaled", traced(scale=3.0))
    capture, same, scaled = pass_views(graph)
    assert capture.ops > 0 and capture.diff == () and same.diff == ()
    assert scaled.added == 1 and scaled.removed == 1
    assert any(line.kind == "add" and "3.0" in line.text for line in scaled.diff)


def test_missing_jinja_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"gemopt\[report\]"):
        filled().to_html()


# ---- graphs as Python ----


def run(code: str, class_name: str, *inputs: Any) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(code, "<graph>", "exec"), scope)
    return scope[class_name]()(*inputs)


def attention(x: torch.Tensor, w: torch.Tensor, lengths: torch.Tensor, scale: float) -> torch.Tensor:
    mask = torch.arange(x.size(1)) < lengths[:, None]
    h = F.linear(x, w)
    s = (h @ h.transpose(-1, -2)) / scale
    s = s.masked_fill(~mask[:, None, :], float("-inf"))
    return ((torch.softmax(s, -1) @ h) * mask[..., None]).to(torch.float64).sum(1)


def traced(scale: float = 8.0) -> fx.GraphModule:
    example = (torch.randn(3, 5, 8), torch.randn(8, 8), torch.tensor([1, 2, 5]))
    return make_fx(lambda *a: attention(*a, scale), tracing_mode="symbolic", pre_dispatch=True)(*example)


def test_recorded_graph_runs_and_computes_the_same() -> None:
    report = Report()
    report.new_graph().record_graph("capture", traced())
    code = report.graph("capture")
    assert code.startswith("# graph after capture: ") and "Written by gemopt" in code
    inputs = (torch.randn(4, 7, 8), torch.randn(8, 8), torch.tensor([7, 1, 3, 2]))  # other sizes than traced
    torch.testing.assert_close(run(code, "capture", *inputs), attention(*inputs, 8.0), rtol=0, atol=0)


def test_graph_names_errors() -> None:
    report = Report()
    with pytest.raises(ValueError, match="index 0 is out of range: the report has 0"):
        report.graph("unpad")
    graph = report.new_graph()
    graph.record_graph("unpad", traced())
    graph.record_graph("unpad", traced())
    assert list(graph.graphs) == ["unpad", "unpad.2"]
    assert report.graph("unpad.2") and report.graph("unpad", index=-1)
    with pytest.raises(ValueError, match=r"'lower'; recorded: \['unpad', 'unpad.2'\]"):
        report.graph("lower")


def test_small_constants_are_written_out_and_large_ones_replaced() -> None:
    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = torch.nn.Parameter(torch.tensor([[1.5, float("-inf")], [float("nan"), 2.0]]))
            self.inner = torch.nn.Module()
            self.inner.large = torch.nn.Parameter(torch.randn(MAX_LITERAL + 1, dtype=torch.float64))
            self.inner.flags = torch.tensor([True, False])

    graph = fx.Graph()
    nodes = [graph.get_attr(name) for name in ("small", "inner.large", "inner.flags")]
    graph.output(tuple(nodes))
    code = readable(fx.GraphModule(Root(), graph), "constants", "Graph")
    small, large, flags = run(code, "Graph")
    assert torch.equal(small.nan_to_num(9.0), torch.tensor([[1.5, float("-inf")], [9.0, 2.0]]).nan_to_num(9.0))
    assert large.shape == (MAX_LITERAL + 1,) and large.dtype == torch.float64 and "stand-in" in code
    assert flags.tolist() == [True, False]


def test_nested_graphs_autocast_and_grad_switches_run() -> None:
    from torch.utils.checkpoint import checkpoint

    captured: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        captured.append(copy.deepcopy(gm))
        return gm

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(lambda t: torch.relu(t @ t), x, use_reentrant=False)
        with torch.no_grad():
            z = y * 2
        return z + y

    x = torch.randn(3, 3)
    torch.compile(model, backend=backend)(x)
    code = readable(captured[0], "with checkpoint", "class")  # a keyword is no class name
    (result,) = run(code, "_class", x)
    torch.testing.assert_close(result, model(x), rtol=0, atol=0)
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:Raw SymInt")  # the case under test: a pass that leaves one bare
def test_bare_size_symbols_are_defined() -> None:
    gm = traced()
    size = next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].shape[1]
    softmax = next(n for n in gm.graph.nodes if "softmax" in n.name)
    with gm.graph.inserting_after(softmax):
        bare = gm.graph.call_function(torch.ops.aten.new_zeros.default, (softmax, [size + 1, 2]))
    gm.graph.output_node().args = (bare,)
    code = readable(gm, "bare")
    result = run(code, "Graph", torch.randn(2, 9, 8), torch.randn(8, 8), torch.tensor([1, 2]))
    assert result.shape == (10, 2)


def test_functions_from_other_modules_are_imported() -> None:
    import math
    import operator

    graph = fx.Graph()
    x = graph.placeholder("x")
    root = graph.call_function(math.sqrt, (x,))
    pair = graph.call_function(operator.mul, (root, 3))
    graph.output(graph.call_function(max, (pair, 1)))
    code = readable(fx.GraphModule({}, graph), "scalars")
    assert run(code, "Graph", 16.0) == 12.0


def test_what_cannot_be_printed_comes_back_as_comments() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<odd thing>"

    graph = fx.Graph()
    x = graph.placeholder("x")
    bad = graph.call_function(torch.relu, (x,))
    graph.output(bad)
    bad.kwargs = {"inplace": slice(Odd(), None)}  # type: ignore[dict-item]
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
    gm.graph._codegen, gm._graph = graph._codegen, graph  # the setter would already fail to print
    code = readable(gm, "odd")
    compile(code, "<odd>", "exec")
    assert "# This graph has no valid Python form" in code and "<odd thing>" in code
