"""`overridden`: lax's collectives are replaced wherever a function gets them from."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import all_gather, psum
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from jaxprs import primitives_in
from pallas_collectives import catalogue
from pallas_collectives.errors import CollectiveError


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = psum_primitive().bind.__func__
    pc.reset_counts()
    yield
    assert psum_primitive().bind.__func__ is before, "lax's primitives are as they were"


def psum_primitive() -> Any:
    (eqn,) = jax.make_jaxpr(lambda x: psum(x, "x"), axis_env=[("x", 2)])(1.0).eqns
    return eqn.primitive


@jax.custom_vjp
def _summed(x: jax.Array) -> jax.Array:
    return psum(x, "x")


_summed.defvjp(lambda x: (psum(x, "x"), None), lambda _, g: (psum(g, "x") / 2,))


@jax.custom_jvp
def _tripled(x: jax.Array) -> jax.Array:
    return 3 * psum(x, "x")


@_tripled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _tripled(*primals), 3 * psum(tangents[0], "x")


def _scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.sin(psum(c, "x")), None), x, length=2)[0]


def _while(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, c: jnp.sin(psum(c, "x")), x)


def _cond(x: jax.Array) -> jax.Array:
    everywhere = psum(jnp.ones(()), "x")
    return lax.cond(everywhere > 0, lambda c: psum(c, "x"), lambda c: 0 * psum(c, "x"), x)


def _remat(x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda c: jnp.sin(all_gather(c, "x")).sum(0))(x)


PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "call": jax.jit(lambda x: psum(x, "x")),
    "custom_vjp": _summed,
    "custom_jvp": _tripled,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat": _remat,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_laxs_is_left(name: str) -> None:
    fn, on = PROGRAMS[name], harness.mesh(2)
    x = harness.random((2, 8, 128), "float32")

    def gradient(x: jax.Array) -> jax.Array:
        # A loop of unknown length has no backward pass.
        derive = jax.jvp if name == "while" else None
        if derive:
            return derive(fn, (x,), (jnp.cos(x),))[1]
        return jax.grad(lambda x: jnp.sum(jnp.cos(fn(x))))(x)

    for what in (fn, gradient):
        ours = harness.per_device(pc.overridden(what), on, check_vma=False)
        by_lax = harness.per_device(what, on, check_vma=False)
        left = catalogue.primitives().keys() & set(primitives_in(jax.make_jaxpr(ours)(x)))
        assert not left
        assert catalogue.primitives().keys() & set(primitives_in(jax.make_jaxpr(by_lax)(x)))
        if what is gradient:  # values of gradients imply those of the function
            np.testing.assert_allclose(ours(x), by_lax(x), rtol=1e-5, atol=1e-5)


def test_what_differentiation_adds_around_shard_map_is_ours() -> None:
    """`check_vma=False`: JAX sums the gradient of what its in_specs replicate by itself."""
    on, x = harness.mesh(2), harness.random((2, 8, 128), "float32")
    w = harness.random((8, 128), "float32", 1)
    specs: dict[str, Any] = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": False}

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return psum(jnp.sum(jnp.sin(w * x)), "x")

    derived = jax.grad(jax.shard_map(loss, mesh=on, **specs))
    program = primitives_in(jax.make_jaxpr(pc.overridden(derived))(w, x))
    assert not catalogue.primitives().keys() & set(program)
    np.testing.assert_allclose(
        jax.jit(pc.overridden(derived))(w, x), jax.jit(derived)(w, x), rtol=1e-5, atol=1e-5
    )


def test_nested_shard_maps() -> None:
    on = harness.mesh(2, 2)

    def inner(x: jax.Array) -> jax.Array:
        return psum(x, "y")

    def outer(x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(inner, in_specs=P("y"), out_specs=P(), axis_names={"y"})
        return psum(mapped(x), "x")

    run = jax.shard_map(outer, mesh=on, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    x = jax.ShapeDtypeStruct((4, 128), "float32")
    program = primitives_in(jax.make_jaxpr(pc.overridden(run))(x))
    assert not catalogue.primitives().keys() & set(program)


def test_from_another_thread_and_not_beside_it() -> None:
    on, x = harness.mesh(2), harness.random((2, 8, 128), "float32")
    programs: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def fn(x: jax.Array) -> jax.Array:
        inside.set()
        assert done.wait(60)
        return psum(x, "x")

    def trace() -> None:
        run = harness.per_device(pc.overridden(fn), on)
        programs["in a thread"] = str(jax.make_jaxpr(run)(x))

    thread = threading.Thread(target=trace)
    thread.start()
    assert inside.wait(60)
    programs["beside"] = str(jax.make_jaxpr(harness.per_device(lambda x: psum(x, "x"), on))(x))
    done.set()
    thread.join()
    assert "pallas_psum" in programs["in a thread"]
    assert "pallas_psum" not in programs["beside"]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_trees_sums_go_together_where_fn_calls_lax_by_name(by_name: bool) -> None:
    tree = [harness.random((2, rows, 3), "float32", rows) for rows in (1, 4, 6)]

    def fn(*leaves: jax.Array) -> Any:
        return lax.psum(leaves, "x") if by_name else psum(leaves, "x")

    for got, leaf in zip(
        harness.per_device(pc.overridden(fn), harness.mesh(2))(*tree), tree, strict=True
    ):
        np.testing.assert_array_equal(got, np.broadcast_to(leaf.sum(0), leaf.shape))
    assert sum(pc.counts().values()) == (1 if by_name else len(tree))


@pytest.mark.parametrize(
    "options, replaced",
    [
        ({"only": "psum"}, {"pallas_psum", "pallas_all_gather"}),
        ({"keep": "all_gather"}, {"pallas_psum"}),
    ],
)
def test_within_a_context_that_replaces_more(options: Any, replaced: set[str]) -> None:
    """What the context replaces stays ours where `only` names another function, and not `keep`."""

    def fn(x: jax.Array) -> Any:
        return lax.psum(x, "x"), lax.all_gather(x, "x")

    with pc.override_lax(only="all_gather"):
        run = harness.per_device(pc.overridden(fn, **options), harness.mesh(2))
        names = primitives_in(jax.make_jaxpr(run)(harness.random((2, 8, 128), "float32")))
    found = {name.partition("_inv")[0] for name in names if name.startswith("pallas_")}
    assert found == replaced


def test_only_and_keep_name_functions() -> None:
    def fn(x: jax.Array) -> Any:
        return psum(x, "x"), all_gather(x, "x")

    def built(**options: Any) -> set[str]:
        run = harness.per_device(pc.overridden(fn, **options), harness.mesh(2))
        names = primitives_in(jax.make_jaxpr(run)(harness.random((2, 8, 128), "float32")))
        return {name for name in names if name.startswith("pallas_")}

    assert {name.partition("_inv")[0] for name in built()} == {"pallas_psum", "pallas_all_gather"}
    assert built(only=["all_gather"]) == built(keep="psum") == {"pallas_all_gather"}
    refusal = r"keep=\['psun'\]: 'psun' is not one of lax's collectives \(all_gather"
    with pytest.raises(CollectiveError, match=refusal):
        pc.overridden(fn, keep=["psun"])


def test_values_where_lax_serves_what_no_kernel_can() -> None:
    x = harness.random((2, 3), "float32")
    run = jax.vmap(pc.overridden(lambda x: psum(x, "v")), axis_name="v")
    np.testing.assert_array_equal(run(x), np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("replaced", [pc.override_lax(), pc.overridden], ids=["within", "fn"])
def test_lax_serves_groups_of_unequal_size(replaced: Callable[..., Any]) -> None:
    """lax takes them in reductions, but on TPUs; no kernel does, and nothing may break by that."""
    on, x = harness.mesh(4), harness.random((4, 8, 128), "float32")

    def added(x: jax.Array) -> jax.Array:
        groups = [[0, 1, 2], [3]]
        most = lax.pmax(lax.stop_gradient(x), "x", axis_index_groups=groups)
        return lax.psum(x, "x", axis_index_groups=groups) * most

    def both(x: jax.Array) -> Any:
        total, vjp = jax.vjp(added, x)
        return total, *vjp(total)

    program = jax.shard_map(both, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    want = jax.jit(program)(x)
    got = jax.jit(replaced(program))(x)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert {backend for _, backend, _ in pc.counts()} == {"xla"}
