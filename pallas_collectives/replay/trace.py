"""Writes a replay as a Chrome trace (JSON), which chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pallas_collectives.replay.report import Report
from pallas_collectives.replay.timeline import Interval, intervals


def write_trace(report: Report, path: str | Path) -> None:
    """Writes the timeline of every modelled device and link to `path`, times in microseconds of the
    model.
    """
    Path(path).write_text(json.dumps({"traceEvents": events(report), "displayTimeUnit": "ns"}))


def events(report: Report) -> list[dict[str, Any]]:
    """The trace's events: a process per device and one for the links; overlapping copies on rows of
    their own.
    """
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str, int], int] = {}
    busy_until: dict[tuple[str, str], list[float]] = {}
    out: list[dict[str, Any]] = []

    def thread(interval: Interval) -> tuple[int, int]:
        pid = processes.setdefault(interval.group, len(processes) + 1)
        lanes = busy_until.setdefault((interval.group, interval.row), [])
        lane = next((i for i, end in enumerate(lanes) if end <= interval.start), len(lanes))
        lanes[lane : lane + 1] = [interval.end]
        return pid, threads.setdefault((interval.group, interval.row, lane), len(threads) + 1)

    for interval in intervals(report):
        pid, tid = thread(interval)
        out.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "ts": interval.start * 1e6,
                "dur": (interval.end - interval.start) * 1e6,
                "name": interval.name,
                "args": interval.detail,
            }
        )
    for group, pid in processes.items():
        label = f"{group} ({report.machine}, modelled)"
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}})
    for (group, row, lane), tid in threads.items():
        label = row if lane == 0 else f"{row} ({lane + 1})"
        pid = processes[group]
        meta = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}}
        out.append(meta)
    return out
