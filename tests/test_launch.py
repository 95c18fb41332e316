"""Collective ids and VMEM, decided at launch."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import harness
import pallas_collectives
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.backends.algorithms import ALGORITHMS
from pallas_collectives.errors import CollectiveError, VmemError
from pallas_collectives.kernels import launch, sync
from pallas_collectives.kernels.launch import CollectiveIds
from pallas_collectives.replay import Machine
from pallas_collectives.replay.program import Enter, Signal, Start, Wait


def test_a_key_keeps_its_id_and_two_keys_never_share_one() -> None:
    ids = CollectiveIds(20)
    keys = [("neighbours", i) for i in range(20)]
    given = [ids.get(key) for key in keys]
    assert sorted(given) == list(range(20))
    assert [ids.get(key) for key in keys] == given


def test_ids_do_not_depend_on_what_else_was_compiled() -> None:
    first, second = CollectiveIds(20), CollectiveIds(20)
    second.get(("everyone", "something else"))
    assert first.get(("neighbours", "x")) == second.get(("neighbours", "x"))


def test_running_out_of_ids_says_what_to_do() -> None:
    ids = CollectiveIds(20)
    for i in range(20):
        ids.get(i)
    with pytest.raises(CollectiveError, match=r"after 20 others.*barrier.*backend='xla'"):
        ids.get("one more")


def test_more_vmem_than_the_chip_has_is_refused_while_tracing() -> None:
    def gather(x: jax.Array) -> jax.Array:
        return pallas_collectives.all_gather(x, "x", algorithm="bidirectional:vmem")

    x = np.zeros((4, 8192, 1024), np.float32)  # 32 MiB a device
    with pytest.raises(VmemError, match=r"160.0 MiB of VMEM: .* has 128 MiB; leave the operands"):
        jax.eval_shape(harness.per_device(gather, harness.mesh(4), jit=False), x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operands_are_on_their_way_to_vmem_while_others_are_waited_for(case: Any) -> None:
    machine = Machine.named("v5p:4x1x1")
    for algorithm in ALGORITHMS[case.op]:
        task = replay_rows.Task(machine, case, "float32", 8 << 10, f"{algorithm}:vmem", ("x",))
        report = replay_rows.run(task)
        columns = report.engine.program.columns
        entered = max(i for i, column in enumerate(columns) if isinstance(column, Enter))
        before_waits = itertools.takewhile(lambda c: not isinstance(c, Wait), columns[entered:])
        began = [column for column in before_waits if isinstance(column, Start | Signal)]
        copies = [column for column in began if isinstance(column, Start)]
        assert copies and copies == began[: len(copies)] != began, algorithm
        assert all(copy.dst.buffer.space == "vmem" for copy in copies), algorithm
        assert report.ok and report.vmem_bytes


def test_a_barrier_that_nobody_knows_is_refused() -> None:
    with pytest.raises(AssertionError, match="no barrier 'neighbors'"):
        sync.enter("neighbors", (), ())


def test_no_id_of_a_simulated_barrier_is_one_of_the_simulators_own() -> None:
    """It numbers a program's other semaphores from 2000 on, in 16 bits."""
    ids = [launch.simulated_ids.get(("a test's", number)) for number in range(100)]
    assert len(set(ids)) == 100
    assert all(1 << 14 <= number < 1 << 15 for number in ids)
