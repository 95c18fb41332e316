"""Reduce-scatter and all-reduce over all axes of a torus at once; see `shares` for when who sends.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.combine import combine
from pallas_collectives.kernels.torus import all_gather, devices, shares, timetable
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.shares import Plan
from pallas_collectives.topology.groups import Group, Ring

# Slots of a stream and phase for sums that arrive. One is being added to and sent on from, one is
# being received into; the third lets upstream start before our send from the first has ended.
SLOTS = 3

# A stream that begins along an axis goes in halves, so that adding one hides behind sending the
# other. By the replay of v5e and v5p smaller ones, and those in VMEM, take less time whole.
HALVES_FROM_BYTES = 256 << 10


class Scratch(NamedTuple):
    """What `Scatter` takes beside its arrays."""

    slots: list[Any]  # for each bundle, for each phase (streams, SLOTS or hops, piece): HBM or VMEM
    semaphores: channels.Semaphores  # (bundles, phases, streams); `sent`: (bundles, streams)

    @classmethod
    def of(cls, plan: Plan, dtype: Any) -> "Scratch":
        """What to allocate."""
        bundles, phases = len(plan.bundles), len(plan.sizes)
        slots = [
            jax.ShapeDtypeStruct(
                (
                    bundle.streams,
                    min(SLOTS, plan.hops(bundle, phase)),
                    *plan.piece_shape(bundle, phase),
                ),
                dtype,
            )
            for bundle in plan.bundles
            for phase in range(phases)
        ]
        streams = max(bundle.streams for bundle in plan.bundles)
        every, sent = (bundles, phases, streams), (bundles, streams)
        return cls(slots, channels.Semaphores.of(*every, window=SLOTS, sent=sent))


class ReduceScratch(NamedTuple):
    """What the all-reduce's kernel takes beside its arrays."""

    scatter: Scratch
    gather: channels.Semaphores  # see torus_all_gather.Gather


def reduce_scatter(
    x: jax.Array, group: Group, *, axis: int, op: str, vmem: bool, interpret: Any
) -> jax.Array:
    """Reduces x over the group and leaves each device its block along `axis`.

    Blocks must be `sliceable` along `axis` and whole tiles in their last two dimensions.
    """
    axes = devices.axes_of(group)
    shape = (*x.shape[:axis], x.shape[axis] // group.size, *x.shape[axis + 1 :])
    view = shares.View.of(shape, axis, x.dtype)
    plan = _plan(axes, view.block, view.at, x.dtype, vmem)
    ones = (1,) * len(axes)
    y = launch.call(
        functools.partial(_scatter_kernel, plan=plan, op=op, vmem=vmem),
        group,
        view.into(x, devices.field_sizes(axes)),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(ones), x.dtype),
        scratch=Scratch.of(plan, x.dtype),
        barrier="neighbours on a torus",
        name="reduce_scatter_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * (group.size - 1) // group.size,
    )
    return view.out_of(y, ones)


def all_reduce(x: jax.Array, group: Group, *, op: str, vmem: bool, interpret: Any) -> jax.Array:
    """Reduces x, of shape (n, whole tiles), over the group."""
    axes = devices.axes_of(group)
    plan = _plan(axes, x.shape[1:], 0, x.dtype, vmem)
    y = launch.call(
        functools.partial(_reduce_kernel, plan=plan, op=op, vmem=vmem),
        group,
        x.reshape(plan.shape(devices.field_sizes(axes))),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(devices.field_sizes(axes)), x.dtype),
        scratch=ReduceScratch(Scratch.of(plan, x.dtype), all_gather.semaphores(plan)),
        barrier="neighbours on a torus",
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


def _scatter_kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Plan,
    op: str,
    vmem: bool,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: all blocks: HBM or VMEM
    # o_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # scratch: a Scratch
    operand, own_block, own = Field(plan, x_ref, *numbers), Field(plan, o_ref), [0] * len(rings)
    scatter = Scatter(plan, rings, operand, own_block, own, scratch, op=op, vmem=vmem)
    timetable.run(plan, (scatter, range(len(rings))[::-1]))


