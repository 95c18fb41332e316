"""Models that use `jax.lax`'s collectives train the same with ours in their place."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import models
import pallas_collectives as pc
from jaxprs import primitives_in
from pallas_collectives import catalogue

STEPS = 2


def train(step: Callable[..., Any], weights: models.Params) -> list[Any]:
    """Losses and gradients of some steps."""
    tokens, seen = models.batch(), []
    for _ in range(STEPS):
        loss, gradients, weights = step(weights, tokens)
        seen.append((float(loss), jax.tree.map(np.asarray, gradients)))
    return seen


def train_with_kernels(model: models.Model, weights: models.Params, kernels: set[str]) -> list[Any]:
    """`train` under `override_lax`, where kernels, these ones, must serve every collective."""
    pc.reset_counts()
    step, weights = model.step(), model.place(weights)
    with pc.override_lax():
        program = primitives_in(jax.make_jaxpr(step)(weights, models.batch()))
        assert not catalogue.primitives().keys() & set(program), "collectives of lax's are left"
        seen = train(step, weights)
    assert not pc.fallback_counts()
    assert {(op, backend) for op, backend, _ in pc.counts()} == {(op, "pallas") for op in kernels}
    return seen


def assert_trained_alike(ours: list[Any], reference: list[Any]) -> None:
    losses = [loss for loss, _ in ours]
    assert losses[-1] < losses[0] - 0.1, "it learns"
    np.testing.assert_allclose(losses, [loss for loss, _ in reference], rtol=1e-5)
    for (_, got), (_, want) in zip(ours, reference, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6), got, want)


@pytest.mark.parametrize(
    "build, arrange, layers",
    [(models.fsdp, models.flattened, 2), (models.tensor_parallel, models.by_thirds, 1)],
    ids=["fsdp", "tensor_parallel"],
)
def test_model_trains_as_with_lax(build: Any, arrange: Any, layers: int) -> None:
    devices = np.array(jax.devices()[: 4 if build is models.fsdp else 8])
    model, weights = build(devices), arrange(models.weights(layers=layers))
    ours = train_with_kernels(model, weights, {"all_gather", "reduce_scatter", "all_reduce"})
    assert_trained_alike(ours, train(model.step(), model.place(weights)))


@pytest.mark.full
def test_mixture_of_experts_trains_as_without_devices() -> None:
    # One layer has all collectives of a second, whose simulation takes as long again.
    model, weights = models.experts(np.array(jax.devices())), models.weights(experts=8, layers=1)
    # The all_to_all is lax's: it is how the transpose of a ragged one learns where rows came from.
    kernels = {"all_gather", "ragged_all_to_all", "all_to_all", "all_reduce"}
    ours = train_with_kernels(model, weights, kernels)
    assert_trained_alike(ours, train(jax.jit(models.dense_experts_step), weights))
