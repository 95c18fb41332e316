"""Collectives in two halves on TPUs: who runs what is started."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc

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
