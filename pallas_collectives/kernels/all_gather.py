"""All-gather: every device ends with the blocks of all, in order.

Ring. Each device passes on, at every step, the block that the step before brought it:

    step  dev0    dev1    dev2    dev3      blocks present (unidirectional, to the right)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [0..3]  [01..]  [.12.]  [..23]
    2     [0.23]  [01.3]  [012.]  [.123]
    3     [0123]  [0123]  [0123]  [0123]

The bidirectional ring does so both ways at once; on an even ring the opposite device's block comes
half by half from both sides, in the last step:

    step  dev0    dev1    dev2    dev3      blocks present (bidirectional; ' one half)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [01.3]  [012.]  [.123]  [0.23]
    2     [0123]  [0123]  [0123]  [0123]

Direct. Every device pushes its block to every other at once: one hop, for small blocks.

             steps      bytes sent per link and direction   VMEM
    ring     n-1        (n-1) blocks to the right, 0 left   none (0 with operands in HBM)
    both     floor(n/2) (n-1)/2 blocks                      none
    direct   1          as the wires lie                    none
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.topology import Group, Lane, Ring, wrap_step

# Receive semaphores per lane, of the 500 or so that a TPU has for a kernel. A fast neighbour may
# be so many steps ahead without waiting for us.
WINDOW = 16


def ring(
    x: jax.Array, group: Group, *, axis: int, bidirectional: bool, vmem: bool, interpret: Any
) -> jax.Array:
    """Gathers x along `axis` over a ring; `axis` must be `sliceable` for x's shape."""
    # Parts serve only to reach the opposite device of an even ring from both sides.
    parts = 2 if bidirectional and group.size % 2 == 0 else 1
    blocks = Blocks.of(x.shape, axis, x.dtype, parts)
    lanes = topology.lanes(group.size, bidirectional=bidirectional, parts=blocks.parts)
    return launch.call(
        functools.partial(_ring_kernel, blocks=blocks, lanes=lanes),
        group,
        x,
        out_shape=_gathered(x, axis, group.size),
        scratch_shapes=[pltpu.SemaphoreType.DMA, *lane_semaphores(lanes)],
        barrier="neighbours",
        name=f"all_gather_{'bidirectional' if bidirectional else 'unidirectional'}",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )


def direct(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Any) -> jax.Array:
    """Gathers x along `axis`, each device writing to all others."""
    return launch.call(
        functools.partial(_direct_kernel, blocks=Blocks.of(x.shape, axis, x.dtype)),
        group,
        x,
        out_shape=_gathered(x, axis, group.size),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        barrier="everyone",
        name="all_gather_direct",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )


def _gathered(x: jax.Array, axis: int, n: int) -> jax.ShapeDtypeStruct:
    shape = (*x.shape[:axis], n * x.shape[axis], *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def lane_semaphores(lanes: tuple[Lane, ...]) -> list[Any]:
    """The send, receive and credit semaphores that `pass_on` takes."""
    streams = len(lanes), lanes[0].parts
    window = min(WINDOW, max(lane.hops for lane in lanes))
    dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
    return [dma(streams), dma((*streams, window)), regular(streams)]


def _ring_kernel(
    ring: Ring,
    x_ref: Any,  # one block: HBM or VMEM
    o_ref: Any,  # n blocks: HBM or VMEM
    copy_sem: Any,  # own; started and waited for once
    *semaphores: Any,  # see pass_on
    blocks: Blocks,
    lanes: tuple[Lane, ...],
) -> None:
    sync.barrier_with_neighbours(ring)
    own_copy = pltpu.make_async_copy(x_ref, blocks.at(o_ref, ring.me), copy_sem)
    start = own_copy.start
    pass_on(ring, x_ref, o_ref, *semaphores, meanwhile=start, blocks=blocks, lanes=lanes)
    own_copy.wait()


def pass_on(
    ring: Ring,
    x_ref: Any,  # own block, from which the first sends leave
    o_ref: Any,  # n blocks; those of the others are filled
    send_sems: Any,  # (lanes, parts): own; all sends of a part, drained at the end
    recv_sems: Any,  # (lanes, parts, window): signalled by the neighbour upstream, in turn
    credit_sems: Any,  # (lanes, parts): signalled by the neighbour downstream on long rings
    *,
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    meanwhile: Callable[[], None] = lambda: None,  # runs when the first sends are under way
) -> None:
    """Sends the own block round the ring and passes on what arrives, until all is there.

    A step's receive has a semaphore of its own: our upstream neighbour may be steps ahead, and
    several of its blocks in flight; on a shared semaphore the later could pass for the earlier.
    On rings of more than `WINDOW` hops semaphores serve again, WINDOW steps later, under credits:
    upstream sends step s only once we have received step s-WINDOW. All credits are used.
    """
    window = recv_sems.shape[-1]

    def place(step: Any, i: int, part: Any) -> Any:
        """Where we keep what we send at `step`: own first, then what came from upstream."""
        return blocks.at(o_ref, ring.block(-lanes[i].direction * step), part)

    def send(source: Any, step: Any, i: int, part: Any) -> None:
        if lanes[i].hops > window:

            @pl.when(step >= window)
            def _() -> None:
                pl.semaphore_wait(credit_sems.at[i, part], 1)

        downstream = ring.peer(lanes[i].direction)
        arrived = recv_sems.at[i, part, wrap_step(step, window)]
        target = place(step, i, part)
        sync.remote_copy(source, target, send_sems.at[i, part], arrived, downstream)

    def receive(step: Any, i: int, part: Any) -> None:
        # What our neighbour sends at this step is what we send at the next.
        sync.wait(recv_sems.at[i, part, wrap_step(step, window)], place(step + 1, i, part))
        if lanes[i].hops > window:

            @pl.when(step + window < lanes[i].hops_of(part))
            def _() -> None:
                upstream = ring.peer(-lanes[i].direction)
                pl.semaphore_signal(credit_sems.at[i, part], 1, device_id=upstream)

    def send_own(step: Any, i: int, part: Any) -> None:
        send(blocks.at(x_ref, part=part), step, i, part)

    def forward(step: Any, i: int, part: Any) -> None:
        receive(step - 1, i, part)
        send(place(step, i, part), step, i, part)

    def drain(_: Any, i: int, part: Any) -> None:
        hops = lanes[i].hops_of(part)
        receive(hops - 1, i, part)
        sync.wait(send_sems.at[i, part], blocks.at(x_ref, part=part), times=hops)

    with jax.named_scope("own_block"):
        topology.for_each_part(lanes, send_own)
        meanwhile()
    with jax.named_scope("forward"):
        topology.for_each_step(lanes, forward, start=1)
    with jax.named_scope("drain"):
        topology.for_each_part(lanes, drain)


def _direct_kernel(
    ring: Ring,
    x_ref: Any,  # one block: HBM or VMEM
    o_ref: Any,  # n blocks: HBM or VMEM
    copy_sem: Any,  # own; started and waited for once
    send_sem: Any,  # own; n-1 sends of one block
    recv_sem: Any,  # n-1 blocks, one from each other device
    *,
    blocks: Blocks,
) -> None:
    sync.barrier_with_everyone(ring)
    sync.push_to_everyone(ring, x_ref, blocks.at(o_ref, ring.me), copy_sem, send_sem, recv_sem)