def _reduce_kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Plan,
    op: str,
    vmem: bool,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: all blocks: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # scratch: a ReduceScratch
    # A neighbour may be gathering while we still reduce: what it writes here, other blocks of o_ref
    # than our own, nobody reads or writes in the reduction.
    operand, result = Field(plan, x_ref, *numbers), Field(plan, o_ref, *numbers)
    own = [ring.me for ring in rings]
    scatter = Scatter(plan, rings, operand, result, own, scratch.scatter, op=op, vmem=vmem)
    gather = all_gather.Gather(plan, rings, result, scratch.gather)
    phases = range(len(rings))
    timetable.run(plan, (scatter, phases[::-1]), (gather, phases))


class Scatter:
    """A `timetable.Stage`: sends sums towards their owners, adding own terms; then the own.

    A stream has a channel for each phase, with slots of its own: upstream in the next phase is
    another device, which may be there while we are in this one. What is sent at hop t is message t.
    Upstream may be a hop ahead of us; a message's slot is released when our send from it has ended.
    What a phase leaves us stays in the slot in which its last sum arrived, which no message follows
    there; the next phase takes its own terms from it.
    """

    def __init__(
        self,
        plan: Plan,
        rings: Sequence[Ring],
        operand: Field,  # all blocks
        result: Field,
        own: Sequence[Any],  # the place of the own block in the result
        scratch: Scratch,
        *,
        op: str,
        vmem: bool,
    ) -> None:
        self._plan, self._rings, self._operand, self._result = plan, rings, operand, result
        self._own, self._scratch = own, scratch
        self._combine = functools.partial(combine, op, vmem=vmem)

    def begin(self, b: int, phase: int, stream: Any) -> None:
        if phase + 1 < len(self._rings):
            self._finish(b, phase + 1, stream)
        channel = self._channel(b, phase, stream)
        target = channel.slot(0)

        def push(term: Any, part: Any) -> None:
            channel.push(term, part, 0)

        self._with_term(b, phase, 0, stream, target, push)

    def go_on(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        channel = self._channel(b, phase, stream)
        summed = channel.slot(hop - 1)
        channel.receive(hop - 1, summed)
        channel.wait_sent(summed)  # at hop - 1, for we have waited for those before it
        channel.release(hop - 2)
        self._with_term(b, phase, hop, stream, summed, self._add)
        channel.send(summed, channel.slot(hop), hop)

    def end(self, b: int, stream: Any) -> None:
        self._finish(b, 0, stream)

    def _finish(self, b: int, phase: int, stream: Any) -> None:
        """What a phase leaves us: our term, and the last sum that has come."""
        channel, hops = self._channel(b, phase, stream), self._hops(b, phase)
        summed = channel.slot(hops - 1)
        channel.receive(hops - 1, summed)
        channel.wait_sent(summed)
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
        ahead = shares.direction_of(stream) * (hops - hop)
        axis = bundle.order[phase]
        place[axis] = self._ring(b, phase).block(ahead)
        if phase + 1 < len(self._rings):
            before = self._channel(b, phase + 1, stream).slot(self._hops(b, phase + 1) - 1)
            body(self._plan.blocks(before, place), slot)
            return

        def with_piece(term: Any, here: Sequence[Any]) -> None:
            inside = [*here[:axis], 0, *here[axis + 1 :]]
            body(term, self._plan.blocks(slot, inside))

        self._operand.for_each_piece(place, bundle, stream, with_piece)

    def _channel(self, b: int, phase: int, stream: Any) -> Channel:
        hops, (slots, semaphores) = self._hops(b, phase), self._scratch
        return Channel(
            self._ring(b, phase),
            shares.direction_of(stream),
            semaphores,
            (b, phase, stream),
            arrivals=hops,
            longest=hops,
            slots=(slots[b * len(self._rings) + phase], (stream,)),
            sent=semaphores.sent.at[b, stream],
        )
