"""`scan_gathered`: what a scan over gathered weights gives, and its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError, WireError
from pallas_collectives.topology import chips
from pallas_collectives.tuning import overlaps

Arrays = dict[str, Any]


def layer(x: jax.Array, w: Arrays) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"] / 8


def by_scan(x: jax.Array, weights: Arrays) -> jax.Array:
    def turn(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        return layer(x, jax.tree.map(lambda w: lax.all_gather(w, "x", tiled=True), w)), None

    return lax.scan(turn, x, weights)[0]


def ours(x: jax.Array, weights: Arrays) -> jax.Array:
    return pc.scan_gathered(layer, x, weights, "x")


def arrays(depth: int, side: int = 16) -> tuple[np.ndarray, Arrays]:
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal((depth, side, side)).astype(np.float32) for name in ("up", "down")
    }
    return rng.standard_normal((4, side)).astype(np.float32), weights


def derived(fn: Any, depth: int, *, check_vma: bool = True, side: int = 16) -> Any:
    """Result and gradients, on two devices."""

    def loss(x: jax.Array, weights: Arrays) -> jax.Array:
        return jnp.sum(fn(x, weights) ** 2)

    def both(x: jax.Array, weights: Arrays) -> Any:
        return fn(x, weights), jax.grad(loss, argnums=(0, 1))(x, weights)

    specs = P("x"), P(None, "x")
    run = jax.shard_map(
        both,
        mesh=harness.mesh(2),
        in_specs=specs,
        out_specs=(P("x"), specs),
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(run)(*arrays(depth, side)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_it_equals_a_scan_over_gathered_weights(depth: int, check_vma: bool) -> None:
    with pc.use_backend("xla"):
        got = derived(ours, depth, check_vma=check_vma)
        want = derived(by_scan, depth, check_vma=check_vma)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_kernels_serve_it() -> None:
    pc.reset_counts()
    got = derived(ours, 3, side=128)
    assert {(op, backend) for op, backend, _ in pc.counts()} == {
        ("all_gather", "pallas"),
        ("reduce_scatter", "pallas"),
    }
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
        got,
        derived(by_scan, 3, side=128),
    )


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["", "remat"])
def test_on_gpus_each_turn_starts_what_the_next_needs(by_nccl: str, wrap: Any) -> None:
    pc.reset_counts()
    got = derived(wrap(ours), 4)
    assert {(op, algorithm) for op, _, algorithm in pc.counts()} == {
        ("all_gather", "copies"),
        ("all_to_all", "copies"),
    }
    with pc.use_backend("xla"):
        want = derived(by_scan, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_on_gpus_products_lie_between_a_start_and_its_done(by_nccl: str) -> None:
    """In the program as it is lowered, by what needs what: in each loop, forward and backward."""
    x, weights = arrays(4)
    specs = P("x"), P(None, "x")
    mapped = jax.shard_map(
        jax.grad(lambda x, w: jnp.sum(ours(x, w) ** 2), argnums=(0, 1)),
        mesh=harness.mesh(2),
        in_specs=specs,
        out_specs=specs,
    )
    closed = jax.make_jaxpr(mapped)(x, weights)
    scans = [eqn for eqn in _equations(closed.jaxpr) if eqn.primitive.name == "scan"]
    assert len(scans) == 2
    for scan in scans:
        eqns = [*_equations(scan.params["jaxpr"].jaxpr)]
        names = [eqn.primitive.name for eqn in eqns]
        starts = [i for i, name in enumerate(names) if name == "nccl_start"]
        dones = [i for i, name in enumerate(names) if name == "nccl_done"]
        products = [i for i, name in enumerate(names) if name == "dot_general"]
        assert len(starts) == len(dones) and products
        assert max(starts) < min(products) and max(products) < min(dones)
        for start in starts:
            needs_token = _descendants(eqns, set(eqns[start].outvars[-1:]))
            assert set(products) <= needs_token, "no product can go before the start"
        wanted = set(scan.params["jaxpr"].jaxpr.outvars)
        for product in products:
            after = _descendants(eqns, set(eqns[product].outvars))
            if wanted & {v for i in after for v in eqns[i].outvars}:
                assert set(dones) <= after, "no result is waited for before a product"


def _descendants(eqns: list[Any], known: set[Any]) -> set[int]:
    """The equations that need one of these values."""
    found = set()
    for i, eqn in enumerate(eqns):
        if any(v in known for v in eqn.invars if not hasattr(v, "val")):
            found.add(i)
            known |= set(eqn.outvars)
    return found


def test_layers_of_several_in_a_turn() -> None:
    def unrolled(x: jax.Array, weights: Arrays) -> jax.Array:
        return pc.scan_gathered(layer, x, weights, "x", unroll=2)

    with pc.use_backend("xla"):
        got, want = derived(unrolled, 5), derived(by_scan, 5)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    v5e, v6e = (chips.BY_NAME[name] for name in ("v5e", "v6e"))
    assert overlaps.gathers_on_sparsecore(v6e) and not overlaps.gathers_on_sparsecore(v5e)


def test_it_can_be_checkpointed() -> None:
    with pc.use_backend("xla"):
        got = derived(jax.checkpoint(ours), 3)
        want = derived(by_scan, 3)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_turn_gathers_before_it_needs_the_weights() -> None:
    """The gather in the loop does not feed that turn's products."""
    x, weights = arrays(3)
    on = harness.mesh(2)
    specs: Any = {"mesh": on, "in_specs": (P("x"), P(None, "x")), "out_specs": P("x")}
    with pc.use_backend("xla"):
        closed = jax.make_jaxpr(jax.shard_map(ours, **specs))(x, weights)
    (scan,) = [eqn for eqn in _equations(closed.jaxpr) if eqn.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    brought = [v for eqn in body.eqns if "all_gather" in eqn.primitive.name for v in eqn.outvars]
    assert len(brought) == 2
    used = [v for eqn in body.eqns for v in eqn.invars]
    assert not any(v in used for v in brought), "they go into the next turn"


def _equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and eqn.primitive.name != "scan":
                yield from _equations(inner)


def test_weights_without_layers_are_refused() -> None:
    def run(x: jax.Array) -> jax.Array:
        return pc.scan_gathered(layer, x, {"up": x, "down": x[:2]}, "x")

    harness.fails(
        CollectiveError, "first dimension of each is the number of layers.*stack the layers", run
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_a_layer_as_lax_scan_has_them_is_refused(depth: int) -> None:
    def run(x: jax.Array) -> jax.Array:
        return pc.scan_gathered(lambda x, w: (x @ w, None), x, jnp.ones((depth, 8, 16)), "x")

    with pytest.raises(CollectiveError, match=r"give the carry alone.* return x, and not "):
        jax.vmap(run, axis_name="x")(jnp.ones((2, 4, 16)))


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_weights_and_gradients_go_over_wires(backend: str) -> None:
    """As a scan whose gathers take one wire and their derivatives another."""
    wires = {"wire": "int8", "wire_backward": pc.Wire("int8", group="row")}

    def narrow(x: jax.Array, weights: Arrays) -> jax.Array:
        return pc.scan_gathered(layer, x, weights, "x", **wires)

    def by_calls(x: jax.Array, weights: Arrays) -> jax.Array:
        def turn(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
            gather = lambda w: pc.all_gather(w, "x", tiled=True, **wires)  # noqa: E731
            return layer(x, jax.tree.map(gather, w)), None

        return lax.scan(turn, x, weights)[0]

    with pc.use_backend(backend):
        got, want, exact = (derived(fn, 3, side=128) for fn in (narrow, by_calls, ours))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)
    assert not np.array_equal(got[0], exact[0])


def test_wires_are_checked_before_anything_is_traced() -> None:
    key = pc.Wire("int8", rounding="stochastic", key=jax.random.key(0))
    for wires, rule in (({"wire": key}, "one key"), ({"wire_backward": "int3"}, "int3")):
        with pytest.raises(WireError, match=rule):
            derived(lambda x, w, o=wires: pc.scan_gathered(layer, x, w, "x", **o), 2)
