"""Who goes where: from the experts that tokens choose to tables of both directions.

Home is the device that has a token, and away the one that has an expert of its choice. A token goes
to each such device once, as a visitor, however many of its experts are there. Which of them it
comes for, and later with what weight, travels apart: a word for each choice.

    home   words     by device, token and expert
           visitors  by device and token: what travels of x
    away   words     the same, by the home they come from
           visitors  by home and token
           rows      by expert, then home, then token: what experts compute on

An exchange is ragged or dense, or by slots (`exchanges` chooses). Ragged: blocks lie one behind the
other, and only what there is travels, from where to where all know from everyone's counts. Dense:
everyone gets everyone's tokens and choices, and picks: static shapes that NCCL plays without the
host, and no counts. With many choices and few devices that is little more; `explain` has the
figures. By slots: everyone gets everyone's choices, in one kernel with the tokens that it is to
have (`slots`); each token has a place of its own there, the same as if all came, so that the plan
is the dense one, and nothing waits for counts.

What does not fit. A device has room for so many rows. Choices are taken in the order of homes,
tokens and experts for as long as there is room, so all that follow are turned away. Each home knows
which of its own those are, from the counts of the homes before it, and sends none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import Number
from pallas_collectives.kernels import visits
from pallas_collectives.kernels.machinery.blocks import LANES
from pallas_collectives.moe import slots
from pallas_collectives.moe.linear import Side
from pallas_collectives.moe.slots import Tables
from pallas_collectives.moe.wire import Ends, Ragged, Sizes, Wire

# Of words that are counted rather than sorted: those of a block are compared with each other.
_IN_A_BLOCK = (32, 64, 128, 256)
_MOST_COMPARISONS = 1 << 25


class TokenPlan(NamedTuple):
    """Where tokens went, and how they come back: arrays alone, so a pytree like any other.

    T tokens a device with k choices each, over n devices with L experts each; R rows.

    Attributes:
      group_sizes: int32[L]: rows of each of this device's experts, as `jax.lax.ragged_dot` has it.
      overflow: int32[]: this device's choices that did not fit where they wanted to go.
      invalid: int32[]: its choices that are no expert's number, nor -1; they count as -1.
      kept: bool[T, k]: the choices that have a row.
      leader: int32[T, k]: the first choice of the same expert by the same token, which has the row;
        k where a choice is of none.
      visitors: int32[R]: away, the visitor in each row; their number for none.
      rows: int32[visitors, min(k, L)]: away, where each is; R for none.
      words: int32[R]: away, the word of each row; their number for none.
      tables: what an exchange needs besides; None for a dense one.
    """

    group_sizes: jax.Array
    overflow: jax.Array
    invalid: jax.Array
    kept: jax.Array
    leader: jax.Array
    visitors: jax.Array
    rows: jax.Array
    words: jax.Array
    tables: Ragged | Tables | None

    def sizes(self, devices: int) -> Sizes:
        """Those of the call that made it."""
        (tokens, k), (rows,) = self.kept.shape, self.visitors.shape
        experts = self.group_sizes.shape[0]
        kinds = {Ragged: "ragged", Tables: "slots"}
        exchange = kinds.get(type(self.tables), "dense")
        return Sizes(tokens, k, devices, experts, rows, exchange)


def with_visitors(
    x: jax.Array, experts: jax.Array, sizes: Sizes, wire: Wire
) -> tuple[TokenPlan, jax.Array]:
    """The plan for this device's choices; and what has come by it of everyone's x."""
    if sizes.exchange == "slots":
        return _by_slots(x, experts, sizes, wire)
    if sizes.exchange == "ragged":
        plan, tables = _ragged(experts, sizes, wire)
        return plan, wire.there(x, tables, sizes.away_visitors)
    started = wire.start(x)
    everyones = wire.everyones(started.before(experts))
    every = jax.vmap(lambda own: _Choices.of(own, sizes))(everyones)
    plan = _of_everyones(every, sizes, wire.me)
    return plan, started.done(after=plan)


def _by_slots(
    x: jax.Array, experts: jax.Array, sizes: Sizes, wire: Wire
) -> tuple[TokenPlan, jax.Array]:
    """By one exchange: of everyone's choices, with the tokens."""
    n, T, k, me = sizes.devices, sizes.tokens, sizes.k, wire.me
    numbers = _numbers(experts, sizes)
    own = _Choices.of(numbers, sizes)
    sent = own.counts[1]
    starts = _exclusive(sent)
    goes = own.nth == 0
    goes &= own.device < n
    place = starts[jnp.minimum(own.device, n - 1)] + own.visitor
    place = jnp.where(goes, place, sizes.home_visitors)
    token = lax.div(jnp.arange(T * k, dtype=jnp.int32), np.int32(k))
    tokens = _scattered(place, token, sizes.home_visitors, T)
    head = visits.head_lanes(n)
    words = head + -(-T * k // LANES) * LANES
    note = jnp.concatenate([jnp.pad(sent, (0, head - n)), numbers.reshape(-1)])
    note = jnp.pad(note, (0, words - len(note)))
    ways = wire.ways(sizes)
    visitors, notes = slots.arrive(x, note, tokens, Side(starts, starts, sent), ways)

    everyones = notes[:, head : head + T * k].reshape(n, T, k)
    every = jax.vmap(lambda own: _Choices.of(own, sizes))(everyones)
    ends = _blocks(every.counts[:, 1], me)
    came = (every.device == me) & (every.nth == 0)
    rank = jnp.where(came, ends.away.starts[:, None, None] + every.visitor, n * T)
    slot = jnp.broadcast_to(jnp.arange(n * T, dtype=jnp.int32).reshape(n, T, 1), rank.shape)
    tables = Tables(
        tokens=tokens,
        places=jnp.sort(place, axis=1)[:, : min(k, n)],
        order=_scattered(rank, slot, n * T, n * T),
        ranks=jnp.min(rank, axis=2).reshape(-1),
        home=ends.home,
        away=ends.away,
    )
    plan = _of_everyones(every, sizes, me)._replace(tables=tables)
    return plan, slots.held(x, visitors, tables, ways)


def _of_everyones(every: "_Choices", sizes: Sizes, me: jax.Array) -> TokenPlan:
    """The plan by everyone's choices: those of each home, one after the other."""
    n, T = sizes.devices, sizes.tokens
    # [home, device]; where there is room for all, nothing is counted.
    room = None if sizes.rows >= sizes.most_rows else _room(every.counts[:, 0], sizes)
    admitted = jax.vmap(_Choices.admitted)(every, room)
    there = admitted & (every.device == me)
    visitor = jnp.arange(n * T, dtype=jnp.int32).reshape(n, T, 1)
    expert = jnp.where(there, every.local, sizes.experts)
    visitor = jnp.broadcast_to(visitor, there.shape)
    away = _Away.of(expert.reshape(-1), visitor.reshape(-1), every.nth.reshape(-1), sizes)
    own = jax.tree.map(lambda a: a[me], every)
    return _plan(own, admitted[me], away, None)


def _ragged(experts: jax.Array, sizes: Sizes, wire: Wire) -> tuple[TokenPlan, Ragged]:
    """By two exchanges: of counts, and of words."""
    n, T, k, me = sizes.devices, sizes.tokens, sizes.k, wire.me
    own = _Choices.of(experts, sizes)
    everyones = wire.everyones(own.counts)  # [home, 0: choices or 1: visitors, device]
    room = _room(everyones[:, 0], sizes)
    admitted = own.admitted(room[me])
    goes = admitted & (own.nth == 0)
    lists = _blocks(lax.div(room + (LANES - 1), np.int32(LANES)), me)  # in rows of words
    coming_to = _blocks(everyones[:, 1], me)

    # Home: where each choice's word lies, and each visitor.
    device = jnp.minimum(own.device, n - 1)
    place = jnp.where(admitted, lists.home.starts[device] * LANES + own.in_block, sizes.home_words)
    slot = jnp.where(goes, coming_to.home.starts[device] + own.visitor, sizes.home_visitors)
    choice = jnp.arange(T * k, dtype=jnp.int32)
    word = 1 + 2 * own.local + (own.nth == 0).astype(jnp.int32)  # even: a visitor's first
    words = _scattered(place, word, sizes.home_words, 0)
    leaving = (own.device[:, :, None] == jnp.arange(n, dtype=jnp.int32)[None, None]) & goes[
        :, :, None
    ]
    leaving = jnp.sum(leaving, axis=(0, 1), dtype=jnp.int32)

    # Away: of each word its visitor, and which of its visitor's choices it is.
    arrived = wire.words_there(words, lists, sizes.away_words)
    first = (arrived > 0) & (arrived % 2 == 0)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(first, dtype=jnp.int32)])
    at = jnp.arange(sizes.away_words, dtype=jnp.int32)
    nth = at - lax.cummax(jnp.where(first, at, 0))
    local = jnp.where(arrived > 0, lax.div(arrived - 1, np.int32(2)), sizes.experts)
    away = _Away.of(local, before[1:] - 1, nth, sizes)
    begin = jnp.minimum(lists.away.starts * LANES, sizes.away_words)
    coming = before[jnp.minimum(begin + room[:, me], sizes.away_words)] - before[begin]

    home, here = coming_to.home._replace(sizes=leaving), coming_to.away._replace(sizes=coming)
    of_token = jnp.sort(slot, axis=1)[:, : min(k, n)]
    tokens = _scattered(slot, lax.div(choice, np.int32(k)), sizes.home_visitors, T)
    choices = _scattered(place, choice, sizes.home_words, T * k)
    tables = Ragged(choices, tokens, of_token, lists, Ends(home, here))
    return _plan(own, admitted, away, tables), tables


