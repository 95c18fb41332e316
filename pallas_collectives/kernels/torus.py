"""All axes of a torus at once: how data is split, in which order each part goes, and when.

A block is cut in parts, each of them a stream. A stream goes through all axes, one after the other,
as a ring along each; what it has met on one axis goes along the next as one piece. Streams differ
in the axis that they begin with and in their direction, so that every link of the torus carries the
same load at all times. Gathering on 4 x 4 devices, hops x blocks of which a hop moves the part:

    stream  part  phase 0   phase 1
    0       1/4   x+ 3 x 1  y+ 3 x 4
    1       1/4   x- 3 x 1  y- 3 x 4
    2       1/4   y+ 3 x 1  x+ 3 x 4
    3       1/4   y- 3 x 1  x- 3 x 4

Each link carries (n-1)/(2d) blocks for n devices and d axes, the least there is: n-1 blocks come in
over 2d links. On axes of different lengths, parts of one size would load the longer axis more; so
parts that begin with different axes differ in size (`ways`). The devices of one chip share its
links and are an axis of their own, through which all parts go last. A reduction goes the same ways
backwards.

The algorithm: N. Jain and Y. Sabharwal, Optimal bucket algorithms for large MPI collectives on
torus interconnects, ICS 2010; XLA's own all-reduce goes round its tori alike.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives.kernels.blocks import LANES, sublanes
from pallas_collectives.kernels.topology import LEFT, RIGHT, Group, Ring


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Streams of one size that go through the axes in one order, each in its own direction.

    Attributes:
      order: the axes, in the order in which a gather goes through them.
      start: where along the cut the first stream begins.
      size: the extent of one stream along the cut.
      streams: how many; even ones go RIGHT, odd ones LEFT.
    """

    order: tuple[int, ...]
    start: int
    size: int
    streams: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Blocks of one shape on a torus, and how they are cut.

    Arrays of blocks have a dimension for each axis of the torus (`Plan.shape`), so that all blocks
    along some axes are one piece that one DMA moves.

    Attributes:
      sizes: devices along each axis of the torus.
      sharing: how many directions share a link along each axis (`links_shared`).
      block: the shape of one block.
      at: before which dimension of a block those of the torus stand.
      cut: the dimension along which a block is cut.
      grain: every cut falls on a multiple of it.
      bundles: what a block is cut into.
    """

    sizes: tuple[int, ...]
    sharing: tuple[int | Fraction, ...]
    block: tuple[int, ...]
    at: int
    cut: int
    grain: int
    bundles: tuple[Bundle, ...]

    @classmethod
    def of(
        cls,
        axes: Sequence[Group],
        block: tuple[int, ...],
        at: int,
        dtype: Any,
        chunks: int,
        both: bool = False,
    ) -> "Plan":
        """Cuts blocks in 2 * `chunks` streams for each axis to begin with, as far as they go.

        With `both`, half of several chunks go on from there in the other order (see `ways`).
        """
        sizes, sharing = tuple(axis.size for axis in axes), tuple(map(links_shared, axes))
        cut, grain = _finest_cut(block, dtype, 2 * len(sizes) * chunks)
        units = block[cut] // grain
        while chunks > 1 and units % (2 * chunks) != 0:
            chunks //= 2
        within = next((a for a, axis in enumerate(axes) if axis.chip), None)
        orders, exact, load = ways(sizes, sharing, within, both=both and chunks > 1)
        streams = 2 * chunks * len(load) // len(orders)  # as many in all
        bundles, start = [], 0
        for order, share in zip(orders, shares(exact, load, units // streams), strict=True):
            if share:
                bundles.append(Bundle(order, start, share * grain, streams))
                start += share * grain * streams
        if start < block[cut]:  # an odd one left over
            bundles.append(Bundle(tuple(range(len(sizes))), start, block[cut] - start, 1))
        return cls(sizes, sharing, block, at, cut, grain, tuple(bundles))

    def hops(self, bundle: Bundle, phase: int) -> int:
        """Hops of a bundle in a phase: along axis `bundle.order[phase]`, to all others on it."""
        return self.sizes[bundle.order[phase]] - 1

    def shape(self, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of an array of as many blocks as `sizes` says along each axis; of all."""
        return (*self.block[: self.at], *(sizes or self.sizes), *self.block[self.at :])

    def piece_shape(self, bundle: Bundle, phase: int) -> tuple[int, ...]:
        """The shape of what one hop of one stream moves in a phase."""
        met = bundle.order[:phase]
        sizes = [n if axis in met else 1 for axis, n in enumerate(self.sizes)]
        shape = list(self.shape(sizes))
        shape[self._cut_dimension] = bundle.size
        return tuple(shape)

    def piece(self, ref: Any, numbers: Sequence[Any], bundle: Bundle, stream: Any) -> Any:
        """A stream's part of some of `ref`'s blocks: on each axis all (None), or one."""
        start = bundle.start + stream * bundle.size
        if not isinstance(start, int):
            start = pl.multiple_of(start, self.grain)
        index = self._index(ref, numbers)
        index[self._cut_dimension] = pl.ds(start, bundle.size)
        return ref.at[tuple(index)]

    def blocks(self, ref: Any, numbers: Sequence[Any]) -> Any:
        """Some of `ref`'s blocks, or the part of them that `ref` has: on each axis all, or one."""
        return ref.at[tuple(self._index(ref, numbers))]

    def _index(self, ref: Any, numbers: Sequence[Any]) -> list[Any]:
        index = [pl.ds(0, size) for size in ref.shape]
        for axis, number in enumerate(numbers):
            if number is not None:
                index[self.at + axis] = pl.ds(number, 1)
        return index

    @property
    def _cut_dimension(self) -> int:
        return self.cut if self.cut < self.at else self.cut + len(self.sizes)


