"""Stands for the wire, the driver and the device in tests of the NCCL plumbing without a GPU.

NVIDIA's bindings are those of `nccl_wire`, which move host memory between threads.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import nccl_kernels
from nccl_wire import SECONDS, SUCCESS, Wire, WireError, give, memory, take
from pallas_collectives import nccl
from pallas_collectives.backends import choice
from pallas_collectives.nccl import copies, cublas, group, mailboxes, progress, runtime
from pallas_collectives.nccl.library import Library
from pallas_collectives.nccl.store import LocalStore

_WORD = ctypes.c_int64
_functions: dict[str, Any] = {}


def _function(name: str, method: Any, count: int) -> int:
    """The address of a C function that calls `method` with `count` words and returns its status."""

    def call(*words: int) -> int:
        try:
            method(*words)
        except WireError as error:
            return error.status
        return SUCCESS

    if name not in _functions:
        _functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, *[_WORD] * count)(call)
    return ctypes.cast(_functions[name], ctypes.c_void_p).value or 0


class HostLibrary(Library):
    """NCCL whose C functions are a wire's."""

    def address(self, function: str) -> int:
        name, count = {
            "ncclAllGather": ("all_gather", 6), "ncclAllReduce": ("all_reduce", 7),
            "ncclReduceScatter": ("reduce_scatter", 7), "ncclAlltoAll": ("allto_all", 6),
            "ncclSend": ("send", 6), "ncclRecv": ("recv", 6),
            "ncclGroupStart": ("group_start", 0), "ncclGroupEnd": ("group_end", 0),
        }[function]  # fmt: skip
        return _function(f"{function} {id(self.bindings)}", getattr(self.bindings, name), count)


class Event:
    handle = 0

    def done(self) -> bool:
        return True


def _copy(target: int, source: int, size: int, *_: int) -> None:
    ctypes.memmove(target, source, size)


