"""Dispatch and combine: where tokens go, what comes home, gradients, and what is refused."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import harness
import routings
from pallas_collectives import moe
from pallas_collectives.errors import AlgorithmError, CollectiveError, DtypeError, UnboundAxisError
from pallas_collectives.moe import linear

E, T, D, K = routings.EXPERTS, 5, 12, 3
HOW: dict[str, dict[str, Any]] = {
    "dense": {"backend": "xla", "exchange": "dense"},
    "ragged": {"backend": "xla", "exchange": "ragged"},
    "slots": {"backend": "xla", "exchange": "slots"},
    "kernels": {"backend": "pallas", "exchange": "slots"},
    "ragged kernels": {"backend": "pallas", "exchange": "ragged"},
    "dense kernels": {"backend": "pallas", "exchange": "dense"},
}
# Mesh sizes, axes of the experts, index groups.
LAYOUTS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "2": ((2,), "x", None),
    "4": ((4,), "x", None),
    "8": ((8,), "x", None),
    "2x4": ((2, 4), ("x", "y"), None),
    "4 of 2x4": ((2, 4), "y", None),
    "groups": ((8,), "x", [[5, 1, 2, 7], [0, 6, 3, 4]]),
}


def members(layout: str) -> np.ndarray:
    """The devices of each set that exchanges, by their numbers on the mesh."""
    sizes, axes, groups = LAYOUTS[layout]
    numbers = np.arange(np.prod(sizes))
    if groups is not None:
        return np.array(groups)
    return numbers.reshape(-1, sizes[-1] if axes == "y" else len(numbers))


def values(devices: int, seed: int = 0, tokens: int = T) -> tuple[np.ndarray, ...]:
    """x, weights of choices, weights of experts, and what results are multiplied with."""
    rng = np.random.default_rng(seed)
    shapes = (devices, tokens, D), (devices, tokens, K), (E, D, D), (devices, tokens, D)
    x, weights, w, seeds = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    return x, np.abs(weights) + 0.1, w, seeds


def layer(
    axis: Any, groups: Any, how: dict[str, Any], overflow: str = "share", rows: int | None = None
) -> Callable[..., tuple[jax.Array, moe.TokenPlan]]:
    """Tokens to experts, through them, and home."""

    def call(x: Any, experts: Any, weights: Any, w: Any) -> tuple[jax.Array, moe.TokenPlan]:
        back = {name: value for name, value in how.items() if name != "exchange"}
        visiting, plan = moe.dispatch(
            x, experts, axis, num_experts=E, rows=rows, axis_index_groups=groups, **how
        )
        y = jnp.tanh(jax.lax.ragged_dot(visiting, w, plan.group_sizes, precision="highest"))
        home = moe.combine(
            y, weights, plan, axis, overflow=overflow, axis_index_groups=groups, **back
        )
        return home, plan

    return call


def of_devices(w: np.ndarray, layout: str) -> np.ndarray:
    """(devices, E / n, ...): the experts that each has."""
    sets = members(layout)
    parts = w.reshape(len(sets[0]), -1, *w.shape[1:])
    result = np.zeros((sets.size, *parts.shape[1:]), w.dtype)
    for devices in sets:
        result[devices] = parts
    return result


@functools.cache
def program(layout: str, how: str) -> Callable[..., Any]:
    """Values, and gradients in x, the choices' weights and the experts'."""
    sizes, axis, groups = LAYOUTS[layout]

    def run(x: Any, experts: Any, weights: Any, w: Any, seeds: Any) -> Any:
        def loss(x: Any, weights: Any, w: Any) -> Any:
            home, _ = layer(axis, groups, HOW[how])(x, experts, weights, w)
            return jnp.sum(home * seeds), home

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, w)

    return harness.per_device(run, harness.mesh(*sizes))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_a_dense_layer(layout: str, how: str) -> None:
    sets = members(layout)
    x, weights, w, seeds = values(sets.size)
    for name, routing in routings.skewed(sets.size, T, K).items():
        grads, home = program(layout, how)(x, routing, weights, of_devices(w, layout), seeds)
        for devices in sets:
            given = x[devices], weights[devices], w
            want = dense_gradients(*given, routing[devices], seeds[devices])
            got = home[devices], grads[0][devices], grads[1][devices], whole(grads[2][devices])
            for a, b in zip(got, want, strict=True):
                scale = max(1.0, np.abs(b).max())
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * scale, err_msg=name)


def _nans(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan, dtype)


@pytest.mark.parametrize("how", ["ragged", "slots", "kernels", "ragged kernels"])
def test_nothing_reads_what_no_block_has_brought(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On TPUs that is whatever the memory held; here NaN. Values and gradients have none."""
    monkeypatch.setattr(linear, "unfilled", _nans)
    x, weights, w, seeds = values(4)
    run = program.__wrapped__("4", how)
    for name, routing in routings.skewed(4, T, K).items():
        grads, home = run(x, routing, weights, of_devices(w, "4"), seeds)
        for got in (home, *grads):
            assert not np.isnan(got).any(), name


