"""Work on a communicator as C calls, recorded once and made again without Python.

Python's part of a small collective costs more than NCCL's, above all where one process drives
several GPUs: their threads queue for the interpreter. So a program's work is recorded when the
program is lowered, `record`, and XLA's calls are answered by the functions of `tape.c`, compiled
with the host's C compiler (CC, or `cc`) against jaxlib's own header when first needed. Without a
compiler Python answers every call: `available` says so, once, and `ffi.counters` which it was.
"""

import ctypes
import dataclasses
import functools
import importlib.resources
import logging
import operator
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax

_log = logging.getLogger(__name__)

_ARGUMENTS = 16
_GIVEN, _STREAM, _INPUT, _OUTPUT = range(4)  # an argument's sources

# As NVIDIA's bindings and NCCL name the functions, which take the same arguments.
_NCCL = {
    "all_gather": "ncclAllGather",
    "all_reduce": "ncclAllReduce",
    "reduce_scatter": "ncclReduceScatter",
    "allto_all": "ncclAlltoAll",
    "send": "ncclSend",
    "recv": "ncclRecv",
    "group_start": "ncclGroupStart",
    "group_end": "ncclGroupEnd",
}
# What must follow even if a call between the two fails.
_CLEANUP = {"ncclGroupStart": "ncclGroupEnd", "cuCtxPushCurrent_v2": "cuCtxPopCurrent_v2"}


class Gap(NamedTuple):
    """An argument that each call fills: the stream, or the address of an input or output.

    It is no number: work that would calculate with it, instead of handing it on, fails when it is
    recorded.
    """

    source: int
    number: int = 0
    offset: int = 0


# An address, or a stream.
Address: TypeAlias = int | Gap

STREAM = Gap(_STREAM)


def behind(address: Address, offset: int) -> Address:
    """The address `offset` bytes behind another, which may be a gap."""
    return address._replace(offset=offset) if isinstance(address, Gap) else address + offset


def inputs(count: int) -> list[Address]:
    """The addresses of a call's operands."""
    return [Gap(_INPUT, i) for i in range(count)]


def outputs(count: int) -> list[Address]:
    """The addresses of its results."""
    return [Gap(_OUTPUT, i) for i in range(count)]


class _Argument(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_int64),
        ("value", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("cleanup", ctypes.c_int64),
        ("arguments", _Argument * _ARGUMENTS),
    )


