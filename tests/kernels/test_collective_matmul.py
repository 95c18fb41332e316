"""The fused kernels: all rings, faults, and what races on some schedule."""

import functools
import types
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
from pallas_collectives.kernels import collective_matmul, matmul_plan, pipelines
from pallas_collectives.kernels.machinery import channel, multiply, product
from pallas_collectives.replay import Machine, replay
from pallas_collectives.topology.groups import Group, wrap_step

F32 = jnp.dtype(jnp.float32)
BF16 = jnp.dtype(jnp.bfloat16)


# Rings --------------------------------------------------------------------------------------------


def both(x: Any, w: Any, n: int, params: Any, *, transposed: bool = False) -> Any:
    """The gathered x and its product, and the scattered sum of that product with w transposed."""
    group = Group(("x",), (n,))
    options = {"precision": None, "interpret": params}
    gathered, y = collective_matmul.all_gather_matmul(
        x, [w], group, out_dtype=F32, transposed=transposed, **options
    )
    back = collective_matmul.matmul_reduce_scatter(
        y, w, group, wire_dtype=F32, scale=0.5, transposed=not transposed, **options
    )
    return gathered, y, back


def references(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    n = len(x)
    gathered = np.broadcast_to(
        np.concatenate(x, axis=1), (n, x.shape[1], n * x.shape[2], x.shape[3])
    )
    wide = w.astype(np.float64)[:, None]
    y = gathered.astype(np.float64) @ wide
    total = (y @ wide.swapaxes(2, 3)).sum(axis=0) / 2
    return gathered, y, np.stack(np.split(total, n, axis=1))


def small(n: int, rows: int = 16, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return harness.random((n, batch, rows, 128), F32), harness.random((n, 128, 128), F32, 1)


@pytest.mark.parametrize(
    "n, mode",
    [
        *((n, "on_wait") for n in (2, 3, 4, 8)),
        (3, "eager"),
        *(
            pytest.param(n, mode, marks=pytest.mark.slow)
            for n, mode in [
                *((n, "on_wait") for n in (5, 6, 7)),
                *((n, "eager") for n in (2, 4, 5, 8)),
            ]
        ),
    ],
)
def test_every_ring_under_both_adversaries(
    n: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are exact; on the smallest rings also with four parts a block."""
    if n < 4:
        monkeypatch.setattr(matmul_plan, "CHUNKS", (4,))
    assert_exact(n, harness.ADVERSARIES[mode], rows=32 if n < 4 else 16, batch=2 if n == 3 else 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "n, mode",
    [
        *((2, "on_wait"), (4, "eager")),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [(3, "on_wait"), (2, "eager")]),
    ],
)
def test_both_cores_of_a_device_have_a_ring_each(n: int, mode: str) -> None:
    """Each core of each device takes the half of every block; none waits for the other's."""
    assert_exact(n, harness.on_cores(mode), rows=64, batch=2 if n == 3 else 1)


def assert_exact(n: int, params: Any, rows: int, batch: int) -> None:
    x, w = small(n, rows, batch)
    run = functools.partial(both, n=n, params=params)
    got = harness.per_device(run, harness.mesh(n), check_vma=False)(x, w)
    for a, b in zip(got, references(x, w), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    assert not harness.race_reported()


def of_columns(x: Any, w: Any, n: int, params: Any) -> Any:
    """The scattered sum of x transposed @ w."""
    options = {"wire_dtype": F32, "scale": 0.5, "transposed": False, "precision": None}
    return collective_matmul.matmul_reduce_scatter(
        x, w, Group(("x",), (n,)), interpret=params, turned=True, **options
    )


@pytest.mark.parametrize(
    "n, cores, mode",
    [
        (3, 1, "on_wait"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in ((2, 1, "eager"), (4, 1, "eager"), (4, 1, "on_wait"), (2, 2, "eager"))
        ),
    ],
)
def test_products_of_x_as_columns(
    n: int, cores: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights' gradients are; each block of columns in two parts."""
    monkeypatch.setattr(matmul_plan, "CHUNKS", (2,))
    params = harness.ADVERSARIES[mode] if cores == 1 else harness.on_cores(mode)
    x, w = harness.random((n, 1, 128, n * 256), F32), harness.random((n, 128, 256), F32, 1)
    run = functools.partial(of_columns, n=n, params=params)
    got = harness.per_device(run, harness.mesh(n), check_vma=False)(x, w)
    total = (x.astype(np.float64).swapaxes(2, 3) @ w[:, None]).sum(axis=0) / 2
    np.testing.assert_array_equal(np.asarray(got), np.stack(np.split(total, n, axis=1)))
    assert not harness.race_reported()


def wire_is_slow(monkeypatch: pytest.MonkeyPatch, ahead: int = 1) -> None:
    """Messages that came wait behind own chunks, as where products take far less than the wire."""
    monkeypatch.setattr(pipelines.Pace, "of", lambda *_: pipelines.Pace(ahead, ratio=1))
    monkeypatch.setattr(matmul_plan, "CHUNKS", (4,))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_messages_that_wait_behind_own_chunks(
    ahead: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire_is_slow(monkeypatch, ahead)
    assert_exact(4, harness.ADVERSARIES[mode], rows=32, batch=1)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("furthest_first", [False, True])
def test_either_order_of_sums(
    furthest_first: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan.ProductTiling, "outlasts_wire", lambda *_: furthest_first)
    monkeypatch.setattr(matmul_plan, "CHUNKS", (4,))
    assert_exact(4, harness.ADVERSARIES[mode], rows=32, batch=1)


def weights_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in VMEM, and come there in tiles of 256 columns."""
    tiles = product.Tiles(rows=8, depth=128, columns=256, inner=128, keep="all")
    monkeypatch.setattr(product, "choose_tiles", lambda *_: tiles)


def with_wide_weights(n: int, mode: str) -> tuple[Any, Any]:
    """What both kernels make of weights of 640 columns, the last 128 a tile of their own."""
    x, w = small(n)[0], harness.random((n, 128, 640), F32, 1)
    run = functools.partial(both, n=n, params=harness.ADVERSARIES[mode])
    got = harness.per_device(run, harness.mesh(n), check_vma=False)
    return functools.partial(got, x, w), references(x, w)


@pytest.mark.full
@pytest.mark.parametrize("n, mode", [(2, "eager"), (3, "on_wait")])
def test_weights_that_stay_come_tile_by_tile(
    n: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_in_tiles(monkeypatch)
    run, wanted = with_wide_weights(n, mode)
    for got, want in zip(run(), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
    assert not harness.race_reported()


def drop_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile of such a name is waited for."""
    wait = multiply._Operand.wait

    def of_others(operand: Any, *args: Any) -> None:
        if operand.name != name:
            wait(operand, *args)

    monkeypatch.setattr(multiply._Operand, "wait", of_others)


@pytest.mark.parametrize("name", ["x", "w", "result"])
def test_a_dropped_wait_for_a_tile_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_in_tiles(monkeypatch)
    drop_waits(name, monkeypatch)
    run, (_, want, _) = with_wide_weights(2, "on_wait")
    assert harness.caught(lambda: run()[1], want)


def is_caught(
    mode: str,
    n: int = 4,
    hold: int | None = None,
    scatter: bool = False,
    cores: int = 1,
    gathered: bool = False,
) -> bool:
    """Whether a fault shows in the gathering half, or in the scattering one."""
    x, w = small(n, rows=32 if cores > 1 else 16)
    params = harness.on_cores(mode) if cores > 1 else harness.ADVERSARIES[mode]
    group = Group(("x",), (n,))

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x if hold is None else harness.delayed(x, hold)
        options = {"transposed": False, "precision": None, "interpret": params}
        if not scatter:
            results = collective_matmul.all_gather_matmul(x, [w], group, out_dtype=F32, **options)
            return results[0 if gathered else 1]
        rows = jnp.concatenate([x] * n, axis=1)
        return collective_matmul.matmul_reduce_scatter(
            rows, w, group, wire_dtype=F32, scale=1.0, **options
        )

    whole, y, _ = references(x, w)
    y = whole if gathered else y
    want = np.broadcast_to((x @ w[:, None]).sum(axis=0), x.shape) if scatter else y
    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught(lambda: run(x, w), want)


@pytest.mark.parametrize("scatter", [False, True])
def test_sound_kernels_are_not_caught(scatter: bool) -> None:
    assert not is_caught("on_wait", hold=1, scatter=scatter)


@pytest.mark.parametrize("scatter", [False, True])
def test_dropped_wait_before_a_part_is_used_is_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel_faults.drop_receives(monkeypatch, dimensions=3)
    assert is_caught("on_wait", scatter=scatter)


@pytest.mark.full
def test_dropped_wait_for_the_own_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own block is never known to be in its place."""
    make = pltpu.make_async_copy

    class Unwaited:
        def __init__(self, *args: Any) -> None:
            self.start = make(*args).start

        def wait(self) -> None:
            pass

    copies = types.SimpleNamespace(make_async_copy=Unwaited, SemaphoreType=pltpu.SemaphoreType)
    monkeypatch.setattr(pipelines, "pltpu", copies)
    assert is_caught("on_wait", n=2, gathered=True)


@pytest.mark.parametrize("scatter", [False, True])
def test_steps_that_share_a_semaphore_are_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (channel, pipelines):
        monkeypatch.setattr(module, "wrap_step", lambda step, slots: wrap_step(step, 1))
    assert is_caught("on_wait", n=6, scatter=scatter)


@pytest.mark.parametrize("scatter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cores_that_see_to_the_same_chunks_are_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan.ProductTiling, "on", lambda plan, core: plan)
    assert is_caught("on_wait", n=2, scatter=scatter, cores=2)


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_with_neighbours")
    assert is_caught("eager", hold=1)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_dropped_credits_are_caught_on_every_schedule(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals of two steps meet in one semaphore, or a sum in a slot that is still being sent."""
    monkeypatch.setattr("pallas_collectives.kernels.pipelines.WINDOW", 1)
    pod, spec = Machine.named("v5e:16x16"), jax.sharding.PartitionSpec("x")

    def is_sound() -> bool:
        def program(x: jax.Array, w: jax.Array) -> jax.Array:
            return getattr(pallas_collectives, op)(x, w, "x", algorithm="fused")

        on = pod.mesh({"x": 16})
        mapped = jax.shard_map(
            program, mesh=on, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )
        shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((16 * 128, 128), (16 * 128, 256))]
        return replay(mapped, *shapes, machine=pod, races=True).ok

    assert is_sound()
    channel_faults.drop_credits(monkeypatch)
    channel_faults.drop_credits(monkeypatch, "semaphore_signal")
    assert not is_sound()


@pytest.mark.full
def test_long_rings_reuse_semaphores_under_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of two makes a ring of seven a long one."""
    monkeypatch.setattr("pallas_collectives.kernels.pipelines.WINDOW", 2)
    assert not is_caught("on_wait", n=7, hold=3)


@pytest.mark.full
def test_a_message_that_leaves_before_it_came_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.Pace, "out", lambda pace, turn, chunks, one_way: turn + 2)
    assert is_caught("on_wait")


def races(n: int, columns: int = 128, rows: int = 16) -> Any:
    """What can race on some schedule, in both kernels on a ring of n."""
    group, options = Group(("x",), (n,)), {"precision": None, "interpret": False}

    def run(x: jax.Array, w: jax.Array) -> Any:
        gathered, y = collective_matmul.all_gather_matmul(
            x, [w], group, out_dtype=F32, transposed=False, **options
        )
        return gathered, collective_matmul.matmul_reduce_scatter(
            y, w, group, wire_dtype=F32, scale=1.0, transposed=True, **options
        )

    return raced(n, run, (1, rows, 128), (128, columns))


def raced(n: int, run: Any, *shapes: tuple[int, ...]) -> Any:
    """What can race on some schedule, in a program of arrays of such shapes."""
    machine, everywhere = Machine.named(f"v5e:{n}"), PartitionSpec()
    function = jax.shard_map(
        run, mesh=machine.mesh({"x": n}), in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    types = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    return replay(function, *types, machine=machine, races=True).races


def test_the_replay_knows_no_race() -> None:
    assert races(8) == []


def test_the_replay_knows_no_race_of_x_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    run, shapes = functools.partial(of_columns, n=8, params=False), ((1, 256, 2048), (256, 256))
    assert raced(8, run, *shapes) == []
    drop_waits("x", monkeypatch)
    assert raced(8, run, *shapes)


@pytest.mark.parametrize("furthest_first", [False, True])
@pytest.mark.parametrize("n", [4, 7])
def test_the_replay_knows_no_race_of_other_orders(
    n: int, furthest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire_is_slow(monkeypatch)
    monkeypatch.setattr(matmul_plan.ProductTiling, "outlasts_wire", lambda *_: furthest_first)
    assert races(n, rows=32) == []


@pytest.mark.parametrize("name", ["x", "w", "term", "result"])
def test_the_replay_knows_the_race_of_a_tile_that_is_not_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_in_tiles(monkeypatch)
    assert races(4, columns=640) == []
    drop_waits(name, monkeypatch)
    assert races(4, columns=640)


def test_the_replay_knows_the_race_of_a_dropped_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.drop_receives(monkeypatch, dimensions=3)
    assert races(8)


def test_the_replay_knows_the_race_of_a_dropped_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast neighbour writes over sums that are still being sent; that it is fast takes luck."""
    channel_faults.drop_credits(monkeypatch)
    assert races(8)
