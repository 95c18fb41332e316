"""Pictures of results: bandwidth and time against size, one line for each algorithm and for lax.

Of collectives over narrower wires: error against time.
"""

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Measured, Replayed, Row, Wired
from benchmarks.settings import FlagError
from pallas_collectives.replay import style


def check_installed() -> None:
    """Raises FlagError where there is no matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        rule = "matplotlib is not installed"
        raise FlagError("a plot", rule, "`pip install matplotlib`, or leave the plot out")


def save(path: str, parts: Mapping[str, Sequence[Row]], environment: Mapping[str, Any]) -> bool:
    """Writes a PNG: two panels for each collective; whether there was anything to plot.

    What was measured has a line for each algorithm; what was replayed, for each pod. Of rows over
    narrower wires it is `error_against_time`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if wired := [row for rows in parts.values() for row in rows if isinstance(row, Wired)]:
        if not any(row.of_plain for row in wired):
            return False
        error_against_time(wired).savefig(Path(path), format="png", dpi=120)
        return True
    rows = _timed(parts)
    ops = list(dict.fromkeys(_panel(row) for row in rows))
    if not ops:
        return False
    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9}):
        figure = Figure(figsize=(10, 0.5 + 3.1 * len(ops)), layout="constrained", facecolor="white")
        figure.suptitle(_title(rows, environment))
        panels = figure.subplots(len(ops), 2, squeeze=False)
        for op, (bandwidth, time) in zip(ops, panels, strict=True):
            _draw([row for row in rows if _panel(row) == op], op, bandwidth, time)
    figure.savefig(Path(path), format="png", dpi=120)
    return True


def error_against_time(rows: Sequence[Wired]) -> Any:
    """A figure: a panel for each collective, and in it a point for each wire, on a line a place.

    rows: as `wired_rows` gives them; those without a wire, or without a time, are no points.
    """
    from matplotlib.figure import Figure

    points = [row for row in rows if row.of_plain and row.off]
    ops = list(dict.fromkeys(row.op for row in points))
    size = (0.6 + 3.6 * len(ops), 3.4)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(ops), squeeze=False, sharex=True, sharey=True)[0]
    for op, panel in zip(ops, panels, strict=True):
        of_op = [row for row in points if row.op == op]
        for number, place in enumerate(dict.fromkeys(map(_place, of_op))):
            there = sorted(
                (row for row in of_op if _place(row) == place), key=lambda row: row.of_plain or 0
            )
            look = {"color": style.LINES[number % len(style.LINES)], "marker": "o", "lw": 0.8}
            panel.plot([r.of_plain for r in there], [r.off for r in there], **look, label=place)
            for row in there:
                at = row.of_plain, row.off
                panel.annotate(row.wire, at, (4, 4), textcoords="offset points", fontsize=7)
        panel.axvline(100, **style.BOUND)
        panel.set(yscale="log", title=op, xlabel="time, % of that without a wire")
        style.count_axis(panel.yaxis)
        panel.margins(y=0.15)
        panel.set_xlim(0, max(110, *(1.1 * (row.of_plain or 0) for row in points)))
        panel.legend(fontsize=7)
    panels[0].set_ylabel("largest error, % of the largest number")
    return figure


def _place(row: Wired) -> str:
    return f"{row.where}, {row.devices} devices, {style.nbytes(row.size)}"


def _timed(parts: Mapping[str, Sequence[Row]]) -> list[Any]:
    """What was measured; where nothing was, what was replayed."""
    for kind in (Measured, Replayed):
        found = [
            row for rows in parts.values() for row in rows if isinstance(row, kind) and row.time_us
        ]
        if found:
            return found
    return []


def _panel(row: Any) -> str:
    where = "" if isinstance(row, Replayed) else f", {row.devices} devices"
    return f"{row.op}, {row.type}{where}"


def _title(rows: Sequence[Any], environment: Mapping[str, Any]) -> str:
    if isinstance(rows[0], Replayed):
        return "Modelled, not measured: the kernels' own DMA programs"
    mesh = ", ".join(f"{axis}={size}" for axis, size in environment["mesh"].items())
    return f"{environment['devices']} x {environment['chip']}, mesh {mesh}"


def _line(row: Any) -> str:
    if isinstance(row, Replayed):
        over = f" {row.over}" if row.over else ""
        algorithm = f", {row.algorithm}" if row.algorithm else ""
        return f"{row.machine}{over}, {row.devices}{algorithm}"
    return "lax" if row.backend == "xla" else row.algorithm or row.backend


def _draw(rows: Sequence[Any], title: str, bandwidth: Any, time: Any) -> None:
    names = list(dict.fromkeys(map(_line, rows)))
    colours = itertools.cycle(style.LINES)
    bounds: set[Any] = set()
    for name in names:
        of_name = sorted((row for row in rows if _line(row) == name), key=lambda row: row.size)
        look = style.LAX if name == "lax" else {"color": next(colours), "marker": "o"}
        look = {"label": name, "markersize": "3", **look}
        sizes = [row.size for row in of_name]
        bandwidth.plot(sizes, [row.busbw for row in of_name], **look)
        latency = f"{of_name[0].time_us:.3g} µs at {style.nbytes(sizes[0])}"
        times = [row.time_us for row in of_name]
        time.plot(sizes, times, **{**look, "label": f"{name}: {latency}"})
        if isinstance(of_name[0], Measured):
            least, most = (
                [getattr(row, f"time_us_{m}") for row in of_name] for m in ("min", "max")
            )
            time.fill_between(sizes, least, most, color=look["color"], alpha=0.15, linewidth=0)
        bound = tuple((row.size, row.bound_us) for row in of_name if getattr(row, "bound_us", 0))
        if bound and bound not in bounds:
            label = None if bounds else "bound"
            bounds.add(bound)
            most_bus = [r.busbw * r.time_us / r.bound_us for r in of_name if r.bound_us]
            own = style.BOUND | {"color": look["color"]}
            time.plot(*zip(*bound, strict=True), **own, label=label)
            bandwidth.plot([size for size, _ in bound], most_bus, **own, label=label)
    for panel, label in ((bandwidth, "bus bandwidth (GB/s)"), (time, "time (µs)")):
        panel.set(yscale="log", ylabel=label)
        style.size_axis(panel, {row.size for row in rows}, "size of the full array")
        style.count_axis(panel.yaxis)
        panel.set_title(title, fontsize=9)
        panel.legend(fontsize=7)
