"""Ragged all-to-all on a torus whose routing would carry a skewed routing over one of its axes.

A torus sends along its first axis first and its last axis last. So what many devices send to one
comes to it over the links of its last axis, and those of the others are idle: at a corner of 4 x 4,
12 of 15 devices' rows come by one link. What one sends to many leaves it by its first axis. Here
rows are cut in as many parts as there are axes on their way, and each part takes another axis for
the last; or for the first, where the most that one sends is more than the most that one receives:

    straight             of the last axis, or the first: to where it is for
    part of another, a   of last axes: to the device of the receiver's ring along a that is next to
                         the sender, so over all axes but a; and from there along a
                         of first axes: to the device of the sender's ring along a that is next to
                         the receiver, so along a; and from there over all axes but a

Only where devices have to do with more than others are rows cut so: equal loads leave no axis idle.
Of small arrays, the rows from and to these devices are cut in equal parts. Of large ones each pair
has shares of its own, by what links carry (`ragged_shares`). Parts go in chunks, so that what is
passed on is on the wire with what is yet to come:

    push      the first chunk of what others pass on, then all that goes straight
    turn      chunk by chunk: once ours has left, the next; once all of theirs is here, on with it
    drain     what came to stay, and what left

             hops   bytes sent per device             buffers                        semaphores
    spread   1 or 2 the rows sent, and what it        see `spread`                   21
                    passes on: by the shortest ways

Who knows what. Each device has everyone's sizes and places, and works out its own tables from them:
what it sends, what comes to be passed on, and where that lies, pair by pair in one order. There is
room for as much as a device of average load passes on. What does not fit there goes straight;
sender, buffer and receiver see that alike, as all have the same sizes. Sizes are clipped, and
slices that lie out of range are moved, as in `kernels.ragged_all_to_all`.

Who could be ahead of whom. All that a chunk brings is waited for before any of it is passed on, and
each chunk has a semaphore of its own: no later one can pass for it. No place is written twice. All
that comes to stay, from senders and from those who pass on, is waited for together.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Interpret, Number, Ref, Semaphore, dma_semaphores, span
from pallas_collectives.kernels.machinery import launch, sync
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.kernels.torus import ragged_shares
from pallas_collectives.kernels.torus.ragged_shares import WHOLE
from pallas_collectives.topology.groups import Group, Ring, wrap

# Of an operand from which links are weighed. If some have to do with more than others, that keeps
# the core for a quarter of a millisecond: 430 thousand cycles on v5p:4x4x4, 200 thousand on
# v6e:4x4, as the compiler estimates. Of a Zipf routing it saves a sixteenth of the exchange, which
# takes 5 ms or more from here on; of smaller ones it lengthened the step (`benchmarks step`,
# `experts` for v5p:2x2x2: 57.2 ms without it, 60.9 with).
WEIGHED_BYTES = 256 << 20
CHUNKS = 16  # the more, the sooner the axes that pass on are busy; each costs a start for each part


class Scratch(NamedTuple):
    """What the kernel takes beside its arrays and tables."""

    waiting_ref: Any  # (rows, ...): HBM or VMEM; what is to be passed on. None on one axis
    come_sems: Semaphore  # (CHUNKS,): from the senders of what we pass on
    leave_sem: Semaphore = dma_semaphores()  # own; a chunk of those that others pass on
    copy_sem: Semaphore = dma_semaphores()  # own; the rows that we send to ourselves
    own_sem: Semaphore = dma_semaphores()  # own; the rows of x_ref that go straight
    on_sem: Semaphore = dma_semaphores()  # own; what we pass on
    final_sem: Semaphore = dma_semaphores()  # what comes to stay


class Tables(NamedTuple):
    """int32 tables of one device, in SMEM. Slices: (peer, its slice); ways: all axes but one.

    Attributes:
      starts: (slices,): where each of ours begins in x_ref.
      places: (slices,): where it begins with its receiver.
      rows: (1 + ways, slices): how many go straight, then those of each way; they lie so in turn.
      spots: (ways, slices): where they lie with the one who passes them on.
      hosts: (ways, slices): who that is.
      on_rows: (ways, slices): of each pair whose rows of a way we pass on, how many.
      on_spots: (ways, slices): where they lie here.
      on_places: (ways, slices): where they are for.
      on_peers: (ways, slices): on whom.
      come: (slices,): rows of each sender's slices for us.
      chunks: (1,): into how many each part is cut; no more than one if nobody passes anything on.
    """

    starts: jax.Array
    places: jax.Array
    rows: jax.Array
    spots: jax.Array
    hosts: jax.Array
    on_rows: jax.Array
    on_spots: jax.Array
    on_places: jax.Array
    on_peers: jax.Array
    come: jax.Array
    chunks: jax.Array


def spread(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    all_sizes: jax.Array,
    all_places: jax.Array,
    group: Group,
    *,
    vmem: bool,
    interpret: Interpret,
    weighed_bytes: int = WEIGHED_BYTES,
) -> jax.Array:
    """As `ragged_all_to_all.ring`, by all axes of the torus that the group lies on.

    Of an operand of `weighed_bytes` and more, shares of rows are found by what links carry.
    """
    rings = _rings(group)
    # A part of what each sends on average, or of what one receives that all send to.
    of_one = len(output) // min(of_axis.shape[1] for of_axis in rings)
    room = -(-max(len(operand), of_one) * (len(rings) - 1) // len(rings))
    sizes = jnp.clip(
        all_sizes.reshape(group.size, group.size, -1), 0, min(len(operand), len(output))
    )
    large = len(rings) > 1 and operand.nbytes >= weighed_bytes
    weighed = large and ragged_shares.fits(group.torus)
    rows = sizes.sum(2)
    first = rows.sum(1).max() > rows.sum(0).max()
    ways = [jax.tree.map(functools.partial(jnp.where, first), *each) for each in _ways(rings)]
    passed = [way.hosts >= 0 for way in ways]
    cuts = ragged_shares.cuts(rows, group.torus, passed, first, weighed=weighed)
    tables = _tables(operand, output, input_offsets, sizes, all_places, group, ways, cuts, room)
    buffer = jax.ShapeDtypeStruct((room, *operand.shape[1:]), operand.dtype)
    return launch.call(
        functools.partial(_kernel, ways=len(ways)),
        group,
        operand,
        output,
        out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
        scalars=[getattr(tables, name).reshape(-1) for name in _read(len(ways))],
        scratch=Scratch(buffer if ways else None, pltpu.SemaphoreType.DMA((CHUNKS,))),
        chunking=Chunking(CHUNKS if ways else 1, of="a slice", at_most=True),
        barrier="everyone",
        name="ragged_all_to_all_spread",
        interpret=interpret,
        vmem=vmem,
        wire_bytes=2 * operand.nbytes,
        input_output_aliases={1: 0},
    )


def _read(ways: int) -> tuple[str, ...]:
    """The tables that are read: those of ways where there are any. No kernel takes what it ignores.

    XLA may leave out an operand that is not read (jax#39744).
    """
    of_ways = ("spots", "hosts", "on_rows", "on_spots", "on_places", "on_peers", "chunks")
    return tuple(name for name in Tables._fields if ways or name not in of_ways)


def _rings(group: Group) -> list[np.ndarray]:
    """For each axis of the torus (rings, size): the positions along it; without axes, one ring."""
    numbers = np.arange(group.size).reshape(group.sizes if group.index_groups is None else -1)
    found = []
    for axis in group.torus:
        if axis.chip:
            continue  # the devices of a chip: no link of the torus joins them
        if axis.index_groups is not None:
            found.append(np.array(axis.index_groups))
            continue
        along = np.moveaxis(numbers, group.axes.index(axis.axes[0]), -1)
        found.append(along.reshape(-1, axis.size))
    return found or [numbers.reshape(1, -1)]


class _Way(NamedTuple):
    """Who passes on along one axis, and whose.

    Attributes:
      hosts: [sender, receiver] -> position of the device that passes on; -1 where none does: where
        it would be either of them, or the part would go as what goes straight.
      pairs: [host, its pairs]: sender * n + receiver; as many for each.
      found: [sender * n + receiver] -> where it stands in `pairs`.
    """

    hosts: np.ndarray | jax.Array
    pairs: np.ndarray | jax.Array
    found: np.ndarray | jax.Array


def _ways(rings: Sequence[np.ndarray]) -> list[tuple[_Way, _Way]]:
    """For each way: that of an axis taken first, that of one taken last."""
    n = rings[0].size
    ring, coordinates = np.zeros((2, len(rings), n), int)
    for axis, of_axis in enumerate(rings):
        for number, members in enumerate(of_axis):
            ring[axis, members], coordinates[axis, members] = number, np.arange(len(members))
    differ = coordinates[:, :, None] != coordinates[:, None, :]

    def way(axis: int, first: bool) -> _Way:
        # What goes straight takes its first axis first, and its last one last.
        straight = ~(differ[:axis] if first else differ[axis + 1 :]).any(axis=0)
        stays, moves = ring[axis], coordinates[axis]
        members = (stays[:, None], moves[None]) if first else (stays[None], moves[:, None])
        hosts = rings[axis][members]
        pairs = np.argsort(hosts.reshape(-1), kind="stable")
        either = (hosts == np.arange(n)[:, None]) | (hosts == np.arange(n))
        hosts = np.where(either | straight, -1, hosts)
        found = hosts, pairs.reshape(n, -1), np.argsort(pairs)
        return _Way(*(table.astype(np.int32) for table in found))

    return [(way(axis + 1, True), way(axis, False)) for axis in range(len(rings) - 1)]


def _tables(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    sizes: jax.Array,
    all_places: jax.Array,
    group: Group,
    ways: Sequence[_Way],
    cuts: jax.Array,
    room: int,
) -> Tables:
    """This device's tables, by everyone's sizes[sender, receiver, slice], places and cuts."""
    n, me, slices = group.size, group.position, sizes.shape[2]
    places = jnp.clip(all_places.reshape(sizes.shape), 0, len(output) - sizes)
    starts = jnp.clip(input_offsets.reshape(n, -1), 0, len(operand) - sizes[me])
    until = sizes // WHOLE * cuts[..., None] + sizes % WHOLE * cuts[..., None] // WHOLE
    rows: list[jax.Array] = []
    spots: list[jax.Array] = []
    taken: Number = 0  # of each one's room
    for way, wanted in zip(ways, jnp.diff(until, axis=0), strict=True):
        wanted = jnp.where((way.hosts >= 0)[:, :, None], wanted, 0)
        of_host = wanted.reshape(n * n, slices)[way.pairs].reshape(n, -1)
        after = taken + jnp.cumsum(of_host, axis=1, dtype=jnp.int32)
        before = jnp.minimum(after - of_host, room)
        fits, taken = jnp.minimum(after, room) - before, after[:, -1:]
        for into, table in ((rows, fits), (spots, before)):
            into.append(table.reshape(n * n, slices)[way.found].reshape(sizes.shape))
    straight = functools.reduce(jnp.subtract, rows, sizes)
    own = jnp.stack([straight, *rows])  # [part, sender, receiver, slice]
    begin = jnp.cumsum(own, axis=0, dtype=jnp.int32) - own  # of each part in its slice
    nothing = jnp.zeros((1, n * slices), jnp.int32)

    def passed_on(table: jax.Array, way: _Way) -> jax.Array:
        """A table's values for the pairs that this device passes on along a way."""
        return table.reshape(n * n, slices)[way.pairs[me]].reshape(-1)

    def of_each(values: Iterable[jax.Array]) -> jax.Array:
        """(ways, n * slices); a table has one element at the least."""
        found = [value.reshape(-1) for value in values]
        return jnp.stack(found) if found else nothing

    numbered = list(enumerate(ways))
    receivers = np.broadcast_to(np.arange(n, dtype=np.int32)[:, None], sizes.shape)
    hosts = [jnp.broadcast_to(way.hosts[me][:, None], sizes.shape[1:]) for way in ways]
    return Tables(
        starts=starts,
        places=places[me],
        rows=own[:, me],
        spots=of_each(spot[me] for spot in spots),
        hosts=of_each(hosts),
        on_rows=of_each(passed_on(rows[i], way) for i, way in numbered),
        on_spots=of_each(passed_on(spots[i], way) for i, way in numbered),
        on_places=of_each(passed_on(places + begin[1 + i], way) for i, way in numbered),
        on_peers=of_each(passed_on(jnp.asarray(receivers), way) for _, way in numbered),
        come=sizes[:, me],
        chunks=jnp.where(jnp.any(straight != sizes), CHUNKS, 1).astype(jnp.int32),
    )


def _kernel(ring: Ring, *refs: Any, ways: int) -> None:
    x_ref, o_ref, scratch = refs[-3:]
    unread: dict[str, Any] = dict.fromkeys(Tables._fields)
    tables = Tables(**(unread | dict(zip(_read(ways), refs[:-3], strict=True))))
    n, count = ring.size, tables.starts.shape[0]
    slices, chunks = count // n, tables.chunks[0] if ways else 0

    def of_peers(body: Callable[[Any, Any], None]) -> None:
        """body(peer, number of a slice) for each slice of each other, beginning behind us."""

        def of_peer(distance: Number) -> None:
            peer = wrap(ring.me + distance, n)
            sync.for_each(0, slices, lambda j: body(peer, peer * slices + j))

        sync.for_each(1, n, of_peer)

    def copy(
        rows: Number, ends: tuple[Any, ...], sems: tuple[Semaphore, Semaphore], peer: Number
    ) -> None:
        """Sends so many rows, if there are any."""
        (source_ref, start, target_ref, place), (sent, come) = ends, sems

        @pl.when(rows > 0)
        def _() -> None:
            source = source_ref.at[span(start, rows)]
            target = target_ref.at[span(place, rows)]
            sync.remote_copy(source, target, sent, come, ring.device_id(peer))

    def push(chunk: Number) -> None:
        def send(_: object, i: Number) -> None:
            begin = tables.starts[i] + tables.rows[i]
            sems = scratch.leave_sem, scratch.come_sems.at[chunk]
            for way in range(ways):
                at, rows = way * count + i, tables.rows[(way + 1) * count + i]
                first, size = _chunk(rows, chunk, chunks)
                ends = x_ref, begin + first, scratch.waiting_ref, tables.spots[at] + first
                copy(size, ends, sems, tables.hosts[at])
                begin = begin + rows

        of_peers(send)

    def left(chunk: Number) -> None:
        def of_slice(_: object, i: Number) -> None:
            for way in range(ways):
                rows = tables.rows[(way + 1) * count + i]
                _wait(scratch.leave_sem, x_ref, _chunk(rows, chunk, chunks)[1])

        of_peers(of_slice)

    def straight(peer: Number, i: Number) -> None:
        ends = x_ref, tables.starts[i], o_ref, tables.places[i]
        copy(tables.rows[i], ends, (scratch.own_sem, scratch.final_sem), peer)

    def pass_on(chunk: Number) -> None:
        def arrive(i: Number) -> None:
            _wait(scratch.come_sems.at[chunk], x_ref, _chunk(tables.on_rows[i], chunk, chunks)[1])

        def on(i: Number) -> None:
            first, size = _chunk(tables.on_rows[i], chunk, chunks)
            spot, place = tables.on_spots[i] + first, tables.on_places[i] + first
            ends = scratch.waiting_ref, spot, o_ref, place
            copy(size, ends, (scratch.on_sem, scratch.final_sem), tables.on_peers[i])

        sync.for_each(0, ways * count, arrive)
        sync.for_each(0, ways * count, on)

    def turn(chunk: Number) -> None:
        left(chunk)
        with jax.named_scope("push"):
            pl.when(chunk + 1 < chunks)(lambda: push(chunk + 1))
        with jax.named_scope("pass_on"):
            pass_on(chunk)

    def to_self(j: Number) -> None:
        i = ring.me * slices + j
        rows = tables.rows[i]

        @pl.when(rows > 0)
        def _() -> None:
            source = x_ref.at[pl.ds(tables.starts[i], rows)]
            target = o_ref.at[pl.ds(tables.places[i], rows)]
            pltpu.make_async_copy(source, target, scratch.copy_sem).start()

    def drain(_: object, i: Number) -> None:
        _wait(scratch.final_sem, o_ref, tables.come[i])
        _wait(scratch.own_sem, x_ref, tables.rows[i])

    with jax.named_scope("push"):
        if ways:
            push(np.int32(0))
        of_peers(straight)
        sync.for_each(0, slices, to_self)
    if ways:
        sync.for_each(0, chunks, turn)
    with jax.named_scope("drain"):
        of_peers(drain)
        if ways:
            gone = lambda i: _wait(scratch.on_sem, x_ref, tables.on_rows[i])  # noqa: E731
            sync.for_each(0, ways * count, gone)
        own = ring.me * slices
        sync.for_each(0, slices, lambda j: _wait(scratch.copy_sem, x_ref, tables.rows[own + j]))


def _chunk(rows: Number, number: Number, chunks: Number) -> tuple[Any, Any]:
    """Where a chunk of so many rows begins, and how many it has."""
    first, end = (lax.div(rows * (number + i), chunks) for i in (0, 1))
    return first, end - first


def _wait(semaphore: Semaphore, ref: Ref, rows: Number) -> None:
    """Waits for so many rows, if there are any."""
    pl.when(rows > 0)(lambda: sync.wait(semaphore, ref.at[span(0, rows)]))
