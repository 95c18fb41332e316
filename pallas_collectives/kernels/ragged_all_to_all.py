"""Ragged all-to-all: rows of runtime-chosen counts from every device to every other.

Direct. Every device sends each other its slice of rows in one DMA, device p first to p+1, so that
at no time two begin with the same receiver. Only the rows that are sent cross the wire. With two
devices, operands [a] and [B, C, D]; device 0 sends nothing to itself and one row to device 1,
device 1 sends two rows to device 0 and one to itself:

    dev0                     dev1
    a -> row 3 of dev1       B C -> rows 0-1 of dev0, D -> row 0 of dev1     push
    [B C . .]                [D . . a]                                       o_ref; . as it was

Ring. For chips that cannot write to all devices. Slices go in chunks of 64 to 512 KiB, by the
shorter side (to the opposite device of an even ring half of a chunk each way), and neighbours pass
them on (see `relay`). Each device has the tables of all, so it knows what comes and where it goes.

Line. As the ring, but every slice goes the one way that there is on a line.

             hops         bytes sent per device           buffers        tables in SMEM
    direct   1            the rows sent                   none           4 n * slices
    ring     floor(n/2)   those, and all that it relays   at most 16 MiB 2 n^2 * slices
    line     n-1          those, and all that it relays   at most 16 MiB 2 n^2 * slices

Who knows what. Direct: a slice's sender has its size and both its offsets, its receiver its size
alone, in `recv_sizes`; that those agree with the senders' `send_sizes` is the caller's part, as in
lax: no device can check it alone, and one that waits for rows that nobody sends waits for ever. So
what is done to sizes must be the same on both sides, and may not depend on offsets: sizes are
clipped to [0, min(rows of operand, rows of output)], and a slice that begins or ends out of range
is moved to where it fits, as `jax.lax.dynamic_slice` does. No DMA ever leaves its array. The ring
does the same, and goes by what the senders send.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, dma_semaphores
from pallas_collectives.kernels.machinery import launch, relay, sync
from pallas_collectives.kernels.machinery.entry import WIDE
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, wrap

CHUNK_BYTES, LEAST_CHUNK_BYTES = 512 << 10, 64 << 10
SLOT_BYTES = 16 << 20
MAX_WIDTH = 16  # see all_to_all
LARGEST_TABLES = 768 << 10  # of the 1 MiB of SMEM that the smallest TPUs have


class Scratch(NamedTuple):
    """What the ring's kernel takes beside its arrays and tables."""

    slots: relay.Scratch
    copy_sem: Semaphore = dma_semaphores()  # own; the rows that we send to ourselves
    own_sem: Semaphore = dma_semaphores()  # own; the rows of x_ref that we send to others
    # What comes to stay: nothing of it is read before all has come.
    final_sem: Semaphore = dma_semaphores()


def direct(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    group: Group,
    *,
    vmem: bool,
    interpret: Interpret,
) -> jax.Array:
    """Sends slices of `operand`'s rows into `output`, whose buffer becomes the result's.

    Rows are the leading dimension of arrays of three dimensions or more, so that DMAs can begin at
    any of them. Offsets and sizes: int32[n * slices per device], by receiver (`recv_sizes`: by
    sender).
    """
    slices = send_sizes.shape[0] // group.size
    return launch.call(
        functools.partial(_direct_kernel, slices=slices),
        group,
        operand,
        output,
        out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
        scalars=(input_offsets, send_sizes, output_offsets, recv_sizes),
        scratch=PushSemaphores(),
        barrier="everyone",
        name="ragged_all_to_all_direct",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=operand.nbytes,
        input_output_aliases={1: 0},
    )


