"""The linear maps that dispatch and combine are made of, each with its transpose.

    gather_sum(x, index, inverse)     on a device: row i of the result is the sum of x's rows
                                      index[i]; backwards the same, with `inverse` as the index
    route(x, here, there)             between devices: blocks of rows lie in x as `here` says, and
                                      arrive as `there` says; backwards the same, the other way
    to_everyone(x), from_everyone(x)  x of all devices, to each; and of what each has made for all,
                                      the sum for each: one is the other backwards

They hold the tables of either direction from the start. So differentiating them, however often,
asks no device for a count, and adds nothing in an order that could change: no scatter, no atomics.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from pallas_collectives import _compat, collectives, validation
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import Dim, DType, Tangent
from pallas_collectives.backends import serving
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import placed, remat
from pallas_collectives.validation import AxisName, Groups


class Side(NamedTuple):
    """Where the blocks of a ragged exchange begin, on one of its sides, by peer: int32[n] each.

    With several slices for each peer int32[n * slices], as `ragged_all_to_all` has them.

    Attributes:
      starts: in this device's array.
      landings: in the peer's array.
      sizes: rows of each block.
    """

    starts: Any
    landings: Any
    sizes: Any


def gather_sum(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Sums of x's rows: row i of the result is that of rows index[i, 0], index[i, 1], ... of x.

    Args:
      x: (rows, ...). Floats narrower than 32 bits are added in float32, and rounded once.
      index: int32[results, terms]; x's number of rows, or more, stands for none.
      inverse: int32[rows, uses]: to which results a row goes; their number stands for none.
    """
    return _gather_sum_p.bind(*alike(x, index, inverse))


