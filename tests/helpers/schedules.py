"""All schedules of a small program, one by one: what the judge's verdicts are held against.

It shares nothing with the judge but the stepped program: no clocks and no order. A state is how far
each device has come and how much of each copy has been read and written. From each state everything
that can happen next does: a device performs its next instruction, a part of a copy is read, a
part that was read is written. Two accesses race if each can begin before the other is over.

Schedules that nobody can tell apart are gone through once. What can happen stays possible until it
happens, and stops nothing else: one core alone waits for a semaphore, and waits count. So what does
not show is done as soon as it can be: an instruction whose rivals are all over, a part of a copy
that does not end it, an end that no rival is still to come to. And one pair of rivals is watched at
a time, so that no other access shows. `reduced=False` does none of this.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_collectives.replay.program import (
    Access,
    Enter,
    Leave,
    Program,
    Signal,
    Start,
    Unscope,
    Wait,
    at,
)

# The device and the number, from 1, of an instruction there.
Mark = tuple[int, int]
# The owner and the number of a semaphore.
Key = tuple[int, int]
# Of each instruction those that touch the same bytes, and whether by its reads or its writes.
Rivals = dict[Mark, dict[Mark, frozenset[str]]]


class TooMany(Exception):
    """More states than were asked for."""


@dataclasses.dataclass
class Step:
    """An instruction: what it waits for, adds and touches."""

    mark: Mark
    waits: tuple[Key, int, bool] | None = None  # semaphore, value, keeps
    adds: list[tuple[Key, int]] = dataclasses.field(default_factory=list)
    copy: tuple[tuple[Key, int] | None, tuple[Key, int]] | None = None  # of its source, its goal
    reads: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)  # bytes, by memory
    writes: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What can happen on some schedule.

    Attributes:
      races: pairs of instructions, the one of the lower device first.
      deadlock: some schedule stops before all devices are done.
      leftovers: semaphores that are not 0 at an end.
      states: how many there are.
    """

    races: frozenset[tuple[Mark, Mark]]
    deadlock: bool
    leftovers: frozenset[Key]
    states: int


def bytes_of(view: Any, position: int) -> np.ndarray:
    """The numbers of a view's bytes in its buffer."""
    number = np.zeros(1, np.int64)
    for size, stride in view.dims:
        number = (number[:, None] + np.arange(int(at(size, position))) * stride).reshape(-1)
    return (int(at(view.base, position)) + number[:, None] + np.arange(view.itemsize)).reshape(-1)


def steps_of(program: Program) -> list[list[Step]]:
    """Each device's instructions."""
    buffers = defaultdict(list)
    for buffer in program.buffers:
        if buffer.space != "smem":
            buffers[buffer.kernel].append(buffer)
    out = []
    for device in range(program.n_devices):
        stream = program.of_device(device)
        out.append(
            [
                _step(program, buffers, (device, count), position, column)
                for count, (_, position, column) in enumerate(stream, 1)
            ]
        )
    return out


def _step(program: Program, buffers: Any, mark: Mark, position: int, column: Any) -> Step:
    device, step = mark[0], Step(mark)

    def place(view: Any, on: int) -> Any:
        return program.home(on, view.buffer), view.buffer.id

    match column:
        case Enter() | Leave():
            for buffer in buffers[column.kernel]:
                if program.home(device, buffer) == device:
                    step.writes[device, buffer.id] = np.arange(buffer.nbytes)
        case Unscope():
            for buffer in column.memory:
                if buffer.space != "semaphore_mem":  # what it then holds is `find_kept`'s
                    step.writes[program.home(device, buffer), buffer.id] = np.arange(buffer.nbytes)
        case Access():
            touched = step.writes if column.writes else step.reads
            touched[place(column.view, device)] = bytes_of(column.view, position)
        case Wait():
            key = device, int(at(column.sem, position))
            step.waits = key, int(at(column.value, position)), column.keeps
        case Signal():
            target = at(column.target, position)
            key = (device if target is None else int(target)), int(at(column.sem, position))
            step.adds.append((key, int(at(column.value, position))))
        case Start():
            target = at(column.target, position)
            goal = device if target is None else int(target)
            nbytes = int(at(column.nbytes, position))
            sent = at(column.src_sem, position)
            step.copy = (
                None if sent is None else ((device, int(sent)), nbytes),
                ((goal, int(at(column.dst_sem, position))), nbytes),
            )
            step.reads[place(column.src, device)] = bytes_of(column.src, position)
            step.writes[place(column.dst, goal)] = bytes_of(column.dst, position)
    return step


