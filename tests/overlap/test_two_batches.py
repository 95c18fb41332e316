"""`two_batch_overlap`: what a layer gives, halves in turn, and who may stand beside whom."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError

ROOT = Path(__file__).parents[2]
Arrays = dict[str, Any]
PIECES = {"up": P(None, None, "x"), "down": P(None, "x"), "whole": P(None, "x")}
DEPTH, BATCH, LENGTH, WIDTH = 2, 4, 8, 128


def cut(x: jax.Array, w: Arrays) -> jax.Array:
    """Tokens are cut over devices between products."""
    seen = lax.all_gather(
        x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)), "x", axis=1, tiled=True
    )
    hidden = jnp.tanh(seen @ w["up"])
    return x + lax.psum_scatter(hidden @ w["down"], "x", scatter_dimension=1, tiled=True) / 8


def summed(x: jax.Array, w: Arrays) -> jax.Array:
    """Tokens are everywhere, and so is one weight once it is gathered."""
    whole = lax.all_gather(w["whole"], "x", tiled=True)
    return x + lax.psum(jnp.tanh(x @ whole @ w["up"]) @ w["down"], "x") / 8


FRESH = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
import pallas_collectives as pc

mesh = Mesh(np.array(jax.devices()), ("x",))
layer = lambda x, w: lax.psum(jnp.tanh(x @ w), "x") @ w
loss = lambda run: lambda x, w: jnp.sum(jax.vmap(run, (0, None))(x, w) ** 2)
mapped = lambda run: jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
x, w = jnp.ones((3, 2, 8)), jnp.full((8, 8), 0.1)
got, want = (jax.jit(mapped(jax.grad(loss(f))))(x, w) for f in (pc.two_batch_overlap(layer), layer))
np.testing.assert_allclose(got, want, rtol=1e-6)
"""


def test_a_fresh_process_needs_nothing_else_of_the_package() -> None:
    """Its barriers have their rules, whether or not anything of ours was called before."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def within_jit(x: jax.Array, w: Arrays) -> jax.Array:
    return jax.jit(cut)(x, w)


LAYERS: dict[Callable[..., Any], P] = {cut: P(None, "x"), summed: P(), within_jit: P(None, "x")}


def arrays(batch: int = BATCH) -> tuple[Any, Arrays]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "whole": (WIDTH, WIDTH)}
    weights = {k: 0.1 * rng.standard_normal((DEPTH, *s), np.float32) for k, s in shapes.items()}
    return rng.standard_normal((batch, LENGTH, WIDTH), np.float32), weights


def mapped(layer: Any, tokens: P, check_vma: bool = True) -> Any:
    """A scan of a layer, with gradients, on two devices."""

    def both(x: jax.Array, weights: Arrays) -> Any:
        def loss(x: jax.Array, weights: Arrays) -> Any:
            y = lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
            return jnp.sum(y**2), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, weights)

    specs = tokens, PIECES
    return jax.shard_map(
        both,
        mesh=harness.mesh(2),
        in_specs=specs,
        out_specs=(specs, tokens),
        check_vma=check_vma,
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint], ids=["", "remat"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_it_equals_the_layer(layer: Any, wrap: Any, check_vma: bool) -> None:
    want = jax.jit(mapped(wrap(layer), LAYERS[layer], check_vma))(*arrays())
    halved = mapped(wrap(pc.two_batch_overlap(layer)), LAYERS[layer], check_vma)
    with pc.override_lax():
        ours = jax.jit(halved)(*arrays())
    for got in (jax.jit(halved)(*arrays()), ours):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def turn_of(layer: Any, tokens: P, **how: Any) -> list[Any]:
    """The equations of the forward scan's turn."""
    closed = jax.make_jaxpr(mapped(layer, tokens, **how))(*arrays())
    (inner,) = [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]
    scan = next(e for e in inner.eqns if e.primitive.name == "scan")
    return scan.params["jaxpr"].jaxpr.eqns


def test_what_depends_on_no_batch_is_computed_once() -> None:
    names = [eqn.primitive.name for eqn in turn_of(pc.two_batch_overlap(summed), P())]
    assert sum("all_gather" in name for name in names) == 1
    assert sum("psum" in name for name in names) == 2


def test_a_barrier_joins_each_exchange_with_products_of_the_other_half() -> None:
    """So products have what they are joined with behind them, and neither needs the other."""
    eqns = turn_of(pc.two_batch_overlap(cut), P(None, "x"))
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    found = []
    for barrier in barriers:
        halves = [_makers(eqns, {v}) for v in barrier.invars]
        assert not set.intersection(*({n for n, _ in half} for half in halves)), "one half's alone"
        found.append(sorted(_last_of(half) for half in halves))
    assert found == [["all_gather", "dot_general"], ["dot_general", "reduce_scatter"]]


