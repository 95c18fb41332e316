"""What a schedule takes: the core and the engines beside it, on one clock. Modelled, not measured.

The core's own work takes the cycles that XLA estimates. A collective takes what the replay says of
the kernel that serves; one of XLA's own, what it says of our fastest, so that both are held to one
model of the wire. An engine serves one collective at a time, in their order. What the core waits
for is exposed; the rest of a collective's time is hidden.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.steps.schedule import CORE, SPARSECORE, Collective, Done, Event, Loop, Start, Work
from pallas_collectives import catalogue
from pallas_collectives.backends.algorithms import KernelPlan
from pallas_collectives.replay.machine import GENERATIONS
from pallas_collectives.topology import chips
from pallas_collectives.topology.chips import Chip
from pallas_collectives.tuning import choice

_LANES = 8 * 128 * 4  # operations in a cycle of one core (`replay.machine`)
US = 1e-6


@dataclasses.dataclass
class Served:
    """All turns of one collective of a program; times in microseconds.

    Attributes:
      op: the canonical collective, or the kernel's name where it is none.
      by: the kernel's name; "lax" for XLA's own.
      engine: where it runs.
      nbytes: of one device's result.
      devices: that take part together.
      times: how often it runs.
      each_us: of one.
      exposed_us: what the core waits in all turns together.
      beside: cycles of the core's work between start and end, in all turns.
      beside_what: the names of the longest of that work.
    """

    op: str
    by: str
    engine: str
    nbytes: int
    devices: int
    times: int = 0
    each_us: float = 0.0
    exposed_us: float = 0.0
    beside: int = 0
    beside_what: str = ""


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of a lane, in microseconds: the core's work or wait, or a collective."""

    lane: str
    kind: str  # "compute", "exposed" or "collective"
    name: str
    begin: float
    end: float


@dataclasses.dataclass
class Timeline:
    """A step; times in microseconds."""

    compute_us: float = 0.0
    exposed_us: float = 0.0
    hidden_us: float = 0.0
    served: dict[str, Served] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)

    @property
    def step_us(self) -> float:
        """All of it."""
        return self.compute_us + self.exposed_us


def run(events: Iterable[Event], chip: Chip, time_of: Callable[[Collective], float]) -> Timeline:
    """What the events take; `time_of` gives microseconds of a collective."""
    return _Clock(clock_of(chip), time_of).after(events)


def clock_of(chip: Chip) -> float:
    """Cycles a second of a chip's core."""
    generation = GENERATIONS[chip.name]
    return generation.vector_rate / (_LANES * generation.cores)


class _Clock:
    def __init__(self, clock: float, time_of: Callable[[Collective], float]) -> None:
        self._clock, self._time_of = clock, time_of
        self._line, self._now = Timeline(), 0.0
        self._free: dict[str, float] = {}  # when each engine is
        self._flying: dict[str, tuple[Served, Collective, float, dict[str, int]]] = {}

    def after(self, events: Iterable[Event]) -> Timeline:
        for event in events:
            match event:
                case Work(name, cycles):
                    self._work(name, cycles)
                case Start(key, collective):
                    self._start(key, collective)
                case Done(key):
                    self._done(key)
                case Loop(times, inside):
                    for _ in range(times):
                        self.after(inside)
        return self._line

    def _work(self, name: str, cycles: int) -> None:
        took = cycles / self._clock / US
        self._span(CORE, "compute", name, self._now, self._now + took)
        self._line.compute_us += took
        self._now += took
        for _, _, _, beside in self._flying.values():
            beside[name] = beside.get(name, 0) + cycles

    def _start(self, key: str, c: Collective) -> None:
        by = c.kernel or "lax"
        what = Served(c.op or c.kernel, by, c.engine, c.nbytes, c.devices)
        served = self._line.served.setdefault(c.name, what)
        served.each_us = self._time_of(c)
        lane = c.engine if c.engine != CORE else "wire"
        begin = self._now if c.engine == CORE else max(self._now, self._free.get(lane, 0.0))
        end = self._free[lane] = begin + served.each_us
        self._span(lane, "collective", f"{served.op} by {by}", begin, end)
        self._flying[key] = served, c, end, {}

    def _done(self, key: str) -> None:
        if key not in self._flying:  # no collective, but a copy
            return
        served, _, end, beside = self._flying.pop(key)
        waited = max(0.0, end - self._now)
        self._span(CORE, "exposed", served.op, self._now, self._now + waited)
        self._now += waited
        served.times += 1
        served.exposed_us += waited
        served.beside += sum(beside.values())
        longest = sorted(beside, key=lambda name: beside[name], reverse=True)[:2]
        served.beside_what = ", ".join(longest)
        self._line.exposed_us += waited
        self._line.hidden_us += max(0.0, served.each_us - waited)

    def _span(self, lane: str, kind: str, name: str, begin: float, end: float) -> None:
        if end > begin:
            self._line.spans.append(Span(lane, kind, name, begin, end))


def times(chip: Chip, plans: Iterable[Any]) -> Callable[[Collective], float]:
    """Microseconds of collectives on a chip, by the replayed table.

    `plans` are those that were followed while the program was lowered: they say how many devices
    a kernel joins, and how these lie.
    """
    known = {(p.op, _result(p)): p for p in plans if isinstance(p, KernelPlan)}

    def time_of(c: Collective) -> float:
        plan = known.get((c.op, c.nbytes)) if c.kernel else None
        devices = plan.devices if plan else c.devices
        if c.op not in catalogue.COLLECTIVES or devices < 2:
            return 0.0
        record = catalogue.COLLECTIVES[c.op]
        block = c.nbytes // devices if c.op == "all_gather" else c.nbytes
        block = block // devices if c.op == "all_to_all" else block
        served = (plan.record.name,) if plan else tuple(a.name for a in record.algorithms)
        found = choice.predict(c.op, block, devices, chip, served, plan.torus if plan else None)
        if found:
            us = min(p.us for p in found.values())
        else:
            us = c.nbytes / GENERATIONS[chip.name].link_bandwidth / US
        g = GENERATIONS[chip.name]
        slower = (g.sparsecore_launch_cost - g.launch_cost) / US
        return us + (slower if c.engine == SPARSECORE else 0.0)

    return time_of


def _result(plan: KernelPlan) -> int:
    """Bytes of the result that a plan's kernel has on a device."""
    factor = {"all_gather": plan.devices, "reduce_scatter": 1 / plan.devices}
    return round(plan.nbytes * factor.get(plan.op, 1))


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name."""
    found = chips.slice_of(topology)
    assert found is not None, topology
    return found[0]