def search(program: Program, limit: int = 200_000, *, reduced: bool = True) -> Outcome:
    """Goes through all schedules; `reduced`: but for those that cannot be told apart.

    Raises:
      TooMany: more than `limit` states.
    """
    steps = steps_of(program)
    rivals = _rivals([step for stream in steps for step in stream])
    watched = [rivals]
    if reduced:
        watched = [
            {a: {b: rivals[a][b]}, b: {a: rivals[b][a]}} for a in rivals for b in rivals[a] if a < b
        ] or [{}]
    found = [_Search(steps, one, limit, reduced).run() for one in watched]
    return Outcome(
        frozenset().union(*(one.races for one in found)),
        any(one.deadlock for one in found),
        frozenset().union(*(one.leftovers for one in found)),
        sum(one.states for one in found),
    )


class _Search:
    def __init__(self, steps: list[list[Step]], rivals: Rivals, limit: int, hasty: bool):
        self.steps, self.limit, self.hasty = steps, limit, hasty
        every = [step for stream in steps for step in stream]
        self.copies = [step for step in every if step.copy]
        self.number = {step.mark: i for i, step in enumerate(self.copies)}
        self.units = _units(every)
        self.rivals = {step.mark: rivals.get(step.mark, {}) for step in every}
        self.early: set[tuple[Mark, Mark]] = set()  # the second has begun before the first was over

    def run(self) -> Outcome:
        start = self._settled((0,) * len(self.steps), ((0, 0),) * len(self.copies))
        seen, open_ = {start}, [start]
        deadlock, leftovers = False, set()
        while open_:
            state = open_.pop()
            following = list(self._following(state))
            if not following:
                left = self._left_over(state)
                if any(done < len(s) for done, s in zip(state[0], self.steps, strict=True)):
                    deadlock = True
                else:
                    leftovers |= left
            for new in following:
                if new not in seen:
                    if len(seen) >= self.limit:
                        raise TooMany(f"more than {self.limit} states")
                    seen.add(new)
                    open_.append(new)
        races = {(a, b) for a, b in self.early if (b, a) in self.early and a < b}
        return Outcome(frozenset(races), deadlock, frozenset(leftovers), len(seen))

    def _value(self, key: Key, state: Any) -> int:
        """What a semaphore holds, in units."""
        done, progress = state
        total = 0
        for sign, amount, mark, of_copy in self.units.uses[key]:
            if done[mark[0]] < mark[1]:
                continue
            if of_copy is None:
                total += sign * amount
            else:
                total += progress[self.number[mark]][of_copy]
        return total

    def _settled(self, done: Any, progress: Any) -> Any:
        """What is reached when all happens that nobody can tell from what was before."""
        state = done, progress
        moved = self.hasty
        while moved:
            moved = False
            for device in range(len(self.steps)):
                while self._next(device, state) and not self._rivals_under_way(device, state):
                    state, moved = self._after(device, state), True
            for i, copy in enumerate(self.copies):
                while part := self._unseen_part(i, copy, state):
                    state, moved = (state[0], _replaced(state[1], i, part)), True
        return state

    def _next(self, device: int, state: Any) -> Step | None:
        """What a device can do next."""
        stream, done = self.steps[device], state[0][device]
        possible = done < len(stream) and self._possible(stream[done], state)
        return stream[done] if possible else None

    def _after(self, device: int, state: Any) -> Any:
        done, progress = state
        return (*done[:device], done[device] + 1, *done[device + 1 :]), progress

    def _rivals_under_way(self, device: int, state: Any) -> list[Mark]:
        """What a device's next instruction would come too early for."""
        mark = self.steps[device][state[0][device]].mark
        return [rival for rival in self.rivals[mark] if not self._over(rival, mark, state)]

    def _unseen_part(self, i: int, copy: Step, state: Any) -> tuple[int, int] | None:
        """How far a copy can come without anybody's seeing it."""
        parts = self._parts(i, state)
        return next((part for part in parts if not self._shows(copy, part, state)), None)

    def _parts(self, i: int, state: Any) -> Iterator[tuple[int, int]]:
        """How far a copy is with one part more of it read, or written."""
        mark, (read, written) = self.copies[i].mark, state[1][i]
        if state[0][mark[0]] >= mark[1]:
            source, goal = self.units.parts[mark]
            if read < source:
                yield read + 1, written
            if written < goal and (written + 1) * source <= read * goal:
                yield read, written + 1

    def _shows(self, copy: Step, part: tuple[int, int], state: Any) -> bool:
        """Whether a part ends what an instruction that is still to come may run into."""
        read, _ = state[1][self.number[copy.mark]]
        side = 0 if part[0] > read else 1
        if part[side] < self.units.parts[copy.mark][side]:
            return False
        kind = ("reads", "writes")[side]
        to_come = (r for r in self.rivals[copy.mark] if state[0][r[0]] < r[1])
        return any(kind in self.rivals[copy.mark][rival] for rival in to_come)

    def _possible(self, step: Step, state: Any) -> bool:
        if step.waits is None:
            return True
        key, value, _ = step.waits
        return self._value(key, state) >= value // self.units.size[key]

    def _following(self, state: Any) -> Iterator[Any]:
        for device in range(len(self.steps)):
            if step := self._next(device, state):
                early = self._rivals_under_way(device, state)
                self.early.update((rival, step.mark) for rival in early)
                yield self._settled(*self._after(device, state))
        for i in range(len(self.copies)):
            for part in self._parts(i, state):
                yield self._settled(state[0], _replaced(state[1], i, part))

    def _over(self, mark: Mark, other: Mark, state: Any) -> bool:
        """Whether all of an instruction that the other one conflicts with is over."""
        done, progress = state
        if done[mark[0]] < mark[1]:
            return False
        if mark not in self.number:
            return True
        read, written = progress[self.number[mark]]
        source, goal = self.units.parts[mark]
        touched = self.rivals[mark][other]
        return (read == source or "reads" not in touched) and (
            written == goal or "writes" not in touched
        )

    def _left_over(self, state: Any) -> set[Key]:
        return {key for key in self.units.uses if self._value(key, state)}


