"""The order of a turn whose products wait for exchanges: what stands beside what."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import topologies
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from benchmarks.steps import schedule
from pallas_collectives.lowering import collective_times, order, questions, turns
from pallas_collectives.lowering.loops import Loop
from pallas_collectives.lowering.order import Call

SMALL, LARGE = 1 << 10, 1 << 20  # elements


@dataclasses.dataclass(eq=False)
class Fake:
    """A step of a turn: so many seconds of products, by the model, and one result."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    takes: float = 0.0
    size: int = SMALL
    eqn: Any = True
    awaited: bool = False
    is_opaque: bool = False
    keeps_order: bool = False
    how: None = None
    sums: bool = False

    @property
    def types(self) -> dict[int, Any]:
        of = {0: SMALL} | dict.fromkeys(self.writes, self.size)
        return {number: jax.ShapeDtypeStruct((n,), jnp.float32) for number, n in of.items()}

    def seconds(self, chip: Any) -> float:
        del chip
        return self.takes * turns.COUNTED


def best(steps: list[Any], tokens: dict[Any, Call], weights: dict[Any, Call] | None = None) -> Any:
    any_chip: Any = None
    return order.best(steps, tokens, weights or {}, any_chip)


def halves() -> tuple[list[Any], dict[Any, Call]]:
    """Two halves, each a norm, a product, an exchange, a product, and an exchange.

    Products take 10 seconds, exchanges 5 on the core and 8 on a SparseCore.
    """
    steps: list[Any] = []
    for first in (1, 101):
        steps += [
            Fake((0,), (first,)),
            Fake((first,), (first + 1,), 10.0),
            Fake((first + 1,), (first + 2,)),
            Fake((first + 2,), (first + 3,), 10.0),
            Fake((first + 3,), (first + 4,)),
        ]
    return steps, {steps[place]: Call(5.0, 8.0) for place in (2, 4, 7, 9)}


def test_each_half_computes_while_the_other_exchanges() -> None:
    found = best(*halves())
    order_of = [step.writes[0] for step in found.steps if step.eqn is not None]
    assert order_of == [1, 101, 2, 3, 102, 103, 4, 5, 104, 105]
    assert sorted(step.writes[0] for step in found.away) == [3, 5, 103]
    assert found.seconds == 40 + 5, "the last has nothing beside it, and is on the core"


def test_barriers_hold_the_order() -> None:
    """Each exchange is under way until a product is done that was started behind it."""
    found = best(*halves())
    for call in found.away:
        behind = found.steps[found.steps.index(call) + 1 :]
        ends = next(k for k, s in enumerate(behind) if {*call.writes} & {*s.reads})
        assert behind[ends].eqn is None, "a barrier, before anything reads it"
        assert any(step.takes for step in behind[:ends])


def test_each_exchange_starts_in_front_of_the_product_beside_it() -> None:
    """A barrier joins its operand with that product's; only then does XLA start it in time."""
    found = best(*halves())
    for call in found.away:
        place = found.steps.index(call)
        after = next(s for s in found.steps[place:] if s.eqn is not None and s.takes)
        joined = [{*s.reads} for s in found.steps[:place] if s.eqn is None]
        assert any({call.reads[0], after.reads[0]} <= numbers for numbers in joined)


def test_the_core_exchanges_nothing_while_a_sparsecore_does() -> None:
    """They would share the links: the core waits for what is under way."""
    steps, calls = halves()
    here = steps[9]
    found = best(steps, calls | {here: Call(1.0, 80.0)})
    place = found.steps.index(here)
    ended = {n for s in found.steps[:place] if s.eqn is None for n in s.reads}
    begun = [s for s in found.steps[:place] if s in found.away]
    assert here not in found.away and len(begun) > 1
    assert all({*s.writes} <= ended for s in begun)


def test_what_is_needed_first_goes_first() -> None:
    """Two weights: the one that an earlier product reads comes before the other."""
    later, sooner = Fake((0,), (50,)), Fake((0,), (51,))
    steps, calls = halves()
    steps[3].reads = (3, 51)  # A's second product
    steps = [later, sooner, *steps, Fake((105, 50), (52,), 10.0)]
    found = best(steps, calls, {step: Call(math.inf, 4.0) for step in (later, sooner)})
    assert found.steps.index(sooner) < found.steps.index(later)


def test_what_waits_for_nothing_else_stays_as_it_is() -> None:
    steps, calls = halves()
    alone = steps[:5]
    assert best(alone, {s: c for s, c in calls.items() if s in alone}) is None


def test_the_core_waits_where_the_next_exchange_then_has_a_product_beside_it() -> None:
    """Products of 10 and 10 seconds beside exchanges of 12 and 8, which follow one another."""
    steps: list[Any] = [
        Fake((), (1,), 10.0),
        first := Fake((1,), (2,)),
        second := Fake((2,), (3,)),
        Fake((3,), (4,), 10.0),
        Fake((0,), (10,)),
        Fake((10,), (11,), 10.0),
        Fake((11,), (12,), 10.0),
    ]
    found = best(steps, {first: Call(12, 12), second: Call(8, 8)})
    assert found.seconds == 10 + 12 + 10 + 10


