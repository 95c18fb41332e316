"""Turns a peer that does not come into an exception that names it.

Without one, a rank that never enters a collective, dies in it, or enters another one leaves every
other rank waiting on its GPU for ever. A watchdog is a thread in each process of a group. It reads
the boards (`progress`) of the local ranks, tells them to the other processes through the store,
reads theirs, and fails the group when

  * a local rank has been in one call for `timeout` seconds: the ranks that have not begun that call
    are missing; so is any whose process no longer reports;
  * two ranks' hashes differ at the same call number: they made different calls, whether NCCL
    hangs over it or ends with garbage;
  * NCCL reports an asynchronous error;
  * another process failed the group.

Failing marks the group first, so that whoever the abort wakes up already finds the reason, and
then aborts the local communicators. Nothing here touches a stream.
"""

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pallas_collectives.nccl import progress
from pallas_collectives.nccl.errors import NcclError, PeerError
from pallas_collectives.nccl.progress import Board
from pallas_collectives.nccl.store import Store

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RankReport:
    """One rank's progress as another process sees it: `Progress` with the calls as text."""

    begun: int
    ended: int
    latest: dict[int, str]
    history: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a group."""

    call: str
    sequence: int
    missing: tuple[int, ...]
    what: str


def disagreement(reports: Mapping[int, RankReport]) -> Finding | None:
    """The first call number, as far as the reports reach, at which ranks made different calls."""
    numbers = sorted({n for report in reports.values() for n in report.history})
    for number in numbers:
        hashes = {r: p.history[number] for r, p in reports.items() if number in p.history}
        if len(set(hashes.values())) < 2:
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(hashes):
            known = reports[rank].latest.get(number, "a call made too long ago to name")
            ranks_of.setdefault(known, []).append(rank)
        calls = "; ".join(f"{text} by ranks {ranks}" for text, ranks in ranks_of.items())
        what = f"ranks made different calls as number {number}: {calls}"
        return Finding(next(iter(ranks_of)), number, (), what)
    return None


def absence(
    stuck: RankReport, reports: Mapping[int, RankReport], size: int, silent: set[int]
) -> Finding:
    """Who keeps a rank, that is still in call number `stuck.ended`, waiting."""
    sequence = stuck.ended
    call = stuck.latest.get(sequence, "a call made too long ago to name")
    late = {r for r in range(size) if r not in reports or reports[r].begun <= sequence}
    parts = []
    if away := sorted(late - silent):
        parts.append(f"ranks {away} have not come to it")
    if silent:
        parts.append(f"the processes of ranks {sorted(silent)} no longer answer")
    if not parts:
        parts.append("all ranks came: the network or a GPU stands still")
    return Finding(call, sequence, tuple(sorted(late | silent)), "; ".join(parts))


class Stall:
    """Tells how long each local rank has been in one call."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}

    def age(self, rank: int, begun: int, ended: int, now: float) -> float:
        """Seconds since `rank` was first seen in call number `ended`; 0 if it is in none."""
        if ended >= begun:  # more, where two streams began at once and one count was lost
            self._since.pop(rank, None)
            return 0.0
        call, since = self._since.get(rank, (-1, now))
        if call != ended:
            self._since[rank] = (ended, now)
            return 0.0
        return now - since


