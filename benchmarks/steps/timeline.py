"""What a schedule takes: a replay of the whole step. Modelled, not measured.

The core's own work takes the cycles that XLA estimates, and a kernel that sends nothing as long as
its products or its bytes by the peak rates. Collectives are replayed with it
(`replay.steps`): a kernel's own program, and for one of XLA's own that of our fastest, so that both
are held to one model of the wire. An engine serves one collective at a time, in their order; all
share the links. What the core waits for is exposed, and so is what it computes for collectives
alone (`steps.packing`). A collective's time beside other work of the core is hidden, and of a
kernel that multiplies while it sends the time of its products at the peak rate.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.steps.schedule import CORE, Collective, Cycles, Done, Event, Loop, Start, StepWork
from pallas_collectives.replay import Machine, steps
from pallas_collectives.replay.program import Program
from pallas_collectives.topology import chips
from pallas_collectives.topology.chips import US, Chip


class OnOneLink(float):
    """Seconds of a result's bytes on one link, where no more is known."""


@dataclasses.dataclass
class Served:
    """All turns of one collective of a program; times in microseconds.

    Attributes:
      op: the canonical collective, or the kernel's name if it is not a collective's.
      by: the kernel's name; "lax" for XLA's own; and whether its time is that `OnOneLink`.
      engine: where it runs.
      nbytes: bytes of one device's result.
      devices: that take part together.
      times: how often it runs.
      each_us: the time of one, its own products included.
      waits_us: what the core waits in all turns together.
      beside: cycles of the core's work between start and end, in all turns, but for packing.
      beside_what: the names of the longest of that work.
    """

    op: str
    by: str
    engine: str
    nbytes: int
    devices: int
    times: int = 0
    each_us: float = 0.0
    waits_us: float = 0.0
    beside: int = 0
    beside_what: str = ""


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of a lane, in microseconds: the core's work or wait, or a collective."""

    lane: str
    kind: str  # "compute", "packing", "exposed" or "collective"
    name: str
    begin: float
    end: float


@dataclasses.dataclass
class Timeline:
    """A step; times in microseconds.

    Attributes:
      compute_us: the core's own work, but for packing.
      waits_us: what it waits for collectives.
      packing_us: what it computes for them alone.
      hidden_us: what they take beside its own work.
      served: each collective, by its instruction's name.
      spans: what the step's lanes show.
    """

    compute_us: float = 0.0
    waits_us: float = 0.0
    packing_us: float = 0.0
    hidden_us: float = 0.0
    served: dict[str, Served] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)

    @property
    def exposed_us(self) -> float:
        """What collectives cost the core."""
        return self.waits_us + self.packing_us

    @property
    def step_us(self) -> float:
        """All of it."""
        return self.compute_us + self.exposed_us


def run(
    events: Iterable[Event],
    machine: Machine,
    placement: np.ndarray,
    what_of: Callable[[Collective], Program | float],
) -> Timeline:
    """Replays the events.

    Args:
      events: the events of one device, in order.
      machine, placement: where the devices are, as `replay.replay` takes them.
      what_of: the stepped program of a collective, or its seconds.
    """
    flat, known = list(_flat(events)), dict[int, float]()
    clock = machine.generation.clock

    def alone(what: Program) -> float:
        if id(what) not in known:
            known[id(what)] = steps.alone(what, machine, placement)
        return known[id(what)]

    parts = [*_parts(flat, clock, what_of, alone)]
    return _Account(flat, clock * US, what_of).of(steps.run(parts, machine, placement))


def _flat(events: Iterable[Event]) -> Iterator[StepWork | Start | Done]:
    """The events with loops unrolled."""
    for event in events:
        if isinstance(event, Loop):
            for _ in range(event.times):
                yield from _flat(event.events)
        else:
            yield event


def _parts(
    events: Iterable[StepWork | Start | Done],
    clock_rate: float,
    what_of: Callable[[Collective], Program | float],
    alone: Callable[[Program], float],
) -> Iterator[steps.Part]:
    """What is to be replayed; what has all links to itself takes as long in each turn: `alone`."""
    flying: set[str] = set()
    for event in events:
        match event:
            case StepWork(name, cycles):
                yield steps.Compute(name, cycles / clock_rate)
            case Start(key, c):
                what = what_of(c)
                if c.engine != CORE:
                    flying.add(key)
                elif not flying and isinstance(what, Program):
                    what = alone(what)
                yield steps.Launch(key, c.name, c.engine, what)
            case Done(key):
                flying.discard(key)
                yield steps.Await(key)


