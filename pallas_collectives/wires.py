"""Wires: numbers of one byte, and a scale for each group of them, in place of wider floats.

A group is `group` consecutive numbers along the last dimension; the last group of a row may be
short, and counts as padded with zeros. With amax its largest magnitude, and M the largest number of
the wire's dtype (127, 448 or 57344):

    scale    amax / M, or the next power of two that is no smaller; at least 2^-126
    value    number / scale, rounded to the dtype
    arrives  value * scale, in float32, rounded to the operand's dtype

What follows from that, and is tested number by number:

    error           at most half a step, or a whole one by stochastic rounding (`error_bound`); a
                    step is `scale` for int8, for floats the distance of neighbours at the value,
                    times `scale`
    zeros           a group of zeros has scale 0, and arrives as zeros; signs of zeros are lost
    inf, NaN        a group that holds one has scale NaN, and arrives as NaN throughout
    subnormal       what is below 2^-126 on the way may count as zero, as on TPUs: that is the error
                    where it is more than half a step
    largest float   what would round up beyond the operand's dtype arrives as its largest number;
                    a sum that is added on the way counts as overflown if it does so there

A wire of bfloat16 has no scales: numbers are rounded to it, and those beyond 3.39e38 to inf.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import tiles
from pallas_collectives.annotations import DTypeLike
from pallas_collectives.errors import DtypeError, WireError
from pallas_collectives.tiles import LANES, SUBLANES

GROUPS = (128, 256, "row")
ROUNDINGS = ("nearest", "stochastic")
SCALES = ("float32", "power of two")
DTYPES = ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")

LEAST_SCALE = 2.0**-126  # the smallest normal float32

# Numbers of at most 2^22 in magnitude that this is added to are rounded to integers, which are the
# sum's low bits: one addition in place of a rounding and a conversion.
TO_INTEGER = np.float32(1.5 * 2**23)

_INFINITY = np.int32(0x7F800000)  # its bits
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}
_LEAST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}  # of normal numbers


@dataclasses.dataclass(frozen=True)
class Wire:
    """In what numbers a collective sends floats; see the module.

    Attributes:
      dtype: "bfloat16" (of float32), "int8", "float8_e4m3fn" or "float8_e5m2".
      group: how many numbers have a scale together: 128, 256, or "row", the last dimension. Sums
        cut an operand into blocks of 128s or of whole rows, and add up what was quantised once.
      rounding: "nearest", ties to even; or "stochastic", up or down so that the mean is the number.
      key: for stochastic rounding, of `jax.random`; devices along the axes that a collective names
        draw numbers of their own from it, and those along other axes the same ones. Calls with one
        key draw the same: give each a key of its own.
      scales: "float32", or "power of two", by which multiplication is exact.
      optional: leave the wire out, and count that, where it would lose or cannot be had, instead of
        raising an error.

    Raises:
      WireError: an unknown value, a key without stochastic rounding, or stochastic rounding without
        a key.

    Example:
      >>> wire = pc.Wire("int8", group=256)
      >>> print(wire)
      int8 in groups of 256, scales float32
      >>> total = jax.vmap(lambda x: pc.psum(x, "x", wire=wire), axis_name="x")(jnp.ones((4, 256)))
      >>> total[0, :2]
      Array([4., 4.], dtype=float32)
    """

    dtype: str
    group: int | str = 128
    rounding: str = "nearest"
    key: Any = dataclasses.field(default=None, compare=False)
    scales: str = "float32"
    optional: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES),
            ("group", GROUPS),
            ("rounding", ROUNDINGS),
            ("scales", SCALES),
            ("optional", (False, True)),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(k) and value == k for k in known):
                rule = f"it must be one of {', '.join(map(repr, known))}"
                raise WireError(f"{name}={value!r} of a wire", rule, "name one of them")
        if (self.key is not None) != (self.rounding == "stochastic"):
            rule = "stochastic rounding draws from a key, and nearest draws nothing"
            remedy = "pass rounding='stochastic' and key=jax.random.key(step), or neither"
            raise WireError(f"rounding={self.rounding!r}, key={self.key}", rule, remedy)
        if self.key is not None and not _is_key(self.key):
            rule = "it must be one key of jax.random"
            raise WireError(f"key={self.key!r} of a wire", rule, "write jax.random.key(step)")
        if self.dtype == "bfloat16" and (self.group, self.scales) != (128, "float32"):
            raise WireError(
                f"group={self.group!r}, scales={self.scales!r} of a bfloat16 wire",
                "bfloat16 has the exponents of float32, and needs no scales",
                "leave group and scales out",
            )

    @property
    def scaled(self) -> bool:
        """Whether numbers go in groups with scales."""
        return self.dtype != "bfloat16"

    @property
    def largest(self) -> float:
        """The largest number of the dtype that is used."""
        return 127.0 if self.dtype == "int8" else float(jnp.finfo(self.dtype).max)

    @property
    def fixed(self) -> "Wire":
        """The same with nothing that is drawn: what is known while a program is built."""
        return dataclasses.replace(self, rounding="nearest", key=None)

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.scaled and (self.group, self.scales) != (128, "float32"):
            parts.append(f"in groups of {self.group}, scales {self.scales}")
        return " ".join(parts)


# What an argument `wire` may be: see `named`.
WireLike: TypeAlias = DTypeLike | Wire | None


def named(wire: WireLike) -> Wire | None:
    """The wire that an argument means: a `Wire`, a dtype or its name, "auto", or None.

    Raises:
      WireError: it is something else.
    """
    if wire is None or isinstance(wire, Wire):
        return wire
    if isinstance(wire, str):
        return Wire("int8", optional=True) if wire == "auto" else Wire(wire)
    try:
        dtype = jnp.dtype(wire)
    except (TypeError, ValueError):
        rule = "it must be a Wire, a dtype or its name, 'auto' or None"
        raise WireError(f"wire={wire!r}", rule, "write it like 'int8'") from None
    return Wire(dtype.name)


def _is_key(key: object) -> bool:
    """Whether it is one key of `jax.random`, new or old."""
    if not isinstance(key, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.ndim == 0
    return key.ndim == 1 and key.dtype == np.uint32


def obstacle(wire: Wire, dtype: DTypeLike) -> str:
    """Why numbers of a dtype, or keys, cannot go over a wire; "" if they can."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key or jnp.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        return "a wire takes float32, bfloat16 and float16 only"
    if jnp.dtype(dtype).itemsize <= jnp.dtype(wire.dtype).itemsize:
        return f"{wire.dtype} is no narrower"
    return ""