def _plan(own: "_Choices", admitted: jax.Array, away: "_Away", tables: Ragged | None) -> TokenPlan:
    k = own.leader.shape[1]
    valid = own.leader < k
    kept = jnp.take_along_axis(admitted, jnp.minimum(own.leader, k - 1), axis=1) & valid
    overflow = jnp.sum(valid & ~kept, dtype=jnp.int32)
    return TokenPlan(away.group_sizes, overflow, own.invalid, kept, own.leader, *away[1:], tables)


class _Choices(NamedTuple):
    """A home's choices, int32[T, k] each if not said; leaders (see TokenPlan) count."""

    leader: jax.Array  # see TokenPlan
    invalid: jax.Array  # int32[]: see TokenPlan
    device: jax.Array  # whose expert it is; n for none, and for those that do not lead
    local: jax.Array  # the expert's number there
    nth: jax.Array  # which it is, by expert, of its token's choices of the same device
    in_block: jax.Array  # which it is of all of this home's choices of the same device
    visitor: jax.Array  # which its token is of this home's visitors to the same device
    counts: jax.Array  # int32[2, n]: choices of each device's experts; visitors to it

    @classmethod
    def of(cls, experts: jax.Array, sizes: Sizes) -> "_Choices":
        k, n, L = sizes.k, sizes.devices, sizes.experts
        number = _numbers(experts, sizes)
        valid = (number >= 0) & (number < n * L)
        same = number[:, :, None] == number[:, None, :]
        leader = jnp.where(valid, jnp.argmax(same, axis=2), k).astype(jnp.int32)
        leads = leader == jnp.arange(k, dtype=jnp.int32)[None]
        device = jnp.where(leads, lax.div(number, np.int32(L)), n)
        earlier = (device[:, :, None] == device[:, None, :]) & (
            number[:, None, :] < number[:, :, None]
        )
        nth = jnp.sum(earlier & leads[:, None, :], axis=2, dtype=jnp.int32)
        by_device = device[:, :, None] == jnp.arange(n, dtype=jnp.int32)[None, None]
        each = jnp.sum(by_device, axis=1, dtype=jnp.int32)  # [token, device]
        visits = (each > 0).astype(jnp.int32)
        index = jnp.minimum(device, n - 1)
        earlier_each, earlier_visits = (
            jnp.take_along_axis(_exclusive(of_token), index, axis=1) for of_token in (each, visits)
        )
        return cls(
            leader,
            jnp.sum((number == -2) | (number == n * L), dtype=jnp.int32),
            device,
            lax.rem(jnp.maximum(number, 0), np.int32(L)),
            nth,
            earlier_each + nth,
            earlier_visits,
            jnp.stack([each.sum(0, dtype=jnp.int32), visits.sum(0, dtype=jnp.int32)]),
        )

    def admitted(self, room: jax.Array | None) -> jax.Array:
        """bool[T, k]: the choices that there is room for: for so many of each device's, or all."""
        n = self.counts.shape[1]
        if room is None:
            return self.device < n
        return (self.device < n) & (self.in_block < room[jnp.minimum(self.device, n - 1)])


