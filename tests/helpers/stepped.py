"""The stepped programs of our kernels, by name, on as few bytes as they take.

Each collective by each algorithm on a TensorCore, by those for SparseCores there too (`:sc`); and
each kernel that does more than a collective.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_collectives
from benchmarks.cases import CASES, Case
from pallas_collectives import catalogue, errors
from pallas_collectives.catalogue.records import Algorithm
from pallas_collectives.kernels import visits
from pallas_collectives.replay import Machine
from pallas_collectives.replay.program import Program
from pallas_collectives.replay.trace_program import trace
from pallas_collectives.topology.groups import Group


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one device calls: `body(axis name, *operands)`, with `operands(n)` on n devices.

    Operands are shapes of float32. `meshes`: on which it is judged; "2x2" are two axes of two.
    """

    body: Callable[..., Any]
    operands: Callable[[int], tuple[tuple[int, ...], ...]]
    meshes: tuple[str, ...] = ("2", "3", "4")


def _collective(case: Case, algorithm: Algorithm, suffix: str = "") -> Kernel:
    def body(axis: Any, x: Any) -> Any:
        name = algorithm.name + suffix
        return case.call(pallas_collectives, x, axis, backend="pallas", algorithm=name)

    one_axis, several = ("2", "3", "4", "5", "8"), ("2x2", "2x2x2")
    meshes = one_axis + several * (algorithm.name == "torus")
    if suffix:  # there sums are made by 16 subcores a device, which are slow to judge
        meshes = ("2", "3", "4")[: 2 if case.adds else 3]
    return Kernel(body, lambda n: (case.operand(n, 1),), meshes)


def _collectives() -> dict[str, Kernel]:
    return {
        f"{case.op}:{algorithm.name}{suffix}": _collective(case, algorithm, suffix)
        for suffix in ("", ":sc")
        for case in CASES
        for algorithm in catalogue.COLLECTIVES[case.op].algorithms
        if not suffix or algorithm.by_subcores or not case.adds
    }


def _copied(x_tile: Any, out_tile: Any) -> None:
    out_tile[...] = x_tile[...]


def _consumed(axis: Any, x: Any) -> Any:
    return pallas_collectives.gather_and_consume(x, _copied, axis, out=x)


def _produced(axis: Any, x: Any) -> Any:
    out = jax.ShapeDtypeStruct((8, 128), x.dtype)
    return pallas_collectives.produce_and_scatter(x, _copied, axis, out=out)


def _visits(axis: Any, x: Any, noted: bool) -> Any:
    """One row to some devices, two to others; told by notes, or known beforehand."""
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    peers = jnp.arange(n, dtype=jnp.int32)
    sizes = 1 + (peers + me) % 2  # also of what comes
    send = functools.partial(visits.send, x, jnp.arange(2 * n, dtype=jnp.int32), 2 * peers, sizes)
    group = Group((axis,), (n,))
    if noted:
        note = jnp.pad(sizes, (0, visits.head_lanes(n) - n))
        return send(n * len(x), group, note=note, interpret=False)
    landings = jnp.full(n, 2 * me, jnp.int32)
    return send(2 * n, group, landings=landings, come=sizes, interpret=False)


def _fused(name: str) -> Callable[..., Any]:
    return lambda axis, *operands: getattr(pallas_collectives, name)(
        *operands, axis, algorithm="fused", backend="pallas"
    )


_MORE = {
    "all_gather_matmul": Kernel(_fused("all_gather_matmul"), lambda n: ((8, 128), (128, 128))),
    "matmul_reduce_scatter": Kernel(
        _fused("matmul_reduce_scatter"), lambda n: ((8 * n, 128), (128, 128))
    ),
    "psum_residual_rmsnorm": Kernel(
        _fused("psum_residual_rmsnorm"), lambda n: ((8, 128), (8, 128), (128,))
    ),
    "gather_and_consume": Kernel(_consumed, lambda n: ((8, 128),)),
    "produce_and_scatter": Kernel(_produced, lambda n: ((8 * n, 128),)),
    "visits": Kernel(functools.partial(_visits, noted=False), lambda n: ((2 * n, 8, 128),)),
    "visits, noted": Kernel(functools.partial(_visits, noted=True), lambda n: ((2 * n, 8, 128),)),
}


def kernels() -> dict[str, Kernel]:
    """All kernels of ours, by name."""
    return _collectives() | _MORE


def program_of(name: str, *sizes: int) -> Program | None:
    """The stepped program of a kernel of ours over axes of such sizes; None if it cannot serve."""
    kernel = kernels()[name]
    axes = dict(zip("xyz", sizes, strict=False))
    over = tuple(axes) if len(axes) > 1 else "x"
    machine = Machine.named("v5p:" + "x".join(map(str, [*sizes, 1, 1][:3])))
    n = math.prod(sizes)
    everywhere = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(kernel.body, over),
        mesh=machine.mesh(axes),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kernel.operands(n)]
    try:
        program, _ = trace(
            mapped,
            *operands,
            generation=machine.generation,
            where=lambda mesh: machine.places(machine.default_placement(n)),
        )
    except errors.CollectiveError:
        return None
    return program
