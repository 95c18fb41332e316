"""The model against measured times: which it was fitted to, and how far off it is on the others.

Published figures of real TPUs, replayed with this library's bidirectional ring all-gather, of whole
blocks, but for the opposite device of an even ring, which gets a half from either side: no source
tells of the smaller parts in which the library sends them otherwise. Where the figure is of XLA's
own all-gather, the copy of the whole result that XLA makes after it is added at HBM bandwidth (it
is in XLA's compiled program). What a figure's text leaves open is stated with it.

    python -m pallas_collectives.replay.calibration
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives.kernels import all_gather
from pallas_collectives.replay.api import replay
from pallas_collectives.replay.machine import Machine
from pallas_collectives.topology.groups import Group

_BOOK = "JAX scaling book"


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured figure. `by_xla`: of XLA's all-gather; `fits`: the constant fitted to it, or
    ''.
    """

    what: str
    source: str
    machine: str
    ring: tuple[int, ...]  # device numbers of one ring, in order; its like are replayed beside it
    axes: tuple[tuple[str, int], ...]
    shard_bytes: int
    measured: float
    unit: str  # µs, GB/s received by a device, or % of the link peak
    by_xla: bool = False
    fits: str = ""

    def replayed(self) -> float:
        """The model's figure, in the same unit."""
        machine = Machine.named(self.machine)
        sizes = dict(self.axes)
        n = sizes["x"]
        group = Group(("x",), (n,))

        def body(x: jax.Array) -> jax.Array:
            return all_gather.ring(
                x, group, axis=0, bidirectional=True, vmem=False, interpret=False, most_chunks=2
            )

        spec = jax.sharding.PartitionSpec()
        function = jax.shard_map(
            body, mesh=machine.mesh(sizes), in_specs=spec, out_specs=spec, check_vma=False
        )
        shape = jax.ShapeDtypeStruct((self.shard_bytes // 512, 128), jnp.float32)
        seconds = replay(function, shape, machine=machine, placement=np.array(self.ring)).time
        if self.by_xla:
            seconds += 2 * n * self.shard_bytes / machine.generation.hbm_bandwidth
        if self.unit == "µs":
            return seconds * 1e6
        rate = (n - 1) * self.shard_bytes / seconds
        if self.unit == "GB/s":
            return rate / 1e9
        return 100 * rate / (2 * machine.generation.link_bandwidth)


def _rows(shape: tuple[int, int], axis: int) -> tuple[int, ...]:
    """Placement of a mesh (x = torus axis `axis`, y = the other)."""
    return tuple(np.moveaxis(np.arange(shape[0] * shape[1]).reshape(shape), axis, 0).reshape(-1))


_V5E_8X4: dict[str, Any] = {
    "machine": "v5e:8x4",
    "ring": _rows((8, 4), 1),
    "axes": (("x", 4), ("y", 8)),
}
_V5E_8X16: dict[str, Any] = {
    "machine": "v5e:8x16",
    "ring": _rows((8, 16), 1),
    "axes": (("x", 16), ("y", 8)),
}
# One device of each of four chips, in the order of a ring on 2x2 chips.
_7X_2X2: dict[str, Any] = {"machine": "7x:2x2x1", "ring": (0, 2, 6, 4), "axes": (("x", 4),)}

POINTS: tuple[Point, ...] = (
    Point(
        "all-gather over 4 of bf16[2048,8192]", _BOOK, shard_bytes=8 << 20, measured=680.0,
        unit="µs", by_xla=True, **_V5E_8X4,
    ),
    Point(
        "all-gather over 4 of bf16[256,256]", _BOOK, shard_bytes=32 << 10, measured=8.0,
        unit="µs", by_xla=True, **_V5E_8X4,
    ),
    Point(
        "all-gather over 16, 10 MiB a device", _BOOK, shard_bytes=10 << 20,
        measured=95.0, unit="% of peak", fits="link_efficiency", **_V5E_8X16,
    ),
    *(
        Point(
            f"all-gather over 4 chips, f32[{n},8,128] a device", "a sweep; its kernel is not named",
            shard_bytes=n * 4096, measured=measured, unit="GB/s", fits=fits, **_7X_2X2,
        )
        for n, measured, fits in (
            (64, 71.8, "launch_cost"),
            (256, 129.0, ""),
            (1024, 162.0, ""),
            (4096, 175.0, ""),
            (16384, 179.0, "link_efficiency"),
        )
    ),
)  # fmt: skip


def table() -> str:
    """Measured, replayed and error of every point, in Markdown."""
    lines = [
        "| machine | what | measured | replayed | error | |",
        "|---|---|---|---|---|---|",
    ]
    for point in POINTS:
        got = point.replayed()
        error = 100 * (got / point.measured - 1)
        note = f"fits {point.fits}" if point.fits else ""
        lines.append(
            f"| {point.machine} | {point.what} | {point.measured:g} {point.unit} "
            f"| {got:.1f} | {error:+.1f}% | {note} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
