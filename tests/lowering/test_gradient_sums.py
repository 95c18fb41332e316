"""Sums of gradients by psum: done where products are beside them, with the values of lax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from benchmarks.steps import schedule
from pallas_collectives.lowering import gradient_sums, questions
from pallas_collectives.lowering.loops import Loop
from turns_of_loops import BARRIERS_SINCE, LEAVES, asked, fake, is_loop_with, meanwhile

Arrays = dict[str, Any]
DEPTH, SIDE = 3, 128


@pytest.fixture(params=["own turn", "next turn"])
def hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products take a second each, and hide sums, which take half of one or three."""
    fake({"own turn": 0.5, "next turn": 3.0}[request.param], monkeypatch)
    by_hand = questions.seconds
    monkeypatch.setattr(
        questions,
        "seconds",
        lambda eqn, chip: by_hand(eqn, chip) if eqn.primitive.name != "scan" else 100.0,
    )
    monkeypatch.setattr(gradient_sums, "_times", lambda _: (9.0, 0.5))
    jax.clear_caches()
    return str(request.param)


def layer(x: jax.Array, w: Arrays) -> jax.Array:
    return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype) / 8


def scanned(body: Any, **options: Any) -> Any:
    return lambda x, weights: lax.scan(lambda x, w: (body(x, w), None), x, weights, **options)[0]


def by_layer(x: jax.Array, weights: Any) -> jax.Array:
    """Layers one by one; of stacked weights, or of each layer's own."""
    if not isinstance(weights, list):
        weights = [{k: w[i] for k, w in weights.items()} for i in range(DEPTH)]
    for w in weights:
        x = jax.checkpoint(layer)(x, w)
    return x


def narrow(x: jax.Array, weights: Arrays) -> jax.Array:
    """Gradients of bfloat16, converted behind the loop."""
    return scanned(layer)(x, {k: w.astype(jnp.bfloat16) for k, w in weights.items()})


def nested(x: jax.Array, weights: Arrays) -> jax.Array:
    twice = jax.tree.map(lambda w: jnp.stack([w, w[::-1]]), weights)
    return lax.scan(lambda x, w: (scanned(layer)(x, w), None), x, twice)[0]


FORWARD: dict[str, Any] = {
    "plain": scanned(layer),
    "remat": scanned(jax.checkpoint(layer)),
    "jit": jax.jit(scanned(jax.jit(layer))),
    "reverse": scanned(jax.checkpoint(layer), reverse=True),
    "unroll": scanned(layer, unroll=2),
    **{f.__name__: f for f in (by_layer, narrow, nested)},
}


def gradient(forward: Any, x: jax.Array, weights: Arrays) -> Arrays:
    return jax.grad(lambda w: jnp.sum(forward(x, w) ** 2))(weights)


def behind(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """As data parallelism is written: a psum of all gradients, then a step of the weights."""
    total = lax.psum(gradient(forward, x, weights), "x")
    return jax.tree.map(lambda w, g: w - g / 64, weights, total)


def each(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    return jax.tree.map(lambda g: lax.pmean(g, "x"), gradient(forward, x, weights))


def grouped(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """Two devices of four each."""
    groups = [[0, 1], [2, 3]]
    return lax.psum(gradient(forward, x, weights), "x", axis_index_groups=groups)


def clipped(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """What is summed is needed at once; and the sums together, for a norm."""
    total = lax.psum(gradient(forward, x, weights), "x")
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in total.values()))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), total)


