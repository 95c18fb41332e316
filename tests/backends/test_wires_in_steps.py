"""Where a step sends over the wires that `override_lax` was given, and where it is better without.

What runs beside products as it is needs no fewer bytes; what stops the core does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.lowering import collective_times, order

NARROW = {"all_gather": "int8", "psum_scatter": "int8"}
WIDTH, LAYERS, DTYPE = 4096, 3, "bfloat16"
DEVICES = 16


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weights and tokens are gathered, tokens scattered."""
    whole = lax.all_gather(w, "x", tiled=True)
    seen = lax.all_gather(2 * x, "x", tiled=True)
    return x + lax.psum_scatter(seen @ whole, "x", tiled=True)


def built(topology: str, rows: int, *, gradient: bool = False, **wires: Any) -> dict[str, set[str]]:
    """Why wires are left out, by function; "" where they are taken. A scan of layers, for TPUs.

    Products stay out of kernels, which have no wires (`tests/lowering/test_fusing.py`).
    """
    pytest.importorskip("libtpu")
    devices = len(harness._topology(topology).devices)
    on = harness.tpu_mesh(topology, {"x": devices})

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    specs = P("x"), P(None, "x")
    run, out = (jax.grad(loss, (0, 1)), specs) if gradient else (loss, P())
    mapped = jax.shard_map(run, mesh=on, in_specs=specs, out_specs=out, check_vma=False)
    shapes = (devices * rows, WIDTH), (LAYERS, WIDTH, WIDTH)
    args = [
        jax.ShapeDtypeStruct(shape, DTYPE, sharding=jax.NamedSharding(on, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with pc.override_lax(fuse=False, **wires):
        jax.jit(mapped).lower(*args)
    found: dict[str, set[str]] = {}
    for line in pc.override_report().wires:
        found.setdefault(line.op, set()).add(line.why)
    return found


SPARSECORE = "a SparseCore runs it beside products"


@pytest.mark.full
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
    found = harness.results_of(order, "best", monkeypatch)
    monkeypatch.setitem(globals(), "layer", pc.two_batch_overlap(layer))
    seen = built("v6e:4x4", 2048, wire=NARROW)
    (timetable,) = filter(None, found)
    tokens = [step for step in timetable.steps if step.awaited]
    away = [step for step in tokens if step in timetable.away]
    assert away and len(away) < len(tokens)
    assert {"", SPARSECORE} <= seen["all_gather"] | seen["psum_scatter"]


@pytest.mark.full
def test_what_a_wire_takes_is_what_its_ways_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a turn's model: on the core, on a SparseCore, and over the wire."""
    told = harness.results_of(collective_times, "on_either", monkeypatch)
    built("v6e:4x4", 512)
    built("v6e:4x4", 512, wire=NARROW)
    plain, narrow = told[:2], told[2:]
    assert [times[:2] for times in plain] == [times[:2] for times in narrow]
    assert all(times[2] is None for times in plain)
    assert all(0.5 < times[2] / times[0] < 0.65 for times in narrow)


@pytest.mark.parametrize(
    "topology, dtype, wire",
    [
        ("v5e:4x4", "bfloat16", "bfloat16"),
        pytest.param("v5e:4x4", "int32", "int8", marks=pytest.mark.full),
        pytest.param("tpu7x:2x2x1", "bfloat16", "bfloat16", marks=pytest.mark.full),
        pytest.param("v4:2x2x1", "bfloat16", "bfloat16", marks=pytest.mark.full),
        pytest.param("v6e:4x4", "int32", "int8", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("rows", [16, 512])
def test_a_wire_that_cannot_serve_changes_nothing(
    topology: str, dtype: str, wire: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lax keeps what it would without one."""
    monkeypatch.setattr("test_wires_in_steps.DTYPE", dtype)

    def report(**wires: Any) -> pc.OverrideReport:
        built(topology, rows, **wires)
        return pc.override_report()

    over, plain = report(wire=dict.fromkeys(NARROW, wire)), report()
    assert (over.replaced, over.left) == (plain.replaced, plain.left)
    assert over.wires and all(line.why for line in over.wires)


def test_a_turns_order_knows_that_a_cast_is_on_either_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float32 over bfloat16 takes what bfloat16 does, there and here."""
    told = harness.results_of(collective_times, "on_either", monkeypatch)
    built("v6e:4x4", 512)
    monkeypatch.setattr("test_wires_in_steps.DTYPE", "float32")
    built("v6e:4x4", 512, wire=dict.fromkeys(NARROW, "bfloat16"))
    assert len(told) == 4 and told[:2] == told[2:]


def test_nothing_is_sent_to_one_device_and_nothing_left_out() -> None:
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh("v5e:4x4", {"a": DEVICES, "b": 1})
    gather = jax.shard_map(
        lambda w: lax.all_gather(w, "b", tiled=True),
        mesh=on,
        in_specs=P("a"),
        out_specs=P("a"),
        check_vma=False,
    )
    sharding = jax.NamedSharding(on, P("a"))
    with pc.override_lax(wire=NARROW):
        jax.jit(gather).lower(jax.ShapeDtypeStruct((8192, WIDTH), "bfloat16", sharding=sharding))
    assert pc.override_report().wires == ()


def test_sizes_that_are_symbols_go_without_a_wire() -> None:
    on = harness.mesh(2)
    (rows,) = export.symbolic_shape("a")
    mapped = jax.shard_map(
        lambda x: lax.all_gather(x, "x", tiled=True),
        mesh=on,
        in_specs=P("x"),
        out_specs=P(),
        check_vma=False,
    )
    sharding = jax.NamedSharding(on, P("x"))
    x = jax.ShapeDtypeStruct((2 * rows, 256), "float32", sharding=sharding)
    with pc.override_lax(wire=NARROW):
        export.export(jax.jit(mapped))(x)
    (line,) = pc.override_report().wires
    assert "symbols" in line.why


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
