"""When each part goes through the axes of a torus (see `shares`): the order of a device's hops."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import Number
from pallas_collectives.kernels.torus.shares import Plan

# Bundles that are less than so much of a hop apart at the end of a phase end it together.
_NEARLY = Fraction(1, 4)


@dataclasses.dataclass(frozen=True)
class Span:
    """Hops `start` to `stop` of a bundle in the phase of number `number` of its course."""

    number: int
    start: int
    stop: int


Segment = tuple[Span | None, ...]


def timetable(plan: Plan, phases: Sequence[int]) -> tuple[Segment, ...]:
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
        speeds, left = {}, {}
        for b, axis in axes.items():
            moved = math.prod(plan.piece_shape(plan.bundles[b], phases[number[b]]))
            before = [number[other] - number[b] for other in under_way if axes[other] == axis]
            goes = min(before) == 0
            speeds[b] = Fraction(goes, moved * before.count(0) * plan.sharing[axis])
            left[b] = plan.sizes[axis] - 1 - done[b]
        time = min(left[b] / speeds[b] for b in under_way if speeds[b])
        spans: list[Span | None] = [None] * len(plan.bundles)
        for b in under_way:
            start = math.ceil(done[b])
            done[b] += time * speeds[b]
            ends = left[b] - time * speeds[b] < _NEARLY
            stop = plan.sizes[axes[b]] - 1 if ends else math.ceil(done[b])
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
    waits for the last of all.
    """

    def begin(self, bundle: int, phase: int, section: Any, stream: Number) -> None: ...
    def take(self, bundle: int, phase: int, hop: Number, section: Any, stream: Number) -> None: ...
    def go_on(self, bundle: int, phase: int, hop: Number, section: Any, stream: Number) -> None: ...
    def end(self, bundle: int, section: Any, stream: Number) -> None: ...


Course = list[tuple[Stage, int]]


def run(plan: Plan, *stages: tuple[Stage, Sequence[int]]) -> None:
    """Takes all streams through one stage's phases after the other's.

    A plan of one section by the timetable; of several, all phases of one after the other at once.
    All devices do the same in the same order, and each waits only for what another did earlier in
    that order: none waits for ever. Loops everywhere: the code grows with the square of the number
    of axes, and not with their lengths.
    """
    course = [(stage, phase) for stage, phases in stages for phase in phases]
    if plan.sections > 1:
        _run_sections(plan, course)
        return

    def begin(b: int, k: int, stream: Number) -> None:
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


def _begin(course: Course, b: int, k: int, section: Any, stream: Number) -> None:
    """Begins phase number k of the course; behind the last, ends all."""
    if k == len(course) or (k and course[k - 1][0] is not course[k][0]):
        course[k - 1][0].end(b, section, stream)
    if k < len(course):
        course[k][0].begin(b, course[k][1], section, stream)


def _run_sections(plan: Plan, course: Course) -> None:
    """In tick t, section t is in the first phase of the course, section t - k in phase number k.

    So all phases are under way at once, each with another section, and hops of all of them take
    turns. Earlier sections come first: what a section leaves is taken before the next one is there.
    Streams come in pairs, one for each way round. While what one pair has sent is on the wire, the
    next pair is seen to. Both streams of a pair take what has come before either sends, so that
    neither needs credits; on lines, where there are credits, each takes and sends.

    Along a line a reduction loads the link behind j others from hop j on, a gather up to hop j. So
    a gather's hops come one round earlier: then the link carries one of both in each round.
    """
    bundles = range(len(plan.bundles))
    pairs = -(-max(bundle.streams for bundle in plan.bundles) // 2)
    rounds = max(plan.sizes) - 2  # of hops 1 and on
    early = [any(plan.lines) and stage is not course[0][0] for stage, _ in course]
    early.append(early[-1])
    last = len(course)
    together = not any(plan.lines)  # see `scatter.is_paired`

    def in_pair(pair: Any, b: int, section: Any, body: Callable[[Any], Any]) -> None:
        stop = jnp.minimum(plan.bundles[b].streams_in(section), 2 * pair + 2)

        def one(stream: Number, _: None) -> None:
            body(stream)

        lax.fori_loop(2 * pair, stop, one, None)

    def begin(tick: Any, pair: Any, k: int, b: int) -> None:
        in_pair(pair, b, tick - k, functools.partial(_begin, course, b, k, tick - k))

    def go_on(tick: Any, g: Any, pair: Any, k: int, b: int) -> None:
        (stage, phase), section = course[k], tick - k
        hops = plan.hops(plan.bundles[b], phase) - 1
        bounds = [jnp.minimum(lax.div((g + i) * hops, np.int32(rounds)), hops) for i in (0, 1)]

        def turn(hop: Number, _: None) -> None:
            in_turn = functools.partial(in_pair, pair, b, section)
            take = functools.partial(stage.take, b, phase, hop, section)
            send = functools.partial(stage.go_on, b, phase, hop, section)
            if together:
                in_turn(take)
                in_turn(send)
            else:
                in_turn(lambda stream: (take(stream), send(stream)))

        lax.fori_loop(bounds[0] + 1, bounds[1] + 1, turn, None)

    def round_of(*parts: tuple[Callable[[Any, int, int], None], Sequence[int]]) -> None:
        def of_pair(pair: Any, _: None) -> None:
            for body, numbers in parts:
                for k, b in itertools.product(sorted(numbers, reverse=True), bundles):
                    body(pair, k, b)

        lax.fori_loop(0, pairs, of_pair, None)

    def in_tick(tick: Any, _: None) -> None:
        first = [k for k in range(last + 1) if early[k]]
        others = [k for k in range(last + 1) if not early[k]]
        hops = functools.partial(go_on, tick)
        if first:
            round_of((functools.partial(begin, tick), first))
        ahead = [(functools.partial(hops, np.int32(0)), first[:-1])] if first and rounds else []
        round_of(*ahead, (functools.partial(begin, tick), others))

        def in_round(g: Any, _: None) -> None:
            round_of(
                (functools.partial(hops, g + 1), first[:-1]),
                (functools.partial(hops, g), [k for k in others if k < last]),
            )

        lax.fori_loop(0, rounds, in_round, None)

    lax.fori_loop(0, plan.sections + last, in_tick, None)


def _for_each_stream(
    plan: Plan, spans: list[tuple[int, Span]], body: Callable[[int, int, Any], None]
) -> None:
    """body(bundle, number of its phase, stream) for every stream of some bundles, in turn."""
    by_streams = itertools.groupby(spans, lambda item: plan.bundles[item[0]].streams)
    for streams, alike in by_streams:

        def in_all_bundles(stream: Number, _: None, alike: Any = tuple(alike)) -> None:
            for b, span in alike:
                body(b, span.number, stream)

        lax.fori_loop(0, streams, in_all_bundles, None)


def _for_each_round(
    plan: Plan, spans: list[tuple[int, Span]], go_on: Callable[[int, int, Any, Any], None]
) -> None:
    """go_on for every hop of the spans but hops 0, which have begun; evenly spread over rounds."""
    first = {b: max(span.start, 1) for b, span in spans}
    count = {b: span.stop - first[b] for b, span in spans}
    rounds = max(count.values())

    def in_round(g: Any, _: None) -> None:
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
