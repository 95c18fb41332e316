"""Where a step sends over the wires that `override_lax` was given, and where it is better without.

What runs beside products as it is needs no fewer bytes; what stops the core does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.lowering import order, turns

NARROW = {"all_gather": "int8", "psum_scatter": "int8"}
WIDTH, DEVICES, LAYERS = 4096, 16, 3


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weights and tokens are gathered, tokens scattered."""
    whole = lax.all_gather(w, "x", tiled=True)
    seen = lax.all_gather(2 * x, "x", tiled=True)
    return x + lax.psum_scatter(seen @ whole, "x", tiled=True)


def built(topology: str, rows: int, *, gradient: bool = False, **wires: Any) -> dict[str, set[str]]:
    """Why wires are left out, by function; "" where they are taken. A scan of layers, for TPUs."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh(topology, {"x": DEVICES})

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    specs = P("x"), P(None, "x")
    run, out = (jax.grad(loss, (0, 1)), specs) if gradient else (loss, P())
    mapped = jax.shard_map(run, mesh=on, in_specs=specs, out_specs=out, check_vma=False)
    shapes = (DEVICES * rows, WIDTH), (LAYERS, WIDTH, WIDTH)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(on, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with pc.override_lax(**wires):
        jax.jit(mapped).lower(*args)
    found: dict[str, set[str]] = {}
    for line in pc.override_report().wires:
        found.setdefault(line.op, set()).add(line.why)
    return found


SPARSECORE = "a SparseCore runs it beside products"


@pytest.mark.parametrize(
    "topology, why",
    [
        ("v6e:4x4", SPARSECORE),
        pytest.param(
            *("v5e:4x4", "XLA runs all_gather beside compute on v5e"), marks=pytest.mark.full
        ),
    ],
)
def test_weights_that_are_hidden_travel_as_they_are(topology: str, why: str) -> None:
    """Products wait for tokens; of weights, if they hide too little."""
    found = built(topology, 512, wire=NARROW)
    taken, left = sorted(found["all_gather"])
    assert taken == "" and left.startswith(why)
    assert found["psum_scatter"] == {""}
    few = built(topology, 16, wire=NARROW)
    assert not any(each.startswith(why) for each in few["all_gather"]) and "" in few["all_gather"]


def test_a_wire_by_name_is_taken_whatever_runs_beside() -> None:
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh("v6e:4x4", {"x": DEVICES})

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ pc.all_gather(w, "x", tiled=True, wire="int8")

    specs = P("x"), P("x")
    mapped = jax.shard_map(step, mesh=on, in_specs=specs, out_specs=P("x"), check_vma=False)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(on, P("x")))
        for shape in ((DEVICES * 4096, WIDTH), (WIDTH, WIDTH))
    ]
    with pc.override_lax():
        jax.jit(mapped).lower(*args)
    (line,) = pc.override_report().wires
    assert (line.op, line.wire, line.why) == ("all_gather", "int8", "")


@pytest.mark.full
def test_derivatives_have_wires_of_their_own() -> None:
    """Named by the call: a scatter's derivative is a gather."""

    def times(**wires: Any) -> int:
        pc.reset_counts()
        built("v6e:4x4", 512, gradient=True, **wires)
        return sum(n for (_, wire, _), n in pc.wire_counts().items() if wire)

    forward, backward, both = (
        times(**wires)
        for wires in (
            {"wire": NARROW},
            {"wire_backward": NARROW},
            {"wire": NARROW, "wire_backward": NARROW},
        )
    )
    assert forward and backward and both == forward + backward


@pytest.mark.full
def test_a_turns_order_says_which_tokens_go_over_their_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is put on a SparseCore travels as it is, and what stays on the core is narrow."""
    found = []

    def noted(*args: Any) -> Any:
        found.append(by_model(*args))
        return found[-1]

    by_model = order.best
    monkeypatch.setattr(order, "best", noted)
    monkeypatch.setitem(globals(), "layer", pc.two_batch_overlap(layer))
    seen = built("v6e:4x4", 2048, wire=NARROW)
    (timetable,) = filter(None, found)
    tokens = [step for step in timetable.steps if step.awaited]
    away = [step for step in tokens if step in timetable.away]
    assert away and len(away) < len(tokens)
    assert {"", SPARSECORE} <= seen["all_gather"] | seen["psum_scatter"]


def test_what_a_wire_takes_is_what_its_ways_say() -> None:
    """In a turn's model the core takes the wire's time, and without one the collective's."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh("v6e:4x4", {"x": DEVICES})
    x = jax.ShapeDtypeStruct((DEVICES * 512, WIDTH), jnp.bfloat16)

    def seconds(**wires: Any) -> tuple[float, float]:
        mapped = jax.shard_map(
            lambda x: lax.all_gather(2 * x, "x", tiled=True) @ jnp.ones((WIDTH, 1), x.dtype),
            mesh=on,
            in_specs=P("x"),
            out_specs=P(),
            check_vma=False,
        )
        told: list[Any] = []
        by_model = turns.on_either

        def noted(step: turns.Step) -> Any:
            told.append(by_model(step))
            return told[-1]

        with pytest.MonkeyPatch.context() as patch, pc.override_lax(**wires):
            patch.setattr(turns, "on_either", noted)
            spec = jax.NamedSharding(on, P("x"))
            jax.jit(mapped).lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec))
        (found,) = told
        return found

    (plain, away), (narrow, away_too) = seconds(), seconds(wire=NARROW)
    assert away == away_too
    assert 0.5 < narrow / plain < 0.65


def test_values_are_within_the_wires_error() -> None:
    """Forward and backward apart, of operands that are large enough for a wire."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1024, 1024), np.float32)
    w = 0.02 * rng.standard_normal((2, 1024, 1024), np.float32)
    specs = P("x"), P(None, "x")

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.sum(jnp.square(y))

    def gradients(**wires: Any) -> Any:
        mapped = jax.shard_map(
            jax.grad(loss, (0, 1)),
            mesh=harness.mesh(2),
            in_specs=specs,
            out_specs=specs,
            check_vma=False,
        )
        jax.clear_caches()
        with pc.override_lax(**wires), pc.use_backend("xla"):
            return jax.tree.map(np.asarray, jax.jit(mapped)(x, w))

    exact = gradients()
    for wires in ({"wire": NARROW}, {"wire_backward": NARROW}):
        for a, b in zip(gradients(**wires), exact, strict=True):
            off = np.abs(a - b).max() / np.abs(b).max()
            assert 0 < off < 0.02, (wires, off)


def test_a_wire_without_scales_is_a_cast_on_any_engine() -> None:
    """float32 as bfloat16: what runs beside products runs so over the wire, too."""
    pytest.importorskip("libtpu")
    for topology, by in (("v6e:4x4", ":sc"), ("v5e:4x4", "lax")):
        on = harness.tpu_mesh(topology, {"x": DEVICES})

        def step(x: jax.Array, w: jax.Array) -> jax.Array:
            return x @ lax.all_gather(w, "x", tiled=True)

        mapped = jax.shard_map(
            step, mesh=on, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False
        )
        sharding = jax.NamedSharding(on, P("x"))
        args = [
            jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=sharding)
            for rows in (DEVICES * 4096, WIDTH)
        ]
        with pc.override_lax(wire={"all_gather": "bfloat16"}):
            jax.jit(mapped).lower(*args)
        report = pc.override_report()
        (line,) = report.wires
        assert (line.wire, line.why) == ("bfloat16", "")
        (served,) = (*report.replaced, *report.left)
        assert by in served.by, str(report)
