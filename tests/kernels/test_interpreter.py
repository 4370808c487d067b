"""Runs the Triton kernel tests under Triton's interpreter, in a process of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [["test_triton_attention.py"], ["test_blocks.py", "test_tiles.py", "test_split.py"]]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_under_the_interpreter(files: list[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "GEMOPT_FORCE_TRITON": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not gpu",
            "-p",
            "no:cacheprovider",
            *(str(Path(__file__).parent / file) for file in files),
        ],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
