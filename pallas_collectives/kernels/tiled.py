"""The two pipelines with a body of the caller's own, called on tiles of rows in VMEM.

Arrays are (rows, columns) with blocks along rows. `gather_and_consume` hands each tile of the
gathered rows to `consume` as it arrives; `produce_and_scatter` has `produce` write the own term of
each tile just before the hop that carries its sum. Further operands stay in VMEM throughout.

    gather_and_consume     consume(x_tile, *operands, *out_tiles)     HBM scratch: none
    produce_and_scatter    produce(x_tile, *operands, term_tile)      HBM scratch: 8 blocks
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import Flag, Interpret, Number, Ref, Semaphore, dma_semaphores
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import pipelines
from pallas_collectives.kernels.machinery import launch, spaces, sync
from pallas_collectives.kernels.machinery.blocks import Blocks, padded_bytes, sublanes
from pallas_collectives.kernels.machinery.combine import wide
from pallas_collectives.topology import chips, groups
from pallas_collectives.topology.groups import Group, Ring, Stream

MOST_ROWS = 1024  # of a tile
MOST_CHUNKS = 8  # of a block


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a block of rows goes in chunks, and a chunk in tiles.

    Attributes:
      rows: how many a block has.
      chunks: how many a block has.
      tile: rows of a tile; divides those of a chunk.
    """

    rows: int
    chunks: int
    tile: int

    def blocks(self, columns: int) -> Blocks:
        """The blocks of an array with as many columns."""
        return Blocks((self.rows, columns), axis=0, cut=0, chunks=self.chunks)


