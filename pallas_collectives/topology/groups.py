"""Rings as integers: who is next to whom, and which block moves at which step.

Everything here is arithmetic on positions and works alike on Python ints (tables, tests) and on
traced int32 scalars (inside a kernel).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from pallas_collectives.annotations import DeviceId, Number, Ref, Step

RIGHT, LEFT = +1, -1


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices that take part in one collective, seen from outside the kernel.

    Attributes:
      axes: mesh axis names, major first; devices are numbered row-major over them, as lax does.
      sizes: the size of each axis.
      index_groups: `axis_index_groups`: lists of device numbers, of equal size, that partition the
        axes; each list is a ring. None for one ring of all.
      order: positions in the order of the ring, the same for all rings, so that neighbours share a
        link (see `placement.arranged`); None for 0, 1, ...
      line: whether the ring's closing hop runs back over the links of all others.
      chip: whether the ring is the devices of one chip, which no link of the torus joins.
      second: with an `order`, that of a second ring, which shares no link with the first (see
        `two_rings`); None where there is one ring.
      torus: the rings along the axes of the torus that the group lies on, if it has several: mesh
        axes, or rings of the group's device numbers. Equality of groups does not depend on it.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index_groups: tuple[tuple[int, ...], ...] | None = None
    order: tuple[int, ...] | None = None
    line: bool = False
    chip: bool = False
    second: tuple[int, ...] | None = None
    torus: tuple["Group", ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def size(self) -> int:
        """Devices in the ring."""
        if self.index_groups is not None:
            return len(self.index_groups[0])
        return math.prod(self.sizes)

    @property
    def position(self) -> jax.Array:
        """This device's, outside of a kernel."""
        device = lax.axis_index(self.axes)
        if self.index_groups is None:
            return device
        positions = np.argsort(self.index_groups, axis=None) % self.size
        return lax.dynamic_index_in_dim(positions.astype(np.int32), device, keepdims=False)

    def members(self) -> np.ndarray | None:
        """What a `Ring` must know of the group, the same on every device; None if arithmetic does.

        Where each device of the axes stands in a row of all groups, then that row: the members of
        each of `index_groups`. Behind these the place of each position, and the position at each
        place, of an `order`; and of the second ring, if there is one. Kernels read it from SMEM.
        """
        known = (self.index_groups, self.order, self.second)
        rows = [np.ravel(numbers) for numbers in known if numbers is not None]
        found = [table for row in rows for table in (np.argsort(row), row)]
        return np.concatenate(found).astype(np.int32) if found else None


class Ring:
    """A group seen by one of its devices, inside a kernel.

    Blocks are numbered by position, as lax numbers devices. Neighbours have neighbouring places
    along the ring; places are positions unless the group has an `order`.

    Attributes:
      size: devices in the ring.
      me: own position, 0 <= me < size.
      place: own place along the ring, 0 <= place < size.
      line: whether nothing goes from the last place to the first; of two devices it is one.
      core: which of each device's cores has this ring; None for the only one.
      several: whether the only core goes round two rings; of two cores each goes round one.
    """

    def __init__(
        self, group: Group, members_ref: Ref | None = None, core: Any = None, number: Any = None
    ) -> None:
        """The ring of a `number`, 0 or 1, of a group that has two; by itself that of the core's."""
        self.size = group.size
        self.core = core
        self.line = group.line or group.size == 2
        self.several = group.second is not None and core is None
        self._group = group
        table: Any = members_ref
        self._members_ref = table
        if number is None:
            number = 0 if core is None or group.second is None else core
        self.me = lax.axis_index(group.axes)
        begin, everyone = 0, math.prod(group.sizes)
        if group.index_groups is not None:
            stands = table[self.me]
            self.me = lax.rem(stands, np.int32(self.size))
            self._members = everyone + stands - self.me  # where they are
            begin = 2 * everyone
        self.place = self.me
        if group.order is not None:
            begin += 2 * number * self.size
            self.place = table[begin + self.me]
            self._order = begin + self.size

    def all_of_core(self) -> list["Ring"]:
        """Every ring that this core goes round."""
        return [self.of_number(number) for number in (0, 1)] if self.several else [self]

    def of_number(self, number: Number) -> "Ring":
        """Where there are several: the ring of that number, 0 or 1."""
        return Ring(self._group, self._members_ref, self.core, number)

    def device_id(self, position: Number) -> DeviceId:
        """The mesh coordinates, over the group's axes, of the device at a position."""
        number: Any = position
        if self._group.index_groups is not None:
            number = self._members_ref[self._members + position]
        return dict(zip(self._group.axes, unraveled(number, self._group.sizes), strict=True))

    def peer(self, offset: Number) -> DeviceId:
        """The device `offset` places to the right (negative: to the left), around the ring."""
        return self.device_id(self.block(offset))

    def block(self, offset: Number) -> Any:
        """The number of the block that belongs to the device `offset` places to the right."""
        place = wrap(self.place + offset, self.size)
        return place if self._group.order is None else self._members_ref[self._order + place]


def wrap(position: Number, n: int) -> Any:
    """`position` mod n, for -n <= position < 2n."""
    if isinstance(position, int):
        return position % n
    return lax.rem(position + n, np.int32(n))


def unraveled(number: Number, sizes: Sequence[int]) -> list[Any]:
    """Where a number is in an array of these sizes, row-major."""
    index: list[Any] = []
    for size in reversed(sizes[1:]):
        index.insert(0, lax.rem(number, np.int32(size)) if size > 1 else 0)
        number = lax.div(number, np.int32(size)) if size > 1 else number
    return [number, *index] if sizes else []


