"""How whole arrays are laid over a mesh, for `sharded`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_collectives.errors import CollectiveError, UnboundAxisError
from pallas_collectives.validation import AxisName


def mapped(
    fn: Callable[..., jax.Array],
    asked: dict[str, Any],
    mesh: Mesh,
    before: PartitionSpec,
    after: PartitionSpec,
    *arrays: jax.Array,
) -> jax.Array:
    """fn(*shards, **asked) on each device, its shards those of arrays, which are laid over the mesh
    first if they are not. Equal calls have one program, compiled once: fn is the same object."""
    for x in arrays:
        check(x, mesh, before)
    laid = (jax.device_put(x, NamedSharding(mesh, before)) for x in arrays)
    parts = fn, tuple((name, _frozen(value)) for name, value in asked.items()), mesh, before, after
    try:
        hash(parts)
    except TypeError:  # as with a wire's key
        return _program.__wrapped__(*parts)(*laid)
    return _program(*parts)(*laid)


@functools.lru_cache(maxsize=256)
def _program(
    fn: Callable[..., jax.Array],
    asked: tuple[tuple[str, Any], ...],
    mesh: Mesh,
    before: PartitionSpec,
    after: PartitionSpec,
) -> Callable[..., jax.Array]:
    run = functools.partial(fn, **dict(asked))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=before, out_specs=after))


def _frozen(value: Any) -> Any:
    """The same with tuples for lists, which have no hash."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def check(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> None:
    """Refuses dimensions that x lacks, axes that the mesh lacks, and shards of unequal size."""
    over = [devices(mesh, () if names is None else names) for names in spec]
    if x.ndim < len(spec):
        rule = f"{spec} must name no more dimensions than it has"
        raise CollectiveError(f"an array of shape {x.shape}", rule, "reshape it, or name fewer")
    for dimension, count in enumerate(over):
        if x.shape[dimension] % count:
            raise CollectiveError(
                f"dimension {dimension} of size {x.shape[dimension]}",
                f"it must be a multiple of the {count} devices that it is laid over",
                f"pad it to {-(-x.shape[dimension] // count) * count}",
            )


def devices(mesh: Mesh, names: AxisName) -> int:
    """How many devices of a mesh some of its axes join."""
    there = getattr(mesh, "shape", None)
    if there is None:
        rule, remedy = "it must be a jax.sharding.Mesh", "write jax.make_mesh((8,), ('x',))"
        raise CollectiveError(f"mesh={mesh!r}", rule, remedy)
    axes = names if isinstance(names, tuple) else (names,)
    for name in axes:
        if name not in there:
            rule = f"the mesh has the axes {', '.join(map(str, there))}"
            raise UnboundAxisError(f"axis_name={name!r}", rule, "name one of them")
    return math.prod(there[name] for name in axes)


def dimension(ndim: int, axis: int) -> int:
    """A dimension of an array that has so many, counted from 0."""
    if not -ndim <= axis < ndim:
        raise CollectiveError(
            f"dimension {axis}",
            f"it must lie in [{-ndim}, {ndim}) for this array",
            "count dimensions from 0, or from -1 backwards",
        )
    return axis % ndim


def spec_of(
    x: jax.Array, axis: int, axis_name: AxisName, spec: PartitionSpec | None
) -> PartitionSpec:
    """The spec given, padded, which lays `axis` over `axis_name`; by default that alone."""
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
