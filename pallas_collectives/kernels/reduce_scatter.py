"""Reduce-scatter: device p ends with the sum (max, min) of everyone's block p.

The all-gather backwards. The sum of a block sets out at the device furthest from its owner and on
its way takes up one term at each device, which adds its own before it passes the sum on. Both ways
round, the owner gets two sums, one from each side, and adds them to its own term:

    step  dev0  dev1  dev2  dev3      terms in the sums under way to a device, its own included,
    0     [11]  [11]  [11]  [11]      for both parts of its block (bidirectional)
    1     [33]  [33]  [33]  [33]
    2     [44]  [44]  [44]  [44]

On a line, whose first and last share no link, sums set out at its ends, the furthest owner's
first, so that both sides' reach their owners in the last step.

Direct. Every device pushes its term of each block to the block's owner, who adds them up: one hop,
for small blocks.

                     steps       bytes sent per link and direction    scratch
    unidirectional   n-1         (n-1) blocks to the right, 0 left    3 blocks
    bidirectional    floor(n/2)  (n-1)/2 blocks                       6 blocks
    line             n-1         at most n-1 blocks                   6 blocks
    direct           1           as the wires lie                     n blocks

The scratch of a ring, three blocks for each direction however many devices there are, lies in HBM,
with at most 2 MiB of VMEM for the tiles being added; or all in VMEM, where the operands are. A
block goes in parts: while one is being added the others are on the wire.

Order and rounding. The sum is own + (from the left) + (from the right), each side's own sum ordered
along the ring; `direct` adds in the order of the devices: the same on every run. Within a device
terms are added in float32 (integers in 32 bits); what goes on the wire is rounded to the operand's
dtype once per hop.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import launch, sync, topology
from pallas_collectives.kernels.blocks import Blocks
from pallas_collectives.kernels.combine import combine, combine_stack
from pallas_collectives.kernels.topology import Group, Lane, Ring, wrap_step

# Slots per lane for sums that arrive. One is being added to and sent on from, one is being received
# into; the third lets our upstream neighbour start before our send from the first has ended.
SLOTS = 3

# Sends of a lane under way at a time. More would share the wire: all parts would come late and
# together, and be added when the last is there, instead of each while the next comes.
IN_FLIGHT = 3

# A block of k * k * UNIT_BYTES goes in k parts, up to eight: by the replay no other rule did better
# on all of v5e, v5p, v6e and 7x at 192 KiB to 16 MiB. Where it is added in VMEM it goes in four, or
# five where it cannot be quartered.
UNIT_BYTES = 64 << 10
MOST_PARTS = 8
MOST_PARTS_IN_VMEM = 5


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
    shape = _block_shape(x, group, axis)
    blocks = Blocks.of(shape, axis, x.dtype, parts_of(shape, x.dtype, vmem))
    lanes = topology.lanes(group.size, bidirectional=bidirectional, parts=blocks.parts)
    return _launch(
        functools.partial(_ring_kernel, blocks=blocks, lanes=lanes, op=op, vmem=vmem),
        group,
        x,
        jax.ShapeDtypeStruct(shape, x.dtype),
        lane_slots(lanes, blocks, x.dtype),
        lane_semaphores(lanes),
        barrier="neighbours",
        name=f"reduce_scatter_{'bidirectional' if bidirectional else 'unidirectional'}",
        interpret=interpret,
        vmem=vmem,
    )


def line(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Any
) -> jax.Array:
    """Reduces x over a line, as `ring`."""
    shape = _block_shape(x, group, axis)
    blocks = Blocks.of(shape, axis, x.dtype, parts_of(shape, x.dtype, vmem))
    lanes = topology.line_lanes(group.size, blocks.parts)
    return _launch(
        functools.partial(_line_kernel, blocks=blocks, lanes=lanes, op=op, vmem=vmem),
        group,
        x,
        jax.ShapeDtypeStruct(shape, x.dtype),
        lane_slots(lanes, blocks, x.dtype),
        lane_semaphores(lanes),
        barrier="line",
        name="reduce_scatter_line",
        interpret=interpret,
        vmem=vmem,
    )


def direct(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Any
) -> jax.Array:
    """Reduces x with one hop a term, as `ring`."""
    shape = _block_shape(x, group, axis)
    blocks = Blocks.of(shape, axis, x.dtype)
    return _launch(
        functools.partial(_direct_kernel, blocks=blocks, op=op, vmem=vmem),
        group,
        x,
        jax.ShapeDtypeStruct(shape, x.dtype),
        jax.ShapeDtypeStruct((group.size, *shape), x.dtype),
        [pltpu.SemaphoreType.DMA] * 3,
        barrier="everyone",
        name="reduce_scatter_direct",
        interpret=interpret,
        vmem=vmem,
    )


def _block_shape(x: jax.Array, group: Group, axis: int) -> tuple[int, ...]:
    return (*x.shape[:axis], x.shape[axis] // group.size, *x.shape[axis + 1 :])


def _launch(
    kernel: Callable[..., None],
    group: Group,
    x: jax.Array,
    out: jax.ShapeDtypeStruct,
    slots: jax.ShapeDtypeStruct,
    semaphores: list[Any],
    *,
    vmem: bool,
    **options: Any,
) -> jax.Array:
    """Runs a kernel of (ring, operand, result, slots, *semaphores), all arrays in HBM or VMEM."""
    in_vmem = [pltpu.VMEM(a.shape, a.dtype) for a in (x, out, slots)] if vmem else []
    return launch.call(
        functools.partial(_in_vmem_kernel, kernel) if vmem else kernel,
        group,
        x,
        out_shape=out,
        buffers=[] if vmem else [slots],
        scratch_shapes=[*in_vmem, *([pltpu.SemaphoreType.DMA] if vmem else ()), *semaphores],
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
        **options,
    )


def _in_vmem_kernel(
    kernel: Callable[..., None],
    ring: Ring,
    x_ref: Any,  # operand: HBM
    o_ref: Any,  # result: HBM
    x_vmem: Any,
    o_vmem: Any,
    slots_vmem: Any,
    copy_sem: Any,  # own; started and waited for once
    *semaphores: Any,
) -> None:
    """Runs a kernel in VMEM; the operand is on its way there while the barrier waits for others."""
    copy = pltpu.make_async_copy(x_ref, x_vmem, copy_sem)
    copy.start()
    kernel(ring, x_vmem, o_vmem, slots_vmem, *semaphores, operand_is_here=copy.wait)
    pltpu.sync_copy(o_vmem, o_ref)


def parts_of(shape: tuple[int, ...], dtype: Any, vmem: bool) -> int:
    """In how many parts a block is to travel, so that adding one hides behind sending the others.

    What is left to add when the last part arrives is not hidden: more parts, less of that, until a
    part is so small that starting its DMAs takes as long.
    """
    if vmem:
        return MOST_PARTS_IN_VMEM
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return max(1, min(MOST_PARTS, math.isqrt(nbytes // UNIT_BYTES)))


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
    operand_is_here: Callable[[], None] = lambda: None,
) -> None:
    sync.barrier_with_neighbours(ring)
    operand_is_here()
    add_on_the_way(ring, x_ref, o_ref, *scratch, blocks=blocks, lanes=lanes, op=op, vmem=vmem)


def _line_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks: HBM or VMEM
    o_ref: Any,  # one block: HBM or VMEM
    *scratch: Any,  # see add_on_the_way
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    op: str,
    vmem: bool,
    operand_is_here: Callable[[], None] = lambda: None,
) -> None:
    sync.barrier_along_line(ring)
    operand_is_here()
    add_along(ring, x_ref, o_ref, *scratch, blocks=blocks, lanes=lanes, op=op, vmem=vmem)


def _direct_kernel(
    ring: Ring,
    x_ref: Any,  # n blocks: HBM or VMEM
    o_ref: Any,  # one block: HBM or VMEM
    stack_ref: Any,  # (n, one block): HBM or VMEM; layer p is written by device p
    copy_sem: Any,  # own; started and waited for once
    send_sem: Any,  # own; n-1 sends of a block
    recv_sem: Any,  # n-1 blocks, one from each other device
    *,
    blocks: Blocks,
    op: str,
    vmem: bool,
    operand_is_here: Callable[[], None] = lambda: None,
) -> None:
    sync.barrier_with_everyone(ring)
    operand_is_here()
    own_layer = stack_ref.at[ring.me]
    sync.push_to_everyone(
        ring, lambda owner: blocks.at(x_ref, owner), own_layer, copy_sem, send_sem, recv_sem
    )
    with jax.named_scope("combine"):
        combine_stack(op, o_ref, stack_ref, vmem=vmem)


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
    """Sends each block's sum towards its owner, adding the own term, and finishes the own block."""
    hops = _Hops(ring, slots_ref, send_sems, recv_sems, credit_sems, lanes)

    def own_term(step: Any, i: int, part: Any) -> Any:
        """Our term of the block whose sum we send at `step`: the furthest first."""
        count = lanes[i].hops_of(part)
        return blocks.at(x_ref, ring.block(lanes[i].direction * (count - step)), part)

    def send_own(step: Any, i: int, part: Any) -> None:
        hops.end_earlier(step, i, part)
        hops.send(own_term(step, i, part), step, i, part)

    def forward(step: Any, i: int, part: Any) -> None:
        hops.receive(step - 1, i, part)
        summed = hops.slot(step - 1, i, part)
        combine(op, (summed, own_term(step, i, part), summed), vmem=vmem)
        hops.end_earlier(step, i, part)  # that of step - 1 too, from the slot of step - 2

        @pl.when((step >= 2) & (step - 2 + SLOTS < lanes[i].hops_of(part)))
        def _() -> None:
            hops.give_credit(i, part)

        hops.send(summed, step, i, part)

    def finish(turn: Any, _: None) -> None:
        """Our own block's part: our term, and the sum that has come on each lane.

        Together with the part that comes last on the other lane, where there is such a one.
        """
        sums = []
        for part in (turn, turn + turns)[: blocks.parts // turns]:
            target, own = blocks.at(o_ref, part=part), blocks.at(x_ref, ring.me, part)
            ends = [lane.hops_of(part) for lane in lanes]
            for i, count in enumerate(ends):
                pl.when(count > 0)(functools.partial(hops.receive, count - 1, i, part))
            come = [hops.slot(count - 1, i, part) for i, count in enumerate(ends)]
            if all(lane.near for lane in lanes):
                sums.append((target, own, *come))
                continue
            for count, summed in zip(ends, come, strict=True):  # two devices: each on one lane
                add = functools.partial(combine, op, (target, own, summed), vmem=vmem)
                pl.when(count > 0)(add)
        if sums:
            combine(op, *sums, vmem=vmem)

    turns = lanes[0].far_parts if 2 * lanes[0].far_parts == blocks.parts else blocks.parts

    with jax.named_scope("own_terms"):
        topology.for_each_part(lanes, send_own)
    with jax.named_scope("forward"):
        topology.for_each_step(lanes, forward, start=1)
    with jax.named_scope("finish"):
        lax.fori_loop(0, turns, finish, None)
        for i in range(len(lanes)):
            hops.end_last(i)


def add_along(
    ring: Ring,
    x_ref: Any,  # these six: see add_on_the_way
    o_ref: Any,
    slots_ref: Any,
    send_sems: Any,
    recv_sems: Any,
    credit_sems: Any,
    *,
    blocks: Blocks,
    lanes: tuple[Lane, ...],
    op: str,
    vmem: bool,
) -> None:
    """`add_on_the_way` along a line.

    Steps of a lane number the owners, the furthest first. A device sees to step s in the tick that
    comes as many after as there are devices behind it: so what it does in one tick, for the owners
    on either side, arrives together, and its own block's sums come from both sides in the last.
    """
    hops = _Hops(ring, slots_ref, send_sems, recv_sems, credit_sems, lanes)
    behind = [topology.behind(ring, lane) for lane in lanes]
    ahead = [ring.size - 1 - b for b in behind]

    def own_term(step: Any, i: int, part: Any) -> Any:
        """Our term of the block whose sum we send at `step`."""
        return blocks.at(x_ref, ring.block(lanes[i].direction * (ahead[i] - step)), part)

    def send_own(step: Any, i: int, part: Any) -> None:
        hops.end_earlier(step, i, part)
        hops.send(own_term(step, i, part), step, i, part)

    def forward(step: Any, i: int, part: Any) -> None:
        hops.receive(step, i, part)
        summed = hops.slot(step, i, part)
        combine(op, (summed, own_term(step, i, part), summed), vmem=vmem)
        hops.end_earlier(step, i, part)  # that of step - 1 too, from that step's slot

        @pl.when((step >= 1) & (step - 1 + SLOTS <= ahead[i]))
        def _() -> None:
            hops.give_credit(i, part)

        hops.send(summed, step, i, part)

    def see_to(tick: Any, i: int, part: Any) -> None:
        first, step = behind[i] == 0, tick - behind[i]
        topology.only_if(first, lambda: send_own(step, i, part))
        topology.only_if(~first & (step >= 0), lambda: forward(step, i, part))

    def finish(part: Any, _: None) -> None:
        """Our own block's part: our term, and the sum from either side; at an end from one."""
        target, own = blocks.at(o_ref, part=part), blocks.at(x_ref, ring.me, part)
        for i in range(len(lanes)):
            topology.only_if(behind[i] > 0, functools.partial(hops.receive, ahead[i], i, part))
        at_end = (ring.place == 0) | (ring.place == ring.size - 1)
        sums = [hops.slot(ahead[i], i, part) for i in range(len(lanes))]
        topology.only_if(~at_end, lambda: combine(op, (target, own, *sums), vmem=vmem))
        arriving = (behind[0] == 0).astype(np.int32)  # the lane that ends here, with step 0
        summed = hops.slot(0, arriving, part)
        topology.only_if(at_end, lambda: combine(op, (target, own, summed), vmem=vmem))

    def tick(number: Any, _: None) -> None:
        topology.for_each_part(lanes, see_to, number)

    with jax.named_scope("forward"):
        lax.fori_loop(0, ring.size - 1, tick, None)
    with jax.named_scope("finish"):
        lax.fori_loop(0, blocks.parts, finish, None)
        for i in range(len(lanes)):
            topology.only_if(ahead[i] > 0, functools.partial(hops.end_last, i))


class _Hops:
    """Single hops of sums along lanes, and their slots and semaphores.

    A lane's upstream neighbour may be ahead of us. Its sums of steps s and s+1 may be in flight
    together, so neighbouring steps have slots and semaphores of their own; that of step s+SLOTS
    would overwrite step s's, so it needs a credit, which we give once our send from that slot has
    ended. Credits are given only for slots that will be written again: all are used, and the
    semaphores end at 0.

    A lane's sends take turns, part by part and step by step. Before one starts, that IN_FLIGHT
    turns earlier has ended, and with it all before that: also the same part's of the step before,
    as IN_FLIGHT counts at most for a step's parts.
    """

    def __init__(
        self,
        ring: Ring,
        slots_ref: Any,
        send_sems: Any,
        recv_sems: Any,
        credit_sems: Any,
        lanes: tuple[Lane, ...],
    ) -> None:
        self._ring, self._lanes, self._slots_ref = ring, lanes, slots_ref
        self._send_sems, self._recv_sems, self._credit_sems = send_sems, recv_sems, credit_sems
        self._in_flight = min(IN_FLIGHT, lanes[0].parts)

    def slot(self, step: Any, i: Any, part: Any) -> Any:
        """Where the sum that is sent at `step` arrives."""
        return self._slots_ref.at[i, part, wrap_step(step, SLOTS)]

    def send(self, source: Any, step: Any, i: int, part: Any) -> None:
        """Sends a sum downstream, into a slot that is free there."""

        @pl.when(step >= SLOTS)
        def _() -> None:
            pl.semaphore_wait(self._credit_sems.at[i, part], 1)

        downstream = self._ring.peer(self._lanes[i].direction)
        arrived = self._recv_sems.at[i, part, wrap_step(step, SLOTS)]
        sent = self._send_sems.at[i, part]
        sync.remote_copy(source, self.slot(step, i, part), sent, arrived, downstream)

    def receive(self, step: Any, i: int, part: Any) -> None:
        """Waits for the sum that upstream sends at `step`."""
        slot = self.slot(step, i, part)
        sync.wait(self._recv_sems.at[i, part, wrap_step(step, SLOTS)], slot)

    def give_credit(self, i: int, part: Any) -> None:
        """Tells upstream that a slot is free."""
        upstream = self._ring.peer(-self._lanes[i].direction)
        pl.semaphore_signal(self._credit_sems.at[i, part], 1, device_id=upstream)

    def end_earlier(self, step: Any, i: int, part: Any) -> None:
        """Waits, before a part's turn at `step`, for the send that may be in flight no longer."""
        turn = self._lanes[i].turn(part)

        @pl.when((turn >= self._in_flight) | (step >= 1))
        def _() -> None:
            self._end(i, turn - self._in_flight)

    def end_last(self, i: int) -> None:
        """Waits for the sends of a lane that no later one has waited for."""
        lane = self._lanes[i]
        count = lane.near * lane.parts + lane.far_parts
        for back in range(1, 1 + min(self._in_flight, count)):
            self._end(i, lane.far_parts - back)

    def _end(self, i: int, turn: Any) -> None:
        """Waits for the send of a turn; turns below 0 are those of the step before."""
        part = self._lanes[i].part(turn)
        sync.wait(self._send_sems.at[i, part], self.slot(0, i, part))
