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

A chunk is 32 KiB or so, whatever the operand. Sums arrive in VMEM, are added to there, and leave
from there; finished chunks go straight to their place in each device's result.

Order and rounding. Each side's sum begins at the end of the line; the middle device adds
left + own + right. Terms are added in float32 (integers in 32 bits); what goes on the wire is
rounded to the operand's dtype once per hop. All devices get the same bits.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.combine import combine
from pallas_collectives.kernels.topology import LEFT, RIGHT, Group, Ring, only_if

# Ticks between a device's turn with a chunk and the next device's: as long as a chunk's time on the
# wire and the latency of a hop together, so that nobody waits for what is only just arriving.
SKEW = 4

# Sends of sums that may be under way when the next one starts.
IN_FLIGHT = 4

# Slots for sums that arrive from a side: those of SKEW ticks on the wire, those IN_FLIGHT onwards,
# the one being added to, and one while its credit travels.
SLOTS = SKEW + IN_FLIGHT + 2

LARGEST_CHUNK = 32 << 10
SMALLEST_CHUNK = 16 << 10
# While the line fills and drains, links idle: so long as a few chunks for each device.
CHUNKS_PER_DEVICE = 8


class Scratch(NamedTuple):
    """A kernel's scratch. Sides: 0 for what comes from the left, 1 from the right."""

    slots_ref: Any  # (2 sides, SLOTS, chunk): VMEM; written by the neighbours further out
    terms_ref: Any  # (2, chunk): VMEM; our terms, on their way from HBM ahead of their sums
    term_sems: Any  # (2,): own; a term is here
    result_sems: Any  # (SLOTS,): own, in the middle; a finished chunk is in its place
    send_sems: Any  # (2 sides, SLOTS): own; a sum has left its slot, in the middle to either side
    recv_sems: Any  # (2 sides, SLOTS): a sum is here; signalled by the neighbour further out
    credit_sem: Any  # a slot of the neighbour further in is free; signalled by it
    return_sem: Any  # own; finished chunks have left, all drained at the end
    # (window,): a finished chunk is here; signalled by the neighbour further in, in turn
    finished_sems: Any


def line(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Any) -> jax.Array:
    """Reduces x over a line; its last two dimensions are whole tiles."""
    chunks = chunks_of(x.shape, x.dtype, group.size)
    chunk = chunks.part_shape
    dma = pltpu.SemaphoreType.DMA
    return launch.call(
        functools.partial(_line_kernel, chunks=chunks, op=op, vmem=vmem),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=Scratch(
            slots_ref=pltpu.VMEM((2, SLOTS, *chunk), x.dtype),
            terms_ref=pltpu.VMEM((2, *chunk), x.dtype),
            term_sems=dma((2,)),
            result_sems=dma((SLOTS,)),
            send_sems=dma((2, SLOTS)),
            recv_sems=dma((2, SLOTS)),
            credit_sem=pltpu.SemaphoreType.REGULAR,
            return_sem=dma,
            finished_sems=dma((_ticks_out_and_back(group.size) + 1,)),
        ),
        barrier="line",
        name="all_reduce_line",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes,
    )


