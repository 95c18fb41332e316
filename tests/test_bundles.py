"""Small arrays of a tree, reduced as one: as lax, and in fewer kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import bundles

pytestmark = pytest.mark.usefixtures("fresh_counts")
N = 2
ROW = bundles.SMALL_BYTES // 4


def model(x: jax.Array) -> Any:
    """Leaves of several shapes; one too large to go with the others, some of another dtype."""
    return {
        "bias": x[0, :3],
        "scale": x[0, 5],
        "kernel": jnp.tile(x, (1, ROW // x.size + 1)),
        "small": [x[:, 1::2], x[:0], None, 4, jnp.float32(2)],
        "narrow": (x[0].astype(jnp.bfloat16), x[:, 1].astype(jnp.bfloat16)),
        "counts": x[1].astype(jnp.int32),
    }


def on_devices(fn: Any, **options: Any) -> Any:
    x = jnp.asarray(harness.random((2 * N, 8), "float32"))
    spec = {"mesh": harness.mesh(N), "in_specs": P("x"), "out_specs": P(), **options}
    return jax.tree.map(np.asarray, jax.jit(jax.shard_map(fn, **spec))(x))


@pytest.mark.parametrize("name, constants", [("psum", 1), ("pmean", 1), ("pmax", 2)])
def test_a_tree_reduces_as_lax_reduces_it(name: str, constants: int) -> None:
    got = on_devices(lambda x: getattr(pc, name)(model(x), "x"))
    want = on_devices(lambda x: getattr(lax, name)(model(x), "x"))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    # The large one, the small float32 ones together, both bfloat16 ones together, the integers;
    # and the numbers that lax does not fold.
    assert sum(pc.counts().values()) == 4 + constants, pc.counts()


def test_gradients_and_types_are_those_of_lax() -> None:
    """`a` and `b` vary over the mesh, `c` does not: it has another cotangent, and goes alone."""

    def loss(m: Any, x: jax.Array) -> jax.Array:
        def total(x: jax.Array, c: jax.Array) -> jax.Array:
            tree = m.psum({"a": x[0], "b": jnp.sin(x[1, :3]), "c": c}, "x")
            assert {k: jax.typeof(v).manual_axis_type for k, v in tree.items()} == {
                k: jax.typeof(v).manual_axis_type
                for k, v in lax.psum({"a": x[0], "b": x[1, :3], "c": c}, "x").items()
            }
            return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(tree))

        return jax.grad(total, (0, 1))(x, jnp.arange(3.0))

    options = {"out_specs": (P("x"), P())}
    got = on_devices(lambda x: loss(pc, x), **options)
    want = on_devices(lambda x: loss(lax, x), **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_under_vmap_some_leaves_are_batched() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        rows = jax.vmap(lambda row: m.psum({"a": row, "b": x[0], "c": row[:2]}, "x"))(x)
        return m.psum((x[0], jax.vmap(jnp.sum)(x)), "x"), rows

    got, want = on_devices(lambda x: fn(pc, x)), on_devices(lambda x: fn(lax, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