def cuts(shape: tuple[int, ...], axis: int, dtype: Any) -> int:
    """Into how many parts blocks of a shape, along an axis, can be cut."""
    block = View.of(shape, axis, dtype).block
    cut, grain = _finest_cut(block, dtype, 1)
    return block[cut] // grain


def _finest_cut(block: tuple[int, ...], dtype: Any, wanted: int) -> tuple[int, int]:
    """The dimension to cut, and in multiples of what: the first that is fine enough, or the finest.

    Fine enough: shares may be off by one unit; with 32 units each that is 3% of one in four.
    """
    grains = (*(1,) * (len(block) - 2), sublanes(dtype), LANES)[-len(block) :]
    units = [n // grain if n % grain == 0 else 1 for n, grain in zip(block, grains, strict=True)]
    found = next((i for i, count in enumerate(units) if count >= 32 * wanted), None)
    cut = units.index(max(units)) if found is None else found
    return cut, block[cut] // units[cut] if units[cut] == 1 else grains[cut]


_MOST_UNITS = 64  # in a tile to add (`combine.TILE_BYTES`), where a unit is one of the hardware's


def ways(
    sizes: Sequence[int], sharing: Sequence[Any], within: int | None = None, both: bool = False
) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Orders of the axes to go through, and how much goes in each so that all links carry the same.

    What begins with axis a moves n_a - 1 times its size along it, then n_a (n_b - 1) times along
    the next axis b, and so on: one linear equation for each axis. The axis `within` chips comes
    last: so what goes to both devices of a chip comes in once. With `both`, parts go on from an
    axis to the one before it as well as to the one behind it, if so much can be had by that.

    Returns:
      The orders, what share of all goes in each, and the load of each axis of links by each share.
    """
    links = [axis for axis in range(len(sizes)) if axis != within]
    orders = [(*links[first:], *links[:first]) for first in range(len(links))]
    if both:
        orders += [(first, *reversed(rest)) for first, *rest in orders]
    load = np.zeros((len(sizes), len(orders)))  # of axis (row) by what goes in an order (column)
    for column, order in enumerate(orders):
        for phase, axis in enumerate(order):
            met = math.prod(sizes[before] for before in order[:phase])
            load[axis, column] = met * (sizes[axis] - 1) * sharing[axis]
    exact = np.linalg.lstsq(load[links], np.ones(len(links)))[0]  # of many solutions the evenest
    if both and (exact < 0).any():  # a long axis beside short ones
        return ways(sizes, sharing, within)
    assert (exact >= 0).all(), (sizes, exact)
    last = () if within is None else (within,)
    return [(*order, *last) for order in orders], exact / exact.sum(), load[links]


def differ(axes: Sequence[Group]) -> bool:
    """Whether parts had better go through axes in more orders than one from each.

    On axes that differ parts do too, and the largest is the last to be through: so it is made two.
    By the replay that takes 3% to 17% off a gather, of 64 KiB to 2 MiB on 4 x 4 x 8 and 4 x 8 x 8;
    sums of 64 and 512 KiB take longer so.
    """
    links = [axis for axis in axes if not axis.chip]
    return len(links) > 2 and len({(axis.size, links_shared(axis)) for axis in links}) > 1


def shares(exact: np.ndarray, load: np.ndarray, units: int) -> tuple[int, ...]:
    """So many `units`, in whole ones, shared out about as `exact` says.

    Of the ways that leave all links about the same load, to those shares that tiles divide best:
    213 units are added in 71 tiles of 3, which takes ten times as long as 212 in 4 of 53.
    """
    wholes = _roundings(exact * units)
    loads = [load @ whole for whole in wholes]
    fair = [
        w for w, carried in zip(wholes, loads, strict=True) if carried.max() <= 1.01 * carried.min()
    ]
    best = max(fair, key=_worst_tile) if fair else min(wholes, key=lambda w: (load @ w).max())
    return tuple(best.tolist())


def _roundings(exact: np.ndarray) -> list[np.ndarray]:
    """Whole numbers near to `exact` with the same sum: the largest takes what is left over."""
    units, largest = round(exact.sum()), int(np.argmax(exact))
    # More than three are those of a gather, which adds nothing.
    reach = [min(4, int(e / 32)) if len(exact) <= 3 else 0 for e in exact]
    near = [range(int(e) - r, int(e) + 2 + r) for e, r in zip(exact + 1e-6, reach, strict=True)]
    near[largest] = range(1)
    found = [np.array(whole) for whole in itertools.product(*near)]
    for whole in found:
        whole[largest] = units - whole.sum()
    return [whole for whole in found if whole[largest] >= 0]


def _worst_tile(whole: np.ndarray) -> float:
    """What the share that tiles divide worst has in one of them, of what it could have."""
    tiles = (
        max(n for n in range(1, _MOST_UNITS + 1) if share % n == 0) / min(share, _MOST_UNITS)
        for share in whole.tolist()
        if share
    )
    return min(tiles, default=1.0)


def links_shared(axis: Group) -> int | Fraction:
    """How many directions share a link: both between two devices, and on a line.

    On a line the hop from the last device to the first goes back over all links. Between devices of
    a chip both ways go over one link as well, six times as fast as those that the two have.
    """
    if axis.chip:
        return Fraction(1, 6)
    return 2 if axis.size == 2 or axis.line else 1


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


def axes_of(group: Group) -> tuple[Group, ...]:
    """The axes of the torus that a group lies on; one ring of all where it lies on none."""
    return group.torus or (group,)


def launch_group(group: Group) -> Group:
    """A group as `launch.call` is to know it: its kernels here ask `tables` for all else."""
    return Group(group.axes, group.sizes)


def barrier_key(group: Group) -> Hashable:
    """Which devices' signals the barrier of a torus counts."""
    return "neighbours on a torus", axes_of(group)


def numbers(axes: Sequence[Group]) -> np.ndarray | None:
    """The numbers of the devices, row-major over the axes; None where they are 0, 1, ...

    That is so where the axes are a mesh's; rings with tables say it themselves.
    """
    if len(axes) == 1 or axes[0].index_groups is None:
        return None
    at = np.zeros(math.prod(axis.size for axis in axes), int)
    for axis in axes:
        at *= axis.size
        for ring in axis.index_groups or ():
            at[list(ring)] += range(axis.size)
    found = np.argsort(at)
    return None if (found == np.arange(len(found))).all() else found


def field_sizes(axes: Sequence[Group]) -> tuple[int, ...]:
    """The dimensions for the torus of an array of all blocks: one after the other if `numbers`."""
    if numbers(axes) is None:
        return tuple(axis.size for axis in axes)
    return (math.prod(axis.size for axis in axes), *(1,) * (len(axes) - 1))


def tables(axes: Sequence[Group]) -> list[jax.Array]:
    """What a kernel must know of its axes beside arithmetic: scalars for `launch.call`."""
    found = [table for table in (axis.members() for axis in axes) if table is not None]
    named = numbers(axes)
    return found if named is None else [*found, jnp.asarray(named, jnp.int32)]


def seen(axes: Sequence[Group], refs: Sequence[Any]) -> tuple[tuple[Ring, ...], Any, list[Any]]:
    """Inside a kernel: this device's ring along each axis; `numbers`; the refs behind `tables`."""
    left = list(refs)

    def ring(axis: Group) -> Ring:
        has_table = axis.index_groups is not None or axis.order is not None
        return Ring(axis, left.pop(0) if has_table else None)

    found = tuple(map(ring, axes))
    return found, None if numbers(axes) is None else left.pop(0), left


@dataclasses.dataclass(frozen=True)
class Field:
    """An array of all devices' blocks, inside a kernel, addressed by places on the torus.

    Attributes:
      plan: how blocks are cut.
      ref: the array: HBM or VMEM.
      numbers_ref: the numbers of the blocks, row-major over the torus (SMEM); None if 0, 1, ...
    """

    plan: Plan
    ref: Any
    numbers_ref: Any = None

    def for_each_piece(
        self,
        place: Sequence[Any],
        bundle: Bundle,
        stream: Any,
        body: Callable[[Any, Sequence[Any]], None],
    ) -> None:
        """body(ref, place) for a stream's part of the blocks at a place: on an axis one, or None.

        None is all, as one piece where blocks are numbered row-major; else they come one by one.
        """
        if self.numbers_ref is None:
            body(self.plan.piece(self.ref, place, bundle, stream), place)
            return
        free = [axis for axis, number in enumerate(place) if number is None]
        count = math.prod(self.plan.sizes[axis] for axis in free)

        def one(j: Any, _: None) -> None:
            here = list(place)
            for axis in reversed(free):
                here[axis] = lax.rem(j, np.int32(self.plan.sizes[axis]))
                j = lax.div(j, np.int32(self.plan.sizes[axis]))
            flat: Any = 0
            for size, number in zip(self.plan.sizes, here, strict=True):
                flat = flat * size + number
            block = [self.numbers_ref[flat], *(0 for _ in here[1:])]
            body(self.plan.piece(self.ref, block, bundle, stream), here)

        lax.fori_loop(0, count, one, None)


def direction_of(stream: Any) -> Any:
    """Which way round a stream of a bundle goes."""
    return RIGHT - (RIGHT - LEFT) * (stream & 1)


def course_table(plan: Plan) -> str:
    """Which way each stream of a gather goes, as printed above."""
    phases = range(len(plan.sizes))
    lines = ["stream  part  " + "  ".join(f"phase {phase} " for phase in phases)]
    for bundle in plan.bundles:
        for stream in range(bundle.streams):
            sign = "+" if direction_of(stream) == RIGHT else "-"
            hops = (
                f"{'xyz'[bundle.order[p]]}{sign} {plan.hops(bundle, p)} x "
                f"{math.prod(plan.sizes[axis] for axis in bundle.order[:p])}"
                for p in phases
            )
            part = Fraction(bundle.size, plan.block[plan.cut])
            lines.append(f"{len(lines) - 1:<8}{part!s:<6}" + "  ".join(hops))
    return "\n".join(line.rstrip() for line in lines)


@dataclasses.dataclass(frozen=True)
class View:
    """Arrays of blocks side by side along `axis`, seen as arrays with dimensions for the torus.

    A reshape that moves nothing. Blocks of columns become blocks of tiles first, as they lie in
    memory; nothing moves there either if their rows are whole tiles.

    Attributes:
      shape: one block as it is.
      axis: the dimension along which blocks lie; they are `sliceable` along it.
      block: one block as it is seen.
      at: the dimension of that before which those of the torus stand.
    """

    shape: tuple[int, ...]
    axis: int
    block: tuple[int, ...]
    at: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int, dtype: Any) -> "View":
        """The view of blocks of a shape along an axis."""
        if axis < len(shape) - 1:
            return cls(shape, axis, shape, axis)
        *before, rows, columns = shape
        high = 8 if rows % 8 == 0 else rows
        return cls(shape, axis, (*before, rows // high, columns // LANES, high, LANES), axis)

    def into(self, x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """An array of as many blocks as `sizes` says, as it is seen."""
        if self.block != self.shape:
            *before, rows, _, high, lanes = self.block
            x = jnp.swapaxes(x.reshape(*before, rows, high, -1, lanes), -3, -2)
        return x.reshape(*self.block[: self.at], *sizes, *self.block[self.at :])

    def out_of(self, y: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """The inverse of `into`."""
        if self.block != self.shape:
            *before, rows, _, high, lanes = self.block
            y = jnp.swapaxes(y.reshape(*before, rows, -1, high, lanes), -3, -2)
        shape = list(self.shape)
        shape[self.axis] *= math.prod(sizes)
        return y.reshape(shape)
