"""Elementwise reduction of arrays of any size, tile by tile through VMEM."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DType, Index, Number, Ref
from pallas_collectives.kernels.machinery import sparsecore, sync
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes
from pallas_collectives.topology.groups import unraveled

TILE_BYTES = 256 << 10  # of each operand; the pipeline holds two tiles of each and of the result

SUBCORE_TILE_BYTES = 32 << 10  # of each operand of a vector subcore, which has 256 or 512 KiB

# Columns that a vector subcore adds in a turn of its loop. The compiler unrolls a turn: with 128 in
# one it runs out of registers, and takes 1.4 times as long on v6e (libtpu 0.0.50, by its bundles).
SUBCORE_COLUMNS = 16

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}


def combine(op: str, *sums: tuple[Any, ...], vmem: bool) -> None:
    """For each (out, *in) of `sums`: out = in[0] op in[1] op ..., in this order, rounded once.

    Refs have one shape, whose last two dimensions are whole tiles, and lie all in HBM (read and
    written through a double-buffered pipeline) or all in VMEM. `out` may be one of `in`; there are
    as many of them in all sums. Floats narrower than 32 bits are combined in float32, integers in
    32 bits.
    """
    if sparsecore.is_wanted():
        for out, *terms in sums:
            _on_a_subcore(op, out, terms)
        return
    outs = [out for out, *_ in sums]
    ins = [ref for _, *terms in sums for ref in terms]
    dtype, each = outs[0].dtype, len(ins) // len(outs)

    def body(*refs: Ref) -> None:
        for i, out in enumerate(refs[len(ins) :]):
            terms = [ref[...].astype(wide(dtype)) for ref in refs[i * each : (i + 1) * each]]
            out[...] = functools.reduce(OPS[op], terms).astype(dtype)

    _over_tiles(body, outs, ins, vmem=vmem)


def _on_a_subcore(op: str, out: Ref, terms: Sequence[Ref]) -> None:
    """One sum of `combine` on a vector subcore, from HBM to HBM; a tile comes while one is added.

    JAX 0.12 warns that a store's semaphore is ignored there (`SparseCorePushStreamWarning`). Its
    wait is a fence for all that the subcore has stored (JAX: `emit_pipeline`'s
    `output_wait_read_only`), so a sum is in HBM when `sync_copy` returns, and may be sent on. It
    would be wrong to leave such stores under way and to count them by a semaphore.
    """
    dtype, tile = out.dtype, tile_shape(out.shape, out.dtype, SUBCORE_TILE_BYTES)
    grid = tuple(size // t for size, t in zip(out.shape, tile, strict=True))
    high = sublanes(dtype)
    assert tile[-2] % high == 0, f"{tile} is not whole tiles"
    steps = (*tile[:-2], tile[-2] // high, tile[-1] // SUBCORE_COLUMNS)
    tiles, at_tile = math.prod(grid), _places(grid, tile)

    def over(*scratch: Ref) -> None:
        slots, arrived = scratch[:-1], scratch[-1]

        def coming(number: Number) -> list[Any]:
            """The copies of a tile of each term, to the slots that even and odd tiles have."""
            slot, index = lax.rem(number, np.int32(2)), at_tile(number)
            return [
                pltpu.make_async_copy(term.at[index], ref.at[slot], arrived.at[slot])
                for term, ref in zip(terms, slots, strict=True)
            ]

        def start(number: Number) -> None:
            for copy in coming(number):
                copy.start()

        def one(number: Number, _: None) -> None:
            pl.when(number + 1 < tiles)(lambda: start(number + 1))
            for copy in coming(number):
                copy.wait()
            slot = lax.rem(number, np.int32(2))
            sync.for_each(0, math.prod(steps), functools.partial(add, slot))
            pltpu.sync_copy(slots[0].at[slot], out.at[at_tile(number)])

        def add(slot: Number, number: Number) -> None:
            *leading, row, column = unraveled(number, steps)
            starts = (row, high), (column, SUBCORE_COLUMNS)
            cut = (pl.ds(pl.multiple_of(i * size, size), size) for i, size in starts)
            at = (slot, *leading, *cut)
            read = [ref[at].astype(wide(dtype)) for ref in slots]
            slots[0][at] = functools.reduce(OPS[op], read).astype(dtype)

        start(np.int32(0))
        lax.fori_loop(0, tiles, one, None)

    pl.run_scoped(
        over, *[pltpu.VMEM((2, *tile), dtype) for _ in terms], pltpu.SemaphoreType.DMA((2,))
    )


def combine_stack(op: str, out_ref: Ref, stack_ref: Ref, *, vmem: bool) -> None:
    """out = stack[0] op stack[1] op ..., as `combine`; the code does not grow with the stack.

    A stack of several dimensions is taken row-major.
    """

    def body(stack: Ref, out: Ref) -> None:
        out[...] = combined(op, stack, out.shape).astype(out.dtype)

    _over_tiles(body, [out_ref], [stack_ref], vmem=vmem)


def stack_bytes(x: jax.Array | jax.ShapeDtypeStruct, layers: int) -> int:
    """Bytes of VMEM in which `combine_stack` adds so many layers like x from HBM."""
    tile = tile_shape(x.shape, x.dtype, TILE_BYTES // layers)
    return 2 * (layers + 1) * math.prod(tile) * x.dtype.itemsize


def combined(op: str, stack: Ref, shape: tuple[int, ...]) -> jax.Array:
    """The layers of a shape that a stack in VMEM has, one after the other, in `wide` numbers."""
    sizes = stack.shape[: -len(shape)]

    def layer(number: Number) -> jax.Array:
        return stack[tuple(unraveled(number, sizes))].astype(wide(stack.dtype))

    return lax.fori_loop(
        1, math.prod(sizes), lambda i, so_far: OPS[op](so_far, layer(i)), layer(np.int32(0))
    )


def _over_tiles(
    body: Callable[..., None], out_refs: Sequence[Ref], in_refs: Sequence[Ref], *, vmem: bool
) -> None:
    """body(*input tiles, *output tiles) for each; stacked inputs come with all their layers."""
    shape, dtype = out_refs[0].shape, out_refs[0].dtype
    layers = math.prod(size for ref in in_refs for size in ref.shape[: -len(shape)])
    limit = TILE_BYTES // (layers * len(out_refs))
    if vmem:
        tile = tile_shape(shape, dtype, limit)
        _for_each_tile(_grid(shape, tile), tile, body, *in_refs, *out_refs)
        return
    for span in even_spans(shape, dtype, limit):
        cut = [ref.at[(*map(_all, ref.shape[:-2]), *span)] for ref in (*in_refs, *out_refs)]
        ins, outs = cut[: len(in_refs)], cut[len(in_refs) :]
        tile = tile_shape(outs[0].shape, dtype, limit)
        in_specs, out_specs = ([_spec(ref, tile) for ref in refs] for refs in (ins, outs))
        grid = _grid(outs[0].shape, tile)
        pltpu.emit_pipeline(body, grid=grid, in_specs=in_specs, out_specs=out_specs)(*cut)


def _spec(ref: Ref, tile: tuple[int, ...]) -> pl.BlockSpec:
    stacked = ref.shape[: -len(tile)]
    return pl.BlockSpec((*stacked, *tile), lambda *index: (*(0 for _ in stacked), *index))


def _grid(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size // t for size, t in zip(shape, tile, strict=True))


def even_spans(
    shape: tuple[int, ...], dtype: DType, limit: int, start: tuple[int, int] = (0, 0)
) -> Iterator[tuple[slice | pl.Slice, slice | pl.Slice]]:
    """The rows and columns of parts of a shape, none of which is cut into small tiles.

    That is all of it, unless `tile_shape` finds less than an eighth of `limit`, as of 251 hardware
    tiles, which nothing divides: then it is what a power of two divides, and the rest. A tile of 4
    KiB takes as long as one of 30.
    """
    tile, sizes = tile_shape(shape, dtype, limit), shape[-2:]
    most = limit // jnp.dtype(dtype).itemsize
    if 8 * math.prod(tile[-2:]) >= min(most, math.prod(sizes)):
        yield pl.ds(start[0], sizes[0]), pl.ds(start[1], sizes[1])
        return
    whole = min(sizes[0], sublanes(dtype)), LANES
    axis = int(sizes[1] // whole[1] > sizes[0] // whole[0])
    step = pl.next_power_of_2(most // math.prod(whole) + 1) // 2 * whole[axis]
    first = sizes[axis] // step * step
    for begin, size in ((0, first), (first, sizes[axis] - first)):
        part, at = [*shape], [*start]
        part[axis - 2], at[axis] = size, start[axis] + begin
        yield from even_spans((*part,), dtype, limit, (at[0], at[1]))


def wide(dtype: DType) -> DType:
    """The dtype in which values of a dtype are combined."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)


