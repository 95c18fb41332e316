"""Collectives on whole arrays: each calls the collective of its name inside `jax.shard_map`.

`**how` takes the collective's own keyword arguments that say what serves it: `backend`, `algorithm`
and, for sums, `precise` and `order` (see `collectives`).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_collectives import collectives
from pallas_collectives.errors import CollectiveError, UnboundAxisError
from pallas_collectives.validation import AxisName


def all_gather(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """Replicates an array that is sharded along one dimension.

    Args:
      x: array whose dimension `axis` is laid over the mesh axis (or tuple of axes) `axis_name`.
      mesh: the mesh.
      axis_name: the axis to gather over.
      axis: the sharded dimension.
      spec: how x is laid over the mesh; by default `axis` over `axis_name` and nothing else.
      **how: see the module.

    Returns:
      The same values, laid out as `spec` without `axis_name`.

    Raises:
      CollectiveError: `spec` does not lay `axis` over `axis_name` alone.
    """
    axis = _dimension(x, axis)
    before = _spec(x, axis, axis_name, spec)
    after = PartitionSpec(*(None if d == axis else s for d, s in enumerate(before)))

    def gather(shard: jax.Array) -> jax.Array:
        return collectives.all_gather(
            shard, axis_name, axis=axis, tiled=True, to="invarying", **how
        )

    return _mapped(gather, mesh, before, after, x)


def psum_scatter(
    x: jax.Array, *, mesh: Mesh, axis_name: AxisName, axis: int = 0, **how: Any
) -> jax.Array:
    """Sums the rows of an array that are laid over a mesh axis, and leaves the sum laid over it.

    Args:
      x: (n, ...): row p is device p's term, for the n devices of `axis_name`.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes, over which the rows of x and the result are laid.
      axis: the dimension of the sum, so of x without its first, that is laid over `axis_name`.
      **how: see the module.

    Returns:
      x.sum(axis=0), its dimension `axis` laid over `axis_name`.

    Raises:
      CollectiveError: x has no dimension `axis` beside its rows.
    """
    axis = _dimension(x[0], axis)

    def scatter(rows: jax.Array) -> jax.Array:
        term = rows.sum(axis=0, dtype=rows.dtype)  # one row, or a device's own few
        return collectives.psum_scatter(term, axis_name, scatter_dimension=axis, tiled=True, **how)

    after = PartitionSpec(*(axis_name if d == axis else None for d in range(x.ndim - 1)))
    return _mapped(scatter, mesh, PartitionSpec(axis_name), after, x)


reduce_scatter = psum_scatter


def psum(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """Sums the rows of an array that are laid over a mesh axis; every device gets the sum.

    Args:
      x: (n, ...): row p is device p's term, for the n devices of `axis_name`.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes, over which the rows of x are laid.
      **how: see the module.

    Returns:
      x.sum(axis=0), replicated.
    """
    return _over_rows(collectives.psum, jnp.sum, x, mesh, axis_name, **how)


all_reduce = psum


def pmean(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """x.mean(axis=0), replicated; arguments as `psum`'s."""
    return psum(x, mesh=mesh, axis_name=axis_name, **how) / x.shape[0]


