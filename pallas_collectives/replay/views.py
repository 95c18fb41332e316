"""Refs: a buffer and the strided part of it that a view names, in bytes.

A view is an affine set of bytes: a base offset and, per dimension, how many elements and how far
apart. Slicing, transposing, and reshaping a contiguous view stay inside that form, so one
representation serves copies, semaphores and scalar memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_collectives.replay import jaxprs, operations
from pallas_collectives.replay.values import UNKNOWN, Lanes, take


class DataDependent(ValueError):
    """The program's addresses or control flow depend on array data, which replay does not hold."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One allocation on each device, of kernel number `kernel`. `space`: 'hbm', 'vmem', 'smem' or
    'semaphore_mem'.
    """

    id: int
    name: str
    space: str
    shape: tuple[int, ...]
    itemsize: int  # bytes; 1 for semaphores, whose views therefore count semaphores
    kernel: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def view(self) -> View:
        return View(self, 0, dense_dims(self.shape, self.itemsize), self.itemsize)


def dense_dims(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[Any, int], ...]:
    """(size, stride in bytes) of each dimension of a row-major array."""
    dims: list[tuple[Any, int]] = []
    stride = itemsize
    for size in reversed(shape):
        dims.append((size, stride))
        stride *= size
    return tuple(reversed(dims))


@dataclasses.dataclass(frozen=True)
class View:
    """Part of a buffer: byte `base` (int or per lane), and per dimension (size, stride in
    bytes).
    """

    buffer: Buffer
    base: Lanes
    dims: tuple[tuple[Any, int], ...]
    itemsize: int

    @property
    def nbytes(self) -> Lanes:
        """Bytes in the view (an int, or one per lane where a slice's size differs)."""
        total: Lanes = self.itemsize
        for size, _ in self.dims:
            total = total * size
        return total

    def take(self, positions: np.ndarray) -> View:
        """The view on the lanes at `positions` only."""
        dims = tuple((take(size, positions), stride) for size, stride in self.dims)
        return View(self.buffer, take(self.base, positions), dims, self.itemsize)

    def transformed(self, transform: Any, read: Callable[[Any], Any]) -> View:
        """The view after one transform of `operations`; `read` gives an operand's value."""
        match transform:
            case operations.Index(dims=dims):
                return self._indexed(dims, read)
            case operations.Transpose(permutation=permutation):
                return dataclasses.replace(self, dims=tuple(self.dims[i] for i in permutation))
            case operations.Reshape(shape=shape):
                self._require_dense("reshape")
                dims = dense_dims(shape, self.itemsize)
                return dataclasses.replace(self, dims=dims)
            case operations.Bitcast(dtype=dtype):
                return self._bitcast(np.dtype(dtype).itemsize)
        raise AssertionError(transform)

    def _indexed(self, indices: tuple[Any, ...], read: Callable[[Any], Any]) -> View:
        base: Lanes = self.base
        dims = []
        for index, (length, stride) in zip(indices, self.dims, strict=True):
            if isinstance(index, tuple):
                start, size, step = (read(i) for i in index)
                dims.append((size, stride * step))
            else:
                start, size, step = read(index), None, 1
            if start is UNKNOWN or size is UNKNOWN:
                raise DataDependent("an index of a ref")
            self._require_inside(start, 1 if size is None else size, step, length)
            if isinstance(start, np.ndarray):
                start = start.astype(np.int64)
            base = base + start * stride
        return View(self.buffer, base, tuple(dims), self.itemsize)

    def _require_inside(self, start: Lanes, size: Lanes, step: int, length: Lanes) -> None:
        last = start + (size - 1) * step
        outside = (size > 0) & ((start < 0) | (last >= length))
        if outside is not False and np.any(outside):  # most are Python's: nothing to ask NumPy
            first, last = np.min(start), np.max(last)
            raise IndexError(f"indices {first} to {last} of {length} of {self.buffer.name}")

    def _bitcast(self, itemsize: int) -> View:
        """As elements of another size: JAX packs narrower ones along the second minor dimension."""
        if itemsize == self.itemsize or not self.dims:
            return dataclasses.replace(self, itemsize=itemsize)
        *outer, (rows, row), (lanes, lane) = ((1, 0), *self.dims)
        if len(self.dims) == 1:
            self._require_dense("bitcast")
            only = ((lanes * self.itemsize // itemsize, itemsize),)
            return dataclasses.replace(self, dims=only, itemsize=itemsize)
        if lane != self.itemsize or row * itemsize % self.itemsize:
            self._require_dense("bitcast")
        column = self.base % row  # bytes before it in its row
        base = self.base - column + column * itemsize // self.itemsize
        packed = (rows * self.itemsize // itemsize, row * itemsize // self.itemsize)
        dims = (*outer[1:], packed, (lanes, itemsize))
        return dataclasses.replace(self, base=base, dims=dims, itemsize=itemsize)

    def _require_dense(self, what: str) -> None:
        sizes = tuple(size for size, _ in self.dims)
        dense = dense_dims(sizes, self.itemsize)
        if any(s != d for s, d, n in zip(self.dims, dense, sizes, strict=True) if n != 1):
            raise jaxprs.UnsupportedEquation(
                f"replay does not know the {what} of a slice of {self.buffer.name} with gaps"
            )


def element_size(aval: Any) -> int:
    """Bytes of one element of a ref's type (semaphores: 1; 4-bit types are counted as whole
    bytes).
    """
    if jaxprs.memory_space(aval) == "semaphore_mem":
        return 1
    return int(np.dtype(aval.dtype).itemsize)
