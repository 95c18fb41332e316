"""Ragged all-to-all: rows of runtime-chosen counts from every device to every other.

Direct. Every device sends each other its slice of rows in one DMA, device p first to p+1, so that
at no time two begin with the same receiver. Only the rows that are sent cross the wire. With two
devices, operands [a] and [B, C, D]; device 0 sends nothing to itself and one row to device 1,
device 1 sends two rows to device 0 and one to itself:

    dev0                     dev1
    a -> row 3 of dev1       B C -> rows 0-1 of dev0, D -> row 0 of dev1     push
    [B C . .]                [D . . a]                                       o_ref; . as it was

Ring. For chips that cannot write to all devices. Slices go in chunks of at most 512 KiB, all in
about as many, so that the links are as busy at the end as at first. Chunks go by the shorter side,
and neighbours pass them on (see `relay`); to the opposite device of an even ring half of each goes
either way, and of large arrays more goes the way whose links are less busy. Each device has the
tables of all, so it knows what comes and where it goes. On rings of up to some 19 devices rounds of
chunks overlap; on larger ones they would need too many slots and semaphores.

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
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, dma_semaphores, span
from pallas_collectives.kernels.machinery import launch, relay, sync
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.kernels.machinery.entry import WIDE
from pallas_collectives.kernels.machinery.relay import MAX_WIDTH, SLOT_BYTES
from pallas_collectives.kernels.machinery.sync import PushSemaphores
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring, wrap

CHUNK_BYTES, LEAST_CHUNK_BYTES, LEAST_PIECE_BYTES = 512 << 10, 64 << 10, 16 << 10
# Bytes of an operand from which links are weighed: that is some ten small sums, on the wire a ms.
WEIGHED_BYTES = 32 << 20
_WHOLE = 256  # all of a chunk, in the parts by which it is divided between both ways


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
        chunking=Chunking(of="a slice"),
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
    if on_line:
        chunk_bytes = min(CHUNK_BYTES, relay.line_message_bytes(n))
    else:  # short slices in pieces as well, so that the next hop begins before all of one has come
        chunk_bytes = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, operand.nbytes // (8 * n)))
    farthest = n - 1 if on_line else n // 2
    schedule = relay.Schedule((RIGHT, LEFT), 1, farthest, farthest, overlapping=not on_line)
    if not on_line:
        chunk_bytes = min(chunk_bytes, SLOT_BYTES // math.prod(schedule.slots))
    chunk = min(most, max(1, chunk_bytes // row_bytes))
    many = 2 * math.prod(schedule.slots) + 8 > chips.current().kernel_semaphores
    if not on_line and (many or chunk_bytes < max(LEAST_CHUNK_BYTES, row_bytes)):  # a large ring
        chunk = min(most, max(1, LEAST_CHUNK_BYTES // row_bytes))
        fitting = max(1, SLOT_BYTES // (4 * chunk * row_bytes))
        schedule = relay.Schedule((RIGHT, LEFT), 1, farthest, min(fitting, farthest, MAX_WIDTH))
    rounds = (-(-jnp.clip(all_sizes.max(), 0, most) // chunk)).reshape(1)
    if n % 2 == 0 and not on_line:
        weighed = operand.nbytes >= WEIGHED_BYTES
        parts = parts_right(all_sizes, n, most) if weighed else jnp.full(n, _WHOLE // 2, jnp.int32)
        rounds = jnp.concatenate([rounds, parts])
    message = (chunk, *operand.shape[1:])
    return launch.call(
        functools.partial(
            _ring_kernel,
            schedule=schedule,
            slices=len(all_sizes) // n**2,
            on_line=on_line,
            least=min(chunk, max(1, LEAST_PIECE_BYTES // row_bytes)),
        ),
        group,
        operand,
        output,
        out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
        scalars=(rounds, input_offsets, all_sizes, all_places),
        scratch=Scratch(relay.Scratch.of(schedule, message, operand.dtype, ragged=True)),
        chunking=chunking(most, chunk),
        # A device may neither send nor receive, and end at once.
        barrier=WIDE,
        name="ragged_all_to_all_line" if on_line else "ragged_all_to_all_ring",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=operand.nbytes * max(1, n // 4),
        input_output_aliases={1: 0},
    )


def chunking(most: int, chunk: int) -> Chunking:
    """In what pieces slices of at most `most` rows go, of `chunk` rows each."""
    return Chunking(-(-most // chunk), of="a slice", at_most=True)


# As `ring`, along a line of at most `catalogue.LONGEST_LINE` devices.
line = functools.partial(ring, on_line=True)


def parts_right(all_sizes: jax.Array, n: int, most: int) -> jax.Array:
    """int32[n]: of each sender's rows for the opposite device, how many 256ths go right; n is even.

    Half of them, and more or fewer by how busy the busiest link is that they cross either way: what
    all that cross it turn away from it together makes both ways alike, if there is so much.
    """
    rows = clipped(all_sizes, most).reshape(n, n, -1).sum(2).astype(jnp.float32)
    place, hops = np.arange(n)[:, None], np.arange(n // 2)
    ahead, behind = (place + hops) % n, (place - hops) % n  # devices at so many hops
    opposite = rows[place[:, 0], (place[:, 0] + n // 2) % n]

    def crossing(way: int, senders: np.ndarray) -> jax.Array:
        """[device]: rows on the link that leads from it in a direction, halves of opposite ones."""
        to = rows[place, (place + way * (hops + 1)) % n].at[:, -1].multiply(0.5)
        farther = jnp.cumsum(to[:, ::-1], axis=1)[:, ::-1]  # [sender, hop]
        return farther[senders, hops].sum(1)

    right, left = crossing(1, behind)[ahead].max(1), crossing(-1, ahead)[behind].max(1)
    turning = (opposite[behind].sum(1)[ahead].max(1), opposite[ahead].sum(1)[behind].max(1))
    part = 0.5 + (left - right) / (2 * jnp.maximum(1.0, jnp.maximum(*turning)))
    return jnp.round(_WHOLE * jnp.clip(part, 0, 1)).astype(jnp.int32)


def _for_each_slice(
    first: Number, slices: int, sizes_ref: Ref, most: int, body: Callable[[Any, Any], None]
) -> None:
    """body(slice number, rows) for those of the `slices` from `first` on that are not empty."""

    def one(j: Number) -> None:
        i = first + j
        count = clipped(sizes_ref[i], most)
        pl.when(count > 0)(functools.partial(body, i, count))

    sync.for_each(0, slices, one)


def clipped(size: Number, most: int) -> jax.Array:
    """A slice's rows: no more than either array has."""
    return lax.clamp(np.int32(0), size, np.int32(most))


