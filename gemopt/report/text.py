"""The report as text: plain for ``print(report)``, and the same content through rich for terminals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from gemopt.report.values import Change, Rejection, Rewrite

if TYPE_CHECKING:
    from gemopt.report.collect import Report
    from gemopt.report.graph import GraphReport

WIDTH = 110
_VERIFIED = {True: "verified", False: "FAILED VERIFICATION", None: "not verified on data"}


def installed(distribution: str) -> str:
    """Version of an installed distribution, ``""`` if absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def si(value: float, unit: str = "") -> str:
    """``12345678`` -> ``12.3 M``: three figures and a decimal prefix."""
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    number = f"{value:.0f}" if power == 0 and value == int(value) else f"{value:.3g}"
    return f"{number} {prefixes[power]}{unit}".strip()


def change_text(change: Change, unit: str) -> str:
    """``8.1 GFLOP -> 2.7 GFLOP (3.0x less)``."""
    if change.ratio >= 1.005:
        verdict = f"{change.ratio:.2f}x less"
    elif change.ratio <= 0.995:
        verdict = f"{1 / change.ratio:.2f}x more"
    else:
        verdict = "the same"
    return f"{si(change.before, unit)} -> {si(change.after, unit)} ({verdict})"


def headline(report: Report) -> str:
    """``2 graphs, 5 rewrites, 1 site left alone``."""
    return ", ".join(
        [
            _count(len(report), "graph"),
            _count(len(report.rewrites), "rewrite"),
            f"{_count(len(report.rejections), 'site')} left alone",
        ]
    )


def steps_text(packed: int, padded: dict[str, int]) -> str:
    """``40 steps packed, 2 padded (fill too high, 2 times)``, empty before the first step."""
    total = sum(padded.values())
    if not packed and not total:
        return ""
    why = "; ".join(f"{reason}, {_count(n, 'time')}" for reason, n in padded.items())
    return f"{_count(packed, 'step')} packed, {total} padded" + (f" ({why})" if why else "")


class Line(NamedTuple):
    """One paragraph of the report, before it is wrapped."""

    text: str
    indent: int = 0
    style: str = ""


def lines(report: Report) -> Iterator[Line]:
    """The whole report, graph sources left out."""
    yield Line(f"gemopt{f' on {report.title}' if report.title else ''}: {headline(report)}", style="bold")
    if not len(report):
        yield Line(
            "No graph yet. Call the model once; if it has run, Dynamo found nothing to compile in it (an LSTM, say) "
            "and it runs exactly as under torch.compile.",
            2,
        )
    for graph in report:
        yield Line("")
        yield from _graph_lines(graph)


def _graph_lines(graph: GraphReport) -> Iterator[Line]:
    yield Line(f"{graph.name} ({graph.mode})", style="bold cyan")
    sentence = graph.plain_sentence()
    if sentence:
        yield Line(sentence, 2)
    steps = steps_text(graph.steps_packed, graph.steps_padded)
    if steps:
        yield Line(steps, 2)
    changes = graph.evaluate()
    if changes:
        at = ", ".join(f"{k}={_number(v)}" for k, v in graph.last.items())
        flops, moved = change_text(changes[0], "FLOP"), change_text(changes[1], "B")
        yield Line(f"one step: {flops}, {moved}" + (f" at {at}" if at else ""), 2)
    for name, description in graph.row_sets.items():
        yield Line(f"rows {name}: {description}", 2)
    if graph.rewrites:
        yield Line("rewritten", 2, "bold green")
        for rewrite in graph.rewrites:
            yield from _rewrite_lines(rewrite)
    if graph.rejections:
        yield Line("left alone", 2, "bold yellow")
        for rejection in graph.rejections:
            yield from _rejection_lines(rejection)
    if graph.graphs:
        yield Line(f"graphs kept after: {', '.join(graph.graphs)}", 2, "dim")


def _rewrite_lines(r: Rewrite) -> Iterator[Line]:
    yield _title(r.site, r.rule + (f" -> {r.kernel}" if r.kernel else ""), r.source)
    if r.before or r.after:
        yield Line(f"{r.before} => {r.after}", 6)
    if r.reason:
        yield Line(r.reason, 6)
    for assumption in r.assumptions:
        yield Line(f"assumes: {assumption}", 6)
    style = "bold red" if r.verified is False else "dim"
    yield Line(", ".join(filter(None, [r.exactness, _VERIFIED[r.verified]])), 6, style)


def _rejection_lines(r: Rejection) -> Iterator[Line]:
    yield _title(r.site, r.rule, r.source)
    yield Line(r.reason + (f" [node {r.node}]" if r.node else ""), 6)
    if r.hint:
        yield Line(f"hint: {r.hint}", 6, "yellow")


def _title(site: str, what: str, source: str) -> Line:
    return Line("  ".join(filter(None, [site, what, source and f"({source})"])), 4, "bold")


def wrapped(line: Line, width: int) -> str:
    indent = " " * line.indent
    return textwrap.fill(
        line.text,
        max(width, line.indent + 20),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(report: Report) -> str:
    """The whole report as plain text."""
    return "\n".join(wrapped(line, WIDTH) for line in lines(report))


def show(report: Report) -> None:
    """Print to the terminal, in its width and with styles; plain where rich is not installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(plain(report))
        return
    console = Console(soft_wrap=True)
    for line in lines(report):
        console.print(Text(wrapped(line, min(console.width, WIDTH)), style=line.style))


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"
