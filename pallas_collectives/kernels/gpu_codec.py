"""What a wire does to numbers on a GPU, each in one pass over memory: Pallas kernels by Triton.

XLA reads what it quantises twice, for the largest number of each group and for the numbers, and
writes numbers and scales apart before it lays them side by side. Here a block of the grid has
whole groups in registers, and writes where they travel. On an H200 64 MiB of bfloat16 take 33 us to
pack, where XLA takes 75, and 25 to unpack, where it takes 41; the bits are the same (`wires` says
what they are).

    pack     (k, ...) -> int8, as `wires.pack` of `wires.quantize`
    unpack   the inverse, in a dtype
    added    the sum of the k blocks, in their order

Groups are as long as a power of two, and lie one behind the other; the rest is for XLA's passes
(`serves`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives import _compat, wires
from pallas_collectives.annotations import Ref
from pallas_collectives.wires import Wire

_GROUPS = (32, 16, 8)  # that a block of the grid has
_MOST = 1 << 31  # offsets are of 32 bits


def serves(shape: tuple[int, ...], wire: Wire) -> bool:
    """Whether these kernels serve blocks: k of them, and then the shape of one."""
    if not wire.scaled or wire.scales != "float32" or not isinstance(wire.group, int):
        return False
    whole = shape[-1] % wire.group == 0 and math.prod(shape) < _MOST
    return whole and _groups(math.prod(shape[1:]) // wire.group) > 0


def pack(blocks: jax.Array, wire: Wire, interpret: bool) -> jax.Array:
    """Blocks' values with their scales behind them, as `wires.pack` lays them.

    Args:
      blocks: (k, ...), which `serves` knows; rounded to nearest.
      wire: with scales.
      interpret: whether the kernel is simulated.
    """
    k, group, groups, each = _cut(blocks.shape, wire)
    nbytes = wires.packed_bytes(blocks.shape[1:], wire)
    values, scales = pl.pallas_call(
        functools.partial(_pack_kernel, wire=wire),
        grid=(k, groups // each),
        in_specs=[_numbers(each, group)],
        out_specs=[_values(each, group), _scales(each)],
        out_shape=[
            jax.ShapeDtypeStruct((k, nbytes), jnp.dtype(wire.dtype)),  # its end is still to come
            jax.ShapeDtypeStruct((k, groups), jnp.float32),
        ],
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=interpret,
        name="pack",
    )(blocks.reshape(-1).reshape(k, groups, group))  # two, so that no type of the caller's stays
    behind = lax.bitcast_convert_type(scales, jnp.int8).reshape(k, -1)
    filled = groups * (group + 4)
    behind = jnp.pad(behind, ((0, 0), (0, nbytes - filled)))
    whole = lax.bitcast_convert_type(values, jnp.int8)
    whole = lax.dynamic_update_slice(whole, behind, (0, groups * group))
    return wires.in_units(whole, filled)


def unpack(
    packed: jax.Array, shape: tuple[int, ...], wire: Wire, dtype: Any, interpret: bool
) -> jax.Array:
    """(k, *shape) in a dtype: what `wires.dequantize` makes of k blocks of a shape."""
    k, group, groups, each = _cut((len(packed), *shape), wire)
    numbers = pl.pallas_call(
        functools.partial(_unpack_kernel, most=float(jnp.finfo(dtype).max)),
        grid=(k, groups // each),
        in_specs=[_values(each, group), _scales(each)],
        out_specs=_numbers(each, group),
        out_shape=jax.ShapeDtypeStruct((k, groups, group), dtype),
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=interpret,
        name="unpack",
    )(*_parts(packed, wire, groups))
    return numbers.reshape(k, *shape)


def added(
    packed: jax.Array, shape: tuple[int, ...], wire: Wire, dtype: Any, result: Any, interpret: bool
) -> jax.Array:
    """The sum of the blocks, of a shape: the first plus the second, plus the third, in float32.

    Args:
      packed: k blocks.
      shape: of one block.
      wire: as they were packed.
      dtype: what was packed, which has no larger numbers than each term.
      result: dtype of the sum; what is beyond that is inf.
      interpret: whether the kernel is simulated.
    """
    k, group, groups, each = _cut((len(packed), *shape), wire)
    total = pl.pallas_call(
        functools.partial(_add_kernel, terms=k, most=float(jnp.finfo(dtype).max)),
        grid=(groups // each,),
        in_specs=[
            pl.BlockSpec((k, each * group), lambda i: (0, i)),
            pl.BlockSpec((k, each), lambda i: (0, i)),
        ],
        out_specs=pl.BlockSpec((each, group), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((groups, group), result),
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=interpret,
        name="add",
    )(*_parts(packed, wire, groups))
    return total.reshape(shape)


# Kernels; their refs hold `each` groups, as (each, group) numbers or (each * group,) values, and
# (each,) scales.


def _pack_kernel(numbers_ref: Ref, values_ref: Ref, scales_ref: Ref, *, wire: Wire) -> None:
    values, scales = wires.of_groups(numbers_ref[...].astype(jnp.float32), wire)
    values_ref[...] = values.reshape(values_ref.shape)
    scales_ref[...] = scales


def _unpack_kernel(values_ref: Ref, scales_ref: Ref, numbers_ref: Ref, *, most: float) -> None:
    numbers = _read(values_ref[...], scales_ref[...], numbers_ref.shape)
    numbers_ref[...] = _within(numbers, most).astype(numbers_ref.dtype)


def _add_kernel(
    values_ref: Ref, scales_ref: Ref, total_ref: Ref, *, terms: int, most: float
) -> None:
    total = _within(_read(values_ref[0, :], scales_ref[0, :], total_ref.shape), most)
    for k in range(1, terms):
        total += _within(_read(values_ref[k, :], scales_ref[k, :], total_ref.shape), most)
    total_ref[...] = total.astype(total_ref.dtype)


def _read(values: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return values.reshape(shape).astype(jnp.float32) * scales[:, None]


def _within(numbers: jax.Array, most: float) -> jax.Array:
    """Numbers, or what of `most` is nearest; NaN stays."""
    limit = np.float32(most)
    return jnp.where(numbers > limit, limit, jnp.where(numbers < -limit, -limit, numbers))


# Where blocks of the grid are.


def _cut(shape: tuple[int, ...], wire: Wire) -> tuple[int, int, int, int]:
    """(blocks, numbers of a group, groups of a block, groups of a block of the grid)."""
    group = int(wire.group)
    groups = math.prod(shape[1:]) // group
    return shape[0], group, groups, _groups(groups)


def _groups(groups: int) -> int:
    """How many of a block's groups a block of the grid has; 0 where no number is right."""
    return next((each for each in _GROUPS if groups % each == 0), 0)


def _parts(packed: jax.Array, wire: Wire, groups: int) -> tuple[jax.Array, jax.Array]:
    """Blocks as values, with what is behind them, and scales: (k, bytes), (k, groups)."""
    flat = packed.reshape(len(packed), -1)
    size = groups * int(wire.group)
    bits = flat[:, size : size + 4 * groups].reshape(len(packed), groups, 4)
    values = lax.bitcast_convert_type(flat, jnp.dtype(wire.dtype))
    return values, lax.bitcast_convert_type(bits, jnp.float32)


def _numbers(each: int, group: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, each, group), lambda b, i: (b, i, 0))


def _values(each: int, group: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, each * group), lambda b, i: (b, i))


def _scales(each: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, each), lambda b, i: (b, i))
