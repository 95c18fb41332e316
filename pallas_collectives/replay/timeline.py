"""A finished replay as intervals: what each modelled device and each link did when. Feeds
`trace.py` and `draw.py`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pallas_collectives.replay import style
from pallas_collectives.replay.program import Start
from pallas_collectives.replay.report import Report

FOR_EVER = "waits for ever"  # the name of a wait in a deadlock; it is drawn to the end
_BEYOND = 1.1  # so far past the last event
_COLOURS = {
    "core": style.WAITING,
    "remote copies": style.LINK,
    "local copies": style.LOCAL,
    "link": style.LINK,
}


@dataclasses.dataclass(frozen=True)
class Interval:
    """Something that lasted from `start` to `end` (seconds). `row`: which line of the picture it
    belongs on.
    """

    group: str
    row: str
    start: float
    end: float
    name: str
    detail: dict[str, str]


Row = tuple[str, str, list[Interval]]  # of a picture: its label, its kind, and what is drawn


def intervals(report: Report) -> list[Interval]:
    """Waits and copies of every modelled device, and the copies on every link they used, by start
    time.
    """
    engine = report.engine
    representative = _representative_links(report)
    out: list[Interval] = []
    for core in engine.cores:
        group = f"device {core.device}"
        count = int(engine.classes.device_count[engine.classes.of_device[core.device]])
        stands_for = {"stands for": f"{count} devices"} if count > 1 else {}
        for block in core.blocks:
            source = block.column.source
            sem = engine.program.semaphores[block.sem].name
            detail = {"line": source.line, "semaphore": sem, **stands_for}
            name = f"wait {source.scope}".strip()
            out.append(Interval(group, "core", block.began, block.ended, name, detail))
        if core.waiting is not None:
            block, source = core.waiting, core.waiting.column.source
            sem = engine.program.semaphores[block.sem].name
            detail = {"line": source.line, "semaphore": sem, **stands_for}
            end = max(report.time, engine.now) * _BEYOND
            out.append(Interval(group, "core", block.began, end, FOR_EVER, detail))
        for message in core.messages:
            if not isinstance(message.column, Start) or math.isnan(message.arrived):
                continue
            column = message.column
            remote = column.target is not None
            name = f"{'to' if remote else 'copy'} {column.dst.buffer.name}"
            detail = {
                "line": column.source.line,
                "bytes": str(int(message.nbytes)),
                "scope": column.source.scope,
                **stands_for,
            }
            row = "remote copies" if remote else "local copies"
            out.append(Interval(group, row, message.issued, message.arrived, name, detail))
            for resource, _ in message.uses:
                if resource in representative:
                    link = representative[resource]
                    name = f"from device {core.device}"
                    out.append(Interval("links", link, message.began, message.left, name, detail))
    return sorted(out, key=lambda i: (i.start, i.end))


def _representative_links(report: Report) -> dict[int, str]:
    """A link's name for each class of links."""
    _, first = np.unique(report.engine.classes.of_link, return_index=True)
    return {k: report.machine.link_name(int(link)) for k, link in enumerate(first)}


@dataclasses.dataclass(frozen=True)
class Lane:
    """All that devices of like behaviour did, row by row. `devices` names them."""

    devices: str
    rows: dict[str, list[Interval]]

    def labelled(self) -> list[Row]:
        """Its rows."""
        return [(f"{self.devices}: {row}", row, self.rows[row]) for row in sorted(self.rows)]


def colour(kind: str, name: str) -> str:
    """The colour of an interval of a name in a row of a kind."""
    return style.LOST if name == FOR_EVER else _COLOURS[kind]


def lanes(report: Report) -> tuple[list[Lane], list[tuple[str, list[Interval]]]]:
    """A lane for each group of devices that did the same at the same times, and (name, intervals)
    of each link that was used, the busiest first.
    """
    of_device: dict[str, dict[str, list[Interval]]] = {}
    links: dict[str, list[Interval]] = {}
    for interval in intervals(report):
        if interval.group == "links":
            links.setdefault(interval.row, []).append(interval)
        else:
            rows = of_device.setdefault(interval.group, {})
            rows.setdefault(interval.row, []).append(interval)
    alike: dict[object, list[str]] = {}
    for group in sorted(of_device, key=_number):
        alike.setdefault(_behaviour(of_device[group]), []).append(group)
    folded = [
        Lane(_members(groups, of_device[groups[0]]), of_device[groups[0]])
        for groups in alike.values()
    ]
    busiest = sorted(links.items(), key=lambda item: -sum(i.end - i.start for i in item[1]))
    return folded, busiest


def _behaviour(rows: dict[str, list[Interval]]) -> object:
    """What devices have in common that behave alike: times to a nanosecond, and what happened."""
    return tuple(
        (row, *((round(i.start * 1e9), round(i.end * 1e9), i.name) for i in rows[row]))
        for row in sorted(rows)
    )


def _members(groups: list[str], rows: dict[str, list[Interval]]) -> str:
    first = next(iter(rows.values()))[0]
    folded = first.detail.get("stands for")
    if len(groups) == 1:
        return groups[0] + (f" (and {int(folded.split()[0]) - 1} alike)" if folded else "")
    return f"{groups[0]} (and {len(groups) - 1} alike)"


def _number(group: str) -> int:
    return int(group.rpartition(" ")[2])
