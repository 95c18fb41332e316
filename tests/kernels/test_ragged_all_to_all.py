"""The ragged all-to-all kernel: routings, bytes on the wire, what the compiler makes."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import conformance
import harness
import pallas_collectives
import ragged_runs
from conformance import routed
from pallas_collectives import replay
from pallas_collectives.errors import CollectiveError, ReachError
from pallas_collectives.kernels import ragged_all_to_all
from pallas_collectives.kernels.machinery import relay
from pallas_collectives.topology.groups import Group

GIB = 1 << 30
ALGORITHMS = ("direct", "ring", "line")
exchange = functools.partial(pallas_collectives.ragged_all_to_all, axis_name="x")
by_lax = functools.partial(jax.lax.ragged_all_to_all, axis_name="x")


Check = Callable[[np.ndarray, np.ndarray, tuple[np.ndarray, ...]], None]


def checker(n: int, algorithm: str) -> Check:
    """One program, to be held against the reference for operands, outputs and tables."""
    call = functools.partial(exchange, algorithm=algorithm)
    run = harness.per_device(call, harness.mesh(n))

    def check(operand: np.ndarray, output: np.ndarray, tables: tuple[np.ndarray, ...]) -> None:
        with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
            got = np.asarray(run(operand, output, *tables))
        assert not harness.race_reported()
        want = conformance.ragged_reference(operand, output, tables)
        np.testing.assert_array_equal(got, want)

    return check


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


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged_runs.in_small_chunks(monkeypatch)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_routings_of_one_program(algorithm: str) -> None:
    n, rows = 5, 24
    operand, output = (harness.random((n, rows, 3, 5), "float32", seed) for seed in (1, 2))
    check = checker(n, algorithm)
    to_one = np.zeros((n, n), np.int32)
    to_one[:, 3] = 4
    to_self = 7 * np.eye(n, dtype=np.int32)
    for send in (np.zeros((n, n), np.int32), to_one, to_self):
        check(operand, output, routed(send, into=2))
    for seed in range(3):
        send = np.random.default_rng(seed).integers(0, 5, (n, n))
        check(operand, output, routed(send))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n, algorithm", [(2, "ring"), (5, "ring"), (8, "ring"), (6, "line")])
def test_chunks_and_waves(n: int, algorithm: str) -> None:
    operand, output = (harness.random((n, 8 * n, 8, 128), "float32", seed) for seed in (1, 2))
    send = np.random.default_rng(n).integers(0, 8, (n, n))
    checker(n, algorithm)(operand, output, routed(send))


@pytest.mark.full
@pytest.mark.parametrize("n", [5, 8])
def test_rounds_of_a_ring_overlap(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than slots, and opposite devices' rows go the way that is less busy."""
    for name in ("CHUNK_BYTES", "LEAST_CHUNK_BYTES", "LEAST_PIECE_BYTES"):
        monkeypatch.setattr(ragged_all_to_all, name, ragged_runs.TILE_BYTES)
    monkeypatch.setattr(ragged_all_to_all, "WEIGHED_BYTES", 0)
    operand, output = (harness.random((n, 9 * n, 8, 128), "float32", seed) for seed in (1, 2))
    send = np.random.default_rng(n).integers(0, 3, (n, n))
    send[1] = 9
    send[:, 2] = 0
    assert relay.Schedule((1, -1), 1, n // 2, n // 2, overlapping=True).slots[1] < 9 * (n // 2)
    checker(n, "ring")(operand, output, routed(send))


def test_opposite_rows_never_make_the_busiest_link_busier() -> None:
    def busiest(rows: np.ndarray, right: np.ndarray) -> float:
        n = len(rows)
        loads = np.zeros((2, n))
        for i, d in itertools.product(range(n), range(1, n)):
            part = right[i] / 256 if 2 * d == n else float(2 * d < n)
            loads[0, (i + np.arange(d)) % n] += part * rows[i, (i + d) % n]
            loads[1, (i - np.arange(n - d)) % n] += (1 - part) * rows[i, (i + d) % n]
        return float(loads.max())

    rng = np.random.default_rng(0)
    for n in (2, 4, 8, 16):
        parts = jax.jit(functools.partial(ragged_all_to_all.parts_right, n=n, most=1 << 20))
        for skew in (0.5, 1, 2, 5) * 4:
            rows = np.minimum(100 * rng.pareto(skew, (n, n)), 1e6).astype(np.int32)
            right = np.asarray(parts(rows.reshape(-1)))
            assert busiest(rows, right) <= busiest(rows, np.full(n, 128)) * (1 + 1e-3)
        one = np.zeros((n, n), np.int32)  # device 0 sends far, and its left is in the way of others
        one[0, 1:], one[1, n // 2 + 1 :] = 100, 50
        right = np.asarray(parts(one.reshape(-1)))
        assert n < 8 or busiest(one, right) < 0.95 * busiest(one, np.full(n, 128))


@pytest.mark.full
def test_the_ring_goes_by_what_the_senders_send() -> None:
    operand, output = (harness.random((3, 12, 2), "float32", seed) for seed in (1, 2))
    *tables, received = conformance.ragged_arguments(3)
    checker(3, "ring")(operand, output, (*tables, np.full_like(received, 5)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_slices_out_of_range_are_clipped_and_moved(algorithm: str) -> None:
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
    checker(n, algorithm)(operand, output, (offsets, send, places, recv))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_tables_of_any_integer_type(dtype: str) -> None:
    with jax.enable_x64(dtype == "int64"):
        tables = tuple(t.astype(dtype) for t in conformance.ragged_arguments(3))
        operand, output = (harness.random((3, 12, 2), "float32", seed) for seed in (1, 2))
        for algorithm in ALGORITHMS:
            checker(3, algorithm)(operand, output, tables)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_exchange_by_themselves(algorithm: str) -> None:
    groups = [[4, 1, 2], [3, 0, 5]]
    operand, output, weights = (harness.random((6, 20, 2), "float32", seed) for seed in (1, 2, 3))
    per_group = conformance.ragged_arguments(3, slices=2)
    tables = tuple(np.zeros((6, 6), np.int32) for _ in per_group)
    value, grads = np.empty_like(output), (np.empty_like(output), np.empty_like(output))
    for group in groups:
        for table, values in zip(tables, per_group, strict=True):
            table[group] = values
        value[group] = conformance.ragged_reference(operand[group], output[group], per_group)
        of_group = conformance.ragged_gradients(weights[group], 20, per_group)
        for grad, rows in zip(grads, of_group, strict=True):
            grad[group] = rows

    def program(x: jax.Array, o: jax.Array, w: jax.Array, *tables: jax.Array) -> Any:
        def call(x: jax.Array, o: jax.Array) -> jax.Array:
            return exchange(x, o, *tables, axis_index_groups=groups, algorithm=algorithm)

        y, pull = jax.vjp(call, x, o)
        return y, pull(w)

    run = harness.per_device(program, harness.mesh(6), check_vma=False)
    got = run(operand, output, weights, *tables)
    jax.tree.map(np.testing.assert_array_equal, got, (value, grads))


@pytest.mark.full
def test_gradients_travel_back_to_the_rows_they_came_from() -> None:
    n, rows = 3, 24
    operand, output, weights, at, ot = (
        harness.random((n, rows, 2), "float32", s) for s in range(1, 6)
    )
    tables = conformance.ragged_arguments(n, slices=2)

    def loss(x: jax.Array, o: jax.Array, w: jax.Array, *tables: jax.Array) -> jax.Array:
        return (exchange(x, o, *tables) * w).sum()

    def program(x: Any, o: Any, w: Any, xt: Any, ot: Any, *tables: Any) -> Any:
        call = lambda x, o: exchange(x, o, *tables)  # noqa: E731
        return jax.grad(loss, (0, 1))(x, o, w, *tables), jax.jvp(call, (x, o), (xt, ot))

    run = harness.per_device(program, harness.mesh(n))
    grads, (value, tangent) = run(operand, output, weights, at, ot, *tables)
    for got, want in zip(grads, conformance.ragged_gradients(weights, rows, tables), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
    for got, of in ((value, (operand, output)), (tangent, (at, ot))):
        want = conformance.ragged_reference(*of, tables)
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("call", [exchange, pallas_collectives.overridden(by_lax)])
def test_rows_that_come_into_zeros_differ_on_each_device(call: Callable[..., jax.Array]) -> None:
    """Zeros are equal on all devices; what comes into them is not, along no axis of the mesh."""
    n, rows, weights = 2, 20, harness.random((4, 16, 8), "float32")
    operand = harness.random((4, rows, 8), "float32", 1)
    tables = conformance.ragged_arguments(n)
    groups = [[0, 2], [1, 3]]  # along x; those along y get the same tables
    everywhere = [np.repeat(table, 2, axis=0) for table in tables]

    def one(x: jax.Array, w: jax.Array, *tables: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = call(x, jnp.zeros(w.shape), *tables)
        assert jax.typeof(y).mat.varying == {"x", "y"}
        return y, jax.grad(lambda x: jnp.sum(w * call(x, jnp.zeros(w.shape), *tables)))(x)

    value, grad = map(
        np.asarray, harness.per_device(one, harness.mesh(2, 2))(operand, weights, *everywhere)
    )
    for group in groups:
        want = conformance.ragged_reference(operand[group], np.zeros((n, 16, 8)), tables)
        np.testing.assert_array_equal(value[group], want)
        of_rows, _ = conformance.ragged_gradients(weights[group], rows, tables)
        np.testing.assert_array_equal(grad[group], of_rows)


@pytest.mark.full
def test_calls_of_which_a_device_takes_no_part_do_not_disturb_each_other() -> None:
    """Nothing is sent to or by device 0, which could be calls ahead of its neighbours."""
    n, send = 4, np.zeros((4, 4), np.int32)
    send[1:, 1:] = [[0, 1, 2], [3, 0, 1], [2, 2, 0]]
    operand, output = (harness.random((n, 12, 8, 128), "float32", seed) for seed in (1, 2))
    tables = routed(send)

    def program(x: jax.Array, o: jax.Array, *tables: jax.Array) -> jax.Array:
        for _ in range(4):
            x = harness.delayed(x, 3, 0.1)
            group, params = Group(("x",), (n,)), harness.ADVERSARIES["eager"]
            x = ragged_all_to_all.ring(x, o, *tables, group, vmem=False, interpret=params)
        return x

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    want = operand
    for _ in range(4):
        want = conformance.ragged_reference(want, output, tables)
    assert not harness.caught(lambda: run(operand, output, *ragged_runs.of_all(tables)), want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_rows_sent_cross_the_wire(algorithm: str) -> None:
    n, machine = 4, replay.Machine.named("v5p:4x4x4")
    report = ragged_runs.replayed(algorithm, machine, {"x": n, "y": 4, "z": 4}, races=False)
    assert not report.findings
    hops = [[min((r - s) % n, (s - r) % n) for r in range(n)] for s in range(n)]
    if algorithm == "line":
        hops = [[abs(r - s) for r in range(n)] for s in range(n)]
    sizes = conformance.ragged_arguments(n)[1]
    want = 16 * 4096 * (sizes * hops).sum()  # the same on each of 4 x 4 rings
    assert sum(report.link_bytes) == want


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("topology", harness.GENERATIONS.values())
def test_compiles_with_nothing_around_it(topology: str, algorithm: str) -> None:
    n = len(harness._topology(topology).devices)
    ops = compile_kernel(topology, n, 1 << 16, algorithm).ops
    assert set(ops) <= {"parameter", "fusion", "get-tuple-element", "custom-call"}
    assert ops.count("custom-call") == 1


@pytest.mark.parametrize("algorithm, scratch", [("direct", 0), ("ring", 16)])
@pytest.mark.parametrize("topology", [*harness.GENERATIONS.values(), "v5e:16x16", "v5p:4x4x4"])
def test_a_gibibyte_needs_no_more_scratch_than_stated(
    topology: str, algorithm: str, scratch: int
) -> None:
    n = len(harness._topology(topology).devices)
    compiled = compile_kernel(topology, n, GIB // 4096, algorithm)
    # operand, and output which is the result
    assert compiled.temp_bytes <= 2 * GIB + (scratch << 20) + (2 << 20)
    assert compiled.seconds < 10


def compile_kernel(topology: str, n: int, rows: int, algorithm: str) -> harness.Compiled:
    def program(x: jax.Array, o: jax.Array, table: jax.Array) -> jax.Array:
        tables = [table.astype(jnp.int32)] * (4 if algorithm == "direct" else 1)
        if algorithm != "direct":
            tables += [jnp.tile(tables[0], n)] * 2
        kernel = getattr(ragged_all_to_all, algorithm)
        return kernel(x, o, *tables, Group(("x",), (n,)), vmem=False, interpret=False)

    return harness.compile_for_tpu(program, topology, (rows, 8, 128), (rows, 8, 128), (n,))


def test_a_ring_of_short_rows_has_semaphores_enough() -> None:
    def program(x: jax.Array, o: jax.Array, table: jax.Array) -> jax.Array:
        tables = (table.astype(jnp.int32),) * 4
        return exchange(x, o, *tables, axis_name="y", algorithm="ring")

    shapes = (22 * 4096, 8, 128), (22 * 4096, 8, 128), (22,)
    harness.compile_for_tpu(program, "v5p:2x2x22", *shapes, sizes=(4, 22))


@pytest.mark.full
def test_v5e_goes_along_all_axes_by_itself() -> None:
    def program(x: jax.Array, o: jax.Array, table: jax.Array, **how: Any) -> jax.Array:
        return exchange(x, o, *(table.astype(jnp.int32),) * 4, **how)

    shapes = (16, 8, 128), (16, 8, 128), (8,)
    pallas_collectives.reset_counts()
    harness.compile_for_tpu(program, "v5e:2x4", *shapes)
    assert ("ragged_all_to_all", "pallas", "torus") in pallas_collectives.counts()
    assert {backend for _, backend, _ in pallas_collectives.counts()} == {"pallas"}
    with pytest.raises(ReachError, match="power-of-two"):
        direct = functools.partial(program, algorithm="direct")
        harness.compile_for_tpu(direct, "v5e:2x4", *shapes)


@pytest.mark.parametrize(
    "sizes, algorithm, slices",
    [((4, 4, 4), "ring", 29), ((2, 2, 1), "direct", 15360), ((2, 2, 1), "spread", 5585)],
)
def test_tables_that_do_not_fit_are_refused(
    sizes: tuple[int, ...], algorithm: str, slices: int
) -> None:
    """Each by what its own kernel reads: so many slices are served, and one more is not."""
    axes = {axis: size for axis, size in zip("xyz", sizes, strict=True) if size > 1}
    n, topology = math.prod(sizes), "v5p:" + "x".join(map(str, sizes))

    def compile_with(slices: int) -> None:
        def program(x: jax.Array, o: jax.Array, table: jax.Array) -> jax.Array:
            tables = (table.astype(jnp.int32),) * 4
            return exchange(x, o, *tables, axis_name=tuple(axes), algorithm=algorithm)

        rows = (16, 8, 128)
        given = rows, rows, (n * slices,)
        harness.compile_for_tpu(program, topology, *given, sizes=tuple(axes.values()))

    compile_with(slices)
    with pytest.raises(ReachError, match=rf"{algorithm}.* {slices + 1} slices each.*960 KiB"):
        compile_with(slices + 1)


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