def _numbers(experts: jax.Array, sizes: Sizes) -> jax.Array:
    """int32: the numbers of experts; those of none as -1, -2 or E, whatever they are."""
    info, last = jnp.iinfo(experts.dtype), sizes.devices * sizes.experts
    return jnp.clip(experts, max(info.min, -2), min(info.max, last)).astype(jnp.int32)


def _room(choices: jax.Array, sizes: Sizes) -> jax.Array:
    """How many of each home's choices of each device there are rows for: [home, device]."""
    return jnp.clip(sizes.rows - _exclusive(choices), 0, choices)


def _blocks(sent: jax.Array, me: jax.Array) -> Ends:
    """The ends of blocks of sent[home, device] rows that lie one behind the other."""
    at_home, away = _exclusive(sent.T).T, _exclusive(sent)
    home = Side(at_home[me], away[me], sent[me])
    return Ends(home, Side(away[:, me], at_home[:, me], sent[:, me]))


class _Away(NamedTuple):
    """The rows of this device; attributes as in `TokenPlan`."""

    group_sizes: jax.Array
    visitors: jax.Array
    rows: jax.Array
    words: jax.Array

    @classmethod
    def of(cls, expert: jax.Array, visitor: jax.Array, nth: jax.Array, sizes: Sizes) -> "_Away":
        """The tables from each word's expert (L: none), its visitor and its choice's number."""
        L, R, size = sizes.experts, sizes.rows, sizes.away_words
        row, group_sizes = _by_expert(expert, L)
        order = jnp.zeros(size, jnp.int32).at[row].set(jnp.arange(size, dtype=jnp.int32))
        visitor = jnp.where(expert < L, visitor, sizes.away_visitors)
        rows = jnp.full((sizes.away_visitors, sizes.per_visit), R, jnp.int32)
        rows = rows.at[visitor, nth].set(row, mode="drop")
        words = jnp.concatenate([order, jnp.full(max(0, R - size), size, jnp.int32)])[:R]
        words = jnp.where(jnp.arange(R) < jnp.sum(group_sizes), words, size)
        visitors = visitor.at[words].get(mode="fill", fill_value=sizes.away_visitors)
        return cls(group_sizes, visitors, rows, words)


