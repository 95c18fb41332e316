"""Rings on the wires: an order of devices in which every hop is one physical link.

Pure integers. A set of devices that fills a box of the torus has a Hamiltonian cycle if the box has
an even side and a second one, or wraps round along an odd side; a box of one side only where it
wraps round. Elsewhere there is a line (a Hamiltonian path), whose ends are `closing` links apart.

    4 x 4 chips            2 x 2 chips of two devices

       0   1   2   3       0,1   7,6
      15   6   5   4       3,2   4,5
      14   7   8   9
      13  12  11  10

Boustrophedon with one column kept free for the way back.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

# The chip's coordinates, then the device's number on the chip.
Place = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Torus:
    """Chips on a grid.

    Attributes:
      shape: chips along each axis.
      wraps: whether the last chip of an axis is linked to the first.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def hops(self, a: Place, b: Place) -> int:
        """Links between two places; the step between devices of one chip counts as one."""
        total = abs(a[-1] - b[-1])
        for x, y, size, wraps in zip(a, b, self.shape, self.wraps, strict=False):
            distance = abs(x - y)
            total += min(distance, size - distance) if wraps else distance
        return total

    def place(self, number: int, devices: int = 1) -> Place:
        """The place of a device by its number, row-major over chips of so many devices."""
        return tuple(map(int, np.unravel_index(number, (*self.shape, devices))))


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What it costs to go round in an order; the less the better.

    Attributes:
      longest: the most links of any hop; on a line, of any but the closing one.
      line: whether to leave the closing hop unused. If a ring closes over as many links as a line
        has, half the way round it is further than from one end of the line to the other.
      closing: the links from the last device back to the first.
      total: the links of all hops.
    """

    longest: int
    line: bool
    closing: int
    total: int


def cost(torus: Torus, places: Sequence[Place], order: Sequence[int]) -> Cost:
    """What it costs to go round `placement` in an order of their numbers."""
    n = len(order)
    hops = [torus.hops(places[a], places[b]) for a, b in itertools.pairwise(order)]
    closing = torus.hops(places[order[-1]], places[order[0]])
    line = n > 2 and 2 * closing >= n * max(1, sum(hops) // (n - 1))
    longest = max(hops, default=0) if line else max([*hops, closing])
    return Cost(longest, line, closing, sum(hops) + closing)


def sharing(torus: Torus, groups: Sequence[Sequence[Place]], order: Sequence[int]) -> int:
    """How many hops go over the busiest link, each way, while all groups go round in an order.

    Groups on the same chips, one for each device of a chip, count as one.
    """
    rings = {(tuple(at[n][:-1] for n in order), cost(torus, at, order).line) for at in groups}
    links = collections.Counter(
        link
        for ring, line in rings
        for a, b in itertools.pairwise(ring if line else (*ring, ring[0]))
        for link in _links(torus, a, b)
    )
    return max(links.values(), default=1)


def _links(torus: Torus, a: Place, b: Place) -> Iterator[tuple[Place, int, int]]:
    """The links from one chip to another, axis by axis: whence, along which axis, which way."""
    for axis, (size, wraps) in enumerate(zip(torus.shape, torus.wraps, strict=True)):
        distance = b[axis] - a[axis]
        if wraps and 2 * abs(distance) > size:
            distance -= int(math.copysign(size, distance))
        way = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            yield a, axis, way
            a = (*a[:axis], (a[axis] + way) % size, *a[axis + 1 :])


def ring_order(torus: Torus, groups: Sequence[Sequence[Place]]) -> tuple[int, ...]:
    """The order in which equal-sized groups of places are to go round, the same for all.

    Args:
      torus: where the places are.
      groups: the places of each group, in lax's order.

    Returns:
      Numbers 0 to n-1 of a group's places, beginning with 0 on a ring: lax's order where none
      costs the slowest group less.
    """
    found = {tuple(range(len(groups[0]))): None}  # lax's order first: it wins where costs are equal
    found |= {_order_of(torus, places): None for places in groups}
    return min(found, key=lambda order: max(cost(torus, places, order) for places in groups))


def _order_of(torus: Torus, places: Sequence[Place]) -> tuple[int, ...]:
    """The order of one group: a cycle, else a line; lax's where the places fill no box."""
    sides = [_side(torus, places, axis) for axis in range(len(torus.shape))]
    cores = sorted({place[-1] for place in places})
    boxes = [levels for levels, _ in sides]
    numbers = {place: number for number, place in enumerate(places)}
    if numbers.keys() != set(itertools.product(*boxes, cores)):
        return tuple(range(len(places)))
    chips, closed = _round([len(levels) for levels in boxes], [closes for _, closes in sides])
    walk = _with_cores(chips, closed, len(cores))
    order = [
        numbers[*(levels[i] for levels, i in zip(boxes, chip, strict=True)), cores[core]]
        for chip, core in walk
    ]
    if not closed and len(cores) == 1:
        return tuple(order if order[0] < order[-1] else order[::-1])
    start = order.index(0)
    order = order[start:] + order[:start]
    return tuple(order if order[1 % len(order)] <= order[-1] else [0, *order[:0:-1]])


