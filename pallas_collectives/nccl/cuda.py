"""The few CUDA driver calls that communication needs, through ctypes.

The driver (`libcuda.so.1`) is on every machine with an NVIDIA GPU, whereas NVIDIA's Python
bindings for it are no dependency of JAX's.
"""

import contextlib
import copy
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_collectives.nccl.errors import CallError, NcclError
from pallas_collectives.nccl.tape import Address, Recorder, address_in

_NOT_READY = 600
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_RELAXED = 2
_HOST_PORTABLE_AND_MAPPED = 1 | 2
_ALREADY_ENABLED = 704
_EQUAL = 1
_WAIT_32, _WRITE_32 = 1, 2
_LAZY_PEER_ACCESS = 1
WORD = 4  # bytes of what streams write and await
_HANDLE = 64  # bytes


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("data", ctypes.c_ubyte * _HANDLE),)


class _WordStep(ctypes.Structure):
    """CUstreamBatchMemOpParams, of 32-bit words."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("spare", ctypes.c_uint64 * 2),
    )


class Driver:
    """The CUDA driver of this process; GPUs are named by their ordinal in it."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NcclError(
                f"no CUDA driver: {error}; NCCL needs a machine with an NVIDIA GPU and its driver"
            ) from error
        # Handed on from the caller as they are; the rest of a call's arguments have ctypes' types.
        self._lib.cuLaunchKernel.argtypes = [
            ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
        ]  # fmt: skip
        self._lib.cuMemsetD8Async.argtypes = [
            ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
        ]  # fmt: skip
        word, number, pointer = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p
        self._lib.cuMemcpyDtoDAsync_v2.argtypes = [word, word, ctypes.c_size_t, pointer]
        self._lib.cuStreamBatchMemOp_v2.argtypes = [pointer, number, pointer, number]
        self._lib.cuEventRecord.argtypes = [pointer, pointer]
        self._lib.cuStreamWaitEvent.argtypes = [pointer, pointer, number]
        self._call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def _call(self, name: str, *args: Any) -> None:
        result = getattr(self._lib, name)(*args)
        if result:
            raise self.failed(name, result)

    def failed(self, function: str, result: int, where: str = "") -> CallError:
        """A result that is not success, with CUDA's words for it; where: the communicator."""
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(result, ctypes.byref(text))
        return CallError(function, result, (text.value or b"unknown error").decode(), where)

    def address(self, function: str) -> int:
        """The address of the driver's C function of this name."""
        return address_in(self._lib, function)

    def recorded(self, recorder: Recorder) -> "Driver":
        """A twin whose calls `recorder` notes, for GPUs that `device` has had before."""
        twin = copy.copy(self)
        twin._call = recorder.call  # type: ignore[method-assign]
        return twin

    @contextlib.contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        """Makes the GPU current on this thread: its primary context, the one that XLA uses."""
        context = self._contexts.get(ordinal)
        if context is None:
            context, device = ctypes.c_void_p(), ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextlib.contextmanager
    def outside_captures(self) -> Iterator[None]:
        """Lets this thread allocate, map, load and query even while a stream is captured.

        CUDA refuses that on a thread that captures, or, after a capture that was begun in CUDA's
        global mode, on every thread, and ends the capture. XLA's captures are of the thread alone.
        """
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextlib.contextmanager
    def workspace(self, ordinal: int, size: int) -> Iterator[tuple[int, int]]:
        """(address, stream): `size` bytes on the GPU, and a stream whose work `with` waits for."""
        with self.device(ordinal), contextlib.ExitStack() as after:
            address = ctypes.c_uint64(self.allocate(ordinal, size))
            after.callback(self._call, "cuMemFree_v2", address)
            with self._brief_stream(ordinal) as stream:
                yield address.value, stream.value or 0

    @contextlib.contextmanager
    def _brief_stream(self, ordinal: int) -> Iterator[ctypes.c_void_p]:
        """A stream, of the GPU made current, whose work `with` waits for."""
        stream = ctypes.c_void_p(self.new_stream(ordinal))
        with self.device(ordinal), contextlib.ExitStack() as after:
            after.callback(self._call, "cuStreamDestroy_v2", stream)
            yield stream
            self._call("cuStreamSynchronize", stream)

    def allocate(self, ordinal: int, size: int) -> int:
        """The address of `size` bytes on the GPU; what a peer may read is never freed."""
        address = ctypes.c_uint64()
        with self.device(ordinal):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def let_in(self, ordinal: int, ordinals: Sequence[int]) -> None:
        """Lets the GPU read and write the memory of others of this process."""
        for other in set(ordinals) - {ordinal}:
            with self.device(other):  # for its context to be there
                pass
            with self.device(ordinal):
                result = self._lib.cuCtxEnablePeerAccess(self._contexts[other], 0)
            if result not in (0, _ALREADY_ENABLED):
                raise self.failed("cuCtxEnablePeerAccess", result, f"GPU {ordinal} of GPU {other}")

    def shared(self, ordinal: int, address: int) -> bytes:
        """What another process on this host needs to reach `address`, of `allocate`'s memory."""
        handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        with self.device(ordinal):
            where = ctypes.c_uint64(address)
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), where)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.data) + (address - base.value).to_bytes(8, "little")

    def opened(self, ordinal: int, shared: bytes) -> int:
        """The address, for the GPU, of memory that another process has shared; never closed."""
        base = ctypes.c_uint64()
        handle = _Handle((ctypes.c_ubyte * _HANDLE)(*shared[:_HANDLE]))
        with self.device(ordinal):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
        return base.value + int.from_bytes(shared[_HANDLE:], "little")

    def fill_words(self, ordinal: int, address: int, value: int, count: int) -> None:
        """Sets 32-bit words on the GPU; waits until they are set, and for nothing else."""
        where, number = ctypes.c_uint64(address), ctypes.c_size_t(count)
        with self._brief_stream(ordinal) as stream:
            self._call("cuMemsetD32Async", where, value, number, stream)

    def put(self, ordinal: int, address: int, data: bytes) -> None:
        """Writes bytes of the host to the GPU; waits until they are there, and for nothing else."""
        where, size = ctypes.c_uint64(address), ctypes.c_size_t(len(data))
        with self._brief_stream(ordinal) as stream:
            self._call("cuMemcpyHtoDAsync_v2", where, data, size, stream)

    def copy(self, target: Address, source: Address, size: int, stream: Address) -> None:
        """Copies bytes between addresses on GPUs: by a copy engine, from one GPU to another."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def give_words(self, addresses: Sequence[int], stream: Address) -> None:
        """Sets 32-bit words to 1, once everything on `stream` so far is done and to be seen."""
        self._words([_WordStep(_WRITE_32, address, 1, 0) for address in addresses], stream)

    def take_words(self, addresses: Sequence[int], stream: Address) -> None:
        """What follows on `stream` waits until these words are 1, and then they are 0."""
        waits = [_WordStep(_WAIT_32, address, 1, _EQUAL) for address in addresses]
        self._words(waits + [_WordStep(_WRITE_32, a, 0, 0) for a in addresses], stream)

    def _words(self, steps: Sequence[_WordStep], stream: Address) -> None:
        """In one node of a graph, for each takes its time."""
        if steps:
            array = (_WordStep * len(steps))(*steps)
            self._call("cuStreamBatchMemOp_v2", stream, len(steps), array, 0)

    def captures(self, stream: int) -> bool:
        """Whether the stream is being captured in a graph."""
        status = ctypes.c_int()
        self._call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return bool(status.value)

    def new_event(self, ordinal: int) -> "Event":
        """An event that has passed until it is recorded."""
        handle = ctypes.c_void_p()
        with self.device(ordinal):
            self._call("cuEventCreate", ctypes.byref(handle), _DISABLE_TIMING)
        return Event(self, handle)

    def record_again(self, event: "Event", stream: Address) -> None:
        """From here on the event stands for everything on `stream` so far."""
        self._call("cuEventRecord", event.handle, stream)

    def new_stream(self, ordinal: int, urgent: bool = False) -> int:
        """A stream of its own, which does not wait for the default stream.

        urgent: of the highest priority. CUDA has few queues (CUDA_DEVICE_MAX_CONNECTIONS) for all
        streams of one priority, and what waits on one stream holds up the others of its queue:
        XLA's too, if it is of their priority.
        """
        stream = ctypes.c_void_p()
        with self.device(ordinal):
            least, greatest = ctypes.c_int(), ctypes.c_int()
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            priority = greatest if urgent else least
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
        return stream.value or 0

    def record(self, ordinal: int, stream: Address) -> "Event":
        """An event that completes when everything on `stream` so far has."""
        event = self.new_event(ordinal)
        with self.device(ordinal):
            self.record_again(event, stream)
        return event

    def wait_event(self, stream: Address, event: "Event") -> None:
        """Work put on `stream` from now on waits, on the device, for `event`."""
        self._call("cuStreamWaitEvent", stream, event.handle, 0)

    def copy_to_host(self, source: int, size: int, stream: int) -> bytes:
        """`size` bytes at device address `source`, once everything on `stream` so far is done."""
        buffer = ctypes.create_string_buffer(size)
        self._call(
            "cuMemcpyDtoHAsync_v2",
            buffer,
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        return buffer.raw

    def clear(self, ordinal: int, address: Address, size: int, stream: Address) -> None:
        """`size` zero bytes at device address `address`, once everything on `stream` is done."""
        with self.device(ordinal):
            self._call("cuMemsetD8Async", address, 0, size, stream)

    def mapped_memory(self, ordinal: int, size: int) -> int:
        """Zeroed host memory that kernels reach at the same address; never freed.

        A kernel may write to it for as long as a captured graph can be replayed, so there is no
        moment at which freeing it would be safe.
        """
        address = ctypes.c_void_p()
        with self.device(ordinal):
            self._call(
                "cuMemHostAlloc",
                ctypes.byref(address),
                ctypes.c_size_t(size),
                _HOST_PORTABLE_AND_MAPPED,
            )
        assert address.value is not None
        ctypes.memset(address.value, 0, size)
        return address.value

    def load_kernels(self, ordinal: int, ptx: bytes, *names: str) -> tuple[ctypes.c_void_p, ...]:
        """The kernels `names` of a PTX module, compiled by the driver for this GPU."""
        module = ctypes.c_void_p()
        kernels = tuple(ctypes.c_void_p() for _ in names)
        with self.device(ordinal):
            self._call("cuModuleLoadData", ctypes.byref(module), ptx + b"\0")
            for kernel, name in zip(kernels, names, strict=True):
                self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        return kernels

    def launch(
        self,
        kernel: ctypes.c_void_p,
        stream: Address,
        *args: Any,
        blocks: int = 1,
        threads: int = 1,
    ) -> None:
        """Launches `kernel` on the current GPU; `args` are ctypes values, as it declares them."""
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        pointers.kept = args  # type: ignore[attr-defined]  # for as long as someone has the array
        sizes = blocks, 1, 1, threads, 1, 1
        self._call("cuLaunchKernel", kernel, *sizes, 0, stream, pointers, None)


class Event:
    """A moment on a stream."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p):
        self._driver = driver
        self.handle = handle

    def done(self) -> bool:
        """Whether the moment has passed; does not wait."""
        with self._driver.outside_captures():
            result = self._driver._lib.cuEventQuery(self.handle)
        if result == _NOT_READY:
            return False
        if result:
            self._driver._call("cuEventSynchronize", self.handle)  # raises with the text
        return True

    def __del__(self) -> None:
        # An event may be destroyed while it is pending: the driver frees it once it is done.
        with self._driver.outside_captures():  # Python collects garbage on whatever thread
            self._driver._lib.cuEventDestroy_v2(self.handle)


@functools.cache
def driver() -> Driver:
    """This process's driver; raises NcclError without one."""
    return Driver()
