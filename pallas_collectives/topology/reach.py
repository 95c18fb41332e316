"""Which devices a TPU can write to, or signal: a rule about two places on a torus.

JAX's documentation ("Distributed Computing in Pallas for TPUs", Routing): a device sends to any
other of its pod, but on v5e it can route to a power-of-two offset from itself only. It does not say
along what an offset is counted. The rule here is the strictest reading: two devices that differ in
one coordinate, by a power of two, the shorter way round where that axis of the whole slice closes.
Such pairs are at a power-of-two offset in device numbers as well, wherever the sides of the slice
are powers of two; diagonal ones are not.

Signals to another device's semaphore travel as DMAs do: the rule holds for both.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pallas_collectives.topology import jumps as distances
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.ring_orders import Place, Torus

Pairs = Iterable[tuple[int, int]]
# Who writes to whom, or signals whom, either way: device numbers of a group.
Pattern = Callable[[Group], Pairs]


def reaches(chip: Chip, torus: Torus, a: Place, b: Place) -> bool:
    """Whether the device at place `a` can write to, or signal, the one at `b`; the rule is
    symmetric.

    Args:
      chip: the TPU generation.
      torus: the whole slice's; the group may be a part of the slice.
      a, b: coordinates of the chip, then the device's number on the chip.
    """
    if chip.reaches_all or a == b:
        return True
    apart = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(apart) > 1:
        return False
    (axis,) = apart
    distance = abs(a[axis] - b[axis])
    if axis < len(torus.shape) and torus.wraps[axis]:
        distance = min(distance, torus.shape[axis] - distance)
    return distance & (distance - 1) == 0


def everywhere(chip: Chip) -> bool:
    """Whether a chip's devices reach all others, wherever they are."""
    return chip.reaches_all


def all_reach(chip: Chip, torus: Torus, rows: Sequence[Sequence[Place]], pairs: Pairs) -> bool:
    """Whether the devices of all pairs reach each other, in every row of places by number."""
    return everywhere(chip) or all(
        reaches(chip, torus, row[a], row[b]) for a, b in pairs for row in rows
    )


def ring(group: Group) -> Pairs:
    """Neighbours on a ring, the last and the first among them."""
    for members in _rings(group):
        yield from zip(members, (*members[1:], members[0]), strict=True)


def line(group: Group) -> Pairs:
    """Neighbours on a line."""
    for members in _rings(group):
        yield from itertools.pairwise(members)


def everyone(group: Group) -> Pairs:
    """Every device and every other."""
    for members in _rings(group):
        yield from itertools.combinations(members, 2)


def torus(group: Group) -> Pairs:
    """Neighbours along every axis of a torus, rings or lines; without axes, on one ring of all."""
    for axis, members in _along_axes(group):
        yield from itertools.pairwise(members)
        if not axis.line:
            yield members[-1], members[0]


def jumps(group: Group) -> Pairs:
    """Devices a jump apart (see `topology.jumps`) along every axis of a torus, or of one ring."""
    for axis, members in _along_axes(group):
        n, line = axis.size, axis.line or axis.size == 2
        for place, jump in itertools.product(range(n), distances.lengths(n, line)):
            if not line or 0 <= place + jump < n:
                yield members[place], members[(place + jump) % n]


def alone(group: Group) -> Pairs:
    """Nobody but those that a call names itself, or who are found to be within reach."""
    del group
    return ()


def _along_axes(group: Group) -> Iterable[tuple[Group, Sequence[int]]]:
    """The axes of a torus, each with the numbers of the devices of each of its rings."""
    for axis in group.torus or (group,):
        if axis.index_groups is not None or axis.axes == group.axes:
            for members in _rings(axis):
                yield axis, members
            continue
        numbers = np.arange(group.size).reshape(group.sizes)
        of_axis = np.moveaxis(numbers, group.axes.index(axis.axes[0]), -1)
        for members in of_axis.reshape(-1, axis.size).tolist():
            yield axis, members


def _rings(group: Group) -> Sequence[Sequence[int]]:
    """The numbers of the devices of each ring of a group, in its order."""
    order = group.order or range(group.size)
    return [[row[i] for i in order] for row in group.index_groups or (range(group.size),)]
