"""How data travels along an axis in jumps of 1, 2, 4, ... devices, which every TPU can make.

A device can write to any device of its row, but on v5e to those at power-of-two offsets only (see
`reach`). So what is for a device further away goes in several jumps, the longest first, and waits
in between at a device on its way. It crosses as few links as there are. On a ring of 16:

    distance  1  2  3    4  5    6    7      8
    jumps     1  2  2 1  4  4 1  4 2  4 2 1  4 4

Each link then carries n^2/8 of what a device has for one other, each way round; on a line n^2/4 in
the middle. What is for the opposite device of an even ring goes right from even places and left
from odd ones, so that both ways carry the same. Where that distance is a power of two it goes in
two jumps, because one jump of half the ring could not tell which way it goes.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Route:
    """How data for the device at a distance travels.

    Attributes:
      distance: in places to the right; negative to the left.
      jumps: places to the right of each jump; they add up to `distance`.
      parity: it begins at even places (0) or at odd ones (1) alone; None for all places.
    """

    distance: int
    jumps: tuple[int, ...]
    parity: int | None = None


@functools.lru_cache(maxsize=64)
def routes(n: int, line: bool) -> tuple[Route, ...]:
    """The routes to all other devices of a line, or of a ring, of n devices.

    From each place one leads to each other: on a line those that do not leave it.
    """
    if line or n == 2:
        return tuple(_route(way * d) for d in range(1, n) for way in (1, -1))
    near = tuple(_route(way * d) for d in range(1, (n + 1) // 2) for way in (1, -1))
    if n % 2:
        return near
    return (*near, _opposite(n // 2, 1, 0), _opposite(n // 2, -1, 1))


def lengths(n: int, line: bool) -> tuple[int, ...]:
    """All jumps that some route makes, either way."""
    return tuple(sorted({jump for route in routes(n, line) for jump in route.jumps}))


def _route(distance: int, parity: int | None = None) -> Route:
    return Route(distance, _powers(distance), parity)


def _opposite(distance: int, way: int, parity: int) -> Route:
    """The way to the opposite device: as any other, a power of two in two halves."""
    jumps = _powers(way * distance)
    return Route(way * distance, jumps if len(jumps) > 1 else (jumps[0] // 2,) * 2, parity)


def _powers(distance: int) -> tuple[int, ...]:
    """The powers of two that make up a distance, the largest first, with its sign."""
    way, far = (1, distance) if distance > 0 else (-1, -distance)
    return tuple(way << bit for bit in reversed(range(far.bit_length())) if far >> bit & 1)
