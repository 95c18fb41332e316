"""What a replay found: time, loads, waits and their causes, the critical path, leftovers,
deadlocks, races, and what the hardware forbids.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pallas_collectives.replay.ends import Leftover, Stuck, find_leftovers, find_stuck
from pallas_collectives.replay.engine import Block, Core, Engine
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.program import Kernel, Start
from pallas_collectives.replay.races import Race
from pallas_collectives.replay.rules import Fault

_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Segment:
    """One stretch of the critical path. `kind`: core, DMA latency, transfer, or hops."""

    kind: str
    device: int
    start: float
    end: float
    where: str


@dataclasses.dataclass(frozen=True)
class Held:
    """Time that devices like `device` spend in one wait."""

    device: int
    line: str
    scope: str
    cause: str
    seconds: float
    times: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A replay's results. Times in seconds, sizes in bytes; `engine` holds every event for pictures
    and traces.

    `races` is None where they were not looked for; `unsought` then says why. Faults by which a
    device may be early (`entry`) are looked for with races only.
    """

    machine: Machine
    time: float
    stuck: list[Stuck]
    leftovers: list[Leftover]
    faults: list[Fault]
    races: list[Race] | None
    unsought: str
    held: list[Held]
    critical_path: list[Segment]
    link_bytes: np.ndarray  # per link of `machine`
    kernels: list[Kernel]
    unmodelled: dict[str, int]
    devices_modelled: int
    engine: Engine

    @property
    def findings(self) -> list[Stuck | Leftover | Fault | Race]:
        """All that is wrong: deadlocks, semaphores left over, faults, races."""
        return [*self.stuck, *self.leftovers, *self.faults, *(self.races or ())]

    @property
    def ok(self) -> bool | None:
        """Whether the program is sound on every schedule. None: nothing is wrong so far, but races
        were not looked for. A program without a kernel is not: nothing was looked at.
        """
        if self.findings or not self.kernels:
            return False
        return None if self.races is None else True

    @property
    def least(self) -> bool:
        """Whether the time is the least that it can be: copies were not held up by one another."""
        return not self.engine.shared

    @property
    def vmem_bytes(self) -> int:
        """Peak VMEM of any kernel, per device: block and scratch buffers."""
        return max((k.vmem_bytes for k in self.kernels), default=0)

    @property
    def hbm_scratch_bytes(self) -> int:
        """Largest HBM scratch of any kernel, per device."""
        return max((k.hbm_scratch_bytes for k in self.kernels), default=0)

    @property
    def link_use(self) -> np.ndarray:
        """The share of the time that each link was busy."""
        seconds = self.link_bytes / self.machine.link_capacity
        return seconds / self.time if self.time else seconds

    @property
    def busiest_link(self) -> tuple[str, float, float]:
        """(name, bytes, share of the time it was busy) of the link that carried most."""
        use = self.link_use
        link = int(np.argmax(use))
        return self.machine.link_name(link), float(self.link_bytes[link]), float(use[link])

    def critical_time(self) -> dict[str, float]:
        """Seconds of the critical path by kind."""
        out: dict[str, float] = defaultdict(float)
        for segment in self.critical_path:
            out[segment.kind] += segment.end - segment.start
        return dict(out)

    def __str__(self) -> str:
        name, carried, busy = self.busiest_link
        us = 1e6
        lines = [
            f"{self.machine}, modelled: {'at least ' * self.least}{self.time * us:.1f} µs"
            + ("  NOT SOUND" if self.findings else "")
            + ("" if self.kernels else "  NO KERNEL in it, so nothing to model,")
            + f" ({self.devices_modelled} of {len(self.engine.classes.of_device)} devices stepped)",
            f"  busiest link   {name}: {carried / 1e6:.3f} MB, busy {busy:.0%}",
            f"  scratch        VMEM {self.vmem_bytes / 2**20:.2f} MiB, "
            f"HBM {self.hbm_scratch_bytes / 2**20:.2f} MiB",
            "  critical path  "
            + ", ".join(f"{k} {v * us:.1f} µs" for k, v in self.critical_time().items()),
        ]
        lines += _some("deadlock", self.stuck)
        lines += _some("left over", self.leftovers)
        lines += [f"  {f.name:<14} {f}" for f in self.faults]
        if self.races is None:
            lines.append(f"  races          not looked for ({self.unsought})")
        elif not self.races:
            where = " up to the deadlock" if self.stuck else ""
            lines.append(f"  races          none{where}, on any schedule")
        lines += _some("race", self.races or ())
        worst: dict[str, Held] = {}  # per line, the device that waits there longest
        for h in self.held:
            worst.setdefault(h.line, h)
        lines += [
            f"  waits          {h.seconds * us:.1f} µs in {h.times} on device {h.device} "
            f"at {h.line}, {h.cause}"
            for h in list(worst.values())[:5]
        ]
        if self.unmodelled:
            lines.append(f"  not modelled   {self.unmodelled}")
        return "\n".join(lines)


