"""What all probes stand on: the devices as they lie, and the one call of a kernel."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_collectives.annotations import Interpret
from pallas_collectives.kernels.machinery import sparsecore
from pallas_collectives.kernels.machinery.blocks import LANES as LANES
from pallas_collectives.replay import Machine

TILE = 8  # rows of float32
TILE_BYTES = TILE * LANES * 4
DIE = -1  # the axis between the devices of a chip


@dataclasses.dataclass(frozen=True)
class Rig:
    """Where probes run.

    Attributes:
      machine: the slice, with the figures that are assumed.
      mesh: all its devices on one axis "x", in the order of the machine's device numbers.
      interpret: False to compile, or `pltpu.InterpretParams`.
      block_bytes: bytes of a block that is streamed.
    """

    machine: Machine
    mesh: Mesh | AbstractMesh
    interpret: Interpret = False
    block_bytes: int = 2 << 20

    @property
    def size(self) -> int:
        """Devices."""
        return self.machine.n_devices

    @property
    def axes(self) -> tuple[int, ...]:
        """The torus axes along which there is a neighbour."""
        return tuple(axis for axis, n in enumerate(self.machine.shape) if n > 1)

    def partners(self, axis: int, distance: int = 1) -> np.ndarray:
        """The device that each one is paired with at a distance along an axis; itself if none.

        Pairs are apart: on a line or ring of 8, at distance 2, they are 0-2, 1-3, 4-6 and 5-7.
        """
        numbers = np.arange(self.size)
        per_chip = self.machine.generation.devices_per_chip
        if axis == DIE:
            return numbers ^ 1 if per_chip == 2 else numbers
        chips, die = np.divmod(numbers, per_chip)
        place = np.array(np.unravel_index(chips, self.machine.shape))
        here = place[axis]
        lower = (here // distance) % 2 == 0
        there = np.where(lower, here + distance, here - distance)
        place[axis] = np.minimum(there, self.machine.shape[axis] - 1)
        paired = np.ravel_multi_index(tuple(place), self.machine.shape) * per_chip + die
        return np.where(there < self.machine.shape[axis], paired, numbers)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A kernel to be run with any count of repetitions.

    Attributes:
      name: what it measures.
      program: (counts, peers, x) -> o; counts is (1,) int32, and x holds `rows` of each device.
      peers: int32 of rank 1: a table of devices.
      rows: how many rows of 128 float32 each device's x has.
      expected: (count, x as (devices, rows, 128)) -> o, likewise.
      guess: seconds of a repetition by the figures assumed.
    """

    name: str
    program: Callable[..., jax.Array]
    peers: np.ndarray
    rows: int
    expected: Callable[[int, np.ndarray], np.ndarray]
    guess: float

    def pattern(self, devices: int) -> np.ndarray:
        """x: no two rows alike, on any device, nor any zero."""
        shape = (devices, self.rows, LANES)
        return (
            (np.arange(math.prod(shape), dtype=np.int64) % (1 << 22) + 1)
            .astype(np.float32)
            .reshape(shape)
        )


def probe(
    rig: Rig,
    name: str,
    kernel: Callable[..., None],
    *,
    rows: int,
    expected: Callable[[int, np.ndarray], np.ndarray],
    guess: float,
    scratch: list[Any],
    out_rows: int = 0,
    peers: np.ndarray | None = None,
    barrier: int | None = None,
    chain: bool = False,
    subcores: int | None = None,
) -> Probe:
    """A probe of a kernel (count, peers, x, o, *scratch); x and o are in HBM.

    Args:
      rig: where it runs.
      name: what it measures.
      kernel: as above; count and peers are in SMEM.
      rows: how many x has.
      expected: see `Probe`.
      guess: see `Probe`.
      scratch: see `pl.pallas_call`.
      out_rows: how many o has, if not as many as x.
      peers: a table of devices.
      barrier: the id of the kernel's barrier semaphore, if it has one.
      chain: the kernel is repeated and not something in it: o is the next one's x.
      subcores: on so many vector subcores of a SparseCore it runs, each with its part of the rows,
        (1, rows, 128) of x and of o; with 0 on the scalar subcore, and with None on the TensorCore.
    """
    out = jax.ShapeDtypeStruct((out_rows or rows, LANES), jnp.float32)
    params = pltpu.CompilerParams(collective_id=barrier)
    options: dict[str, Any] = {"compiler_params": params, "interpret": rig.interpret, "name": name}
    if subcores is None:
        hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
        specs: dict[str, Any] = {"in_specs": [smem, smem, hbm], "out_specs": hbm}
        options |= {"out_shape": out, "scratch_shapes": scratch, **specs}
        call = pl.pallas_call(kernel, **options)
    else:
        call = _on_sparsecore(kernel, out, scratch, subcores, options)

    def body(count: jax.Array, peers: jax.Array, x: jax.Array) -> jax.Array:
        if not chain:
            return call(count, peers, x)
        return jax.lax.fori_loop(0, count[0], lambda _, x: call(count, peers, x), x)

    everywhere, split = PartitionSpec(), PartitionSpec("x")
    program = jax.shard_map(
        body,
        mesh=rig.mesh,
        in_specs=(everywhere, everywhere, split),
        out_specs=split,
        check_vma=False,
    )
    table = np.zeros(1, np.int32) if peers is None else peers.astype(np.int32).reshape(-1)
    return Probe(name, program, table, rows, expected, guess)


def _on_sparsecore(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    scratch: list[Any],
    subcores: int,
    options: dict[str, Any],
) -> Callable[..., jax.Array]:
    """The call of a probe's kernel there, as `probe` has it."""

    def body(tables: Any, _: Any, xs: Any, outs: Any, __: Any, *own: Any) -> None:
        kernel(*tables, *xs, *outs, *own)

    parts = (1, subcores, out.shape[0] // subcores, LANES) if subcores else out.shape
    shape = jax.ShapeDtypeStruct(parts, out.dtype)
    launched = sparsecore.kernel(body, ([shape], []), scratch, {}, subcores, **options)

    def call(*tables_and_x: jax.Array) -> jax.Array:
        *tables, x = tables_and_x
        read = [sparsecore.table(("x",), subcores, table) for table in tables]
        return launched(read, [], [x.reshape(parts)])[0][0].reshape(out.shape)

    return call


def shapes(rig: Rig, this: Probe) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The operands' shapes, with their shardings where the mesh has devices."""
    sizes = (
        ((1,), jnp.int32),
        (this.peers.shape, jnp.int32),
        ((rig.size * this.rows, LANES), jnp.float32),
    )
    if isinstance(rig.mesh, AbstractMesh):
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in sizes)
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("x")
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(rig.mesh, spec))
        for (shape, dtype), spec in zip(sizes, specs, strict=True)
    )


@functools.cache
def machine_mesh(machine: Machine) -> AbstractMesh:
    """An abstract mesh of a machine's devices, in their order."""
    return machine.mesh({"x": machine.n_devices})