def doubled(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """Each gradient summed twice over, by one psum."""
    own = gradient(forward, x, weights)
    first, second = lax.psum((own, own), "x")
    return jax.tree.map(lambda a, b: a + 2 * b, first, second)


def steps(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """Steps of training as turns of a loop: the next one needs the sums."""
    return lax.scan(lambda w, _: (behind(forward, x, w), None), weights, length=2)[0]


def also_read(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """Gradients that something else needs as well, before they are summed."""
    own = gradient(forward, x, weights)
    total = lax.psum(own, "x")
    return jax.tree.map(lambda a, b: a - jnp.max(jnp.abs(b)), total, own)


def accumulated(forward: Any, x: jax.Array, weights: Arrays) -> Any:
    """Losses and gradients of two batches, added up by a loop."""

    def turn(so_far: Any, x: jax.Array) -> Any:
        own = jnp.sum(forward(x, weights)), gradient(forward, x, weights)
        return jax.tree.map(jnp.add, so_far, own), None

    nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    loss, total = lax.psum(lax.scan(turn, nothing, jnp.stack([x, x / 2]))[0], "x")
    return jax.tree.map(lambda g: g / loss, total)


SUMMED = {
    f.__name__: f for f in (behind, each, grouped, clipped, doubled, steps, also_read, accumulated)
}


def run(program: Any, check_vma: bool = False, devices: int = 2) -> Any:
    """The program on devices, jitted anew."""
    names = ("up", "down")
    weights = {k: harness.random((DEPTH, SIDE, SIDE), "float32", i) for i, k in enumerate(names)}
    x = harness.random((2 * devices, SIDE), "float32", 7)
    out = P("x") if check_vma is False else P()
    mesh, specs = harness.mesh(devices), (P("x"), P())
    mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    return jax.tree.map(np.asarray, jax.jit(mapped)(x, weights))


def served() -> set[str]:
    return {line.op for line in pc.override_report().replaced}


CASES = [
    *(("behind", name) for name in FORWARD),
    *((name, "remat") for name in SUMMED if name != "behind"),
    *((name, "by_layer") for name in SUMMED if name != "behind"),
]
# The sums of loops that are none of their stacks alone, or of arrays of their own.
STAY = {"by_layer", "nested", "grouped", "doubled", "also_read", "accumulated"}


@pytest.mark.parametrize("summed, forward", CASES)
def test_values_are_those_of_lax(summed: str, forward: str, hidden: str) -> None:
    """To the last bit: a sum of two devices' terms has one order."""
    program = functools.partial(SUMMED[summed], FORWARD[forward])
    devices = 4 if summed == "grouped" else 2
    by_lax = run(program, devices=devices)
    with pc.override_lax():
        got = run(program, devices=devices)
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)
    stay = not STAY.isdisjoint((summed, forward))
    assert served() == ({"psum"} if stay else {"psum_scatter", "all_gather"})
    leaves = hidden == "next turn" and (not stay or (summed, forward) == ("grouped", "remat"))
    assert bool(asked(LEAVES)) == leaves


@pytest.mark.parametrize("forward", FORWARD)
def test_sums_that_check_vma_adds(forward: str, hidden: str) -> None:
    """They are in the turns as they are written."""
    program = functools.partial(gradient, FORWARD[forward])
    by_lax = run(program, check_vma=True)
    with pc.override_lax():
        got = run(program, check_vma=True)
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)
    whole = forward in ("by_layer", "narrow")  # converted behind the sum, in its turn
    assert served() == ({"psum"} if whole else {"psum_scatter", "all_gather"})


@pytest.mark.usefixtures("hidden")
def test_a_turn_stacks_its_sum_and_what_it_makes_of_it() -> None:
    """Such a sum is needed whole in its turn."""

    def turn(x: jax.Array, w: Arrays) -> Any:
        y = layer(x, w)
        total = lax.psum(x.T @ y, "x")
        return y, (total, total.T, total.astype(jnp.bfloat16))

    program = functools.partial(lax.scan, turn)
    by_lax = run(program)
    with pc.override_lax():
        got = run(program)
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)


@pytest.mark.usefixtures("hidden")
def test_overridden_reaches_them_too() -> None:
    by_lax = run(functools.partial(behind, FORWARD["remat"]))
    pc.reset_counts()
    got = run(pc.overridden(functools.partial(behind, FORWARD["remat"])))
    jax.tree.map(np.testing.assert_array_equal, got, by_lax)
    assert {op for op, *_ in pc.counts()} == {"reduce_scatter", "all_gather"}


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("options", [{"ahead": False}, {"everything": True}, {"keep": ["psum"]}])
def test_options_that_leave_sums_where_they_are(options: dict[str, Any]) -> None:
    with pc.override_lax(**options):
        run(functools.partial(behind, FORWARD["remat"]))
    assert served() <= {"psum"}


