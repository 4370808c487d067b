"""An fx graph as one Python file that compiles and, where its ops are importable, runs.

fx prints the body of ``forward``; what a reader needs besides it is added here: a header that says how the
file was made, the imports behind the names in the body, definitions of size symbols that stand bare in
arguments, and a module class that holds the constants and nested graphs the body refers to. Constants above
``MAX_LITERAL`` elements are not written out: the file makes random stand-ins of the same shape and dtype and
says so.
"""

from __future__ import annotations

import keyword
import re
import types
from typing import Any

import torch
from torch import fx

MAX_LITERAL = 64
_INDENT = "    "
_NO_TRACE = "# No stacktrace found for following nodes"


def readable(gm: fx.GraphModule, title: str = "", class_name: str = "Graph") -> str:
    """Python source of ``gm``: a file that defines ``class_name(torch.nn.Module)`` around the graph.

    Always compiles. A graph fx cannot print as valid Python comes back as comments and a reason.
    """
    header = _header(gm, title, class_name)
    try:
        imports: dict[str, str] = {}
        code = header + "\n" + _assemble(gm, _identifier(class_name), imports)
        compile(code, f"<{title or class_name}>", "exec")
    except Exception as error:
        body = "\n".join(f"# {line}" for line in str(gm.graph).splitlines())
        why = f"{type(error).__name__}: {_one_line(error)}"
        return f"{header}#\n# This graph has no valid Python form ({why}).\n{body}\n"
    return code


def _header(gm: fx.GraphModule, title: str, class_name: str) -> str:
    from gemopt import __version__

    ops = sum(node.op.startswith("call") for node in gm.graph.nodes)
    what = _one_line(title) or class_name
    return (
        f"# {what}: {ops} ops. Written by gemopt {__version__} from an fx graph, torch {torch.__version__}.\n"
        "# Annotations give dtype and shape as traced; s0 and its like are sizes of inputs,\n"
        "# u0 and its like sizes known at run time only.\n"
    )


def _assemble(gm: fx.GraphModule, class_name: str, imports: dict[str, str]) -> str:
    classes = _module_class(gm, class_name, imports)
    lines = [imports[name] for name in sorted(imports, key=lambda n: (not imports[n].startswith("import"), n))]
    return "\n".join(["import torch", *lines, "", "", classes]) + "\n"


def _module_class(gm: fx.GraphModule, class_name: str, imports: dict[str, str]) -> str:
    """The class of ``gm``, after the classes of the graphs nested in it."""
    printed = gm.graph.python_code("self", verbose=True)
    _collect_imports(printed.globals, printed.src, imports)
    nested, init = [], []
    for target in _attributes(gm.graph):
        value = _fetch(gm, target)
        if isinstance(value, fx.GraphModule):
            child = f"{class_name}_{_identifier(target)}"
            nested.append(_module_class(value, child, imports))
            init.append((target, f"torch.fx.symbolic_trace({child}())"))  # ops that take graphs want fx ones
        else:
            init.append((target, _literal(value)))
    lines = [f"class {class_name}(torch.nn.Module):"]
    if init:
        lines += [f"{_INDENT}def __init__(self):", f"{_INDENT * 2}super().__init__()"]
        holders = sorted({".".join(t.split(".")[:i]) for t, _ in init for i in range(1, t.count(".") + 1)})
        lines += [f"{_INDENT * 2}self.{holder} = torch.nn.Module()" for holder in holders]
        lines += [f"{_INDENT * 2}self.{target} = {expression}" for target, expression in init]
        lines.append("")
    lines += [_INDENT + line if line.strip() else "" for line in _forward(gm.graph, printed.src)]
    return "\n\n\n".join([*nested, "\n".join(lines).rstrip()])


def _forward(graph: fx.Graph, source: str) -> list[str]:
    lines = [line.rstrip() for line in source.strip("\n").splitlines() if _NO_TRACE not in line]
    while lines and not lines[-1].strip():
        lines.pop()
    definitions = _symbol_definitions(graph)
    at = next((i for i, line in enumerate(lines) if line.startswith("def ")), None)
    if at is not None and definitions:
        lines[at + 1 : at + 1] = [f"{_INDENT}{line}" for line in definitions]
    return lines


def _symbol_definitions(graph: fx.Graph) -> list[str]:
    """``s0 = x.size(1)`` for every size symbol that stands bare in an argument instead of as a node."""
    wanted: set[str] = set()
    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), lambda a: wanted.update(_symbols_of(a)))
    found: dict[str, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value), str(node))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                found.setdefault(str(size), f"{node}.size({dim})")
    return [
        f"{name} = {found[name]}" if name in found else f"{name} = None  # no input has this size" for name in sorted(wanted)
    ]


def _symbols_of(value: Any) -> set[str]:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {str(symbol) for symbol in value.node.expr.free_symbols}
    return set()


def _attributes(graph: fx.Graph) -> list[str]:
    targets = [str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")]
    return list(dict.fromkeys(targets))


def _fetch(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _literal(value: Any) -> str:
    """An expression that rebuilds an attribute, or a stand-in of the same shape that says so."""
    if not isinstance(value, torch.Tensor):
        simple = isinstance(value, int | float | bool | str | type(None))
        return repr(value) if simple else f"None  # a {type(value).__name__}, not written out"
    shape, dtype = tuple(_size(d) for d in value.shape), str(value.dtype)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"
    if plain and value.numel() <= MAX_LITERAL and not value.is_complex():
        data = repr(value.detach().cpu().tolist())
        data = re.sub(r"\b(inf|nan)\b", r"float('\1')", data)
        return f"torch.tensor({data}, dtype={dtype}).reshape({shape})"
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return f"torch.randn({shape}).to({dtype})  # stand-in: values not written out"
    return f"torch.zeros({shape}, dtype={dtype})  # stand-in: values not written out"


def _size(dim: Any) -> int:
    """A plain size; symbolic ones (fake constants) become 2."""
    return dim if isinstance(dim, int) else 2


def _collect_imports(names: dict[str, Any], source: str, imports: dict[str, str]) -> None:
    for name, value in names.items():
        if name != "torch" and re.search(rf"\b{re.escape(name)}\b", source):
            imports[name] = _import_line(name, value)


def _import_line(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{name} = float({str(value)!r})"
    if value is type(None):
        return f"{name} = type(None)"
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and qualified and "<" not in qualified and module != "__main__":
        head, *rest = qualified.split(".")
        if not rest:
            return f"from {module} import {qualified}" + ("" if qualified == name else f" as {name}")
        return f"from {module} import {head} as _{name}\n{name} = _{name}.{'.'.join(rest)}"
    return f"{name} = None  # {_one_line(value)[:80]}: defined inside a function, cannot be imported"


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_") or "Graph"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
