"""A small transformer whose gradients are summed as int8 ends where the exact one does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import models
import pallas_collectives as pc

STEPS, RATE = 200, 0.1


def loss(w: models.Params, tokens: jax.Array) -> jax.Array:
    """The mean loss of a device's part of the batch."""
    x = w["embed"][tokens[:, :-1]]
    x, _ = lax.scan(lambda x, layer: (models.dense_layer(x, layer), None), x, w["layers"])
    return models.losses(x, w["embed"], tokens[:, 1:]).mean()


def trained(wire: Any, n: int = 4) -> np.ndarray:
    """The losses of all steps."""

    def train(w: models.Params, tokens: jax.Array) -> jax.Array:
        def step(w: models.Params, _: None) -> tuple[models.Params, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(w, tokens)
            mean = pc.pmean(gradients, "x", wire=wire, backend="xla")
            w = jax.tree.map(lambda w, g: w - RATE * g, w, mean)
            return w, lax.pmean(value, "x")

        return lax.scan(step, w, length=STEPS)[1]

    on = harness.mesh(n)
    mapped = jax.shard_map(train, mesh=on, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    return np.asarray(jax.jit(mapped)(jax.tree.map(jnp.asarray, models.weights()), models.batch()))


@pytest.mark.full
@pytest.mark.parametrize("wire", ["int8", pc.Wire("int8", scales="power of two")], ids=str)
def test_int8_gradient_sums_end_within_a_percent_of_the_exact_loss(wire: Any) -> None:
    exact, narrow = trained(None), trained(wire)
    assert exact[-1] < 0.6 * exact[0], "it learns"
    assert not np.array_equal(exact, narrow)
    assert abs(narrow[-1] / exact[-1] - 1) < 0.01
