"""The devices of a torus as its kernels know them: their rings, their numbers, their blocks."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import Number, Ref
from pallas_collectives.kernels.torus.shares import Bundle, Shares
from pallas_collectives.topology.groups import Group


def axes_of(group: Group) -> tuple[Group, ...]:
    """The axes of the torus that a group lies on; one ring of all where it lies on none."""
    return group.torus or (group,)


def numbers(axes: Sequence[Group]) -> np.ndarray | None:
    """The numbers of the devices, row-major over the axes; None where they are 0, 1, ...

    That is so where the axes are a mesh's; rings with tables say it themselves.
    """
    if len(axes) == 1 or axes[0].index_groups is None:
        return None
    at = np.zeros(math.prod(axis.size for axis in axes), int)
    for axis in axes:
        at *= axis.size
        for ring in axis.index_groups or ():
            at[list(ring)] += range(axis.size)
    found = np.argsort(at)
    return None if (found == np.arange(len(found))).all() else found


def field_sizes(axes: Sequence[Group]) -> tuple[int, ...]:
    """The dimensions for the torus of an array of all blocks: one after the other if `numbers`."""
    if numbers(axes) is None:
        return tuple(axis.size for axis in axes)
    return (math.prod(axis.size for axis in axes), *(1,) * (len(axes) - 1))


def tables(axes: Sequence[Group]) -> list[jax.Array]:
    """`numbers` as a scalar operand of `launch.call`, if a kernel must be told."""
    named = numbers(axes)
    return [] if named is None else [jnp.asarray(named, jnp.int32)]


@dataclasses.dataclass(frozen=True)
class Field:
    """An array of all devices' blocks, inside a kernel, addressed by places on the torus.

    Attributes:
      plan: how blocks are cut.
      ref: the array: HBM or VMEM.
      numbers_ref: the numbers of the blocks, row-major over the torus (SMEM); None if 0, 1, ...
    """

    plan: Shares
    ref: Ref
    numbers_ref: Ref | None = None

    def for_each_piece(
        self,
        place: Sequence[Any],
        bundle: Bundle,
        section: Number,
        stream: Number,
        body: Callable[[Any, Sequence[Any]], None],
    ) -> None:
        """body(ref, place) for a stream's part of the blocks at a place: on an axis one, or None.

        None is all, as one piece where blocks are numbered row-major; else they come one by one.
        """
        numbers_ref = self.numbers_ref
        if numbers_ref is None:
            body(self.plan.piece(self.ref, place, bundle, section, stream), place)
            return
        free = [axis for axis, number in enumerate(place) if number is None]
        count = math.prod(self.plan.sizes[axis] for axis in free)

        def one(j: Number, _: None) -> None:
            here = list(place)
            for axis in reversed(free):
                here[axis] = lax.rem(j, np.int32(self.plan.sizes[axis]))
                j = lax.div(j, np.int32(self.plan.sizes[axis]))
            flat: Number = 0
            for size, number in zip(self.plan.sizes, here, strict=True):
                flat = flat * size + number
            block = [numbers_ref[flat], *(0 for _ in here[1:])]
            body(self.plan.piece(self.ref, block, bundle, section, stream), here)

        lax.fori_loop(0, count, one, None)
