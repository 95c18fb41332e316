"""Boxes of a buffer: which elements a view covers."""

from __future__ import annotations

from pallas_collectives.replay.program import at
from pallas_collectives.replay.views import Buffer, View, dense_dims

# Per dimension of the buffer (start, size).
Box = tuple[tuple[int, int], ...]


def whole(buffer: Buffer) -> Box:
    """All of a buffer."""
    return tuple((0, n) for n in buffer.shape)


def box_of(view: View, position: int) -> Box:
    """The smallest box of the buffer's own dimensions that holds the view on one lane.

    Exact for slices with stride 1; for a reshaped view whose dimensions straddle the buffer's,
    whole rows of the first dimension that it crosses.
    """
    strides = dense_dims(view.buffer.shape, view.buffer.itemsize)
    if not view.buffer.nbytes:
        return whole(view.buffer)
    base = int(at(view.base, position))
    starts = [base // stride % n for n, stride in strides]
    extents = [1] * len(strides)
    for size, stride in view.dims:
        size = int(at(size, position))
        if size == 0:
            return tuple((s, 0) for s in starts)
        for k, (n, own) in enumerate(strides):
            if (stride % own == 0 and stride < own * n) or (own == stride and n == 1):
                extent = (size - 1) * (stride // own) + extents[k]
                if starts[k] + extent > n:
                    return _rows(view, base, position)
                extents[k] = extent
                break
        else:
            if size > 1:
                return _rows(view, base, position)
    return tuple(zip(starts, extents, strict=True))


def _rows(view: View, base: int, position: int) -> Box:
    """From the view's first byte to its last: whole rows of the first dimension that it crosses."""
    last = base + view.itemsize - 1
    for size, stride in view.dims:
        last += (int(at(size, position)) - 1) * stride
    box: list[tuple[int, int]] = []
    crossed = False
    for n, stride in dense_dims(view.buffer.shape, view.buffer.itemsize):
        first, until = (0, n) if crossed else (base // stride % n, last // stride % n + 1)
        box.append((first, until - first))
        crossed |= until - first > 1
    return tuple(box)


def covers(a: Box, b: Box) -> bool:
    """Whether `a` holds all of `b`."""
    pairs = zip(a, b, strict=True)
    return all(p <= q and q + n <= p + m for (p, m), (q, n) in pairs)
