"""VMEM, decided at launch; and what would be launched, asked without a kernel."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import jaxprs
import pallas_collectives
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import ppermute
from pallas_collectives.kernels.machinery import launch, sync
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


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("algorithm", ["bidirectional", "direct:vmem", "direct:sc", "fused"])
def test_effects_are_those_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, cores: int
) -> None:
    """JAX orders and keeps what has effects: a kernel that is left out has all of its own."""
    left_out, asked = launch.effects, []

    def both(run: Callable[..., Any], *shapes: Any) -> frozenset[Any]:
        built = frozenset(jax.make_jaxpr(lambda *xs: run(*xs))(*shapes).effects)
        asked.append((left_out(run, *shapes), built))
        return built

    def program(x: jax.Array) -> jax.Array:
        if algorithm == "fused":
            return pallas_collectives.all_gather_matmul(x, x.T, "x", algorithm=algorithm)
        return pallas_collectives.all_gather(x, "x", algorithm=algorithm)

    monkeypatch.setattr(launch, "effects", both)
    x = np.zeros((4, 128, 256 + 128 * cores), np.float32)  # a shape that no other test has asked
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(num_cores_or_threads=cores)):
        jax.eval_shape(harness.per_device(program, harness.mesh(4), jit=False), x)
    assert asked
    for found, built in asked:
        assert found == built != frozenset()


def test_a_kernel_that_was_left_out_is_built_when_it_is_to_run() -> None:
    """JAX keeps what it has traced of a jitted function; without the kernel it is another."""
    group = Group(("x",), (4,))
    on, spec = harness.mesh(4), PartitionSpec("x")
    pairs: Any = {"perm": ((0, 1), (1, 2), (3, 0)), "everyone": False}
    simulated = pltpu.InterpretParams()
    shift = jax.jit(lambda x: ppermute.direct(x, group, **pairs, vmem=False, interpret=simulated))
    whole = jax.shard_map(shift, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 128), np.float32)
    effects = launch.effects(whole, x)
    program = jax.make_jaxpr(lambda x: whole(x))(x)
    assert "pallas_call" in jaxprs.primitives_in(program.jaxpr)
    assert effects == program.effects
    assert launch.effects(lambda x: whole(x), x) == effects


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e"])
def test_a_kernel_of_little_vmem_leaves_the_rest_of_it_to_the_program(
    generation: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one asks for a limit, XLA reserves its default for each other operation."""
    pytest.importorskip("libtpu")
    if asks:
        monkeypatch.setattr(launch, "_BY_DEFAULT", 0)

    def program(x: jax.Array) -> jax.Array:
        total = pallas_collectives.psum(x[0], "x", algorithm="gather")
        w = jnp.ones((1024, 1024), x.dtype)
        return jnp.tanh(jnp.tanh(x @ w) * total) @ w

    text = harness.compile_for_tpu(program, harness.GENERATIONS[generation], (512, 1024)).text
    assert "all_reduce_gather" in text
    reserved = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text)
    assert (max(map(int, reserved), default=0) >= 16 << 20) == asks
