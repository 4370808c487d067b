"""The report as one self-contained HTML page: no script, no font and no image from elsewhere.

What is drawn is computed here (bars, diffs between passes) and laid out by ``templates/report.html.jinja``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gemopt.report.text import change_text, headline, installed, si, steps_text
from gemopt.report.values import Change

if TYPE_CHECKING:
    from gemopt.report.collect import Report
    from gemopt.report.graph import GraphReport

MAX_DIFF_LINES = 2000
BAR_WIDTH = 420
_NOT_THE_GRAPH = ("#", "class ", "import ", "from ", "inf = ", "nan = ", "NoneType = ")


class DiffLine(NamedTuple):
    """One line of a diff: ``kind`` is ``add``, ``del``, ``at`` (a hunk's position) or ``same``."""

    kind: str
    text: str


@dataclass(frozen=True)
class PassView:
    """One recorded graph: its source, and what changed against the pass before it."""

    name: str
    code: str
    ops: int
    diff: tuple[DiffLine, ...]
    added: int
    removed: int


@dataclass(frozen=True)
class Bar:
    """A pair of bars, before and after, in SVG user units of ``BAR_WIDTH``."""

    label: str
    before: str
    after: str
    before_width: float
    after_width: float
    verdict: str


def render(report: Report) -> str:
    """The page. Raises ImportError that names the extra where jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("Report.to_html needs jinja2: pip install 'gemopt[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gemopt.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    from gemopt import __version__

    return environment.get_template("report.html.jinja").render(
        report=report,
        headline=headline(report),
        version=__version__,
        torch_version=installed("torch"),
        steps=steps_text,
        cards=_cards(report),
        bars=_bars,
        passes=pass_views,
        number=_number,
        width=BAR_WIDTH,
    )


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """(label, value, note) of the summary."""
    verified = sum(r.verified is True for r in report.rewrites)
    failed = sum(r.verified is False for r in report.rewrites)
    note = f"{verified} verified on data" + (f", {failed} FAILED" if failed else "")
    cards = [
        ("Rewrites", str(len(report.rewrites)), note),
        ("Left alone", str(len(report.rejections)), "each with its reason below"),
    ]
    for label, change, unit in (("FLOPs", report.flops, "FLOP"), ("Bytes", report.bytes, "B")):
        if change is not None and change.before:
            less = f"{change.ratio:.2f}x less" if change.ratio >= 1 else f"{1 / change.ratio:.2f}x more"
            cards.append((label, less, f"{si(change.before, unit)} to {si(change.after, unit)} a step"))
    padded = sum(report.steps_padded.values())
    if report.steps_packed or padded:
        cards.append(("Steps packed", f"{report.steps_packed}", f"of {report.steps_packed + padded}"))
    return cards


def _bars(graph: GraphReport) -> list[Bar]:
    changes = graph.evaluate()
    if changes is None:
        return []
    pairs = [("FLOPs", changes[0], "FLOP"), ("Bytes", changes[1], "B")]
    return [_bar(label, change, unit) for label, change, unit in pairs if change.before or change.after]


def _bar(label: str, change: Change, unit: str) -> Bar:
    scale = BAR_WIDTH / max(change.before, change.after)
    return Bar(
        label,
        si(change.before, unit),
        si(change.after, unit),
        change.before * scale,
        change.after * scale,
        change_text(change, unit).rpartition("(")[2].rstrip(")"),
    )


def pass_views(graph: GraphReport) -> list[PassView]:
    """The recorded graphs in order, each with a unified diff against the one before it."""
    views = []
    previous: str | None = None
    for name, code in graph.graphs.items():
        diff = _diff(previous, code) if previous is not None else ()
        count = re.search(r"(\d+) ops", code.partition("\n")[0])
        ops = int(count.group(1)) if count else 0
        added, removed = (sum(line.kind == kind for line in diff) for kind in ("add", "del"))
        views.append(PassView(name, code, ops, diff, added, removed))
        previous = code
    return views


def _diff(before: str, after: str) -> tuple[DiffLine, ...]:
    raw = difflib.unified_diff(_comparable(before), _comparable(after), n=3, lineterm="")
    lines = []
    for line in raw:
        if line.startswith(("---", "+++")):
            continue
        kind = {"+": "add", "-": "del", "@": "at"}.get(line[:1], "same")
        lines.append(DiffLine(kind, line))
        if len(lines) == MAX_DIFF_LINES:
            lines.append(DiffLine("at", "... the rest of the diff is left out"))
            break
    return tuple(lines)


def _comparable(code: str) -> list[str]:
    """Lines of the graph itself: no header, imports or class name, no ``;  x = None`` that frees values."""
    lines = [line.split(";  ")[0] for line in code.splitlines()]
    return [line for line in lines if line and not line.startswith(_NOT_THE_GRAPH)]


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"
