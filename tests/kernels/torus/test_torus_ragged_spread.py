"""The ragged all-to-all over all axes of a torus: routings, faults, what the compiler makes."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import conformance
import harness
import pallas_collectives as pc
from conformance import routed
from pallas_collectives import replay
from pallas_collectives.kernels.torus import ragged_shares, ragged_spread
from pallas_collectives.topology.groups import Group

AXES = ("x", "y", "z")


def program(sizes: tuple[int, ...], groups: Any = None) -> Callable[..., Any]:
    axes = AXES[: len(sizes)]
    call = functools.partial(
        pc.ragged_all_to_all, axis_name=axes, axis_index_groups=groups, algorithm="spread"
    )
    return harness.per_device(call, harness.mesh(*sizes))


def routings(n: int, most: int = 9) -> dict[str, np.ndarray]:
    """What each sends to each, by name."""
    to_one, from_one = np.zeros((2, n, n), np.int32)
    to_one[:, n - 1] = from_one[0] = most
    return {
        "random": np.random.default_rng(n).integers(0, most + 1, (n, n)),
        "to one": to_one,
        "from one": from_one,
        "none": np.zeros((n, n), np.int32),
    }


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3), (4, 2), (2, 2, 2)], ids=str)
def test_routings_of_one_program(sizes: tuple[int, ...]) -> None:
    n = int(np.prod(sizes))
    operand, output = (harness.random((n, 80, 2, 128), "float32", seed) for seed in (1, 2))
    run = program(sizes)
    for (name, send), mode in itertools.product(routings(n).items(), harness.ADVERSARIES):
        tables = routed(send, into=1)
        with pltpu.force_tpu_interpret_mode(harness.EITHER):
            got = harness.EITHER.under(mode, lambda: np.asarray(run(operand, output, *tables)))  # noqa: B023
        assert not harness.race_reported()
        want = conformance.ragged_reference(operand, output, tables)
        np.testing.assert_array_equal(got, want, err_msg=f"{name}, {mode}")


@pytest.mark.parametrize("first", [True, False], ids=["first axes", "last axes"])
def test_who_passes_on_lies_behind_the_axis_taken_first_or_ahead_of_the_last(first: bool) -> None:
    sizes, n = (2, 3, 4), 24
    at = np.indices(sizes).reshape(3, n)
    group = Group(
        AXES, sizes, torus=tuple(Group((a,), (s,)) for a, s in zip(AXES, sizes, strict=True))
    )
    for number, way in enumerate(ragged_spread._ways(ragged_spread._rings(group))):
        hosts, own = way[not first].hosts, np.arange(3) == number + first
        for sender, receiver in itertools.product(range(n), repeat=2):
            ends = at[:, sender], at[:, receiver]
            behind, ahead = ends if first else ends[::-1]
            want = np.ravel_multi_index(np.where(own, ahead, behind), sizes)
            assert hosts[sender, receiver] in (want, -1)
        assert (hosts >= 0).sum() >= n  # of 2 axes at the least
        for host, pairs in enumerate(way[not first].pairs):
            assert set(hosts.reshape(-1)[pairs]) <= {host, -1}


@pytest.mark.parametrize("sizes, groups", [((4,), None), ((1, 4), None), ((4,), [[0, 1], [2, 3]])])
def test_large_arrays_go_straight_where_no_axis_could_help(sizes: Any, groups: Any) -> None:
    n, of_group = int(np.prod(sizes)), 4 if groups is None else 2
    rows = ragged_spread.WEIGHED_BYTES // 4096
    array = jax.ShapeDtypeStruct((n, rows, 8, 128), jnp.float32)
    tables = [jax.ShapeDtypeStruct((n, of_group), jnp.int32)] * 4
    got = jax.eval_shape(program(sizes, groups), array, array, *tables)
    assert got.shape == array.shape


@pytest.mark.full
def test_several_slices_for_each_device_and_hostile_ones() -> None:
    n, sizes = 4, (2, 2)
    operand, output = (harness.random((n, 20, 128), "float32", seed) for seed in (1, 2))
    run = program(sizes)
    tables = conformance.ragged_arguments(n, slices=2)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = np.asarray(run(operand, output, *tables))
        np.testing.assert_array_equal(got, conformance.ragged_reference(operand, output, tables))
        tables = hostile(n)
        got = np.asarray(program(sizes)(operand, output, *tables))
    np.testing.assert_array_equal(got, conformance.ragged_reference(operand, output, tables))


def hostile(n: int) -> tuple[np.ndarray, ...]:
    """Sizes, offsets and places far out of range."""
    send = np.zeros((n, n), np.int32)
    send[:, 0], send[0, 1] = -3, 2**31 - 1
    offsets = np.full((n, n), -(2**31), np.int32)
    places = np.full((n, n), 2**31 - 1, np.int32)
    return offsets, send, places, np.ascontiguousarray(send.T)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)], ids=str)
def test_shares_by_what_links_carry(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """As of large arrays, which would take an interpreter too long."""
    n, found = int(np.prod(sizes)), []
    ends = ragged_shares.ends
    monkeypatch.setattr(ragged_shares, "ends", lambda *given: found.append(1) or ends(*given))
    torus = tuple(Group((name,), (size,)) for name, size in zip(AXES, sizes, strict=False))
    group = Group(AXES[: len(sizes)], sizes, torus=torus)
    operand, output = (harness.random((n, 80, 2, 128), "float32", seed) for seed in (1, 2))
    rows = {name: routed(send, into=1) for name, send in routings(n).items()}
    for mode, interpret in harness.ADVERSARIES.items():
        call = functools.partial(
            ragged_spread.spread, group=group, vmem=False, interpret=interpret, weighed_bytes=0
        )
        run = harness.per_device(call, harness.mesh(*sizes), check_vma=False)
        for name, tables in (rows | {"hostile": hostile(n)}).items():
            got = run(operand, output, *of_all(tables))
            assert not harness.race_reported()
            want = conformance.ragged_reference(operand, output, tables)
            np.testing.assert_array_equal(got, want, err_msg=f"{name}, {mode}")
    assert found


def of_all(tables: Any) -> tuple[Any, Any, Any]:
    n = len(tables[0])
    return tables[0], *(np.tile(table.reshape(-1), (n, 1)) for table in tables[1:3])


def planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernel = ragged_spread._kernel

    def faulty(ring: Any, *refs: Any, **static: Any) -> None:
        *others, scratch = refs
        waits = {
            "no final": scratch.final_sem,
            "no leaving": scratch.own_sem,
            "no arrival": scratch.come_sems,
        }
        if fault in waits:
            harness.drop_waits(monkeypatch, waits[fault])
        if fault == "one semaphore":
            scratch = scratch._replace(come_sems=harness.OneSemaphore(scratch.come_sems))
        kernel(ring, *others, scratch, **static)

    monkeypatch.setattr(ragged_spread, "_kernel", faulty)
    if fault == "no barrier":
        harness.drop_barrier(monkeypatch, "barrier_with_everyone")


def passed_on(n: int) -> np.ndarray:
    """What each sends to each, so much to the last that rows for it are passed on."""
    send = np.ones((n, n), np.int32)
    send[:, n - 1] = 16
    return send


def run_caught(fault: str, mode: str) -> bool:
    n = 4
    operand, output = (harness.random((n, 80, 8, 128), "float32", seed) for seed in (1, 2))
    tables = routed(passed_on(n), into=0)
    torus = Group(("x",), (2,)), Group(("y",), (2,))
    group = Group(("x", "y"), (2, 2), torus=torus)

    def call(x: jax.Array, *rest: jax.Array) -> jax.Array:
        x = held(x) if fault in ("no barrier", "none") else x
        return ragged_spread.spread(
            x, *rest, group, vmem=False, interpret=harness.ADVERSARIES[mode]
        )

    run = harness.per_device(call, harness.mesh(2, 2), check_vma=False)
    want = conformance.ragged_reference(operand, output, tables)
    return harness.caught(lambda: run(operand, output, *of_all(tables)), want)


def held(x: jax.Array) -> jax.Array:
    return harness.delayed(x, 1, 1.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, mode",
    [
        *[("none", mode) for mode in harness.ADVERSARIES],
        *[("no final", "on_wait"), ("no arrival", "on_wait"), ("no barrier", "eager")],
    ],
)
def test_faults_are_caught(monkeypatch: pytest.MonkeyPatch, fault: str, mode: str) -> None:
    planted(monkeypatch, fault)
    assert run_caught(fault, mode) == (fault != "none")


@pytest.mark.parametrize(
    "fault",
    [
        *["none", "no final", "no arrival", "no barrier"],
        *["one semaphore", "no leaving"],  # need not show in a run: chunks mostly arrive in turn
    ],
)
def test_faults_are_named(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    planted(monkeypatch, fault)
    report = replayed(replay.Machine.named("v6e:2x2"), {"x": 2, "y": 2}, passed_on(4), races=True)
    assert bool(report.findings) == (fault != "none"), report


def replayed(machine: replay.Machine, axes: dict[str, int], send: np.ndarray, races: bool) -> Any:
    tables = [table.astype(np.int32).reshape(-1) for table in routed(send)]
    rows = max(1, int(send.sum(1).max())), max(1, int(send.sum(0).max()))

    def shard(x: jax.Array, o: jax.Array, *tables: jax.Array) -> jax.Array:
        return pc.ragged_all_to_all(
            x, o, *tables, axis_name=tuple(axes), backend="pallas", algorithm="spread"
        )

    everywhere, own = PartitionSpec(), PartitionSpec(tuple(axes))
    mapped = jax.shard_map(
        shard, mesh=machine.mesh(axes), in_specs=(everywhere, everywhere, *(own,) * 4),
        out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    arrays = (jax.ShapeDtypeStruct((count, 56, 128), jnp.bfloat16) for count in rows)
    return replay.replay(mapped, *arrays, *tables, machine=machine, races=races)


@pytest.mark.full
@pytest.mark.parametrize("name", ["to one", "from one"])
def test_what_one_device_has_to_do_with_uses_all_its_links(name: str) -> None:
    machine, n = replay.Machine.named("v6e:4x4"), 16
    send = routings(n, 512)[name]
    report = replayed(machine, {"x": 4, "y": 4}, send, races=False)
    least = replay.bound("ragged_all_to_all", machine, np.arange(n)[None], 14336.0 * send)
    assert not report.findings
    assert least.wire / report.time >= 0.9


@pytest.mark.full
def test_no_race_on_16_devices() -> None:
    report = replayed(
        replay.Machine.named("v6e:4x4"), {"x": 4, "y": 4}, routings(16)["random"], True
    )
    assert not report.findings


@pytest.mark.parametrize("rows", [1 << 12, 1 << 14])
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_compiles_on_all_that_reach_all(topology: str, rows: int) -> None:
    devices = harness._topology(topology).devices
    n = len(devices)
    sizes = {8: (2, 2, 2), 4: (2, 2)}[n]

    def call(x: jax.Array, *table: jax.Array) -> jax.Array:
        words = [t[:n, 0, 0].astype(jnp.int32) for t in table]
        axes = AXES[: len(sizes)]
        return pc.ragged_all_to_all(
            x, jnp.zeros_like(x), *words, axis_name=axes, backend="pallas", algorithm="spread"
        )

    shapes = [(rows, 8, 128), *[(128, 8, 128)] * 4]
    assert "custom-call" in harness.compile_for_tpu(call, topology, *shapes, sizes=sizes).ops