def wrap_step(step: Step, slots: int) -> Any:
    """`step` mod `slots`, for step >= 0."""
    return step % slots if isinstance(step, int) else lax.rem(step, np.int32(slots))


@dataclasses.dataclass(frozen=True)
class Stream:
    """One way round a ring or along a line, which every block travels in equal chunks, in turn.

    Attributes:
      direction: `RIGHT` or `LEFT`.
      chunks: how many chunks a block is cut into.
      near: how many hops every chunk travels; a device sends as many of each. On a line, the hops
        from its first device to its last.
      far: the range of chunks that travel one hop more, to the opposite device of an even ring.
      line: whether the stream ends at the last device, and does not go round.
    """

    direction: int
    chunks: int
    near: int
    far: tuple[int, int] = (0, 0)
    line: bool = False

    @property
    def hops(self) -> int:
        """The most hops of any chunk."""
        return self.near + (self.far[0] < self.far[1])

    @property
    def far_chunks(self) -> int:
        """How many chunks travel one hop more."""
        return self.far[1] - self.far[0]

    def chunk(self, turn: Number) -> Any:
        """The chunk whose turn it is, 0 <= turn < chunks: first those that travel furthest."""
        return wrap(self.far[0] + turn, self.chunks)

    def turn(self, chunk: Number) -> Any:
        """When it is a chunk's turn: `chunk` backwards."""
        return wrap(chunk - self.far[0], self.chunks)

    def hops_of(self, chunk: Number) -> Any:
        """How many hops a chunk travels."""
        start, stop = self.far
        is_far = (start <= chunk) & (chunk < stop)
        return self.near + (is_far if isinstance(is_far, bool) else is_far.astype(np.int32))

    def behind(self, ring: Ring) -> Any:
        """How many devices of a line are upstream of this one."""
        return ring.place if self.direction == RIGHT else ring.size - 1 - ring.place

    def ahead(self, ring: Ring) -> Any:
        """How many devices of a line are downstream of this one."""
        return ring.size - 1 - self.behind(ring)


def streams(n: int, *, bidirectional: bool, chunks: int) -> tuple[Stream, ...]:
    """The streams on which every block reaches, or comes from, all other n-1 devices.

    Both ways round, a block travels (n-1)/2 hops each way. The opposite device of an even ring gets
    half of the chunks from either side, so that every link carries (n-1)/2 blocks either way; of an
    odd number of chunks one more comes from the right, a single chunk from the left.

    Args:
      n: devices in the ring.
      bidirectional: use both directions of the links.
      chunks: how many a block has.
    """
    if not bidirectional:
        return (Stream(RIGHT, chunks, n - 1),)
    near, middle = (n - 1) // 2, max(1, chunks // 2)
    if n % 2:
        return Stream(RIGHT, chunks, near), Stream(LEFT, chunks, near)
    right = Stream(RIGHT, chunks, near, (0, middle))
    left = Stream(LEFT, chunks, near, (middle, chunks))
    return tuple(stream for stream in (right, left) if stream.hops)


def line_streams(n: int, chunks: int) -> tuple[Stream, Stream]:
    """The two streams of a line of n devices."""
    return Stream(RIGHT, chunks, n - 1, line=True), Stream(LEFT, chunks, n - 1, line=True)


def barrier_of(streams: tuple[Stream, ...]) -> str:
    """The entry barrier (`sync.enter`) of a kernel that sends along streams alone."""
    return "line" if streams[0].line else "neighbours"


ChunkBody = Callable[[Any, int, Any], None]


def for_each_chunk(
    streams: tuple[Stream, ...], body: ChunkBody, step: Step = 0, far: bool = False
) -> None:
    """body(step, stream number, chunk) for every chunk; with `far`, for those that go furthest.

    Chunk by chunk, in both directions each: while one is seen to, the others are on the wire. Those
    that travel furthest come first in their stream (`Stream.chunk`).
    Loops and no conditions: libtpu cannot compile a predicated DMA of so many operands for v4.
    """
    whole = streams[0].near and not far
    counts = [stream.chunks if whole else stream.far_chunks for stream in streams]

    def in_streams(turn: Number, chosen: Sequence[int]) -> None:
        for i in chosen:
            body(step, i, streams[i].chunk(turn))

    apart = [[i] for i in range(len(streams))]
    for chosen in [range(len(streams))] if len(set(counts)) == 1 else apart:
        if counts[chosen[0]]:
            chunks = counts[chosen[0]]
            lax.fori_loop(0, chunks, lambda turn, _, c=chosen: in_streams(turn, c), None)


def for_each_step(streams: tuple[Stream, ...], body: ChunkBody, start: int) -> None:
    """`for_each_chunk` for all steps from `start` on; the code does not grow with their number."""
    near = streams[0].near
    lax.fori_loop(start, near, lambda step, _: for_each_chunk(streams, body, step), None)
    if near >= start:
        for_each_chunk(streams, body, near, far=True)


def only_if(condition: Any, body: Callable[[], None]) -> None:
    """body() where a condition holds.

    Where it is known only in the kernel that is a loop, for the reason that `for_each_chunk` has.
    """
    if isinstance(condition, bool):
        if condition:
            body()
        return
    lax.fori_loop(0, condition.astype(np.int32), lambda _, __: body(), None)
