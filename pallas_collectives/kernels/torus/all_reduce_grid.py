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

Every link along the first axis carries a chunk once: inwards where it leads to the chunk's column,
outwards where it leads away. Those of the column carry it once either way. So all links of the grid
carry the same: on n x n devices (n + 1) / 2n of the operand, the least that any all-reduce loads
them with (`replay.bound`). Where sides differ, the two parts of a chunk do (`Cut`).

             steps                              scratch in VMEM
    grid     2 (n_a - 1) + 2 floor(n_b/2),      some 40 chunks for each of the two orders
             each chunk

Order and rounding. Within a row each side's sum begins at its end. A device of the column adds, in
float32 (integers in 32 bits), own + left + right + what comes along the column, from its low end
first. What goes on the wire is rounded once per hop. All devices get the same bits.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.all_reduce_line import steps
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.kernels.machinery.combine import combine, wide
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, only_if, wrap_step

# Ticks between a device's turn with a chunk and the next device's, as `all_reduce_line.SKEW`.
SKEW = 4

# Sends of sums along a row that may be under way when the next one starts.
IN_FLIGHT = 2

# Finished and summed chunks of a column that may be on their way from a device.
SUMS = 2

# The least operand: by the replay of v5e and v6e smaller ones take less time as a whole.
LEAST_BYTES = 2 << 20

