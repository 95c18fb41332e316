"""All-to-all over all axes of a torus: values, faults, links, what the compiler makes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import channel_faults
import harness
import pallas_collectives
from pallas_collectives.kernels.torus import all_to_all, exchange
from pallas_collectives.replay import Machine, Report, bound, replay
from pallas_collectives.topology import placement
from tori import NAMES, group_of

MIB = 1 << 20


def test_the_table_in_the_docstring_is_what_phases_bring() -> None:
    """On 2 x 2 devices, where a block for the other place along an axis goes there."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    blocks = {d: [(d, to) for to in range(4)] for d in range(4)}
    lines = [blocks[0]]
    for axis in (0, 1):
        sent = [(block, places[block[1]][axis], d) for d in blocks for block in blocks[d]]
        blocks = {
            d: [b for b, goal, at in sent if places[d][axis] == goal and _alike(axis, d, at)]
            for d in range(4)
        }
        lines.append(blocks[0])
    cells = [" ".join(f"{a}>{b}" for a, b in sorted(line)) for line in lines]
    assert " ".join(["device 0", *cells]) in " ".join((exchange.__doc__ or "").split())


def _alike(axis: int, a: int, b: int) -> bool:
    """Whether two devices differ along an axis alone, if at all."""
    return a & (1 << axis) == b & (1 << axis)


# Values and races.


@pytest.mark.parametrize(
    "sizes, split, concat, shape, dtype",
    [
        ((2, 4), 0, 0, (8 * 64, 128), "float32"),
        ((2, 2, 2), 0, 1, (8 * 16, 256), "bfloat16"),  # blocks lie elsewhere in the result
        ((3, 2), 1, 1, (3, 6 * 32, 128), "int8"),
        ((2, 2), 1, 0, (16, 4 * 256), "float32"),
        ((8,), 0, 0, (8 * 64, 128), "float32"),
        ((5,), 0, 0, (5 * 24, 128), "int32"),
        ((2, 2), 0, 0, (12, 5), "float32"),  # no whole tiles
        ((4, 2), 2, 1, (3, 5, 8, 7), "bool"),
    ],
)
def test_values_are_laxs_without_races(
    sizes: tuple[int, ...], split: int, concat: int, shape: tuple[int, ...], dtype: str
) -> None:
    on, x = harness.mesh(*sizes), harness.random((math.prod(sizes), *shape), dtype)

    def exchanging(m: Any, **how: Any) -> Callable[..., Any]:
        def body(a: jax.Array) -> jax.Array:
            return m.all_to_all(a, on.axis_names, split, concat, tiled=True, **how)

        return harness.per_device(body, on)

    want = np.asarray(exchanging(jax.lax)(x))
    program = exchanging(pallas_collectives, algorithm="torus")
    for mode in harness.ADVERSARIES:
        with pltpu.force_tpu_interpret_mode(harness.EITHER):
            got = harness.EITHER.under(mode, lambda: np.asarray(program(x)))
        assert not harness.race_reported(), mode
        np.testing.assert_array_equal(got, want, mode, strict=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v5p:2x2x2", "7x:2x2x1", "v5e:2x4"])
def test_one_mesh_axis_laid_over_a_torus_in_any_order(name: str) -> None:
    """Blocks come from their places, and go to them, one by one."""
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    x = harness.random((8, 8 * 24, 128), "float32")
    params = harness.ADVERSARIES["on_wait"]
    with placement.torus(name), pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: pallas_collectives.all_to_all(a, "x", 0, 0, tiled=True, algorithm="torus"),
            jax.sharding.Mesh(devices, ("x",)),
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, x.reshape(8, 8, -1).swapaxes(0, 1).reshape(x.shape))


# Faults.


