"""Which copies and accesses could happen at the same time: a happens-before analysis of a stepped
program.

It does not look at one execution's order: it asks what the semaphores guarantee. A wait for `value`
tells only that so much has arrived in total; which signals those were is the adversary's choice
among all that could have come by then. With S the signals on that semaphore that are not ordered
after the wait, and W what the core has taken from it in total, wait included:

* the completion of a copy s in S is guaranteed iff the others of S could not make up W; * an event
known to the sender of a signal is known after the wait iff the signals whose sender does not know
it could not make up W.

Program order is known first, then orders follow from waits until nothing new does (a least fixed
point, so no order is its own reason). Knowledge is a vector clock: per device, up to which of its
instructions. Two accesses of overlapping bytes, one of them a write, race if neither is ordered
before the other. Every buffer is also written as a whole when its kernel is entered and when it is
left: a copy into a device that might not be there yet, or that might have gone, is a race.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_collectives.replay.program import (
    Access,
    Enter,
    Leave,
    Program,
    Signal,
    Start,
    Wait,
    Work,
    at,
)
from pallas_collectives.replay.regions import Box, box_of, covers, whole

_CLOCK_TABLE_LIMIT = 2 << 30  # bytes


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses of one device's buffer that nothing orders."""

    device: int
    buffer: str
    first: str
    second: str
    shared: Box

    def __str__(self) -> str:
        where = f"device {self.device}, {self.buffer}{list(self.shared)}"
        return f"{where}: {self.first}  races with  {self.second}"


@dataclasses.dataclass(eq=False)
class _Event:
    """One executed instruction of one device."""

    device: int
    count: int  # its number among its device's events, from 1
    column: Any
    position: int
    row: int = -1  # of the clock table: what its device knew then, itself included; waits have none
    read_known: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    write_known: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Arrivals:
    """All additions to one semaphore of one device, by signals and by copies."""

    senders: list[int] = dataclasses.field(default_factory=list)
    rows: Any = dataclasses.field(default_factory=list)  # of the clock table
    values: Any = dataclasses.field(default_factory=list)
    known_at: list[list[tuple[int, int]] | None] = dataclasses.field(default_factory=list)

    def add(self, event: _Event, value: int, known_at: list[tuple[int, int]] | None) -> None:
        self.senders.append(event.device)
        self.rows.append(event.row)
        self.values.append(value)
        self.known_at.append(known_at)

    def close(self) -> None:
        self.rows, self.values = np.array(self.rows), np.array(self.values)
        self.sums = np.cumsum(self.values)  # of the first so many: one sender's are in its order
        self.marked = np.zeros(len(self.rows), bool)  # completions known in this pass
        self.sender = self.senders[0] if len(set(self.senders)) == 1 else None

    def possible(self, wait: _Event, clocks: np.ndarray) -> np.ndarray:
        """The numbers of the additions that are not ordered after `wait`."""
        if self.sender is None:
            return np.nonzero(clocks[self.rows, wait.device] < wait.count)[0]
        low, high = 0, len(self.rows)  # what one sender knows only grows: a prefix
        while low < high:
            middle = (low + high) // 2
            if clocks[self.rows[middle], wait.device] < wait.count:
                low = middle + 1
            else:
                high = middle
        return np.arange(low)


def find_races(
    program: Program, devices: Sequence[int] | None = None, limit: int = 20
) -> list[Race]:
    """Races on the buffers of `devices` (all by default), at most `limit` of them, one per pair of
    source lines.

    The program must run to its end (no deadlock); raises ValueError if it does not.
    """
    order = list(_execute(program))
    clocked = 0
    for event in order:
        if not isinstance(event.column, (Wait, Work)):
            event.row = clocked
            clocked += 1
    if clocked * program.n_devices * 4 > _CLOCK_TABLE_LIMIT:
        raise ValueError(
            f"{clocked} events on {program.n_devices} devices are too many for the race check: "
            "check the same kernel on fewer devices"
        )
    clocks = np.zeros((clocked, program.n_devices), np.int32)
    _order_events(order, clocks)
    return _check(program, order, clocks, set(devices) if devices is not None else None, limit)


