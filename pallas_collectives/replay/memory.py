"""What a kernel holds of its core's memories at a time: operands and scratch for as long as it
runs, scoped allocations as they nest.

Counted as the TPU compiler counts (AOT, libtpu 0.0.42 and 0.0.50, v4 to 7x): in VMEM and SMEM the
last dimension is filled up to 128 elements and the one before it to 8, or to a power of two below
that; narrower types are packed along it. A semaphore takes a word of its own whatever its shape.
The copies that Pallas makes around a kernel have semaphores too, which are not counted here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

from pallas_collectives.kernels.machinery.blocks import LANES, up
from pallas_collectives.replay.views import Buffer

_SUBLANES, _WORD = 8, 4

# The memories that a kernel can run out of.
LIMITED = ("vmem", "smem", "semaphore_mem")


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most that a kernel holds of one memory, and the line that asked for the last of it.

    `amount`: bytes; of semaphores, how many.
    """

    amount: int = 0
    line: str = ""


class Held:
    """What one kernel holds, by memory, while it is stepped; `peaks` is the most so far."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = dict.fromkeys(LIMITED, Peak())

    def take(self, buffers: Iterable[Buffer], line: str) -> None:
        for buffer in buffers:
            if buffer.space in self.peaks:
                self._now[buffer.space] += size(buffer)
        for space, peak in self.peaks.items():
            if self._now[space] > peak.amount:
                self.peaks[space] = Peak(self._now[space], line)

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self._now[buffer.space] -= size(buffer)


def size(buffer: Buffer) -> int:
    """What a buffer takes of its memory: bytes with the padding to tiles, or semaphores."""
    if buffer.space == "semaphore_mem":
        return math.prod(buffer.shape)
    if 0 in buffer.shape:
        return 0
    *outer, rows, lanes = (1, 1, *buffer.shape)
    lanes = up(lanes, LANES)
    if len(buffer.shape) > 1:
        packed = max(1, _WORD // buffer.itemsize)
        few = 1 << (rows - 1).bit_length()  # the power of two that holds them
        rows = max(few, packed) if few < _SUBLANES else up(rows, _SUBLANES)
    return math.prod(outer) * rows * lanes * buffer.itemsize
