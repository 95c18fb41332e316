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

RIGHT, LEFT = +1, -1


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices that take part in one collective, seen from outside the kernel.

    Attributes:
      axes: mesh axis names, major first; devices are numbered row-major over them, as lax does.
      sizes: the size of each axis.
      index_groups: `axis_index_groups`: equal-sized lists of device numbers that partition the
        axes, each list a ring of its own in the order given; None for one ring of all.
      order: device numbers in the order of the ring, so that neighbours share a link (see
        `placement.arranged`); None for 0, 1, ... Not together with `index_groups`.
      line: whether the ring's closing hop runs back over the links of all others.
      chip: whether the ring is the devices of one chip, which no link of the torus joins.
      torus: the rings along the axes of the torus that the group lies on, if it has several: mesh
        axes, or rings of the group's device numbers. How a group lies does not make it another.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index_groups: tuple[tuple[int, ...], ...] | None = None
    order: tuple[int, ...] | None = None
    line: bool = False
    chip: bool = False
    torus: tuple["Group", ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def size(self) -> int:
        """Devices in the ring."""
        if self.index_groups is not None:
            return len(self.index_groups[0])
        return math.prod(self.sizes)

    def members(self) -> jax.Array | None:
        """What this device's kernel must know of the group; None where arithmetic tells it.

        Its position, then the device numbers at positions 0, 1, ...; or, where the ring has an
        order of its own, its place along the ring, then the positions of the devices at places
        0, 1, ... Kernels read it from SMEM.
        """
        groups = self.index_groups if self.order is None else (self.order,)
        if groups is None:
            return None
        table = np.zeros((math.prod(self.sizes), 1 + self.size), np.int32)
        for group in groups:
            for place, device in enumerate(group):
                table[device] = (place, *group)
        return lax.dynamic_index_in_dim(table, lax.axis_index(self.axes), keepdims=False)


class Ring:
    """A group seen by one of its devices, inside a kernel.

    Blocks are numbered by position, as lax numbers devices. Neighbours are those at neighbouring
    places along the ring, which are the positions unless the group has an order of its own.

    Attributes:
      size: devices in the ring.
      me: own position, 0 <= me < size.
      place: own place along the ring, 0 <= place < size.
      line: whether it is a line, whose last and first share no link.
    """

    def __init__(self, group: Group, members_ref: Any = None) -> None:
        self.size, self.line = group.size, group.line
        self._group = group
        self._members_ref = members_ref
        self.place = lax.axis_index(group.axes) if members_ref is None else members_ref[0]
        self.me = lax.axis_index(group.axes) if group.order is not None else self.place

    def device_id(self, position: Any) -> dict[str, Any]:
        """The mesh coordinates, over the group's axes, of the device at a position."""
        number = position
        if self._group.index_groups is not None:
            number = self._members_ref[1 + position]
        coordinates: dict[str, Any] = {}
        for axis, size in zip(reversed(self._group.axes), reversed(self._group.sizes), strict=True):
            coordinates[axis] = number if len(self._group.axes) == 1 else lax.rem(number, size)
            number = lax.div(number, size) if len(self._group.axes) > 1 else number
        return coordinates

    def peer(self, offset: Any) -> dict[str, Any]:
        """The device `offset` places to the right (negative: to the left), around the ring."""
        return self.device_id(self.block(offset))

    def block(self, offset: Any) -> Any:
        """The number of the block that belongs to the device `offset` places to the right."""
        place = wrap(self.place + offset, self.size)
        return place if self._group.order is None else self._members_ref[1 + place]


def wrap(position: Any, n: int) -> Any:
    """`position` mod n, for -n <= position < 2n."""
    if isinstance(position, int):
        return position % n
    return lax.rem(position + n, np.int32(n))


def wrap_step(step: Any, slots: int) -> Any:
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

    def chunk(self, turn: Any) -> Any:
        """The chunk whose turn it is, 0 <= turn < chunks: first those that travel furthest."""
        return wrap(self.far[0] + turn, self.chunks)

    def turn(self, chunk: Any) -> Any:
        """When it is a chunk's turn: `chunk` backwards."""
        return wrap(chunk - self.far[0], self.chunks)

    def hops_of(self, chunk: Any) -> Any:
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
      chunks: of a block.
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
    streams: tuple[Stream, ...], body: ChunkBody, step: Any = 0, far: bool = False
) -> None:
    """body(step, stream number, chunk) for every chunk; with `far`, for those that go furthest.

    Chunk by chunk, in both directions each: while one is seen to, the others are on the wire. Those
    that travel furthest come first in their stream (`Stream.chunk`).
    Loops and no conditions: libtpu cannot compile a predicated DMA of so many operands for v4.
    """
    whole = streams[0].near and not far
    counts = [stream.chunks if whole else stream.far_chunks for stream in streams]

    def in_streams(turn: Any, chosen: Sequence[int]) -> None:
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


def gather_table(n: int, streams: tuple[Stream, ...]) -> str:
    """Which blocks each device of a ring holds after every step, as printed in `all_gather`."""
    whole = frozenset(range(streams[0].chunks))
    held = [[whole if b == device else frozenset() for b in range(n)] for device in range(n)]
    lines = [_table_line(0, held, whole)]
    for step in range(max(stream.hops for stream in streams)):
        before = [row.copy() for row in held]
        for stream in streams:
            moving = {chunk for chunk in whole if step < stream.hops_of(chunk)}
            for device in range(n):
                block = wrap(device - stream.direction * step, n)
                assert moving <= before[device][block], "a device sends on what it does not hold"
                held[wrap(device + stream.direction, n)][block] |= moving
        lines.append(_table_line(step + 1, held, whole))
    return "\n".join(lines)


def line_table(n: int) -> str:
    """`gather_table` of a line: what is not there cannot be passed on."""
    lines = []
    for step in range(n):
        rows = ([b if abs(b - device) <= step else "." for b in range(n)] for device in range(n))
        lines.append(f"{step:<6}" + "  ".join(f"[{''.join(map(str, row))}]" for row in rows))
    return "\n".join(lines)


def reduce_table(n: int, streams: tuple[Stream, ...]) -> str:
    """How many terms the sums under way to each device hold, as printed in `reduce_scatter`.

    Columns are devices; a digit for each chunk of a device's own block: from 1, its own, to n.
    """
    terms = [1] * streams[0].chunks
    lines = []
    for step in range(max(stream.hops for stream in streams) + 1):
        lines.append(f"{step:<6}" + "  ".join([f"[{''.join(map(str, terms))}]"] * n))
        for stream in streams:
            for chunk in range(stream.chunks):
                terms[chunk] += bool(step < stream.hops_of(chunk))  # one more term on its way
    return "\n".join(lines)


def _table_line(step: int, held: list[list[Any]], whole: Any) -> str:
    rows = ("".join(str(b) if h == whole else "." for b, h in enumerate(row)) for row in held)
    return f"{step:<6}" + "  ".join(f"[{row}]" for row in rows)
