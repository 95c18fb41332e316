"""Which way chunks go through the axes of a torus in an `exchange`, as numbers and as a table."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pallas_collectives.annotations import Semaphore, dma_semaphores, regular_semaphores
from pallas_collectives.topology import jumps
from pallas_collectives.topology.groups import Group

FIELDS = 6  # of the table, for a jump
SCRATCH_BYTES = 16 << 20  # that the chunks under way may take


@dataclasses.dataclass(frozen=True)
class Axis:
    """What happens along an axis of n devices.

    Attributes:
      n: its devices.
      line: whether routes end at its ends.
      peers: where in the table the lengths of all jumps are, and how many.
      relays, lasts: likewise, for each step of a phase, those jumps that lead to a slot, and those
        that end a route.
      slots: parcels that wait here.
      picky: whether some routes begin at some places only.
    """

    n: int
    line: bool
    peers: tuple[int, int]
    relays: tuple[tuple[int, int], ...]
    lasts: tuple[tuple[int, int], ...]
    slots: int
    picky: bool

    @property
    def steps(self) -> int:
        """Steps of a phase along it."""
        return len(self.lasts)


class Semaphores(NamedTuple):
    """What an `Exchange` takes."""

    # (orders, steps, window): from peers: what a step needs; of a chunk's first step not used
    arrived: Semaphore
    final: Semaphore  # from peers: what ends the last phase, waited for at the end
    left: Semaphore  # (orders, steps): own; what a step has sent, and what stays here in a phase
    # (orders, phases, jumps): the credits of channels (`machinery.channel`) to and from peers
    credits: Semaphore


@dataclasses.dataclass(frozen=True)
class Course:
    """Which way each chunk goes.

    Attributes:
      axes: the axes of the torus.
      table: for each axis its number of peers and their distances; then jumps: of the route its
        distance, what of it lies behind, the parity of the places where it begins (-1: all); the
        jump; the slots from which and to which it leads (-1: none).
      orders: orders of the axes; chunk c goes through that of number c, modulo their number.
      window: chunks of an order under way in a phase.
    """

    axes: tuple[Axis, ...]
    table: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    window: int

    @classmethod
    def of(cls, along: Sequence[Group]) -> "Course":
        """That along the axes of a torus."""
        axes, table = _table([(g.size, g.line or g.size == 2) for g in along])
        d = len(axes)
        orders = tuple((*range(first, d), *range(first)) for first in range(d))
        # A slot fills for as many rounds as its phase has steps, and empties in the next two.
        return cls(axes, table, orders, max(axis.steps for axis in axes) + 2)

    def cut(self, chunks: int) -> "Course":
        """That of so many chunks."""
        orders = self.orders[:chunks]
        most = -(-chunks // len(orders))
        return dataclasses.replace(self, orders=orders, window=min(self.window, most))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(axis.n for axis in self.axes)

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return sum(axis.steps for axis in self.axes)

    @property
    def scratch(self) -> float:
        """How many times all that a chunk has lies in slots."""
        on_way = sum(axis.slots / axis.n for axis in self.axes)
        return len(self.orders) * self.window * (len(self.axes) - 1 + on_way)

    @property
    def semaphores(self) -> Semaphores:
        """What to allocate."""
        orders, phases = len(self.orders), len(self.axes)
        return Semaphores(
            dma_semaphores(orders, self.steps, self.window),
            dma_semaphores(),
            dma_semaphores(orders, self.steps),
            regular_semaphores(orders, phases, max(axis.peers[1] for axis in self.axes)),
        )


def _table(sizes: Sequence[tuple[int, bool]]) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    """Axes of so many devices, each on a line or not, and the table of all."""
    table: list[int] = []
    peers = []
    for n, line in sizes:
        lengths = jumps.lengths(n, line)
        peers.append((len(table) + 1, len(lengths)))
        table += [len(lengths), *lengths]
    axes = []
    for (n, line), those in zip(sizes, peers, strict=True):
        routes = jumps.routes(n, line)
        waits = [(r, step) for r in routes for step in range(1, len(r.jumps))]
        slots = {wait: number for number, wait in enumerate(waits)}
        ranges: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for step in range(max(len(route.jumps) for route in routes)):
            for left, where in zip((2, 1), ranges, strict=True):
                now = [r for r in routes if min(len(r.jumps) - step, 2) == left]
                where.append((len(table), len(now)))
                for r in now:
                    parity = -1 if r.parity is None else r.parity
                    table += [r.distance, sum(r.jumps[:step]), parity, r.jumps[step]]
                    table += [slots.get((r, step), -1), slots.get((r, step + 1), -1)]
        picky = any(route.parity is not None for route in routes)
        axes.append(Axis(n, line, those, tuple(ranges[0]), tuple(ranges[1]), len(slots), picky))
    return tuple(axes), tuple(table)
