"""NVIDIA's bindings to NCCL, as far as the package calls them, over host memory.

Addresses are host addresses, streams mean nothing, ranks are threads, and every call has ended when
it returns.
"""

import collections
import ctypes
import dataclasses
import itertools
import queue
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np

SECONDS = 20.0
_NUMBERS = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64, 6: np.float16,
    7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16, 10: ml_dtypes.float8_e4m3fn,
    11: ml_dtypes.float8_e5m2,
}  # fmt: skip
_REDUCE = {
    0: lambda x: x.sum(0), 1: lambda x: x.prod(0), 2: lambda x: x.max(0), 3: lambda x: x.min(0),
    4: lambda x: x.mean(0),
}  # fmt: skip
SUCCESS, _INTERNAL, _INVALID_USAGE, _REMOTE_ERROR = 0, 3, 5, 6


class WireError(Exception):
    """As nccl4py's: carries the status."""

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


def memory(address: int, count: int, dtype: Any) -> np.ndarray:
    """Host memory as an array."""
    size = count * np.dtype(dtype).itemsize
    return (
        np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
        if size
        else np.empty(0, dtype)
    )


def give(address: int) -> None:
    """Sets a 32-bit word to 1."""
    ctypes.c_uint32.from_address(address).value = 1


def take(address: int) -> None:
    """Waits until a 32-bit word is 1, and sets it to 0."""
    word, until = ctypes.c_uint32.from_address(address), time.monotonic() + SECONDS
    while word.value != 1:
        assert time.monotonic() < until, "nobody gives the word"
        time.sleep(1e-5)
    word.value = 0


@dataclasses.dataclass
class _Clique:
    size: int
    joined: threading.Barrier
    changed: threading.Condition
    rounds: dict[tuple[str, int], int]
    contributions: dict[tuple[str, int, int], np.ndarray]
    mail: dict[tuple[int, int, str], queue.Queue]


class Comm(int):
    """A communicator's handle, as nccl4py's: a class of its own."""


class _UniqueId:
    def __init__(self, number: int):
        self._text = ctypes.create_string_buffer(str(number).encode(), 128)
        self.ptr = ctypes.addressof(self._text)


