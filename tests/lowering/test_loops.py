"""Which gathers and scatters of a loop another turn begins, and which are left to lax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_collectives as pc
from benchmarks.steps import schedule
from pallas_collectives.backends import counters
from pallas_collectives.lowering import collective_times, loops
from pallas_collectives.topology import placement
from turns_of_loops import (
    BARRIERS_SINCE,
    LEAVES,
    asked,
    is_loop_with,
    meanwhile,
    whole,
)


def lowered(
    run: Any,
    topology: str = "v6e:2x2",
    depth: int = 4,
    rows: int = 16384,
    dtype: Any = jnp.bfloat16,
    count: int = 4,
    **options: Any,
) -> Any:
    """A scan of layers of 4096 x 4096, for TPUs; their lowering, under `override_lax`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:count]), ("x",))
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


def read_again(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weights that two products read, as a backward pass reads them."""
    gathered = whole(w)
    return jnp.tanh(jnp.tanh(jnp.tanh(x @ gathered) @ jnp.ones((4096, 4096), x.dtype)) @ gathered)


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


def over_updates(x: jax.Array, w: jax.Array) -> Any:
    """Gathered weights that a product reads first, and that a turn writes into what it carries."""

    def turn(state: Any, w: jax.Array) -> Any:
        (x, cache), gathered = state, whole(w)
        x = jnp.tanh(jnp.tanh(x @ gathered) @ jnp.ones((4096, 4096), x.dtype))
        return (x, lax.dynamic_update_index_in_dim(cache, gathered, 0, 0)), None

    y, cache = lax.scan(turn, (x, jnp.zeros((2, 4096, 4096), x.dtype)), w)[0]
    return y + cache[0, : len(x)]


@pytest.mark.parametrize(
    "run, topology, depth, options, count",
    [
        (over(and_after), "v6e:2x2", 4, {}, 1),  # built once: before the loop as in it
        (over(and_after), "v6e:2x2", 4, {"ahead": False}, 0),
        (over(and_after), "v6e:2x2", 4, {"everything": True}, 0),
        (over(and_after), "v6e:2x2", 1, {}, 0),
        (over(and_after), "v5e:2x2", 4, {}, 1),  # by lax, beside products as in its turn
        (over(and_after), "v5e:2x2", 4, {"ahead": False}, 0),
        (over(and_after), "v5e:2x2", 4, {"everything": True}, 0),
        (over(and_after), "v5e:2x2", 4, {"dtype": jnp.float32}, 0),  # XLA sends half the bytes
        (over(and_after), "tpu7x:2x2x1", 4, {}, 1),
        (over(and_after), "tpu7x:2x2x1", 4, {"rows": 256}, 0),  # products would hide too little
        (over(and_after), "tpu7x:2x2x1", 32, {"rows": 256}, 1),  # but many turns do
        (over(read_again), "v5e:2x2", 4, {}, 0),
        (over(read_again), "v6e:2x2", 4, {}, 1),
        (over(before_and_after), "v6e:2x2", 4, {}, 0),
        (over(of_carry), "v6e:2x2", 4, {}, 0),
        (over_consts, "v6e:2x2", 4, {}, 0),
        (over_kept, "v6e:2x2", 4, {}, 0),
        (over_updates, "v6e:2x2", 4, {}, 0),
    ],
    ids=[
        "first",
        "off",
        "forced",
        "one layer",
        "v5e",
        "v5e, off",
        "v5e, forced",
        "v5e, float32",
        "7x",
        "7x, few rows",
        "7x, few rows, many turns",
        "v5e, read again",
        "read again",
        "hidden",
        "of the carry",
        "of consts",
        "kept",
        "an update",
    ],
)
def test_what_is_asked_for_ahead(
    run: Any, topology: str, depth: int, options: Any, count: int
) -> None:
    pytest.importorskip("libtpu")
    lowered(run, topology, depth, **options)
    assert asked() == count


def over_stacked(x: jax.Array, w: jax.Array) -> Any:
    """Gathered weights that a turn stacks, beside products that do not read them."""

    def turn(x: jax.Array, w: jax.Array) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ jnp.ones((4096, 4096), x.dtype))
        return x, whole(w)

    y, stacked = lax.scan(turn, x, w)
    return y, stacked


def over_set(x: jax.Array, w: jax.Array) -> Any:
    """Gathered weights that no product reads, and that a turn sets in what it carries."""

    def turn(state: Any, w: jax.Array) -> Any:
        x, cache = state
        x = jnp.tanh(x @ jnp.ones((4096, 4096), x.dtype))
        return (x, cache.at[0].set(whole(w))), None

    y, cache = lax.scan(turn, (x, jnp.zeros((2, 4096, 4096), x.dtype)), w)[0]
    return y + cache[0, : len(x)]


def read_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """Gathered weights that a product reads, and something else."""
    gathered = whole(w)
    y = jnp.tanh(jnp.tanh(x @ gathered) @ jnp.ones((4096, 4096), x.dtype))
    return y + jnp.sum(jnp.abs(gathered), 0)


def of_training(ws: jax.Array, xs: jax.Array) -> jax.Array:
    """Each turn is a step of training: what it hands on is weights."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(jnp.tanh(x @ whole(w)) @ jnp.ones((4096, 4096), x.dtype))
        return jnp.sum(jnp.sort(y[:1, :128].astype(jnp.float32))) + jnp.sum(y.astype(jnp.float32))

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 1e-3 * jax.grad(loss)(w, x), None

    return lax.scan(step, ws[:1024], jnp.stack([ws, ws]) + jnp.sum(xs))[0]


@pytest.mark.parametrize(
    "run, alone",
    [
        (over(and_after), True),
        (of_training, True),
        (over(read_twice), False),
        (over_set, False),
        (over_kept, False),
        (over_stacked, False),
        (over_updates, False),
    ],
)
def test_a_kernel_is_told_where_products_alone_read_its_result(run: Any, alone: bool) -> None:
    pytest.importorskip("libtpu")
    with counters.recorded(built=True) as plans:
        found = lowered(run)
    gathers = [plan for plan in plans if plan.op == "all_gather"]
    assert gathers and all(plan.on_sparsecore for plan in gathers)
    assert {plan.for_products for plan in gathers} == {alone}
    if run in (over_stacked, over_set):
        assert 'async_execution_thread="sparsecore"' in found.compile().as_text()


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
    known, by_model = [], collective_times.under_way

    def under_way(*step_and_chip: Any) -> float:
        known.append(placement.in_scope() is not None)
        return by_model(*step_and_chip)

    monkeypatch.setattr(collective_times, "under_way", under_way)
    lowered(gradient(and_after))
    assert known and all(known)


def test_a_scatter_with_products_behind_it_stays_in_its_turn() -> None:
    pytest.importorskip("libtpu")
    lowered(gradient(between))
    whys = [x.why for x in pc.override_report().replaced if x.op == "psum_scatter"]
    assert whys and not any(LEAVES in why for why in whys)


@pytest.mark.parametrize("rows, serves", [(512, "torus"), (4096, "bidirectional:sc")])
def test_the_core_adds_what_products_would_not_hide(rows: int, serves: str) -> None:
    """On all links of a torus it takes a third of what a SparseCore does, along a ring."""
    pytest.importorskip("libtpu")
    with counters.recorded(built=True) as plans:
        lowered(gradient(and_after), "v5p:4x4x4", rows=64 * rows, count=64)
    assert {p.algorithm for p in plans if p.op == "reduce_scatter"} == {serves}
    assert {p.algorithm for p in plans if p.op == "all_gather"} == {"torus:sc"}


@pytest.mark.full
@pytest.mark.parametrize("body", [and_after, between])
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_products_run_beside_a_scatter(body: Any, topology: str) -> None:
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(gradient(body), topology).compile().as_text()
    (backward,) = (loop for loop in schedule.events(text) if is_loop_with(loop, "reduce_scatter"))
    assert min(meanwhile(backward, "reduce_scatter")) > 200_000


@pytest.mark.parametrize("body, turns", [(product, 2), (and_after, 1)])
def test_turns_go_in_pairs_where_nothing_is_left_to_run_beside(body: Any, turns: int) -> None:
    """XLA gives a gather the place of what the turn reads, so it begins behind the last reader."""
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(over(body)).compile().as_text()
    (loop,) = (e for e in schedule.events(text) if is_loop_with(e, "all_gather"))
    beside = meanwhile(loop, "all_gather")
    assert loop.times == 4 // turns and len(beside) == turns and min(beside) > 200_000
    assert ("a second turn's values" in str(pc.override_report())) == (turns == 2)


def beside_another(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose time nobody knows, by experts."""
    of_each = jnp.full(1, len(x), jnp.int32)
    return product(lax.ragged_dot(x, jnp.ones((1, 4096, 4096), x.dtype), of_each), w)


@pytest.mark.parametrize(
    "body, rows, by_lax",
    [(product, 1024, True), (product, 65536, False), (beside_another, 1024, False)],
)
def test_lax_keeps_what_no_products_would_hide(body: Any, rows: int, by_lax: bool) -> None:
    pytest.importorskip("libtpu")
    lowered(gradient(body), rows=rows)
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


def scattered(gradient: jax.Array) -> jax.Array:
    return lax.psum_scatter(gradient, "x", tiled=True)


def not_tiled(gradient: jax.Array) -> jax.Array:
    return lax.psum_scatter(gradient.reshape(4, 1024, 4096), "x")


def summed(gradient: jax.Array) -> jax.Array:
    return lax.psum(gradient[:1024], "x")


def added_up(
    x: jax.Array,
    w: jax.Array,
    read: Any = lambda total: None,
    add: Any = scattered,
    unroll: int = 1,
) -> Any:
    """Gradients of micro-batches, whose sums are added up."""

    whole = jnp.concatenate([*w])

    def turn(total: jax.Array, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32) ** 2))(whole)
        return total + add(gradient).astype(jnp.float32), read(total)

    return lax.scan(turn, jnp.zeros((1024, 4096)), jnp.stack([x] * 4), unroll=unroll)


def added_with_more(x: jax.Array, w: jax.Array) -> Any:
    return added_up(x, w, read=jnp.sum)


def added_for_all(x: jax.Array, w: jax.Array) -> Any:
    return added_up(x, w, add=summed)


def added_as_rows(x: jax.Array, w: jax.Array) -> Any:
    return added_up(x, w, add=not_tiled)


def added_in_pairs(x: jax.Array, w: jax.Array) -> Any:
    return added_up(x, w, unroll=2)


def added_beside_pairs(x: jax.Array, w: jax.Array) -> Any:
    """Two turns are one, as the weights of a turn are read until its end."""

    def turn(state: Any, w: jax.Array) -> Any:
        x, total = state
        x = product(x, w)
        return (x, total + lax.psum(x[:1024].astype(jnp.float32), "x")), None

    return lax.scan(turn, (x, jnp.zeros((1024, 4096))), w)[0]


def added_without_a_loop(x: jax.Array, w: jax.Array) -> Any:
    return added_up(x, w, unroll=4)


@pytest.mark.parametrize(
    "body, by_lax",
    [
        (added_up, "psum_scatter"),
        (added_for_all, "psum"),
        (added_with_more, ""),
        (added_as_rows, ""),
        (added_in_pairs, ""),
        (added_beside_pairs, ""),
        (added_without_a_loop, "psum_scatter"),
    ],
)
def test_lax_sums_once_what_turns_add_up(body: Any, by_lax: str) -> None:
    """XLA moves such a sum out of the loop, but no kernel."""
    pytest.importorskip("libtpu")
    lowered(body, "v5p:2x2x1")
    kept = [(by_lax, loops.ADDED_UP)] if by_lax else []
    assert [(line.op, line.why) for line in pc.override_report().left] == kept