def _scattered(place: jax.Array, values: jax.Array, size: int, fill: Number) -> jax.Array:
    """values at their places, which differ; those beyond `size` are dropped."""
    filled = jnp.full(size, fill, values.dtype)
    return filled.at[place.reshape(-1)].set(values.reshape(-1), mode="drop")


def _by_expert(expert: jax.Array, L: int) -> tuple[jax.Array, jax.Array]:
    """(row of each word, int32[words]; words of each expert, int32[L]).

    Rows are by expert, and within it as the words are; those of no expert, L, are last.

    Counted, not sorted, where comparisons of some words with each other and of all with the experts
    are few: on an H200 that takes a third of the time of XLA's sort of 16384.
    """
    size, kinds = expert.shape[0], jnp.arange(L + 1, dtype=jnp.int32)
    known = isinstance(size, int)  # and not a symbol, in `jax.export`
    each = min(_IN_A_BLOCK, key=lambda each: _comparisons(size, L, each)) if known else 0
    if not known or _comparisons(size, L, each) > _MOST_COMPARISONS:
        order = jnp.argsort(expert, stable=True)
        row = jnp.zeros(size, jnp.int32).at[order].set(jnp.arange(size, dtype=jnp.int32))
        return row, jnp.sum(expert[:, None] == kinds[None, :L], axis=0, dtype=jnp.int32)
    blocks = jnp.pad(expert, (0, -size % each), constant_values=L).reshape(-1, each)
    is_of = blocks[:, :, None] == kinds[None, None]
    counts = jnp.sum(is_of, axis=1, dtype=jnp.int32)  # [block, expert]
    of_all = jnp.sum(counts, axis=0, dtype=jnp.int32)
    before = _sum_before(of_all)[None] + _sum_before(counts)
    first = jnp.sum(jnp.where(is_of, before[:, None, :], 0), axis=2, dtype=jnp.int32)
    same = blocks[:, :, None] == blocks[:, None, :]
    rank = jnp.sum(same & _earlier(each)[None], axis=2, dtype=jnp.int32)
    return (first + rank).reshape(-1)[:size], of_all[:L]


def _comparisons(size: int, L: int, each: int) -> int:
    blocks = -(-size // each)
    return size * (each + 2 * L) + blocks * blocks * L


def _earlier(size: int) -> jax.Array:
    """bool[size, size]: whether the second is before the first."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    return numbers[None, :] < numbers[:, None]


def _sum_before(counts: jax.Array) -> jax.Array:
    """As `_exclusive`, in one pass over all pairs: for few."""
    pairs = _earlier(len(counts)).reshape(len(counts), len(counts), *[1] * (counts.ndim - 1))
    return jnp.sum(jnp.where(pairs, counts[None], 0), axis=1, dtype=jnp.int32)


def _exclusive(counts: jax.Array) -> jax.Array:
    """Sums of those before, along the first dimension."""
    return jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