def pmax(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """x.max(axis=0), replicated; arguments as `psum`'s."""
    return _over_rows(collectives.pmax, jnp.max, x, mesh, axis_name, **how)


def pmin(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """x.min(axis=0), replicated; arguments as `psum`'s."""
    return _over_rows(collectives.pmin, jnp.min, x, mesh, axis_name, **how)


def _over_rows(
    collective: Any, locally: Any, x: jax.Array, mesh: Mesh, axis_name: AxisName, **how: Any
) -> jax.Array:
    """Reduces rows laid over `axis_name`: a device's own few first, then those of all devices."""

    if locally is jnp.sum and x.dtype == jnp.bool_:
        x = jnp.asarray(x, jnp.int32)  # counts, as psum has them

    def reduce(rows: jax.Array) -> jax.Array:
        return collective(locally(rows, axis=0).astype(rows.dtype), axis_name, **how)

    before, after = PartitionSpec(axis_name), PartitionSpec()
    return _mapped(reduce, mesh, before, after, x)


def all_to_all(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """Shards along another dimension an array that is sharded along one.

    Args:
      x: array whose dimension `concat_axis` is laid over the mesh axis (or tuple of axes)
        `axis_name`.
      mesh: the mesh.
      axis_name: the axis.
      split_axis: the dimension to lay over `axis_name`; its size is a multiple of the devices.
      concat_axis: the dimension that will be whole on each device.
      spec: how x is laid over the mesh; by default `concat_axis` over `axis_name`, nothing else.
      **how: see the module.

    Returns:
      The same values, laid out as `spec` with `axis_name` at `split_axis`.

    Raises:
      CollectiveError: `spec` does not lay `concat_axis` over `axis_name` alone, or lays
        `split_axis` over something.
    """
    split_axis, concat_axis = _dimension(x, split_axis), _dimension(x, concat_axis)
    before = _spec(x, concat_axis, axis_name, spec)
    if before[split_axis] is not None:
        raise CollectiveError(
            f"split_axis={split_axis} with spec={before}",
            "the dimension must be whole on each device",
            "split another dimension, or gather this one first",
        )
    laid = {split_axis: axis_name, concat_axis: None}
    after = PartitionSpec(*(laid.get(d, s) for d, s in enumerate(before)))

    def exchange(shard: jax.Array) -> jax.Array:
        return collectives.all_to_all(shard, axis_name, split_axis, concat_axis, tiled=True, **how)

    return _mapped(exchange, mesh, before, after, x)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    **how: Any,
) -> jax.Array:
    """Sends rows of runtime-chosen counts between the shards of two arrays.

    Args:
      operand: (n * rows, ...): n shards, laid over `axis_name` by their first dimension.
      output: (n * rows', ...): likewise.
      input_offsets: int[n * k * n]: each device's argument of `collectives.ragged_all_to_all`, one
        device's after the other's. The next three likewise.
      send_sizes: see `input_offsets`.
      output_offsets: see `input_offsets`.
      recv_sizes: see `input_offsets`.
      mesh: the mesh.
      axis_name: the axis, or tuple of axes, of n devices.
      **how: see the module.

    Returns:
      `output` with the rows received in place, laid out like it.

    Raises:
      CollectiveError: see `collectives.ragged_all_to_all`.
    """

    def exchange(*shards: jax.Array) -> jax.Array:
        return collectives.ragged_all_to_all(*shards, axis_name=axis_name, **how)

    rows = PartitionSpec(axis_name)
    slices = (input_offsets, send_sizes, output_offsets, recv_sizes)
    return _mapped(exchange, mesh, rows, rows, operand, output, *slices)


def ppermute(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    perm: Any,
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """Moves the blocks of a sharded array: block t becomes what block s was, for each (s, t).

    Args:
      x: array whose dimension `axis` is laid over the mesh axis (or tuple of axes) `axis_name`.
      mesh: the mesh.
      axis_name: the axis.
      perm: (source, target) pairs of block numbers, no number is a source or a target twice.
      axis: the sharded dimension.
      spec: how x is laid over the mesh; by default `axis` over `axis_name` and nothing else.
      **how: see the module.

    Returns:
      The blocks in their new places, zeros in places that are not a target, laid out like x.

    Raises:
      CollectiveError: a bad `perm`, or `spec` does not lay `axis` over `axis_name` alone.
    """
    return _of_blocks(collectives.ppermute, x, perm, mesh, axis_name, axis, spec, how)


def pshuffle(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    perm: Any,
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """`ppermute` by sources: block t becomes what block perm[t] was; arguments as `ppermute`'s."""
    return _of_blocks(collectives.pshuffle, x, perm, mesh, axis_name, axis, spec, how)


def pbroadcast(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    source: Any,
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """Every block becomes what block `source` is, bit for bit; other arguments as `ppermute`'s."""
    return _of_blocks(collectives.pbroadcast, x, source, mesh, axis_name, axis, spec, how)


def pswapaxes(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, axis: int, **how: Any) -> jax.Array:
    """Swaps the rows of an array, which are laid over a mesh axis, with another dimension.

    Args:
      x: (n, ...) for the n devices of `axis_name`, laid over them by its first dimension.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes.
      axis: another dimension of x, of size n too.
      **how: see the module.

    Returns:
      x.swapaxes(0, axis), laid out like x.

    Raises:
      CollectiveError: x has more or fewer rows than there are devices, or another size on `axis`.
    """
    axis, rows = _dimension(x, axis), PartitionSpec(axis_name)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    devices = math.prod(mesh.shape[name] for name in names)
    if axis == 0 or x.shape[0] != devices:
        raise CollectiveError(
            f"axis={axis} of x of shape {x.shape}",
            f"its rows are swapped with another dimension: there must be {devices}, one a device",
            "reshape x, or name another dimension",
        )

    def swap(row: jax.Array) -> jax.Array:
        return collectives.pswapaxes(row[0], axis_name, axis - 1, **how)[None]

    return _mapped(swap, mesh, rows, rows, x)


def _of_blocks(
    collective: Callable[..., jax.Array],
    x: jax.Array,
    argument: Any,
    mesh: Mesh,
    axis_name: AxisName,
    axis: int,
    spec: PartitionSpec | None,
    how: dict[str, Any],
) -> jax.Array:
    """A collective that leaves the blocks of an array laid out as they are."""
    layout = _spec(x, _dimension(x, axis), axis_name, spec)

    def move(shard: jax.Array) -> jax.Array:
        return collective(shard, axis_name, argument, **how)

    return _mapped(move, mesh, layout, layout, x)


def _mapped(
    fn: Callable[..., jax.Array],
    mesh: Mesh,
    before: PartitionSpec,
    after: PartitionSpec,
    *arrays: jax.Array,
) -> jax.Array:
    """fn on each device's shards of arrays, which are laid over the mesh first if they are not."""
    for x in arrays:
        _check_layout(x, mesh, before)
    laid = (jax.device_put(x, NamedSharding(mesh, before)) for x in arrays)
    return jax.shard_map(fn, mesh=mesh, in_specs=before, out_specs=after)(*laid)


def _check_layout(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> None:
    """Refuses axes that the mesh lacks, and dimensions that its devices do not divide."""
    there = getattr(mesh, "shape", None)
    if there is None:
        raise CollectiveError(f"mesh={mesh!r}", "it is a jax.sharding.Mesh", "make one")
    for dimension, names in enumerate(spec):
        axes = names if isinstance(names, tuple) else () if names is None else (names,)
        for name in axes:
            if name not in there:
                rule = f"the mesh has the axes {', '.join(map(str, there))}"
                raise UnboundAxisError(f"axis_name={name!r}", rule, "name one of them")
        devices = math.prod(there[name] for name in axes)
        if x.shape[dimension] % devices:
            raise CollectiveError(
                f"dimension {dimension} of size {x.shape[dimension]}",
                f"it is laid over {devices} devices, and must be a multiple of that",
                "pad it",
            )


def _dimension(x: jax.Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise CollectiveError(
            f"dimension {axis}",
            f"it must lie in [{-x.ndim}, {x.ndim}) for this array",
            "count dimensions from 0, or from -1 backwards",
        )
    return axis % x.ndim


def _spec(
    x: jax.Array, axis: int, axis_name: AxisName, spec: PartitionSpec | None
) -> PartitionSpec:
    if spec is None:
        return PartitionSpec(*(axis_name if d == axis else None for d in range(x.ndim)))
    padded = (*spec, *(None,) * (x.ndim - len(spec)))
    if padded[axis] not in (axis_name, (axis_name,)) and (padded[axis],) != axis_name:
        raise CollectiveError(
            f"spec={spec}",
            f"it must lay dimension {axis} over {axis_name!r}",
            "pass the spec that x has, and the axis to gather over",
        )
    return PartitionSpec(*padded)
