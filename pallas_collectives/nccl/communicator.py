"""One rank's NCCL communicator: every collective on raw pointers and a stream.

Counts are in elements of the JAX dtype given, pointers are device addresses, streams are CUDA
streams. Nothing here waits: a call puts its work on the stream and returns. Moving takes any dtype
of whole bytes; reducing what `dtypes.reduced` lists.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_collectives.annotations import DType
from pallas_collectives.nccl import cuda, dtypes, progress
from pallas_collectives.nccl.errors import CallError, CommunicatorError, NcclError, raise_for
from pallas_collectives.nccl.library import Library
from pallas_collectives.nccl.progress import Board
from pallas_collectives.nccl.tape import Address, Recorder


@functools.cache
def _signature(call: tuple[Any, ...]) -> int:
    """The signature of a call: its name, its details, and at the end perhaps dtype and count."""
    words = (str(w) if isinstance(w, str | int) else np.dtype(w).name for w in call)
    return progress.signature(" ".join(words))


class Communicator:
    """A rank of a group. `group.create` makes it; not safe for two threads at a time.

    Attributes:
      library, driver, handle: NCCL, CUDA and the `ncclComm_t`.
      rank, size: this rank and how many there are.
      ordinal: the CUDA ordinal of its GPU in this process.
      board: where the GPU writes its progress for the watchdog, if there is one.
      unusable: 1 from the moment on from which every call raises.
      before_abort: what ends work of this rank that NCCL does not know of.
    """

    def __init__(
        self,
        library: Library,
        driver: cuda.Driver,
        handle: int,
        rank: int,
        size: int,
        ordinal: int,
        title: str,
    ):
        self.library = library
        self.driver = driver
        self._nccl = library.bindings
        self.handle = handle
        self.rank = rank
        self.size = size
        self.ordinal = ordinal
        self._title = title
        self.board: Board | None = None
        self._reason: CommunicatorError | None = None
        self.unusable = ctypes.c_int32(0)
        self.before_abort: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} of {self._title}"

    def all_gather(
        self, send: Address, recv: Address, count: int, dtype: DType | str, stream: Address
    ) -> None:
        """Every rank's `count` elements at `send`, in order of rank, to `recv` (size × count)."""
        code, width = dtypes.moved(dtype)
        self._issue(
            ("all_gather", dtype, count), stream, "ncclAllGather", self._nccl.all_gather,
            send, recv, count * width, code,
        )  # fmt: skip

    def all_reduce(
        self, send: Address, recv: Address, count: int, dtype: DType | str, op: str, stream: Address
    ) -> None:
        """The reduction of every rank's `count` elements to every rank; `recv` may be `send`."""
        code, width, reduction = dtypes.reduced(dtype, op)
        self._issue(
            ("all_reduce", op, dtype, count), stream, "ncclAllReduce", self._nccl.all_reduce,
            send, recv, count * width, code, reduction,
        )  # fmt: skip

    def reduce_scatter(
        self, send: Address, recv: Address, count: int, dtype: DType | str, op: str, stream: Address
    ) -> None:
        """The reduction of size × count elements; this rank's `count` of them to `recv`."""
        code, width, reduction = dtypes.reduced(dtype, op)
        self._issue(
            ("reduce_scatter", op, dtype, count), stream, "ncclReduceScatter",
            self._nccl.reduce_scatter, send, recv, count * width, code, reduction,
        )  # fmt: skip

    def all_to_all(
        self, send: Address, recv: Address, count: int, dtype: DType | str, stream: Address
    ) -> None:
        """The i-th `count` elements at `send` to rank i, and rank i's to the i-th at `recv`."""
        code, width = dtypes.moved(dtype)
        self._issue(
            ("all_to_all", dtype, count), stream, "ncclAlltoAll", self._nccl.allto_all,
            send, recv, count * width, code,
        )  # fmt: skip

    def broadcast(
        self,
        send: Address,
        recv: Address,
        count: int,
        dtype: DType | str,
        root: int,
        stream: Address,
    ) -> None:
        """`root`'s `count` elements at `send` to every rank's `recv`; `send` counts there alone."""
        code, width = dtypes.moved(dtype)
        self.check_peer(root)
        self._issue(
            ("broadcast", root, dtype, count), stream, "ncclBroadcast", self._nccl.broadcast,
            send, recv, count * width, code, root,
        )  # fmt: skip

    def reduce(
        self,
        send: Address,
        recv: Address,
        count: int,
        dtype: DType | str,
        op: str,
        root: int,
        stream: Address,
    ) -> None:
        """The reduction of every rank's `count` elements to `root`'s `recv`."""
        code, width, reduction = dtypes.reduced(dtype, op)
        self.check_peer(root)
        self._issue(
            ("reduce", op, root, dtype, count), stream, "ncclReduce", self._nccl.reduce,
            send, recv, count * width, code, reduction, root,
        )  # fmt: skip

    def read_back(self, address: int, size: int, stream: int) -> bytes:
        """`size` bytes of device memory; waits for everything on `stream` so far."""
        return self.driver.copy_to_host(address, size, stream)

    def clear(self, address: Address, size: int, stream: Address) -> None:
        """`size` zero bytes at `address`, after everything on `stream` so far."""
        self.driver.clear(self.ordinal, address, size, stream)

    def check_peer(self, peer: int) -> None:
        """Raises ValueError unless `peer` is a rank."""
        if not 0 <= peer < self.size:
            raise ValueError(
                f"rank {peer} is not in {self._title}, whose ranks are 0 to {self.size - 1}"
            )

    def _issue(
        self,
        call: tuple[Any, ...],
        stream: Address,
        name: str,
        function: Callable[..., None],
        *args: Address,
    ) -> None:
        with self.calling(call, stream):
            try:
                function(*args, self.handle, stream)
            except Exception as error:
                raise_for(error, self.failure(name, error))

    def plan(self, call: Callable[[], None]) -> None:
        """Has NCCL plan the collective that `call` makes, and connect the peers that it would use.

        Every rank of the group plans the same one; nothing is put on a stream.
        """
        self._nccl.group_start()
        try:
            call()
        except BaseException:
            with contextlib.suppress(Exception):  # it repeats the call's
                self._nccl.group_simulate_end()
            raise
        self.library.call("ncclGroupSimulateEnd", str(self), self._nccl.group_simulate_end)

    def check(self) -> None:
        """Raises why this communicator is unusable, if it is."""
        if self._reason is not None:
            raise self._reason

    @contextlib.contextmanager
    def calling(self, call: tuple[Any, ...], stream: Address) -> Iterator[None]:
        """Tells the board that what is put on `stream` within it is one call.

        Refuses, if this communicator is unusable.
        """
        self.check()
        if self.board is not None:
            self.board.enter(stream, _signature(call))
        try:
            yield
        finally:
            self._end(stream)

    def _end(self, stream: Address) -> None:
        """A call is over, unless it is left half done."""
        if self.board is not None and self._reason is None:
            self.board.leave(stream)

    def failure(self, name: str, error: Exception) -> Exception:
        """What to raise for an error in an NCCL call; an abort's reason says more than its echo."""
        return self._reason or self._noted(self.library.error(name, error, str(self)))

    def failed(self, function: str, result: int, stream: int) -> Exception:
        """What to raise for a result of a C function that is not 0, made without Python."""
        error = self._reason or self._noted(
            self._owner(function).failed(function, result, str(self))
        )
        if function.startswith("nccl"):  # in a call, whose end its tape has not come to
            self._end(stream)
        return error

    def _noted(self, error: Exception) -> Exception:
        """`error`; later calls raise too where NCCL may be half done: it would not know."""
        if isinstance(error, CallError) and error.leaves_nccl_half_done:
            self.disable(CommunicatorError(f"an earlier call failed: {error}"))
        return error

    def address(self, function: str) -> int:
        """The address of a C function of NCCL's or the driver's."""
        return self._owner(function).address(function)

    def _owner(self, function: str) -> Library | cuda.Driver:
        return self.library if function.startswith("nccl") else self.driver

    def recorded(self, recorder: Recorder) -> "Communicator":
        """A twin whose calls `recorder` notes, this one's work in every other respect."""
        twin = copy.copy(self)
        twin._nccl, twin.driver = recorder, self.driver.recorded(recorder)
        twin.board = self.board and self.board.recorded(recorder)
        return twin

    def disable(self, reason: CommunicatorError) -> None:
        """Makes every later call raise `reason`; the first reason stays."""
        self._reason = self._reason or reason
        self.unusable.value = 1

    def async_error(self) -> NcclError | None:
        """What NCCL says went wrong since, if anything; does not wait."""
        get = self._nccl.comm_get_async_error
        code = self.library.call("ncclCommGetAsyncError", str(self), get, self.handle)
        if code in (0, 7):  # success, in progress
            return None
        return self.library.failed("an earlier call", code, str(self))

    def destroy(self) -> None:
        """Waits for this communicator's work and frees it; the group calls it."""
        self.library.call("ncclCommDestroy", str(self), self._nccl.comm_destroy, self.handle)

    def abort(self) -> None:
        """Ends its work, also work that waits for a peer, and frees it; the group calls it."""
        for end in self.before_abort:
            end()
        self.library.call("ncclCommAbort", str(self), self._nccl.comm_abort, self.handle)