def _execute(program: Program) -> Iterator[_Event]:
    """Some order in which the instructions can happen: each device runs until it must wait."""
    streams = [program.of_device(d) for d in range(program.n_devices)]
    counts = [0] * program.n_devices
    semaphores: dict[tuple[int, int], int] = defaultdict(int)
    held: dict[int, tuple[tuple[int, int], int, _Event]] = {}
    waiting_on: dict[tuple[int, int], int] = {}
    ready = deque(range(program.n_devices))

    def add(device: int, sem: int, value: int) -> None:
        key = (device, sem)
        semaphores[key] += value
        waiter = waiting_on.get(key)
        if waiter is not None and semaphores[key] >= held[waiter][1]:
            del waiting_on[key]
            ready.append(waiter)

    while ready:
        device = ready.popleft()
        while True:
            if device in held:
                key, need, event = held.pop(device)
            else:
                entry = next(streams[device], None)
                if entry is None:
                    break
                _, position, column = entry
                counts[device] += 1
                event = _Event(device, counts[device], column, position)
                if isinstance(column, Wait):
                    key = (device, at(column.sem, position))
                    need = at(column.value, position)
            column, position = event.column, event.position
            if isinstance(column, Wait):
                if semaphores[key] < need:
                    held[device] = (key, need, event)
                    waiting_on[key] = device
                    break
                if not column.keeps:
                    semaphores[key] -= need
            elif isinstance(column, Signal):
                target = at(column.target, position)
                target = device if target is None else target
                add(target, at(column.sem, position), at(column.value, position))
            elif isinstance(column, Start):
                target = at(column.target, position)
                target = device if target is None else target
                nbytes = int(at(column.nbytes, position))
                if column.src_sem is not None:
                    add(device, at(column.src_sem, position), nbytes)
                add(target, at(column.dst_sem, position), nbytes)
            yield event
    if held:
        raise ValueError(
            "races are looked for in programs that run to their end; this one deadlocks"
        )


def _arrivals(order: list[_Event]) -> dict[tuple[int, int], _Arrivals]:
    """All additions to each (device, semaphore)."""
    out: dict[tuple[int, int], _Arrivals] = defaultdict(_Arrivals)
    for event in order:
        column, position = event.column, event.position
        if isinstance(column, Signal):
            target = at(column.target, position)
            key = (event.device if target is None else target, at(column.sem, position))
            out[key].add(event, at(column.value, position), None)
        elif isinstance(column, Start):
            nbytes = int(at(column.nbytes, position))
            if column.src_sem is not None:
                key = (event.device, at(column.src_sem, position))
                out[key].add(event, nbytes, event.read_known)
            target = at(column.target, position)
            key = (event.device if target is None else target, at(column.dst_sem, position))
            out[key].add(event, nbytes, event.write_known)
    for arrivals in out.values():
        arrivals.close()
    return out


def _order_events(order: list[_Event], clocks: np.ndarray) -> None:
    """Fills in the clock table, and where each copy's completion is known."""
    n_devices = clocks.shape[1]
    arrivals = _arrivals(order)
    while True:
        knows = np.zeros((n_devices, n_devices), np.int32)
        taken: dict[tuple[int, int], int] = defaultdict(int)
        changed = False
        for at_semaphore in arrivals.values():
            at_semaphore.marked[:] = False
        for event in order:
            mine = knows[event.device]
            mine[event.device] = event.count
            if isinstance(event.column, Wait):
                key = (event.device, at(event.column.sem, event.position))
                need = taken[key] + at(event.column.value, event.position)
                if not event.column.keeps:
                    taken[key] = need
                if need:
                    changed |= _learn(arrivals[key], need, event, mine, clocks)
            elif event.row >= 0:
                row = clocks[event.row]
                if not np.array_equal(row, mine):
                    row[:] = mine
                    changed = True
        if not changed:
            return


def _learn(
    arrivals: _Arrivals, need: int, wait: _Event, mine: np.ndarray, clocks: np.ndarray
) -> bool:
    """Adds to `mine` what is known after a wait that took `need` in total; whether a copy's end is
    newly known.
    """
    could = arrivals.possible(wait, clocks)
    values = arrivals.values[could]
    total = int(values.sum())
    if arrivals.sender is None:
        table = clocks[arrivals.rows[could]]
        learned = table.max(axis=0) if total == need else _least_over_choices(table, values, need)
        np.maximum(mine, learned, out=mine)
    elif arrivals.sender != wait.device:
        # One device's additions, in its order: any choice that suffices holds one as late as this.
        last = int(np.searchsorted(arrivals.sums, need))
        np.maximum(mine, clocks[arrivals.rows[last]], out=mine)
    if total - int(values.max()) >= need:
        return False
    changed = False
    mark = (wait.device, wait.count)
    for i in could[(total - values < need) & ~arrivals.marked[could]]:
        arrivals.marked[i] = True
        known_at = arrivals.known_at[i]
        if known_at is not None and mark not in known_at:
            known_at.append(mark)
            changed = True
    return changed


def _least_over_choices(table: np.ndarray, values: np.ndarray, need: int) -> np.ndarray:
    """Per column, the least maximum over all choices of rows whose values reach `need`."""
    choice = np.argsort(table, axis=0, kind="stable")
    last = np.argmax(np.cumsum(values[choice], axis=0) >= need, axis=0)
    return np.take_along_axis(table, choice, axis=0)[last, np.arange(table.shape[1])]


# Accesses -----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Use:
    event: _Event
    box: Box
    writes: bool
    ends_at: list[tuple[int, int]] | None  # None: over when its instruction is


