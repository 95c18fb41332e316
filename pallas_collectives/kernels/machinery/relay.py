"""Messages that devices of a ring pass on for one another, hop by hop.

A message for a device d positions away takes d hops, by the shorter side. What has further to go
waits in a slot of its host and is sent on from there. A slot is written again only when the message
has left it: it is the `channel`'s, and released then.

On a line there is one side. Its schedule serves all n-1 distances in one batch: messages then wait
only for those of earlier moves (see `for_each_move`), whichever of them the ends leave out.

Round by round (`for_each_move`) few messages lie in slots, but a device whose neighbours send much
waits for them in each round. In `for_each_turn` the rounds overlap: whoever waits does so for what
was sent a turn before, and links are as busy as all that crosses them makes them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Number, Ref, Semaphore, buffer, span
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.topology.groups import RIGHT, Ring


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Messages that go round a ring in a fixed order, the same in each of `directions`.

    Attributes:
      directions: which ways.
      nearest, farthest: the distances served. In each round there is a message per distance.
      width: how many distances are served together, as a batch: so many messages at the most lie in
        slots.
      overlapping: whether it is for `for_each_turn`, in which all distances have their turns.
    """

    directions: tuple[int, ...]
    nearest: int
    farthest: int
    width: int
    overlapping: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def relays(self) -> int:
        """How many messages each device takes in, a round and direction, to send them on."""
        return sum(range(self.nearest - 1, self.farthest))

    @property
    def slots(self) -> tuple[int, int]:
        """Slots: (directions, slots each). Half of them fill while the other half empties."""
        held = self.relays if self.overlapping else self.width
        return len(self.directions), max(1, held * (1 + self.overlapping) + self.leaving)

    @property
    def leaving(self) -> int:
        """How many messages may be on their way on before the first of them is released."""
        return min(self.relays, _LEAVING) if self.overlapping else self.width

    @property
    def batches(self) -> int:
        """How many times `width` distances it takes to serve all."""
        return -(-(self.farthest - self.nearest + 1) // self.width)


SLOT_BYTES = 16 << 20  # that all slots may take
MAX_WIDTH = 16  # a message on its way takes four semaphores per direction; a core has hundreds
_LEAVING = 8  # messages of an overlapping schedule on a link at a time: that keeps it busy


class Scratch(NamedTuple):
    """What the `Slots` of a schedule take."""

    slots_ref: Ref  # (directions, slots, *message): HBM or VMEM; written by upstream
    # (directions) channels; `sent`: (directions, slots): own; a message has left its slot
    semaphores: channels.Semaphores
    # (directions, slots): SMEM, own: how many rows the message in each slot has; None where every
    #   message fills its slot
    rows_ref: Ref | None

    @classmethod
    def of(
        cls, schedule: Schedule, message: tuple[int, ...], dtype: DType, *, ragged: bool = False
    ) -> "Scratch":
        """What to allocate for messages of a shape, or, if `ragged`, of as many rows or fewer."""
        ways, slots = schedule.slots
        return cls(
            buffer((ways, slots, *message), dtype),
            channels.Semaphores.of(ways, window=slots, sent=(ways, slots)),
            pltpu.SMEM((ways, slots), jnp.int32) if ragged else None,
        )


class Slots:
    """The slots in which messages of one schedule wait, here and at our neighbours.

    Messages are numbered in the order in which they come, which is that in which they are sent on;
    number k lies in slot k modulo their number. No device knows how many will come: so
    each message that has left is released, and `drain` takes the credits that nobody has used.
    """

    def __init__(self, ring: Ring, schedule: Schedule, scratch: Scratch) -> None:
        self._ring, self._schedule, self._scratch = ring, schedule, scratch

    def send(
        self,
        way: int,
        number: Number,
        source: Ref,
        sent: Semaphore | None,
        rows: Number | None = None,
    ) -> None:
        """Sends our message `number`, of so many rows, to a slot downstream, once it is free.

        Without that wait we could be a whole round of slots ahead of our neighbour, and write over
        a message that it has not sent on.
        """
        channel = self._channel(way, sent)
        slot = channel.slot(number)
        channel.send(source, slot if rows is None else slot.at[span(0, rows)], number)

    def arrived(self, way: int, number: Number, rows: Number | None = None) -> tuple[Any, Any]:
        """Where message `number` lies, once it is here, and the semaphore that it is to leave by.

        Releases the message that has left by now: the one `Schedule.leaving` earlier.
        """
        channel, left = self._channel(way), number - self._schedule.leaving

        @pl.when(left >= 0)
        def _() -> None:
            self._wait_until_left(way, left)
            channel.release(left)

        if self._scratch.rows_ref is not None:
            self._scratch.rows_ref[self._at(way, number)] = rows
        message = self._message(way, number)
        channel.receive(number, message)
        return message, self._scratch.semaphores.sent.at[self._at(way, number)]

    def drain(self, way: int, relayed: Number, forwarded: Number) -> None:
        """Leaves every semaphore at 0, after so many messages `relayed` downstream and sent on."""

        def all_but(messages: Number, last: int) -> Number:
            return lax.max(messages - np.int32(last), np.int32(0))

        leaving, slots = self._schedule.leaving, self._schedule.slots[1]
        left = functools.partial(self._wait_until_left, way)
        sync.for_each(all_but(forwarded, leaving), forwarded, left)
        self._channel(way).take_credits(all_but(relayed, leaving) - all_but(relayed, slots))

    def _wait_until_left(self, way: int, number: Number) -> None:
        sent = self._scratch.semaphores.sent.at[self._at(way, number)]
        sync.wait(sent, self._message(way, number))

    def _message(self, way: int, number: Number) -> Ref:
        slot, rows_ref = self._channel(way).slot(number), self._scratch.rows_ref
        return slot if rows_ref is None else slot.at[pl.ds(0, rows_ref[self._at(way, number)])]

    def _at(self, way: int, number: Number) -> tuple[int, Any]:
        return way, lax.rem(number, np.int32(self._schedule.slots[1]))

    def _channel(self, way: int, sent: Semaphore | None = None) -> Channel:
        scratch, direction = self._scratch, self._schedule.directions[way]
        return Channel(
            self._ring,
            direction,
            scratch.semaphores,
            (way,),
            slots=(scratch.slots_ref, (way,)),
            sent=sent,
        )


def line_message_bytes(n: int) -> int:
    """How large messages on a line of n devices may be: all slots take `SLOT_BYTES` at most."""
    return SLOT_BYTES // (4 * (n - 1))


def on_line(ring: Ring, direction: int, hop: Number, distance: Number) -> Any:
    """Whether a message's sender, `hop` - 1 places behind on a line, and its receiver are there."""
    behind = ring.place if direction == RIGHT else ring.size - 1 - ring.place
    return (hop <= behind + 1) & (distance - hop < ring.size - 1 - behind)


# (schedule, round, hop, distance, counts, first hop, last hop) -> counts
Move = Callable[[Any, Any, Any, Any, Any, bool, bool], Any]


def for_each_move(
    schedules: Sequence[Any], rounds: Number, move: Move, counts: list[Any]
) -> list[Any]:
    """Calls `move` for every hop of every message of some schedules; returns the `counts` of each.

    All devices make the same moves in the same order: round by round, within it the `width`
    farthest distances first, for these hop by hop, and the farthest first. The schedules after the
    first take part in its first batch, and have one themselves.

    No device waits for ever, if in a move it waits for the message (`Slots.arrived`) before it
    waits for a free slot (`Slots.send`). For one hop of one batch moves no more than `width`
    messages: message k - width is sent on in an earlier move, or the same, than the one which
    sends message k; there the host releases message k - 2 * width, whose slot is k's, before it
    waits for any. What it waits for itself was sent in an earlier move. Messages that are left out,
    by a `move` that does nothing, only bring the others forward.
    """

    def hop_of_batch(
        schedule: Any, number: Number, high: Number, hop: Number, counts: Any, first: bool
    ) -> Any:
        """One hop of the messages for distances high, high - 1, ...: `width` of them, or fewer."""
        low = lax.max(high - np.int32(schedule.width), np.int32(schedule.nearest - 1))
        if schedule.relays:
            counts = lax.fori_loop(
                np.int32(0),
                high - lax.max(low, hop),
                lambda i, c: move(schedule, number, hop, high - i, c, first, False),
                counts,
            )
        elif not first:
            return counts
        return lax.fori_loop(  # the message that is there with this hop, if the batch has one
            lax.max(low + 1, hop),
            lax.min(high, hop) + 1,
            lambda distance, c: move(schedule, number, hop, distance, c, first, True),
            counts,
        )

    def batch(number: Number, highs: list[Any], counts: list[Any]) -> list[Any]:
        """The whole way of one batch of each schedule."""

        def hop_of_all(hop: Number, counts: list[Any], first: bool) -> list[Any]:
            return [
                hop_of_batch(schedule, number, high, hop, c, first)
                for schedule, high, c in zip(schedules, highs, counts, strict=False)
            ]

        counts = hop_of_all(np.int32(1), counts, True)
        forward = functools.partial(hop_of_all, first=False)
        return lax.fori_loop(np.int32(2), highs[-1] + 1, forward, counts)

    def round_of_all(number: Number, counts: list[Any]) -> list[Any]:
        near, farthest = schedules[0], [np.int32(each.farthest) for each in schedules]
        counts = batch(number, farthest, counts)
        near_counts = lax.fori_loop(
            np.int32(1),
            np.int32(near.batches),
            lambda i, c: batch(number, [farthest[0] - i * np.int32(near.width)], c),
            counts[:1],
        )
        return [*near_counts, *counts[1:]]

    return lax.fori_loop(np.int32(0), rounds, round_of_all, counts)


def for_each_turn(schedule: Schedule, rounds: Any, move: Move, counts: Any) -> Any:
    """Calls `move` for every hop of every message of an overlapping schedule; returns the counts.

    In turn t the messages of round t make their first hop, those of round t - 1 their second, and
    so on: a device sends on in a turn what came to it in the one before.

    No device waits for ever. By induction all have made the moves of turn t - 1. A message that is
    sent on in turn t was sent to us in that turn. It goes to the slot of one that is
    2 * relays + leaving earlier, and that downstream releases when it sends on the message
    2 * relays earlier. No turn has more than `relays` of them: so that one was sent two turns ago
    at the latest, and downstream sends it on in turn t - 1 or before. Messages that are left out
    make others later in number alone.
    """
    farthest = np.int32(schedule.farthest)

    def turn(number: Number, counts: Any) -> Any:
        def make_hop(hop: Number, counts: Any, first: bool = False) -> Any:
            at = number - hop + 1
            goes = ((at >= 0) & (at < rounds)).astype(np.int32)
            counts = lax.fori_loop(
                np.int32(0),
                goes * (farthest - hop),
                lambda i, c: move(schedule, at, hop, farthest - i, c, first, False),
                counts,
            )
            return lax.fori_loop(
                np.int32(0), goes, lambda _, c: move(schedule, at, hop, hop, c, first, True), counts
            )

        counts = make_hop(np.int32(1), counts, True)
        return lax.fori_loop(np.int32(2), farthest + 1, make_hop, counts)

    return lax.fori_loop(np.int32(0), rounds + farthest - 1, turn, counts)
