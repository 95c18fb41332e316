"""What a wire does to numbers on a GPU, each in one pass over memory: Pallas kernels by Triton.

XLA reads what it quantises twice, for the largest number of each group and for the numbers, and
writes numbers and scales apart before it lays them side by side. Here a block of the grid has
whole groups in registers, and reads and writes them where they travel: a block's values, and its
scales behind them. The bits are the same (`wires` says what they are).

    pack     (k, ...) -> int8 (k, bytes)
    unpack   the inverse, in a dtype
    added    the sum of the blocks that come, in their order

What a device keeps of its own is not packed: `unpack` and `added` round it where it lies. Each
kernel can do a part of every block at a time, of which all are as long, so that one is on the wire
while the next is packed; those that unpack write their part to what the one before has begun.
Groups are as long as a power of two, and lie one behind the other; the rest is for XLA's passes
(`serves`).
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
from pallas_collectives.annotations import Ref
from pallas_collectives.wires import Wire

_GROUPS = (32, 16, 8)  # that a block of the grid has
_MOST = 1 << 31  # offsets are of 32 bits
_SCALE = 4  # bytes


def serves(shape: tuple[int, ...], wire: Wire) -> bool:
    """Whether these kernels serve blocks: k of them, and then the shape of one."""
    if not wire.scaled or wire.scales != "float32" or not isinstance(wire.group, int):
        return False
    whole = shape[-1] % wire.group == 0 and math.prod(shape) < _MOST
    return whole and _together(math.prod(shape[1:]) // wire.group) > 0


class Part(NamedTuple):
    """The part of each block that a kernel sees to.

    Attributes:
      wire: with scales, of float32.
      numbers: of a whole block.
      number, parts: which of how many parts it is.
      interpret: whether kernels are simulated.
    """

    wire: Wire
    numbers: int
    number: int
    parts: int
    interpret: bool

    @classmethod
    def all_of(cls, shape: tuple[int, ...], wire: Wire, most: int, interpret: bool) -> list["Part"]:
        """The parts of blocks: as many as may be, up to `most`."""
        numbers = math.prod(shape[1:])
        groups = numbers // int(wire.group)
        parts = next(n for n in range(most, 0, -1) if _together(groups / n))
        return [cls(wire, numbers, number, parts, interpret) for number in range(parts)]

    @property
    def group(self) -> int:
        """Numbers of a group."""
        return int(self.wire.group)

    @property
    def groups(self) -> int:
        """Groups of the part."""
        return self.numbers // self.group // self.parts

    @property
    def together(self) -> int:
        """Groups of a block of the grid."""
        return _together(self.groups)

    @property
    def steps(self) -> int:
        """Blocks of the grid for one part."""
        return self.groups // self.together

    @property
    def nbytes(self) -> int:
        """Bytes of the part on the wire."""
        return self.groups * (self.group + _SCALE)


def pack(part: Part, blocks: jax.Array, left_out: jax.Array, *after: jax.Array) -> jax.Array:
    """A part of blocks as it travels: int8 (k, bytes).

    Args:
      part: which.
      blocks: (k, ...), which `serves` knows; rounded to nearest.
      left_out: int32 (1,): the block that stays, of which nothing is written; -1 for none.
      after: small arrays that are there before it begins.
    """
    k = len(blocks)
    return pl.pallas_call(
        functools.partial(_pack_kernel, part=part),
        grid=(k, part.steps),
        in_specs=[_numbers(part), *[_word()] * (1 + len(after))],
        out_specs=_block(part),
        out_shape=jax.ShapeDtypeStruct((k, part.nbytes), jnp.int8),
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=part.interpret,
        name="pack",
    )(*map(_untyped, (_in_groups(blocks, part), left_out, *after)))


def unpack(
    part: Part, dtype: Any, come: jax.Array, blocks: jax.Array, own: jax.Array, *begun: jax.Array
) -> jax.Array:
    """(n, ...) in a dtype: a part of the blocks that have come, and of one's own.

    Args:
      part: which.
      dtype: of the result.
      come: int8 (n, bytes): n parts.
      blocks: what was packed here: the own block, or one for each device.
      own: int32 (1,): whose place in the result this device's own block has; -1 for nobody's.
      begun: the result with the parts before this one, if it is not the first.
    """
    kernel = functools.partial(_unpack_kernel, part=part, most=float(jnp.finfo(dtype).max))
    whole = jax.ShapeDtypeStruct((len(come), part.numbers // part.group, part.group), dtype)
    specs = [_block(part), _numbers(part, single=len(blocks) == 1), _word()]
    call = _part_of(whole, _numbers(part), kernel, (len(come), part.steps), specs, part, *begun)
    return call(come, _in_groups(blocks, part), own)


def added(
    part: Part, dtype: Any, come: jax.Array, blocks: jax.Array, own: jax.Array, *begun: jax.Array
) -> jax.Array:
    """The sum of a part of the blocks: the first plus the second, plus the third, in float32.

    As `unpack`. No term has larger numbers than the dtype of `blocks`; what is beyond that of the
    sum is inf.
    """
    most = float(jnp.finfo(blocks.dtype).max)
    kernel = functools.partial(_add_kernel, part=part, most=most)
    shape = (part.together, part.group)
    first = part.number * part.steps
    whole = jax.ShapeDtypeStruct((part.numbers // part.group, part.group), dtype)
    specs = [
        pl.BlockSpec(come.shape, lambda i: (0, 0)),
        pl.BlockSpec((len(blocks), *shape), lambda i: (0, first + i, 0)),
        _word(),
    ]
    out = pl.BlockSpec(shape, lambda i: (first + i, 0))
    call = _part_of(whole, out, kernel, (part.steps,), specs, part, *begun)
    return call(come, _in_groups(blocks, part), own)


def _part_of(
    whole: jax.ShapeDtypeStruct,
    out_specs: pl.BlockSpec,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    part: Part,
    *begun: jax.Array,
) -> Callable[..., jax.Array]:
    """The call of a kernel that writes a part of a whole, in place of one that has been begun."""
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[*in_specs, *[out_specs] * len(begun)],
        out_specs=out_specs,
        out_shape=whole,
        input_output_aliases={len(in_specs): 0} if begun else {},
        compiler_params=_compat.triton_params(num_warps=4, num_stages=1),
        interpret=part.interpret,
        name="unpack" if len(grid) == 2 else "add",
    )
    return lambda *operands: call(*map(_untyped, (*operands, *begun)))


# Kernels. Numbers are (groups, group) of one block of the grid; packed blocks are whole; a result
# that was begun is there behind the operands, and not looked at.


def _pack_kernel(numbers_ref: Ref, left_out_ref: Ref, *refs: Ref, part: Part) -> None:
    packed_ref, (values_at, scales_at) = refs[-1], _places(part, pl.program_id(1))

    @pl.when(pl.program_id(0) != left_out_ref[0])
    def _() -> None:
        values, scales = wires.of_groups(numbers_ref[...].astype(jnp.float32), part.wire)
        packed_ref[values_at] = lax.bitcast_convert_type(values, jnp.int8).reshape(-1)
        words = lax.bitcast_convert_type(scales, jnp.int32)[:, None]
        packed_ref[scales_at] = (words >> _shifts()).astype(jnp.int8).reshape(-1)


def _unpack_kernel(
    come_ref: Ref, numbers_ref: Ref, own_ref: Ref, *refs: Ref, part: Part, most: float
) -> None:
    places = _places(part, pl.program_id(1))
    numbers = lax.cond(
        pl.program_id(0) == own_ref[0],
        lambda: _rounded(numbers_ref[...], part.wire),
        lambda: _read(come_ref, (), places, part),
    )
    refs[-1][...] = _within(numbers, most).astype(refs[-1].dtype)


def _add_kernel(
    come_ref: Ref, numbers_ref: Ref, own_ref: Ref, *refs: Ref, part: Part, most: float
) -> None:
    places = _places(part, pl.program_id(0))
    last = numbers_ref.shape[0] - 1

    def term(k: int) -> jax.Array:
        numbers = lax.cond(
            own_ref[0] == k,
            lambda: _rounded(numbers_ref[min(k, last)], part.wire),
            lambda: _read(come_ref, (k,), places, part),
        )
        return _within(numbers, most)

    total = term(0)
    for k in range(1, come_ref.shape[0]):
        total += term(k)
    refs[-1][...] = total.astype(refs[-1].dtype)


def _rounded(numbers: jax.Array, wire: Wire) -> jax.Array:
    """What would arrive of numbers, if they went over the wire."""
    values, scales = wires.of_groups(numbers.astype(jnp.float32), wire)
    return values.astype(jnp.float32) * scales[:, None]


def _read(come_ref: Ref, block: tuple[int, ...], places: Any, part: Part) -> jax.Array:
    """The numbers of a block, of which these are the places of values and scales."""
    values, octets = (come_ref[(*block, at)].reshape(part.together, -1) for at in places)
    numbers = lax.bitcast_convert_type(values, jnp.dtype(part.wire.dtype)).astype(jnp.float32)
    words = ((octets.astype(jnp.int32) & 255) << _shifts()).sum(axis=1)
    return numbers * lax.bitcast_convert_type(words, jnp.float32)[:, None]


def _places(part: Part, step: Any) -> tuple[Any, Any]:
    """Where values and scales of a step's groups are in a packed block."""
    values, scales = part.together * part.group, part.together * _SCALE
    behind = part.groups * part.group
    return pl.ds(step * values, values), pl.ds(behind + step * scales, scales)


