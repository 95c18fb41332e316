"""Collectives on whole arrays: each calls the collective of its name inside `jax.shard_map`.

`**how` takes the collective's own keyword arguments that say what serves it: `backend`, `algorithm`
and, for sums, `precise` and `order` (see `collectives`).

The examples have two devices: `mesh = jax.make_mesh((2,), ("x",))`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pallas_collectives import collectives, laying
from pallas_collectives.errors import CollectiveError
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

    Example:
      >>> whole = pc.sharded.all_gather(jnp.arange(4.0), mesh=mesh, axis_name="x")
      >>> whole.is_fully_replicated, whole.tolist()
      (True, [0.0, 1.0, 2.0, 3.0])
    """
    axis = laying.dimension(x.ndim, axis)
    before = laying.spec_of(x, axis, axis_name, spec)
    after = PartitionSpec(*(None if d == axis else s for d, s in enumerate(before)))
    asked = dict(axis_name=axis_name, axis=axis, tiled=True, to="invarying", **how)
    return laying.mapped(collectives.all_gather, asked, mesh, before, after, x)


def psum_scatter(
    x: jax.Array, *, mesh: Mesh, axis_name: AxisName, axis: int = 0, **how: Any
) -> jax.Array:
    """Sums the rows of an array that are laid over a mesh axis, and leaves the sum laid over it.

    Args:
      x: (k n, ...) for the n devices of `axis_name`: device p's term is the sum of the k rows
        that it has.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes, over which the rows of x and the result are laid.
      axis: the dimension of the sum, so of x without its first, that is laid over `axis_name`.
      **how: see the module.

    Returns:
      x.sum(axis=0), its dimension `axis` laid over `axis_name`.

    Raises:
      CollectiveError: x has no dimension `axis` beside its rows.

    Example:
      >>> total = pc.sharded.psum_scatter(jnp.ones((2, 4)), mesh=mesh, axis_name="x")
      >>> tuple(total.sharding.spec), total.tolist()
      (('x',), [2.0, 2.0, 2.0, 2.0])
    """
    axis = laying.dimension(x.ndim - 1, axis)
    before = PartitionSpec(axis_name)
    after = PartitionSpec(*(axis_name if d == axis else None for d in range(x.ndim - 1)))
    asked = dict(axis_name=axis_name, scatter_dimension=axis, tiled=True, **how)
    return laying.mapped(_scattered, asked, mesh, before, after, x)


def _scattered(rows: jax.Array, **asked: Any) -> jax.Array:
    """The sum of rows, one a device or a few of its own, scattered."""
    return collectives.psum_scatter(rows.sum(axis=0, dtype=rows.dtype), **asked)


reduce_scatter = psum_scatter


