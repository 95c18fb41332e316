"""Which share of each pair's rows takes which axis of a torus for its last, by what links carry.

A part of an axis goes over all other axes, the first one first, and along its own at the end; or
along its own at the beginning, where axes are taken for the first (see `ragged_spread`). What is
best for one pair depends on what all the others do, so shares are found in rounds, by
multiplicative weights: each round puts all rows on the links, prices each link by how busy it is
beside the busiest, and takes weight from the parts that cross dear links. Rounds swing about the
best, so the mean of all counts, the latest most: half of what is put on the links is this mean.
Where its busiest link has not much less to carry than if all went straight, all goes straight.

Every device does these sums on the same tables in the same program, with no random numbers and no
sums whose order is left open, and so finds the same shares to the last bit. They count in 256ths:
whatever shares are, all of a pair's rows arrive, as long as all devices see the same.

Of each link these sums need no list of pairs: on its way along an axis, a part is where its
receiver is on the axes behind it, and where its sender is on those ahead. So of those that come to
a link after a number of hops along its axis, some senders' rows for some receivers cross it: two
products with tables of zeros and ones, all as wide as there are chips.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.kernels.torus import devices
from pallas_collectives.topology.groups import Group

WHOLE = 256  # shares are told in such parts of one
# Tried on Zipf's and the worst skew on v5p:4x4x4, 7x:4x4x2 and v6e:4x4: links then carry at most 3%
# more than by the best shares.
_ROUNDS, _POWER, _RATE, _FADE, _MOMENTUM, _NEW = 16, 12, 5.0, 0.6, 0.3, 0.3
_MOST = 1 << 22  # elements of a table of links: 16 x 16 chips have as many
_WORTH = 0.9  # of the busiest link's rows, what is left at the most where parts pay


def cuts(
    rows: jax.Array,
    axes: Sequence[Group],
    passed: Sequence[jax.Array],
    first: jax.Array,
    *,
    weighed: bool,
) -> jax.Array:
    """int32[1 + ways, sender, receiver]: where parts of ways begin and end in a pair's rows.

    In parts of `WHOLE`. What is behind goes straight. `passed`: of each way, whose part is passed
    on; `first`: whether a part's axis is its first one, or its last; `weighed`: whether links are
    weighed, or all parts of a pair are alike.
    """
    nothing = jnp.zeros((1 + len(passed), *rows.shape), jnp.int32)
    if not passed:
        return nothing
    uneven = _is_more(rows.sum(0))[None, :] | _is_more(rows.sum(1))[:, None]
    if weighed:
        found = ends(rows, axes, uneven.any(), first)[: len(passed)]
    else:
        until = jnp.cumsum(jnp.stack(passed), axis=0, dtype=jnp.int32)
        found = jnp.where(uneven, WHOLE * until // (until[-1] + 1), 0)
    return jnp.concatenate([nothing[:1], found])


def _is_more(loads: jax.Array) -> jax.Array:
    """Which devices' loads are a quarter more than the average."""
    loads = loads.astype(jnp.float32)
    return loads * (4 * len(loads)) > 5 * jnp.sum(loads)


def ends(rows: jax.Array, axes: Sequence[Group], wanted: jax.Array, first: jax.Array) -> jax.Array:
    """int32[axes, n, n]: where the part of each axis ends in a pair's rows, in parts of `WHOLE`.

    The last part goes straight: that of the last axis, or of the first if it is `first` ones.

    Args:
      rows: [sender, receiver].
      axes: the axes of the torus, the devices of a chip as well; these have no part.
      wanted: bool: whether to weigh links at all; else all goes straight.
      first: bool: whether a part's axis is its first one, or its last.
    """
    sizes, numbers = [axis.size for axis in axes], devices.numbers(axes)
    chips = [k for k, axis in enumerate(axes) if axis.chip]
    inside = [*chips, *(k + len(sizes) for k in chips)]
    long = [axis for axis in axes if not axis.chip]
    at, back = (slice(None),) * 2 if numbers is None else (numbers, np.argsort(numbers))
    table = rows.astype(jnp.float32)[at][:, at].reshape(*sizes, *sizes).sum(inside)
    places = math.prod(axis.size for axis in long)
    legs = jax.tree.map(functools.partial(jnp.where, first), _legs(long, True), _legs(long, False))
    flat = table.reshape(places, places)
    straight = jnp.stack([0.0 * flat] * len(long)).at[-1].add(1.0)
    found = lax.cond(wanted, _found, lambda *_: straight, flat, legs)
    end = jnp.round(WHOLE * jnp.cumsum(found, axis=0)).astype(jnp.int32)
    apart = jnp.expand_dims(end.reshape(len(long), *table.shape), [1 + k for k in inside])
    return jnp.broadcast_to(apart, (len(long), *sizes, *sizes)).reshape(-1, *rows.shape)[:, back][
        :, :, back
    ]


_Parts = list[jax.Array]  # of each part, [sender, receiver]


