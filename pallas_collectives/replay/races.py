"""Which copies and accesses could happen at the same time, by the order that `order.py` finds.

Two accesses of overlapping bytes, one of them a write, race if neither is ordered before the other.
Every buffer is also written as a whole when its kernel is entered and when it is left: a copy into
a device that might not be there yet, or that might have gone, is a race. So is a scope's when it
ends, and with it those of other scopes of the kernel, which may have the same memory.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_collectives.replay import reasons, schedule
from pallas_collectives.replay.order import Event, Mark, Order
from pallas_collectives.replay.program import Access, Enter, Leave, Start, Unscope, at
from pallas_collectives.replay.regions import Box, box_of, covers, whole

_MANY_ALIKE = 64  # uses of one place that a later one may race with


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses of one device's buffer that nothing orders.

    Attributes:
      steps: for each access, the device that performs it and the number of its instruction there.
      why: what leaves the two unordered.
      remedy: what would order them.
      flights: for each copy, what it moves, and the semaphores that tell when it is over.
      reads: whether it is the first one's reading that is not over.
      part: what both touch, as an index of the buffer.
    """

    device: int
    buffer: str
    first: str
    second: str
    shared: Box
    steps: tuple[Mark, Mark]
    why: str
    remedy: str
    lines: tuple[str, str] = ("", "")
    flights: tuple[str, str] = ("", "")
    reads: bool = False
    part: str = ""

    def __str__(self) -> str:
        where = f"device {self.device}, {self.buffer}{list(self.shared)}"
        one, other = (f"device {device}'s step {step}" for device, step in self.steps)
        return (
            f"{where}: {self.first} ({one})  races with  {self.second} ({other}): "
            f"{self.why}; {self.remedy}"
        )


def find_races(order: Order, limit: int = 200) -> list[Race]:
    """Races, at most `limit` of them, one per pair of source lines."""
    live: dict[tuple[int, int], _Live] = {}
    found: dict[frozenset[str], Race] = {}
    for key, use in _uses(order):
        if any(size == 0 for _, size in use.box):
            continue
        uses = live.setdefault(key, _Live(len(use.box)))
        conflicts = uses.conflicts(use)
        for i in conflicts:
            old = uses.uses[i]
            assert old is not None
            if not _ordered(old, use, order):
                pair = frozenset((_describe(old), _describe(use)))
                if _ordered(use, old, order):
                    continue
                if pair in found:
                    if len(conflicts) < _MANY_ALIKE:
                        continue
                elif order.possible(old.event, use.event, reads=not old.writes):
                    found[pair] = _race(order, key, old, use)
                    if len(found) >= limit:
                        return list(found.values())
                    continue
            # Over before this use, or one of many that are faulty alike: this one stands for it.
            if use.writes and covers(use.box, old.box):
                uses.drop(i)
        uses.add(use)
    return list(found.values())


@dataclasses.dataclass(eq=False)
class _Use:
    event: Event
    box: Box
    writes: bool
    ends_at: list[Mark] | None  # None: over when its instruction is


def _ordered(a: _Use, b: _Use, order: Order) -> bool:
    """Whether `a` is over before `b` begins, on every schedule."""
    if a.ends_at is None:
        return order.knows(b.event, (a.event.device, a.event.count)) and a.event is not b.event
    return any(order.knows(b.event, mark) for mark in a.ends_at)


