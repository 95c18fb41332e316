"""Who goes where: from the experts that tokens choose to tables of both directions.

Home is the device that has a token, and away the one that has an expert of its choice. A token goes
to each such device once, as a visitor, however many of its experts are there. What describes
choices (which expert; later the weight) travels apart, as a list of words.

    home   choices   by device, token and expert: the list in which words travel
           visitors  by device and token: what travels of x
    away   arrivals  the same words, by the home they came from
           visitors  by home and token
           rows      by expert, then home, then token: what experts compute on

An exchange is ragged or dense. Ragged: blocks lie one behind the other, and only what there is
travels, from where to where everyone knows from everyone's counts. Dense: each home has as much
room for each device as it could need, so that shapes, and where things lie, are static: one
all-to-all, which NCCL can play without the host, and no counts.

What does not fit. A device has room for so many rows. Its choices are taken in the order of
homes, tokens and experts for as long as there is room, so all that follow are turned away. Each
home knows which of its own those are, by the counts of the homes before it, and sends none.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import collectives
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.moe import linear
from pallas_collectives.moe.linear import Side


class Ends(NamedTuple):
    """Both sides of a ragged exchange."""

    home: Side
    away: Side


class Plan(NamedTuple):
    """Where tokens went, and how they come back: arrays alone, so a pytree like any other.

    T tokens a device with k choices each, over n devices with L experts each; R rows.

    Attributes:
      group_sizes: int32[L]: rows of each of this device's experts, as `jax.lax.ragged_dot` has it.
      overflow: int32[]: this device's choices that did not fit where they wanted to go.
      invalid: int32[]: its choices that are no expert's number, nor -1; they count as -1.
      kept: bool[T, k]: the choices that have a row.
      leader: int32[T, k]: the first choice of the same expert by the same token, which has the row;
        k where a choice is of none.
      choices: int32[list]: home, the choice (token * k + its number) of each word; T * k for none.
      tokens: int32[visitors]: home, whose row each visitor is; T for none.
      slots: int32[T, min(k, n)]: home, its visitors; their number for none.
      visitors: int32[R]: away, the visitor in each row; their number for none.
      rows: int32[visitors, min(k, L)]: away, where it is; R for none.
      arrivals: int32[R]: away, the word of each row; their number for none.
      lists: of the words, in rows of 128; None if dense.
      visits: of the visitors; None if dense.
    """

    group_sizes: Any
    overflow: Any
    invalid: Any
    kept: Any
    leader: Any
    choices: Any
    tokens: Any
    slots: Any
    visitors: Any
    rows: Any
    arrivals: Any
    lists: Ends | None
    visits: Ends | None


@dataclasses.dataclass(frozen=True)
class Wire:
    """How a call's blocks travel.

    Attributes:
      axis_name: mesh axis, or axes.
      groups: `axis_index_groups`.
      how: the backend of the rows and words.
      backend: as the caller named it, for the counts.
    """

    axis_name: Any
    groups: Any
    how: How
    backend: str | None

    @property
    def size(self) -> int:
        """Devices that exchange."""
        if self.groups is not None:
            return len(self.groups[0])
        return int(lax.axis_size(self.axis_name))

    @property
    def me(self) -> Any:
        """This device's position among them."""
        number = lax.axis_index(self.axis_name)
        if self.groups is None:
            return number
        position = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            position[list(group)] = np.arange(len(group))
        return jnp.asarray(position)[number]

    def counts(self, mine: jax.Array) -> jax.Array:
        """Everyone's, one after the other in a new first dimension."""
        return collectives.all_gather(
            mine, self.axis_name, axis_index_groups=self.groups, backend=self.backend
        )

    def there(self, x: jax.Array, ends: Ends | None, rows: int) -> jax.Array:
        """From home to away: the one way that anything takes there. (Rows narrower on the wire
        than in memory would be made so here, and in `back`.)
        """
        return self._travel(x, ends, rows)

    def back(self, x: jax.Array, ends: Ends | None, rows: int) -> jax.Array:
        """From away to home."""
        return self._travel(x, None if ends is None else Ends(ends.away, ends.home), rows)

    def _travel(self, x: jax.Array, ends: Ends | None, rows: int) -> jax.Array:
        if ends is None:
            algorithm = self.how.algorithm or "auto"
            return collectives.all_to_all(
                x, self.axis_name, 0, 0, axis_index_groups=self.groups, tiled=True,
                backend=self.backend, algorithm=algorithm,
            )  # fmt: skip
        here, there = ends
        return linear.route(x, here, there, rows, self.axis_name, self.groups, self.how)

    def words_there(self, words: jax.Array, ends: Ends | None, size: int) -> jax.Array:
        """A list to those whom its blocks are for; `size` words of everyone's."""
        return self._words(self.there, words, ends, size)

    def words_back(self, words: jax.Array, ends: Ends | None, size: int) -> jax.Array:
        """The other way."""
        return self._words(self.back, words, ends, size)

    def _words(self, travel: Any, words: jax.Array, ends: Ends | None, size: int) -> jax.Array:
        if ends is None:
            return travel(words, None, size)
        return travel(words.reshape(-1, LANES), ends, size // LANES).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a call; attributes as in `Plan`."""

    tokens: int
    k: int
    devices: int
    experts: int  # of each device
    rows: int
    dense: bool

    @classmethod
    def of(cls, plan: "Plan", devices: int) -> "Sizes":
        """Those of the call that made a plan."""
        (tokens, k), (rows,) = plan.kept.shape, plan.visitors.shape
        experts = plan.group_sizes.shape[0]
        return cls(tokens, k, devices, experts, rows, plan.visits is None)

    @property
    def per_visit(self) -> int:
        """The most choices that a token has of one device."""
        return min(self.k, self.experts)

    @property
    def most_rows(self) -> int:
        """The most rows that a device could be asked for."""
        return self.devices * self.tokens * self.per_visit

    @property
    def block(self) -> int:
        """Dense: visitors that there is room for, for each device."""
        return min(self.tokens, self.rows)

    @property
    def list_block(self) -> int:
        """Dense: words, likewise."""
        return min(self.tokens * self.per_visit, self.rows)

    @property
    def home_list(self) -> int:
        """Words at home."""
        return self._list(self.tokens * self.k)

    @property
    def away_list(self) -> int:
        """Words away."""
        return self._list(min(self.rows, self.most_rows))

    def _list(self, words: int) -> int:
        if self.dense:
            return self.devices * self.list_block
        return _whole_rows(words + self.devices * (LANES - 1))

    @property
    def home_visitors(self) -> int:
        """Visitors at home."""
        if self.dense:
            return self.devices * self.block
        return self.tokens * min(self.k, self.devices)

    @property
    def away_visitors(self) -> int:
        """Visitors away."""
        if self.dense:
            return self.devices * self.block
        return min(self.devices * self.tokens, self.rows)


def plan(experts: jax.Array, sizes: Sizes, wire: Wire) -> Plan:
    """The plan for this device's choices, with two exchanges: of counts, and of words."""
    home = _Home.of(experts, sizes)
    lists, visits, home = _sides(home, sizes, wire)
    words = _scattered(home.list_place, home.words, sizes.home_list, 0)
    arrived = wire.words_there(words, lists, sizes.away_list)
    away = _Away.of(arrived, sizes)
    if lists is not None and visits is not None:
        lists_end = lists.away.starts * LANES + home.admitted_here
        came = away.first_up_to(lists_end) - away.first_up_to(lists.away.starts * LANES)
        visits = visits._replace(away=visits.away._replace(sizes=came))
    T, k = sizes.tokens, sizes.k
    own = _scattered(home.order, home.admitted, T * k, False).reshape(T, k)
    leads = jnp.minimum(home.leader, k - 1)
    kept = jnp.take_along_axis(own, leads, axis=1) & (home.leader < k)
    slots = _scattered(home.order, home.slot, T * k, sizes.home_visitors).reshape(T, k)
    return Plan(
        group_sizes=away.group_sizes,
        overflow=jnp.sum((home.leader < k) & ~kept, dtype=jnp.int32),
        invalid=home.invalid,
        kept=kept,
        leader=home.leader,
        choices=_scattered(home.list_place, home.order, sizes.home_list, T * k),
        tokens=_scattered(home.slot, lax.div(home.order, np.int32(k)), sizes.home_visitors, T),
        slots=jnp.sort(slots, axis=1)[:, : min(k, sizes.devices)],
        visitors=away.visitors,
        rows=away.rows,
        arrivals=away.arrivals,
        lists=lists,
        visits=visits,
    )


class _Home(NamedTuple):
    """This device's choices, in the order in which they travel: by device, token and expert.

    `order` and those behind it are int32[T * k]; choices of none, and all but the first of several
    of one expert by one token, come last, and have no place.
    """

    leader: Any  # see Plan
    invalid: Any
    order: Any  # which choice
    device: Any  # whose expert it chooses
    words: Any  # 1 + 2 * (the expert's number there) + whether it is its visitor's first
    in_block: Any  # how many choices of the same device come before it
    visitor: Any  # how many visitors to the same device come before it
    counts: Any  # int32[2, n]: choices of each device's experts; visitors to it
    admitted: Any = None  # whether there is room for it
    list_place: Any = None  # where its word lies
    slot: Any = None  # where its visitor lies, if it is its first choice
    admitted_here: Any = None  # int32[n]: how many choices of each home are admitted on this device

    @classmethod
    def of(cls, experts: jax.Array, sizes: Sizes) -> "_Home":
        T, k, n, L = sizes.tokens, sizes.k, sizes.devices, sizes.experts
        info = jnp.iinfo(experts.dtype)
        number = jnp.clip(experts, max(info.min, -2), min(info.max, n * L)).astype(jnp.int32)
        valid = (number >= 0) & (number < n * L)
        same = number[:, :, None] == number[:, None, :]
        leader = jnp.where(valid, jnp.argmax(same, axis=2), k).astype(jnp.int32)
        leads = leader == jnp.arange(k, dtype=jnp.int32)
        token = jnp.arange(T, dtype=jnp.int32)[:, None]
        device, local = lax.div(number, np.int32(L)), lax.rem(number, np.int32(L))
        key = jnp.where(leads, (device * T + token) * L + local, n * T * L).reshape(-1)
        order = jnp.argsort(key).astype(jnp.int32)
        key = key[order]
        there = key < n * T * L
        visit = lax.div(key, np.int32(L))  # device * T + token
        first = there & jnp.concatenate([jnp.ones(1, bool), visit[1:] != visit[:-1]])
        device = jnp.where(there, lax.div(visit, np.int32(T)), n)
        ends = jnp.searchsorted(device, jnp.arange(n + 1, dtype=jnp.int32)).astype(jnp.int32)
        before = _running(first)
        index = jnp.minimum(device, n - 1)
        return cls(
            leader,
            jnp.sum((number == -2) | (number == n * L), dtype=jnp.int32),
            order,
            device,
            1 + 2 * lax.rem(key, np.int32(L)) + first.astype(jnp.int32),
            jnp.arange(T * k, dtype=jnp.int32) - ends[index],
            before[:-1] - before[ends[index]],
            jnp.stack([ends[1:] - ends[:-1], before[ends[1:]] - before[ends[:-1]]]),
        )

    def placed(
        self, room: Any, list_starts: Any, visitor_starts: Any, sizes: Sizes
    ) -> tuple["_Home", jax.Array]:
        """With room for so many choices of each device; and so many visitors then go there."""
        n = sizes.devices
        index = jnp.minimum(self.device, n - 1)
        admitted = (self.device < n) & (self.in_block < room[index])
        goes = admitted & (self.words % 2 == 0)  # a word of a visitor's first choice is even
        place = jnp.where(admitted, list_starts[index] + self.in_block, sizes.home_list)
        slot = jnp.where(goes, visitor_starts[index] + self.visitor, sizes.home_visitors)
        by_device = self.device[:, None] == jnp.arange(n, dtype=jnp.int32)
        going = jnp.sum(by_device & goes[:, None], axis=0, dtype=jnp.int32)
        return self._replace(admitted=admitted, list_place=place, slot=slot), going


def _sides(home: _Home, sizes: Sizes, wire: Wire) -> tuple[Ends | None, Ends | None, _Home]:
    """Where lists and visitors lie; what visitors come is not known yet, before the words are."""
    n, me = sizes.devices, wire.me
    choices = home.counts[0]
    everyones: Any = None
    if not sizes.dense or sizes.rows < sizes.most_rows:
        everyones = wire.counts(home.counts)  # [home, 0: choices or 1: visitors, device]
        before = _exclusive(everyones[:, 0])
        admitted = jnp.clip(sizes.rows - before, 0, everyones[:, 0])
        choices = admitted[me]
    if sizes.dense:
        block = jnp.arange(n, dtype=jnp.int32)
        home, _ = home.placed(choices, block * sizes.list_block, block * sizes.block, sizes)
        return None, None, home
    rows = lax.div(admitted + (LANES - 1), np.int32(LANES))  # of words
    lists = _blocks(rows, me)
    visits = _blocks(everyones[:, 1], me)
    home, going = home.placed(choices, lists.home.starts * LANES, visits.home.starts, sizes)
    visits = visits._replace(home=visits.home._replace(sizes=going))
    return lists, visits, home._replace(admitted_here=admitted[:, me])


def _blocks(sent: jax.Array, me: Any) -> Ends:
    """Of blocks one behind the other: sent[home, device] rows each."""
    at_home, away = _exclusive(sent.T).T, _exclusive(sent)
    return Ends(
        Side(at_home[me], away[me], sent[me]), Side(away[:, me], at_home[:, me], sent[:, me])
    )


class _Away(NamedTuple):
    """What comes to this device; attributes as in `Plan`."""

    before: Any  # int32[list + 1]: visitors that came before each word
    group_sizes: Any
    visitors: Any
    rows: Any
    arrivals: Any

    @classmethod
    def of(cls, words: jax.Array, sizes: Sizes) -> "_Away":
        L, R, size = sizes.experts, sizes.rows, sizes.away_list
        there = words > 0
        expert = jnp.where(there, lax.div(words - 1, np.int32(2)), L)
        first = there & (words % 2 == 0)
        before = _running(first)
        place = jnp.arange(size, dtype=jnp.int32)
        visitor = before[1:] - 1
        if sizes.dense:
            begin = lax.div(place, np.int32(sizes.list_block))
            visitor += begin * sizes.block - before[begin * sizes.list_block]
        visitor = jnp.where(there, visitor, sizes.away_visitors)
        # Rows by expert; the sort is stable, so within it by home and token.
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        ends = jnp.searchsorted(expert[order], jnp.arange(L, dtype=jnp.int32), side="right")
        ends = ends.astype(jnp.int32)
        row = jnp.zeros(size, jnp.int32).at[order].set(place)
        nth = place - lax.cummax(jnp.where(first, place, 0))  # of its visitor's choices
        rows = jnp.full((sizes.away_visitors, sizes.per_visit), R, jnp.int32)
        rows = rows.at[visitor, nth].set(row, mode="drop")
        taken = jnp.arange(R, dtype=jnp.int32)
        arrivals = jnp.concatenate([order, jnp.full(max(0, R - size), size, jnp.int32)])[:R]
        arrivals = jnp.where(taken < ends[-1], arrivals, size)
        visitors = visitor.at[arrivals].get(mode="fill", fill_value=sizes.away_visitors)
        sizes_of = jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))
        return cls(before, sizes_of, visitors, rows, arrivals)

    def first_up_to(self, place: jax.Array) -> jax.Array:
        """How many visitors came in the words before a place."""
        return self.before[jnp.minimum(place, len(self.before) - 1)]


def _scattered(place: jax.Array, values: jax.Array, size: int, fill: Any) -> jax.Array:
    """values at their places, each of which is taken once; none beyond `size`."""
    return jnp.full(size, fill, values.dtype).at[place].set(values, mode="drop")


def _running(flags: jax.Array) -> jax.Array:
    """How many of the flags before each are set, and of all."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(flags, dtype=jnp.int32)])


def _exclusive(counts: jax.Array) -> jax.Array:
    """Sums of those before, along the first dimension."""
    return jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts


def _whole_rows(words: int) -> int:
    return -(-words // LANES) * LANES
