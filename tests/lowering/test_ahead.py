"""The weights that a loop's turn needs first, asked for in the turn before."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.lowering import ahead
from pallas_collectives.tuning import overlaps

SAYS = "a loop's turn asks for it for the next one"
Arrays = dict[str, Any]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every gather takes longer than any products: those of a turn's `xs` are asked for ahead."""
    monkeypatch.setattr(ahead, "_under_way", lambda step, chip: 1.0)
    monkeypatch.setattr(overlaps, "holds_scatters", lambda chip: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def whole(w: jax.Array) -> jax.Array:
    return lax.all_gather(w, "x", tiled=True)


def layer(x: jax.Array, w: Arrays) -> jax.Array:
    return x + jnp.tanh(x @ whole(w["up"])) @ whole(w["down"].astype(x.dtype)) / 8


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
    "remat": jax.checkpoint(layer),
    "custom": own,
}


def scanned(body: Any, reverse: bool = False, unroll: int = 1) -> Any:
    def run(x: jax.Array, weights: Arrays) -> Any:
        def turn(x: jax.Array, w: Arrays) -> Any:
            return body(x, w), jnp.sum(x, 1)

        return lax.scan(turn, x, weights, reverse=reverse, unroll=unroll)

    return run


def arrays(depth: int = 3, side: int = 128) -> tuple[Any, Arrays]:
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


def asked() -> int:
    """How many gathers of the last context a turn asks for ahead."""
    return sum(line.times for line in pc.override_report().replaced if SAYS in line.why)


CASES = [
    *(("plain", reverse, unroll, True) for reverse, unroll in ((False, 1), (True, 1), (False, 2))),
    *((body, False, 1, vma) for body in ("jit", "remat", "custom") for vma in (True, False)),
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("body, reverse, unroll, check_vma", CASES)
def test_values_and_gradients_are_the_same_to_the_bit(
    body: str, reverse: bool, unroll: int, check_vma: bool
) -> None:
    run = scanned(BODIES[body], reverse, unroll)
    by_lax = derived(run, check_vma)
    with pc.override_lax(ahead=False):
        within = derived(run, check_vma)
    assert not asked()
    with pc.override_lax():
        got = derived(run, check_vma)
    assert asked()
    jax.tree.map(np.testing.assert_array_equal, got, within)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), got, by_lax)


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


