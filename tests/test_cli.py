"""The command line: targets, outputs, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemopt
from gemopt import cli
from gemopt.report import Report

FACTORY = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2

def make():
    return Model(), (torch.ones(2),)

def keywords():
    return Model(), {"x": torch.ones(2)}

def lone():
    return Model(), torch.ones(2)

def triple():
    return Model(), (), ()

def backwards():
    return (torch.ones(2),), Model()

constant = 3
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module `factory_under_test` in the current folder."""
    (tmp_path / "factory_under_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield "factory_under_test"
    sys.modules.pop("factory_under_test", None)


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replaces gemopt.explain; holds the arguments of every call."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
        calls.append((args, kwargs))
        report = Report("explained")
        graph = report.new_graph("main")
        graph.rewrite("attention", "softmax-attention", kernel="jagged_attention")
        graph.record_graph("unpad", torch.fx.symbolic_trace(model))
        return report

    monkeypatch.setitem(vars(gemopt), "explain", explain)
    return calls


@pytest.mark.parametrize("form", ["{}:make", "{}.py:make"])
def test_inspect_prints_the_report(target: str, explained: list[Any], capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert cli.main(["inspect", form.format(target)]) == 0
    output = capsys.readouterr().out
    assert "gemopt on explained" in output and "jagged_attention" in output
    ((args, kwargs),) = explained
    assert torch.equal(args[0], torch.ones(2)) and kwargs == {}


def test_inputs_may_be_keywords_or_one_tensor(target: str, explained: list[Any]) -> None:
    assert cli.main(["inspect", f"{target}:keywords"]) == 0 and cli.main(["inspect", f"{target}:lone"]) == 0
    assert set(explained[0][1]) == {"x"} and explained[0][0] == ()
    assert len(explained[1][0]) == 1 and isinstance(explained[1][0][0], torch.Tensor)


def test_inspect_writes_json_and_html(target: str, explained: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", f"{target}:make", "--json", "out/r.json", "--html", "out/r.html"]) == 0
    assert Report.load_json("out/r.json").rewrites[0].site == "attention"
    assert "</html>" in Path("out/r.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["inspect", f"{target}:make", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["rewrites"] == 1


def test_inspect_prints_one_graph(target: str, explained: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", f"{target}:make", "--graph", "unpad"]) == 0
    compile(capsys.readouterr().out, "<graph>", "exec")
    assert cli.main(["inspect", f"{target}:make", "--graph", "lower"]) == 2
    assert "recorded: ['unpad']" in capsys.readouterr().err
    assert cli.main(["inspect", f"{target}:make", "--graph", "unpad", "--index", "3"]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "expected MODULE:CALLABLE"),
        (":make", "expected MODULE:CALLABLE"),
        ("no_such_module_anywhere:make", "no module"),
        ("no_such_file.py:make", "no file"),
        ("factory_under_test:missing", "has no 'missing'"),
        ("factory_under_test:constant", "is a int, not a function"),
        ("factory_under_test:triple", "returned 3 values; expected (model, inputs)"),
        ("factory_under_test:backwards", "expected (model, inputs)"),
    ],
)
def test_bad_targets_say_what_is_allowed(target: str, capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    assert cli.main(["inspect", given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemopt inspect: target: ") and message in error


def test_a_missing_import_inside_the_target_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_target.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        cli.main(["inspect", "broken_target:make"])


def test_verify_reports_and_exits_by_result(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []

    def agrees(model: Any, inputs: Any, **kwargs: Any) -> str:
        seen.append((inputs, kwargs))
        return "2 outputs agree"

    fake = types.ModuleType("gemopt.testing")
    fake.assert_equivalent = agrees  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gemopt.testing", fake)
    assert cli.main(["verify", f"{target}:make", "--seed", "3"]) == 0
    assert cli.main(["verify", f"{target}:keywords", "--inner", "eager"]) == 0
    assert "2 outputs agree" in capsys.readouterr().out
    assert isinstance(seen[0][0], tuple) and seen[0][1] == {"seed": 3, "inner": "aot_eager"}
    assert set(seen[1][0]) == {"x"} and seen[1][1] == {"seed": 0, "inner": "eager"}

    def differs(model: Any, inputs: Any, **kwargs: Any) -> None:
        raise AssertionError("output 0 differs by 3 ulp")

    fake.assert_equivalent = differs  # type: ignore[attr-defined]
    assert cli.main(["verify", f"{target}:make"]) == 1
    assert "differs by 3 ulp" in capsys.readouterr().out


def test_train_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    fake = types.ModuleType("gemopt.model_zoo.train")
    fake.main = lambda argv: seen.append(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gemopt.model_zoo.train", fake)
    assert cli.main(["train", "--help", "--steps", "3"]) == 0
    assert seen == [["--help", "--steps", "3"]]


def test_version_and_help_load_nothing_heavy() -> None:
    code = "import sys; from gemopt import cli; cli.main(['version']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"gemopt {gemopt.__version__}" and lines[-1] == "False"
    assert any(line.startswith("torch 2.") for line in lines)


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2 and "COMMAND" in capsys.readouterr().err
