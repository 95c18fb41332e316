"""Operands that are no plain array, and types that only check_vma knows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import harness
import pallas_collectives as pc
from against_lax import (
    CANONICAL,
    check,
    compare,
    loss,
    served_by_kernels,
)

pytestmark = pytest.mark.usefixtures("fresh_counts")


def test_constants_fold() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        constants = (
            *(m.psum(1, "x"), m.psum(2.5, ("x",)), m.psum(np.float32(3), "x"), m.pmean(4.0, "x")),
            *(m.psum(np.arange(3, dtype=np.int8), "x"), m.psum(1, ())),
        )
        kinds.append([type(constant) for constant in constants])
        return x, constants

    kinds: list[Any] = []
    check(fn, kernels=False)
    assert kinds[0] == kinds[1]
    assert kinds[0][0] is int
    assert not pc.counts()


@pytest.mark.full
def test_constants_that_lax_does_not_fold() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        return x, (
            *(m.psum(True, "x"), m.psum(np.array([True, False]), "x"), m.psum(jnp.arange(3), "x")),
            *(m.pmean(True, "x"), m.pmax(3, "x"), m.pmin(np.arange(3), "x"), m.psum(None, "x")),
            *(m.all_gather(3, "x"), m.ppermute(2.5, "x", [(0, 1)]), m.psum({"a": True}, "x")),
        )

    check(fn)


@pytest.mark.full
def test_trees_of_mixed_dtypes() -> None:
    def tree(x: jax.Array) -> Any:
        return {
            "f32": x,
            "others": [x.astype(jnp.bfloat16), x.astype(jnp.int32), (x > 0, None)],
            "scalar": 3,
        }

    def fn(m: Any, x: jax.Array) -> Any:
        arrays = {name: leaf for name, leaf in tree(x).items() if name != "scalar"}
        return (
            m.psum(tree(x), "x"),
            m.pmean({"a": x, "b": 1.5}, "x"),
            m.pmax(tree(x)["others"][:2], "x"),
            m.all_gather(arrays, "x"),
            m.psum_scatter({"a": x, "b": x.astype(jnp.bfloat16)}, "x", tiled=True),
            m.all_to_all([x, x > 0], "x", 0, 0, tiled=True),
            m.ppermute(arrays, "x", [(0, 1)]),
        )

    check(fn)


@pytest.mark.parametrize("shape", [(2, 0), (2,), (2, 5, 129)], ids=str)
@pytest.mark.parametrize("op", CANONICAL)
def test_shapes(op: str, shape: tuple[int, ...]) -> None:
    calls = {
        **CANONICAL,
        "all_gather": lambda m, x: m.all_gather(x, "x", tiled=True),
        "all_to_all": lambda m, x: m.all_to_all(x, "x", 0, 0, tiled=True),
    }
    x = harness.random((2, *shape), "float32")

    def fn(m: Any, x: jax.Array) -> Any:
        call = functools.partial(calls[op], m)
        return call(x), jax.grad(loss(call))(x)

    check(fn, x, kernels=x.size > 0)


def test_arrays_of_rank_0() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        calls = (
            lambda x: m.psum(x, "x"),
            lambda x: m.all_gather(x, "x"),
            lambda x: m.ppermute(x, "x", [(0, 1)]),
            lambda x: m.pmean(x, "x"),
        )
        return [(call(x), jax.grad(loss(call))(x)) for call in calls]

    check(fn, harness.random((2,), "float32"))


@pytest.mark.full
def test_float0_tangents_and_integer_gradients() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        calls = [functools.partial(call, m) for call in CANONICAL.values()]

        def both(x: jax.Array, i: jax.Array) -> Any:
            return [(call(x), call(i)) for call in calls]

        i = x.astype(jnp.int32)
        no_tangent = np.zeros(i.shape, jax.dtypes.float0)
        out, tangents = jax.jvp(both, (x, i), (x, no_tangent))
        assert all(t.dtype == jax.dtypes.float0 for _, t in tangents)

        def scalar(x: jax.Array, i: jax.Array) -> jax.Array:
            return sum(jnp.sum(jnp.sin(y) * z) for y, z in both(x, i))

        dx, di = jax.grad(scalar, (0, 1), allow_int=True)(x, i)
        assert di.dtype == jax.dtypes.float0
        return out, [t for t, _ in tangents], dx

    check(fn, check_vma=False)


def test_float0_that_is_given_is_laxs() -> None:
    """It holds no bytes, which kernels lay out by their size."""

    def fn(m: Any, x: jax.Array) -> Any:
        nothing = np.zeros((4, 2), jax.dtypes.float0)
        shapes = [call(nothing).shape for call in (
            lambda x: m.all_gather(x, "x"),
            lambda x: m.all_to_all(x, "x", 0, 0, tiled=True),
            lambda x: m.psum_scatter(x, "x", tiled=True),
        )]  # fmt: skip
        return [x * np.prod(shape) for shape in shapes]

    check(fn, check_vma=False, kernels=False)


def test_weak_types() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        weak = lax.fori_loop(0, 1, lambda _, c: c + 1.0, 1.0)
        assert jax.typeof(weak).weak_type
        varying = lax.pcast(weak, "x", to="varying")
        collectives = (m.psum, m.pmax, m.all_gather, functools.partial(m.ppermute, perm=[(0, 1)]))
        return [collective(varying, "x") for collective in collectives]

    check(fn)


@pytest.mark.full
@pytest.mark.parametrize("op", ["all_gather", "psum_scatter", "psum", "pmax"])
def test_every_dtype_of_laxs(op: str) -> None:
    """One tree of them all, without shapes that kernels like; moves and sums of 64 bits are two."""
    dtypes = {"all_gather": harness.DTYPES, "pmax": harness.COMPARED}.get(op, harness.ADDED)

    def run(m: Any, *xs: jax.Array) -> Any:
        options: Any = {"tiled": True} if op == "psum_scatter" else {}
        return getattr(m, op)(list(xs), "x", **options)

    with jax.enable_x64(True):
        xs = [harness.random((2, 2, 5), dtype) for dtype in dtypes]
        ours, want = (
            harness.per_device(functools.partial(run, m), harness.mesh(2), check_vma=False)(*xs)
            for m in (pc, lax)
        )
    for got, expected in zip(ours, want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    by_lax = 0 if op == "all_gather" else sum(map(harness.is_64_bit, dtypes))
    assert sum(pc.fallback_counts().values()) == by_lax


def test_constants_of_64_bits() -> None:
    """A cast to pairs of 32 bits, of a constant, and XLA for CPUs ends the process."""
    with jax.enable_x64(True):
        check(lambda m, x: m.all_gather(jnp.ones((1, 5)), "x"), check_vma=False)


def test_random_keys() -> None:
    def fn(m: Any, x: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(lax.axis_index("x")), 4)
        moved = (
            m.all_gather(keys, "x", tiled=True),
            m.all_to_all(keys, "x", 0, 0, tiled=True),
            m.ppermute(keys, "x", [(0, 1)]),
        )
        return [jax.random.key_data(key) for key in moved]

    check(fn)


def test_broadcast_of_four_bits() -> None:
    x = harness.random((2, 8, 128), "int4")
    broadcast = harness.per_device(lambda x: pc.pbroadcast(x, "x", 1), harness.mesh(2))
    np.testing.assert_array_equal(broadcast(x), x[[1, 1]])
    assert served_by_kernels()


def test_permutation_to_the_left_by_numbers_below_0() -> None:
    shift = [(p, p - 1) for p in range(3)]
    check(lambda m, x: m.ppermute(x, "x", shift), on=harness.mesh(3))


def test_gather_to_reduced_and_its_gradient() -> None:
    """FSDP as JAX types it: the gradient of a reduced array is unreduced, and then scattered."""
    on = harness.mesh(2)
    x, w = harness.random((32, 8), "float32"), harness.random((4, 8), "float32", 1)
    split = PartitionSpec("x")

    def run(m: Any) -> Any:
        def shard(x: jax.Array, w: jax.Array) -> jax.Array:
            gathered = m.all_gather(w, "x", tiled=True, to="reduced")
            assert jax.typeof(gathered).mat.reduced == {"x"}
            return m.psum(jnp.sum((x @ gathered.T) * x[:, :1]), "x")

        mapped = jax.shard_map(shard, mesh=on, in_specs=(split, split), out_specs=PartitionSpec())
        with jax.set_mesh(on):
            return jax.jit(jax.value_and_grad(mapped, 1))(x, w)

    ours = run(pc)
    assert served_by_kernels()
    assert {op for op, _, _ in pc.counts()} == {"all_gather", "all_reduce", "reduce_scatter"}
    compare(ours, run(lax))


def test_sums_of_unreduced_arrays() -> None:
    on = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    a, b = harness.random((4, 16), "float32"), harness.random((16, 8), "float32", 1)
    unreduced = PartitionSpec(None, None, unreduced={"x"})

    def run(m: Any) -> Any:
        def shard(y: jax.Array) -> Any:
            return m.psum(y, "x"), m.psum_scatter(y, "x", tiled=True)

        def model(a: jax.Array, b: jax.Array) -> Any:
            y = jnp.einsum("ij,jk->ik", a, b, out_sharding=unreduced)
            outs = (PartitionSpec(), PartitionSpec("x"))
            return jax.shard_map(shard, in_specs=unreduced, out_specs=outs)(y)

        with jax.set_mesh(on):
            columns = jax.device_put(a, PartitionSpec(None, "x"))
            return jax.jit(model)(columns, jax.device_put(b, PartitionSpec("x")))

    ours = run(pc)
    assert served_by_kernels()
    compare(ours, run(lax))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="sums alone are unreduced before")
@pytest.mark.parametrize("op", ["pmax", "pmin"])
def test_extremes_of_unreduced_arrays(op: str) -> None:
    on = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    terms = harness.random((2, 4, 16), "float32")
    kind = getattr(jax.sharding.UnreducedKind, op[1:])
    spec = PartitionSpec(None, None, unreduced={"x"}, unreduced_kind=kind)
    unreduced = jax.make_array_from_single_device_arrays(
        terms.shape[1:],
        jax.NamedSharding(on, spec),
        list(map(jax.device_put, terms, on.devices)),
    )

    def reduce(y: jax.Array) -> jax.Array:
        assert jax.typeof(y).mat.unreduced == {"x"}
        return getattr(pc, op)(y, "x")

    mapped = jax.shard_map(reduce, mesh=on, in_specs=spec, out_specs=PartitionSpec())
    got = jax.jit(mapped)(unreduced)
    assert served_by_kernels()
    np.testing.assert_array_equal(np.asarray(got), getattr(terms, op[1:])(axis=0))
