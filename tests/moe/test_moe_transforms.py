"""Dispatch and combine under JAX's transformations, and what they cost in collectives."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import routings
from jaxprs import primitives_in
from pallas_collectives import catalogue, moe
from routings import HOW

E, N, T, D, K = routings.EXPERTS, 4, 4, 8, 2
every = pytest.mark.parametrize("how", HOW)


def values(batch: int = 0, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    lead = (N, batch) if batch else (N,)
    x, weights = (rng.standard_normal((*lead, T, size)).astype(np.float32) for size in (D, K))
    routing = rng.integers(-1, E, (*lead, T, K)).astype(np.int32)
    return x, routing, np.abs(weights), rng.standard_normal((E, D, D)).astype(np.float32)


def layer(how: str, x: Any, experts: Any, weights: Any, w: Any) -> Any:
    """Tokens to experts, through them, and home."""
    back = {name: value for name, value in HOW[how].items() if name != "exchange"}
    rows, plan = moe.dispatch(x, experts, "x", num_experts=E, **HOW[how])
    number = jnp.searchsorted(jnp.cumsum(plan.group_sizes), jnp.arange(len(rows)), side="right")
    of_row = w[jnp.minimum(number, len(w) - 1)]  # ragged_dot takes no vmap over such operands
    y = jnp.tanh(jnp.einsum("rd,rdh->rh", rows, of_row, precision="highest"))
    return moe.combine(y, weights, plan, "x", **back)


def own(w: Any) -> Any:
    """This device's experts, of all."""
    each = E // N
    return jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index("x") * each, each)


def dense(x: Any, routing: Any, weights: Any, w: Any) -> np.ndarray:
    return np.asarray(routings.answers(x, routing, weights, w))


def agree(got: Any, want: Any) -> None:
    want = np.asarray(want)
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6 * scale)


def run(program: Callable[..., Any], *args: Any) -> Any:
    return harness.per_device(program, harness.mesh(N))(*args)


def everywhere(w: np.ndarray) -> np.ndarray:
    return np.broadcast_to(w, (N, *w.shape))


@pytest.mark.parametrize("mapped", ["rows", "routing"])
@every
def test_vmap(how: str, mapped: str) -> None:
    x, routing, weights, w = values(batch=2)
    if mapped == "rows":
        routing = routing[:, :1].repeat(2, axis=1)

    def program(x: Any, e: Any, c: Any, w: Any) -> Any:
        call = functools.partial(layer, how, w=own(w))
        if mapped == "rows":
            return jax.vmap(lambda x, c: call(x, e[0], c))(x, c)
        return jax.vmap(call)(x, e, c)

    got = run(program, x, routing, weights, everywhere(w))
    for b in range(2):
        agree(got[:, b], dense(x[:, b], routing[:, b], weights[:, b], w))


@pytest.mark.full
@every
def test_checkpoint_in_a_scan_keeps_nothing_and_differentiates(how: str) -> None:
    x, routing, weights, w = values()

    def loss(x: Any, c: Any, e: Any, w: Any) -> Any:
        @jax.checkpoint
        def block(x: Any, _: None) -> tuple[Any, None]:
            return x + layer(how, x, e, c, w), None

        return jnp.sum(jax.lax.scan(block, x, None, length=2)[0] ** 2)

    def program(x: Any, e: Any, c: Any, w: Any) -> Any:
        return jax.grad(loss, (0, 1))(x, c, e, own(w))

    def whole(x: Any, c: Any) -> Any:
        for _ in range(2):
            x = x + routings.answers(x, routing, c, w)
        return jnp.sum(x**2)

    got = run(program, x, routing, weights, everywhere(w))
    for a, b in zip(got, jax.grad(whole, (0, 1))(x, weights), strict=True):
        agree(a, b)


