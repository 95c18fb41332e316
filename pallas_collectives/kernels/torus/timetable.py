"""When each part goes through the axes of a torus (see `shares`): the order of a device's hops."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import Flag, Number
from pallas_collectives.kernels.torus.shares import Shares

# Bundles that are less than so much of a hop apart at the end of a phase end it together.
_NEARLY = Fraction(1, 4)


@dataclasses.dataclass(frozen=True)
class Span:
    """Hops `start` to `stop` of a bundle in the phase of number `number` of its course."""

    number: int
    start: int
    stop: int


Segment = tuple[Span | None, ...]


def timetable(plan: Shares, phases: Sequence[int]) -> tuple[Segment, ...]:
    """In which order a device sees to the hops of its bundles: that in which they should arrive.

    Each bundle goes through `phases` one after the other. A segment has one span of hops for each
    bundle (None: no hop), spread evenly over it; the next begins where one of them ends a phase.
    It is found by letting each bundle move at the speed of its links. Where several would share
    them, those that have more of the way before them go first: the others can wait, and no axis is
    left idle at the end. On an axis of equals all bundles end their phases together.
    """
    number = [0] * len(plan.bundles)
    done = [Fraction(0)] * len(plan.bundles)
    segments = []
    while any(k < len(phases) for k in number):
        under_way = [b for b, k in enumerate(number) if k < len(phases)]
        axes = {b: plan.bundles[b].order[phases[number[b]]] for b in under_way}
        speeds, left, hops = {}, {}, {}
        for b, axis in axes.items():
            moved: Any = math.prod(plan.piece_shape(plan.bundles[b], phases[number[b]]))
            before = [number[other] - number[b] for other in under_way if axes[other] == axis]
            goes = min(before) == 0
            hops[b] = plan.hops(plan.bundles[b], phases[number[b]])
            # Where a stream goes both ways, there are fewer, and each takes as much longer.
            moved *= Fraction(plan.sizes[axis] - 1, hops[b])
            speeds[b] = Fraction(goes, moved * before.count(0) * plan.sharing[axis])
            left[b] = hops[b] - done[b]
        time = min(left[b] / speeds[b] for b in under_way if speeds[b])
        spans: list[Span | None] = [None] * len(plan.bundles)
        for b in under_way:
            start = math.ceil(done[b])
            done[b] += time * speeds[b]
            ends = left[b] - time * speeds[b] < _NEARLY
            stop = hops[b] if ends else math.ceil(done[b])
            if start < stop:
                spans[b] = Span(number[b], start, stop)
            if ends:
                number[b], done[b] = number[b] + 1, Fraction(0)
        if any(spans):
            segments.append(tuple(spans))
    return tuple(segments)


class Stage(Protocol):
    """What a device does for each hop of a stream, as hops of a gather or of a reduction.

    Phases are numbered as a gather goes through them. In each, `begin` starts hop 0, having waited
    for the last of the phase before; `take` waits for hop t-1, and `go_on` then starts hop t; `end`
    waits for the last of all. A stage that `keeps` what comes starts to do so in `take_last`, for
    both streams of a pair before `begin` or `end` waits for either.
    """

    keeps: bool = False

    def begin(self, bundle: int, phase: int, section: Number, stream: Number) -> None: ...
    def take(
        self, bundle: int, phase: int, hop: Number, section: Number, stream: Number
    ) -> None: ...
    def go_on(
        self, bundle: int, phase: int, hop: Number, section: Number, stream: Number
    ) -> None: ...
    def end(self, bundle: int, section: Number, stream: Number) -> None: ...

    def take_last(self, bundle: int, phase: int, section: Number, stream: Number) -> None:
        return  # unless it keeps what comes


Course = list[tuple[Stage, int]]


def run(plan: Shares, *stages: tuple[Stage, Sequence[int]]) -> None:
    """Takes all streams through one stage's phases after the other's.

    A plan of one section by the timetable; of several, all phases of one after the other at once.
    All devices do the same in the same order, and each waits only for what another did earlier in
    that order: none waits for ever. Loops everywhere: the code grows with the square of the number
    of axes, and not with their lengths.
    """
    course = [(stage, phase) for stage, phases in stages for phase in phases]
    if plan.sections > 1 or plan.parts > 1:
        _run_sections(plan, course)
        return

    def begin(b: int, k: int, stream: Number) -> None:
        if _keeps(course, k):
            _take_last(course, b, k, 0, stream)
        _begin(course, b, k, 0, stream)

    def go_on(b: int, k: int, hop: Number, stream: Number) -> None:
        stage, phase = course[k]
        stage.take(b, phase, hop, 0, stream)
        stage.go_on(b, phase, hop, 0, stream)

    for segment in timetable(plan, [phase for _, phase in course]):
        spans = [(b, span) for b, span in enumerate(segment) if span is not None]
        _for_each_stream(plan, [(b, s) for b, s in spans if s.start == 0], begin)
        _for_each_round(plan, spans, go_on)
    everything = [(b, Span(len(course), 0, 0)) for b in range(len(plan.bundles))]
    _for_each_stream(plan, everything, begin)


def _keeps(course: Course, k: int) -> bool:
    """Whether what the last hop before phase number k brings is kept."""
    return k > 0 and course[k - 1][0].keeps


def _take_last(course: Course, b: int, k: int, section: Number, stream: Number) -> None:
    stage, phase = course[k - 1]
    stage.take_last(b, phase, section, stream)


def _begin(course: Course, b: int, k: int, section: Number, stream: Number) -> None:
    """Begins phase number k of the course; behind the last, ends all."""
    if k == len(course) or (k and course[k - 1][0] is not course[k][0]):
        course[k - 1][0].end(b, section, stream)
    if k < len(course):
        course[k][0].begin(b, course[k][1], section, stream)


def _run_sections(plan: Shares, course: Course) -> None:
    """In a tick each phase of the course has a section: the first one the section of its number,
    those behind it earlier ones (`Turn`).

    So all phases are under way at once, and hops of all of them take turns. Earlier sections come
    first: what a section leaves is taken before the next one is there. Streams come in pairs, one
    for each way round. While what one pair has sent is on the wire, the next pair is seen to. Both
    streams of a pair take what has come before either sends, so that neither needs credits. On
    lines, and where a stream goes both ways, there are credits: each takes and sends, and bundles
    take turns besides.
    """
    pairs = -(-max(bundle.streams for bundle in plan.bundles) // 2)
    together = plan.ways == 1  # see `windows.is_paired`
    turns, steps = _turns(plan, course)
    numbers, bundles = range(len(turns))[::-1], range(len(plan.bundles))
    in_turn: list[tuple[int, Sequence[int]]] = [(k, bundles) for k in numbers]
    if not together:
        in_turn = [(k, [b]) for b in bundles for k in numbers]

    def in_pair(
        pair: Number, b: int, section: Number, body: Callable[[Any], Any], here: Flag
    ) -> None:
        stop = jnp.minimum(plan.bundles[b].streams_in(section), 2 * pair + 2)

        def one(stream: Number, _: None) -> None:
            body(stream)

        lax.fori_loop(2 * pair, jnp.where(here, stop, 0), one, None)

    def see_to(tick: Number, step: Number, pair: Number, k: int, b: int) -> None:
        turn, section = turns[k], tick - turns[k].tick
        begin = functools.partial(_begin, course, b, k, section)
        in_pair(pair, b, section, begin, step == turn.begin)
        if k == len(course):
            return
        stage, phase = course[k]
        hops = plan.hops(plan.bundles[b], phase) - 1

        def go_on(hop: Number, _: None) -> None:
            take = functools.partial(stage.take, b, phase, hop, section)
            send = functools.partial(stage.go_on, b, phase, hop, section)
            if together:
                in_pair(pair, b, section, take, True)
                in_pair(pair, b, section, send, True)
            else:
                in_pair(pair, b, section, lambda stream: (take(stream), send(stream)), True)

        lax.fori_loop(turn.done(step - 1, hops) + 1, turn.done(step, hops) + 1, go_on, None)

    def take_last(tick: Number, step: Number, pair: Number, k: int, b: int) -> None:
        section = tick - turns[k].tick
        of_stream = functools.partial(_take_last, course, b, k, section)
        in_pair(pair, b, section, of_stream, step == turns[k].begin)

    def in_step(tick: Number, step: Number) -> None:
        def of_pair(pair: Number, _: None) -> None:
            for k, of_phase in in_turn:
                for body in (take_last, see_to) if _keeps(course, k) else (see_to,):
                    for b in of_phase:
                        body(tick, step, pair, k, b)

        lax.fori_loop(0, pairs, of_pair, None)

    def in_tick(tick: Number, _: None) -> None:
        lax.fori_loop(0, steps, lambda step, _: in_step(tick, step), None)

    lax.fori_loop(0, plan.sections + turns[-1].tick, in_tick, None)


@dataclasses.dataclass(frozen=True)
class Turn:
    """When a phase of the course has its hops, in a tick of some steps.

    Attributes:
      tick: it has section t - `tick` in tick t.
      begin: the step in which it begins.
      span: the steps behind that one which its hops 1 and on are spread over.
    """

    tick: int
    begin: int
    span: int

    def done(self, step: Number, hops: int) -> jax.Array:
        """How many of its hops 1 and on, of so many, it has had behind a step."""
        return jnp.clip(lax.div((step - self.begin) * hops, np.int32(self.span)), 0, hops)


def ticks(plan: Shares) -> int:
    """How many ticks a section of a gather takes, and so how many of them are under way at most.

    It ends at the start of the tick behind them, before a section begins there (`_run_sections`).
    """
    turns, _ = _turns(plan, [(Stage, phase) for phase in plan.phases])
    return turns[-1].tick


def _turns(plan: Shares, course: Sequence[tuple[Any, int]]) -> tuple[list[Turn], int]:
    """The turns of all phases of the course and of its end, and the steps of a tick.

    Along the last axis of links a phase moves the most; those along the others go by quicker. So
    round rings two of these that follow one another have one tick, half of it each: the fewer ticks
    a section takes, the sooner all phases are under way, and the shorter links idle at the end.
    Both parts of the last axis (`Shares.parts`) have one tick, too.

    Along a line a reduction loads the link behind j others from hop j on, a gather up to hop j. So
    a gather's hops come one step earlier: then the link carries one of both in each step.
    """
    hops = [plan.hops(bundle, phase) for bundle in plan.bundles for _, phase in course]
    rounds = max(1, max(hops) - 1)  # of hops 1 and on
    on_lines, outermost = any(plan.lines), len(plan.sizes) - 1 - (plan.within is not None)
    inner, halves = [phase < outermost for _, phase in course], [0] * len(course)
    for k in range(0 if on_lines else len(course) - 1):
        alike = inner[k] == inner[k + 1] and (inner[k] or plan.parts > 1)
        if alike and halves[k] != 2:
            halves[k], halves[k + 1] = 1, 2
    parts = 2 if any(halves) else 1
    turns, tick = [], -1
    for (stage, _), half in zip(course, halves, strict=True):
        tick += half != 2
        begin = rounds + 1 if half == 2 else int(on_lines and stage is course[0][0])
        turns.append(Turn(tick, begin, rounds if half else parts * rounds))
    ends = Turn(tick + 1, int(on_lines and course[-1][0] is course[0][0]), 1)
    return [*turns, ends], parts * (rounds + 1) + on_lines


def _for_each_stream(
    plan: Shares, spans: list[tuple[int, Span]], body: Callable[[int, int, Any], None]
) -> None:
    """body(bundle, number of its phase, stream) for every stream of some bundles, in turn."""
    by_streams = itertools.groupby(spans, lambda item: plan.bundles[item[0]].streams)
    for streams, alike in by_streams:

        def in_all_bundles(
            stream: Number, _: None, alike: tuple[tuple[int, Span], ...] = tuple(alike)
        ) -> None:
            for b, span in alike:
                body(b, span.number, stream)

        lax.fori_loop(0, streams, in_all_bundles, None)


def _for_each_round(
    plan: Shares, spans: list[tuple[int, Span]], go_on: Callable[[int, int, Any, Any], None]
) -> None:
    """go_on for every hop of the spans but hops 0, which have begun; evenly spread over rounds."""
    first = {b: max(span.start, 1) for b, span in spans}
    count = {b: span.stop - first[b] for b, span in spans}
    rounds = max(count.values())

    def in_round(g: Number, _: None) -> None:
        def hops(b: int, number: int, stream: Number) -> None:
            if count[b] == rounds:
                go_on(b, number, first[b] + g, stream)
                return
            lax.fori_loop(
                first[b] + lax.div(g * count[b], np.int32(rounds)),
                first[b] + lax.div((g + 1) * count[b], np.int32(rounds)),
                lambda hop, _: go_on(b, number, hop, stream),
                None,
            )

        _for_each_stream(plan, [(b, span) for b, span in spans if count[b]], hops)

    lax.fori_loop(0, rounds, in_round, None)