def _ordered(a: _Use, b: _Use, clocks: np.ndarray) -> bool:
    """Whether `a` is over before `b` begins, on every schedule."""
    clock = clocks[b.event.row]
    if a.ends_at is None:
        return bool(clock[a.event.device] >= a.event.count) and a.event is not b.event
    return any(clock[d] >= count for d, count in a.ends_at)


def _uses(program: Program, order: list[_Event]) -> Iterator[tuple[tuple[int, int], _Use]]:
    """((device, buffer), use) of every event, in order."""
    owned: dict[int, list[Any]] = defaultdict(list)
    for buffer in program.buffers:
        if buffer.space != "smem":
            owned[buffer.kernel].append(buffer)
    for event in order:
        column, position, d = event.column, event.position, event.device
        if isinstance(column, (Enter, Leave)):
            for buffer in owned[column.kernel]:
                yield (d, buffer.id), _Use(event, whole(buffer), True, None)
        elif isinstance(column, Access):
            view = column.view
            yield (d, view.buffer.id), _Use(event, box_of(view, position), column.writes, None)
        elif isinstance(column, Start):
            read_over = [*event.read_known, *event.write_known]  # what was written has been read
            source = _Use(event, box_of(column.src, position), False, read_over)
            yield (d, column.src.buffer.id), source
            target = at(column.target, position)
            key = (d if target is None else target, column.dst.buffer.id)
            yield key, _Use(event, box_of(column.dst, position), True, event.write_known)


class _Live:
    """The uses of one buffer that a later one could still race with."""

    def __init__(self, n_dims: int):
        self.uses: list[_Use | None] = []
        self._bounds = np.zeros((2, n_dims, 64), np.int64)  # first and last element per dimension
        self._state = np.zeros((2, 64), bool)  # is live, writes

    def conflicts(self, use: _Use) -> list[int]:
        n = len(self.uses)
        hits = self._state[0, :n].copy()
        if not use.writes:
            hits &= self._state[1, :n]
        for k, (start, size) in enumerate(use.box):
            hits &= (self._bounds[0, k, :n] < start + size) & (self._bounds[1, k, :n] > start)
        return np.nonzero(hits)[0].tolist()

    def add(self, use: _Use) -> None:
        n = len(self.uses)
        if n == self._state.shape[1]:
            self._compact()
            n = len(self.uses)
        for k, (start, size) in enumerate(use.box):
            self._bounds[:, k, n] = start, start + size
        self._state[:, n] = True, use.writes
        self.uses.append(use)

    def drop(self, i: int) -> None:
        self._state[0, i] = False
        self.uses[i] = None

    def _compact(self) -> None:
        keep = np.nonzero(self._state[0])[0]
        room = np.zeros(max(64, 2 * len(keep)) - len(keep), bool)
        self.uses = [self.uses[i] for i in keep]
        pad = np.zeros((2, self._bounds.shape[1], len(room)), np.int64)
        self._bounds = np.concatenate([self._bounds[:, :, keep], pad], axis=2)
        self._state = np.concatenate([self._state[:, keep], np.stack([room, room])], axis=1)


def _check(
    program: Program,
    order: list[_Event],
    clocks: np.ndarray,
    devices: set[int] | None,
    limit: int,
) -> list[Race]:
    live: dict[tuple[int, int], _Live] = {}
    found: dict[frozenset[str], Race] = {}
    for key, use in _uses(program, order):
        if devices is not None and key[0] not in devices:
            continue
        uses = live.setdefault(key, _Live(len(use.box)))
        for i in uses.conflicts(use):
            old = uses.uses[i]
            assert old is not None
            if _ordered(old, use, clocks):
                if use.writes and covers(use.box, old.box):
                    uses.drop(i)
            elif not _ordered(use, old, clocks):
                race = _race(program, key, old, use)
                found.setdefault(frozenset((race.first, race.second)), race)
                if len(found) >= limit:
                    return list(found.values())
        uses.add(use)
    return list(found.values())


def _race(program: Program, key: tuple[int, int], a: _Use, b: _Use) -> Race:
    buffer = program.buffers[key[1]]
    shared = tuple(
        (max(p, q), min(p + m, q + n) - max(p, q))
        for (p, m), (q, n) in zip(a.box, b.box, strict=True)
    )
    return Race(key[0], f"{buffer.name} ({buffer.space})", _describe(a), _describe(b), shared)


def _describe(use: _Use) -> str:
    column = use.event.column
    kind = type(column).__name__
    if kind == "Start":
        what = "a copy's write" if use.writes else "a copy's read"
    elif kind in ("Enter", "Leave"):
        way = "entry into" if kind == "Enter" else "exit from"
        return f"the device's {way} {column.source.kernel}"
    else:
        what = "the core's write" if use.writes else "the core's read"
    return f"{what} at {column.source.line}"
