"""Replays a step: kernels on several engines of a device, and what its core computes between them.

    gather = steps.program(function, shard, machine=machine, placement=placement)
    course = steps.run(
        [Launch("w", "gather", "SparseCore", gather), Compute("product", 80e-6), Await("w")],
        machine, placement)

A program of one kernel or several is stepped as `replay` steps it. Here such programs become the
instructions of engines: each engine of a device has a stream of its own, beside the core's, which
tells an engine to begin and later waits until it is done. All streams share links and memories, so
that collectives under way together slow one another down. An engine runs one program at a time, in
the order of their launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_collectives.replay import symmetry, trace_program
from pallas_collectives.replay.engine import Engine
from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.program import (
    Access,
    CoreWork,
    Enter,
    Kernel,
    Leave,
    Program,
    Semaphore,
    Signal,
    Source,
    Start,
    Wait,
)
from pallas_collectives.replay.report import Report, report
from pallas_collectives.replay.values import Lanes
from pallas_collectives.replay.views import Buffer, View

CORE = "core"


@dataclasses.dataclass(frozen=True)
class Compute:
    """The core computes for so many seconds."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program sets out on an engine; on `CORE` the core itself runs it, to its end.

    `what`: a stepped program, or the seconds that something takes which cannot be stepped.
    """

    key: str
    name: str
    engine: str
    what: Program | float


@dataclasses.dataclass(frozen=True)
class Await:
    """The core waits until what was launched last under this key is done."""

    key: str


Part = Compute | Launch | Await


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of an engine's time, in seconds; `part` is the number of the part it belongs to."""

    engine: str
    part: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Course:
    """What a step did: the spans of the device that is done last, and a report of all devices."""

    parts: Sequence[Part]
    spans: list[Span]
    report: Report

    @property
    def time(self) -> float:
        """Seconds of the whole step."""
        return max((span.end for span in self.spans if span.engine == CORE), default=0.0)


def program(
    function: Callable[..., Any], *args: Any, machine: Machine, placement: np.ndarray
) -> Program:
    """The stepped program of a function's kernels, for a `Launch`; arguments as `replay`'s."""
    places = machine.places(placement)
    return trace_program.trace(
        function, *args, generation=machine.generation, where=lambda mesh: places
    )[0]


def run(parts: Sequence[Part], machine: Machine, placement: np.ndarray) -> Course:
    """Replays the parts of a step, in the core's order; `placement` as `replay`'s, one a device."""
    composed = _Composed(parts, len(placement))
    classes = symmetry.refine(composed.program, machine, placement)
    engine = Engine(composed.program, machine, placement, classes)
    engine.run()
    found = report(engine, [], None, "a step's kernels are looked at one by one")
    # The device whose core is done last.
    ends = [engine.cores[of].time for of in classes.of_device[: len(placement)]]
    device = int(np.argmax(ends))
    spans = [
        span
        for name, first in composed.first.items()
        for span in _spans(engine, composed, name, device + first * len(placement))
    ]
    return Course(parts, sorted(spans, key=lambda span: (span.begin, span.part)), found)


def alone(program: Program, machine: Machine, placement: np.ndarray) -> float:
    """Seconds of a collective with all links to itself."""
    return run([Launch("", "", CORE, program)], machine, placement).time


class _Composed:
    """The parts as one program; `part_of` says of each of its columns which part it belongs to."""

    def __init__(self, parts: Sequence[Part], n_devices: int) -> None:
        self.first = _streams(parts)
        cores = max(first + _width(parts, name) for name, first in self.first.items())
        self.program = Program(n_devices * cores, [], [], [], [], {}, cores)
        self.part_of: list[int] = []
        self._lanes = np.arange(n_devices)
        self._known: dict[tuple[int, str], list[Any]] = {}  # columns of a program on an engine
        self._launched: dict[str, int] = {}  # key -> its "done" semaphore, and with which part
        self._targets: dict[str, np.ndarray] = {}
        for number, part in enumerate(parts):
            before = len(self.program.columns)
            self._add(part)
            self.part_of += [number] * (len(self.program.columns) - before)

    def _add(self, part: Part) -> None:
        columns, source = self.program.columns, _SOURCE
        match part:
            case Compute(_, seconds):
                columns.append(CoreWork(self._lanes, seconds, source))
            case Launch(key, _, engine, what) if engine == CORE:
                columns += self._columns(what, engine)
                self._launched.pop(key, None)
            case Launch(key, name, engine, what):
                begin, done = self._semaphore(f"begin {name}"), self._semaphore(f"done {name}")
                there = self._on(engine)
                columns.append(Signal(self._lanes, 0.0, source, begin, there, 1, True))
                columns.append(Wait(there, 0.0, source, begin, 1, False, False, True))
                columns += self._columns(what, engine)
                columns.append(Signal(there, 0.0, source, done, self._on(CORE), 1, True))
                self._launched[key] = done
            case Await(key) if key in self._launched:
                done = self._launched.pop(key)
                columns.append(Wait(self._lanes, 0.0, source, done, 1, False, False, True))

    def _on(self, engine: str) -> np.ndarray:
        """The first stream of an engine on each device: always the same array."""
        first = self.first[engine]
        return self._targets.setdefault(engine, (self._lanes + len(self._lanes) * first))

    def _semaphore(self, name: str) -> int:
        self.program.semaphores.append(Semaphore(name, 0))
        return len(self.program.semaphores) - 1

    def _columns(self, what: Program | float, engine: str) -> list[Any]:
        if not isinstance(what, Program):
            return [CoreWork(self._on(engine), what, _SOURCE)]
        key = id(what), engine
        if key not in self._known:
            by = len(self._lanes) * self.first[engine]
            shifted = _Shifted(self.program, by, what)
            self._known[key] = [shifted.column(column) for column in what.columns]
            self.program.buffers += [shifted.buffer(buffer) for buffer in what.buffers]
            self.program.semaphores += [
                Semaphore(s.name, s.kernel + shifted.kernels if s.kernel else 0)
                for s in what.semaphores
            ]
            self.program.kernels += [shifted.kernel(kernel) for kernel in what.kernels]
        return self._known[key]


