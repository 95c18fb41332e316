"""Collectives in two halves: what stands between `..._start` and `done` hides the wire.

    started = psum_scatter_start(gradient, "x", tiled=True)
    y = layer(x, w)                     # while the sum is on the wire
    mine = started.done(after=y)

As `jax.lax.psum_scatter_start` of JAX 0.12, for every collective, and with what that lacks:
gradients (the transpose of a gather that is started and done is an exchange that is), and vmap.
Each takes what the whole collective takes, and `after`; shapes and errors are the same.

Who serves:

* On GPUs of one host, copy engines (`nccl.copies`, between processes `nccl.posts`). Nothing that
  holds multiprocessors is in their way: on two H200, 16 layers whose weights are gathered one ahead
  take 1.05 times as long as with weights that are there, and 1.2 times as long with lax's gathers.
  What they do not do is one call of NCCL, where it is started: pmax, pmin, pbroadcast,
  ragged_all_to_all (lax's up to 1 MiB), elements that share bytes, and everything between hosts.
* On TPUs the collective is one call, where it is started, by what lets the core go on: lax, where
  XLA runs it beside compute; else a SparseCore, for what is worth its launch; else a kernel on the
  TensorCore, which stops for it. `explain("all_gather_start", ...)` says which, and why.
* Anywhere else it is one call, by the backend in scope.

Over a wire what is packed moves so: on GPUs by copy engines, with the bits of the whole call (see
`backends.packed_flights`); on TPUs where the core waits less for passes before and behind than for
a kernel that packs (`backends.wire_choice`).

No kernel hands DMAs that are under way to a second one, though that compiles for all TPUs: XLA may
copy the memory between the two, and does so in loops, with bytes in it that have not come yet.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_collectives import collectives, validation
from pallas_collectives.annotations import Number
from pallas_collectives.backends import choice, flights
from pallas_collectives.backends.layout import blocks, side_by_side
from pallas_collectives.overlap.split_sums import all_reduce_start as all_reduce_start
from pallas_collectives.overlap.split_sums import pmax_start as pmax_start
from pallas_collectives.overlap.split_sums import pmean_start as pmean_start
from pallas_collectives.overlap.split_sums import pmin_start as pmin_start
from pallas_collectives.overlap.split_sums import psum_scatter_start as psum_scatter_start
from pallas_collectives.overlap.split_sums import psum_start as psum_start
from pallas_collectives.overlap.split_sums import reduce_scatter_start as reduce_scatter_start
from pallas_collectives.overlap.started import Started as Started
from pallas_collectives.overlap.started import Way, at_once, start
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import Wire


def all_gather_start(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    order: str | None = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `all_gather(x, axis_name, ...)`; arguments, shapes and errors are that function's.

    Args:
      after: arrays, in any pytree, that GPUs compute before the collective starts.
        Elsewhere XLA decides.
      **narrower: `wire` and related options. On GPUs what is packed for a wire is under way; with
        random rounding or any other of these options the collective runs whole where it starts.

    Returns:
      A `Started`, whose `done()` gives the result.

    Example, inside `jax.shard_map` over 8 devices, the next layer's weights under way:
      ahead = all_gather_start(w_next, "x", tiled=True); y = x @ w; w = ahead.done(after=y)

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(lambda x: pc.all_gather_start(x, "x").done(), axis_name="x")(jnp.arange(2.0))
      Array([[0., 1.],
             [0., 1.]], dtype=float32)
    """
    options: dict[str, Any] = {
        "axis_index_groups": axis_index_groups,
        "axis": axis,
        "tiled": tiled,
        "to": to,
    }

    def leave(leaf: jax.Array, group: Group, _: Wire | None) -> Way:
        place = axis % (leaf.ndim + (not tiled))

        def arrive(blocks: jax.Array) -> jax.Array:
            return side_by_side(blocks, place) if tiled else jnp.moveaxis(blocks, 0, place)

        return Way(flights.new("gather", group, to=to), leaf, arrive)

    how: dict[str, Any] = {"backend": backend, "algorithm": algorithm, "order": order}
    call = functools.partial(collectives.all_gather, x, axis_name, **how, **options, **narrower)
    for leaf, where in validation.leaves(x):
        validation.check_axis("axis", axis, np.ndim(leaf) + (not tiled), where)
    settled = choice.settle(axis_name, axis_index_groups, **how)
    if to != "varying" and (to != "invarying" or axis_index_groups is not None):
        return at_once(call, after)
    return start(x, axis_name, axis_index_groups, settled, call, narrower, leave, after)


