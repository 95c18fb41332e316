"""The two pipelines with a body of the caller's own, called on tiles of rows in VMEM.

Arrays are (rows, columns) with blocks along rows. `gather_and_consume` hands each tile of the
gathered rows to `consume` as it arrives; `produce_and_scatter` has `produce` write the own term of
each tile just before the hop that carries its sum. Further operands stay in VMEM throughout.

    gather_and_consume     consume(x_tile, *operands, *out_tiles)     HBM scratch: none
    produce_and_scatter    produce(x_tile, *operands, term_tile)      HBM scratch: 8 blocks
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import chips
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import launch, pipelines, spaces, topology
from pallas_collectives.kernels.blocks import LANES, Blocks, sublanes
from pallas_collectives.kernels.collective_matmul import MOST_PARTS, VMEM_SHARE
from pallas_collectives.kernels.combine import wide
from pallas_collectives.kernels.topology import Group, Lane, Ring

MOST_ROWS = 1024  # of a tile


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a block of rows goes in parts, and a part in tiles.

    Attributes:
      rows: of a block.
      parts: of a block.
      tile: rows of a tile; divides those of a part.
    """

    rows: int
    parts: int
    tile: int

    def blocks(self, columns: int) -> Blocks:
        """The blocks of an array with as many columns."""
        return Blocks((self.rows, columns), axis=0, cut=0, parts=self.parts)


