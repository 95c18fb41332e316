"""Matrix products fused with the collective before or after them, on `pipelines`.

    all_gather_matmul        multiplies each chunk of a block as it arrives
    matmul_reduce_scatter    computes each partial product just before the hop that carries it

Arrays are (A, rows, K) with blocks along rows; leading dimensions and odd sizes are the backend's
matter. Steps, bytes on the wire and their order are those of the bidirectional rings in
`all_gather` and `reduce_scatter`; operands, results and what is gathered lie in HBM, and tiles of
them pass through VMEM as `product` says, by a plan (`matmul_plan`).

On devices of two cores (v4, v5p) each takes half the rows of every block, or half the columns of
every sum, and so half the weights, round a ring of its own: they share what is in HBM, and wait for
each other nowhere. Where the torus has two rings that share
no link (`two_rings`) either core has one; a single core sends half of each block's chunks round
either.

                             scratch in HBM                    added up in
    all_gather_matmul        none (the gathered x is a result)    float32, rounded once
    matmul_reduce_scatter    8 blocks of the result            float32, rounded once per hop
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Flag, Interpret, Number, Ref
from pallas_collectives.kernels import pipelines
from pallas_collectives.kernels.machinery import launch, multiply
from pallas_collectives.kernels.machinery.multiply import Products, Where
from pallas_collectives.kernels.matmul_plan import ProductTiling, plan
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group, Ring, Stream


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    group: Group,
    *,
    out_dtype: DType,
    transposed: bool,
    precision: PrecisionLike,
    interpret: Interpret,
    turn: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """The gathered x, (A, n * rows, K), and its products with every w, (A, n * rows, N).

    Args:
      x: (A, rows, K): rows whole tiles, K whole lanes.
      ws: each (K, N), or (N, K) if `transposed`; N whole lanes. With `turn` also those of all turns
        of a loop, (turns, K, N).
      group: the devices.
      out_dtype: the dtype of the products.
      transposed: see ws.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.
      turn: one int32[1], which of these turns it is; or none.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, rows, depth) = group.size, x.shape
    columns = [w.shape[-2 if transposed else -1] for w in ws]
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
        precision=precision,
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
    scratch = Scratch.of(pipelines.GatherScratch.of(streams), tiling)
    return launch.call_many(
        kernel,
        group,
        x,
        *ws,
        scalars=turn,
        out_shapes=shapes,
        scratch=scratch,
        barrier="neighbours",
        name="all_gather_matmul",
        interpret=interpret,
        cores=tiling.cores,
        wire_bytes=(n - 1) * x.nbytes,
        flops=n * tiling.flops,
        pipeline_bytes=tiling.kept_by_compiler,
        chunking=tiling.chunking,
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
    turned: bool = False,
    turn: Sequence[jax.Array] = (),
) -> jax.Array:
    """The block of rows `me` of `scale` times the sum of everyone's x @ w.

    Args:
      x: (A, n * rows, K): rows whole tiles, K whole lanes; or (A, K, n * rows), all whole lanes, if
        `turned`.
      w: (K, N), or (N, K) if `transposed`; N whole lanes. With `turn` also that of all turns of a
        loop, (turns, K, N).
      group: the devices.
      wire_dtype: in which sums travel, and of the result.
      scale: a factor of the result, before it is rounded.
      transposed: see w.
      precision: as `jax.lax.dot_general`'s.
      interpret: see `launch.call`.
      turned: see x.
      turn: one int32[1], which of these turns it is; or none.

    Raises:
      VmemError: no tiles fit the chip's VMEM.
    """
    n, (batch, *sizes) = group.size, x.shape
    all_rows, depth = sizes[::-1] if turned else sizes
    columns, rows = w.shape[-2 if transposed else -1], all_rows // n
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
        turned=turned,
        precision=precision,
    )
    streams = tiling.streams(n)
    out = tiling.blocks_of(tiling.problems[0].columns)
    kernel = functools.partial(
        _scatter_kernel,
        tiling=tiling,
        streams=streams,
        furthest_first=tiling.outlasts_wire(group, block_bytes),
        scale=scale,
        precision=precision,
    )
    scratch = Scratch.of(pipelines.scatter_scratch(streams, out, wire_dtype, tiling.cores), tiling)
    return launch.call_many(
        kernel,
        group,
        x,
        w,
        scalars=turn,
        out_shapes=[jax.ShapeDtypeStruct((batch, rows, columns), wire_dtype)],
        scratch=scratch,
        barrier="neighbours",
        cores=tiling.cores,
        name="matmul_reduce_scatter",
        interpret=interpret,
        wire_bytes=(n - 1) * block_bytes,
        flops=n * tiling.flops,
        pipeline_bytes=tiling.kept_by_compiler,
        chunking=tiling.chunking,
    )[0]


class Scratch(NamedTuple):
    """What a fused kernel takes beside its arrays."""

    pipeline: Any  # see `pipelines`
    products: list[multiply.Scratch]  # with each w

    @classmethod
    def of(cls, pipeline: Any, tiling: ProductTiling) -> "Scratch":
        """What to allocate."""
        return cls(pipeline, list(map(multiply.Scratch.of, tiling.problems, tiling.tiles)))


