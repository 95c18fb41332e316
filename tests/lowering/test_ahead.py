"""What a loop's turn asks for in the turn before, and what it leaves to the turn behind."""

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
from benchmarks.steps import schedule
from pallas_collectives.lowering import loops, turns
from pallas_collectives.topology import placement

SAYS = "a loop's turn asks for it for the next one"
LEAVES = "a loop's turn leaves it to the next one"
Arrays = dict[str, Any]


@pytest.fixture(params=["one by one", "in pairs"])
def always(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each collective takes as long as three products: gathers of a turn's `xs` are asked for
    ahead, and scatters of stacked gradients are left for the turn behind. Turns go in pairs or not.
    """
    monkeypatch.setattr(
        turns, "_seconds", lambda eqn, _: float(eqn.primitive.name == "dot_general")
    )
    pairs = request.param == "in pairs"
    monkeypatch.setattr(loops.Loop, "goes_in_pairs", lambda *_: pairs)
    _fake(3.0, monkeypatch)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def hardly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each takes less time than any product: of a turn's scatters only the last one is left."""
    _fake(0.5, monkeypatch)
    jax.clear_caches()
    yield
    jax.clear_caches()


def _fake(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """Products take a second each, and collectives that many."""
    patch.setattr(turns, "_seconds", lambda eqn, _: float(eqn.primitive.name == "dot_general"))
    patch.setattr(turns, "under_way", lambda step, chip: seconds)


def whole(w: jax.Array) -> jax.Array:
    return lax.all_gather(w, "x", tiled=True)


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


def asked(says: str = SAYS) -> int:
    """How many collectives of the last context another turn begins."""
    return sum(line.times for line in pc.override_report().replaced if says in line.why)


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
BARRIERS_SINCE = "0.0.50"  # older compilers put no products beside some scatters
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
    _fake(100.0, monkeypatch)
    with pc.override_lax():
        got = derived(RUNS[name], False)
    assert any(loops.NO_PRODUCTS in line.why for line in pc.override_report().left)
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)


@pytest.mark.parametrize(
    "takes, pairs", [((8.0,), False), ((14.0,), True), ((8.0, 8.0), True), ((4.0, 4.0), False)]
)
def test_turns_go_in_pairs_where_gathers_outlast_them(
    takes: tuple[float, ...], pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One behind the other, from their last readers on: eleven more products of a second each."""
    _fake(takes[0], monkeypatch)

    def turn(x: jax.Array, weights: Any) -> Any:
        x = x @ sum(map(whole, weights))
        for _ in range(11):
            x = jnp.tanh(x @ x)
        return x, None

    with pc.override_lax():
        mapped = jax.shard_map(
            lambda x, w: lax.scan(turn, x, w)[0],
            mesh=harness.mesh(2),
            in_specs=(P(), P(None, "x")),
            out_specs=P(),
            check_vma=False,
        )
        square = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        stacked = [jax.ShapeDtypeStruct((4, 128, 128), jnp.float32) for _ in takes]
        traced = jax.make_jaxpr(mapped)(square, stacked)
    (outer,) = traced.eqns
    (scan,) = (e for e in outer.params["jaxpr"].eqns if e.primitive.name == "scan")
    loop = loops.Loop.of(scan.params, len(scan.invars))
    assert loop.goes_in_pairs([step for step in loop.steps if step.how]) == pairs


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


def lowered(
    run: Any,
    topology: str = "v6e:2x2",
    depth: int = 4,
    rows: int = 16384,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Any:
    """A scan of layers of 4096 x 4096, for TPUs; their lowering, under `override_lax`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:4]), ("x",))
    specs = P("x"), P(None, "x")
    shapes = (rows, 4096), (depth, 4096, 4096)
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
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


def over_kept(x: jax.Array, w: jax.Array) -> Any:
    """Gathered weights that are a result, as those that a derivative keeps."""

    def turn(x: jax.Array, w: jax.Array) -> Any:
        gathered = whole(w)
        return jnp.tanh(jnp.tanh(x @ gathered) @ jnp.ones((4096, 4096), x.dtype)), gathered

    y, kept = lax.scan(turn, x, w)
    return y + kept[:, : len(x)].sum(0)


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
        (over_kept, "v6e:2x2", 4, {}, 0),
    ],
    ids=[
        "first",
        "off",
        "forced",
        "one layer",
        "v5e",
        "hidden",
        "of the carry",
        "of consts",
        "kept",
    ],
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


