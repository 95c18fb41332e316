"""Matrix products fused with the collective before or after them, on `pipelines`.

    all_gather_matmul        multiplies each chunk of a block as it arrives
    matmul_reduce_scatter    computes each partial product just before the hop that carries it

Arrays are (A, rows, K) with blocks along rows; leading dimensions and odd sizes are the backend's
matter. Steps, bytes on the wire and their order are those of the bidirectional rings in
`all_gather` and `reduce_scatter`; operands, results and what is gathered lie in HBM, and tiles of
them pass through VMEM as `product` says, by a plan (`matmul_plan`).

On devices of two cores (v4, v5p) each takes half the rows of every block, round a ring of its own:
they share what is in HBM, and wait for each other nowhere. Where the torus has two rings that share
no link (`two_rings`) either core has one; a single core sends half of each block's chunks round
either.

                             scratch in HBM                    added up in
    all_gather_matmul        none (the gathered x is a result)    float32, rounded once
    matmul_reduce_scatter    8 blocks of the result            float32, rounded once per hop
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Interpret, Number, Ref
from pallas_collectives.kernels import pipelines
from pallas_collectives.kernels.machinery import launch, product
from pallas_collectives.kernels.matmul_plan import Plan, plan
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream

AHEAD = 1


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
    block_bytes = batch * rows * columns * wire_dtype.itemsize
    tiling = plan(
        (batch, rows, depth),
        [(columns, w.dtype)],
        x.dtype,
        wire_dtype,
        group=group,
        block_bytes=block_bytes,
        cores=launch.cores(interpret),
        terms=2,
        transposed=transposed,
    )
    streams = tiling.streams(n)
    out = tiling.blocks_of(columns)
    kernel = functools.partial(
        _scatter_kernel,
        tiling=tiling,
        streams=streams,
        furthest_first=tiling.outlasts_wire(group, block_bytes),
        scale=scale,
        precision=precision,
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
    copy_sems: dict[int, Any]  # own; one for each tile of columns that is copied there

    @classmethod
    def of(cls, tiling: Plan) -> "TileScratch":
        """What to allocate."""
        each = list(zip(tiling.problems, tiling.tiles, strict=True))
        resident = {
            i: pltpu.VMEM(product.resident_shape(problem, tiles), problem.w_dtype)
            for i, (problem, tiles) in enumerate(each)
            if tiles.keep == "all"
        }
        copy_sems = {i: pltpu.SemaphoreType.DMA((product.across(*each[i]),)) for i in resident}
        sums = [
            pltpu.VMEM(product.sum_shape(tiles), product.accumulator_dtype(problem.x_dtype))
            for problem, tiles in each
        ]
        return cls(sums, resident, copy_sems)

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
        """Starts the first copies of weights to VMEM; the first product sees to the others.

        What is returned does nothing: each tile of columns is waited for where it is used first.
        """
        for i in self._copy_sems:
            tiles = product.across(self.tiling.problems[i], self.tiling.tiles[i])
            for column in range(min(AHEAD, tiles)):
                self._with_copy(i, column, lambda copy: copy.start())
        return lambda: None

    def multiply(
        self, i: int, x_ref: Ref, out_ref: Ref, *terms: Any, first: Any, **options: Any
    ) -> None:
        """out = x @ w[i] + terms; `first` of all products with w[i], or not."""
        tiling = self.tiling
        stays = i in self._copy_sems
        product.multiply(
            x_ref,
            self.refs[i],
            out_ref,
            *terms,
            sum_ref=self.sums[i],
            problem=tiling.problems[i],
            tiles=tiling.tiles[i],
            begins=functools.partial(self._arrives, i, first) if stays else None,
            **options,
        )

    def _arrives(self, i: int, first: Any, column: Number) -> None:
        """Waits for a tile of columns if the product is the first, and starts a later one's copy.

        So tiles come one behind another, not all of them late and together.
        """
        tiles = product.across(self.tiling.problems[i], self.tiling.tiles[i])

        @pl.when(first)
        def _() -> None:
            self._with_copy(i, column, lambda copy: copy.wait())
            later = column + AHEAD

            @pl.when(later < tiles)
            def _() -> None:
                self._with_copy(i, later, lambda copy: copy.start())

    def _with_copy(self, i: int, column: Number, act: Callable[[Any], None]) -> None:
        """act(the copy of a tile of columns to VMEM); the last one may be narrower."""
        problem, tiles = self.tiling.problems[i], self.tiling.tiles[i]
        last = product.across(problem, tiles) - 1
        narrow = problem.columns - last * tiles.columns

        def of(size: int) -> None:
            source, target = (
                product.columns_of(problem, ref, column * tiles.columns, size)
                for ref in (self._w_refs[i], self.refs[i])
            )
            act(pltpu.make_async_copy(source, target, self._copy_sems[i].at[column]))

        if narrow == tiles.columns:
            of(narrow)
        else:
            groups.only_if(column < last, lambda: of(tiles.columns))
            groups.only_if(column == last, lambda: of(narrow))


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
        first = (block == ring.me) & (chunk == 0)
        arrived = tiling.blocks.at(gathered_ref, block, chunk)
        for i, out_ref in enumerate(out_refs):
            target = tiling.blocks_of(out_ref.shape[2]).at(out_ref, block, chunk)
            weights.multiply(i, arrived, target, first=first, precision=precision)

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
    furthest_first: bool,
    scale: float,
    precision: PrecisionLike,
) -> None:
    tiling = tiling.on(ring.core)
    weights = _Weights(tiling, [w_ref], scratch.tiles)

    begins = next(stream for stream in streams if stream.hops_of(0))
    furthest = ring.block(begins.direction * begins.hops_of(0))  # the other stream begins elsewhere

    def produce(block: Number, chunk: Number, sum_ref: Ref, adds: Any) -> None:
        own = tiling.blocks.at(x_ref, block, chunk)
        first = ~adds & (chunk == 0) & (block == furthest)
        weights.multiply(0, own, sum_ref, sum_ref, first=first, adds=adds, precision=precision)

    def finish(chunk: Number, target_ref: Ref, *sum_refs: Ref) -> None:
        own = tiling.blocks.at(x_ref, ring.me, chunk)
        options: dict[str, Any] = {"scale": scale, "precision": precision}
        weights.multiply(0, own, target_ref, *sum_refs, first=False, **options)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        scratch.pipeline,
        produce=produce,
        finish=finish,
        blocks=tiling.blocks_of(o_ref.shape[2]),
        streams=streams,
        furthest_first=furthest_first,
    )
