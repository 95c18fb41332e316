"""All-reduce on a grid of devices, whose axes are lines: along trees, chunk by chunk.

Each chunk has a column of the grid. Along every row its sums travel to that column from both sides,
along the column to its middle, and from there the finished chunk goes back the same way. Columns
take turns; and half of the chunks go along the other axis first, so that "rows" are columns there.
A chunk that belongs to column 1 of a grid of 4 x 3; in brackets the steps:

    sums come in                            finished, it goes out

    dev  (0) > dev < (1) dev < (0) dev      dev <     dev > (4) dev > (5) dev
               v (3)                              ^ (4)
    dev  (0) > dev < (1) dev < (0) dev      dev <     DEV > (4) dev > (5) dev
               ^ (3)                              v (4)
    dev  (0) > dev < (1) dev < (0) dev      dev <     dev > (4) dev > (5) dev

Every link along the first axis carries a chunk once, inwards or outwards, and those of the column
once either way: all links of n x n devices carry (n + 1) / 2n of the operand, the least there is
(`replay.bound`). Where sides differ, the two parts of a chunk do (`Cut`).

            steps of each chunk             scratch in VMEM
    grid    2 (n_a - 1) + 2 floor(n_b/2)    some 50 chunks for each of the two orders

Order and rounding. Within a row each side's sum begins at its end. A device of the column adds, in
float32 (integers in 32 bits), own + left + right + what comes along the column, from its low end
first. What goes on the wire is rounded once per hop. All devices get the same bits.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Copy, DType, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.kernels.machinery.combine import combine, wide
from pallas_collectives.kernels.torus.grid_chunks import SKEW, Cut, Row, direction, ticks
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, only_if, wrap_step

# Sends of sums along a row that may be under way when the next one starts.
IN_FLIGHT = 2

# Finished and summed chunks of a column that may be on their way from a device.
SUMS = 2


class Scratch(NamedTuple):
    """What one part takes. Sides: 0 for what comes from the left, 1 for what comes from the right.

    `on` is for sums that go on along the row, `here` for those that end at us, `column` for those
    that come along the column; each has slots, written by the neighbour.
    """

    on_ref: Ref  # (2 sides, window, chunk): VMEM
    here_ref: Ref  # (2, window, chunk): VMEM
    column_ref: Ref  # (2, window, chunk): VMEM
    on: Semaphores  # (2); `sent`: (2, window): own; a sum has left its slot
    here: Semaphores  # (2)
    column: Semaphores  # (2)
    sums_ref: Ref  # (SUMS, chunk): VMEM; the column's sums as they leave us
    sum_sems: Semaphore  # (SUMS,): own; one of these has left
    result_sems: Semaphore  # (SUMS,): own, in the middle; a finished chunk is in its place
    wide_ref: Ref  # (chunk): VMEM, a sum that is not rounded yet
    terms_ref: Ref  # (3, 2, chunk): VMEM; our terms for sums of either side and of the column
    term_sems: Semaphore  # (3, 2): own; a term is here
    # Outwards: a finished chunk comes once, from whichever side; nobody gives credits: see
    # `_Part._receive`. `sent`: own; all drained at the end.
    outwards: Semaphores

    @classmethod
    def of(cls, sizes: tuple[int, int], chunk: tuple[int, int], dtype: DType) -> "Scratch":
        """What to allocate; `sizes` with the axis first along which the part goes first."""
        along, across = sizes
        dma = pltpu.SemaphoreType.DMA
        on, here = SKEW + IN_FLIGHT + 2, SKEW * (along - 1 + across // 2) // along + 2
        column = SKEW // along + 2

        def slots(window: int) -> Ref:
            return pltpu.VMEM((2, window, *chunk), dtype)

        return cls(
            slots(on),
            slots(here),
            slots(column),
            Semaphores.of(2, window=on, sent=(2, on)),
            Semaphores.of(2, window=here),
            Semaphores.of(2, window=column),
            pltpu.VMEM((SUMS, *chunk), dtype),
            dma((SUMS,)),
            dma((SUMS,)),
            pltpu.VMEM(chunk, wide(dtype)),
            pltpu.VMEM((3, 2, *chunk), dtype),
            dma((3, 2)),
            Semaphores(dma((1,)), dma((1, ticks(sizes) + 1)), None),
        )


def grid(
    x: jax.Array,
    group: Group,
    axes: Sequence[Group],
    cut: Cut,
    *,
    op: str,
    interpret: Interpret,
    name: str,
) -> jax.Array:
    """Reduces x over a grid; `cut` as `cut_of` says. `name` is what profilers show."""
    flat = x.reshape(-1, x.shape[-1])
    orders = ((axes[k].size, axes[1 - k].size) for k in (0, 1))
    scratch = [
        Scratch.of(sizes, (height, cut.width), x.dtype)
        for sizes, height in zip(orders, cut.heights, strict=True)
    ]
    y = launch.call(
        functools.partial(_kernel, cut=cut, op=op),
        group,
        flat,
        axes=axes,
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        scratch=scratch,
        chunking=Chunking(cut.count, of="the operand"),
        barrier="neighbours on a torus",
        name=name,
        interpret=interpret,
        wire_bytes=2 * x.nbytes * (group.size - 1) // group.size,
    )
    return y.reshape(x.shape)


def _kernel(
    rings: Sequence[Ring],  # along each axis
    x_ref: Ref,  # the operand, of rows and columns: HBM
    o_ref: Ref,  # the result: HBM; written by neighbours, in the middle of a column by us
    scratch: list[Scratch],  # one for each part
    *,
    cut: Cut,
    op: str,
) -> None:
    orders = (rings[0], rings[1]), (rings[1], rings[0])
    parts = [
        _Part(*order, x_ref, o_ref, scratch[k], k, cut=cut, op=op) for k, order in enumerate(orders)
    ]

    def tick(time: Number, _: None) -> None:
        for part in parts:
            part.tick(time)

    longest = max(ticks((row.size, column.size)) for row, column in orders)
    lax.fori_loop(0, cut.count + longest, tick, None)
    for part in parts:
        part.drain()


class _Part:
    """One part of all chunks, at one device.

    Chunk c sets out in tick c. All that a tick waits for was sent in an earlier one, credits too:
    so nobody waits for ever. Sides are those of `Row`.
    """

    def __init__(
        self,
        row: Ring,
        column: Ring,
        x_ref: Ref,
        o_ref: Ref,
        scratch: Scratch,
        number: int,
        *,
        cut: Cut,
        op: str,
    ) -> None:
        self._rings, self._row, self._s = (row, column), Row(row, cut.count), scratch
        self._x_ref, self._o_ref, self._cut, self._number = x_ref, o_ref, cut, number
        self._combine = functools.partial(combine, op, vmem=True)
        middle = column.size // 2
        hops = abs(column.place - middle)  # of a sum to it, and back
        self._adds, self._ends = (row.size - 1 + middle + sign * hops for sign in (-1, 1))
        self._in_middle = column.place == middle
        low = (column.place > 0) & (column.place <= middle)
        high = (column.place < column.size - 1) & (column.place >= middle)
        self._is_low = column.place < middle
        self._sums_from = (low, high)  # the sides of the column that sums come from
        # Where finished chunks of our column go: ring, direction, whether there is anyone.
        along = (row, RIGHT, row.place < row.size - 1), (row, LEFT, row.place > 0)
        self._goes_to = ((column, RIGHT, high), (column, LEFT, low), *along)
        self._copies = sum(there.astype(jnp.int32) for *_, there in self._goes_to)

    def tick(self, time: Number) -> None:
        """What the device does in a tick, of each kind for one chunk at the most."""
        row, finished, sums = self._row, time - SKEW * self._ends, time - SKEW * self._adds

        def pass_on(side: Number) -> None:
            chunk = finished - SKEW * row.behind(side)
            comes = row.has(chunk) & (row.ahead(side, chunk) < 0)
            only_if(comes, lambda: self._pass_on(side, chunk))

        def add(side: Number) -> None:
            chunk = time - SKEW * row.behind(side)
            self._fetch(side, chunk + 1)
            goes = row.has(chunk) & (row.ahead(side, chunk) > 0)
            only_if(goes, lambda: self._add(side, chunk))

        ends = row.has(finished) & row.is_ours(finished) & ~self._in_middle
        only_if(ends, lambda: self._spread(finished, self._receive(finished)))
        sync.for_each(0, 2, pass_on)
        self._fetch(2, sums + 1)
        only_if(row.has(sums) & row.is_ours(sums), lambda: self._add_in_column(sums))
        sync.for_each(0, 2, add)

    def drain(self) -> None:
        """Waits until all has left."""
        row, sent = self._row, jnp.where(self._in_middle, 0, self._row.own * self._copies)
        for side in (0, 1):
            end = functools.partial(self._end_send, side)
            sync.for_each(row.past(side) - IN_FLIGHT, row.past(side), end)
            sent += jnp.where(row.is_last(side), 0, row.past(1 - side))
        sync.for_each(row.own - SUMS, row.own, self._end_sums)
        first = self._of(self._o_ref, jnp.int32(0))
        self._outwards(self._rings[0], RIGHT).wait_sent(first, times=sent)

    def _of(self, ref: Ref, chunk: Number) -> Ref:
        return self._cut.at(ref, self._number, chunk)

    # Channels; messages of a column are numbered by rounds

    def _on(self, side: Number) -> Channel:
        """The channel of sums that go on along the row."""
        comes = jnp.where(self._row.behind(side) > 0, self._row.past(side), 0)
        return self._summing(0, side, self._s.on, self._s.on_ref, comes)

    def _here(self, side: Number) -> Channel:
        """The channel of sums that end here, and are added to those of the column."""
        comes = jnp.where(self._row.behind(side) > 0, self._row.own, 0)
        return self._summing(0, side, self._s.here, self._s.here_ref, comes)

    def _along(self, side: Number) -> Channel:
        """The channel of sums that come along the column."""
        comes = jnp.where(jnp.where(side == 0, *self._sums_from), self._row.own, 0)
        return self._summing(1, side, self._s.column, self._s.column_ref, comes)

    def _summing(
        self, ring: int, side: Number, semaphores: Semaphores, slots: Ref, comes: Number
    ) -> Channel:
        to, most, place = direction(side), self._cut.count, (slots, (side,))
        return Channel(self._rings[ring], to, semaphores, (side,), comes, most, place)

    def _outwards(self, ring: Ring, to: Number) -> Channel:
        """The channel of finished chunks; messages are numbered as chunks are."""
        return Channel(ring, to, self._s.outwards, (0,), self._cut.count, longest=0)

    # Our terms, copied to VMEM one chunk ahead; of kinds 0 and 1 for sums of a side, 2 for columns'

    def _fetch(self, kind: Number, chunk: Number) -> None:
        """Starts the copy of our term, if this kind of sum takes that of this chunk."""
        if isinstance(kind, int):
            wanted = self._row.is_ours(chunk)
        else:  # where sums set out they leave from the operand
            wanted = (self._row.ahead(kind, chunk) > 0) & (self._row.behind(kind) > 0)
        only_if(self._row.has(chunk) & wanted, lambda: self._term_copy(kind, chunk).start())

    def _term_copy(self, kind: Number, chunk: Number) -> Copy:
        at = (kind, wrap_step(chunk, 2))
        source, target = self._of(self._x_ref, chunk), self._s.terms_ref.at[at]
        return pltpu.make_async_copy(source, target, self._s.term_sems.at[at])

    def _term(self, kind: Number, chunk: Number) -> Ref:
        self._term_copy(kind, chunk).wait()
        return self._s.terms_ref.at[kind, wrap_step(chunk, 2)]

    # Sums along the row

    def _add(self, side: Number, chunk: Number) -> None:
        """Adds our term to a sum that comes from a side, and sends it on."""
        on, number = self._on(side), self._row.number(side, chunk)

        def begin() -> None:
            self._end_send(side, number - IN_FLIGHT)
            self._send_on(side, self._of(self._x_ref, chunk), chunk)

        def add() -> None:
            summed = on.slot(number)
            on.receive(number, summed)
            self._combine((summed, summed, self._term(side, chunk)))
            self._end_send(side, number - IN_FLIGHT)
            self._send_on(side, summed, chunk)

        sets_out = self._row.behind(side) == 0
        only_if(sets_out, begin)
        only_if(~sets_out, add)

    def _send_on(self, side: Number, source: Ref, chunk: Number) -> None:
        """To the neighbour, whose column is the chunk's or not."""
        sent = self._sent(side, self._row.number(side, chunk))

        def send(channel: Channel, number: Number) -> None:
            own = dataclasses.replace(channel, sent=sent)
            own.send(source, channel.slot(number), number)

        ahead, there = self._row.ahead(side, chunk), self._row.number(side, chunk, further=1)
        only_if(ahead == 1, lambda: send(self._here(side), self._row.round(chunk)))
        only_if(ahead > 1, lambda: send(self._on(side), there))

    def _sent(self, side: Number, number: Number) -> Semaphore:
        return self._s.on.sent.at[side, wrap_step(number, self._on(side).window)]

    def _end_send(self, side: Number, number: Number) -> None:
        """Waits until a sum has left its slot, and gives the slot back to who filled it."""

        def end() -> None:
            on = self._on(side)
            sync.wait(self._sent(side, number), on.slot(number))
            only_if(self._row.behind(side) > 0, lambda: on.release(number))

        only_if(number >= 0, end)

    # Sums along the column

    def _add_in_column(self, chunk: Number) -> None:
        """Adds what comes from all sides, and sends the sum on; in the middle it is finished."""
        number, term = self._row.round(chunk), self._term(2, chunk)
        self._end_sums(number - SUMS)
        summed = self._summed(number)
        so_far = summed if wide(summed.dtype) == summed.dtype else self._s.wide_ref
        self._combine((so_far, term))
        in_row = ((self._row.behind(side) > 0, self._here(side)) for side in (0, 1))
        in_column = ((self._sums_from[side], self._along(side)) for side in (0, 1))

        def add(channel: Channel) -> None:
            channel.receive(number, channel.slot(number))
            self._combine((so_far, so_far, channel.slot(number)))
            channel.release(number)

        for there, channel in (*in_row, *in_column):
            only_if(there, functools.partial(add, channel))
        if so_far is not summed:
            self._combine((summed, so_far))
        only_if(self._in_middle, lambda: self._finish(chunk, number))
        only_if(~self._in_middle, lambda: self._send_in(number))

    def _send_in(self, number: Number) -> None:
        channel, sent = self._along(jnp.where(self._is_low, 0, 1)), self._sum_sent(number)
        own = dataclasses.replace(channel, sent=sent)
        own.send(self._summed(number), channel.slot(number), number)

    def _finish(self, chunk: Number, number: Number) -> None:
        self._result_copy(chunk, number).start()
        self._spread(chunk, self._summed(number), self._sum_sent(number))

    def _result_copy(self, chunk: Number, number: Number) -> Copy:
        source, semaphore = self._summed(number), self._s.result_sems.at[wrap_step(number, SUMS)]
        return pltpu.make_async_copy(source, self._of(self._o_ref, chunk), semaphore)

    def _summed(self, number: Number) -> Ref:
        return self._s.sums_ref.at[wrap_step(number, SUMS)]

    def _sum_sent(self, number: Number) -> Semaphore:
        return self._s.sum_sems.at[wrap_step(number, SUMS)]

    def _end_sums(self, number: Number) -> None:
        """Waits until a sum has left us."""
        times = jnp.where(self._in_middle, self._copies, 1)

        def end() -> None:
            sync.wait(self._sum_sent(number), self._summed(number), times=times)
            only_if(self._in_middle, self._result_copy(jnp.int32(0), number).wait)

        only_if(number >= 0, end)

    # Finished chunks

    def _spread(self, chunk: Number, source: Ref, sent: Semaphore | None = None) -> None:
        """Sends a finished chunk of our column on along it, and along our row."""
        for ring, to, there in self._goes_to:
            push = functools.partial(self._push, self._outwards(ring, to), chunk, source, sent)
            only_if(there, push)

    def _push(
        self, channel: Channel, chunk: Number, source: Ref, sent: Semaphore | None = None
    ) -> None:
        own = dataclasses.replace(channel, sent=sent)
        own.push(source, self._of(self._o_ref, chunk), chunk)

    def _pass_on(self, side: Number, chunk: Number) -> None:
        """Takes a finished chunk that has come along the row."""
        finished, channel = self._receive(chunk), self._outwards(self._rings[0], direction(side))
        only_if(~self._row.is_last(side), lambda: self._push(channel, chunk, finished))

    def _receive(self, chunk: Number) -> Ref:
        """Waits for a finished chunk, in its place in the result.

        No chunk that is `window` later can have come on the same semaphore: it is finished only
        after we have sent our sum of it, in a later tick than the one in which we wait for this.
        """
        finished = self._of(self._o_ref, chunk)
        self._outwards(self._rings[0], RIGHT).receive(chunk, finished)
        return finished
