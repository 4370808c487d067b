"""The collectors: a GraphReport per compiled graph, a Report for everything one ``gemopt.compile`` produced.

Compilation and training may run in several threads, so every append takes the lock of its graph. Readers get tuples
and copies.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gemopt.report.values import Change, Cost, Formula, Rejection, Rewrite

if TYPE_CHECKING:
    from torch import fx

SCHEMA = "gemopt-report"
SCHEMA_VERSION = 1
MODES = ("train", "inference")
PLAIN = "runs exactly as under torch.compile"

Bind = Callable[..., Mapping[str, float]]


class _Locked:
    """State with a lock that copies and pickles leave behind."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {
                k: copy.copy(v) if isinstance(v, dict | list | Counter) else v for k, v in vars(self).items()
            }
        state.pop("_lock")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


class GraphReport(_Locked):
    """What happened to one compiled graph. Made by :meth:`Report.new_graph`; filled by the compiler.

    Attributes:
        name: the graph's name, unique within its report.
        mode: ``"train"`` or ``"inference"``.
        graphs: pass name -> readable, runnable Python of the graph after that pass, in the order of the passes.
        row_sets: name -> description of the rows kept (predicate and the tensors stored that way).
        cost: FLOPs and bytes of one step as formulas, or ``None`` while unknown.
        last: symbol values of the last step seen, e.g. ``{"B": 128, "L": 200, "T": 11264}``.
        plain_reason: why nothing was rewritten, where that is known.
    """

    def __init__(self, name: str, mode: str = "train") -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        self.name = name
        self.mode = mode
        self.graphs: dict[str, str] = {}
        self.row_sets: dict[str, str] = {}
        self.cost: Cost | None = None
        self.last: dict[str, float] = {}
        self.plain_reason = ""
        self._rewrites: list[Rewrite] = []
        self._rejections: list[Rejection] = []
        self._packed = 0
        self._padded: Counter[str] = Counter()
        self._bind: Bind | None = None

    # ---- filled by the compiler ------------------------------------------------------------------------------------

    def rewrite(
        self,
        site: str,
        rule: str,
        *,
        kernel: str | None = None,
        source: str = "",
        before: str = "",
        after: str = "",
        assumptions: tuple[str, ...] | list[str] = (),
        exactness: str = "",
        verified: bool | None = None,
        reason: str = "",
    ) -> Rewrite:
        """Record a rewrite (arguments: :class:`Rewrite`) and return it."""
        value = Rewrite(
            site, rule, kernel, source, before, after, tuple(assumptions), exactness, verified, reason
        )
        with self._lock:
            self._rewrites.append(value)
        return value

    def reject(
        self, site: str, rule: str, *, reason: str, source: str = "", hint: str = "", node: str = ""
    ) -> Rejection:
        """Record a site that is left alone (arguments: :class:`Rejection`) and return the record."""
        value = Rejection(site, rule, source, reason, hint, node)
        with self._lock:
            self._rejections.append(value)
        return value

    def verify(self, rewrite: Rewrite, passed: bool) -> Rewrite:
        """Mark a recorded rewrite as compared with the original. Returns the record that takes its place."""
        marked = replace(rewrite, verified=bool(passed))
        with self._lock:
            try:
                self._rewrites[self._rewrites.index(rewrite)] = marked
            except ValueError:
                raise ValueError(f"rewrite at {rewrite.site!r} is not in graph {self.name!r}") from None
        return marked

    def discard_rewrites(self) -> None:
        """Forget the rewrites, when the rewritten graph turned out not to be used (an error, a failed check)."""
        with self._lock:
            self._rewrites.clear()

    def record_graph(self, pass_name: str, gm: fx.GraphModule) -> str:
        """Keep the graph as it is after ``pass_name``, as Python. A second one of that name takes the next number."""
        from gemopt.report.source import readable

        code = readable(gm, f"{self.name} after {pass_name}", pass_name)
        with self._lock:
            key, n = pass_name, 2
            while key in self.graphs:
                key, n = f"{pass_name}.{n}", n + 1
            self.graphs[key] = code
        return code

    def row_set(self, name: str, description: str) -> None:
        """Describe one set of rows that is kept."""
        with self._lock:
            self.row_sets[name] = description

    def set_cost(
        self,
        *,
        flops_before: Formula,
        flops_after: Formula,
        bytes_before: Formula = 0,
        bytes_after: Formula = 0,
        symbols: Mapping[str, str] | None = None,
        bind: Bind | None = None,
    ) -> Cost:
        """Set the cost formulas of one step.

        Args:
            symbols: name -> meaning.
            bind: maps what :meth:`evaluate` is called with (lengths, say) to symbol values.
        """
        cost = Cost.of(flops_before, flops_after, bytes_before, bytes_after, symbols)
        with self._lock:
            self.cost, self._bind = cost, bind
        return cost

    def saw(self, values: Mapping[str, float]) -> None:
        """Remember the symbol values of the step at hand; costs are shown at the last ones."""
        with self._lock:
            self.last.update({str(k): v for k, v in values.items()})

    def count_step(self, packed: bool, reason: str | None = None) -> None:
        """Count one run of the graph. ``reason`` says why it ran padded."""
        with self._lock:
            if packed:
                self._packed += 1
            else:
                self._padded[reason or "no reason given"] += 1

    def nothing(self, reason: str) -> None:
        """Say why there was nothing to rewrite."""
        with self._lock:
            self.plain_reason = reason

    # ---- read by the user ------------------------------------------------------------------------------------------

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        with self._lock:
            return tuple(self._rewrites)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        with self._lock:
            return tuple(self._rejections)

    @property
    def steps_packed(self) -> int:
        return self._packed

    @property
    def steps_padded(self) -> dict[str, int]:
        """Reason -> number of steps that ran the padded graph for it, most frequent first."""
        with self._lock:
            return dict(self._padded.most_common())

    def evaluate(self, *args: Any, **values: Any) -> tuple[Change, Change] | None:
        """FLOPs and bytes of one step, each before and after; ``None`` while no cost or no step is known.

        Without arguments: at the last step seen. With keyword arguments that are symbols of the cost: at these values
        (the last ones seen fill the gaps). With anything else: the arguments go to the graph's own binding, which
        turns lengths into symbol values.
        """
        with self._lock:
            cost, bind, at = self.cost, self._bind, dict(self.last)
        if cost is None:
            return None
        if args or set(values) - set(cost.symbols):
            if bind is None:
                raise ValueError(
                    f"graph {self.name!r} has no binding for {list(values) or 'positional arguments'}; "
                    f"give symbol values: {sorted(cost.symbols)}"
                )
            at.update(bind(*args, **values))
        else:
            at.update(values)
        if not args and not values and cost.missing(at):
            return None
        return cost.flops(at), cost.bytes(at)

    def plain_sentence(self) -> str | None:
        """The sentence for a graph that nothing was done to, else ``None``."""
        if self._rewrites:
            return None
        reason = self.plain_reason or (
            "every site that was looked at was left alone, see the reasons below"
            if self._rejections
            else "no padding that gemopt can prove dead was found"
        )
        return f"{self.name} {PLAIN}: {reason}."

    def to_dict(self) -> dict[str, Any]:
        changes = self.evaluate()
        return {
            "name": self.name,
            "mode": self.mode,
            "rewrites": [r.to_dict() for r in self.rewrites],
            "rejections": [r.to_dict() for r in self.rejections],
            "row_sets": dict(self.row_sets),
            "graphs": dict(self.graphs),
            "cost": self.cost.to_dict() if self.cost else None,
            "at": dict(self.last),
            "flops": changes[0]._asdict() if changes else None,
            "bytes": changes[1]._asdict() if changes else None,
            "steps": {"packed": self.steps_packed, "padded": self.steps_padded},
            "plain": self.plain_sentence(),
            "plain_reason": self.plain_reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphReport:
        graph = cls(data["name"], data["mode"])
        graph._rewrites = [Rewrite.from_dict(r) for r in data["rewrites"]]
        graph._rejections = [Rejection.from_dict(r) for r in data["rejections"]]
        graph.row_sets, graph.graphs, graph.last = (
            dict(data["row_sets"]),
            dict(data["graphs"]),
            dict(data["at"]),
        )
        graph.cost = Cost.from_dict(data["cost"]) if data["cost"] else None
        graph._packed, graph._padded = data["steps"]["packed"], Counter(data["steps"]["padded"])
        graph.plain_reason = data["plain_reason"]
        return graph


class Report(_Locked):
    """What ``gemopt.compile`` did, over all graphs of one model: an ordered collection of :class:`GraphReport`.

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
        """FLOPs of one step before and after, summed over the graphs whose last step is known; None if none is."""
        changes = self.evaluate()
        return changes[0] if changes else None

    @property
    def bytes(self) -> Change | None:
        """Bytes of one step before and after, like :attr:`flops`."""
        changes = self.evaluate()
        return changes[1] if changes else None

    def evaluate(self, *args: Any, **values: Any) -> tuple[Change, Change] | None:
        """FLOPs and bytes summed over the graphs, at what the arguments say (see :meth:`GraphReport.evaluate`)."""
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
        return (
            f"<Report: {len(self)} graphs, {len(self.rewrites)} rewrites, {len(self.rejections)} left alone>"
        )

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
        """One self-contained HTML page; written to ``path`` if given. Needs jinja2 (``pip install gemopt[report]``)."""
        from gemopt.report.html import render

        page = render(self)
        if path is not None:
            _write(path, page)
        return page

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Read back :meth:`to_dict`. Raises ValueError for other data or a newer schema."""
        if (
            data.get("schema") != SCHEMA
            or not 1 <= cast(int, data.get("schema_version", 0)) <= SCHEMA_VERSION
        ):
            raise ValueError(
                f"not a report this version reads: schema {data.get('schema')!r} version {data.get('schema_version')!r}; "
                f"expected {SCHEMA!r} up to version {SCHEMA_VERSION}"
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
