"""Collectives in two halves on TPUs: who runs what is started."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from benchmarks import replay_rows
from pallas_collectives import catalogue, explanation
from pallas_collectives.backends import canonical, counters, fastest
from pallas_collectives.replay import Machine
from pallas_collectives.topology import chips, placement
from pallas_collectives.tuning.choice import predict

MIB = 1 << 20
SERVED = {
    ("all_gather_start", "v4"): "the core stops for it, where it is started .v4's SparseCores",
    ("all_gather_start", "v5e"): "XLA runs all_gather beside compute",
    ("all_gather_start", "v5p"): "a SparseCore runs it, beside compute",
    ("all_gather_start", "v6e"): "a SparseCore runs it, beside compute",
    ("all_gather_start", "7x"): "XLA runs all_gather beside compute",
    ("all_to_all_start", "v6e"): "a SparseCore runs it, beside compute",
    ("all_to_all_start", "7x"): "a SparseCore runs it, beside compute",
    ("psum_start", "v6e"): "a SparseCore runs it, beside compute",
    ("psum_scatter_start", "v5p"): "a SparseCore runs it, beside compute",
    ("ppermute_start", "v4"): "XLA runs ppermute beside compute",
    ("psum_start", "7x"): "XLA runs all_reduce beside compute",
}


@pytest.mark.parametrize("op, chip", SERVED)
def test_explain_says_who_runs_what_is_started(op, chip):
    said = pc.explain(op, 16 * MIB, devices=8, chip=chip)
    assert re.match(SERVED[op, chip], said.why), said.why
    assert said.algorithm.endswith(":sc") == ("SparseCore runs" in said.why)
    short = pc.explain(op, 4096, devices=8, chip=chip)
    assert not short.algorithm.endswith(":sc")
    whole = pc.explain(op.removesuffix("_start"), 16 * MIB, devices=8, chip=chip)
    assert not whole.algorithm.endswith(":sc") and whole.algorithm != "lax's own"


GROUPS = {
    "v5p:4x4x4": [("x", "y", "z"), ("x", "y"), ("x",)],
    "v6e:16x16": [("x", "y"), ("y",)],
    "v4:4x4x4": [("x", "y")],
}


@pytest.mark.usefixtures("modelled_table_alone")
@pytest.mark.parametrize("pod, axes", [(pod, axes) for pod in GROUPS for axes in GROUPS[pod]])
@pytest.mark.parametrize("op", ["psum_start", "psum_scatter_start", "all_gather_start"])
def test_explain_gives_the_reason_by_which_it_was_decided(op, pod, axes):
    """By times of the table, read here anew: of what a SparseCore can run, and of the core's; a
    SparseCore takes longer to add.
    """
    machine = Machine.named(pod)
    mesh = machine.mesh(replay_rows.mesh_axes(machine))
    record = catalogue.functions()[op.removesuffix("_start")]
    able = {a.name for a in record.algorithms if a.by_subcores or not record.adds}
    for nbytes in (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        said = pc.explain(op, nbytes, mesh=mesh, axis_name=axes)
        with explanation._on(mesh, placement.of_mesh(mesh)):
            group = placement.arranged(canonical.group_of(axes))
            block = record.block_bytes(nbytes, group.size)
            chip = chips.current()
            of = record.name, block, group.size, chip
            names = fastest.reachable(record.name, group, chip)
            (there, name), (here, _) = (
                min(
                    ((p.us, name) for name, p in predict(*of, chosen, said.torus).items()),
                    default=(None, ""),
                )
                for chosen in ([name for name in names if name in able], names)
            )
            if there is not None and record.adds:
                there += fastest.added_by_subcores_us(record.name, name, block, group.size)
        if pod.startswith("v4"):
            wanted = "(v4's SparseCores: Pallas does not reach its SparseCores)"
        elif there is None:
            wanted = "(a SparseCore adds along rings and lines alone"
        elif min(there, here) < 30:
            wanted = "(it is too short to be worth a SparseCore's launch)"
        elif there > 4 * here:
            wanted = (
                f"(a SparseCore would take {there:.0f} us for it, and the core takes {here:.0f})"
            )
        else:
            wanted = "a SparseCore runs it, beside compute"
        assert wanted in said.why and said.algorithm.endswith(":sc") == ("runs it" in wanted)


@pytest.mark.usefixtures("modelled_table_alone")
@pytest.mark.parametrize(
    "pod, axes, sizes",
    [
        ("v5p:4x4x4", ("x", "y", "z"), [1 << 24]),
        ("v6e:16x16", ("x", "y"), [1 << 22]),
    ],
)
def test_a_sum_that_the_core_adds_sooner_is_not_called_short(pod, axes, sizes):
    machine = Machine.named(pod)
    mesh = machine.mesh(replay_rows.mesh_axes(machine))
    for nbytes in sizes:
        said = pc.explain("psum_scatter_start", nbytes, mesh=mesh, axis_name=axes).why
        assert re.search(r"a SparseCore would take \d+ us for it, and the core takes \d+", said)


def test_a_plan_keeps_why_the_core_runs_it():
    run = harness.per_device(lambda a: pc.psum(a, "x"), harness.mesh(2))
    with counters.recorded() as plans:
        jax.jit(run).lower(np.zeros((2, 8, 128), np.float32))
    assert plans[-1].engine_why == "no step is known around it"


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "7x"])
def test_compiled_it_is_beside_products_where_anything_can_run_it_there(generation):
    pytest.importorskip("libtpu")

    def program(x):
        started = pc.all_gather_start(x, "x", tiled=True)
        w = jnp.ones((1024, 1024), x.dtype)
        between = jnp.tanh(jnp.tanh(x[:1024] @ w) @ w)
        return started.done(after=between)[:1024] + between

    pc.reset_counts()
    topology = harness.GENERATIONS[generation]
    text = harness.compile_for_tpu(program, topology, (4096, 1024), sizes=(4, 2)).text
    ((_, backend, algorithm),) = pc.counts()
    on_sparsecore = "call-start" in text and 'async_execution_thread="sparsecore"' in text
    match generation:
        case "v4":
            assert backend == "pallas" and not algorithm.endswith(":sc")
        case "v5e":
            assert backend == "xla"
        case "7x":
            assert backend == "xla" and on_sparsecore
        case _:
            assert algorithm.endswith(":sc") and on_sparsecore


def test_jaxs_own_started_scatter_is_ours_within_override_lax():
    if not hasattr(jax.lax, "psum_scatter_start"):
        pytest.skip("JAX has it from 0.12 on")
    of_lax = jax.lax.psum_scatter_start
    x = harness.random((2, 16, 128), "float32")

    def loss(x):
        started = jax.lax.psum_scatter_start(x, "x", tiled=True)
        return jnp.sum(started.done() ** 2)

    pc.reset_counts()
    with pc.override_lax():
        got = np.asarray(harness.per_device(jax.grad(loss), harness.mesh(2))(x))
    assert {(op, backend) for op, backend, _ in pc.counts()} == {
        ("reduce_scatter", "pallas"),
        ("all_gather", "pallas"),
    }
    np.testing.assert_allclose(got[0], 2 * x.sum(0), rtol=1e-6)
    assert jax.lax.psum_scatter_start is of_lax
    with pc.override_lax(keep=["psum_scatter_start"]), pytest.raises(Exception):  # noqa: B017
        harness.per_device(jax.grad(loss), harness.mesh(2)).lower(x)
