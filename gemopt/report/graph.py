"""The report of one compiled graph.

Compilation and training may run in several threads, so every append takes the lock of its graph. Readers get
tuples and copies.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemopt.report.values import Change, Cost, Formula, Rejection, Rewrite

if TYPE_CHECKING:
    from torch import fx

MODES = ("train", "inference")
PLAIN = "runs exactly as under torch.compile"

Bind = Callable[..., Mapping[str, float]]


class Locked:
    """State with a lock that copies and pickles leave behind."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {k: copy.copy(v) if isinstance(v, dict | list | Counter) else v for k, v in vars(self).items()}
        state.pop("_lock")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


class GraphReport(Locked):
    """What happened to one compiled graph. Made by :meth:`Report.new_graph`; filled by the compiler.

    Attributes:
        name: the graph's name, unique within its report.
        mode: ``"train"`` or ``"inference"``.
        graphs: pass name -> readable, runnable Python of the graph after that pass, in order.
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

    def __getstate__(self) -> dict[str, Any]:
        """Formulas and values travel; the binding, a function, stays behind."""
        return {**super().__getstate__(), "_bind": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphReport:
        twin: GraphReport = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._bind = self._bind
        return twin

    # ---- filled by the compiler ----

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
        value = Rewrite(site, rule, kernel, source, before, after, tuple(assumptions), exactness, verified, reason)
        with self._lock:
            self._rewrites.append(value)
        return value

    def reject(self, site: str, rule: str, *, reason: str, source: str = "", hint: str = "", node: str = "") -> Rejection:
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
        """Forget the rewrites, where the rewritten graph is not used after all (an error, a failed check)."""
        with self._lock:
            self._rewrites.clear()

    def record_graph(self, pass_name: str, gm: fx.GraphModule) -> str:
        """Keep the graph as it is after ``pass_name``, as Python. A second of that name takes a number."""
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

    # ---- read by the user ----

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

        Without arguments: at the last step seen. With keyword arguments that are symbols of the cost: at
        these values (the last ones seen fill the gaps). With anything else: the arguments go to the graph's
        own binding, which turns lengths into symbol values.
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
