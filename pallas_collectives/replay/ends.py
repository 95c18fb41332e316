"""How a program ends: devices that wait for ever, and semaphores that are not 0."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_collectives.replay.engine import Engine
from pallas_collectives.replay.program import Signal, Start, Wait

_EXPLAINED = 16  # devices for which the program is searched: those that follow are like them
_NAMED = 4  # signallers of one semaphore


@dataclasses.dataclass(frozen=True)
class Stuck:
    """A device that waits for ever.

    `signalled_by`: who has signalled what it waits for, who would, and where those stopped;
    `waits_for`: the devices that would and stopped. `counts`: "bytes" or "signals".
    """

    device: int
    line: str
    semaphore: str
    has: int
    needs: int
    signalled_by: tuple[str, ...]
    waits_for: tuple[int, ...] = ()
    counts: str = "signals"
    devices: int = 1  # that do the same, this one included

    @property
    def key(self) -> tuple[Any, ...]:
        """What devices that are stuck alike have in common."""
        return self.line, self.semaphore, self.has, self.needs

    @property
    def remedy(self) -> str:
        """What would let the device go on."""
        if self.waits_for == (self.device,):
            return "leave this wait out, or start what signals it before: the device itself would"
        if self.waits_for:
            others = ", ".join(map(str, self.waits_for[:_NAMED]))
            return (
                f"let the wait at {self.line} come after what device {others} waits for, or signal "
                f"{self.semaphore} before that"
            )
        more = self.needs - self.has
        if not self.has and not self.signalled_by:
            return f"signal {self.semaphore} of this device, or leave the wait out"
        unit = "byte" if self.counts == "bytes" else "time"
        what = f"{more:,} {unit}{'s' * (more > 1)} more"
        less = f"wait for {self.has:,} only" if self.has else "leave this wait out"
        return f"{less}, or let {self.semaphore} be signalled {what}"

    def __str__(self) -> str:
        who = "; ".join(self.signalled_by) or "nobody ever signals it"
        return (
            f"device {self.device} waits at {self.line} for {self.semaphore} to reach "
            f"{self.needs}; it is {self.has}: {who}"
        )


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A semaphore that is not zero at the end. `added`, `taken`: lines, with how much each."""

    device: int
    semaphore: str
    value: int
    added: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    line: str = ""
    counts: str = "signals"
    devices: int = 1  # on which it is so, this one included

    @property
    def key(self) -> tuple[Any, ...]:
        """What semaphores that are left over alike have in common."""
        name = self.semaphore.partition("[")[0]
        return name, self.value, self.counts, self.line

    def __str__(self) -> str:
        out = f"device {self.device}: {self.semaphore} is {self.value} at the end, not 0"
        if self.added:
            taken = ", ".join(self.taken) or "nowhere"
            out += f"; added {', '.join(self.added)}; waited for {taken}"
        return out


def find_stuck(engine: Engine) -> list[Stuck]:
    """The devices that a finished engine holds up, each with why nobody will release it."""
    out: list[Stuck] = []
    for core in engine.cores:
        block = core.waiting
        if block is None:
            continue
        who: tuple[str, ...] = ()
        waits_for: tuple[int, ...] = ()
        if len(out) < _EXPLAINED:
            who, waits_for = _signallers(engine, core.device, block.sem)
        out.append(
            Stuck(
                core.device,
                block.column.source.line,
                engine.program.semaphores[block.sem].name,
                core.semaphores[block.sem],
                block.value,
                who,
                waits_for,
                "bytes" if block.column.is_dma else "signals",
                _alike(engine, core.device),
            )
        )
    return out


def _signallers(engine: Engine, device: int, sem: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Which instructions would signal `sem` of `device`, and whether they have been reached."""
    has, would = [], []
    stopped: list[int] = []
    for k, column, lanes in _additions(engine, device, sem):
        for lane in lanes:
            core, line = engine.cores[engine.classes.of_device[lane]], column.source.line
            if core.finished > k:
                has.append(f"device {lane} has signalled it at {line}")
            elif core.waiting is not None:
                at_line = core.waiting.column.source.line
                would.append(f"device {lane} would at {line}, but waits at {at_line}")
                stopped.append(lane)
            else:
                would.append(f"device {lane} would at {line}")
    who = list(dict.fromkeys([*would, *has]))
    more = [f"and {len(who) - _NAMED} more"] if len(who) > _NAMED else []
    return (*who[:_NAMED], *more), tuple(dict.fromkeys(stopped))


def _additions(engine: Engine, device: int, sem: int) -> Iterator[tuple[int, Any, list[int]]]:
    """(column number, column, the devices that add to `sem` of `device` there)."""
    for k, column in enumerate(engine.program.columns):
        if isinstance(column, Signal):
            fields: list[tuple[Any, Any]] = [(column.sem, column.target)]
        elif isinstance(column, Start):
            fields = [(column.dst_sem, column.target), (column.src_sem, None)]
        else:
            continue
        for sems, targets in fields:
            if sems is None:
                continue
            shape = column.lanes.shape
            owners = column.lanes if targets is None else np.broadcast_to(targets, shape)
            hits = (owners == device) & (np.broadcast_to(sems, shape) == sem)
            if hits.any():
                yield k, column, column.lanes[hits].tolist()


def find_leftovers(engine: Engine) -> list[Leftover]:
    """Semaphores that are not 0 although all devices have come to their ends."""
    out: list[Leftover] = []
    for core in engine.cores:
        alike = _alike(engine, core.device)
        for sem, value in sorted(core.semaphores.items()):
            if not value:
                continue
            name = engine.program.semaphores[sem].name
            if len(out) >= _EXPLAINED:
                out.append(Leftover(core.device, name, value, devices=alike))
                continue
            added, taken, copies = _traffic(engine, core.device, sem)
            line = next(iter(added), next(iter(taken), ""))
            counts = "bytes" if copies else "signals"
            out.append(
                Leftover(core.device, name, value, _said(added), _said(taken), line, counts, alike)
            )
    return out


def _alike(engine: Engine, device: int) -> int:
    return int(engine.classes.device_count[engine.classes.of_device[device]])


def _said(amounts: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{amount:,} at {line}" for line, amount in amounts.items())


def _traffic(engine: Engine, device: int, sem: int) -> tuple[Counter[str], Counter[str], bool]:
    """How much is added to a semaphore, and taken from it, by line; whether copies do."""
    copies = False
    added: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for _, column, lanes in _additions(engine, device, sem):
        copies |= isinstance(column, Start)
        amount = column.nbytes if isinstance(column, Start) else column.value
        amounts = np.broadcast_to(amount, column.lanes.shape)
        added[column.source.line] += int(amounts[np.isin(column.lanes, lanes)].sum())
    for column in engine.program.columns:
        if not isinstance(column, Wait) or column.keeps:
            continue
        hits = (column.lanes == device) & (np.broadcast_to(column.sem, column.lanes.shape) == sem)
        if hits.any():
            taken[column.source.line] += int(np.broadcast_to(column.value, hits.shape)[hits].sum())
    return added, taken, copies
