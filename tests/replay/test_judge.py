"""The judge's verdicts on kernels, sound and faulty; on small ones against all schedules."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import harness
import judged
import program_mutants
import replay_kernels
import schedules
import stepped
from judged import Case
from pallas_collectives.replay import Machine, replay
from pallas_collectives.replay.jaxprs import UnsupportedEquation
from pallas_collectives.replay.trace_program import trace

CASES = judged.cases()
_ROWS = [pytest.param(c, n, id=f"{c.name}-{n}") for c in CASES for n in c.devices]
_SEARCHED = [
    pytest.param(c, n, id=f"{c.name}-{n}")
    for c in CASES
    for n in c.devices
    if n <= 4 and not c.finds & {"bounds", "memory"}
]
# All but sums on SparseCores: 16 subcores a device have more schedules than a search goes through.
_MUTATED = [name for name, kernel in stepped.kernels().items() if "4" in kernel.meshes]


def _function(case: Case, n: int) -> tuple[Any, Any, Machine]:
    machine = Machine.named(f"v5e:{n}" if case.machine == "v5e" else f"{case.machine}:{n}x1x1")
    body = lambda x: case.body(x, n)  # noqa: E731
    x = jax.ShapeDtypeStruct((n * 8 * n, 128), jnp.float32)
    return replay_kernels.sharded(body, machine.mesh({"x": n})), x, machine


def _program(name: str, n: int) -> Any:
    (case,) = (case for case in CASES if case.name == name)
    function, x, machine = _function(case, n)
    return trace(function, x, generation=machine.generation)[0]


def _kinds(report: Any) -> set[str]:
    kinds = {"deadlock": report.stuck, "left over": report.leftovers, "race": report.races}
    return {f.name for f in report.faults} | {kind for kind, found in kinds.items() if found}


@pytest.mark.parametrize(("case", "n"), _ROWS)
def test_verdicts(case: Case, n: int) -> None:
    function, x, machine = _function(case, n)
    if "bounds" in case.finds:
        with pytest.raises(IndexError):
            replay(function, x, machine=machine, races=True)
        return
    report = replay(function, x, machine=machine, races=True)
    assert _kinds(report) == case.finds, "\n".join(map(str, report.findings))
    assert report.ok == (not case.finds)


def test_there_are_enough_of_either_kind() -> None:
    sound = [case for case in CASES if not case.finds]
    assert len(CASES) >= 60
    assert min(len(sound), len(CASES) - len(sound)) >= 20
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("case", "n"), _SEARCHED)
def test_verdicts_are_what_all_schedules_show(case: Case, n: int) -> None:
    outcome = schedules.search(_program(case.name, n))
    assert program_mutants.shown(outcome) == case.finds & program_mutants.SEARCHED


@pytest.mark.parametrize(
    ("name", "n"),
    [("ring ", 2), ("ring no_wait", 2), ("shift once", 2), ("counts, one left", 2), ("uneven", 2)],
)
def test_schedules_that_are_left_out_show_nothing_else(name: str, n: int) -> None:
    program = _program(name, n)
    few, all_of_them = (schedules.search(program, reduced=r) for r in (True, False))
    assert dataclasses.replace(few, states=0) == dataclasses.replace(all_of_them, states=0)


@pytest.mark.parametrize("name", _MUTATED)
def test_mutants_are_caught_or_equivalent_and_all_schedules_agree(name: str) -> None:
    """A sample of a kernel's, spread over faults, on the fewest devices that have a ring."""
    program = stepped.program_of(name, 3)
    assert program is not None
    mutants = list(program_mutants.mutants_of(program))
    verdicts = [
        program_mutants.verdict(program, mutant, search=True)
        for mutant in mutants[:: max(1, len(mutants) // 12)]
    ]
    assert all(found.agrees for found in verdicts), verdicts
    assert any(found.searched is not None for found in verdicts)
    assert sum(found.name == "caught" for found in verdicts) >= 5


def test_refs_that_a_program_made_outside_keep_their_names() -> None:
    named = {buffer.name for buffer in _program("refs from outside", 2).buffers}
    assert {"x_ref", "o_ref"} <= named, named


@pytest.mark.full
def test_a_judge_that_sees_no_races_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_mutants, "find_races", lambda *args, **kwargs: [])
    program = _program("ring ", 3)
    verdicts = (
        program_mutants.verdict(program, mutant, search=True)
        for mutant in program_mutants.mutants_of(program)
        if mutant.fault in ("late-wait", "share-semaphore")
    )
    assert not all(found.agrees for found in verdicts)  # the first that does not is enough


def test_what_a_program_leaves_tells_a_wrong_slice() -> None:
    program = _program("both ways", 3)
    found = [
        program_mutants.verdict(program, mutant)
        for mutant in program_mutants.mutants_of(program)
        if mutant.fault == "wrong-source"
    ]
    assert found and not any(verdict.name == "equivalent" for verdict in found)


_INTERPRETED = [
    pytest.param(case, id=case.name)
    for case in CASES
    if "how" in inspect.signature(case.body).parameters
    and case.finds <= {"race"}
    and case.name != "ring shared"  # which it shows on some runs only
]


@pytest.mark.parametrize("case", _INTERPRETED)
def test_the_interpreter_agrees(case: Case) -> None:
    """It runs one schedule at a time: copies as late as they may be, or at once. Deadlocks, what is
    left over, and devices that are not there yet it does not show.
    """
    n = max(case.devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))
    x = np.arange(n * 8 * n * 128, dtype=np.float32).reshape(-1, 128)
    body = lambda x: case.body(x, n, interpret=harness.EITHER)  # noqa: E731
    run = jax.jit(replay_kernels.sharded(body, mesh))
    if case.finds:
        assert harness.caught_under(("on_wait", "eager"), lambda: run(x), None)
        return
    late, at_once = (
        harness.EITHER.under(mode, lambda: np.asarray(run(x))) for mode in ("on_wait", "eager")
    )
    assert np.array_equal(late, at_once, equal_nan=True)
    assert not harness.race_reported()


def test_the_race_in_jaxs_all_gather_shows_in_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which the judge names: see `test_replay_races`. Blocks are sent on before they have come.

    On one run of 150 the interpreter's threads take an order in which they have.
    """
    launched = pl.pallas_call
    params = pltpu.InterpretParams(dma_execution_mode="on_wait")
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: launched(*a, **k, interpret=params))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    x = np.arange(4 * 32 * 128, dtype=np.float32).reshape(-1, 128)
    rows = jax.device_put(x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    runs = (np.asarray(replay_kernels.shipped_all_gather(rows, mesh)) for _ in range(20))
    assert any(np.isnan(gathered).any() for gathered in runs)


def test_what_cannot_be_judged_names_primitive_and_line() -> None:
    def body(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any, done: Any) -> None:
            pltpu.make_async_copy(x_ref, o_ref, done).start()

        return judged.launch(kernel, x, replay_kernels.REGULAR)

    machine = Machine.named("v5p:2x1x1")
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    function = replay_kernels.sharded(body, machine.mesh({"x": 2}))
    with pytest.raises(UnsupportedEquation, match="other semaphores") as caught:
        replay(function, x, machine=machine)
    assert caught.value.primitive == "dma_start"
    assert caught.value.line.startswith("test_judge.py:")
