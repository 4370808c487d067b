"""Shared by all tests: no state of torch.compile survives a test, and no cache survives the run."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

# Before torch is imported anywhere: compiled artifacts of this run stay in one temporary folder, which the
# workers of xdist inherit through the environment.
_OWNS_CACHE = "GEMOPT_TEST_CACHE" not in os.environ
if _OWNS_CACHE:
    os.environ["GEMOPT_TEST_CACHE"] = tempfile.mkdtemp(prefix="gemopt-test-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["GEMOPT_TEST_CACHE"], "inductor")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compiling processes for every worker is slower
os.environ["TRITON_CACHE_DIR"] = os.path.join(os.environ["GEMOPT_TEST_CACHE"], "triton")

import pytest  # noqa: E402
import torch  # noqa: E402


def _hypothesis_profiles() -> None:
    """`ci` draws the same few examples every time, `dev` new ones, `deep` many (HYPOTHESIS_PROFILE=deep)."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # a machine that only runs the GPU tests
        return
    quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    settings.register_profile("dev", max_examples=30, **quiet)
    settings.register_profile("ci", max_examples=15, derandomize=True, database=None, **quiet)
    settings.register_profile("deep", max_examples=500, **quiet)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


_hypothesis_profiles()


# Files with long lists of cases of one kind, of which a run of many tests takes half. A run of one file, or of the sweep
# (GEMOPT_TEST_SWEEP=1), takes all.
_LONG = frozenset(
    f"{folder}/test_{name}.py"
    for folder, names in {
        "graph": "capture facts",
        "hostile": "attention_layouts dtypes feature_orders intermediates lengths masks_as_numbers models "
        "reads_of_constants results_as_eager soundness state where_branches",
        "passes": "blocks by_head generated jagged norm_fusion recognise unpad",
    }.items()
    for name in names.split()
)
_MANY = 1000


def _in_the_other_half(item: pytest.Item) -> bool:
    name = item.nodeid.removeprefix("tests/")
    return name.split("::")[0] in _LONG and "[" in name and zlib.crc32(name.split("::", 1)[1].encode()) % 2 == 1


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWNS_CACHE and not os.environ.get("PYTEST_XDIST_WORKER"):
        shutil.rmtree(os.environ["GEMOPT_TEST_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Long ones first, so that no worker is left with one of them at the end while the other is idle.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if len(items) > _MANY and not os.environ.get("GEMOPT_TEST_SWEEP"):
        for item in filter(_in_the_other_half, items):
            item.add_marker(pytest.mark.skip(reason="half of a long list: set GEMOPT_TEST_SWEEP=1"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Same seed for every test; grad mode, default dtype and Dynamo's caches as at the start."""
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch._dynamo.reset()
