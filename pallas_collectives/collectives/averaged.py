"""A psum of three or more devices over a wire, whose rounding averages out over steps.

It rounds twice: what each device sends, and the sum of each block, which everyone is to have. So it
is a psum_scatter, and a gather by the device that has a block's sum: what that loses goes into the
residue of this device, and random rounding draws for it too. (1-bit Adam, arXiv:2102.02888, keeps
the errors of both steps likewise.)
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_collectives import _compat, validation, wires
from pallas_collectives.backends import canonical, wire_choice, wired
from pallas_collectives.backends.plans import How
from pallas_collectives.backends.wire_ways import EXCHANGE
from pallas_collectives.lowering import bundles, primitives, quantized
from pallas_collectives.lowering.primitives import LAX
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import Wire

Both = tuple[Any, Any]  # a sum and its residue, or None where none is asked for


class Averaged(NamedTuple):
    """Such a psum.

    Attributes:
      axis_name, groups: the devices.
      wire: with scales; with its key, if it draws.
      how: what is asked for.
      mean: whether sums are divided by the number of devices.
      residues: whether residues are asked for.
    """

    axis_name: AxisName
    groups: Groups
    wire: Wire
    how: How
    mean: bool
    residues: bool

    @property
    def serves(self) -> bool:
        """Whether anything is rounded twice; not by a wire that each step might leave out."""
        named = self.how.algorithm in (None, EXCHANGE) and not self.wire.optional
        sent = quantized.are_sent(self.axis_name, self.groups, quantized.FLAT)
        return named and self.wire.scaled and sent and self._devices > 2

    @property
    def _devices(self) -> int:
        return validation.devices_of(self.axis_name, self.groups)

    def sums(self, x: Any, otherwise: Callable[[Any], Both]) -> Both:
        """The sums of a tree of arrays, small ones of which travel together, and their residues.

        otherwise: the same of an array of which nothing is sent, or that no wire takes.
        """
        leaves, tree = jax.tree.flatten(x)
        sent = [i for i, leaf in enumerate(leaves) if self._sends(leaf)]
        arrays = validation.varying([leaves[i] for i in sent], self.axis_name)
        number = itertools.count()

        def reduced(x: jax.Array, how: How) -> Both:
            key = None if self.wire.key is None else jax.random.fold_in(self.wire.key, next(number))
            total, residue = self._reduced(x, key, how)
            return total / self._devices if self.mean else total, residue

        found = dict(zip(sent, bundles.reduced(reduced, arrays, self.how, ()), strict=True))
        both = [found.get(i) or otherwise(leaf) for i, leaf in enumerate(leaves)]
        totals, residues = ([pair[i] for pair in both] for i in range(2))
        return jax.tree.unflatten(tree, totals), jax.tree.unflatten(tree, residues)

    def _sends(self, leaf: Any) -> bool:
        sent = quantized.FLAT.send(leaf) and not validation.symbols([leaf])
        return sent and not wires.obstacle(self.wire, leaf.dtype)

    def _reduced(self, x: jax.Array, key: jax.Array | None, how: How) -> Both:
        """Those of one array; differentiated as one sum is."""

        @jax.custom_jvp
        def both(x: jax.Array, key: jax.Array | None) -> Both:
            return self._in_two(x, key, how)

        @both.defjvp
        def moved(primals: Any, tangents: Any) -> tuple[Both, Both]:
            total, residue = both(*primals)
            tangent = primitives.with_twins(
                how.differentiated,
                lambda x: LAX.psum(x, self.axis_name, axis_index_groups=self.groups),
                tangents[0],
            )
            return (total, residue), (_like(tangent, total), jax.tree.map(_zeros, residue))

        return both(x, key)

    def _in_two(self, x: jax.Array, key: jax.Array | None, of: How) -> Both:
        group = canonical.group_of(self.axis_name, self.groups)
        blocks, how = wired.in_blocks(x, of, group.size), dataclasses.replace(of, pieces=())
        sent = group.size * wires.packed_bytes(blocks.shape[1:], self.wire)
        wire_choice.lost("all_reduce", x, sent, self.wire)
        by_block = quantized.Groups(0, group.size, flat=True)
        sums, residue = self._step(LAX.psum_scatter, blocks, by_block, how, key, 0)
        # As lax types a sum: as equal everywhere, where types are told at all.
        to = "invarying" if _compat.varying(x) >= set(group.axes) else "varying"
        how = dataclasses.replace(how, algorithm=None, order=None)
        total, lost = self._step(LAX.all_gather, sums, quantized.WHOLE, how, key, 1, to=to)
        if self.residues:
            own = residue[group.position] + lost
            residue = lax.dynamic_update_index_in_dim(residue, own, group.position, 0)
        both = total, residue
        return jax.tree.map(functools.partial(wired.out_of_blocks, shape=x.shape, how=of), both)

    def _step(
        self,
        by_lax: Callable[..., Any],
        x: jax.Array,
        groups: quantized.Groups,
        how: How,
        key: jax.Array | None,
        number: int,
        **options: Any,
    ) -> Both:
        """One collective of x, and what this device's x loses."""
        wire = self.wire
        if key is not None:
            wire = dataclasses.replace(wire, key=jax.random.fold_in(key, number))
        over = wire, self.axis_name, self.groups, groups
        given = quantized.sent(x, *over, how)
        got = primitives.with_twins(
            how,
            lambda x: by_lax(x, self.axis_name, axis_index_groups=self.groups, **options),
            given,
        )
        return got, quantized.residue(x, given, *over, how) if self.residues else None


def _zeros(x: jax.Array) -> jax.Array:
    return _like(jnp.zeros_like(x), x)


def _like(x: jax.Array, of: jax.Array) -> jax.Array:
    """x, typed as different where another array is."""
    return _compat.as_varying(x, _compat.varying(of))
