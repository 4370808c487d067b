"""Names of the custom ops: each carries a hash of the sources behind it.

AOTAutograd caches compiled graphs under a key that contains the *name* of a custom op but neither its kernel, its fake
nor its backward (pytorch#144344). An op that keeps its name across an edit therefore meets artifacts compiled for
the old formula. Every op name here ends in eight hex digits of a hash over all sources of `gemopt.ops` and
`gemopt.kernels`, so a changed source is a different op.
"""

import hashlib
from functools import cache
from pathlib import Path

NAMESPACE = "gemopt"
_PACKAGES = ("ops", "kernels")


@cache
def source_hash() -> str:
    """Eight hex digits over path and content of every Python and C++ source of `gemopt.ops` and `gemopt.kernels`."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(p for p in (root / package).rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()[:8]


def op_name(base: str) -> str:
    """`gemopt::<base>_<hash8>`."""
    return f"{NAMESPACE}::{base}_{source_hash()}"
