"""Arrays of one process as its part of global ones, and back.

A global array's shards lie where its sharding puts them: each process owns those on its devices.
So the local array that a process sees is the same shards under the mesh of its own devices, and
neither direction moves bytes between processes, unless a global array comes in another sharding
than the one asked for.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_collectives import _compat
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, agree


def host_local_array_to_global_array(local_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Makes global arrays of each process's part, as the function of that name in
    `jax.experimental.multihost_utils` does.

    A mesh axis that spans processes multiplies the dimensions that it shards: on 2 processes,
    (4, 3) on each becomes (8, 3) under `P("x")`. A dimension that no such axis shards must hold
    the same values on every process; `assert_equal` tells.

    Args:
      local_inputs: pytree of arrays, scalars and key arrays. Arrays that are global already are
        returned as they are.
      global_mesh: each process's devices form a contiguous block of it.
      pspecs: pytree of `PartitionSpec`s, a prefix of `local_inputs`.

    Returns:
      The tree, with global `jax.Array`s under `NamedSharding(global_mesh, pspec)`.

    Raises:
      CollectiveError: no mesh of devices; no pspec for a leaf; a leaf that is traced.
      ValueError: pspecs is no prefix, or a dimension is not divisible by its local devices.

    Example, the same on one process as on many:
      >>> mesh, spec = jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x")
      >>> x = pc.multihost.host_local_array_to_global_array(np.arange(4), mesh, spec)
      >>> [shard.data.tolist() for shard in x.addressable_shards]
      [[0, 1], [2, 3]]
    """

    def convert(array: Any, spec: P) -> jax.Array:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return array
        local = NamedSharding(global_mesh.local_mesh, spec)
        if not (
            isinstance(array, jax.Array) and array.sharding.is_equivalent_to(local, array.ndim)
        ):
            array = jax.device_put(array, local)
        return _relabel(array, local, NamedSharding(global_mesh, spec))

    return _map("host_local_array_to_global_array", convert, local_inputs, global_mesh, pspecs)


def global_array_to_host_local_array(
    global_inputs: Any, global_mesh: Mesh, pspecs: Any, *, timeout: float = DEFAULT_TIMEOUT
) -> Any:
    """Each process's part of global arrays: `jax.experimental.multihost_utils`' function of that
    name, and the inverse of `host_local_array_to_global_array`.

    Args:
      global_inputs: pytree of global arrays, which are resharded if they do not have the sharding
        asked for. Leaves that this process holds whole are returned as they are.
      global_mesh: each process's devices form a contiguous block of it.
      pspecs: pytree of `PartitionSpec`s, a prefix of `global_inputs`.
      timeout: seconds that each wait of a resharding may take.

    Returns:
      The tree, with `jax.Array`s under `NamedSharding(global_mesh.local_mesh, pspec)`.

    Raises:
      CollectiveError: no mesh of devices; no pspec for a leaf; a leaf that is traced.
      ProcessTimeoutError, ProcessMismatchError: from a resharding, naming the processes at fault.
      ValueError: pspecs is no prefix.

    Example, on one process:
      >>> mesh, spec = jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x")
      >>> whole = jax.device_put(np.arange(4), jax.sharding.NamedSharding(mesh, spec))
      >>> pc.multihost.global_array_to_host_local_array(whole, mesh, spec).tolist()
      [0, 1, 2, 3]
    """
    operation = "global_array_to_host_local_array"

    def convert(array: Any, spec: P) -> jax.Array:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return array
        whole = NamedSharding(global_mesh, spec)
        if not array.sharding.is_equivalent_to(whole, array.ndim):
            agreement = agree(operation, [f"{array.sharding} to {whole}"], timeout=timeout)
            array = agreement.run(lambda: jax.block_until_ready(jax.device_put(array, whole)))
        return _relabel(array, whole, NamedSharding(global_mesh.local_mesh, spec))

    return _map(operation, convert, global_inputs, global_mesh, pspecs)


def _map(operation: str, convert: Any, tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """`convert(leaf, pspec)` over a tree, with the checks and conversions common to both ways."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, P)

    def convert_leaf(value: Any, spec: P | None) -> Any:
        if value is None:
            return None
        if not isinstance(spec, P):
            raise CollectiveError(
                f"{operation} with {spec!r} among the pspecs",
                "every leaf needs a PartitionSpec",
                "pass jax.sharding.PartitionSpec() for a leaf that is replicated",
            )
        if _compat.is_traced(value):
            raise CollectiveError(
                f"{operation} of {value.aval}",
                "arrays change between local and global outside of jit, grad and vmap",
                "call it on the arguments and results of the jitted function",
            )
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = convert(jax.random.key_data(value), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        if getattr(value, "dtype", None) == jax.dtypes.float0:
            value = np.zeros(value.shape, bool)
        return convert(value, spec)

    if not isinstance(mesh, Mesh):
        rule = "it must be a jax.sharding.Mesh, of devices"
        raise CollectiveError(
            f"{operation} with global_mesh={mesh!r}", rule, "pass what jax.make_mesh makes"
        )
    specs = jax.tree.broadcast(pspecs, tree, is_leaf=is_leaf)
    return jax.tree.map(convert_leaf, tree, specs, is_leaf=is_leaf)


def _relabel(array: jax.Array, old: NamedSharding, new: NamedSharding) -> jax.Array:
    """The shards of `array` that lie here, which are under `old`, under `new`."""
    shard = old.shard_shape(array.shape)
    spec = (*new.spec, *[None] * (array.ndim - len(new.spec)))
    shape = tuple(n * _partitions(new.mesh, axes) for n, axes in zip(shard, spec, strict=True))
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, new, shards)


def _partitions(mesh: Mesh | AbstractMesh, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(mesh.shape[name] for name in names)
