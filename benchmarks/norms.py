"""`norms`: a sum with residual and norm in one kernel, beside the sum and XLA's pass apart.

Kernels are replayed on modelled pods, over axis x, in bfloat16, with the vector unit's cost. A row
holds, in µs:

    fused      `psum_residual_rmsnorm` in one kernel
    sum        `psum` alone, by the algorithm that is chosen
    unfused    that, and one pass: a DMA for both operands, one for both results, at HBM's full
               rate. It is the least that residual and norm take apart; to start it is left out
    runs       which of them runs by itself
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import PartitionSpec

import pallas_collectives
from benchmarks import devices, settings
from benchmarks.fused import PODS, machine_of
from benchmarks.replay_rows import mesh_axes
from pallas_collectives.overlap import residual_norm
from pallas_collectives.replay import Machine, Report, replay

COLUMNS = 2048  # of a row: 4 KiB
flags.declare_key_flag("pods")  # of fused
_ROWS = flags.DEFINE_list(
    "rows", ["1", "4", "16", "64", "256"], f"Rows of {COLUMNS} elements on each device."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """So many rows on one pod; times in seconds."""

    where: str
    rows: int
    fused: float
    sum: float
    unfused: float
    runs: str

    def line(self) -> str:
        """The row as text, under `HEADER`."""
        times = "".join(f"{1e6 * t:12.1f}" for t in (self.fused, self.sum, self.unfused))
        return f"{self.where:12}{self.rows:>6}{self.rows * COLUMNS * 2:>10}{times}  {self.runs}"


HEADER = f"{'where':12}{'rows':>6}{'bytes':>10}" + "".join(
    f"{name:>12}" for name in ("fused us", "sum us", "unfused us")
)


def main(argv: Sequence[str]) -> int:
    """Prints the rows of what the flags ask for."""
    settings.check_no_arguments(argv)
    counts = [settings.parse_count(text, "--rows") for text in _ROWS.value]
    machines = list(map(machine_of, PODS.value))
    devices.prepare(2)
    print(
        "Modelled, not measured: one axis (x) of each pod, bfloat16.", f"{HEADER}  runs", sep="\n"
    )
    for row in rows(machines, counts):
        print(row.line(), flush=True)
    return 0


def rows(machines: Sequence[Machine], counts: Sequence[int]) -> Iterator[Row]:
    """Rows of replayed kernels."""
    for machine in machines:
        for count in counts:
            yield _row(machine, count)


def _row(machine: Machine, count: int) -> Row:
    shape = jax.ShapeDtypeStruct((count, COLUMNS), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((COLUMNS,), jnp.bfloat16)

    def run(call: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> Report:
        everywhere, mesh = PartitionSpec(), machine.mesh(mesh_axes(machine))
        program = jax.shard_map(
            functools.partial(call, axis_name="x"),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        return replay(program, *operands, machine=machine)

    norm = pallas_collectives.psum_residual_rmsnorm
    fused = run(functools.partial(norm, algorithm="fused"), shape, shape, weight).time
    summed = run(pallas_collectives.psum, shape).time
    (kernel,) = run(norm, shape, shape, weight).kernels
    nbytes = count * COLUMNS * 2
    unfused = summed + residual_norm.seconds_of_passes(nbytes, nbytes, machine.generation)
    runs = "fused" if kernel.name == residual_norm.NAME else "unfused"
    return Row(str(machine), count, fused, summed, unfused, runs)
