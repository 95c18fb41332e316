"""A schedule that shows a finding: what each device does, step by step, drawn as text in lanes."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pallas_collectives.replay.order import (
    Event,
    Key,
    Mark,
    additions,
    all_but_the_last_byte,
    execute,
)
from pallas_collectives.replay.program import (
    Access,
    Enter,
    Instruction,
    Leave,
    Program,
    Signal,
    Start,
    Unscope,
    Wait,
    at,
)
from pallas_collectives.replay.regions import Box, box_of
from pallas_collectives.replay.values import Lanes
from pallas_collectives.replay.views import View

_LANES, _ROWS, _WIDTH = 4, 20, 96  # of a drawing: devices, steps, characters of all lanes together


@dataclasses.dataclass(frozen=True)
class Step:
    """One row of a schedule.

    `mark`: "A>" where the first access of a race begins, ">A" where it is over, "A" where both are
    one; "B" the second; "X" where a device stops for ever.
    """

    device: int
    text: str
    line: str
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps in an order in which they can happen; `devices` have a lane each.

    `left_out`: how many steps came before, and how many devices have no lane.
    """

    devices: tuple[int, ...]
    heads: tuple[str, ...]  # of the lanes
    steps: tuple[Step, ...]
    left_out: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        width = min(38, _WIDTH // max(len(self.devices), 1))
        lanes = {device: k for k, device in enumerate(self.devices)}
        heads = "".join(head.ljust(width) for head in self.heads)
        rows = [f"     {heads}".rstrip()]
        if self.left_out[0]:
            rows.append(f"     ... after {self.left_out[0]} steps that are not shown")
        for step in self.steps:
            cells = ["·".ljust(width)] * len(self.devices)
            cells[lanes[step.device]] = _cut(step.text, width - 2).ljust(width)
            rows.append(f"{step.mark:>3}  {''.join(cells)}{step.line.split(' (')[0]}".rstrip())
        if self.left_out[1]:
            more = self.left_out[1]
            rows.append(f"     (and {more} more device{'s' * (more > 1)})")
        return "\n".join(rows)


def of_race(program: Program, first: Mark, later: Mark, *, reads: bool) -> Schedule:
    """How the event `later` comes before `first` is over.

    The first is held back, all else goes as far as it can. `reads`: what is held back of a copy is
    its reading, and not its writing alone.
    """
    events: list[Event] = []
    execute(program, events, (*first, reads))
    done = {(event.device, event.count): event for event in events}
    held = done.get(first) or _event(program, first)
    begun = first if first in done else (first[0], first[1] - 1)
    needed = _causes(events, [later, begun], (*first, reads))
    steps: list[Step] = []
    for event in events:
        mark = (event.device, event.count)
        if event.count > needed.get(event.device, 0):
            continue
        if mark == first:
            steps.append(_step(program, event, "A>"))
        elif mark == later:
            steps.append(_step(program, event, "B"))
        elif isinstance(event.column, (Signal, Start, Wait)) and not _implicit(event.column):
            steps.append(_step(program, event))
    late = "only now: " if first not in done else "over only now: "
    steps.append(_step(program, held, "A" if first not in done else ">A", late))
    movers = [event.device for event in events if _moves(event, needed)]
    goals = [event.target for event in (held, done.get(later)) if event and _is_copy(event)]
    return _shortened(program, steps, [first[0], later[0], *goals, *movers])


def of_deadlock(program: Program, stuck: Sequence[int], others: int = 0) -> Schedule:
    """What the devices `stuck` did last, and where each waits for ever; `others` do too."""
    events: list[Event] = []
    execute(program, events)
    last: dict[int, int] = {event.device: event.count for event in events}
    shown = list(dict.fromkeys(stuck))[:_LANES]
    steps = [
        _step(program, event)
        for event in events
        if event.device in shown
        and last[event.device] - event.count < 8
        and isinstance(event.column, (Signal, Start, Wait))
        and not _implicit(event.column)
    ]
    for device in shown:
        waiting = _event(program, (device, last.get(device, 0) + 1))
        steps.append(_step(program, waiting, "X", after=" for ever"))
    return _shortened(program, steps, shown, len(set(stuck)) - len(shown) + others)


def _event(program: Program, mark: Mark) -> Event:
    """The `count`-th event of a device, which has perhaps not happened."""
    device, count = mark
    for number, (_, position, column) in enumerate(program.of_device(device), 1):
        if number == count:
            return Event(device, count, column, position)
    raise AssertionError(mark)


def _is_copy(event: Event) -> bool:
    return isinstance(event.column, Start)


def _moves(event: Event, needed: dict[int, int]) -> bool:
    """Whether an event sends data to another device, of those that happen."""
    mine = event.count <= needed.get(event.device, 0)
    return mine and _is_copy(event) and event.target != event.device


def _implicit(column: Instruction) -> bool:
    return getattr(column, "implicit", False)


def _causes(
    events: Iterable[Event], wanted: Iterable[Mark], held_back: tuple[int, int, bool]
) -> dict[int, int]:
    """Up to which of its events each device must have come for the wanted ones to happen so."""
    by_device: dict[int, list[Event]] = defaultdict(list)
    added: dict[Key, list[tuple[Event, int]]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
        is_held = (event.device, event.count) == held_back[:2]
        adds = all_but_the_last_byte(event, held_back[2]) if is_held else additions(event)
        for key, value, _ in adds:
            added[key].append((event, value))
    came: dict[int, int] = defaultdict(int)
    taken: dict[Key, int] = defaultdict(int)
    used: dict[Key, int] = defaultdict(int)  # additions looked at, and what they amount to
    sums: dict[Key, int] = defaultdict(int)
    open_ = list(wanted)
    while open_:
        device, count = open_.pop()
        for event in by_device[device][came[device] : count]:
            if not isinstance(event.column, Wait):
                continue
            key = (device, at(event.column.sem, event.position))
            need = taken[key] + event.value
            if not event.column.keeps:
                taken[key] = need
            while sums[key] < need and used[key] < len(added[key]):
                cause, value = added[key][used[key]]
                used[key] += 1
                sums[key] += value
                open_.append((cause.device, cause.count))
        came[device] = max(came[device], count)
    return came


def _step(
    program: Program, event: Event, mark: str = "", before: str = "", after: str = ""
) -> Step:
    text = before + describe(program, event) + after
    return Step(event.device, text, event.column.source.line, mark)


def describe(program: Program, event: Event) -> str:
    """What an instruction does, in a few words."""
    column, position = event.column, event.position
    match column:
        case Signal():
            to = "" if event.target == event.device else f" → {event.target}"
            return f"signal {_sem(program, column.sem, position)}{to}"
        case Wait():
            return f"wait {_sem(program, column.sem, position)}"
        case Start():
            source, goal = named(column.src, position), named(column.dst, position)
            if event.target == event.device:
                return f"copy {source} → {goal}"
            return f"copy {source} → {event.target}" + (f": {goal}" if goal != source else "")
        case Unscope():
            return f"end the scope of {column.own[0].name}"
        case Access():
            return f"{'write' if column.writes else 'read'} {named(column.view, position)}"
        case Enter():
            return f"enter {column.source.kernel}"
        case Leave():
            return f"leave {column.source.kernel}"
    return "compute"


def _sem(program: Program, sem: Lanes, position: int) -> str:
    return re.sub(r"^barrier\[.*\]$", "barrier", program.semaphores[at(sem, position)].name)


def named(view: View, position: int) -> str:
    """A view as its author would write it: `o_ref[2]`, `slots[0, 8:16]`."""
    return view.buffer.name + part(box_of(view, position), view.buffer.shape)


def part(box: Box, shape: tuple[int, ...]) -> str:
    """A box of an array as an index; "" if it is all of it."""
    dims = [
        ":" if (start, size) == (0, n) else str(start) if size == 1 else f"{start}:{start + size}"
        for (start, size), n in zip(box, shape, strict=True)
    ]
    while dims and dims[-1] == ":":
        dims.pop()
    return f"[{', '.join(dims)}]" if dims else ""


def _head(program: Program, device: int) -> str:
    """What a lane is called: of programs on several cores each core is a device of its own."""
    core, number = divmod(device, program.n_devices // program.cores)
    return f"device {number}" + (f", core {core}" if program.cores > 1 else "")


def _shortened(
    program: Program, steps: list[Step], first: Sequence[int], more_devices: int = 0
) -> Schedule:
    """As much as a page holds: the devices that matter first, the latest steps."""
    everyone = list(dict.fromkeys([*first, *(step.device for step in steps)]))
    shown = sorted(list(dict.fromkeys(first))[:_LANES])
    kept = [step for step in steps if step.device in shown]
    cut = max(0, len(kept) - _ROWS)
    begins = [step for step in kept[:cut] if step.mark]  # what is marked stays
    hidden = cut - len(begins)
    left_out = (hidden, more_devices + len(everyone) - len(shown))
    heads = tuple(_head(program, device) for device in shown)
    return Schedule(tuple(shown), heads, tuple(begins + kept[cut:]), left_out)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