def psums(loop: Loop) -> list[tuple[int, int, bool]]:
    """How many arrays each psum adds, how many products are before it, and whether more follow."""
    products, found = 0, []
    for step in loop.steps:
        products += step.is_product
        if step.totals:
            found.append((len(step.writes), products, step.sums))
    return found


def body(program: Any, weights: Any) -> Loop:
    """What a program does in `jax.shard_map`."""
    mapped = jax.shard_map(
        program, mesh=harness.mesh(2), in_specs=(P("x"), P()), out_specs=P(), check_vma=False
    )
    with pc.override_lax():
        traced = jax.make_jaxpr(mapped)(jnp.ones((4, SIDE)), weights)
    return Loop.once(core.ClosedJaxpr(traced.eqns[0].params["jaxpr"], ()))


@pytest.mark.parametrize(
    "seconds, apart",
    [((0.6, 0.5), [8, 10, 13, 15, 18]), ((9.0, 4.5), [8, 10, 13]), ((0.1, 99.0), []), (None, [])],
)
def test_each_array_has_a_sum_where_it_is_made(
    seconds: Any, apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as products hide half of it; of six arrays that 20 products have made."""
    fake(0.0, monkeypatch)
    monkeypatch.setattr(gradient_sums, "_times", lambda _: seconds)
    layers = [{"up": jnp.ones((SIDE, SIDE)), "down": jnp.ones((SIDE, SIDE))}] * DEPTH
    loop = body(functools.partial(behind, by_layer), layers)
    assert psums(loop) == [(6, 20, False)]
    early = [(1, products, True) for products in apart]
    assert psums(gradient_sums.placed(loop)) == [*early, (6 - len(apart), 20, False)]


def lowered(program: Any, topology: str, side: int = 4096, rows: int = 16384) -> Any:
    """The program for TPUs, of bfloat16, under `override_lax`."""
    devices = 8 if topology.startswith("tpu7x") else 4  # 7x has two devices a chip
    mesh = harness.tpu_mesh(topology, {"x": devices})
    x = jax.ShapeDtypeStruct((rows, side), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((4, side, side), jnp.bfloat16)
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=False
    )
    with pc.override_lax():
        return jax.jit(mapped).lower(x, {"up": stack, "down": stack})


@pytest.mark.full
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_products_run_beside_sums(topology: str) -> None:
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(functools.partial(behind, FORWARD["remat"]), topology).compile().as_text()
    (backward,) = (e for e in schedule.events(text) if is_loop_with(e, "reduce_scatter"))
    beside = meanwhile(backward, "reduce_scatter")
    assert len(beside) == 2 and min(beside) > 200_000


@pytest.mark.full
def test_xla_runs_its_own_sums_beside_products_on_7x() -> None:
    pytest.importorskip("libtpu", minversion=BARRIERS_SINCE)
    text = lowered(functools.partial(behind, FORWARD["remat"]), "tpu7x:2x2x1").compile().as_text()
    (backward,) = (e for e in schedule.events(text) if is_loop_with(e, "all_reduce"))
    assert min(meanwhile(backward, "all_reduce")) > 200_000


@pytest.mark.parametrize(
    "topology, side, rows",
    [
        ("v5e:2x2", 4096, 16384),
        ("v6e:2x2", 4096, 64),
        ("v5p:2x2x1", 1024, 4096),  # a SparseCore would take half as long again as the core
    ],
)
def test_sums_stay_behind_where_products_hide_none(topology: str, side: int, rows: int) -> None:
    pytest.importorskip("libtpu")
    lowered(functools.partial(behind, FORWARD["remat"]), topology, side, rows)
    report = pc.override_report()
    assert {(x.op, x.nbytes) for x in (*report.replaced, *report.left)} == {
        ("psum", 2 * 4 * side * side * 2)
    }


def test_sums_between_slices_stay_behind() -> None:
    """They take longer than a ring's, and no SparseCore runs them."""
    pytest.importorskip("libtpu")
    with pc.across_slices("x"):
        lowered(functools.partial(behind, FORWARD["remat"]), "v5p:2x2x1")
    report = pc.override_report()
    assert [x.op for x in (*report.replaced, *report.left)] == ["psum"]