def cut(rows: int, whole: int, row_bytes: int, resident_bytes: int, tile: int | None) -> Cut:
    """The parts and tiles of a block: large tiles, and as many parts as leave one each.

    Args:
      rows: of a block.
      whole: what a tile's rows are a multiple of.
      row_bytes: of VMEM for one row of all tiles.
      resident_bytes: of VMEM for what stays there.
      tile: the rows of a tile, if the caller says; divides `rows`.

    Raises:
      VmemError: not even the smallest tiles fit the chip's VMEM.
    """
    chip = chips.current()
    room = int(chip.vmem_bytes * VMEM_SHARE) - resident_bytes
    if tile is None:
        units = rows // whole
        most = max(1, min(MOST_ROWS, room // row_bytes) // whole)
        tile = whole * max(d for d in range(1, most + 1) if units % d == 0)
        if rows == tile and units % 2 == 0:
            tile //= 2  # a block in one part has nothing to hide behind
    if tile * row_bytes > room:
        raise VmemError(
            f"tiles of {tile} rows and {resident_bytes >> 20} MiB of operands",
            f"{chip.name} has {chip.vmem_bytes >> 20} MiB of VMEM, of which tiles take two each",
            "use smaller tiles or operands",
        )
    parts = 1
    while parts < MOST_PARTS and rows % (2 * parts * tile) == 0:
        parts *= 2
    return Cut(rows, parts, tile)


def gather_and_consume(
    x: jax.Array,
    operands: Sequence[jax.Array],
    group: Group,
    *,
    consume: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    tile: int | None,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """The gathered x, and all that `consume` has written.

    Args:
      x: (rows, columns), whole tiles.
      operands: of two dimensions or more.
      group: the devices.
      consume: see the module.
      outs: (rows, columns) each, whole tiles: the results of one block.
      tile: rows of a tile, or None.
      interpret: see `launch.call`.

    Raises:
      VmemError: see `cut`.
    """
    n, shapes_in = group.size, tuple(operand.shape for operand in operands)
    operands = list(map(spaces.widened, operands))
    rows: list[Any] = [x, *outs]
    whole = max(sublanes(a.dtype) for a in rows)
    row_bytes = 2 * sum(map(_row_bytes, rows))
    how = cut(len(x), whole, row_bytes, _resident_bytes(operands), tile)
    lanes = topology.lanes(n, bidirectional=True, parts=how.parts)
    shapes = [jax.ShapeDtypeStruct((n * a.shape[0], a.shape[1]), a.dtype) for a in rows]
    return launch.call_many(
        functools.partial(
            _consume_kernel,
            how=how,
            lanes=lanes,
            consume=consume,
            operand_shapes=shapes_in,
            outs=len(outs),
        ),
        group,
        x,
        *operands,
        out_shapes=shapes,
        scratch_shapes=[*pipelines.gather_semaphores(lanes), *_resident(operands)],
        barrier="neighbours",
        name="gather_and_consume",
        interpret=interpret,
        wire_bytes=(n - 1) * x.nbytes,
        pipeline_bytes=how.tile * row_bytes,
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
    interpret: Any,
) -> jax.Array:
    """The own block of `scale` times the sum of everyone's terms.

    Args:
      x: (n * rows, columns), whole tiles.
      operands: of two dimensions or more.
      group: the devices.
      produce: see the module; terms are float32, or int32 for integers.
      out: (rows, columns), whole tiles: the result, in whose dtype sums travel.
      tile: rows of a tile, or None.
      scale: of the result, before it is rounded.
      interpret: see `launch.call`.

    Raises:
      VmemError: see `cut`.
    """
    n, shapes_in = group.size, tuple(operand.shape for operand in operands)
    operands = list(map(spaces.widened, operands))
    term = jax.ShapeDtypeStruct(out.shape, wide(out.dtype))
    whole = max(sublanes(x.dtype), sublanes(out.dtype))
    row_bytes = 2 * _row_bytes(x) + 6 * _row_bytes(out) + _row_bytes(term)
    how = cut(out.shape[0], whole, row_bytes, _resident_bytes(operands), tile)
    lanes = topology.lanes(n, bidirectional=True, parts=how.parts)
    blocks = how.blocks(out.shape[1])
    return launch.call_many(
        functools.partial(
            _produce_kernel,
            how=how,
            lanes=lanes,
            produce=produce,
            operand_shapes=shapes_in,
            scale=scale,
        ),
        group,
        x,
        *operands,
        out_shapes=[out],
        buffers=[pipelines.sum_slots(lanes, blocks, out.dtype)],
        scratch_shapes=[
            *pipelines.scatter_semaphores(lanes),
            pltpu.VMEM((how.tile, out.shape[1]), term.dtype),
            *_resident(operands),
        ],
        barrier="neighbours",
        name="produce_and_scatter",
        interpret=interpret,
        wire_bytes=(n - 1) * blocks.nbytes(out.dtype),
        pipeline_bytes=how.tile * (row_bytes - _row_bytes(term)),
    )[0]


def _row_bytes(x: Any) -> int:
    return x.shape[1] * jnp.dtype(x.dtype).itemsize


def _resident_bytes(operands: Sequence[Any]) -> int:
    """Bytes of operands in VMEM, their last two dimensions whole tiles."""
    total = 0
    for x in operands:
        rows, columns = (-(-x.shape[-2] // sublanes(x.dtype)), -(-x.shape[-1] // LANES))
        tile = sublanes(x.dtype) * LANES * jnp.dtype(x.dtype).itemsize
        total += math.prod(x.shape[:-2]) * rows * columns * tile
    return total


def _resident(operands: Sequence[jax.Array]) -> list[Any]:
    """A place in VMEM for each operand, then a semaphore for each copy."""
    places = [pltpu.VMEM(x.shape, x.dtype) for x in operands]
    return [*places, *(pltpu.SemaphoreType.DMA for _ in operands)]


def _bring(refs: Sequence[Any], scratch: Sequence[Any]) -> None:
    """Copies operands to their places in VMEM."""
    copies = [
        pltpu.make_async_copy(ref, scratch[i], scratch[len(refs) + i]) for i, ref in enumerate(refs)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _as(shapes: Sequence[tuple[int, ...]], refs: Sequence[Any]) -> list[Any]:
    """Refs of such shapes: those in VMEM, cut where an operand was widened."""
    cuts = [tuple(pl.ds(0, size) for size in shape) for shape in shapes]
    pairs = zip(shapes, refs[: len(shapes)], cuts, strict=True)
    return [ref if ref.shape == shape else ref.at[cut] for shape, ref, cut in pairs]


def _tiles(how: Cut, ref: Any) -> pl.BlockSpec:
    return pl.BlockSpec((how.tile, ref.shape[1]), lambda i: (i, 0))


def _consume_kernel(
    ring: Ring,
    x_ref: Any,  # (rows, columns): HBM
    *refs: Any,  # operands, the gathered x, the results: HBM; then semaphores, see
    # pipelines.gather_and_consume; then VMEM, see _resident
    how: Cut,
    lanes: tuple[Lane, ...],
    consume: Callable[..., None],
    operand_shapes: tuple[tuple[int, ...], ...],
    outs: int,
) -> None:
    count = len(operand_shapes)
    operand_refs, gathered_ref = refs[:count], refs[count]
    out_refs, scratch = refs[count + 1 : count + 1 + outs], refs[count + 1 + outs :]
    semaphores, scratch = scratch[:4], scratch[4:]
    blocks = how.blocks(x_ref.shape[1])

    def of_part(block: Any, part: Any) -> None:
        arrived = blocks.at(gathered_ref, block, part)
        targets = [how.blocks(out.shape[1]).at(out, block, part) for out in out_refs]

        def body(x: Any, *out_tiles: Any) -> None:
            consume(x, *_as(operand_shapes, scratch), *out_tiles)

        pltpu.emit_pipeline(
            body,
            grid=(how.rows // how.parts // how.tile,),
            in_specs=[_tiles(how, arrived)],
            out_specs=[_tiles(how, target) for target in targets],
        )(arrived, *targets)

    pipelines.gather_and_consume(
        ring,
        x_ref,
        gathered_ref,
        *semaphores,
        consume=of_part,
        blocks=blocks,
        lanes=lanes,
        prepare=lambda: _bring(operand_refs, scratch),
    )


def _produce_kernel(
    ring: Ring,
    x_ref: Any,  # (n * rows, columns): HBM
    *refs: Any,  # operands, the result, sum_slots: HBM; then semaphores, see
    # pipelines.produce_and_scatter; then VMEM: a term, and see _resident
    how: Cut,
    lanes: tuple[Lane, ...],
    produce: Callable[..., None],
    operand_shapes: tuple[tuple[int, ...], ...],
    scale: float,
) -> None:
    count = len(operand_shapes)
    operand_refs, o_ref, slots_ref = refs[:count], refs[count], refs[count + 1]
    semaphores, term_ref = refs[count + 2 : count + 5], refs[count + 5]
    scratch = refs[count + 6 :]

    def over_tiles(
        block: Any, part: Any, target: Any, sums: Sequence[Any], adds: Any, factor: float
    ) -> None:
        own = how.blocks(x_ref.shape[1]).at(x_ref, block, part)

        def body(x: Any, *tiles: Any) -> None:
            *arrived, out = tiles
            produce(x, *_as(operand_shapes, scratch), term_ref)
            total = term_ref[...]
            for tile in arrived:
                value = tile[...].astype(total.dtype)
                total += value if adds is True else jnp.where(adds, value, 0)
            out[...] = (total if factor == 1.0 else total * factor).astype(out.dtype)

        pltpu.emit_pipeline(
            body,
            grid=(how.rows // how.parts // how.tile,),
            in_specs=[_tiles(how, own), *(_tiles(how, target) for _ in sums)],
            out_specs=[_tiles(how, target)],
        )(own, *sums, target)

    def add(block: Any, part: Any, sum_ref: Any, adds: Any) -> None:
        over_tiles(block, part, sum_ref, [sum_ref], adds, 1.0)

    def finish(part: Any, target: Any, *sums: Any) -> None:
        over_tiles(ring.me, part, target, sums, True, scale)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        slots_ref,
        *semaphores,
        produce=add,
        finish=finish,
        blocks=how.blocks(o_ref.shape[1]),
        lanes=lanes,
        prepare=lambda: _bring(operand_refs, scratch),
    )
