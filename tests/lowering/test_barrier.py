"""A barrier is value by value: types, derivatives, vmap, and what nobody reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import harness
from pallas_collectives.lowering.barrier import barrier

NAME = "optimization_barrier"


def barriers(fn: Any, *args: Any) -> list[Any]:
    return [e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.primitive.name == NAME]


def test_values_pass_as_they_are() -> None:
    x, n = np.float32(2.0), np.int32(3)
    for run in (barrier, jax.jit(barrier)):
        assert [*run([x, n])] == [2.0, 3]


def test_types_stay_as_they_are() -> None:
    """Over a mesh axis only one of them varies, and a loop can carry both on."""

    def run(x: jax.Array, everywhere: jax.Array) -> Any:
        return jax.lax.scan(
            lambda both, _: (tuple(barrier(both)), None), (x, everywhere), length=2
        )[0]

    specs = P("x"), P()
    mapped = jax.shard_map(run, mesh=harness.mesh(2), in_specs=specs, out_specs=specs)
    x, one = jax.jit(mapped)(jnp.arange(2.0), jnp.float32(1))
    assert x.tolist() == [0.0, 1.0] and one == 1


def test_derivatives_pass_a_barrier_of_their_own() -> None:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y, _ = barrier([x, y, jnp.int32(1)])
        return x * x + 3 * y

    x, y = jnp.float32(2), jnp.float32(5)
    assert jax.jvp(fn, (x, y), (x, y)) == (19, 23)
    assert jax.grad(fn, (0, 1))(x, y) == (4, 3)
    forward, backward = barriers(jax.grad(fn, (0, 1)), x, y)
    assert len(forward.invars) == 3 and len(backward.invars) == 2
    (alone,) = barriers(lambda x: jax.vjp(lambda x: barrier([x, y])[0], x)[1](x), x)[1:]
    assert len(alone.invars) == 1, "nothing waits for a derivative that is 0"


def test_each_value_has_a_mapped_dimension_of_its_own() -> None:
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(2.0)
    a, b, c = jax.vmap(lambda x, y: tuple(barrier([x, y, jnp.float32(7)])), (1, None), (1, 0, 0))(
        x, y
    )
    assert (a == x).all() and (b == y).all() and (c == 7).all()


def test_what_nobody_reads_is_not_computed_again() -> None:
    """In what a checkpoint computes on the way back."""

    def layer(x: jax.Array) -> jax.Array:
        kept, other = barrier([jnp.sin(x), jnp.cos(x)])
        return jnp.sin(kept) + other

    closed = jax.make_jaxpr(jax.grad(jax.checkpoint(layer)))(jnp.float32(1))
    (again,) = [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.params.get("differentiated")]
    computed, derived = [e for e in again.eqns if e.primitive.name == NAME]
    assert len(computed.invars) == 1, "the cosine is a summand, and its derivative needs no sum"
    assert len(derived.invars) == 2
