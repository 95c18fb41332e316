"""All-to-all over all axes of a torus at once, in jumps that every chip can make.

A block for another device goes along one axis after the other. A phase is an all-to-all along one
axis: what a device has for all those with some place on it travels there as one bundle. Blocks are
cut into chunks, which take turns in the order of the axes that they go through, so that all axes
are at work. On 2 x 2 devices, a chunk of the blocks that device 0 holds in each phase:

    sender>receiver       phase 0: along x        phase 1: along y
    0>0 0>1 0>2 0>3       0>0 0>1 2>0 2>1         0>0 1>0 2>0 3>0

Within a phase bundles go in jumps of 1, 2, 4, ... places (see `topology.jumps`): first all that
begin, each in its first jump; then, in one step for each further jump, what waits at a device on
its way. So a chunk takes as many steps as all axes' longest routes have jumps.

             steps                          bytes per link and direction        scratch
    torus    jumps of the longest routes    n_a N / 8 on a ring of n_a          see below
                                            n_a N / 4 on a line, in the middle

N are the bytes of the operand. Each axis carries that whatever the other axes do.

Steps of different chunks overlap: a device goes round by round; in each, chunk c is a step further
than chunk c + `LAG`, and what was sent `LAG` rounds ago is waited for. So what was sent since then
is on the wire meanwhile.

Scratch: each order of the axes has for each phase but the last a place for all blocks' chunks that
have come, and for each phase slots for bundles on their way, for `window` chunks. Chunks are so
small that all this is 16 MiB at most, where blocks can be cut as finely: on v5e 16 x 16, in blocks
of 4 KiB tiles, it is TODO.

Who could be ahead of whom. A chunk's messages of a phase arrive in slot c modulo `window`, and on
semaphores of that slot: relayed ones on one for each step, others on one for all, as nothing of
them is read before all are there. A device begins a phase of chunk c + window when all of its peers,
those at a jump's length, have told it that their slots of chunk c are free. To be told apart, they
tell it on the credit semaphore of that slot: a peer's next credit there, for chunk c + window, needs
what we send to it of that chunk, which is behind our wait for all credits for chunk c. For to each
peer a message goes in each phase of each chunk, and straight.

All devices do the same in the same order, and each waits only for what another did in an earlier
round: none waits for ever.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import LANES, Blocks
from pallas_collectives.kernels.torus import devices
from pallas_collectives.topology import groups, jumps
from pallas_collectives.topology.groups import Group, Ring, wrap, wrap_step

SCRATCH_BYTES = 16 << 20
LAG = 1  # rounds from one step of a chunk to the next
MOST_CHUNKS = 256
LEAST_BUNDLE = 64 << 10


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays."""

    # For each order and phase but the last: (window, all blocks' chunks): HBM or VMEM; peers write.
    held: list[list[Any]]
    # For each order and phase: (window, slots, a bundle's chunks): HBM or VMEM; peers write. None
    #   where nothing waits on its way.
    relayed: list[list[Any]]
    # (orders, steps, window): from peers: what a step needs. Of phase 0's first step not used.
    arrived_sems: Any
    final_sem: Any  # from peers: what comes to stay in the result, waited for at the end
    left_sems: Any  # (orders, steps, LAG): own; what a step has sent, and its own copy
    credits: Any  # (orders, phases, window): from peers, one of each for a chunk


def all_axes(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, vmem: bool, interpret: Any
) -> jax.Array:
    """Exchanges blocks over all axes; a block must be `sliceable` along either axis."""
    axes = devices.axes_of(group)
    block = list(x.shape)
    block[split_axis] //= group.size
    view = View.of(tuple(block), x.dtype, split_axis, concat_axis)
    plan = Plan.of(axes, view, x.dtype)
    sizes = devices.field_sizes(axes)
    y = launch.call(
        functools.partial(_kernel, plan=plan),
        group,
        view.into(x, split_axis, sizes),
        axes=axes,
        scalars=[jnp.asarray(plan.table, jnp.int32), *devices.tables(axes)],
        out_shape=jax.ShapeDtypeStruct(view.field(concat_axis, sizes), x.dtype),
        scratch=plan.scratch(x.dtype),
        barrier="jumps on a torus",
        name="all_to_all_torus",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=x.nbytes * len(axes),
    )
    return view.out_of(y, concat_axis)


