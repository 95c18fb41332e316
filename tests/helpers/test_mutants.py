"""The kernels' mutants: they are found, applied as they say, and noticed by the tests."""

import ast
from pathlib import Path

import pytest

import mutants

SOURCE = """
def kernel(ring, x_ref, send_sems, recv_sems, credit_sems):  # öäü: columns are counted in bytes
    sync.barrier_with_neighbours(ring)

    def step(i):
        "ö"; sync.remote_copy(x_ref, x_ref, send_sems.at[i], recv_sems.at[0, i], ring.peer(1))
        sync.wait(recv_sems.at[0, i], x_ref, times=2)
        pl.semaphore_signal(credit_sems.at[0], 1, device_id=ring.peer(-1))
        pl.when(i > 1)(lambda: pl.semaphore_wait(credit_sems.at[0], 1))

    lax.fori_loop(0, ring.size, step, None)
"""


def changes(fault: str) -> list[str]:
    found = [m for m in mutants.mutants_of(Path("kernel.py"), SOURCE) if m.fault == fault]
    for mutant in found:
        assert ast.dump(ast.parse(mutant.applied(SOURCE))) != ast.dump(ast.parse(SOURCE))
    return [mutant.change(SOURCE) for mutant in found]


def test_each_fault_is_planted_where_it_can_be() -> None:
    assert changes("drop-wait") == ["sync.wait(recv_sems.at[0, i], x_ref, times=2) -> None"]
    assert changes("drop-barrier") == ["sync.barrier_with_neighbours(ring) -> None"]
    assert changes("drop-credits") == [
        "pl.semaphore_signal(credit_sems.at[0], 1, device_id=ring.peer(-1)) -> None; "
        "pl.semaphore_wait(credit_sems.at[0], 1) -> None"
    ]
    assert changes("swap-semaphores") == [
        "send_sems.at[i] -> recv_sems.at[0, i]; recv_sems.at[0, i] -> send_sems.at[i]"
    ]
    assert changes("share-semaphore") == ["i -> 0"] * 3
    assert changes("one-step-less") == ["2 -> (2) - 1", "ring.size -> (ring.size) - 1"]
    assert changes("wrong-neighbour") == ["1 -> -(1)", "-1 -> -(-1)"]


def test_the_kernels_have_places_for_each_fault() -> None:
    found = mutants.every_mutant()
    assert {mutant.fault for mutant in found} == set(mutants.FAULTS)
    sample = mutants.sample(found, 24)
    assert len(set(map(str, sample))) == 24
    assert {mutant.fault for mutant in sample} == set(mutants.FAULTS)
    assert len({mutant.path for mutant in sample}) > 8, "they are spread over files"


@pytest.mark.full
def test_a_file_is_tested_by_its_own_tests_and_by_those_of_what_imports_it() -> None:
    (mutant, *_) = (m for m in mutants.every_mutant() if m.path.stem == "relay")
    arguments = mutants.arguments_of(mutant, mutants.ROOT, "quick")
    first, *others = [Path(file).name for file in arguments if file.endswith(".py")]
    assert first == "test_conformance.py"
    assert {"test_all_to_all.py", "test_ragged_all_to_all.py"} <= set(others)
    assert "test_ppermute.py" not in others
    kept = arguments[arguments.index("-k") + 1].split(" or ")
    assert {"all_to_all", "all_to_all_packed_ring", "ragged_all_to_all"} <= set(kept)
    (mutant, *_) = (m for m in mutants.every_mutant() if mutants.module_of(m.path) == "all_gather")
    arguments = mutants.arguments_of(mutant, mutants.ROOT, "quick")
    files = [Path(file).name for file in arguments if file.endswith(".py")]
    assert files[:2] == ["test_all_gather.py", "test_conformance.py"]
    assert len(set(files)) == len(files)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sample_of_mutants_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    survivors = mutants.main(["--sample", "24"])
    assert not survivors, capsys.readouterr().out
