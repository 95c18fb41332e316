"""Collectives in two halves over a wire: the bits of the whole call; and what moves on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from in_halves import EVERY, FORMS, N, on_devices, split
from jaxprs import primitives_in
from pallas_collectives.errors import CollectiveError, DtypeError, WireError

WIRES = [
    "int8",
    "float8_e4m3fn",
    pc.Wire("int8", group="row"),
    pc.Wire("float8_e5m2", group=256, scales="power of two"),
]
# Blocks of a stacked result lie along a new dimension, which the whole call groups them by.
MOVED = [form for form in FORMS if not form.endswith("stacked") and "order" not in form]


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype))


def whole(form: str, x: jax.Array, **options: Any) -> jax.Array:
    name, args, kwargs = EVERY[form](x, **options)
    return getattr(pc, name)(*args, **kwargs)


@pytest.mark.parametrize(
    "form, wire, dtype",
    [(form, "int8", "float32") for form in MOVED]
    + [(form, wire, "bfloat16") for form in ("all_gather", "psum") for wire in WIRES[1:]],
)
def test_the_bits_are_those_of_the_whole_call(by_nccl, fresh_counts, form, wire, dtype):
    x = numbers((N, 2 * N, 96 * N), dtype)
    got = on_devices(lambda x: split(form, x, wire=wire)[0], x)
    assert {algorithm for _, _, algorithm in pc.counts()} == {"copies"}
    assert all(taken for (_, taken, _) in pc.wire_counts())
    want = on_devices(functools.partial(whole, form, wire=wire), x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", ["all_gather stacked", "all_to_all stacked", "pswapaxes"])
def test_stacked_results_are_within_half_a_step(by_nccl, form):
    x = numbers((N, N, 128, 128), "float32")
    got = on_devices(lambda x: split(form, x, wire="int8")[0], x)
    want = on_devices(functools.partial(whole, form), x)
    assert not np.array_equal(got, want)
    np.testing.assert_allclose(got, want, atol=np.abs(x).max() / 254 * 1.001)


def test_bfloat16_needs_no_scales(by_nccl):
    x = numbers((N, 2 * N, 96 * N), "float32")
    for form in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute"):
        got = on_devices(lambda x, f=form: split(f, x, wire="bfloat16")[0], x)
        want = on_devices(functools.partial(whole, form), x)
        assert not np.array_equal(got, want)
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("form", MOVED)
def test_batched_bits_are_those_of_the_whole_call(by_nccl, form):
    x = numbers((N, 2 * N, 96 * N, 3), "float32")
    batched = functools.partial(jax.vmap, in_axes=2, out_axes=-1)
    got = on_devices(batched(lambda x: split(form, x, wire="int8")[0]), x)
    want = on_devices(batched(functools.partial(whole, form, wire="int8")), x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "wrap, check_vma",
    [
        pytest.param(lambda f: f, True, id="plain"),
        pytest.param(jax.checkpoint, False, id="checkpoint", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("form", [*MOVED, "all_gather stacked"])
def test_derivatives_pass_straight_through(by_nccl, form, wrap, check_vma):
    """In full precision, of a loss that is linear in the result."""
    x = numbers((N, 2 * N, 96 * N), "float32")

    def derived(x: jax.Array, **options: Any) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            y = split(form, x, **options)[0]
            places = jnp.arange(y.size) + jax.lax.axis_index("x")  # no constant
            return jnp.sum(y * jnp.sin(places).reshape(y.shape))

        return jax.grad(wrap(loss))(x)

    run = functools.partial(harness.per_device, on=harness.mesh(N), check_vma=check_vma)
    got, want = run(functools.partial(derived, wire="int8"))(x), run(derived)(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    tangents = run(lambda x: jax.jvp(lambda x: split(form, x, wire="int8")[0], (x,), (x,))[1])(x)
    np.testing.assert_allclose(tangents, run(lambda x: split(form, x)[0])(x), rtol=1e-6)


def test_what_may_be_left_out_is_and_is_counted(by_nccl, fresh_counts):
    x = numbers((N, 2 * N, 96 * N), "float32")
    got = on_devices(lambda x: split("all_gather", x, wire="auto")[0], x)
    np.testing.assert_array_equal(got, on_devices(lambda x: split("all_gather", x)[0], x))
    ((_, wire, why),) = pc.wire_counts()
    assert wire == "" and "copy engines" in why


def test_what_flights_do_not_do_is_the_whole_call_where_it_starts(by_nccl, fresh_counts):
    x = numbers((N, 2 * N, 96 * N), "float32")
    drawn = pc.Wire("int8", rounding="stochastic", key=jax.random.key(0))
    options: list[tuple[str, dict[str, Any]]] = [
        ("psum", {"wire": pc.Wire("int8", group="row"), "order": "rank"}),
        ("psum", {"wire": drawn}),
        ("all_gather", {"wire": "int8", "wire_backward": "int8"}),
    ]
    for form, asked in options:
        got = on_devices(lambda x, f=form, o=asked: split(f, x, **o)[0], x)
        want = on_devices(functools.partial(whole, form, **asked), x)
        np.testing.assert_array_equal(got, want)
    assert "copies" not in {algorithm for _, _, algorithm in pc.counts()}


@pytest.mark.parametrize(
    "error, rule, form, options",
    [
        (DtypeError, "float32, bfloat16 and float16 only", "psum", {"wire": "int8"}),
        (WireError, "in place of", "all_gather", {"wire": "int8"}),
        (WireError, "in place of", "psum", {"wire": "int8"}),
        (WireError, "int3", "psum_scatter", {"wire": "int3"}),
        (CollectiveError, "widens", "psum", {"wire": "int8", "precise": True}),
    ],
)
def test_bad_input_is_refused_as_by_the_whole_call(by_nccl, error, rule, form, options):
    rows = 3 if form == "psum" else 4 * N
    x = np.ones((N, rows, 1), "int32" if error is DtypeError else "float32")
    for call in (lambda x: split(form, x, **options)[0], lambda x: whole(form, x, **options)):
        with pytest.raises(error, match=rule):
            on_devices(call, x)


@pytest.mark.full
def test_gradients_of_batches_within_checkpoints_and_scans(by_nccl):
    """A batch that is traced once before it is differentiated."""
    x = numbers((N, 2 * N, 96 * N, 3), "float32")
    for form in ("all_gather", "psum", "psum_scatter", "ppermute"):
        batched = jax.vmap(lambda x, f=form: split(f, x, wire="int8")[0], in_axes=2, out_axes=-1)
        exact = jax.vmap(lambda x, f=form: split(f, x)[0], in_axes=2, out_axes=-1)

        def derived(fn: Any, x: jax.Array) -> jax.Array:
            def turn(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                return carry, jnp.sum(jnp.sin(jax.checkpoint(fn)(carry)))

            return jax.grad(lambda x: jnp.sum(jax.lax.scan(turn, x, length=2)[1]))(x)

        got, want = (on_devices(functools.partial(derived, fn), x) for fn in (batched, exact))
        np.testing.assert_allclose(got, want, atol=0.1 * np.abs(want).max())


def test_what_comes_after_has_no_part_in_derivatives(by_nccl):
    """In forward mode, of what the end waits for alone, nothing is under way that no start sent."""
    w = numbers((N, 8, 128), "float32")

    def tangent(w: jax.Array) -> jax.Array:
        def fn(h: jax.Array) -> jax.Array:
            started = pc.all_gather_start(w, "x", tiled=True, wire="int8")
            return jnp.sum(started.done(after=h)) * h

        return jax.jvp(fn, (w[0, 0],), (w[0, 0],))[1]

    on = {"mesh": harness.mesh(N), "in_specs": P("x"), "out_specs": P("x")}
    mapped = jax.shard_map(lambda w: tangent(w)[None], check_vma=False, **on)
    names = primitives_in(jax.make_jaxpr(mapped)(w.reshape(-1, 128)).jaxpr)
    assert names["nccl_done"] == names["nccl_start"] == 1


def test_small_arrays_of_a_tree_are_added_as_they_are(by_nccl, fresh_counts):
    """The whole call adds them as one, where they need no wire of their own."""
    x = numbers((N, 2 * N, 96 * N), "float32")
    tree = lambda x: {"b": x[0, :3], "w": x}  # noqa: E731
    got = on_devices(lambda x: pc.psum_start(tree(x), "x", wire="int8").done()["b"], x)
    np.testing.assert_allclose(got, on_devices(lambda x: jax.lax.psum(x[0, :3], "x"), x), rtol=1e-6)
    assert {wire for _, wire, _ in pc.wire_counts()} == {"", "int8"}


def test_one_device_alone_sends_nothing(by_nccl):
    x = numbers((1, 8, 256), "float32")
    for form in ("all_gather", "psum"):
        alone = functools.partial(harness.per_device, on=harness.mesh(1))
        np.testing.assert_array_equal(alone(lambda x, f=form: split(f, x, wire="int8")[0])(x), x)


# --- on TPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiled_what_is_packed_moves_beside_products(generation, fresh_counts):
    """By lax or a SparseCore; on v4, where nothing does, a kernel packs on the core."""
    pytest.importorskip("libtpu")

    def program(x: jax.Array) -> jax.Array:
        started = pc.all_gather_start(x, "x", tiled=True, wire="int8")
        w = jnp.ones((1024, 1024), x.dtype)
        between = jnp.tanh(jnp.tanh(x[:1024] @ w) @ w)
        return started.done(after=between)[:1024] + between

    topology = harness.GENERATIONS[generation]
    text = harness.compile_for_tpu(program, topology, (4096, 1024), sizes=(4, 2)).text
    assert [wire for _, wire, _ in pc.wire_counts()] == ["int8"]
    ((_, backend, algorithm),) = pc.counts()
    assert ("wire_pack" in text) == ("wire_unpack" in text) == (generation != "v4")
    on_sparsecore = "call-start" in text and 'async_execution_thread="sparsecore"' in text
    if generation in ("v5e", "7x"):
        assert backend == "xla" and "all-gather" in text
    elif generation == "v4":
        assert backend == "pallas" and not algorithm.endswith(":sc")
    else:
        assert algorithm.endswith(":sc") and on_sparsecore


def test_explain_lays_out_steps_in_their_order():
    row = pc.Wire("int8", group="row")
    said = pc.explain("psum_start", shape=(4096, 1024), devices=8, chip="v5e", wire=row)
    assert [step.op for step in said.inside] == ["all_to_all", "all_gather"]
    exchange, gather = (step.nbytes for step in said.inside)
    assert gather == exchange // 8 > 0


@pytest.mark.parametrize(
    "op, chip, way",
    [
        ("all_gather_start", "v6e", "passes"),
        ("all_gather_start", "v5e", "passes"),
        ("all_gather_start", "v4", "bidirectional"),
        ("psum_start", "v5p", "ring"),
        ("all_gather", "v6e", "line"),
    ],
)
def test_explain_says_what_packs_and_who_moves_it(op, chip, way):
    said = pc.explain(op, shape=(4096, 1024), dtype="bfloat16", devices=8, chip=chip, wire="int8")
    assert (said.wire.way or "passes") == way
    if way == "passes":
        (moved,) = said.inside
        assert "beside compute" in moved.why
        assert "the core would stop for it" in str(said)
