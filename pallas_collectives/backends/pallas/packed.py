"""Gathers, exchanges and permutes whose kernels pack: the layout, the algorithm, the launch.

A kernel packs whole tiles (`Codec.tile`) of the operand as it lies. What lies otherwise is left to
passes of XLA around a kernel that moves what is packed (`backends.wired`): to pad it, and to cut
what comes, would take as many.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives import catalogue
from pallas_collectives.annotations import DType
from pallas_collectives.backends import algorithms, fastest
from pallas_collectives.backends.plans import How
from pallas_collectives.catalogue.records import Kernel
from pallas_collectives.kernels.machinery.blocks import LANES, sublanes, whole_shape
from pallas_collectives.kernels.machinery.codec import ROWS, Codec
from pallas_collectives.kernels.torus import sections
from pallas_collectives.kernels.torus.views import View
from pallas_collectives.topology import chips, placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire


class PackedLayout(NamedTuple):
    """An operand as a kernel sees it; a reshape that moves nothing."""

    shape: tuple[int, ...]
    axis: int  # of the collective


def _able(shape: tuple[int, ...], dtype: DType, wire: Wire) -> bool:
    """Whether rows are whole groups, of numbers that a kernel can convert."""
    if not wire.scaled or wire.group == "row" or jnp.dtype(dtype).name == "float16" or not shape:
        return False
    return shape[-1] % int(wire.group) == 0


def _in_rows(shape: tuple[int, ...], dtype: DType, wire: Wire) -> tuple[int, int] | None:
    """An operand as (rows, columns) of whole tiles; None if it does not lie so."""
    if not _able(shape, dtype, wire):
        return None
    rows, columns = Codec(wire).tile
    merged = math.prod(shape[:-1])
    if math.prod(shape) % (rows * columns):
        return None
    if merged == 1:
        return shape[-1] // columns, columns
    whole = merged % rows == 0 and shape[-2] % sublanes(dtype) == 0
    return (merged, shape[-1]) if whole else None


def _along(shape: tuple[int, ...], axis: int, dtype: DType, wire: Wire) -> PackedLayout | None:
    """How a kernel can read an operand, pack it and gather it along an axis; None if it cannot."""
    if _able(shape, dtype, wire) and sections.of_whole_tiles(shape, axis, Codec(wire)):
        return PackedLayout(shape, axis)
    seen = None if math.prod(shape[:axis]) > 1 else _in_rows(shape, dtype, wire)
    return seen and PackedLayout(seen, 0)


class Blocks(NamedTuple):
    """As `PackedLayout`, of an operand of blocks."""

    shape: tuple[int, ...]  # of a block
    split_axis: int
    concat_axis: int
    views: tuple[View, View] | None = None  # of what leaves and what comes, if as tiles in a row


def _exchanged(
    shape: tuple[int, ...], split: int, concat: int, n: int, dtype: DType, wire: Wire
) -> Blocks | None:
    """How a kernel can read an operand, pack it and exchange its blocks; None if it cannot."""
    block = (*shape[:split], shape[split] // n, *shape[split + 1 :])
    if math.prod(shape[:split]) == math.prod(block[:concat]) == 1:
        if seen := _in_rows(block, dtype, wire):
            return Blocks(seen, 0, 0)
        if not _able(block, dtype, wire):
            return None
        leaves, comes = (
            sections.of_whole_tiles(block, axis, Codec(wire)) for axis in (split, concat)
        )
        row = math.prod(block) // LANES, LANES
        return Blocks(row, 0, 0, (leaves, comes)) if leaves and comes else None
    able = max(split, concat) < len(shape) - 1 and _able(block, dtype, wire)
    return Blocks(block, split, concat) if able and block[-2] % ROWS == 0 else None


# Bytes of an operand on the way by an algorithm that packs, scales included; 0 if it cannot.


def gather_bytes(name: str, wire: Wire, *, x: jax.Array, axis: int, group: Group) -> int:
    """Bytes that a gather along an axis sends; 0 if no kernel packs it."""
    seen = _along(x.shape, axis, x.dtype, wire)
    if seen is None:
        return 0
    sent_bytes = _sent_bytes("all_gather", name)
    return sent_bytes(placement.arranged(group), *seen, x.dtype, codec=Codec(wire))


def exchange_bytes(
    name: str, wire: Wire, *, x: jax.Array, split_axis: int, concat_axis: int, group: Group
) -> int:
    """Bytes that an all-to-all sends; 0 if no kernel packs it."""
    seen = _exchanged(x.shape, split_axis, concat_axis, group.size, x.dtype, wire)
    sent_bytes = _sent_bytes("all_to_all", name)
    return sent_bytes(seen.shape, group.size, x.dtype, Codec(wire)) if seen else 0


def _sent_bytes(op: str, name: str) -> Kernel:
    """The function beside an algorithm's kernel that says what it sends."""
    algorithm = catalogue.COLLECTIVES[op].algorithm(name)
    assert algorithm is not None and isinstance(algorithm.packed, Kernel)
    return dataclasses.replace(algorithm.packed, function="sent_bytes")


