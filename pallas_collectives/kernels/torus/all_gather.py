"""All-gather over all axes of a torus at once; see `shares` for who sends what when.

             steps           bytes sent per link and direction   scratch
    torus    sum of n_a - 1  (n-1)/(2d) blocks                   none

A phase's hop moves all that the phases before have brought, straight from its place in our result
to its place in our neighbour's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.kernels.all_gather import Way
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.torus import devices, shares, timetable
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.shares import Plan
from pallas_collectives.topology.groups import Group, Ring

# Receive semaphores of a stream and phase: how many hops a fast neighbour may be ahead. A kernel
# has some 500 semaphores.
WINDOW = 16
_SEMAPHORES = 256


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    copy_sems: Any  # (bundles, streams): own; the own block's way into the result
    semaphores: channels.Semaphores  # see Gather


def all_axes(x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Any) -> jax.Array:
    """Gathers x along `axis`; `axis` must be `sliceable` for x's shape."""
    axes = devices.axes_of(group)
    view = shares.View.of(x.shape, axis, x.dtype)
    plan = plan_of(axes, view, x.dtype)
    gathering = way(plan)
    y = launch.call(
        gathering.kernel,
        group,
        view.into(x, (1,) * len(axes)),
        axes=axes,
        scalars=devices.tables(axes),
        out_shape=jax.ShapeDtypeStruct(plan.shape(devices.field_sizes(axes)), x.dtype),
        scratch=gathering.scratch,
        barrier=gathering.barrier,
        name="all_gather_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )
    return view.out_of(y, plan.sizes)


def plan_of(axes: Sequence[Group], view: shares.View, dtype: Any) -> Plan:
    """How blocks are cut that are gathered over the axes of a torus."""
    both = shares.differ(axes)
    return Plan.of(axes, view.block, view.at, dtype, chunks=1 + both, both=both)


def way(plan: Plan) -> Way:
    """How blocks so cut are gathered; the kernel takes `devices.tables` behind its rings."""
    own = Scratch(semaphores(plan).sent, semaphores(plan))
    return Way(functools.partial(_kernel, plan=plan), own, "neighbours on a torus")


def semaphores(plan: Plan) -> channels.Semaphores:
    """The channels that `Gather` takes."""
    bundles, phases = len(plan.bundles), len(plan.sizes)
    streams = max(bundle.streams for bundle in plan.bundles)
    window = max(2, min(WINDOW, _SEMAPHORES // (bundles * phases * streams), max(plan.sizes) - 1))
    every = bundles, phases, streams
    return channels.Semaphores.of(*every, window=window, sent=(bundles, streams))


def _kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Plan,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # scratch: a Scratch
    field = Field(plan, o_ref, *numbers)
    gather = Gather(plan, rings, field, scratch.semaphores, own=(x_ref, scratch.copy_sems))
    timetable.run(plan, (gather, range(len(rings))))


class Gather:
    """A `timetable.Stage`: sends the own block and what arrives on, until all is there.

    A stream has a channel for each phase: upstream in the next phase is another device, which may
    be there while we are in this one. What is sent at hop t is message t of the channel, in one
    piece or several. Nothing is written twice, so it is released as soon as it is here.
    """

    def __init__(
        self,
        plan: Plan,
        rings: Sequence[Ring],
        field: Field,  # the result; the own block is there, those of the others are filled
        # (bundles, phases, streams) channels; `sent`: (bundles, streams): drained at the end
        semaphores: channels.Semaphores,
        *,
        own: tuple[Any, Any] | None = None,  # the own block and, as `sent`, its copies' semaphores
    ) -> None:
        """Without `own` the own block is in the result."""
        self._plan, self._rings, self._field = plan, rings, field
        self._semaphores, self._own = semaphores, own

    def begin(self, b: int, phase: int, stream: Any) -> None:
        if phase == 0:
            if self._own:
                self._send(b, phase, 0, stream, self._own_piece(b, stream))
                self._copy_own(b, stream, lambda copy: copy.start())
            else:
                self._send(b, phase, 0, stream)
            return
        self._receive(b, phase - 1, self._hops(b, phase - 1) - 1, stream)
        if phase == 1 and self._own:
            # What goes along the second axis holds it.
            self._copy_own(b, stream, lambda copy: copy.wait())
        self._send(b, phase, 0, stream)

    def go_on(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        self._receive(b, phase, hop - 1, stream)
        self._send(b, phase, hop, stream)

    def end(self, b: int, stream: Any) -> None:
        last = len(self._rings) - 1
        self._receive(b, last, self._hops(b, last) - 1, stream)
        if last == 0 and self._own:
            self._copy_own(b, stream, lambda copy: copy.wait())
        for phase in range(last + 1):
            sent = functools.partial(
                self._channel(b, phase, stream).wait_sent, times=self._hops(b, phase)
            )
            self._for_each_piece(b, phase, 0, stream, sent)

    def _own_piece(self, b: int, stream: Any) -> Any:
        assert self._own, "the own block is in the result already"
        return self._plan.piece(self._own[0], [0] * len(self._rings), self._plan.bundles[b], stream)

    def _copy_own(self, b: int, stream: Any, do: Callable[[Any], None]) -> None:
        assert self._own, "the own block is in the result already"
        source, sem = self._own_piece(b, stream), self._own[1].at[b, stream]

        def copy(target: Any) -> None:
            do(pltpu.make_async_copy(source, target, sem))

        self._for_each_piece(b, 0, 0, stream, copy)

    def _hops(self, b: int, phase: int) -> int:
        return self._plan.hops(self._plan.bundles[b], phase)

    def _ring(self, b: int, phase: int) -> Ring:
        return self._rings[self._plan.bundles[b].order[phase]]

    def _for_each_piece(
        self, b: int, phase: int, hop: Any, stream: Any, body: Callable[[Any], None]
    ) -> None:
        """body(piece) for all that we send at a hop: what was there at first, then what came."""
        bundle = self._plan.bundles[b]
        place: list[Any] = [ring.me for ring in self._rings]
        for axis in bundle.order[:phase]:
            place[axis] = None
        back = -shares.direction_of(stream) * hop
        place[bundle.order[phase]] = self._ring(b, phase).block(back)
        self._field.for_each_piece(place, bundle, stream, lambda piece, _: body(piece))

    def _channel(self, b: int, phase: int, stream: Any) -> Channel:
        hops = self._hops(b, phase)
        return Channel(
            self._ring(b, phase),
            shares.direction_of(stream),
            self._semaphores,
            (b, phase, stream),
            arrivals=hops,
            longest=hops,
            sent=self._semaphores.sent.at[b, stream],
        )

    def _send(self, b: int, phase: int, hop: Any, stream: Any, source: Any = None) -> None:
        channel = self._channel(b, phase, stream)
        channel.wait_until_free(hop)

        def push(piece: Any) -> None:
            channel.push(piece if source is None else source, piece, hop)

        self._for_each_piece(b, phase, hop, stream, push)

    def _receive(self, b: int, phase: int, hop: Any, stream: Any) -> None:
        channel = self._channel(b, phase, stream)
        receive = functools.partial(channel.receive, hop)
        self._for_each_piece(b, phase, hop + 1, stream, receive)
        channel.release(hop)
