"""What the tests of every collective share: simulated meshes, adversaries, the real compiler.

A collective's test module adds rows to `conformance.py` and its kernels' own faults; how to run and
what to compare with is here.
"""

import dataclasses
import functools
import re
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_collectives import _compat
from pallas_collectives.kernels.machinery import sync

# "on_wait" runs every DMA as late as it may, newest first; "eager" at once. Races raise.
ADVERSARIES = {
    mode: pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    for mode in ("on_wait", "eager")
}


def on_cores(mode: str) -> pltpu.InterpretParams:
    """An adversary on devices of two cores."""
    return dataclasses.replace(ADVERSARIES[mode], num_cores_or_threads=2)


class Adversaries(pltpu.InterpretParams):
    """All of them: JAX asks for the mode when a kernel starts, and need not compile it again."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def under(self, mode: str, run: Callable[[], Any]) -> Any:
        """run(), under one of them."""
        vars(self)["dma_execution_mode"] = mode
        return run()


EITHER = Adversaries(detect_races=True)


class OneSemaphore:
    """An array of semaphores that gives its first wherever it is asked for one of a row."""

    def __init__(self, semaphores: Any) -> None:
        self._semaphores = semaphores

    @property
    def at(self) -> "OneSemaphore":
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._semaphores.shape

    def __getitem__(self, index: Any) -> Any:
        before = index[:-1] if isinstance(index, tuple) else ()
        return self._semaphores.at[(*before, 0)]


def is_of(semaphore: Any, semaphores: Any) -> bool:
    """Whether a semaphore that a kernel names is one of these."""
    return getattr(semaphore, "ref", semaphore) is semaphores


def drop_waits(
    patch: pytest.MonkeyPatch, semaphores: Any, at: types.ModuleType | None = None
) -> None:
    """`sync.wait` no longer waits for these; only where a module calls it, if one is given."""
    wait = sync.wait

    def some(semaphore: Any, ref: Any, times: Any = 1) -> None:
        if not is_of(semaphore, semaphores):
            wait(semaphore, ref, times)

    if at is None:
        patch.setattr(sync, "wait", some)
    else:
        patch.setattr(at, "sync", replaced(sync, wait=some))


def replaced(module: types.ModuleType, **attributes: Any) -> types.SimpleNamespace:
    """A module with some of its functions replaced."""
    return types.SimpleNamespace(**{**vars(module), **attributes})


def drop_barrier(patch: pytest.MonkeyPatch, name: str, module: Any = sync) -> None:
    """A barrier that gets its semaphore, and waits for nobody."""

    def open_door(*_: Any, meanwhile: Callable[[], None] = sync.nothing) -> None:
        pltpu.get_barrier_semaphore()
        meanwhile()

    patch.setattr(module, name, open_door)


# One topology for each TPU generation, by libtpu's names.
GENERATIONS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "7x": "tpu7x:2x2x1",
}
# A torus, or a grid of lines, of each: (topology, sizes of the axes).
TORI = (
    ("v4:2x2x1", (2, 2, 2)),
    ("v5e:4x4", (4, 4)),
    ("v5p:4x4x4", (4, 4, 4)),
    ("v6e:4x4", (4, 4)),
    ("tpu7x:2x2x1", (2, 2, 2)),
)

SMALL = 1024

# What lax moves between devices, adds and compares: all dtypes of JAX but those of two bits, which
# its own gather on CPUs mixes up. 64 bits are for `jax.enable_x64`.
_FLOATS = (
    *("float32", "bfloat16", "float16", "float64", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn"),
)
_INTEGERS = tuple(f"{kind}{bits}" for bits in (4, 8, 16, 32, 64) for kind in ("int", "uint"))
ADDED = (*_FLOATS, *_INTEGERS, "complex64", "complex128")
COMPARED = (*_FLOATS, *_INTEGERS, "bool")
DTYPES = (*ADDED, "bool", "float8_e8m0fnu")


def mesh(*sizes: int) -> Mesh:
    """A mesh of the first simulated devices, with axes "x", "y", "z"."""
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("x", "y", "z")[: len(sizes)])


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Values that tell blocks apart and add exactly in narrow types."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(shape) < 0.5
    if dtype == jnp.float8_e8m0fnu:  # powers of two, and no zero
        return (2.0 ** rng.integers(-4, 4, shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.integers(-8, 8, shape) + 1j * rng.integers(-8, 8, shape)).astype(dtype)
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -4
    return rng.integers(low, 4, shape).astype(dtype)


def is_64_bit(dtype: Any) -> bool:
    """Whether numbers, or the parts of complex ones, have 64 bits."""
    return jnp.dtype(dtype).name in ("float64", "int64", "uint64", "complex128")


def is_differentiable(dtype: Any) -> bool:
    """Whether gradients are of the dtype, which then has a zero."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype != "float8_e8m0fnu"


def per_device(
    fn: Callable[..., Any], on: Mesh, *, check_vma: bool = True, jit: bool = True
) -> Callable[..., list[np.ndarray]]:
    """fn inside shard_map: takes arrays of shape (devices, ...), gives each device's result."""
    spec = PartitionSpec(on.axis_names)

    def finish(y: Any) -> jax.Array:
        return (_varying(y, on) if check_vma else jnp.asarray(y))[None]

    def shard(*args: jax.Array) -> Any:
        return jax.tree.map(finish, fn(*(a[0] for a in args)))

    mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.jit(mapped) if jit else mapped


