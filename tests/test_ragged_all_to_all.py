"""The ragged all-to-all kernel: routings, faults, bytes on the wire, what the compiler makes."""

import functools
import types
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
import pallas_collectives
from pallas_collectives import replay
from pallas_collectives.errors import CollectiveError, ReachError
from pallas_collectives.kernels import ragged_all_to_all, sync
from pallas_collectives.kernels.topology import Group

GIB = 1 << 30
exchange = functools.partial(pallas_collectives.ragged_all_to_all, axis_name="x")


def routed(n: int, send: np.ndarray, into: int) -> tuple[np.ndarray, ...]:
    """The four arguments for given sizes (sender, slice), packed from row `into` of receivers."""
    slices = send.shape[1] // n
    send = send.astype(np.int32)
    received = send.reshape(n, n, slices).transpose(1, 0, 2).reshape(n, -1)
    starts = into + np.cumsum(received, axis=1) - received
    at_receiver = starts.reshape(n, n, slices).transpose(1, 0, 2).reshape(n, -1)
    tables = (np.cumsum(send, axis=1) - send, send, at_receiver, received)
    return tuple(t.astype(np.int32) for t in tables)


def check(operand: np.ndarray, output: np.ndarray, tables: tuple[np.ndarray, ...]) -> None:
    run = harness.per_device(exchange, harness.mesh(len(operand)))
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = np.asarray(run(operand, output, *tables))
    assert not harness.race_reported()
    want = conformance.ragged_reference(operand, output, tables)
    np.testing.assert_array_equal(got, want)


def test_the_example_of_lax() -> None:
    operand = np.array([[1, 2, 2], [3, 4, 0]], np.float32)
    tables = (
        np.array([[0, 1], [0, 1]], np.int32),
        np.array([[1, 2], [1, 1]], np.int32),
        np.array([[0, 0], [1, 2]], np.int32),
        np.array([[1, 1], [2, 1]], np.int32),
    )
    run = harness.per_device(exchange, harness.mesh(2))
    got = np.asarray(run(operand, np.zeros((2, 4), np.float32), *tables))
    np.testing.assert_array_equal(got, [[1, 3, 0, 0], [2, 2, 4, 0]])


def test_routings_of_one_program() -> None:
    n, rows = 5, 24
    operand, output = (harness.random((n, rows, 3, 5), "float32", seed) for seed in (1, 2))
    to_one = np.zeros((n, n), np.int32)
    to_one[:, 3] = 4
    to_self = 7 * np.eye(n, dtype=np.int32)
    for send in (np.zeros((n, n), np.int32), to_one, to_self):
        check(operand, output, routed(n, send, into=2))
    for seed in range(3):
        send = np.random.default_rng(seed).integers(0, 5, (n, n))
        check(operand, output, routed(n, send, into=0))


def test_slices_out_of_range_are_clipped_and_moved() -> None:
    n, rows = 3, 8
    operand = harness.random((n, rows, 4), "float32", 1)
    output = harness.random((n, 6, 4), "float32", 2)
    # Per receiver: nothing; more than there is, from before the beginning; two rows, past the end.
    send = np.tile(np.array([-3, 2**31 - 1, 2], np.int32), (n, 1))
    send[:2, 1] = 0  # (only one sender may fill all of device 1)
    recv = np.ascontiguousarray(send.T)
    offsets = np.tile(np.array([5, -(2**31), 2**31 - 1], np.int32), (n, 1))
    places = offsets.copy()
    places[:, 2] = [-1, 2, 100]
    check(operand, output, (offsets, send, places, recv))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_tables_of_any_integer_type(dtype: str) -> None:
    with jax.enable_x64(dtype == "int64"):
        tables = tuple(t.astype(dtype) for t in conformance.ragged_arguments(3))
        operand, output = (harness.random((3, 12, 2), "float32", seed) for seed in (1, 2))
        check(operand, output, tables)