class _Tape(ctypes.Structure):
    _fields_ = (
        ("unusable", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("steps", ctypes.POINTER(_Step)),
    )


class _Work(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        ("next", ctypes.c_void_p),
        ("text", ctypes.c_char_p),
        ("length", ctypes.c_int64),
        ("devices", ctypes.c_int64),
        ("tapes", ctypes.POINTER(_Tape)),
    )


class Recorder:
    """Stands for NCCL's bindings and notes what is called.

    address: the address of a C function by its name.
    """

    def __init__(self, address: Callable[[str], int]):
        self._address = address
        self._steps: list[_Step] = []
        self.names: list[str] = []
        self._keep: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _NCCL:
            raise AttributeError(f"{name} cannot be recorded: only {', '.join(_NCCL)}")
        return functools.partial(self.call, _NCCL[name])

    def call(self, name: str, *args: Any) -> None:
        """Notes a call of the C function `name`, which returns 0 if all is well.

        args: gaps, numbers and handles, and ctypes' pointers, arrays and references.
        """
        if len(args) > _ARGUMENTS:
            raise ValueError(f"{name} has {len(args)} arguments, more than {_ARGUMENTS}")
        words = [
            _Argument(*a) if isinstance(a, Gap) else _Argument(_GIVEN, self._word(a)) for a in args
        ]
        self._steps.append(_Step(self._address(name), 0, tuple(words)))
        self.names.append(name)

    def _word(self, value: Any) -> int:
        self._keep.append(value)
        if value is None:
            return 0
        if isinstance(value, ctypes.Array):
            return ctypes.addressof(value)
        if hasattr(value, "_obj"):  # ctypes.byref(...)
            return ctypes.cast(value, ctypes.c_void_p).value or 0
        if isinstance(value, ctypes._SimpleCData):
            return value.value or 0
        return operator.index(value)

    def steps(self) -> "ctypes.Array[_Step]":
        """What was noted, in order."""
        begun: list[int] = []
        for i, name in enumerate(self.names):
            if begun and name == _CLEANUP[self.names[begun[-1]]]:
                for step in self._steps[begun.pop() + 1 : i]:
                    step.cleanup = step.cleanup or i
                continue
            if name in _CLEANUP:
                begun.append(i)
        steps = (_Step * len(self._steps))(*self._steps)
        steps.kept = self._keep  # type: ignore[attr-defined]
        return steps


def address_in(library: ctypes.CDLL, function: str) -> int:
    """The address of a C function of a loaded library."""
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0


class Recordable(Protocol):
    """What `record` needs of a communicator."""

    unusable: ctypes.c_int32

    def address(self, function: str) -> int:
        """The address of a C function of NCCL's or the driver's."""

    def recorded(self, recorder: Recorder) -> Any:
        """A twin whose calls `recorder` notes."""

    def failed(self, function: str, result: int, stream: int) -> Exception:
        """What to raise when a function did not return 0, on its way to put work on `stream`."""


@dataclasses.dataclass(frozen=True)
class Tape:
    """What one device does for one piece of work.

    Attributes:
      communicator: on which it does it.
      names: the names of the C functions, in order.
      steps: the calls.
    """

    communicator: Recordable
    names: Sequence[str]
    steps: Any


def record(communicator: Recordable, enqueue: Callable[[Any], None]) -> Tape:
    """The calls that `enqueue(communicator)` makes, without making them."""
    recorder = Recorder(communicator.address)
    enqueue(communicator.recorded(recorder))
    return Tape(communicator, recorder.names, recorder.steps())


_published: dict[bytes, Mapping[int, Recordable]] = {}  # text -> by ordinal
_steps: dict[int, tuple[Recordable, str]] = {}  # by address: the communicator and the function
_keep: list[Any] = []  # what the C side has been given: a program may use it at any time
_adding = threading.Lock()
_compiling = threading.Lock()


def publish(text: str, tapes: Mapping[int, Tape]) -> None:
    """From here on programs' calls of the work `text` are made from `tapes`, by ordinal.

    Equal texts are equal work: what is published again for the same communicators is let be.
    """
    library = _library()
    assert library is not None
    name = text.encode()
    communicators = {ordinal: tape.communicator for ordinal, tape in tapes.items()}
    with _adding:
        if _published.get(name) == communicators:
            return
        _published[name] = communicators
        by_ordinal = (_Tape * (max(tapes) + 1))()
        for ordinal, tape in tapes.items():
            unusable = ctypes.addressof(tape.communicator.unusable)
            by_ordinal[ordinal] = _Tape(unusable, len(tape.steps), tape.steps)
            for step, function in zip(tape.steps, tape.names, strict=True):
                _steps[ctypes.addressof(step)] = tape.communicator, function
        work = _Work(None, name, len(name), len(by_ordinal), by_ordinal)
        _keep.append((name, tapes, by_ordinal, work))
        library.add(ctypes.byref(work))


def failed(step: int, result: int, stream: int) -> Exception:
    """What to raise when the step at this address did not return 0."""
    communicator, function = _steps[step]
    return communicator.failed(function, result, stream)


def available() -> bool:
    """Whether calls are made from tapes on this host; if not, a warning has said why."""
    return _library() is not None


def calls() -> int:
    """How many of XLA's calls were made from tapes so far."""
    library = _compiled() if _compiled.cache_info().currsize else None
    return ctypes.c_int64.in_dll(library, "calls").value if library else 0


_Python = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)


def handler(has_stream: bool, graph: bool, python: Callable[..., int | None]) -> Any:
    """The C function that answers XLA.

    graph: whether XLA may capture what it is asked for.
    python: what it leaves the rest to: (address of XLA's call frame, `has_stream`, address of
      the step that failed or None, its result) -> address of XLA's error or None.
    """
    library = _library()
    assert library is not None
    callback = _Python(python)
    _keep.append(callback)
    by_kind = (ctypes.c_void_p * 2).in_dll(library, "python")
    by_kind[graph] = ctypes.cast(callback, ctypes.c_void_p).value
    place, kind = "stream" if has_stream else "host", "graph" if graph else "plain"
    return getattr(library, f"on_{place}_{kind}")


def address(function: str) -> int:
    """The address of a C function of tape.c's own; 0 where no compiler has made it.

    Work is recorded there all the same, to be made ready, and never made from the tape.
    """
    library = _library()
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0 if library else 0


def _library() -> ctypes.CDLL | None:
    with _compiling:  # a second copy would know nothing of what the first was given
        return _compiled()


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    """tape.c, compiled; None, with a warning, where that cannot be done."""
    compiler = os.environ.get("CC") or "cc"
    source = importlib.resources.files("pallas_collectives.nccl") / "tape.c"
    try:
        with importlib.resources.as_file(source) as path, tempfile.TemporaryDirectory() as folder:
            target = os.path.join(folder, "tape.so")
            # Symbolic: the names in it are its own, whatever else is loaded.
            command = [*shlex.split(compiler), "-std=c11", "-O2", "-shared", "-fPIC"]
            command += ["-Wl,-Bsymbolic", "-I", jax.ffi.include_dir(), str(path), "-o", target]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            return ctypes.CDLL(target)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning(
            "NCCL calls inside jit go through Python, which costs some tens of microseconds each "
            "outside CUDA graphs: %s failed: %s\n%sInstall a C compiler, or name one in the "
            "environment variable CC, and let TMPDIR be a folder whose libraries can be loaded",
            compiler,
            error,
            getattr(error, "stderr", None) or "",
        )
        return None
