"""What a wire does to numbers on a GPU, each in one pass over memory: Pallas kernels by Triton.

XLA reads what it quantises twice, for the largest number of each group and for the numbers, and
writes numbers and scales apart before it lays them side by side. Here a block of the grid has
whole groups in registers, and reads and writes them where they travel: a block's values, and its
scales behind them. The bits are the same (`wires` says what they are).

    pack     (k, ...) -> int8 (k, bytes)
    unpack   the inverse, in a dtype
    added    the sum of the blocks that come, in their order

What a device keeps of its own is not packed: `unpack` and `added` round it where it lies. Groups
are as long as a power of two, and lie one behind the other; the rest is for XLA's passes
(`serves`). Between GPUs that reach each other's memory `nccl.packed` takes the place of all this.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_collectives import _compat, wires
from pallas_collectives.annotations import DType, Index, Number, Ref, span
from pallas_collectives.wires import Wire

_GROUPS = (32, 16, 8)  # that a block of the grid has
_MOST = 1 << 31  # packed bytes of all blocks: offsets among them are signed, of 32 bits
_SCALE = 4  # bytes


def serves(shape: tuple[int, ...], wire: Wire, come: int) -> bool:
    """Whether these kernels serve blocks: k of them, and then the shape of one.

    come: how many such blocks come.
    """
    if not wire.scaled or wire.scales != "float32" or not isinstance(wire.group, int):
        return False
    format = Format(wire, math.prod(shape[1:]), False)
    fits = max(shape[0], come) * format.nbytes < _MOST
    return fits and shape[-1] % wire.group == 0 and format.together > 0


class Format(NamedTuple):
    """What kernels know of blocks.

    Attributes:
      wire: with scales, of float32.
      numbers: how many a block has.
      interpret: whether kernels are simulated.
    """

    wire: Wire
    numbers: int
    interpret: bool

    @property
    def group(self) -> int:
        """Numbers of a group."""
        return int(self.wire.group)

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.numbers // self.group

    @property
    def together(self) -> int:
        """Groups of a block of the grid."""
        return _together(self.groups)

    @property
    def steps(self) -> int:
        """Blocks of the grid for one block."""
        return self.groups // self.together

    @property
    def nbytes(self) -> int:
        """Bytes of a block on the wire."""
        return self.groups * (self.group + _SCALE)


def pack(format: Format, blocks: jax.Array, left_out: jax.Array) -> jax.Array:
    """Blocks as they travel: int8 (k, bytes).

    Args:
      format: the blocks' format.
      blocks: (k, ...), which `serves` knows; rounded to nearest.
      left_out: int32 (1,): the block that stays and is not written; -1 for no block.
    """
    k = len(blocks)
    packed = jax.ShapeDtypeStruct((k, format.nbytes), jnp.int8)
    kernel = functools.partial(_pack_kernel, format=format)
    specs = [_numbers(format), _word()]
    call = _call("pack", kernel, (k, format.steps), specs, _block(format), packed, format)
    return call(_in_groups(blocks, format), left_out)


def unpack(
    format: Format, dtype: DType, come: jax.Array, blocks: jax.Array, own: jax.Array
) -> jax.Array:
    """(n, groups, group) in a dtype: the blocks that have come, and one's own.

    Args:
      format: the blocks' format.
      dtype: the dtype of the result.
      come: int8 (n, bytes).
      blocks: what was packed here: the own block, or one for each device.
      own: int32 (1,): whose place in the result this device's own block has; -1 for nobody's.
    """
    n, most = len(come), float(jnp.finfo(dtype).max)
    kernel = functools.partial(_unpack_kernel, format=format, most=most)
    whole = jax.ShapeDtypeStruct((n, format.groups, format.group), dtype)
    specs = [_block(format), _numbers(format, single=len(blocks) == 1), _word()]
    call = _call("unpack", kernel, (n, format.steps), specs, _numbers(format), whole, format)
    return call(come, _in_groups(blocks, format), own)


def added(
    format: Format, dtype: DType, come: jax.Array, blocks: jax.Array, own: jax.Array
) -> jax.Array:
    """(groups, group): the first block plus the second, plus the third, in float32.

    As `unpack`. No term has larger numbers than the dtype of `blocks`; what is beyond that of the
    sum is inf.
    """
    most = float(jnp.finfo(blocks.dtype).max)
    kernel = functools.partial(_add_kernel, format=format, most=most)
    shape = (format.together, format.group)
    total = jax.ShapeDtypeStruct((format.groups, format.group), dtype)
    specs = [
        pl.BlockSpec(come.shape, lambda i: (0, 0)),
        pl.BlockSpec((len(blocks), *shape), lambda i: (0, i, 0)),
        _word(),
    ]
    out = pl.BlockSpec(shape, lambda i: (i, 0))
    call = _call("add", kernel, (format.steps,), specs, out, total, format)
    return call(come, _in_groups(blocks, format), own)


def _call(
    name: str,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: pl.BlockSpec,
    result: jax.ShapeDtypeStruct,
    format: Format,
) -> Callable[..., jax.Array]:
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=result,
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=format.interpret,
        name=name,
    )
    return lambda *operands: call(*map(_untyped, operands))


# Kernels. Numbers are (groups, group) of one block of the grid; packed blocks are whole.


def _pack_kernel(numbers_ref: Ref, left_out_ref: Ref, packed_ref: Ref, format: Format) -> None:
    values_at, scales_at = _places(format, pl.program_id(1))

    @pl.when(pl.program_id(0) != left_out_ref[0])
    def _() -> None:
        values, scales = wires.of_groups(numbers_ref[...].astype(jnp.float32), format.wire)
        packed_ref[values_at] = lax.bitcast_convert_type(values, jnp.int8).reshape(-1)
        words = lax.bitcast_convert_type(scales, jnp.int32)[:, None]
        packed_ref[scales_at] = (words >> _shifts()).astype(jnp.int8).reshape(-1)


def _unpack_kernel(
    come_ref: Ref, numbers_ref: Ref, own_ref: Ref, out_ref: Ref, format: Format, most: float
) -> None:
    places = _places(format, pl.program_id(1))
    numbers = lax.cond(
        pl.program_id(0) == own_ref[0],
        lambda: _rounded(numbers_ref[...], format.wire),
        lambda: _read(come_ref, (), places, format),
    )
    out_ref[...] = _within(numbers, most).astype(out_ref.dtype)


def _add_kernel(
    come_ref: Ref, numbers_ref: Ref, own_ref: Ref, out_ref: Ref, format: Format, most: float
) -> None:
    places = _places(format, pl.program_id(0))
    last = numbers_ref.shape[0] - 1

    def term(k: int) -> jax.Array:
        numbers = lax.cond(
            own_ref[0] == k,
            lambda: _rounded(numbers_ref[min(k, last)], format.wire),
            lambda: _read(come_ref, (k,), places, format),
        )
        return _within(numbers, most)

    total = term(0)
    for k in range(1, come_ref.shape[0]):
        total += term(k)
    out_ref[...] = total.astype(out_ref.dtype)


def _rounded(numbers: jax.Array, wire: Wire) -> jax.Array:
    """What would arrive of numbers, if they went over the wire."""
    values, scales = wires.of_groups(numbers.astype(jnp.float32), wire)
    return values.astype(jnp.float32) * scales[:, None]


def _read(
    come_ref: Ref, block: tuple[int, ...], places: tuple[Index, Index], format: Format
) -> jax.Array:
    """The numbers of a block, from the places of its values and scales."""
    values, octets = (come_ref[(*block, at)].reshape(format.together, -1) for at in places)
    numbers = lax.bitcast_convert_type(values, jnp.dtype(format.wire.dtype)).astype(jnp.float32)
    words = ((octets.astype(jnp.int32) & 255) << _shifts()).sum(axis=1)
    return numbers * lax.bitcast_convert_type(words, jnp.float32)[:, None]


def _places(format: Format, step: Number) -> tuple[Any, Any]:
    """Where values and scales of a step's groups are in a packed block."""
    values, scales = format.together * format.group, format.together * _SCALE
    behind = format.groups * format.group
    return span(step * values, values), span(behind + step * scales, scales)


