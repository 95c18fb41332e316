"""The all-reduce on a grid of lines: its order and rounding, faults, loads and time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from test_torus_kernels import SLOW, on_lines

import harness
import pallas_collectives
from benchmarks import cases, replay_rows
from channel_faults import Patch, no_credits, no_wait, one_semaphore
from pallas_collectives.kernels.machinery.combine import wide
from pallas_collectives.kernels.torus import all_reduce_grid, grid_chunks
from pallas_collectives.kernels.torus.grid_chunks import Cut
from pallas_collectives.replay import Machine, Report, bound
from pallas_collectives.replay import replay as replayed
from pallas_collectives.topology.groups import Group

OPS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum}


def group_on(*sizes: int) -> Group:
    """The group of a grid: axes of two devices close, and are lines all the same."""
    return on_lines(sizes, [k for k, n in enumerate(sizes) if n > 2])


def reduced(x: jax.Array, group: Group, cut: Cut, params: Any = False, op: str = "sum") -> Any:
    return all_reduce_grid.grid(
        x, group, group.torus, cut, op=op, interpret=params, name="all_reduce_torus"
    )


def in_order(x: np.ndarray, sizes: tuple[int, int], cut: Cut, op: str = "sum") -> np.ndarray:
    """What the docstring says, of terms (devices, rows, columns)."""
    terms = x.reshape(*sizes, *x.shape[1:])
    out = np.zeros_like(x[0])
    for chunk in range(cut.count):
        row, column = divmod(chunk, cut.across)
        for part in (0, 1):
            start = row * sum(cut.heights) + part * cut.heights[0]
            here = (
                slice(start, start + cut.heights[part]),
                slice(column * cut.width, (column + 1) * cut.width),
            )
            along = np.moveaxis(terms, part, 0)[(slice(None), slice(None), *here)]
            out[here] = summed(along, chunk % sizes[part], op)
    return out


def summed(terms: np.ndarray, owner: int, op: str) -> np.ndarray:
    """The sum of terms (place in the row, place in the column, ...) that column `owner` makes."""
    own, n = terms.astype(wide(terms.dtype)), terms.shape[1]

    def on_wire(x: np.ndarray) -> np.ndarray:
        return x.astype(terms.dtype).astype(own.dtype)

    def along(places: range, so_far: np.ndarray) -> np.ndarray:
        comes = None
        for place in places:
            comes = own[place] if comes is None else OPS[op](comes, own[place])
            comes = on_wire(comes)
        return so_far if comes is None else OPS[op](so_far, comes)

    right, left = range(owner), range(len(terms) - 1, owner, -1)
    column = along(left, along(right, own[owner]))

    def towards_middle(places: range, total: np.ndarray, last: np.ndarray | None) -> Any:
        for place in places:
            last = column[place] if last is None else OPS[op](column[place], last)
            last = on_wire(last)
        return total if last is None else OPS[op](total, last)

    total = towards_middle(range(n // 2), column[n // 2], None)
    total = towards_middle(range(n - 1, n // 2, -1), total, None)
    return total.astype(terms.dtype)


CUTS = {
    "float32": Cut((8, 8), 128, 1, 26),
    "bfloat16": Cut((32, 16), 128, 2, 16),
    "int8": Cut((32, 32), 128, 1, 14),
}


def operand(n: int, cut: Cut, dtype: str) -> np.ndarray:
    """Numbers whose sum depends on the order in which they are added."""
    shape = (n, sum(cut.heights) * cut.count // cut.across, cut.width * cut.across)
    return (20 * np.random.default_rng(n).standard_normal(shape)).astype(dtype)


def found_wrong(
    sizes: tuple[int, int], *modes: str, dtype: str = "float32", op: str = "sum", hold: int = 0
) -> list[str]:
    """The modes in which a race or other bits than `in_order` has are found, on any device."""
    cut, group = CUTS[dtype], group_on(*sizes)
    x = operand(math.prod(sizes), cut, dtype)

    def program(block: jax.Array) -> jax.Array:
        return reduced(harness.delayed(block, hold), group, cut, harness.EITHER, op)

    run = harness.per_device(program, harness.mesh(*sizes), check_vma=False)
    want = np.broadcast_to(in_order(x, sizes, cut, op), x.shape)
    return harness.caught_under(modes, lambda: run(x), want)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes, dtype, op, hold",
    [
        ((2, 3), "bfloat16", "sum", 0),
        ((4, 2), "float32", "sum", 5),
        pytest.param((3, 2), "float32", "max", 4, marks=SLOW),
        pytest.param((2, 4), "int8", "sum", 2, marks=SLOW),
        pytest.param((2, 3), "float32", "sum", 3, marks=SLOW),
    ],
)
def test_all_devices_have_the_documented_bits_however_late_one_is(
    sizes: tuple[int, int], dtype: str, op: str, hold: int
) -> None:
    assert not found_wrong(sizes, *harness.ADVERSARIES, dtype=dtype, op=op, hold=hold)


def test_the_order_shows_in_the_bits() -> None:
    """Else the test above could not tell one order, or one rounding, from another."""
    for dtype in ("float32", "bfloat16"):
        x = operand(6, CUTS[dtype], dtype)
        documented = in_order(x, (2, 3), CUTS[dtype])
        for other in (in_order(x[::-1], (2, 3), CUTS[dtype]), x.sum(axis=0, dtype=dtype)):
            assert not np.array_equal(documented, other)


@pytest.mark.full
def test_a_users_psum_goes_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_chunks, "PAIR_SECONDS", 0.1e-6)
    x = harness.random((8, 256, 256), "float32")
    with pallas_collectives.torus("v5e:2x4"):
        program = harness.per_device(
            lambda a: pallas_collectives.psum(
                a, ("x", "y"), backend="pallas", algorithm="torus:hbm"
            ),
            harness.mesh(2, 4),
        )
        got = np.asarray(program(x))
    np.testing.assert_array_equal(got, np.broadcast_to(x.sum(0), x.shape))


# On machines that are not there -------------------------------------------------------------------


def run_on(sizes: tuple[int, int], cut: Cut, races: bool = True) -> Report:
    """The replay of float32 on a grid of v5e."""
    pod, group = Machine.named(f"v5e:{'x'.join(map(str, sizes))}"), group_on(*sizes)
    program = jax.shard_map(
        lambda x: reduced(x, group, cut),
        mesh=pod.mesh({"x": sizes[0], "y": sizes[1]}),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    rows = sum(cut.heights) * cut.count // cut.across
    x = jax.ShapeDtypeStruct((rows, cut.width * cut.across), jnp.float32)
    return replayed(program, x, machine=pod, races=races)


SMALL = Cut((8, 8), 128, 1, 24)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 3),
        (3, 3),
        (5, 3),
        pytest.param((4, 4), marks=SLOW),
        pytest.param((2, 8), marks=SLOW),
        pytest.param((8, 2), marks=SLOW),
        pytest.param((7, 3), marks=SLOW),
        pytest.param((4, 8), marks=SLOW),
    ],
)
def test_no_fault_on_any_schedule_and_each_link_carries_the_same(sizes: tuple[int, int]) -> None:
    """A whole number of rounds; halves carry the same if the sides are the same."""
    cut = Cut((8, 8), 128, 1, math.lcm(*sizes) * (60 // math.lcm(*sizes) + 1))
    report = run_on(sizes, cut)
    assert report.ok
    loads = set(report.link_bytes[report.link_bytes > 0].tolist())
    part = cut.count * 8 * 512
    assert loads == {part + part / n for n in sizes}


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(patch, "barrier_on_torus")


def freed_before_it_has_left(patch: pytest.MonkeyPatch) -> None:
    def end_send(self: Any, side: Any, number: Any) -> None:
        """Releases the sum that is only just about to leave."""
        self._on(side).release(number + all_reduce_grid.IN_FLIGHT)

    patch.setattr(all_reduce_grid._Part, "_end_send", end_send)


def sums_written_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(all_reduce_grid._Part, "_end_sums", lambda *_: None)


def term_before_it_is_here(patch: pytest.MonkeyPatch) -> None:
    def term(self: Any, kind: Any, chunk: Any) -> Any:
        return self._s.terms_ref.at[kind, chunk % 2]

    patch.setattr(all_reduce_grid._Part, "_term", term)


# What is planted, and the buffer of a race that it makes.
FAULTS: dict[str, tuple[Patch, str]] = {
    "no wait for a sum": (no_wait(of_sums=True), "on_ref"),
    "no wait for a finished chunk": (no_wait(of_sums=False), "result_refs[0]"),
    "no credits": (no_credits, "here_ref"),
    "one semaphore for all sums": (one_semaphore(of_sums=True), "on_ref"),
    "one for all finished chunks": (one_semaphore(of_sums=False), "result_refs[0]"),
    "no barrier": (no_barrier, "on_ref"),
    "a slot freed before its sum has left": (freed_before_it_has_left, "on_ref"),
    "a column's sums written over": (sums_written_over, "sums_ref"),
    "a term added before it is here": (term_before_it_is_here, "terms_ref"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, buffer = FAULTS[fault]
    plant(monkeypatch)
    races = run_on((2, 4), SMALL).races or []
    assert any(buffer in race.buffer for race in races)


@pytest.mark.full
def test_a_fault_is_found_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    no_wait(of_sums=True)(monkeypatch)
    assert found_wrong((2, 3), "on_wait", dtype="bfloat16")


# Time, memory, compilers --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "machine, mib, of_wire",
    [
        ("v5e:2x4", 16, 90),
        ("v5e:3x3", 9, 85),
        pytest.param("v5e:4x4", 16, 88, marks=SLOW),
        pytest.param("v6e:4x4", 16, 81, marks=SLOW),
        pytest.param("v6e:4x4", 32, 88, marks=SLOW),
        pytest.param("v5e:3x5", 15, 84, marks=SLOW),
    ],
)
def test_large_sums_keep_all_links_of_a_grid_busy(machine: str, mib: int, of_wire: int) -> None:
    psum = [case for case in cases.CASES if case.name == "psum"]
    plan = replay_rows.plan([machine], psum, [mib << 20], axes=("x", "y"))
    (row,) = replay_rows.rows(plan)
    assert row.served == "torus" and not row.faults and not row.error
    assert of_wire <= (row.of_wire or 0) <= 100


@pytest.mark.parametrize("sizes", [(2, 4), (3, 5), (4, 4), (4, 8)])
@pytest.mark.parametrize("rows", [1 << 15, 3 << 17])
def test_scratch_is_16_mib_at_the_most(sizes: tuple[int, int], rows: int) -> None:
    """Whatever the operand; and shares of it leave links about the same load."""
    wanted = grid_chunks.PAIR_SECONDS * 90e9
    for columns, dtype in ((128, jnp.float32), (8192, jnp.bfloat16)):
        cut = Cut.of(sizes, (rows, columns), dtype, wanted)
        assert cut is not None and cut.count * sum(cut.heights) // cut.across == rows
        nbytes = 0
        for height, order in zip(cut.heights, (sizes, sizes[::-1]), strict=True):
            leaves = jax.tree.leaves(
                all_reduce_grid.Scratch.of(order, (height, cut.width), jnp.dtype(dtype))
            )
            in_vmem = [x for x in leaves if x.memory_space == pltpu.VMEM]
            nbytes += sum(math.prod(x.shape) * x.dtype.itemsize for x in in_vmem)
        assert nbytes <= 16 << 20
        share = cut.heights[0] / sum(cut.heights)
        loads = (share + (1 - share) / sizes[1], 1 - share + share / sizes[0])
        assert max(loads) <= 1.04 * min(loads)


@pytest.mark.full
@pytest.mark.parametrize("topology", ["v4:2x4x1", "v5e:4x4", "v5p:2x4x2", "v6e:4x4", "tpu7x:2x2x2"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_compiles_to_the_kernel_alone(topology: str, dtype: str) -> None:
    """Sixteen devices, taken for a grid of 4 x 4: compilers do not ask how they lie."""
    pytest.importorskip("libtpu")
    shape = (4096, 2048)
    cut = Cut.of((4, 4), shape, jnp.dtype(dtype), 64 << 10)
    assert cut is not None
    program = harness.compile_for_tpu(
        lambda x: reduced(x, group_on(4, 4), cut),
        topology,
        shape,
        dtype=jnp.dtype(dtype),
        sizes=(4, 4),
    )
    free = ("parameter", "get-tuple-element", "bitcast")
    around = [op for op in program.ops if op not in free]
    assert around == ["fusion", "custom-call", "fusion"]


def test_bound_is_what_all_links_carry() -> None:
    """So nothing could be quicker on the wire."""
    for n in (3, 4):
        machine = Machine.named(f"v5e:{n}x{n}")
        rate = machine.generation.link_bandwidth * machine.generation.link_efficiency
        least = bound("all_reduce", machine, np.arange(n * n)[None], 1e6 / (n * n)).wire * rate
        assert least == pytest.approx(1e6 * (n + 1) / (2 * n))
