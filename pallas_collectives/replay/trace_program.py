"""From a function with Pallas TPU kernels inside shard_map to its stepped `Program`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from pallas_collectives.replay import jaxprs, live
from pallas_collectives.replay.equations import compile_equation
from pallas_collectives.replay.program import Program
from pallas_collectives.replay.stepper import Stepper
from pallas_collectives.replay.values import UNKNOWN, Known
from pallas_collectives.topology import placement
from pallas_collectives.topology.chips import Chip
from pallas_collectives.topology.placement import Places


class NoShardMap(ValueError):
    """The function has no `jax.shard_map`, so replay cannot know its devices."""


def trace(
    function: Callable[..., Any],
    *args: Any,
    generation: Chip,
    where: Callable[[Any], Places | None] = lambda mesh: None,
) -> tuple[Program, Any]:
    """Steps `function(*args)` for every device of its shard_map's mesh; returns the program and the
    mesh.

    `where(mesh)` is where the mesh's devices are: our own collectives choose their rings by that.
    `args` are pytrees of `jax.ShapeDtypeStruct`s (only shapes matter) or arrays (their
    contents are followed, e.g. sizes that a kernel reads from scalar memory). Raises NoShardMap,
    and DataDependent where the kernel's addresses or control flow depend on an argument given by
    shape only.
    """
    closed = jax.make_jaxpr(function)(*jax.tree.map(_shape, args))
    contents = [_contents(a) for a in jax.tree.leaves(args)]
    shard_map, operands = find_shard_map(closed, contents)
    mesh = shard_map.params["mesh"]
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    specs = shard_map.params["in_specs"]
    per_device = [_shard(v, spec, axes) for v, spec in zip(operands, specs, strict=True)]
    body = shard_map.params["jaxpr"]
    if _reads_semaphores(body):
        return live.LiveProgram(mesh, generation, body, per_device), mesh  # type: ignore[return-value]
    stepper = Stepper(mesh, generation, compile_equation)
    with placement.scope(where(mesh)):
        stepper.run(body, per_device, np.arange(stepper.n_devices))
    return stepper.program(), mesh


def _shape(a: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> jax.ShapeDtypeStruct:
    """What is traced in an argument's place: sharded as it is, where a mesh's axes are explicit."""
    sharding = getattr(a, "sharding", None)
    of_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    dtype = jax.dtypes.result_type(a)
    return jax.ShapeDtypeStruct(np.shape(a), dtype, sharding=sharding if of_mesh else None)


def _contents(a: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> Any:
    """What is known of an argument: of a `jax.Array`, what can be fetched and may be an index."""
    if isinstance(a, (np.ndarray, np.generic, int, float)):
        return Known(np.asarray(a), False)
    fetched = isinstance(a, jax.Array) and a.is_fully_addressable
    if fetched and (jax.dtypes.issubdtype(a.dtype, np.integer) or a.dtype == np.bool_):
        return Known(np.asarray(a), False)
    return UNKNOWN


def find_shard_map(closed: core.Jaxpr | core.ClosedJaxpr, args: list[Any]) -> tuple[Any, list[Any]]:
    """The outermost shard_map equation and what is known of its operands."""
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    known: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    known |= {v: Known(np.asarray(c), False) for v, c in zip(jaxpr.constvars, consts, strict=True)}
    for eqn in jaxpr.eqns:
        operands = [UNKNOWN if jaxprs.is_literal(v) else known.get(v, UNKNOWN) for v in eqn.invars]
        if eqn.primitive.name == "shard_map":
            return eqn, operands
        called = jaxprs.called_jaxpr(eqn)
        if called is not None:
            try:
                return find_shard_map(called, operands)
            except NoShardMap:
                pass
    raise NoShardMap("replay wants a function that calls jax.shard_map over the mesh to model")


def _shard(value: Any, spec: PartitionSpec, axes: dict[str, int]) -> Any:
    """Each device's part of a global array under a PartitionSpec."""
    if not isinstance(value, Known):
        return UNKNOWN
    if not any(spec) and value.values.ndim:
        return value
    n = math.prod(axes.values())
    shape = tuple(axes.values())
    coordinates = dict(zip(axes, np.unravel_index(np.arange(n), shape), strict=True))
    shards = []
    for device in range(n):
        part = value.values
        for dim, entry in enumerate(spec):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            index, count = 0, 1
            for name in names:
                index = index * axes[name] + int(coordinates[name][device])
                count *= axes[name]
            size = part.shape[dim] // count
            part = np.take(part, range(index * size, (index + 1) * size), axis=dim)
        shards.append(part)
    stacked = np.stack(shards)
    return stacked if stacked.ndim == 1 else Known(stacked, True)


def _reads_semaphores(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> bool:
    return any(eqn.primitive.name == "semaphore_read" for eqn in jaxprs.equations(jaxpr))