def _shifts() -> jax.Array:
    """By how much the bytes of a word are shifted, in the order in which they lie: (1, 4)."""
    return 8 * lax.broadcasted_iota(jnp.int32, (1, _SCALE), 1)


def _within(numbers: jax.Array, most: float) -> jax.Array:
    """Numbers, or what of `most` is nearest; NaN stays."""
    limit = np.float32(most)
    return jnp.where(numbers > limit, limit, jnp.where(numbers < -limit, -limit, numbers))


# Where they are.


def _together(groups: int) -> int:
    """How many of so many groups a block of the grid has; 0 where no number is right."""
    return next((each for each in _GROUPS if groups % each == 0), 0)


def _in_groups(blocks: jax.Array, format: Format) -> jax.Array:
    return blocks.reshape(len(blocks), -1, format.group)


def _untyped(x: jax.Array) -> jax.Array:
    """x, reshaped twice, so that no type of the caller's stays."""
    return x.reshape(-1, 1).reshape(x.shape)


def _numbers(format: Format, *, single: bool = False) -> pl.BlockSpec:
    """The block spec of each block's numbers, or of a single block's."""
    shape = (None, format.together, format.group)
    return pl.BlockSpec(shape, lambda b, i: (0 if single else b, i, 0))


def _block(format: Format) -> pl.BlockSpec:
    return pl.BlockSpec((None, format.nbytes), lambda b, i: (b, 0))


def _word() -> pl.BlockSpec:
    return pl.BlockSpec((1,), lambda *_: (0,))
