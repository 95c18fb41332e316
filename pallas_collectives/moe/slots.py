"""Tokens to slots, and answers home: linear maps that hold the tables of either direction.

    arrive(x, note, tables)    x's rows to the devices that want them, row r of device p to slot
                               p * rows + r, and everyone's notes with them
    there(x, tables)           the same, where tables are known on both sides already
    back(y, tables)            what has been made of slots, home, and added up for each row of x

`there` is `back` backwards, and the other way round. Slots that nobody sends to hold anything.

Each goes by a kernel that sends row by row (`kernels.visits`), if the chip reaches all devices of
one slice, rows are few, and that loads the links less than what stands in for it: `all_gather`,
which fills all slots, and home `ragged_all_to_all`, of rows that are laid out in blocks before.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad

from pallas_collectives import _compat
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import Dim, Tangent
from pallas_collectives.backends import canonical, counters, slices, wired
from pallas_collectives.backends.pallas import packing
from pallas_collectives.backends.plans import How, Plan
from pallas_collectives.kernels import visits
from pallas_collectives.kernels.machinery import entry
from pallas_collectives.lowering import placed, remat
from pallas_collectives.moe import exchanges, linear
from pallas_collectives.moe.linear import Side, alike
from pallas_collectives.topology import chips, placement, reach
from pallas_collectives.topology.groups import Group
from pallas_collectives.validation import AxisName, Groups


class Tables(NamedTuple):
    """Which rows go where; T tokens a device, each to m of n devices at the most.

    Attributes:
      tokens: int32[T * m]: home, whose row each visitor is, by device; T for none.
      places: int32[T, m]: home, the visitors of each token; T * m for none.
      order: int32[n * T]: away, the slot of each visitor, by home; n * T for none.
      ranks: int32[n * T]: away, of each slot its place in `order`; n * T for none.
      home: where visitors begin in `tokens`.
      away: where they begin in `order`.
    """

    tokens: Any
    places: Any
    order: Any
    ranks: Any
    home: Side
    away: Side


# The rows that leave, where each receiver's begin, and how many they are.
Listed = tuple[jax.Array, jax.Array, jax.Array]


class Ways(NamedTuple):
    """Between whom, and how: parameters of the primitives here.

    Attributes:
      axis_name: mesh axis, or axes.
      groups: `axis_index_groups`.
      how: the backend.
      visited: to how many other devices a token is expected to go.
    """

    axis_name: AxisName
    groups: Groups
    how: How
    visited: float

    @property
    def differentiated(self) -> "Ways":
        """Those of derivatives."""
        return self._replace(how=self.how.differentiated)

    @property
    def once_more_mapped(self) -> "Ways":
        """Those under one more vmap."""
        return self._replace(how=self.how.once_more_mapped)

    @property
    def group(self) -> Group:
        """The devices, as they lie on the links."""
        return placement.arranged(canonical.group_of(self.axis_name, self.groups))

    def by_kernel(self, slots: int, listed: int, group: Group) -> str:
        """Why rows do not go one by one; "" if they do."""
        if self.how.backend != "pallas":
            return f"{self.how.backend} has no kernel for rows one by one"
        if slots > exchanges.FEW or not visits.fits(listed, group.size, noted=True):
            return "rows are many, and each would take a DMA"
        chip = chips.current()
        if not placement.reaches(reach.everyone(group), group, chip):
            return f"{chip.name} cannot write to all devices"
        return slices.obstacle(group, self.how.across)


def arrive(
    x: jax.Array, note: jax.Array, tokens: jax.Array, home: Side, ways: Ways
) -> tuple[jax.Array, jax.Array]:
    """(n * T, ...) slots, and int32[n, words]: everyone's note. To be held by `held`.

    Args:
      x: (T, ...): the rows.
      note: int32[words], whole lanes: in front home.sizes, padded to `visits.head_lanes`.
      tokens: as in `Tables`.
      home: as in `Tables`.
      ways: between whom, and how.
    """
    operands = alike(lax.stop_gradient(x), note, tokens, home.starts, home.sizes)
    visitors, notes = _arrive_p.bind(*operands, ways=ways)
    return visitors, notes


def held(x: jax.Array, visitors: jax.Array, tables: Tables, ways: Ways) -> jax.Array:
    """What has arrived of x, with the derivative of `there`."""
    return _held(x, visitors, tables, ways)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _held(x: jax.Array, visitors: jax.Array, tables: Tables, ways: Ways) -> jax.Array:
    del x, tables, ways
    return visitors


@_held.defjvp
def _held_jvp(ways: Ways, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    x, visitors, tables = primals
    return _held(x, visitors, tables, ways), there(tangents[0], tables, ways.differentiated)


def there(x: jax.Array, tables: Tables, ways: Ways) -> jax.Array:
    """(T, ...) -> (n * T, ...) slots."""
    return _slots_p.bind(*alike(x, *jax.tree.leaves(tables)), back=False, ways=ways)


def back(y: jax.Array, tables: Tables, ways: Ways) -> jax.Array:
    """(n * T, ...) slots -> (T, ...): what came home for each token, added up by device."""
    return _slots_p.bind(*alike(y, *jax.tree.leaves(tables)), back=True, ways=ways)


# Lowering -----------------------------------------------------------------------------------------


def _tables(leaves: Sequence[jax.Array]) -> Tables:
    tokens, places, order, ranks, *ends = leaves
    return Tables(tokens, places, order, ranks, Side(*ends[:3]), Side(*ends[3:]))


def arrived(
    x: jax.Array,
    note: jax.Array,
    tokens: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    *,
    ways: Ways,
) -> tuple[jax.Array, jax.Array]:
    """What `arrive` is lowered to."""
    group = ways.group
    slots = len(x) * group.size
    why = ways.by_kernel(slots, len(tokens), group)
    if not why and exchanges.gathers_on(group, ways.visited):
        why = "the links carry less if everyone gets all tokens"
    if why:
        plain = dataclasses.replace(ways.how, wire=None, wire_backward=None)
        told = linear.to_everyone(note, ways.axis_name, ways.groups, plain)
        come = linear.to_everyone(x, ways.axis_name, ways.groups, ways.how)
        return come, told.reshape(group.size, -1)
    notes: list[jax.Array] = []

    def move(rows: jax.Array) -> jax.Array:
        come, told = _sent(rows, (tokens, starts, sizes), slots, group, ways.how, note=note)
        notes.append(told)
        return come

    visitors = _over_wire(x, slots, group, ways.how, move)
    _note("slots, with choices")
    return visitors, notes[0]


def moved(x: jax.Array, *leaves: jax.Array, back: bool, ways: Ways) -> jax.Array:
    """What `there` and `back` are lowered to."""
    tables, group = _tables(leaves), ways.group
    n, tokens = group.size, len(tables.places)
    slots = n * tokens
    why = ways.by_kernel(slots, slots if back else len(tables.tokens), group)
    if not back:
        if why or exchanges.gathers_on(group, ways.visited):
            return linear.to_everyone(x, ways.axis_name, ways.groups, ways.how)
        home, come = tables.home, tables.away.sizes

        def move(rows: jax.Array) -> jax.Array:
            listed = tables.tokens, home.starts, home.sizes
            return _sent(rows, listed, slots, group, ways.how, come=come)[0]

        _note("slots")
        return _over_wire(x, slots, group, ways.how, move)
    visitors, away = len(tables.tokens), tables.away
    if why:
        blocks = linear.gather_sum(x, tables.order[:, None], tables.ranks[:, None])
        here = ways.axis_name, ways.groups, ways.how
        come = linear.route(blocks, away, tables.home, visitors, *here, filled=False)
    else:

        def move(rows: jax.Array) -> jax.Array:
            listed = tables.order, away.starts, away.sizes
            known = {"landings": away.landings, "come": tables.home.sizes}
            return _sent(rows, listed, visitors, group, ways.how, **known)[0]

        _note("slots, back")
        come = _over_wire(x, visitors, group, ways.how, move)
    return linear.gather_sum(come, tables.places, tables.tokens[:, None])


def _sent(
    x: jax.Array, listed: Listed, rows: int, group: Group, how: How, **known: Any
) -> tuple[jax.Array, ...]:
    """As `visits.send`, for arrays of any shape."""
    with entry.in_slices(functools.partial(slices.slices, axes=how.across)):
        come, *notes = visits.send(
            packing.rows_of(x), *listed, rows, group, **known, interpret=how.interpret
        )
    return packing.from_rows(come, x), *notes


def _over_wire(
    x: jax.Array, rows: int, group: Group, how: How, move: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """move(x), (rows, ...), as narrower numbers if so wanted, each row with its scales behind."""
    if how.wire is None:
        return move(x)
    by = types.SimpleNamespace(ragged_all_to_all=lambda packed, *_, how: move(packed))
    blank = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return wired.OnWire(by).ragged_all_to_all(x, blank, (), group, how=how)


def _note(way: str) -> None:
    why = "rows are few: each goes by itself, and no counts ahead"
    counters.note(Plan(op="moe", backend="pallas", algorithm=way, why=why))


# Primitives ---------------------------------------------------------------------------------------

_slots_p = linear.new_primitive("moe_slots")
_arrive_p = core.Primitive("moe_arrive")
_arrive_p.multiple_results = True
remat.register(_arrive_p)


@_slots_p.def_effectful_abstract_eval
def _slots_type(*avals: Aval, back: bool, ways: Ways) -> tuple[Aval, frozenset[Any]]:
    tokens = avals[2].shape[0]
    rows = tokens if back else tokens * linear.devices_of(ways.axis_name, ways.groups)
    return linear.typed(moved, rows, avals, {"back": back, "ways": ways}, ways.how)


@_arrive_p.def_effectful_abstract_eval
def _arrive_type(*avals: Aval, ways: Ways) -> tuple[tuple[Aval, Aval], frozenset[Any]]:
    x, note = avals[:2]
    n = linear.devices_of(ways.axis_name, ways.groups)
    aval, effects = linear.typed(arrived, n * x.shape[0], avals, {"ways": ways}, ways.how)
    return (aval, note.update(shape=(n, *note.shape), weak_type=False)), effects


def _slots_transpose(
    ct: Tangent, x: ad.UndefinedPrimal, *tables: jax.Array, back: bool, ways: Ways
) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval()), *[None] * len(tables)]
    come = _slots_p.bind(*alike(ct, *tables), back=not back, ways=ways.differentiated)
    return [come, *[None] * len(tables)]


def _slots_batch(args: Sequence[jax.Array], dims: Sequence[Dim], **params: Any) -> tuple[Any, Any]:
    if all(dim is None for dim in dims[1:]):
        return linear.batch_of_rows(_slots_p, args, dims[0], **params)
    outs = [_slots_p.bind(*each, **params) for each in _each(args, dims)]
    return jnp.stack(outs), 0


def _arrive_batch(args: Sequence[jax.Array], dims: Sequence[Dim], **params: Any) -> tuple[Any, Any]:
    outs = [_arrive_p.bind(*each, **params) for each in _each(args, dims)]
    return [jnp.stack(parts) for parts in zip(*outs, strict=True)], [0, 0]


def _each(args: Sequence[jax.Array], dims: Sequence[Dim]) -> list[list[Any]]:
    """The operands of each element of a batch: an exchange has one set of tables."""
    size, front = linear.in_front(args, dims)
    return [[a[i] for a in front] for i in range(size)]


_compat.register(_slots_p, transpose=_slots_transpose, batch_alone=_slots_batch)
_compat.register(_arrive_p, batch_alone=_arrive_batch)
placed.register(_slots_p, moved)
placed.register(_arrive_p, arrived)