_SOURCE = Source("", "", "step")


def _width(parts: Sequence[Part], engine: str) -> int:
    """How many streams an engine needs on each device: one, or what a kernel of several cores."""
    launched = [part.what for part in parts if isinstance(part, Launch) and part.engine == engine]
    return max((what.cores for what in launched if isinstance(what, Program)), default=1)


def _streams(parts: Sequence[Part]) -> dict[str, int]:
    """The number of each engine's first stream on a device, the core's before all."""
    launched = (part.engine for part in parts if isinstance(part, Launch))
    first, total = {}, 0
    for engine in dict.fromkeys([CORE, *launched]):
        first[engine] = total
        total += _width(parts, engine)
    return first


class _Shifted:
    """A program's instructions as those of other streams, with memory of their own."""

    def __init__(self, into: Program, lanes: int, of: Program) -> None:
        self.lanes, self.kernels = lanes, len(into.kernels)
        self._buffers, self._semaphores = len(into.buffers), len(into.semaphores)
        self._targets: dict[int, np.ndarray] = {}
        self._of = of

    def column(self, column: Any) -> Any:
        new: dict[str, Any] = {"lanes": column.lanes + self.lanes}
        match column:
            case Start():
                new |= {"src": self._view(column.src), "dst": self._view(column.dst)}
                new |= {"target": self._target(column.target)}
                new |= {"src_sem": self._sem(column.src_sem), "dst_sem": self._sem(column.dst_sem)}
            case Signal():
                new |= {"sem": self._sem(column.sem), "target": self._target(column.target)}
            case Wait():
                new |= {"sem": self._sem(column.sem)}
            case Access():
                new |= {"view": self._view(column.view)}
            case Enter() | Leave():
                new |= {"kernel": column.kernel + self.kernels}
        return dataclasses.replace(column, **new)

    def buffer(self, buffer: Buffer) -> Buffer:
        of_semaphores = buffer.space == "semaphore_mem"
        first = self._semaphores if of_semaphores else self._buffers
        kernel = buffer.kernel + self.kernels if buffer.kernel else 0
        return dataclasses.replace(buffer, id=buffer.id + first, kernel=kernel)

    def kernel(self, kernel: Kernel) -> Kernel:
        results = tuple(number + self._buffers for number in kernel.results)
        return dataclasses.replace(kernel, results=results)

    def _view(self, view: View) -> View:
        return dataclasses.replace(view, buffer=self.buffer(view.buffer))

    def _sem(self, sem: Lanes | None) -> Lanes | None:
        return None if sem is None else sem + self._semaphores

    def _target(self, target: Lanes | None) -> Lanes | None:
        """Another device's stream of the same engine; one array for equal ones, as they were."""
        if not isinstance(target, np.ndarray):
            return None if target is None else target + self.lanes
        return self._targets.setdefault(id(target), target + self.lanes)


def _spans(engine: Engine, composed: _Composed, name: str, lane: int) -> Iterator[Span]:
    """The stretches of a stream, one for each part."""
    part, begin, now = -1, 0.0, 0.0
    for column, was, now_is in _times(engine, lane):
        number = composed.part_of[column]
        if number != part:
            if now > begin:
                yield Span(name, part, begin, now)
            part, begin = number, was
        if _is_signal_to_begin(composed, column, name):
            begin = now_is
        now = now_is
    if now > begin:
        yield Span(name, part, begin, now)


def _is_signal_to_begin(composed: _Composed, column: int, name: str) -> bool:
    """Whether it is an engine's wait for its launch, which is no work of its own."""
    found = composed.program.columns[column]
    if name == CORE or not isinstance(found, Wait) or found.source is not _SOURCE:
        return False
    return composed.program.semaphores[found.sem].name.startswith("begin ")


def _times(engine: Engine, lane: int) -> Iterator[tuple[int, float, float]]:
    """(column, when the stream came to it, when it was done) of a stream's instructions."""
    core = engine.cores[engine.classes.of_device[lane]]
    blocks, issue, now = iter(core.blocks), engine.machine.generation.issue_cost, 0.0
    block = next(blocks, None)
    for k, _, column in engine.program.of_device(core.device):
        was = now
        now += column.busy
        if isinstance(column, Start | Signal):
            now += issue
        # A column may come again: then it is the time that tells which visit was held up.
        held = block is not None and block.column is column
        if block is not None and held and abs(block.began - now) < 1e-13 + 1e-9 * now:
            now, block = block.ended, next(blocks, None)
        yield k, was, now
