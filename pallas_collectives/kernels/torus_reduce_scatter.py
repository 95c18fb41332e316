"""Reduce-scatter and all-reduce over all axes of a torus at once; see `torus` for when who sends.

The all-gather backwards: a stream goes through the axes in the opposite order. In each phase it
reduces, as a ring along that axis, the pieces that the gather's phase moves: first all blocks of
the operand, 1/n_a of them for each device along the axis; then what it has got of these, and so on
down to its own block. All-reduce goes on with the all-gather, with no barrier between: a stream
whose own part is finished sends it on at once, into places that nobody's reduction touches.

                     steps              bytes sent per link and direction
    reduce_scatter   sum of n_a - 1     (n-1)/(2d) blocks
    all_reduce       2 (sum of n_a - 1) (n-1)/d blocks

Scratch: for each hop of a phase, at most `SLOTS`, the piece that it moves. The first phase's are
the largest: 1/n_a of the operand, for the axes with which the parts begin.

Order and rounding. A sum is built up along one axis after the other: own + (from upstream), the
latter ordered along the ring. It is the same on every run. Within a device terms are added in
float32 (integers in 32 bits); each hop rounds once to the operand's dtype.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels import (
    launch,
    sync,
    torus,
    torus_all_gather,
    torus_devices,
    torus_timetable,
)
from pallas_collectives.kernels.combine import combine
from pallas_collectives.kernels.topology import Group, Ring, wrap_step
from pallas_collectives.kernels.torus import Plan
from pallas_collectives.kernels.torus_devices import Field

# Slots of a stream and phase for sums that arrive. One is being added to and sent on from, one is
# being received into; the third lets upstream start before our send from the first has ended.
SLOTS = 3

# A stream that begins along an axis goes in halves, so that adding one hides behind sending the
# other. By the replay of v5e and v5p smaller ones, and those in VMEM, take less time whole.
HALVES_FROM_BYTES = 256 << 10


def reduce_scatter(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Any
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions.
    """
    axes = torus_devices.axes_of(group)
    shape = (*x.shape[:axis], x.shape[axis] // group.size, *x.shape[axis + 1 :])
    view = torus.View.of(shape, axis, x.dtype)
    plan = _plan(axes, view.block, view.at, x.dtype, vmem)
    ones = (1,) * len(axes)
    y = launch.call(
        functools.partial(_scatter_kernel, axes=axes, plan=plan, op=op, vmem=vmem),
        torus_devices.launch_group(group),
        view.into(x, torus_devices.field_sizes(axes)),
        scalars=torus_devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(ones), x.dtype),
        buffers=slots(plan, x.dtype),
        scratch_shapes=semaphores(plan),
        barrier=torus_devices.barrier_key(group),
        name="reduce_scatter_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
    )
    return view.out_of(y, ones)


def all_reduce(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Any) -> jax.Array:
    """Reduces x, of shape (n, whole tiles), over the group."""
    axes = torus_devices.axes_of(group)
    plan = _plan(axes, x.shape[1:], 0, x.dtype, vmem)
    y = launch.call(
        functools.partial(_reduce_kernel, axes=axes, plan=plan, op=op, vmem=vmem),
        torus_devices.launch_group(group),
        x.reshape(plan.shape(torus_devices.field_sizes(axes))),
        scalars=torus_devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(torus_devices.field_sizes(axes)), x.dtype),
        buffers=slots(plan, x.dtype),
        scratch_shapes=[*semaphores(plan), *torus_all_gather.semaphores(plan)],
        barrier=torus_devices.barrier_key(group),
        name="all_reduce_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * x.nbytes * (group.size - 1) // group.size,
    )
    return y.reshape(x.shape)


def _plan(axes: Sequence[Group], block: tuple[int, ...], at: int, dtype: Any, vmem: bool) -> Plan:
    stream_bytes = math.prod(block) * jnp.dtype(dtype).itemsize // (2 * len(axes))
    halves = not vmem and stream_bytes >= HALVES_FROM_BYTES
    return Plan.of(axes, block, at, dtype, chunks=2 if halves else 1)


