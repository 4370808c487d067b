"""The report as text: plain for ``print(report)``, and the same content through rich for terminals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

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


def plain(report: Report) -> str:
    """The whole report as plain text, graph sources left out."""
    lines = [f"gemopt{f' on {report.title}' if report.title else ''}: {headline(report)}"]
    if not len(report):
        lines.append(
            "  Nothing has been compiled yet: call the model once, or use gemopt.explain(model, *inputs)."
        )
    for graph in report:
        lines += ["", *_graph_lines(graph)]
    return "\n".join(lines)


def _graph_lines(graph: GraphReport) -> list[str]:
    lines = [f"{graph.name} ({graph.mode})"]
    sentence = graph.plain_sentence()
    if sentence:
        lines += _wrap(sentence, "  ")
    steps = steps_text(graph.steps_packed, graph.steps_padded)
    if steps:
        lines += _wrap(steps, "  ")
    changes = graph.evaluate()
    if changes:
        at = ", ".join(f"{k}={_number(v)}" for k, v in graph.last.items())
        lines += _wrap(
            f"one step: {change_text(changes[0], 'FLOP')}, {change_text(changes[1], 'B')} at {at}", "  "
        )
    for name, description in graph.row_sets.items():
        lines += _wrap(f"rows {name}: {description}", "  ")
    if graph.rewrites:
        lines.append("  rewritten")
        lines += [line for r in graph.rewrites for line in _rewrite_lines(r)]
    if graph.rejections:
        lines.append("  left alone")
        lines += [line for r in graph.rejections for line in _rejection_lines(r)]
    if graph.graphs:
        lines.append(f"  graphs kept after: {', '.join(graph.graphs)}")
    return lines


def _rewrite_lines(r: Rewrite) -> list[str]:
    lines = [_title(r.site, r.rule + (f" -> {r.kernel}" if r.kernel else ""), r.source)]
    if r.before or r.after:
        lines += _wrap(f"{r.before} => {r.after}", "      ")
    if r.reason:
        lines += _wrap(r.reason, "      ")
    for assumption in r.assumptions:
        lines += _wrap(f"assumes: {assumption}", "      ")
    lines += _wrap(", ".join(filter(None, [r.exactness, _VERIFIED[r.verified]])), "      ")
    return lines


def _rejection_lines(r: Rejection) -> list[str]:
    lines = [_title(r.site, r.rule, r.source)]
    lines += _wrap(r.reason + (f" [node {r.node}]" if r.node else ""), "      ")
    if r.hint:
        lines += _wrap(f"hint: {r.hint}", "      ")
    return lines


def _title(site: str, what: str, source: str) -> str:
    return "    " + "  ".join(filter(None, [site, what, source and f"({source})"]))


def _wrap(text: str, indent: str) -> Iterable[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


def show(report: Report) -> None:
    """Print to the terminal: tables through rich, or the plain text where rich is not installed."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(plain(report))
        return
    console = Console()
    console.print(
        f"[bold]gemopt{escape(f' on {report.title}') if report.title else ''}[/]: {headline(report)}"
    )
    if not len(report):
        console.print(
            "Nothing has been compiled yet: call the model once, or use gemopt.explain(model, *inputs)."
        )
    for graph in report:
        console.rule(f"{escape(graph.name)} ({graph.mode})", align="left")
        for line in _graph_notes(graph):
            console.print(escape(line))
        if graph.rewrites:
            table = Table(
                "site", "rule", "kernel", "source", "assumes", "exactness", "verified", title="rewritten"
            )
            for r in graph.rewrites:
                cells = [r.site, r.rule, r.kernel or "", r.source, "\n".join(r.assumptions), r.exactness]
                table.add_row(
                    *map(escape, cells), {True: "yes", False: "[red]FAILED[/]", None: "-"}[r.verified]
                )
            console.print(table)
        if graph.rejections:
            table = Table("site", "rule", "source", "reason", "hint", title="left alone")
            for rejection in graph.rejections:
                cells = [rejection.site, rejection.rule, rejection.source, rejection.reason, rejection.hint]
                table.add_row(*map(escape, cells))
            console.print(table)


def _graph_notes(graph: GraphReport) -> list[str]:
    """The sentences of a graph that stand above its tables."""
    notes = [graph.plain_sentence() or "", steps_text(graph.steps_packed, graph.steps_padded)]
    changes = graph.evaluate()
    if changes:
        notes.append(f"one step: {change_text(changes[0], 'FLOP')}, {change_text(changes[1], 'B')}")
    notes += [f"rows {name}: {description}" for name, description in graph.row_sets.items()]
    return [note for note in notes if note]
