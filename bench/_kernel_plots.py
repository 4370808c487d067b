"""Pictures of bench/kernels.py's records: bars by cell, and the roofline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

CUBLAS = "cublas-8192"
COPY = "copy-1gib"
ASSUMED_TB_S = 4.2  # where a file was written before copies were timed: an H200's
DIRECTIONS = ("forward", "backward")
COLOURS = {
    "gemopt": "#17708f",
    "gemopt-deterministic": "#7fb9cc",
    "gemopt-copied": "#9fb8a6",
    "gemopt-unsplit": "#b9cdbe",
    "gemopt-unfused": "#cfe3ea",
    "gemopt-unfused-compiled": "#a7cdd9",
    "flash-2-varlen": "#e39a55",
    "sdpa-cudnn": "#8db36b",
    "sdpa-efficient": "#c4b04b",
    "flex-document-mask": "#c98bb9",
    "padded-compiled": "#b5656b",
    "generative-recommenders": "#7a5ea8",
    "generative-recommenders-tma": "#b3a0d4",
}
OTHERS = ("#7d7d7d", "#a65628", "#4d4d4d", "#999933")  # contestants of other peers, in order of appearance
SOFTMAX_ONLY = ("flash", "sdpa", "flex")
INK, FAINT = "#222222", "#8a8a8a"


def colours(records: Sequence[Record]) -> dict[str, str]:
    """The colour of every contestant, ours first."""
    seen = dict.fromkeys(name for r in records for name in r["tflops"] if name != CUBLAS)
    known = {name: colour for name, colour in COLOURS.items() if name in seen}
    unknown = [name for name in seen if name not in COLOURS]
    return known | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(unknown)}


def by_cell(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Cells in order of head size, kind and intensity, each with its record by direction."""

    def place(record: Record) -> tuple[Any, ...]:
        name, shape = record["config"]["cell"], record["shape"]
        kinds = ("gdpa", "hstu", "softmax", "full", "window", "pma", "block", "pffn-block")
        kind = next((i for i, k in enumerate(kinds) if name.startswith(k)), len(kinds))
        return -shape["dim"], kind, -record["flops"] / record["bytes"]

    found: dict[str, dict[str, Record]] = {}
    for record in sorted(records, key=place):
        found.setdefault(record["config"]["cell"], {})[record["config"]["direction"]] = record
    return found


def describe(shape: Mapping[str, Any]) -> str:
    """What a cell computes, in a few words."""

    def lengths(what: Any) -> str:
        return str(what) if isinstance(what, int) else f"{what[0]}[1..{what[1]}]"

    act = {"softmax": "softmax", "gelu": "GELU", "silu": "SiLU"}.get(shape["act"], shape["act"])
    parts = [act, lengths(shape["q"]) if shape["k"] is None else f"{lengths(shape['q'])} over {lengths(shape['k'])}"]
    if shape.get("shared"):
        parts[-1] += ", shared queries"
    if shape["causal"]:
        parts.append("causal")
    if shape["window"][0] >= 0:
        parts.append("window ±{}".format(shape["window"][0]))
    if shape["block"]:
        parts.append(f"blocks of {shape['block']}")
    return ", ".join(parts)


def bandwidth(records: Sequence[Record]) -> float:
    """TB/s of a copy in the same processes."""
    measured = [r["terabytes_per_second"][COPY] for r in records if COPY in r.get("terabytes_per_second", {})]
    return statistics.median(measured) if measured else ASSUMED_TB_S