def psum(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """Sums the rows of an array that are laid over a mesh axis; every device gets the sum.

    Args:
      x: (k n, ...) for the n devices of `axis_name`: device p's term is the sum of the k rows
        that it has.
      mesh: the mesh.
      axis_name: mesh axis, or tuple of axes, over which the rows of x are laid.
      **how: see the module.

    Returns:
      x.sum(axis=0), replicated, of x's dtype as lax's: small integers wrap, bools become int32.

    Example:
      >>> pc.sharded.psum(jnp.arange(6.0).reshape(2, 3), mesh=mesh, axis_name="x")
      Array([3., 5., 7.], dtype=float32)
    """
    return _over_rows(collectives.psum, jnp.sum, x, mesh, axis_name, **how)


all_reduce = psum


def pmean(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """`psum` over the number of rows, so x.mean(axis=0) where the sum fits; arguments as `psum`'s.

    Example:
      >>> pc.sharded.pmean(jnp.arange(6.0).reshape(2, 3), mesh=mesh, axis_name="x")
      Array([1.5, 2.5, 3.5], dtype=float32)
    """
    return psum(x, mesh=mesh, axis_name=axis_name, **how) / x.shape[0]


def pmax(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """x.max(axis=0), replicated; arguments as `psum`'s.

    Example:
      >>> pc.sharded.pmax(jnp.arange(6.0).reshape(2, 3), mesh=mesh, axis_name="x")
      Array([3., 4., 5.], dtype=float32)
    """
    return _over_rows(collectives.pmax, jnp.max, x, mesh, axis_name, **how)


def pmin(x: jax.Array, *, mesh: Mesh, axis_name: AxisName, **how: Any) -> jax.Array:
    """x.min(axis=0), replicated; arguments as `psum`'s.

    Example:
      >>> pc.sharded.pmin(jnp.arange(6.0).reshape(2, 3), mesh=mesh, axis_name="x")
      Array([0., 1., 2.], dtype=float32)
    """
    return _over_rows(collectives.pmin, jnp.min, x, mesh, axis_name, **how)


def _over_rows(
    collective: Callable[..., jax.Array],
    locally: Callable[..., jax.Array],
    x: jax.Array,
    mesh: Mesh,
    axis_name: AxisName,
    **how: Any,
) -> jax.Array:
    """Reduces rows laid over `axis_name`: a device's own few first, then those of all devices."""
    if locally is jnp.sum and x.dtype == jnp.bool_:
        x = jnp.asarray(x, jnp.int32)  # counts, as psum has them
    asked = dict(collective=collective, locally=locally, axis_name=axis_name, **how)
    return laying.mapped(_reduced, asked, mesh, PartitionSpec(axis_name), PartitionSpec(), x)


def _reduced(
    rows: jax.Array,
    collective: Callable[..., jax.Array],
    locally: Callable[..., jax.Array],
    **asked: Any,
) -> jax.Array:
    return collective(locally(rows, axis=0).astype(rows.dtype), **asked)


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

    Example:
      >>> x, to_columns = jnp.arange(4).reshape(2, 2), {"split_axis": 1, "concat_axis": 0}
      >>> y = pc.sharded.all_to_all(x, mesh=mesh, axis_name="x", **to_columns)
      >>> tuple(y.sharding.spec), bool((y == x).all())
      ((None, 'x'), True)
    """
    split_axis, concat_axis = (
        laying.dimension(x.ndim, split_axis),
        laying.dimension(x.ndim, concat_axis),
    )
    before = laying.spec_of(x, concat_axis, axis_name, spec)
    if before[split_axis] is not None:
        raise CollectiveError(
            f"split_axis={split_axis} with spec={before}",
            "the dimension must be whole on each device",
            "split another dimension, or gather this one first",
        )
    laid = {split_axis: axis_name, concat_axis: None}
    after = PartitionSpec(*(laid.get(d, s) for d, s in enumerate(before)))
    dimensions = {"split_axis": split_axis, "concat_axis": concat_axis}
    asked = dict(axis_name=axis_name, tiled=True, **dimensions, **how)
    return laying.mapped(collectives.all_to_all, asked, mesh, before, after, x)


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

    Example:
      >>> sizes, starts = np.array([1, 1, 1, 1]), np.array([0, 1, 0, 1])  # a row from each to each
      >>> tables = starts, sizes, np.array([0, 0, 1, 1]), sizes
      >>> rows = jnp.arange(4.0).repeat(128).reshape(4, 128)
      >>> got = pc.sharded.ragged_all_to_all(rows, 0 * rows, *tables, mesh=mesh, axis_name="x")
      >>> got[:, 0]
      Array([0., 2., 1., 3.], dtype=float32)
    """
    rows, asked = PartitionSpec(axis_name), dict(axis_name=axis_name, **how)
    arrays = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    return laying.mapped(collectives.ragged_all_to_all, asked, mesh, rows, rows, *arrays)


def ppermute(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
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

    Example:
      >>> pc.sharded.ppermute(jnp.arange(4), mesh=mesh, axis_name="x", perm=[(0, 1), (1, 0)])
      Array([2, 3, 0, 1], dtype=int32)
    """
    return _of_blocks(collectives.ppermute, x, mesh, axis_name, axis, spec, perm=perm, **how)


def pshuffle(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    perm: Sequence[int],
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """`ppermute` by sources: block t becomes what block perm[t] was; arguments as `ppermute`'s.

    Example:
      >>> pc.sharded.pshuffle(jnp.arange(4), mesh=mesh, axis_name="x", perm=[1, 0])
      Array([2, 3, 0, 1], dtype=int32)
    """
    return _of_blocks(collectives.pshuffle, x, mesh, axis_name, axis, spec, perm=perm, **how)


def pbroadcast(
    x: jax.Array,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    source: int,
    axis: int = 0,
    spec: PartitionSpec | None = None,
    **how: Any,
) -> jax.Array:
    """Every block becomes what block `source` is, bit for bit; other arguments as `ppermute`'s.

    Example:
      >>> pc.sharded.pbroadcast(jnp.arange(4), mesh=mesh, axis_name="x", source=1)
      Array([2, 3, 2, 3], dtype=int32)
    """
    return _of_blocks(collectives.pbroadcast, x, mesh, axis_name, axis, spec, source=source, **how)


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

    Example:
      >>> pc.sharded.pswapaxes(jnp.arange(4).reshape(2, 2), mesh=mesh, axis_name="x", axis=1)
      Array([[0, 2],
             [1, 3]], dtype=int32)
    """
    axis, rows = laying.dimension(x.ndim, axis), PartitionSpec(axis_name)
    devices = laying.devices(mesh, axis_name)
    if axis == 0 or x.shape[0] != devices:
        raise CollectiveError(
            f"axis={axis} of x of shape {x.shape}",
            f"its rows are swapped with another dimension: there must be {devices}, one a device",
            "reshape x, or name another dimension",
        )
    asked = dict(axis_name=axis_name, axis=axis - 1, **how)
    return laying.mapped(_swapped, asked, mesh, rows, rows, x)


def _swapped(row: jax.Array, **asked: Any) -> jax.Array:
    return collectives.pswapaxes(row[0], **asked)[None]


def _of_blocks(
    collective: Callable[..., jax.Array],
    x: jax.Array,
    mesh: Mesh,
    axis_name: AxisName,
    axis: int,
    spec: PartitionSpec | None,
    **asked: Any,
) -> jax.Array:
    """A collective that leaves the blocks of an array laid out as they are."""
    layout = laying.spec_of(x, laying.dimension(x.ndim, axis), axis_name, spec)
    return laying.mapped(collective, dict(axis_name=axis_name, **asked), mesh, layout, layout, x)
