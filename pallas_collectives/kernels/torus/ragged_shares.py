"""Which share of each pair's rows takes which axis of a torus for its last, by what links carry.

A part of an axis goes over all other axes, the first one first, and along its own at the end (see
`ragged_spread`). What is best for one pair depends on what all the others do, so shares are found
in rounds, by multiplicative weights: each round puts all rows on the links, prices each link by how
busy it is beside the busiest, and takes weight from the parts that cross dear links. Of all rounds
the shares count whose busiest link has least to carry; where that is not much less than if all
went straight, all goes straight.

Every device does these sums on the same tables in the same program, and so finds the same shares.
Of each link they need no list of pairs: on its way along an axis, a part is where its receiver is
on the axes behind it, and where its sender is on those ahead. So what crosses a ring is a sum of
the table over the dimensions that do not say which ring it is, nor from where to where along it.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.kernels.torus import devices
from pallas_collectives.topology.groups import Group

WHOLE = 256  # shares are told in such parts of one
# Tried on Zipf's and the worst skew on v5p:4x4x4, 7x:4x4x2 and v6e:4x4: links then carry at most 6%
# more than by the best shares.
_ROUNDS, _POWER, _RATE, _FADE, _MOMENTUM = 12, 8, 2.0, 0.4, 0.3
_WORTH = 0.9  # of the busiest link's rows, what is left at the most where parts pay


def ends(rows: jax.Array, axes: Sequence[Group]) -> jax.Array:
    """int32[axes, n, n]: where the part of each axis ends in a pair's rows, in parts of `WHOLE`.

    Args:
      rows: [sender, receiver].
      axes: of the torus, the devices of a chip as well; these have no part.
    """
    sizes, numbers = [axis.size for axis in axes], devices.numbers(axes)
    chips = [k for k, axis in enumerate(axes) if axis.chip]
    long = [axis for axis in axes if not axis.chip]
    at = np.arange(len(rows)) if numbers is None else numbers
    table = rows.astype(jnp.float32)[at][:, at].reshape(*sizes, *sizes)
    inside = [*chips, *(k + len(sizes) for k in chips)]
    found = _found(table.sum(inside), long)
    end = jnp.round(WHOLE * jnp.cumsum(found, axis=0)).astype(jnp.int32)
    apart = jnp.expand_dims(end, [1 + k for k in inside])
    back = np.argsort(at)
    return jnp.broadcast_to(apart, (len(long), *sizes, *sizes)).reshape(-1, *rows.shape)[:, back][
        :, :, back
    ]


def _found(table: jax.Array, axes: Sequence[Group]) -> jax.Array:
    """[axis, *senders, *receivers]: the share of each axis' part, of a table of chips."""
    crossed = [jnp.asarray(_crossed(axis.size, axis.line)).astype(jnp.float32) for axis in axes]
    straight = jnp.zeros((len(axes), *table.shape)).at[-1].set(1.0)

    def one(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights, speed, least, best = state
        shares = jax.nn.softmax(weights, axis=0)
        links = _links(table * shares, crossed)
        busiest = _most(links)
        prices = [(carried / jnp.maximum(1.0, busiest)) ** _POWER for carried in links]
        price = _prices(prices, crossed, table.shape)
        speed = _MOMENTUM * speed + price - price.min(axis=0)
        best = jnp.where(busiest < least, shares, best)
        weights -= _RATE / (1 + _FADE * number) * speed
        return weights, speed, jnp.minimum(least, busiest), best

    nothing = jnp.zeros_like(straight)
    worth = _WORTH * _most(_links(table * straight, crossed))
    return lax.fori_loop(0, _ROUNDS, one, (nothing, nothing, worth, straight))[-1]


def _most(links: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([carried.max() for carried in links]).max()


def _legs(count: int) -> dict[tuple[int, int], tuple[str, str]]:
    """Of each part and axis: the letters of a table of pairs, and of the rings along the axis.

    Small ones are for where the sender is, capitals for where the receiver is; a ring's are those
    of its place on the other axes, then of both ends along it.
    """
    senders = "abcdef"[:count]
    receivers, found = senders.upper(), {}
    for part in range(count):
        order = [*(axis for axis in range(count) if axis != part), part]
        for step, axis in enumerate(order):
            behind = order[:step]
            place = [receivers[k] if k in behind else senders[k] for k in range(count) if k != axis]
            found[part, axis] = (
                senders + receivers,
                "".join(place) + senders[axis] + receivers[axis],
            )
    return found


def _links(parts: jax.Array, crossed: Sequence[jax.Array]) -> list[jax.Array]:
    """For each axis [rings, links of one]: the rows that cross each."""
    legs, found = _legs(len(crossed)), []
    for axis, of_axis in enumerate(crossed):
        along = [
            jnp.einsum("->".join(legs[part, axis]), parts[part]) for part in range(len(crossed))
        ]
        rings = sum(along[1:], along[0]).reshape(-1, len(of_axis))
        found.append(jnp.dot(rings, of_axis, precision="highest"))
    return found


def _prices(
    prices: Sequence[jax.Array], crossed: Sequence[jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """[part, *senders, *receivers]: what the links on the way cost together."""
    count, legs = len(crossed), _legs(len(crossed))
    found = [jnp.zeros(shape)] * count
    for axis, of_axis in enumerate(crossed):
        of_ends = jnp.dot(prices[axis], of_axis.T, precision="highest")
        for part in range(count):
            table, ring = legs[part, axis]
            lengths = [shape[table.index(letter)] for letter in ring]
            turn = sorted(range(len(ring)), key=lambda k: table.index(ring[k]))
            missing = [k for k, letter in enumerate(table) if letter not in ring]
            turned = of_ends.reshape(lengths).transpose(turn)
            found[part] = found[part] + jnp.expand_dims(turned, missing)
    return jnp.stack(found)


def _crossed(size: int, line: bool) -> np.ndarray:
    """int32[size * size, 2 * size]: 1 where what goes from one place to another crosses a link.

    Links: those that lead up from each place, then those that lead down. Ways are the shorter ones;
    of two that are alike it is up from even places and down from odd ones.
    """
    found = np.zeros((size, size, 2, size), np.int32)
    for start, end in itertools.permutations(range(size), 2):
        up, down = (end - start) % size, (start - end) % size
        rises = start < end if line else up < down or (up == down and start % 2 == 0)
        for hop in range(up if rises else down):
            found[start, end, int(not rises), (start + (hop if rises else -hop)) % size] = 1
    return found.reshape(size * size, 2 * size)
