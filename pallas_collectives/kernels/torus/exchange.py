"""How everyone's data for everyone goes over all axes of a torus, in jumps that all chips can make.

Data for another device goes along one axis after the other. A phase is an exchange along one axis:
what a device has for all those with some place on it travels there as one bundle. Data is cut into
chunks, which take turns in the order of the axes that they go through, so that all axes are at
work. On 2 x 2 devices, what device 0 holds of a chunk that goes along the second axis last:

    sender>receiver    before                   behind phase 0           behind phase 1
    device 0           0>0 0>1 0>2 0>3          0>0 0>1 2>0 2>1          0>0 1>0 2>0 3>0

Within a phase bundles go in jumps of 1, 2, 4, ... places (see `topology.jumps`): first all of them
in their first jumps; then, in a step for each further jump, those that wait on their way. So a
chunk takes as many steps as the longest routes along all axes have jumps.

Steps of different chunks overlap. A device goes round by round; in each, a chunk is a step further
than the next chunk of its order, and waits for what was sent in the round before: on the wire are
then the other chunks' bundles of all axes.

Who could be ahead of whom:

* A chunk's bundles arrive in slots, and on semaphores, of its number modulo `window`: those that
  are on their way on one semaphore for each step, those that have come to a phase's end on another.
  They are waited for together, as nothing of them is read before all are there.
* A device begins a phase of chunk c + window when all of its peers, the devices that it can jump
  to, have told it that their slots of chunk c are free. By then all that they had of chunk c is
  through that phase, and has left.
* Each peer tells it on a credit semaphore of its own, once for each chunk, in their order: none can
  stand in for another.
* Every semaphore ends at 0: all that arrives and leaves is waited for, and credits are given only
  where a chunk follows that takes them.
* All devices do the same in the same order, and each waits only for what another did in an earlier
  round: none waits for ever.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import (
    Number,
    Ref,
    Semaphore,
    dma_semaphores,
    regular_semaphores,
)
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.topology import groups, jumps
from pallas_collectives.topology.groups import Group, Ring, wrap, wrap_step

_FIELDS = 6  # of the table, for a jump


@dataclasses.dataclass(frozen=True)
class Axis:
    """What happens along an axis of n devices.

    Attributes:
      n: its devices.
      line: whether routes end at its ends.
      peers: where in the table the lengths of all jumps are, and how many.
      relays, lasts: likewise, for each step of a phase, those jumps that lead to a slot, and those
        that end a route.
      slots: bundles that wait here.
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
    credits: Semaphore  # (orders, phases, peers): from each peer one for a chunk that it has let go


