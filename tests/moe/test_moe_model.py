"""A small expert transformer trains with dispatch and combine as it does with lax's collectives."""

from typing import Any

import jax
import numpy as np
import pytest

import models
import pallas_collectives as pc
from pallas_collectives import moe

EXPERTS, STEPS = 16, 3


def mixed(how: dict[str, Any]) -> models.Mix:
    """The layer's experts, by dispatch and combine."""

    def mix(tokens: Any, chosen: Any, shares: Any, up: Any, down: Any) -> jax.Array:
        rows, plan = moe.dispatch(tokens, chosen, "x", num_experts=EXPERTS, **how)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, up, plan.group_sizes))
        answers = jax.lax.ragged_dot(hidden, down, plan.group_sizes)
        return moe.combine(answers, shares, plan, "x", backend=how["backend"])

    return mix


def train(model: models.Model) -> tuple[list[float], Any]:
    """Losses, and the weights in the end."""
    w = model.place(models.weights(experts=EXPERTS, layers=2))
    step, losses = model.step(), []
    for _ in range(STEPS):
        loss, _, w = step(w, models.batch())
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, w)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_an_expert_transformer_trains_as_with_lax(backend: str) -> None:
    devices = np.array(jax.devices()[:4])
    want, weights = train(models.routed(devices, models.mix_by_lax))
    pc.reset_counts()
    got, trained = train(models.routed(devices, mixed({"backend": backend})))
    assert want[-1] < want[0] - 0.1, "it learns"
    np.testing.assert_allclose(got, want, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), trained, weights
    )
    served = {name for _, name, _ in pc.counts()}
    assert served == {backend} and not pc.fallback_counts()
