"""The notebooks' pictures. Device d, and whatever came from it, has the colour COLOURS[d]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection

from lesson import copies, signals
from pallas_collectives.replay import Report
from pallas_collectives.replay.steps import CORE, Compute, Course
from pallas_collectives.replay.style import COMPUTE, EMPTY, LINK, LOST, WAITING
from pallas_collectives.replay.style import DEVICES as COLOURS


def cells(axes: Any, x: float, y: float, colours: Sequence[str], size: float = 1.0) -> None:
    """A row of coloured cells, from left to right from (x, y)."""
    boxes(axes, [(x + i * size, y, size, size) for i in range(len(colours))], colours, lw=1.5)


def boxes(axes: Any, places: Sequence[Any], colours: Sequence[str], **look: Any) -> None:
    """Coloured boxes, each at (left, bottom, width, height), drawn as one: quick in a film."""
    corners = [
        [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        for x, y, width, height in places
    ]
    look = {"edgecolors": "white", **look}
    axes.add_collection(PolyCollection(corners, facecolors=colours, **look), autolim=False)


def grid(
    panels: dict[str, np.ndarray],
    *,
    x: str,
    y: str = "device",
    size: float = 0.42,
    numbers: dict[str, np.ndarray] | None = None,
) -> Any:
    """Panels side by side of cells coloured by the device that each number names; -1 is empty.

    Rows are devices; `size` is a cell's, in inches; `numbers` are written into a panel's cells.
    """
    widths = [np.shape(panel)[1] for panel in panels.values()]
    height = size * max(np.shape(panel)[0] for panel in panels.values()) + 1.0
    figure, all_axes = plt.subplots(
        1,
        len(panels),
        figsize=(max(4.0, size * sum(widths) + 1.0 * len(panels)), height),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    for axes, (title, owners) in zip(all_axes[0], panels.items(), strict=True):
        for row, owners_here in enumerate(np.asarray(owners)):
            colours = [EMPTY if d < 0 else COLOURS[d % len(COLOURS)] for d in owners_here]
            cells(axes, -0.5, row - 0.5, colours)
        for (row, column), number in np.ndenumerate((numbers or {}).get(title, np.empty((0, 0)))):
            axes.text(column, row, number, ha="center", va="center", color="white", fontsize=8)
        rows, columns = np.shape(owners)
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), title=title, xlabel=x)
        axes.set(yticks=range(rows), aspect="equal")
        axes.set_xticks(range(0, columns, max(1, columns // 8)))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    all_axes[0][0].set_ylabel(y)
    return figure


def space_time(report: Report, title: str, devices: Sequence[int] | None = None) -> Any:
    """Time to the right, a line for each device. Grey: it waits. Bands: copies from line to line,
    with a filled dot where the send semaphore is signalled, a hollow one where the receive
    semaphore is. Dotted: signals.
    """
    shown = list(range(len(report.engine.cores)) if devices is None else devices)
    row = {device: i for i, device in enumerate(shown)}
    figure, axes = plt.subplots(figsize=(9, 1.0 + 0.75 * len(shown)), layout="constrained")
    us = 1e6
    for device in shown:
        axes.axhline(row[device], color=COLOURS[device], lw=1.5, zorder=1)
        for block in report.engine.cores[device].blocks:
            span = [(block.began * us, (block.ended - block.began) * us)]
            axes.broken_barh(span, (row[device] - 0.09, 0.18), facecolors=WAITING, zorder=2)
    for source, target, sent, arrived in signals(report):
        if source in row and target in row:
            ends = [sent * us, arrived * us], [row[source], row[target]]
            axes.plot(*ends, ":", color=COLOURS[source], lw=1.2, zorder=1)
    for copy in copies(report):
        if copy.source not in row or copy.target not in row:
            continue
        x = np.array([copy.first, copy.leaves, copy.arrives, copy.arrives]) * us
        x[3] -= x[1] - x[0]
        y = [row[copy.source], row[copy.source], row[copy.target], row[copy.target]]
        colour = COLOURS[copy.source]
        axes.fill(x, y, facecolor=colour, edgecolor=colour, alpha=0.35, lw=1, zorder=3)
        axes.plot(x[1], y[0], "o", color=colour, markersize=6, zorder=4)
        axes.plot(x[2], y[2], "o", mfc="white", mec=colour, mew=1.8, markersize=6, zorder=4)
    axes.set_yticks(range(len(shown)), [f"device {d}" for d in shown])
    axes.set_ylim(len(shown) - 0.6, -0.4)
    axes.set(xlabel="modelled time, µs", xlim=(0, report.time * us * 1.02), title=title)
    axes.spines["left"].set_visible(False)
    return figure


def slots(report: Report, device: int) -> Any:
    """One device's slots in a reduce-scatter one way round, in one part: who is in them, when.

    Pale: a sum is being received; solid: it is there, until it has been sent on. Triangles: credits
    that the device gives to its neighbour upstream.
    """
    n, us = len(report.engine.cores), 1e6
    upstream = (device - 1) % n
    arriving = [c for c in copies(report) if c.target == device]
    leaving = [c for c in copies(report) if c.source == device and len(c.reads) == len(c.writes)]
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for step, copy in enumerate(arriving):
        slot = copy.writes[2][0]
        sent_on = leaving[step].leaves if step < len(leaving) else report.time
        colour = COLOURS[(upstream + n - 1 - step) % n]
        spans = (copy.begins, copy.arrives, 0.35), (copy.arrives, sent_on, 1.0)
        for start, end, alpha in spans:
            span = [(start * us, (end - start) * us)]
            axes.broken_barh(span, (slot - 0.35, 0.7), facecolors=colour, alpha=alpha)
        axes.text(copy.begins * us, slot, f"  step {step}", va="center")
    credits = [sent for source, target, sent, _ in signals(report) if source == device]
    barrier_ends = arriving[0].begins
    given = [sent * us for sent in credits if sent > barrier_ends]
    axes.plot(given, [-0.6] * len(given), "v", color="black", label="credit given", clip_on=False)
    axes.set_yticks(range(3), [f"slot {k}" for k in range(3)])
    axes.set(ylim=(2.5, -0.75), xlim=(0, report.time * us), xlabel="modelled time, µs")
    axes.set_title(f"The slots of device {device}")
    axes.legend(loc="lower left", frameon=False)
    return figure


def tour(axes: Any, places: Sequence[tuple[int, int]], title: str) -> None:
    """A ring over chips on a grid: chips at their (row, column), hops as arrows in their order."""
    axes.set_aspect("equal")
    axes.axis("off")
    for k, (row, column) in enumerate(places):
        next_row, next_column = places[(k + 1) % len(places)]
        links = abs(next_row - row) + abs(next_column - column)
        bend = f"arc3,rad={0.0 if links == 1 else 0.25}"
        style = {"arrowstyle": "-|>", "color": COLOURS[k], "lw": 2, "connectionstyle": bend}
        ends = {"xy": (next_column, next_row), "xytext": (column, row)}
        axes.annotate("", **ends, arrowprops={**style, "shrinkA": 10, "shrinkB": 12})
    for k, (row, column) in enumerate(places):
        axes.plot(column, row, "o", color=COLOURS[k], markersize=17, zorder=4)
        axes.text(column, row, k, color="white", ha="center", va="center", zorder=5)
    rows, columns = (1 + max(along) for along in zip(*places, strict=True))
    axes.set(xlim=(-0.7, columns - 0.3), ylim=(rows - 0.3, -0.7), title=title)


def overlap(panels: dict[str, tuple[Report, float]]) -> Any:
    """What device 0 does in each of some replays: its copies, and its core beside them.

    With each comes the time of a product that follows the kernel, 0 without a product.
    """
    us, end = 1e6, max(report.time + after for report, after in panels.values())
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(9, 1.4 * len(panels) + 0.5), sharex=True, layout="constrained"
    )
    for axes, (title, (report, after)) in zip(all_axes, panels.items(), strict=True):
        core = report.engine.cores[0]
        sent = [(c.begins, c.leaves) for c in copies(report) if c.source == 0]
        waits = [
            (b.began, b.ended)
            for b in core.blocks
            if b.cause is not None and b.cause.column.target is not None
        ]
        begins, ends = [0.0, *(e for _, e in waits)], [*(s for s, _ in waits), report.time]
        works = list(zip(begins, ends, strict=True))
        if after:
            works = [(report.time, report.time + after)]
        rows = ((sent, 1, LINK), (works, 0, COMPUTE), (waits, 0, WAITING))
        for spans, row, colour in rows:
            bars = [(start * us, (stop - start) * us) for start, stop in spans]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour)
        axes.set_yticks([1, 0], ["on the wire", "multiplies"])
        axes.set(xlim=(0, end * us), title=title)
    all_axes[-1].set_xlabel("modelled time, µs")
    return figure


def lanes(panels: dict[str, Course]) -> Any:
    """The engines of a device in each of some steps: its core, and what runs beside it.

    What the core waits for is exposed, in the colour of lost time.
    """
    us, end = 1e6, max(course.time for course in panels.values())
    figure, all_axes = plt.subplots(
        *(len(panels), 1),
        figsize=(9, 1.4 * len(panels) + 0.6),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    all_axes = all_axes[:, 0]
    for axes, (title, course) in zip(all_axes, panels.items(), strict=True):
        engines = list(dict.fromkeys([CORE, *(span.engine for span in course.spans)]))
        for span in course.spans:
            part = course.parts[span.part]
            works = isinstance(part, Compute)
            colour = COMPUTE if works else LOST if span.engine == CORE else LINK
            row = engines.index(span.engine)
            bar = (span.begin * us, (span.end - span.begin) * us)
            axes.broken_barh([bar], (row - 0.35, 0.7), facecolors=colour, edgecolors="white")
        axes.set_yticks(range(len(engines)), engines)
        axes.set(xlim=(0, end * us), title=title)
        axes.invert_yaxis()
    all_axes[-1].set_xlabel("modelled time, µs")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COMPUTE, LOST, LINK)]
    figure.legend(handles, ["computes", "waits", "gathers"], loc="outside lower center", ncols=3)
    return figure
