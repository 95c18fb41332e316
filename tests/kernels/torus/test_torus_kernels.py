"""All axes of a torus at once: the kernels' values, faults and loads."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from benchmarks import cases, replay_rows
from pallas_collectives.kernels.machinery import channel, sync
from pallas_collectives.kernels.torus import all_gather, reduce_scatter, scatter
from pallas_collectives.kernels.torus.shares import Plan
from pallas_collectives.replay import Machine, Report, bound, replay
from pallas_collectives.topology import chips, placement, torus_axes
from pallas_collectives.topology.groups import Group

SLOW = pytest.mark.slow
NAMES = ("x", "y", "z")


def group_of(*sizes: int) -> Group:
    plain = Group(NAMES[: len(sizes)], sizes)
    return Group(plain.axes, sizes, torus=torus_axes.of_mesh(plain))


# Values and races.

CASES: dict[str, tuple[Callable[..., jax.Array], Callable[[np.ndarray], np.ndarray]]] = {
    "all_gather": (
        lambda m, x, axes, **how: m.all_gather(x, axes, tiled=True, **how),
        lambda xs: np.broadcast_to(np.concatenate(list(xs)), (len(xs), xs.size // 128, 128)),
    ),
    "psum_scatter": (
        lambda m, x, axes, **how: m.psum_scatter(x, axes, tiled=True, **how),
        lambda xs: np.stack(np.split(xs.astype(np.float64).sum(0), len(xs))),
    ),
    "psum": (
        lambda m, x, axes, **how: m.psum(x, axes, **how),
        lambda xs: np.broadcast_to(xs.astype(np.float64).sum(0), xs.shape),
    ),
}


def run(
    op: str, sizes: tuple[int, ...], params: Any, dtype: str = "float32", space: str = ""
) -> None:
    call, reference = CASES[op]
    n, on = math.prod(sizes), harness.mesh(*sizes)
    rows = 8 * 2 * len(sizes) * (4 // jnp.dtype(dtype).itemsize)
    x = harness.random((n, rows * (1 if op == "all_gather" else n), 128), dtype)
    pallas_collectives.reset_counts()
    with pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: call(pallas_collectives, a, on.axis_names, algorithm=f"torus{space}"), on
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    assert {name for _, _, name in pallas_collectives.counts()} == {f"torus{space}"}
    np.testing.assert_array_equal(got, reference(x).astype(got.dtype))


TORI = [(2, 4), (4, 2), (2, 2, 2)]

QUICK = {  # the others take minutes together
    ("all_gather", (2, 4), "on_wait"),
    ("all_gather", (2, 2, 2), "eager"),
    ("psum", (4, 2), "on_wait"),
    ("psum_scatter", (2, 2, 2), "on_wait"),
}


@pytest.mark.parametrize(
    "op, sizes, mode",
    [
        pytest.param(*case, marks=() if case in QUICK else SLOW)
        for case in itertools.product(CASES, TORI, harness.ADVERSARIES)
    ],
)
def test_values_without_races(op: str, sizes: tuple[int, ...], mode: str) -> None:
    run(op, sizes, harness.ADVERSARIES[mode], space="" if op == "all_gather" else ":vmem")


def test_bfloat16_in_hbm() -> None:
    run("psum", (2, 2), pltpu.InterpretParams(), "bfloat16")


@pytest.mark.parametrize("axis, dtype", [(0, "float32"), (1, "int8"), (2, "bfloat16")])
def test_gathers_along_any_axis_as_lax(axis: int, dtype: str) -> None:
    x, on = harness.random((4, 3, 64, 256), dtype), harness.mesh(2, 2)

    def gather(m: Any, **how: Any) -> np.ndarray:
        body = functools.partial(m.all_gather, axis_name=("y", "x"), axis=axis, tiled=True, **how)
        return np.asarray(harness.per_device(body, on)(x))

    np.testing.assert_array_equal(
        gather(pallas_collectives, algorithm="torus"), gather(jax.lax), strict=True
    )


@pytest.mark.parametrize(
    "op, space, name",
    [
        ("all_gather", "", "v5p:2x2x2"),
        pytest.param("psum", ":vmem", "v5p:2x2x2", marks=SLOW),
        ("all_gather", "", "7x:2x2x1"),
        pytest.param("psum", ":vmem", "7x:2x2x1", marks=SLOW),
    ],
)
def test_one_mesh_axis_laid_over_a_torus_in_any_order(op: str, space: str, name: str) -> None:
    """Of 8 devices that lie as 2 x 2 x 2, numbered anyhow: blocks go one by one."""
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    call, reference = CASES[op]
    x = harness.random((8, 48 * (1 if op == "all_gather" else 8), 128), "float32")
    params = harness.ADVERSARIES["on_wait"]
    with placement.torus(name), pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: call(pallas_collectives, a, "x", algorithm=f"torus{space}"),
            jax.sharding.Mesh(devices, ("x",)),
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, reference(x).astype(got.dtype))


# Faults.


def gather_is_caught(mode: str, sizes: tuple[int, ...] = (2, 4), hold: int | None = None) -> bool:
    n, on = math.prod(sizes), harness.mesh(*sizes)
    x = harness.random((n, 32, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        params = harness.ADVERSARIES[mode]
        return all_gather.all_axes(block, group_of(*sizes), axis=0, vmem=False, interpret=params)

    run = harness.per_device(program, on, check_vma=False)
    return harness.caught(lambda: run(x), np.broadcast_to(x.reshape(-1, 128), (n, 32 * n, 128)))


def sum_is_caught(mode: str, sizes: tuple[int, ...] = (4, 2), vmem: bool = True) -> bool:
    n, on = math.prod(sizes), harness.mesh(*sizes)
    x = harness.random((n, n * 32, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        return reduce_scatter.reduce_scatter(
            block,
            group_of(*sizes),
            axis=0,
            op="sum",
            vmem=vmem,
            interpret=harness.ADVERSARIES[mode],
        )

    run = harness.per_device(program, on, check_vma=False)
    return harness.caught(lambda: run(x), x.sum(0).reshape(n, 32, 128))


@pytest.fixture
def in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little scratch that the smallest operands go by in sections."""
    monkeypatch.setattr(reduce_scatter, "SCRATCH_BYTES", 1 << 17)


