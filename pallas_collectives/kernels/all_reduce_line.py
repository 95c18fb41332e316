"""All-reduce on a line of devices: sums towards its middle, and back out, both at once.

Chunk by chunk, each device adds its term to the sum that comes from outside and sends it on towards
the middle. The middle device adds the sums of both sides, and the finished chunk goes back the same
way. So every link carries the operand once in either direction, the least that any all-reduce loads
the links of a line with. (A reduce-scatter and an all-gather load them with up to (n-1)/n of the
operand twice, one way, while the other way idles.)

One chunk on five devices; the terms in the sum that each device holds:

    step  dev0     dev1     dev2     dev3     dev4
    0     [0....]  [.1...]  [..2..]  [...3.]  [....4]
    1     [0....]  [01...]  [..2..]  [...34]  [....4]
    2     [0....]  [01...]  [01234]  [...34]  [....4]
    3     [0....]  [01234]  [01234]  [01234]  [....4]
    4     [01234]  [01234]  [01234]  [01234]  [01234]

             steps                 bytes sent per link and direction    scratch
    line     2 floor(n/2), each    the operand                          22 chunks in VMEM
             chunk

A chunk is 16 or 32 KiB or so (`chunk_bytes`), whatever the operand. Sums arrive in VMEM, are added
to there, and leave from there; finished chunks go straight to their place in each device's result.

Order and rounding. Each side's sum begins at the end of the line; the middle device adds
left + own + right. Terms are added in float32 (integers in 32 bits); what goes on the wire is
rounded to the operand's dtype once per hop. All devices get the same bits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Copy, DType, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import LANES, Blocks, Chunking
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.kernels.machinery.combine import combine
from pallas_collectives.kernels.reduce_scatter import one_axis
from pallas_collectives.kernels.torus import reduce_scatter as torus
from pallas_collectives.kernels.torus.grid_chunks import SKEW
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, only_if, wrap_step

# Sends of sums that may be under way when the next one starts.
IN_FLIGHT = 4

# Slots for sums that arrive from a side: those of SKEW ticks on the wire, those IN_FLIGHT onwards,
# the one being added to, and one while its credit travels.
SLOTS = SKEW + IN_FLIGHT + 2

# A chunk is what a link carries in so long, as a power of two. By the replay of lines of 4 and 8 on
# v5e and v6e smaller ones cost the core more time than the wire; while larger ones fill the line,
# and while they drain, links idle.
CHUNK_SECONDS = 0.4e-6
SMALLEST_CHUNK = 16 << 10
CHUNKS_PER_DEVICE = 8


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays. Sides: 0 for what comes from the left, 1 from the
    right.
    """

    slots_ref: Ref  # (2 sides, SLOTS, chunk): VMEM; written by the neighbours further out
    terms_ref: Ref  # (2, chunk): VMEM; our terms, on their way from HBM ahead of their sums
    term_sems: Semaphore  # (2,): own; a term is here
    result_sems: Semaphore  # (SLOTS,): own, in the middle; a finished chunk is in its place
    # (2 sides) channels inwards; `sent`: (2 sides, SLOTS): own; a sum has left its slot, in the
    #   middle to either side
    inwards: Semaphores
    # The channel outwards; `sent`: own; finished chunks have left, all drained at the end. Nobody
    #   gives credits: see `_Device._receive_finished`.
    outwards: Semaphores

    @classmethod
    def of(cls, chunk: tuple[int, ...], dtype: DType, n: int) -> "Scratch":
        """What to allocate."""
        dma = pltpu.SemaphoreType.DMA
        return cls(
            pltpu.VMEM((2, SLOTS, *chunk), dtype),
            pltpu.VMEM((2, *chunk), dtype),
            dma((2,)),
            dma((SLOTS,)),
            Semaphores.of(2, window=SLOTS, sent=(2, SLOTS)),
            Semaphores(dma((1,)), dma((1, _ticks_out_and_back(n) + 1)), None),
        )


def line(
    x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Interpret, **packed: Any
) -> jax.Array:
    """Reduces x over a line; its last two dimensions are whole tiles.

    Of a number of tiles that cannot be cut into chunks XLA makes one that can: two passes more.
    `packed` is a `codec` for what travels; then x is n blocks, and goes by section by section, as
    over a torus of one axis, which loads links no more.
    """
    if packed:
        options: dict[str, Any] = {"op": op, "vmem": vmem, "interpret": interpret, **packed}
        alone = one_axis(group, line=True)
        return torus.all_reduce(x, alone, name="all_reduce_line", **options)
    chunks = chunks_of(x.shape, x.dtype, group.size)
    if chunks.nbytes(x.dtype) > 2 * chunk_bytes() * chunks.chunks:
        whole = chunk_bytes() // jnp.dtype(x.dtype).itemsize
        cut = jnp.pad(x.reshape(-1), (0, -x.size % whole)).reshape(1, -1, LANES)
        y = line(cut, group, op=op, vmem=vmem, interpret=interpret)
        return y.reshape(-1)[: x.size].reshape(x.shape)
    device = functools.partial(_Device, chunks=chunks, op=op, vmem=vmem)
    return launch.call(
        lambda *refs: device(*refs).run(),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=Scratch.of(chunks.chunk_shape, x.dtype, group.size),
        barrier="line",
        prepare=None if vmem else lambda *refs: device(*refs).prepare(),
        name="all_reduce_line",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes,
        chunking=Chunking(chunks.chunks, of="the operand"),
    )


