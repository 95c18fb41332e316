"""`fused`: products with their collective in one kernel, beside both apart: what is hidden.

On TPUs and GPUs it times them on one axis of all devices; elsewhere it replays the kernels on
modelled pods. A row holds, in µs:

    fused       one kernel on TPUs, products beside copies on GPUs
    product     the product alone, by XLA on all cores of a device
    collective  the collective alone
    hidden %    of the shorter of these two, what fused hides: both together less fused
    x longer    fused, in times of the longer of the two
    least       modelled: what no form takes less than
    apart       measured: both, one after the other in one program

Modelled, the collective is our kernel, replayed, and the product takes the cycles that the TPU
compiler estimates for XLA's (`xla_products`). The least is the longer of the product at the chip's
peak rate and the bytes on the busiest link: where it forbids to hide 85%, or to be within 1.1 of
the longer, the row says so.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, PartitionSpec

import pallas_collectives
from benchmarks import compiled, devices, fused_timed, results, settings, timing, xla_products
from benchmarks.replay_rows import mesh_axes
from benchmarks.settings import FlagError
from pallas_collectives import catalogue
from pallas_collectives.backends.pallas.products import GATHER, SCATTER
from pallas_collectives.replay import Machine, MachineError, bound, replay

flags.adopt_module_key_flags(timing)
flags.adopt_module_key_flags(fused_timed)

OPS = (GATHER, SCATTER)
PODS = flags.DEFINE_list(
    "pods", ["v4:4x4x4", "v5e:16", "v5p:4x4x4", "v6e:16", "7x:4x4x4"], "Pods to model."
)
_OVER = flags.DEFINE_string("over", "x", "Axes of the pods' torus; several, with commas, together.")
SHAPES = (
    *("2048x4096x4096", "4096x4096x11008", "1024x4096x4096"),
    *("4096x8192x28672", "16384x1024x8192"),
)
TIMED_SHAPES = (*SHAPES, "2048x4096x8192")  # which PyTorch's and JAX's own forms were timed at
_SHAPES = flags.DEFINE_list(
    "shapes",
    None,
    f"ROWSxKxN: rows of one device's block, K, N. By default {', '.join(SHAPES)}, and on devices "
    f"{TIMED_SHAPES[-1]}.",
)
_FUSED = flags.DEFINE_list("fused", list(OPS), "The products, by name.")
_LEARN = flags.DEFINE_bool(
    "learn_products", False, "Ask the TPU compiler what XLA's products take."
)

_SAVE = flags.DEFINE_bool("save", False, "Keep the modelled rows for the README's table.")
SAVED = Path(__file__).parent / "fused.json"

HIDDEN, LONGER = 0.85, 1.10  # what a fused product is wanted to hide, and to take


@dataclasses.dataclass(frozen=True)
class Row:
    """One product with its collective; times in seconds.

    `least` is 0 where it is measured, and `apart` where it is modelled.
    """

    where: str
    op: str
    shape: tuple[int, int, int]
    fused: float
    product: float
    collective: float
    least: float = 0.0
    apart: float = 0.0

    @property
    def shorter(self) -> float:
        """The shorter of product and collective."""
        return min(self.product, self.collective)

    @property
    def longer(self) -> float:
        """The longer of them."""
        return max(self.product, self.collective)

    @property
    def overlap(self) -> float:
        """The share of the shorter one that the fused form hides."""
        return self.hidden_at(self.fused)

    def hidden_at(self, time: float) -> float:
        """The share of the shorter one that a form taking this time hides."""
        apart = self.product + self.collective
        return (apart - time) / self.shorter if self.shorter > 0 else 0.0

    @property
    def verdict(self) -> str:
        """What is wanted and not reached, and whether the bound forbids it."""
        if self.overlap >= HIDDEN and self.fused <= LONGER * self.longer:
            return ""
        forbidden = self.hidden_at(self.least) < HIDDEN or self.least > LONGER * self.longer
        return "forbidden by the least" if forbidden and self.least else "below what is wanted"

    def line(self) -> str:
        """The row as text, under `header`."""
        rows, depth, columns = self.shape
        times = "".join(f"{1e6 * t:12.1f}" for t in (self.fused, self.product, self.collective))
        shares = f"{100 * self.overlap:10.1f}{self.fused / self.longer:10.2f}"
        size, least = f"{rows}x{depth}x{columns}", f"{1e6 * (self.least or self.apart):12.1f}"
        text = f"{self.where:16}{self.op:24}{size:20}{times}{shares}{least}"
        return f"{text}  {self.verdict}".rstrip()


def header(last: str) -> str:
    """The columns' names; the last one's is `last`."""
    numbers = (
        *(("fused us", 12), ("product us", 12), ("coll us", 12)),
        *(("hidden %", 10), ("x longer", 10), (last, 12)),
    )
    names = "".join(f"{name:>{width}}" for name, width in numbers)
    return f"{'where':16}{'op':24}{'rows x K x N':20}{names}"


def main(argv: Sequence[str]) -> int:
    """Prints the rows of what the flags ask for."""
    settings.check_no_arguments(argv)
    named = [*map(shape_of, _SHAPES.value or ())]
    if unknown := set(_FUSED.value) - set(OPS):
        rule = f"the products are {', '.join(OPS)}"
        raise FlagError(f"--fused={min(unknown)}", rule, "name one, or both with a comma")
    if _SAVE.value:
        saved()  # says so before minutes of replaying if they could not be kept
    over = settings.parse_axis(_OVER.value, settings.AXES, "--over")
    devices.prepare(8)
    if devices.kind() == "simulated":
        shapes = named or [*map(shape_of, SHAPES)]
        if _LEARN.value:
            learn(PODS.value, shapes, over)
        found = modelled(PODS.value, _FUSED.value, shapes, over)
        title = f"Modelled, not measured: over {', '.join(over)} of each pod, bfloat16."
        names = header("least us")
    else:
        shapes = named or [*map(shape_of, TIMED_SHAPES)]
        found = measured(_FUSED.value, shapes, timing.ITERS.value, fused_timed.VALUES.value)
        where = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        title = f"Measured: {where}, bfloat16, --values={fused_timed.VALUES.value}."
        names = header("apart us")
    if devices.speaks():
        print(title, names, sep="\n")
    slower = False
    for row in found:
        slower |= row.overlap < 0
        if devices.speaks():
            print(row.line(), flush=True)
        if _SAVE.value and row.least:
            save(row)
    if slower and devices.speaks():
        print("hidden below 0: fused takes longer; by itself such a product runs unfused.")
    return 0


def saved() -> list[Row]:
    """The rows that are kept.

    Raises:
      FlagError: the file holds none.
    """
    with results.reading(SAVED, results.AS_COMMITTED):
        rows = json.loads(SAVED.read_text(encoding="utf-8")) if SAVED.exists() else []
        return [Row(**{**row, "shape": tuple(row["shape"])}) for row in rows]


def save(row: Row) -> None:
    """Keeps a row, in the place of the one that is like it."""
    kept = {(r.where, r.op, r.shape): r for r in (*saved(), row)}
    lines = ",\n ".join(json.dumps(dataclasses.asdict(r)) for r in kept.values())
    results.write(str(SAVED), lambda file: file.write(f"[{lines}]\n"))


def shape_of(text: str) -> tuple[int, int, int]:
    """Rows, K and N of a shape as text.

    Raises:
      FlagError: it is not a shape.
    """
    try:
        rows, depth, columns = map(int, text.split("x"))
    except ValueError:
        remedy = "write it like 4096x4096x11008"
        raise FlagError(f"--shapes={text}", "it must be ROWSxKxN", remedy) from None
    if not all(1 <= size <= 1 << 20 for size in (rows, depth, columns)):
        rule = f"each must be from 1 to {1 << 20}"
        raise FlagError(f"--shapes={text}", rule, "write it like 4096x4096x11008")
    return rows, depth, columns


def modelled(
    pods: Sequence[str],
    ops: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    over: tuple[str, ...] = ("x",),
) -> Iterator[Row]:
    """Rows of replayed kernels.

    Raises:
      FlagError: an unknown pod, or one device along an axis; a product that the compiler
        has not been asked for.
    """
    machines = [machine_of(pod, over) for pod in pods]  # all checked before the first is replayed
    return itertools.starmap(_modelled, itertools.product(machines, ops, shapes, [over]))


def learn(
    pods: Sequence[str], shapes: Sequence[tuple[int, int, int]], over: tuple[str, ...]
) -> None:
    """Asks the compiler for the products of these rows.

    Raises:
      FlagError: there is no compiler.
    """
    if not compiled.is_available():
        raise FlagError(
            "--learn_products", compiled.INSTALL, "install it, or leave --learn_products out"
        )
    machines = [machine_of(pod, over) for pod in pods]
    xla_products.learn(
        _product(machine, shape, _devices(machine, over))
        for machine, shape in itertools.product(machines, shapes)
    )


def machine_of(pod: str, over: tuple[str, ...] = ("x",)) -> Machine:
    """The pod of a name.

    Raises:
      FlagError: the pod is unknown, or has one device along one of the axes.
    """
    try:
        machine = Machine.named(pod)
    except MachineError as error:
        raise FlagError(f"--pods={pod}", str(error), "write it like v5e:16") from None
    for axis in over:
        if axis not in mesh_axes(machine):
            raise FlagError(f"--pods={pod}", f"it has one device along {axis}", "name a larger one")
    return machine


def _devices(machine: Machine, over: tuple[str, ...]) -> int:
    return math.prod(mesh_axes(machine)[axis] for axis in over)


def _product(machine: Machine, shape: tuple[int, int, int], n: int) -> xla_products.Product:
    rows, depth, columns = shape
    return machine.generation.name, n * rows, depth, columns


def _modelled(machine: Machine, op: str, shape: tuple[int, int, int], over: tuple[str, ...]) -> Row:
    axes, (rows, depth, columns), n = mesh_axes(machine), shape, _devices(machine, over)
    axis_name = over if len(over) > 1 else over[0]
    product = xla_products.seconds(_product(machine, shape, n))
    if product is None:
        rule = f"the TPU compiler has not been asked what it takes on {machine}"
        raise FlagError(f"--shapes={rows}x{depth}x{columns}", rule, "ask it: --learn_products")

    def seconds(run: Callable[..., Any], *operands: tuple[int, ...]) -> float:
        everywhere = PartitionSpec()
        function = jax.shard_map(
            functools.partial(run, axis_name=axis_name),
            mesh=machine.mesh(axes),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        given = [jax.ShapeDtypeStruct(operand, jnp.bfloat16) for operand in operands]
        return replay(function, *given, machine=machine).time

    fused = functools.partial(getattr(pallas_collectives, op), algorithm="fused")
    case, operand = fused_timed.collective_of(op, shape, n)
    both = seconds(fused, (operand[0], depth), (depth, columns))
    collective = seconds(lambda x, axis_name: case.call(pallas_collectives, x, axis_name), operand)
    block = catalogue.COLLECTIVES[case.op].block_bytes(math.prod(operand), n)  # its elements
    devices = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    last = [list(axes).index(axis) for axis in over]
    groups = np.moveaxis(devices, last, range(-len(last), 0)).reshape(-1, n)
    wire = bound(case.op, machine, groups, 2 * block).wire
    least = max(wire, 2 * n * rows * depth * columns / machine.generation.matrix_rate)
    where = f"{machine} {','.join(over)}"
    return Row(where, op, shape, both, product, collective, least)


def measured(
    ops: Sequence[str], shapes: Sequence[tuple[int, int, int]], iters: int, values: str
) -> Iterator[Row]:
    """Rows of chains of products in one program, on all devices."""
    mesh = Mesh(np.array(jax.devices()), (fused_timed.AXIS,))
    for op, shape in itertools.product(ops, shapes):
        times = fused_timed.seconds(mesh, op, shape, iters, values)
        yield Row(f"{mesh.size} devices", op, shape, **times)
