"""The package as installed: one top-level name, data files, and peace with packages that claim `passes`."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("gemopt", "passes", "model_zoo", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
CLAIMED = ("model_zoo", "passes", "tests")


def python(code: str, path: Path, cwd: Path) -> str:
    """Run code in a fresh interpreter whose first import path is ``path``; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept: no build output of the working tree leaks in or stays behind."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source distribution: what that lacks, the wheel lacks."""
    dist = tmp_path_factory.mktemp("dist")
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(dist)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (sdist,) = dist.glob("gemopt-*.tar.gz")
    pip("wheel", sdist, "--no-deps", "--no-build-isolation", "-w", dist)
    (built,) = dist.glob("gemopt-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gemopt and, installed into it first, a distribution that claims the bare names."""
    target = tmp_path_factory.mktemp("site")
    other = tmp_path_factory.mktemp("other")
    pip("install", "--no-deps", "--target", target, rival(other))
    pip("install", "--no-deps", "--target", target, wheel)
    return target


def rival(folder: Path) -> Path:
    """A wheel with top-level `model_zoo`, `passes` and `tests`, as FuxiCTR's has two of them."""
    path = folder / "rival-1.0-py3-none-any.whl"
    info = "rival-1.0.dist-info"
    files = {f"{name}/__init__.py": f"OWNER = 'rival {name}'\n" for name in CLAIMED}
    files["model_zoo/sasrec.py"] = "OWNER = 'rival sasrec'\n"
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheel_installs_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gemopt", "gemopt-0.1.0.dist-info"}


def test_wheel_holds_every_source_file_and_the_templates(checkout: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"gemopt/py.typed", "gemopt/report/templates/report.html.jinja"}
    for top in ("gemopt", "passes", "model_zoo"):
        prefix = "" if top == "gemopt" else "gemopt/"
        wanted |= {prefix + str(path.relative_to(checkout)) for path in (checkout / top).rglob("*.py")}
    assert wanted - names == set()
    assert "gemopt/passes/__init__.py" in names and "gemopt/model_zoo/__init__.py" in names


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read("gemopt-0.1.0.dist-info/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    core = [r.replace(" ", "") for r in metadata.get_all("Requires-Dist", []) if "extra" not in r]
    assert sorted(r.split(";")[0].split(">")[0].split("<")[0] for r in core) == [
        "networkx",
        "sympy",
        "torch",
        "triton",
    ]
    assert any("triton" in r and 'platform_system=="Linux"' in r.replace("'", '"') for r in core)
    extras = {"data", "public", "report", "test", "torchrec", "torchrec-cpu"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    entry_points = archive.read("gemopt-0.1.0.dist-info/entry_points.txt").decode()
    assert "gemopt = gemopt.cli:main" in entry_points
    assert "[gemopt.pipelines]\ndefault = gemopt.passes:default_pipeline" in entry_points
    assert b"Apache License" in archive.read("gemopt-0.1.0.dist-info/licenses/LICENSE")


def test_both_distributions_import_side_by_side(installed: Path, tmp_path: Path) -> None:
    code = (
        "import gemopt.passes, gemopt.model_zoo, model_zoo, model_zoo.sasrec, passes, tests;"
        "print(gemopt.passes.__file__, gemopt.model_zoo.__file__,"
        " model_zoo.OWNER, model_zoo.sasrec.OWNER, passes.OWNER, tests.OWNER, sep='\\n')"
    )
    lines = python(code, installed, tmp_path).splitlines()
    assert lines[0] == str(installed / "gemopt" / "passes" / "__init__.py")
    assert lines[1] == str(installed / "gemopt" / "model_zoo" / "__init__.py")
    assert lines[2:] == ["rival model_zoo", "rival sasrec", "rival passes", "rival tests"]
    assert not (installed / "gemopt" / "passes").is_symlink()


def test_installed_report_finds_its_template(installed: Path, tmp_path: Path) -> None:
    code = "import gemopt; gemopt.Report('x').to_html('r.html'); print(gemopt.__file__)"
    assert python(code, installed, tmp_path) == str(installed / "gemopt" / "__init__.py")
    assert "</html>" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_plain_checkout_imports_without_install(checkout: Path, tmp_path: Path) -> None:
    code = "import gemopt.passes as p, gemopt.model_zoo as m; print(p.__file__, m.__file__, sep='\\n')"
    assert python(code, checkout, tmp_path).splitlines() == [
        str(checkout / "gemopt" / "passes" / "__init__.py"),
        str(checkout / "gemopt" / "model_zoo" / "__init__.py"),
    ]


def test_links_are_relative_and_point_at_the_folders_at_the_top() -> None:
    for name in ("passes", "model_zoo"):
        link = ROOT / "gemopt" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}"


def test_importing_gemopt_is_cheap(checkout: Path, tmp_path: Path) -> None:
    code = (
        "import sys, gemopt; gemopt.__version__; dir(gemopt); gemopt.Report;"
        "print([m for m in ('torch', 'triton', 'sympy', 'networkx', 'jinja2', 'rich') if m in sys.modules])"
    )
    assert python(code, checkout, tmp_path) == "[]"


def test_no_source_imports_the_bare_names() -> None:
    """`import passes` would work in a checkout and break where it is installed."""
    bare = tuple(f"{verb} {name}{end}" for verb in ("import", "from") for name in CLAIMED[:2] for end in (" ", ".", "\n"))
    for top in ("gemopt", "passes", "model_zoo", "bench", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not f"{line.strip()}\n".startswith(bare), f"{path.relative_to(ROOT)}: {line}"


def test_public_names_load_on_first_use_and_others_do_not() -> None:
    import gemopt

    for name in gemopt.__all__:
        assert getattr(gemopt, name) is not None
    assert callable(gemopt.compile) and callable(gemopt.explain) and set(gemopt.__all__) <= set(dir(gemopt))
    with pytest.raises(AttributeError, match="no attribute 'complie'"):
        gemopt.complie  # type: ignore[attr-defined]