def test_groups_exchange_by_themselves() -> None:
    groups = [[4, 1, 2], [3, 0, 5]]
    operand, output = (harness.random((6, 12, 2), "float32", seed) for seed in (1, 2))
    per_group = conformance.ragged_arguments(3, slices=2)
    tables = tuple(np.zeros((6, 6), np.int32) for _ in per_group)
    want = np.empty_like(output)
    for group in groups:
        for table, values in zip(tables, per_group, strict=True):
            table[group] = values
        want[group] = conformance.ragged_reference(operand[group], output[group], per_group)
    run = harness.per_device(functools.partial(exchange, axis_index_groups=groups), harness.mesh(6))
    np.testing.assert_array_equal(np.asarray(run(operand, output, *tables)), want)


def test_gradients_travel_back_to_the_rows_they_came_from() -> None:
    n, rows = 3, 12
    operand, output, weights = (harness.random((n, rows, 2), "float32", s) for s in (1, 2, 3))
    tables = conformance.ragged_arguments(n)

    def loss(x: jax.Array, o: jax.Array, w: jax.Array, *tables: jax.Array) -> jax.Array:
        return (exchange(x, o, *tables) * w).sum()

    run = harness.per_device(jax.grad(loss), harness.mesh(n))
    got = np.asarray(run(operand, output, weights, *tables))
    # A row's gradient is the weight of the place it went to: send the weights' row numbers along.
    ids = np.arange(1, n * rows + 1, dtype=np.float32).reshape(n, rows, 1)
    went = conformance.ragged_reference(ids, np.zeros_like(ids), tables)
    by_id = {int(i): w for i, w in zip(went.ravel(), weights.reshape(-1, 2), strict=True)}
    zero = np.zeros(2, np.float32)
    want = [by_id.get(int(i), zero) for i in ids.ravel()]
    np.testing.assert_array_equal(got.reshape(-1, 2), want)


def run_caught(mode: str, hold: int | None = None) -> bool:
    n = 4
    operand, output = (harness.random((n, 2 + 3 * n, 8, 128), "float32", s) for s in (1, 2))
    tables = conformance.ragged_arguments(n)

    def program(x: jax.Array, *rest: jax.Array) -> jax.Array:
        x = x if hold is None else harness.delayed(x, hold)
        params = harness.ADVERSARIES[mode]
        group = Group(("x",), (n,))
        return ragged_all_to_all.direct(x, *rest, group, vmem=False, interpret=params)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    want = conformance.ragged_reference(operand, output, tables)
    return harness.caught(lambda: run(operand, output, *tables), want)


def with_wait(wait: Callable[..., None]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**vars(sync), "wait": wait})


@pytest.mark.parametrize("dropped", [False, True])
def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch, dropped: bool) -> None:
    calls: list[Any] = []

    def wait(semaphore: Any, ref: Any, times: int = 1) -> None:
        calls.append(semaphore)  # traced once for receives, then once for sends, once for our own
        if not (dropped and len(calls) == 1):
            sync.wait(semaphore, ref, times)

    monkeypatch.setattr(ragged_all_to_all, "sync", with_wait(wait))
    assert run_caught("on_wait") == dropped
    assert len(calls) == 3


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_caught("eager", hold=1)
    monkeypatch.setattr(sync, "barrier_with_everyone", lambda ring: pltpu.get_barrier_semaphore())
    assert run_caught("eager", hold=1)


