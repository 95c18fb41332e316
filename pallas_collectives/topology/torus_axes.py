"""Which axes of a torus a group of devices fills, so that a collective can use all at once."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from pallas_collectives.topology import chips
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.ring_orders import Place, Torus


def of_mesh(group: Group, chip: Chip) -> tuple[Group, ...]:
    """The rings and lines along a group's mesh axes, if it has several; else ().

    This is for devices whose places are unknown: the mesh's axes are taken for those of its torus,
    each a ring or a line as axes of so many devices are on the chip: two devices are either, and
    simulated ones lie on rings.
    """
    along = _long(group)
    if chip is chips.SIMULATED:
        return along
    closes = chip.wraps(tuple(chip.wrap_at if axis.size == 2 else axis.size for axis in along))
    return tuple(
        dataclasses.replace(axis, line=not ring) for axis, ring in zip(along, closes, strict=True)
    )


def on_wires(group: Group, torus: Torus, rows: Sequence[Sequence[Place]]) -> tuple[Group, ...]:
    """The rings along the axes of a torus that a group fills, if they are several; else ().

    The group's mesh axes where along each of them neighbours share a link; else the sides of the
    box that the devices fill, whatever their numbers: one mesh axis laid over several of the torus.

    Args:
      group: without `index_groups`.
      torus: where the devices are.
      rows: the places of each group's devices (see `placement`), in lax's order.
    """
    mesh = _long(group)
    if mesh and (kinds := _kinds(torus, rows, _row_major([axis.size for axis in mesh]))):
        return tuple(
            Group(axis.axes, axis.sizes, line=line, chip=chip)
            for axis, (line, chip) in zip(mesh, kinds, strict=True)
        )
    numbers = _box(rows[0])
    if numbers is None or not (kinds := _kinds(torus, rows, numbers)):
        return ()

    def rings(axis: int) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, _along(axis, numbers).tolist()))

    return tuple(
        Group(group.axes, group.sizes, rings(k), line=line, chip=chip)
        for k, (line, chip) in enumerate(kinds)
    )


def _long(group: Group) -> tuple[Group, ...]:
    """A group's mesh axes of more than one device, if there are several; else ()."""
    long = [(name, size) for name, size in zip(group.axes, group.sizes, strict=True) if size > 1]
    if group.index_groups is not None or len(long) < 2:
        return ()
    return tuple(Group((name,), (size,)) for name, size in long)


def _row_major(sizes: Sequence[int]) -> np.ndarray:
    return np.arange(np.prod(sizes)).reshape(sizes)


def _box(places: Sequence[Place]) -> np.ndarray | None:
    """The numbers of places in the box that they fill, by their rank on each of its long sides.

    Row-major if that is possible, whichever side comes first. None if they fill no box, or a line.
    """
    levels = [sorted(set(along)) for along in zip(*places, strict=True)]
    sides = [side for side, found in enumerate(levels) if len(found) > 1]
    sizes = [len(levels[side]) for side in sides]
    if len(sides) < 2 or np.prod(sizes) != len(places):
        return None
    numbers = np.zeros(sizes, int)
    for number, place in enumerate(places):
        numbers[tuple(levels[side].index(place[side]) for side in sides)] = number
    turns = [numbers.transpose(turn) for turn in itertools.permutations(range(len(sides)))]
    return next((turn for turn in turns if (np.diff(turn.reshape(-1)) == 1).all()), numbers)


def _along(axis: int, numbers: np.ndarray) -> np.ndarray:
    """The numbers of the devices of each ring along an axis, one row a ring."""
    return np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])


def _kinds(
    torus: Torus, rows: Sequence[Sequence[Place]], numbers: np.ndarray
) -> list[tuple[bool, bool]] | None:
    """Whether the rings along each axis are lines, and whether they are the devices of one chip.

    None if they do not run straight on wires.
    """
    kinds: list[tuple[bool, bool]] = []
    taken: set[int] = set()
    for axis, size in enumerate(numbers.shape):
        along: set[int] = set()
        closes = True
        for row, ring in itertools.product(rows, _along(axis, numbers).tolist()):
            places = [row[number] for number in ring]
            for a, b in itertools.pairwise(places):
                if torus.hops(a, b) != 1:
                    return None
                along |= {i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}
            closes &= torus.hops(places[-1], places[0]) == 1
        if len(along) != 1 or along & taken:
            return None
        taken |= along
        kinds.append((size > 2 and not closes, along == {len(torus.shape)}))
    return kinds
