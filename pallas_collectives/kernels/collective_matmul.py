"""Matrix products fused with the collective before or after them, on `pipelines`.

    all_gather_matmul        multiplies each chunk of a block as it arrives
    matmul_reduce_scatter    computes each partial product just before the hop that carries it

Arrays are (A, rows, K) with blocks along rows; leading dimensions and odd sizes are the backend's
matter. Steps, bytes on the wire and their order are those of the bidirectional rings in
`all_gather` and `reduce_scatter`; operands, results and what is gathered lie in HBM, and tiles of
them pass through VMEM as `product` says, within `VMEM_SHARE` of the chip's.

On devices of two cores (v4, v5p) each takes half the rows of every block, round a ring of its own:
they share what is in HBM, and wait for each other nowhere.

                             scratch in HBM                    added up in
    all_gather_matmul        none (the gathered x is a result)    float32, rounded once
    matmul_reduce_scatter    8 blocks of the result            float32, rounded once per hop
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Interpret, Number, Ref
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import pipelines
from pallas_collectives.kernels.machinery import launch, product, sync
from pallas_collectives.kernels.machinery.blocks import Blocks, sublanes
from pallas_collectives.kernels.machinery.product import Problem, Tiles
from pallas_collectives.topology import chips, groups
from pallas_collectives.topology.groups import Group, Ring, Stream

# Of a chip's VMEM, what the tiles of all products together may take; the rest is the compiler's.
VMEM_SHARE = 0.7
# Chunks of a block that a core may have: the more, the less there is at the end that nothing hides;
# but each fetches the weights anew. Halves, so that the opposite device gets one from either side.
CHUNKS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a block goes in chunks, and each chunk's products through VMEM.

    Attributes:
      blocks: the blocks of x, (A, rows, K), and their chunks, of all cores.
      problems: one product each, of a chunk.
      tiles: theirs.
      cores: how many share the chunks of each block.
    """

    blocks: Blocks
    problems: tuple[Problem, ...]
    tiles: tuple[Tiles, ...]
    cores: int

    @property
    def chunks(self) -> int:
        """Chunks of a block that each core sees to."""
        return self.blocks.chunks // self.cores

    def on(self, core: Number | None) -> "Plan":
        """The plan as a core follows it, which counts chunks from the first of its own."""
        first = 0 if core is None else core * self.chunks
        return dataclasses.replace(self, blocks=dataclasses.replace(self.blocks, first=first))

    def streams(self, devices: int) -> tuple[Stream, ...]:
        """The streams of each core."""
        return groups.streams(devices, bidirectional=True, chunks=self.chunks)

    def blocks_of(self, columns: int) -> Blocks:
        """The same blocks of an array of another size in its last dimension."""
        return dataclasses.replace(self.blocks, shape=(*self.blocks.shape[:2], columns))

    @property
    def vmem_bytes(self) -> int:
        """What the tiles of all products of a core together take, at most."""
        return sum(map(product.vmem, self.problems, self.tiles))

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

        The longer of wire and products; the shorter for the one chunk that nothing hides; and two
        DMAs' latency for each chunk.
        """
        n, wire = group.size, wire_seconds(group, block_bytes)
        products = n * self.seconds_per_block
        last = min(wire / max(1, n // 2), products / n) / self.chunks
        starts = 2 * chips.current().dma_latency * n * self.chunks
        return max(wire, products) + last + starts

    def pace(self, group: Group, block_bytes: int) -> pipelines.Pace | None:
        """When own chunks are to set out, where a block has so many bytes on the wire.

        None where the wire takes longer than the products: nothing is gained by keeping it waiting.
        """
        wire = wire_seconds(group, block_bytes)
        if group.size * self.seconds_per_block < wire:
            return None
        a_chunk = 2 * wire / (group.size - 1) / self.chunks
        return pipelines.Pace.of(self.seconds_per_block / self.chunks, a_chunk)


def wire_seconds(group: Group, block_bytes: int) -> float:
    """What it takes to pass blocks both ways round a ring, by the rates of the chip."""
    chip, n = chips.current(), group.size
    # The devices of a chip that are not all in the ring have rings of their own, on the same links.
    mesh = jax.sharding.get_abstract_mesh().shape
    sharing = chip.devices_per_chip if math.prod(mesh.values()) > n and not group.chip else 1
    link = chip.link_bandwidth * chip.link_efficiency / sharing / (2 if group.line else 1)
    return (n - 1) / 2 * block_bytes / link + (n // 2) * (chip.hop_latency + chip.dma_latency)


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
) -> Plan:
    """How the products of blocks of this shape go: in as many chunks as take least time.

    Blocks whose rows cannot be divided between the cores are all the first core's.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    least_rows = max(sublanes(x_dtype), sublanes(out_dtype))
    able = cores if shape[1] % (cores * least_rows) == 0 else 1
    whole = [count for count in CHUNKS if shape[1] % (able * count * least_rows) == 0]
    found = [
        cut
        for count in whole or [1]
        if (cut := _cut(shape, weights, x_dtype, out_dtype, able, count, terms, transposed))
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
    transposed: bool,
) -> Plan | None:
    """The plan with so many chunks of a block for each core; None if no tiles fit."""
    batch, rows, depth = shape
    problems = tuple(
        Problem(
            batch=batch,
            rows=rows // (cores * chunks),
            depth=depth,
            columns=columns,
            x_dtype=x_dtype,
            w_dtype=w_dtype,
            out_dtype=out_dtype,
            terms=terms,
            transposed=transposed,
        )
        for columns, w_dtype in weights
    )
    chip = chips.current()
    budget = int(chip.vmem_bytes * VMEM_SHARE) // len(problems)
    tiles = [product.choose_tiles(problem, budget, chip, cores) for problem in problems]
    blocks = Blocks(shape, axis=1, cut=1, chunks=cores * chunks)
    fitting = tuple(t for t in tiles if t is not None)
    return Plan(blocks, problems, fitting, cores) if len(fitting) == len(tiles) else None


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    group: Group,
    *,
    out_dtype: DType,
    transposed: bool,
    precision: PrecisionLike,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """The gathered x, (A, n * rows, K), and its products with every w, (A, n * rows, N).

    Args:
      x: (A, rows, K): rows whole tiles, K whole lanes.
      ws: each (K, N), or (N, K) if `transposed`; N whole lanes.
      group: the devices.
      out_dtype: of the products.
      transposed: see ws.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, rows, depth) = group.size, x.shape
    columns = [w.shape[0 if transposed else 1] for w in ws]
    weights = [(size, w.dtype) for size, w in zip(columns, ws, strict=True)]
    tiling = plan(
        (batch, rows, depth),
        weights,
        x.dtype,
        out_dtype,
        group=group,
        block_bytes=x.nbytes,
        cores=launch.cores(interpret),
        transposed=transposed,
    )
    streams = tiling.streams(n)
    shapes = [jax.ShapeDtypeStruct((batch, n * rows, depth), x.dtype)]
    shapes += [jax.ShapeDtypeStruct((batch, n * rows, size), out_dtype) for size in columns]
    kernel = functools.partial(
        _gather_kernel,
        tiling=tiling,
        streams=streams,
        pace=tiling.pace(group, x.nbytes),
        precision=precision,
    )
    tiles = TileScratch.of(tiling)
    return launch.call_many(
        kernel,
        group,
        x,
        *ws,
        out_shapes=shapes,
        scratch=Scratch(pipelines.GatherScratch.of(streams), tiles),
        barrier="neighbours",
        name="all_gather_matmul",
        interpret=interpret,
        cores=tiling.cores,
        wire_bytes=(n - 1) * x.nbytes,
        flops=n * tiling.blocks.chunks * sum(problem.flops for problem in tiling.problems),
        pipeline_bytes=tiling.vmem_bytes - tiles.nbytes,
    )


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    group: Group,
    *,
    wire_dtype: DType,
    scale: float,
    transposed: bool,
    precision: PrecisionLike,
    interpret: Interpret,
) -> jax.Array:
    """The block of rows `me` of `scale` times the sum of everyone's x @ w.

    Args:
      x: (A, n * rows, K): rows whole tiles, K whole lanes.
      w: (K, N), or (N, K) if `transposed`; N whole lanes.
      group: the devices.
      wire_dtype: in which sums travel, and of the result.
      scale: of the result, before it is rounded.
      transposed: see w.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, all_rows, depth) = group.size, x.shape
    columns, rows = w.shape[0 if transposed else 1], all_rows // n
    tiling = plan(
        (batch, rows, depth),
        [(columns, w.dtype)],
        x.dtype,
        wire_dtype,
        group=group,
        block_bytes=batch * rows * columns * wire_dtype.itemsize,
        cores=launch.cores(interpret),
        terms=2,
        transposed=transposed,
    )
    streams = tiling.streams(n)
    out = tiling.blocks_of(columns)
    kernel = functools.partial(
        _scatter_kernel, tiling=tiling, streams=streams, scale=scale, precision=precision
    )
    tiles = TileScratch.of(tiling)
    return launch.call_many(
        kernel,
        group,
        x,
        w,
        out_shapes=[jax.ShapeDtypeStruct(out.shape, wire_dtype)],
        scratch=Scratch(pipelines.scatter_scratch(streams, out, wire_dtype), tiles),
        barrier="neighbours",
        cores=tiling.cores,
        prepare=lambda ring, x_ref, w_ref, o_ref, scratch: _Weights(
            tiling, [w_ref], scratch.tiles
        ).bring(),
        name="matmul_reduce_scatter",
        interpret=interpret,
        wire_bytes=(n - 1) * out.nbytes(wire_dtype),
        flops=n * tiling.blocks.chunks * tiling.problems[0].flops,
        pipeline_bytes=tiling.vmem_bytes - tiles.nbytes,
    )[0]


