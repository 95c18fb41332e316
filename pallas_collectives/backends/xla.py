"""Canonical collectives by lax's own, where its primitive alone will not do: sums in order, and
what travels as narrower numbers (`wired`).
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import all_gather as lax_all_gather  # as it is, whatever `override_lax` puts there
from jax.lax import all_to_all as lax_all_to_all
from jax.lax import pmax as lax_pmax
from jax.lax import pmin as lax_pmin
from jax.lax import ppermute as lax_ppermute
from jax.lax import psum as lax_psum
from jax.lax import psum_scatter as lax_psum_scatter
from jax.lax import ragged_all_to_all as lax_ragged_all_to_all
from jax.sharding import PartitionSpec

from pallas_collectives import simulation
from pallas_collectives.backends import ordered
from pallas_collectives.backends.plans import How
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups


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
    """The sum of everyone's block `me`, in the order of the ranks if that was asked for."""
    if how.order is None:
        return by_lax(lax_psum_scatter, group, scatter_dimension=axis, tiled=True)(x)
    return ordered.reduce_scatter(x, group, axis=axis, how=how)


def all_reduce(x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
    """The sum, maximum or minimum, everywhere; in the order of the ranks if that was asked for."""
    if how.order is None:
        return by_lax({"sum": lax_psum, "max": lax_pmax, "min": lax_pmin}[op], group)(x)
    return ordered.all_reduce(x, group, how=how)


def ppermute(x: jax.Array, group: Group, *, perm: Sequence[tuple[int, int]], how: How) -> jax.Array:
    """What the source sends; zeros on devices without a source."""
    del how

    def permute(x: jax.Array, axis_name: AxisName, axis_index_groups: Groups) -> jax.Array:
        assert axis_index_groups is None, "permutations have no groups"
        return lax_ppermute(x, axis_name, perm)

    return by_lax(permute, group)(x)


def ragged_all_to_all(
    operand: jax.Array, output: jax.Array, tables: Sequence[jax.Array], group: Group, *, how: How
) -> jax.Array:
    """Rows of runtime-chosen counts to each device; in padded blocks on CPUs, where XLA cannot."""
    del how
    exchange = _in_blocks if simulation.platform() == "cpu" else lax_ragged_all_to_all
    return by_lax(exchange, group)(operand, output, *tables)


def _in_blocks(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    **axis: Any,
) -> jax.Array:
    """lax's ragged exchange by its dense one: every slice goes as a block of the operand's size."""
    dense: Callable[..., jax.Array] = functools.partial(
        lax_all_to_all, split_axis=0, concat_axis=0, tiled=True, **axis
    )
    rows, row, slices = len(operand), jnp.arange(len(operand)), len(send_sizes)
    sent = jnp.where(row < send_sizes[:, None], input_offsets[:, None] + row, rows)
    come = dense(operand.at[sent.reshape(-1)].get(mode="fill", fill_value=0))
    of_slice = jnp.arange(len(output))[:, None] - dense(output_offsets)
    inside = (of_slice >= 0) & (of_slice < recv_sizes)
    found = jnp.where(inside, jnp.arange(slices) * rows + of_slice, 0).sum(1, dtype=jnp.int32)
    received = come.at[found].get(mode="fill", fill_value=0)
    there = lax.expand_dims(inside.any(axis=1), range(1, output.ndim))
    return jnp.where(there, received, output)


def by_lax(function: Callable[..., Any], group: Group, **options: Any) -> Callable[..., jax.Array]:
    """lax's collective over a group, uninterpreted by shard_map's types."""
    groups = group.index_groups and [list(row) for row in group.index_groups]

    axis: dict[str, Any] = {"axis_name": group.axes, "axis_index_groups": groups}
    nothing = PartitionSpec()
    return jax.shard_map(
        functools.partial(function, **axis, **options),
        in_specs=nothing,
        out_specs=nothing,
        axis_names=frozenset(),
        check_vma=False,
    )


ordered.exchanges["xla"] = sys.modules[__name__]
