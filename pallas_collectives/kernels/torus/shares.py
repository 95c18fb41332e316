"""All axes of a torus at once: how data is split, and in which order each part goes.

A block is cut in parts, each of them a stream. A stream goes through all axes, one after the other,
both ways round a ring along each; what it has met on one axis goes along the next as one piece.
Streams differ in the axis that they begin with, and in the direction in which they go as far as the
opposite device, so that every link of the torus carries the same load at all times. Gathering on
4 x 4 devices; +2-1 x 4 means 2 hops to the right and 1 to the left, each of 4 blocks' part:

    stream  part  phase 0     phase 1
    0       1/4   x +2-1 x 1  y +2-1 x 4
    1       1/4   x +1-2 x 1  y +1-2 x 4
    2       1/4   y +2-1 x 1  x +2-1 x 4
    3       1/4   y +1-2 x 1  x +1-2 x 4

Where blocks go by in sections, a stream of most plans (`halfway`) goes one way alone, every second
one to the left: its next section is under way by then, and it takes half as much of VMEM.

Each link carries (n-1)/(2d) blocks for n devices and d axes, the least there is: n-1 blocks come in
over 2d links. On axes of different lengths, parts of one size would load the longer axis more; so
parts that begin with different axes differ in size (`balance`). The devices of one chip share its
links and are an axis of their own, through which all parts go last. A reduction goes the same ways
backwards. When each hop has its turn is `timetable`'s matter.

The algorithm: N. Jain and Y. Sabharwal, Optimal bucket algorithms for large MPI collectives on
torus interconnects, ICS 2010; XLA's own all-reduce goes round a torus alike.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives.annotations import DType, Number, Ref
from pallas_collectives.kernels.machinery.blocks import LANES, Chunking, sublanes
from pallas_collectives.kernels.torus import balance
from pallas_collectives.topology.groups import LEFT, RIGHT, Group, Ring

# What each of two cores has of a block at the least: by the replay of v5p a packed sum over two
# axes takes 8% less than on one core so, and with half of this 10% longer.
UNITS_FOR_A_CORE = 8


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Streams of one size that go through the axes in one order.

    Attributes:
      order: the axes, in the order in which a gather goes through them.
      start: where along the cut its first piece begins.
      size: the extent of one piece along the cut.
      streams: how many; round a ring even ones go RIGHT, odd ones LEFT (`direction_of`), or both
        ways, and as far as the opposite device in that direction (`ways_round`).
      pieces: how many there are, dealt out to the streams in turn. A stream's pieces go one after
        the other, each as a section of its own.
    """

    order: tuple[int, ...]
    start: int
    size: int
    streams: int
    pieces: int

    @property
    def sections(self) -> int:
        """Pieces of its first stream, which has the most."""
        return -(-self.pieces // self.streams)

    def streams_in(self, section: Any) -> Any:
        """How many streams, from the first on, have a piece in a section; none before section 0."""
        left = self.pieces - section * self.streams
        if isinstance(section, int):
            return min(left, self.streams) if section >= 0 else 0
        return jnp.where(section < 0, 0, jnp.clip(left, 0, self.streams))

    def sections_of(self, stream: Number) -> Any:
        """How many pieces a stream has."""
        most = self.pieces - stream + self.streams - 1
        return most // self.streams if isinstance(stream, int) else lax.div(most, self.streams)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Blocks of one shape on a torus, and how they are cut.

    Arrays of blocks have a dimension for each axis of the torus (`Shares.shape`), so that all
    blocks along some axes are one piece that one DMA moves.

    Attributes:
      sizes: devices along each axis of the torus.
      sharing: how many directions share a link along each axis (`balance.links_shared`).
      block: the shape of one block.
      at: before which dimension of a block those of the torus stand.
      cut: the dimension along which a block is cut.
      grain: every cut falls on a multiple of it.
      bundles: what a block is cut into.
      lines: which axes are lines: there every stream goes both ways, and no hop closes a ring.
      within: the axis that is the devices of a chip, if there is one.
      cores: how many a device has; each has as much of a block along the cut, and these bundles.
      core: which of them this is.
      halfway: whether every stream goes both ways round a ring, too, as far as the opposite
        device: in half as many hops.
      parts: in how many parts, 1 or 2, what a stream has met goes along the last axis, one after
        the other: those of half of the places on the axis before. Each is a phase of its own.
    """

    sizes: tuple[int, ...]
    sharing: tuple[int | Fraction, ...]
    block: tuple[int, ...]
    at: int
    cut: int
    grain: int
    bundles: tuple[Bundle, ...]
    lines: tuple[bool, ...]
    within: int | None
    cores: int = 1
    core: Number = 0
    halfway: bool = False
    parts: int = 1

    @classmethod
    def of(
        cls,
        axes: Sequence[Group],
        block: tuple[int, ...],
        at: int,
        dtype: DType,
        streams: int,
        both: bool = False,
        there_and_back: bool = False,
        tile: tuple[int, int] | None = None,
        cores: int = 1,
        halfway: bool = True,
    ) -> "Shares":
        """Cuts blocks in so many streams, 2^k, for each axis to begin with, as far as they go.

        Every piece is a multiple of `tile`, rows and columns; by default the dtype's tile.
        Blocks that cannot be divided between `cores` alike, or are small, are all the first one's.

        With `both`, half of more than two go on from there in the other order (see
        `balance.ways`). With `there_and_back` what is reduced is gathered again, meanwhile.
        `halfway` is as above.
        """
        sizes = tuple(axis.size for axis in axes)
        sharing = tuple(balance.links_shared(axis, there_and_back) for axis in axes)
        cut, grain = _finest_cut(block, dtype, len(sizes) * streams * cores, tile)
        units = block[cut] // grain
        cores = cores if units % cores == 0 and units >= cores * UNITS_FOR_A_CORE else 1
        extent = block[cut] // cores
        units = extent // grain
        while streams > 2 and units % streams != 0:
            streams //= 2
        within = next((a for a, axis in enumerate(axes) if axis.chip), None)
        lines = tuple(axis.line for axis in axes)
        orders, exact, load = balance.ways(sizes, sharing, within, both=both and streams > 2)
        streams = streams * len(load) // len(orders)  # as many in all
        bundles, start = [], 0
        for order, share in zip(orders, balance.shares(exact, load, units // streams), strict=True):
            if share:
                bundles.append(Bundle(order, start, share * grain, streams, streams))
                start += share * grain * streams
        if start < extent:  # an odd one left over
            bundles.append(Bundle(tuple(range(len(sizes))), start, extent - start, 1, 1))
        return cls(
            sizes,
            sharing,
            block,
            at,
            cut,
            grain,
            tuple(bundles),
            lines,
            within,
            cores,
            halfway=halfway,
        )

    def on(self, core: Number | None) -> "Shares":
        """The plan as a core follows it; None for the only one that runs a kernel."""
        return self if core is None else dataclasses.replace(self, core=core)

    @property
    def extent(self) -> int:
        """What a core has of a block along the cut."""
        return self.block[self.cut] // self.cores

    def in_sections(self, size: int, streams: int, even: bool = True, parts: int = 1) -> "Shares":
        """The same blocks in pieces of `size`, which go by in sections, a piece for each stream.

        Bundles have so many sections that all links carry about the same. What is left over are
        bundles of small pieces, shared out likewise; without `even` as little as can be.
        """
        orders, exact, load = balance.ways(self.sizes, self.sharing, self.within)
        each = size // self.grain * 2  # units that a pair of streams takes
        units = self.extent // self.grain
        pairs, small = balance.in_pairs(exact * units, load, each, even)
        sections = 2 * max(pairs) // streams
        bundles, start = [], 0

        def add(order: tuple[int, ...], size: int, pieces: int, streams: int) -> None:
            nonlocal start
            bundles.append(Bundle(order, start, size, min(streams, pieces), pieces))
            start += pieces * size

        for order, count in zip(orders, pairs, strict=True):
            if count:
                add(order, size, 2 * count, streams)
        for order, count in zip(orders, small, strict=True):
            if count:
                most = min(count, max(1, sections))
                cuts = max(n for n in range(1, most + 1) if count % n == 0)
                add(order, count // cuts * self.grain, 2 * cuts, 2)
        if odd := self.extent - start:
            add(orders[0], odd, 1, 1)
        plan = dataclasses.replace(self, bundles=tuple(bundles))
        return dataclasses.replace(plan, parts=parts)

    @property
    def busiest(self) -> float:
        """What the busiest links carry."""
        load = [0.0] * len(self.sizes)
        for bundle in self.bundles:
            met = bundle.pieces * bundle.size
            for axis in bundle.order:
                load[axis] += met * (self.sizes[axis] - 1) * float(self.sharing[axis])
                met *= self.sizes[axis]
        return max(load)

    @property
    def chunking(self) -> Chunking:
        """In what pieces a block goes along the first axis."""
        return Chunking(self.cores * sum(bundle.pieces for bundle in self.bundles), self.sections)

    @property
    def sections(self) -> int:
        """The most sections of any bundle."""
        return max(bundle.sections for bundle in self.bundles)

    @property
    def phases(self) -> range:
        """Those of a gather: one along each axis, and of the last one all `parts`."""
        return range(len(self.sizes) - 1 + self.parts)

    def along(self, phase: int) -> int:
        """The number of the axis, in a bundle's order, that a phase goes along."""
        return min(phase, len(self.sizes) - 1)

    def parts_along(self, number: int) -> int:
        """How many phases go along the axis of this number in a bundle's order."""
        return self.parts if number + 1 == len(self.sizes) else 1

    @property
    def ways(self) -> int:
        """The most channels that a stream has along an axis: two if it goes both ways."""
        return max(map(self.ways_along, range(len(self.sizes))))

    def ways_along(self, axis: int) -> int:
        """How many it has along one."""
        return 1 + (self.lines[axis] or (self.halfway and self.sizes[axis] > 2))

    def is_paired(self, bundle: Bundle, phase: int) -> bool:
        """Whether all that goes one way round an axis has something that goes the other way.

        Then upstream cannot be far ahead of us, and needs no credits where messages have places of
        their own. Each device sees to the two streams of a pair in turn: hop t to the right, hop t
        to the left. Before it sends to the right at hop t, it has taken what we sent to the left at
        hop t - 2; that we sent after we had taken what came from it at hop t - 3. So no more than
        three of its messages are on their way. At a section's end each takes the last of both.
        """
        in_pairs = bundle.pieces % 2 == bundle.streams % 2 == 0
        return in_pairs and not self.halfway and not self.lines[bundle.order[phase]]

    def stream(self, b: int, stream: Number) -> Any:
        """The number of a stream among those of all bundles."""
        return sum(bundle.streams for bundle in self.bundles[:b]) + stream

    @property
    def streams(self) -> int:
        """How many there are."""
        return self.stream(len(self.bundles), 0)

    def hops(self, bundle: Bundle, phase: int) -> int:
        """Hops of a bundle in a phase: along axis `bundle.order[phase]`, to all others on it."""
        axis = bundle.order[self.along(phase)]
        round_ring = self.halfway and not self.lines[axis]
        return self.sizes[axis] // 2 if round_ring else self.sizes[axis] - 1

    def shape(self, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of an array of as many blocks as `sizes` says along each axis; of all."""
        return (*self.block[: self.at], *(sizes or self.sizes), *self.block[self.at :])

    def piece_shape(self, bundle: Bundle, phase: int) -> tuple[int, ...]:
        """The shape of what one hop of one stream moves in a phase."""
        met = bundle.order[:phase]
        sizes = [n if axis in met else 1 for axis, n in enumerate(self.sizes)]
        shape = list(self.shape(sizes))
        shape[self._cut_dimension] = bundle.size
        return tuple(shape)

    def part_of_all(self, number: int, section: Number, part: int) -> Any:
        """The number of a section's part along such an axis, among those of all sections."""
        parts = self.parts_along(number)
        return section if parts == 1 else section * parts + part

    def section_of(self, number: int, part: Number) -> Any:
        """The section that part number `part` of all belongs to."""
        parts = self.parts_along(number)
        return part if parts == 1 else lax.div(part, np.int32(parts))

    def parts_of(self, bundle: Bundle, number: int, stream: Number) -> Any:
        """How many of them a stream has in all."""
        return self.parts_along(number) * bundle.sections_of(stream)

    def message_shape(self, bundle: Bundle, number: int) -> tuple[int, ...]:
        """The shape of what one message holds along the axis of this number in its order."""
        shape = list(self.piece_shape(bundle, number))
        if self.parts_along(number) > 1:
            shape[self.at + bundle.order[number - 1]] //= self.parts
        return tuple(shape)

    def met(self, bundle: Bundle, number: int, part: Number) -> list[Any]:
        """The places whose blocks such a message holds, one part of all: see `blocks`."""
        place: list[Any] = [None] * len(self.sizes)
        if self.parts_along(number) > 1:
            before = bundle.order[number - 1]
            size = self.sizes[before] // self.parts
            place[before] = pl.ds(lax.rem(part, np.int32(self.parts)) * size, size)
        return place

    def piece(
        self, ref: Ref, numbers: Sequence[Any], bundle: Bundle, section: Any, stream: Number
    ) -> Any:
        """A stream's part of some of `ref`'s blocks: as in `blocks`."""
        start = bundle.start + (section * bundle.streams + stream) * bundle.size
        start += self.core * self.extent
        if not isinstance(start, int):
            start = pl.multiple_of(start, self.grain)
        index = self._index(ref, numbers)
        index[self._cut_dimension] = pl.ds(start, bundle.size)
        return ref.at[tuple(index)]

    def blocks(self, ref: Ref, numbers: Sequence[Any]) -> Any:
        """Some of `ref`'s blocks, or the part of them that `ref` has.

        They are those at some place: on each axis all (None), one (its number), or a span.
        """
        return ref.at[tuple(self._index(ref, numbers))]

    def span(self, axis: int, place: Any) -> Any:
        """The places on an axis that a place says: see `blocks`."""
        if place is None:
            return pl.ds(0, self.sizes[axis])
        return place if isinstance(place, pl.Slice) else pl.ds(place, 1)

    def _index(self, ref: Ref, numbers: Sequence[Any]) -> list[Any]:
        index = [pl.ds(0, size) for size in ref.shape]
        for axis, number in enumerate(numbers):
            if number is not None:
                index[self.at + axis] = self.span(axis, number)
        return index

    @property
    def _cut_dimension(self) -> int:
        return self.cut if self.cut < self.at else self.cut + len(self.sizes)


def _finest_cut(
    block: tuple[int, ...], dtype: DType, wanted: int, tile: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The dimension to cut, and in multiples of what: the first that is fine enough, or the finest.

    Fine enough: shares may be off by one unit; with 32 units each that is 3% of one in four.
    """
    grains = (*(1,) * (len(block) - 2), *(tile or (sublanes(dtype), LANES)))[-len(block) :]
    units = [n // grain if n % grain == 0 else 1 for n, grain in zip(block, grains, strict=True)]
    found = next((i for i, count in enumerate(units) if count >= 32 * wanted), None)
    cut = units.index(max(units)) if found is None else found
    return cut, block[cut] // units[cut] if units[cut] == 1 else grains[cut]


def direction_of(stream: Number) -> Any:
    """Which way round a stream of a bundle goes."""
    return RIGHT - (RIGHT - LEFT) * (stream & 1)


def ways_round(plan: Shares, size: int, stream: Number) -> list[tuple[int, Any, Any]]:
    """How a stream goes round a ring of so many devices.

    Returns:
      (way, direction, hops): both ways if `plan.halfway`, and to the opposite device of an even
      ring in the direction that the stream has otherwise.
    """
    if not plan.halfway or size == 2:  # to the only other device
        return [(0, direction_of(stream), size - 1)]
    short = stream & 1 if size % 2 == 0 else 0
    return [(0, RIGHT, size // 2 - short), (1, LEFT, (size - 1) // 2 + short)]


def legs(
    plan: Shares, ring: Ring, bundle: Bundle, phase: int, stream: Number
) -> list[tuple[int, Any, Any, Any]]:
    """How a stream of a gather passes a device along an axis, on each of its ways.

    Returns:
      (way, direction, how many messages come, how many go): on a line both ways, round a ring as
      `ways_round` has it.
    """
    if not plan.lines[bundle.order[phase]]:
        return [(way, to, hops, hops) for way, to, hops in ways_round(plan, ring.size, stream)]
    place, last = ring.place, ring.size - 1
    right = jnp.where(place < last, place + 1, 0)
    left = jnp.where(place > 0, last - place + 1, 0)
    return [(0, RIGHT, place, right), (1, LEFT, last - place, left)]
