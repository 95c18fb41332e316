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

Line. As the ring both ways, on devices whose first and last share no link: everybody passes on
to the right what comes from the left, and to the left what comes from the right.

    step  dev0    dev1    dev2    dev3      blocks present (line)
    0     [0...]  [.1..]  [..2.]  [...3]
    1     [01..]  [012.]  [.123]  [..23]
    2     [012.]  [0123]  [0123]  [.123]
    3     [0123]  [0123]  [0123]  [0123]

Direct. Every device pushes its block to every other at once: one hop, for small blocks.

             steps      bytes sent per link and direction   VMEM
    ring     n-1        (n-1) blocks to the right, 0 left   none (0 with operands in HBM)
    both     floor(n/2) (n-1)/2 blocks                      none
    line     n-1        at most n-1 blocks                  none
    direct   1          as the wires lie                    none
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.topology import Group, Lane, Ring, wrap_step

# Receive semaphores per lane, of the 500 or so that a TPU has for a kernel. A fast neighbour may
# be so many steps ahead without waiting for us.
WINDOW = 16

# A block goes in parts of whole tiles: while one is passed on, others are on the wire. Eight were
# best, or within 3% of it, for blocks of 32 KiB to 2 MiB by the replay of v5e and v5p.
MOST_PARTS = 8


def ring(
    x: jax.Array,
    group: Group,
    *,
    axis: int,
    bidirectional: bool,
    vmem: bool,
    interpret: Any,
    most_parts: int = MOST_PARTS,
) -> jax.Array:
    """Gathers x along `axis` over a ring; `axis` must be `sliceable` for x's shape."""
    blocks = Blocks.of(x.shape, axis, x.dtype, most_parts)
    lanes = topology.lanes(group.size, bidirectional=bidirectional, parts=blocks.parts)
    return _launch(
        functools.partial(_ring_kernel, blocks=blocks, lanes=lanes, on_line=False),
        group,
        x,
        axis,
        lane_semaphores(lanes),
        barrier="neighbours",
        name=f"all_gather_{'bidirectional' if bidirectional else 'unidirectional'}",
        interpret=interpret,
        vmem=vmem,
    )


def line(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Any) -> jax.Array:
    """Gathers x along `axis` over a line, as `ring`."""
    blocks = Blocks.of(x.shape, axis, x.dtype, MOST_PARTS)
    lanes = topology.line_lanes(group.size, blocks.parts)
    return _launch(
        functools.partial(_ring_kernel, blocks=blocks, lanes=lanes, on_line=True),
        group,
        x,
        axis,
        lane_semaphores(lanes),
        barrier="line",
        name="all_gather_line",
        interpret=interpret,
        vmem=vmem,
    )


def direct(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Any) -> jax.Array:
    """Gathers x along `axis`, each device writing to all others."""
    return _launch(
        functools.partial(_direct_kernel, blocks=Blocks.of(x.shape, axis, x.dtype)),
        group,
        x,
        axis,
        [pltpu.SemaphoreType.DMA] * 2,
        barrier="everyone",
        name="all_gather_direct",
        interpret=interpret,
        vmem=vmem,
    )


def _launch(
    kernel: Callable[..., None],
    group: Group,
    x: jax.Array,
    axis: int,
    semaphores: list[Any],
    **options: Any,
) -> jax.Array:
    """Runs a kernel of (ring, block, gathered blocks, semaphore of a copy, *semaphores)."""
    shape = (*x.shape[:axis], group.size * x.shape[axis], *x.shape[axis + 1 :])
    return launch.call(
        kernel,
        group,
        x,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA, *semaphores],
        wire_bytes=(group.size - 1) * x.nbytes,
        **options,
    )


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
    on_line: bool,
) -> None:
    if on_line:
        sync.barrier_along_line(ring)
        gather = pass_along
    else:
        sync.barrier_with_neighbours(ring)
        gather = pass_on
    own_copy = pltpu.make_async_copy(x_ref, blocks.at(o_ref, ring.me), copy_sem)
    start = own_copy.start
    gather(ring, x_ref, o_ref, *semaphores, meanwhile=start, blocks=blocks, lanes=lanes)
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
    """Sends the own block round the ring and passes on what arrives, until all is there."""
    hops = _Hops(
        ring, o_ref, send_sems, recv_sems, credit_sems, blocks, lanes,
        arrivals=lambda i, part: lanes[i].hops_of(part),
    )  # fmt: skip

    def send_own(step: Any, i: int, part: Any) -> None:
        hops.send(blocks.at(x_ref, part=part), step, i, part)

    def drain(_: Any, i: int, part: Any) -> None:
        count = lanes[i].hops_of(part)
        hops.receive(count - 1, i, part)
        sync.wait(send_sems.at[i, part], blocks.at(x_ref, part=part), times=count)

    with jax.named_scope("own_block"):
        topology.for_each_part(lanes, send_own)
        meanwhile()
    with jax.named_scope("forward"):
        topology.for_each_step(lanes, hops.forward, start=1)
    with jax.named_scope("drain"):
        topology.for_each_part(lanes, drain)


