"""All-gather over all axes of a torus at once; see `shares` for who sends what when.

             steps           bytes sent per link and direction   scratch
    torus    sum of n_a // 2 (n-1)/(2d) blocks                   none

A phase's hop moves all that the phases before have brought, straight from its place in our result
to its place in our neighbour's. A stream goes both ways: round a ring as far as the opposite
device; along a line, in n_a - 1 steps, what has come to a device from one side goes on to the
other, and no hop joins the ends.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Flag, Interpret, Number, Ref, Semaphore
from pallas_collectives.kernels.all_gather import Way
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.torus import balance, devices, shares, timetable
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.shares import Bundle, Shares
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology.groups import Group, Ring, only_if

# Receive semaphores of a stream and phase: how many hops a fast neighbour may be ahead. All take
# fewer than `chips.Chip.kernel_semaphores` of any chip.
WINDOW = 16
SEMAPHORES = 192
# Of those that know without credits when to send on (see `Shares.is_paired`).
WINDOW_WITHOUT_CREDITS = 3


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    copy_sems: Semaphore  # (streams): own; the own block's way into the result
    semaphores: list[channels.Semaphores]  # see Gather


def all_axes(
    x: jax.Array, group: Group, *, axis: int, vmem: bool, interpret: Interpret
) -> jax.Array:
    """Gathers x along `axis`; `axis` must be `sliceable` for x's shape."""
    axes = devices.axes_of(group)
    view = View.of(x.shape, axis)
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
        chunking=gathering.chunking,
        name="all_gather_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=(group.size - 1) * x.nbytes,
    )
    return view.out_of(y, plan.sizes)


def plan_of(axes: Sequence[Group], view: View, dtype: DType) -> Shares:
    """How blocks are cut that are gathered over the axes of a torus."""
    both = balance.differ(axes)
    return Shares.of(axes, view.block, view.at, dtype, streams=2 + 2 * both, both=both)


def way(plan: Shares) -> Way:
    """How blocks so cut are gathered; the kernel takes `devices.tables` behind its rings."""
    own = Scratch(copy_semaphores(plan), semaphores(plan, SEMAPHORES))
    kernel = functools.partial(_kernel, plan=plan)
    return Way(kernel, own, "neighbours on a torus", plan.chunking)