def chunks_of(shape: tuple[int, ...], dtype: Any, n: int) -> Blocks:
    """How an operand is cut."""
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    fine = min(CHUNKS_PER_DEVICE * n, nbytes // SMALLEST_CHUNK)
    return Blocks.of(shape, 0, dtype, max(1, nbytes // LARGEST_CHUNK, fine))


def _ticks_out_and_back(n: int) -> int:
    return SKEW * 2 * (n // 2)


def _line_kernel(
    ring: Ring,
    x_ref: Any,  # own operand: HBM or VMEM
    o_ref: Any,  # result: HBM or VMEM; written by the neighbour further in, in the middle by us
    *scratch: Any,  # see Scratch
    chunks: Blocks,
    op: str,
    vmem: bool,
) -> None:
    device = _Device(ring, x_ref, o_ref, Scratch(*scratch), chunks, op, vmem)
    device.fetch_term(jnp.int32(0))
    sync.barrier_along_line(ring)

    def tick(time: Any, _: None) -> None:
        device.send_sum(time - SKEW * (device.deepest - device.depth))
        device.receive_finished(time - SKEW * (device.deepest + device.depth))

    with jax.named_scope("sum_and_return"):
        lax.fori_loop(0, chunks.parts + _ticks_out_and_back(ring.size), tick, None)
    with jax.named_scope("drain"):
        device.drain()


class _Device:
    """A device of the line, `depth` hops from the middle.

    With D hops from the middle to the farther end, it adds its term to chunk c in tick
    c + SKEW (D - depth), and passes finished chunk c on in tick c + SKEW (D + depth). All that a
    tick waits for was sent in an earlier one, credits too: so nobody waits for ever.
    """

    def __init__(
        self,
        ring: Ring,
        x_ref: Any,
        o_ref: Any,
        scratch: Scratch,
        chunks: Blocks,
        op: str,
        vmem: bool,
    ) -> None:
        n, middle = ring.size, ring.size // 2
        self.deepest = middle
        self.depth = lax.abs(ring.place - middle)
        on_left = ring.place < middle
        self._in_middle = ring.place == middle
        self._at_end = (ring.place == 0) | (ring.place == n - 1) & ~self._in_middle
        self._side = jnp.where(on_left, 0, 1)
        inwards = jnp.where(on_left, RIGHT, LEFT)
        self._further_in, self._further_out = ring.peer(inwards), ring.peer(-inwards)
        self._sides = [(0, ring.peer(LEFT)), (1, ring.peer(RIGHT))][: 1 + (middle < n - 1)]
        self._x_ref, self._o_ref, self._chunks, self._s = x_ref, o_ref, chunks, scratch
        self._op, self._vmem, self._count = op, vmem, chunks.parts

    def _of(self, ref: Any, chunk: Any) -> Any:
        return self._chunks.at(ref, part=chunk)

    # Our terms, copied to VMEM one ahead of the sum that they are added to

    def fetch_term(self, chunk: Any) -> None:
        """Starts the copy of our term of a chunk; at the ends, sums set out from the operand."""
        if not self._vmem:
            wanted = ~self._at_end & (chunk < self._count)
            only_if(wanted, lambda: self._term_copy(chunk).start())

    def _term_copy(self, chunk: Any) -> Any:
        at = lax.rem(chunk, 2)
        target, semaphore = self._s.terms_ref.at[at], self._s.term_sems.at[at]
        return pltpu.make_async_copy(self._of(self._x_ref, chunk), target, semaphore)

    def _term(self, chunk: Any) -> Any:
        if self._vmem:
            return self._of(self._x_ref, chunk)
        self._term_copy(chunk).wait()
        return self._s.terms_ref.at[lax.rem(chunk, 2)]

    # Sums, on their way in

    def send_sum(self, chunk: Any) -> None:
        """Adds our term to a chunk, and sends the sum on."""
        ours = (chunk >= 0) & (chunk < self._count)
        only_if(ours & self._at_end, lambda: self._begin(chunk))
        only_if(ours & ~self._at_end & ~self._in_middle, lambda: self._add(chunk))
        only_if(ours & self._in_middle, lambda: self._finish(chunk))

    def _begin(self, chunk: Any) -> None:
        self._end_sends(chunk - IN_FLIGHT)
        self._send_in(self._of(self._x_ref, chunk), chunk)

    def _add(self, chunk: Any) -> None:
        self.fetch_term(chunk + 1)  # into the buffer of the term before this one
        summed = self._arrived(self._side, chunk)
        combine(self._op, (summed, summed, self._term(chunk)), vmem=True)
        self._end_sends(chunk - IN_FLIGHT)
        self._send_in(summed, chunk)

    def _finish(self, chunk: Any) -> None:
        """In the middle: adds both sides' sums, keeps the finished chunk and sends it out."""
        self.fetch_term(chunk + 1)
        left, *right = (self._arrived(side, chunk) for side, _ in self._sides)
        combine(self._op, (left, left, self._term(chunk), *right), vmem=True)
        self._end_sends(chunk - IN_FLIGHT)
        self._result_copy(chunk).start()
        for side, further_out in self._sides:
            sent = self._s.send_sems.at[side, lax.rem(chunk, SLOTS)]
            self._send_out(left, chunk, sent, further_out)

    def _arrived(self, side: Any, chunk: Any) -> Any:
        """The slot of a sum from a side, once it is there.

        The neighbour further out has a credit for a slot before it sends into it again, so what
        arrives on the slot's semaphore is this chunk.
        """
        slot = lax.rem(chunk, SLOTS)
        summed = self._s.slots_ref.at[side, slot]
        sync.wait(self._s.recv_sems.at[side, slot], summed)
        return summed

    def _send_in(self, source: Any, chunk: Any) -> None:
        """Sends a sum to a slot of the neighbour further in.

        Slots are used in turn. Without credits we could be SLOTS chunks ahead of that neighbour,
        and write over a sum that it has not sent on; k credits mean that its first k slots are
        free.
        """
        at = self._side, lax.rem(chunk, SLOTS)
        only_if(chunk >= SLOTS, lambda: pl.semaphore_wait(self._s.credit_sem, 1))
        target, arrived = self._s.slots_ref.at[at], self._s.recv_sems.at[at]
        sync.remote_copy(source, target, self._s.send_sems.at[at], arrived, self._further_in)

    def _end_sends(self, chunk: Any) -> None:
        """Waits until a chunk has left its slot, and gives the slot back to who filled it."""
        slot = lax.rem(lax.max(chunk, 0), SLOTS)

        def left(side: Any) -> None:
            sync.wait(self._s.send_sems.at[side, slot], self._s.slots_ref.at[side, slot])

        def give_back(further_out: Any) -> None:
            wanted_again = chunk + SLOTS < self._count
            credit = self._s.credit_sem
            only_if(wanted_again, lambda: pl.semaphore_signal(credit, 1, device_id=further_out))

        def in_middle() -> None:
            self._result_copy(chunk).wait()
            for side, _ in self._sides:
                left(side)
            for _, further_out in self._sides:
                give_back(further_out)

        def elsewhere() -> None:
            left(self._side)
            only_if(~self._at_end, lambda: give_back(self._further_out))

        only_if((chunk >= 0) & self._in_middle, in_middle)
        only_if((chunk >= 0) & ~self._in_middle, elsewhere)

    def _result_copy(self, chunk: Any) -> Any:
        slot = lax.rem(lax.max(chunk, 0), SLOTS)
        source, semaphore = self._s.slots_ref.at[0, slot], self._s.result_sems.at[slot]
        return pltpu.make_async_copy(source, self._of(self._o_ref, chunk), semaphore)

    # Finished chunks, on their way out

    def _send_out(self, source: Any, chunk: Any, send_sem: Any, further_out: Any) -> None:
        window = self._s.finished_sems.shape[0]
        arrived = self._s.finished_sems.at[lax.rem(chunk, window)]
        sync.remote_copy(source, self._of(self._o_ref, chunk), send_sem, arrived, further_out)

    def receive_finished(self, chunk: Any) -> None:
        """Waits for a finished chunk, in its place in the result, and passes it on.

        The neighbour further in cannot have sent chunk c + window, on the same semaphore, before we
        wait for c: the middle finishes that chunk only after we have sent our sum of it, and our
        tick for that is no earlier than the one in which we wait for c.
        """
        arrives = (chunk >= 0) & (chunk < self._count) & ~self._in_middle

        def pass_on() -> None:
            finished = self._of(self._o_ref, chunk)
            window = self._s.finished_sems.shape[0]
            sync.wait(self._s.finished_sems.at[lax.rem(chunk, window)], finished)
            further_out, left = self._further_out, self._s.return_sem
            only_if(~self._at_end, lambda: self._send_out(finished, chunk, left, further_out))

        only_if(arrives, pass_on)

    def drain(self) -> None:
        """Waits for what is still leaving, so that every semaphore ends at 0."""
        for last in range(IN_FLIGHT, 0, -1):
            self._end_sends(jnp.int32(self._count - last))
        passed_on = (~self._in_middle & ~self._at_end).astype(jnp.int32) * self._count
        sync.wait(self._s.return_sem, self._of(self._o_ref, jnp.int32(0)), times=passed_on)