def pass_along(
    ring: Ring,
    x_ref: Any,  # these five: see pass_on
    o_ref: Any,
    send_sems: Any,
    recv_sems: Any,
    credit_sems: Any,
    *,
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """`pass_on` along a line: from one side to the other, as much as there is on that side."""
    behind = [topology.behind(ring, lane) for lane in lanes]
    has_next = [b < ring.size - 1 for b in behind]
    hops = _Hops(
        ring, o_ref, send_sems, recv_sems, credit_sems, blocks, lanes,
        arrivals=lambda i, part: behind[i],
    )  # fmt: skip

    def send_own(step: Any, i: int, part: Any) -> None:
        send = functools.partial(hops.send, blocks.at(x_ref, part=part), step, i, part)
        topology.only_if(has_next[i], send)

    def forward(step: Any, i: int, part: Any) -> None:
        comes = step <= behind[i]
        topology.only_if(comes & has_next[i], lambda: hops.forward(step, i, part))
        topology.only_if(comes & ~has_next[i], lambda: hops.receive(step - 1, i, part))

    def drain(_: Any, i: int, part: Any) -> None:
        topology.only_if(~has_next[i], lambda: hops.receive(ring.size - 2, i, part))
        sends = has_next[i].astype(np.int32) * (behind[i] + 1)
        sync.wait(send_sems.at[i, part], blocks.at(x_ref, part=part), times=sends)

    with jax.named_scope("own_block"):
        topology.for_each_part(lanes, send_own)
        meanwhile()
    with jax.named_scope("forward"):
        topology.for_each_step(lanes, forward, start=1)
    with jax.named_scope("drain"):
        topology.for_each_part(lanes, drain)


class _Hops:
    """Single hops of blocks along lanes, and their semaphores.

    A step's receive has a semaphore of its own: our upstream neighbour may be steps ahead, and
    several of its blocks in flight; on a shared semaphore the later could pass for the earlier.
    On rings of more than `WINDOW` hops semaphores serve again, WINDOW steps later, under credits:
    upstream sends step s only once we have received step s-WINDOW. All credits are used.
    """

    def __init__(
        self,
        ring: Ring,
        o_ref: Any,
        send_sems: Any,
        recv_sems: Any,
        credit_sems: Any,
        blocks: Blocks,
        lanes: tuple[Lane, ...],
        arrivals: Callable[[int, Any], Any],  # how often a part of lane i comes to us
    ) -> None:
        self._ring, self._o_ref = ring, o_ref
        self._sems = send_sems, recv_sems, credit_sems
        self._blocks, self._lanes, self._arrivals = blocks, lanes, arrivals
        self._window = recv_sems.shape[-1]

    def _place(self, step: Any, i: int, part: Any) -> Any:
        """Where we keep what we send at `step`: own first, then what came from upstream."""
        block = self._ring.block(-self._lanes[i].direction * step)
        return self._blocks.at(self._o_ref, block, part)

    def _arrived(self, step: Any, i: int, part: Any) -> Any:
        return self._sems[1].at[i, part, wrap_step(step, self._window)]

    def send(self, source: Any, step: Any, i: int, part: Any) -> None:
        """Sends `source`, the part that our neighbour is to have at `step`."""
        send_sems, _, credit_sems = self._sems
        if self._lanes[i].hops > self._window:

            @pl.when(step >= self._window)
            def _() -> None:
                pl.semaphore_wait(credit_sems.at[i, part], 1)

        downstream = self._ring.peer(self._lanes[i].direction)
        target, arrived = self._place(step, i, part), self._arrived(step, i, part)
        sync.remote_copy(source, target, send_sems.at[i, part], arrived, downstream)

    def receive(self, step: Any, i: int, part: Any) -> None:
        """Waits for what our neighbour sends at `step`: it is what we send at the next."""
        sync.wait(self._arrived(step, i, part), self._place(step + 1, i, part))
        if self._lanes[i].hops > self._window:

            @pl.when(step + self._window < self._arrivals(i, part))
            def _() -> None:
                upstream = self._ring.peer(-self._lanes[i].direction)
                pl.semaphore_signal(self._sems[2].at[i, part], 1, device_id=upstream)

    def forward(self, step: Any, i: int, part: Any) -> None:
        """Receives what we send at `step`, and sends it."""
        self.receive(step - 1, i, part)
        self.send(self._place(step, i, part), step, i, part)


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
