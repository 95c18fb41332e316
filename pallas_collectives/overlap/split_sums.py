"""Sums in two halves: what `split` starts and adds when the result is asked for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_collectives import _compat, collectives, validation
from pallas_collectives.backends import choice, flights, ordered, wire_ways, wired
from pallas_collectives.backends.nccl import blocks
from pallas_collectives.overlap.started import Started, UnderWay, Way, at_once, start
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import Wire


def psum_scatter_start(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    precise: bool = False,
    order: str | None = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `psum_scatter(x, axis_name, ...)`; see `all_gather_start`.

    On GPUs every device's block comes as it is, and they are added when the result is asked for:
    in the order of the devices, narrow floats in float32.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.psum_scatter_start(x, "x").done(), axis_name="x")(jnp.ones((4, 4)))
      Array([4., 4., 4., 4.], dtype=float32)
    """
    options: dict[str, Any] = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    options["scatter_dimension"] = scatter_dimension

    def leave(leaf: jax.Array, group: Group, wire: Wire | None) -> Way:
        place = scatter_dimension % leaf.ndim
        apart = blocks(leaf, place, group.size)
        over = dataclasses.replace(settled, wire=wire)

        def arrive(total: jax.Array) -> jax.Array:
            total = wired.out_of_blocks(total, apart.shape[1:], over)
            return total if tiled else jnp.squeeze(total, place)

        return Way(flights.new("exchange", group), wired.flattened(apart, over), arrive, adds=True)

    validation.check_blocks(
        "scatter_dimension", scatter_dimension, x, axis_name, axis_index_groups, tiled
    )
    validation.check_added("psum_scatter_start", x)
    how: dict[str, Any] = {
        "backend": backend,
        "algorithm": algorithm,
        "precise": precise,
        "order": order,
    }
    call = functools.partial(collectives.psum_scatter, x, axis_name, **how, **options, **narrower)
    settled = choice.settle(axis_name, axis_index_groups, **how)
    return start(x, axis_name, axis_index_groups, settled, call, narrower, leave, after)


reduce_scatter_start = psum_scatter_start


def psum_start(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `psum(x, axis_name, ...)`; see `all_gather_start`.

    On GPUs small arrays are gathered, and added when the result is asked for; of large ones the
    blocks are under way, as `psum_scatter_start`'s, and their sums are gathered then. They are
    added in the order of the devices.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.psum_start(x, "x").done(), axis_name="x")(jnp.arange(4.0))
      Array([6., 6., 6., 6.], dtype=float32)
    """
    how: dict[str, Any] = {
        "backend": backend,
        "algorithm": algorithm,
        "precise": precise,
        "order": order,
    }
    return _sum(collectives.psum, x, axis_name, axis_index_groups, how, after, narrower)


all_reduce_start = psum_start


def pmean_start(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    precise: bool = False,
    order: str | None = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `pmean(x, axis_name, ...)`; see `psum_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmean_start(x, "x").done(), axis_name="x")(jnp.arange(4.0))
      Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    how: dict[str, Any] = {
        "backend": backend,
        "algorithm": algorithm,
        "precise": precise,
        "order": order,
    }
    return _sum(collectives.pmean, x, axis_name, axis_index_groups, how, after, narrower)


def _sum(
    whole: Callable[..., Any],
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    how: dict[str, Any],
    after: Any,
    narrower: dict[str, Any],
) -> Started:
    settled = choice.settle(axis_name, groups, **how)
    call = functools.partial(whole, x, axis_name, axis_index_groups=groups, **how, **narrower)

    def leave(leaf: jax.Array, group: Group, wire: Wire | None) -> Way:
        # Typed as lax types a sum: as equal everywhere, where types are told at all.
        to = "invarying" if _compat.varying(leaf) >= set(group.axes) else "varying"
        flat = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        n, over = group.size, dataclasses.replace(settled, wire=wire)
        apart = wired.in_blocks(flat, over, n)

        def finished(total: jax.Array) -> jax.Array:
            total = wired.out_of_blocks(total, leaf.shape, over)
            return total / n if whole is collectives.pmean else total

        gather = flights.new("gather", group, to=to)
        terms = apart.reshape(-1, *apart.shape[2:])
        if wire_ways.gathers_terms(n) if wire else ordered.gathers(leaf.nbytes, n):
            return Way(gather, terms, finished, adds=True)

        def arrive(total: jax.Array) -> jax.Array:
            return UnderWay(Way(gather, total, finished, wire=wire, dtype=flat.dtype)).done()

        scatter, sums = flights.new("exchange", group), jnp.float32 if wire else None
        return Way(scatter, apart, arrive, adds=True, dtype=sums)

    traced = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
    if groups is not None or not traced:
        return at_once(call, after)  # a constant's sum is one, and lax types no sums of groups
    return start(x, axis_name, None, settled, call, narrower, leave, after)


def pmax_start(x: Any, axis_name: AxisName, *, after: Any = (), **options: Any) -> Started:
    """Starts `pmax(x, axis_name, **options)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmax_start(x, "x").done(), axis_name="x")(jnp.arange(4.0))
      Array([3., 3., 3., 3.], dtype=float32)
    """
    return at_once(functools.partial(collectives.pmax, x, axis_name, **options), after)


def pmin_start(x: Any, axis_name: AxisName, *, after: Any = (), **options: Any) -> Started:
    """Starts `pmin(x, axis_name, **options)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.pmin_start(x, "x").done(), axis_name="x")(jnp.arange(4.0))
      Array([0., 0., 0., 0.], dtype=float32)
    """
    return at_once(functools.partial(collectives.pmin, x, axis_name, **options), after)