def _some(kind: str, findings: Sequence[object], limit: int = 8) -> list[str]:
    """A line each for the first findings, and how many more there are."""
    lines = [f"  {kind:<14} {finding}" for finding in findings[:limit]]
    more = len(findings) - limit
    return [*lines, f"  {kind:<14} and {more} more"] if more > 0 else lines


def report(
    engine: Engine, faults: list[Fault], races: list[Race] | None, unsought: str = ""
) -> Report:
    """Sums up a finished engine, with what was found in its program."""
    program = engine.program
    stuck = find_stuck(engine)
    return Report(
        machine=engine.machine,
        time=engine.time,
        stuck=stuck,
        leftovers=[] if stuck else find_leftovers(engine),
        faults=faults,
        races=races,
        unsought=unsought,
        held=_held(engine),
        critical_path=_critical_path(engine),
        link_bytes=engine.network.carried[engine.classes.of_link],
        kernels=program.kernels,
        unmodelled=program.unmodelled,
        devices_modelled=len(engine.cores),
        engine=engine,
    )


def _held(engine: Engine) -> list[Held]:
    """All waits, longest first, by device class, line and cause."""
    total: dict[tuple[int, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for core in engine.cores:
        for block in core.blocks:
            source = block.column.source
            key = (core.device, source.line, source.scope, _cause(core, block))
            total[key][0] += block.ended - block.began
            total[key][1] += 1
    held = [
        Held(device, line, scope, cause, seconds, int(times))
        for (device, line, scope, cause), (seconds, times) in total.items()
    ]
    return sorted(held, key=lambda h: -h.seconds)


def _cause(core: Core, block: Block) -> str:
    message = block.cause
    assert message is not None
    what = "a copy" if isinstance(message.column, Start) else "a signal"
    if message.core is core and message.column.target is None:
        return f"for {what} of its own from {message.column.source.line}"
    return f"for {what} from {message.column.source.line}"


def _critical_path(engine: Engine) -> list[Segment]:
    """Backwards from the last core's end: what each step had to wait for."""
    core = max(engine.cores, key=lambda c: c.time)
    time = core.time
    path: list[Segment] = []
    ends = {id(c): [b.ended for b in c.blocks] for c in engine.cores}
    before = {id(c): len(c.blocks) for c in engine.cores}
    while True:
        i = min(bisect.bisect_right(ends[id(core)], time + _ROUNDING), before[id(core)]) - 1
        block = core.blocks[i] if i >= 0 else None
        since = block.ended if block else 0.0
        where = block.column.source.line if block else "start"
        if time > since:
            path.append(Segment("core", core.device, since, time, where))
        if block is None:
            break
        before[id(core)] = i  # never the same wait twice, whatever ties there are
        message = block.cause
        assert message is not None
        device, line = message.core.device, message.column.source.line
        if block.ended > message.left:
            path.append(Segment("hops", device, message.left, block.ended, line))
        if message.began == message.began:  # a copy
            path.append(Segment("transfer", device, message.began, message.left, line))
            path.append(Segment("DMA latency", device, message.issued, message.began, line))
        core, time = message.core, message.issued
    return path[::-1]
