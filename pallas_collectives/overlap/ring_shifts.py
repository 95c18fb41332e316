"""Ring shifts: how a pipeline passes blocks along an axis, and where results lie."""

import functools
from typing import Any

import jax
from jax import lax

from pallas_collectives import _compat, validation
from pallas_collectives.annotations import Number
from pallas_collectives.overlap import split
from pallas_collectives.topology import groups
from pallas_collectives.validation import AxisName

Ways = tuple[int, ...]


class Ring:
    """The devices along an axis, seen by one of them, and how blocks pass between them.

    Attributes:
      size: how many there are.
      me: own number.
    """

    def __init__(self, axis_name: AxisName, backend: str | None, algorithm: str | None) -> None:
        self.size = validation.size_of(axis_name)
        self.me = lax.axis_index(axis_name)
        self._axis_name = axis_name
        self._how = {"backend": backend, "algorithm": algorithm}

    def rounds(self, bidirectional: bool) -> tuple[Ways, int, Ways]:
        """The directions of blocks, their number of hops, and those with one hop more.

        On an even ring, both ways round, the opposite device's block comes from the left only.
        """
        if self.size == 1:
            return (), 0, ()
        if not bidirectional or self.size == 2:
            return (groups.RIGHT,), self.size - 1, ()
        far = () if self.size % 2 else (groups.RIGHT,)
        return (groups.RIGHT, groups.LEFT), (self.size - 1) // 2, far

    def at(self, offset: Number) -> Number:
        """The number of the device `offset` positions to the right."""
        return groups.wrap(self.me + offset, self.size)

    def start(self, block: Any, offset: int) -> split.Started:
        """Starts to send a block `offset` positions to the right."""
        perm = [(source, (source + offset) % self.size) for source in range(self.size)]
        return split.ppermute_start(block, self._axis_name, perm, **self._how)

    def send(self, block: Any, offset: int) -> Any:
        """Sends a block `offset` positions to the right; returns what comes from the left."""
        return self.start(block, offset).done()

    def relay(self, block: Any, way: int, distance: Number, furthest: int) -> split.Started:
        """`start` over a distance of up to `furthest`, which may be known only at run time.

        A permutation is part of the program, so a block goes such a distance by powers of two, one
        for each of its bits. The distance is the same on all devices.
        """
        if isinstance(distance, int):
            return self.start(block, way * distance)
        for power in (1 << bit for bit in range(furthest.bit_length())):
            by_power = functools.partial(self.send, offset=way * power)
            block = lax.cond(distance & power != 0, by_power, lambda block: block, block)
        return split.Started.of(block)

    def varying(self, tree: Any) -> Any:
        """Arrays typed as different on every device, as received arrays are."""
        return validation.varying(tree, self._axis_name)


class Places:
    """The places of each device's results in the whole."""

    def __init__(self, ring: Ring, axis: int, tiled: bool) -> None:
        self._ring, self._axis, self._tiled = ring, axis, tiled

    def room(self, results: Any) -> Any:
        """Arrays with room for the results of all devices, of whatever values."""
        for leaf, where in validation.leaves(results):
            validation.check_axis("axis", self._axis, leaf.ndim + (not self._tiled), where)
        return jax.tree.map(self._room, results)

    def lay(self, results: Any, source: Number, whole: Any) -> Any:
        """Writes the results for device `source` to their place."""
        return jax.tree.map(lambda leaf, to: self._lay(leaf, source, to), results, whole)

    def _room(self, leaf: jax.Array) -> jax.Array:
        block, axis = self._block(leaf)
        shape = [self._ring.size if d == axis else 1 for d in range(block.ndim)]
        shape = [size * count for size, count in zip(block.shape, shape, strict=True)]
        return _compat.as_varying(_compat.empty(tuple(shape), block.dtype), _compat.varying(block))

    def _lay(self, leaf: jax.Array, source: Number, whole: jax.Array) -> jax.Array:
        block, axis = self._block(leaf)
        return lax.dynamic_update_slice_in_dim(whole, block, source * block.shape[axis], axis)

    def _block(self, leaf: jax.Array) -> tuple[jax.Array, int]:
        axis = self._axis % (leaf.ndim + (not self._tiled))
        return (leaf if self._tiled else lax.expand_dims(leaf, (axis,))), axis
