"""`fused`: products with their collective in one kernel, beside both apart: what is hidden.

On TPUs and GPUs it times them on one axis of all devices; elsewhere it replays the kernels on
modelled pods. A row holds, in µs:

    fused       one kernel on TPUs, a pipeline of permutes on GPUs
    unfused     the collective, then the product
    product     the product alone, by XLA on all cores of a device
    overlap %   of the shorter of product and collective (unfused less product), what fused hides

Modelled, the product takes what its operations take at the chip's full rate, and unfused is that
after our collective's kernel, replayed.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices, timing
from benchmarks.replay_rows import mesh_axes
from benchmarks.settings import FlagError
from pallas_collectives.backends.pallas.products import GATHER, SCATTER
from pallas_collectives.replay import Machine, MachineError, replay

flags.adopt_module_key_flags(timing)

OPS = (GATHER, SCATTER)
PODS = flags.DEFINE_list(
    "pods", ["v4:4x4x4", "v5e:16", "v5p:4x4x4", "v6e:16", "7x:4x4x4"], "Pods to model, over axis x."
)
_SHAPES = flags.DEFINE_list(
    "shapes", ["2048x4096x4096", "4096x4096x11008"], "ROWSxKxN: rows of one device's block, K, N."
)
_FUSED = flags.DEFINE_list("fused", list(OPS), "The products, by name.")


@dataclasses.dataclass(frozen=True)
class Row:
    """One product with its collective; times in seconds."""

    where: str
    op: str
    shape: tuple[int, int, int]
    fused: float
    unfused: float
    product: float

    @property
    def overlap(self) -> float:
        """Of the shorter of product and collective, the share that the fused form hides."""
        shorter = min(self.product, self.unfused - self.product)
        return (self.unfused - self.fused) / shorter if shorter > 0 else 0.0

    def line(self) -> str:
        """The row as text, under `HEADER`."""
        rows, depth, columns = self.shape
        times = "".join(f"{1e6 * t:12.1f}" for t in (self.fused, self.unfused, self.product))
        size = f"{rows}x{depth}x{columns}"
        return f"{self.where:12}{self.op:24}{size:20}{times}{100 * self.overlap:12.1f}"


HEADER = f"{'where':12}{'op':24}{'rows x K x N':20}" + "".join(
    f"{name:>12}" for name in ("fused us", "unfused us", "product us", "overlap %")
)


def main(argv: Sequence[str]) -> int:
    """Prints the rows of what the flags ask for."""
    if argv[1:]:
        raise FlagError(f"argument {argv[1]!r}", "there are only flags", "see --help")
    shapes = [_shape(text) for text in _SHAPES.value]
    if unknown := set(_FUSED.value) - set(OPS):
        rule = f"the products are {', '.join(OPS)}"
        raise FlagError(f"--fused={min(unknown)}", rule, "name one, or both with a comma")
    devices.prepare(8)
    if devices.kind() == "simulated":
        found = modelled(PODS.value, _FUSED.value, shapes)
        title = "Modelled, not measured: one axis (x) of each pod, bfloat16."
    else:
        found = measured(_FUSED.value, shapes, timing.ITERS.value)
        title = f"Measured: {jax.device_count()} x {jax.devices()[0].device_kind}, bfloat16."
    if devices.speaks():
        print(title, HEADER, sep="\n")
    slower = False
    for row in found:
        slower |= row.overlap < 0
        if devices.speaks():
            print(row.line(), flush=True)
    if slower and devices.speaks():
        print("overlap below 0: fused takes longer; by itself such a product runs unfused.")
    return 0


def _shape(text: str) -> tuple[int, int, int]:
    try:
        rows, depth, columns = map(int, text.split("x"))
    except ValueError:
        remedy = "write it like 4096x4096x11008"
        raise FlagError(f"--shapes={text}", "it is ROWSxKxN", remedy) from None
    if not all(1 <= size <= 1 << 20 for size in (rows, depth, columns)):
        rule = f"each is from 1 to {1 << 20}"
        raise FlagError(f"--shapes={text}", rule, "write it like 4096x4096x11008")
    return rows, depth, columns


def modelled(
    pods: Sequence[str], ops: Sequence[str], shapes: Sequence[tuple[int, int, int]]
) -> Iterator[Row]:
    """Rows of replayed kernels.

    Raises:
      FlagError: a pod that is none, or has one device along x.
    """
    machines = list(map(machine_of, pods))  # all of them checked before the first is replayed
    return itertools.starmap(_modelled, itertools.product(machines, ops, shapes))


def machine_of(pod: str) -> Machine:
    """The pod of a name.

    Raises:
      FlagError: it is none, or has one device along x.
    """
    try:
        machine = Machine.named(pod)
    except MachineError as error:
        raise FlagError(f"--pods={pod}", str(error), "write it like v5e:16") from None
    if "x" not in mesh_axes(machine):
        raise FlagError(f"--pods={pod}", "it has one device along x", "name a larger one")
    return machine


def _modelled(machine: Machine, op: str, shape: tuple[int, int, int]) -> Row:
    axes = mesh_axes(machine)
    n, (rows, depth, columns) = axes["x"], shape

    def seconds(run: Callable[..., Any], *operands: tuple[int, ...]) -> float:
        everywhere = PartitionSpec()
        function = jax.shard_map(
            run,
            mesh=machine.mesh(axes),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        given = [jax.ShapeDtypeStruct(operand, jnp.bfloat16) for operand in operands]
        return replay(function, *given, machine=machine).time

    product = 2 * n * rows * depth * columns / machine.generation.matrix_rate
    fused = functools.partial(getattr(pallas_collectives, op), axis_name="x", algorithm="fused")
    if op == GATHER:
        gather = functools.partial(pallas_collectives.all_gather, axis_name="x", tiled=True)
        collective = seconds(gather, (rows, depth))
        both = seconds(fused, (rows, depth), (depth, columns))
    else:
        scatter = functools.partial(pallas_collectives.psum_scatter, axis_name="x", tiled=True)
        collective = seconds(scatter, (n * rows, columns))
        both = seconds(fused, (n * rows, depth), (depth, columns))
    return Row(str(machine), op, shape, both, collective + product, product)


def measured(
    ops: Sequence[str], shapes: Sequence[tuple[int, int, int]], iters: int
) -> Iterator[Row]:
    """Rows of chains of products in one program, on all devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for op, shape in itertools.product(ops, shapes):
        rows, depth, columns = shape
        blocks = 1 if op == GATHER else mesh.size
        call = functools.partial(getattr(pallas_collectives, op), axis_name="x")
        times = {
            how: _seconds(
                mesh, functools.partial(call, algorithm=how), (blocks * rows, depth), columns, iters
            )
            for how in ("fused", "unfused")
        }
        product = _seconds(mesh, jnp.matmul, (mesh.size * rows, depth), columns, iters)
        where = f"{mesh.size} devices"
        yield Row(where, op, shape, times["fused"], times["unfused"], product)


