"""The ragged all-to-all kernel with faults planted in it: each shows in a run, or is named."""

from typing import Any

import jax
import pytest

import conformance
import harness
import ragged_runs
from pallas_collectives import replay
from pallas_collectives.kernels import ragged_all_to_all
from pallas_collectives.kernels.machinery import channel, sync
from pallas_collectives.topology.groups import Group


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged_runs.in_small_chunks(monkeypatch)


def run_caught(
    mode: str,
    hold: int | None = None,
    algorithm: str = "direct",
    n: int = 4,
    seconds: float = 0.3,
) -> bool:
    operand, output = (harness.random((n, 2 + 3 * n, 8, 128), "float32", s) for s in (1, 2))
    tables = conformance.ragged_arguments(n)

    def program(x: jax.Array, *rest: jax.Array) -> jax.Array:
        x = x if hold is None else harness.delayed(x, hold, seconds)
        params = harness.ADVERSARIES[mode]
        kernel = getattr(ragged_all_to_all, algorithm)
        return kernel(x, *rest, Group(("x",), (n,)), vmem=False, interpret=params)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    want = conformance.ragged_reference(operand, output, tables)
    given = tables if algorithm == "direct" else ragged_runs.of_all(tables)
    return harness.caught(lambda: run(operand, output, *given), want)


@pytest.mark.parametrize("dropped", [False, True])
def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch, dropped: bool) -> None:
    calls: list[Any] = []

    def wait(semaphore: Any, ref: Any, times: int = 1) -> None:
        calls.append(semaphore)  # traced once for receives, then once for sends, once for our own
        if not (dropped and len(calls) == 1):
            sound(semaphore, ref, times)

    sound = sync.wait
    monkeypatch.setattr(sync, "wait", wait)
    assert run_caught("on_wait") == dropped
    assert len(calls) == 3


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_caught("eager", hold=1)
    harness.drop_barrier(monkeypatch, "barrier_with_everyone")
    assert run_caught("eager", hold=1)


def planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernel = ragged_all_to_all._ring_kernel

    def faulty(ring: Any, *refs: Any, **static: Any) -> None:
        *others, scratch = refs
        slots = scratch.slots
        sent, arrived, _ = slots.semaphores
        waits = {"no_arrival": arrived, "no_leaving": sent, "no_final": scratch.final_sem}
        if fault in waits:
            harness.drop_waits(monkeypatch, waits[fault])
        if fault == "no_credit":
            unheard = harness.replaced(channel.pl, semaphore_wait=lambda *_: None)
            monkeypatch.setattr(channel, "pl", unheard)
        if fault == "shared_receive":
            shared = slots.semaphores._replace(arrived=harness.OneSemaphore(arrived))
            scratch = scratch._replace(slots=slots._replace(semaphores=shared))
        kernel(ring, *others, scratch, **static)

    monkeypatch.setattr(ragged_all_to_all, "_ring_kernel", faulty)
    if fault == "no_barrier":
        harness.drop_barrier(monkeypatch, "barrier_with_everyone")


@pytest.mark.full
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "fault, mode",
    [
        *[("none", mode) for mode in harness.ADVERSARIES],
        *[("no_arrival", "on_wait"), ("no_final", "on_wait"), ("no_barrier", "eager")],
    ],
)
def test_fault_in_the_ring_is_caught(
    monkeypatch: pytest.MonkeyPatch, fault: str, mode: str
) -> None:
    planted(monkeypatch, fault)
    seconds = 3.0 if fault == "no_barrier" else 0.3  # what the others take on a busy machine
    caught = run_caught(mode, hold=1, algorithm="ring", n=7, seconds=seconds)
    assert caught == (fault != "none")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "fault",
    [
        *["none", "no_arrival", "no_final", "no_barrier"],
        *["no_credit", "no_leaving", "shared_receive"],  # show in a run only if a device is late
    ],
)
def test_fault_in_the_ring_is_named(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The replay looks at all that may be."""
    planted(monkeypatch, fault)
    report = ragged_runs.replayed("ring", replay.Machine.named("v5p:2x2x2"), {"x": 8}, races=True)
    assert bool(report.findings) == (fault != "none"), report