def start(ref: Ref, offset: Number, size: Number) -> Number:
    """Where a slice begins in an array: at its offset, or as near to it as it fits."""
    return lax.clamp(np.int32(0), offset, np.int32(ref.shape[0]) - size)


def _rows(ref: Ref, offset: Number, size: Number) -> Ref:
    return ref.at[span(start(ref, offset, size), size)]


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


def _wait(semaphore: Semaphore, ref: Ref, _: object, count: Number) -> None:
    sync.wait(semaphore, ref.at[span(0, count)])


def _ring_kernel(
    ring: Ring,
    # SMEM, as the next three: chunks of the largest slice of all; then, on an even ring, (n,): of
    # each sender's rows for the opposite device, how many 256ths go right
    rounds_ref: Ref,
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
    least: int,
) -> None:
    n, chunk = ring.size, np.int32(scratch.slots.slots_ref.shape[2])
    most = min(x_ref.shape[0], o_ref.shape[0])
    slots, rounds = relay.Slots(ring, schedule, scratch.slots), lax.max(rounds_ref[0], np.int32(1))

    def move(
        _: object,
        number: Number,
        hop: Number,
        distance: Number,
        counts: Any,
        first: bool,
        last: bool,
    ) -> Any:
        """One hop of chunk `number` / slices of slice `number` % slices, for a distance each way.

        `counts` are, for each way, the messages relayed and forwarded.
        """

        def one_way(
            way: int, direction: int, relayed: Number, forwarded: Number
        ) -> tuple[Any, Any]:
            sender = ring.block(direction * (1 - hop))
            receiver = ring.block(direction * (distance - hop + 1))
            i = receiver * slices + lax.rem(number, np.int32(slices))
            size = clipped(sizes_ref[sender * (n * slices) + i], most)
            piece = lax.clamp(np.int32(least), lax.div(size + rounds - 1, rounds), chunk)
            begin = lax.div(number, np.int32(slices)) * piece
            whole = lax.clamp(np.int32(0), size - begin, piece)
            if on_line:
                there = relay.on_line(ring, direction, hop, distance)
                count = lax.select(there, whole, np.int32(0))
            else:
                right = _part_right(rounds_ref, sender, whole) if n % 2 == 0 else whole
                skipped = lax.select(
                    2 * distance == n, right if way else whole - right, np.int32(0)
                )
                begin, count = begin + (skipped if way else 0), whole - skipped

            def send(_: object) -> None:
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

    def for_each_slice(sender: Number, receiver: Number, body: Callable[[Any, Any], None]) -> None:
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
        messages = rounds_ref[0] * slices
        if schedule.overlapping:
            counts = relay.for_each_turn(schedule, messages, move, counts)
        else:
            (counts,) = relay.for_each_move([schedule], messages, move, [counts])
    with jax.named_scope("drain"):
        for way, (relayed, forwarded) in enumerate(counts):
            slots.drain(way, relayed, forwarded)
        sync.for_each(1, n, drain)
        for_each_slice(ring.me, ring.me, functools.partial(_wait, scratch.copy_sem, x_ref))


def _part_right(rounds_ref: Ref, sender: Number, rows: Number) -> Number:
    """How many rows of a chunk for the opposite device go right; of halves even senders' are up."""
    up = np.int32(_WHOLE // 2) * lax.rem(sender + 1, np.int32(2))
    return lax.div(rows * rounds_ref[1 + sender] + up, np.int32(_WHOLE))
