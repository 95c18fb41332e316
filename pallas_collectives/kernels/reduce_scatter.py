"""Reduce-scatter: device p ends with the sum (max, min) of everyone's block p.

The all-gather backwards. The sum of a block sets out at the device furthest from its owner and on
its way takes up one term at each device, which adds its own before it passes the sum on. Both ways
round, the owner gets two sums, one from each side, and adds them to its own term:

    step  dev0  dev1  dev2  dev3      terms in the sums under way to a device, its own included,
    0     [11]  [11]  [11]  [11]      for both parts of its block (bidirectional)
    1     [33]  [33]  [33]  [33]
    2     [44]  [44]  [44]  [44]

                     steps       bytes sent per link and direction    scratch
    unidirectional   n-1         (n-1) blocks to the right, 0 left    3 blocks
    bidirectional    floor(n/2)  (n-1)/2 blocks                       6 blocks

The scratch lies in HBM, with at most 2 MiB of VMEM for the tiles being added; or all in VMEM, where
the operands are. A block goes in parts: while one is being added the others are on the wire.

Order and rounding. The sum is own + (from the left) + (from the right), each side's own sum ordered
along the ring: the same on every run. Within a device terms are added in float32 (integers in 32
bits); what goes on the wire is rounded to the operand's dtype once per hop.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.combine import combine
from pallas_collectives.kernels.topology import Group, Lane, Ring, wrap_step

# Slots per lane for sums that arrive. One is being added to and sent on from, one is being received
# into; the third lets our upstream neighbour start before our send from the first has ended.
SLOTS = 3

# By the replay: parts of half a MiB, up to eight, did best on v5e, v5p, v6e and 7x at 1 to 16 MiB.
MOST_PARTS = 8
PART_BYTES = 512 << 10


def ring(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    op: str,
    bidirectional: bool,
    vmem: bool,
    interpret: Any,
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions.
    """
    shape = (*x.shape[:axis], x.shape[axis] // group.size, *x.shape[axis + 1 :])
    blocks = Blocks.of(shape, axis, x.dtype, parts_of(shape, x.dtype))
    lanes = topology.lanes(group.size, bidirectional=bidirectional, parts=blocks.parts)
    return launch.call(
        functools.partial(_ring_kernel, blocks=blocks, lanes=lanes, op=op, vmem=vmem),
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        buffers=[lane_slots(lanes, blocks, x.dtype)],
        scratch_shapes=lane_semaphores(lanes),
        barrier="neighbours",
        name=f"reduce_scatter_{'bidirectional' if bidirectional else 'unidirectional'}",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
    )


def parts_of(shape: tuple[int, ...], dtype: Any) -> int:
    """In how many parts a block is to travel, so that adding one hides behind sending the others.

    What is left to add when the last part arrives is not hidden: more parts, less of that, until a
    part is so small that starting its DMAs takes as long.
    """
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return max(2, min(MOST_PARTS, pl.next_power_of_2(nbytes // PART_BYTES + 1) // 2))


def lane_slots(lanes: tuple[Lane, ...], blocks: Blocks, dtype: Any) -> jax.ShapeDtypeStruct:
    """The slots that `add_on_the_way` takes."""
    return jax.ShapeDtypeStruct((len(lanes), blocks.parts, SLOTS, *blocks.part_shape), dtype)


def lane_semaphores(lanes: tuple[Lane, ...]) -> list[Any]:
    """The send, receive and credit semaphores that `add_on_the_way` takes."""
    streams = len(lanes), lanes[0].parts
    dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
    return [dma(streams), dma((*streams, SLOTS)), regular(streams)]


def _ring_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks: HBM or VMEM
    o_ref: Any,  # one block: HBM or VMEM
    *scratch: Any,  # see add_on_the_way
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    op: str,
    vmem: bool,
) -> None:
    sync.barrier_with_neighbours(ring)
    add_on_the_way(ring, x_ref, o_ref, *scratch, blocks=blocks, lanes=lanes, op=op, vmem=vmem)


def add_on_the_way(
    ring: Ring,
    x_ref: Any,  # n blocks: HBM or VMEM
    o_ref: Any,  # the own block of the result: HBM or VMEM
    slots_ref: Any,  # (lanes, parts, SLOTS, one part): HBM or VMEM; written by upstream neighbours
    send_sems: Any,  # (lanes, parts): own; one send in flight at a time
    recv_sems: Any,  # (lanes, parts, SLOTS): signalled by upstream, once per use of the slot
    credit_sems: Any,  # (lanes, parts): signalled by downstream, once per slot that it frees
    *,
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    op: str,
    vmem: bool,
) -> None:
    """Sends each block's sum towards its owner, adding the own term, and finishes the own block.

    A lane's upstream neighbour may be ahead of us. Its sums of steps s and s+1 may be in flight
    together, so neighbouring steps have slots and semaphores of their own; that of step s+SLOTS
    would overwrite step s's, so it needs a credit, which we give once our send from that slot has
    ended. Credits are given only for slots that will be written again: all are used, and the
    semaphores end at 0.
    """

    def own_term(step: Any, i: int, part: Any) -> Any:
        """Our term of the block whose sum we send at `step`: the furthest first."""
        hops = lanes[i].hops_of(part)
        return blocks.at(x_ref, ring.block(lanes[i].direction * (hops - step)), part)

    def slot(step: Any, i: int, part: Any) -> Any:
        return slots_ref.at[i, part, wrap_step(step, SLOTS)]

    def send(source: Any, step: Any, i: int, part: Any) -> None:
        downstream = ring.peer(lanes[i].direction)
        arrived = recv_sems.at[i, part, wrap_step(step, SLOTS)]
        sync.remote_copy(source, slot(step, i, part), send_sems.at[i, part], arrived, downstream)

    def receive(step: Any, i: int, part: Any) -> None:
        sync.wait(recv_sems.at[i, part, wrap_step(step, SLOTS)], slot(step, i, part))

    def send_own(step: Any, i: int, part: Any) -> None:
        send(own_term(step, i, part), step, i, part)

    def forward(step: Any, i: int, part: Any) -> None:
        receive(step - 1, i, part)
        # The send of step - 1, for we have waited for those before it.
        sync.wait(send_sems.at[i, part], slot(step - 1, i, part))

        @pl.when((step >= 2) & (step - 2 + SLOTS < lanes[i].hops_of(part)))
        def _() -> None:
            upstream = ring.peer(-lanes[i].direction)
            pl.semaphore_signal(credit_sems.at[i, part], 1, device_id=upstream)

        summed = slot(step - 1, i, part)
        combine(op, summed, own_term(step, i, part), summed, vmem=vmem)

        @pl.when(step >= SLOTS)
        def _() -> None:
            pl.semaphore_wait(credit_sems.at[i, part], 1)

        send(summed, step, i, part)

    def finish(part: Any, _: None) -> None:
        """Our own block's part: our term, and the sum that has come on each lane."""
        ends = [lane.hops_of(part) for lane in lanes]
        for i, hops in enumerate(ends):
            pl.when(hops > 0)(functools.partial(receive, hops - 1, i, part))
        sums = [slot(hops - 1, i, part) for i, hops in enumerate(ends)]
        target, own = blocks.at(o_ref, part=part), blocks.at(x_ref, ring.me, part)
        if all(lane.near for lane in lanes):
            combine(op, target, own, *sums, vmem=vmem)
        else:  # two devices: half of the parts come on each lane
            for hops, summed in zip(ends, sums, strict=True):
                add = functools.partial(combine, op, target, own, summed, vmem=vmem)
                pl.when(hops > 0)(add)

    def drain(_: Any, i: int, part: Any) -> None:
        sync.wait(send_sems.at[i, part], slot(0, i, part))

    with jax.named_scope("own_terms"):
        topology.for_each_part(lanes, send_own)
    with jax.named_scope("forward"):
        topology.for_each_step(lanes, forward, start=1)
    with jax.named_scope("finish"):
        lax.fori_loop(0, blocks.parts, finish, None)
        topology.for_each_part(lanes, drain)
