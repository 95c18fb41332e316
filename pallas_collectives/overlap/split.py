"""Collectives in two halves: what stands between `..._start` and `done` hides the wire.

    started = psum_scatter_start(gradient, "x", tiled=True)
    y = layer(x, w)                     # while the sum is on the wire
    mine = started.done(after=y)

As `jax.lax.psum_scatter_start` of JAX 0.12, for more collectives, and with what that lacks:
gradients (the transpose of a gather that is started and done is an exchange that is), and vmap.

Who serves:

* On GPUs of one process, copy engines (`nccl.copies`). Nothing that holds multiprocessors is in
  their way: on two H200, 16 layers whose weights are gathered one ahead take 1.05 times as long as
  with weights that are there, and 1.2 times as long with lax's gathers.
* Anywhere else the collective is one call, where it is started, by the backend in scope. XLA then
  runs beside it what it can: permutes, v5e's gathers, the SparseCores' collectives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import collectives, validation
from pallas_collectives.backends import canonical, choice, flights, ordered
from pallas_collectives.backends.nccl import blocks, side_by_side
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups, varying


class Started:
    """A collective under way: a result that is still to come."""

    def __init__(self, tree: Any, here: Sequence[Any], under_way: Sequence["_UnderWay"]) -> None:
        self._tree, self._here, self._under_way = tree, here, under_way

    @property
    def tokens(self) -> list[jax.Array]:
        """What to name in another's `after`, for it to come after this one's start."""
        return [leaf.token for leaf in self._under_way]

    @classmethod
    def of(cls, result: Any) -> "Started":
        """A collective whose result is there."""
        leaves, tree = jax.tree.flatten(result)
        return cls(tree, leaves, ())

    def done(self, after: Any = ()) -> Any:
        """The result.

        Args:
          after: arrays, in any pytree: on GPUs, what is to be computed before the result is waited
            for. Elsewhere XLA decides.
        """
        tokens = jax.tree.leaves(after)
        came = [leaf.done(tokens) for leaf in self._under_way]
        return jax.tree.unflatten(self._tree, [*self._here, *came])

    def before(self, arrays: Any) -> Any:
        """These arrays, for use once the collective is under way: on GPUs XLA keeps that order.

        It does so for whole numbers without dimensions, and as a rule for other arrays.
        """
        for leaf in self._under_way:
            arrays = jax.tree.map(functools.partial(_behind, leaf.token), arrays)
        return arrays


def _behind(token: jax.Array, x: jax.Array) -> jax.Array:
    """x, which is there only after the token, a 0, is."""
    if jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer):
        return x + token[0].astype(jnp.result_type(x))
    return lax.optimization_barrier((x, token))[0]  # taken away before XLA merges products


class _UnderWay:
    """One array of a collective under way."""

    def __init__(
        self,
        flight: flights.Flight,
        operand: jax.Array,
        arrive: Callable[[jax.Array], Any],
        after: Sequence[jax.Array],
    ) -> None:
        self._flight, self._arrive = flight, arrive
        self._started, self.token = flights.start(flight, operand, *after)

    def done(self, after: Sequence[jax.Array]) -> Any:
        return self._arrive(flights.done(self._flight, self._started, *after))


def all_gather_start(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
) -> Started:
    """Starts `all_gather(x, axis_name, ...)`; arguments, shapes and errors are that function's.

    Args:
      after: arrays, in any pytree: on GPUs, what is to be computed before it starts.

    Returns:
      What gives the result when it is asked for: see `Started.done`.

    Example, inside `jax.shard_map` over 8 devices, the next layer's weights under way:
      ahead = all_gather_start(w_next, "x", tiled=True); y = x @ w; w = ahead.done(after=y)
    """
    options: Any = {"axis_index_groups": axis_index_groups, "axis": axis, "tiled": tiled}

    def leave(leaf: jax.Array, group: Group) -> _Way:
        place = axis % (leaf.ndim + (not tiled))

        def arrive(blocks: jax.Array) -> jax.Array:
            return side_by_side(blocks, place) if tiled else jnp.moveaxis(blocks, 0, place)

        return flights.new("gather", group), leaf, arrive

    def at_once() -> Any:
        return collectives.all_gather(x, axis_name, backend=backend, algorithm=algorithm, **options)

    for leaf, where in validation.leaves(x):
        validation.check_axis("axis", axis, np.ndim(leaf) + (not tiled), where)
    return _start(x, axis_name, axis_index_groups, backend, algorithm, at_once, leave, after)


def psum_scatter_start(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
) -> Started:
    """Starts `psum_scatter(x, axis_name, ...)`; see `all_gather_start`.

    On GPUs every device's block comes as it is, and they are added when the result is asked for:
    in the order of the devices, narrow floats in float32.
    """
    options: Any = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    options["scatter_dimension"] = scatter_dimension

    def leave(leaf: jax.Array, group: Group) -> _Way:
        place = scatter_dimension % leaf.ndim

        def arrive(terms: jax.Array) -> jax.Array:
            if terms.dtype == jnp.bool_:
                terms = terms.astype(jnp.int32)
            total = ordered.added(terms, group.size, 0)[0]
            return total if tiled else jnp.squeeze(total, place)

        return flights.new("exchange", group), blocks(leaf, place, group.size), arrive

    def at_once() -> Any:
        how: Any = {"backend": backend, "algorithm": algorithm}
        return collectives.psum_scatter(x, axis_name, **how, **options)

    validation.check_blocks(
        "scatter_dimension", scatter_dimension, x, axis_name, axis_index_groups, tiled
    )
    validation.check_added("psum_scatter_start", x)
    return _start(x, axis_name, axis_index_groups, backend, algorithm, at_once, leave, after)


def all_to_all_start(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
) -> Started:
    """Starts `all_to_all(x, axis_name, split_axis, concat_axis, tiled=True, ...)`.

    See `all_gather_start`.
    """
    at: Any = {"split_axis": split_axis, "concat_axis": concat_axis}

    def leave(leaf: jax.Array, group: Group) -> _Way:
        apart = blocks(leaf, split_axis % leaf.ndim, group.size)
        place = concat_axis % leaf.ndim
        return flights.new("exchange", group), apart, lambda came: side_by_side(came, place)

    def at_once() -> Any:
        options: Any = {"axis_index_groups": axis_index_groups, "tiled": True, **at}
        return collectives.all_to_all(x, axis_name, backend=backend, algorithm=algorithm, **options)

    validation.check_blocks("split_axis", split_axis, x, axis_name, axis_index_groups, True)
    for leaf, where in validation.leaves(x):
        validation.check_axis("concat_axis", concat_axis, np.ndim(leaf), where)
    return _start(x, axis_name, axis_index_groups, backend, algorithm, at_once, leave, after)


def ppermute_start(
    x: Any,
    axis_name: AxisName,
    perm: Any,
    *,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
) -> Started:
    """Starts `ppermute(x, axis_name, perm)`; see `all_gather_start`."""
    validation.check_order(axis_name)
    pairs = validation.checked_perm(perm, validation.size_of(axis_name))

    def leave(leaf: jax.Array, group: Group) -> _Way:
        return flights.new("permute", group, pairs), leaf, lambda came: came

    def at_once() -> Any:
        return collectives.ppermute(x, axis_name, pairs, backend=backend, algorithm=algorithm)

    return _start(x, axis_name, None, backend, algorithm, at_once, leave, after)


# The flight, its operand, and what to make of its result.
_Way = tuple[flights.Flight, jax.Array, Callable[[jax.Array], Any]]


def _start(
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    backend: str | None,
    algorithm: str | None,
    at_once: Callable[[], Any],
    leave: Callable[[jax.Array, Group], _Way],
    after: Any,
) -> Started:
    how = choice.settle(axis_name, groups, backend, algorithm)
    leaves, tree = jax.tree.flatten(x)
    if not flights.serve(how) or not all(map(flights.moves, leaves)):
        return Started.of(at_once())
    group = canonical.group_of(axis_name, groups)
    tokens = jax.tree.leaves(after)
    under_way = []
    for leaf in leaves:
        flight, operand, arrive = leave(varying(jnp.asarray(leaf), axis_name), group)
        under_way.append(_UnderWay(flight, operand, arrive, tokens))
    return Started(tree, (), under_way)
