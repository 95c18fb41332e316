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
from pallas_collectives.topology.groups import Group, unraveled


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
        """body(ref, inside) for a stream's part of the blocks at a place: see `Shares.blocks`.

        They come as one piece where blocks are numbered row-major, else one by one; `inside` is
        their place among those at `place`.
        """
        numbers_ref = self.numbers_ref
        if numbers_ref is None:
            body(self.plan.piece(self.ref, place, bundle, section, stream), [None] * len(place))
            return
        spans = [self.plan.span(axis, number) for axis, number in enumerate(place)]
        free = [axis for axis, span in enumerate(spans) if span.size > 1]

        def one(j: Number, _: None) -> None:
            inside: list[Any] = [0] * len(place)
            for axis, number in zip(free, unraveled(j, [spans[k].size for k in free]), strict=True):
                inside[axis] = number
            flat: Number = 0
            for size, span, number in zip(self.plan.sizes, spans, inside, strict=True):
                flat = flat * size + span.start + number
            block = [numbers_ref[flat], *(0 for _ in place[1:])]
            body(self.plan.piece(self.ref, block, bundle, section, stream), inside)

        lax.fori_loop(0, math.prod(span.size for span in spans), one, None)
