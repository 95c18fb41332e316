"""VMEM, decided at launch."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import ppermute
from pallas_collectives.kernels.machinery import sync
from pallas_collectives.replay import Machine, replay
from pallas_collectives.replay.program import Enter, Signal, Start, Wait
from pallas_collectives.topology.groups import Group


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
        report = replay_rows.run(task, races=True)
        columns = report.engine.program.columns
        entered = max(i for i, column in enumerate(columns) if isinstance(column, Enter))
        signals = next(i for i, c in enumerate(columns) if i > entered and isinstance(c, Signal))
        copies = [c for c in columns[entered:signals] if isinstance(c, Start)]
        waited = [c for c in columns[entered:signals] if isinstance(c, Wait)]
        assert all(copy.dst.buffer.space == "vmem" for copy in copies), algorithm
        # What a result begins with is there before others know that they may write over it.
        assert (len(copies), len(waited)) == ((2, 1) if "ragged" in case.op else (1, 0)), algorithm
        assert report.ok and report.vmem_bytes, report


@pytest.mark.parametrize("everyone", [False, True])
def test_zeros_of_a_result_in_vmem_are_there_before_others_write_over_them(everyone: bool) -> None:
    machine, group = Machine.named("v5p:4x1x1"), Group(("x",), (4,))
    pairs: Any = {"perm": ((0, 1), (1, 2), (3, 0)), "everyone": everyone}
    function = jax.shard_map(
        lambda x: ppermute.direct(x, group, **pairs, vmem=True, interpret=False),
        mesh=machine.mesh({"x": 4}),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((16, 128), np.float32)
    assert replay(function, x, machine=machine, races=True).races == []


def test_a_barrier_that_nobody_knows_is_refused() -> None:
    with pytest.raises(AssertionError, match="no barrier 'neighbors'"):
        sync.enter("neighbors", (), ())
