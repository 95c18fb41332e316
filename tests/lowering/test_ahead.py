"""What a loop's turn asks for in the turn before, and what it leaves to the turn behind."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.lowering import collective_times, loops
from pallas_collectives.tuning import overlaps
from turns_of_loops import LEAVES, SAYS, asked, fake, whole

Arrays = dict[str, Any]


@pytest.fixture(params=["one by one", "in pairs"])
def always(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each collective takes as long as three products: gathers of a turn's `xs` are asked for
    ahead, and scatters of stacked gradients are left for the turn behind. Turns go in pairs or not.
    """
    pairs = request.param == "in pairs"
    monkeypatch.setattr(loops.Loop, "goes_in_pairs", lambda *_: pairs)
    fake(3.0, monkeypatch)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def hardly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each takes less time than any product: of a turn's scatters only the last one is left."""
    fake(0.5, monkeypatch)
    jax.clear_caches()
    yield
    jax.clear_caches()


def saving(x: jax.Array, w: Arrays) -> jax.Array:
    """Keeps what it has gathered for its derivative."""
    return x + jnp.tanh(x @ whole(w["up"])) @ whole(w["down"].astype(x.dtype)) / 8


layer = jax.checkpoint(saving)


@jax.custom_vjp
def _own(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ whole(w)


def _own_backward(saved: Any, cotangent: jax.Array) -> Any:
    x, w = saved
    gradient = lax.psum_scatter(x.T @ cotangent, "x", tiled=True)
    return cotangent @ whole(w).T, gradient


_own.defvjp(lambda x, w: (_own(x, w), (x, w)), _own_backward)


def own(x: jax.Array, w: Arrays) -> jax.Array:
    return x + jnp.tanh(_own(x, w["up"])) @ whole(w["down"]) / 8


BODIES: dict[str, Callable[..., Any]] = {
    "plain": layer,
    "jit": jax.jit(layer),
    "saving": saving,
    "custom": own,
}


def scanned(body: Any, reverse: bool = False, unroll: int = 1) -> Any:
    def run(x: jax.Array, weights: Arrays) -> Any:
        def turn(x: jax.Array, w: Arrays) -> Any:
            return body(x, w), jnp.sum(x, 1)

        return lax.scan(turn, x, weights, reverse=reverse, unroll=unroll)

    return run


def arrays(depth: int = 5, side: int = 128) -> tuple[Any, Arrays]:
    names = ("up", "down")
    weights = {k: harness.random((depth, side, side), "float32", i) for i, k in enumerate(names)}
    return harness.random((4, side), "float32", 7), weights


def derived(run: Any, check_vma: bool) -> Any:
    """Results and gradients, on two devices; jitted anew."""

    def both(x: jax.Array, weights: Arrays) -> Any:
        def loss(x: jax.Array, weights: Arrays) -> Any:
            y, rows = run(x, weights)
            return jnp.sum(y**2) + jnp.sum(jnp.sin(rows)), (y, rows)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, weights)

    specs = P("x"), P(None, "x")
    mapped = jax.shard_map(
        both,
        mesh=harness.mesh(2),
        in_specs=specs,
        out_specs=(specs, (P("x"), P(None, "x"))),
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays()))


def vmapped(x: jax.Array, weights: Arrays) -> Any:
    """Each row of x by itself."""
    y, rows = jax.vmap(scanned(layer), (0, None))(x[:, None], weights)
    return y[:, 0], rows[..., 0].T


def nested(x: jax.Array, weights: Arrays) -> Any:
    """A scan of scans: twice the layers, one after the other."""
    pairs = jax.tree.map(lambda w: jnp.stack([w, w[::-1]]), weights)
    y, rows = lax.scan(scanned(layer), x, pairs)
    return y, rows.reshape(-1, rows.shape[-1])


def of_one(x: jax.Array, weights: Arrays) -> Any:
    """Loops of one turn, which no other turn is beside."""
    y, rows = scanned(layer)(x, {k: w[:1] for k, w in weights.items()})
    return y, rows


def of_two(x: jax.Array, weights: Arrays) -> Any:
    return scanned(layer, reverse=True)(x, {k: w[-2:] for k, w in weights.items()})


def twice(x: jax.Array, weights: Arrays) -> Any:
    """Gradients that a loop's own turn makes, stacked twice; others that it also computes with."""

    def turn(x: jax.Array, w: Arrays) -> Any:
        loss = lambda w, x: jnp.sum(layer(x, w) ** 2)  # noqa: E731
        made = jax.grad(loss)(w, x)
        half = made["down"].astype(jnp.bfloat16)
        return layer(x, w), (jnp.sum(x, 1), made["up"], made["up"], half, 2 * made["down"])

    y, (rows, *gradients) = lax.scan(turn, x, weights)
    return y, rows + sum(jnp.sum(g.astype(jnp.float32) ** 2, (1, 2))[:, None] for g in gradients)


PLAIN = {f"reverse={r}, unroll={u}": scanned(layer, r, u) for r in (False, True) for u in (1, 2)}
OTHERS = {
    **{name: scanned(body) for name, body in BODIES.items() if name != "plain"},
    **{f.__name__: f for f in (vmapped, nested, of_one, of_two, twice)},
}
RUNS = PLAIN | OTHERS
CASES = [
    *((name, True) for name in RUNS if name != "twice"),
    *((name, False) for name in OTHERS),
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name, check_vma", CASES)
def test_values_and_gradients_are_the_same_to_the_bit(name: str, check_vma: bool) -> None:
    run = RUNS[name]
    by_lax = derived(run, check_vma)
    with pc.override_lax(ahead=False):
        within = derived(run, check_vma)
    assert not asked() and not asked(LEAVES)
    with pc.override_lax():
        got = derived(run, check_vma)
    jax.tree.map(np.testing.assert_array_equal, got, within)
    assert bool(asked()) == (name not in ("of_one", "saving"))
    assert bool(asked(LEAVES)) == (name != "of_one")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), got, by_lax)


