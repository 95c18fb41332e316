"""From a function with Pallas TPU kernels inside shard_map to its stepped `Program`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives.replay import jaxprs, live, values
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
    """Steps `function(*args)` for every device of its shard_maps' mesh; returns the program and the
    mesh.

    `where(mesh)` is where the mesh's devices are: our own collectives choose their rings by that.
    `args` are pytrees of `jax.ShapeDtypeStruct`s (only shapes matter) or arrays (their
    contents are followed, e.g. sizes that a kernel reads from scalar memory). Raises NoShardMap,
    and DataDependent where the kernel's addresses or control flow depend on an argument given by
    shape only.
    """
    closed = jax.make_jaxpr(function)(*jax.tree.map(_shape, args))
    contents = [_contents(a) for a in jax.tree.leaves(args)]
    mesh = find_shard_map(closed).params["mesh"]
    if _reads_semaphores(closed):
        return live.LiveProgram(mesh, generation, closed, contents), mesh  # type: ignore[return-value]
    stepper = Stepper(mesh, generation, compile_equation)
    with placement.scope(where(mesh)):
        stepper.run(closed, contents, np.arange(stepper.n_devices))
    return stepper.program(), mesh


def _shape(a: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> jax.ShapeDtypeStruct:
    """What is traced in an argument's place: sharded as it is, where a mesh's axes are explicit."""
    sharding = getattr(a, "sharding", None)
    of_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    dtype = jax.dtypes.result_type(a)
    return jax.ShapeDtypeStruct(np.shape(a), dtype, sharding=sharding if of_mesh else None)


def _contents(a: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> Any:
    """What is known of an argument: of a `jax.Array`, what can be fetched and may be an index."""
    dtype = jax.dtypes.result_type(a)
    given = isinstance(a, (np.ndarray, np.generic, int, float))
    if isinstance(a, jax.Array) and a.is_fully_addressable:
        given = jax.dtypes.issubdtype(dtype, np.integer) or dtype == np.bool_
    if not given:
        return UNKNOWN
    array = np.asarray(a)
    return Known(array, False) if array.ndim else values.settle(array.item(), dtype)


def find_shard_map(closed: core.Jaxpr | core.ClosedJaxpr) -> JaxprEqn:
    """The first shard_map equation of a program."""
    for eqn in jaxprs.equations(closed):
        if eqn.primitive.name == "shard_map":
            return eqn
    raise NoShardMap("replay wants a function that calls jax.shard_map over the mesh to model")


def _reads_semaphores(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> bool:
    return any(eqn.primitive.name == "semaphore_read" for eqn in jaxprs.equations(jaxpr))
