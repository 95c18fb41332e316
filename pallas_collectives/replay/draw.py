"""Pictures of replays, in matplotlib (the `notebooks` or `test` extra)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pallas_collectives.replay import style, timeline
from pallas_collectives.replay.engine import Message
from pallas_collectives.replay.report import Report


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install -e '.[notebooks]' in the clone"
        ) from error
    return plt


def gantt(report: Report, *, max_rows: int = 40) -> Any:
    """Time from left to right, rows for each device and one for each link: waits, copies, and what
    each link carried. Returns the figure.

    Devices that do the same at the same times share their rows. Of more rows than `max_rows`, whole
    devices from the first on and the busiest links, by halves; the title says what is left out.
    """
    plt = _pyplot()
    folded, links = timeline.lanes(report)
    for_links = min(len(links), max(max_rows // 2, max_rows - sum(len(x.rows) for x in folded)))
    rows: list[timeline.Row] = []
    shown = 0
    for lane in folded:
        if rows and len(rows) + len(lane.rows) > max_rows - for_links:
            break
        shown += 1
        rows += lane.labelled()
    drawn = links[: max(1, max_rows - len(rows))]
    rows += [(name, "link", spans) for name, spans in drawn]
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.28 * len(rows)), layout="constrained")
    for y, (_, kind, spans) in enumerate(rows):
        axes.broken_barh(
            [(i.start * 1e6, (i.end - i.start) * 1e6) for i in spans],
            (y - 0.4, 0.8),
            facecolors=[timeline.colour(kind, i.name) for i in spans],
            edgecolors="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("modelled time, µs")
    hidden = {"kinds of device": len(folded) - shown, "links": len(links) - len(drawn)}
    more = " and ".join(f"{number} more {what}" for what, number in hidden.items() if number)
    title = f"{report.machine}: waits, copies (remote ones and links: ochre)"
    axes.set_title(f"{title}; {more} not drawn" if more else title)
    return figure


def link_heat(report: Report) -> Any:
    """The torus, each link coloured by the share of the time it was busy. Returns the figure.

    Links one way are drawn as one bar, those back as another beside it. A third torus axis is shown
    as one panel a layer; links along it as squares at their chip. Links that wrap round leave the
    panel. The colours end at the busiest link's share, which the scale tells.
    """
    plt = _pyplot()
    machine = report.machine
    shape, n_dims = machine.shape, len(machine.shape)
    busy = (report.link_bytes / machine.link_capacity)[: 2 * n_dims * machine.n_chips]
    busy = busy / max(report.time, 1e-30)
    layers = shape[2] if n_dims == 3 else 1
    rows, columns = shape[0], shape[1] if n_dims > 1 else 1
    cell = min(0.9, max(0.45, 4 / max(rows, columns)))  # inches from chip to chip
    size = 1.5 + layers * (0.8 + cell * (columns + 1)), 1.2 + cell * (rows + 1)
    figure, panels = plt.subplots(1, layers, figsize=size, squeeze=False, layout="constrained")
    from matplotlib.collections import LineCollection

    colours: dict[str, Any] = {"cmap": "viridis", "norm": plt.Normalize(0, max(busy.max(), 1e-9))}
    point = cell * 72  # in points, from a chip to the next
    for layer, axes in enumerate(panels[0]):
        lines: list[Any] = []
        shares: list[float] = []
        for chip in range(machine.n_chips):
            at = np.unravel_index(chip, shape)
            if n_dims == 3 and at[2] != layer:
                continue
            here = np.array([float(at[1]) if n_dims > 1 else 0.0, float(at[0])])
            axes.plot(*here, "o", color="black", markersize=0.08 * point, zorder=3)
            for axis, backwards in itertools.product(range(n_dims), (0, 1)):
                at_edge = at[axis] == (0 if backwards else shape[axis] - 1)
                if shape[axis] == 1 or (at_edge and not machine.wraps[axis]):
                    continue
                share = busy[(chip * n_dims + axis) * 2 + backwards]
                sign = 1 - 2 * backwards
                along = np.array([(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)][axis])
                start = here + 0.12 * sign * along[::-1] + 0.15 * sign * along
                if axis == 2:
                    marker: dict[str, Any] = {"marker": "s", "s": (0.13 * point) ** 2, "zorder": 3}
                    axes.scatter(*(here + 0.3 * sign), c=[share], **marker, **colours)
                    continue
                lines.append((start, start + (0.45 if at_edge else 0.7) * sign * along))
                shares.append(share)
        bars = LineCollection(lines, linewidths=0.13 * point, array=np.array(shares), **colours)
        axes.add_collection(bars)
        axes.set(xlabel="y", ylabel="x", aspect="equal")
        axes.set(xticks=range(columns), yticks=range(rows))
        axes.set(xlim=(-0.8, columns - 0.2), ylim=(-0.8, rows - 0.2))
        axes.set_title(f"z = {layer}" if layers > 1 else str(machine))
    scale = plt.cm.ScalarMappable(**colours)
    label = "share of the time busy (modelled)"
    figure.colorbar(scale, ax=panels[0].tolist(), label=label, shrink=0.8)
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
    for (name, seconds), colour in zip(times.items(), itertools.cycle(style.LINES), strict=False):
        look = {"marker": "o", "markersize": 3, "color": colour, "label": name}
        axes.plot(sizes, np.array(seconds) * 1e6, **look)
    axes.plot(sizes, np.array(bounds) * 1e6, **style.BOUND, label="bound")
    axes.set(yscale="log", ylabel="modelled time, µs")
    style.size_axis(axes, sizes, "bytes per device")
    style.count_axis(axes.yaxis)
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
    axes.scatter(
        *place.T, s=420, c=[style.DEVICES[d % len(style.DEVICES)] for d in range(n)], zorder=3
    )
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
                colours.append(style.device(source))
        moving.set_offsets(np.array(points).reshape(-1, 2))
        moving.set_facecolor(colours or "none")
        title.set_text(f"{now * 1e6:.1f} µs (modelled)")
        return moving, title

    return FuncAnimation(figure, show, frames=frames, interval=80)


def _target(message: Message, device: int) -> int | None:
    target = getattr(message.column, "target", None)
    if isinstance(target, np.ndarray):
        target = target[np.searchsorted(message.column.lanes, device)]
    return None if target is None else int(target)