def _of_turn(w_ref: Ref, turn_refs: Sequence[Ref]) -> Ref:
    """The weights, or of those of all turns this one's."""
    return w_ref if len(w_ref.shape) == 2 else w_ref.at[turn_refs[0][0]]


def _products(
    tiling: ProductTiling, w_refs: Sequence[Ref], scratch: Scratch, precision: PrecisionLike
) -> list[Products]:
    """The products with each w, ready for the first."""
    each = zip(tiling.problems, tiling.tiles, w_refs, scratch.products, strict=True)
    made = [Products(*of_w, precision) for of_w in each]
    for products in made:
        products.begin()
    return made


def _gather_kernel(
    ring: Ring,
    *refs: Any,  # the turn if there is one, (1,): SMEM; x, (A, rows, K); the ws; the gathered x,
    # (A, n * rows, K), and the products, (A, n * rows, N): HBM; then a Scratch
    tiling: ProductTiling,
    streams: tuple[Stream, ...],
    pace: pipelines.Pace | None,
    precision: PrecisionLike,
) -> None:
    tiling, count = tiling.on(ring.core), len(tiling.problems)
    *turn_refs, x_ref = refs[: -2 * count - 2]
    *arrays, scratch = refs[-2 * count - 2 :]
    w_refs = [_of_turn(w_ref, turn_refs) for w_ref in arrays[:count]]
    gathered_ref, out_refs = arrays[count], arrays[count + 1 :]
    all_products = _products(tiling, w_refs, scratch, precision)

    def rows_of(block: Number, chunk: Number, own: Flag) -> Where:
        def where(act: Callable[[Ref], None]) -> None:
            groups.only_if(own, lambda: act(tiling.blocks.at(x_ref, chunk=chunk)))
            groups.only_if(~own, lambda: act(tiling.blocks.at(gathered_ref, block, chunk)))

        return where

    def fetch(block: Number, chunk: Number, own: Flag) -> None:
        all_products[0].fetch(rows_of(block, chunk, own))

    def consume(block: Number, chunk: Number, own: Flag, follow: Callable[[], None]) -> None:
        rows = rows_of(block, chunk, own)
        then: list[Callable[[], None]] = [
            *(functools.partial(products.fetch, rows) for products in all_products[1:]),
            follow,
        ]
        for products, out_ref, call in zip(all_products, out_refs, then, strict=True):
            target = tiling.blocks_of(out_ref.shape[2]).at(out_ref, block, chunk)
            products.multiply(rows, target, follow=call)

    pipelines.gather_and_consume(
        ring,
        x_ref,
        gathered_ref,
        scratch.pipeline,
        consume=consume,
        fetch=fetch,
        blocks=tiling.blocks,
        streams=streams,
        pace=pace,
    )
    for products, out_ref in zip(all_products, out_refs, strict=True):
        products.settle(tiling.blocks_of(out_ref.shape[2]).at(out_ref, ring.me, 0))


def _scatter_kernel(
    ring: Ring,
    *refs: Any,  # the turn if there is one, (1,): SMEM; x, (A, n * rows, K) or (A, K, n * rows);
    # w, (K, N) or (N, K); the result, (A, rows, N): HBM; then a Scratch
    tiling: ProductTiling,
    streams: tuple[Stream, ...],
    furthest_first: bool,
    scale: float,
    precision: PrecisionLike,
) -> None:
    *turn_refs, x_ref, w_ref, o_ref, scratch = refs
    w_ref, columns = _of_turn(w_ref, turn_refs), tiling.problems[0].columns
    if ring.core is not None:
        own_columns = pl.ds(pl.multiple_of(ring.core * columns, columns), columns)
        w_ref = w_ref.at[
            own_columns if tiling.problems[0].transposed else (slice(None), own_columns)
        ]
        o_ref = o_ref.at[:, :, own_columns]
    out = tiling.blocks_of(columns)
    [products] = _products(tiling, [w_ref], scratch, precision)

    def rows_of(block: Number, chunk: Number) -> Where:
        return lambda act: act(tiling.blocks_of_x.at(x_ref, block, chunk))

    def sums_in(adds: Flag, *sum_refs: Ref) -> list[Where]:
        def where(ref: Ref, act: Callable[[Ref], None]) -> None:
            groups.only_if(adds, lambda: act(ref))

        return [functools.partial(where, ref) for ref in sum_refs]

    def fetch(block: Number, chunk: Number) -> None:
        products.fetch(rows_of(block, chunk))

    def produce(
        block: Number, chunk: Number, sum_ref: Ref, adds: Flag, follow: Callable[[], None]
    ) -> None:
        sums = sums_in(adds, sum_ref)
        products.multiply(rows_of(block, chunk), sum_ref, *sums, adds=adds, follow=follow)
        products.settle(sum_ref)  # it sets out next

    def finish(chunk: Number, target_ref: Ref, *rest: Any) -> None:
        *sum_refs, follow = rest
        sums = sums_in(True, *sum_refs)
        options: dict[str, Any] = {"scale": scale, "follow": follow}
        products.multiply(rows_of(ring.me, chunk), target_ref, *sums, **options)

    pipelines.produce_and_scatter(
        ring,
        o_ref,
        scratch.pipeline,
        produce=produce,
        finish=finish,
        fetch=fetch,
        blocks=out,
        streams=streams,
        furthest_first=furthest_first,
    )
    products.settle(out.at(o_ref, chunk=0))