@pytest.mark.full
@pytest.mark.usefixtures("hardly")
def test_scatters_that_stay_in_their_turn_sum_the_same_to_the_bit() -> None:
    with pc.override_lax(ahead=False):
        within = derived(scanned(layer), True)
    with pc.override_lax():
        got = derived(scanned(layer), True)
    of_scatters = {LEAVES in x.why for x in pc.override_report().replaced if x.op == "psum_scatter"}
    assert of_scatters == {True, False}
    jax.tree.map(np.testing.assert_array_equal, got, within)


@pytest.mark.parametrize("name", ["reverse=True, unroll=2", "custom", "twice"])
def test_what_lax_keeps_of_a_turn_has_lax_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective takes a hundred times as long as a product."""
    by_lax = derived(RUNS[name], False)
    fake(100.0, monkeypatch)
    with pc.override_lax():
        got = derived(RUNS[name], False)
    assert any(loops.NO_PRODUCTS in line.why for line in pc.override_report().left)
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)


@pytest.mark.parametrize("name", ["reverse=False, unroll=1", "reverse=True, unroll=2", "custom"])
def test_gathers_by_lax_are_asked_for_ahead_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where XLA runs each collective beside products, as long as three of them."""
    by_lax = derived(RUNS[name], False)
    fake(0.0, monkeypatch)
    monkeypatch.setattr(collective_times, "beside_by_xla", lambda step, chip: 3.0)
    monkeypatch.setattr(overlaps, "by_xla", lambda op, chip: "XLA runs it")
    with pc.override_lax():
        got = derived(RUNS[name], False)
    assert asked() and not pc.override_report().replaced
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)


def test_of_a_gather_over_a_wire_the_report_says_whose_it_is_and_of_which_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cast to bfloat16 it is still one that XLA runs beside products, so lax keeps it."""
    fake(0.0, monkeypatch)
    monkeypatch.setattr(collective_times, "beside_by_xla", lambda step, chip: 3.0)
    monkeypatch.setattr(overlaps, "by_xla", lambda op, chip: "XLA runs it")
    specs = P("x"), P(None, "x")
    run = jax.shard_map(scanned(layer), mesh=harness.mesh(2), in_specs=specs, out_specs=P("x"))
    with pc.override_lax(wire={"all_gather": "bfloat16"}):
        jax.jit(run).lower(*arrays(side=1024))
    said = [line.why for line in pc.override_report().left if SAYS in line.why]
    assert said and all(why.startswith("XLA runs it; ") for why in said)
    assert all("what wire bfloat16 packs; " in why for why in said)


@pytest.mark.usefixtures("always")
def test_what_is_carried_on_keeps_its_type() -> None:
    """Gradients of weights vary over fewer axes than products do, and a counter over none."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    specs = P(("x", "y")), P(None, "x")

    def gradient(x: jax.Array, weights: Arrays) -> Arrays:
        def turn(state: Any, w: Arrays) -> Any:
            x, count = state
            return (layer(x, w) * count, count + 1), None

        loss = lambda w: jnp.sum(lax.scan(turn, (x, 1), w)[0][0])  # noqa: E731
        return jax.grad(loss)(weights)

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
    with pc.override_lax():
        jax.jit(mapped).trace(*arrays()).lower(lowering_platforms=("tpu",))
    assert asked() and asked(LEAVES)


@pytest.mark.usefixtures("always")
def test_overridden_reaches_it_too() -> None:
    run = scanned(layer)

    def gradient(run: Any) -> Any:
        loss = jax.grad(lambda x, w: jnp.sum(run(x, w)[0] ** 2), argnums=1)
        specs = P("x"), P(None, "x")
        options: Any = {"in_specs": specs, "out_specs": P(None, "x")}
        return jax.shard_map(loss, mesh=harness.mesh(2), **options)

    lowered = jax.jit(pc.overridden(gradient(run))).lower(*arrays())
    apart = jax.jit(pc.overridden(gradient(run), ahead=False)).lower(*arrays())
    assert lowered.as_text() != apart.as_text()


def test_tokens_that_turns_hand_on_are_no_weights() -> None:
    """Also where nothing else of a turn changes: no SparseCore is asked for what products await."""
    pytest.importorskip("libtpu")

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        seen = lax.all_gather(x, "x", tiled=True)
        return x + lax.psum_scatter(seen @ w, "x", tiled=True), None

    on = harness.tpu_mesh("v6e:4x4", {"x": 16})
    specs = P("x"), P(None, None, "x")
    mapped = jax.shard_map(
        lambda x, w: lax.scan(turn, x, w)[0],
        mesh=on, in_specs=specs, out_specs=P("x"), check_vma=False,
    )  # fmt: skip
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(on, spec))
        for shape, spec in zip(((1024, 4096), (4, 4096, 4096 * 16)), specs, strict=True)
    ]
    pc.reset_counts()
    with pc.override_lax(fuse=False):
        jax.jit(mapped).lower(*args)
    assert {backend for _, backend, _ in pc.counts()} == {"xla"}, pc.counts()
