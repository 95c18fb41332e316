"""Rows by expert: the order that a stable sort gives, counted or sorted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_collectives.moe import plans


@pytest.mark.parametrize("size", [1, 5, 31, 32, 1000, 16384])
@pytest.mark.parametrize("experts", [1, 3, 128])
@pytest.mark.parametrize("counted", [True, False])
def test_words_lie_by_expert_and_as_they_were(
    size: int, experts: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        monkeypatch.setattr(plans, "_MOST_COMPARISONS", -1)
    expert = np.random.default_rng(size).integers(0, experts + 1, size).astype(np.int32)
    row, sizes = jax.jit(lambda e: plans._by_expert(e, experts))(jnp.asarray(expert))
    np.testing.assert_array_equal(np.argsort(np.asarray(row)), np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(np.sort(row), np.arange(size))
    np.testing.assert_array_equal(sizes, np.bincount(expert, minlength=experts + 1)[:experts])


def test_many_words_of_many_experts_are_sorted() -> None:
    """Comparing them all would take longer."""
    (symbol,) = export.symbolic_shape("words")
    for size, experts, sorts in ((16384, 128, False), (1 << 20, 64, True), (symbol, 4, True)):
        expert = jax.ShapeDtypeStruct((size,), jnp.int32)
        text = str(jax.make_jaxpr(lambda e, n=experts: plans._by_expert(e, n))(expert))
        assert (" sort[" in text) == sorts
