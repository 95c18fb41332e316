"""Pictures of results: bandwidth and time against size, one line for each algorithm and for lax."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Measured, Replayed, Row
from benchmarks.settings import FlagError

_LAX = {"color": "0.55", "linestyle": "--", "marker": "s"}
_BOUND = {"color": "black", "linestyle": ":", "label": "bound"}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by all
_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))


def check_installed() -> None:
    """Raises FlagError where there is no matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        rule = "matplotlib is not installed"
        raise FlagError("a plot", rule, "`pip install matplotlib`, or leave the plot out")


def save(path: str, parts: Mapping[str, Sequence[Row]], environment: Mapping[str, Any]) -> bool:
    """Writes a PNG: a line of panels for each collective; whether there was anything to plot."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = _timed(parts)
    ops = list(dict.fromkeys(_panel(row) for row in rows))
    if not ops:
        return False
    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9}):
        figure = Figure(figsize=(10, 0.5 + 3.1 * len(ops)), layout="constrained")
        figure.suptitle(_title(rows, environment))
        panels = figure.subplots(len(ops), 2, squeeze=False)
        for op, (bandwidth, time) in zip(ops, panels, strict=True):
            _draw([row for row in rows if _panel(row) == op], op, bandwidth, time)
    figure.savefig(Path(path), format="png", dpi=120)
    return True


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
    where = f" on {row.machine}" if isinstance(row, Replayed) else ""
    return f"{row.op}, {row.type}, {row.devices} devices{where}"


def _title(rows: Sequence[Any], environment: Mapping[str, Any]) -> str:
    if isinstance(rows[0], Replayed):
        return "Modelled, not measured: the kernels' own DMA programs"
    mesh = ", ".join(f"{axis}={size}" for axis, size in environment["mesh"].items())
    return f"{environment['devices']} x {environment['chip']}, mesh {mesh}"


def _line(row: Any) -> str:
    backend = getattr(row, "backend", "pallas")
    if backend == "xla":
        return "lax"
    return row.algorithm or (backend if isinstance(row, Measured) else "chosen by size")


def _draw(rows: Sequence[Any], title: str, bandwidth: Any, time: Any) -> None:
    from matplotlib import ticker

    names = list(dict.fromkeys(map(_line, rows)))
    colours = iter(_COLOURS * len(names))
    for name in names:
        of_name = sorted((row for row in rows if _line(row) == name), key=lambda row: row.size)
        style = _LAX if name == "lax" else {"color": next(colours), "marker": "o"}
        style = {"label": name, "markersize": "3", **style}
        sizes = [row.size for row in of_name]
        bandwidth.plot(sizes, [row.busbw for row in of_name], **style)
        latency = f"{of_name[0].time_us:.3g} µs at {_bytes(sizes[0])}"
        times = [row.time_us for row in of_name]
        time.plot(sizes, times, **{**style, "label": f"{name}: {latency}"})
        if isinstance(of_name[0], Measured):
            least, most = (
                [getattr(row, f"time_us_{m}") for row in of_name] for m in ("min", "max")
            )
            time.fill_between(sizes, least, most, color=style["color"], alpha=0.15, linewidth=0)
    if bounds := sorted({(row.size, row.bound_us) for row in rows if getattr(row, "bound_us", 0)}):
        time.plot(*zip(*bounds, strict=True), **_BOUND)
    sizes = sorted({row.size for row in rows})
    for panel, label in ((bandwidth, "bus bandwidth (GB/s)"), (time, "time (µs)")):
        panel.set(xscale="log", yscale="log", xlabel="size of the full array (bytes)", ylabel=label)
        shown = sizes[:: -(-len(sizes) // 6)]
        panel.set_xticks(shown, [_bytes(size) for size in shown])
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_title(title, fontsize=9)
        panel.legend(fontsize=8)


def _bytes(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, ""))
    return f"{size / unit:.3g}{name}"
