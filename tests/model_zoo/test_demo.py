"""The demo's own logic, with the compilers left out."""

import json

import pytest
import torch

from gemopt.model_zoo import demo, tasks
from gemopt.model_zoo.data import movielens

try:
    movielens.data_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

ARGUMENTS = [
    "--max-len",
    "6",
    "--steps",
    "3",
    "--long-max-len",
    "9",
    "--long-steps",
    "2",
    "--batch-size",
    "8",
]


class FakeReport:
    def to_dict(self):
        return {"rewrites": []}

    def to_html(self, path):
        path.write_text("<html>")


@pytest.fixture
def uncompiled(monkeypatch):
    """Both sides run eagerly; evaluation looks at a few samples."""

    def compiled(module, mode, dynamic=None):
        module.report = FakeReport()
        return module

    full = demo.evaluate_model
    monkeypatch.setattr(tasks, "compiled", compiled)
    monkeypatch.setattr(demo, "evaluate_model", lambda *arguments: full(*arguments, limit=50))


def test_demo_writes_its_files(uncompiled, tmp_path, capsys):
    assert demo.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "report.json").read_text())
    assert summary["largest_loss_difference"] == 0.0
    assert summary["metrics"]["compile"] == summary["metrics"]["gemopt"]
    assert [summary["speed"][n]["steps"] for n in ("6", "9")] == [3, 2]
    assert len(summary["losses"]["gemopt"]) == 4 + 3
    assert (tmp_path / "report.html").read_text() and (tmp_path / "step_time.png").stat().st_size > 10_000
    assert "calibration" in capsys.readouterr().out


def test_demo_fails_when_the_losses_part(uncompiled, tmp_path, monkeypatch, capsys):
    make = demo.make_sides

    def one_spoiled(*arguments):
        sides = make(*arguments)
        with torch.no_grad():
            sides["gemopt"].model.head[-1].bias += 1
        return sides

    monkeypatch.setattr(demo, "make_sides", one_spoiled)
    assert demo.main([*ARGUMENTS, "--long-steps", "0", "--out", str(tmp_path)]) == 1
    assert "losses part" in capsys.readouterr().out


def test_bad_arguments(capsys):
    assert demo.main(["--steps", "0"]) == 2
    assert "steps" in capsys.readouterr().err
