"""Pictures of replays, in matplotlib (the `notebooks` or `test` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pallas_collectives.replay.report import Report
from pallas_collectives.replay.timeline import intervals

_COLOURS = {"core": "#c9c9c9", "remote copies": "#1f77b4", "local copies": "#2ca02c"}


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'pallas-collectives[notebooks]'"
        ) from error
    return plt


def gantt(report: Report, *, max_rows: int = 40) -> Any:
    """Time from left to right, a row per device and link: waits, copies, and what each link
    carried. Returns the figure.
    """
    plt = _pyplot()
    rows: dict[tuple[str, str], list[Any]] = {}
    for interval in intervals(report):
        rows.setdefault((interval.group, interval.row), []).append(interval)
    names = sorted(rows, key=lambda r: (r[0] == "links", _natural(r[0]), _natural(r[1])))
    names = names[:max_rows]
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.28 * len(names)), layout="constrained")
    for y, name in enumerate(names):
        spans = [(i.start * 1e6, (i.end - i.start) * 1e6) for i in rows[name]]
        axes.broken_barh(
            spans,
            (y - 0.4, 0.8),
            facecolors=_COLOURS.get(name[1], "#ff7f0e"),
            edgecolors="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(names)), [f"{g}: {r}" if g != "links" else r for g, r in names])
    axes.invert_yaxis()
    axes.set_xlabel("modelled time, µs")
    axes.set_title(f"{report.machine}: waits (grey), remote and local copies, links (orange)")
    return figure


def link_heat(report: Report) -> Any:
    """The torus, each link coloured by the share of the time it was busy. Returns the figure.

    A third torus axis is shown as one panel a layer; links along it as dots at their chip. Links
    that wrap round leave the panel.
    """
    plt = _pyplot()
    machine = report.machine
    shape, n_dims = machine.shape, len(machine.shape)
    busy = report.link_bytes / machine.link_capacity / max(report.time, 1e-30)
    layers = shape[2] if n_dims == 3 else 1
    figure, panels = plt.subplots(
        1, layers, figsize=(1.5 + 4 * layers, 4.2), squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("viridis")
    for chip in range(machine.n_chips):
        at = np.unravel_index(chip, shape)
        axes = panels[0][at[2] if n_dims == 3 else 0]
        x, y = float(at[1]) if n_dims > 1 else 0.0, float(at[0])
        axes.plot(x, y, "o", color="black", markersize=3)
        for axis in range(n_dims):
            for backwards in (0, 1):
                if shape[axis] == 1:
                    continue
                share = busy[(chip * n_dims + axis) * 2 + backwards]
                edge = at[axis] == (0 if backwards else shape[axis] - 1)
                if edge and not machine.wraps[axis]:
                    continue
                step = 0.45 * (-1 if backwards else 1)
                aside = 0.06 * (-1 if backwards else 1)
                if axis == 0:
                    ends = ((x + aside, x + aside), (y, y + step))
                elif axis == 1:
                    ends = ((x, x + step), (y + aside, y + aside))
                else:
                    axes.plot(x + aside, y + aside, "s", color=colours(share), markersize=5)
                    continue
                axes.plot(*ends, color=colours(share), linewidth=3, solid_capstyle="butt")
    for k, axes in enumerate(panels[0]):
        axes.set_xlabel("y")
        axes.set_ylabel("x")
        axes.set_aspect("equal")
        axes.set_title(f"z = {k}" if layers > 1 else str(machine))
    scale = plt.cm.ScalarMappable(cmap=colours)
    figure.colorbar(scale, ax=panels[0].tolist(), label="share of the time busy (modelled)")
    return figure


def time_against_size(
    sizes: Sequence[float],
    times: Mapping[str, Sequence[float]],
    bounds: Sequence[float],
    title: str,
) -> Any:
    """Seconds against bytes, both logarithmic, one line per algorithm and the bound. Returns the
    figure.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, seconds in times.items():
        axes.loglog(sizes, np.array(seconds) * 1e6, marker="o", markersize=3, label=name)
    axes.loglog(sizes, np.array(bounds) * 1e6, "k--", linewidth=1, label="bound")
    axes.set_xlabel("bytes per device")
    axes.set_ylabel("modelled time, µs")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    return figure


def ring_animation(report: Report, *, frames: int = 60) -> Any:
    """Devices on a circle and the copies between them as they travel, as a matplotlib animation.
    For rings of one axis.
    """
    plt = _pyplot()
    from matplotlib.animation import FuncAnimation

    engine = report.engine
    n = engine.program.n_devices
    angle = 2 * np.pi * np.arange(n) / n
    place = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    flights = [
        (core.device, target, m.issued, m.arrived)
        for core in engine.cores
        for m in core.messages
        for target in [_target(m, core.device)]
        if target is not None and m.nbytes
    ]
    figure, axes = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    axes.set_aspect("equal")
    axes.axis("off")
    axes.scatter(*place.T, s=420, c=[plt.get_cmap("tab10")(d % 10) for d in range(n)], zorder=3)
    for device, (x, y) in enumerate(place):
        axes.text(x, y, str(device), ha="center", va="center", color="white", zorder=4)
    moving = axes.scatter([], [], s=60, zorder=2)
    title = axes.set_title("")

    def show(frame: int) -> tuple[Any, ...]:
        now = report.time * frame / max(frames - 1, 1)
        points, colours = [], []
        for source, target, start, end in flights:
            if start <= now < end:
                share = (now - start) / (end - start)
                points.append(place[source] + share * (place[target] - place[source]))
                colours.append(plt.get_cmap("tab10")(source % 10))
        moving.set_offsets(np.array(points).reshape(-1, 2))
        moving.set_facecolor(colours or "none")
        title.set_text(f"{now * 1e6:.1f} µs (modelled)")
        return moving, title

    return FuncAnimation(figure, show, frames=frames, interval=80)


def _target(message: Any, device: int) -> int | None:
    target = getattr(message.column, "target", None)
    if isinstance(target, np.ndarray):
        target = target[np.searchsorted(message.column.lanes, device)]
    return None if target is None else int(target)


def _natural(text: str) -> list[Any]:
    import re

    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