def _uses(order: Order) -> Iterator[tuple[tuple[int, int], _Use]]:
    """((device, buffer), use) of every event, in order."""
    owned: dict[int, list[Any]] = defaultdict(list)
    for buffer in order.program.buffers:
        if buffer.space != "smem":
            owned[buffer.kernel].append(buffer)
    for event in order.events:
        column, position, d = event.column, event.position, event.device
        home = order.program.home
        if isinstance(column, (Enter, Leave)):
            for buffer in owned[column.kernel]:
                if home(d, buffer) == d:
                    yield (d, buffer.id), _Use(event, whole(buffer), True, None)
        elif isinstance(column, Unscope):
            for buffer in column.memory:
                if buffer.space != "semaphore_mem":  # see `rules.find_kept`
                    yield (home(d, buffer), buffer.id), _Use(event, whole(buffer), True, None)
        elif isinstance(column, Access):
            buffer, box = column.view.buffer, box_of(column.view, position)
            yield (home(d, buffer), buffer.id), _Use(event, box, column.writes, None)
        elif isinstance(column, Start):
            read_over = [*event.read_known, *event.write_known]  # what was written has been read
            source = _Use(event, box_of(column.src, position), False, read_over)
            yield (home(d, column.src.buffer), column.src.buffer.id), source
            key = (home(event.target, column.dst.buffer), column.dst.buffer.id)
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


def _race(order: Order, key: tuple[int, int], a: _Use, b: _Use) -> Race:
    buffer = order.program.buffers[key[1]]
    shared = tuple(
        (max(p, q), min(p + m, q + n) - max(p, q))
        for (p, m), (q, n) in zip(a.box, b.box, strict=True)
    )
    steps = (a.event.device, a.event.count), (b.event.device, b.event.count)
    why, remedy = _reason(order, key, a, b)
    return Race(
        device=key[0],
        buffer=f"{buffer.name} ({buffer.space})",
        first=_describe(a),
        second=_describe(b),
        shared=shared,
        steps=steps,
        why=why,
        remedy=remedy,
        lines=(a.event.column.source.line, b.event.column.source.line),
        flights=(_flight(order, a), _flight(order, b)),
        reads=not a.writes,
        part=schedule.part(shared, buffer.shape),
    )


def _flight(order: Order, use: _Use) -> str:
    """What a copy moves from where to where, and who is told; "" of anything else."""
    column, position = use.event.column, use.event.position
    if not isinstance(column, Start):
        return ""
    names = order.program.semaphores
    source = schedule.named(column.src, position)
    goal = schedule.named(column.dst, position)
    sent = "" if column.src_sem is None else f", sent: {names[at(column.src_sem, position)].name}"
    return (
        f"{source} of device {use.event.device} to {goal} of device {use.event.target}, "
        f"{int(at(column.nbytes, position)):,} bytes{sent}, "
        f"arrived: {names[at(column.dst_sem, position)].name}"
    )


def _reason(order: Order, key: tuple[int, int], a: _Use, b: _Use) -> tuple[str, str]:
    """Why nothing orders two uses of a device's buffer, and what would."""
    device, number = key
    for one, other in ((a, b), (b, a)):
        if isinstance(other.event.column, Enter) and one.event.device != device:
            return reasons.not_entered(order, one.event, device)
    for one, other in ((a, b), (b, a)):
        if one.ends_at is not None:
            partial = reasons.partial_wait(order, one.event, other.event, of_write=one.writes)
            if partial is not None:
                return partial
    for one, other in ((a, b), (b, a)):
        if one.ends_at is not None:
            unwaited = reasons.never_waited(order, one.event, other.event, of_write=one.writes)
            if unwaited is not None:
                return unwaited
    for one, other in ((a, b), (b, a)):
        if one.writes and one.event.device != device and other.event.device == device:
            return reasons.not_told(one.event, other.event, order.program.buffers[number])
    if a.ends_at is not None and b.ends_at is not None and a.writes and b.writes:
        return reasons.both_write(a.event, b.event, order.program.buffers[number].name)
    return (
        "no wait or signal orders the two",
        "let the later one follow a wait that only the earlier one's end can satisfy",
    )


def _describe(use: _Use) -> str:
    column = use.event.column
    kind = type(column).__name__
    if kind == "Start":
        what = "a copy's write" if use.writes else "a copy's read"
    elif kind in ("Enter", "Leave"):
        way = "entry into" if kind == "Enter" else "exit from"
        return f"the device's {way} {column.source.kernel}"
    elif kind == "Unscope":
        what = "the scope's end"
    else:
        what = "the core's write" if use.writes else "the core's read"
    return f"{what} at {column.source.line}"