def whole(parts: np.ndarray) -> np.ndarray:
    """All experts, from each device's."""
    return parts.reshape(E, *parts.shape[2:])


def dense_gradients(x: Any, weights: Any, w: Any, routing: Any, seeds: Any) -> tuple[Any, ...]:
    """Values and gradients of the same by one-hot products, without devices."""

    def loss(x: Any, weights: Any, w: Any) -> Any:
        home = routings.answers(x, routing, weights, w)
        return jnp.sum(home * seeds), home

    grads, home = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, w)
    return home, *grads


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", [K, 7, 20, 400])
def test_what_fits_and_what_does_not(how: str, rows: int) -> None:
    n = 4
    x, weights, w, _ = values(n)
    call = layer("x", None, HOW[how], rows=rows)
    visit = functools.partial(moe.dispatch, axis_name="x", num_experts=E, rows=rows, **HOW[how])

    def run(x: Any, experts: Any, weights: Any, w: Any) -> Any:
        visiting, plan = visit(x, experts)
        home, _ = call(x, experts, weights, w)
        dropping = layer("x", None, HOW[how], "drop", rows)(x, experts, weights, w)[0]
        return visiting, plan.group_sizes, plan.kept, plan.overflow, plan.invalid, home, dropping

    mapped = harness.per_device(run, harness.mesh(n))
    for name, routing in routings.skewed(n, T, K).items():
        want = routings.expected(x, routing, rows)
        *facts, invalid, shared, dropped = mapped(x, routing, weights, of_devices(w, "4"))
        for got, wanted in zip(facts, dataclasses.astuple(want), strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)
        assert not np.any(invalid)
        for got, overflow in ((shared, "share"), (dropped, "drop")):
            counted = routings.weighed(weights, routing, want.kept, overflow)
            np.testing.assert_allclose(
                got, routings.answers(x, routing, counted, w), rtol=1e-6, atol=2e-6, err_msg=name
            )


HOSTILE = {
    "int32": [-2, -(2**31), 2**31 - 1, E, E + 1, 3, -1, 0],
    "int8": [-128, 127, E, -2, 5, 5, -1, 0],
    "uint8": [255, 128, E, E - 1, 5, 5, 200, 0],
}


@pytest.mark.parametrize("dtype", HOSTILE)
@pytest.mark.parametrize("how", ["kernels", "ragged kernels"])
def test_hostile_routings_move_nothing_out_of_bounds(how: str, dtype: str) -> None:
    n, rows = 4, 9
    rng = np.random.default_rng(3)
    routing = rng.choice(np.array(HOSTILE[dtype]), (n, T, K)).astype(dtype)
    x, weights, w, _ = values(n)

    def run(x: Any, experts: Any, weights: Any, w: Any) -> Any:
        home, plan = layer("x", None, HOW[how], rows=rows)(x, experts, weights, w)
        return home, plan.kept, plan.overflow, plan.invalid

    mapped = harness.per_device(run, harness.mesh(n))
    numbers = routing.astype(np.int64)
    want = routings.expected(x, numbers, rows)
    counted = routings.weighed(weights, numbers, want.kept, "share")
    right = routings.answers(x, np.where(want.kept, numbers, -1), counted, w)
    operands = x, routing, weights, of_devices(w, "4")
    for mode in harness.ADVERSARIES:
        with pltpu.force_tpu_interpret_mode(harness.EITHER):
            found = harness.EITHER.under(mode, lambda: jax.tree.map(np.asarray, mapped(*operands)))
        assert not harness.race_reported(), mode
        home, kept, overflow, invalid = found
        np.testing.assert_array_equal(kept, want.kept)
        np.testing.assert_array_equal(overflow, want.overflow)
        np.testing.assert_array_equal(invalid, ((numbers < -1) | (numbers >= E)).sum((1, 2)))
        np.testing.assert_allclose(home, right, rtol=1e-6, atol=2e-6)


