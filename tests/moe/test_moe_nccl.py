"""Dispatch and combine by NCCL: on a wire of host memory, and on GPUs (-m gpu)."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import nccl_host
import pallas_collectives as pc
import routings
from pallas_collectives import moe
from pallas_collectives.moe import wire
from pallas_collectives.nccl import ffi, group

E, T, D, K = routings.EXPERTS, 5, 16, 3
N = min(4, jax.device_count())  # a host may have two GPUs


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)], autouse=True)
def where(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the collectives run: over the wire of host memory, or on GPUs with NCCL."""
    if request.param == "gpu":
        if jax.default_backend() != "gpu" or N < 2:
            pytest.skip("needs two GPUs")
    else:
        nccl_host.serve(monkeypatch)
        group._options["runtime"].library.bindings.ordered = False
    yield request.param


def layer(x: Any, experts: Any, weights: Any, w: Any, **how: Any) -> Any:
    """Tokens to experts, through them, and home."""
    rows, plan = moe.dispatch(x, experts, "x", num_experts=E, backend="nccl", **how)
    number = jnp.searchsorted(jnp.cumsum(plan.group_sizes), jnp.arange(len(rows)), side="right")
    of_row = w[jnp.minimum(number, len(w) - 1)]
    y = jnp.tanh(jnp.einsum("rd,rdh->rh", rows, of_row, precision="highest"))
    return moe.combine(y, weights, plan, "x", backend="nccl")


def values() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x, weights = (rng.standard_normal((N, T, size)).astype(np.float32) for size in (D, K))
    return x, np.abs(weights), rng.standard_normal((E, D, D)).astype(np.float32)


def gradients(x: Any, experts: Any, weights: Any, w: Any, **how: Any) -> Any:
    def loss(x: Any, weights: Any, w: Any) -> Any:
        home = layer(x, experts, weights, w, **how)
        return jnp.sum(home**2), home

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, w)


@pytest.mark.parametrize("exchange", ["auto", "auto, beside the plan", "ragged"])
def test_values_and_gradients_are_those_of_a_dense_layer(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, _, beside = exchange.partition(", ")
    if beside:  # as large tokens go
        monkeypatch.setattr(wire, "_BESIDE_BYTES", 0)
    x, weights, w = values()
    run = harness.per_device(functools.partial(gradients, exchange=exchange), harness.mesh(N))
    pc.reset_counts()
    for name, routing in routings.skewed(N, T, K).items():
        grads, home = run(x, routing, weights, w.reshape(N, -1, D, D))

        def loss(x: Any, weights: Any, w: Any, routing: Any = routing) -> Any:
            home = routings.answers(x, routing, weights, w)
            return jnp.sum(home**2), home

        want, value = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, w)
        got = home, *grads[:2], grads[2].reshape(w.shape)
        for a, b in zip(got, (value, *want), strict=True):
            scale = max(1.0, float(np.abs(b).max()))
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * scale, err_msg=name)
    served = {(op, backend) for op, backend, _ in pc.counts()}
    ragged = {("ragged_all_to_all", "nccl"), ("all_gather", "nccl")}
    dense = {("all_gather", "nccl"), ("all_to_all", "nccl"), ("reduce_scatter", "nccl")}
    assert served == (ragged if exchange == "ragged" else dense)
    by_copies = {op for op, _, algorithm in pc.counts() if algorithm == "copies"}
    assert by_copies == ({"all_gather", "all_to_all"} if beside else set())
    assert not pc.fallback_counts()


def test_tokens_that_nccl_cannot_move_go_by_lax(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has named a backend, so lax serves, where copy engines would else take them too."""
    if where == "gpu":
        pytest.skip("which backend is chosen is no matter of GPUs")
    monkeypatch.setattr(wire, "_BESIDE_BYTES", 0)
    x, routing = values()[0].round(), routings.random(N, T, K)

    def program(x: Any, experts: Any) -> Any:
        rows, _ = moe.dispatch(x.astype("int4"), experts, "x", num_experts=E)
        return rows.astype(jnp.float32)

    pc.reset_counts()
    rows = harness.per_device(program, harness.mesh(N))(x, routing)
    np.testing.assert_array_equal(rows, routings.expected(x, routing, rows.shape[1]).rows)
    assert ("all_gather", "xla", None) in pc.counts()
    assert any("whole bytes" in str(kept) for kept in pc.fallback_counts())


def test_the_host_has_no_part_in_it() -> None:
    """Every call is recorded as a program is lowered, and made without Python."""
    x, weights, w = values()
    run = harness.per_device(gradients, harness.mesh(N))
    given = x, routings.random(N, T, K), weights, w.reshape(N, -1, D, D)
    jax.block_until_ready(run(*given))
    python = ffi.counters.python
    jax.block_until_ready(run(*given))
    assert ffi.counters.python == python


@pytest.mark.gpu
def test_a_layer_is_captured_in_a_cuda_graph(where: str) -> None:
    if where != "gpu":
        pytest.skip("graphs are a matter of GPUs")
    x, weights, w = values()
    run = harness.per_device(gradients, harness.mesh(N))
    given = x, routings.random(N, T, K), weights, w.reshape(N, -1, D, D)
    counts = []
    for _ in range(10):
        before = ffi.counters.calls
        jax.block_until_ready(run(*given))
        counts.append(ffi.counters.calls - before)
    assert counts[-5:] == [0] * 5, counts
