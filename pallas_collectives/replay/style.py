"""What colours mean, in every picture: replays, plots of results, notebooks, films and reports.

Each is told apart by people who see colours differently, in print, and on light and dark pages:
pictures have a background of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Device d, and whatever comes from it.
DEVICES = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf"),
    "#bcbd22",
)
EMPTY, WAITING = "#f0f0f0", "#d9d9d9"  # a place that holds nothing yet; a device that waits

# What is at work.
COMPUTE = "#44546a"  # a core, or a product
LINK = "#c8a415"  # a link, and what is on the wire
LOCAL = "#8fae7f"  # copies within a device
LOST = "#b00020"  # time that nothing hides, or a wait for ever

# Lines against size: a colour for each algorithm or pod; and what they are held against.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LAX: dict[str, Any] = {"color": "0.55", "linestyle": "--", "marker": "s"}
BOUND: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1}

_UNITS = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def device(number: int) -> str:
    """The colour of a device."""
    return DEVICES[number % len(DEVICES)]


def nbytes(size: float) -> str:
    """A number of bytes in binary units: "64 KiB"."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, ""))
    return f"{size / unit:.3g} {name}B"


def size_axis(axes: Any, sizes: Collection[float], label: str) -> None:
    """A logarithmic x axis of bytes: at most six of the sizes, in binary units."""
    from matplotlib import ticker

    known = sorted(set(map(float, sizes)))
    shown = known[:: -(-len(known) // 6)]
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(shown, [nbytes(size) for size in shown])
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def count_axis(axis: Any) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
