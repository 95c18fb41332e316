"""Exchanges under way over a wire: packed bytes fly, and derivatives beside them as they are.

What sets out is quantised where the exchange starts and read where it is done, by kernels of one
pass where `gpu_codec` serves, else by passes of XLA. The bits are those of the whole call (but for
stacked results, whose groups it has along the new dimension), whose derivatives pass straight
through, too. Integers have none: so floats go beside them from a start to its end, zeros that XLA
takes away, whose tangents are an exchange of their own.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import _compat, wires
from pallas_collectives.backends import flights, nccl_packed, ordered, wired
from pallas_collectives.backends.flights import Flight
from pallas_collectives.wires import Wire

Arrays = tuple[jax.Array, ...]


class Packed(NamedTuple):
    """An exchange over a wire.

    Attributes:
      flight: of what is packed.
      wire: rounding to nearest.
      dtype: of what comes.
      adds: whether it is the sum of the blocks that come, in float32.
    """

    flight: Flight
    wire: Wire
    dtype: np.dtype
    adds: bool

    def start(self, x: jax.Array, *after: jax.Array) -> tuple[tuple[Arrays, Arrays], jax.Array]:
        """Starts it once x, floats, and `after` are there: what `done` takes, and a token."""
        packed = self._packed(self._blocks(wires.overflown(lax.stop_gradient(x), self.dtype)))
        operand = packed if self.flight.op == "exchange" else packed[0]
        under_way, token = flights.start(self.flight, operand, *after)
        return (tuple(under_way), tuple(flights.beside(self.flight, x))), token

    def done(self, started: tuple[Arrays, Arrays], *after: jax.Array) -> jax.Array:
        """What came of it, or the sum, waited for once `after` is there."""
        return _come(self, *started, tuple(map(lax.stop_gradient, after)))  # that moves nothing

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.flight.blocks(x.shape))

    def _by_kernels(self, blocks: jax.Array) -> bool:
        return wired.on_gpus(blocks, self.wire, self.flight.op, self.flight.group)

    def _packed(self, blocks: jax.Array) -> jax.Array:
        """What travels of blocks (k, ...): (k, ...)."""
        if not self.wire.scaled:
            return blocks.astype(self.wire.dtype)
        if self._by_kernels(blocks):
            packed = nccl_packed.packed_of(blocks, self.wire)
            return _compat.as_varying(packed, _compat.varying(blocks))  # kernels know no types
        return wires.pack(*wires.quantize(blocks, self.wire))

    def read(self, come: jax.Array, x: jax.Array) -> jax.Array:
        """What has come, or its sum; of an operand like x."""
        blocks = self._blocks(x)
        block, come = blocks.shape[1:], come[None] if self.flight.op == "permute" else come
        if self.wire.scaled and self._by_kernels(blocks):
            numbers = nccl_packed.read(come, blocks, self.wire, self.dtype, adds=self.adds)
            numbers = _compat.as_varying(numbers, _compat.varying(come))
            return numbers.reshape(self._shape(x.shape, block))
        terms = jnp.float32 if self.adds else self.dtype
        if not self.wire.scaled:
            numbers = come.astype(terms)
        else:
            numbers = wires.dequantize(*wires.unpack(come, block, self.wire), terms)
        if self.adds:
            numbers = wires.saturated(numbers, x.dtype, terms) if self.wire.scaled else numbers
            numbers = ordered.added(numbers, self.flight.group.size, 0)[0].astype(self.dtype)
        return numbers.reshape(self._shape(x.shape, block))

    def _shape(self, operand: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what comes, or of its sum."""
        if self.adds:
            return block
        return (self.flight.group.size, *operand) if self.flight.op == "gather" else operand


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _come(packed: Packed, under_way: Arrays, beside: Arrays, after: Arrays) -> jax.Array:
    come = flights.done(packed.flight, under_way, *after)
    return packed.read(come, lax.stop_gradient(beside[1]))


@_come.defjvp
def _come_jvp(
    packed: Packed, primals: Sequence[Arrays], tangents: Sequence[Arrays]
) -> tuple[jax.Array, jax.Array]:
    moved = flights.done(packed.flight.differentiated, tangents[1])
    if packed.adds:
        moved = ordered.added(moved, packed.flight.group.size, 0)[0]
    return _come(packed, *primals), moved.astype(packed.dtype)
