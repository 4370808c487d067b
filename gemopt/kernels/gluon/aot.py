"""Ahead-of-time compilation: what ptxas says of a kernel, without a GPU.

Triton compiles for any target; the ptxas in its wheel reports registers and spills, and warns (C75xx) when it has to
serialise wgmma instructions, which halves a kernel's speed in silence.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type


@dataclass(frozen=True)
class Resources:
    """Per thread registers at launch, spilled bytes, shared memory bytes and ptxas warnings of one kernel.

    tensor_memory: 32-bit columns of tensor memory, of the 512 there are on sm_100.
    """

    registers: int
    spilled: int
    shared: int
    tensor_memory: int
    warnings: tuple[str, ...]
    ptx: str


def compile_kernel(kernel: Any, arguments: dict[str, Any], capability: int = 90) -> Resources:
    """Compile `kernel` for sm_<capability> for a launch with these arguments, whose tensors may be on the CPU."""
    names = kernel.arg_names
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    full = {n: "constexpr" if n in constants else _type_of(arguments[n]) for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if full[n].startswith("*")}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel, signature=full, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs
    )
    options = {n: v for n, v in arguments.items() if n in ("num_warps", "num_stages", "maxnreg")}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = _ptxas(compiled.asm["ptx"], capability)
    registers = re.search(r"Used (\d+) registers", report)
    return Resources(
        int(registers.group(1)) if registers else 0,
        sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        compiled.metadata.shared,
        compiled.metadata.tmem_size,
        tuple(re.findall(r".*C75\d\d.*", report)),
        compiled.asm["ptx"],
    )


def _type_of(value: Any) -> str:
    """The type Triton's launcher would give an argument: integers that fit are int32, tensors pointers."""
    return "fp32" if isinstance(value, float) else "i32" if isinstance(value, int) else mangle_type(value)


def _ptxas(ptx: str, capability: int) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = tools / ("ptxas-blackwell" if capability >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        return subprocess.run(
            [ptxas, "-v", f"-arch=sm_{capability}a", path, "-o", os.devnull], check=True, capture_output=True, text=True
        ).stderr
