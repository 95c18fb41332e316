"""JAX's strict modes: every function lowers where no dtype and no rank may be promoted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harness
import pallas_collectives as pc

ROUTED = np.arange(8, dtype=np.int32).reshape(4, 2)


def _layer(x: Any, exchange: str) -> Any:
    def answers(x: Any, weights: Any) -> Any:
        rows, plan = pc.moe.dispatch(
            x, jnp.asarray(ROUTED), "x", num_experts=8, exchange=exchange, backend="pallas"
        )
        return pc.moe.combine(2 * rows, weights, plan, "x", backend="pallas").sum()

    return jax.grad(answers, (0, 1))(x[:4], jnp.full((4, 2), 0.5, jnp.bfloat16))[0]


def _normed(x: Any, **how: Any) -> Any:
    def total(x: Any, weight: Any) -> Any:
        return sum(y.sum() for y in pc.psum_residual_rmsnorm(x, x, weight, "x", **how))

    return jax.grad(total, (0, 1))(x, x[0])[0]


def _ragged(x: Any) -> Any:
    one, at = jnp.ones(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    to = jnp.full(4, lax.axis_index("x"), jnp.int32)
    return pc.ragged_all_to_all(x, x, at, one, to, one, axis_name="x")


IN_STRICT_MODES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: pc.psum(x, "x"),
    "psum of bool": lambda x: pc.psum(x > 0, "x").astype(x.dtype),
    "psum in order": lambda x: pc.psum(x, "x", order="rank"),
    "psum by exchange": lambda x: pc.psum(x, "x", order="rank", algorithm="exchange"),
    "psum by lax": lambda x: pc.psum(x, "x", order="rank", backend="xla"),
    "psum over a wire": lambda x: pc.psum(x, "x", wire="int8"),
    "psum with a residue": lambda x: pc.psum(x, "x", wire="int8", return_residue=True),
    "psum that draws": lambda x: pc.psum(
        x, "x", wire=pc.Wire("int8", rounding="stochastic", key=jax.random.key(0))
    ),
    "pmean": lambda x: pc.pmean(x, "x"),
    "pmean over a wire": lambda x: pc.pmean(x, "x", wire="int8"),
    "pmax": lambda x: pc.pmax(x, "x"),
    "pmin": lambda x: pc.pmin(x, "x"),
    "psum_scatter": lambda x: pc.psum_scatter(x, "x", tiled=True, order="rank"),
    "all_gather": lambda x: jax.grad(lambda x: pc.all_gather(x, "x", order="rank").sum())(x),
    "all_to_all": lambda x: pc.all_to_all(x, "x", 0, 1, tiled=True),
    "ragged_all_to_all": lambda x: jax.grad(lambda x: _ragged(x).sum())(x),
    "ppermute": lambda x: pc.ppermute(x, "x", [(0, 1), (1, 0)]),
    "pshuffle": lambda x: pc.pshuffle(x, "x", [3, 2, 1, 0]),
    "pswapaxes": lambda x: pc.pswapaxes(x.reshape(4, 4, 128), "x", 0),
    "pbroadcast": lambda x: jax.grad(lambda x: pc.pbroadcast(x, "x", 1).sum())(x),
    "all_gather_matmul": lambda x: pc.all_gather_matmul(x, x.T, "x"),
    "matmul_reduce_scatter": lambda x: pc.matmul_reduce_scatter(x, x.T, "x", order="rank"),
    "psum_residual_rmsnorm": _normed,
    "psum_residual_rmsnorm, fused": lambda x: _normed(x, algorithm="fused"),
    "psum_residual_rmsnorm by lax": lambda x: _normed(x, backend="xla"),
    "moe, ragged": lambda x: _layer(x, "ragged"),
    "moe, slots": lambda x: _layer(x, "slots"),
    "moe, dense": lambda x: _layer(x, "dense"),
}


@pytest.mark.parametrize("name", IN_STRICT_MODES)
def test_nothing_is_promoted(name: str) -> None:
    """Neither a dtype nor a rank: programs lower where JAX forbids both."""
    program = harness.per_device(IN_STRICT_MODES[name], harness.mesh(4), check_vma=False)
    x = jnp.ones((4, 16, 128), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        program.lower(x)  # type: ignore[attr-defined]