def _varying(y: Any, on: Mesh) -> jax.Array:
    """y, typed as different on every device where it is not already."""
    y = jnp.asarray(y)
    equal = set(on.axis_names) - set(jax.typeof(y).mat.varying)
    return jax.lax.pcast(y, tuple(equal), to="varying") if equal else y


def delayed(x: jax.Array, device: int, seconds: float = 0.3) -> jax.Array:
    """x, held back on one device of axis "x": the others run ahead of it."""

    def hold(position: Any, value: Any) -> Any:
        if int(position) == device:
            time.sleep(seconds)
        return value

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(hold, shape, jax.lax.axis_index("x"), x)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the TPU compiler made of a program, on one device.

    Attributes:
      ops: names of the entry computation's instructions, in order, whose result has
        at least `SMALL` elements (tables of a few devices are not worth mentioning).
      temp_bytes: memory beyond arguments and results.
      seconds: time to trace, lower and compile.
      text: all of it.
    """

    ops: tuple[str, ...]
    temp_bytes: int
    seconds: float
    text: str


@functools.cache
def _topology(name: str, slices: int = 1) -> Any:
    several = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **several)


def tpu_mesh(topology: str, axes: dict[str, int]) -> Mesh:
    """A mesh of the TPUs of a topology, to compile for."""
    devices = np.array(_topology(topology).devices)
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def compile_for_tpu(
    fn: Callable[..., Any],
    topology: str,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
    sizes: tuple[int, ...] | None = None,
    slices: int = 1,
) -> Compiled:
    """Compiles fn, inside shard_map over all devices, for a TPU topology that is not there.

    Of `slices` such slices, one network of links each.

    `shapes` are per device. Around fn stand a producer and a consumer, as in a model; a result that
    a remote device writes cannot be the program's own output without a copy, whoever writes it.
    """
    devices = np.array(_topology(topology, slices).devices)
    sizes = sizes or (devices.size,)
    on = Mesh(devices.reshape(sizes), ("x", "y", "z")[: len(sizes)])
    spec = PartitionSpec(on.axis_names)

    def shard(*args: jax.Array) -> Any:
        produced = [_touch(a[0]) for a in args]
        return jax.tree.map(lambda y: _touch(y)[None], fn(*produced))

    mapped = jax.jit(jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = NamedSharding(on, spec)
    operands = [jax.ShapeDtypeStruct((devices.size, *s), dtype, sharding=sharding) for s in shapes]
    start = time.perf_counter()
    compiled = mapped.lower(*operands).compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    entry = text.split("ENTRY")[1]
    ops = [op for shape, op in _INSTRUCTION.findall(entry) if _elements(shape) >= SMALL]
    return Compiled(tuple(ops), compiled.memory_analysis().temp_size_in_bytes, seconds, text)


# "%name = f32[16,128]{1,0} fusion(": the type, or tuple of types, and the op.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%\S+ = (.*?) ([a-z][\w\-]*)\(", re.MULTILINE)


def _elements(shape: str) -> int:
    extents = (re.findall(r"\d+", dims) for dims in re.findall(r"\[([\d,]*)\]", shape))
    return max((int(np.prod([int(e) for e in dims])) for dims in extents), default=0)


def _touch(x: jax.Array) -> jax.Array:
    """An elementwise pass that XLA cannot see through or drop."""
    if x.dtype == jnp.bool_:
        return ~x
    return (x.astype(jnp.float32) + 1).astype(x.dtype)


def caught(run: Callable[[], Any], want: Any) -> bool:
    """Whether a fault shows: the kernel dies as it runs, races, or has wrong values.

    A fault that cannot even be traced is a mistake of the test, and raises.
    """
    try:
        got = jax.tree.map(np.asarray, run())
    except jax.errors.JaxRuntimeError:
        return True
    else:
        same = all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))
        return race_reported() or not same
    finally:
        forget_failures()


def caught_under(modes: Iterable[str], run: Callable[[], Any], want: Any) -> list[str]:
    """The modes in which a fault shows, of a program with `EITHER`."""
    return [mode for mode in modes if EITHER.under(mode, lambda: caught(run, want))]


forget_failures = _compat.forget_simulated_failures
race_reported = _compat.races_reported


def fails(error: type[Exception], match: str, program: Callable[[jax.Array], Any]) -> None:
    """On 3 devices the program of an array cannot be traced, for such an error."""
    x = jax.ShapeDtypeStruct((3, 3, 6, 4), "float32")
    with pytest.raises(error, match=match):
        jax.eval_shape(per_device(program, mesh(3), jit=False), x)


def results_of(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a function of a module gives from here on, call by call."""
    found: list[Any] = []
    function = getattr(module, name)

    def noted(*args: Any, **options: Any) -> Any:
        found.append(function(*args, **options))
        return found[-1]

    monkeypatch.setattr(module, name, noted)
    return found
