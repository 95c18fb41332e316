"""How everyone's data for everyone goes over all axes of a torus, in jumps that all chips can make.

Data for another device goes along one axis after the other. A phase is an exchange along one axis:
what a device has for all those with some place on it travels there as one parcel. Data is cut into
chunks, which take turns in the order of the axes that they go through, so that all axes are at
work. On 2 x 2 devices, what device 0 holds of a chunk that goes along the second axis last:

    sender>receiver    before                   behind phase 0           behind phase 1
    device 0           0>0 0>1 0>2 0>3          0>0 0>1 2>0 2>1          0>0 1>0 2>0 3>0

Within a phase parcels go in jumps of 1, 2, 4, ... places (see `topology.jumps`): first all of them
in their first jumps; then, in a step for each further jump, those that wait on their way. So a
chunk takes as many steps as the longest routes along all axes have jumps.

Steps of different chunks overlap. A device goes round by round; in each, a chunk is a step further
than the next chunk of its order, and waits for what was sent in the round before: on the wire are
then the other chunks' parcels of all axes.

Who could be ahead of whom:

* A chunk's parcels arrive in slots, and on semaphores, of its number modulo `window`: those that
  are on their way on one semaphore for each step, those that have come to a phase's end on another.
  They are waited for together, as nothing of them is read before all are there.
* A device begins a phase of chunk c + window when all of its peers, the devices that it can jump
  to, have told it that their slots of chunk c are free. By then all that they had of chunk c is
  through that phase, and has left.
* That is a credit of a channel (`machinery.channel`), whose messages are chunks. Each jump has a
  channel of its own in each phase of an order.
* Every semaphore ends at 0: all that arrives and leaves is waited for.
* All devices do the same in the same order, and each waits only for what another did in an earlier
  round: none waits for ever.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Flag, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.torus.course import FIELDS, Axis, Course, Semaphores
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Ring, wrap, wrap_step


@dataclasses.dataclass(frozen=True)
class Move:
    """A parcel of a chunk, and its next jump.

    Attributes:
      order: the number of the chunk's order.
      phase: of the chunk.
      axis: of the phase.
      chunk: its number among all.
      slot: the chunk's.
      origin, goal: the numbers along the axis of the devices where the parcel is from and for.
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
    """What parcels hold."""

    def pairs(self, move: Move, body: Callable[[Ref, Ref], None]) -> None:
        """body(source here, target there) for all parts of a parcel, which it copies."""

    def wait(self, semaphore: Semaphore, move: Move) -> None:
        """Waits for all parts of a parcel."""


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
        totals = [chunks + (n - 1 - o) for o in range(n)]
        counts = [t // n if isinstance(t, int) else lax.div(t, np.int32(n)) for t in totals]

        def go_on(o: int, step: int, c: Number) -> None:
            if step:
                self._settle(o, step - 1, c, counts[o])
            if step < course.steps:
                self._advance(o, step, c, counts[o])

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

    def _advance(self, o: int, step: int, c: Number, count: Number) -> None:
        """Waits for what a step of a chunk needs, and sends it on."""
        phase, hop = self._phase(o, step)
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        arrived, left = self._arrived(o, step, c), self.semaphores.left.at[o, step]
        if hop:
            self._for_each_jump(o, phase, hop, c, lambda move, _: self.cargo.wait(arrived, move))
        elif phase:
            self._for_each_other(o, phase - 1, c, functools.partial(self.cargo.wait, arrived))
        if hop == 0:
            self._for_each_channel(o, phase, +1, count, lambda to: to.wait_until_free(c))

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
        self, o: int, phase: int, c: Number, origin: Number, goal: Number, *slots: Number | None
    ) -> Move:
        axis, chunk = self.course.orders[o][phase], c * len(self.course.orders) + o
        return Move(o, phase, axis, chunk, self._slot(c), origin, goal, *slots)

    def _release(self, o: int, phase: int, c: Number, count: Number) -> None:
        """Tells peers that a chunk's slots of a phase are free, if another chunk needs them."""
        self._for_each_channel(o, phase, -1, count, lambda by: by.release(c))

    def _serve_again(self, o: int, phase: int, count: Number) -> bool:
        """Whether a phase has slots, and so many chunks may take one twice."""
        has_slots = phase + 1 < len(self.rings) or self._axis(o, phase).slots > 0
        return has_slots and not (isinstance(count, int) and count <= self.course.window)

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

    def _slot(self, c: Number) -> Number:
        return wrap_step(c, self.course.window)

    def _arrived(self, o: int, step: int, c: Number) -> Semaphore:
        return self.semaphores.arrived.at[o, step, self._slot(c)]

    def _for_each_channel(
        self, o: int, phase: int, end: int, count: Number, body: Callable[[Channel], None]
    ) -> None:
        """body(channel) for all jumps to devices (end 1) or from them (-1), for their credits."""
        if not self._serve_again(o, phase, count):
            return
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        start, jumps = axis.peers
        own = self.semaphores
        semaphores = channels.Semaphores(own.left, own.arrived, own.credits)

        def one(i: Number) -> None:
            jump = self.table_ref[start + i]
            inside = _within(axis, ring.place + end * jump) if axis.line else True
            channel = Channel(ring, jump, semaphores, (o, phase, i), arrivals=count)
            groups.only_if(inside, functools.partial(body, channel))

        sync.for_each(0, jumps, one)

    def _for_each_other(self, o: int, phase: int, c: Number, body: Callable[[Move], None]) -> None:
        """body(move) for what each other device along a phase's axis has for us."""
        ring = self._ring(o, phase)

        def one(distance: Number) -> None:
            body(self._move(o, phase, c, ring.block(distance), ring.block(0)))

        sync.for_each(1, ring.size, one)

    def _for_each_jump(
        self, o: int, phase: int, hop: int, c: Number, body: Callable[[Move, Number], None]
    ) -> None:
        """body(move, jump) for the parcels that we send in a step, those to slots first."""
        axis, ring = self._axis(o, phase), self._ring(o, phase)

        def one(start: int, relays: bool, i: Number) -> None:
            at = [self.table_ref[start + FIELDS * i + k] for k in range(FIELDS)]
            distance, behind, parity, jump, slot, next_slot = at
            origin = ring.place - behind
            goes: Flag = True
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


def _within(axis: Axis, place: Number) -> Flag:
    return (place >= 0) & (place < axis.n)