def ring(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    all_sizes: jax.Array,
    all_places: jax.Array,
    group: Group,
    *,
    vmem: bool,
    interpret: Interpret,
    on_line: bool = False,
) -> jax.Array:
    """As `direct`, round the ring.

    `all_sizes`, `all_places`: int32[n * n * slices]: the `send_sizes` and `output_offsets` of all
    devices of the group, one after the other. Each device must have the same.
    """
    n = group.size
    row_bytes = operand.nbytes // len(operand)
    most = min(len(operand), len(output))
    # Short slices in pieces as well, so that the next hop begins before all of one has come.
    chunk_bytes = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, operand.nbytes // (8 * n)))
    if on_line:
        chunk_bytes = min(CHUNK_BYTES, relay.line_message_bytes(n))
    chunk = min(most, max(1, chunk_bytes // row_bytes))
    farthest = n - 1 if on_line else n // 2
    fitting = max(1, SLOT_BYTES // (4 * chunk * row_bytes))
    width = farthest if on_line else min(fitting, farthest, MAX_WIDTH)
    schedule = relay.Schedule((RIGHT, LEFT), 1, farthest, width)
    chunks = -(-jnp.clip(all_sizes.max(), 0, most) // chunk)
    message = (chunk, *operand.shape[1:])
    return launch.call(
        functools.partial(
            _ring_kernel, schedule=schedule, slices=len(all_sizes) // n**2, on_line=on_line
        ),
        group,
        operand,
        output,
        out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
        scalars=(chunks.reshape(1), input_offsets, all_sizes, all_places),
        scratch=Scratch(relay.Scratch.of(schedule, message, operand.dtype, ragged=True)),
        # A device may neither send nor receive, and end at once.
        barrier=WIDE,
        name="ragged_all_to_all_line" if on_line else "ragged_all_to_all_ring",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=operand.nbytes * max(1, n // 4),
        input_output_aliases={1: 0},
    )


# As `ring`, along a line of at most `catalogue.LONGEST_LINE` devices.
line = functools.partial(ring, on_line=True)


def _for_each_slice(
    first: Any, slices: int, sizes_ref: Ref, most: int, body: Callable[[Any, Any], None]
) -> None:
    """body(slice number, rows) for those of the `slices` from `first` on that are not empty."""

    def one(j: Number) -> None:
        i = first + j
        count = clipped(sizes_ref[i], most)
        pl.when(count > 0)(functools.partial(body, i, count))

    sync.for_each(0, slices, one)


def clipped(size: Number, most: int) -> Any:
    """A slice's rows: no more than either array has."""
    return lax.clamp(np.int32(0), size, np.int32(most))


def start(ref: Ref, offset: Number, size: Number) -> Any:
    """Where a slice begins in an array: at its offset, or as near to it as it fits."""
    return lax.clamp(np.int32(0), offset, np.int32(ref.shape[0]) - size)


def _rows(ref: Ref, offset: Number, size: Any) -> Any:
    return ref.at[pl.ds(start(ref, offset, size), size)]


def _direct_kernel(
    ring: Ring,
    input_offsets_ref: Ref,  # (n * slices,): SMEM, as the next three
    send_sizes_ref: Ref,
    output_offsets_ref: Ref,
    recv_sizes_ref: Ref,
    x_ref: Ref,  # (rows, ...): HBM or VMEM
    o_ref: Ref,  # (rows', ...): HBM or VMEM; rows that nobody sends to are as they were
    scratch: PushSemaphores,  # of rows, from and to ourselves and others
    *,
    slices: int,
) -> None:
    # One receive semaphore serves all: nothing is read before every row has arrived. A device may
    # receive nothing and be done at once, so the barrier is among everyone: see sync.
    n, (copy_sem, send_sem, recv_sem) = ring.size, scratch
    most = min(x_ref.shape[0], o_ref.shape[0])

    def for_each_slice(position: Number, sizes_ref: Ref, body: Callable[[Any, Any], None]) -> None:
        _for_each_slice(position * slices, slices, sizes_ref, most, body)

    def copy_to_self(i: Number, count: Number) -> None:
        source = _rows(x_ref, input_offsets_ref[i], count)
        pltpu.make_async_copy(source, _rows(o_ref, output_offsets_ref[i], count), copy_sem).start()

    def push(distance: Number) -> None:
        receiver = wrap(ring.me + distance, n)

        def send(i: Number, count: Number) -> None:
            source = _rows(x_ref, input_offsets_ref[i], count)
            target = _rows(o_ref, output_offsets_ref[i], count)
            sync.remote_copy(source, target, send_sem, recv_sem, ring.device_id(receiver))

        for_each_slice(receiver, send_sizes_ref, send)

    def drain(distance: Number) -> None:
        peer = wrap(ring.me + distance, n)
        for_each_slice(peer, recv_sizes_ref, functools.partial(_wait, recv_sem, o_ref))
        for_each_slice(peer, send_sizes_ref, functools.partial(_wait, send_sem, x_ref))

    with jax.named_scope("push"):
        sync.for_each(1, n, push)
        for_each_slice(ring.me, send_sizes_ref, copy_to_self)
    with jax.named_scope("drain"):
        sync.for_each(1, n, drain)
        for_each_slice(ring.me, send_sizes_ref, functools.partial(_wait, copy_sem, x_ref))


def _wait(semaphore: Semaphore, ref: Ref, _: Any, count: Any) -> None:
    sync.wait(semaphore, ref.at[pl.ds(0, count)])


def _ring_kernel(
    ring: Ring,
    chunks_ref: Ref,  # (1,): SMEM: chunks of the largest slice of all, as the next three
    input_offsets_ref: Ref,  # (n * slices,)
    sizes_ref: Ref,  # (n * n * slices,): rows of each sender's slices, by receiver
    places_ref: Ref,  # (n * n * slices,): where they begin there
    x_ref: Ref,  # (rows, ...): HBM or VMEM
    o_ref: Ref,  # (rows', ...): HBM or VMEM; rows that nobody sends to are as they were
    scratch: Scratch,
    *,
    schedule: relay.Schedule,
    slices: int,
    on_line: bool,
) -> None:
    n, chunk = ring.size, np.int32(scratch.slots.slots_ref.shape[2])
    most = min(x_ref.shape[0], o_ref.shape[0])
    slots = relay.Slots(ring, schedule, scratch.slots)

    def move(
        _: Any, number: Number, hop: Number, distance: Number, counts: Any, first: bool, last: bool
    ) -> Any:
        """One hop of chunk `number` / slices of slice `number` % slices, for a distance each way.

        `counts` are, for each way, the messages relayed and forwarded.
        """

        def one_way(way: int, direction: int, relayed: Any, forwarded: Any) -> tuple[Any, Any]:
            sender = ring.block(direction * (1 - hop))
            receiver = ring.block(direction * (distance - hop + 1))
            i = receiver * slices + lax.rem(number, np.int32(slices))
            size = clipped(sizes_ref[sender * (n * slices) + i], most)
            begin = lax.div(number, np.int32(slices)) * chunk
            whole = lax.clamp(np.int32(0), size - begin, chunk)
            if on_line:
                there = relay.on_line(ring, direction, hop, distance)
                count = lax.select(there, whole, np.int32(0))
            else:
                # Of an opposite device's rows half go each way, an odd one right from even senders.
                half = lax.div(whole + lax.rem(sender + 1, np.int32(2)), np.int32(2))
                skipped = lax.select(2 * distance == n, half if way else whole - half, np.int32(0))
                begin, count = begin + (skipped if way else 0), whole - skipped

            def send(_: Any) -> None:
                if first:
                    first_row = start(x_ref, input_offsets_ref[i], size) + begin
                    source, sent = x_ref.at[pl.ds(first_row, count)], scratch.own_sem
                else:
                    source, sent = slots.arrived(way, forwarded, count)
                if last:
                    place = places_ref[sender * (n * slices) + i]
                    first_row = start(o_ref, place, size) + begin
                    target, peer = o_ref.at[pl.ds(first_row, count)], ring.peer(direction)
                    sync.remote_copy(source, target, sent, scratch.final_sem, peer)
                else:
                    slots.send(way, relayed, source, sent, count)

            goes = (count > 0).astype(np.int32)
            sync.for_each(0, goes, send)
            return relayed + (0 if last else goes), forwarded + (0 if first else goes)

        return [one_way(i, schedule.directions[i], *counts[i]) for i in range(len(counts))]

    def for_each_slice(sender: Any, receiver: Any, body: Callable[[Any, Any], None]) -> None:
        _for_each_slice((sender * n + receiver) * slices, slices, sizes_ref, most, body)

    def copy_to_self(i: Number, count: Number) -> None:
        source = _rows(x_ref, input_offsets_ref[i - ring.me * (n * slices)], count)
        pltpu.make_async_copy(source, _rows(o_ref, places_ref[i], count), scratch.copy_sem).start()

    def drain(distance: Number) -> None:
        peer = wrap(ring.me + distance, n)
        for_each_slice(peer, ring.me, functools.partial(_wait, scratch.final_sem, o_ref))
        for_each_slice(ring.me, peer, functools.partial(_wait, scratch.own_sem, x_ref))

    for_each_slice(ring.me, ring.me, copy_to_self)
    with jax.named_scope("pass_on"):
        counts: Any = [(np.int32(0), np.int32(0))] * len(schedule.directions)
        rounds = chunks_ref[0] * slices
        (counts,) = relay.for_each_move([schedule], rounds, move, [counts])
    with jax.named_scope("drain"):
        for way, (relayed, forwarded) in enumerate(counts):
            slots.drain(way, relayed, forwarded)
        sync.for_each(1, n, drain)
        for_each_slice(ring.me, ring.me, functools.partial(_wait, scratch.copy_sem, x_ref))
