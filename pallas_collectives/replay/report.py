"""What a replay found: time, loads, waits and their causes, the critical path, leftovers,
deadlocks, races, and what the hardware forbids.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict

import numpy as np

from pallas_collectives.replay.engine import Block, Core, Engine
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.program import Kernel, Signal, Start
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
class Leftover:
    """A semaphore that is not zero at the end."""

    device: int
    semaphore: str
    value: int

    def __str__(self) -> str:
        return f"device {self.device}: {self.semaphore} is {self.value} at the end, not 0"


@dataclasses.dataclass(frozen=True)
class Stuck:
    """A device that waits for ever."""

    device: int
    line: str
    semaphore: str
    has: int
    needs: int
    signalled_by: tuple[str, ...]

    def __str__(self) -> str:
        who = "; ".join(self.signalled_by) or "nobody ever signals it"
        return (
            f"device {self.device} waits at {self.line} for {self.semaphore} to reach "
            f"{self.needs}; it is {self.has}: {who}"
        )


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
    def vmem_bytes(self) -> int:
        """Peak VMEM of any kernel, per device: block and scratch buffers."""
        return max((k.vmem_bytes for k in self.kernels), default=0)

    @property
    def hbm_scratch_bytes(self) -> int:
        """Largest HBM scratch of any kernel, per device."""
        return max((k.hbm_scratch_bytes for k in self.kernels), default=0)

    @property
    def link_use(self) -> np.ndarray:
        """Of each link, the share of the time that it was busy."""
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
            f"{self.machine}, modelled: {self.time * us:.1f} µs"
            + ("  NOT SOUND" if self.findings else "")
            + ("" if self.kernels else "  NO KERNEL in it, so nothing to model,")
            + f" ({self.devices_modelled} of {len(self.engine.classes.of_device)} devices stepped)",
            f"  busiest link   {name}: {carried / 1e6:.3f} MB, busy {busy:.0%}",
            f"  scratch        VMEM {self.vmem_bytes / 2**20:.2f} MiB, "
            f"HBM {self.hbm_scratch_bytes / 2**20:.2f} MiB",
            "  critical path  "
            + ", ".join(f"{k} {v * us:.1f} µs" for k, v in self.critical_time().items()),
        ]
        lines += [f"  deadlock       {s}" for s in self.stuck[:8]]
        lines += [
            f"  left over      device {x.device}, {x.semaphore} = {x.value}"
            for x in self.leftovers[:8]
        ]
        lines += [f"  {f.name:<14} {f}" for f in self.faults]
        if self.races is None:
            lines.append(f"  races          not looked for ({self.unsought})")
        elif not self.races:
            where = " up to the deadlock" if self.stuck else ""
            lines.append(f"  races          none{where}, on any schedule")
        lines += [f"  race           {r}" for r in self.races or ()]
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


def report(
    engine: Engine, faults: list[Fault], races: list[Race] | None, unsought: str = ""
) -> Report:
    """Sums up a finished engine, with what was found in its program."""
    program = engine.program
    stuck = _stuck(engine)
    leftovers = [
        Leftover(core.device, program.semaphores[sem].name, value)
        for core in engine.cores
        for sem, value in sorted(core.semaphores.items())
        if value and not stuck
    ]
    return Report(
        machine=engine.machine,
        time=engine.time,
        stuck=stuck,
        leftovers=leftovers,
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


def _stuck(engine: Engine) -> list[Stuck]:
    out = []
    for core in engine.cores:
        block = core.waiting
        if block is None:
            continue
        name = engine.program.semaphores[block.sem].name
        has = core.semaphores[block.sem]
        who = tuple(_signallers(engine, core.device, block.sem))
        line = block.column.source.line
        out.append(Stuck(core.device, line, name, has, block.value, who))
    return out


def _signallers(engine: Engine, device: int, sem: int, limit: int = 4) -> list[str]:
    """Which instructions would signal `sem` of `device`, and whether they have been reached."""
    out: list[str] = []
    for k, column in enumerate(engine.program.columns):
        if isinstance(column, Signal):
            fields = [(column.sem, column.target)]
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
            for lane in column.lanes[hits]:
                core = engine.cores[engine.classes.of_device[lane]]
                line = column.source.line
                if core.finished > k:
                    out.append(f"device {lane} has signalled it at {line}")
                elif core.waiting is not None:
                    at_line = core.waiting.column.source.line
                    out.append(f"device {lane} would at {line}, but waits at {at_line}")
                else:
                    out.append(f"device {lane} would at {line}")
                if len(out) == limit:
                    return out
    return out
