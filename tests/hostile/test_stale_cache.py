"""A pass or an op that the user changes between two runs is seen: no compiled artifact of the old one is met.

Both runs are processes of their own that share inductor's and AOTAutograd's cache directory, as two runs of a user's
training script do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .common import sweep

SCRIPT = """
import torch
import gemopt
import mypass
from torch._dynamo.utils import counters

torch.manual_seed(0)
torch.set_num_threads(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x, lengths):
        valid = torch.arange(x.size(1)) < lengths[:, None]
        y = torch.relu(self.linear(x)).masked_fill(~valid[..., None], 0.0).sum(1)
        return self.out(y)


model = Model()
x, lengths = torch.ones(6, 40, 8), torch.tensor([1, 2, 3, 1, 2, 4])
recipe = gemopt.Recipe(pipeline=mypass.pipeline, min_saving=0.0, strict=True, inner="inductor")
compiled = gemopt.compile(model, recipe=recipe)
out = compiled(x, lengths)
out.sum().backward()
ratio = (out / model(x, lengths)).mean().item()
hits = sum(n for name, n in counters["inductor"].items() if "cache_hit" in name)
hits += sum(n for name, n in counters["aot_autograd"].items() if "cache_hit" in name)
print("RESULT", round(ratio, 4), round(model.out.bias.grad.mean().item(), 4), compiled.report.steps_packed, hits)
"""

PASS = """
import myop
import torch
from gemopt.passes import default_pipeline


def pipeline(captured, recipe, report):
    plan = default_pipeline(captured, recipe, report)
    assert plan is not None, report
    graph = plan.packed.graph
    (output,) = graph.find_nodes(op="output")
    result = output.args[0][0]
    with graph.inserting_before(output):
        scaled = graph.call_function(torch.ops.stale_test.scale.default, (result,))
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (scaled, {factor}))
        scaled.meta.update(result.meta)
    output.args = ((scaled, *output.args[0][1:]),)
    plan.packed.recompile()
    return plan
"""

# The graph stays the same; what the op means changes: its source has to be in the key.
OP = """
import torch


@torch.library.custom_op("stale_test::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}


scale.register_fake(lambda x: torch.empty_like(x))
scale.register_autograd(lambda ctx, grad: grad * {factor})
"""


def run(folder: Path, cache: Path) -> list[float]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the two versions of a file may have one second's time stamp
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "main.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(x) for x in lines[0].split()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["pass", pytest.param("op", marks=sweep)])
def test_a_changed_pass_and_a_changed_op_are_seen(tmp_path, changed):
    """The pass takes another factor, or the op it calls another body and backward, under the same name and schema, while
    the pass and the graph stay."""
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "myop.py").write_text(OP.format(factor=5.0))
    steps = [
        (10.0, "mypass.py", PASS.format(factor=2.0)),
        (15.0, "mypass.py", PASS.format(factor=3.0)) if changed == "pass" else (14.0, "myop.py", OP.format(factor=7.0)),
    ]
    for factor, name, text in steps:
        (tmp_path / name).write_text(text)
        ratio, bias, packed, _ = run(tmp_path, tmp_path / "cache")
        assert packed == 1
        assert ratio == pytest.approx(factor, rel=1e-3), name
        assert bias == pytest.approx(6 * factor, rel=1e-3), name


@sweep
def test_the_caches_are_in_use(tmp_path):
    """An unchanged pass does meet the artifacts of the last run: without that, the test above shows nothing."""
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "myop.py").write_text(OP.format(factor=5.0))
    (tmp_path / "mypass.py").write_text(PASS.format(factor=2.0))
    assert [run(tmp_path, tmp_path / "cache")[3] > 0 for _ in range(2)] == [False, True]
