"""Draws time lines as lanes: the core's work and waits, and the engines beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Stepped
from pallas_collectives.replay import style

_COLOURS = {
    "compute": style.COMPUTE,
    "packing": style.LOCAL,
    "exposed": style.LOST,
    "collective": style.LINK,
}
_LABELS = {
    "compute": "the core's work",
    "packing": "its work for collectives alone",
    "exposed": "the core waits",
    "collective": "a collective",
}
_LANES = ("core", "wire", "DMA", "SparseCore")


def save(path: str, rows: Sequence[Stepped]) -> None:
    """Writes a PNG: a panel for each row, lax's above ours.

    Rows of one program on one topology share their time axis.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [row for row in rows if row.spans]
    if not drawn:
        return
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(12, 0.6 + 1.5 * len(drawn)), layout="constrained")
        figure.suptitle("Modelled, not measured: XLA's cycles, and the replay of collectives")
        panels = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
        for panel, row in zip(panels, drawn, strict=True):
            alike = [r for r in drawn if (r.topology, r.op) == (row.topology, row.op)]
            _draw(panel, row, max(r.time_us or 0.0 for r in alike))
        patches = [Patch(color=_COLOURS[kind], label=label) for kind, label in _LABELS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    figure.savefig(Path(path), format="png", dpi=120)


def _draw(panel: Any, row: Stepped, until: float) -> None:
    used = [lane for lane in _LANES if any(span[0] == lane for span in row.spans)]
    for lane, kind, _, begin, end in row.spans:
        place = (used.index(lane) - 0.4, 0.8)
        panel.broken_barh([(begin, end - begin)], place, facecolors=_COLOURS[kind], linewidth=0)
    panel.set_yticks(range(len(used)), used)
    panel.set_xlim(0, until)
    panel.invert_yaxis()
    panel.set_xlabel("µs")
    times = f"{row.time_us:.0f} µs, exposed {row.exposed_us:.0f}"
    panel.set_title(f"{row.op}, {row.topology}, {row.under}: {times}", loc="left", fontsize=8)
