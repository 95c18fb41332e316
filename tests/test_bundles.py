"""Reductions of trees: one primitive of many operands, of which small ones travel together."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh

import harness
import pallas_collectives as pc
from against_lax import SHAPE, check
from jaxprs import primitives_in
from pallas_collectives.backends import bundles

pytestmark = pytest.mark.usefixtures("fresh_counts")
Reduce = Callable[[Any], Any]


def model(x: jax.Array) -> Any:
    """Leaves of several types and shapes, and one too large to go with others."""
    return {
        "kernel": jnp.tile(x, (bundles.SMALL_BYTES // x.nbytes + 1, 1)),
        "small": [x[:3, 1::2], x[:0], None, x[0, 5]],
        "weak": jnp.where(lax.axis_index("x") > 0, 1.0, 2.0),
        "narrow": (x[0].astype(jnp.bfloat16), x[:, 1].astype(jnp.bfloat16)),
        "integers": (x[1].astype(jnp.int32), x > 0),
        "constant": 4,
    }


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["psum", "pmean", "pmax"])
def test_a_tree_is_reduced_as_lax_reduces_it(name: str, check_vma: bool) -> None:
    check(lambda m, x: getattr(m, name)(model(x), "x"), check_vma=check_vma)
    # The kernel; small ones of float32, bfloat16 and int32; of a maximum the truth values and the
    # constant, which lax does not fold.
    assert sum(pc.counts().values()) == (5 if name == "pmax" else 4), pc.counts()


def test_two_kernels_for_twenty_leaves_of_two_types() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        return m.psum([row.astype(("f4", "i4")[i % 2]) for i, row in enumerate([*x, *x[:4]])], "x")

    check(fn)
    assert sum(pc.counts().values()) == 2


def test_bundles_hold_so_many_bytes() -> None:
    half = bundles.BUNDLE_BYTES // bundles.SMALL_BYTES // 2 + 1
    xs = [jax.ShapeDtypeStruct((bundles.SMALL_BYTES // 4,), jnp.float32)] * 2 * half
    built = jax.eval_shape(lambda *xs: bundles.reduced(shapes.append, xs, HOW, ("x",)), *xs)
    del built


def groups_differ(m: Any, x: jax.Array) -> Any:
    return m.psum([x, x[0]], "x", axis_index_groups=[[1, 0]])


def vmapped(m: Any, x: jax.Array) -> Any:
    """What is not mapped stays so: an out_axes of None takes nothing else."""
    reduce = functools.partial(m.psum, axis_name="x")
    axes = {"mapped": 1, "else": None}
    fn = jax.vmap(lambda a, b: reduce({"mapped": a, "else": b}), (0, None), axes)
    return fn(x, x[0])


def vmapped_axis(m: Any, x: jax.Array) -> Any:
    """Over an axis of vmap, which becomes a dimension, and one of the mesh."""
    return jax.vmap(
        lambda a, b: (m.psum((a, b), ("x", "v")), m.pmax((a, b), ("v", "x"))),
        (0, None), None, axis_name="v",
    )(x, x[0])  # fmt: skip


def derived(m: Any, x: jax.Array) -> Any:
    """Tangents of some leaves, integers among the others."""
    n = (4 * x).astype(jnp.int32)

    def fn(a: jax.Array, n: jax.Array) -> Any:
        y = m.psum({"a": a, "constant": x[0], "n": n, "b": jnp.sin(a)}, "x")
        return y.pop("n"), y

    tangent = np.zeros(n.shape, jax.dtypes.float0)
    (_, values), (_, tangents) = jax.jvp(fn, (x, n), (jnp.cos(x), tangent))
    grad = jax.grad(lambda a: jnp.sum(jnp.sin(fn(a, n)[1]["b"])))
    return values, tangents, grad(x), jax.jvp(grad, (x,), (jnp.cos(x),))


def transposed(m: Any, x: jax.Array) -> Any:
    """Of a sum that is linear in one leaf, times another."""

    def fn(a: jax.Array) -> jax.Array:
        y = m.psum({"a": a, "b": jnp.sin(x)}, "x")
        return y["a"] * y["b"]

    return jax.linear_transpose(fn, x)(m.psum(x, "x"))


def checkpointed(m: Any, x: jax.Array) -> Any:
    def step(carry: jax.Array, scale: jax.Array) -> Any:
        y = m.psum({"a": carry * scale, "b": x}, "x")
        return carry + jnp.sin(y["a"]) * y["b"], None

    scan = jax.checkpoint(lambda c: jnp.sum(lax.scan(step, c, jnp.arange(1.0, 3.0))[0]))
    return jax.grad(scan)(jnp.cos(x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("fn", [vmapped, derived, transposed, checkpointed])
def test_each_leaf_is_transformed_on_its_own(fn: Any, check_vma: bool) -> None:
    check(fn, check_vma=check_vma)


def test_axes_of_vmap() -> None:
    check(vmapped_axis, check_vma=False)


def test_tangents_that_are_zero_are_not_summed() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.jvp(lambda a: pc.psum({"a": a, "b": x}, "x"), (x,), (x,))

    program = jax.make_jaxpr(harness.per_device(fn, harness.mesh(2)))(np.zeros((2, *SHAPE), "f4"))
    sums = [eqn for eqn in equations(program) if eqn.primitive.name == "pallas_psum_invariant"]
    assert [len(eqn.invars) for eqn in sums] == [2, 1]


def test_a_leaf_that_nobody_reads_is_not_summed() -> None:
    pass
