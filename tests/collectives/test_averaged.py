"""Sums over a wire whose rounding averages out over steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.errors import WireError
from pallas_collectives.wires import Wire
from wired_calls import BY_XLA, data, run

BY_PALLAS = {"backend": "pallas"}
EXACT = 1e-5


def drawing(key: Any, **options: Any) -> Wire:
    return Wire("int8", rounding="stochastic", key=key, **options)


@pytest.mark.parametrize(
    "n, wire, shape",
    [
        (3, Wire("int8"), (3, 300)),  # padded
        (4, Wire("float8_e4m3fn", group=256), (64, 256)),  # as it lies
        (5, Wire("int8", group="row"), (7, 200)),  # rows of padding
    ],
    ids=str,
)
def test_a_sum_and_what_all_have_lost_are_the_exact_sum(
    n: int, wire: Wire, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(n).normal(size=(n, *shape)).astype(np.float32)
    how: Any = {"wire": wire, "return_residue": True}

    def program(x: jax.Array) -> Any:
        by_kernels = pc.psum(x, "x", backend="pallas", **how)
        total, lost = pc.psum(x, "x", **BY_XLA, **how)
        return total, lost, pc.psum(x, "x", wire=wire, **BY_XLA), by_kernels

    total, lost, without, by_kernels = run(program, x, n=n)
    np.testing.assert_allclose(total[0] + lost.sum(axis=0), x.sum(axis=0), atol=EXACT * n)
    np.testing.assert_array_equal(total, without)
    for ours, theirs in zip(by_kernels, (total, lost), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=EXACT)


def test_the_mean_over_steps_becomes_the_exact_one() -> None:
    x, steps = data(4), 32
    wire = Wire("int8")

    def program(x: jax.Array) -> Any:
        def step(state: Any, _: None) -> tuple[Any, None]:
            mean, residue = state
            found, residue = pc.pmean(x + residue, "x", wire=wire, return_residue=True, **BY_XLA)
            return (mean + found / steps, residue), None

        start = (0 * x[:], 0 * x)
        varying = jax.tree.map(lambda y: y + 0 * x, start)
        return jax.lax.scan(jax.checkpoint(step), varying, None, length=steps)[0]

    mean, residue = run(program, x, n=4, check_vma=False)
    exact = x.mean(axis=0, dtype=np.float64)
    off = np.abs(mean[0] - exact).max()
    assert off <= np.abs(residue).sum(axis=0).max() / steps / 4 + EXACT
    once = run(lambda x: pc.pmean(x, "x", wire=wire, **BY_XLA), x, n=4)
    assert off < np.abs(once[0] - exact).max() / 8


def test_the_mean_of_drawn_sums_is_the_sum() -> None:
    n, draws = 3, 400
    x = data(n, rows=1)

    def program(x: jax.Array) -> Any:
        def one(key: jax.Array) -> jax.Array:
            return pc.psum(x, "x", wire=drawing(key), **BY_XLA)

        keys = jax.random.split(jax.random.key(7), draws)
        return jax.lax.map(one, keys), pc.psum(x, "x", wire="int8", **BY_XLA)

    drawn, nearest = run(program, x, n=n, check_vma=False)
    exact = x.sum(axis=0, dtype=np.float64)
    step = (np.abs(x).max() * n**0.5 + np.abs(exact).max()) / 127  # of terms, and of their sum
    five = 5 * step / 2 / draws**0.5
    assert (np.abs(drawn[0].mean(axis=0, dtype=np.float64) - exact) <= five).all()
    assert (np.abs(nearest[0] - exact) > five).any()
    np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize("vma", [True, False])
def test_leaves_of_a_tree_travel_together_and_constants_are_not_sent(vma: bool) -> None:
    n, constant = 3, np.full(5, 2, np.float32)
    x, small = data(n), data(n)[:, 0, :3]
    how: Any = {"wire": drawing(jax.random.key(1)), "return_residue": True, **BY_XLA}

    def program(x: jax.Array, small: jax.Array) -> Any:
        sums, lost = pc.psum({"a": x, "b": small, "c": constant, "d": x[:0]}, "x", **how)
        return jax.tree.map(lambda y: y + 0 * x[0, 0], (sums, lost))

    sums, lost = run(program, x, small, n=n, check_vma=vma)
    for name, exact in (("a", x), ("b", small)):
        arrived = sums[name][0] + lost[name].sum(axis=0)
        np.testing.assert_allclose(arrived, exact.sum(axis=0), atol=n * EXACT)
        assert lost[name].any()
    np.testing.assert_array_equal(sums["c"], np.full((n, 5), 2 * n))
    assert not lost["c"].any() and sums["d"].size == lost["d"].size == 0


def test_groups_have_sums_of_their_own() -> None:
    n, x = 6, data(6)
    how: Any = {"wire": "int8", "return_residue": True, **BY_XLA}
    groups = [[0, 3, 5], [4, 2, 1]]
    of_groups = lambda x: pc.psum(x, "x", axis_index_groups=groups, **how)  # noqa: E731
    sums, lost = run(of_groups, x, n=n, check_vma=False)
    for group in groups:
        exact = x[group].sum(axis=0)
        for device in group:
            np.testing.assert_allclose(sums[device] + lost[group].sum(axis=0), exact, atol=1e-4)


@pytest.mark.parametrize("backward", [None, "int8"])
def test_derivatives_pass_straight_through(backward: str | None) -> None:
    n, x = 3, data(3)
    weights = np.arange(x.shape[-1], dtype=np.float32)
    how: Any = {"wire": drawing(jax.random.key(2)), "wire_backward": backward, **BY_XLA}

    def loss(x: jax.Array) -> jax.Array:
        total, lost = pc.psum(x, "x", return_residue=True, **how)
        return (total * weights).sum() + lost.sum()

    got = run(jax.grad(loss), x, n=n, check_vma=False)
    tangent = run(lambda x: jax.jvp(lambda x: pc.psum(x, "x", **how), (x,), (x,))[1], x, n=n)
    off = np.abs(got - n * weights).max(), np.abs(tangent[0] - x.sum(axis=0)).max()
    if backward is None:
        assert off[0] == 0 and off[1] <= EXACT
    else:
        assert 0 < off[0] <= n * weights.max() / 127 and EXACT < off[1] <= 4 * np.abs(x).max() / 127


def test_elements_of_vmap_have_groups_of_their_own() -> None:
    n, scales = 3, np.float32([1, 1e4])
    x = data(n, rows=1)[:, None, :, :200] * scales[:, None, None]
    how: Any = {"wire": "int8", "return_residue": True, **BY_XLA}
    sums, lost = run(jax.vmap(lambda x: pc.psum(x, "x", **how)), x, n=n, check_vma=False)
    exact = x.sum(axis=0)
    for element, scale in enumerate(scales):
        arrived = sums[0, element] + lost[:, element].sum(axis=0)
        np.testing.assert_allclose(arrived, exact[element], atol=EXACT * n * scale)
        assert np.abs(lost[:, element]).max() < 0.05 * scale


def test_sixteen_bits_lose_no_more_than_their_own_rounding() -> None:
    n = 4
    x = jnp.asarray(data(n, rows=8), jnp.bfloat16)
    how: Any = {"wire": "int8", "return_residue": True, **BY_XLA}
    total, lost = run(lambda x: pc.psum(x, "x", **how), x, n=n)
    exact = np.asarray(x, np.float32).sum(axis=0)
    off = total[0].astype(np.float32) + lost.astype(np.float32).sum(axis=0) - exact
    assert np.abs(off).max() <= 3 * 2.0**-9 * np.abs(exact).max()
    assert total.dtype == lost.dtype == jnp.bfloat16


@pytest.mark.parametrize("n, size", [(8, 256), (4, 3)])
def test_padding_that_takes_more_bytes_is_refused(n: int, size: int) -> None:
    x = data(n)[:, 0, :size]
    for wire in (Wire("int8"), drawing(jax.random.key(0))):
        with pytest.raises(WireError, match=f"bytes in place of {4 * size}"):
            run(lambda x, w=wire: pc.psum(x, "x", wire=w, return_residue=True, **BY_XLA), x, n=n)


def test_rows_of_several_leaves_keep_scales_of_their_own() -> None:
    n, rows = 3, Wire("int8", group="row")
    small, large = data(n, rows=2), 1e4 * data(n, rows=1)
    how: Any = {"wire": rows, **BY_XLA}

    def program(small: jax.Array, large: jax.Array) -> Any:
        tree = small, large
        each = [pc.psum(x, "x", **how) for x in tree]
        return pc.psum(tree, "x", **how), each, pc.psum(tree, "x", return_residue=True, **how)

    together, apart, (sums, _) = run(program, small, large, n=n)
    for got in (together, sums):
        for ours, alone in zip(got, apart, strict=True):
            np.testing.assert_array_equal(ours, alone)


@pytest.mark.parametrize("once", [{}, {"return_residue": True}], ids=["", "residue"])
@pytest.mark.parametrize("op", [pc.psum, functools.partial(pc.psum_scatter, tiled=True)])
def test_a_named_exchange_has_a_derivative(op: Any, once: dict[str, Any]) -> None:
    def loss(x: jax.Array) -> jax.Array:
        found = op(x, "x", wire="int8", algorithm="exchange", **once, **BY_PALLAS)
        return (found[0] if once else found).sum()

    assert (run(jax.grad(loss), data(4), n=4, check_vma=False) > 0).all()


def test_draws_may_vary_where_their_operand_does_not() -> None:
    """As replicated weights: the key is of a device."""
    n, x = 3, data(1)[0]
    wire = drawing(jax.random.key(3))

    def loss(x: jax.Array) -> jax.Array:
        gathered = pc.all_gather(x, "x", wire=wire, **BY_XLA)
        total = pc.psum(x, "x", wire=wire, **BY_XLA)
        return jax.lax.pmean((gathered * 2).sum() + total.sum(), "x")

    on = harness.mesh(n)
    mapped = jax.shard_map(loss, mesh=on, in_specs=P(), out_specs=P())
    got = jax.jit(jax.grad(mapped))(x)
    np.testing.assert_allclose(got, 2 * n + n, rtol=1e-6)


def test_what_is_flat_is_drawn_and_lost_by_kernels() -> None:
    """In a program for simulated devices."""
    wire = drawing(jax.random.key(4))

    def program(x: jax.Array) -> Any:
        return pc.psum(x.reshape(-1), "x", wire=wire, return_residue=True, **BY_PALLAS)

    x = np.ones((4, 1024, 128), np.float32)
    text = str(jax.make_jaxpr(harness.per_device(program, harness.mesh(4)))(x))
    assert text.count("name=wire_drawn") == text.count("name=wire_lost") == 2


def test_numbers_among_the_axes_are_refused() -> None:
    def mapped(x: jax.Array) -> Any:
        return pc.psum(x, (0, "x"), wire="int8", return_residue=True, **BY_XLA)

    with pytest.raises(WireError, match="no term is sent by itself"):
        run(mapped, data(3), n=3, check_vma=False)