def between(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product of gathered weights between others: its gradient is made before the end."""
    for _ in range(2):
        x = jnp.tanh(x @ jnp.ones((4096, 4096), x.dtype))
    return and_after(x, w)


def gradient(body: Any) -> Any:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        loss = lambda w: jnp.sum(over(jax.checkpoint(body))(x, w).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.grad(loss)(w)

    return run


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_a_scatter_is_left_where_no_product_stands_behind_it(topology: str) -> None:
    pytest.importorskip("libtpu")
    lowered(gradient(and_after), topology)
    assert asked() and asked(LEAVES)
    assert "which keeps 32.0 MiB more" in str(pc.override_report())
    lowered(gradient(and_after), topology, ahead=False)
    assert not asked() and not asked(LEAVES)


def test_what_collectives_take_is_asked_where_devices_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a ring takes depends on where on the torus its devices are."""
    pytest.importorskip("libtpu")
    known, by_model = [], turns.under_way

    def under_way(*step_and_chip: Any) -> float:
        known.append(placement.in_scope() is not None)
        return by_model(*step_and_chip)

    monkeypatch.setattr(turns, "under_way", under_way)
    lowered(gradient(and_after))
    assert known and all(known)


def test_a_scatter_with_products_behind_it_stays_in_its_turn() -> None:
    pytest.importorskip("libtpu")
    lowered(gradient(between))
    whys = [x.why for x in pc.override_report().replaced if x.op == "psum_scatter"]
    assert whys and not any(LEAVES in why for why in whys)


@pytest.mark.full
@pytest.mark.parametrize("body", [and_after, between])
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_products_run_beside_a_scatter(body: Any, topology: str) -> None:
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(gradient(body), topology).compile().as_text()
    (backward,) = (loop for loop in schedule.events(text) if is_loop_with(loop, "reduce_scatter"))
    assert min(meanwhile(backward, "reduce_scatter")) > 200_000


def meanwhile(loop: schedule.Loop, op: str) -> list[int]:
    """The core's cycles while each collective of a turn is under way."""
    order = [getattr(e, "key", "") for e in loop.events]
    begins = [i for i, e in enumerate(loop.events) if is_start_of(e, op)]
    ends = [order.index(order[i], i + 1) for i in begins]
    return [schedule.cycles_of(loop.events[i:j]) for i, j in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("body, turns", [(product, 2), (and_after, 1)])
def test_turns_go_in_pairs_where_nothing_is_left_to_run_beside(body: Any, turns: int) -> None:
    """XLA gives a gather the place of what the turn reads, so it begins behind the last reader."""
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(over(body)).compile().as_text()
    (loop,) = (e for e in schedule.events(text) if is_loop_with(e, "all_gather"))
    beside = meanwhile(loop, "all_gather")
    assert loop.times == 4 // turns and len(beside) == turns and min(beside) > 200_000
    assert ("a second turn's values" in str(pc.override_report())) == (turns == 2)


@pytest.mark.parametrize("rows, by_lax", [(1024, True), (65536, False)])
def test_lax_keeps_what_no_products_would_hide(rows: int, by_lax: bool) -> None:
    pytest.importorskip("libtpu")
    lowered(gradient(product), rows=rows)
    report = pc.override_report()
    assert {line.op for line in report.left} == (
        {"all_gather", "psum_scatter"} if by_lax else set()
    )
    assert all(loops.NO_PRODUCTS in line.why for line in report.left)


def test_lax_gathers_float32_for_products() -> None:
    """XLA moves half the bytes."""
    pytest.importorskip("libtpu")
    lowered(over(product), dtype=jnp.float32)
    (line,) = pc.override_report().left
    assert line.op == "all_gather" and "gathers float32 as bfloat16" in line.why
    lowered(over(product), dtype=jnp.float32, everything=True)
    assert not pc.override_report().left
    with jax.default_matmul_precision("highest"):
        lowered(over(product), dtype=jnp.float32)
    assert not pc.override_report().left


def is_start_of(event: Any, op: str) -> bool:
    return isinstance(event, schedule.Start) and event.collective.op == op


def is_loop_with(event: Any, op: str) -> bool:
    return isinstance(event, schedule.Loop) and any(is_start_of(e, op) for e in event.events)