def test_what_is_larger_than_exchanges_is_in_no_barrier() -> None:
    """XLA would have to keep it: scores of attention, which it computes piece by piece."""
    steps, calls = halves()
    scores = steps[6]
    scores.size = LARGE
    steps.insert(7, Fake(scores.writes, (106,), 10.0))
    steps[8].reads = (106,)
    found = best(steps, calls)
    held = {n for step in found.steps if step.eqn is None for n in step.reads}
    assert held and scores.writes[0] not in held


def test_weights_are_brought_by_the_sparsecore_alone() -> None:
    steps, calls = halves()
    weight = Fake((0,), (50,))
    steps = [weight, *steps, Fake((50, 105), (51,), 10.0)]
    found = best(steps, calls, {weight: Call(math.inf, 9.0)})
    assert weight in found.away and found.seconds == 50 + 5


def test_wires_are_for_what_stays_on_the_core_if_the_turn_is_shorter_so() -> None:
    """By a twentieth at least; else the order is that without wires, and says who had one."""
    steps, calls = halves()
    plain = best(steps, calls)
    narrow = {s: call._replace(wired=call.here / 2) for s, call in calls.items()}
    wired = best(steps, narrow)
    assert wired.seconds < 0.95 * plain.seconds and not wired.unwired
    same = {s: call._replace(wired=0.99 * call.here) for s, call in calls.items()}
    kept = best(steps, same)
    assert (kept.seconds, kept.away) == (plain.seconds, plain.away)
    assert kept.unwired == calls.keys() - plain.away