# What a link carries in about 1.5 us: both parts of a chunk.
PAIR_SECONDS = 1.5e-6


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an operand of rows and columns is cut into chunks, each of two parts.

    Attributes:
      heights: rows of the part that goes along the first axis first, and of the other one.
      width: columns of both.
      across: chunks side by side.
      count: chunks in all.
    """

    heights: tuple[int, int]
    width: int
    across: int
    count: int

    @classmethod
    def of(
        cls, sizes: tuple[int, int], shape: tuple[int, int], dtype: DType, wanted: float
    ) -> "Cut | None":
        """Chunks of about `wanted` bytes on a grid of these sizes; None if tiles do not allow it.

        A share f that goes along the first axis first loads its links with f + (1-f) / n_b, those
        of the other axis with (1-f) + f / n_a.
        """
        (rows, columns), high = shape, sublanes(dtype)
        along, across = (1 - 1 / n for n in sizes)
        share = across / (along + across)
        found = []
        for units in (2, 4, 8, 16, 32, 64):
            first = round(share * units)
            for lanes in range(LANES, columns + 1, LANES):
                nbytes = units * high * lanes * jnp.dtype(dtype).itemsize
                fits = rows % (units * high) == 0 and columns % lanes == 0
                if fits and 0 < first < units and wanted / 2 <= nbytes <= 2 * wanted:
                    uneven = abs(first / units - share)
                    off = abs(math.log2(nbytes / wanted))
                    found.append((uneven + 0.1 * off, -lanes, units, first))
        if not found:
            return None
        _, lanes, units, first = min(found)
        heights = (first * high, (units - first) * high)
        across = columns // -lanes
        return cls(heights, -lanes, across, rows // (units * high) * across)

    def at(self, ref: Ref, part: int, chunk: Number) -> Any:
        """One part of a chunk."""
        row, column = lax.div(chunk, jnp.int32(self.across)), wrap_step(chunk, self.across)
        start = row * sum(self.heights) + part * self.heights[0]
        high = math.gcd(*self.heights)
        return ref.at[
            pl.ds(pl.multiple_of(start, high), self.heights[part]),
            pl.ds(pl.multiple_of(column * self.width, self.width), self.width),
        ]


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
    sums_sems: Semaphore  # (SUMS,): own; one of these has left
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

        def slots(window: int) -> Any:
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


def ticks(sizes: tuple[int, int]) -> int:
    """Ticks from the one in which a chunk sets out to the one in which it is everywhere."""
    along, across = sizes
    return SKEW * 2 * (along - 1 + across // 2)


def cut_of(axes: Sequence[Group], shape: tuple[int, ...], dtype: DType) -> Cut | None:
    """How an operand of blocks of rows and columns is cut; None if others serve it better."""
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    if len(axes) != 2 or not _is_grid(axes) or nbytes < LEAST_BYTES:
        return None
    sizes = axes[0].size, axes[1].size
    rows = (math.prod(shape[:-1]), shape[-1])
    return Cut.of(sizes, rows, dtype, PAIR_SECONDS * chips.current().link_bandwidth)


def _is_grid(axes: Sequence[Group]) -> bool:
    """Whether none of some axes closes, and one at least is longer than two devices."""
    lines = [axis.line for axis in axes]
    return any(lines) and all(
        line or (axis.size == 2 and not axis.chip)
        for line, axis in zip(lines, axes, strict=True)
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

    def tick(time: Any, _: None) -> None:
        for part in parts:
            part.tick(time)

    longest = max(ticks((row.size, column.size)) for row, column in orders)
    lax.fori_loop(0, cut.count + longest, tick, None)
    for part in parts:
        part.drain()


class _Part:
    """One part of all chunks, at one device.

    Chunk c sets out in tick c. All that a tick waits for was sent in an earlier one, credits too:
    so nobody waits for ever. Chunk c belongs to the column of place c modulo their number. A side
    of us is 0, the left, from where things go RIGHT; or 1.
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
        self._row, self._column, self._s = row, column, scratch
        self._x_ref, self._o_ref = x_ref, o_ref
        self._cut, self._number, self._count = cut, number, cut.count
        self._combine = functools.partial(combine, op, vmem=True)
        self._last = row.size - 1
        self._adds, self._ends = steps(column.place, column.size)
        middle, end = column.size // 2, column.size - 1
        self._in_middle = column.place == middle
        # From which sides sums come along the column, and finished chunks leave along it.
        self._sums_from = (
            (column.place > 0) & (column.place <= middle),
            (column.place < end) & (column.place >= middle),
        )
        self._ends_to = (
            (column.place < end) & (column.place >= middle),
            (column.place > 0) & (column.place <= middle),
        )
        self._to_middle = jnp.where(column.place < middle, 0, 1)  # the side that it comes from

    def tick(self, time: Any) -> None:
        """What the device does in a tick, of each kind for one chunk at the most."""
        finished = time - SKEW * (self._last + self._ends)
        sums = time - SKEW * (self._last + self._adds)

        def pass_on(side: Number) -> None:
            chunk = finished - SKEW * self._behind(side)
            comes = self._is_one(chunk) & (self._ahead(side, chunk) < 0)
            only_if(comes, lambda: self._pass_on(side, chunk))

        def add(side: Number) -> None:
            chunk = time - SKEW * self._behind(side)
            self._fetch(side, chunk + 1)
            goes = self._is_one(chunk) & (self._ahead(side, chunk) > 0)
            only_if(goes, lambda: self._add(side, chunk))

        ends = self._is_one(finished) & self._is_ours(finished) & ~self._in_middle
        only_if(ends, lambda: self._end_column(finished))
        sync.for_each(0, 2, pass_on)
        self._fetch(2, sums + 1)
        only_if(self._is_one(sums) & self._is_ours(sums), lambda: self._add_in_column(sums))
        sync.for_each(0, 2, add)

    def drain(self) -> None:
        """Waits until all has left."""

        def side(side: Number) -> None:
            goes = self._going(side)
            sync.for_each(goes - IN_FLIGHT, goes, lambda number: self._end_send(side, number))

        sync.for_each(0, 2, side)
        ours = self._chunks(self._row.place, self._row.place + 1)
        sync.for_each(ours - SUMS, ours, self._end_sums)
        ends = self._also(self._ends_to[0]) + self._also(self._ends_to[1])
        sent = self._also(~self._in_middle) * ours * (ends + self._sides)
        sent += self._chunks(0, self._row.place) * self._also(self._row.place < self._last)
        sent += self._chunks(self._row.place + 1, self._row.size) * self._also(self._row.place > 0)
        self._outwards(self._row, RIGHT).wait_sent(self._of(self._o_ref, jnp.int32(0)), times=sent)

    # Which chunk is whose

    def _is_one(self, chunk: Any) -> Any:
        return (chunk >= 0) & (chunk < self._count)

    def _owner(self, chunk: Any) -> Any:
        return wrap_step(lax.max(chunk, 0), self._row.size)

    def _is_ours(self, chunk: Any) -> Any:
        return self._owner(chunk) == self._row.place

    def _behind(self, side: Number) -> Any:
        """Devices of the row on a side of us."""
        return jnp.where(side == 0, self._row.place, self._last - self._row.place)

    def _ahead(self, side: Number, chunk: Any) -> Any:
        """How far its column lies ahead of what comes from a side; negative: behind us."""
        return self._direction(side) * (self._owner(chunk) - self._row.place)

    def _round(self, chunk: Any) -> Any:
        """How many chunks of each column have come before it."""
        return lax.div(lax.max(chunk, 0), jnp.int32(self._row.size))

    def _chunks(self, start: Any, stop: Any) -> Any:
        """How many chunks belong to the columns at these places of a row."""
        rounds, rest = divmod(self._count, self._row.size)
        return rounds * (stop - start) + jnp.clip(rest - start, 0, stop - start)

    def _number_on(self, side: Number, behind: Any, chunk: Any) -> Any:
        """Number of a chunk among those that go on from a device with so many behind it."""
        owner, count = self._owner(chunk), self._last - behind
        before = jnp.where(side == 0, owner - behind - 1, owner)
        return self._round(chunk) * count + before

    def _going(self, side: Number) -> Any:
        """How many sums go on past us, of those that come from a side or set out here."""
        place = self._row.place
        right, left = self._chunks(place + 1, self._row.size), self._chunks(0, place)
        return jnp.where(side == 0, right, left)

    @staticmethod
    def _direction(side: Number) -> Any:
        return RIGHT - (RIGHT - LEFT) * side

    @staticmethod
    def _also(condition: Any) -> Any:
        return condition.astype(jnp.int32)

    @property
    def _sides(self) -> Any:
        """Neighbours in our row."""
        return self._also(self._row.place > 0) + self._also(self._row.place < self._last)

    def _of(self, ref: Ref, chunk: Number) -> Any:
        return self._cut.at(ref, self._number, chunk)

    # Channels; messages of a column are numbered by rounds

    def _on(self, side: Number) -> Channel:
        """Of sums that go on along the row."""
        comes = jnp.where(self._behind(side) > 0, self._going(side), 0)
        return self._summing(self._row, side, self._s.on, self._s.on_ref, comes)

    def _here(self, side: Number) -> Channel:
        """Of sums that end here, and are added to those of the column."""
        place = self._row.place
        comes = jnp.where(self._behind(side) > 0, self._chunks(place, place + 1), 0)
        return self._summing(self._row, side, self._s.here, self._s.here_ref, comes)

    def _along(self, side: Number) -> Channel:
        """Of sums that come along the column."""
        place = self._row.place
        there = jnp.where(side == 0, *self._sums_from)
        comes = jnp.where(there, self._chunks(place, place + 1), 0)
        return self._summing(self._column, side, self._s.column, self._s.column_ref, comes)

    def _summing(
        self, ring: Ring, side: Number, semaphores: Semaphores, slots: Ref, comes: Any
    ) -> Channel:
        to = self._direction(side)
        return Channel(ring, to, semaphores, (side,), comes, self._count, (slots, (side,)))

    def _outwards(self, ring: Ring, direction: Number) -> Channel:
        """Of finished chunks; messages are numbered as chunks are."""
        return Channel(ring, direction, self._s.outwards, (0,), self._count, longest=0)

    # Our terms, copied to VMEM one chunk ahead; of kinds 0 and 1 for sums of a side, 2 for columns'

    def _fetch(self, kind: Number, chunk: Any) -> None:
        """Starts the copy of our term, if this kind of sum takes that of this chunk."""
        if isinstance(kind, int):
            wanted = self._is_ours(chunk)
        else:  # where sums set out they leave from the operand
            wanted = (self._ahead(kind, chunk) > 0) & (self._behind(kind) > 0)
        only_if(self._is_one(chunk) & wanted, lambda: self._term_copy(kind, chunk).start())

    def _term_copy(self, kind: Number, chunk: Any) -> Any:
        at = (kind, wrap_step(lax.max(chunk, 0), 2))
        source, target = self._of(self._x_ref, chunk), self._s.terms_ref.at[at]
        return pltpu.make_async_copy(source, target, self._s.term_sems.at[at])

    def _term(self, kind: Number, chunk: Any) -> Any:
        self._term_copy(kind, chunk).wait()
        return self._s.terms_ref.at[kind, wrap_step(chunk, 2)]

    # Sums along the row

    def _add(self, side: Number, chunk: Any) -> None:
        """Adds our term to a sum that comes from a side, and sends it on."""
        on = self._on(side)
        number = self._number_on(side, self._behind(side), chunk)

        def begin() -> None:
            self._end_send(side, number - IN_FLIGHT)
            self._send_in(side, self._of(self._x_ref, chunk), chunk, number)

        def add() -> None:
            summed = on.slot(number)
            on.receive(number, summed)
            self._combine((summed, summed, self._term(side, chunk)))
            self._end_send(side, number - IN_FLIGHT)
            self._send_in(side, summed, chunk, number)

        sets_out = self._behind(side) == 0
        only_if(sets_out, begin)
        only_if(~sets_out, add)

    def _send_in(self, side: Number, source: Ref, chunk: Any, number: Any) -> None:
        ahead, rounds = self._ahead(side, chunk), self._round(chunk)

        def send(channel: Channel, number_there: Any) -> None:
            channel = dataclasses.replace(channel, sent=self._sent(side, number))
            channel.send(source, channel.slot(number_there), number_there)

        there = self._number_on(side, self._behind(side) + 1, chunk)
        only_if(ahead == 1, lambda: send(self._here(side), rounds))
        only_if(ahead > 1, lambda: send(self._on(side), there))

    def _sent(self, side: Number, number: Any) -> Any:
        return self._s.on.sent.at[side, wrap_step(number, self._s.on.arrived.shape[-1])]

    def _end_send(self, side: Number, number: Any) -> None:
        """Waits until a sum has left its slot, and gives the slot back to who filled it."""

        def end() -> None:
            on = self._on(side)
            sync.wait(self._sent(side, number), on.slot(number))
            only_if(self._behind(side) > 0, lambda: on.release(number))

        only_if(number >= 0, end)

    # Sums along the column

    def _add_in_column(self, chunk: Any) -> None:
        """Adds what comes from all sides, and sends the sum on; in the middle it is finished."""
        number, term = self._round(chunk), self._term(2, chunk)
        summed = self._summed(number)
        self._end_sums(number - SUMS)
        so_far = summed if wide(summed.dtype) == summed.dtype else self._s.wide_ref
        self._combine((so_far, term))
        comes = (self._row.place > 0, self._row.place < self._last, *self._sums_from)
        channels = (self._here(0), self._here(1), self._along(0), self._along(1))

        def add(channel: Channel) -> None:
            channel.receive(number, channel.slot(number))
            self._combine((so_far, so_far, channel.slot(number)))
            channel.release(number)

        for there, channel in zip(comes, channels, strict=True):
            only_if(there, functools.partial(add, channel))
        if so_far is not summed:
            self._combine((summed, so_far))
        only_if(self._in_middle, lambda: self._finish(chunk, number))
        only_if(~self._in_middle, lambda: self._send_along(number))

    def _send_along(self, number: Any) -> None:
        channel = dataclasses.replace(
            self._along(self._to_middle), sent=self._s.sums_sems.at[wrap_step(number, SUMS)]
        )
        channel.send(self._summed(number), channel.slot(number), number)

    def _finish(self, chunk: Any, number: Any) -> None:
        self._result_copy(chunk, number).start()
        sent = self._s.sums_sems.at[wrap_step(number, SUMS)]
        self._spread(chunk, self._summed(number), sent)

    def _result_copy(self, chunk: Any, number: Any) -> Any:
        place, semaphore = self._of(self._o_ref, chunk), wrap_step(number, SUMS)
        return pltpu.make_async_copy(self._summed(number), place, self._s.result_sems.at[semaphore])

    def _summed(self, number: Any) -> Any:
        return self._s.sums_ref.at[wrap_step(number, SUMS)]

    def _end_sums(self, number: Any) -> None:
        """Waits until a sum has left us."""
        ends = self._also(self._ends_to[0]) + self._also(self._ends_to[1]) + self._sides
        times = jnp.where(self._in_middle, ends, 1)

        def end() -> None:
            sent = self._s.sums_sems.at[wrap_step(number, SUMS)]
            sync.wait(sent, self._summed(number), times=times)
            copy = self._result_copy(jnp.int32(0), number)
            only_if(self._in_middle, copy.wait)

        only_if(number >= 0, end)

    # Finished chunks

    def _spread(self, chunk: Any, source: Ref, sent: Any = None) -> None:
        """Sends a finished chunk of our column on along it, and along our row."""
        place = self._row.place
        to = (place < self._last, place > 0)
        for ring, sides in ((self._column, self._ends_to), (self._row, to)):
            for side, there in enumerate(sides):
                channel = self._outwards(ring, self._direction(side))
                only_if(there, functools.partial(self._push, channel, chunk, source, sent))

    def _push(self, channel: Channel, chunk: Any, source: Ref, sent: Any = None) -> None:
        own = dataclasses.replace(channel, sent=sent)
        own.push(source, self._of(self._o_ref, chunk), chunk)

    def _end_column(self, chunk: Any) -> None:
        """Takes a finished chunk that has come along the column."""
        self._spread(chunk, self._receive(chunk))

    def _pass_on(self, side: Number, chunk: Any) -> None:
        """Takes one that has come along the row."""
        finished, to = self._receive(chunk), self._direction(side)
        goes = self._behind(side) < self._last
        only_if(goes, lambda: self._push(self._outwards(self._row, to), chunk, finished))

    def _receive(self, chunk: Any) -> Any:
        """Waits for a finished chunk, in its place in the result.

        No chunk that is `window` later can have come on the same semaphore: it is finished only
        after we have sent our sum of it, in a later tick than the one in which we wait for this.
        """
        finished = self._of(self._o_ref, chunk)
        self._outwards(self._row, RIGHT).receive(chunk, finished)
        return finished