def tile_shape(shape: tuple[int, ...], dtype: DType, limit: int) -> tuple[int, ...]:
    """The largest tile of whole hardware tiles, or of all rows where they are fewer, that cuts a
    shape evenly, of `limit` bytes.

    Of those that are as large, the widest. It spans several of a leading dimension only where it
    spans all of those behind it.
    """
    *leading, rows, columns = shape
    high = min(rows, sublanes(dtype))
    units = max(1, limit // (jnp.dtype(dtype).itemsize * high * LANES))
    fitting = [
        (width * height, width, height)
        for width in _divisors(columns // LANES)
        for height in _divisors(rows // high)
        if width * height <= units
    ]
    size, width, height = max(fitting)
    tile = [height * high, width * LANES]
    for i, extent in reversed(list(enumerate(leading))):
        spans = tuple(tile) == tuple(shape[i + 1 :])
        tile.insert(0, max(n for n in _divisors(extent) if n * size <= units) if spans else 1)
        size *= tile[0]
    return tuple(tile)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _for_each_tile(
    grid: tuple[int, ...], tile: tuple[int, ...], body: Callable[..., None], *refs: Ref
) -> None:
    at = _places(grid, tile)

    def step(number: Number, _: None) -> None:
        index = at(number)
        body(*(ref.at[(*map(_all, ref.shape[: -len(index)]), *index)] for ref in refs))

    lax.fori_loop(0, math.prod(grid), step, None)


def _places(grid: tuple[int, ...], tile: tuple[int, ...]) -> Callable[[Number], tuple[Any, ...]]:
    """Where the tile of a number is, row-major."""

    def at(number: Number) -> tuple[Any, ...]:
        index = unraveled(number, grid)
        return tuple(pl.ds(pl.multiple_of(i * t, t), t) for i, t in zip(index, tile, strict=True))

    return at


def _all(size: int) -> Index:
    return pl.ds(0, size)
