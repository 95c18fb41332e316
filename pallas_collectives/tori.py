"""Which axes of a torus a group of devices fills, so that a collective can use all at once."""

import itertools
from collections.abc import Sequence

import numpy as np

from pallas_collectives.kernels.physical import Place, Torus
from pallas_collectives.kernels.topology import Group


def of_mesh(group: Group) -> tuple[Group, ...]:
    """The rings along a group's mesh axes, where it has several; () where it has not.

    For devices of which nobody knows where they are: a mesh's axes are those of its torus.
    """
    long = [(name, size) for name, size in zip(group.axes, group.sizes, strict=True) if size > 1]
    if group.index_groups is not None or len(long) < 2:
        return ()
    return tuple(Group((name,), (size,)) for name, size in long)


def on_wires(group: Group, torus: Torus, rows: Sequence[Sequence[Place]]) -> tuple[Group, ...]:
    """The rings along the axes of a torus that a group fills, if they are several; else ().

    A group's devices, in lax's order, must be numbered row-major over these axes, along each of
    which neighbours share a link. The group's mesh axes may be such; so may one mesh axis be that
    is laid over several of the torus.

    Args:
      group: without `index_groups`.
      torus: where the devices are.
      rows: the places of each group's devices (see `places`), in lax's order.
    """
    mesh = of_mesh(group)
    for axes in ([mesh] if mesh else []) + [
        _over_one(group, sizes) for sizes in _box_sizes(rows[0])
    ]:
        lines = _lines(torus, rows, [axis.size for axis in axes])
        if lines is not None:
            return tuple(
                Group(axis.axes, axis.sizes, axis.index_groups, line=line)
                for axis, line in zip(axes, lines, strict=True)
            )
    return ()


def _box_sizes(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The sides of the box that places fill, in any order; none if they fill none, or a line."""
    sides = [len(set(levels)) for levels in zip(*places, strict=True)]
    long = [side for side in sides if side > 1]
    if len(long) < 2 or np.prod(long) != len(places):
        return []
    return sorted(set(itertools.permutations(long)))


def _over_one(group: Group, sizes: tuple[int, ...]) -> tuple[Group, ...]:
    """The rings along each axis of devices numbered row-major over axes of some sizes."""
    return tuple(
        Group(group.axes, group.sizes, tuple(map(tuple, _along(axis, sizes).tolist())))
        for axis in range(len(sizes))
    )


def _along(axis: int, sizes: Sequence[int]) -> np.ndarray:
    """The numbers of the devices of each ring along an axis, one row a ring."""
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    return np.moveaxis(numbers, axis, -1).reshape(-1, sizes[axis])


def _lines(
    torus: Torus, rows: Sequence[Sequence[Place]], sizes: Sequence[int]
) -> list[bool] | None:
    """Whether the rings along each axis are lines; None if they do not run straight on wires."""
    lines, taken = [], set()
    for axis, size in enumerate(sizes):
        along, closes = set(), True
        for row, ring in itertools.product(rows, _along(axis, sizes).tolist()):
            places = [row[number] for number in ring]
            for a, b in itertools.pairwise(places):
                if torus.hops(a, b) != 1:
                    return None
                along |= {i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}
            closes &= torus.hops(places[-1], places[0]) == 1
        if len(along) != 1 or along & taken:
            return None
        taken |= along
        lines.append(size > 2 and not closes)
    return lines