def is_caught(mode: str, sizes: tuple[int, ...] = (2, 4), hold: int | None = None) -> bool:
    """Whether a fault is caught, with blocks in so many chunks that slots serve again."""
    n, on = math.prod(sizes), harness.mesh(*sizes)
    x = harness.random((n, n * 128, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        params = harness.ADVERSARIES[mode]
        how: Any = {"split_axis": 0, "concat_axis": 0, "vmem": False, "interpret": params}
        return all_to_all.all_axes(block, group_of(*sizes), **how)

    run = harness.per_device(program, on, check_vma=False)
    return harness.caught(
        lambda: run(x), x.reshape(n, n, -1).swapaxes(0, 1).reshape(n, n * 128, 128)
    )


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 KiB go in 16 chunks."""
    monkeypatch.setattr(all_to_all, "PARCEL_BYTES", 4 << 10)


@pytest.mark.full
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("mode, sizes", [("on_wait", (2, 2)), ("on_wait", (2, 4)), ("eager", (8,))])
def test_slots_that_serve_again_with_a_late_device(mode: str, sizes: tuple[int, ...]) -> None:
    assert not is_caught(mode, sizes, hold=1)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("fault", ["arrived", "left", "own"])
def test_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    class Deaf(all_to_all.Parcels):
        def wait(self, semaphore: Any, move: Any) -> None:
            is_left = harness.is_of(semaphore, self.scratch.semaphores.left)
            kind = "own" if move.origin is move.goal else "left" if is_left else "arrived"
            if kind != fault:
                super().wait(semaphore, move)

    monkeypatch.setattr(all_to_all, "Parcels", Deaf)
    report, _ = replayed("v5e:2x4", {"x": 2, "y": 4}, ("x", "y"), 1 << 20, races=True)
    assert not report.ok


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("fault", ["none", "credits", "released early"])
def test_fault_in_the_credits_races_on_some_schedule(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Peers are seldom so far ahead: the replay looks at all that they may be."""
    settle, released = exchange.Exchange._settle, exchange.Exchange._release

    def too_early(self: Any, o: int, step: int, c: Any, count: Any) -> None:
        if step == 0:
            released(self, o, 0, c, count)
        settle(self, o, step, c, count)

    if fault == "credits":
        channel_faults.no_credits(monkeypatch)
    elif fault == "released early":
        at_other_times = functools.partialmethod(
            lambda self, o, phase, *rest: phase and released(self, o, phase, *rest)
        )
        monkeypatch.setattr(exchange.Exchange, "_settle", too_early)
        monkeypatch.setattr(exchange.Exchange, "_release", at_other_times)
    report, _ = replayed("v5e:2x4", {"x": 2, "y": 4}, ("x", "y"), 1 << 20, races=True)
    assert report.ok == (fault == "none")


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_with_jumps")
    assert is_caught("eager", (2, 2), hold=1)


# On tori that are not there: the compiler, and the replay.


@pytest.mark.parametrize(
    "topology, sizes",
    [
        ("v4:2x2x1", (2, 2, 2)),
        ("v5e:4x4", (4, 4)),
        ("v5e:16x16", (16, 16)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v6e:4x4", (4, 4)),
        ("tpu7x:2x2x1", (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("split, concat", [(0, 0), (0, 1), (1, 0)])
def test_compiles_with_nothing_around_it(
    topology: str, sizes: tuple[int, ...], split: int, concat: int
) -> None:
    pytest.importorskip("libtpu")
    axes, n = NAMES[: len(sizes)], math.prod(sizes)
    program = harness.compile_for_tpu(
        lambda x: pallas_collectives.all_to_all(
            x, axes, split, concat, tiled=True, algorithm="torus", backend="pallas"
        ),
        topology,
        (n * 16, n * 128) if split or concat else (n * 16, 256),
        sizes=sizes,
    )
    assert "custom-call" in program.ops
    assert not {"copy", "transpose", "pad", "reshape"} & set(program.ops)


@pytest.mark.full
@pytest.mark.parametrize("side, scratch", [(4, 16), (16, 25)])
def test_a_gibibyte_needs_no_more_scratch_than_stated(side: int, scratch: int) -> None:
    pytest.importorskip("libtpu")
    program = harness.compile_for_tpu(
        lambda x: pallas_collectives.all_to_all(
            x, ("x", "y"), 0, 0, tiled=True, algorithm="torus", backend="pallas"
        ),
        f"v5e:{side}x{side}",
        (2 * MIB, 128),
        sizes=(side, side),
    )
    assert program.temp_bytes <= 2 * 1024 * MIB + scratch * MIB + MIB


def replayed(
    name: str, mesh: dict[str, int], axes: tuple[str, ...], nbytes: int, races: bool = False
) -> tuple[Report, float]:
    """The replay over some axes of a pod, of so many bytes a device, and the wire's share of it."""
    machine, n = Machine.named(name), math.prod(mesh[axis] for axis in axes)
    call = functools.partial(pallas_collectives.all_to_all, tiled=True, algorithm="torus")
    function = jax.shard_map(
        lambda x: call(x, axes, 0, 0, backend="pallas"),
        mesh=machine.mesh(mesh),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    operand = jax.ShapeDtypeStruct((nbytes // 512, 128), jnp.float32)
    report = replay(function, operand, machine=machine, races=races)
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names = list(mesh)
    rest = [k for k, axis in enumerate(names) if axis not in axes]
    groups = numbers.transpose(*rest, *(names.index(axis) for axis in axes)).reshape(-1, n)
    return report, bound("all_to_all", machine, groups, nbytes / n).wire / report.time


@pytest.mark.parametrize(
    "name, mesh, axes, nbytes, share",
    [
        ("v5e:4x4", {"x": 4, "y": 4}, ("x",), 16 * MIB, 0.95),
        ("v5e:8x8", {"x": 8, "y": 8}, ("x",), 32 * MIB, 0.95),
        ("v5e:16x16", {"x": 16, "y": 16}, ("x",), 16 * MIB, 0.93),
        ("v5e:4x4", {"x": 4, "y": 4}, ("x", "y"), 16 * MIB, 0.9),
        pytest.param(
            *("v5e:16x16", {"x": 16, "y": 16}, ("x", "y"), 16 * MIB, 0.95), marks=pytest.mark.slow
        ),
    ],
)
def test_links_of_v5e_are_at_work_almost_all_the_time(
    name: str, mesh: dict[str, int], axes: tuple[str, ...], nbytes: int, share: float
) -> None:
    report, of_wire = replayed(name, mesh, axes, nbytes)
    assert not report.findings
    assert of_wire >= share


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("v5e:4x4", {"x": 4, "y": 4}),
        ("v5e:2x4", {"x": 2, "y": 4}),
        pytest.param("v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, marks=pytest.mark.slow),
        pytest.param("7x:2x2x1", {"x": 2, "y": 2, "core": 2}, marks=pytest.mark.slow),
    ],
)
def test_no_schedule_races(name: str, mesh: dict[str, int]) -> None:
    n = math.prod(mesh.values())
    report, _ = replayed(name, mesh, tuple(mesh), n * 64 << 10, races=True)
    assert report.ok, report.findings
