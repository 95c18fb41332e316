"""What semaphores guarantee: a happens-before analysis of a stepped program.

It does not look at one execution's order. A wait for `value` tells only that so much has arrived in
total; which signals those were is the adversary's choice among all that could have come by then,
and so is which bytes of which copies: bytes of copies arrive in no particular order. With S the
signals and copies on that semaphore that are not ordered after the wait, and W what the core has
taken from it in total, wait included:

* the copies of S are complete iff W is all that S amounts to: a byte less might be any copy's;
* an event known to the sender of a signal or copy is known after the wait iff those whose sender
  does not know it could not make up W.

Program order is known first, then orders follow from waits until nothing new does (a least fixed
point, so no order is its own reason). Knowledge is a vector clock: per device, up to which of its
instructions.

That finds orders enough for nearly all kernels, but not all: of a barrier with everyone between two
calls it takes a step of thought about all devices at once. So what it leaves unordered is put to a
test that is exact: `b` can come before `a` is over iff it comes when `a` is held back for ever and
all else goes as far as it can. (More signals never hold anybody up.)

A program that deadlocks stops at the same places on every schedule: a device is held up only by
waits on its own semaphores, and nobody else takes what has been added to those. So what is found in
the events before holds on every schedule too.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_collectives.replay.program import (
    CoreWork,
    Enter,
    Program,
    Signal,
    Start,
    Wait,
    at,
)

_CLOCK_TABLE_LIMIT = 2 << 30  # bytes
_STRIDE = 512  # events from one state that is kept to the next

# A device and the number of one of its semaphores.
Key = tuple[int, int]
# A device and the number of one of its events: what is over once that event is known.
Mark = tuple[int, int]


@dataclasses.dataclass(eq=False)
class Event:
    """One executed instruction of one device."""

    device: int
    count: int  # its number among its device's events, from 1
    column: Any
    position: int
    row: int = -1  # of the clock table: what its device knew then, itself included; waits: -1
    number: int = -1  # its place among all
    kernel: int = 0  # in which it is, a number from 1; 0 outside
    taken: int = 0  # of a wait: by it and all before it, from its semaphore
    read_known: list[Mark] = dataclasses.field(default_factory=list)
    write_known: list[Mark] = dataclasses.field(default_factory=list)

    @property
    def value(self) -> int:
        """What a signal adds, or a wait asks for."""
        return int(at(self.column.value, self.position))

    @property
    def target(self) -> int:
        """The device that a signal or a copy goes to."""
        target = at(self.column.target, self.position)
        return self.device if target is None else int(target)


@dataclasses.dataclass(eq=False)
class Arrivals:
    """All additions to one semaphore of one device, by signals and by copies."""

    events: list[Event] = dataclasses.field(default_factory=list)  # who added
    rows: Any = dataclasses.field(default_factory=list)  # of the clock table
    values: Any = dataclasses.field(default_factory=list)
    known_at: list[list[Mark] | None] = dataclasses.field(default_factory=list)

    def add(self, event: Event, value: int, known_at: list[Mark] | None) -> None:
        self.events.append(event)
        self.rows.append(event.row)
        self.values.append(value)
        self.known_at.append(known_at)

    def close(self) -> None:
        self.rows, self.values = np.array(self.rows), np.array(self.values)
        self.sums = np.cumsum(self.values)  # of the first so many: one sender's are in its order
        self.marked = np.zeros(len(self.rows), bool)  # completions known in this pass
        equal = len(self.values) > 0 and bool((self.values == self.values[0]).all())
        self.each = int(self.values[0]) if equal else 0  # of all alike
        senders = {event.device for event in self.events}
        self.sender = senders.pop() if len(senders) == 1 else None
        self.forget()

    def forget(self) -> None:
        """What was known at the additions has changed."""
        self._sorted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def least(self, could: np.ndarray, need: int, clocks: np.ndarray) -> np.ndarray:
        """Per device, the least that is known after any choice of `could` that reaches `need`.

        Many waits ask for more and more of the same additions: they are sorted once.
        """
        if self._sorted is None or not np.array_equal(self._sorted[0], could):
            table = clocks[self.rows[could]]
            if self.each:
                self._sorted = could, np.sort(table, axis=0), table[:0]
            else:
                choice = np.argsort(table, axis=0, kind="stable")
                sums = np.cumsum(self.values[could][choice], axis=0)
                self._sorted = could, np.take_along_axis(table, choice, axis=0), sums
        _, table, sums = self._sorted
        if self.each:
            return table[-(-need // self.each) - 1]
        last = np.argmax(sums >= need, axis=0)
        return table[last, np.arange(table.shape[1])]

    def possible(self, wait: Event, clocks: np.ndarray) -> np.ndarray:
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


class Order:
    """The events of a program, each after all that it needs, and what is known at each.

    Attributes:
      events: the events of all devices.
      finished: whether the program runs to its end, not into a deadlock.
      clocks: per event (its `row`) and device, how many of the device's events are known there.
      arrivals: what is added to each semaphore.
      waits: on each semaphore, in order.
    """

    def __init__(self, program: Program) -> None:
        """Raises ValueError for a program of too many events."""
        self.program = program
        self.events: list[Event] = []
        self.finished = execute(program, self.events)
        self._without: dict[tuple[int, int, bool], list[int]] = {}  # how far devices come
        self._of_device: list[list[Event]] = [[] for _ in range(program.n_devices)]
        self._states = [_State([0] * program.n_devices, {})]
        clocked = 0
        for number, event in enumerate(self.events):
            event.number = number
            self._of_device[event.device].append(event)
            if not isinstance(event.column, (Wait, CoreWork)):
                event.row = clocked
                clocked += 1
        if clocked * program.n_devices * 4 > _CLOCK_TABLE_LIMIT:
            raise ValueError(
                f"{clocked} events on {program.n_devices} devices are too many for the race check: "
                "check the same kernel on fewer devices"
            )
        self.clocks = np.zeros((clocked, program.n_devices), np.int32)
        self.arrivals = _arrivals(self.events)
        self.waits: dict[Key, list[Event]] = defaultdict(list)
        for event in self.events:
            if isinstance(event.column, Wait):
                self._take(event)
        self._order_events()

    def knows(self, event: Event, mark: Mark) -> bool:
        """Whether `mark`'s device has come that far before `event`, on every schedule."""
        return bool(self.clocks[event.row][mark[0]] >= mark[1])

    def possible(self, first: Event, later: Event, *, reads: bool = False) -> bool:
        """Whether `later` can come before `first` is over, on some schedule.

        A copy is over when all has been written, or, with `reads`, read.
        """
        key = (first.device, first.count, reads)
        if key not in self._without:
            self._without[key] = self._reached(first, key)
        return self._without[key][later.device] >= later.count

    def _reached(self, first: Event, held_back: tuple[int, int, bool]) -> list[int]:
        """How far each device comes while `first` is never over: from where that begins."""
        nearest = min(first.number // _STRIDE, len(self._states) - 1)
        state, number = self._states[nearest].copy(), nearest * _STRIDE
        for event in self.events[number : first.number]:
            if number % _STRIDE == 0 and number // _STRIDE == len(self._states):
                self._states.append(state.copy())
            state.pass_by(event)
            number += 1
        events: list[Event] = []
        streams = [
            map(own.__getitem__, range(count, len(own)))
            for own, count in zip(self._of_device, state.counts, strict=True)
        ]
        _execute(streams, state.semaphores, events, held_back)
        for event in events:
            state.counts[event.device] = event.count
        return state.counts

    def entries(self) -> dict[tuple[int, int], Event]:
        """Where each (device, kernel) is entered."""
        return {
            (event.device, event.column.kernel): event
            for event in self.events
            if isinstance(event.column, Enter)
        }

    def could_take(self, wait: Event) -> tuple[list[Event], int]:
        """The signals and copies that a wait, or one before it, may take; what they amount to."""
        arrivals = self.arrivals.get((wait.device, at(wait.column.sem, wait.position)))
        if arrivals is None:  # a wait for nothing
            return [], 0
        could = arrivals.possible(wait, self.clocks)
        return [arrivals.events[i] for i in could], int(arrivals.values[could].sum())

    def left_over(self, event: Event, semaphore: int) -> str:
        """The line that can add to a semaphore of an event's device by then what is taken only
        later; "" if each comes in time.
        """
        key = (event.device, semaphore)
        arrivals, waits = self.arrivals.get(key), self.waits.get(key, [])
        if arrivals is None:
            return ""
        taken = [0, *(_after(wait) for wait in waits if wait.count < event.count)][-1]
        if arrivals.sums[-1] > (_after(waits[-1]) if waits else 0):
            return ""  # not 0 at the program's end either
        could = arrivals.possible(event, self.clocks)
        if arrivals.values[could].sum() <= taken:
            return ""
        early = [i for i in could if self.possible(event, arrivals.events[i])]
        over = arrivals.values[early].sum() > taken
        return arrivals.events[early[-1]].column.source.line if over else ""

    def _take(self, wait: Event) -> None:
        waits = self.waits[wait.device, at(wait.column.sem, wait.position)]
        wait.taken = (_after(waits[-1]) if waits else 0) + wait.value
        waits.append(wait)

    def _order_events(self) -> None:
        """Fills in the clock table, and where each copy's completion is known."""
        n_devices, clocks = self.program.n_devices, self.clocks
        while True:
            knows = np.zeros((n_devices, n_devices), np.int32)
            changed = False
            for arrivals in self.arrivals.values():
                arrivals.marked[:] = False
            for event in self.events:
                mine = knows[event.device]
                mine[event.device] = event.count
                if isinstance(event.column, Wait):
                    if event.taken:
                        key = (event.device, at(event.column.sem, event.position))
                        changed |= _learn(self.arrivals[key], event, mine, clocks)
                elif event.row >= 0:
                    row = clocks[event.row]
                    if not np.array_equal(row, mine):
                        row[:] = mine
                        changed = True
                        for key, _, _ in additions(event):
                            self.arrivals[key].forget()
            if not changed:
                return


def _after(wait: Event) -> int:
    """What has been taken from a wait's semaphore once it is over."""
    return wait.taken - (wait.value if wait.column.keeps else 0)


@dataclasses.dataclass
class _State:
    """How far each device has come, and what its semaphores hold."""

    counts: list[int]
    semaphores: dict[Key, int]

    def copy(self) -> _State:
        held = {key: value for key, value in self.semaphores.items() if value}
        return _State(self.counts.copy(), defaultdict(int, held))

    def pass_by(self, event: Event) -> None:
        self.counts[event.device] = event.count
        for key, value, _ in additions(event):
            self.semaphores[key] += value
        if isinstance(event.column, Wait) and not event.column.keeps:
            self.semaphores[event.device, at(event.column.sem, event.position)] -= event.value


def execute(
    program: Program, events: list[Event], held_back: tuple[int, int, bool] | None = None
) -> bool:
    """Appends the events in some order in which they can happen: each device runs until it must
    wait. Returns whether all come to their end.

    `held_back`: the device and number of an event that never ends; the last of its bytes is never
    written, nor, if the third is true, read. Anything but a copy is not even begun.
    """
    streams = [_stream(program, device) for device in range(program.n_devices)]
    return _execute(streams, defaultdict(int), events, held_back)


def _stream(program: Program, device: int) -> Iterator[Event]:
    kernel = 0
    for count, (_, position, column) in enumerate(program.of_device(device), 1):
        if isinstance(column, Enter):
            kernel = column.kernel
        yield Event(device, count, column, position, kernel=kernel)


def _execute(
    streams: Sequence[Iterator[Event]],
    semaphores: dict[Key, int],
    events: list[Event],
    held_back: tuple[int, int, bool] | None,
) -> bool:
    """As `execute`, from where the devices' streams of events and their semaphores are."""
    held: dict[int, tuple[Key, int, Event]] = {}
    waiting_on: dict[Key, int] = {}
    last = held_back or (-1, -1, False)
    ready = deque(range(len(streams)))

    def run(device: int) -> Iterator[tuple[Key, int, Any]]:
        """Goes on with a device; yields what it adds to semaphores."""
        while True:
            if device in held:
                key, need, event = held.pop(device)
            else:
                following = next(streams[device], None)
                if following is None:
                    return
                event, column = following, following.column
                if (device, event.count) == last[:2] and not isinstance(column, Start):
                    return
                if isinstance(column, Wait):
                    key, need = (device, at(column.sem, event.position)), event.value
            if isinstance(event.column, Wait):
                if semaphores[key] < need:
                    held[device] = (key, need, event)
                    waiting_on[key] = device
                    return
                if not event.column.keeps:
                    semaphores[key] -= need
            elif (device, event.count) == last[:2]:
                yield from all_but_the_last_byte(event, last[2])
            else:
                yield from additions(event)
            events.append(event)

    while ready:
        for key, value, _ in run(ready.popleft()):
            semaphores[key] += value
            waiter = waiting_on.get(key)
            if waiter is not None and semaphores[key] >= held[waiter][1]:
                del waiting_on[key]
                ready.append(waiter)
    return not held


def additions(event: Event) -> Iterator[tuple[Key, int, list[Mark] | None]]:
    """(semaphore, how much, where it is known to be over) of what an event adds to semaphores."""
    column, position = event.column, event.position
    if isinstance(column, Signal):
        yield (event.target, at(column.sem, position)), event.value, None
    elif isinstance(column, Start):
        nbytes = int(at(column.nbytes, position))
        if column.src_sem is not None:
            yield (event.device, at(column.src_sem, position)), nbytes, event.read_known
        yield (event.target, at(column.dst_sem, position)), nbytes, event.write_known


def all_but_the_last_byte(copy: Event, reads: bool) -> Iterator[tuple[Key, int, list[Mark] | None]]:
    for key, nbytes, known_at in additions(copy):
        yield key, nbytes - (reads or known_at is copy.write_known), known_at


def _arrivals(events: list[Event]) -> dict[Key, Arrivals]:
    """All additions to each semaphore."""
    out: dict[Key, Arrivals] = defaultdict(Arrivals)
    for event in events:
        for key, value, known_at in additions(event):
            out[key].add(event, value, known_at)
    for arrivals in out.values():
        arrivals.close()
    return out


def _learn(arrivals: Arrivals, wait: Event, mine: np.ndarray, clocks: np.ndarray) -> bool:
    """Adds to `mine` what is known after a wait; whether a copy's end is newly known."""
    could = arrivals.possible(wait, clocks)
    values = arrivals.values[could]
    total, need = int(values.sum()), wait.taken
    if arrivals.sender is None:
        np.maximum(mine, arrivals.least(could, need, clocks), out=mine)
    elif arrivals.sender != wait.device:
        # One device's additions, in its order: any choice that suffices holds one as late as this.
        last = int(np.searchsorted(arrivals.sums, need))
        np.maximum(mine, clocks[arrivals.rows[last]], out=mine)
    if total > need:
        return False
    changed = False
    mark = (wait.device, wait.count)
    for i in could[~arrivals.marked[could]]:
        arrivals.marked[i] = True
        known_at = arrivals.known_at[i]
        if known_at is not None and mark not in known_at:
            known_at.append(mark)
            changed = True
    return changed