def on_lines(sizes: tuple[int, ...], lines: Sequence[int]) -> Group:
    """A group on a mesh some of whose axes are lines."""
    whole = group_of(*sizes)
    torus = (dataclasses.replace(a, line=k in lines) for k, a in enumerate(whole.torus))
    return dataclasses.replace(whole, torus=tuple(torus))


SECTIONED = [
    ("psum", (4, 2), (), "on_wait"),
    ("psum", (2, 4), (1,), "on_wait"),
    ("psum_scatter", (3, 2), (0,), "on_wait"),
    ("psum_scatter", (2, 2, 2), (), "on_wait"),
    ("psum_scatter", (2, 4), (), "eager"),
    ("psum", (3, 2), (0,), "eager"),
    ("psum", (8,), (), "on_wait"),
]


@pytest.mark.parametrize(
    "op, sizes, lines, mode",
    [pytest.param(*case, marks=() if k < 3 else SLOW) for k, case in enumerate(SECTIONED)],
)
def test_sections_add_up_without_races(
    op: str, sizes: tuple[int, ...], lines: Sequence[int], mode: str, in_sections: None
) -> None:
    n, on, group = math.prod(sizes), harness.mesh(*sizes), on_lines(sizes, lines)
    how: Any = {"op": "sum", "vmem": False, "interpret": harness.ADVERSARIES[mode]}
    xs = harness.random((n, n, 13 * 8, 128), "float32")

    def program(x: jax.Array) -> jax.Array:
        if op == "psum":
            return reduce_scatter.all_reduce(x, group, **how)
        return reduce_scatter.reduce_scatter(x, group, axis=0, **how)

    got = np.asarray(harness.per_device(program, on, check_vma=False)(xs))
    assert not harness.race_reported()
    total = xs.astype(np.float64).sum(0)
    want = np.broadcast_to(total, xs.shape) if op == "psum" else total.reshape(n, 1, 13 * 8, 128)
    np.testing.assert_array_equal(got.reshape(want.shape), want.astype(got.dtype))


def test_sound_gather_is_not_caught() -> None:
    assert not gather_is_caught("on_wait", hold=1)


def test_few_semaphores_do_under_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "WINDOW", 2)
    assert not gather_is_caught("on_wait")
    monkeypatch.setattr(scatter, "SLOTS", 2)
    assert not sum_is_caught("on_wait")


def test_hops_that_share_a_semaphore_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "wrap_step", lambda hop, window: 0)
    assert gather_is_caught("on_wait")


