"""What is known of memory's contents: scalar memory, and small integer operands in HBM.

Sizes, offsets and tables that a kernel reads decide what it does. They are followed where they come
from arguments of known contents: through stores, and through copies between small arrays in HBM,
scalar memory and tables in vector memory (by which a SparseCore's subcores read one), and between
devices.
Anything else is unknown, and a program that depends on it says so.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from pallas_collectives.replay.program import home
from pallas_collectives.replay.values import UNKNOWN, Known, Lanes
from pallas_collectives.replay.views import Buffer, View

_LARGEST = 1 << 24  # elements of an array in HBM, on all devices together, that are followed


class Contents:
    """The elements of some buffers, on each core, and which of them are known."""

    def __init__(self, n_devices: int):
        self.n_devices = n_devices
        self._held: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def may_hold(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of such a shape on each device is small enough to be followed."""
        return math.prod(shape) * self.n_devices <= _LARGEST

    def hold(self, buffer: Buffer, dtype: DTypeLike, n_lanes: int) -> None:
        """Follows a buffer's contents from now on; so far all are unknown."""
        if buffer.id in self._held:
            return
        size = (n_lanes, math.prod(buffer.shape))
        self._held[buffer.id] = np.zeros(size, dtype), np.zeros(size, bool)

    def load(self, view: View, lanes: np.ndarray) -> Any:
        """What lies in a view, on each of the lanes."""
        if view.buffer.id not in self._held or any(_differs(size) for size, _ in view.dims):
            return UNKNOWN
        data, known = self._held[view.buffer.id]
        at = self._rows(view, lanes), _elements(view)
        if not known[at].all():
            return UNKNOWN
        shape = tuple(size for size, _ in view.dims)
        if math.prod(shape) != 1:
            return Known(data[at].reshape(len(lanes), *shape), True)
        loaded = data[at][:, 0]
        return loaded[0].item() if (loaded == loaded[0]).all() else loaded

    def store(self, view: View, value: Any, lanes: np.ndarray) -> None:
        """Stores a value of the view's shape, or a scalar for each of its elements."""
        if view.buffer.id not in self._held:
            return
        data, known = self._held[view.buffer.id]
        rows = self._rows(view, lanes)
        if any(_differs(size) for size, _ in view.dims):
            known[rows] = False
            return
        at = rows, _elements(view)
        if isinstance(value, Known):
            value = value.values.reshape(len(lanes) if value.per_lane else 1, -1)
        elif isinstance(value, np.ndarray):
            value = value.reshape(-1, 1)
        follows = value is not UNKNOWN and not isinstance(value, View)
        known[at] = follows
        if follows:
            data[at] = value

    def copy(self, src: View, dst: View, lanes: np.ndarray, target: Lanes | None) -> None:
        """Copies from `src` on the lanes to `dst` there, or on each lane's `target`.

        What only some devices send is unknown to the others: they are stepped in any order.
        """
        if dst.buffer.id not in self._held:
            return
        value = self.load(src, lanes) if src.itemsize == dst.itemsize else UNKNOWN
        if target is None:
            self.store(dst, value, lanes)
            return
        targets = np.broadcast_to(np.asarray(target), lanes.shape)
        known = self._held[dst.buffer.id][1]
        if value is UNKNOWN or len(np.unique(targets)) != len(known):
            known[self._rows(dst, targets)] = False
            return
        self.store(dst, value, targets)

    def _rows(self, view: View, lanes: np.ndarray) -> np.ndarray:
        return home(lanes, view.buffer, self.n_devices).reshape(-1, 1)


def _differs(size: Lanes) -> bool:
    return isinstance(size, np.ndarray)


def _elements(view: View) -> np.ndarray:
    """The numbers of a view's elements in its buffer, per lane: (1 or lanes, elements)."""
    number = np.zeros(1, np.int64)
    for size, stride in view.dims:
        number = (number[:, None] + np.arange(size) * (stride // view.itemsize)).reshape(-1)
    return np.asarray(view.base).reshape(-1, 1) // view.itemsize + number