def _seconds(
    mesh: Mesh, call: Callable[..., Any], shape: tuple[int, int], columns: int, iters: int
) -> float:
    """The median time of one call, in a chain within one program, less that of a chain of one.

    Each call waits for the one before through one element that this overwrites in its operand.
    """
    spec = PartitionSpec("x")
    sharding = NamedSharding(mesh, spec)

    def chain(length: int) -> Callable[..., Any]:
        def link(_: Any, x: jax.Array, w: jax.Array) -> jax.Array:
            y = jax.lax.optimization_barrier(call(x, w))
            return jax.lax.dynamic_update_slice(x, y[:1, :1].astype(x.dtype), (0, 0))

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, length, lambda i, x: link(i, x, w[0]), x[0])[None]

        mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped)

    def operand(shape: tuple[int, ...]) -> jax.Array:
        ones = functools.partial(jnp.ones, (mesh.size, *shape), jnp.bfloat16)
        return jax.jit(ones, out_shardings=sharding)()

    x, w = operand(shape), operand((shape[1], columns))
    one, many = chain(1), chain(1 + iters)

    def clock(program: Callable[..., Any]) -> float:
        return timing.clocked(program, x, w)

    for program in (one, many):
        clock(program)
    dispatch = statistics.median(clock(one) for _ in range(timing.SAMPLES))
    return statistics.median((clock(many) - dispatch) / iters for _ in range(timing.SAMPLES))