def _replaced(items: Any, i: int, item: Any) -> Any:
    return (*items[:i], item, *items[i + 1 :])


@dataclasses.dataclass
class _Units:
    """Semaphores' amounts in units that divide all that is added and waited for."""

    size: dict[Key, int]
    uses: dict[Key, list[tuple[int, int, Mark, int | None]]]  # sign, units, who, side of a copy
    parts: dict[Mark, tuple[int, int]]  # a copy's units read and written


def _units(steps: list[Step]) -> _Units:
    amounts: dict[Key, list[int]] = defaultdict(list)
    for step in steps:
        ends = [end for end in step.copy or () if end]
        waits = [step.waits[:2]] if step.waits else []
        for key, amount in (*step.adds, *ends, *waits):
            amounts[key].append(amount)
    size = {key: math.gcd(*values) or 1 for key, values in amounts.items()}
    uses: dict[Key, list[Any]] = defaultdict(list)
    parts: dict[Mark, tuple[int, int]] = {}
    for step in steps:
        if step.waits and not step.waits[2]:
            key, value, _ = step.waits
            uses[key].append((-1, value // size[key], step.mark, None))
        for key, value in step.adds:
            uses[key].append((1, value // size[key], step.mark, None))
        if step.copy:
            source, (goal, nbytes) = step.copy
            uses[goal].append((1, 0, step.mark, 1))
            n_read = 1
            if source:
                uses[source[0]].append((1, 0, step.mark, 0))
                n_read = nbytes // size[source[0]]
            parts[step.mark] = n_read, nbytes // size[goal]
    for key in size:
        uses.setdefault(key, [])
    return _Units(size, uses, parts)


def _rivals(steps: list[Step]) -> Rivals:
    """For each instruction, the others that touch the same bytes, one of the two writing; and
    whether by its reads or its writes.
    """
    touching: dict[Any, list[tuple[Step, str, np.ndarray]]] = defaultdict(list)
    for step in steps:
        for kind in ("reads", "writes"):
            for place, touched in getattr(step, kind).items():
                if len(touched):
                    touching[place].append((step, kind, touched))
    out: Rivals = {step.mark: {} for step in steps}
    for uses in touching.values():
        for i, (a, kind, touched) in enumerate(uses):
            for b, other, touched_too in uses[i + 1 :]:
                if a is b or kind == other == "reads" or _same_core(a, b):
                    continue
                if np.intersect1d(touched, touched_too).size:
                    out[a.mark][b.mark] = out[a.mark].get(b.mark, frozenset()) | {kind}
                    out[b.mark][a.mark] = out[b.mark].get(a.mark, frozenset()) | {other}
    return out


def _same_core(a: Step, b: Step) -> bool:
    """Whether one device does both, at once: in the order of its program."""
    return a.mark[0] == b.mark[0] and a.copy is None and b.copy is None
