"""A plan says in what pieces its kernel sends data, and the kernel's DMAs are as many as that."""

import math
from typing import Any

import jax
import pytest

import pallas_collectives as pc
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import KernelPlan, ProductPlan
from pallas_collectives.catalogue import ALGORITHMS, COLLECTIVES
from pallas_collectives.catalogue.records import JUMPS, NEIGHBOURS, TORUS
from pallas_collectives.kernels.machinery.blocks import Chunking
from pallas_collectives.replay import Machine
from pallas_collectives.replay.program import Start
from pallas_collectives.replay.trace_program import trace

ALL = [(op, name) for op in COLLECTIVES for name in ALGORITHMS[op]]
SMALL, LARGE = 8, 8192  # rows of 128: a tile, and 4 MiB


def sent(op: str, algorithm: str, pod: str, rows: int, **how: Any) -> tuple[Chunking, int]:
    """What the plan says, and the messages of all devices, of blocks of so many rows."""
    machine, (case, *_) = Machine.named(pod), (case for case in CASES if case.op == op)
    axes = replay_rows.mesh_axes(machine)
    n, over = math.prod(axes.values()), (tuple(axes) if len(axes) > 1 else "x")

    def body(x: jax.Array) -> jax.Array:
        return case.call(pc, x, over, backend="pallas", algorithm=algorithm, **how)

    everywhere = jax.sharding.PartitionSpec()
    of = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
    with counters.recorded() as plans:
        program, _ = trace(
            jax.shard_map(body, mesh=machine.mesh(axes), **of),
            jax.ShapeDtypeStruct(case.operand(n, rows), "float32"),
            generation=machine.generation,
            where=lambda _: machine.places(machine.default_placement(n)),
        )
    *_, plan = (p for p in plans if isinstance(p, KernelPlan) and p.op == op)
    (said,) = plan.chunking
    sending = [c for c in program.columns if isinstance(c, Start) and c.target is not None]
    kernel = sending[-1].source.kernel  # tables may be gathered before
    return said, sum(len(start.lanes) for start in sending if start.source.kernel == kernel)


def check(
    op: str, algorithm: str, pod: str, rows: tuple[int, int] = (SMALL, LARGE), **how: Any
) -> Chunking:
    """Messages are as many times more for a large block as its chunks are."""
    (whole, fewest), (cut, most) = (sent(op, algorithm, pod, n, **how) for n in rows)
    if cut.at_most:
        assert fewest * cut.chunks >= most >= fewest
    elif cut.of == whole.of:
        assert most * whole.chunks == fewest * cut.chunks
    else:  # a sum on a grid: each of a chunk's two parts goes along a tree, there and back
        n = math.prod(replay_rows.mesh_axes(Machine.named(pod)).values())
        assert most == cut.chunks * 2 * 2 * (n - 1)
    return cut


@pytest.mark.parametrize("op, algorithm", ALL)
def test_a_kernel_sends_in_as_many_chunks_as_its_plan_says(op: str, algorithm: str) -> None:
    check(op, algorithm, "v5p:3x1x1")


@pytest.mark.full
@pytest.mark.parametrize("op, algorithm", ALL)
def test_so_it_does_on_several_axes_from_vmem_and_packed(op: str, algorithm: str) -> None:
    record = COLLECTIVES[op].algorithm(algorithm)
    assert record
    if record.reach in (TORUS, JUMPS, NEIGHBOURS):
        check(op, algorithm, "v5e:4x4", (SMALL, 1024))
    if record.in_vmem:
        assert check(op, f"{algorithm}:vmem", "v5p:3x1x1").sections == 1
    if record.packed:
        pod = "v5p:2x2x1" if record.reach is TORUS else "v5p:3x1x1"
        check(op, algorithm, pod, (512, 4096), wire="int8")


def test_sums_of_large_blocks_go_in_sections() -> None:
    cut, _ = sent("reduce_scatter", "bidirectional", "v5p:3x1x1", LARGE)
    assert cut.chunks > cut.sections > 1
    assert str(cut) == f"a block goes in {cut.chunks} chunks, in {cut.sections} sections"


def test_explain_says_what_the_plan_says() -> None:
    told = pc.explain("psum", 16 << 20, devices=8, chip="v5p")
    said, _ = sent("all_reduce", told.algorithm, "v5p:8x1x1", (16 << 20) // (8 * 512))
    assert told.chunking == (said,) and f"\n  {said}\n" in str(told)
    small = pc.explain("ppermute", 4096, devices=8, chip="v5p")
    assert "\n  a block goes whole\n" in str(small)
    both = pc.explain("psum_start", 16 << 20, devices=8, chip="v5p")  # a scatter, and a gather
    assert both.algorithm == "ring:sc" and len(both.chunking) == 2


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("pod, n", [("v5e:16x1", 16), ("v5p:4x1x1", 4)])  # one core, and two
def test_products_send_in_as_many_chunks_as_their_plan_says(op: str, pod: str, n: int) -> None:
    machine, rows = Machine.named(pod), 4096
    gathers = op == "all_gather_matmul"
    x = jax.ShapeDtypeStruct((rows if gathers else n * rows, 1024), "bfloat16")
    w = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        product: jax.Array = getattr(pc, op)(x, w, "x", backend="pallas", algorithm="fused")
        return product

    everywhere = jax.sharding.PartitionSpec()
    of = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
    with counters.recorded() as plans:
        program, _ = trace(
            jax.shard_map(body, mesh=machine.mesh({"x": n}), **of),
            x,
            w,
            generation=machine.generation,
            where=lambda _: machine.places(machine.default_placement(n)),
        )
    (plan,) = (p for p in plans if isinstance(p, ProductPlan))
    ((said,), starts) = plan.chunking, (c for c in program.columns if isinstance(c, Start))
    assert said.chunks > 1
    messages = sum(len(start.lanes) for start in starts if start.target is not None)
    assert messages == n * (n - 1) * said.chunks
    told = pc.explain(op, shape=x.shape, columns=1024, devices=n, chip=pod[:3], dtype="bfloat16")
    assert told.algorithm == "fused" and f"\n  {said}\n" in str(told)