def _shifts() -> jax.Array:
    """By how much the bytes of a word are shifted, in the order in which they lie: (1, 4)."""
    return 8 * lax.broadcasted_iota(jnp.int32, (1, _SCALE), 1)


def _within(numbers: jax.Array, most: float) -> jax.Array:
    """Numbers, or what of `most` is nearest; NaN stays."""
    limit = np.float32(most)
    return jnp.where(numbers > limit, limit, jnp.where(numbers < -limit, -limit, numbers))


# Where they are.


def _together(groups: float) -> int:
    """How many of so many groups a block of the grid has; 0 where no number is right."""
    return next((each for each in _GROUPS if groups % each == 0), 0)


def _in_groups(blocks: jax.Array, part: Part) -> jax.Array:
    return blocks.reshape(len(blocks), -1, part.group)


def _untyped(x: jax.Array) -> jax.Array:
    """x, reshaped twice, so that no type of the caller's stays."""
    return x.reshape(-1, 1).reshape(x.shape)


def _numbers(part: Part, *, single: bool = False) -> pl.BlockSpec:
    """This part of each block, or of the only one there is."""
    first = part.number * part.steps
    shape = (None, part.together, part.group)
    return pl.BlockSpec(shape, lambda b, i: (0 if single else b, first + i, 0))


def _block(part: Part) -> pl.BlockSpec:
    return pl.BlockSpec((None, part.nbytes), lambda b, i: (b, 0))


def _word() -> pl.BlockSpec:
    return pl.BlockSpec((1,), lambda *_: (0,))
