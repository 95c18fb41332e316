"""Messages that devices of a ring pass on for one another, hop by hop.

A message for a device d positions away takes d hops, by the shorter side. What has further to go
waits in a slot of its host and is sent on from there. A slot is written again only under a credit,
which the host gives once the message has left it.

On a line there is one side. Its train serves all n-1 distances in one wave: messages then wait for
none but those of earlier moves (see `for_each_move`), whichever of them the line's ends leave out.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import sync
from pallas_collectives.kernels.topology import RIGHT, Ring


@dataclasses.dataclass(frozen=True)
class Train:
    """Messages that go round a ring in a fixed order, the same in each of `directions`.

    Attributes:
      directions: which ways.
      nearest, farthest: the distances served. In each round there is a message per distance.
      width: how many distances are served together: so many messages at the most lie in slots.
    """

    directions: tuple[int, ...]
    nearest: int
    farthest: int
    width: int

    @property
    def relays(self) -> int:
        """How many messages each device takes in, a round and direction, to send them on."""
        return sum(range(self.nearest - 1, self.farthest))

    @property
    def slots(self) -> tuple[int, int]:
        """Slots: (directions, slots each). Half of them fill while the other half empties."""
        return len(self.directions), 2 * self.width

    @property
    def semaphores(self) -> tuple[Any, Any, Any]:
        """The semaphores of its `Slots`."""
        dma = pltpu.SemaphoreType.DMA(self.slots)
        return dma, dma, pltpu.SemaphoreType.REGULAR(self.slots[:1])

    @property
    def waves(self) -> int:
        """How many times `width` distances it takes to serve all."""
        return -(-(self.farthest - self.nearest + 1) // self.width)


class Slots:
    """The slots in which messages of one train wait, here and at our neighbours.

    Messages are numbered in the order in which they come, which is that in which they are sent on;
    number k lies in slot k modulo their number, 2 * width.
    """

    def __init__(
        self,
        ring: Ring,
        train: Train,
        slots_ref: Any,  # (directions, slots, *message): written by the neighbour upstream
        # (directions, slots): own; a message has left its slot
        send_sems: Any,
        # (directions, slots): a message has come into its slot. Each slot has its own: the
        #   neighbour upstream may have two on their way, and the later could pass for the earlier.
        recv_sems: Any,
        # (directions,): signalled by the neighbour downstream when it has emptied the slot that is
        #   filled next. Slots are emptied in the order in which they are filled, so k credits mean
        #   that the first k are free, whichever signal came first. `drain` takes those left over.
        credit_sems: Any,
        *,
        # (directions, slots): SMEM, own: how many rows the message in each slot has; None where
        #   every message fills its slot
        rows_ref: Any = None,
    ) -> None:
        self._ring, self._train = ring, train
        self._slots_ref, self._send_sems, self._recv_sems = slots_ref, send_sems, recv_sems
        self._credit_sems, self._rows_ref = credit_sems, rows_ref

    def free(self, lane: int, number: Any) -> tuple[Any, Any]:
        """Where our message `number` goes at our neighbour downstream, as soon as it may.

        Without the wait we could be a whole round of slots ahead of that neighbour, and write over
        a message that it has not sent on.
        """
        credit_sem = self._credit_sems.at[lane]
        pl.when(number >= self._train.slots[1])(lambda: pl.semaphore_wait(credit_sem, 1))
        at = self._at(lane, number)
        return self._slots_ref.at[at], self._recv_sems.at[at]

    def arrived(self, lane: int, number: Any, rows: Any = None) -> tuple[Any, Any]:
        """Where message `number` lies, once it is here; gives a credit for one that has left."""
        upstream = self._ring.peer(-self._train.directions[lane])
        left = number - self._train.width

        @pl.when(left >= 0)
        def _() -> None:
            self._wait_until_left(lane, left)
            pl.semaphore_signal(self._credit_sems.at[lane], 1, device_id=upstream)

        at = self._at(lane, number)
        if self._rows_ref is not None:
            self._rows_ref[at] = rows
        message = self._message(at)
        sync.wait(self._recv_sems.at[at], message)
        return message, self._send_sems.at[at]

    def drain(self, lane: int, relayed: Any, forwarded: Any) -> None:
        """Leaves every semaphore at 0, after so many messages `relayed` downstream and sent on."""
        width = np.int32(self._train.width)

        def given(messages: Any) -> Any:
            return lax.max(messages - width, np.int32(0))

        sync.for_each(given(forwarded), forwarded, functools.partial(self._wait_until_left, lane))
        credit_sem = self._credit_sems.at[lane]
        sync.for_each(
            given(relayed - width), given(relayed), lambda _: pl.semaphore_wait(credit_sem, 1)
        )

    def _wait_until_left(self, lane: int, number: Any) -> None:
        at = self._at(lane, number)
        sync.wait(self._send_sems.at[at], self._message(at))

    def _message(self, at: tuple[int, Any]) -> Any:
        slot = self._slots_ref.at[at]
        return slot if self._rows_ref is None else slot.at[pl.ds(0, self._rows_ref[at])]

    def _at(self, lane: int, number: Any) -> tuple[int, Any]:
        return lane, lax.rem(number, np.int32(self._train.slots[1]))


_LINE_SLOT_BYTES = 16 << 20


def line_message_bytes(n: int) -> int:
    """How large messages on a line of n devices may be, so that all slots take 16 MiB at most."""
    return _LINE_SLOT_BYTES // (4 * (n - 1))


def on_line(ring: Ring, direction: int, hop: Any, distance: Any) -> Any:
    """Whether a message's sender, `hop` - 1 places behind on a line, and its receiver are there."""
    behind = ring.place if direction == RIGHT else ring.size - 1 - ring.place
    return (hop <= behind + 1) & (distance - hop < ring.size - 1 - behind)


