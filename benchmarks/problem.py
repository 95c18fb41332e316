"""A collective at one size: operands on the devices, the program, and what must come out."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices
from benchmarks.cases import LANES, Case
from benchmarks.settings import FlagError
from pallas_collectives.errors import BackendError
from pallas_collectives.wires import Wire

Step = Callable[[jax.Array], jax.Array]


class Problem:
    """A case at one size: random operands on the devices, and what must come out."""

    def __init__(
        self,
        case: Case,
        dtype: str,
        size: int,
        mesh: Mesh,
        axes: tuple[str, ...],
        rng: np.random.Generator,
    ) -> None:
        """A case of `size` bytes, less up to a row of 128 elements a device, as in nccl-tests.

        Raises:
          FlagError: less than such a row for each device.
        """
        self.case, self._mesh, self._axes = case, mesh, axes
        self.n = int(np.prod([mesh.shape[axis] for axis in axes]))
        smallest = self.n * LANES * jnp.dtype(dtype).itemsize
        if size < smallest:
            rule = f"{self.n} devices with {LANES} elements of {dtype} each need {smallest} bytes"
            raise FlagError(f"--sizes with {size}", rule, "begin with a larger size")
        rows = size // smallest
        self.nbytes = rows * smallest
        self.count = rows * LANES * (self.n if case.whole else 1)
        shape = (mesh.size, *case.operand(self.n, rows))
        self._values = _random(shape, dtype, self.n if case.adds else 0, rng)
        self._spec = PartitionSpec(mesh.axis_names)
        self.operands = jax.device_put(self._values, NamedSharding(mesh, self._spec))

    def call(self, backend: str, algorithm: str | None, wire: Wire | None = None) -> Step:
        """The collective on one device's operand; over a wire it is ours, whoever serves.

        Raises:
          BackendError: lax's own, where that cannot be run.
        """
        if backend == "xla" and wire is None:
            if obstacle := self._lax_obstacle:
                remedy = "numpy's result is what ours is checked against"
                raise BackendError(f"lax's {self.case.name}", obstacle, remedy)
            return lambda x: self.case.by_lax(x, self._axes)
        how = {"backend": backend, "algorithm": algorithm, **({"wire": wire} if wire else {})}
        return lambda x: self.case.call(pallas_collectives, x, self._axes, **how)

    def compile(self, fn: Step, *, by_xla: bool = False) -> Step:
        """A program that runs fn on every device's operand; with lax's options if XLA serves it."""
        mapped = jax.shard_map(
            lambda x: fn(x[0])[None],
            mesh=self._mesh,
            in_specs=self._spec,
            out_specs=self._spec,
            check_vma=False,
        )
        options = devices.lax_options(self._mesh) if by_xla else {}
        return jax.jit(mapped, compiler_options=options).lower(self.operands).compile()

    def wrong(self, result: jax.Array) -> int:
        """How many elements of a result differ from numpy's or, where lax runs here, from lax's.

        Of the devices of this process.
        """
        wrong = 0
        for number, shard in enumerate(result.addressable_shards):
            got = np.asarray(shard.data)[0]
            expected = self._by_numpy[shard.index[0].start or 0]
            differs = _differs(got, expected.astype(got.dtype))
            if self._by_lax is not None:
                by_lax = self._by_lax.addressable_shards[number].data
                differs = differs | _differs(got, np.asarray(by_lax)[0])
            wrong += int(np.sum(differs))
        return wrong

    def off_by(self, result: jax.Array) -> float:
        """The largest difference from numpy's result, as a share of that one's largest number."""
        largest = off = 0.0
        for shard in result.addressable_shards:
            want = self._by_numpy[shard.index[0].start or 0].astype(np.float64)
            largest = max(largest, float(np.abs(want).max()))
            got = np.asarray(shard.data)[0].astype(np.float64)
            off = max(off, float(np.abs(got - want).max()))
        return off / largest if largest else off

    @property
    def _lax_obstacle(self) -> str:
        """Why lax's own is not run here; "" if it is."""
        if self.case.lax_everywhere:
            return ""
        if devices.kind() == "simulated":
            return "XLA cannot run it on CPU devices"
        if devices.kind() == "gpu" and jax.process_count() > 1:
            # With xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback, from 4 MiB on.
            return "XLA refuses it between processes; told not to, it was wrong, and hung"
        return ""

    @functools.cached_property
    def _by_lax(self) -> jax.Array | None:
        if self._lax_obstacle:
            return None
        return self.compile(self.call("xla", None), by_xla=True)(self.operands)

    @functools.cached_property
    def _by_numpy(self) -> dict[int, np.ndarray]:
        """Device number -> result."""
        names = self._mesh.axis_names
        numbers = np.arange(self._mesh.size).reshape(tuple(self._mesh.shape.values()))
        first = [names.index(axis) for axis in self._axes]
        groups = np.moveaxis(numbers, first, range(len(first))).reshape(self.n, -1).T
        return {
            device: result
            for members in groups.tolist()
            for device, result in zip(
                members, self.case.reference(self._values[members]), strict=True
            )
        }


def _differs(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    if got.dtype != want.dtype or got.shape != want.shape:
        return np.ones(got.shape, bool)
    return got != want


def _random(
    shape: tuple[int, ...], dtype: str, summands: int, rng: np.random.Generator
) -> np.ndarray:
    """Random values; whole numbers whose sum over `summands` devices is exact, if that is given."""
    to, limit = jnp.dtype(dtype), 100
    if to == jnp.bool_:
        return rng.integers(0, 2, shape, np.int8).astype(to)
    if summands and jnp.issubdtype(to, jnp.floating):
        exact_up_to = 2 ** (jnp.finfo(to).nmant + 1)
        limit = max(1, min(limit, exact_up_to // summands))
    return rng.integers(-limit, limit + 1, shape, np.int8).astype(to)
