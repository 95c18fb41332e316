"""Collectives over narrower wires under derivatives, vmap, groups and several axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives.errors import WireError
from wired_calls import BY_XLA, CALLS, COLUMNS, data, run


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", CALLS)
def test_gradients_pass_straight_through(op: str, check_vma: bool) -> None:
    """Bit for bit those without a wire; with one of their own they are quantised, by it."""
    n = 2
    x, weight = data(n), np.random.default_rng(1).normal(size=(n, 1)).astype(np.float32)
    call = CALLS[op]

    def program(x: jax.Array, weight: jax.Array) -> Any:
        def loss(x: jax.Array, **how: Any) -> jax.Array:
            y = call(x, **how, **BY_XLA)
            return (jnp.sin(jnp.arange(1.0, y.shape[-1] + 1)) * weight * y).sum()

        def gradient(**how: Any) -> jax.Array:
            return jax.grad(functools.partial(loss, **how))(x)

        def checkpointed(x: jax.Array) -> jax.Array:
            return jnp.sin(call(x, wire="int8", **BY_XLA)).sum()

        tangent = jax.jvp(lambda x: call(x, wire="int8", **BY_XLA), (x,), (x,))[1]
        kept = [jax.grad(f)(x) for f in (checkpointed, jax.checkpoint(checkpointed))]
        return (gradient(), gradient(wire="int8"), gradient(wire="int8", wire_backward="int8"),
                tangent, call(x, **BY_XLA), *kept)  # fmt: skip

    plain, straight, by_wire, tangent, exact, one, other = run(
        program, x, weight, n=n, check_vma=check_vma
    )
    np.testing.assert_array_equal(straight, plain)
    np.testing.assert_array_equal(tangent, exact)
    np.testing.assert_array_equal(one, other)
    if op == "psum" and check_vma:  # its derivative sends nothing
        np.testing.assert_array_equal(by_wire, plain)
    else:
        assert not np.array_equal(by_wire, plain)
        np.testing.assert_allclose(by_wire, plain, atol=0.05)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_vmap_groups_each_element_by_itself(op: str, where: int) -> None:
    n = 2
    x = np.stack([data(n, kind, rows=4) for kind in ("normal", "heavy tails", "one outlier")])
    x = np.moveaxis(x, 0, 1)
    call = functools.partial(CALLS[op], wire="int8", **BY_XLA)

    def program(x: jax.Array) -> Any:
        mapped = jax.vmap(call, in_axes=where)(jnp.moveaxis(x, 0, where))
        return mapped, jnp.stack([call(element) for element in x])

    mapped, apart = run(program, x, n=n)
    np.testing.assert_array_equal(mapped, apart)


def test_groups_and_several_axes() -> None:
    x = data(4)
    pairs = [[0, 2], [3, 1]]

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", **BY_XLA}
        in_groups = pc.psum_scatter(x, "x", tiled=True, axis_index_groups=pairs, **how)
        return in_groups, pc.psum(x, "x", **how)

    in_groups, summed = run(program, x, check_vma=False)
    for pair in pairs:
        exact = x[pair].sum(axis=0).reshape(2, -1, COLUMNS)
        for place, device in enumerate(pair):
            assert np.abs(in_groups[device] - exact[place]).max() < 0.06
    both = harness.per_device(
        lambda x: pc.psum(x, ("x", "y"), wire="int8", **BY_XLA), harness.mesh(2, 2)
    )(x)
    np.testing.assert_array_equal(np.asarray(both), summed)


@pytest.mark.parametrize("op", CALLS)
def test_vmap_mixes_no_elements_in_a_group(op: str) -> None:
    """Rows of no whole groups; an element with inf leaves the other as it is, forth and back."""
    n, columns = 2, 200
    x = np.random.default_rng(3).normal(size=(n, 2, 4, columns)).astype(np.float32)
    x[:, 1] *= 1e4
    call = functools.partial(CALLS[op], wire="int8", wire_backward="int8", **BY_XLA)
    cotangent = np.stack([np.where(np.arange(columns) == 0, np.inf, 1), np.linspace(0, 1, columns)])

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        y, pull = jax.vjp(call, x)
        ct = jnp.broadcast_to(jnp.resize(cotangent, y.shape[-1]), y.shape).astype(y.dtype)
        return pull(ct)[0]

    def program(x: jax.Array) -> Any:
        mapped = jax.vmap(call)(x), jax.vmap(gradient)(x, cotangent)
        apart = [(call(one), gradient(one, ct)) for one, ct in zip(x, cotangent, strict=True)]
        y, pull = jax.vjp(jax.vmap(call), x)  # what was mapped is transposed
        cts = jax.vmap(lambda y, ct: jnp.broadcast_to(jnp.resize(ct, y.shape[-1]), y.shape))
        return (
            mapped,
            [jnp.stack(part) for part in zip(*apart, strict=True)],
            pull(cts(y, cotangent).astype(y.dtype))[0],
        )

    (mapped, back), apart, pulled = run(program, x, n=n, check_vma=False)
    np.testing.assert_array_equal(mapped, apart[0])
    np.testing.assert_array_equal(back, apart[1])
    np.testing.assert_array_equal(pulled, apart[1])
    assert np.isnan(back[:, 0]).any() and np.isfinite(back[:, 1]).all()


def test_vmap_over_a_sum_of_vmaps_own_axis_and_the_meshs() -> None:
    x = np.random.default_rng(3).normal(size=(2, 3, 2, 200)).astype(np.float32)
    x[:, :, 1, 7] = np.inf

    def one(x: jax.Array) -> jax.Array:
        return pc.psum(x, ("v", "x"), wire="int8", **BY_XLA)

    inner = jax.vmap(jax.vmap(one), axis_name="v", out_axes=None)
    outer = jax.vmap(jax.vmap(one, axis_name="v", out_axes=None), in_axes=1)
    for got in run(lambda x: (inner(x), outer(x)), x, n=2, check_vma=False):
        exact = x[:, :, 0].sum(axis=(0, 1))
        assert np.abs(got[:, 0] - exact).max() < 0.15
        assert np.isnan(got[:, 1, :128]).all() and np.isfinite(got[:, 1, 128:]).all()


def test_vmap_mixes_no_elements_where_lax_serves_in_place_of_kernels() -> None:
    x = np.ones((4, 2, 1000), np.float32)
    x[:, 0] = 1e4
    with pc.across_slices("x"):
        summed = functools.partial(pc.psum, axis_name=("x", "y"), wire="int8")
        got = harness.per_device(jax.vmap(summed), harness.mesh(2, 2), check_vma=False)(x)
    assert pc.fallback_counts()
    np.testing.assert_allclose(np.asarray(got)[:, 1], 4, rtol=1e-6)


def test_scalars_of_vmap_have_no_group_together_in_a_kernel_either() -> None:
    """16384 of them would be whole tiles."""
    how: Any = {"wire": "int8", "backend": "pallas", "algorithm": "everyone"}
    send = functools.partial(pc.ppermute, axis_name="x", perm=[(0, 1), (1, 0)], **how)
    with pytest.raises(WireError, match="81920 bytes in place of 65536"):
        run(jax.vmap(send), np.zeros((2, 16384), np.float32), n=2, check_vma=False)


def test_scalars_of_vmap_have_no_group_together() -> None:
    x = np.arange(2048, dtype=np.float32).reshape(2, 1024)
    x[0, 0] = np.inf

    def program(x: jax.Array, wire: Any) -> jax.Array:
        send = lambda x: pc.ppermute(x, "x", [(0, 1), (1, 0)], wire=wire, **BY_XLA)  # noqa: E731
        return jax.vmap(send)(x)

    with pytest.raises(WireError, match="in place of 4096"):
        run(functools.partial(program, wire="int8"), x, n=2)
    np.testing.assert_array_equal(run(functools.partial(program, wire="auto"), x, n=2), x[::-1])


@pytest.mark.parametrize("op", CALLS)
def test_gradients_of_complex_numbers_beside_a_wire_that_is_left_out(op: str) -> None:
    x = (data(2) + 1j * data(2)[::-1]).astype(np.complex64)
    call = CALLS[op]

    def program(x: jax.Array) -> Any:
        def both(x: jax.Array, **how: Any) -> Any:
            y = functools.partial(call, **how, **BY_XLA)
            tangent = jax.jvp(y, (x,), (2j * x,))[1]
            return tangent, jax.grad(lambda x: (jnp.abs(y(x)) ** 2).sum())(x)

        return both(x, wire="auto"), both(x)

    got, exact = run(program, x, n=2, check_vma=False)
    jax.tree.map(np.testing.assert_array_equal, got, exact)
