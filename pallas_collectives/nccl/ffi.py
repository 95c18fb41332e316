"""Python functions as calls inside `jax.jit`, on XLA's own stream, at little host cost.

`jax.experimental.buffer_callback` does the same, with an object for each buffer and context, a
pytree and some layers for each call. Where one process drives four GPUs, four threads pay that
under one interpreter lock. This handler reads the addresses straight from XLA's call frame, whose
layout is that of `xla/ffi/api/c_api.h` (shipped with jaxlib: `jax.ffi.include_dir()`), major
version 0, which XLA promises to keep for at least twelve months.

What is called is named by a text in the program, not by a number that another process would give
to something else: a program from JAX's persistent compilation cache finds the same function.

Where the work has been recorded as a tape of C calls (`nccl.tape`), they are made without Python;
Python then answers only once something is wrong.
"""

import ctypes
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.interpreters import mlir

from pallas_collectives.nccl import tape

_METADATA = 1  # XLA_FFI_Extension_Metadata
_GRAPH_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_LONGEST = 200  # characters of a text that a program holds as they are
_MAJOR, _MINOR = 0, 3  # the version of the structures below: jaxlib 0.10's


class _Base(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
    )


class _Version(_Base):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Extension(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
    )


class _MetadataExtension(_Extension):
    _fields_ = (("metadata", ctypes.POINTER(_Metadata)),)


class _Items(_Base):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.c_void_p)),
    )


class _Attributes(_Base):
    _fields_ = (
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.c_void_p)),
    )


class _Frame(_Base):
    """XLA_FFI_CallFrame."""

    _fields_ = (
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("inputs", _Items),
        ("outputs", _Items),
        ("attributes", _Attributes),
    )


class _Buffer(_Base):
    _fields_ = (("dtype", ctypes.c_int), ("data", ctypes.c_void_p))