def permute_bytes(
    name: str, wire: Wire, *, x: jax.Array, perm: Sequence[tuple[int, int]], group: Group
) -> int:
    """Bytes that a permute sends; 0 if no kernel packs it."""
    seen, group = _in_rows(x.shape, x.dtype, wire), placement.arranged(group)
    able = _permuting(group, perm)
    sent_bytes = Kernel("ppermute_packed", "sent_bytes")
    return sent_bytes(seen, Codec(wire)) if seen and name in able else 0


def _permuting(group: Group, perm: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """The algorithms that can serve a permutation."""
    if not placement.reaches(perm, group, chips.current()):
        return ()
    able = catalogue.COLLECTIVES["ppermute"].algorithms
    return tuple(a.name for a in able if not a.shifts_alone or fastest.is_shift(group, perm))


# Launches; `how` names the algorithm.


def all_gather(x: jax.Array, group: Group, *, axis: int, wire: Wire, how: How) -> jax.Array:
    """The group's blocks side by side along `axis`."""
    group, seen = placement.arranged(group), _along(x.shape, axis, x.dtype, wire)
    assert seen is not None, "`gather_bytes` says so"
    block = x.reshape(seen.shape)
    plan = algorithms.choose("all_gather", how, block, group)
    options = {"codec": Codec(wire), "interpret": how.interpret}
    gathered = algorithms.launch(plan, block, group, axis=seen.axis, **options)
    return gathered.reshape(whole_shape(x.shape, axis, group.size))


def all_to_all(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, wire: Wire, how: How
) -> jax.Array:
    """Block p goes to p and lands as block `me`."""
    group, n = placement.arranged(group), group.size
    seen = _exchanged(x.shape, split_axis, concat_axis, n, x.dtype, wire)
    assert seen is not None, "`exchange_bytes` says so"
    shape, result = list(seen.shape), list(x.shape)
    shape[seen.split_axis] *= n
    result[split_axis] //= n
    result[concat_axis] *= n
    blocks = (seen.views[0].into(x, (n,)) if seen.views else x).reshape(shape)
    plan = algorithms.choose("all_to_all", how, blocks, group)
    at = {"split_axis": seen.split_axis, "concat_axis": seen.concat_axis}
    options = {"codec": Codec(wire), "interpret": how.interpret}
    come = algorithms.launch(plan, blocks, group, **at, **options)
    return (seen.views[1].out_of(come, (n,)) if seen.views else come).reshape(result)


def ppermute(
    x: jax.Array, group: Group, *, perm: Sequence[tuple[int, int]], wire: Wire, how: How
) -> jax.Array:
    """Each source's x at its target, zeros elsewhere."""
    group, seen = placement.arranged(group), _in_rows(x.shape, x.dtype, wire)
    assert seen is not None, "`permute_bytes` says so"
    rows = x.reshape(seen)
    plan = algorithms.choose("ppermute", how, rows, group, perm=perm)
    options = {"codec": Codec(wire), "interpret": how.interpret}
    return algorithms.launch(plan, rows, group, perm=perm, **options).reshape(x.shape)
