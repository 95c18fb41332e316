"""What is wrong with a program, in one form: the rule, the places, the reason, and a remedy."""

from __future__ import annotations

import dataclasses
import linecache
import os
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from pallas_collectives.replay import lines, schedule
from pallas_collectives.replay.ends import Leftover, Stuck
from pallas_collectives.replay.lines import Line
from pallas_collectives.replay.races import Race
from pallas_collectives.replay.report import Report
from pallas_collectives.replay.rules import Fault

_WIDTH = 116

# What is looked for: the rule's name, and what breaks it.
RULES = {
    "deadlock": "a device waits for what never comes, on every schedule",
    "race": "two accesses of the same memory, one of them a write, that nothing orders",
    "early-read": "memory is read that a copy under way may still be writing",
    "entry": "a copy or signal to a device that may not have entered the kernel, or has left it",
    "leftover": "a semaphore is not 0 when its kernel, or its scope, ends",
    "bytes": "a wait is for other bytes than copies bring to its semaphore",
    "barrier": "signals to a barrier semaphore and waits there that do not add up, or have no id",
    "reach": "a copy or signal to a device that the chip does not route to",
    "memory": "more VMEM, SMEM or semaphores at a time than the chip has",
    "bounds": "an index outside of a ref, or a device that is not there",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """One side of a finding: a line of code, and what it does there."""

    line: Line | None
    text: str
    label: str = ""  # the line where its path is not known

    @property
    def where(self) -> str:
        return str(self.line) if self.line else self.label

    @property
    def path(self) -> str:
        """`path:line`, from the folder that one is in where it lies below that."""
        if self.line is None:
            return self.label
        file = self.line.file
        below = file.startswith(os.getcwd() + os.sep)
        return f"{os.path.relpath(file) if below else file}:{self.line.number}"

    @property
    def source(self) -> str:
        """The line of code itself."""
        found = linecache.getline(self.line.path, self.line.number) if self.line else ""
        return found.strip()


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong.

    Attributes:
      rule: one of `RULES`.
      what: one sentence.
      places: where, the first the one to look at.
      why: what makes it possible.
      remedy: what would mend it.
      drawing: a schedule that shows it, as text; "" where one run shows it.
      alike: how many more devices or places it holds for.
    """

    rule: str
    what: str
    places: tuple[Place, ...]
    why: str
    remedy: str
    drawing: str = ""
    alike: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What it has in common with the same finding on another mesh."""
        return self.rule, tuple(sorted(place.where for place in self.places))

    def __str__(self) -> str:
        return "\n".join(self.text())

    def text(self) -> Iterator[str]:
        """Lines for people."""
        more = f" (and {self.alike} more like it)" if self.alike else ""
        yield f"{self.rule.upper()}: {self.what}{more}"
        for number, place in enumerate(self.places):
            letter = "AB"[number] if len(self.places) == 2 else "-"
            yield from _wrapped(f"  {letter} ", place.text)
            yield f"      {place.path}" + (f"    {place.source}" if place.source else "")
        if self.why:
            yield from _wrapped("  why   ", self.why)
        yield from _wrapped("  mend  ", self.remedy)
        if self.drawing:
            yield "  a schedule that shows it:"
            yield from (f"    {row}" for row in self.drawing.splitlines())


def _wrapped(before: str, text: str) -> list[str]:
    """Text behind a label, in lines of a terminal's or a page's width."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=before,
        subsequent_indent=" " * len(before),
        break_long_words=False,
        break_on_hyphens=False,
    )


def of_report(report: Report) -> list[Finding]:
    """All that a replay found wrong, each kind once, what is drawn as a schedule first."""
    where = _paths(report)
    found = [
        *_of_stuck(report, where),
        *(_of_race(race, report, where) for race in report.races or ()),
        *(_of_fault(fault, where) for fault in report.faults),
        *_of_leftovers(report, where),
    ]
    return list({finding.key: finding for finding in reversed(found)}.values())[::-1]


def of_index_error(error: IndexError, line: Line | None) -> Finding:
    """An address that is outside of its ref, which stopped the replay."""
    what, _, remedy = str(error).partition("\n")
    return Finding(
        "bounds",
        what.partition(" at ")[0],
        (Place(line, "here"),),
        "a TPU would halt, or read and write elsewhere",
        remedy.partition(": ")[2].rstrip(".") or "keep the index inside",
    )


def _paths(report: Report) -> dict[str, Line]:
    """Whole lines by what findings call them."""
    program = report.engine.program
    sources = (column.source for column in program.columns)
    return {source.line: source.place for source in sources if source.place is not None}


def _of_stuck(report: Report, where: dict[str, Line]) -> Iterator[Finding]:
    groups = _grouped(report.stuck)
    if not groups:
        return
    chain, others = _chain(report)
    live = not hasattr(report.engine.program, "of_device") or report.unsought.startswith("the kern")
    drawing = "" if live else str(schedule.of_deadlock(report.engine.program, chain, others))
    for number, group in enumerate(groups):
        first: Stuck = group[0]
        short = first.counts == "bytes" and first.has and not first.waits_for
        unit = "bytes" if first.counts == "bytes" else "signals"
        has = f"{first.has:,} of {first.needs:,} {unit}"
        yield Finding(
            "bytes" if short else "deadlock",
            f"device {first.device} waits for ever for {first.semaphore}, which has {has}",
            (_place(first.line, f"device {first.device} waits here", where),),
            "; ".join(first.signalled_by) or "nobody ever signals it",
            first.remedy,
            drawing if number == 0 else "",
            sum(one.devices for one in group) - 1,
        )


def _chain(report: Report) -> tuple[list[int], int]:
    """Devices that are stuck, each before those that it waits for, and how many others are too.

    Where none waits for another it is all of them.
    """
    by_device = {one.device: one for one in report.stuck}
    of_device = report.engine.classes.of_device
    stuck = {int(of_device[device]) for device in by_device}
    everyone = [device for device, kind in enumerate(of_device) if int(kind) in stuck]
    order: list[int] = []
    open_ = [report.stuck[0].device]
    while open_:
        device = open_.pop(0)
        if device in everyone and device not in order:
            order.append(device)
            open_ += by_device[device].waits_for if device in by_device else ()
    if len(order) > 1:
        return order, len(everyone) - len(order)
    return [*order, *(device for device in everyone if device not in order)], 0


def _of_leftovers(report: Report, where: dict[str, Line]) -> Iterator[Finding]:
    for group in _grouped(report.leftovers):
        first: Leftover = group[0]
        copies = first.counts == "bytes" and first.taken
        why = "more is added than waited for"
        if first.added:
            taken = ", ".join(first.taken) or "nowhere"
            why += f": added {', '.join(first.added)}; waited for {taken}"
        yield Finding(
            "bytes" if copies else "leftover",
            f"{first.semaphore} of device {first.device} is {first.value:,} at the end, not 0",
            (_place(first.line, "added here", where),),
            why,
            f"wait for {first.value:,} {first.counts} more, or let as much less come",
            "",
            sum(one.devices for one in group) - 1,
        )


def _grouped(found: Iterable[Any]) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for one in found:
        groups.setdefault(one.key, []).append(one)
    return list(groups.values())


def _of_fault(fault: Fault, where: dict[str, Line]) -> Finding:
    step = f"its instruction {fault.step}" if fault.step else "the whole kernel"
    return Finding(
        fault.name,
        f"{fault.what}",
        (_place(fault.line, f"device {fault.device}, {step}, in {fault.kernel}", where),),
        fault.rule,
        fault.remedy,
        "",
        fault.others,
    )


def _of_race(race: Race, report: Report, where: dict[str, Line]) -> Finding:
    kinds = [side.partition(" at ")[0] for side in (race.first, race.second)]
    name, _, space = race.buffer.rpartition(" (")
    entry = any("entry into" in kind or "exit from" in kind for kind in kinds)
    reads = any(kind.endswith("read") for kind in kinds)
    unfinished = "a copy's write" in kinds and reads and "bytes" in race.why + race.remedy
    early = unfinished or ("a copy's write" in kinds and "the copy signals" in race.why)
    sides = zip(kinds, race.steps, race.lines, race.flights, strict=True)
    return Finding(
        "entry" if entry else "early-read" if early and reads else "race",
        f"{name}{race.part} of device {race.device}, in {space.rstrip(')').upper()}: "
        f"{kinds[0]} and {kinds[1]} can come in either order",
        tuple(
            _place(line, f"{kind}, device {device}'s instruction {count}{_of(copy)}", where)
            for kind, (device, count), line, copy in sides
        ),
        race.why,
        race.remedy,
        str(schedule.of_race(report.engine.program, *race.steps, reads=race.reads)),
    )


def _of(copy: str) -> str:
    return f": {copy}" if copy else ""


def _place(label: str, text: str, where: dict[str, Line]) -> Place:
    line = where.get(label)
    known = line is not None and line.rank != lines.NOBODYS
    return Place(line if known else None, text, label)