class Wire:
    """NVIDIA's bindings, as far as the package calls them.

    As NCCL, it connects a communicator for a function when that is first called or planned, and
    cannot while `capturing`. Unless `ordered`, calls of other kinds or sizes may come in another
    order on each rank: a GPU's stream has one, but XLA's threads on a CPU start what is ready.
    """

    Comm = Comm

    def __init__(self) -> None:
        self.capturing = False
        self.ordered = True
        self.connected: dict[int, set[str]] = collections.defaultdict(set)
        self._planned: dict[int, list[tuple[int, str]]] = {}
        self._warning = ""
        self._ids = itertools.count(1)
        self._handles = itertools.count(1)
        self._cliques: dict[bytes, _Clique] = {}
        self._comms: dict[int, tuple[_Clique, int]] = {}
        self._lock = threading.Lock()
        # By thread: threading.local would forget between two calls from outside Python.
        self._grouped: dict[int, list[tuple]] = {}
        self.aborted: list[int] = []
        self.destroyed: list[int] = []
        self.async_status: dict[int, int] = {}
        self.calls: collections.Counter[str] = collections.Counter()

    def get_unique_id(self) -> _UniqueId:
        return _UniqueId(next(self._ids))

    def comm_init_rank_scalable(self, size: int, rank: int, n: int, ids: int, config: int) -> int:
        name = ctypes.string_at(ids, 128)
        with self._lock:
            clique = self._cliques.setdefault(
                name,
                _Clique(
                    size,
                    threading.Barrier(size),
                    threading.Condition(),
                    {},
                    {},
                    collections.defaultdict(queue.Queue),
                ),
            )
            handle = Comm(next(self._handles))
            self._comms[handle] = clique, rank
        clique.joined.wait(SECONDS)
        return handle

    def comm_destroy(self, comm: int) -> None:
        self.destroyed.append(comm)

    def comm_abort(self, comm: int) -> None:
        self.aborted.append(comm)
        clique, _ = self._comms[comm]
        with clique.changed:
            clique.changed.notify_all()

    def comm_get_async_error(self, comm: int) -> int:
        return self.async_status.get(comm, SUCCESS)

    def get_error_string(self, status: int) -> str:
        return {
            _INTERNAL: "internal error", _INVALID_USAGE: "invalid usage",
            _REMOTE_ERROR: "remote process exited",
        }[status]  # fmt: skip

    def get_last_error(self, comm: Comm) -> str:
        if not isinstance(comm, Comm):
            raise TypeError(f"Cannot convert {type(comm).__name__} to nccl.bindings.nccl.Comm")
        return self._warning

    def _connect(self, comm: int, name: str) -> None:
        name = {"reduce": "broadcast"}.get(name, name)  # a ring does both, and nothing else does
        if name in self.connected[comm]:
            return
        if self.capturing:
            self._warning = "failed to peer: operation not permitted when stream is capturing"
            raise WireError(_INTERNAL)
        self.connected[comm].add(name)

    def _plans(self, comm: int, name: str) -> bool:
        """Whether the call is one of a group: then it is noted, and not made."""
        group = self._planned.get(threading.get_ident())
        if group is None:
            self._connect(comm, name)
            return False
        group.append((comm, name))
        return True

    def group_simulate_end(self) -> None:
        self._grouped.pop(threading.get_ident())
        for comm, name in self._planned.pop(threading.get_ident()):
            self._connect(comm, name)

    def _kind(self, call: str) -> str:
        """What keeps a call apart from those that may come before it elsewhere."""
        return "" if self.ordered else call

    def _gathered(self, comm: int, array: np.ndarray, name: str) -> np.ndarray:
        """Every rank's array, stacked, once all ranks are in the call."""
        self.calls[name] += 1
        clique, rank = self._comms[comm]
        with clique.changed:
            kind = self._kind(f"{name} {array.dtype} {array.size}")
            number = clique.rounds[kind, rank] = clique.rounds.get((kind, rank), -1) + 1
            clique.contributions[kind, number, rank] = array.copy()
            clique.changed.notify_all()
            there = [(kind, number, r) for r in range(clique.size)]
            arrived = clique.changed.wait_for(
                lambda: comm in self.aborted or all(k in clique.contributions for k in there),
                SECONDS,
            )
            if not arrived or comm in self.aborted:
                raise WireError(_INVALID_USAGE)
            parts = [clique.contributions[k] for k in there]
        try:
            return np.stack(parts)
        except ValueError:  # other counts; NCCL may hang or not: here it fails
            raise WireError(_INVALID_USAGE) from None

    def all_gather(self, send, recv, count, code, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "all_gather"):
            return
        parts = self._gathered(comm, memory(send, count, _NUMBERS[code]), "all_gather")
        memory(recv, parts.size, _NUMBERS[code])[:] = parts.reshape(-1)

    def all_reduce(self, send, recv, count, code, op, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "all_reduce"):
            return
        parts = self._gathered(comm, memory(send, count, _NUMBERS[code]), "all_reduce")
        memory(recv, count, _NUMBERS[code])[:] = _REDUCE[op](parts)

    def reduce_scatter(self, send, recv, count, code, op, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "reduce_scatter"):
            return
        clique, rank = self._comms[comm]
        mine = memory(send, count * clique.size, _NUMBERS[code])
        parts = self._gathered(comm, mine, "reduce_scatter")
        memory(recv, count, _NUMBERS[code])[:] = _REDUCE[op](parts)[rank * count :][:count]

    def allto_all(self, send, recv, count, code, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "allto_all"):
            return
        clique, rank = self._comms[comm]
        mine = memory(send, count * clique.size, _NUMBERS[code])
        parts = self._gathered(comm, mine, "all_to_all").reshape(clique.size, clique.size, count)
        memory(recv, count * clique.size, _NUMBERS[code])[:] = parts[:, rank].reshape(-1)

    def broadcast(self, send, recv, count, code, root, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "broadcast"):
            return
        _, rank = self._comms[comm]
        source = send if rank == root else recv
        parts = self._gathered(comm, memory(source, count, _NUMBERS[code]), "broadcast")
        memory(recv, count, _NUMBERS[code])[:] = parts[root]

    def reduce(self, send, recv, count, code, op, root, comm, stream):  # type: ignore[no-untyped-def]
        if self._plans(comm, "reduce"):
            return
        _, rank = self._comms[comm]
        parts = self._gathered(comm, memory(send, count, _NUMBERS[code]), "reduce")
        if rank == root:
            memory(recv, count, _NUMBERS[code])[:] = _REDUCE[op](parts)

    def group_start(self) -> None:
        self._grouped[threading.get_ident()] = []
        self._planned[threading.get_ident()] = []

    def send(self, address, count, code, peer, comm, stream):  # type: ignore[no-untyped-def]
        self._connect(comm, "allto_all")  # which connects every pair of ranks
        self.calls["send"] += 1
        clique, rank = self._comms[comm]
        kind = self._kind(f"{code} {count}")
        clique.mail[rank, peer, kind].put(memory(address, count, _NUMBERS[code]).copy())

    def recv(self, address, count, code, peer, comm, stream):  # type: ignore[no-untyped-def]
        self._connect(comm, "allto_all")
        self.calls["recv"] += 1
        self._grouped[threading.get_ident()].append((address, count, code, peer, comm))

    def group_end(self) -> None:
        assert not self._planned.pop(threading.get_ident()), "the wire does not group collectives"
        for address, count, code, peer, comm in self._grouped.pop(threading.get_ident()):
            clique, rank = self._comms[comm]
            kind = self._kind(f"{code} {count}")
            try:
                sent = clique.mail[peer, rank, kind].get(timeout=SECONDS)
                memory(address, count, _NUMBERS[code])[:] = sent
            except queue.Empty:
                raise WireError(_INVALID_USAGE) from None