class TileScratch(NamedTuple):
    """What the products take; see `product`."""

    sums: list[Any]  # for each product, a sum under way: VMEM
    resident: dict[int, Any]  # of the products whose w stays in VMEM, its place there
    copy_sems: dict[int, Any]  # own; their copies

    @classmethod
    def of(cls, tiling: Plan) -> "TileScratch":
        """What to allocate."""
        each = list(zip(tiling.problems, tiling.tiles, strict=True))
        resident = {
            i: pltpu.VMEM(product.resident_shape(problem, tiles), problem.w_dtype)
            for i, (problem, tiles) in enumerate(each)
            if tiles.keep == "all"
        }
        sums = [
            pltpu.VMEM(product.sum_shape(tiles), product.accumulator_dtype(problem.x_dtype))
            for problem, tiles in each
        ]
        return cls(sums, resident, dict.fromkeys(resident, pltpu.SemaphoreType.DMA))

    @property
    def nbytes(self) -> int:
        """Bytes of VMEM."""
        places = (*self.sums, *self.resident.values())
        return sum(math.prod(p.shape) * p.dtype.itemsize for p in places)


class Scratch(NamedTuple):
    """What a fused kernel takes beside its arrays."""

    pipeline: Any  # see `pipelines`
    tiles: TileScratch


