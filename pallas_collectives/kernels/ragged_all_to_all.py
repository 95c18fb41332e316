"""Ragged all-to-all: rows of runtime-chosen counts from every device to every other.

Direct. Every device sends each other its slice of rows in one DMA, device p first to p+1, so that
at no time two begin with the same receiver. Only the rows that are sent cross the wire. With two
devices, operands [a] and [B, C, D]; device 0 sends nothing to itself and one row to device 1,
device 1 sends two rows to device 0 and one to itself:

    dev0                     dev1
    a -> row 3 of dev1       B C -> rows 0-1 of dev0, D -> row 0 of dev1     push
    [B C . .]                [D . . a]                                       o_ref; . as it was

             hops   bytes sent per device   scratch
    direct   1      the rows sent           none

Who knows what. A slice's sender has its size and both its offsets, its receiver its size alone, in
`recv_sizes`; that those agree with the senders' `send_sizes` is the caller's part, as in lax: no
device can check it alone, and one that waits for rows that nobody sends waits for ever. So what is
done to sizes must be the same on both sides, and may not depend on offsets: sizes are clipped to
[0, min(rows of operand, rows of output)], and a slice that begins or ends out of range is moved to
where it fits, as `jax.lax.dynamic_slice` does. No DMA ever leaves its array.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync
from pallas_collectives.kernels.topology import Group, Ring, wrap


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
    interpret: Any,
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
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        barrier="everyone",
        name="ragged_all_to_all_direct",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=operand.nbytes,
        input_output_aliases={1: 0},
    )


def _direct_kernel(
    ring: Ring,
    input_offsets_ref: Any,  # (n * slices,): SMEM, as the next three
    send_sizes_ref: Any,
    output_offsets_ref: Any,
    recv_sizes_ref: Any,
    x_ref: Any,  # (rows, ...): HBM or VMEM
    _: Any,  # the buffer of o_ref, with the rows that stay where none are received
    o_ref: Any,  # (rows', ...): HBM or VMEM
    copy_sem: Any,  # own; the rows that we send to ourselves
    send_sem: Any,  # own; the rows that we send to others
    recv_sem: Any,  # the rows that others send us
    *,
    slices: int,
) -> None:
    # One receive semaphore serves all: nothing is read before every row has arrived. A device may
    # receive nothing and be done at once, so the barrier is among everyone: see sync.
    n = ring.size
    largest = np.int32(min(x_ref.shape[0], o_ref.shape[0]))

    def rows(ref: Any, start: Any, count: Any) -> Any:
        last = np.int32(ref.shape[0]) - count
        return ref.at[pl.ds(lax.clamp(np.int32(0), start, last), count)]

    def for_each_slice(position: Any, sizes_ref: Any, body: Any) -> None:
        """body(slice number, rows) for the slices of a peer that are not empty."""

        def one(j: Any) -> None:
            i = position * slices + j
            count = lax.clamp(np.int32(0), sizes_ref[i], largest)
            pl.when(count > 0)(functools.partial(body, i, count))

        sync.for_each(0, slices, one)

    def copy_to_self(i: Any, count: Any) -> None:
        source = rows(x_ref, input_offsets_ref[i], count)
        pltpu.make_async_copy(source, rows(o_ref, output_offsets_ref[i], count), copy_sem).start()

    def push(distance: Any) -> None:
        receiver = wrap(ring.me + distance, n)

        def send(i: Any, count: Any) -> None:
            source = rows(x_ref, input_offsets_ref[i], count)
            target = rows(o_ref, output_offsets_ref[i], count)
            sync.remote_copy(source, target, send_sem, recv_sem, ring.device_id(receiver))

        for_each_slice(receiver, send_sizes_ref, send)

    def wait(semaphore: Any, ref: Any, _: Any, count: Any) -> None:
        sync.wait(semaphore, ref.at[pl.ds(0, count)])

    def drain(distance: Any) -> None:
        peer = wrap(ring.me + distance, n)
        for_each_slice(peer, recv_sizes_ref, functools.partial(wait, recv_sem, o_ref))
        for_each_slice(peer, send_sizes_ref, functools.partial(wait, send_sem, x_ref))

    sync.barrier_with_everyone(ring)
    with jax.named_scope("push"):
        sync.for_each(1, n, push)
        for_each_slice(ring.me, send_sizes_ref, copy_to_self)
    with jax.named_scope("drain"):
        sync.for_each(1, n, drain)
        for_each_slice(ring.me, send_sizes_ref, functools.partial(wait, copy_sem, x_ref))
