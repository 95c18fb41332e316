"""What a run keeps: rows by part, in JSON and CSV files that are up to date while they come."""

import contextlib
import csv
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from benchmarks import interrupt
from benchmarks.rows import PARTS, Row
from benchmarks.settings import FlagError
from benchmarks.tables import Screen
from pallas_collectives import multihost

# Of the environment: what may differ between a run and the one that goes on with it.
_MAY_DIFFER = {"command", "host_cpus"}

_IN_CSV = ("measured", "wires", "replayed")  # the first of these that a run has


@dataclasses.dataclass(frozen=True)
class Saved:
    """A JSON file of results: what they depend on, and the rows by part."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    parts: dict[str, list[Any]]


class Results:
    """The rows of a run, by part.

    Files are written after every row: an interrupt, or a crash, loses no more than the row it falls
    into.
    """

    def __init__(
        self,
        screen: Screen,
        environment: dict[str, Any],
        settings: dict[str, Any],
        json_file: str = "",
        csv_file: str = "",
        resume: bool = False,
    ) -> None:
        """With `resume` the rows that `json_file` holds are kept, by all processes.

        Processes but the first have no file.

        Raises:
          FlagError: they were made with other settings, or in another environment.
        """
        self._screen, self._json_file, self._csv_file = screen, json_file, csv_file
        self._about = {"environment": environment, "settings": settings}
        self.parts: dict[str, list[Row]] = {}
        if resume and (text := _of_first(json_file)):
            saved = load(json_file, text)
            self.parts = self._same_run(saved) if json_file else saved.parts

    def _same_run(self, saved: Saved) -> dict[str, list[Row]]:
        now = json.loads(json.dumps(self._about))  # tuples are lists in the file
        for what, then in (("settings", saved.settings), ("environment", saved.environment)):
            names = sorted({*then, *now[what]} - _MAY_DIFFER)
            other = [name for name in names if then.get(name) != now[what].get(name)]
            if other:
                rule = f"it was made with other {what}: {', '.join(other)}"
                remedy = "leave out --resume to begin anew, or name another --json"
                raise FlagError(f"--resume of {self._json_file}", rule, remedy)
        return saved.parts

    def kept(self, part: str) -> int:
        """How many rows of a part are there already."""
        return len(self.parts.get(part, []))

    def collect(self, part: str, rows: Iterator[Row], total: int, title: str = "") -> None:
        """Takes the rows of a part as they are made, behind a progress bar.

        With a title they are shown as a table, those that were kept before among them.
        """
        kept = self.parts.setdefault(part, [])
        with (
            self._screen.table(title) if title else contextlib.nullcontext() as table,
            interrupt.between_rows() as check,
            self._screen.progress() as progress,
        ):
            show = table.add if table else lambda row: None
            for row in kept:
                show(row)
            bar = progress.add_task(part, total=total, completed=len(kept))
            for row in rows:
                kept.append(row)
                self.save()
                show(row)
                said = "failed" if row.failed else "refused" if row.reason else "ok"
                progress.update(bar, advance=1, description=f"{row}: {said}")
                check()

    def say(self, line: str) -> None:
        """Prints a line."""
        self._screen.say(line)

    @property
    def failed(self) -> bool:
        """Whether a row is wrong, or nothing of a part could run."""
        return any(
            any(row.failed for row in rows) or all(row.reason for row in rows)
            for rows in self.parts.values()
        )

    @property
    def verdict(self) -> str:
        """One line: how many rows, and what is wrong."""
        rows = [row for rows in self.parts.values() for row in rows]
        found = {
            "wrong": sum(bool(getattr(row, "wrong", 0)) for row in rows),
            "failed": sum(bool(row.error) for row in rows),
            "not sound": sum(bool(getattr(row, "faults", "")) for row in rows),
            "refused": sum(bool(row.refused) for row in rows),
        }
        amiss = [f"{number} {what}" for what, number in found.items() if number]
        idle = [part for part, of in self.parts.items() if of and all(row.reason for row in of)]
        if idle:
            amiss.append(f"nothing of {', '.join(idle)} could run")
        count = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
        if not self.failed:
            return f"{count}, all right" + (f" ({', '.join(amiss)})" if amiss else "")
        return f"{count}, NOT all right: {', '.join(amiss)}"

    def save(self) -> None:
        """Writes the files."""
        if self._json_file:
            parts = {
                part: [dataclasses.asdict(row) for row in rows] for part, rows in self.parts.items()
            }
            text = json.dumps({**self._about, **parts}, indent=1)
            write(self._json_file, lambda file: file.write(text + "\n"))
        rows = next((self.parts[part] for part in _IN_CSV if self.parts.get(part)), None)
        if self._csv_file and rows:
            write(self._csv_file, lambda file: _write_csv(file, rows))


def _of_first(path: str) -> str:
    """The text of the first process' file, for all; "" without one."""
    text = Path(path).read_bytes() if path and Path(path).exists() else b""
    if jax.distributed.is_initialized():  # process_count would take the TPUs
        size = int(multihost.broadcast_one_to_all(np.array(len(text))))
        sent = np.frombuffer(text.ljust(size), np.uint8)
        text = multihost.broadcast_one_to_all(sent[:size]).tobytes()
    return text.decode(errors="replace")


def load(path: str, text: str | None = None) -> Saved:
    """The results in a JSON file, whose text may have been read.

    Raises:
      FlagError: there is no file, or it is not one of ours.
    """
    with reading(path, "name a file that --json of this version has written"):
        content = json.loads(Path(path).read_text() if text is None else text)
        about = content.pop("environment"), content.pop("settings")
        kinds = {part: PARTS[part][0] for part in content}
        parts = {part: [kinds[part](**row) for row in rows] for part, rows in content.items()}
    return Saved(*about, parts)


@contextlib.contextmanager
def reading(path: str | Path, remedy: str) -> Iterator[None]:
    """Within this context what is read of a file are results.

    Raises:
      FlagError: it is not there, or holds something else.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"it holds no results ({type(error).__name__}: {error})"
        raise FlagError(str(path), rule, remedy) from None


AS_COMMITTED = "restore it by `git checkout`, or remove it to begin anew"


def _write_csv(file: TextIO, rows: list[Row]) -> None:
    writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(rows[0])])
    writer.writeheader()
    writer.writerows(map(dataclasses.asdict, rows))


def write(path: str, put: Callable[[Any], Any]) -> None:
    """Writes a file whole or not at all."""
    draft = Path(f"{path}.part")
    with draft.open("w", newline="") as file:
        put(file)
    os.replace(draft, path)


def check_writable(path: str, flag: str) -> str:
    """The path of a file to be written.

    Raises:
      FlagError: it cannot be.
    """
    if path:
        try:
            if Path(path).is_dir():
                raise IsADirectoryError("it is a directory")
            draft = Path(f"{path}.part")
            draft.open("w").close()
            draft.unlink()
        except OSError as error:
            rule = f"no file can be written there ({error.strerror or error})"
            remedy = "name a file in a directory that exists"
            raise FlagError(f"{flag}={path}", rule, remedy) from None
    return path
