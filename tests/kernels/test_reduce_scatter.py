"""The reduce-scatter and all-reduce kernels: their tables, their faults, their rounding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import channel_faults
import harness
import pallas_collectives
import step_tables
from pallas_collectives.kernels import all_reduce, all_reduce_line, one_hop, reduce_scatter
from pallas_collectives.kernels.machinery import channel
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group


def scatter(x: jax.Array, n: int, params: Any) -> jax.Array:
    return reduce_scatter.ring(
        x,
        Group(("x",), (n,)),
        axis=0,
        op="sum",
        bidirectional=False,
        vmem=True,
        interpret=params,
    )


def reduce(x: jax.Array, n: int, params: Any) -> jax.Array:
    tiles = x.reshape(n, -1, 128)
    y = all_reduce.ring(
        tiles, Group(("x",), (n,)), op="sum", bidirectional=True, vmem=True, interpret=params
    )
    return y.reshape(x.shape)


def scatter_line(x: jax.Array, n: int, params: Any) -> jax.Array:
    group = Group(("x",), (n,))
    return reduce_scatter.line(x, group, axis=0, op="sum", vmem=True, interpret=params)


def scatter_direct(x: jax.Array, n: int, params: Any) -> jax.Array:
    group = Group(("x",), (n,))
    return one_hop.reduce_scatter(x, group, axis=0, op="sum", vmem=True, interpret=params)


def reduce_line(x: jax.Array, n: int, params: Any) -> jax.Array:
    tiles, group = x.reshape(1, -1, 128), Group(("x",), (n,))
    y = all_reduce_line.line(tiles, group, op="sum", vmem=True, interpret=params)
    return y.reshape(x.shape)


def is_caught(
    kernel: Callable[..., jax.Array], n: int, *modes: str, hold: int | None = None, rows: int = 16
) -> list[str]:
    x = harness.random((n, n * rows, 128), "float32")
    total = x.sum(axis=0)
    whole = kernel in (reduce, reduce_line)
    want = np.broadcast_to(total, x.shape) if whole else total.reshape(n, rows, 128)

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        return kernel(block, n, harness.EITHER)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught_under(modes, lambda: run(x), want)


@pytest.mark.parametrize("kernel", [scatter, scatter_line, scatter_direct, reduce, reduce_line])
def test_sound_kernel_is_not_caught(kernel: Callable[..., jax.Array]) -> None:
    assert not is_caught(kernel, 6, *harness.ADVERSARIES, hold=1)


@pytest.mark.full
@pytest.mark.parametrize("n", [2, 4])
def test_an_odd_number_of_chunks_goes_round_an_even_ring(n: int) -> None:
    assert not is_caught(reduce, n, "on_wait", hold=1, rows=24)


@pytest.mark.parametrize("kernel", [scatter, scatter_line])
def test_dropped_credit_is_caught(
    kernel: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for credits: a fast neighbour writes over sums that are still being sent."""
    channel_faults.drop_credits(monkeypatch)
    assert is_caught(kernel, 8, "on_wait")


def test_too_few_slots_for_the_credits_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps share a slot and its semaphore, and the credits do not know it."""
    wrap_step = groups.wrap_step
    monkeypatch.setattr(channel, "wrap_step", lambda step, slots: wrap_step(step, 1))
    assert is_caught(scatter, 8, "on_wait")


@pytest.mark.parametrize("kernel", [scatter, scatter_line])
def test_missing_receive_wait_is_caught(
    kernel: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel_faults.drop_receives(monkeypatch, dimensions=3)
    assert is_caught(kernel, 4, "on_wait")


def test_sends_of_a_slot_that_have_not_ended_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for earlier sends: a credit is given for a slot that is still being sent."""
    monkeypatch.setattr(reduce_scatter._Turns, "end_earlier", lambda *_: None)
    assert is_caught(scatter, 8, "on_wait")


