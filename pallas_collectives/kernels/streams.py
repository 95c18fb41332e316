"""The streams of a ring, where which one it is shows in the kernel only."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.annotations import Flag, Number, Ref
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.topology.groups import Ring, Stream, wrap_step


class Streams:
    """The streams of a ring, by a number known only in the kernel."""

    def __init__(self, ring: Ring, streams: tuple[Stream, ...]) -> None:
        self.ring = ring
        self.count = len(streams)
        self.chunks = streams[0].chunks
        self.hops = max(stream.hops for stream in streams)
        self.near = streams[0].near  # hops of every chunk, on each stream
        self._streams = streams

    def of(self, stream: Number, value: Callable[[Stream], int]) -> Number:
        """A stream's value."""
        values = [value(each) for each in self._streams]
        return values[0] if len(set(values)) == 1 else jnp.where(stream == 0, values[0], values[1])

    def hops_of(self, stream: Number, chunk: Number) -> Number:
        """How many hops a chunk travels on a stream."""
        start, stop = self.of(stream, lambda s: s.far[0]), self.of(stream, lambda s: s.far[1])
        is_far = (start <= chunk) & (chunk < stop)
        return self.of(stream, lambda each: each.near) + as_int(is_far)

    def downstream(self, stream: Number, chunk: Number, distance: Number) -> Number:
        """The position `distance` hops downstream; negative: upstream, from where blocks come."""
        return self.ring_of(chunk).block(self._direction(stream) * distance)

    def ring_of(self, chunk: Number) -> Ring:
        """The ring that a chunk goes round: of two, each has half of those of either side."""
        if not self.ring.several:
            return self.ring
        return self.ring.of_number(ring_number(chunk, self.chunks))

    def channel(
        self,
        semaphores: channels.Semaphores,
        stream: Number,
        chunk: Number,
        slots: tuple[Ref, tuple[Number, ...]] | None = None,
    ) -> Channel:
        """That of a chunk on a stream."""
        index = stream, chunk
        return Channel(
            self.ring_of(chunk),
            self._direction(stream),
            semaphores,
            index,
            arrivals=self.hops_of(stream, chunk),
            longest=self.hops,
            slots=slots,
        )

    def for_each(self, active: Callable[[Number], Any], body: Callable[[Number], None]) -> None:
        """body(stream) for every stream that is active; where any is, the last or the first is."""
        first, last = (as_int(active(i)) for i in (0, self.count - 1))
        stop = first if self.count == 1 else self.count - 1 + last
        lax.fori_loop(1 - first, stop, lambda stream, _: body(stream), None)

    def first(self, active: Callable[[Number], Any]) -> Number:
        """The first of the streams that are active."""
        return 0 if self.count == 1 else 1 - as_int(active(0))

    def follows(self, stream: Number, active: Callable[[Number], Any]) -> Flag:
        """Whether another stream is active behind this one."""
        return jnp.asarray(False) if self.count == 1 else (stream == 0) & active(1)

    def in_turn(self, index: Number) -> Number:
        """The chunk at an index in the order in which chunks are seen to.

        The opposite device's chunks come from either side: one from here, one from there.
        """
        half = self.chunks // 2
        if self.chunks < 2 or self._streams[0].far[1] in (0, self.chunks):
            return index
        return lax.div(index, np.int32(2)) + lax.rem(index, np.int32(2)) * half

    def furthest(self, stream: Number, index: Number) -> Number:
        """A stream's chunk at an index: those of the opposite device go before all others."""
        return lax.rem(self.of(stream, lambda each: each.far[0]) + index, np.int32(self.chunks))

    def _direction(self, stream: Number) -> Number:
        return self.of(stream, lambda each: each.direction)


def ring_number(chunk: Number, chunks: int) -> Number:
    """Which of a core's two rings a chunk of so many goes round.

    In the order of `Streams.in_turn` 0, 1, 1, 0, ...: and half of those that come from either side.
    """
    half = chunks // 2
    return wrap_step(chunk + as_int(chunk >= half) * (half + 1), 2) if half else 0


def as_int(flag: Any) -> Number:
    """1 where it holds, else 0."""
    return int(flag) if isinstance(flag, bool) else flag.astype(np.int32)