def wide(dtype: DTypeLike) -> DType:
    """In which numbers of a dtype are added: floats in 32 bits at least."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def route(
    x: jax.Array,
    here: Side,
    there: Side,
    rows: int,
    axis_name: AxisName,
    groups: Groups,
    how: How,
    *,
    filled: bool,
) -> jax.Array:
    """(rows, ...): the blocks that the peers of a group send.

    Args:
      x: (rows here, ...): a row of it is in one block at the most.
      here: the blocks that leave.
      there: the blocks that come.
      rows: how many the result has.
      axis_name: mesh axis, or axes.
      groups: `axis_index_groups`.
      how: the backend.
      filled: whether there are zeros where no block arrives, there and backwards. Else nobody may
        read what is there: on TPUs whatever the memory held.
    """
    operands = alike(x, *here, *there)
    sizes = {"rows": rows, "rows_back": len(x), "filled": filled}
    return _route_p.bind(*operands, **sizes, axis_name=axis_name, groups=groups, how=how)


def to_everyone(x: jax.Array, axis_name: AxisName, groups: Groups, how: How) -> jax.Array:
    """(rows, ...) of each of n devices -> (n * rows, ...) on all of them."""
    return _of_everyone(x, False, axis_name, groups, how)


def from_everyone(x: jax.Array, axis_name: AxisName, groups: Groups, how: How) -> jax.Array:
    """(n * rows, ...) on each of n devices -> (rows, ...): what all have for this one, added up."""
    return _of_everyone(x, True, axis_name, groups, how)


def _of_everyone(
    x: jax.Array, back: bool, axis_name: AxisName, groups: Groups, how: How
) -> jax.Array:
    x = _compat.as_varying(x, frozenset(validation.named(axis_name)))
    return _everyone_p.bind(x, back=back, axis_name=axis_name, groups=groups, how=how)


def alike(*operands: jax.Array) -> list[jax.Array]:
    """Operands typed as varying over the same axes."""
    axes = frozenset().union(*map(_compat.varying, operands))
    return [_compat.as_varying(x, axes) for x in operands]


# Lowering -----------------------------------------------------------------------------------------

# Memory as it is, on TPUs: to fill a step's buffers takes as long as to send what they are for.
unfilled = lax.empty


def _sums(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    del inverse
    terms = [x.at[column].get(mode="fill", fill_value=0) for column in index.T]
    if len(terms) == 1:
        return terms[0]
    added = functools.reduce(jnp.add, (term.astype(wide(x.dtype)) for term in terms))
    return added.astype(x.dtype)


def routed(
    x: jax.Array,
    *tables: jax.Array,
    rows: int,
    rows_back: int,
    filled: bool,
    axis_name: AxisName,
    groups: Groups,
    how: How,
) -> jax.Array:
    """What `route` is lowered to."""
    del rows_back
    here, there = Side(*tables[:3]), Side(*tables[3:])
    axis: dict[str, Any] = {"axis_name": axis_name, "axis_index_groups": groups}
    blank = (jnp.zeros if filled else unfilled)((rows, *x.shape[1:]), x.dtype)
    ragged = here.starts, here.sizes, here.landings, there.sizes
    by_lax = functools.partial(serving.run, "ragged_all_to_all", How("xla"))
    return serving.served("ragged_all_to_all", how, by_lax, x, blank, *ragged, **axis)


def everyones(
    x: jax.Array, *, back: bool, axis_name: AxisName, groups: Groups, how: How
) -> jax.Array:
    """What `to_everyone` and `from_everyone` are lowered to."""
    n = devices_of(axis_name, groups)
    tiled: dict[str, Any] = {"axis_index_groups": groups, "tiled": True}
    axis: dict[str, Any] = {"axis_name": axis_name, **tiled}
    if not back:
        by_lax: Any = lambda x, **_: collectives.LAX.all_gather(x, axis_name, **tiled)  # noqa: E731
        along = {"all_gather_dimension": 0, "axis_size": n}
        return serving.served("all_gather", how, by_lax, x, **along, **axis)
    by_lax = lambda x, **_: collectives.LAX.all_to_all(x, axis_name, 0, 0, **tiled)  # noqa: E731
    along = {"split_axis": 0, "concat_axis": 0}
    come = serving.served("all_to_all", how, by_lax, x, **along, **axis)
    terms = come.reshape(n, -1, *x.shape[1:]).astype(wide(x.dtype))
    return functools.reduce(jnp.add, terms).astype(x.dtype)  # in the order of devices


def devices_of(axis_name: AxisName, axis_index_groups: Groups) -> int:
    """How many exchange."""
    groups = axis_index_groups
    return int(lax.axis_size(axis_name)) if groups is None else len(groups[0])


def typed(
    run: Callable[..., Any], rows: int, avals: Sequence[Aval], params: dict[str, Any], how: How
) -> tuple[Aval, frozenset[Any]]:
    """The type of a result with so many rows, and the effects of what makes it."""
    x = avals[0]
    aval = x.update(shape=(rows, *x.shape[1:]), weak_type=False)
    if how.backend == "xla":
        return aval, frozenset()
    return aval, serving.effects(run, avals, **params)


def new_primitive(name: str) -> core.Primitive:
    primitive = core.Primitive(name)
    remat.register(primitive)
    _compat.register(primitive, jvp=functools.partial(_jvp, primitive))
    return primitive


def _jvp(
    primitive: core.Primitive,
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    **params: Any,
) -> Any:
    """Linear in the rows; tables have no tangent."""
    (_, *tables), moving = primals, tangents[0]
    out = primitive.bind(*primals, **params)
    if isinstance(moving, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(*alike(moving, *tables), **derived(params))


_SENT = ("how", "ways")  # the parameters that say over which wire


def derived(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a primitive's derivatives, which have a wire of their own."""
    return params | {name: params[name].differentiated for name in _SENT if name in params}


_gather_sum_p = new_primitive("moe_gather_sum")
_route_p = new_primitive("moe_route")
_everyone_p = new_primitive("moe_everyone")


@_gather_sum_p.def_abstract_eval
def _gather_sum_type(x: Aval, index: Aval, inverse: Aval) -> Aval:
    return x.update(shape=(index.shape[0], *x.shape[1:]), weak_type=False)


@_route_p.def_effectful_abstract_eval
def _route_type(*avals: Aval, **params: Any) -> tuple[Aval, frozenset[Any]]:
    return typed(routed, params["rows"], avals, params, params["how"])


@_everyone_p.def_effectful_abstract_eval
def _everyone_type(x: Aval, **params: Any) -> tuple[Aval, frozenset[Any]]:
    n, rows = devices_of(params["axis_name"], params["groups"]), x.shape[0]
    rows = rows // n if params["back"] else rows * n
    return typed(everyones, rows, (x,), params, params["how"])


_compat.register(_gather_sum_p, lowering=mlir.lower_fun(_sums, multiple_results=False))
placed.register(_route_p, routed)
placed.register(_everyone_p, everyones)


# Transposes and vmap ------------------------------------------------------------------------------