def all_to_all_start(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `all_to_all(x, axis_name, split_axis, concat_axis, ...)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> start = lambda x: pc.all_to_all_start(x, "x", 0, 0).done()
      >>> jax.vmap(start, axis_name="x")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 2.],
             [1., 3.]], dtype=float32)
    """
    options: dict[str, Any] = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def leave(leaf: jax.Array, group: Group, _: Wire | None) -> Way:
        split, concat = split_axis % leaf.ndim, concat_axis % leaf.ndim
        apart = blocks(leaf, split, group.size)

        def arrive(came: jax.Array) -> jax.Array:
            if tiled:
                return side_by_side(came, concat)
            return jnp.moveaxis(jnp.squeeze(came, 1 + split), 0, concat)

        return Way(flights.new("exchange", group), apart, arrive)

    validation.check_blocks("split_axis", split_axis, x, axis_name, axis_index_groups, tiled)
    for leaf, where in validation.leaves(x):
        validation.check_axis("concat_axis", concat_axis, np.ndim(leaf), where)
    how: dict[str, Any] = {"backend": backend, "algorithm": algorithm}
    options |= {"split_axis": split_axis, "concat_axis": concat_axis}
    call = functools.partial(collectives.all_to_all, x, axis_name, **how, **options, **narrower)
    settled = choice.settle(axis_name, axis_index_groups, **how)
    return start(x, axis_name, axis_index_groups, settled, call, narrower, leave, after)


def pswapaxes_start(
    x: Any,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `pswapaxes(x, axis_name, axis, ...)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> start = lambda x: pc.pswapaxes_start(x, "x", 0).done()
      >>> jax.vmap(start, axis_name="x")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 2.],
             [1., 3.]], dtype=float32)
    """
    how: dict[str, Any] = {
        "axis_index_groups": axis_index_groups,
        "backend": backend,
        "algorithm": algorithm,
    }
    return all_to_all_start(x, axis_name, axis, axis, **how, after=after, **narrower)


def ppermute_start(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `ppermute(x, axis_name, perm)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> start = lambda x: pc.ppermute_start(x, "x", [(0, 1), (1, 0)]).done()
      >>> jax.vmap(start, axis_name="x")(jnp.arange(2.0))
      Array([1., 0.], dtype=float32)
    """
    how: dict[str, Any] = {"backend": backend, "algorithm": algorithm}
    settled = choice.settle(axis_name, None, **how)
    validation.check_order(axis_name)
    pairs = validation.checked_perm(perm, validation.size_of(axis_name))

    def leave(leaf: jax.Array, group: Group, _: Wire | None) -> Way:
        return Way(flights.new("permute", group, pairs), leaf, lambda came: came)

    call = functools.partial(collectives.ppermute, x, axis_name, pairs, **how, **narrower)
    return start(x, axis_name, None, settled, call, narrower, leave, after)


def pshuffle_start(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[int],
    *,
    backend: str | None = None,
    algorithm: str | None = "auto",
    after: Any = (),
    **narrower: Any,
) -> Started:
    """Starts `pshuffle(x, axis_name, perm)`; see `all_gather_start`.

    Example, with `jax.vmap` in place of a mesh:
      >>> start = lambda x: pc.pshuffle_start(x, "x", [1, 2, 3, 0]).done()
      >>> jax.vmap(start, axis_name="x")(jnp.arange(4.0))
      Array([1., 2., 3., 0.], dtype=float32)
    """
    pairs = validation.shuffled(perm, validation.size_of(axis_name))
    how: dict[str, Any] = {"backend": backend, "algorithm": algorithm}
    return ppermute_start(x, axis_name, pairs, **how, after=after, **narrower)


def pbroadcast_start(
    x: Any, axis_name: AxisName, source: Number, *, after: Any = (), **options: Any
) -> Started:
    """Starts `pbroadcast(x, axis_name, source, **options)`; see `all_gather_start`.

    Example:
      >>> P, mesh = jax.sharding.PartitionSpec("x"), jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> told = jax.shard_map(
      ...     lambda x: pc.pbroadcast_start(x, "x", 1).done(), mesh=mesh, in_specs=P, out_specs=P
      ... )
      >>> jax.jit(told)(jnp.arange(2))
      Array([1, 1], dtype=int32)
    """
    call = functools.partial(collectives.pbroadcast, x, axis_name, source, **options)
    return at_once(call, after)


def ragged_all_to_all_start(*operands: ArrayLike, after: Any = (), **options: Any) -> Started:
    """Starts `ragged_all_to_all(*operands, **options)`; see `all_gather_start`.

    Example, inside `jax.shard_map`, with the tables that `ragged_all_to_all` shows:
      >>> def exchange(x):
      ...     me, ones = jax.lax.axis_index("x"), jnp.ones(2, int)
      ...     tables = jnp.arange(2), ones, jnp.full(2, me), ones
      ...     return pc.ragged_all_to_all_start(x, 0 * x, *tables, axis_name="x").done()
      >>> P, mesh = jax.sharding.PartitionSpec("x"), jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> rows = jnp.arange(4.0).repeat(128).reshape(4, 128)
      >>> jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P, out_specs=P))(rows)[:, 0]
      Array([0., 2., 1., 3.], dtype=float32)
    """
    return at_once(functools.partial(collectives.ragged_all_to_all, *operands, **options), after)


NAMES = tuple(sorted(name for name in globals() if name.endswith("_start")))