@pytest.mark.parametrize(
    "kernel, barrier",
    [
        (scatter, "barrier_with_neighbours"),
        (scatter_line, "barrier_along_line"),
        (scatter_direct, "barrier_with_everyone"),
        (reduce, "barrier_with_neighbours"),
        (reduce_line, "barrier_along_line"),
    ],
)
def test_dropped_barrier_is_caught(
    kernel: Callable[..., jax.Array], barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.drop_barrier(monkeypatch, barrier)
    assert is_caught(kernel, 4, "eager", hold=1)


def test_step_table_in_the_docstring_is_the_schedule() -> None:
    streams = groups.streams(4, bidirectional=True, chunks=2)
    table = step_tables.reduce_scatter(4, streams)
    assert all(line in (reduce_scatter.__doc__ or "") for line in table.splitlines()), f"\n{table}"


@pytest.mark.parametrize("algorithm", ["ring", "one_shot"])
def test_all_devices_hold_the_same_bits_on_every_run(algorithm: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 33, 7)).astype(np.float32)
    run = harness.per_device(
        lambda a: pallas_collectives.psum(a, "x", algorithm=algorithm), harness.mesh(5)
    )
    first, second = np.asarray(run(x)), np.asarray(run(x))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, np.broadcast_to(first[0], first.shape))
    np.testing.assert_allclose(first[0], x.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("n", [4, 7])
def test_bfloat16_sums_round_once_per_hop_and_precise_ones_once(n: int) -> None:
    x = np.random.default_rng(1).standard_normal((n, n * 16, 128)).astype(ml_dtypes.bfloat16)
    exact = x.astype(np.float64).sum(axis=0).reshape(n, 16, 128)

    def error(**options: Any) -> float:
        scatter = functools.partial(pallas_collectives.psum_scatter, tiled=True, **options)
        got = harness.per_device(lambda a: scatter(a, "x"), harness.mesh(n))(x)
        return float(np.abs(np.asarray(got).astype(np.float64) - exact).max())

    ulp = 2.0**-8 * np.abs(exact).max()
    assert error(precise=True) <= ulp
    assert error() <= (n // 2 + 1) * ulp


@pytest.mark.full
def test_large_blocks_go_through_many_tiles() -> None:
    x = harness.random((2, 4096, 256), "float32")
    got = harness.per_device(
        lambda a: pallas_collectives.psum_scatter(a, "x", tiled=True), harness.mesh(2)
    )(x)
    np.testing.assert_array_equal(np.asarray(got), x.sum(axis=0).reshape(2, 2048, 256))


@pytest.mark.full
def test_sums_and_gathers_in_one_program() -> None:
    x = harness.random((4, 32, 128), "float32")

    def program(m: Any, a: jax.Array) -> jax.Array:
        a = harness.delayed(a, 2, 0.1)
        for _ in range(2):
            a = m.psum_scatter(a, "x", tiled=True)
            a = m.all_gather(a, "x", tiled=True) - m.psum(jnp.sin(a).sum(), "x")
        return m.pmax(a, "x")

    def run(m: Any) -> np.ndarray:
        program_m = functools.partial(program, m)
        return np.asarray(harness.per_device(program_m, harness.mesh(4), check_vma=False)(x))

    np.testing.assert_allclose(run(pallas_collectives), run(jax.lax), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "axis_name, n, name, reduce",
    [("x", 2, "pmean", np.mean), ("y", 4, "pmax", np.max), (("x", "y"), 8, "pmin", np.min)],
)
def test_sharded_sums_of_whole_arrays(axis_name: Any, n: int, name: str, reduce: Any) -> None:
    x, on = harness.random((n, 16, 128), "float32"), harness.mesh(2, 4)
    whole = pallas_collectives.sharded
    summed = whole.psum(x, mesh=on, axis_name=axis_name)
    np.testing.assert_array_equal(np.asarray(summed), x.sum(axis=0))
    assert summed.sharding.is_fully_replicated
    got = getattr(whole, name)(x, mesh=on, axis_name=axis_name)
    np.testing.assert_allclose(np.asarray(got), reduce(x, axis=0), rtol=1e-6)
    for axis in (0, -1):
        laid = whole.psum_scatter(x, mesh=on, axis_name=axis_name, axis=axis)
        np.testing.assert_array_equal(np.asarray(laid), x.sum(axis=0))
        assert laid.sharding.spec[axis] == axis_name


def test_a_negative_axis_counts_from_the_last() -> None:
    x = harness.random((4, 3, 28), "float32")  # JAX 0.10's lax takes no negative one
    scatter = functools.partial(pallas_collectives.psum_scatter, scatter_dimension=-1, tiled=True)
    got = harness.per_device(lambda a: scatter(a, "x"), harness.mesh(4))(x)
    np.testing.assert_array_equal(np.asarray(got), np.stack(np.split(x.sum(0), 4, axis=1)))
