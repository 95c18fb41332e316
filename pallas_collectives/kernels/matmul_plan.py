"""How fused products go: in how many chunks a block travels, and each chunk's tiles in VMEM.

What takes least time by the chip's rates is chosen here, and nowhere else: `collective_matmul`
follows a plan, and whether a product is fused at all goes by the same seconds.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Number
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import pipelines, streams
from pallas_collectives.kernels.machinery import product
from pallas_collectives.kernels.machinery.blocks import LANES, Blocks, Chunking, sublanes
from pallas_collectives.kernels.machinery.product import Problem, Tiles
from pallas_collectives.topology import chips, groups
from pallas_collectives.topology.groups import Group, Stream

# Chunks of a block that a core may have: the more, the less there is at the end that nothing hides;
# but each fetches the weights anew. The opposite device gets half from either side, but a single
# one from one side.
CHUNKS = (1, 2, 4, 8, 16)
BARE_OF_SUMS = 4  # products of chunks that nothing hides where sums are longer on the wire
MOST_SUMMED = 8  # of a block that is summed: each also waits for its sum and fetches it, at a hop


@dataclasses.dataclass(frozen=True)
class ProductTiling:
    """How a block goes in chunks, and each chunk's products through VMEM.

    Attributes:
      blocks: the blocks of x, seen as (A, rows, K), and their chunks; in a gather, those of all
        cores.
      problems: one product each, of a chunk.
      tiles: theirs.
      cores: how many share each block: in a gather its chunks, in a scatter its columns.
    """

    blocks: Blocks
    problems: tuple[Problem, ...]
    tiles: tuple[Tiles, ...]
    cores: int

    @property
    def chunks(self) -> int:
        """Chunks of a block that each core sees to."""
        return self.blocks.chunks // (1 if self._scatters else self.cores)

    @property
    def chunking(self) -> Chunking:
        """In what pieces a block is sent."""
        return Chunking(self.cores * self.chunks)

    @property
    def flops(self) -> int:
        """Operations of the products of one block, on all cores."""
        return self.cores * self.chunks * sum(problem.flops for problem in self.problems)

    def on(self, core: Number | None) -> "ProductTiling":
        """The plan as a core follows it, which counts chunks from the first of its own."""
        first = 0 if core is None or self._scatters else core * self.chunks
        return dataclasses.replace(self, blocks=dataclasses.replace(self.blocks, first=first))

    def streams(self, devices: int) -> tuple[Stream, ...]:
        """The streams of each core."""
        return groups.streams(devices, bidirectional=True, chunks=self.chunks)

    @property
    def blocks_of_x(self) -> Blocks:
        """The blocks of x as it is."""
        if not self.problems[0].turned:
            return self.blocks
        batch, rows, depth = self.blocks.shape
        return dataclasses.replace(self.blocks, shape=(batch, depth, rows), axis=2, cut=2)

    def blocks_of(self, columns: int) -> Blocks:
        """The same blocks of an array of another size in its last dimension."""
        return dataclasses.replace(self.blocks, shape=(*self.blocks.shape[:2], columns))

    @property
    def kept_by_compiler(self) -> int:
        """Bytes of VMEM that all products of a core together take beside their scratch."""
        return sum(map(product.kept_by_compiler, self.problems, self.tiles))

    @property
    def seconds_per_block(self) -> float:
        """What the products of one block take by the chip's rates, on all these cores."""
        chip = chips.current()
        once = sum(
            product.seconds(p, t, chip, self.cores)
            for p, t in zip(self.problems, self.tiles, strict=True)
        )
        return once * self.chunks

    def seconds(self, group: Group, block_bytes: int) -> float:
        """What the kernel takes by the chip's rates, where a block has so many bytes on the wire.

        Where the wire takes longer: that, a DMA's latency for each chunk, in a scatter of two, and
        the products that nothing hides, those of the chunks that come last; in a scatter of two at
        its start besides, and what the first waits for its tiles, for nothing sets out before it.
        Where the products do: these, a DMA's latency for each chunk, what the first waits for its
        tiles, and what `_waits` says.
        """
        chip, n, wire = chips.current(), group.size, self._wire_seconds(group, block_bytes)
        of_chunk = self.seconds_per_block / self.chunks
        late = sum(
            product.seconds_to_bring(p, t, chip, self.cores)
            for p, t in zip(self.problems, self.tiles, strict=True)
        )
        products = n * self.seconds_per_block + late + self._waits(group, block_bytes)
        starts = chip.dma_latency * n * self.chunks
        # The opposite device's chunks come last, from either side, but a single one from one.
        bare = 2 if n % 2 else min(2, self.chunks)
        ends = BARE_OF_SUMS * of_chunk + late if self._scatters else bare * of_chunk
        return max(wire + ends + (2 if self._scatters else 1) * starts, products + starts)

    def _waits(self, group: Group, block_bytes: int) -> float:
        """What products wait for the wire where they take longer.

        In a scatter see `_waits_for_sums`. In a gather those of the first to come wait for what
        that takes longer on the wire, with all that are under way, than the own block's products.
        """
        hop = wire_seconds(group, block_bytes) * 2 / max(1, group.size - 1)  # of a block
        if self._scatters:
            return self._waits_for_sums(hop, group.size)
        under_way = min(1.0, pipelines.ON_WIRE * self._rings(group) / self.chunks)
        return max(0.0, under_way * hop - self.seconds_per_block)

    def _waits_for_sums(self, hop: float, devices: int) -> float:
        """What products of the own block wait for the sums that come last, at the end of a scatter.

        When the first of these is to be added to, upstream has sent it and then multiplied the
        chunks behind it: on an even ring each block's other chunks, on an odd one all of another
        block besides. A single chunk that goes to the opposite device is sent with nothing behind
        it, and a step before with one block.
        """
        block, chunks = self.seconds_per_block, self.chunks
        behind = block * (devices % 2 + (chunks - 1) / chunks)
        wait = max(0.0, hop / chunks - behind)
        single = chunks == 1 and devices % 2 == 0
        return wait + (max(0.0, hop - block) if single else 0.0)

    @property
    def _scatters(self) -> bool:
        return any(problem.terms for problem in self.problems)

    def pace(self, group: Group, block_bytes: int) -> pipelines.Pace:
        """When a gather's messages are to set out, where a block has so many bytes on the wire."""
        wire, rings = self._wire_seconds(group, block_bytes), self._rings(group)
        on_wire = wire / max(1, self._messages(group)) / rings  # rings carry one each meanwhile
        lags = not self.outlasts_wire(group, block_bytes)
        return pipelines.Pace.of(self.seconds_per_block / self.chunks, on_wire, rings, lags)

    def outlasts_wire(self, group: Group, block_bytes: int) -> bool:
        """Whether the products take longer than the wire."""
        return group.size * self.seconds_per_block > self._wire_seconds(group, block_bytes)

    def _wire_seconds(self, group: Group, block_bytes: int) -> float:
        """What the wire takes; a single chunk reaches the opposite device from one side alone."""
        even = (group.size - 1) / 2 * self.chunks / self._rings(group)
        return wire_seconds(group, block_bytes) * self._messages(group) / (even or 1)

    def _messages(self, group: Group) -> int:
        """Chunks of a core that the busiest of a device's links carries."""
        carried: dict[tuple[Number, int], int] = collections.Counter()
        for stream, chunk in itertools.product(self.streams(group.size), range(self.chunks)):
            ring = streams.ring_number(chunk, self.chunks) if self._rings(group) > 1 else 0
            carried[ring, stream.direction] += stream.hops_of(chunk)
        return max(carried.values(), default=0)

    def _rings(self, group: Group) -> int:
        """How many rings a core goes round: of two cores each has one."""
        return 2 if group.second is not None and self.cores == 1 else 1


