"""What a wire does to numbers on a TPU beside a collective, each in one pass over memory.

XLA quantises in passes of its own, and lays values and scales side by side in others; by the
compiler's cycles that takes ten times as long as HBM does. Here tiles are read, and written where
they travel, in the order in which they lie:

    pack     (k, ...) -> int32 (k, tiles, 8, 128)
    unpack   the inverse, in a dtype
    added    the sum of the blocks that come, in their order; or their maximum or minimum
    lost     blocks less what arrives of them
    drawn    blocks rounded at random to what arrives as it is

Values and scales are those of `wires`, bit by bit; `wire_format` says where they are. Blocks of too
few numbers, or of no whole tiles, are for XLA's passes (`Format.of`), and so is float16, which
kernels do not know.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives.annotations import DTypeLike, Interpret
from pallas_collectives.kernels import wire_bodies
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.kernels.wire_format import Format
from pallas_collectives.tiles import LANES, SUBLANES


def pack(blocks: jax.Array, format: Format, dtype: DTypeLike, *, interpret: Interpret) -> jax.Array:
    """Blocks as they travel: int32 (k, tiles, 8, 128).

    Args:
      blocks: (k, ...).
      format: the blocks' format.
      dtype: what overflows in it is sent as inf.
      interpret: False to compile.
    """
    k = len(blocks)
    packed = launch.apart(
        functools.partial(wire_bodies.pack, format=format, dtype=dtype),
        format.seen(blocks),
        grid=(k // format.together(k), *format.grid),
        in_specs=[_numbers(format, k)],
        out_specs=_packed(format, k),
        out_shape=jax.ShapeDtypeStruct((k, format.tiles * SUBLANES, LANES), jnp.int32),
        compiler_params=_parallel(3),
        name="wire_pack",
        seconds=format.seconds_to_pack(k, blocks.dtype.itemsize),
        interpret=interpret,
    )
    return packed.reshape(k, -1, SUBLANES, LANES)


def unpack(come: jax.Array, format: Format, dtype: DTypeLike, *, interpret: Interpret) -> jax.Array:
    """(n * rows, columns) in a dtype: the blocks that have come."""
    n = len(come)
    numbers = _made(
        wire_bodies.unpack,
        come.reshape(n, -1, LANES),
        in_specs=[_packed(format, n)],
        result=(n, dtype),
        format=format,
        name="wire_unpack",
        seconds=format.seconds_to_unpack(n, jnp.dtype(dtype).itemsize),
        interpret=interpret,
    )
    return format.unseen(numbers)


def values(come: jax.Array, format: Format, *, interpret: Interpret) -> jax.Array:
    """(n, rows, columns) in the wire's dtype: the values of the blocks that have come."""
    n = len(come)
    return _made(
        wire_bodies.values,
        come.reshape(n, -1, LANES),
        in_specs=[_packed(format, n)],
        result=(n, format.wire.dtype),
        format=format,
        name="wire_values",
        seconds=format.seconds_to_unpack(n, 1),
        interpret=interpret,
    )


def added(
    come: jax.Array,
    format: Format,
    terms: DTypeLike,
    dtype: DTypeLike,
    *,
    op: str = "sum",
    interpret: Interpret,
) -> jax.Array:
    """(rows, columns) in a dtype: the first block plus the second, plus the third, in float32.

    Args:
      come: the blocks, as they travel.
      format: theirs.
      terms: the dtype of the terms, none of which has a larger number.
      dtype: the result's.
      op: "sum"; or "max" or "min" in place of plus.
      interpret: False to compile.
    """
    n, along = len(come), format.grid[1]
    each = format.together(n)
    rows, numbers = format.chunks * format.chunk_rows, math.prod(format.step)
    total = launch.apart(
        functools.partial(wire_bodies.add, format=format, terms=terms, op=op),
        come.reshape(n, -1, LANES),
        grid=(*format.grid, n // each),
        in_specs=[pl.BlockSpec((each, rows, LANES), lambda r, c, b: (b, r * along + c, 0))],
        out_specs=pl.BlockSpec(format.step, lambda r, c, b: (r, c)),
        out_shape=jax.ShapeDtypeStruct(format.block, dtype),
        scratch_shapes=[pltpu.VMEM((numbers // LANES, LANES), jnp.float32)],
        compiler_params=_parallel(2),
        name="wire_add",
        seconds=format.seconds_to_unpack(n, jnp.dtype(dtype).itemsize),
        interpret=interpret,
    )
    return format.unseen(total[None])


def lost(*blocks: jax.Array, format: Format, interpret: Interpret) -> jax.Array:
    """(k * rows, columns): blocks (k, ...) less what arrives of them, or of others that are second.

    blocks: of one dtype.
    """
    k, dtype = len(blocks[0]), blocks[0].dtype
    residue = _made(
        wire_bodies.lost,
        *map(format.seen, blocks),
        in_specs=[_numbers(format, k)] * len(blocks),
        result=(k, dtype),
        format=format,
        scratch=[_one_packed(format)],
        name="wire_lost",
        seconds=format.seconds_to_lose(k, dtype.itemsize, len(blocks)),
        interpret=interpret,
    )
    return format.unseen(residue)


def drawn(
    blocks: jax.Array, words: jax.Array, format: Format, *, interpret: Interpret
) -> jax.Array:
    """(k * rows, columns): blocks (k, ...) rounded by the `noise` of these key words."""
    k, dtype = len(blocks), blocks.dtype
    arrived = _made(
        wire_bodies.drawn,
        words,
        format.seen(blocks),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), _numbers(format, k)],
        result=(k, dtype),
        format=format,
        scratch=[_one_packed(format)],
        name="wire_drawn",
        seconds=format.seconds_to_draw(k, dtype.itemsize),
        interpret=interpret,
    )
    return format.unseen(arrived)


def _made(
    kernel: Callable[..., None],
    *operands: jax.Array,
    in_specs: Sequence[pl.BlockSpec],
    result: tuple[int, DTypeLike],
    format: Format,
    scratch: Sequence[Any] = (),
    **told: Any,
) -> jax.Array:
    """So many blocks as they are seen, in a dtype: what a kernel makes step by step."""
    k, dtype = result
    return launch.apart(
        functools.partial(kernel, format=format),
        *operands,
        grid=(k // format.together(k), *format.grid),
        in_specs=in_specs,
        out_specs=_numbers(format, k),
        out_shape=jax.ShapeDtypeStruct((k, *format.block), dtype),
        scratch_shapes=scratch,
        compiler_params=_parallel(3),
        **told,
    )


def _one_packed(format: Format) -> Any:
    """Scratch for a step of one block as it travels."""
    return pltpu.VMEM((format.chunks * format.chunk_rows, LANES), jnp.int32)


def _parallel(dimensions: int) -> pltpu.CompilerParams:
    """So many of the grid's three can be shared by a device's cores."""
    semantics: Any = ("parallel",) * dimensions + ("arbitrary",) * (3 - dimensions)
    return pltpu.CompilerParams(dimension_semantics=semantics)


def _numbers(format: Format, blocks: int) -> pl.BlockSpec:
    return pl.BlockSpec((format.together(blocks), *format.step), lambda b, r, c: (b, r, c))


def _packed(format: Format, blocks: int) -> pl.BlockSpec:
    rows, along = format.chunks * format.chunk_rows, format.grid[1]
    shape = format.together(blocks), rows, LANES
    return pl.BlockSpec(shape, lambda b, r, c: (b, r * along + c, 0))
