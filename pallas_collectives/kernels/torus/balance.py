"""How much goes through the axes of a torus in each order, so that all links carry the same."""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pallas_collectives.topology.groups import Group

_MOST_UNITS = 64  # in a tile to add (`combine.TILE_BYTES`), where a unit is one of the hardware's


def links_shared(axis: Group, there_and_back: bool = False) -> int | Fraction:
    """How many directions share a link: both between two devices, and on a line.

    On a line of n devices the busiest link carries n-1 blocks in either direction; where what is
    reduced goes back meanwhile, n in both, for then it is the busiest one way alone. Between
    devices of a chip both ways go over one link as well, six times as fast as those of the two.
    """
    if axis.chip:
        return Fraction(1, 6)
    if axis.line and there_and_back:
        return Fraction(axis.size, axis.size - 1)
    return 2 if axis.size == 2 or axis.line else 1


def ways(
    sizes: Sequence[int], sharing: Sequence[Any], within: int | None = None, both: bool = False
) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Orders of the axes to go through, and how much goes in each so that all links carry the same.

    What begins with axis a moves n_a - 1 times its size along it, then n_a (n_b - 1) times along
    the next axis b, and so on: one linear equation for each axis. The axis `within` chips comes
    last: so what goes to both devices of a chip comes in once. With `both`, parts go on from an
    axis to the one before it as well as to the one behind it, if that can balance the load.

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


def in_pairs(
    exact: np.ndarray, load: np.ndarray, each: int, even: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Units shared out about as `exact` says: how often `each` of them, and how often two more.

    So that the busiest links carry least; or, without `even`, with the fewest of the latter.
    """
    units, best = round(exact.sum()), None

    def near(shares: np.ndarray, slack: int) -> Iterator[tuple[int, ...]]:
        whole = [math.floor(share + 1e-6) for share in shares]
        return itertools.product(*(range(max(0, w - slack), max(0, w + 2 + slack)) for w in whole))

    for pairs in near(exact / each, 0):
        rest = (units - each * sum(pairs)) // 2
        for small in near((exact - each * np.array(pairs)) / 2, 1) if rest >= 0 else ():
            if sum(small) == rest:
                carried = (load @ (each * np.array(pairs) + 2 * np.array(small))).max()
                key = (carried, rest) if even else (rest, carried)
                if best is None or key < best[0]:
                    best = key, pairs, small
    assert best is not None
    return best[1:]


def differ(axes: Sequence[Group]) -> bool:
    """Whether it is better that parts go through axes in more orders than one from each.

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