def wire_seconds(group: Group, block_bytes: int) -> float:
    """What it takes to pass blocks both ways round a ring or two, by the rates of the chip."""
    chip, n = chips.current(), group.size
    link = chip.link_bandwidth * chip.link_efficiency / sharing(group) / (2 if group.line else 1)
    link *= 1 if group.second is None else 2  # half of each block goes round either ring
    return (n - 1) / 2 * block_bytes / link + (n // 2) * (chip.hop_latency + chip.dma_latency)


def sharing(group: Group) -> int:
    """How many rings have the same links: one for each device of a chip, if not all are in it."""
    alone = math.prod(jax.sharding.get_abstract_mesh().shape.values()) <= group.size
    return 1 if alone or group.chip else chips.current().devices_per_chip


def plan(
    shape: tuple[int, int, int],
    weights: Sequence[tuple[int, Any]],  # N and dtype of each
    x_dtype: DType,
    out_dtype: DType,
    *,
    group: Group,
    block_bytes: int,  # on the wire
    cores: int,
    terms: int = 0,
    transposed: bool = False,
    turned: bool = False,
    precision: PrecisionLike = None,
) -> ProductTiling:
    """How the products of blocks of this shape go: in as many chunks as take least time.

    Blocks whose rows (in a scatter: whose columns) cannot be divided between the cores are all the
    first core's.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    least_rows = LANES if turned else max(sublanes(x_dtype), sublanes(out_dtype))
    (_, rows, _), sharing = shape, weights[0][0] // LANES if terms else shape[1] // least_rows
    able = cores if sharing % cores == 0 else 1
    counts = [count for count in CHUNKS if not terms or count <= MOST_SUMMED]
    parts = 1 if terms else able
    whole = [count for count in counts if rows % (parts * count * least_rows) == 0]
    n, in_full = group.size, precision is lax.Precision.HIGHEST
    of_w = (shape, weights, x_dtype, out_dtype)
    found = [
        cut
        for count in whole or [1]
        # Where the wire takes longer, few of the products of sums count, and their weights' wait.
        for times in ((n * count, BARE_OF_SUMS) if terms else (n * count,))
        if (cut := _cut(*of_w, able, count, terms, (transposed, turned, in_full), times))
    ]
    if not found:
        chip = chips.current()
        raise VmemError(
            f"products of {shape} with {len(weights)} weights",
            f"no tiles of them fit {chip.name}'s {chip.vmem_bytes >> 20} MiB of VMEM",
            "use algorithm='unfused', or fewer weights at once",
        )
    return min(found, key=lambda each: each.seconds(group, block_bytes))


def _cut(
    shape: tuple[int, int, int],
    weights: Sequence[tuple[int, Any]],
    x_dtype: DType,
    out_dtype: DType,
    cores: int,
    chunks: int,
    terms: int,
    how: tuple[bool, bool, bool],  # `Problem.transposed`, `turned`, `in_full`
    times: int,
) -> ProductTiling | None:
    """The plan with so many chunks of a block for each core; None if no tiles fit.

    The tiles are those of least time where each core does a product so many `times`.
    """
    (batch, rows, depth), (transposed, turned, in_full) = shape, how
    down, right = (chunks, cores) if terms else (cores * chunks, 1)
    problems = tuple(
        Problem(
            batch=batch,
            rows=rows // down,
            depth=depth,
            columns=columns // right,
            x_dtype=x_dtype,
            w_dtype=w_dtype,
            out_dtype=out_dtype,
            terms=terms,
            transposed=transposed,
            turned=turned,
            in_full=in_full,
        )
        for columns, w_dtype in weights
    )
    chip = chips.current()
    budget = int(chip.vmem_bytes * chips.VMEM_SHARE) // len(problems)
    tiles = [product.choose_tiles(problem, budget, chip, cores, times) for problem in problems]
    blocks = Blocks(shape, axis=1, cut=1, chunks=down)
    fitting = tuple(t for t in tiles if t is not None)
    return ProductTiling(blocks, problems, fitting, cores) if len(fitting) == len(tiles) else None