def origin(records: Sequence[Record]) -> str:
    """Device and versions, as far as the records agree."""

    def only(part: str, key: str) -> str:
        return " / ".join(dict.fromkeys(str(r[part].get(key)) for r in records if part in r)) or "unknown"

    return f"{only('machine', 'gpu')}, torch {only('versions', 'torch')}, triton {only('versions', 'triton')}"


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """`kernels.png` and `roofline.png` in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT}):
        return [bars(records, folder / "kernels.png"), roofline(records, folder / "roofline.png")]


def bars(records: Sequence[Record], path: Path) -> Path:
    """One bar per cell, direction and contestant: its share of the cuBLAS product timed beside it, and TFLOP/s in figures.

    A tick over a cell's bars is what the bytes allow; hatched bars compute softmax where the cell does not.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    paint, cells, rate = colours(records), by_cell(records), bandwidth(records)
    sizes = list(
        dict.fromkeys((c[next(iter(c))]["shape"]["heads"], c[next(iter(c))]["shape"]["dim"]) for c in cells.values())
    )
    bar, gap = 0.165, 0.15  # inches

    def of_size(size: tuple[int, int]) -> dict[str, dict[str, Record]]:
        return {n: c for n, c in cells.items() if all((r["shape"]["heads"], r["shape"]["dim"]) == size for r in c.values())}

    def slots(cell: Mapping[str, Record]) -> int:
        return max(sum(name in paint for name in r["tflops"]) for r in cell.values())

    heights = [sum(bar * max(slots(c), 2) + gap for c in of_size(size).values()) for size in sizes]
    names = [*paint]
    rows_of_legend = -(-(len(names) + 3) // 4)
    top, between, bottom = 0.62 + 0.24 * rows_of_legend + 0.35, 0.55, 0.6
    height = top + sum(heights) + between * (len(sizes) - 1) + bottom
    figure = plt.figure(figsize=(12, height))
    left, width = 0.215, 0.372
    at = height - top
    most = max(r["tflops"][n] / r["tflops"][CUBLAS] for r in records for n in r["tflops"])
    hatched = False
    for size, tall in zip(sizes, heights, strict=True):
        for side, direction in enumerate(DIRECTIONS):
            axes = figure.add_axes((left + side * (width + 0.03), (at - tall) / height, width, tall / height))
            y = gap / 2
            ticks = []
            for name, cell in of_size(size).items():
                room = bar * max(slots(cell), 2)
                ticks.append((y + room / 2, name, describe(cell[next(iter(cell))]["shape"])))
                if direction in cell:
                    record = cell[direction]
                    runs = [(n, record["tflops"][n]) for n in names if n in record["tflops"]]
                    first = y + (room - bar * len(runs)) / 2
                    allowed = record["flops"] / record["bytes"] * rate / record["tflops"][CUBLAS]
                    if allowed < 1:
                        end = first + bar * len(runs)
                        axes.plot([allowed] * 2, [first - 0.03, end + 0.03], color=INK, linewidth=1.3, zorder=3)
                    for i, (who, tflops) in enumerate(runs):
                        share = tflops / record["tflops"][CUBLAS]
                        other = who.startswith(SOFTMAX_ONLY) and record["shape"]["act"] != "softmax"
                        hatched |= other
                        axes.barh(
                            first + (i + 0.5) * bar, share, bar * 0.9, color=paint[who], zorder=2,
                            edgecolor="white", linewidth=0, hatch="////" if other else None,
                        )  # fmt: skip
                        room_of_figures = 0.012 + 0.023 * len(f"{tflops:.0f}")
                        beside = allowed if share - 0.01 < allowed < share + room_of_figures else share
                        axes.text(
                            beside + 0.007, first + (i + 0.5) * bar, f"{tflops:.0f}", va="center_baseline", fontsize=8,
                            color=paint[who] if who == "gemopt" else "#555555", zorder=4,
                            fontweight="bold" if who == "gemopt" else "normal",
                            path_effects=[withStroke(linewidth=2, foreground="white")],
                        )  # fmt: skip
                y += room + gap
            axes.set(ylim=(tall, 0), xlim=(0, max(1.0, most * 1.06)))
            axes.set_yticks([])
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
            axes.tick_params(axis="x", length=0, labelsize=9, labelcolor="#555555")
            axes.grid(axis="x", color="#e6e6e6", linewidth=0.8, zorder=0)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.axvline(1, color=FAINT, linewidth=1, zorder=1)
            axes.set_title(f"{direction}, H = {size[0]}, D = {size[1]}", fontsize=11, fontweight="bold", loc="left", pad=6)
            if size == sizes[-1]:
                axes.set_xlabel("share of the cuBLAS product of 8192³", fontsize=9.5)
            if side == 0:
                for place, name, words in ticks:
                    axes.annotate(
                        name.removesuffix(f"-{size[1]}"), (0, place), (-9, 1.5), textcoords="offset points", ha="right",
                        va="bottom", fontsize=10, fontweight="bold", annotation_clip=False,
                    )  # fmt: skip
                    axes.annotate(
                        words, (0, place), (-9, -0.5), textcoords="offset points", ha="right", va="top", fontsize=8,
                        color="#666666", annotation_clip=False,
                    )  # fmt: skip
        at -= tall + between
    keys: list[Any] = [Patch(facecolor=paint[n], label=n) for n in names]
    keys.append(Line2D([], [], color=INK, linewidth=1.3, marker="", label=f"what {rate:.1f} TB/s allow"))
    if hatched:
        keys.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="////", label="softmax: another function"))
    figure.text(0.02, 1 - 0.3 / height, "Attention kernels, bf16", fontsize=15, fontweight="bold", va="center")
    figure.text(
        0.02, 1 - 0.56 / height, f"TFLOP/s beside the bars; {origin(records)}", fontsize=9.5, color="#666666", va="center"
    )
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.012, 1 - 0.66 / height), ncols=4, frameon=False, fontsize=9.5,
        columnspacing=1.6, handlelength=1.5, borderaxespad=0.2,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def roofline(records: Sequence[Record], path: Path) -> Path:
    """TFLOP/s over FLOPs per byte, under the rates of a copy and of the cuBLAS products of the same processes."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    paint, rate = colours(records), bandwidth(records)
    intensity = [r["flops"] / r["bytes"] for r in records]
    speeds = [r["tflops"][n] for r in records for n in paint if n in r["tflops"]]
    peaks = [r["tflops"][CUBLAS] for r in records]
    peak = statistics.median(peaks)
    source = "copy" if any("terabytes_per_second" in r for r in records) else "bytes"
    across = min(intensity) / 1.6, max(intensity) * 2.6
    up = min(speeds) / 1.35, peak * 1.5
    shapes = list(dict.fromkeys(r["shape"]["dim"] for r in sorted(records, key=lambda r: -r["shape"]["dim"])))
    marks = dict(zip(shapes, "oDs^v", strict=False))
    hollow = False
    figure, both = plt.subplots(1, 2, figsize=(13, 6.6), sharey=True)
    figure.subplots_adjust(left=0.055, right=0.985, top=0.79, bottom=0.085, wspace=0.04)
    for axes, direction in zip(both, DIRECTIONS, strict=True):
        axes.set(xscale="log", yscale="log", xlim=across, ylim=up, xlabel="FLOPs per byte that must move")
        knee = peak / rate
        axes.fill_between([across[0], knee, across[1]], [across[0] * rate, peak, peak], up[1], color="#f3f3f3", zorder=0)
        axes.plot([across[0], knee], [across[0] * rate, peak], color=INK, linewidth=1.4, zorder=1)
        axes.plot([knee, across[1]], [peak, peak], color=INK, linewidth=1.4, zorder=1)
        if max(peaks) > min(peaks):
            axes.fill_between([knee, across[1]], min(peaks), max(peaks), color=FAINT, alpha=0.25, linewidth=0, zorder=1)
        axes.annotate(
            f"cuBLAS 8192³, {peak:.0f} TFLOP/s", (across[1], max(peaks)), (-6, 4), textcoords="offset points", ha="right",
            fontsize=9.5,
        )  # fmt: skip
        low = across[0] * 1.15
        axes.annotate(
            f"{source}, {rate:.1f} TB/s", (low, low * rate), (-2, 5), textcoords="offset points", fontsize=9.5,
            rotation=_slope(axes), rotation_mode="anchor",
        )  # fmt: skip
        labels = []
        for record in (r for r in records if r["config"]["direction"] == direction):
            x = record["flops"] / record["bytes"]
            for who, tflops in record["tflops"].items():
                if who in paint:
                    ours = who == "gemopt"
                    other = who.startswith(SOFTMAX_ONLY) and record["shape"]["act"] != "softmax"
                    hollow |= other
                    axes.plot(
                        x, tflops, marks[record["shape"]["dim"]], markersize=9 if ours else 5.5, zorder=4 if ours else 3,
                        color="white" if other else paint[who], markeredgecolor=paint[who] if other else "white",
                        markeredgewidth=1.2 if other else 0.8,
                    )  # fmt: skip
                    if ours:
                        labels.append((x, tflops, record["config"]["cell"]))
        axes.grid(which="major", color="#e6e6e6", linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        for axis, limits in ((axes.xaxis, across), (axes.yaxis, up)):
            steps = [m * 10**e for e in range(5) for m in (1, 2, 5) if limits[0] <= m * 10**e <= limits[1]]
            axis.set_ticks(steps, [f"{s:,}" for s in steps])
            axis.set_ticks([], minor=True)
        axes.tick_params(length=0, labelcolor="#555555", labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(direction, fontsize=11, fontweight="bold", loc="left", pad=6)
        _label(axes, labels, paint.get("gemopt", INK))
    both[0].set_ylabel("TFLOP/s")
    keys = [
        Line2D([], [], marker="o", linestyle="", color=c, markersize=9 if n == "gemopt" else 6, label=n)
        for n, c in paint.items()
    ]
    keys += [Line2D([], [], marker=m, linestyle="", color=FAINT, markersize=6, label=f"D = {d}") for d, m in marks.items()]
    if hollow:
        softmax = {"markerfacecolor": "white", "markeredgecolor": FAINT, "markeredgewidth": 1.2}
        keys.append(Line2D([], [], marker="o", linestyle="", markersize=6, label="softmax: another function", **softmax))
    figure.text(0.012, 0.962, "Roofline of the attention kernels, bf16", fontsize=15, fontweight="bold", va="center")
    figure.text(
        0.012, 0.922, f"cells by name at gemopt's points; {origin(records)}", fontsize=9.5, color="#666666", va="center"
    )
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.006, 0.905), ncols=6, frameon=False, fontsize=9.5,
        handletextpad=0.3, columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _slope(axes: Any) -> float:
    """Degrees at which a line of slope 1 climbs in log-log axes."""
    (x, y), (right, up) = axes.transData.transform([(10, 10), (100, 100)])
    return math.degrees(math.atan2(up - y, right - x))


Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


def _along(a: Sequence[float], b: Sequence[float], half: float) -> list[Box]:
    """Small boxes along a line."""
    count = max(int(math.dist(a, b) / max(half, 1.0)), 1)
    steps = [(a[0] + (b[0] - a[0]) * t / count, a[1] + (b[1] - a[1]) * t / count) for t in range(count + 1)]
    return [(x - half, y - half, x + half, y + half) for x, y in steps]


def _nearest(box: Box, point: Sequence[float]) -> tuple[float, float]:
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _hits(boxes: Sequence[Box], taken: Any) -> int:
    """How many pairs of a box and a row of `taken` overlap."""
    import numpy as np

    left, bottom, right, top = np.array(boxes, float).reshape(-1, 4).T[:, :, None]
    return int(((left < taken[:, 2]) & (right > taken[:, 0]) & (bottom < taken[:, 3]) & (top > taken[:, 1])).sum())


def _label(axes: Any, points: Sequence[tuple[float, float, str]], colour: str) -> None:
    """Names beside points, each where it covers no other name, point or ceiling, with a line where that is far."""
    import numpy as np

    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent()
    taken: list[Box] = []
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        if len(corners) == 1:
            taken += _along(corners[0], corners[0], 5)
        for a, b in pairwise(corners):
            taken += _along(a, b, 1)
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        if text.get_rotation():  # its extents are a large square: what counts is the diagonal
            high = 5 * figure.dpi / 72
            taken += _along((box.x0 + high, box.y0 + high), (box.x1 - high, box.y1 - high), high)
        else:
            taken.append(tuple(box.extents))
    ways = [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)]
    ways += [(right, up) for steep in (0.5, 1, 1.7, 3) for right in (1.0, -1.0) for up in (steep, -steep)]
    pixels = figure.dpi / 72
    for x, y, name in sorted(points, key=lambda p: (-p[0], -p[1])):
        at = axes.transData.transform((x, y))
        full = np.array(taken)
        others = [axes.transData.transform(p[:2]) for p in points if p[:2] != (x, y)]
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=8.5, color=colour, zorder=5)
        size = text.get_window_extent(renderer)
        best: tuple[float, float, float, list[Box]] | None = None
        for distance in range(8, 96, 3):
            for right, up in ways:
                longer = math.hypot(right, up)
                dx, dy = distance * pixels * right / longer, distance * pixels * up / longer
                dx -= 0 if right > 0 else size.width if right < 0 else size.width / 2
                dy -= size.height / 2 if right else 0 if up > 0 else size.height
                box = at[0] + dx, at[1] + dy, at[0] + dx + size.width, at[1] + dy + size.height
                near = _nearest(box, at)
                lead = _along(at, near, 1)[8:] if math.dist(at, near) > 11 * pixels else []
                nearer = [o for o in others if math.dist(o, _nearest(box, o)) < math.dist(at, near)]
                outside = box[0] < frame.x0 or box[1] < frame.y0 or box[2] > frame.x1 or box[3] > frame.y1
                cost = 1000 * _hits([(box[0] - 2, box[1] - 1, box[2] + 2, box[3] + 1)], full) + distance + 1e6 * outside
                cost += 100 * _hits(lead, full) + 30 * len(nearer)
                if best is None or cost < best[0]:
                    best = cost, dx, dy, [box, *lead]
            if best is not None and best[0] < distance + 3:  # those farther away cost more
                break
        assert best is not None
        _, dx, dy, covered = best
        taken += covered
        text.set_position((dx / pixels, (dy - (size.y0 - at[1])) / pixels))
        if len(covered) > 1:
            end = axes.transData.inverted().transform(_nearest(covered[0], at))
            axes.plot([x, end[0]], [y, end[1]], color=colour, linewidth=0.6, alpha=0.6, zorder=2.5)
