"""Builds and loads the C++ kernels for this machine, once, with the C++ compiler that torch.compile needs on a CPU anyway.

The library lies in inductor's cache folder under a name that hashes the source, the flags, the compiler and the processor.
Without a compiler (or with GEMOPT_CPU_NATIVE=0) there is none, and attention runs on PyTorch's operators.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

FOLDER = Path(__file__).parent
SOURCES = ("attention.cpp", "pffn.cpp")
HEADERS = ("activations.h", "vectors.h")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast")
THREADS = "-fopenmp"  # left out where the compiler does not know it
log = logging.getLogger(__name__)


def _compiler() -> str | None:
    """CXX if set, else the first of g++, clang++, c++."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((found for name in names if (found := shutil.which(name))), None)


def _processor() -> str:
    """Something that differs between machines that run different instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), platform.machine())


def _native() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    sources = (str(FOLDER / name) for name in SOURCES)
    subprocess.run([compiler, *flags, *sources, "-o", str(library)], capture_output=True, text=True, check=True)


def build(compiler: str, machine: str) -> Path:
    """The library for the instructions that the flag `machine` names. Raises what a failed compiler run raises."""
    flags = [*FLAGS, THREADS, machine]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    key = "\0".join((*texts, *flags, compiler, version, _processor()))
    folder = Path(cache_dir()) / "gemopt"
    library = folder / f"attention-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            try:
                _compile(compiler, flags, made)
            except subprocess.CalledProcessError:
                _compile(compiler, [flag for flag in flags if flag != THREADS], made)
            os.replace(made, library)  # whole or not at all, whoever else builds it now
    return library


@cache
def has_threads() -> bool:
    """Whether the library has threads of its own (OpenMP), or else its caller has to bring them."""
    library = load()
    return library is not None and bool(library.gemopt_has_threads())


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None; it stays as it is for the life of the process."""
    if os.environ.get("GEMOPT_CPU_NATIVE") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        log.info("no C++ compiler: attention on the CPU runs on PyTorch's operators")
        return None
    try:
        return bind(build(compiler, _native()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("attention on the CPU runs on PyTorch's operators, for its own kernel did not build: %s", detail)
        return None


def bind(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions."""
    library = ctypes.CDLL(str(path))
    for name in ("gemopt_forward", "gemopt_backward", "gemopt_pffn_forward", "gemopt_pffn_backward"):
        getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.c_void_p, ctypes.c_int64], None
    return library
