"""The report of one model: its graphs in the order they were compiled, and the totals over them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from gemopt.report.graph import GraphReport, Locked
from gemopt.report.values import Change, Rejection, Rewrite

SCHEMA = "gemopt-report"
SCHEMA_VERSION = 1


class Report(Locked):
    """What ``gemopt.compile`` did to one model: an ordered collection of :class:`GraphReport`.

    ``print(report)`` is plain text, :meth:`print` uses rich where it is installed, :meth:`to_html` writes one
    self-contained page, :meth:`save_json` a versioned JSON file.
    """

    def __init__(self, title: str = "") -> None:
        super().__init__()
        self.title = title
        self._graphs: list[GraphReport] = []

    def new_graph(self, name: str = "graph", mode: str = "train") -> GraphReport:
        """Add a graph. Names are made unique by a number (``graph``, ``graph.2``, ...)."""
        with self._lock:
            taken = {g.name for g in self._graphs}
            unique, n = name, 2
            while unique in taken:
                unique, n = f"{name}.{n}", n + 1
            graph = GraphReport(unique, mode)
            self._graphs.append(graph)
        return graph

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._graphs.clear()

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        with self._lock:
            return tuple(self._graphs)

    def __iter__(self) -> Iterator[GraphReport]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def __getitem__(self, index: int) -> GraphReport:
        return self.graphs[index]

    def __bool__(self) -> bool:
        """A report without graphs is still a report."""
        return True

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """The rewrites of all graphs, in order."""
        return tuple(r for g in self.graphs for r in g.rewrites)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rejections of all graphs, in order."""
        return tuple(r for g in self.graphs for r in g.rejections)

    @property
    def flops(self) -> Change | None:
        """FLOPs of one step before and after, summed over the graphs whose last step is known, or None."""
        changes = self.evaluate()
        return changes[0] if changes else None

    @property
    def bytes(self) -> Change | None:
        """Bytes of one step before and after, like :attr:`flops`."""
        changes = self.evaluate()
        return changes[1] if changes else None

    def evaluate(self, *args: Any, **values: Any) -> tuple[Change, Change] | None:
        """FLOPs and bytes summed over the graphs; arguments as for :meth:`GraphReport.evaluate`."""
        known = [c for c in (g.evaluate(*args, **values) for g in self.graphs) if c is not None]
        if not known:
            return None
        zero = Change(0.0, 0.0)
        return sum((f for f, _ in known), zero), sum((b for _, b in known), zero)

    @property
    def steps_packed(self) -> int:
        return sum(g.steps_packed for g in self.graphs)

    @property
    def steps_padded(self) -> dict[str, int]:
        """Reason -> number of padded steps, over all graphs."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.steps_padded)
        return dict(total.most_common())

    def graph(self, pass_name: str, index: int = 0) -> str:
        """The ``index``-th graph after the pass of that name, as Python that runs.

        Raises:
            ValueError: no such graph or pass; the message lists what there is.
        """
        graphs = self.graphs
        if not -len(graphs) <= index < len(graphs):
            raise ValueError(f"index {index} is out of range: the report has {len(graphs)} graph(s)")
        codes = graphs[index].graphs
        if pass_name not in codes:
            raise ValueError(f"no graph was recorded after pass {pass_name!r}; recorded: {list(codes)}")
        return codes[pass_name]

    def __str__(self) -> str:
        from gemopt.report.text import plain

        return plain(self)

    def __repr__(self) -> str:
        return f"<Report: {len(self)} graphs, {len(self.rewrites)} rewrites, {len(self.rejections)} left alone>"

    def print(self) -> None:
        """Print, through rich where it is installed."""
        from gemopt.report.text import show

        show(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the layout is versioned by ``schema_version``."""
        from gemopt import __version__
        from gemopt.report.text import installed

        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "title": self.title,
            "gemopt": __version__,
            "torch": installed("torch"),
            "summary": {
                "graphs": len(self),
                "rewrites": len(self.rewrites),
                "rejections": len(self.rejections),
                "flops": self.flops._asdict() if self.flops else None,
                "bytes": self.bytes._asdict() if self.bytes else None,
                "steps": {"packed": self.steps_packed, "padded": self.steps_padded},
            },
            "graphs": [g.to_dict() for g in self.graphs],
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def save_json(self, path: str | Path) -> Path:
        """Write the JSON file, creating its folder. Returns the path."""
        return _write(path, self.to_json() + "\n")

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, written to ``path`` if given. Needs jinja2 (``gemopt[report]``)."""
        from gemopt.report.html import render

        page = render(self)
        if path is not None:
            _write(path, page)
        return page

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Read back :meth:`to_dict`. Raises ValueError for other data or a newer schema."""
        if data.get("schema") != SCHEMA or not 1 <= cast(int, data.get("schema_version", 0)) <= SCHEMA_VERSION:
            raise ValueError(
                f"not a report this version reads: schema {data.get('schema')!r} version "
                f"{data.get('schema_version')!r}; expected {SCHEMA!r} up to version {SCHEMA_VERSION}"
            )
        report = cls(data.get("title", ""))
        report._graphs = [GraphReport.from_dict(g) for g in data["graphs"]]
        return report

    @classmethod
    def load_json(cls, path: str | Path) -> Report:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
