"""When each part goes through the axes of a torus (see `shares`): the order of a device's hops."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from jax import lax

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
    for the last of the phase before; `go_on` starts hop t, having waited for hop t-1; `end` waits
    for the last of all.
    """

    def begin(self, bundle: int, phase: int, stream: Any) -> None: ...
    def go_on(self, bundle: int, phase: int, hop: Any, stream: Any) -> None: ...
    def end(self, bundle: int, stream: Any) -> None: ...


def run(plan: Plan, *stages: tuple[Stage, Sequence[int]]) -> None:
    """Takes all streams through one stage's phases after the other's, by the timetable.

    All devices do the same in the same order, and each waits only for what another did earlier in
    that order: none waits for ever. Loops everywhere: the code grows with the square of the number
    of axes, and not with their lengths.
    """
    course = [(stage, phase) for stage, phases in stages for phase in phases]

    def begin(b: int, k: int, stream: Any) -> None:
        stage, phase = course[k]
        if k and course[k - 1][0] is not stage:
            course[k - 1][0].end(b, stream)
        stage.begin(b, phase, stream)

    def go_on(b: int, k: int, hop: Any, stream: Any) -> None:
        course[k][0].go_on(b, course[k][1], hop, stream)

    for segment in timetable(plan, [phase for _, phase in course]):
        spans = [(b, span) for b, span in enumerate(segment) if span is not None]
        _for_each_stream(plan, [(b, s) for b, s in spans if s.start == 0], begin)
        _for_each_round(plan, spans, go_on)
    everything = [(b, Span(len(course) - 1, 0, 0)) for b in range(len(plan.bundles))]
    _for_each_stream(plan, everything, lambda b, _, stream: course[-1][0].end(b, stream))


def _for_each_stream(
    plan: Plan, spans: list[tuple[int, Span]], body: Callable[[int, int, Any], None]
) -> None:
    """body(bundle, number of its phase, stream) for every stream of some bundles, in turn."""
    by_streams = itertools.groupby(spans, lambda item: plan.bundles[item[0]].streams)
    for streams, alike in by_streams:

        def in_all_bundles(stream: Any, _: None, alike: Any = tuple(alike)) -> None:
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
        def hops(b: int, number: int, stream: Any) -> None:
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
