"""A finished replay as intervals: what each modelled device and each link did when. Feeds
`trace.py` and `draw.py`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pallas_collectives.replay.program import Start
from pallas_collectives.replay.report import Report


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
