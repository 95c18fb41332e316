"""Reduction along all axes of a torus: the stage that `reduce_scatter` makes its kernels of.

Sums arrive in slots in VMEM, our own terms are added to them there, and from there they go on: of
HBM that takes one read for each byte that arrives. What a phase leaves stays in VMEM too, and the
next phase takes its own terms from it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.codec import TURNED, Codec
from pallas_collectives.kernels.machinery.combine import combine
from pallas_collectives.kernels.torus import shares, timetable, windows
from pallas_collectives.kernels.torus.devices import Field
from pallas_collectives.kernels.torus.shares import Bundle, Shares
from pallas_collectives.topology.groups import LEFT, RIGHT, Ring, only_if

# Streams of a bundle whose terms are brought at once where they are packed before they set out. The
# others follow one by one: so the first are here, and on the wire, before all have been read.
AT_FIRST = 2


class Scratch(NamedTuple):
    """What `Scatter` takes beside its arrays. Ways: see `Shares.ways`."""

    # for each bundle and phase: VMEM
    # (streams * ways, SLOTS or fewer, message); written by upstream. Of packed ones (`Codec`) that
    # need credits there is one more behind these, our own: see `_packed`
    slots: list[Any]
    semaphores: list[channels.Semaphores]  # (streams * ways)
    # (streams, piece): what the phase leaves, of the section that it was in last; None of phase 0
    # where that is packed, in a place of the host's
    left: list[Any]
    # for each bundle: VMEM
    terms: list[Any]  # (streams * ways, message): our terms, on their way from HBM; none if there
    term_sems: Semaphore  # (all streams * ways): own; a term is here

    @classmethod
    def of(
        cls,
        plan: Shares,
        dtype: DType,
        *,
        vmem: bool,
        codec: Codec | None = None,
        left: DType | None = None,
    ) -> "Scratch":
        """What to allocate; `vmem` as `launch.call` has it.

        `left` is of what phase 0 leaves; None with a `codec` for what is packed.
        """
        ways, phases = plan.ways, len(plan.sizes)
        each = [(bundle, phase) for bundle in plan.bundles for phase in range(phases)]

        def slots(bundle: Bundle, phase: int) -> Any:
            count, message = windows.slots(plan, bundle, phase), plan.message_shape(bundle, phase)
            if codec is None:
                return pltpu.VMEM((bundle.streams * ways, count, *message), dtype)
            places = bundle.streams * ways, count + (not windows.is_paired(plan, bundle, phase))
            return pltpu.VMEM((*places, *codec.packed_shape(message)), jnp.int32)

        def leaves(bundle: Bundle, phase: int) -> Any:
            summed = jnp.dtype(TURNED) if phase else left
            of = dtype if codec is None else summed
            piece = bundle.streams, *plan.piece_shape(bundle, phase)
            return None if of is None else pltpu.VMEM(piece, of)

        return cls(
            slots=[slots(*of) for of in each],
            semaphores=windows.semaphores(plan),
            left=[leaves(*of) for of in each],
            terms=[
                pltpu.VMEM((bundle.streams * ways, *plan.message_shape(bundle, phases - 1)), dtype)
                for bundle in plan.bundles
                if not vmem
            ],
            term_sems=pltpu.SemaphoreType.DMA((plan.streams * ways,)),
        )


class _Leg(NamedTuple):
    """One way of a stream along one axis, in one section; along the last, in a part of it.

    Round a ring we send our own term of the furthest block as message 0, and as message k our term
    added to what message k - 1 has brought, at hop k. Along a line messages number the owners, the
    furthest first; a sum that comes as message k goes on as message k, in the hop that comes as
    many after as there are devices behind us. Either way our own block's sum comes last.
    """

    b: int
    phase: int  # the number of the axis (`Shares.along`)
    section: Any  # or the part's number among those of all sections (`Shares.part_of_all`)
    stream: Number
    row: Any  # of its slots and semaphores: the stream's way, among those of its bundle
    channel: Channel
    ahead: Any  # devices that we send to: messages in a section
    arrivals: Any  # messages that come in a section
    behind: Any  # on a line, the devices behind us; None on a ring

    def comes(self, number: Number) -> Any:
        """The number in its channel of a message that comes in this section."""
        return self.section * self.arrivals + number

    def goes(self, number: Number) -> Any:
        """The number in its channel of a message that we send in this section."""
        return self.section * self.ahead + number


class Scatter(timetable.Stage):
    """Sends sums towards their owners, adding own terms; then the own.

    A stream has channels for each phase, with slots of their own: upstream in the next phase is
    another device, which may be there while we are in this one. A channel has one send under way at
    a time. Upstream may be ahead of us; a message's slot is released when our send from it has
    ended, or, of a section's last, when it is added to what the phase leaves. That is written again
    a section later, when the next phase has sent all that it sends from it. To messages, parts of a
    section (`Shares.parts`) are sections of their own.
    """

    def __init__(
        self,
        plan: Shares,
        rings: Sequence[Ring],
        operand: Field,  # all blocks
        scratch: Scratch,
        *,
        op: str,
        # (bundle, section, stream, body): body(place) for where the own block's sum is to be; in
        #   VMEM
        target: Callable[[int, Any, Any, Callable[[Any], None]], None],
        codec: Codec | None = None,  # of what travels
        last: Codec | None = None,  # of the own block's sum, if that is packed too
    ) -> None:
        self._plan, self._rings, self._operand = plan, rings, operand
        self.keeps = plan.parts > 1
        self._s, self._target, self._codec = scratch, target, codec
        plainly: Callable[..., None] = functools.partial(combine, op, vmem=True)
        self._combine = codec.combine if codec else plainly
        self._combine_last = last.combine if last else self._combine

    def own(self, b: int, section: Any, stream: Number) -> Any:
        """Where a stream's part of the own block may be, in VMEM; a section later it changes."""
        del section
        return self._left(b, 0, stream)

    def fetch_first(self) -> None:
        """Starts to bring what is packed first: before all else, where there is a codec."""
        for b, bundle in enumerate(self._plan.bundles):
            first = min(AT_FIRST, bundle.streams_in(0))
            sync.for_each(0, first, functools.partial(self._fetch_at_first, b))

    def _fetch_at_first(self, b: int, stream: Number) -> None:
        """Starts to bring what a stream packs first of all."""
        for way, leg in enumerate(self._legs(b, self._plan.phases[-1], 0, stream)):
            self._fetch(leg, 0, way == 0)

    def begin(self, b: int, phase: int, section: Any, stream: Number) -> None:
        if phase + 1 in self._plan.phases:
            if not self.keeps:
                self._finish(b, phase + 1, section, stream)
        elif self._codec:
            follows = (section == 0) & (stream + AT_FIRST < self._plan.bundles[b].streams_in(0))
            only_if(follows, lambda: self._fetch_at_first(b, stream + AT_FIRST))
        for way, leg in enumerate(self._legs(b, phase, section, stream)):
            sets_out = True if leg.behind is None else leg.behind == 0
            held_up = b == 0 and not self._codec and self._plan.sections > 1
            if held_up and leg.behind is None and self._from_hbm(leg):
                only_if((section == 0) & (stream >= 2), functools.partial(self._be_late, leg))
            only_if(sets_out, functools.partial(self._set_out, leg, 0))
            self._fetch(leg, 1, way == 0)

    def take(self, b: int, phase: int, hop: Number, section: Any, stream: Number) -> None:
        for leg in self._legs(b, phase, section, stream):
            adds, comes, goes = self._passes(leg, hop)
            only_if(adds, functools.partial(self._take, leg, comes, goes))

    def go_on(self, b: int, phase: int, hop: Number, section: Any, stream: Number) -> None:
        for way, leg in enumerate(self._legs(b, phase, section, stream)):
            adds, comes, goes = self._passes(leg, hop)
            if leg.behind is not None:
                only_if(leg.behind == 0, functools.partial(self._set_out, leg, hop))
            only_if(adds, functools.partial(self._add, leg, comes, goes))
            self._fetch(leg, hop + 1, way == 0)

    def _passes(self, leg: _Leg, hop: Number) -> tuple[Any, Number, Number]:
        """Whether a sum goes on at a hop; as what message it comes, and as what it goes."""
        if leg.behind is None:  # of an even ring, one way is a hop shorter
            hops = self._plan.hops(self._plan.bundles[leg.b], leg.phase)
            always = isinstance(leg.ahead, int) and leg.ahead == hops
            return always or hop < leg.ahead, hop - 1, hop
        number = hop - leg.behind
        return (leg.behind > 0) & (number >= 0) & (number < leg.ahead), number, number

    def _be_late(self, leg: _Leg) -> None:
        """Holds up a pair of streams at the start, so that it sends while another's is on the wire.

        What is sent together shares the wire and comes together, and the wire idles till it goes
        on. Pairs once apart stay apart. To bring a term takes about as long as a hop.
        """
        self._fetch(leg, 1, first=True)
        fetched, semaphore = self._fetched(leg)
        sync.wait(semaphore, fetched)

    def take_last(self, b: int, phase: int, section: Any, stream: Number) -> None:
        # All before any begins: meanwhile the terms come that set out next.
        self._finish(b, phase, section, stream)

    def end(self, b: int, section: Any, stream: Number) -> None:
        if not self.keeps:
            self._finish(b, 0, section, stream)

    def _legs(self, b: int, phase: int, section: Any, stream: Number) -> list[_Leg]:
        bundle, ways = self._plan.bundles[b], self._plan.ways
        along, first = self._plan.along(phase), self._plan.phases[-1]
        part = self._plan.part_of_all(along, section, first - phase)
        axis, number = bundle.order[along], b * len(self._rings) + along
        ring, last = self._rings[axis], self._plan.sizes[axis] - 1
        parts = self._plan.parts_along(along)
        paired = windows.is_paired(self._plan, bundle, along)

        def leg(way: int, direction: Number, ahead: Any, behind: Any) -> _Leg:
            arrivals = ahead if behind is None else jnp.where(behind > 0, ahead + 1, 0)
            row = stream * ways + way
            channel = Channel(
                ring,
                direction,
                self._s.semaphores[number],
                (row,),
                arrivals=arrivals * self._plan.parts_of(bundle, along, stream),
                longest=0 if paired else ring.size * parts * bundle.sections,
                slots=(self._s.slots[number], (row,)),
                sent=windows.sent_by(self._plan, self._s.semaphores, b, along, row),
            )
            return _Leg(b, along, part, stream, row, channel, ahead, arrivals, behind)

        if not self._plan.lines[axis]:
            return [leg(*way, None) for way in shares.ways_round(self._plan, ring.size, stream)]
        return [
            leg(0, RIGHT, last - ring.place, ring.place),
            leg(1, LEFT, ring.place, last - ring.place),
        ]

    def _set_out(self, leg: _Leg, number: Number) -> None:
        """Sends our own term alone."""
        channel, goes = leg.channel, leg.goes(number)
        slot = channel.slot(goes)
        only_if(number > 0, lambda: channel.wait_sent(slot))
        if self._codec:
            packed = self._packed(leg, goes)
            self._add_term(leg, leg.ahead - number, (packed,), self._combine)
            channel.send(packed, slot, goes)
            return
        channel.wait_until_free(goes)

        def push(term: Ref, part: Callable[[Any], Any]) -> None:
            channel.push(term, part(slot), goes)

        self._with_term(leg, leg.ahead - number, push)

    def _packed(self, leg: _Leg, goes: Number) -> Ref:
        """Where our own term is packed that sets out as message number `goes`, the section's first.

        In a pair it is the slot of the message before, which was added to what its section leaves.
        Upstream writes there again with its third message from this one on: at hop 2, or when it
        has ended this section. By then it has taken, on the other way, what we have sent behind
        `take` of hop 1, or all that we send in the section; and so this one has left.
        """
        window = leg.channel.window
        if windows.is_paired(self._plan, self._plan.bundles[leg.b], leg.phase):
            return leg.channel.slot(goes + window - 1)
        slots = self._s.slots[leg.b * len(self._rings) + leg.phase]
        return slots.at[leg.row, window]

    def _take(self, leg: _Leg, comes: Any, goes: Any) -> None:
        """Waits for a sum that is to go on, and for the end of the send before."""
        channel, comes_before = leg.channel, comes - 1
        summed = channel.slot(leg.comes(comes))
        channel.receive(leg.comes(comes), summed)

        def end_earlier() -> None:
            channel.wait_sent(summed)
            only_if(comes_before >= 0, lambda: channel.release(leg.comes(comes_before)))

        only_if(True if leg.behind is None else goes > 0, end_earlier)

    def _add(self, leg: _Leg, comes: Any, goes: Any) -> None:
        """Adds our term to a sum that has come, and sends it on."""
        channel = leg.channel
        summed = channel.slot(leg.comes(comes))
        self._add_term(leg, leg.ahead - goes, (summed, summed), self._combine)
        channel.send(summed, channel.slot(leg.goes(goes)), leg.goes(goes))

    def _finish(self, b: int, phase: int, section: Any, stream: Number) -> None:
        """What a phase leaves us: our term, and the last sums that have come."""
        legs = self._legs(b, phase, section, stream)

        def into(target: Ref) -> None:
            if legs[0].behind is None:
                self._sum_up(legs, target)
                return
            right, left = (leg.behind > 0 for leg in legs)
            only_if(right & left, lambda: self._sum_up(legs, target))
            only_if(~left, lambda: self._sum_up(legs, target, [0]))
            only_if(~right, lambda: self._sum_up(legs, target, [1]))

        if phase:
            along = legs[0].phase
            part = self._plan.met(self._plan.bundles[b], along, legs[0].section)
            into(self._plan.blocks(self._left(b, along, stream), part))
        else:
            self._target(b, section, stream, into)
        for way, leg in enumerate(legs):
            self._end(leg)
            if self._codec:  # the term's place is free, and a packed one sets out from there
                follows = leg._replace(section=leg.section + 1)
                fetch = functools.partial(self._fetch, follows, 0, way == 0)
                parts = self._plan.parts_of(self._plan.bundles[b], leg.phase, stream)
                only_if(follows.section < parts, fetch)

    def _sum_up(self, legs: list[_Leg], target: Ref, sides: Sequence[int] = (0, 1)) -> None:
        """target = our term + what has come, from these sides."""
        come = []
        for leg in [legs[side] for side in sides[: len(legs)]]:
            number = leg.comes(leg.arrivals - 1)
            come.append(leg.channel.slot(number))
            leg.channel.receive(number, come[-1])
        combined = self._combine if legs[0].phase else self._combine_last
        self._add_term(legs[0], 0, (target, *come), combined)

    def _end(self, leg: _Leg) -> None:
        """The last send of a section ends, and nothing lies in slots any more."""
        channel, last = leg.channel, leg.arrivals - 1

        def release() -> None:
            only_if(last > 0, lambda: channel.release(leg.comes(last - 1)))
            channel.release(leg.comes(last))

        only_if(leg.ahead > 0, lambda: channel.wait_sent(channel.slot(0)))
        only_if(last >= 0, release)

    # Our own terms.

    def _add_term(
        self, leg: _Leg, ahead: Any, refs: Sequence[Ref], combined: Callable[..., None]
    ) -> None:
        """refs[0] = our term for the device so far ahead + refs[1] + ..."""

        def add(term: Ref, part: Callable[[Any], Any]) -> None:
            out, *come = map(part, refs)
            combined((out, term, *come))

        if self._from_hbm(leg):
            fetched, semaphore = self._fetched(leg)
            sync.wait(semaphore, fetched)
            add(fetched, lambda ref: ref)
        else:
            self._with_term(leg, ahead, add)

    def _from_hbm(self, leg: _Leg) -> bool:
        return leg.phase + 1 == len(self._rings) and bool(self._s.terms)

    def _fetched(self, leg: _Leg) -> tuple[Any, Any]:
        """Where the term that a leg needs next is in VMEM, and the semaphore of its copy."""
        number = self._plan.stream(leg.b, 0) * self._plan.ways + leg.row
        return self._s.terms[leg.b].at[leg.row], self._s.term_sems.at[number]

    def _fetch(self, leg: _Leg, hop: Number, first: bool) -> None:
        """Starts to bring the term that a leg needs at a hop; our own block's behind the last.

        The leg that is `first` on its axis brings that one.
        """
        if not self._from_hbm(leg):
            return
        ref, semaphore = self._fetched(leg)

        def start(term: Ref, part: Callable[[Any], Any]) -> None:
            pltpu.make_async_copy(term, part(ref), semaphore).start()

        if leg.behind is None:
            number, wanted = hop, hop < leg.ahead
        else:
            number = hop - leg.behind
            wanted = (number >= 0) & (number < leg.ahead)
            if not self._codec:  # where sums set out they leave from the operand
                wanted &= leg.behind > 0
        if first:
            wanted |= number == leg.ahead
        only_if(wanted, lambda: self._with_term(leg, leg.ahead - number, start))

    def _with_term(
        self, leg: _Leg, ahead: Any, body: Callable[[Any, Callable[[Any], Any]], None]
    ) -> None:
        """body(term, part) for our terms for the device so far ahead, where they lie.

        They are in pieces if the operand is; part(ref) is where in a whole such piece one belongs.
        """
        bundle = self._plan.bundles[leg.b]
        axis = bundle.order[leg.phase]
        place = self._plan.met(bundle, leg.phase, leg.section)
        place[axis] = self._rings[axis].block(leg.channel.direction * ahead)
        if leg.phase + 1 < len(self._rings):
            left = self._left(leg.b, leg.phase + 1, leg.stream)
            body(self._plan.blocks(left, place), lambda ref: ref)
            return

        def with_piece(term: Ref, inside: Sequence[Any]) -> None:
            body(term, lambda ref: self._plan.blocks(ref, inside))

        section = self._plan.section_of(leg.phase, leg.section)
        self._operand.for_each_piece(place, bundle, section, leg.stream, with_piece)

    def _left(self, b: int, phase: int, stream: Number) -> Any:
        return self._s.left[b * len(self._rings) + phase].at[stream]
