"""How a call's tokens, words and answers travel: the one place where anything goes on the wire.

Tokens and answers may be narrower there than in memory (`How.wire`); words and weights never are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import collectives, validation
from pallas_collectives.backends import flights
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.moe import exchanges, linear, slots
from pallas_collectives.moe.linear import Side
from pallas_collectives.moe.slots import Tables, Ways
from pallas_collectives.overlap import split
from pallas_collectives.overlap.started import Started
from pallas_collectives.validation import AxisName, Groups

# Bytes of a device's tokens from which copy engines take them, outside CUDA graphs.
_BESIDE_BYTES = 4 << 20


class Ends(NamedTuple):
    """Both sides of a ragged exchange."""

    home: Side
    away: Side


class Ragged(NamedTuple):
    """What a ragged exchange needs; T tokens with k choices each, n devices.

    Attributes:
      choices: int32[words]: home, the choice (token * k + its number) of each word; T * k for none.
      tokens: int32[visitors]: home, whose row each visitor is; T for none.
      slots: int32[T, min(k, n)]: home, the visitors of each token; their number for none.
      lists: the exchange of words, in rows of 128.
      visits: the exchange of visitors.
    """

    choices: jax.Array
    tokens: jax.Array
    slots: jax.Array
    lists: Ends
    visits: Ends


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a call.

    Attributes:
      tokens: T, of each device.
      k: choices of each token.
      devices: n.
      experts: L, of each device.
      rows: R, that each device has room for.
      exchange: one of `exchanges.EXCHANGES`.
    """

    tokens: int
    k: int
    devices: int
    experts: int
    rows: int
    exchange: str

    @property
    def static(self) -> bool:
        """Whether visitor home * T + token is that token, whoever comes; else they lie in a row."""
        return self.exchange != "ragged"

    @property
    def per_visit(self) -> int:
        """The most choices that a token has of one device."""
        return min(self.k, self.experts)

    @property
    def most_rows(self) -> int:
        """The most rows that a device could be asked for."""
        return self.devices * self.tokens * self.per_visit

    @property
    def home_words(self) -> int:
        """Words in the list at home; every block of it begins a new row of lanes."""
        return self._whole_rows(self.tokens * self.k)

    @property
    def away_words(self) -> int:
        """Words in the list away."""
        if self.static:
            return self.devices * self.tokens * self.k
        return self._whole_rows(min(self.rows, self.most_rows))

    def _whole_rows(self, words: int) -> int:
        return -(-(words + self.devices * (LANES - 1)) // LANES) * LANES

    @property
    def home_visitors(self) -> int:
        """Visitors that leave a device; unless dense."""
        return self.tokens * min(self.k, self.devices)

    @property
    def away_visitors(self) -> int:
        """Visitors that come to a device."""
        everyone = self.devices * self.tokens
        return everyone if self.static else min(everyone, self.rows)


@dataclasses.dataclass(frozen=True)
class Wire:
    """The devices of a call, and how they exchange.

    Attributes:
      axis_name: mesh axis, or axes.
      groups: `axis_index_groups`.
      how: what serves the exchange of rows.
      backend: as the caller named it, for small things.
    """

    axis_name: AxisName
    groups: Groups
    how: How
    backend: str | None

    @property
    def size(self) -> int:
        """Devices that exchange."""
        if self.groups is not None:
            return len(self.groups[0])
        return int(lax.axis_size(self.axis_name))

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each of the axes; of a group, its own number."""
        if self.groups is not None:
            return (self.size,)
        shape = jax.sharding.get_abstract_mesh().shape
        return tuple(shape[axis] for axis in validation.named(self.axis_name))

    @property
    def me(self) -> jax.Array:
        """This device's position among them."""
        number = lax.axis_index(self.axis_name)
        if self.groups is None:
            return number
        position = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            position[list(group)] = np.arange(len(group))
        return jnp.asarray(position)[number]

    def everyones(self, small: jax.Array) -> jax.Array:
        """What each device has, in a new first dimension."""
        return collectives.all_gather(
            small, self.axis_name, axis_index_groups=self.groups, backend=self.backend
        )

    def ways(self, sizes: Sizes) -> Ways:
        """How tokens go to slots, and come back."""
        visited = exchanges.visits(sizes.devices, sizes.devices * sizes.experts, sizes.k)
        return Ways(self.axis_name, self.groups, self.how, visited)

    def start(self, x: jax.Array) -> Started:
        """Starts to send everyone's (T, D) to all: the (n * T, D) that comes.

        Large ones by copy engines where those serve, beside what else is computed.
        """
        if self._copied(x.nbytes):
            return split.all_gather_start(x, **self._tiled)
        return Started.of(linear.to_everyone(x, self.axis_name, self.groups, self.how))

    def _copied(self, nbytes: int) -> bool:
        """Whether copy engines carry so many bytes for each device of a dense exchange."""
        how = self.how
        plain = how.wire is None and how.wire_backward is None
        return plain and nbytes >= _BESIDE_BYTES and flights.in_place(how)

    @property
    def _tiled(self) -> dict[str, Any]:
        to = {"axis_name": self.axis_name, "axis_index_groups": self.groups}
        return to | {"tiled": True, "backend": self.backend}

    def there(self, x: jax.Array, ragged: Ragged, visitors: int) -> jax.Array:
        """From home: the (visitors, D) that come to this device, if ragged."""
        leaving = linear.gather_sum(x, ragged.tokens[:, None], ragged.slots)
        return self._route(leaving, ragged.visits, visitors, self.how, filled=False)

    def back(self, answers: jax.Array, tables: Ragged | Tables | None, sizes: Sizes) -> jax.Array:
        """From away: (T, D), what came back for each token, added up."""
        if tables is None:
            if self._copied(answers.nbytes // sizes.devices):
                return split.psum_scatter_start(answers, **self._tiled).done()
            return linear.from_everyone(answers, self.axis_name, self.groups, self.how)
        if isinstance(tables, Tables):
            return slots.back(answers, tables, self.ways(sizes))
        ends = Ends(tables.visits.away, tables.visits.home)
        home = self._route(answers, ends, len(tables.tokens), self.how, filled=False)
        return linear.gather_sum(home, tables.slots, tables.tokens[:, None])

    def weights_there(self, weights: jax.Array, tables: Any, words: int) -> jax.Array:
        """(T, k) of the choices at home, in the list of words away."""
        if not isinstance(tables, Ragged):
            if weights.dtype.itemsize > 4:  # whose derivative no kernel adds: devices do
                plain = dataclasses.replace(self._plain, algorithm=None)
                return linear.to_everyone(weights, self.axis_name, self.groups, plain).reshape(-1)
            return self.everyones(weights).reshape(-1)
        listed = weights.reshape(-1).at[tables.choices].get(mode="fill", fill_value=0)
        return self.words_there(listed, tables.lists, words)

    def words_there(self, words: jax.Array, lists: Ends, size: int) -> jax.Array:
        """The list of words away, of a size, by that at home."""
        lanes, rows = words.reshape(-1, LANES), size // LANES
        return self._route(lanes, lists, rows, self._plain, filled=True).reshape(-1)

    @property
    def _plain(self) -> How:
        """What serves words and weights, which are never narrower."""
        return dataclasses.replace(self.how, wire=None, wire_backward=None)

    def _route(self, x: jax.Array, ends: Ends, rows: int, how: How, *, filled: bool) -> jax.Array:
        """Only rows that arrived are read, except of words, where a zero stands for no word."""
        return linear.route(x, *ends, rows, self.axis_name, self.groups, how, filled=filled)
