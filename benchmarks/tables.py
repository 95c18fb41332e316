"""Rows as tables: on a terminal, with progress while they come, and in Markdown."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from benchmarks import columns
from benchmarks.columns import Column
from benchmarks.rows import Row

_WIDEST = 1000  # a terminal breaks lines that are too long for it; rich would leave parts out


class Rows:
    """The rows of a table, in the order in which they are added."""

    def __init__(self) -> None:
        self.added: list[Row] = []

    def add(self, row: Row) -> None:
        """Takes the next row."""
        self.added.append(row)


class _Piped(Rows):
    """Rows that are printed as they come, below a header; a new one where columns change."""

    def __init__(self, title: str, say: Callable[[str], None]) -> None:
        super().__init__()
        self._title, self._say = title, say
        self._headers: list[str] = []
        self._widths: list[int] = []

    def add(self, row: Row) -> None:
        super().add(row)
        shown = columns.of(self.added)
        if len(self.added) == 1:
            self._say(self._title)
        headers, cells = [c.header for c in shown], [c.cell(row) for c in shown]
        if headers != self._headers:
            self._headers, self._widths = headers, [c.width for c in shown]
            self._line(shown, headers)
        self._line(shown, cells)

    def _line(self, shown: Sequence[Column], cells: Sequence[str]) -> None:
        """Columns grow with what comes; what has been printed stays."""
        self._widths = [max(w, len(cell)) for w, cell in zip(self._widths, cells, strict=True)]
        placed = (
            cell.ljust(width) if column.is_text else cell.rjust(width)
            for column, cell, width in zip(shown, cells, self._widths, strict=True)
        )
        self._say("  ".join(placed).rstrip())


class Screen:
    """Standard output for results and standard error for progress; neither if `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self._stdout = Console(width=_WIDEST, quiet=quiet)
        self._stderr = Console(stderr=True, quiet=quiet)

    def say(self, line: str = "") -> None:
        """Prints a line."""
        self._stdout.print(line, highlight=False, markup=False)

    @contextlib.contextmanager
    def table(self, title: str) -> Iterator[Rows]:
        """A table of the rows that are added within this context; without rows, nothing.

        Piped, each row is printed as it is added. A terminal gets the table at the end, since its
        columns are chosen to fit. Below stands what was refused or failed.
        """
        at_the_end = self._stdout.is_terminal
        rows = Rows() if at_the_end else _Piped(title, self.say)
        try:
            yield rows
        finally:
            if at_the_end and rows.added:
                self._fitted(title, rows.added)
            for line in reasons(rows.added):
                self.say(line)

    def _fitted(self, title: str, rows: Sequence[Row]) -> None:
        shown = columns.of(rows)
        narrow = _width(shown, rows) > shutil.get_terminal_size().columns
        if narrow:
            shown = columns.few(rows)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=not narrow, collapse_padding=narrow)
        for column in shown:
            justify = "left" if column.is_text else "right"
            table.add_column(column.header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in rows:
            cells = (column.cell(row) for column in shown)
            table.add_row(*cells, style="red" if row.failed else None)
        self.say(title)
        self._stdout.print(table)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A bar on a terminal, which goes when it is done."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._stderr,
            transient=True,
            redirect_stdout=self._stdout.is_terminal,
            disable=not self._stderr.is_terminal,
        ) as progress:
            yield progress


def _width(shown: Sequence[Column], rows: Sequence[Row]) -> int:
    """Width of a table on a terminal, with its spaces and rules between columns."""
    widths = (max(len(c.header), *(len(c.cell(row)) for row in rows)) for c in shown)
    return 2 + sum(width + 3 for width in widths)


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why rows did not run or what was found amiss: each reason once, with its first row."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.reason:
            first.setdefault(row.reason, row)
    return [f"{row}: {reason}" for reason, row in first.items()]


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table of rows of one part, with the reasons below it."""
    shown = columns.of(rows)
    text = grid(
        [column.header for column in shown],
        [[column.cell(row) for column in shown] for row in rows],
        [column.is_text for column in shown],
    )
    notes = [f"* {line}" for line in reasons(rows)]
    return "\n".join([text, "", *notes, ""] if notes else [text, ""])


def grid(headers: Sequence[str], cells: Sequence[Sequence[str]], is_text: Sequence[bool]) -> str:
    """A Markdown table."""
    rule = ["---" if left else "---:" for left in is_text]
    lines = [_line(headers), "|" + "|".join(rule) + "|", *map(_line, cells)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