class Beats:
    """Tells which processes have stopped reporting."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def age(self, process: int, beat: int, now: float) -> float:
        """Seconds since `process` last reported a new beat."""
        last, since = self._last.get(process, (-1, now))
        if beat != last:
            self._last[process] = (beat, now)
            return 0.0
        return now - since


class Watchdog:
    """Watches one group from one process.

    boards: of the local ranks. owners: for every rank its process. title: the group, for messages.
    timeout: seconds that a call may take. fail: marks the group and aborts. async_error: NCCL's own
    word on the local communicators, or None.
    """

    def __init__(
        self,
        *,
        boards: Mapping[int, Board],
        owners: tuple[int, ...],
        process: int,
        title: str,
        store: Store,
        key: str,
        timeout: float,
        fail: Callable[[PeerError], None],
        async_error: Callable[[], NcclError | None],
    ):
        self._boards = boards
        self._owners = owners
        self._process = process
        self._title = title
        self._store = store
        self._prefix = f"{key}/watchdog/"
        self._timeout = timeout
        self._interval = min(max(timeout / 10, 0.05), 1.0)
        self._fail = fail
        self._async_error = async_error
        self._stall = Stall()
        self._beats = Beats()
        self._beat = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"nccl watchdog of {title}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the watching, without waiting where it is the watchdog itself that asks."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)
        with contextlib.suppress(Exception):  # the store may be what has failed
            self._store.delete(f"{self._prefix}{self._process}")

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                error = self.look(time.monotonic())
            except Exception as problem:  # the store is gone: the job is ending, or its host is
                error = PeerError(
                    f"{self._title}: the watchdog cannot reach the other processes: {problem}",
                    group=self._title,
                    call="",
                    sequence=-1,
                    missing=(),
                )
            if error is not None and not self._stopped.is_set():
                _log.error("%s", error)
                self._fail(error)
                return

    def look(self, now: float) -> PeerError | None:
        """One round: reports, reads the others' reports, and says what is wrong, if anything."""
        local = {rank: _report(board) for rank, board in self._boards.items()}
        self._beat += 1
        mine = {
            "beat": self._beat,
            "ranks": {r: dataclasses.asdict(report) for r, report in local.items()},
        }
        self._store.set(f"{self._prefix}{self._process}", json.dumps(mine))
        entries = {
            key.removeprefix(self._prefix): json.loads(value)
            for key, value in self._store.entries(self._prefix).items()
        }
        if (theirs := entries.pop("failed", None)) is not None:
            return self._error(Finding(**(theirs | {"missing": tuple(theirs["missing"])})))
        finding = self._judge(local, entries, now)
        if finding is None:
            return None
        self._store.set(f"{self._prefix}failed", json.dumps(dataclasses.asdict(finding)))
        return self._error(finding)

    def _judge(
        self, local: dict[int, RankReport], entries: dict[str, dict], now: float
    ) -> Finding | None:
        silent_processes = set(self._owners) - {int(process) for process in entries}
        reports: dict[int, RankReport] = {}
        for process, entry in entries.items():
            if self._beats.age(int(process), entry["beat"], now) > 3 * self._interval:
                silent_processes.add(int(process))
            reports |= {int(rank): _parsed(fields) for rank, fields in entry["ranks"].items()}
        reports |= local
        if (finding := disagreement(reports)) is not None:
            return finding
        silent = {r for r, owner in enumerate(self._owners) if owner in silent_processes}
        for rank, report in local.items():
            if self._stall.age(rank, report.begun, report.ended, now) > self._timeout:
                return absence(report, reports, len(self._owners), silent)
        if (error := self._async_error()) is not None:
            latest = next(iter(local.values()))
            return dataclasses.replace(
                absence(latest, reports, len(self._owners), silent), what=str(error)
            )
        return None

    def _error(self, finding: Finding) -> PeerError:
        return PeerError(
            f"{self._title}, call {finding.sequence} ({finding.call}): {finding.what}. The group's "
            "communicators in this process are aborted; create the group anew to go on",
            group=self._title,
            call=finding.call,
            sequence=finding.sequence,
            missing=finding.missing,
        )


def _report(board: Board) -> RankReport:
    seen = board.read()
    latest = {n: progress.text_of(s) for n, s in seen.latest.items()}
    return RankReport(seen.begun, seen.ended, latest, seen.history)


def _parsed(fields: dict) -> RankReport:
    return RankReport(
        fields["begun"],
        fields["ended"],
        {int(n): text for n, text in fields["latest"].items()},
        {int(n): value for n, value in fields["history"].items()},
    )