def chunks_of(shape: tuple[int, ...], dtype: DType, n: int) -> Blocks:
    """How an operand is cut."""
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    fine = min(CHUNKS_PER_DEVICE * n, nbytes // SMALLEST_CHUNK)
    return Blocks.of(shape, 0, dtype, max(1, nbytes // chunk_bytes(), fine))


def chunk_bytes() -> int:
    """How large a chunk is on the chip of the mesh in scope: 16 KiB on v4 and v5e, else 32 KiB."""
    return 1 << int(math.log2(CHUNK_SECONDS * chips.current().link_bandwidth))


def steps(place: Number, n: int) -> tuple[Any, Any]:
    """The step in which a place adds its term to a chunk, and that in which it holds the whole sum.

    They lie as far before and behind the middle's own step, n // 2, as the place lies from it.
    """
    hops: Any = abs(place - n // 2)
    return n // 2 - hops, n // 2 + hops


def _ticks_out_and_back(n: int) -> int:
    return SKEW * 2 * (n // 2)


class _Device:
    """A device of the line.

    It adds its term to chunk c in tick c + SKEW `adds`, and passes finished chunk c on in tick
    c + SKEW `ends`, by its `steps`. All that a tick waits for was sent in an earlier one, credits
    too: so nobody waits for ever.
    """

    def __init__(
        self,
        ring: Ring,
        x_ref: Ref,  # own operand: HBM or VMEM
        o_ref: Ref,  # result: HBM or VMEM; written by the neighbour further in, in the middle by us
        scratch: Scratch,
        *,
        chunks: Blocks,
        op: str,
        vmem: bool,
    ) -> None:
        n, self._middle = ring.size, ring.size // 2
        self._adds, self._ends = steps(ring.place, n)
        self._in_middle = ring.place == self._middle
        self._at_end = (ring.place == 0) | (ring.place == n - 1) & ~self._in_middle
        on_left = ring.place < self._middle
        self._side = jnp.where(on_left, 0, 1)
        inwards = jnp.where(on_left, RIGHT, LEFT)
        self._ring, self._x_ref, self._o_ref, self._s = ring, x_ref, o_ref, scratch
        self._chunks, self._op, self._vmem = chunks, op, vmem
        self._count = chunks.chunks
        self._inwards = self._sums(inwards, self._side)
        # In the middle both sides' sums arrive; of two devices there is one side.
        self._both = [self._sums(RIGHT, 0), self._sums(LEFT, 1)][: 1 + (self._middle < n - 1)]
        self._outwards = self._finished(-inwards)

    def _sums(self, direction: Number, side: Number) -> Channel:
        slots = self._s.slots_ref, (side,)
        count = self._count
        return Channel(self._ring, direction, self._s.inwards, (side,), count, count, slots)

    def _finished(self, direction: Number) -> Channel:
        return Channel(self._ring, direction, self._s.outwards, (0,), self._count, longest=0)

    def prepare(self) -> Callable[[], None]:
        """Before the barrier."""
        self._fetch_term(jnp.int32(0))
        return lambda: None

    def run(self) -> None:
        """Behind it."""

        def tick(time: Number, _: None) -> None:
            self._send_sum(time - SKEW * self._adds)
            self._receive_finished(time - SKEW * self._ends)

        ticks = self._count + _ticks_out_and_back(self._ring.size)
        with jax.named_scope("sum_and_return"):
            lax.fori_loop(0, ticks, tick, None)
        with jax.named_scope("drain"):
            for last in range(IN_FLIGHT, 0, -1):
                self._end_sends(jnp.int32(self._count - last))
            passed_on = (~self._in_middle & ~self._at_end).astype(jnp.int32) * self._count
            self._outwards.wait_sent(self._of(self._o_ref, jnp.int32(0)), times=passed_on)

    def _of(self, ref: Ref, chunk: Number) -> Ref:
        return self._chunks.at(ref, chunk=chunk)

    # Our terms, copied to VMEM one ahead of the sum that they are added to

    def _fetch_term(self, chunk: Number) -> None:
        """Starts the copy of our term of a chunk; at the ends, sums set out from the operand."""
        if not self._vmem:
            wanted = ~self._at_end & (chunk < self._count)
            only_if(wanted, lambda: self._term_copy(chunk).start())

    def _term_copy(self, chunk: Number) -> Copy:
        at = wrap_step(chunk, 2)
        target, semaphore = self._s.terms_ref.at[at], self._s.term_sems.at[at]
        return pltpu.make_async_copy(self._of(self._x_ref, chunk), target, semaphore)

    def _term(self, chunk: Number) -> Ref:
        if self._vmem:
            return self._of(self._x_ref, chunk)
        self._term_copy(chunk).wait()
        return self._s.terms_ref.at[wrap_step(chunk, 2)]

    # Sums, on their way in

    def _send_sum(self, chunk: Number) -> None:
        """Adds our term to a chunk, and sends the sum on."""
        ours = (chunk >= 0) & (chunk < self._count)
        only_if(ours & self._at_end, lambda: self._begin(chunk))
        only_if(ours & ~self._at_end & ~self._in_middle, lambda: self._add(chunk))
        only_if(ours & self._in_middle, lambda: self._finish(chunk))

    def _begin(self, chunk: Number) -> None:
        self._end_sends(chunk - IN_FLIGHT)
        self._send_in(self._of(self._x_ref, chunk), chunk)

    def _add(self, chunk: Number) -> None:
        self._fetch_term(chunk + 1)  # into the buffer of the term before this one
        summed = self._inwards.slot(chunk)
        self._inwards.receive(chunk, summed)
        combine(self._op, (summed, summed, self._term(chunk)), vmem=True)
        self._end_sends(chunk - IN_FLIGHT)
        self._send_in(summed, chunk)

    def _finish(self, chunk: Number) -> None:
        """In the middle: adds both sides' sums, keeps the finished chunk and sends it out."""
        self._fetch_term(chunk + 1)
        left, *right = (channel.slot(chunk) for channel in self._both)
        for channel in self._both:
            channel.receive(chunk, channel.slot(chunk))
        combine(self._op, (left, left, self._term(chunk), *right), vmem=True)
        self._end_sends(chunk - IN_FLIGHT)
        self._result_copy(chunk).start()
        for side, channel in enumerate(self._both):
            out = self._finished(-channel.direction)
            self._push(out, left, self._of(self._o_ref, chunk), chunk, side)

    def _send_in(self, source: Ref, chunk: Number) -> None:
        """Sends a sum to a slot of the neighbour further in, once it is free."""
        self._inwards.wait_until_free(chunk)
        self._push(self._inwards, source, self._inwards.slot(chunk), chunk, self._side)

    def _push(
        self, channel: Channel, source: Ref, target: Ref, chunk: Number, side: Number
    ) -> None:
        """Sends from a slot: it has a semaphore of its own, as others may leave before it."""
        dataclasses.replace(channel, sent=self._sent(side, chunk)).push(source, target, chunk)

    def _sent(self, side: Number, chunk: Number) -> Semaphore:
        return self._s.inwards.sent.at[side, wrap_step(chunk, SLOTS)]

    def _end_sends(self, chunk: Number) -> None:
        """Waits until a chunk has left its slot, and gives the slot back to who filled it."""
        number = lax.max(chunk, 0)

        def in_middle() -> None:
            self._result_copy(number).wait()
            for side, channel in enumerate(self._both):
                sync.wait(self._sent(side, number), channel.slot(number))
            for channel in self._both:
                channel.release(chunk)

        def elsewhere() -> None:
            sync.wait(self._sent(self._side, number), self._inwards.slot(number))
            only_if(~self._at_end, lambda: self._inwards.release(chunk))

        only_if((chunk >= 0) & self._in_middle, in_middle)
        only_if((chunk >= 0) & ~self._in_middle, elsewhere)

    def _result_copy(self, chunk: Number) -> Copy:
        semaphore = self._s.result_sems.at[wrap_step(chunk, SLOTS)]
        place = self._of(self._o_ref, chunk)
        return pltpu.make_async_copy(self._both[0].slot(chunk), place, semaphore)

    # Finished chunks, on their way out

    def _receive_finished(self, chunk: Number) -> None:
        """Waits for a finished chunk, in its place in the result, and passes it on.

        The neighbour further in cannot have sent chunk c + window, on the same semaphore, before we
        wait for c: the middle finishes that chunk only after we have sent our sum of it, and our
        tick for that is later than the one in which we wait for c.
        """
        arrives = (chunk >= 0) & (chunk < self._count) & ~self._in_middle

        def pass_on() -> None:
            finished = self._of(self._o_ref, chunk)
            self._outwards.receive(chunk, finished)
            only_if(~self._at_end, lambda: self._outwards.push(finished, finished, chunk))

        only_if(arrives, pass_on)