class Driver:
    """A CUDA driver whose streams are done with everything at once."""

    def __init__(self) -> None:
        self._streams = itertools.count(1)
        self.outside: set[int] = set()  # threads that no capture can disturb
        self._memory: list[Any] = []
        _function("give", give, 1)
        _function("take", take, 1)
        _function("cuMemcpyDtoDAsync_v2", _copy, 4)
        _function("cuLaunchKernel", nccl_kernels.launch, 11)
        _function("cuStreamIsCapturing", lambda stream, status: None, 2)

    def device(self, ordinal: int) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def outside_captures(self) -> Any:
        before = {*self.outside}
        self.outside.add(me := threading.get_ident())
        try:
            yield
        finally:
            self.outside -= {me} - before

    @contextlib.contextmanager
    def workspace(self, ordinal: int, size: int) -> Any:
        memory = ctypes.create_string_buffer(size)
        yield ctypes.addressof(memory), self.new_stream(ordinal)

    def new_stream(self, ordinal: int, urgent: bool = False) -> int:
        return next(self._streams)

    def record(self, ordinal: int, stream: int) -> Event:
        return Event()

    def captures(self, stream: int) -> bool:
        return False

    def new_event(self, ordinal: int) -> Event:
        return Event()

    def record_again(self, event: Event, stream: int) -> None:
        pass

    def allocate(self, ordinal: int, size: int) -> int:
        self._memory.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._memory[-1])

    def let_in(self, ordinal: int, ordinals: Any) -> None:
        pass

    def shared(self, ordinal: int, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def opened(self, ordinal: int, shared: bytes) -> int:
        return int.from_bytes(shared, "little")

    def fill_words(self, ordinal: int, address: int, value: int, count: int) -> None:
        (ctypes.c_uint32 * count).from_address(address)[:] = [value] * count

    def put(self, ordinal: int, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def give_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            give(address)

    def take_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            take(address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        _copy(target, source, size)

    def load_kernels(self, ordinal: int, ptx: bytes, name: str) -> tuple[int]:
        return (nccl_kernels.load(name),)

    def launch(self, kernel: int, stream: int, *args: Any, **sizes: int) -> None:
        try:
            nccl_kernels.run(kernel, *(a.value for a in args))
        except WireError as error:
            raise self.failed("cuLaunchKernel", error.status, "") from None

    def copy_to_host(self, source: int, size: int, stream: int) -> bytes:
        return ctypes.string_at(source, size)

    def wait_event(self, stream: int, event: Event) -> None:
        pass

    def clear(self, ordinal: int, address: int, size: int, stream: int) -> None:
        ctypes.memset(address, 0, size)

    def recorded(self, recorder: Any) -> "_RecordedDriver":
        return _RecordedDriver(recorder)

    def address(self, function: str) -> int:
        return ctypes.cast(_functions[function], ctypes.c_void_p).value or 0

    def failed(self, function: str, result: int, where: str) -> nccl.CallError:
        return nccl.CallError(function, result, f"status {result}", where)


class _RecordedDriver(Driver):
    def __init__(self, recorder: Any):
        super().__init__()
        self._recorder = recorder
        _function("clear", lambda address, size: ctypes.memset(address, 0, size), 2)

    def clear(self, ordinal: int, address: int, size: int, stream: int) -> None:
        self._recorder.call("clear", address, size)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._recorder.call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def give_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            self._recorder.call("give", address)

    def take_words(self, addresses: Sequence[int], stream: int) -> None:
        for address in addresses:
            self._recorder.call("take", address)


class HostProducts:
    """cuBLASLt whose C functions multiply host memory."""

    def prepare(self, driver: Any, ordinal: int, product: cublas.Product) -> "_HostProduct":
        return _HostProduct(product)

    def call(self, name: str, *args: int) -> None:
        _products[name](*args)

    def address(self, function: str) -> int:
        return _function(function, _products[function], 4)


_products: dict[str, Any] = {}


class _HostProduct:
    def __init__(self, product: cublas.Product):
        self._product, self._name = product, f"cublas {product}"
        _products[self._name] = self._run

    def multiply(self, call: Any, x: Any, w: Any, c: Any, d: Any, stream: Any) -> None:
        call(self._name, x, w, 0 if c is None else c, d)

    def _run(self, x: int, w: int, c: int, d: int) -> None:
        p = self._product
        left = self._matrices(x, p.dtype, p.rows, p.depth, p.pitches[0])
        shape = (p.columns, p.depth) if p.transposed else (p.depth, p.columns)
        right = memory(w, p.depth * p.columns, jnp.dtype(p.dtype)).reshape(shape)
        right = right.astype(np.float32)
        result = left.astype(np.float32) @ (right.T if p.transposed else right)
        if c:
            result += self._matrices(c, p.result, p.rows, p.columns, p.pitches[1])
        self._matrices(d, p.result, p.rows, p.columns, p.pitches[2])[:] = result

    def _matrices(self, address: int, dtype: str, rows: int, columns: int, pitch: int) -> Any:
        batch, kind = self._product.batch, jnp.dtype(dtype)
        flat = memory(address, (batch - 1) * pitch + rows * columns, kind)
        steps = [pitch * kind.itemsize, columns * kind.itemsize, kind.itemsize]
        return np.lib.stride_tricks.as_strided(flat, (batch, rows, columns), steps)


class HostBoard:
    """A board on which the host writes, doing what the kernels do: the reference for them."""

    def __init__(self) -> None:
        self.words = progress.Words()

    def enter(self, stream: int, signature: int) -> None:
        words = self.words
        words.history = (words.history * 16777619 & 0xFFFFFFFF) ^ signature
        words.slots[words.begun % progress.SLOTS] = (signature, words.history)
        words.begun += 1

    def leave(self, stream: int) -> None:
        self.words.ended += 1

    def read(self) -> progress.Progress:
        return progress.read(self.words)

    def recorded(self, recorder: Any) -> "_RecordedBoard":
        return _RecordedBoard(self, recorder)


class _RecordedBoard:
    def __init__(self, board: HostBoard, recorder: Any):
        self._id = id(board)
        _function(f"enter {self._id}", board.enter, 2)
        _function(f"leave {self._id}", board.leave, 1)
        self._recorder = recorder

    def enter(self, stream: Any, signature: int) -> None:
        self._recorder.call(f"enter {self._id}", stream, signature)

    def leave(self, stream: Any) -> None:
        self._recorder.call(f"leave {self._id}", stream)


class Runtime(runtime.Runtime):
    """What a group stands on, on the host."""

    def ordinal(self, device: Any) -> int:
        return device.id

    def lend(self, array: Any, stream: int) -> Any:
        return array.block_until_ready()

    def adopt(self, array: Any, event: Event) -> Any:
        return array

    def board(self, ordinal: int) -> HostBoard:
        return HostBoard()


def runtimes(processes: int = 1) -> list[Runtime]:
    """The runtimes of processes that share a wire and a store; threads stand for them."""
    library = HostLibrary(Wire(), "/host/libnccl.so.2", "2.28.9")
    store = LocalStore()
    return [Runtime(library, Driver(), store, process) for process in range(processes)]


def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the NCCL backend serve CPU devices over a wire of host memory, for one test."""
    (runtime,) = runtimes()
    monkeypatch.setattr(choice, "_GPU", ("cpu",))
    monkeypatch.setattr(choice, "_missing", lambda name, platform: "")
    monkeypatch.setattr(group, "_options", {"runtime": runtime})
    monkeypatch.setattr(group, "_groups", {})
    monkeypatch.setattr(copies, "_copiers", {})
    monkeypatch.setattr(mailboxes, "_made", {})
    products = HostProducts()
    monkeypatch.setattr(cublas, "library", lambda: products)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of one of several processes, as far as groups look at it."""

    id: int
    process_index: int
    local_hardware_id: int


def in_threads(*functions: Any) -> list[Any]:
    """Each function's result or exception, from threads that run at the same time."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    return results