def test_only_the_rows_sent_cross_the_wire() -> None:
    n, row = 4, (8, 128)
    machine = replay.Machine.named("v5p:4x4x4")
    tables = conformance.ragged_arguments(n)
    rows = 2 + 3 * n

    def shard(x: jax.Array, o: jax.Array, *tables: jax.Array) -> jax.Array:
        return ragged_all_to_all.direct(
            x, o, *tables, Group(("x",), (n,)), vmem=False, interpret=False
        )

    spec = PartitionSpec("x")
    on = machine.mesh({"x": n, "y": 4, "z": 4})
    mapped = jax.shard_map(shard, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    array = jax.ShapeDtypeStruct((n * rows, *row), jnp.float32)
    report = replay.replay(mapped, array, array, *(t.reshape(-1) for t in tables), machine=machine)
    assert report.ok
    hops = [[min((r - s) % n, (s - r) % n) for r in range(n)] for s in range(n)]
    want = 16 * 4096 * (tables[1] * hops).sum()  # the same on each of 4 x 4 rings
    assert sum(report.link_bytes) == want


@pytest.mark.parametrize("topology", harness.GENERATIONS.values())
def test_compiles_with_nothing_around_it(topology: str) -> None:
    n = len(harness._topology(topology).devices)
    ops = compile_kernel(topology, n, 1 << 16).ops
    assert set(ops) <= {"parameter", "fusion", "get-tuple-element", "custom-call"}
    assert ops.count("custom-call") == 1


@pytest.mark.parametrize("topology", [*harness.GENERATIONS.values(), "v5e:16x16", "v5p:4x4x4"])
def test_a_gibibyte_needs_no_scratch(topology: str) -> None:
    n = len(harness._topology(topology).devices)
    compiled = compile_kernel(topology, n, GIB // 4096)
    assert compiled.temp_bytes <= 2 * GIB + (1 << 20)  # operand, and output which is the result
    assert compiled.seconds < 10


def compile_kernel(topology: str, n: int, rows: int) -> harness.Compiled:
    def program(x: jax.Array, o: jax.Array, table: jax.Array) -> jax.Array:
        tables = (table.astype(jnp.int32),) * 4
        group = Group(("x",), (n,))
        return ragged_all_to_all.direct(x, o, *tables, group, vmem=False, interpret=False)

    return harness.compile_for_tpu(program, topology, (rows, 8, 128), (rows, 8, 128), (n,))


def test_lax_serves_where_a_chip_cannot_reach_everyone() -> None:
    def program(x: jax.Array, o: jax.Array, table: jax.Array, **how: Any) -> jax.Array:
        return exchange(x, o, *(table.astype(jnp.int32),) * 4, **how)

    shapes = (16, 8, 128), (16, 8, 128), (8,)
    pallas_collectives.reset_counts()
    harness.compile_for_tpu(program, "v5e:2x4", *shapes)
    assert set(pallas_collectives.counts()) == {("ragged_all_to_all", "xla", None)}
    assert any("power-of-two" in reason for reason in pallas_collectives.fallback_counts())
    for how in ({"backend": "pallas"}, {"algorithm": "direct"}):
        with pytest.raises(ReachError, match="power-of-two"):
            harness.compile_for_tpu(functools.partial(program, **how), "v5e:2x4", *shapes)


@pytest.mark.parametrize(
    "shapes, match",
    [
        (((4, 8), (4, 9), (2,), (2,), (2,), (2,)), "rows of the same shape"),
        (((4, 8), (4, 8), (2,), (2,), (4,), (2,)), "of one length"),
        (((4, 8), (4, 8), (3,), (3,), (3,), (3,)), "multiple of the 2 devices"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, match: str) -> None:
    arguments = [np.zeros((2, *s), np.float32 if i < 2 else np.int32) for i, s in enumerate(shapes)]
    with pytest.raises(CollectiveError, match=match):
        harness.per_device(exchange, harness.mesh(2))(*arguments)


def test_sharded_ragged_all_to_all_of_whole_arrays() -> None:
    n = 4
    operand, output = (harness.random((n, 14, 8), "float32", s) for s in (1, 2))
    tables = conformance.ragged_arguments(n)
    flat = [a.reshape(-1, *a.shape[2:]) for a in (operand, output, *tables)]
    got = pallas_collectives.sharded.ragged_all_to_all(*flat, mesh=harness.mesh(n), axis_name="x")
    want = conformance.ragged_reference(operand, output, tables)
    np.testing.assert_array_equal(np.asarray(got), want.reshape(-1, 8))