def test_phases_that_share_semaphores_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = all_gather.Gather

    def faulty(plan: Plan, rings: Any, o: Any, semaphores: list[Any], **own: Any) -> Any:
        phases = len(plan.sizes)
        first = [semaphores[k - k % phases] for k in range(len(semaphores))]
        return sound(plan, rings, o, first, **own)

    monkeypatch.setattr(all_gather, "Gather", faulty)
    assert gather_is_caught("on_wait", (4, 2))


def test_a_window_too_small_without_credits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream is up to two messages ahead of what we have waited for, and no more."""
    monkeypatch.setattr(all_gather, "WINDOW_WITHOUT_CREDITS", 1)
    assert gather_is_caught("on_wait", (4, 2))


def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = sync.wait

    def for_sends_only(semaphore: Any, ref: Any, times: int = 1) -> None:
        if len(semaphore.ref.shape) != 2:  # `arrived` is the 2-D one
            wait(semaphore, ref, times)

    monkeypatch.setattr(sync, "wait", for_sends_only)
    assert gather_is_caught("on_wait", (2, 2))
    assert sum_is_caught("on_wait", (2, 2))


def test_dropped_credit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = pl.semaphore_wait

    def only_in_barriers(semaphore: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(semaphore, "transforms", ()):  # the barrier's is a bare one
            wait(semaphore, *args, **kwargs)

    monkeypatch.setattr(pl, "semaphore_wait", only_in_barriers)
    monkeypatch.setattr(scatter, "SLOTS", 1)
    assert sum_is_caught("on_wait")


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*rings: Any) -> None:
        pltpu.get_barrier_semaphore()

    monkeypatch.setattr(sync, "barrier_on_torus", none)
    assert gather_is_caught("eager", (2, 2), hold=1)


# On tori that are not there: the compiler, and the replay.


@pytest.mark.parametrize(
    "topology, sizes",
    [
        ("v4:2x2x1", (2, 2, 2)),
        ("v5e:16x16", (16, 16)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v6e:4x4", (4, 4)),
        ("tpu7x:2x2x1", (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("op", ["all_gather", pytest.param("psum_scatter", marks=SLOW), "psum"])
def test_compiles_for_every_generation(op: str, topology: str, sizes: tuple[int, ...]) -> None:
    pytest.importorskip("libtpu")
    call, axes = CASES[op][0], NAMES[: len(sizes)]
    rows = 16 * 2 * len(sizes) * (1 if op == "all_gather" else math.prod(sizes))
    program = harness.compile_for_tpu(
        lambda x: call(pallas_collectives, x, axes, algorithm="torus", backend="pallas"),
        topology,
        (rows, 256),
        dtype=jnp.bfloat16,
        sizes=sizes,
    )
    assert "custom-call" in program.ops
    assert not {"copy", "transpose", "pad", "reshape"} & set(program.ops)


@pytest.mark.parametrize(
    "topology, sizes, mib",
    [
        ("v4:2x2x1", (2, 2, 2), 64),
        ("v5e:4x4", (4, 4), 8),
        pytest.param("v5p:4x4x4", (4, 4, 4), 64, marks=SLOW),
        pytest.param("tpu7x:2x2x1", (2, 2, 2), 64, marks=SLOW),
        pytest.param("v6e:2x4", (8,), 64, marks=SLOW),
    ],
)
def test_sections_compile_for_every_generation(
    topology: str, sizes: tuple[int, ...], mib: int
) -> None:
    pytest.importorskip("libtpu")
    axes = NAMES[: len(sizes)]
    algorithm = "torus" if len(sizes) > 1 else "ring"
    program = harness.compile_for_tpu(
        lambda x: pallas_collectives.psum(x, axes, algorithm=algorithm, backend="pallas"),
        topology,
        (mib << 11, 128),
        sizes=sizes,
    )
    assert "custom-call" in program.ops
    assert not {"copy", "transpose", "pad", "reshape"} & set(program.ops)


@pytest.mark.parametrize(
    "op, machine, mesh, mib, share",
    [
        ("psum_scatter", "v5p:4x4x4", {"x": 4, "y": 4}, 64, 0.96),
        ("psum", "v5e:16x16", {"x": 16}, 64, 0.99),
        pytest.param("psum_scatter", "v5e:16x16", {"x": 16, "y": 16}, 256, 0.98, marks=SLOW),
        pytest.param("psum", "v5e:16x16", {"x": 16, "y": 16}, 256, 0.98, marks=SLOW),
        pytest.param("psum", "v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, 64, 0.95, marks=SLOW),
        pytest.param("psum_scatter", "v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, 64, 0.925, marks=SLOW),
    ],
)
def test_large_sums_keep_the_wires_busy_in_16_mib(
    op: str, machine: str, mesh: dict[str, int], mib: int, share: float
) -> None:
    n = math.prod(mesh.values())
    whole = dict(zip(NAMES, Machine.named(machine).shape, strict=False))
    how = {"algorithm": "torus"} if len(mesh) > 1 else {}
    report, least = replayed(op, machine, whole, (mib << 20) // n, over=tuple(mesh), **how)
    assert not report.findings
    assert report.hbm_scratch_bytes == 0 and report.vmem_bytes <= 16 << 20
    rate = report.machine.generation.link_bandwidth * report.machine.generation.link_efficiency
    assert share * report.time <= least / rate


@pytest.mark.parametrize(
    "machine, axes, mib, of_wire",
    [pytest.param("7x:4x4x4", ("x", "y", "z", "core"), 64, 90, marks=SLOW)],
)
def test_a_sum_over_a_whole_slice_is_chosen_and_keeps_the_wires_busy(
    machine: str, axes: tuple[str, ...], mib: int, of_wire: float
) -> None:
    psum = [case for case in cases.CASES if case.name == "psum"]
    (row,) = replay_rows.rows(replay_rows.plan([machine], psum, [mib << 20], axes=axes))
    assert row.served == "torus" and not row.faults
    assert (row.of_wire or 0) >= of_wire


def races_of_sections(op: str, *sizes: int, **how: Any) -> int:
    """How many races a sum has, in sections round rings of a v5p torus, on any schedule."""
    mesh = dict(zip(NAMES, sizes, strict=False))
    name = f"v5p:{'x'.join(map(str, sizes))}"
    report, _ = replayed(op, name, mesh, 64 << 10, races=True, algorithm="torus", **how)
    assert not report.stuck and not report.leftovers
    return len(report.findings)


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every axis of a torus closes."""
    monkeypatch.setattr(chips.Chip, "wraps", lambda chip, shape: tuple(n > 2 for n in shape))