def cut(rows: int, whole: int, row_bytes: int, resident_bytes: int, tile: int | None) -> Cut:
    """The chunks and tiles of a block: large tiles, and as many chunks as leave one each.

    Args:
      rows: how many a block has.
      whole: what a tile's rows are a multiple of.
      row_bytes: bytes of VMEM for one row of all tiles.
      resident_bytes: bytes of VMEM for what stays there.
      tile: the rows of a tile, if the caller says; divides `rows`.

    Raises:
      VmemError: not even the smallest tiles fit the chip's VMEM.
    """
    chip = chips.current()
    # `launch` adds a quarter of the tiles.
    room = int(chip.vmem_bytes * chips.VMEM_SHARE * 4 / 5) - resident_bytes
    if tile is None:
        units = rows // whole
        most = max(1, min(MOST_ROWS, room // row_bytes) // whole)
        tile = whole * max(d for d in range(1, most + 1) if units % d == 0)
        if rows == tile and units % 2 == 0:
            tile //= 2  # a block in one chunk has nothing to hide behind
    if tile * row_bytes > room:
        raise VmemError(
            f"tiles of {tile} rows and {resident_bytes >> 20} MiB of operands",
            f"{chip.name} has {chip.vmem_bytes >> 20} MiB of VMEM, and tiles take twice their size",
            "use smaller tiles or operands",
        )
    chunks = 1
    while chunks < MOST_CHUNKS and rows % (2 * chunks * tile) == 0:
        chunks *= 2
    return Cut(rows, chunks, tile)


def gather_and_consume(
    x: jax.Array,
    operands: Sequence[jax.Array],
    group: Group,
    *,
    consume: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    tile: int | None,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """The gathered x, and all that `consume` has written.

    Args:
      x: (rows, columns), whole tiles.
      operands: arrays of two dimensions or more.
      group: the devices.
      consume: see the module.
      outs: (rows, columns) each, whole tiles: the results of one block.
      tile: rows of a tile, or None.
      interpret: see `launch.call`.

    Raises:
      VmemError: see `cut`.
    """
    n, given = group.size, tuple(operand.shape for operand in operands)
    operands = list(map(spaces.widened, operands))
    rows: list[Any] = [x, *outs]
    whole = max(sublanes(a.dtype) for a in rows)
    row_bytes = 2 * sum(map(_row_bytes, rows))
    tiling = cut(len(x), whole, row_bytes, sum(map(padded_bytes, operands)), tile)
    streams = groups.streams(n, bidirectional=True, chunks=tiling.chunks)
    shapes = [jax.ShapeDtypeStruct((n * a.shape[0], a.shape[1]), a.dtype) for a in rows]
    return launch.call_many(
        functools.partial(
            _consume_kernel, tiling=tiling, streams=streams, consume=consume, given=given
        ),
        group,
        x,
        *operands,
        out_shapes=shapes,
        scratch=Scratch.of(pipelines.GatherScratch.of(streams), operands),
        barrier="neighbours",
        name="gather_and_consume",
        interpret=interpret,
        wire_bytes=(n - 1) * x.nbytes,
        pipeline_bytes=tiling.tile * row_bytes,
    )


def produce_and_scatter(
    x: jax.Array,
    operands: Sequence[jax.Array],
    group: Group,
    *,
    produce: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    tile: int | None,
    scale: float,
    interpret: Interpret,
) -> jax.Array:
    """The own block of `scale` times the sum of everyone's terms.

    Args:
      x: (n * rows, columns), whole tiles.
      operands: arrays of two dimensions or more.
      group: the devices.
      produce: see the module; terms are float32, or int32 for integers.
      out: (rows, columns), whole tiles: the result, in whose dtype sums travel.
      tile: rows of a tile, or None.
      scale: a factor of the result, before it is rounded.
      interpret: see `launch.call`.

    Raises:
      VmemError: see `cut`.
    """
    n, given = group.size, tuple(operand.shape for operand in operands)
    operands = list(map(spaces.widened, operands))
    term = jax.ShapeDtypeStruct(out.shape, wide(out.dtype))
    whole = max(sublanes(x.dtype), sublanes(out.dtype))
    row_bytes = 2 * _row_bytes(x) + 6 * _row_bytes(out) + _row_bytes(term)
    tiling = cut(out.shape[0], whole, row_bytes, sum(map(padded_bytes, operands)), tile)
    streams = groups.streams(n, bidirectional=True, chunks=tiling.chunks)
    blocks = tiling.blocks(out.shape[1])
    return launch.call_many(
        functools.partial(
            _produce_kernel,
            tiling=tiling,
            streams=streams,
            produce=produce,
            given=given,
            scale=scale,
        ),
        group,
        x,
        *operands,
        out_shapes=[out],
        scratch=Scratch.of(
            pipelines.scatter_scratch(streams, blocks, out.dtype),
            operands,
            pltpu.VMEM((tiling.tile, out.shape[1]), term.dtype),
        ),
        barrier="neighbours",
        prepare=lambda ring, x_ref, *refs: refs[-1].bring(refs[: len(operands)]),
        name="produce_and_scatter",
        interpret=interpret,
        wire_bytes=(n - 1) * blocks.nbytes(out.dtype),
        pipeline_bytes=tiling.tile * (row_bytes - _row_bytes(term)),
    )[0]


def _row_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    return x.shape[1] * jnp.dtype(x.dtype).itemsize


class Scratch(NamedTuple):
    """What a kernel here takes beside its arrays."""

    pipeline: Any  # see `pipelines`
    operands: list[Ref]  # where each operand stays: VMEM
    copy_sems: list[Semaphore]  # own; their copies
    term: Any = None  # (tile, columns): VMEM: our term of a tile, if there are any

    @classmethod
    def of(cls, pipeline: Any, operands: Sequence[jax.Array], term: Any = None) -> "Scratch":
        """What to allocate."""
        places = [pltpu.VMEM(x.shape, x.dtype) for x in operands]
        return cls(pipeline, places, [dma_semaphores() for _ in operands], term)

    def bring(self, refs: Sequence[Ref]) -> Callable[[], None]:
        """Sets out to copy operands to their places in VMEM; what is returned waits for them."""
        return sync.started(refs, self.operands, self.copy_sems)


def _as(shapes: Sequence[tuple[int, ...]], refs: Sequence[Ref]) -> list[Ref]:
    """Refs of such shapes: those in VMEM, cut where an operand was widened."""
    cuts = [tuple(pl.ds(0, size) for size in shape) for shape in shapes]
    pairs = zip(shapes, refs, cuts, strict=True)
    return [ref if ref.shape == shape else ref.at[cut] for shape, ref, cut in pairs]


def _tiles(tiling: Cut, ref: Ref) -> pl.BlockSpec:
    return pl.BlockSpec((tiling.tile, ref.shape[1]), lambda i: (i, 0))


def _consume_kernel(
    ring: Ring,
    x_ref: Ref,  # (rows, columns): HBM
    *refs: Any,  # operands, the gathered x, the results: HBM; then a Scratch
    tiling: Cut,
    streams: tuple[Stream, ...],
    consume: Callable[..., None],
    given: tuple[tuple[int, ...], ...],  # shapes of the operands, some of which are widened
) -> None:
    *arrays, scratch = refs
    count = len(scratch.operands)
    operand_refs, gathered_ref, out_refs = arrays[:count], arrays[count], arrays[count + 1 :]
    blocks = tiling.blocks(x_ref.shape[1])

    def of_chunk(block: Number, chunk: Number) -> None:
        arrived = blocks.at(gathered_ref, block, chunk)
        targets = [tiling.blocks(out.shape[1]).at(out, block, chunk) for out in out_refs]

        def body(x: Ref, *out_tiles: Ref) -> None:
            consume(x, *_as(given, scratch.operands), *out_tiles)

        pltpu.emit_pipeline(
            body,
            grid=(tiling.rows // tiling.chunks // tiling.tile,),
            in_specs=[_tiles(tiling, arrived)],
            out_specs=[_tiles(tiling, target) for target in targets],
        )(arrived, *targets)

    pipelines.gather_and_consume(
        ring,
        x_ref,
        gathered_ref,
        scratch.pipeline,
        consume=of_chunk,
        blocks=blocks,
        streams=streams,
        prepare=lambda: scratch.bring(operand_refs)(),
    )


def _produce_kernel(
    ring: Ring,
    x_ref: Ref,  # (n * rows, columns): HBM
    *refs: Any,  # operands, the result: HBM; then a Scratch
    tiling: Cut,
    streams: tuple[Stream, ...],
    produce: Callable[..., None],
    given: tuple[tuple[int, ...], ...],  # shapes of the operands, some of which are widened
    scale: float,
) -> None:
    *_, o_ref, scratch = refs  # operands are in VMEM already

    def over_tiles(
        block: Number, chunk: Number, target: Ref, sums: Sequence[Ref], adds: Flag, factor: float
    ) -> None:
        own = tiling.blocks(x_ref.shape[1]).at(x_ref, block, chunk)

        def body(x: Ref, *tiles: Ref) -> None:
            *arrived, out = tiles
            produce(x, *_as(given, scratch.operands), scratch.term)
            total = scratch.term[...]
            for tile in arrived:
                value = tile[...].astype(total.dtype)
                total += value if adds is True else jnp.where(adds, value, 0)
            out[...] = (total if factor == 1.0 else total * factor).astype(out.dtype)

        pltpu.emit_pipeline(
            body,
            grid=(tiling.rows // tiling.chunks // tiling.tile,),
            in_specs=[_tiles(tiling, own), *(_tiles(tiling, target) for _ in sums)],
            out_specs=[_tiles(tiling, target)],
        )(own, *sums, target)

    def add(block: Number, chunk: Number, sum_ref: Ref, adds: Flag) -> None:
        over_tiles(block, chunk, sum_ref, [sum_ref], adds, 1.0)

    def finish(chunk: Number, target: Ref, *sums: Ref) -> None:
        over_tiles(ring.me, chunk, target, sums, True, scale)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        scratch.pipeline,
        produce=add,
        finish=finish,
        blocks=tiling.blocks(o_ref.shape[1]),
        streams=streams,
    )