Part = tuple[Address, int, int]
"""(device address, elements, the other rank) of one message."""


@dataclasses.dataclass(frozen=True)
class Messages:
    """What one rank sends and receives in an `exchange`."""

    communicator: Communicator
    sends: list[Part]
    recvs: list[Part]
    stream: Address


def exchange(messages: Sequence[Messages], dtype: DType | str, what: str) -> None:
    """Point-to-point messages of this process's ranks of a group, all at once.

    Between two ranks the n-th send meets the n-th receive. Every rank of the group takes part, if
    need be with nothing to send or receive; one thread that has several ranks names all of them,
    since NCCL waits for the peers when two ranks first meet.
    what: names the exchange in the watchdog's messages; equal on every rank.

    Example, four numbers from the first GPU to the second, whose memory x and y stand for:
      >>> x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
      >>> with pc.nccl.create(jax.devices()[:2], name="pair") as group:
      ...     first, second = group.communicators.values()
      ...     leaves = pc.nccl.Messages(first, [(x.ctypes.data, 4, 1)], [], 0)
      ...     arrives = pc.nccl.Messages(second, [], [(y.ctypes.data, 4, 0)], 0)
      ...     pc.nccl.exchange([leaves, arrives], "float32", "first to second")
      >>> y.tolist()
      [0.0, 1.0, 2.0, 3.0]
    """
    code, width = dtypes.moved(dtype)
    for m in messages:
        m.communicator.check()  # before any other begins
        for _, _, peer in (*m.sends, *m.recvs):
            m.communicator.check_peer(peer)
    nccl = messages[0].communicator._nccl
    with contextlib.ExitStack() as calls:
        for m in messages:
            calls.enter_context(m.communicator.calling(("exchange", what), m.stream))
        try:
            nccl.group_start()
            try:
                for m in messages:
                    handle, stream = m.communicator.handle, m.stream
                    for address, count, peer in m.sends:
                        nccl.send(address, count * width, code, peer, handle, stream)
                    for address, count, peer in m.recvs:
                        nccl.recv(address, count * width, code, peer, handle, stream)
            finally:
                nccl.group_end()
        except Exception as error:
            told = [m.communicator.failure("ncclSend and ncclRecv", error) for m in messages]
            raise_for(error, told[0])
