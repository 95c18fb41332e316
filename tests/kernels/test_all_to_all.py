"""The all-to-all kernels: table, faults, chunks and steps, wire load, what the compiler makes."""

import functools
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
from pallas_collectives.errors import AlgorithmError, CollectiveError
from pallas_collectives.kernels import all_to_all
from pallas_collectives.kernels.machinery import channel, relay, sync
from pallas_collectives.topology.groups import Group

MIB = 1 << 20


def exchange(x: Any, n: int, algorithm: str = "ring", params: Any = False, concat: int = 0) -> Any:
    return getattr(all_to_all, algorithm)(
        x,
        Group(("x",), (n,)),
        split_axis=0,
        concat_axis=concat,
        vmem=False,
        interpret=params,
    )


def exchanged(xs: np.ndarray) -> np.ndarray:
    n = len(xs)
    return xs.reshape(n, n, -1, *xs.shape[2:]).swapaxes(0, 1).reshape(xs.shape)


def run_caught(n: int, mode: str, algorithm: str = "ring", hold: int | None = None) -> bool:
    x = harness.random((n, n * 64, 128), "float32")

    def program(shard: jax.Array) -> jax.Array:
        shard = shard if hold is None else harness.delayed(shard, hold)
        return exchange(shard, n, algorithm, harness.ADVERSARIES[mode])

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught(lambda: run(x), exchanged(x))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 KiB go in four chunks, two distances at a time, through four slots."""
    monkeypatch.setattr(all_to_all, "CHUNK_BYTES", 8 << 10)
    monkeypatch.setattr(all_to_all, "SLOT_BYTES", 64 << 10)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n, mode", [(4, "on_wait"), (7, "on_wait"), (8, "on_wait"), (8, "eager")])
def test_chunks_and_waves_with_a_late_device(n: int, mode: str) -> None:
    assert not run_caught(n, mode, hold=1)


@pytest.mark.parametrize(
    "order, mode",
    [((0, 1, 2), "on_wait"), ((2, 0, 3, 1), "eager"), ((0, 1, 2, 3, 7, 6, 5, 4), "on_wait")],
)
def test_small_blocks_go_along_a_line(order: tuple[int, ...], mode: str) -> None:
    n = len(order)
    x = harness.random((n, n * 8, 128), "float32")
    group = Group(("x",), (n,), order=order, line=True)

    def program(shard: jax.Array) -> jax.Array:
        return all_to_all.ring(
            harness.delayed(shard, 1),
            group,
            split_axis=0,
            concat_axis=0,
            vmem=False,
            interpret=harness.ADVERSARIES[mode],
        )

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    assert not harness.caught(lambda: run(x), exchanged(x))


def test_nothing_goes_over_the_hop_that_closes_a_line() -> None:
    """Neither of a block of 8 KiB nor of one of 8 MiB, which goes in chunks."""
    machine = replay.Machine.named("v5e:4")
    mesh = machine.mesh({"x": 4})

    def hops(rows: int) -> list[float]:
        program = functools.partial(exchange, n=4, algorithm="line")
        spec = PartitionSpec()
        function = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        x = jax.ShapeDtypeStruct((4 * rows, 128), jnp.float32)
        report = replay.replay(function, x, machine=machine, races=True)
        assert report.ok
        return sorted({m.hops for core in report.engine.cores for m in core.messages if m.hops})

    assert hops(16) == [1.0]
    assert hops(16 << 10) == [1.0]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tiles", [1, 3])
def test_block_that_cannot_be_halved(tiles: int) -> None:
    x = harness.random((4, 4, tiles * 8, 128), "float32")
    run = harness.per_device(
        lambda a: exchange(a, 4, params=harness.ADVERSARIES["on_wait"]),
        harness.mesh(4),
        check_vma=False,
    )
    np.testing.assert_array_equal(np.asarray(run(x)), exchanged(x))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dropped, mode", [(False, "on_wait"), (True, "on_wait"), (True, "eager")])
def test_dropped_credit_is_caught(
    monkeypatch: pytest.MonkeyPatch, dropped: bool, mode: str
) -> None:
    wait = (lambda *_: None) if dropped else channel.pl.semaphore_wait
    monkeypatch.setattr(channel, "pl", harness.replaced(channel.pl, semaphore_wait=wait))
    assert run_caught(7, mode, hold=1) == dropped


@pytest.mark.parametrize("fault", ["none", "shared_receive", "early_credit", "missing_arrival"])
@pytest.mark.usefixtures("small_chunks")
def test_fault_in_the_slots_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernel = all_to_all._ring_kernel

    def faulty(ring: Any, x: Any, o: Any, scratch: all_to_all.Scratch, **static: Any) -> None:
        (its,) = scratch.relays  # of the one schedule of an odd ring
        assert its is not None
        sent, arrived, credit = its.semaphores
        match fault:
            case "shared_receive":
                semaphores = its.semaphores._replace(arrived=harness.OneSemaphore(arrived))
                scratch = scratch._replace(relays=(its._replace(semaphores=semaphores),))
            case "early_credit":
                harness.drop_waits(monkeypatch, sent, at=relay)
            case "missing_arrival":
                harness.drop_waits(monkeypatch, arrived, at=channel)
            case "none":
                for module in (relay, channel):
                    harness.drop_waits(monkeypatch, credit, at=module)
        kernel(ring, x, o, scratch, **static)

    monkeypatch.setattr(all_to_all, "_ring_kernel", faulty)
    tries = 1 if fault == "none" else 3  # a race need not show in every run
    assert any(run_caught(7, "on_wait") for _ in range(tries)) == (fault != "none")


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_missing_wait_for_what_stays_is_caught(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, dropped: bool
) -> None:
    waits: list[int] = []

    def wait(semaphore: Any, ref: Any, times: int = 1) -> None:
        waits.append(times)
        is_receive = waits == [2]  # of the two waits for the blocks of two others, the first
        if not (dropped and is_receive):
            sound(semaphore, ref, times)

    sound = sync.wait
    monkeypatch.setattr(sync, "wait", wait)
    assert run_caught(3, "on_wait", algorithm) == dropped
    assert waits == [2, 2]


@pytest.mark.parametrize(
    "algorithm, barrier",
    [
        ("direct", "barrier_with_everyone"),
        ("ring", "barrier_with_neighbours"),
        ("line", "barrier_along_line"),
    ],
)
def test_dropped_barrier_is_caught(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, barrier: str
) -> None:
    harness.drop_barrier(monkeypatch, barrier)
    assert run_caught(4, "eager", algorithm, hold=1)


@pytest.mark.parametrize("n, rows", [(8, 16), (16, 16), (16, 8192)])
def test_the_busiest_link_carries_the_bidirectional_bound(n: int, rows: int) -> None:
    machine = replay.Machine.named(f"v5p:{n}x4x4")
    spec = PartitionSpec("x")
    mapped = jax.shard_map(
        lambda x: exchange(x, n),
        mesh=machine.mesh({"x": n, "y": 4, "z": 4}),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    shape = jax.ShapeDtypeStruct((n * n * rows, 128), jnp.float32)
    report = replay.replay(mapped, shape, machine=machine)
    assert not report.findings
    bound = n**2 // 8 * rows * 512
    assert report.busiest_link[1] == bound
    if rows == 8192:
        link = machine.generation.link_bandwidth * machine.generation.link_efficiency
        assert report.time <= 1.05 * bound / link


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["direct", "ring", "line"])
@pytest.mark.parametrize("topology", harness.GENERATIONS.values())
def test_compiles_with_nothing_around_it(topology: str, algorithm: str) -> None:
    n = len(harness._topology(topology).devices)
    for concat in (0, 1):
        program = functools.partial(exchange, n=n, algorithm=algorithm, concat=concat)
        compiled = harness.compile_for_tpu(program, topology, (n * 16, 256))
        around = [op for op in compiled.ops if op not in ("parameter", "get-tuple-element")]
        assert around == ["fusion", "custom-call", "fusion"]


@pytest.mark.parametrize("algorithm, scratch", [("direct", 0), ("ring", 18 * MIB)])
@pytest.mark.parametrize("topology", [*harness.GENERATIONS.values(), "v5e:16x16", "v5p:4x4x4"])
def test_a_gibibyte_needs_no_more_scratch_than_stated(
    topology: str, algorithm: str, scratch: int
) -> None:
    n = len(harness._topology(topology).devices)
    program = functools.partial(exchange, n=n, algorithm=algorithm, concat=1)
    compiled = harness.compile_for_tpu(program, topology, (2 * MIB, 128))
    assert compiled.temp_bytes <= 2 * 1024 * MIB + scratch + MIB // 2  # operand and result, and it
    assert compiled.seconds < 10


def test_v5e_goes_round_the_ring_by_itself() -> None:
    def program(x: jax.Array, **how: Any) -> jax.Array:
        return pallas_collectives.all_to_all(x, "x", 0, 0, tiled=True, **how)

    pallas_collectives.reset_counts()
    harness.compile_for_tpu(program, "v5e:2x4", (64, 128))
    assert set(pallas_collectives.counts()) == {("all_to_all", "pallas", "ring")}
    with pytest.raises(AlgorithmError, match="power-of-two"):
        direct = functools.partial(program, algorithm="direct")
        harness.compile_for_tpu(direct, "v5e:2x4", (64, 128))


@pytest.mark.full
def test_calls_in_one_program_do_not_disturb_each_other() -> None:
    on = harness.mesh(2, 4)
    x = harness.random((8, 64, 128), "float32")

    def program(m: Any, block: jax.Array, **how: Any) -> jax.Array:
        block = harness.delayed(block, 1, 0.1)
        for axis_name in ("y", "y", "x", ("x", "y")):
            block = m.all_to_all(block, axis_name, 0, 0, tiled=True, **how) + block
            block = block - m.all_to_all(block, axis_name, 0, 0, tiled=True)
        return m.ppermute(block, "y", [(0, 1), (1, 3)])

    def run(m: Any, **how: Any) -> np.ndarray:
        return np.asarray(harness.per_device(functools.partial(program, m, **how), on)(x))

    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = run(pallas_collectives, algorithm="ring")
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, run(jax.lax))


@pytest.mark.full
def test_groups_exchange_by_themselves() -> None:
    groups = [[0, 3, 4], [5, 2, 1]]
    x = harness.random((6, 6, 5), "float32")
    for algorithm in ("ring", "line", "direct"):
        run = harness.per_device(
            lambda a, algorithm=algorithm: pallas_collectives.all_to_all(
                a, "x", 0, 1, axis_index_groups=groups, tiled=True, algorithm=algorithm
            ),
            harness.mesh(6),
        )
        got = np.asarray(run(x))
        for group in groups:
            for p, device in enumerate(group):
                want = np.concatenate([x[s, 2 * p : 2 * p + 2] for s in group], axis=1)
                np.testing.assert_array_equal(got[device], want)


@pytest.mark.full
def test_axes_may_be_negative_and_leaves_of_any_rank() -> None:
    xs = [harness.random((4, 8, 4, 128), "float32"), harness.random((4, 3, 5, 4, 2), "int8")]

    def run(split: int, concat: int, tiled: bool) -> list[np.ndarray]:
        def program(*leaves: jax.Array) -> Any:
            return pallas_collectives.all_to_all(leaves, "x", split, concat, tiled=tiled)

        return list(map(np.asarray, harness.per_device(program, harness.mesh(4))(*xs)))

    for tiled in (True, False):
        for got, x in zip(run(-2, -1, tiled), xs, strict=True):
            want = conformance.exchanged(x.ndim - 3, x.ndim - 2, tiled)(x)
            np.testing.assert_array_equal(got, want)


def test_pswapaxes_is_the_same_kernel() -> None:
    x = harness.random((4, 3, 4), "int32")

    def run(m: Any) -> np.ndarray:
        return np.asarray(harness.per_device(lambda a: m.pswapaxes(a, "x", 1), harness.mesh(4))(x))

    pallas_collectives.reset_counts()
    np.testing.assert_array_equal(run(pallas_collectives), run(jax.lax))
    served = {(op, backend) for op, backend, _ in pallas_collectives.counts()}
    assert served == {("all_to_all", "pallas")}


def test_sharded_all_to_all_of_a_whole_array() -> None:
    x = harness.random((16, 256), "float32")
    on = harness.mesh(2, 4)
    sharded = functools.partial(pallas_collectives.sharded.all_to_all, x, mesh=on, axis_name="y")
    got = sharded(split_axis=-1, concat_axis=0)
    np.testing.assert_array_equal(np.asarray(got), x)
    assert got.sharding.spec == PartitionSpec(None, "y")
    with pytest.raises(CollectiveError, match="whole on each device"):
        sharded(split_axis=0, concat_axis=1, spec=PartitionSpec("x", "y"))
    with pytest.raises(CollectiveError, match="dimension 2"):
        sharded(split_axis=2, concat_axis=1)


@pytest.mark.full
def test_sharded_pswapaxes_of_a_whole_array() -> None:
    x, on = harness.random((8, 3, 8, 5), "float32"), harness.mesh(2, 4)
    swap = functools.partial(pallas_collectives.sharded.pswapaxes, mesh=on, axis_name=("x", "y"))
    got = swap(x, axis=-2)
    np.testing.assert_array_equal(np.asarray(got), x.swapaxes(0, 2))
    assert got.sharding.spec == PartitionSpec(("x", "y"))
    with pytest.raises(CollectiveError, match="there must be 8, one a device"):
        swap(x[:4], axis=2)
    with pytest.raises(CollectiveError, match="axis=0 of size 3"):
        swap(x, axis=1)
