"""Canonical collectives on Pallas kernels: the layout, the algorithm, the launch."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives.backends import algorithms, nested, ordered
from pallas_collectives.backends.layout import blocks, side_by_side
from pallas_collectives.backends.pallas import packing
from pallas_collectives.backends.pallas.reductions import all_reduce as all_reduce
from pallas_collectives.backends.pallas.reductions import reduce_scatter as reduce_scatter
from pallas_collectives.backends.pallas.reductions import requantized_reduce as requantized_reduce
from pallas_collectives.backends.pallas.reductions import (
    requantized_scatter as requantized_scatter,
)
from pallas_collectives.backends.plans import How, KernelPlan
from pallas_collectives.errors import ReachError
from pallas_collectives.kernels.machinery import spaces
from pallas_collectives.kernels.machinery.blocks import LANES, sliceable
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group

_KEPT_SMEM = 64 << 10  # of scalar memory, for the compiler


def all_gather(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The group's blocks side by side along `axis`.

    Blocks whose size along `axis` is a whole number of tiles are written to their place; others
    are gathered along a new leading dimension, and moved to their place by XLA: one more pass.
    """
    group = placement.arranged(group)
    packed, added = packing.pack(x)
    axis += added
    aligned = sliceable(packed.shape[axis], axis, packed.ndim, packed.dtype)
    aligned = aligned and packed.size > 1
    block = packed if aligned else packed.reshape(1, *_at_least_2d(packed.shape))
    block, along = spaces.widened(block), axis if aligned else 0
    plan = algorithms.choose("all_gather", how, block, group)
    gathered = algorithms.launch(plan, block, group, axis=along, interpret=how.interpret)
    if not aligned:
        stack = _of_widened(gathered, packed).reshape(group.size, *packed.shape)
        gathered = side_by_side(stack, axis)
    return packing.unpack(gathered, x.dtype)


def all_to_all(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, how: How
) -> jax.Array:
    """Block p along `split_axis` goes to device p; what comes lies side by side on `concat_axis`.

    Blocks that are whole tiles along both axes are read and written in place. Along an axis where
    they are not, they go through a new leading dimension instead, at one more pass by XLA.
    """
    group = placement.arranged(group)
    packed, added = packing.pack(x)
    split, concat = split_axis + added, concat_axis + added
    block = list(packed.shape)
    block[split] //= group.size
    splits, joins = (
        sliceable(block[axis], axis, packed.ndim, packed.dtype) for axis in (split, concat)
    )
    # What must be moved XLA moves too, but of rows of whole lanes no more than is needed.
    in_place = (splits and joins) or x.shape[-1] % LANES == 0
    packing.check_in_place("all_to_all", x, how, in_place)
    if splits and joins:
        operand, split_at, concat_at = packed, split, concat
    elif splits:
        operand, split_at, concat_at = packed[None], split + 1, 0
    else:
        stack = blocks(packed, split, group.size)
        operand = stack.reshape(group.size, *_at_least_2d(stack.shape[1:]))
        split_at, concat_at = 0, concat + 1 if joins else 0
    plan = algorithms.choose("all_to_all", how, operand, group)
    at = {"split_axis": split_at, "concat_axis": concat_at}
    y = algorithms.launch(plan, operand, group, **at, interpret=how.interpret)
    if not joins:
        y = side_by_side(y.reshape(group.size, *block), concat)
    elif not splits:
        y = y[0]
    return packing.unpack(y, x.dtype)


def ragged_all_to_all(
    operand: jax.Array, output: jax.Array, tables: Sequence[jax.Array], group: Group, *, how: How
) -> jax.Array:
    """The slices of rows that everyone sends, in their places in `output`.

    Arrays of three or more dimensions whose last is whole lanes of 128 are read and written in
    place. For others, whose rows DMAs cannot address one by one, rows are padded to whole lanes,
    and all are moved: one more pass over either operand and the result. For ring and line the
    tables of sizes and offsets are gathered first.
    """
    group = placement.arranged(group)
    plan = algorithms.choose("ragged_all_to_all", how, operand, group)
    rows, rows_init = packing.rows_of(operand), packing.rows_of(output)
    begin, sizes, targets, expected = map(_as_int32, tables)
    _check_tables(plan, sizes.size, group)
    if plan.record.takes_everyones:
        given = [*_tables_of_all(jnp.stack([sizes, targets]), group, how)]
    else:
        if how.interpret:
            from pallas_collectives.backends.pallas import received  # for simulated devices alone

            most = min(len(operand), len(output))
            expected = received.checked(sizes, expected, most, group)
        given = [sizes, targets, expected]
    y = algorithms.launch(plan, rows, rows_init, begin, *given, group, interpret=how.interpret)
    return packing.from_rows(y, output)


def _check_tables(plan: KernelPlan, entries: int, group: Group) -> None:
    """Raises ReachError where a kernel's tables of so many slices do not fit scalar memory."""
    given = 2 * group.size + 1 if plan.record.takes_everyones else 4
    chip, needed = chips.current(), 4 * entries * max(given, plan.record.tables(group))
    if needed > (most := chip.smem_bytes - _KEPT_SMEM):
        raise ReachError(
            f"ragged_all_to_all by {plan.algorithm!r} over {group.size} devices with "
            f"{entries // group.size} slices each",
            f"its sizes and offsets take {needed / 1024:.1f} KiB of scalar memory, and "
            f"{chip.name} has {most >> 10} KiB for them",
            "use fewer devices or slices, or leave backend and algorithm to be chosen: lax then "
            "serves",
        )


def _tables_of_all(tables: jax.Array, group: Group, how: How) -> jax.Array:
    """Tables (k, entries) of all devices, side by side: (k, n * entries)."""
    options: dict[str, Any] = {"axis": 1, "tiled": True, "axis_index_groups": group.index_groups}
    gather = functools.partial(lax.all_gather, axis_name=group.axes, **options)
    return nested.run(dataclasses.replace(how, algorithm=None), gather, tables)


def ppermute(
    x: jax.Array, group: Group, *, perm: tuple[tuple[int, int], ...], how: How
) -> jax.Array:
    """Each source's x at its target, zeros elsewhere."""
    packed, _ = packing.pack(x)
    plan = algorithms.choose("ppermute", how, packed, group, perm=perm)
    rows = spaces.widened(packed.reshape(_at_least_2d(packed.shape)))
    y = algorithms.launch(plan, rows, group, perm=perm, interpret=how.interpret)
    return packing.unpack(_of_widened(y, packed).reshape(packed.shape), x.dtype)


def _as_int32(x: jax.Array) -> jax.Array:
    """Integers of any type as int32; those beyond it become its largest or smallest."""
    of, to = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.clip(x, max(of.min, to.min), min(of.max, to.max)).astype(jnp.int32)


def _at_least_2d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (2 - len(shape)) + shape


def _of_widened(y: jax.Array, x: jax.Array) -> jax.Array:
    """What a kernel made of `spaces.widened(x)`, with x's own last dimension again."""
    return y[..., :1] if x.size == 1 else y


ordered.exchanges["pallas"] = sys.modules[__name__]
