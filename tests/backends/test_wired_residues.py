"""Residues, stochastic draws and trees of collectives over narrower wires."""

from typing import Any

import jax
import numpy as np
import pytest

import pallas_collectives as pc
from pallas_collectives.errors import WireError
from pallas_collectives.wires import Wire
from wired_calls import BY_XLA, data, run


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_residues_are_what_terms_have_lost(rounding: str) -> None:
    a, b = data(2), data(2, "heavy tails")[:, :1, :200]
    key = jax.random.key(0) if rounding == "stochastic" else None
    wire = Wire("int8", rounding=rounding, key=key)

    def program(a: jax.Array, b: jax.Array) -> Any:
        how: Any = {"wire": wire, "return_residue": True, **BY_XLA}
        total, lost = pc.psum([a, b], "x", **how)
        blocks, also_lost = pc.psum_scatter(a, "x", tiled=True, **how)
        return total, lost, blocks, also_lost

    total, lost, blocks, also_lost = run(program, a, b, n=2)
    for x, sums_of_x, lost_of_x in zip((a, b), total, lost, strict=True):
        arrived = (x - lost_of_x).sum(axis=0)
        assert (lost_of_x != 0).any()
        assert np.abs(sums_of_x[0] - arrived).max() <= np.abs(arrived).max() / 127
    np.testing.assert_allclose(
        blocks.reshape(a[0].shape), (a - also_lost).sum(axis=0), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(WireError, match="a residue needs a wire; write wire='int8'"):
        run(lambda x: pc.psum(x, "x", return_residue=True, **BY_XLA), data(2), n=2)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nothing_is_drawn_or_lost_where_nothing_is_sent(rounding: str) -> None:
    key = jax.random.key(0) if rounding == "stochastic" else None
    how: Any = {"wire": Wire("int8", rounding=rounding, key=key), **BY_XLA}

    def program(x: jax.Array) -> Any:
        alone: Any = {"axis_index_groups": [[0], [1]], "return_residue": True}
        total, lost = pc.psum_scatter(x, "x", tiled=True, **alone, **how)
        sums = jax.vmap(lambda x: pc.psum(x, "v", return_residue=True, **how), axis_name="v")(x)
        mean = jax.vmap(lambda x: pc.pmean(x, "v", **how), axis_name="v")(x)
        return total - x, lost, sums[1], sums[0] - x.sum(axis=0), mean - x.mean(axis=0)

    for got in run(program, data(2), n=2, check_vma=False):
        np.testing.assert_allclose(got, 0, atol=1e-5)

    def on_one(x: jax.Array) -> Any:
        sums = pc.psum([x, x[:0]], "x", return_residue=True, **how)
        moved = pc.ppermute(x, "x", [(0, 0)], **how), pc.all_gather(x, "x", tiled=True, **how)
        return sums[1][0], sums[0][0] - x, *(y - x for y in moved)

    for got in run(on_one, data(1), n=1, check_vma=False):
        np.testing.assert_array_equal(got, 0)
    constant = data(1)[0]

    def on_none(x: jax.Array) -> Any:  # constants are multiplied
        sums, lost = pc.psum([constant, x], "x", return_residue=True, **how)
        return sums[0] - 2 * constant + 0 * x, lost[0] + 0 * x

    for got in run(on_none, data(2)[:, :1, :1], n=2, check_vma=False):
        np.testing.assert_array_equal(got, 0)
    mixed = lambda x: pc.psum(x, ("v", "x"), return_residue=True, **how)  # noqa: E731
    with pytest.raises(WireError, match="no term is sent by itself"):
        run(jax.vmap(mixed, axis_name="v", out_axes=(None, 0)), data(2), n=2, check_vma=False)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_residues_under_vmap_are_those_of_each_element(rounding: str) -> None:
    x = data(2)[..., :200] * np.float32([1, 1e4, 1, 1e-3])[:, None]
    key = jax.random.key(0) if rounding == "stochastic" else None
    how: Any = {"wire": Wire("int8", rounding=rounding, key=key), "return_residue": True, **BY_XLA}
    mapped = jax.vmap(lambda x: pc.psum_scatter(x, "x", tiled=True, **how))
    sums, lost = run(mapped, x, n=2)
    arrived = (x - lost).sum(axis=0).reshape(4, 2, 100)
    for device in range(2):
        np.testing.assert_allclose(sums[device], arrived[:, device], rtol=1e-5, atol=1e-6)


def test_the_mean_of_stochastic_sums_is_the_sum() -> None:
    x, draws = data(2, rows=1), 600

    def program(x: jax.Array) -> Any:
        def one(key: jax.Array) -> jax.Array:
            wire = Wire("int8", rounding="stochastic", key=key)
            return pc.psum_scatter(x, "x", tiled=True, wire=wire, **BY_XLA)

        drawn = jax.lax.map(one, jax.random.split(jax.random.key(5), draws))
        return drawn, pc.psum_scatter(x, "x", tiled=True, wire="int8", **BY_XLA)

    drawn, nearest = run(program, x, n=2, check_vma=False)
    exact = x.astype(np.float64).sum(axis=0).reshape(nearest.shape)
    step = np.abs(x).max() / 127
    five = 5 * step * np.sqrt(2) / 2 / np.sqrt(draws)
    assert (np.abs(drawn.mean(axis=1, dtype=np.float64) - exact) <= five).all()
    assert (np.abs(nearest - exact) > five).any()
    assert not np.array_equal(drawn[0, 0], drawn[0, 1])


def test_small_leaves_of_a_tree_go_together_in_groups_of_their_own() -> None:
    leaves = [data(2)[:, :1, :300], 1e4 * data(2)[:, 0, :77], data(2, rows=8)]

    def program(*leaves: jax.Array) -> Any:
        how: Any = {"wire": "int8", "backend": "pallas"}
        return pc.psum(list(leaves), "x", **how), [pc.psum(x, "x", **how) for x in leaves[::2]]

    pc.reset_counts()
    together, apart = run(program, *leaves, n=2)
    np.testing.assert_array_equal(together[0], apart[0])  # beside one of far larger numbers
    np.testing.assert_array_equal(together[2], apart[1])
    assert np.abs(together[1] - leaves[1].sum(axis=0)).max() < 1e4 * 0.06


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_small_leaf_goes_in_its_bundle(backend: str) -> None:
    """By itself it would take more bytes; with the others it takes fewer."""
    leaves = [data(2), data(2)[:, 0, :3]]
    how: Any = {"wire": "int8", "backend": backend}
    got = run(lambda *leaves: pc.psum(list(leaves), "x", **how), *leaves, n=2)
    for total, x in zip(got, leaves, strict=True):
        assert np.abs(total - x.sum(axis=0)).max() < 0.1
    with pytest.raises(WireError, match="in place of 12"):
        run(lambda x: pc.psum(x, "x", **how), leaves[1], n=2)


@pytest.mark.usefixtures("fresh_counts")
def test_every_padded_block_is_counted() -> None:
    """256 numbers on 8 devices are 8 groups, more than the numbers themselves."""
    x = data(8)[:, 0, :256]
    with pytest.raises(WireError, match="takes 2048 bytes in place of 1024"):
        run(lambda x: pc.psum(x, "x", wire="int8", **BY_XLA), x, n=8)
    run(lambda x: pc.psum(x[:1], "x", wire="bfloat16", **BY_XLA), x, n=8)  # needs no padding
