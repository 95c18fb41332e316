"""Tokens and answers that travel as narrower numbers: values, and derivatives straight through."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import routings
from pallas_collectives import moe, wires
from pallas_collectives.errors import WireError
from routings import HOW

N, T, D, K, E = 4, 6, 256, 3, routings.EXPERTS
every = pytest.mark.parametrize("how", HOW)


def given(seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, routing, weights."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, T, D)).astype(np.float32)
    return x, routings.random(N, T, K), rng.random((N, T, K)).astype(np.float32)


@pytest.mark.full
@every
def test_values_are_those_that_the_wire_can_say(how: str) -> None:
    x, routing, weights = given()

    def program(x: Any, experts: Any, weights: Any) -> Any:
        visit = functools.partial(moe.dispatch, axis_name="x", num_experts=E, **HOW[how])
        rows, plan = visit(x, experts, wire="float8_e4m3fn")
        back = functools.partial(moe.combine, axis_name="x", backend=HOW[how]["backend"])
        there = jnp.arange(len(rows)) < plan.group_sizes.sum()
        y = jnp.where(there[:, None], rows, 0)
        return y, back(y, weights, plan, wire="bfloat16"), back(y, weights, plan)

    rows, narrow, plain = harness.per_device(program, harness.mesh(N))(x, routing, weights)
    arrived = np.asarray(wires.as_sent(jnp.asarray(x), wires.Wire("float8_e4m3fn")))
    want = routings.expected(arrived, routing, rows.shape[1])
    np.testing.assert_array_equal(rows, want.rows)
    assert np.abs(rows - routings.expected(x, routing, rows.shape[1]).rows).max() > 0.01
    exact = np.sum(np.where(want.kept, weights, 0), axis=2)[..., None] * arrived
    np.testing.assert_allclose(plain, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(narrow, exact, rtol=2**-7, atol=2**-7)
    assert np.abs(narrow - plain).max() > 1e-4


@pytest.mark.full
@every
def test_derivatives_pass_straight_through_by_a_wire_of_their_own(how: str) -> None:
    x, routing, weights = given()
    seeds = given(1)[0]

    def slope(x: Any, experts: Any, weights: Any, seeds: Any, **over: Any) -> Any:
        back = {"backend": HOW[how]["backend"]}

        def loss(x: Any, weights: Any) -> Any:
            rows, plan = moe.dispatch(x, experts, "x", num_experts=E, **HOW[how], **over)
            return jnp.sum(moe.combine(rows, weights, plan, "x", **back) * seeds)

        return jax.grad(loss)(x, weights)

    def program(*args: Any) -> Any:
        narrow = slope(*args, wire="float8_e4m3fn")
        both = slope(*args, wire="float8_e4m3fn", wire_backward="bfloat16")
        return slope(*args), narrow, both

    mapped = harness.per_device(program, harness.mesh(N))
    plain, narrow, both = mapped(x, routing, weights, seeds)
    np.testing.assert_array_equal(narrow, plain)
    np.testing.assert_allclose(both, plain, rtol=2**-7, atol=2**-6)
    assert np.abs(both - plain).max() > 1e-4


@every
def test_vmap_mixes_no_elements_in_a_group(how: str) -> None:
    """Rows of half a group; forth, home and back, an element is as it is by itself."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 2, 2, T, 64)).astype(np.float32)
    x[:, 0] *= 1e4
    routing, weights = routings.random(N, T, K), np.full((N, T, K), 0.5, np.float32)
    wire = wires.Wire("int8", scales="power of two")  # so that sums of few are exact
    narrow: Any = {"wire": wire, "wire_backward": wire}

    def program(x: Any, experts: Any, weights: Any) -> Any:
        def there(x: Any) -> Any:
            rows, plan = moe.dispatch(x, experts, "x", num_experts=E, **HOW[how], **narrow)
            return jnp.where(jnp.arange(len(rows))[:, None] < plan.group_sizes.sum(), rows, 0), plan

        plan = there(x[0, 0])[1]  # of slots it is mapped where `dispatch` is

        def both(x: Any) -> Any:
            y, pull = jax.vjp(lambda x: there(x)[0], x)
            back = {"backend": HOW[how]["backend"], **narrow}
            home, pull_home = jax.vjp(lambda y: moe.combine(y, weights, plan, "x", **back), y)
            return y, home, pull(y)[0], pull_home(home)[0]

        apart = jax.lax.map(functools.partial(jax.lax.map, both), x)
        return jax.vmap(jax.vmap(both), in_axes=1, out_axes=1)(x), apart

    mapped, apart = harness.per_device(program, harness.mesh(N))(x, routing, weights)
    jax.tree.map(np.testing.assert_array_equal, mapped, apart)


def test_wires_that_lose_or_are_none_are_refused() -> None:
    def program(x: Any, **over: Any) -> Any:
        return moe.dispatch(x[0], np.zeros((6, 1), np.int32), "x", num_experts=6, **over)[0]

    harness.fails(WireError, "dtype='float3' of a wire", functools.partial(program, wire="float3"))
    short = functools.partial(program, wire="int8", backend="pallas", exchange="slots")
    harness.fails(WireError, "more bytes|in place of", short)