def _side(torus: Torus, places: Sequence[Place], axis: int) -> tuple[list[int], bool]:
    """The coordinates that occur along an axis, in a row; and whether the row closes to a ring."""
    levels = sorted({place[axis] for place in places})
    if not torus.wraps[axis] or len(levels) < 3:
        return levels, False
    size = torus.shape[axis]
    gaps = [(b - a) % size for a, b in zip(levels, (*levels[1:], levels[0]), strict=True)]
    after = gaps.index(max(gaps)) + 1 if len(set(gaps)) > 1 else 0
    return levels[after:] + levels[:after], len(set(gaps)) == 1


Chips = list[tuple[int, ...]]


def _round(extents: Sequence[int], closes: Sequence[bool]) -> tuple[Chips, bool]:
    """The chips of a box in an order of single links, and whether the last is next to the first."""
    long = [axis for axis, extent in enumerate(extents) if extent > 1]
    if len(long) <= 1:
        snake = _snake(extents, range(len(extents)))
        return snake, all(extents[axis] == 2 or closes[axis] for axis in long)
    even = [axis for axis in long if extents[axis] % 2 == 0]
    if even:  # a stroke at each of an even number of rows ends next to the free column
        row = even[0]
        rows = _snake(extents, [row])
        columns = _snake(extents, [axis for axis in long if axis != row])
    elif any(closes):  # the last stroke ends at the far side, next to the free column by the wrap
        column = closes.index(True)
        rows = _snake(extents, [axis for axis in long if axis != column])
        columns = _snake(extents, [column])
    else:
        return _snake(extents, long), False
    strokes = [columns[1:] if i % 2 == 0 else columns[:0:-1] for i in range(len(rows))]
    walk = [(row, column) for row, stroke in zip(rows, strokes, strict=True) for column in stroke]
    walk += [(row, columns[0]) for row in reversed(rows)]
    return [tuple(map(int.__add__, row, column)) for row, column in walk], True


def _snake(extents: Sequence[int], axes: Sequence[int]) -> Chips:
    """All positions along some axes of a box, step by step, to and fro; 0 along the others."""
    walk: Chips = [(0,) * len(extents)]
    for axis in axes:
        steps = range(extents[axis])
        walk = [
            (*chip[:axis], step, *chip[axis + 1 :])
            for number, chip in enumerate(walk)
            for step in (steps if number % 2 == 0 else reversed(steps))
        ]
    return walk


def _with_cores(chips: Chips, closed: bool, cores: int) -> list[tuple[tuple[int, ...], int]]:
    """Each chip's devices: one after the other on a ring of an even number of chips, so that each
    link between chips is used once; else there on the first devices and back on the second.
    """
    if cores == 1:
        return [(chip, 0) for chip in chips]
    if len(chips) == 1 or (closed and len(chips) % 2 == 0):
        return [
            (chip, core)
            for number, chip in enumerate(chips)
            for core in (range(cores) if number % 2 == 0 else reversed(range(cores)))
        ]
    return [(chip, 0) for chip in chips] + [(chip, 1) for chip in reversed(chips)]