class _Weights:
    """The weights of a kernel, where its products find them."""

    def __init__(self, tiling: Plan, w_refs: Sequence[Ref], scratch: TileScratch) -> None:
        self.tiling, self.sums = tiling, scratch.sums
        self.refs = [scratch.resident.get(i, w_ref) for i, w_ref in enumerate(w_refs)]
        self._w_refs, self._copy_sems = w_refs, scratch.copy_sems

    def bring(self) -> Callable[[], None]:
        """Sets out to copy the weights that stay in VMEM there; what is returned waits for them."""
        stay = list(self._copy_sems)
        return sync.started(
            [self._w_refs[i] for i in stay],
            [product.resident(self.tiling.problems[i], self.refs[i]) for i in stay],
            [self._copy_sems[i] for i in stay],
        )

    def multiply(self, i: int, x_ref: Ref, out_ref: Ref, *terms: Any, **options: Any) -> None:
        """out = x @ w[i] + terms."""
        tiling = self.tiling
        product.multiply(
            x_ref,
            self.refs[i],
            out_ref,
            *terms,
            sum_ref=self.sums[i],
            problem=tiling.problems[i],
            tiles=tiling.tiles[i],
            **options,
        )


def _gather_kernel(
    ring: Ring,
    x_ref: Ref,  # (A, rows, K): HBM
    *refs: Any,  # the ws; the gathered x, (A, n * rows, K), and the products, (A, n * rows, N):
    # HBM; then a Scratch
    tiling: Plan,
    streams: tuple[Stream, ...],
    pace: pipelines.Pace | None,
    precision: PrecisionLike,
) -> None:
    tiling, count, (*arrays, scratch) = tiling.on(ring.core), len(tiling.problems), refs
    w_refs, gathered_ref, out_refs = arrays[:count], arrays[count], arrays[count + 1 :]
    weights = _Weights(tiling, w_refs, scratch.tiles)

    def consume(block: Number, chunk: Number) -> None:
        arrived = tiling.blocks.at(gathered_ref, block, chunk)
        for i, out_ref in enumerate(out_refs):
            target = tiling.blocks_of(out_ref.shape[2]).at(out_ref, block, chunk)
            weights.multiply(i, arrived, target, precision=precision)

    pipelines.gather_and_consume(
        ring,
        x_ref,
        gathered_ref,
        scratch.pipeline,
        consume=consume,
        blocks=tiling.blocks,
        streams=streams,
        prepare=lambda: weights.bring()(),
        pace=pace,
    )


def _scatter_kernel(
    ring: Ring,
    x_ref: Ref,  # (A, n * rows, K): HBM
    w_ref: Ref,  # (K, N) or (N, K): HBM
    o_ref: Ref,  # (A, rows, N): HBM
    scratch: Scratch,
    *,
    tiling: Plan,
    streams: tuple[Stream, ...],
    scale: float,
    precision: PrecisionLike,
) -> None:
    tiling = tiling.on(ring.core)
    weights = _Weights(tiling, [w_ref], scratch.tiles)

    def produce(block: Number, chunk: Number, sum_ref: Ref, adds: Any) -> None:
        own = tiling.blocks.at(x_ref, block, chunk)
        weights.multiply(0, own, sum_ref, sum_ref, adds=adds, precision=precision)

    def finish(chunk: Number, target_ref: Ref, *sum_refs: Ref) -> None:
        own = tiling.blocks.at(x_ref, ring.me, chunk)
        weights.multiply(0, own, target_ref, *sum_refs, scale=scale, precision=precision)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        scratch.pipeline,
        produce=produce,
        finish=finish,
        blocks=tiling.blocks_of(o_ref.shape[2]),
        streams=streams,
    )