@dataclasses.dataclass(frozen=True)
class View:
    """Blocks side by side along an axis, seen with dimensions for the torus there.

    Reshapes that move nothing: where an axis is the last, blocks are seen as the tiles that they
    are in memory.

    Attributes:
      shape: of a block.
      block: of a block as it is seen.
      split, concat: before which of its dimensions those of the torus stand.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    split: int
    concat: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: Any, split: int, concat: int) -> "View":
        """That of blocks of a shape, `sliceable` along both axes."""
        if len(shape) - 1 not in (split, concat):
            return cls(shape, shape, split, concat)
        *before, rows, columns = shape
        high = 8 if rows % 8 == 0 else rows
        return cls(shape, (*before, rows // high, columns // LANES, high, LANES), split, concat)

    def field(self, at: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of as many blocks as `sizes` says, along axis `at`, as they are seen."""
        return (*self.block[:at], *sizes, *self.block[at:])

    def into(self, x: jax.Array, axis: int, sizes: tuple[int, ...]) -> jax.Array:
        """An array of blocks along an axis, as it is seen."""
        if self.block != self.shape:
            *before, rows, columns = x.shape
            high = self.block[-2]
            x = x.reshape(*before, rows // high, high, columns // LANES, LANES)
            x = jnp.swapaxes(x, -3, -2)
        return x.reshape(self.field(axis, sizes))

    def out_of(self, y: jax.Array, axis: int) -> jax.Array:
        """The inverse of `into`."""
        shape, seen = list(self.shape), list(self.block)
        n = y.size // math.prod(shape)
        shape[axis] *= n
        seen[axis] *= n
        y = y.reshape(seen)
        return (y if self.block == self.shape else jnp.swapaxes(y, -3, -2)).reshape(shape)


FIELDS = 6  # of the table, for a jump


@dataclasses.dataclass(frozen=True)
class Axis:
    """What happens along an axis of n devices.

    Attributes:
      n: its devices.
      line: whether routes end at its ends.
      peers: jumps of any length; where the table says so.
      relays, lasts: for each step of a phase where in the table those jumps begin that lead to a
        slot, or that end a route, and how many there are.
      slots: bundles that wait here.
      picky: whether some routes begin at some places only.
    """

    n: int
    line: bool
    peers: tuple[int, int]
    relays: tuple[tuple[int, int], ...]
    lasts: tuple[tuple[int, int], ...]
    slots: int
    picky: bool

    @property
    def steps(self) -> int:
        """Steps of a phase along it."""
        return len(self.lasts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How blocks are cut, and which way each chunk goes.

    Attributes:
      axes: of the torus.
      table: for each axis its number of peers and their distances; then jumps, of FIELDS each: of
        the route its distance, what of it lies behind, and the parity of the places where it
        begins, or -1; the jump; the slots from which and to which it leads, or -1.
      view: of the blocks.
      blocks: their cuts.
      orders: of the axes; chunk c goes through the c-th, modulo their number.
      window: chunks of an order under way in a phase.
    """

    axes: tuple[Axis, ...]
    table: tuple[int, ...]
    view: View
    blocks: Blocks
    orders: tuple[tuple[int, ...], ...]
    window: int

    @classmethod
    def of(cls, groups: Sequence[Group], view: View, dtype: Any) -> "Plan":
        """That of blocks of a view on axes."""
        axes, table = _along([(g.size, g.line or g.size == 2) for g in groups])
        d, n = len(axes), math.prod(axis.n for axis in axes)
        window = LAG * (max(axis.steps for axis in axes) + 1) + 1
        # Of all blocks: what lies in scratch of a chunk of them, in all orders together.
        share = d * window * (d - 1 + sum(axis.slots / axis.n for axis in axes))
        block_bytes = math.prod(view.block) * jnp.dtype(dtype).itemsize
        wanted = math.ceil(share * n * block_bytes / SCRATCH_BYTES)
        full = block_bytes * n // (max(axis.n for axis in axes) * LEAST_BUNDLE)
        blocks = Blocks.of(view.block, 0, dtype, max(1, min(MOST_CHUNKS, max(wanted, min(full, 8 * d)))))
        orders = tuple((*range(first, d), *range(first)) for first in range(min(d, blocks.chunks)))
        return cls(axes, table, view, blocks, orders, min(window, -(-blocks.chunks // len(orders))))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(axis.n for axis in self.axes)

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return sum(axis.steps for axis in self.axes)

    def first_step(self, order: Sequence[int], phase: int) -> int:
        """The number of a phase's first step."""
        return sum(self.axes[axis].steps for axis in order[:phase])

    def chunks(self, number: int) -> int:
        """How many chunks go in an order, by its number."""
        return -(-(self.blocks.chunks - number) // len(self.orders))

    def scratch(self, dtype: Any) -> Scratch:
        """What to allocate."""
        dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
        chunk = dataclasses.replace(self.view, block=self.blocks.chunk_shape)

        def held(sizes: Sequence[int], *slots: int) -> jax.ShapeDtypeStruct:
            shape = chunk.field(self.view.split, sizes)
            return jax.ShapeDtypeStruct((self.window, *slots, *shape), dtype)

        def waiting(axis: int) -> jax.ShapeDtypeStruct | None:
            sizes = list(self.sizes)
            sizes[axis] = 1
            slots = self.axes[axis].slots
            return held(sizes, slots) if slots else None

        orders, phases = len(self.orders), len(self.axes)
        return Scratch(
            [[held(self.sizes) for _ in order[1:]] for order in self.orders],
            [[waiting(axis) for axis in order] for order in self.orders],
            dma((orders, self.steps, self.window)),
            dma,
            dma((orders, self.steps, LAG)),
            regular((orders, phases, self.window)),
        )


def _along(sizes: Sequence[tuple[int, bool]]) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    """Axes of so many devices, each on a line or not, and the table of all."""
    table: list[int] = []
    peers = []
    for n, line in sizes:
        found = jumps.lengths(n, line)
        peers.append((len(table) + 1, len(found)))
        table += [len(found), *found]
    axes = []
    for (n, line), those in zip(sizes, peers, strict=True):
        routes = jumps.routes(n, line)
        slots: dict[tuple[jumps.Route, int], int] = {}
        for route in routes:
            for step in range(1, len(route.jumps)):
                slots[route, step] = len(slots)
        ranges: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for step in range(max(len(route.jumps) for route in routes)):
            for last, where in enumerate(ranges):
                now = [r for r in routes if step < len(r.jumps)]
                now = [r for r in now if (step == len(r.jumps) - 1) == bool(last)]
                where.append((len(table), len(now)))
                for r in now:
                    parity = -1 if r.parity is None else r.parity
                    way = (r.distance, sum(r.jumps[:step]), parity, r.jumps[step])
                    table += [*way, slots.get((r, step), -1), slots.get((r, step + 1), -1)]
        picky = any(route.parity is not None for route in routes)
        axes.append(Axis(n, line, those, tuple(ranges[0]), tuple(ranges[1]), len(slots), picky))
    return tuple(axes), tuple(table)


@dataclasses.dataclass(frozen=True)
class Field:
    """Blocks, or chunks of them, by their places on the torus.

    Attributes:
      plan: how they are cut.
      ref: HBM or VMEM.
      at: before which dimension of a block those of the torus stand.
      chunk: of whole blocks in `ref` the one that is meant; None where `ref` has chunks alone.
      numbers_ref: see `devices.Field`; `numbered` arrays have blocks one after the other.
    """

    plan: Plan
    ref: Any
    at: int
    chunk: Any = None
    numbers_ref: Any = None

    def bundle(self, place: Sequence[Any]) -> Any:
        """All blocks at a place: on each axis one, or all (None)."""
        index = [
            pl.ds(0, n) if number is None else pl.ds(number, 1)
            for number, n in zip(place, self.plan.sizes, strict=True)
        ]
        return self._part(index)

    def block(self, place: Sequence[Any]) -> Any:
        """One block, without dimensions for the torus."""
        if self.numbers_ref is None:
            return self._part(list(place))
        flat: Any = 0
        for size, number in zip(self.plan.sizes, place, strict=True):
            flat = flat * size + number
        return self._part([self.numbers_ref[flat], *(0 for _ in place[1:])])

    def all(self) -> Any:
        """All blocks."""
        return self._part([pl.ds(0, n) for n in self.ref.shape[self.at :][: len(self.plan.axes)]])

    def _part(self, index: list[Any]) -> Any:
        blocks = self.plan.blocks
        dims: list[Any] = [pl.ds(0, size) for size in blocks.chunk_shape]
        if self.chunk is not None:
            size = blocks.chunk_shape[blocks.cut]
            dims[blocks.cut] = pl.ds(pl.multiple_of(self.chunk * size, size), size)
        return self.ref.at[tuple([*dims[: self.at], *index, *dims[self.at :]])]


def _kernel(
    rings: Sequence[Ring],  # along each axis
    table_ref: Any,  # Plan.table: SMEM
    *refs: Any,  # see below
    plan: Plan,
) -> None:
    *numbers, x_ref, o_ref, scratch = refs
    # numbers: `devices.tables`
    # x_ref: all blocks, with dimensions for the torus: HBM or VMEM
    # o_ref: likewise
    # scratch: a Scratch
    exchange = Exchange(plan, rings, table_ref, numbers, x_ref, o_ref, scratch)
    orders, chunks = range(len(plan.orders)), plan.chunks(0)

    def round_of_all(t: Any) -> None:
        for step in reversed(range(plan.steps + 1)):
            c = t - LAG * step
            for o in orders:

                def go_on(o: int = o, step: int = step, c: Any = c) -> None:
                    if step:
                        exchange.settle(o, step - 1, c)
                    if step < plan.steps:
                        exchange.advance(o, step, c)

                groups.only_if((c >= 0) & (c < plan.chunks(o)), go_on)

    with jax.named_scope("exchange"):
        sync.for_each(0, chunks + LAG * plan.steps, round_of_all)
    with jax.named_scope("drain"):
        exchange.drain()


def _is_one_of(count: int, number: Any) -> Any:
    return (number >= 0) & (number < count)


class Exchange:
    """What a device does for a chunk in a step, in an order of the axes."""

    def __init__(
        self,
        plan: Plan,
        rings: Sequence[Ring],
        table_ref: Any,
        numbers: Sequence[Any],
        x_ref: Any,
        o_ref: Any,
        scratch: Scratch,
    ) -> None:
        self._plan, self._rings, self._table_ref = plan, rings, table_ref
        self._numbers, self._x_ref, self._o_ref = numbers, x_ref, o_ref
        self._scratch = scratch

    def advance(self, o: int, step: int, c: Any) -> None:
        """Waits for what a step needs, and sends it on."""
        phase, hop = self._phase(o, step)
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        arrived = self._scratch.arrived_sems.at[o, step, self._slot(c)]
        if hop:
            self._for_each_jump(
                o, phase, hop, lambda e: sync.wait(arrived, self._waiting(o, phase, c, e[4]))
            )
        elif phase:
            before = self._plan.orders[o][phase - 1]
            place: list[Any] = [None] * len(self._rings)
            place[before] = 0
            source = self._source(o, phase, c)
            sync.wait(arrived, source.bundle(place), times=self._plan.axes[before].n - 1)
        if hop == 0:
            if self._credited(o, phase):

                @pl.when(c >= self._plan.window)
                def _() -> None:
                    credit = self._scratch.credits.at[o, phase, self._slot(c)]
                    self._for_each_peer(o, phase, lambda _: pl.semaphore_wait(credit, 1))

        left = self._left(o, step, c)

        def send(e: Sequence[Any], last: bool) -> None:
            distance, behind, _, jump, slot, next_slot = e
            peer = ring.peer(jump)
            start = functools.partial(self._start, left, peer)
            if last:
                sem = self._final(o, phase, c)
                target = self._target(o, phase, c), self._at(o, phase, ring.block(-behind))
            else:
                sem = self._scratch.arrived_sems.at[o, step + 1, self._slot(c)]
                target = self._on_way(o, phase, c, next_slot), self._at(o, phase, 0)
            if hop:
                source = self._on_way(o, phase, c, slot), self._at(o, phase, 0)
            else:
                source = self._source(o, phase, c), self._at(o, phase, ring.block(distance))
            self._for_each_pair(source, target, lambda a, b: start(sem, a, b))

        self._for_each_jump(o, phase, hop, functools.partial(send, last=False), axis.relays)
        self._for_each_jump(o, phase, hop, functools.partial(send, last=True), axis.lasts)
        if hop == 0:
            own = self._at(o, phase, ring.block(0))

            def copy(a: Any, b: Any) -> None:
                pltpu.make_async_copy(a, b, left).start()

            self._for_each_pair(
                (self._source(o, phase, c), own), (self._target(o, phase, c), own), copy
            )

    def settle(self, o: int, step: int, c: Any) -> None:
        """Waits until what a step has sent has left; slots that are free then serve again."""
        phase, hop = self._phase(o, step)
        left = self._left(o, step, c)
        if hop:
            self._for_each_jump(
                o, phase, hop, lambda e: sync.wait(left, self._waiting(o, phase, c, e[4]))
            )
        else:
            sync.wait(left, self._source(o, phase, c).all())
        if hop == 0 and phase:
            self._release(o, phase - 1, c)
        if step == self._plan.steps - 1:
            self._release(o, phase, c)

    def drain(self) -> None:
        """Waits for what comes to stay."""
        for o, order in enumerate(self._plan.orders):
            last = len(order) - 1
            n = self._axis(o, last).n
            times = self._plan.chunks(o) * (n - 1)
            if self._numbers:  # no bundle is one piece
                part = Field(self._plan, self._x_ref, self._plan.view.split, 0).block(
                    [0] * len(order)
                )
                times *= math.prod(self._plan.sizes) // n
            else:
                part = Field(self._plan, self._x_ref, self._plan.view.split, 0).bundle(
                    self._at(o, last, 0)
                )
            sync.wait(self._scratch.final_sem, part, times=times)

    def _start(self, left: Any, peer: Any, sem: Any, source: Any, target: Any) -> None:
        sync.remote_copy(source, target, left, sem, peer)

    def _release(self, o: int, phase: int, c: Any) -> None:
        if not self._credited(o, phase):
            return
        ring, credit = self._ring(o, phase), self._scratch.credits.at[o, phase, self._slot(c)]

        @pl.when(c + self._plan.window < self._plan.chunks(o))
        def _() -> None:
            self._for_each_peer(
                o, phase, lambda jump: pl.semaphore_signal(credit, 1, device_id=ring.peer(jump))
            )

    def _credited(self, o: int, phase: int) -> bool:
        """Whether a phase has slots that serve again."""
        used = phase + 1 < len(self._rings) or self._axis(o, phase).slots > 0
        return used and self._plan.chunks(o) > self._plan.window

    def _phase(self, o: int, step: int) -> tuple[int, int]:
        """The phase of a step, and its number therein."""
        order, phase = self._plan.orders[o], 0
        while step >= self._plan.axes[order[phase]].steps:
            step -= self._plan.axes[order[phase]].steps
            phase += 1
        return phase, step

    def _axis(self, o: int, phase: int) -> Axis:
        return self._plan.axes[self._plan.orders[o][phase]]

    def _ring(self, o: int, phase: int) -> Ring:
        return self._rings[self._plan.orders[o][phase]]

    def _slot(self, c: Any) -> Any:
        return wrap_step(c, self._plan.window)

    def _left(self, o: int, step: int, c: Any) -> Any:
        return self._scratch.left_sems.at[o, step, wrap_step(c, LAG)]

    def _final(self, o: int, phase: int, c: Any) -> Any:
        """What counts bundles that have come to the end of a phase."""
        if phase + 1 == len(self._rings):
            return self._scratch.final_sem
        return self._scratch.arrived_sems.at[
            o, self._plan.first_step(self._plan.orders[o], phase + 1), self._slot(c)
        ]

    def _at(self, o: int, phase: int, number: Any) -> list[Any]:
        """The place of a bundle: everywhere, but at a number along the phase's axis."""
        place: list[Any] = [None] * len(self._rings)
        place[self._plan.orders[o][phase]] = number
        return place

    def _source(self, o: int, phase: int, c: Any) -> Field:
        split = self._plan.view.split
        if phase == 0:
            chunk = c * len(self._plan.orders) + o
            return Field(self._plan, self._x_ref, split, chunk, *self._numbers)
        return Field(self._plan, self._scratch.held[o][phase - 1].at[self._slot(c)], split)

    def _target(self, o: int, phase: int, c: Any) -> Field:
        if phase + 1 < len(self._rings):
            return self._source(o, phase + 1, c)
        chunk = c * len(self._plan.orders) + o
        return Field(self._plan, self._o_ref, self._plan.view.concat, chunk, *self._numbers)

    def _on_way(self, o: int, phase: int, c: Any, slot: Any) -> Field:
        ref = self._scratch.relayed[o][phase].at[self._slot(c), slot]
        return Field(self._plan, ref, self._plan.view.split)

    def _waiting(self, o: int, phase: int, c: Any, slot: Any) -> Any:
        return self._on_way(o, phase, c, slot).bundle(self._at(o, phase, 0))

    def _for_each_pair(
        self,
        source: tuple[Field, list[Any]],
        target: tuple[Field, list[Any]],
        body: Callable[[Any, Any], None],
    ) -> None:
        """body(source, target) for a bundle: as one piece where both have one, or by blocks."""
        (of, here), (to, there) = source, target
        if of.at == to.at and of.numbers_ref is None and to.numbers_ref is None:
            body(of.bundle(here), to.bundle(there))
            return
        free = [axis for axis, number in enumerate(here) if number is None]

        def one(j: Any) -> None:
            a, b = list(here), list(there)
            for axis in reversed(free):
                n = np.int32(self._plan.sizes[axis])
                a[axis] = b[axis] = lax.rem(j, n)
                j = lax.div(j, n)
            body(of.block(a), to.block(b))

        sync.for_each(0, math.prod(self._plan.sizes[axis] for axis in free), one)

    def _for_each_peer(self, o: int, phase: int, body: Callable[[Any], None]) -> None:
        """body(jump) for each device that is a jump away."""
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        start, count = axis.peers

        def one(i: Any) -> None:
            jump = self._table_ref[start + i]
            there = ring.place + jump
            inside = _is_one_of(axis.n, there) if axis.line else True
            groups.only_if(inside, functools.partial(body, jump))

        sync.for_each(0, count, one)

    def _for_each_jump(
        self,
        o: int,
        phase: int,
        hop: int,
        body: Callable[[Sequence[Any]], None],
        among: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """body(the table's entry) for the jumps that we make in a step."""
        axis, ring = self._axis(o, phase), self._ring(o, phase)
        ranges = [among[hop]] if among else [axis.relays[hop], axis.lasts[hop]]

        def one(start: int, i: Any) -> None:
            entry = [self._table_ref[start + FIELDS * i + k] for k in range(FIELDS)]
            origin = ring.place - entry[1]
            goes: Any = True
            if axis.line:
                goes = _is_one_of(axis.n, origin) & _is_one_of(axis.n, origin + entry[0])
            elif axis.picky:
                odd = lax.rem(wrap(origin, axis.n), np.int32(2))
                goes = (entry[2] < 0) | (entry[2] == odd)
            groups.only_if(goes, functools.partial(body, entry))

        for start, count in ranges:
            if count:
                sync.for_each(0, count, functools.partial(one, start))
