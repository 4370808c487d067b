"""The command line: ``gemopt inspect | verify | train | version``.

``MODULE:CALLABLE`` names a function without arguments that returns ``(model, inputs)``: a module or a
function, and the tuple of its positional arguments (a dict is taken as keyword arguments, a lone tensor as
the only one).
``MODULE`` is importable from the current folder, or the path of a ``.py`` file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

EXIT_OK, EXIT_DIFFERENT, EXIT_USAGE = 0, 1, 2


class UsageError(Exception):
    """The command cannot be run as given; the message says what was given and what is allowed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if ``verify`` found a difference, 2 if the command cannot be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # its options are the training command's own, --help included
        return _train(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UsageError as error:
        print(f"gemopt {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemopt", description="Trains padded sequence models packed.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = _target_command(commands, "inspect", _inspect, "say what gemopt would do to a model, and why")
    inspect.add_argument("--json", metavar="PATH", help="write the report as JSON; - prints it instead of the text")
    inspect.add_argument("--html", metavar="PATH", help="write the report as one HTML page")
    inspect.add_argument("--graph", metavar="PASS", help="print the graph after this pass, as Python, and no report")
    inspect.add_argument("--index", type=int, default=0, help="which graph --graph prints (default 0)")

    verify = _target_command(commands, "verify", _verify, "compare the compiled model with eager, backward included")
    verify.add_argument("--seed", type=int, default=0, help="seed of lengths and contents (default 0)")
    verify.add_argument("--inner", default="aot_eager", choices=("inductor", "aot_eager", "eager"))

    # listed here for --help only; main() hands it on before the options are parsed
    commands.add_parser("train", help="train a model of the zoo; `gemopt train --help` lists its options")
    version = commands.add_parser("version", help="print the versions of gemopt, Python and what it builds on")
    version.set_defaults(run=_version)
    return parser


def _target_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument("target", metavar="MODULE:CALLABLE", help="function that returns (model, inputs)")
    parser.set_defaults(run=run)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    model, args, kwargs = load_target(options.target)
    import gemopt

    report = gemopt.explain(model, *args, **kwargs)
    if options.html:
        report.to_html(options.html)
    if options.json and options.json != "-":
        report.save_json(options.json)
    if options.graph:
        try:
            print(report.graph(options.graph, options.index))
        except ValueError as error:
            raise UsageError(str(error)) from None
    elif options.json == "-":
        print(report.to_json())
    else:
        report.print()
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    model, args, kwargs = load_target(options.target)
    from gemopt.testing import assert_equivalent

    try:
        result = assert_equivalent(model, kwargs or args, seed=options.seed, inner=options.inner)
    except AssertionError as error:
        print(error)
        return EXIT_DIFFERENT
    print(result)
    return EXIT_OK


def _train(arguments: list[str]) -> int:
    result = importlib.import_module("gemopt.model_zoo.train").main(arguments)
    return result if isinstance(result, int) else EXIT_OK


def _version(options: argparse.Namespace) -> int:
    import platform

    from gemopt import __version__
    from gemopt.report.text import installed

    print(f"gemopt {__version__}")
    print(f"python {platform.python_version()}")
    for name in ("torch", "triton", "sympy", "networkx", "torchrec"):
        print(f"{name} {installed(name) or 'not installed'}")
    return EXIT_OK


def load_target(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the factory ``MODULE:CALLABLE``. Returns the model, its positional and its keyword arguments.

    Raises:
        UsageError: the target cannot be imported, or does not return ``(model, inputs)``.
    """
    module_name, separator, attribute = target.rpartition(":")
    if not separator or not module_name or not attribute:
        raise UsageError(f"target: got {target!r}; expected MODULE:CALLABLE, for example model.py:make")
    factory: Any = _import(module_name)
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise UsageError(f"target: {module_name!r} has no {attribute!r}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise UsageError(f"target: {target!r} is a {type(factory).__name__}, not a function")
    made = factory()
    if not isinstance(made, tuple | list) or len(made) != 2 or not callable(made[0]):
        _wrong(target, made)
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _wrong(target: str, made: object) -> NoReturn:
    got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
    raise UsageError(f"target: {target!r} returned {got}; expected (model, inputs), model a module or function")


def _import(name: str) -> Any:
    """A module by dotted name, current folder first, or by the path of its file."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"target: no file {name!r}")
        private = f"_gemopt_target_{path.stem}"
        spec = importlib.util.spec_from_file_location(private, path)
        assert spec is not None and spec.loader is not None  # a .py file always has a loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[private] = module
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"target: no module {name!r} (searched the current folder first)") from None
        raise  # a missing import inside the user's module keeps its own traceback


if __name__ == "__main__":
    raise SystemExit(main())
