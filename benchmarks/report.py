"""What a run shows and keeps: progress, tables, JSON, CSV."""

import contextlib
import csv
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import interrupt

MIB = 1 << 20
_WIDEST = 1000
Column = tuple[str, Callable[[Any], str]]


def _number(name: str, digits: int) -> Callable[[Any], str]:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else f"{value:.{digits}f}"

    return cell


def _wrong(row: Any) -> str:
    if row.error:
        return "error"
    return "refused" if row.wrong is None else str(row.wrong)


def _temp(name: str) -> Callable[[Any], str]:
    return lambda row: "-" if row.error else f"{getattr(row, name) / MIB:.1f}"


def _spread(row: Any) -> str:
    if row.time_us is None:
        return "-"
    return f"{row.time_us_min:.1f}-{row.time_us_max:.1f}"


_WHAT: tuple[Column, ...] = (
    ("op", lambda row: row.op),
    ("algorithm", lambda row: row.algorithm or "-"),
)
_MEASURED: tuple[Column, ...] = (
    *_WHAT,
    ("backend", lambda row: row.backend),
    ("size", lambda row: str(row.size)),
    ("count", lambda row: str(row.count)),
    ("type", lambda row: row.type),
    ("devices", lambda row: str(row.devices)),
)
_RATES: tuple[Column, ...] = (
    ("algbw(GB/s)", _number("algbw", 2)),
    ("busbw(GB/s)", _number("busbw", 2)),
    ("#wrong", _wrong),
)
TIMED = (*_MEASURED, ("time(us)", _number("time_us", 1)), ("min-max", _spread), *_RATES)
SIMULATED = (*_MEASURED, ("interp ms", _number("interpret_ms", 0)), *_RATES)
COMPILED: tuple[Column, ...] = (
    ("topology", lambda row: row.topology),
    *_WHAT,
    ("type", lambda row: row.type),
    ("devices", lambda row: str(row.devices or "-")),
    ("temp MiB", _temp("temp")),
    ("lax temp", _temp("lax_temp")),
    ("program", lambda row: row.ops or "error"),
    ("lax program", lambda row: row.lax_ops or "error"),
)
REPLAYED: tuple[Column, ...] = (
    ("pod", lambda row: row.machine),
    *_WHAT,
    ("size", lambda row: str(row.size)),
    ("count", lambda row: str(row.count)),
    ("type", lambda row: row.type),
    ("devices", lambda row: str(row.devices)),
    ("model us", _number("time_us", 1)),
    *_RATES[:2],
    ("bound us", _number("bound_us", 1)),
    ("% of bound", _number("of_bound", 0)),
)
_LEFT = {"pod", "op", "algorithm", "backend", "type", "topology", "program", "lax program"}


class Report:
    """The rows of a run, by part, written to files as they come in.

    So an interrupt, or a crash, loses no more than the row it falls into.
    """

    def __init__(self, environment: dict[str, Any], json_file: str, csv_file: str) -> None:
        self._environment = environment
        self._json_file, self._csv_file = json_file, csv_file
        self._parts: dict[str, list[Any]] = {}
        # A terminal breaks lines that are too long for it; rich would leave parts of them out.
        self._stdout = Console(width=_WIDEST)
        self._stderr = Console(stderr=True)

    def collect(self, part: str, rows: Iterator[Any], total: int) -> None:
        """Takes the rows of a part as they are made, behind a progress bar."""
        kept = self._parts.setdefault(part, [])
        with interrupt.between_rows() as check, self._progress() as progress:
            bar = progress.add_task(part, total=total)
            for row in rows:
                kept.append(row)
                self._save()
                progress.update(bar, advance=1, description=str(row))
                check()

    def show(self, part: str, title: str, columns: tuple[Column, ...]) -> None:
        """Prints a part's table, with what was refused or failed spelt out below it."""
        rows = self._parts.get(part, [])
        if not rows:
            return
        on_terminal = self._stdout.is_terminal
        table = Table(box=box.SIMPLE_HEAD if on_terminal else None, pad_edge=on_terminal)
        for header, _ in columns:
            table.add_column(header, justify="left" if header in _LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(cell(row) for _, cell in columns), style="red" if row.failed else None)
        self.say(title)
        self._stdout.print(table)
        reasons = {_reason(row): row for row in reversed(rows)}
        for reason, row in reversed(reasons.items()):
            if reason:
                self.say(f"{row}: {reason}")

    def say(self, line: str = "") -> None:
        """Prints a line to standard output."""
        self._stdout.print(line, highlight=False, markup=False)

    @property
    def failed(self) -> bool:
        """Whether a row is wrong, or nothing of a part could run."""
        return any(
            any(row.failed for row in rows) or all(_reason(row) for row in rows)
            for rows in self._parts.values()
        )

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self._stderr,
            transient=True,
            disable=not self._stderr.is_terminal,
        ) as progress:
            yield progress

    def _save(self) -> None:
        if self._json_file:
            parts = {
                part: [dataclasses.asdict(row) for row in rows]
                for part, rows in self._parts.items()
            }
            text = json.dumps({"environment": self._environment, **parts}, indent=1)
            _replace(self._json_file, lambda file: file.write(text + "\n"))
        if self._csv_file and (rows := self._parts.get("measured") or self._parts.get("replayed")):
            _replace(self._csv_file, lambda file: _write_csv(file, rows))


def _reason(row: Any) -> str:
    """Why a row did not run, or what it found amiss; "" if it ran and all is right."""
    return row.error or getattr(row, "refused", "") or getattr(row, "faults", "")


def _write_csv(file: Any, rows: list[Any]) -> None:
    writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(rows[0])])
    writer.writeheader()
    writer.writerows(map(dataclasses.asdict, rows))


def _replace(path: str, write: Callable[[Any], Any]) -> None:
    """Writes a file whole or not at all."""
    draft = Path(f"{path}.part")
    with draft.open("w", newline="") as file:
        write(file)
    os.replace(draft, path)