def check(wire: Wire, dtype: DTypeLike, what: str) -> None:
    """Raises DtypeError unless numbers of a dtype can go over a wire."""
    if why := obstacle(wire, dtype):
        raise DtypeError(f"{what} of {jnp.dtype(dtype)} by wire {wire}", why, "leave wire=None")


# Values and scales --------------------------------------------------------------------------------


def quantize(
    x: jax.Array, wire: Wire, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(values, scales): x's shape in the wire's dtype, and float32 (..., groups of a row).

    Args:
      x: (..., columns) floats.
      wire: with scales.
      noise: uniform in [0, 1), in x's shape, for stochastic rounding.
    """
    cut = _cut(x.shape, groups_of(x.shape[-1], wire))
    drawn = None if noise is None else cut.groups(noise)
    values, scales = of_groups(cut.groups(x.astype(jnp.float32)), wire, drawn, cut.axes)
    return cut.whole(values), cut.by_row(scales)


def of_groups(
    groups: jax.Array, wire: Wire, noise: jax.Array | None = None, axes: tuple[int, ...] = (-1,)
) -> tuple[jax.Array, jax.Array]:
    """`quantize` of whole groups of float32, which lie along some axes; scales have the others."""
    bits = jnp.max(magnitudes(groups), axis=axes, keepdims=True, initial=0)
    scales = scales_of(bits, wire)
    return rounded(groups, inverse(scales), wire, noise), jnp.squeeze(scales, axes)


def magnitudes(numbers: jax.Array) -> jax.Array:
    """Float32 as integers, which order magnitudes alike; inf for NaN, whatever the backend."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32) & np.int32(0x7FFFFFFF)
    return jnp.minimum(bits, _INFINITY)


def scales_of(bits: jax.Array, wire: Wire) -> jax.Array:
    """Scales of groups, from the largest of each group's `magnitudes`."""
    largest = lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.maximum(largest * np.float32(1 / wire.largest), LEAST_SCALE)
    if wire.scales == "power of two":
        words = lax.bitcast_convert_type(scale, jnp.int32)
        words = (words + np.int32(0x007FFFFF)) & np.int32(0x7F800000)
        scale = lax.bitcast_convert_type(words, jnp.float32)
    scale = jnp.where(bits == 0, 0.0, scale)
    return jnp.where(bits < _INFINITY, scale, jnp.nan)


def inverse(scales: jax.Array) -> jax.Array:
    """What numbers are multiplied by; 0 where scales are 0 or NaN, and so are the values."""
    usable = scales > 0
    return jnp.where(usable, 1 / jnp.where(usable, scales, 1), 0)


def rounded(
    numbers: jax.Array, inverses: jax.Array, wire: Wire, noise: jax.Array | None = None
) -> jax.Array:
    """Values of float32; `inverse` of their scales broadcasts against them."""
    inverses = jnp.broadcast_to(inverses, numbers.shape)  # first: TPUs compare as many either way
    scaled = jnp.where(inverses > 0, numbers * inverses, 0)
    scaled = jnp.clip(scaled, -wire.largest, wire.largest)
    if noise is not None:
        scaled = jnp.clip(_at_random(scaled, wire, noise), -wire.largest, wire.largest)
    if wire.dtype == "int8":
        bits = lax.bitcast_convert_type(scaled + TO_INTEGER, jnp.int32)
        return bits.astype(jnp.int8)
    return scaled.astype(wire.dtype)


def _at_random(scaled: jax.Array, wire: Wire, noise: jax.Array) -> jax.Array:
    if wire.dtype == "int8":
        return jnp.floor(scaled + noise)
    step = spacing(scaled, wire)
    bits = np.int32(254 << 23) - lax.bitcast_convert_type(step, jnp.int32)  # of a power of two
    return jnp.floor(scaled * lax.bitcast_convert_type(bits, jnp.float32) + noise) * step


def dequantize(values: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """values * scales: what `quantize` stands for, in a dtype.

    Args:
      values: (..., columns).
      scales: float32 (..., groups); groups are as long as makes so many of the columns.
      dtype: the dtype of the result.
    """
    cut = _cut(values.shape, scales.shape[-1])
    wide = jnp.expand_dims(cut.by_group(scales), cut.axes)
    return cut.whole(saturated(cut.groups(values).astype(jnp.float32) * wide, dtype))


def saturated(numbers: jax.Array, dtype: DTypeLike, result: DTypeLike | None = None) -> jax.Array:
    """Numbers that have arrived in a dtype: its largest number for those beyond; as `result`."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(numbers, -limit, limit).astype(dtype if result is None else result)


def overflows_from(dtype: DTypeLike) -> float:
    """The least magnitude that a dtype rounds to inf."""
    info = jnp.finfo(dtype)
    if info.dtype == jnp.float32:
        return math.inf
    return float(2.0**info.maxexp * (1 - 2.0 ** -(info.nmant + 2)))  # halfway to what would be next


def overflown(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x, with inf for what a dtype rounds to inf."""
    beyond = overflows_from(dtype)
    if float(jnp.finfo(x.dtype).max) < beyond:
        return x
    return jnp.where(jnp.abs(x) < beyond, x, x * jnp.inf)


def group_size(columns: int, groups: int) -> int:
    """Elements of a group, of a row that has so many columns and so many groups."""
    if groups == 1:
        return max(1, columns)
    found = [g for g in GROUPS if isinstance(g, int) and -(-columns // g) == groups]
    if not found:
        raise WireError(
            f"{groups} scales for {columns} columns",
            "there must be a scale for each 128 or 256 columns, or for each row",
            "pass scales as they came with these values",
        )
    return int(found[0])


def groups_of(columns: int, wire: Wire) -> int:
    """How many groups a row has."""
    return 1 if wire.group == "row" else -(-columns // int(wire.group))


def error_bound(x: jax.Array, scales: jax.Array, wire: Wire) -> jax.Array:
    """How far each number may be from x on arrival, in float32: half a step, or a whole one drawn.

    A maximum or minimum may be as far from the exact one as the term that is farthest from its own
    number there; and of three devices or more so much more as the maximum is on its way to all.

    What float32 itself rounds off on the way is in it: 2^-22 of the number, or 2^-126.
    """
    group = group_size(x.shape[-1], scales.shape[-1])
    wide = jnp.repeat(scales, group, axis=-1)[..., : x.shape[-1]]
    magnitude = jnp.abs(x.astype(jnp.float32))
    scaled = jnp.where(wide > 0, magnitude / jnp.where(wide > 0, wide, 1), 0)
    steps = 1 if wire.rounding == "stochastic" else 0.5
    return steps * spacing(scaled, wire) * wide + 2.0**-22 * magnitude + LEAST_SCALE


def spacing(scaled: jax.Array, wire: Wire) -> jax.Array:
    """The distance of the wire's numbers at numbers that are scaled already."""
    if wire.dtype == "int8":
        return jnp.ones_like(scaled)
    bits = lax.bitcast_convert_type(scaled, jnp.int32) & _INFINITY  # of its exponent alone
    power = lax.bitcast_convert_type(bits, jnp.float32)
    least = np.float32(2.0 ** _LEAST_EXPONENT[wire.dtype])
    return jnp.maximum(power, least) * np.float32(2.0 ** -_MANTISSA[wire.dtype])


def _cut(shape: tuple[int, ...], count: int) -> tiles.Cut:
    """How an array is cut, of whose rows each has so many groups."""
    return tiles.Cut(shape, count, group_size(shape[-1], count))


# One buffer ---------------------------------------------------------------------------------------

# What kernels cut goes in units, tiles of one-byte numbers. Blocks have an even number of them, for
# an odd one goes by itself: on v5e 16 x 16 a gather of 33 takes 108 us, and of 34 91.
_UNIT_BYTES = SUBLANES * LANES
_PAIR_BYTES = 2 * _UNIT_BYTES
_CUT_FROM_BYTES = 4 * _PAIR_BYTES


def packed_bytes(shape: tuple[int, ...], wire: Wire, *, cut: bool = True) -> int:
    """Bytes of one block on the wire, scales and padding included; `cut` as `pack` has it."""
    if not wire.scaled:
        return 2 * math.prod(shape)
    nbytes = math.prod(shape) + 4 * math.prod(shape[:-1]) * groups_of(shape[-1], wire)
    return _padded(nbytes, cut)


def _padded(nbytes: int, cut: bool) -> int:
    """In whole rows of lanes; if it is cut, in so many pairs of units that it can be cut evenly.

    A power of two divides their number, as large as adds no more than a 128th.
    """
    whole = LANES
    if cut and nbytes >= _CUT_FROM_BYTES:
        whole = _PAIR_BYTES << max(0, (nbytes // (128 * _PAIR_BYTES)).bit_length() - 1)
    return -(-nbytes // whole) * whole


def pack(values: jax.Array, scales: jax.Array, *, cut: bool = True) -> jax.Array:
    """Blocks' values with their scales behind them: int8, (blocks, rows, 128).

    Blocks of 8 KiB and more that kernels may `cut` are (blocks, units, 8, 128): cuts between units
    fall on tiles, while rows of one-byte numbers could be cut at every 32nd only. Values that are
    whole tiles are units as they are.
    """
    blocks = len(values)
    numbers, behind = (lax.bitcast_convert_type(part, jnp.int8) for part in (values, scales))
    nbytes = math.prod(numbers.shape[1:]) + math.prod(behind.shape[1:])
    units = _in_units(values.shape[1:], nbytes, cut)
    if units:
        numbers = tiles.in_tiles(numbers).reshape(blocks, units, SUBLANES, LANES)
        behind = behind.reshape(blocks, -1)
        room = _padded(nbytes, cut) - units * _UNIT_BYTES
        behind = jnp.pad(behind, ((0, 0), (0, room - behind.shape[1])))
        return jnp.concatenate([numbers, behind.reshape(blocks, -1, SUBLANES, LANES)], axis=1)
    joined = jnp.concatenate([part.reshape(blocks, -1) for part in (numbers, behind)], axis=1)
    padded = jnp.pad(joined, ((0, 0), (0, _padded(nbytes, cut) - nbytes)))
    return in_units(padded, nbytes, cut=cut)


def _in_units(block: tuple[int, ...], nbytes: int, cut: bool) -> int:
    """How many units a block's values are in `pack`; 0 where they are not whole tiles."""
    whole = cut and nbytes >= _CUT_FROM_BYTES and tiles.are_whole(block)
    return math.prod(block) // _UNIT_BYTES if whole else 0


def in_units(padded: jax.Array, nbytes: int, *, cut: bool = True) -> jax.Array:
    """(blocks, bytes), so many of them not padding, in the shape that `pack` gives them."""
    unit = (SUBLANES, LANES) if cut and nbytes >= _CUT_FROM_BYTES else (LANES,)
    return padded.reshape(len(padded), -1, *unit)


def unpack(packed: jax.Array, shape: tuple[int, ...], wire: Wire) -> tuple[jax.Array, jax.Array]:
    """The values and scales of blocks of a shape: the inverse of `pack`."""
    blocks, size, scales = len(packed), math.prod(shape), (*shape[:-1], groups_of(shape[-1], wire))
    units = _in_units(shape, size + 4 * math.prod(scales), packed.ndim == 4)
    if units:
        *lead, rows, columns = shape
        apart = (*lead, rows // SUBLANES, columns // LANES, SUBLANES, LANES)
        values = tiles.in_rows(packed[:, :units].reshape(blocks, *apart))
        behind = packed[:, units:].reshape(blocks, -1)
    else:
        flat = packed.reshape(blocks, -1)
        values, behind = flat[:, :size].reshape(blocks, *shape), flat[:, size:]
    bits = behind[:, : 4 * math.prod(scales)].reshape(blocks, *scales, 4)
    values = lax.bitcast_convert_type(values, jnp.dtype(wire.dtype))
    return values, lax.bitcast_convert_type(bits, jnp.float32)


# Stochastic rounding and residues -----------------------------------------------------------------


def as_sent(x: jax.Array, wire: Wire, noise: jax.Array | None = None) -> jax.Array:
    """What arrives of x."""
    if wire.scaled:
        return dequantize(*quantize(x, wire, noise), x.dtype)
    if noise is None:
        return x.astype(jnp.bfloat16).astype(x.dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    added = bits + (noise * 2.0**16).astype(jnp.uint32)  # carries into what is kept
    kept = lax.bitcast_convert_type(added & np.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), kept, x).astype(x.dtype)