def slots(plan: Plan, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """The slots that `Scatter` takes: for each bundle, for each phase."""
    return [
        jax.ShapeDtypeStruct(
            (
                bundle.streams,
                min(SLOTS, plan.hops(bundle, phase)),
                *plan.piece_shape(bundle, phase),
            ),
            dtype,
        )
        for bundle in plan.bundles
        for phase in range(len(plan.sizes))
    ]


def semaphores(plan: Plan) -> list[Any]:
    """The send, receive and credit semaphores that `Scatter` takes."""
    bundles, phases = len(plan.bundles), len(plan.sizes)
    streams = max(bundle.streams for bundle in plan.bundles)
    dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
    every = bundles, phases, streams
    return [dma((bundles, streams)), dma((*every, SLOTS)), regular(every)]


def _scatter_kernel(
    _: Ring,
    *refs: Any,  # `torus_devices.tables`, then
    # x_ref: all blocks: HBM or VMEM
    # o_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # scratch: see Scatter
    axes: Sequence[Group],
    plan: Plan,
    op: str,
    vmem: bool,
) -> None:
    rings, numbers, (x_ref, o_ref, *scratch) = torus_devices.seen(axes, refs)
    sync.barrier_with_neighbours(*rings)
    operand, own_block = Field(plan, x_ref, numbers), Field(plan, o_ref)
    own = [0] * len(rings)
    scatter = Scatter(plan, rings, operand, own_block, own, *scratch, op=op, vmem=vmem)
    torus_timetable.run(plan, (scatter, range(len(rings))[::-1]))


def _reduce_kernel(
    _: Ring,
    *refs: Any,  # `torus_devices.tables`, then
    # x_ref: all blocks: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # scratch: see Scatter; then the semaphores of Gather
    axes: Sequence[Group],
    plan: Plan,
    op: str,
    vmem: bool,
) -> None:
    # A neighbour may be gathering while we still reduce: what it writes here, other blocks of o_ref
    # than our own, nobody reads or writes in the reduction.
    rings, numbers, (x_ref, o_ref, *scratch) = torus_devices.seen(axes, refs)
    sync.barrier_with_neighbours(*rings)
    operand, result = Field(plan, x_ref, numbers), Field(plan, o_ref, numbers)
    own = [ring.me for ring in rings]
    scatter = Scatter(plan, rings, operand, result, own, *scratch[:-3], op=op, vmem=vmem)
    gather = torus_all_gather.Gather(plan, rings, result, *scratch[-3:])
    phases = range(len(rings))
    torus_timetable.run(plan, (scatter, phases[::-1]), (gather, phases))


class Scatter:
    """A `torus_timetable.Stage`: sends sums towards their owners, adding own terms; then the own.

    Upstream may be ahead of us. Its sums of hops t and t+1 may be in flight together, so
    neighbouring hops have slots and semaphores of their own; that of hop t+SLOTS would overwrite
    hop t's, so it needs a credit, which we give once our send from that slot has ended. Credits are
    given only for slots that will be written again: all are used, and the semaphores end at 0.
    In the next phase upstream is another device, which may be there while we are in this one: so
    each phase has slots, semaphores and credits of its own. What a phase leaves us stays in the
    slot in which its last sum arrived; the next phase takes its own terms from there.
    """

    def __init__(
        self,
        plan: Plan,
        rings: Sequence[Ring],
        operand: Field,  # all blocks
        result: Field,
        own: Sequence[Any],  # the place of the own block in the result
        *scratch: Any,  # slots; send, receive and credit semaphores, as in Gather
        op: str,
        vmem: bool,
    ) -> None:
        self._plan, self._rings, self._operand, self._result = plan, rings, operand, result
        *slots_refs, self._send_sems, self._recv_sems, self._credit_sems = scratch
        d = len(rings)
        self._slots_refs = [slots_refs[b * d : b * d + d] for b in range(len(plan.bundles))]
        self._own = own
        self._combine = functools.partial(combine, op, vmem=vmem)

    def begin(self, b: int, phase: int, stream: Any) -> None:
        if phase + 1 < len(self._rings):
            self._finish(b, phase + 1, stream)
        target = self._slot(b, phase, 0, stream)
        push = functools.partial(self._send, b, phase, 0, stream)
        self._with_term(b, phase, 0, stream, target, push)

    def go_on(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        self._receive(b, phase, hop - 1, stream)
        # The send of hop - 1, for we have waited for those before it.
        summed = self._slot(b, phase, hop - 1, stream)
        sync.wait(self._send_sems.at[b, stream], summed)
        hops = self._hops(b, phase)
        if hops > SLOTS:

            @pl.when((hop >= 2) & (hop - 2 + SLOTS < hops))
            def _() -> None:
                upstream = self._ring(b, phase).peer(-torus.direction_of(stream))
                pl.semaphore_signal(self._credit_sems.at[b, phase, stream], 1, device_id=upstream)

        self._with_term(b, phase, hop, stream, summed, self._add)
        if hops > SLOTS:

            @pl.when(jnp.asarray(hop) >= SLOTS)
            def _() -> None:
                pl.semaphore_wait(self._credit_sems.at[b, phase, stream], 1)

        self._send(b, phase, hop, stream, summed, self._slot(b, phase, hop, stream))

    def end(self, b: int, stream: Any) -> None:
        self._finish(b, 0, stream)

    def _finish(self, b: int, phase: int, stream: Any) -> None:
        """What a phase leaves us: our term, and the last sum that has come."""
        hops = self._hops(b, phase)
        self._receive(b, phase, hops - 1, stream)
        summed = self._slot(b, phase, hops - 1, stream)
        sync.wait(self._send_sems.at[b, stream], summed)
        if phase:
            self._with_term(b, phase, hops, stream, summed, self._add)
            return

        def finish(target: Any, _: Any) -> None:
            def add(term: Any, so_far: Any) -> None:
                self._combine((target, term, so_far))

            self._with_term(b, 0, hops, stream, summed, add)

        self._result.for_each_piece(self._own, self._plan.bundles[b], stream, finish)

    def _add(self, term: Any, summed: Any) -> None:
        self._combine((summed, term, summed))

    def _hops(self, b: int, phase: int) -> int:
        return self._plan.hops(self._plan.bundles[b], phase)

    def _ring(self, b: int, phase: int) -> Ring:
        return self._rings[self._plan.bundles[b].order[phase]]

    def _with_term(
        self,
        b: int,
        phase: int,
        hop: Any,
        stream: Any,
        slot: Any,
        body: Callable[[Any, Any], None],
    ) -> None:
        """body(term, its part of a slot): our terms of the sum that we send at a hop.

        First that of the furthest device, our own last. A term is in pieces if the operand is.
        """
        bundle, hops = self._plan.bundles[b], self._hops(b, phase)
        place: list[Any] = [None] * len(self._rings)
        ahead = torus.direction_of(stream) * (hops - hop)
        axis = bundle.order[phase]
        place[axis] = self._ring(b, phase).block(ahead)
        if phase + 1 < len(self._rings):
            before = self._slot(b, phase + 1, self._hops(b, phase + 1) - 1, stream)
            body(self._plan.blocks(before, place), slot)
            return

        def with_piece(term: Any, here: Sequence[Any]) -> None:
            inside = [*here[:axis], 0, *here[axis + 1 :]]
            body(term, self._plan.blocks(slot, inside))

        self._operand.for_each_piece(place, bundle, stream, with_piece)

    def _slot(self, b: int, phase: int, hop: Any, stream: Any) -> Any:
        slots_ref = self._slots_refs[b][phase]
        return slots_ref.at[stream, wrap_step(hop, slots_ref.shape[1])]

    def _send(self, b: int, phase: int, hop: Any, stream: Any, source: Any, target: Any) -> None:
        arrived = self._recv_sems.at[b, phase, stream, wrap_step(hop, SLOTS)]
        downstream = self._ring(b, phase).peer(torus.direction_of(stream))
        sync.remote_copy(source, target, self._send_sems.at[b, stream], arrived, downstream)

    def _receive(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        arrived = self._recv_sems.at[b, phase, stream, wrap_step(hop, SLOTS)]
        sync.wait(arrived, self._slot(b, phase, hop, stream))
