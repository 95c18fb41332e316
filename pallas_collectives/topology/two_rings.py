"""Two rings through a torus of two axes that share no link: they use all four of a device's.

A torus of a x b devices, with rings along both axes, has 2ab links, and a ring through all devices
takes ab of them. One goes along each row, but for one hop, and then down to the next; the other has
the links that are left. On 4 x 4:

     0   1   2   3       0   7  10  13
     5   6   7   4       1   6  11  12
    10  11   8   9       2   5   8  15
    15  12  13  14       3   4   9  14

Which way the first goes along each row decides whether it comes back to where it began, and whether
the links that are left are one ring. Some number of rows to the right and the others to the left
does, if both sides are even or both are odd and neither is above 16: `tests/topology` tries them.
"""

import dataclasses
import itertools

import numpy as np

from pallas_collectives.topology.groups import LEFT, RIGHT, Group

Place = tuple[int, int]


def of(group: Group) -> Group:
    """The group with two such rings; the group itself if its devices are not such a torus."""
    axes = group.torus
    if len(axes) != 2 or any(axis.line or axis.chip or axis.size < 3 for axis in axes):
        return group
    sizes = axes[0].size, axes[1].size
    rows = np.asarray(axes[1].index_groups or np.arange(group.size).reshape(sizes))
    for numbers in (rows, rows.T):
        if rings := _rings(*numbers.shape):
            first, second = (tuple(int(numbers[place]) for place in ring) for ring in rings)
            return dataclasses.replace(group, order=first, second=second, line=False)
    return group


def _rings(a: int, b: int) -> tuple[list[Place], list[Place]] | None:
    """The places of both rings, in their order; None if none goes along rows of b."""
    for right in range(a, -1, -1):
        first = _along_rows([RIGHT] * right + [LEFT] * (a - right), b)
        if first and (second := _of_links_left(first, a, b)):
            return first, second
    return None


def _along_rows(directions: list[int], b: int) -> list[Place] | None:
    """The ring that goes along each row in a direction; None if it does not end where it began."""
    start, found = 0, []
    for row, direction in enumerate(directions):
        found += [(row, (start + direction * hop) % b) for hop in range(b)]
        start = (start - direction) % b
    return None if start else found


def _of_links_left(ring: list[Place], a: int, b: int) -> list[Place] | None:
    """The ring of all links that another has left; None if they are several rings."""
    left = {(i, j): {((i + d) % a, j) for d in (1, -1)} | {(i, (j + d) % b) for d in (1, -1)}
            for i, j in ring}  # fmt: skip
    for here, there in itertools.pairwise([*ring, ring[0]]):
        left[here].remove(there)
        left[there].remove(here)
    found = [(0, 0), max(left[0, 0])]
    while (onward := left[found[-1]] - {found[-2]}) != {(0, 0)}:
        found += onward
    return found if len(found) == len(ring) else None
