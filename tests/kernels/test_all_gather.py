"""The all-gather kernels: their table, their faults, their neighbours in a program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import channel_faults
import harness
import pallas_collectives
import step_tables
from pallas_collectives.kernels import all_gather
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group

Kernel = Callable[..., None]


def gather(x: jax.Array, n: int, params: Any, bidirectional: bool = True) -> jax.Array:
    return all_gather.ring(
        x, Group(("x",), (n,)), axis=0, bidirectional=bidirectional, vmem=False, interpret=params
    )


def with_shared_receive_semaphore(kernel: Kernel) -> Kernel:
    def shared(scratch: all_gather.Scratch) -> all_gather.Scratch:
        arrived = harness.OneSemaphore(scratch.semaphores.arrived)
        return scratch._replace(semaphores=scratch.semaphores._replace(arrived=arrived))

    return lambda ring, x, o, scratch, **static: kernel(ring, x, o, shared(scratch), **static)


def run_faulty(n: int, *modes: str, hold: int | None = None, rows: int = 16) -> list[str]:
    """The modes in which something is found wrong with a ring."""
    x = harness.random((n, rows, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        return gather(block, n, harness.EITHER)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught_under(
        modes, lambda: run(x), np.broadcast_to(x.reshape(-1, 128), (n, rows * n, 128))
    )


@pytest.mark.parametrize("n", [4, 7])
def test_sound_kernel_is_not_caught(n: int) -> None:
    assert not run_faulty(n, *harness.ADVERSARIES, hold=1)


@pytest.mark.parametrize("n", [2, 4])
def test_an_odd_number_of_chunks_goes_round_an_even_ring(n: int) -> None:
    assert not run_faulty(n, "on_wait", hold=1, rows=24)


@pytest.mark.parametrize("n", [5, 8])
def test_shared_receive_semaphore_is_caught(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    faulty = with_shared_receive_semaphore(all_gather._ring_kernel)
    monkeypatch.setattr(all_gather, "_ring_kernel", faulty)
    # While the last device is late, the one before it is in its barrier, and those before it send.
    assert run_faulty(n, "on_wait", hold=n - 1)


def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = sync.wait

    def wait_for_sends_only(semaphore: Any, ref: Any, times: int = 1) -> None:
        if semaphore.transforms and len(semaphore.ref.shape) == 3:  # `arrived` is the 3-D one
            return
        wait(semaphore, ref, times)

    monkeypatch.setattr(sync, "wait", wait_for_sends_only)
    assert run_faulty(4, "on_wait")


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_with_neighbours")
    assert run_faulty(4, "eager", hold=1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_step_table_in_the_docstring_is_the_schedule(bidirectional: bool) -> None:
    streams = groups.streams(4, bidirectional=bidirectional, chunks=2)
    table = step_tables.all_gather(4, streams)
    assert all(line in all_gather.__doc__ for line in table.splitlines()), f"\n{table}"


def test_line_table_in_the_docstring_is_the_schedule() -> None:
    table = step_tables.all_gather_line(4)
    assert all(line in (all_gather.__doc__ or "") for line in table.splitlines()), f"\n{table}"


def run_line(n: int, *modes: str, hold: int | None = None, rows: int = 16) -> list[str]:
    """The modes in which something is found wrong with an all-gather along a line."""
    x = harness.random((n, rows, 128), "float32")
    params = harness.EITHER

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        return all_gather.line(block, Group(("x",), (n,)), axis=0, vmem=False, interpret=params)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught_under(
        modes, lambda: run(x), np.broadcast_to(x.reshape(-1, 128), (n, rows * n, 128))
    )


@pytest.mark.full
def test_a_line_is_sound_under_credits_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_line(5, *harness.ADVERSARIES, hold=1)
    monkeypatch.setattr(all_gather, "WINDOW", 2)
    assert not run_line(7, *harness.ADVERSARIES, hold=3)


def test_a_line_with_shared_receive_semaphores_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = with_shared_receive_semaphore(all_gather._ring_kernel)
    monkeypatch.setattr(all_gather, "_ring_kernel", faulty)
    # On a busy machine one run may happen to go in the right order.
    assert any(run_line(5, "on_wait", hold=hold) for hold in (4, 2, 1))


def test_a_line_without_credits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "WINDOW", 1)
    channel_faults.drop_credits(monkeypatch)
    assert run_line(7, "on_wait")


def test_a_line_with_no_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_along_line")
    assert run_line(4, "eager", hold=1)


@pytest.mark.full
def test_calls_in_one_program_do_not_disturb_each_other() -> None:
    on = harness.mesh(2, 4)
    x = harness.random((8, 8, 128), "float32")

    def program(m: Any, block: jax.Array) -> jax.Array:
        block = harness.delayed(block, 1, 0.1)
        for axis_name in ("x", "x", "y", ("x", "y"), "y"):
            block = m.all_gather(block, axis_name, tiled=True)[:8] + block
        return m.all_gather(jnp.sin(block), "y", axis=1, tiled=True)

    def run(m: Any) -> np.ndarray:
        return np.asarray(harness.per_device(functools.partial(program, m), on)(x))

    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES["on_wait"]):
        got = run(pallas_collectives)
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, run(jax.lax))


def test_an_axis_of_one_device_runs_no_kernel() -> None:
    pallas_collectives.reset_counts()
    x = harness.random((1, 8, 128), "float32")
    got = harness.per_device(lambda a: pallas_collectives.all_gather(a, "x"), harness.mesh(1))(x)
    np.testing.assert_array_equal(np.asarray(got)[0, 0], x[0])
    assert not any(backend == "pallas" for _, backend, _ in pallas_collectives.counts())


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_jitted_or_eager_and_checked_or_not(jit: bool, check_vma: bool) -> None:
    x = harness.random((4, 8, 128), "float32")
    run = harness.per_device(
        lambda a: pallas_collectives.all_gather(a, "x", tiled=True),
        harness.mesh(4),
        check_vma=check_vma,
        jit=jit,
    )
    np.testing.assert_array_equal(np.asarray(run(x))[2], x.reshape(-1, 128))


@pytest.mark.full
def test_sharded_all_gather_of_a_whole_array() -> None:
    x = harness.random((16, 256), "float32")
    on = harness.mesh(2, 4)
    for axis in (0, 1):
        got = pallas_collectives.sharded.all_gather(x, mesh=on, axis_name="y", axis=axis)
        np.testing.assert_array_equal(np.asarray(got), x)
        assert got.sharding.is_fully_replicated
    spec = jax.sharding.PartitionSpec("x", "y")
    got = pallas_collectives.sharded.all_gather(x, mesh=on, axis_name="y", axis=1, spec=spec)
    np.testing.assert_array_equal(np.asarray(got), x)
    assert got.sharding.spec[0] == "x"