def _makers(eqns: list[Any], wanted: set[Any]) -> list[tuple[int, str]]:
    """Numbers and names of products and collectives that values are made of, in one half."""
    found = []
    for number, eqn in reversed([*enumerate(eqns)]):
        if wanted & {*eqn.outvars}:
            if eqn.primitive.name == "optimization_barrier":  # value by value
                passed = zip(eqn.invars, eqn.outvars, strict=True)
                wanted |= {before for before, behind in passed if behind in wanted}
                continue
            wanted |= {v for v in eqn.invars if not hasattr(v, "val")}
            if eqn.primitive.name in ("all_gather", "dot_general", "reduce_scatter"):
                found.append((number, eqn.primitive.name))
    return found[::-1]


def _last_of(half: list[tuple[int, str]]) -> str:
    return half[-1][1]


def test_results_without_a_batch_are_given_as_they_are() -> None:
    def layer(x: Arrays, scale: jax.Array, power: int = 1) -> Any:
        return {"y": lax.psum(x["tokens"] * scale, "x") ** power, "scale": 2 * scale, "one": 1.0}

    x = {"tokens": jnp.arange(8.0).reshape(2, 4), "places": jnp.ones((2, 4, 1))}
    halved = pc.two_batch_overlap(layer, axis=0)
    got = jax.vmap(lambda x: halved(x, jnp.float32(3), power=2), axis_name="x")(x)
    assert got["scale"].tolist() == [6.0, 6.0] and got["one"].tolist() == [1.0, 1.0]
    total = (3 * x["tokens"]).sum(0) ** 2
    assert got["y"].tolist() == [total.tolist()] * 2


def test_results_of_the_batchs_shape_have_all_rows() -> None:
    """Also where their values do not depend on it; and constants are what they are."""
    constant = np.arange(3, dtype=np.float32)

    def layer(x: jax.Array) -> Any:
        return lax.psum(x, "x"), jnp.zeros_like(x), jnp.ones(x.shape[:1]), jnp.asarray(constant)

    x = jnp.arange(16.0).reshape(2, 4, 2)
    got = jax.vmap(pc.two_batch_overlap(layer), axis_name="x")(x)
    jax.tree.map(np.testing.assert_array_equal, got, jax.vmap(layer, axis_name="x")(x))


@pytest.mark.parametrize("form", ["scan", "once", "halves"])
def test_an_inner_jit_may_close_over_arrays(form: str) -> None:
    mask = np.tri(8, dtype=np.float32)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return lax.psum(x @ mask, "x") / 4

    body = pc.two_batch_overlap(product) if form == "halves" else product

    def run(x: jax.Array) -> Any:
        x = 2 * x
        if form == "scan":
            return lax.scan(lambda x, _: (body(x), None), x, length=2)[0]
        return body(x)

    specs: Any = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(run, mesh=harness.mesh(2), **specs)
    x = np.ones((4, 8), np.float32)
    want = jax.jit(mapped)(x)
    with pc.override_lax():
        np.testing.assert_allclose(jax.jit(mapped)(x), want, rtol=1e-6)


def test_a_layer_with_ordered_effects_is_refused() -> None:
    def layer(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0], ordered=True)
        return x

    with pytest.raises(CollectiveError, match=r"effects in order.*call back in order, outside"):
        jax.jit(pc.two_batch_overlap(layer))(np.ones((2, 2), np.float32))


def test_a_layer_without_collectives_is_the_same_layer() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    assert (pc.two_batch_overlap(lambda x: x * 2, axis=-1)(x) == x * 2).all()


@pytest.mark.parametrize(
    "x, says",
    [
        (np.ones((3, 2), np.float32), r"x of \(3, 2\).*even number of 2 or more; pad the batch"),
        (np.ones((0, 2), np.float32), r"x of \(0, 2\)"),
        ({}, "x of no arrays"),
        ({"a": np.ones(4), "b": np.ones(2)}, r"x of \(4,\).*equal in all"),
    ],
)
def test_a_batch_that_has_no_halves_is_refused(x: Any, says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        pc.two_batch_overlap(lambda x: x)(x)


def test_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(CollectiveError, match="axis=2"):
        pc.two_batch_overlap(lambda x: x, axis=2)(np.ones((4, 4), np.float32))


@pytest.mark.parametrize("fn", [jnp.sum, lambda x: x.reshape(-1)], ids=["scalar", "other shape"])
def test_a_result_that_has_no_batch_is_refused(fn: Any) -> None:
    with pytest.raises(CollectiveError, match="must be its batch, 2 in each half; return it row"):
        pc.two_batch_overlap(fn)(np.ones((4, 3), np.float32))


def test_collectives_that_cannot_run_beside_are_refused() -> None:
    def run(x: jax.Array) -> jax.Array:
        _, weights = arrays()
        layer = jax.checkpoint(lambda x: lax.psum(x @ weights["whole"][0], "x"))
        return pc.two_batch_overlap(layer)(x)

    with pytest.raises(
        CollectiveError, match=r"collectives in \['(checkpoint|remat2)'\].*wrap the"
    ):
        jax.vmap(run, axis_name="x")(arrays()[0][:2])
