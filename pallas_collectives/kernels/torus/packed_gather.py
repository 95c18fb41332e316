"""All-gather of packed blocks over all axes of a torus, unpacked in VMEM: `all_reduce`'s way back.

As `all_gather.Gather`, of blocks that travel packed (see `codec`). A message arrives in a slot in
VMEM, goes on from there, and stays here as well:

    phases before the last    it is copied to `held`, the packed blocks that the last phase sends
    the last phase            it is unpacked, and copied from there to its place in the result

Of HBM that takes one write for each byte of the result. The own block is unpacked from what it has
been packed to, so that all devices have the same bits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import shares, timetable, windows
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.shares import Bundle, Shares
from pallas_collectives.topology.groups import Ring, only_if, unraveled, wrap_step

# Places of unpacked blocks for each way of a stream: while what is in one is copied to the result,
# the other is unpacked to. By the replay of v5p 4 x 4 x 4 256 MiB take 10% less time than with one;
# where the last phase goes in parts, 1.3% less, and one place does.
PLAIN = 2


def _met(plan: Shares, bundle: Bundle, phase: int) -> int:
    """How many blocks a stream has of when a phase begins: those of the axes before."""
    return math.prod(plan.sizes[axis] for axis in bundle.order[:phase])


def _sent(plan: Shares, bundle: Bundle, phase: int) -> int:
    """How many of them a message holds."""
    return _met(plan, bundle, phase) // plan.parts_along(phase)


def _places(plan: Shares) -> int:
    """How many of `PLAIN` there are."""
    return PLAIN if plan.parts == 1 else 1


class Scratch(NamedTuple):
    """What `PackedGather` takes beside its arrays. Ways: see `Shares.ways`."""

    # for each bundle and phase: VMEM
    # (streams * ways, 3 or fewer, blocks met, or a part of them, packed piece); written by upstream
    slots: list[Any]
    semaphores: list[channels.Semaphores]  # (streams * ways)
    # for each bundle: VMEM
    held: list[Any]  # (streams, sections, blocks met, packed piece); sections: those under way
    plain: list[Any]  # (streams * ways, `_places`, message): on its way from a slot to the result
    # (phases - 1, or 1 of one section, all streams * ways): own; what stays is in `held`
    kept_sems: Semaphore
    # (all streams * ways, `_places`): own; what was unpacked is in the result
    plain_sems: Semaphore

    @classmethod
    def of(cls, plan: Shares, dtype: DType, codec: Codec) -> "Scratch":
        """What to allocate."""
        ways, phases = plan.ways, len(plan.sizes)
        each = [(bundle, phase) for bundle in plan.bundles for phase in range(phases)]
        slots_of = [windows.slots(plan, bundle, phase) for bundle, phase in each]

        def packed(bundle: Bundle, blocks: int, *leading: int) -> Any:
            piece = codec.packed_shape(plan.piece_shape(bundle, 0))
            return pltpu.VMEM((*leading, blocks, *piece), jnp.int32)

        return cls(
            slots=[
                packed(bundle, _sent(plan, bundle, phase), bundle.streams * ways, window)
                for (bundle, phase), window in zip(each, slots_of, strict=True)
            ],
            semaphores=windows.semaphores(plan),
            held=[
                packed(
                    bundle,
                    _met(plan, bundle, phases - 1),
                    bundle.streams,
                    min(bundle.sections, timetable.ticks(plan)),
                )
                for bundle in plan.bundles
            ],
            plain=[
                pltpu.VMEM(
                    (
                        bundle.streams * ways,
                        _places(plan),
                        *plan.message_shape(bundle, phases - 1),
                    ),
                    dtype,
                )
                for bundle in plan.bundles
            ],
            kept_sems=pltpu.SemaphoreType.DMA(
                (1 if plan.sections == 1 else max(1, phases - 1), plan.streams * ways)
            ),
            plain_sems=pltpu.SemaphoreType.DMA((plan.streams * ways, _places(plan))),
        )


class _Leg(NamedTuple):
    """One way of a stream along one axis, in one section.

    What is sent at hop t is message t of the section: the own blocks, then what has come at the hop
    before. On a ring as many are sent as come, on every device.
    """

    b: int
    phase: int
    section: Any
    stream: Number
    row: Any  # of its slots and semaphores: the stream's way, among those of its bundle
    with_own: bool  # in the last phase it unpacks the own blocks, too
    channel: Channel
    comes_in_all: Any  # messages in a section
    sends_in_all: Any  # likewise

    def comes(self, hop: Number) -> Any:
        """Whether a message comes that was sent at a hop."""
        return isinstance(self.comes_in_all, int) or hop < self.comes_in_all

    def sends(self, hop: Number) -> Any:
        """Whether we send one."""
        return isinstance(self.sends_in_all, int) or hop < self.sends_in_all

    def come(self, hop: Number) -> Any:
        """The number in its channel of the message that comes."""
        return self.section * self.comes_in_all + hop

    def sent(self, hop: Number) -> Any:
        """The number in its channel of the message that we send."""
        return self.section * self.sends_in_all + hop

    @property
    def unpacks_in_all(self) -> Any:
        """What it unpacks in a section of the last phase."""
        return self.comes_in_all + self.with_own

    def unpacked(self, hop: Number) -> Any:
        """How many it has unpacked before the message that comes; of the own blocks, hop is -1."""
        return self.section * self.unpacks_in_all + hop + self.with_own


class PackedGather(timetable.Stage):
    """Sends the own packed block and what arrives on, and unpacks it all.

    A stream has channels for each phase, one for each way that it goes (`shares.legs`), with slots
    of their own, and one send under way at a time. A message's slot is released when our send from
    it has ended and what stays here has left it (what was unpacked has, whether or not it is in the
    result yet); the order of both is that of `scatter.Scatter`, and so is the reason why pairs need
    no credits where sections follow one another (`windows.is_paired`): a message is kept before the
    next one goes on. Both ways of one stream need them: on an even ring one way is a hop shorter,
    and at a section's end the last word from upstream is a hop too old for the next one's slot.

    `held` is written by us alone. It has a place for each section that is under way
    (`timetable.ticks`).
    """

    keeps = True

    def __init__(
        self,
        plan: Shares,
        rings: Sequence[Ring],
        field: Field,  # the result
        scratch: Scratch,
        codec: Codec,
        # (bundle, section, stream, target): packs a stream's part of the own block
        pack: Callable[[int, Any, Number, Ref], None] | None = None,
    ) -> None:
        """Without `pack` the own block is packed, to where `own` says, by the stage before."""
        self._pack = pack
        self._plan, self._rings, self._field = plan, rings, field
        self._s, self._codec = scratch, codec
        self._last = len(rings) - 1

    def own(self, b: int, section: Any, stream: Number) -> Any:
        """Where a stream's part of the own block is to be packed to, in VMEM, before phase 0."""
        return self._held(b, 0, section, stream).at[0]

    def begin(self, b: int, phase: int, section: Any, stream: Number) -> None:
        if phase:
            self._finish(b, phase - 1, section, stream)
        elif self._pack:
            self._pack(b, section, stream, self.own(b, section, stream))
        own, legs = self._held(b, phase, section, stream), self._legs(b, phase, section, stream)
        for leg in legs:
            only_if(leg.sends(0), functools.partial(self._send, leg, 0, own))
        if phase >= self._last:
            self._unpack(legs[0], -1, own, legs[0].channel.ring.me)

    def take(self, b: int, phase: int, hop: Number, section: Any, stream: Number) -> None:
        for leg in self._legs(b, phase, section, stream):
            self._take(leg, hop)

    def go_on(self, b: int, phase: int, hop: Number, section: Any, stream: Number) -> None:
        legs = self._legs(b, phase, section, stream)
        for leg in legs:
            come = leg.channel.slot(leg.come(hop - 1))
            only_if(leg.sends(hop), functools.partial(self._send, leg, hop, come))
        for leg in legs:
            only_if(leg.comes(hop - 1), functools.partial(self._keep, leg, hop - 1))

    def end(self, b: int, section: Any, stream: Number) -> None:
        self._finish(b, self._plan.phases[-1], section, stream)

    def drain(self) -> None:
        """Waits until all is in the result: of no stream before others have been seen to."""
        for b, bundle in enumerate(self._plan.bundles):
            sync.for_each(0, bundle.streams, functools.partial(self._drain, b))

    def _drain(self, b: int, stream: Number) -> None:
        parts = self._plan.parts_of(self._plan.bundles[b], self._last, stream)
        for leg in self._legs(b, self._last, 0, stream):
            in_all = parts * leg.unpacks_in_all
            for back in range(1, _places(self._plan) + 1):
                only_if(in_all >= back, functools.partial(self._end_copy, leg, in_all - back))

    def take_last(self, b: int, phase: int, section: Any, stream: Number) -> None:
        """Waits for the last hop of a phase, and until all that we have sent has left."""
        hops = self._plan.hops(self._plan.bundles[b], phase)
        for leg in self._legs(b, phase, section, stream):
            self._take(leg, hops)
            only_if(leg.comes(hops - 1), functools.partial(self._keep, leg, hops - 1))

    def _finish(self, b: int, phase: int, section: Any, stream: Number) -> None:
        """Waits until what it has brought is kept."""
        hops = self._plan.hops(self._plan.bundles[b], phase)
        for leg in self._legs(b, phase, section, stream):

            def last(leg: _Leg = leg) -> None:
                self._end_kept(leg)
                leg.channel.release(leg.come(hops - 1))

            only_if(leg.comes(hops - 1), last)

    def _take(self, leg: _Leg, hop: Number) -> None:
        """Waits for what comes from the hop before, and for the end of what we sent at it."""
        channel = leg.channel
        come = channel.slot(leg.come(hop - 1))
        only_if(leg.comes(hop - 1), lambda: channel.receive(leg.come(hop - 1), come))
        only_if(leg.sends(hop - 1), lambda: channel.wait_sent(come))

        def release() -> None:
            self._end_kept(leg)
            channel.release(leg.come(hop - 2))

        only_if((hop >= 2) & leg.comes(hop - 2), release)

    def _send(self, leg: _Leg, hop: Number, source: Ref) -> None:
        number = leg.sent(hop)
        leg.channel.send(source, leg.channel.slot(number), number)

    # What stays here.

    def _keep(self, leg: _Leg, hop: Number) -> None:
        """Starts to bring a message that has come to its place: in `held`, or in the result."""
        come = leg.channel.slot(leg.come(hop))
        place = leg.channel.ring.block(-leg.channel.direction * (hop + 1))
        if leg.phase == self._last:
            self._unpack(leg, hop, come, place)
        else:
            target = self._held(leg.b, leg.phase, leg.section, leg.stream, place)
            pltpu.make_async_copy(come, target, self._kept_sem(leg)).start()

    def _end_kept(self, leg: _Leg) -> None:
        """Waits until it has left its slot."""
        if leg.phase < self._last:
            sync.wait(self._kept_sem(leg), leg.channel.slot(0))

    def _kept_sem(self, leg: _Leg) -> Any:
        phase = 0 if self._plan.sections == 1 else leg.phase
        return self._s.kept_sems.at[phase, self._way(leg)]

    def _way(self, leg: _Leg) -> Any:
        """The leg's stream and way, among those of all bundles."""
        return self._plan.stream(leg.b, 0) * self._plan.ways + leg.row

    def _plain(self, leg: _Leg, count: Number) -> tuple[Ref, Semaphore]:
        """Where what a leg unpacks as number `count` is, and the semaphore of its copy."""
        place = wrap_step(count, _places(self._plan))
        sems = self._s.plain_sems.at[self._way(leg), place]
        return self._s.plain[leg.b].at[leg.row, place], sems

    def _end_copy(self, leg: _Leg, count: Number) -> None:
        """Waits until that is in the result."""
        plain, semaphore = self._plain(leg, count)
        sync.wait(semaphore, plain)

    def _unpack(self, leg: _Leg, hop: Number, packed: Ref, number: Any) -> None:
        """Unpacks the blocks of device `number` on the last axis, and starts to copy them."""
        bundle, rings, count = self._plan.bundles[leg.b], self._rings, leg.unpacked(hop)
        (plain, semaphore), places = self._plain(leg, count), _places(self._plan)
        only_if(count >= places, functools.partial(self._end_copy, leg, count - places))
        axis, *inner = reversed(bundle.order)
        sizes = [self._plan.sizes[other] for other in inner]

        def one(block: Number, _: None) -> None:
            here: list[Any] = [0] * len(rings)
            for other, number in zip(inner, unraveled(block, sizes), strict=True):
                here[other] = number
            self._codec.unpack(self._plan.blocks(plain, here), packed.at[block])

        lax.fori_loop(0, _sent(self._plan, bundle, leg.phase), one, None)
        place = self._plan.met(bundle, leg.phase, leg.section)
        place[axis] = number

        def copy(target: Ref, inside: Sequence[Any]) -> None:
            source = self._plan.blocks(plain, inside)
            pltpu.make_async_copy(source, target, semaphore).start()

        section = self._plan.section_of(leg.phase, leg.section)
        self._field.for_each_piece(place, bundle, section, leg.stream, copy)

    def _held(self, b: int, phase: int, section: Any, stream: Number, number: Any = None) -> Any:
        """The blocks that device `number` (by default we) sends first in a phase, held here.

        Blocks are numbered by their places on the axes that a gather goes through before the last,
        the first axis innermost.
        """
        bundle = self._plan.bundles[b]
        along = self._plan.along(phase)
        sent = _sent(self._plan, bundle, along)
        start: Any = (phase - along) * sent
        for later in range(along, self._last):
            ring = self._rings[bundle.order[later]]
            at = ring.me if later > along or number is None else number
            start = start + at * _met(self._plan, bundle, later)
        ref = self._s.held[b]
        place = lax.rem(section, np.int32(ref.shape[1])) if ref.shape[1] > 1 else 0
        return ref.at[stream, place, pl.ds(start, sent)]

    def _legs(self, b: int, phase: int, section: Any, stream: Number) -> list[_Leg]:
        bundle, along = self._plan.bundles[b], self._plan.along(phase)
        part = self._plan.part_of_all(along, section, phase - along)
        parts = self._plan.parts_along(along)
        axis, number = bundle.order[along], b * len(self._rings) + along
        ring, paired = self._rings[axis], windows.is_paired(self._plan, bundle, along)
        hops = self._plan.hops(bundle, phase)

        def leg(way: int, direction: Number, comes: Any, goes: Any) -> _Leg:
            row = stream * self._plan.ways + way
            channel = Channel(
                ring,
                direction,
                self._s.semaphores[number],
                (row,),
                arrivals=comes * self._plan.parts_of(bundle, along, stream),
                longest=0 if paired else hops * parts * bundle.sections,
                slots=(self._s.slots[number], (row,)),
                sent=windows.sent_by(self._plan, self._s.semaphores, b, along, row),
            )
            return _Leg(b, along, part, stream, row, way == 0, channel, comes, goes)

        return [leg(*way) for way in shares.legs(self._plan, ring, bundle, along, stream)]