class _Text(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _StreamArgs(_Base):
    _fields_ = (("context", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class _OrdinalArgs(_Base):
    _fields_ = (("context", ctypes.c_void_p), ("ordinal", ctypes.c_int32))


class _ErrorArgs(_Base):
    _fields_ = (("message", ctypes.c_char_p), ("code", ctypes.c_int))


# XLA's own functions return at once, so they are called with the interpreter lock held: giving it
# up and getting it back would cost more than the call.
_XlaFunction = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(_Base):
    _fields_ = (
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", _XlaFunction),
        ("error_get", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _XlaFunction),
        ("type_register", ctypes.c_void_p),
        ("context_get", ctypes.c_void_p),
        ("state_set", ctypes.c_void_p),
        ("state_get", ctypes.c_void_p),
        ("memory_allocate", ctypes.c_void_p),
        ("memory_free", ctypes.c_void_p),
        ("pool_schedule", ctypes.c_void_p),
        ("pool_threads", ctypes.c_void_p),
        ("future_create", ctypes.c_void_p),
        ("future_set_available", ctypes.c_void_p),
        ("future_set_error", ctypes.c_void_p),
        ("run_id_get", ctypes.c_void_p),
        ("ordinal_get", _XlaFunction),
    )


Function = Callable[[int, int, Sequence[int], Sequence[int]], None]
"""(CUDA stream, device ordinal, input addresses, output addresses); it only enqueues work."""

_functions: dict[bytes, Function] = {}
_keep: list[Any] = []  # the registered handlers: XLA holds bare pointers to them


@dataclasses.dataclass
class Counters:
    """How often XLA's programs called out in this process; a CUDA graph's replay does not.

    Attributes:
      python: calls that Python answered.
    """

    python: int = 0

    @property
    def tape(self) -> int:
        """Calls that were answered from tapes, without Python."""
        return tape.calls()

    @property
    def calls(self) -> int:
        """All of them."""
        return self.python + self.tape


counters = Counters()


def call(
    text: str,
    function: Function,
    result_shape_dtypes: Any,
    *operands: Any,
    graph: bool = True,
    platform: str = "CUDA",
) -> Any:
    """`function` on the operands' and results' memory, as part of the program being traced.

    text: what `function` does, in full: equal texts mean equal functions, in every process. The
      latest function of a text serves all programs that name it, where there are no tapes of it.
    graph: whether its work may be captured in a CUDA graph and replayed without Python.
    Returns arrays as `jax.ffi.ffi_call` does. A call is never removed, even if its results are not
    used: the other ranks would wait for it. An exception in `function` fails the program.
    """
    name = _name(text)
    _functions[name.encode()] = function
    target = _register(platform, graph)
    foreign = jax.ffi.ffi_call(target, result_shape_dtypes, has_side_effect=True)
    return foreign(*operands, text=name)


def lower(
    ctx: mlir.LoweringRuleContext,
    text: str,
    function: Function,
    *operands: Any,
    graph: bool = True,
    has_effect: bool = True,
    aliases: Mapping[int, int] | None = None,
    tapes: Mapping[int, tape.Tape] | None = None,
) -> Any:
    """`call`, for the lowering rule of a primitive.

    has_effect: whether it must be made even if its results are not used. If XLA fuses such a call
      with slices before or after it (DynamicSliceFusionRewriter, JAX 0.11) it is made twice: XLA
      keeps it beside the fusion.
    aliases: operand -> result that is the operand's memory, which `function` overwrites in part.
    tapes: what `function` calls on each device, by ordinal, if that can be known now.
    """
    name = _name(text)
    _functions[name.encode()] = function
    if tapes and tape.available():
        tape.publish(name, tapes)
    platform = ctx.module_context.platforms[0]
    rule = jax.ffi.ffi_lowering(
        _register("cpu" if platform == "cpu" else "CUDA", graph),
        has_side_effect=has_effect,
        operand_output_aliases=dict(aliases or {}),
    )
    return rule(ctx, *operands, text=name)


def _name(text: str) -> str:
    """A text that every call can look up at once, however many devices the whole one names."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... {hashlib.sha256(text.encode()).hexdigest()}"


@functools.cache
def _register(platform: str, graph: bool) -> str:
    """The target that calls functions by name; `graph` says whether XLA may capture it."""
    name = f"pallas_collectives_{'graph' if graph else 'plain'}"
    has_stream = platform != "cpu"
    python = functools.partial(_handle, _GRAPH_COMPATIBLE * graph)
    if tape.available():
        handler = tape.handler(has_stream, graph, python)
    else:
        handler = _Handler(lambda frame: python(frame, has_stream))
    _keep.append(handler)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
    return name


def _handle(
    traits: int, address: int, has_stream: bool, step: int | None = None, result: int = 0
) -> int | None:
    """What XLA calls. None means success; an exception must not pass into XLA.

    step, result: the address of a tape's step that did not return 0, and what it did return.
    """
    frame = _Frame.from_address(address)
    if frame.extension_start:
        extension = _MetadataExtension.from_address(frame.extension_start)
        if extension.type == _METADATA:
            metadata = extension.metadata.contents
            metadata.version.major, metadata.version.minor = _MAJOR, _MINOR
            metadata.traits = traits
            return None
    stream_get, ordinal_get, error_create = _xla(frame.api)
    if not hasattr(_thread, "kept"):
        _keep_thread_state()
    try:
        text = _Text.from_address(frame.attributes.items[0])
        name = ctypes.string_at(text.data, text.size)
        stream = _StreamArgs(ctypes.sizeof(_StreamArgs), None, frame.context)
        if has_stream and stream_get(ctypes.addressof(stream)):
            raise RuntimeError("XLA gives no stream")
        if step:
            raise tape.failed(step, result, stream.stream or 0)
        ordinal = _OrdinalArgs(_OrdinalArgs.ordinal.offset + 4, None, frame.context)
        if ordinal_get(ctypes.addressof(ordinal)):
            raise RuntimeError("XLA gives no device ordinal")
        counters.python += 1
        _functions[name](
            stream.stream or 0, ordinal.ordinal, _addresses(frame.inputs), _addresses(frame.outputs)
        )
        return None
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        wrong = _ErrorArgs(_ErrorArgs.code.offset + 4, None, message, _INTERNAL)
        return error_create(ctypes.addressof(wrong))


_thread = threading.local()


def _keep_thread_state() -> None:
    """Keeps Python's state of this thread, one of XLA's, for as long as the thread lives.

    Without this Python makes a state whenever the thread calls in and drops it on return; where
    four threads do that at once it is most of a call's cost (seen: 70 of 90 µs). One more Ensure
    than Releases is what keeps it.
    """
    ctypes.pythonapi.PyGILState_Ensure()
    _thread.kept = True


def _addresses(buffers: _Items) -> list[int]:
    items = buffers.items
    return [_Buffer.from_address(items[i]).data or 0 for i in range(buffers.size)]


@functools.cache
def _xla(api: int) -> tuple[Any, Any, Any]:
    functions = _Api.from_address(api)
    return functions.stream_get, functions.ordinal_get, functions.error_create