class _Legs(NamedTuple):
    """Who crosses which link: those rows of a part do whose sender and receiver are both named.

    Attributes:
      senders: for each part, int8[hop, link, place]: the senders whose rows are so many hops along
        the axis of a link when they come to it.
      receivers: for each part, int8[hop, link, place]: the receivers for whom these then cross it.
    """

    senders: list[Any]
    receivers: list[Any]


def fits(axes: Sequence[Group]) -> bool:
    """Whether the tables of links are small beside the arrays that they are to speed up."""
    long = [axis.size for axis in axes if not axis.chip]
    return 2 * (len(long) * math.prod(long)) ** 2 * _hops(axes) <= _MOST


def _hops(axes: Sequence[Group]) -> int:
    """Hops of the longest way along one axis."""
    return max(axis.size - 1 if axis.line else axis.size // 2 for axis in axes if not axis.chip)


def _legs(axes: Sequence[Group], first: bool) -> _Legs:
    """The senders and receivers of each part whose rows cross a link; see `_Legs`."""
    at = np.indices([axis.size for axis in axes]).reshape(len(axes), -1)
    same = at[:, :, None] == at[:, None, :]  # [axis, place, place]
    shape = len(axes), _hops(axes), len(axes), 2, at.shape[1], at.shape[1]
    senders, receivers = np.zeros((2, *shape), np.int8)
    for part, axis in itertools.product(range(len(axes)), repeat=2):
        own = (part + first) % len(axes)
        order = sorted(range(len(axes)), key=lambda k: (k == own) != first)
        behind, ahead = order[: order.index(axis)], order[order.index(axis) + 1 :]
        size, line = axes[axis].size, axes[axis].line
        for hop, down in itertools.product(range(shape[1]), range(2)):
            start = at[axis] + (hop if down else -hop)  # of those at each place after so many hops
            inside = (start >= 0) & (start < size) if line else np.full(len(start), hop < size)
            rises, far = _way(start[:, None] % size, at[axis][None, :], size, line)
            crosses = inside[:, None] & (rises != bool(down)) & (far > hop)
            begins = start[:, None] % size == at[axis][None, :]
            senders[part, hop, axis, down] = same[ahead].all(0) & begins
            receivers[part, hop, axis, down] = same[behind].all(0) & crosses
    tables = (table.reshape(*shape[:2], -1, shape[-1]) for table in (senders, receivers))
    return _Legs(*map(list, tables))


def _way(start: np.ndarray, end: np.ndarray, size: int, line: bool) -> tuple[Any, Any]:
    """Whether it leads up, and how many hops: the shorter way.

    Of two that are alike it is up from even places and down from odd ones.
    """
    up, down = (end - start) % size, (start - end) % size
    rises = start < end if line else (up < down) | ((up == down) & (start % 2 == 0))
    return rises, np.where(rises, up, down)


def _found(table: jax.Array, legs: _Legs) -> jax.Array:
    """[part, sender, receiver]: the share of each axis' part, of a table of chips.

    Parts are arrays of their own, and told apart from the products: XLA then makes one pass of all
    that is done element by element, and does it once.
    """
    senders, receivers = ([part.astype(jnp.float32) for part in side] for side in legs)
    exact, count = functools.partial(jnp.einsum, precision="highest"), len(senders)

    def carried(shares: _Parts) -> jax.Array:
        """The rows that cross each link."""
        come = (exact("hls,sr->hlr", senders[k], table * shares[k]) for k in range(count))
        crossing = [of * to for of, to in zip(come, receivers, strict=True)]
        return _each(jnp.add, crossing).sum((0, 2))

    def prices(of_links: jax.Array) -> _Parts:
        """What the links on each pair's ways cost together."""
        at = of_links[:, None]
        return [exact("hls,hlr->sr", senders[k] * at, receivers[k]) for k in range(count)]

    def one(number: jax.Array, state: tuple[_Parts, ...]) -> tuple[_Parts, ...]:
        weights, speed, mean = state
        most = _each(jnp.maximum, weights)
        new = [jnp.exp(weight - most) for weight in weights]
        whole = _each(jnp.add, new)
        shares = [part / whole for part in new]
        mean = [old + _NEW * (share - old) for old, share in zip(mean, shares, strict=True)]
        both = [old + share for old, share in zip(mean, shares, strict=True)]
        links = carried(lax.optimization_barrier(both))
        price = prices((links / jnp.maximum(1.0, links.max())) ** _POWER)
        least = _each(jnp.minimum, price)
        speed = [_MOMENTUM * old + of - least for old, of in zip(speed, price, strict=True)]
        rate = _RATE / (1 + _FADE * number)
        weights = [old - rate * of for old, of in zip(weights, speed, strict=True)]
        return weights, speed, mean

    nothing = [0.0 * table] * count  # varies among devices, to JAX, as rows do
    even, straight = [of + 1 / count for of in nothing], [*nothing[1:], nothing[0] + 1]
    mean = lax.fori_loop(0, _ROUNDS, one, (nothing, nothing, even))[-1]
    pays = carried(mean).max() <= _WORTH * carried(straight).max()
    return jnp.where(pays, jnp.stack(mean), jnp.stack(straight))


def _each(join: Callable[[Any, Any], Any], parts: _Parts) -> jax.Array:
    return functools.reduce(join, parts)