@pytest.mark.parametrize(
    "op, sizes",
    [
        ("psum_scatter", (4, 4)),
        ("psum", (3, 3)),
        pytest.param("psum", (3, 5), marks=SLOW),
        pytest.param("psum_scatter", (2, 4), marks=SLOW),
        pytest.param("psum_scatter", (4, 8, 8), marks=SLOW),
        pytest.param("psum", (4, 4, 4), marks=SLOW),
    ],
)
def test_pairs_need_no_credits_in_sections(
    op: str, sizes: tuple[int, ...], in_sections: None, closing: None
) -> None:
    assert not races_of_sections(op, *sizes)


def test_a_window_of_two_slots_without_credits_is_caught(
    monkeypatch: pytest.MonkeyPatch, in_sections: None, closing: None
) -> None:
    monkeypatch.setattr(scatter, "SLOTS", 2)
    assert races_of_sections("psum_scatter", 4, 4)


def test_a_pair_that_does_not_take_together_is_caught(
    monkeypatch: pytest.MonkeyPatch, in_sections: None, closing: None
) -> None:
    take, go_on = scatter.Scatter.take, scatter.Scatter.go_on

    def in_turn(stage: Any, *where: Any) -> None:
        take(stage, *where)
        go_on(stage, *where)

    monkeypatch.setattr(scatter.Scatter, "take", lambda *_: None)
    monkeypatch.setattr(scatter.Scatter, "go_on", in_turn)
    assert races_of_sections("psum_scatter", 4, 4)


TORI_OF_SUMS = [(2, 4), (3, 5), (4, 4, 4), (4, 8, 8), (16, 16), (16,)]