def _gather_sum_transpose(
    ct: Tangent, x: ad.UndefinedPrimal, index: jax.Array, inverse: jax.Array
) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval()), None, None]
    return [gather_sum(ct, inverse, index), None, None]


def _route_transpose(
    ct: Tangent, x: ad.UndefinedPrimal, *tables: jax.Array, rows: int, rows_back: int, **params: Any
) -> list[Any]:
    nothing = [None] * len(tables)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval()), *nothing]
    back = *tables[3:], *tables[:3]
    sizes = {"rows": rows_back, "rows_back": rows}
    return [_route_p.bind(*alike(ct, *back), **sizes, **derived(params)), *nothing]


def _everyone_transpose(
    ct: Tangent, x: ad.UndefinedPrimal, *, back: bool, how: How, **params: Any
) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval())]
    how = dataclasses.replace(how.differentiated, algorithm=None)  # the name is of the other one's
    return [_everyone_p.bind(ct, back=not back, how=how, **params)]


_compat.register(_everyone_p, transpose=_everyone_transpose)
_compat.register(_gather_sum_p, transpose=_gather_sum_transpose)
_compat.register(_route_p, transpose=_route_transpose)


def in_front(args: Sequence[Any], dims: Sequence[Any]) -> tuple[int, list[Any]]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return size, [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]


def batch_of_rows(
    primitive: core.Primitive, args: Sequence[jax.Array], dim: Any, **params: Any
) -> tuple[Any, Any]:
    """With the same tables for all: what is mapped is a dimension of each row."""
    x, *tables = args
    params |= {name: params[name].once_more_mapped for name in _SENT if name in params}
    return primitive.bind(jnp.moveaxis(x, dim, 1), *tables, **params), 1


def _gather_sum_batch(args: Sequence[jax.Array], dims: Sequence[Dim]) -> tuple[Any, Any]:
    if dims[1] is None and dims[2] is None:
        return batch_of_rows(_gather_sum_p, args, dims[0])
    size, (x, index, inverse) = in_front(args, dims)
    rows, results = x.shape[1], index.shape[1]
    flat = gather_sum(x.reshape(-1, *x.shape[2:]), _offset(index, rows), _offset(inverse, results))
    return flat.reshape(size, results, *x.shape[2:]), 0


def _offset(index: jax.Array, rows: int) -> jax.Array:
    """(size, ...) row numbers of as many arrays, as those of the arrays one after the other."""
    size = len(index)
    first = (jnp.arange(size, dtype=jnp.int32) * rows).reshape(-1, *[1] * (index.ndim - 1))
    numbers = jnp.where(index < rows, index + first, size * rows)
    return numbers.reshape(-1, index.shape[-1])


def _route_batch(
    args: Sequence[jax.Array], dims: Sequence[Dim], *, rows: int, rows_back: int, **params: Any
) -> tuple[Any, Any]:
    sizes = {"rows": rows, "rows_back": rows_back}
    if all(dim is None for dim in dims[1:]):
        return batch_of_rows(_route_p, args, dims[0], **sizes, **params)
    size, (x, *tables) = in_front(args, dims)
    peers = devices_of(params["axis_name"], params["groups"])

    def slices_of(table: jax.Array, each: int) -> jax.Array:
        """(size, n * slices) starts in arrays of so many rows, as (n * size * slices) in one."""
        first = jnp.arange(size, dtype=jnp.int32)[:, None] * each
        return jnp.moveaxis((table + first).reshape(size, peers, -1), 0, 1).reshape(-1)

    ends = rows_back, rows, 0, rows, rows_back, 0  # whose starts and landings these are
    tables = [slices_of(table, each) for table, each in zip(tables, ends, strict=True)]
    flat = _route_p.bind(
        *alike(x.reshape(-1, *x.shape[2:]), *tables),
        rows=size * rows, rows_back=size * rows_back, **params,
    )  # fmt: skip
    return flat.reshape(size, rows, *x.shape[2:]), 0


def _everyone_batch(
    args: Sequence[jax.Array], dims: Sequence[Dim], **params: Any
) -> tuple[Any, Any]:
    return batch_of_rows(_everyone_p, args, dims[0], **params)


_compat.register(_everyone_p, batch_alone=_everyone_batch)
_compat.register(_gather_sum_p, batch_alone=_gather_sum_batch)
_compat.register(_route_p, batch_alone=_route_batch)