# (train, round, hop, distance, counts, first hop, last hop) -> counts
Move = Callable[[Any, Any, Any, Any, Any, bool, bool], Any]


def for_each_move(trains: Sequence[Any], rounds: Any, move: Move, counts: list[Any]) -> list[Any]:
    """Calls `move` for every hop of every message of some trains; returns the `counts` of each.

    All devices make the same moves in the same order: round by round, within it the `width`
    farthest distances first, for these hop by hop, and the farthest first. The trains after the
    first take part in its first wave, and have one themselves.

    No device waits for ever, if in a move it waits for the message (`Slots.arrived`) before it
    waits for a free slot (`Slots.free`). For one hop of one wave moves no more than `width`
    messages: message k - width is sent on in an earlier move, or the same, than the one which
    sends message k; there the host gives the credit for message k - 2 * width, whose slot is k's,
    before it waits for any. What it waits for itself was sent in an earlier move. Messages that are
    left out, by a `move` that does nothing, only bring the others forward.
    """

    def hop_of_wave(train: Any, number: Any, high: Any, hop: Any, counts: Any, first: bool) -> Any:
        """One hop of the messages for distances high, high - 1, ...: `width` of them, or fewer."""
        low = lax.max(high - np.int32(train.width), np.int32(train.nearest - 1))
        if train.relays:
            counts = lax.fori_loop(
                np.int32(0),
                high - lax.max(low, hop),
                lambda i, c: move(train, number, hop, high - i, c, first, False),
                counts,
            )
        elif not first:
            return counts
        return lax.fori_loop(  # the message that is there with this hop, if the wave has one
            lax.max(low + 1, hop),
            lax.min(high, hop) + 1,
            lambda distance, c: move(train, number, hop, distance, c, first, True),
            counts,
        )

    def wave(number: Any, highs: list[Any], counts: list[Any]) -> list[Any]:
        """The whole way of one wave of each train."""

        def hop_of_all(hop: Any, counts: list[Any], first: bool) -> list[Any]:
            return [
                hop_of_wave(train, number, high, hop, c, first)
                for train, high, c in zip(trains, highs, counts, strict=False)
            ]

        counts = hop_of_all(np.int32(1), counts, True)
        forward = functools.partial(hop_of_all, first=False)
        return lax.fori_loop(np.int32(2), highs[-1] + 1, forward, counts)

    def round_of_all(number: Any, counts: list[Any]) -> list[Any]:
        near, farthest = trains[0], [np.int32(train.farthest) for train in trains]
        counts = wave(number, farthest, counts)
        near_counts = lax.fori_loop(
            np.int32(1),
            np.int32(near.waves),
            lambda i, c: wave(number, [farthest[0] - i * np.int32(near.width)], c),
            counts[:1],
        )
        return [*near_counts, *counts[1:]]

    return lax.fori_loop(np.int32(0), rounds, round_of_all, counts)