@pytest.mark.full
@every
def test_second_order_and_forward(how: str) -> None:
    x, routing, weights, w = values()
    direction = values(seed=1)[0]

    def program(x: Any, e: Any, c: Any, w: Any, d: Any) -> Any:
        def slope(x: Any, c: Any) -> Any:
            return jax.grad(lambda x: jnp.sum(layer(how, x, e, c, own(w)) ** 2))(x)

        again = jax.grad(lambda x, c: jnp.sum(slope(x, c) * d), (0, 1))(x, c)
        return again, jax.jvp(lambda x: slope(x, c), (x,), (d,))[1]

    def slope(x: Any, c: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(routings.answers(x, routing, c, w) ** 2))(x)

    again, forward = run(program, x, routing, weights, everywhere(w), direction)
    want = jax.grad(lambda x, c: jnp.sum(slope(x, c) * direction), (0, 1))(x, weights)
    for a, b in zip(again, want, strict=True):
        agree(a, b)
    agree(forward, jax.jvp(lambda x: slope(x, weights), (x,), (direction,))[1])


def test_the_plan_goes_through_functions_of_its_own() -> None:
    """Made in one program, used in another, as a checkpoint or a pipeline would have it."""
    x, routing, weights, _ = values()
    mesh, how = harness.mesh(N), HOW["dense"]
    there = harness.per_device(lambda x, e: moe.dispatch(x, e, "x", num_experts=E, **how), mesh)
    rows, plan = jax.tree.map(np.asarray, there(x, routing))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(plan))

    def shard(y: Any, c: Any, plan: Any) -> Any:
        local = jax.tree.map(lambda a: a[0], plan)
        return moe.combine(y[0], c[0], local, "x", backend="xla")[None]

    spec = jax.sharding.PartitionSpec("x")
    home = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))
    valid = (routing >= 0).astype(np.float32)
    agree(home(2 * rows, weights, plan), 2 * x * (weights * valid).sum(-1, keepdims=True))


def wires(program: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    traced = jax.make_jaxpr(harness.per_device(program, harness.mesh(N), jit=False))(*args)
    own = {"moe_route", "moe_everyone", "moe_arrive", "moe_slots"}
    sends = {f"pallas_{name}" for name in catalogue.primitives()} | own
    return collections.Counter({k: v for k, v in primitives_in(traced).items() if k in sends})


@every
def test_going_back_exchanges_no_counts(how: str) -> None:
    """There: counts and words, or everyone's choices, then rows. Back: weights, then answers. All
    that backwards again: what has a gradient, which is rows, weights and answers.
    """
    x, routing, weights, w = values()
    given = x, routing, weights, everywhere(w)
    there, back = {"pallas_all_gather": 1, "moe_route": 4}, {"moe_route": 3}
    if how == "dense":
        there = {"pallas_all_gather": 2, "moe_everyone": 2}
        back = {"pallas_reduce_scatter": 1, "moe_everyone": 2}
    if how == "kernels":  # choices go with the tokens
        there = {"moe_arrive": 1, "pallas_all_gather": 1, "moe_slots": 1}
        back = {"pallas_reduce_scatter": 1, "moe_slots": 2}

    def forward(x: Any, e: Any, c: Any, w: Any) -> Any:
        return layer(how, x, e, c, own(w))

    def backward(x: Any, e: Any, c: Any, w: Any) -> Any:
        return jax.grad(lambda x, c, w: jnp.sum(layer(how, x, e, c, w)), (0, 1, 2))(x, c, own(w))

    assert wires(forward, *given) == collections.Counter(there)
    assert wires(backward, *given) == collections.Counter(there) + collections.Counter(back)


def test_no_expert_is_asked_twice_and_no_device_sent_to_twice() -> None:
    x = values()[0]
    routing = np.array([[0, 1], [1, 1], [5, 4], [15, 0]], np.int32)  # 4 experts a device
    routing = np.broadcast_to(routing, (N, T, K))

    def program(x: Any, e: Any) -> Any:
        _, plan = moe.dispatch(x, e, "x", num_experts=E, **HOW["ragged"])
        return plan.tables.visits.home.sizes, plan.group_sizes

    sent, group_sizes = run(program, x, routing)
    assert [*sent[0]] == [3, 1, 0, 1]  # tokens 0, 1 and 3 to device 0
    assert [*group_sizes[0]] == [2 * N, 2 * N, 0, 0]
    assert [*group_sizes[1]] == [N, N, 0, 0]
