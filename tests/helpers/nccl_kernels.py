"""What kernels on GPUs do, on host memory: the stand-in for them, and the reference.

By numpy, since the threads that would launch them belong to a program of JAX's that runs.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from nccl_wire import give, memory, take
from pallas_collectives import wires
from pallas_collectives.nccl import codec, sums
from pallas_collectives.nccl.rows import Row
from pallas_collectives.wires import LEAST_SCALE, Wire

_numbers: dict[str, int] = {}  # kernels, by name
_loaded: dict[int, tuple[int, Callable[..., None]]] = {}  # how many parameters, and what it does


def load(name: str) -> int:
    """The handle of a kernel."""
    if name not in _numbers:
        if name.removeprefix("add_") in sums.ADDED:
            count, run = 3, _sums(name.removeprefix("add_"))
        else:
            kernel = next(k for k in codecs() if k.name == name)
            count, run = len(codec.PARAMETERS), _Codec(kernel).run
        _numbers[name] = len(_numbers) + 1
        _loaded[_numbers[name]] = count, run
    return _numbers[name]


def run(handle: int, *given: int) -> None:
    """A kernel, by its handle; the last that it is given is how much there is to do."""
    if not given[-1]:
        return
    _loaded[handle][1](*given)


def launch(handle: int, *args: int) -> None:
    """cuLaunchKernel."""
    parameters = ctypes.cast(args[-2], ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
    run(handle, *(parameters[i][0] for i in range(_loaded[handle][0])))


def table(rows: int, count: int) -> list[Row]:
    """The rows at an address."""
    words = memory(rows, 4 * count, np.dtype(np.uint64)).reshape(-1, 4).tolist()
    return list(itertools.starmap(Row, words))


def _sums(name: str) -> Callable[..., None]:
    dtype = jnp.dtype(name)

    def add(x: int, y: int, words: int) -> None:
        left, right = (memory(at, words * sums.WORD // dtype.itemsize, dtype) for at in (x, y))
        right[:] = left.astype(np.float32) + right.astype(np.float32)

    return add


def codecs() -> Iterable[codec.Kernel]:
    """All of `codec`'s."""
    floats = ("float32", "bfloat16", "float16")
    wires = ("int8", "float8_e4m3fn", "float8_e5m2")
    kinds = (codec.SEND, codec.READ, codec.KEEP, codec.ADD, codec.RELAY, codec.TAKE)
    return itertools.starmap(
        codec.Kernel, itertools.product(kinds, floats, floats, wires, (128, 256))
    )


class _Codec:
    """One of `codec`'s kernels."""

    def __init__(self, kernel: codec.Kernel) -> None:
        self._kernel = kernel
        self._dtype, self._result = jnp.dtype(kernel.dtype), jnp.dtype(kernel.result)
        self._wire, self._group = Wire(kernel.wire), kernel.group

    def run(self, source: int, target: int, rows: int, count: int, groups: int) -> None:
        given = table(rows, count)
        for row in given:
            if row.take:
                take(row.take)
        getattr(self, f"_{self._kernel.kind}")(source, target, given, groups)
        for row in given:
            if row.give:
                give(row.give)

    def _send(self, own: int, to: int, rows: list[Row], groups: int) -> None:
        for row in rows:
            self._put(to + row.target, *self._quantised(own + row.source, groups))

    def _take(self, *_: Any) -> None:
        """Words alone."""

    def _put(self, to: int, values: Any, scales: Any) -> None:
        for mine, come in zip((values, scales), self._come(to, len(scales)), strict=True):
            come[:] = mine

    def _read(self, come: int, to: int, rows: list[Row], groups: int) -> None:
        for row in rows:
            numbers = self._numbers(*self._come(come + row.source, groups), self._result)
            self._store(to + row.target, numbers)

    def _keep(self, own: int, to: int, rows: list[Row], groups: int) -> None:
        for row in rows:
            numbers = self._numbers(*self._quantised(own + row.source, groups), self._result)
            self._store(to + row.target, numbers)

    def _add(self, own: int, to: int, rows: list[Row], groups: int) -> None:
        self._store(to, self._sum(own, rows, groups))

    def _relay(self, own: int, to: int, rows: list[Row], groups: int) -> None:
        sums = self._sum(own, rows, groups)
        values, scales = self._of_groups(sums, wires.overflows_from(self._result))
        for row in rows:
            if row.source:
                self._put(row.target, values, scales)
            else:
                self._store(to + row.target, self._numbers(values, scales, self._result))

    def _sum(self, own: int, rows: list[Row], groups: int) -> Any:
        terms = [
            self._numbers(
                *(self._come(row.source, groups) if row.source else self._quantised(own, groups)),
                self._dtype,
            )
            for row in rows
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            return sum(terms[1:], terms[0])

    def _quantised(self, own: int, groups: int) -> tuple[Any, Any]:
        flat = memory(own, groups * self._group, self._dtype).astype(np.float32)
        infinite = np.inf if self._kernel.adds else wires.overflows_from(self._result)
        return self._of_groups(flat.reshape(groups, self._group), infinite)

    def _of_groups(self, numbers: Any, infinite: float) -> tuple[Any, Any]:
        largest = np.float32(self._wire.largest)
        most = np.abs(numbers).max(axis=1)  # NaN if one is
        most = np.where(most < np.float32(infinite), most, np.nan)
        with np.errstate(all="ignore"):
            scales = np.maximum(most * np.float32(1 / self._wire.largest), np.float32(LEAST_SCALE))
            scales = np.where(np.isfinite(most), np.where(most == 0, 0, scales), np.nan)
            usable = scales > 0
            inverse = np.float32(1) / np.where(usable, scales, 1).astype(np.float32)
            scaled = np.where(usable[:, None], numbers * inverse[:, None], 0)
        scaled = np.clip(scaled, -largest, largest)
        if self._wire.dtype == "int8":
            scaled = np.rint(scaled)
        return scaled.astype(jnp.dtype(self._wire.dtype)), scales.astype(np.float32)

    def _come(self, at: int, groups: int) -> tuple[Any, Any]:
        size = groups * self._group
        values = memory(at, size, jnp.dtype(self._wire.dtype)).reshape(groups, self._group)
        return values, memory(at + size, groups, np.dtype(np.float32))

    def _numbers(self, values: Any, scales: Any, dtype: Any) -> Any:
        most = float(jnp.finfo(dtype).max)
        return np.clip(values.astype(np.float32) * scales[:, None], -most, most)

    def _store(self, to: int, numbers: Any) -> None:
        with np.errstate(over="ignore"):
            memory(to, numbers.size, self._result)[:] = numbers.reshape(-1).astype(self._result)