@dataclasses.dataclass(frozen=True)
class Course:
    """Which way each chunk goes.

    Attributes:
      axes: of the torus.
      table: for each axis its number of peers and their distances; then jumps: of the route its
        distance, what of it lies behind, the parity of the places where it begins (-1: all); the
        jump; the slots from which and to which it leads (-1: none).
      orders: of the axes; chunk c goes through that of number c, modulo their number.
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


@dataclasses.dataclass(frozen=True)
class Move:
    """A bundle of a chunk, and its next jump.

    Attributes:
      order: the number of the chunk's order.
      phase: of the chunk.
      axis: of the phase.
      chunk: its number among all.
      slot: the chunk's.
      origin, goal: the numbers along the axis of the devices where the bundle is from and for.
      at, to: the slots where it waits here, and where it is to wait; None where it sets out, and
        where it has come.
    """

    order: int
    phase: int
    axis: int
    chunk: Number
    slot: Number
    origin: Number
    goal: Number
    at: Number | None = None
    to: Number | None = None


class Cargo(Protocol):
    """What bundles hold."""

    def pairs(self, move: Move, body: Callable[[Ref, Ref], None]) -> None:
        """body(source here, target there) for all parts of a bundle, which it copies."""

    def wait(self, semaphore: Semaphore, move: Move) -> None:
        """Waits for all parts of a bundle."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a device does.

    Attributes:
      course: of the chunks.
      rings: along each axis.
      table_ref: the course's: SMEM.
      semaphores: its own.
      cargo: what moves.
    """

    course: Course
    rings: Sequence[Ring]
    table_ref: Ref
    semaphores: Semaphores
    cargo: Cargo

    def run(self, chunks: Number) -> None:
        """Takes so many chunks through all their steps, and waits for all that comes to stay."""
        course, n = self.course, len(self.course.orders)
        total = np.int32(chunks) if isinstance(chunks, int) else chunks
        counts = [lax.div(total + (n - 1 - o), np.int32(n)) for o in range(n)]

        def go_on(o: int, step: int, c: Number) -> None:
            if step:
                self._settle(o, step - 1, c, counts[o])
            if step < course.steps:
                self._advance(o, step, c)

        def round_of_all(t: Number) -> None:
            for step in reversed(range(course.steps + 1)):
                c = t - step
                for o in range(n):
                    exists = (c >= 0) & (c < counts[o])
                    groups.only_if(exists, functools.partial(go_on, o, step, c))

        def drain(o: int, c: Number) -> None:
            wait = functools.partial(self.cargo.wait, self.semaphores.final)
            self._for_each_other(o, len(self.rings) - 1, c, wait)

        with jax.named_scope("exchange"):
            sync.for_each(0, counts[0] + course.steps, round_of_all)
        with jax.named_scope("drain"):
            for o in range(n):
                sync.for_each(0, counts[o], functools.partial(drain, o))

    def _advance(self, o: int, step: int, c: Number) -> None:
        """Waits for what a step of a chunk needs, and sends it on."""
        phase, hop = self._phase(o, step)
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        arrived, left = self._arrived(o, step, c), self.semaphores.left.at[o, step]
        if hop:
            self._for_each_jump(o, phase, hop, c, lambda move, _: self.cargo.wait(arrived, move))
        elif phase:
            self._for_each_other(o, phase - 1, c, functools.partial(self.cargo.wait, arrived))
        if hop == 0:
            self._take_credits(o, phase, c)

        def send(move: Move, jump: Number) -> None:
            there = self._arrived(o, step + 1, c) if move.to is not None else end
            self.cargo.pairs(
                move, lambda a, b: sync.remote_copy(a, b, left, there, ring.peer(jump))
            )

        last = phase + 1 == len(self.rings)
        end = self.semaphores.final if last else self._arrived(o, step + axis.steps - hop, c)
        self._for_each_jump(o, phase, hop, c, send)
        if hop == 0:
            self.cargo.pairs(
                self._own(o, phase, c), lambda a, b: pltpu.make_async_copy(a, b, left).start()
            )

    def _settle(self, o: int, step: int, c: Number, count: Number) -> None:
        """Waits until what a step has sent has left; slots that are free then serve again."""
        phase, hop = self._phase(o, step)
        wait = functools.partial(self.cargo.wait, self.semaphores.left.at[o, step])
        self._for_each_jump(o, phase, hop, c, lambda move, _: wait(move))
        if hop == 0:
            wait(self._own(o, phase, c))
            if phase:
                self._release(o, phase - 1, c, count)
        if step == self.course.steps - 1:
            self._release(o, phase, c, count)

    def _own(self, o: int, phase: int, c: Number) -> Move:
        """What stays here in a phase."""
        me = self._ring(o, phase).block(0)
        return self._move(o, phase, c, me, me)

    def _move(
        self, o: int, phase: int, c: Number, origin: Number, goal: Number, *slots: Any
    ) -> Move:
        axis, chunk = self.course.orders[o][phase], c * len(self.course.orders) + o
        return Move(o, phase, axis, chunk, self._slot(c), origin, goal, *slots)

    def _take_credits(self, o: int, phase: int, c: Number) -> None:
        if not self._serve_again(o, phase):
            return

        def take(peer: Number, _: Any) -> None:
            pl.semaphore_wait(self.semaphores.credits.at[o, phase, peer], 1)

        again = c >= self.course.window
        pl.when(again)(functools.partial(self._for_each_peer, o, phase, take))

    def _release(self, o: int, phase: int, c: Number, count: Number) -> None:
        """Tells peers that a chunk's slots of a phase are free, if another chunk needs them."""
        if not self._serve_again(o, phase):
            return

        ring, peers = self._ring(o, phase), self._axis(o, phase).peers[1]

        def give(peer: Number, jump: Number) -> None:
            # We are as far from it the other way: lengths are in ascending order.
            credit = self.semaphores.credits.at[o, phase, peers - 1 - peer]
            pl.semaphore_signal(credit, 1, device_id=ring.peer(jump))

        again = c + self.course.window < count
        pl.when(again)(functools.partial(self._for_each_peer, o, phase, give))

    def _serve_again(self, o: int, phase: int) -> bool:
        """Whether a phase has slots."""
        return phase + 1 < len(self.rings) or self._axis(o, phase).slots > 0

    def _phase(self, o: int, step: int) -> tuple[int, int]:
        """The phase of a step, and its number therein."""
        for phase, axis in enumerate(self.course.orders[o]):
            if step < self.course.axes[axis].steps:
                return phase, step
            step -= self.course.axes[axis].steps
        raise AssertionError("no such step")

    def _axis(self, o: int, phase: int) -> Axis:
        return self.course.axes[self.course.orders[o][phase]]

    def _ring(self, o: int, phase: int) -> Ring:
        return self.rings[self.course.orders[o][phase]]

    def _slot(self, c: Number) -> Any:
        return wrap_step(c, self.course.window)

    def _arrived(self, o: int, step: int, c: Number) -> Any:
        return self.semaphores.arrived.at[o, step, self._slot(c)]

    def _for_each_peer(self, o: int, phase: int, body: Callable[[Number, Number], None]) -> None:
        """body(number, jump) for each device that is a jump away."""
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        start, count = axis.peers

        def one(i: Number) -> None:
            jump = self.table_ref[start + i]
            inside = _within(axis, ring.place + jump) if axis.line else True
            groups.only_if(inside, functools.partial(body, i, jump))

        sync.for_each(0, count, one)

    def _for_each_other(self, o: int, phase: int, c: Number, body: Callable[[Move], None]) -> None:
        """body(move) for what each other device along a phase's axis has for us."""
        ring = self._ring(o, phase)

        def one(distance: Number) -> None:
            body(self._move(o, phase, c, ring.block(distance), ring.block(0)))

        sync.for_each(1, ring.size, one)

    def _for_each_jump(
        self, o: int, phase: int, hop: int, c: Number, body: Callable[[Move, Number], None]
    ) -> None:
        """body(move, jump) for the bundles that we send in a step, those to slots first."""
        axis, ring = self._axis(o, phase), self._ring(o, phase)

        def one(start: int, relays: bool, i: Number) -> None:
            at = [self.table_ref[start + _FIELDS * i + k] for k in range(_FIELDS)]
            distance, behind, parity, jump, slot, next_slot = at
            origin = ring.place - behind
            goes: Any = True
            if axis.line:
                goes = _within(axis, origin) & _within(axis, origin + distance)
            elif axis.picky:
                goes = (parity < 0) | (parity == lax.rem(wrap(origin, axis.n), np.int32(2)))

            def go() -> None:
                ends = ring.block(-behind), ring.block(distance - behind)
                slots = slot if hop else None, next_slot if relays else None
                body(self._move(o, phase, c, *ends, *slots), jump)

            groups.only_if(goes, go)

        for relays, (start, count) in ((True, axis.relays[hop]), (False, axis.lasts[hop])):
            if count:
                sync.for_each(0, count, functools.partial(one, start, relays))


def _within(axis: Axis, place: Number) -> Any:
    return (place >= 0) & (place < axis.n)


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