@pytest.mark.parametrize("kind", ["is_opaque", "keeps_order"])
def test_a_turn_with_kernels_or_effects_in_an_order_stays_as_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels take is not known; and an effect may not pass what stands before it."""
    steps, calls = halves()
    for step in calls:
        step.awaited = True
    monkeypatch.setattr(collective_times, "on_either", lambda step, chip: calls[step])
    turn = Loop({"length": 1}, steps, (), (), (), [])
    assert turn.in_order() is not None
    setattr(steps[0], kind, True)
    assert turn.in_order() is None


def test_what_must_go_packed_is_in_no_order() -> None:
    """A SparseCore packs nothing; a wire of `override_lax` may be left out."""
    x, w = jnp.ones((2, 16, 128)), {k: jnp.ones((128, 256)) for k in SPECS[1]}

    def awaited(layer: Any = layer, **how: Any) -> int:
        mapped = jax.shard_map(
            layer, mesh=harness.mesh(2), in_specs=SPECS, out_specs=SPECS[0], check_vma=False
        )
        with pc.override_lax(**how):
            closed = jax.make_jaxpr(mapped)(x, w)
        body = core.ClosedJaxpr(closed.jaxpr.eqns[0].params["jaxpr"], ())
        flat = turns.Flat.of(body)
        flat.add(body, flat.numbers(len(body.jaxpr.invars)))
        return sum(step.awaited for step in flat.steps)

    assert awaited() == 4
    assert awaited(wire={"all_gather": "int8"}) == 4
    narrow = functools.partial(pc.all_gather, wire="int8")
    assert awaited(functools.partial(layer, gather=narrow)) == 2


@st.composite
def turns_of_any_kind(draw: Any) -> tuple[list[Any], dict[Any, Call]]:
    steps: list[Any] = []
    calls = {}
    for number in range(1, draw(st.integers(1, 12))):
        reads = draw(st.sets(st.integers(0, number - 1), max_size=3))
        kind = draw(st.sampled_from(["light", "product", "exchange"]))
        reads = reads if kind != "exchange" else {*sorted(reads)[:1]} or {0}
        takes = draw(st.integers(1, 20)) if kind == "product" else 0
        size = draw(st.sampled_from([SMALL, LARGE]))
        steps.append(Fake(tuple(sorted(reads)), (number,), float(takes), size))
        if kind == "exchange":
            calls[steps[-1]] = Call(draw(st.integers(1, 20)), draw(st.integers(1, 20)))
    return steps, calls


@given(turns_of_any_kind())
@settings(max_examples=200, deadline=None)
def test_every_step_runs_once_behind_what_it_needs(turn: Any) -> None:
    steps, calls = turn
    found = best(steps, calls) if calls else None
    on_core = sum(step.takes for step in steps) + sum(call.here for call in calls.values())
    if found is None:
        return
    assert sum(step.takes for step in steps) <= found.seconds < on_core
    there, ran_once = {0}, []
    for step in found.steps:
        assert {*step.reads} <= there
        if step.eqn is not None:
            ran_once.append(step)
            there |= {*step.writes}
    assert sorted(map(id, ran_once)) == sorted(map(id, steps))


def layer(x: jax.Array, w: dict[str, jax.Array], gather: Any = None) -> jax.Array:
    """Tokens are cut over devices between two pairs of products."""
    for up, down in (("q", "o"), ("up", "down")):
        seen = (gather or lax.all_gather)(x / 2, "x", axis=1, tiled=True)
        y = jnp.tanh(seen @ w[up]) @ w[down]
        x = x + lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True)
    return x


def gradient(form: str) -> Any:
    """The gradient of two layers of two halves, in a scan or not."""
    halved = jax.checkpoint(pc.two_batch_overlap(layer))

    def loss(x: jax.Array, weights: Any) -> jax.Array:
        if form == "scan":
            x = lax.scan(lambda x, w: (halved(x, w), None), x, weights)[0]
        elif form == "one turn":
            all_at_once = jax.tree.map(lambda w: w[None], weights)
            x = lax.scan(lambda x, w: (unrolled(x, w), None), x, all_at_once)[0]
        else:
            x = unrolled(x, weights)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def unrolled(x: jax.Array, weights: Any) -> jax.Array:
        for row in range(2):
            x = halved(x, jax.tree.map(lambda w, row=row: w[row], weights))
        return x

    return jax.grad(loss, (0, 1))


SPECS = P(None, "x"), dict.fromkeys(("q", "o", "up", "down"), P(None, "x"))


@pytest.mark.parametrize(
    "form, wire", [("scan", None), ("one turn", None), ("unrolled", None), ("scan", "int8")]
)
def test_values_are_the_same_in_another_order(
    form: str, wire: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a turn is as short without its wires: they are left out then."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 16, 128), np.float32)
    weights = {k: 0.1 * rng.standard_normal((2, 256, 128), np.float32) for k in SPECS[1]}
    mapped = jax.shard_map(
        gradient(form), mesh=harness.mesh(2), in_specs=SPECS, out_specs=SPECS, check_vma=False
    )
    want = jax.jit(mapped)(x, weights)
    found = harness.results_of(order, "best", monkeypatch)
    monkeypatch.setattr(questions, "seconds", lambda e, _: float(e.primitive.name == "dot_general"))
    monkeypatch.setattr(collective_times, "on_either", lambda step, chip: (2.0, 2.5, wire and 1.99))
    jax.clear_caches()
    over = wire and dict.fromkeys(("all_gather", "psum_scatter"), wire)
    with pc.override_lax(wire=over, wire_backward=over):
        got = jax.jit(mapped)(x, weights)
    left_out = {line.why for line in pc.override_report().wires}
    assert any("as short without" in why for why in left_out) == bool(wire), left_out
    jax.clear_caches()
    once = 1 if form == "unrolled" else 2  # forward and backward
    assert sum(bool(t) for t in found) == once, "a turn is put in order once"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        off = 0.02 * np.abs(b).max() if wire else 1e-3  # what is away is narrow, in simulation
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=off)


@pytest.mark.full
@pytest.mark.parametrize(
    "topology", ["v6e:2x2", pytest.param("tpu7x:2x2x1", marks=pytest.mark.full)]
)
def test_products_stand_beside_what_a_sparsecore_brings(topology: str) -> None:
    """In the program as it is compiled, between each call's start and its end; on 7x, lax's."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices), ("x",))
    rows, width = 1024 * mesh.size, 2048 * mesh.size
    shapes = (2, rows, 2048), dict.fromkeys(SPECS[1], (2, width, 2048))
    args = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        ),
        shapes,
        SPECS,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )

    def forward(x: jax.Array, weights: Any) -> jax.Array:
        return lax.scan(lambda x, w: (pc.two_batch_overlap(layer)(x, w), None), x, weights)[0]

    mapped = jax.shard_map(forward, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0], check_vma=False)
    by_xla = topology.startswith("tpu7x")  # whose calls are in order beside those with a wire
    wire = dict.fromkeys(("all_gather", "psum_scatter"), "int8") if by_xla else None
    with pc.override_lax(wire=wire):
        text = jax.jit(mapped).lower(*args).compile().as_text()
    (turn,) = [e for e in schedule.events(text, lambda *_: 0) if isinstance(e, schedule.Loop)]
    starts = [e for e in turn.events if isinstance(e, schedule.Start)]
    away = [start for start in starts if start.collective.engine == schedule.SPARSECORE]
    beside = []
    for start in away:
        there = turn.events[turn.events.index(start) : turn.events.index(schedule.Done(start.key))]
        beside.append(sum(e.cycles for e in there if isinstance(e, schedule.StepWork)))
    assert len(starts) == 8 and len(away) >= (2 if by_xla else 6)
    assert sum(cycles > 100_000 for cycles in beside) >= len(away) // 2 + 1, beside
    assert all((start.collective.kernel == "") == by_xla for start in away)