def lowered(run: Any, topology: str = "v6e:2x2", depth: int = 4, **options: Any) -> Any:
    """A scan of layers of 4096 x 4096, for TPUs; their lowering, under `override_lax`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:4]), ("x",))
    specs = P("x"), P(None, "x")
    shapes = (16384, 4096), (depth, 4096, 4096)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    with pc.override_lax(**options):
        return jax.jit(mapped).lower(x, w)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ whole(w))


def before_and_after(x: jax.Array, w: jax.Array) -> jax.Array:
    """Products that need no gathered weights, long enough to hide the gather, and one that does."""
    for _ in range(8):
        x = jnp.tanh(x @ jnp.ones((4096, 4096), x.dtype))
    return jnp.tanh(product(x, w) @ jnp.ones((4096, 4096), x.dtype))


def and_after(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(product(x, w) @ jnp.ones((4096, 4096), x.dtype))


def of_carry(x: jax.Array, w: jax.Array) -> jax.Array:
    moved = w + x[: w.shape[0]]
    return jnp.tanh(jnp.tanh(x @ whole(moved)) @ jnp.ones((4096, 4096), x.dtype))


def over(body: Any) -> Any:
    return lambda x, w: lax.scan(lambda x, w: (body(x, w), None), x, w)[0]


def over_consts(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (and_after(x, w[0]), None), x, length=4)[0]


@pytest.mark.parametrize(
    "run, topology, depth, options, count",
    [
        (over(and_after), "v6e:2x2", 4, {}, 1),  # built once: before the loop as in it
        (over(and_after), "v6e:2x2", 4, {"ahead": False}, 0),
        (over(and_after), "v6e:2x2", 4, {"everything": True}, 0),
        (over(and_after), "v6e:2x2", 1, {}, 0),
        (over(and_after), "v5e:2x2", 4, {}, 0),
        (over(before_and_after), "v6e:2x2", 4, {}, 0),
        (over(of_carry), "v6e:2x2", 4, {}, 0),
        (over_consts, "v6e:2x2", 4, {}, 0),
    ],
    ids=["first", "off", "forced", "one layer", "v5e", "hidden", "of the carry", "of consts"],
)
def test_what_is_asked_for_ahead(
    run: Any, topology: str, depth: int, options: Any, count: int
) -> None:
    pytest.importorskip("libtpu")
    lowered(run, topology, depth, **options)
    assert asked() == count


def test_a_loop_of_any_length_is_exported_as_it_was_written() -> None:
    pytest.importorskip("libtpu")
    (depth,) = export.symbolic_shape("depth")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh, specs = Mesh(np.array(devices[:4]), ("x",)), (P("x"), P(None, "x"))
    shapes = (16384, 4096), (depth, 4096, 4096)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    run = jax.shard_map(
        over(and_after), mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False
    )
    with pc.override_lax():
        exported = export.export(jax.jit(run), platforms=["tpu"])(x, w)
    assert "stablehlo.while" in exported.mlir_module() and not asked()


@pytest.mark.parametrize("topology, count", [("v6e:2x2", 2), ("v5p:2x2x1", 1)])
def test_turns_that_scatter_ask_ahead_where_it_was_seen_to_gain(topology: str, count: int) -> None:
    """The forward pass does on both chips."""
    pytest.importorskip("libtpu")

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        run = over(jax.checkpoint(and_after))
        return jax.grad(lambda x, w: jnp.sum(run(x, w).astype(jnp.float32) ** 2), 1)(x, w)

    def carried(**options: Any) -> list[int]:
        """How many matrices as large as a whole weight each loop carries on."""
        lines = lowered(gradient, topology, **options).as_text().splitlines()
        loops = [line for line in lines if "stablehlo.while" in line]
        return [line.count("tensor<4096x4096xbf16>") for line in loops]

    differ = [a != b for a, b in zip(carried(ahead=True), carried(ahead=False), strict=True)]
    assert len(differ) == 2 and sum(differ) == count


@pytest.mark.usefixtures("always")
def test_scatters_of_a_turn_are_held_one_behind_the_other() -> None:
    """The first until the next turn's weights have come, each other one until the one before."""
    loss = lambda w, x: jnp.sum(scanned(jax.checkpoint(layer))(x, w)[0] ** 2)  # noqa: E731
    options: Any = {"mesh": harness.mesh(2), "check_vma": False}
    specs: Any = {"in_specs": (P(None, "x"), P("x")), "out_specs": P(None, "x")}
    x, weights = arrays()
    with pc.override_lax():
        backward = jax.make_jaxpr(jax.shard_map(jax.grad(loss), **specs, **options))(weights, x)
    _, scan = equations(backward.jaxpr, "scan")
    loop = ahead.Loop.of(scan.params, len(scan.invars))
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in scan.invars]
    run = functools.partial(loop.run, loop.early())
    mapped = jax.shard_map(run, in_specs=P(), out_specs=P(), **options)
    (turns,) = equations(jax.make_jaxpr(mapped)(*operands).jaxpr, "scan")
    turn = turns.params["jaxpr"].jaxpr
    made = {v: eqn for eqn in turn.eqns for v in eqn.outvars}
    first, second = equations(turn, "pallas_reduce_scatter")
    for scatter, behind in ((first, "pallas_all_gather"), (second, "pallas_reduce_scatter")):
        barrier = made[scatter.invars[0]]
        assert barrier.primitive.name == "optimization_barrier"
        waits = [made[v].primitive.name for v in barrier.invars[1:]]
        assert waits and set(waits) == {behind}


def equations(jaxpr: Any, name: str) -> list[Any]:
    """Those of a primitive, in a program and in what is mapped within it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        elif eqn.primitive.name == "shard_map":
            found += equations(eqn.params["jaxpr"], name)
    return found