class _Flying(NamedTuple):
    """A collective under way."""

    served: Served
    beside: collections.Counter[str]  # cycles of the core's own work
    spans: list[steps.Span]  # beside the core


class _Account:
    """Adds up a step's course."""

    def __init__(
        self,
        events: list[StepWork | Start | Done],
        clock: float,  # cycles in a microsecond
        what_of: Callable[[Collective], Program | float],
    ) -> None:
        self._events, self._clock, self._what_of = events, clock, what_of
        self._line = Timeline()
        self._flying: dict[str, _Flying] = {}

    def of(self, course: steps.Course) -> Timeline:
        spans: dict[int, list[steps.Span]] = {}
        for span in course.spans:
            spans.setdefault(span.part, []).append(span)
        for number, event in enumerate(self._events):
            on_core = [s for s in spans.get(number, ()) if s.engine == CORE]
            aside = [s for s in spans.get(number, ()) if s.engine != CORE]
            self._add(event, on_core, aside)
        return self._line

    def _add(
        self, event: StepWork | Start | Done, on_core: list[steps.Span], aside: list[steps.Span]
    ) -> None:
        took = sum(span.end - span.begin for span in on_core) / US
        match event:
            case StepWork(name, packs=True):
                self._line.packing_us += took
                for flying in self._flying.values():
                    self._unhide(_common(flying.spans, on_core) / US)
                self._draw(CORE, "packing", name, on_core)
            case StepWork(name, cycles):
                self._line.compute_us += took
                for flying in self._flying.values():
                    flying.beside[name] += cycles
                self._draw(CORE, "compute", name, on_core)
            case Start(key, c):
                served = self._served(c)
                alone = c.engine == CORE
                each = took if alone else sum(span.end - span.begin for span in aside) / US
                served.each_us = max(served.each_us, each)
                served.times += 1
                own = min(took, c.cycles / self._clock)
                self._line.compute_us += own
                self._wait(served, took - own, on_core)
                self._line.hidden_us += own if alone else each
                lane = "wire" if alone else c.engine
                self._draw(lane, "collective", f"{served.op} by {served.by}", aside or on_core)
                self._flying[key] = _Flying(served, collections.Counter(), aside)
            case Done(key) if key in self._flying:  # else no collective, but a copy
                served, beside, _ = self._flying.pop(key)
                served.beside += sum(beside.values())
                served.beside_what = ", ".join(name for name, _ in beside.most_common(2))
                self._wait(served, took, on_core)
                self._unhide(took)

    def _unhide(self, took: float) -> None:
        self._line.hidden_us -= min(took, self._line.hidden_us)

    def _served(self, c: Collective) -> Served:
        by = c.kernel or "lax"
        if isinstance(self._what_of(c), OnOneLink):
            by += " (as its bytes on one link)"
        new = Served(c.op or c.kernel, by, c.engine, c.nbytes, c.devices)
        return self._line.served.setdefault(c.name, new)

    def _wait(self, served: Served, took: float, spans: list[steps.Span]) -> None:
        served.waits_us += took
        self._line.waits_us += took
        self._draw(CORE, "exposed", served.op, spans)

    def _draw(self, lane: str, kind: str, name: str, spans: list[steps.Span]) -> None:
        self._line.spans += [Span(lane, kind, name, s.begin / US, s.end / US) for s in spans]


def _common(some: list[steps.Span], others: list[steps.Span]) -> float:
    """The time for which spans of both lists last."""
    pairs = itertools.product(some, others)
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a, b in pairs)


def cycles_of(machine: Machine) -> Cycles:
    """What gives the cycles of a kernel that sends nothing: by the peak rates of a device."""
    generation = machine.generation
    # What libtpu shows as a device can be one of the cores that the model takes together.
    share = chips.BY_NAME[generation.name].devices_per_chip / generation.devices_per_chip

    def cycles(flops: int, nbytes: int) -> int:
        seconds = max(flops / generation.matrix_rate, nbytes / generation.hbm_bandwidth) / share
        return round(seconds * generation.clock)

    return cycles


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name."""
    found = chips.slice_of(topology)
    assert found is not None, topology
    return found[0]