def semaphores(plan: Shares, most: int) -> list[channels.Semaphores]:
    """The channels that `Gather` takes, with about so many semaphores for arrivals."""
    each = [(bundle, phase) for bundle in plan.bundles for phase in range(len(plan.sizes))]

    def channels_of(bundle: Bundle, phase: int) -> int:
        return bundle.streams * plan.ways_along(bundle.order[phase])

    ways = sum(itertools.starmap(channels_of, each))

    def of(bundle: Bundle, phase: int) -> channels.Semaphores:
        count, hops = channels_of(bundle, phase), plan.hops(bundle, phase) * bundle.sections
        if plan.is_paired(bundle, phase):
            window = min(WINDOW_WITHOUT_CREDITS, hops)
            return channels.Semaphores.of(count, window=window, credits=False)
        return channels.Semaphores.of(count, window=max(2, min(WINDOW, most // ways, hops)))

    return [of(bundle, phase) for bundle, phase in each]


def copy_semaphores(plan: Shares) -> Semaphore:
    """Those of the own blocks' copies."""
    return pltpu.SemaphoreType.DMA((plan.streams,))


def _kernel(
    rings: Sequence[Ring],  # along each axis
    *refs: Any,  # see below
    plan: Shares,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: one block, with dimensions of 1 for the torus: HBM or VMEM
    # o_ref: all blocks: HBM or VMEM
    # scratch: a Scratch

    def own_piece(b: int, section: Number, stream: Number) -> Ref:
        return plan.piece(x_ref, [0] * len(rings), plan.bundles[b], section, stream)

    field = Field(plan, o_ref, *numbers)
    gather = Gather(plan, rings, field, scratch.semaphores, own=(own_piece, scratch.copy_sems))
    timetable.run(plan, (gather, range(len(rings))))


class Gather(timetable.Stage):
    """Sends the own block and what arrives on, until all is there.

    A stream has channels for each phase: upstream in the next phase is another device, which may
    be there while we are in this one. What is sent at hop t is message t of the section, in one
    piece or several. Nothing is written twice, so it is released as soon as it is here. All sends
    of a phase have ended when the next one begins: what the own pieces lie in may then change.
    """

    def __init__(
        self,
        plan: Shares,
        rings: Sequence[Ring],
        field: Field,  # the result; the own block is there, those of the others are filled
        semaphores: list[channels.Semaphores],  # of each bundle and phase: (streams * ways)
        *,
        # (bundle, section, stream) -> its part of the own block; and the semaphores of its copies
        own: tuple[Callable[[int, Any, Any], Any], Any] | None = None,
    ) -> None:
        """Without `own` the own block is in the result."""
        self._plan, self._rings, self._field = plan, rings, field
        self._semaphores, self._own = semaphores, own

    def begin(self, b: int, phase: int, section: Number, stream: Number) -> None:
        source = None
        if phase == 0:
            if self._own:
                source = self._own[0](b, section, stream)
        else:
            self._finish(b, phase - 1, section, stream)
        for leg in self._legs(b, phase, section, stream):
            only_if(leg.sends(0), functools.partial(self._send, leg, 0, source))
        if phase == 0:
            self._copy_own(b, section, stream, lambda copy: copy.start())

    def take(self, b: int, phase: int, hop: Number, section: Number, stream: Number) -> None:
        for leg in self._legs(b, phase, section, stream):
            only_if(leg.comes(hop - 1), functools.partial(self._receive, leg, hop - 1))

    def go_on(self, b: int, phase: int, hop: Number, section: Number, stream: Number) -> None:
        for leg in self._legs(b, phase, section, stream):
            only_if(leg.sends(hop), functools.partial(self._send, leg, hop))

    def end(self, b: int, section: Number, stream: Number) -> None:
        self._finish(b, len(self._rings) - 1, section, stream)

    def _finish(self, b: int, phase: int, section: Number, stream: Number) -> None:
        """Waits for the last hop of a phase, and until all that we have sent in it has left."""
        last = self._plan.hops(self._plan.bundles[b], phase) - 1
        for leg in self._legs(b, phase, section, stream):
            only_if(leg.comes(last), functools.partial(self._receive, leg, last))
            sent = functools.partial(leg.channel.wait_sent, times=leg.sends_in_all)
            self._for_each_piece(leg, 0, sent)
        if phase == 0:
            # What goes along the second axis holds it.
            self._copy_own(b, section, stream, lambda copy: copy.wait())

    def _copy_own(self, b: int, section: Number, stream: Number, do: Callable[[Any], None]) -> None:
        if self._own is None:
            return
        source, sem = (
            self._own[0](b, section, stream),
            self._own[1].at[self._plan.stream(b, stream)],
        )
        place = [ring.me for ring in self._rings]

        def copy(target: Ref, _: object) -> None:
            do(pltpu.make_async_copy(source, target, sem))

        self._field.for_each_piece(place, self._plan.bundles[b], section, stream, copy)

    def _legs(self, b: int, phase: int, section: Number, stream: Number) -> list["_Leg"]:
        bundle = self._plan.bundles[b]
        axis = bundle.order[phase]
        ring, ways = self._rings[axis], self._plan.ways_along(axis)

        def leg(way: int, direction: Number, comes: Number, goes: Number) -> _Leg:
            channel = Channel(
                ring,
                direction,
                self._semaphores[b * len(self._rings) + phase],
                (stream * ways + way,),
                arrivals=comes * bundle.sections_of(stream),
                longest=0 if self._plan.is_paired(bundle, phase) else None,
            )
            return _Leg(b, phase, section, stream, channel, comes, goes)

        return [leg(*way) for way in shares.legs(self._plan, ring, bundle, phase, stream)]

    def _for_each_piece(self, leg: "_Leg", hop: Number, body: Callable[[Any], None]) -> None:
        """body(piece) for all that we send at a hop: what was there at first, then what came."""
        bundle = self._plan.bundles[leg.b]
        place: list[Any] = [ring.me for ring in self._rings]
        for axis in bundle.order[: leg.phase]:
            place[axis] = None
        channel = leg.channel
        place[bundle.order[leg.phase]] = channel.ring.block(-channel.direction * hop)
        self._field.for_each_piece(
            place, bundle, leg.section, leg.stream, lambda piece, _: body(piece)
        )

    def _send(self, leg: "_Leg", hop: Number, source: Ref | None = None) -> None:
        number = leg.section * leg.sends_in_all + hop
        leg.channel.wait_until_free(number)

        def push(piece: Ref) -> None:
            leg.channel.push(piece if source is None else source, piece, number)

        self._for_each_piece(leg, hop, push)

    def _receive(self, leg: "_Leg", hop: Number) -> None:
        number = leg.section * leg.comes_in_all + hop
        self._for_each_piece(leg, hop + 1, functools.partial(leg.channel.receive, number))
        leg.channel.release(number)


class _Leg(NamedTuple):
    """One way of a stream along one axis, in one section."""

    b: int
    phase: int
    section: Number
    stream: Number
    channel: Channel
    comes_in_all: Number  # messages, in a section: one at each hop from 0 on
    sends_in_all: Number  # likewise

    def comes(self, hop: Number) -> Flag:
        """Whether a message comes that was sent at a hop."""
        return self._within(hop, self.comes_in_all)

    def sends(self, hop: Number) -> Flag:
        """Whether we send one."""
        return self._within(hop, self.sends_in_all)

    def _within(self, hop: Number, count: Number) -> Any:
        return True if isinstance(count, int) else hop < count