def test_answers_to_rows_that_nobody_sent_are_not_read() -> None:
    x, weights, *_ = values(2)
    routing = routings.random(2, T, K)

    def run(x: Any, experts: Any, weights: Any, spoilt: Any) -> Any:
        def loss(x: Any, weights: Any) -> Any:
            rows, plan = moe.dispatch(x, experts, "x", num_experts=E, backend="xla")
            there = jnp.arange(len(rows)) < plan.group_sizes.sum()
            y = jnp.where(there[:, None], rows, spoilt)
            return jnp.sum(moe.combine(y, weights, plan, "x", backend="xla") ** 2)

        return jax.grad(loss, (0, 1))(x, weights)

    mapped = harness.per_device(run, harness.mesh(2))
    clean, spoilt = (
        mapped(x, routing, weights, np.full(2, spoil, np.float32)) for spoil in (0, np.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, clean, spoilt)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_narrow_answers_are_rounded_once_a_device_and_once_at_home(dtype: str) -> None:
    n, k = 2, 4
    x = harness.random((n, T, D), dtype)
    routing = np.broadcast_to(np.array([0, 1, E - 1, E - 2], np.int32), (n, T, k))
    weights = np.float32([1, 2**-9, 1, 2**-9]) * np.ones((n, T, 1), np.float32)

    def run(x: Any, experts: Any, weights: Any) -> Any:
        rows, plan = moe.dispatch(x, experts, "x", num_experts=E, backend="xla")
        return moe.combine(rows, weights, plan, "x", backend="xla")

    got = harness.per_device(run, harness.mesh(n))(x, routing, weights)
    partial = (x.astype(np.float32) * np.float32(1 + 2**-9)).astype(jnp.dtype(dtype))
    want = (2 * partial.astype(np.float32)).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def call(x: Any, **wrong: Any) -> Any:
    """A dispatch over 3 devices of 6 tokens, x[0], with something wrong."""
    options: dict[str, Any] = {"num_experts": 6, **wrong}
    experts = options.pop("experts", np.zeros((6, 2), np.int32))
    tokens, axis = options.pop("tokens", x[0]), options.pop("axis", "x")
    return moe.dispatch(tokens, experts, axis, **options)[0]


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        ({"num_experts": 10}, CollectiveError, "must be a multiple of 3: .*; say 12"),
        ({"num_experts": 0}, CollectiveError, "whole number of 1 or more"),
        ({"num_experts": "6"}, CollectiveError, "whole number of 1 or more"),
        ({"num_experts": 6.0}, CollectiveError, "whole number of 1 or more"),
        ({"experts": np.full((6, 2), 6)}, CollectiveError, "expert 6 among experts"),
        ({"experts": np.full((6, 2), -2)}, CollectiveError, "-1 stands for no expert"),
        ({"experts": np.zeros((6, 9), np.int32)}, CollectiveError, "1 to 8 choices"),
        ({"experts": np.zeros((6, 0), np.int32)}, CollectiveError, "1 to 8 choices"),
        ({"experts": np.zeros((5, 2), np.int32)}, CollectiveError, "experts .T, k."),
        ({"experts": np.zeros((6, 2))}, DtypeError, "experts of float"),
        ({"rows": 1}, CollectiveError, "whole number of 2 or more, which one token alone may"),
        ({"rows": 2.5}, CollectiveError, "whole number of 2 or more, which one token alone may"),
        ({"rows": 1 << 40}, CollectiveError, "numbered in 32 bits"),
        ({"num_experts": np.int32(3 << 29)}, CollectiveError, "numbered in 32 bits"),
        ({"num_experts": np.int8(127)}, CollectiveError, "say 129"),
        ({"axis": "z"}, UnboundAxisError, "'z'"),
        ({"axis": ("x", "x")}, CollectiveError, "twice"),
        ({"exchange": "sparse"}, AlgorithmError, "'auto' or one of ragged, slots, dense"),
        ({"algorithm": "fastest"}, AlgorithmError, "ragged_all_to_all"),
        ({"axis_index_groups": [[0, 1], [2]]}, CollectiveError, "equal size"),
        ({"tokens": np.zeros((6, 4, 2), np.float32)}, CollectiveError, "x must be .T, D."),
        ({"tokens": np.zeros((6, 0), np.float32)}, CollectiveError, "T and D of 1 or more"),
    ],
    ids=range(22),
)
def test_bad_input_is_refused_before_launch(
    wrong: dict[str, Any], error: type[Exception], match: str
) -> None:
    harness.fails(error, match, functools.partial(call, **wrong))


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        ({"y": np.zeros((4, 4), np.float32)}, CollectiveError, "y of shape"),
        ({"y": np.zeros((36, 4), np.int32)}, DtypeError, "y of int32"),
        ({"weights": np.zeros((6, 3), np.float32)}, CollectiveError, "one per choice; give shape"),
        ({"weights": np.zeros((6, 2), np.int32)}, DtypeError, "weights of int32"),
        ({"plan": ()}, CollectiveError, "plan of type tuple"),
        ({"overflow": "keep"}, CollectiveError, "'share' or 'drop'"),
        ({"axis_name": "z"}, UnboundAxisError, "'z'"),
    ],
    ids=["y", "y of integers", "weights", "weights of integers", "plan", "overflow", "axis"],
)
def test_bad_answers_are_refused_before_launch(
    wrong: dict[str, Any], error: type[Exception], match: str
) -> None:
    def program(x: Any) -> Any:
        experts = np.zeros((6, 2), np.int32)
        y, plan = moe.dispatch(x[0], experts, "x", num_experts=6, backend="xla")
        given = {"y": y, "weights": np.ones((6, 2), np.float32), "plan": plan, "axis_name": "x"}
        return moe.combine(**(given | wrong), backend="xla")

    harness.fails(error, match, program)


