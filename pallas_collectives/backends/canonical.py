"""From lax's primitives and their parameters to the few functions that a backend has.

A backend module implements these, for arrays with at least one element, groups of two or more, and
one array at a time. Blocks are numbered by position in the group; nothing adds or drops dimensions:

    all_gather(x, group, *, axis, how)                       blocks side by side along axis
    reduce_scatter(x, group, *, axis, how)                   the sum of everyone's block `me`
    all_reduce(x, group, *, op, how)                         op: "sum", "max" or "min"
    all_to_all(x, group, *, split_axis, concat_axis, how)    block p goes to p, lands as block me
    ragged_all_to_all(operand, output, tables, group, *, how)
                      as lax; tables: input_offsets, send_sizes, output_offsets, recv_sizes
    ppermute(x, group, *, perm, how)                         perm: (source, target) pairs

Where a backend cannot serve a dtype it raises `DtypeError`. A backend that lacks a function leaves
that collective to lax.

A primitive whose record says nothing else (`catalogue.Primitive.by`) has the canonical function's
own parameters, and `axis_name` in place of the group. Such a function is called with empty arrays
and for single devices too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives import catalogue, validation
from pallas_collectives.annotations import DType, DTypeLike, Number
from pallas_collectives.backends import wired
from pallas_collectives.backends.pallas import packing
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels.machinery.blocks import block_shape, whole_shape
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups


def run(module: Any, primitive: str, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    """Serves the lax primitive of a name from a backend module, over its wire."""
    collective, served = catalogue.primitives()[primitive]
    if how.wire is not None:
        module = wired.OnWire(module)
    x = args[0]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not served.reduction:
        numbers = [_key_data(x) for x in args]  # keys move as the numbers that they are
        data = run(module, primitive, how, *numbers, **params)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if served.by == "":
        return _as_it_is(getattr(module, collective.name), how, *args, **params)
    if served.reduction:
        return _all_reduce(module, how, served.reduction, *args, **params)
    return globals()[f"_{served.by}"](module, how, *args, **params)


def _key_data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _as_it_is(
    function: Callable[..., jax.Array],
    how: How,
    *args: jax.Array,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    **params: Any,
) -> jax.Array:
    """Calls a function with the primitive's own parameters, and a group in place of its axes."""
    return function(*args, group_of(axis_name, axis_index_groups), **params, how=how)


def group_of(axis_name: AxisName, index_groups: Groups = None) -> Group:
    """The group that lax's axis_name and axis_index_groups mean under the mesh in scope."""
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    shape = jax.sharding.get_abstract_mesh().shape
    groups = None if index_groups is None else tuple(map(tuple, index_groups))
    return Group(axes, tuple(shape[axis] for axis in axes), groups)


def _all_gather(
    module: Any,
    how: How,
    x: jax.Array,
    *,
    all_gather_dimension: int,
    axis_name: AxisName,
    axis_size: int,
    tiled: bool,
    axis_index_groups: Groups = None,
) -> jax.Array:
    axis = all_gather_dimension
    if not tiled:
        x = lax.expand_dims(x, (axis,))
    if axis_size == 1:
        return x
    if x.size == 0:
        return jnp.zeros(whole_shape(x.shape, axis, axis_size), x.dtype)
    return module.all_gather(x, group_of(axis_name, axis_index_groups), axis=axis, how=how)


def _reduce_scatter(
    module: Any,
    how: How,
    x: jax.Array,
    *,
    scatter_dimension: int,
    axis_name: AxisName,
    axis_size: int,
    tiled: bool,
    axis_index_groups: Groups = None,
) -> jax.Array:
    axis = scatter_dimension
    group = group_of(axis_name, axis_index_groups)
    if x.size == 0:
        x = jnp.zeros(block_shape(x.shape, axis, axis_size), x.dtype)
    elif axis_size > 1:
        x = module.reduce_scatter(x, group, axis=axis, how=how)
    return x if tiled else lax.squeeze(x, (axis,))


def _all_reduce(
    module: Any,
    how: How,
    op: str,
    x: jax.Array,
    *,
    axes: Sequence[Any],
    axis_index_groups: Groups = None,
) -> jax.Array:
    # vmap turns a named axis into a number: a dimension of x, which is reduced here.
    named = validation.named(axes)
    if numbered := tuple(axis for axis in axes if axis not in named):
        reduce: Any = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
        x = reduce(x, axis=numbered).astype(x.dtype)
    group = group_of(named, axis_index_groups)
    if group.size == 1 or x.size == 0:
        return x
    return module.all_reduce(x, group, op=op, how=how)


def _all_to_all(
    module: Any,
    how: How,
    x: jax.Array,
    *,
    split_axis: int,
    concat_axis: int,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    tiled: bool = True,
) -> jax.Array:
    del tiled  # lax has added the dimension already
    group = group_of(axis_name, axis_index_groups)
    if group.size == 1:
        return x
    if x.size == 0:
        shape = block_shape(x.shape, split_axis, group.size)
        return jnp.zeros(whole_shape(shape, concat_axis, group.size), x.dtype)
    return module.all_to_all(x, group, split_axis=split_axis, concat_axis=concat_axis, how=how)


def _ragged_all_to_all(
    module: Any,
    how: How,
    operand: jax.Array,
    output: jax.Array,
    *tables: jax.Array,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
) -> jax.Array:
    if operand.size == 0 or output.size == 0:
        return output
    group = group_of(axis_name, axis_index_groups)
    return module.ragged_all_to_all(operand, output, tables, group, how=how)


def _ppermute(
    module: Any, how: How, x: jax.Array, *, axis_name: AxisName, perm: Sequence[tuple[int, int]]
) -> jax.Array:
    if not perm or x.size == 0:
        return jnp.zeros_like(x)
    return module.ppermute(x, group_of(axis_name), perm=tuple(map(tuple, perm)), how=how)


def _pbroadcast(
    module: Any,
    how: How,
    x: jax.Array,
    source: Number | None = None,
    *,
    axis_name: AxisName,
    **params: Any,
) -> jax.Array:
    # Everyone but the source adds zero bits: the sum of unsigned integers is the source's bits.
    group = group_of(axis_name)
    source = params.get("source", source)
    bits, packed_dtype = _bits(x)
    masked = jnp.where(lax.axis_index(group.axes) == source, bits, jnp.zeros_like(bits))
    if group.size > 1 and x.size:
        plain = dataclasses.replace(how, wire=None)  # bits are no numbers, also of a derivative
        masked = module.all_reduce(masked, group, op="sum", how=plain)
    return _from_bits(masked, packed_dtype, x.dtype)


def _bits(x: jax.Array) -> tuple[jax.Array, DType]:
    """x as unsigned integers, and the dtype of what they are the bits of (see `packing`)."""
    packed, _ = packing.pack(x)
    unsigned = lax.bitcast_convert_type(packed, _unsigned(packed.dtype))
    return unsigned.astype(jnp.uint8) if _bits_of(packed.dtype) < 8 else unsigned, packed.dtype


def _from_bits(bits: jax.Array, packed_dtype: DType, dtype: DType) -> jax.Array:
    unsigned = bits.astype(_unsigned(packed_dtype))
    return packing.unpack(lax.bitcast_convert_type(unsigned, packed_dtype), dtype)


def _unsigned(dtype: DType) -> DTypeLike:
    return getattr(jnp, f"uint{_bits_of(dtype)}")


def _bits_of(dtype: DType) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
