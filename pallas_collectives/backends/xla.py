"""Canonical collectives by lax's own, where its primitive alone will not do: sums in order."""

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.lax import all_gather as lax_all_gather  # as it is, whatever `override_lax` puts there
from jax.lax import all_to_all as lax_all_to_all
from jax.sharding import PartitionSpec

from pallas_collectives.backends import ordered
from pallas_collectives.backends.plans import How
from pallas_collectives.topology.groups import Group


def all_gather(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The group's blocks side by side along `axis`."""
    del how
    return by_lax(lax_all_gather, group, axis=axis, tiled=True)(x)


def all_to_all(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, how: How
) -> jax.Array:
    """Block p goes to p and lands as block `me`."""
    del how
    options = {"split_axis": split_axis, "concat_axis": concat_axis, "tiled": True}
    return by_lax(lax_all_to_all, group, **options)(x)


def reduce_scatter(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The sum of everyone's block `me`, in the order of the ranks."""
    return ordered.reduce_scatter(x, group, axis=axis, how=how)


def all_reduce(x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
    """The sum, everywhere, in the order of the ranks."""
    assert op == "sum", "maxima have no order"
    return ordered.all_reduce(x, group, how=how)


def by_lax(
    function: Callable[..., Any], group: Group, **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """lax's collective over a group, uninterpreted by shard_map's types."""
    groups = group.index_groups and [list(row) for row in group.index_groups]

    def run(x: jax.Array) -> jax.Array:
        return function(x, axis_name=group.axes, axis_index_groups=groups, **options)

    nothing = PartitionSpec()
    return jax.shard_map(
        run, in_specs=nothing, out_specs=nothing, axis_names=frozenset(), check_vma=False
    )


ordered.exchanges["xla"] = sys.modules[__name__]
