"""Any collective, shape, dtype, axis, groups and number of devices, against lax.

A failure that is found here becomes a row of `conformance.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import conformance
import harness
import pallas_collectives as pc

MOVED, ADDED, COMPARED = harness.DTYPES, harness.ADDED, harness.COMPARED
# A choice: what lax runs on CPUs, with the dtypes that it takes; `calls` draws for each by name.
DTYPES = {"all_gather": MOVED, "all_to_all": MOVED}
DTYPES |= {"ppermute": (*ADDED, "bool")}  # the others have no zero for who is no target
DTYPES |= {"psum": ADDED, "psum_scatter": ADDED, "pmax": COMPARED, "pmin": COMPARED}

sizes = st.sampled_from([1, 2, 3, 5, 8, 16, 24, 128, 129])
# A mesh, the axes to communicate over, and how many devices these have.
meshes = st.sampled_from([
    *(((n,), "x", n) for n in (2, 3, 4, 5)),
    *(((2, 3), axes, n) for axes, n in [("y", 3), (("x", "y"), 6)]),
])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a collective on a mesh of `sizes`; `shape` is each device's operand."""

    op: str
    sizes: tuple[int, ...]
    axes: Any
    shape: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def __call__(self, module: Any, x: jax.Array) -> jax.Array:
        return getattr(module, self.op)(x, self.axes, **self.options)


@st.composite
def calls(draw: st.DrawFn, op: str) -> Call:
    on, axes, n = draw(meshes)
    shape = draw(st.lists(sizes, max_size=3))
    groups = None
    if op != "ppermute" and draw(st.booleans()):
        members = draw(st.permutations(range(n)))
        size = draw(st.sampled_from([size for size in range(1, n + 1) if n % size == 0]))
        groups = [members[i : i + size] for i in range(0, n, size)]
    devices = len(groups[0]) if groups else n
    options: dict[str, Any] = {} if op == "ppermute" else {"axis_index_groups": groups}
    match op:
        case "all_gather":
            tiled = bool(shape) and draw(st.booleans())
            ndim = len(shape) + (not tiled)
            options |= {"tiled": tiled, "axis": draw(st.integers(-ndim, ndim - 1))}
        case "psum_scatter" | "all_to_all":
            shape = shape or [3]
            axis = draw(st.integers(0, len(shape) - 1))
            tiled = draw(st.booleans())
            shape[axis] = devices * (shape[axis] if tiled else 1)
            options |= {"tiled": tiled}
            if op == "psum_scatter":
                options |= {"scatter_dimension": axis}
            else:
                # lax cannot differentiate an untiled exchange from one dimension to another.
                concat = draw(st.integers(0, len(shape) - 1)) if tiled else axis
                options |= {"split_axis": axis, "concat_axis": concat}
        case "ppermute":
            sources, targets = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
            pairs = list(zip(sources, targets, strict=True))
            options |= {"perm": pairs[: draw(st.integers(1, n))]}
    return Call(op, on, axes, tuple(shape), draw(st.sampled_from(DTYPES[op])), options)


@pytest.mark.full
@pytest.mark.parametrize("op", DTYPES)
def test_value_and_gradient(op: str) -> None:
    served: list[bool] = []

    @settings(
        max_examples=5,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(op))
    def agrees(call: Call) -> None:
        with jax.enable_x64(harness.is_64_bit(call.dtype)):
            _check(call)
        served.append(any(backend == "pallas" for _, backend, _ in pc.counts()))

    agrees()
    assert sum(served) > len(served) / 3, "too few calls reach a kernel to mean anything"


def _check(call: Call) -> None:
    """Small integers, so that sums are exact in any order and any dtype."""
    on = harness.mesh(*call.sizes)
    x = harness.random((on.size, *call.shape), call.dtype)
    differentiable = call.op not in ("pmax", "pmin") and harness.is_differentiable(call.dtype)

    def run(module: Any) -> Any:
        def shard(x: jax.Array) -> Any:
            if not differentiable:
                return call(module, x)
            y, pull = jax.vjp(lambda x: call(module, x), x)
            weights = (jnp.arange(y.size).reshape(y.shape) % 3).astype(y.dtype)
            return y, pull(weights + lax.axis_index("x").astype(y.dtype) % 2)

        return harness.per_device(shard, on, check_vma=False)(x)

    pc.reset_counts()
    ours, want = jax.tree.leaves(run(pc)), jax.tree.leaves(run(lax))
    assert all("at most 32 bits" in reason for reason in pc.fallback_counts())
    assert not pc.fallback_counts() or harness.is_64_bit(call.dtype)
    for got, expected in zip(ours, want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@st.composite
def routings(draw: st.DrawFn) -> dict[str, Any]:
    n, slices = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    sent = st.lists(st.integers(0, 3), min_size=n * n * slices, max_size=n * n * slices)
    return {
        "send": np.array(draw(sent), np.int32).reshape(n, n * slices),
        "row": tuple(draw(st.lists(sizes, max_size=2))),
        "dtype": draw(st.sampled_from(MOVED)),
        "algorithm": draw(st.sampled_from(conformance.ALGORITHMS["ragged_all_to_all"])),
    }


@pytest.mark.full
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(routings())
def test_ragged_value_and_gradient(drawn: dict[str, Any]) -> None:
    """Against numpy: lax has it on accelerators only."""
    with jax.enable_x64(harness.is_64_bit(drawn["dtype"])):
        _check_ragged(drawn)


def _check_ragged(drawn: dict[str, Any]) -> None:
    n, tables = len(drawn["send"]), conformance.routed(drawn["send"])
    shape = (n, 1 + int(max(drawn["send"].sum(1).max(), tables[3].sum(1).max())), *drawn["row"])
    operand, output, weights = (harness.random(shape, drawn["dtype"], seed) for seed in (1, 2, 3))
    differentiable = harness.is_differentiable(drawn["dtype"])

    def shard(x: jax.Array, o: jax.Array, w: jax.Array, *tables: jax.Array) -> Any:
        def call(x: jax.Array, o: jax.Array) -> jax.Array:
            how = {"axis_name": "x", "algorithm": drawn["algorithm"]}
            return pc.ragged_all_to_all(x, o, *tables, **how)

        if not differentiable:
            return call(x, o), ()
        y, pull = jax.vjp(call, x, o)
        return y, pull(w)

    run = harness.per_device(shard, harness.mesh(n), check_vma=False)
    value, grads = run(operand, output, weights, *tables)
    np.testing.assert_array_equal(value, conformance.ragged_reference(operand, output, tables))
    if differentiable:
        want = conformance.ragged_gradients(weights, shape[1], tables)
        jax.tree.map(np.testing.assert_array_equal, grads, want)