@pytest.mark.parametrize("how", HOW)
def test_numbers_of_64_bits(how: str) -> None:
    """Rows are numbered in 32 bits; weights have gradients of their own dtype, added in y's."""
    n, back = 2, {"backend": HOW[how]["backend"]}
    routing = routings.random(n, T, K)

    def program(x: Any, experts: Any, weights: Any) -> Any:
        def total(x: Any, weights: Any) -> Any:
            rows, plan = moe.dispatch(x, experts, "x", num_experts=E, **HOW[how])
            return moe.combine(rows, weights, plan, "x", **back).sum(), plan.group_sizes

        (dx, dweights), sizes = jax.grad(total, (0, 1), has_aux=True)(x, weights)
        return dx, dweights, sizes

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for dtype in (np.float32, np.float64):
            x, weights = rng.standard_normal((n, T, D)).astype(dtype), rng.random((n, T, K))
            dx, dweights, sizes = run(x, routing, weights)
            assert (dx.dtype, dweights.dtype, sizes.dtype) == (dtype, np.float64, np.int32)
            want = np.where(routing >= 0, x.astype(np.float64).sum(axis=2, keepdims=True), 0)
            tolerance = 1e-5 if dtype == np.float32 else 1e-12
            np.testing.assert_allclose(dweights, want, rtol=tolerance, atol=tolerance)


def test_an_axis_of_vmap_is_refused() -> None:
    visit = functools.partial(moe.dispatch, axis_name="v", num_experts=4)
    with pytest.raises(CollectiveError, match="axis 'v': experts lie on axes of a mesh"):
        jax.vmap(visit, axis_name="v")(np.ones((2, 3, 4)), np.zeros((2, 3, 1), np.int32))


@pytest.mark.full
@pytest.mark.parametrize("generation", harness.GENERATIONS)
@pytest.mark.parametrize(
    "exchange, wire", [("ragged", None), ("slots", None), ("slots", "float8_e4m3fn")]
)
def test_compiles_for_every_generation(exchange: str, wire: Any, generation: str) -> None:
    def call(x: Any) -> Any:
        experts = (x[:, :2].astype(jnp.int32) + jnp.arange(2)) % E
        how: Any = {"exchange": exchange, "wire": wire, "backend": "pallas"}
        rows, plan = moe.dispatch(x, experts, "x", num_experts=E, rows=512, **how)
        weights = x[:, :2].astype(jnp.float32)
        return moe.combine(rows, weights, plan, "x", backend="pallas")

    topology = harness.GENERATIONS[generation]
    compiled = harness.compile_for_tpu(call, topology, (128, 1024), dtype=jnp.bfloat16)
    assert compiled.ops.count("custom-call") >= 2  # there and back