@pytest.mark.parametrize("lines", [(), (0, 1, 2)])
@pytest.mark.parametrize("sizes", TORI_OF_SUMS)
def test_scratch_of_sums_is_16_mib_at_the_most(
    sizes: tuple[int, ...], lines: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.BY_NAME["v5p"])
    axes = [Group((NAMES[k],), (n,), line=k in lines) for k, n in enumerate(sizes)]
    for rows, dtype, back in itertools.product((64, 2048, 3001), (4, 2), (False, True)):
        kind = {4: jnp.float32, 2: jnp.bfloat16}[dtype]
        plan = reduce_scatter._plan(axes, (32 // dtype * rows, 128), 0, kind, False, back)
        own: Any = reduce_scatter.ReduceScratch if back else reduce_scatter.ScatterScratch
        assert own.of(plan, kind, vmem=False).scatter.nbytes <= 16 << 20


def test_columns_are_gathered_in_place() -> None:
    pytest.importorskip("libtpu")
    program = harness.compile_for_tpu(
        lambda x: pallas_collectives.all_gather(
            x, ("x", "y"), axis=1, tiled=True, algorithm="torus", backend="pallas"
        ),
        "v6e:4x4",
        (256, 512),
        sizes=(4, 4),
    )
    assert not {"copy", "transpose", "pad", "reshape"} & set(program.ops)


def replayed(
    op: str,
    name: str,
    mesh: dict[str, int],
    nbytes: int,
    over: tuple[str, ...] | None = None,
    races: bool = False,
    **how: Any,
) -> tuple[Report, float]:
    """The replay of a collective of blocks of `nbytes` on a whole pod, and its bound in bytes.

    Over all axes of the mesh, or over some, the first ones. `races` as `replay` has it.
    """
    machine, axes = Machine.named(name), over or tuple(mesh)
    n = math.prod(mesh[axis] for axis in axes)
    call = functools.partial(CASES[op][0], pallas_collectives, backend="pallas", **how)
    function = jax.shard_map(
        lambda x: call(x, axes),
        mesh=machine.mesh(mesh),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    rows = nbytes // 1024 * (1 if op == "all_gather" else n)
    operand = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    report = replay(function, operand, machine=machine, races=races)
    canonical = {"psum": "all_reduce", "psum_scatter": "reduce_scatter"}.get(op, op)
    rate = machine.generation.link_bandwidth * machine.generation.link_efficiency
    groups = np.arange(math.prod(mesh.values())).reshape(n, -1).T
    return report, bound(canonical, machine, groups, nbytes).wire * rate


@pytest.mark.parametrize(
    "op, machine, mesh",
    [
        ("all_gather", "v5e:16x16", {"x": 16, "y": 16}),
        ("all_gather", "v5p:4x4x4", {"x": 4, "y": 4, "z": 4}),
        ("all_gather", "v5p:4x4x8", {"x": 4, "y": 4, "z": 8}),
        ("all_gather", "v5p:4x4x4", {"x": 64}),
        ("all_gather", "v5p:8x8x8", {"x": 8, "y": 8, "z": 8}),
        ("all_gather", "v4:2x2x2", {"x": 2, "y": 2, "z": 2}),
        ("all_gather", "v6e:8x16", {"x": 8, "y": 16}),
        ("all_gather", "7x:2x2x1", {"x": 8}),
        ("all_gather", "7x:4x4x4", {"x": 4, "y": 4, "z": 4, "core": 2}),
        pytest.param("psum", "7x:2x2x1", {"x": 2, "y": 2, "core": 2}, marks=SLOW),
        pytest.param("psum_scatter", "v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, marks=SLOW),
        pytest.param("psum", "v5e:16x16", {"x": 16, "y": 16}, marks=SLOW),
    ],
)
def test_the_busiest_link_carries_what_it_must(op: str, machine: str, mesh: dict[str, int]) -> None:
    """Within 2% of the least that is possible; chosen by itself, also for one mesh axis.

    But on four chips of two devices a ring takes no longer.
    """
    how = {"algorithm": "torus"} if machine == "7x:2x2x1" else {}
    report, least = replayed(op, machine, mesh, 8 << 20, **how)
    assert [kernel.name.endswith("_torus") for kernel in report.kernels] == [True]
    assert not report.findings
    assert 0.999 <= report.busiest_link[1] / least <= 1.02


@pytest.mark.parametrize(
    "machine, mesh", [("v5e:16x16", {"x": 16, "y": 16}), ("v5p:4x4x4", {"x": 4, "y": 4, "z": 4})]
)
def test_gathers_take_little_longer_than_links_allow(machine: str, mesh: dict[str, int]) -> None:
    report, least = replayed("all_gather", machine, mesh, 4 << 20)
    rate = report.machine.generation.link_bandwidth * report.machine.generation.link_efficiency
    assert report.time <= 1.05 * least / rate
