"""Gathers whose kernels pack: the layout, the algorithm, the launch.

A kernel packs whole tiles (`Codec.tile`) of the operand as it lies. What lies otherwise is left to
passes of XLA around a kernel that moves what is packed (`backends.wired`): to pad it, and to cut
what comes, would take as many.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_collectives.annotations import DType
from pallas_collectives.backends import algorithms
from pallas_collectives.backends.plans import How
from pallas_collectives.kernels.machinery.blocks import sublanes
from pallas_collectives.kernels.machinery.codec import Codec
from pallas_collectives.kernels.torus import all_gather_packed
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire


class Layout(NamedTuple):
    """An operand as a kernel sees it; a reshape that moves nothing."""

    shape: tuple[int, ...]
    axis: int  # of the collective


def codec_of(wire: Wire) -> Codec:
    """How numbers travel that are quantised once: within the bound of `wires.error_bound`."""
    return Codec(wire, precise=True)


def layout(shape: tuple[int, ...], axis: int, dtype: DType, wire: Wire) -> Layout | None:
    """How a kernel can read an operand, pack it and gather it along an axis; None if it cannot."""
    if not wire.scaled or wire.group == "row" or jnp.dtype(dtype).name == "float16" or not shape:
        return None
    rows, columns = codec_of(wire).tile
    if shape[-1] % columns:
        return None
    if len(shape) > 1 and axis < len(shape) - 1 and shape[-2] % rows == 0:
        return Layout(shape, axis)
    if math.prod(shape[:axis]) > 1 or math.prod(shape) % (rows * columns):
        return None
    if math.prod(shape[:-1]) == 1:
        return Layout((shape[-1] // columns, columns), 0)
    merged = math.prod(shape[:-1])
    whole = axis < len(shape) - 1 and shape[-2] % sublanes(dtype) == 0 and merged % rows == 0
    return Layout((merged, shape[-1]), 0) if whole else None


def sent_bytes(name: str, x: jax.Array, axis: int, group: Group, wire: Wire) -> int:
    """Bytes of an operand on the way by an algorithm of a gather that packs; 0 if it cannot."""
    seen = layout(x.shape, axis, x.dtype, wire)
    if seen is None:
        return 0
    of: Any = {"codec": codec_of(wire), "lies": all_gather_packed.LIES[name]}
    return all_gather_packed.sent_bytes(placement.arranged(group), *seen, x.dtype, **of)


def all_gather(x: jax.Array, group: Group, *, axis: int, wire: Wire, how: How) -> jax.Array:
    """The group's blocks side by side along `axis`, by an algorithm that packs: `how` names it."""
    group, seen = placement.arranged(group), layout(x.shape, axis, x.dtype, wire)
    assert seen is not None, "`sent_bytes` says so"
    block = x.reshape(seen.shape)
    plan = algorithms.choose("all_gather", how, block, group)
    options = {"codec": codec_of(wire), "interpret": how.interpret}
    gathered = plan.launch(block, group, axis=seen.axis, **options)
    return gathered.reshape(*x.shape[:axis], group.size * x.shape[axis], *x.shape[axis + 1 :])
