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

import harness
import pallas_collectives as pc

MOVED = ("float32", "bfloat16", "float16", "int8", "int32", "uint8", "bool", "complex64")
ADDED = ("float32", "bfloat16", "float16", "int8", "int32", "uint32", "complex64")
COMPARED = ("float32", "bfloat16", "int8", "uint32")
DTYPES = {"all_gather": MOVED, "all_to_all": MOVED, "ppermute": MOVED}
DTYPES |= {"psum": ADDED, "psum_scatter": ADDED, "pmax": COMPARED, "pmin": COMPARED}

sizes = st.sampled_from([1, 2, 3, 5, 8, 16, 24, 128, 129])


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a collective; `shape` is each device's operand."""

    op: str
    n: int
    shape: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def __call__(self, module: Any, x: jax.Array) -> jax.Array:
        return getattr(module, self.op)(x, "x", **self.options)


@st.composite
def calls(draw: st.DrawFn, op: str) -> Call:
    n = draw(st.integers(2, 4))
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
    return Call(op, n, tuple(shape), draw(st.sampled_from(DTYPES[op])), options)


@pytest.mark.parametrize("op", DTYPES)
def test_value_and_gradient(op: str) -> None:
    served: list[bool] = []

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(op))
    def agrees(call: Call) -> None:
        _check(call)
        served.append(any(backend == "pallas" for _, backend, _ in pc.counts()))

    agrees()
    assert sum(served) > len(served) / 3, "too few calls reach a kernel to mean anything"


def _check(call: Call) -> None:
    """Small integers, so that sums are exact in any order and any dtype."""
    on, x = harness.mesh(call.n), harness.random((call.n, *call.shape), call.dtype)
    differentiable = call.op not in ("pmax", "pmin") and jnp.issubdtype(call.dtype, jnp.floating)

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
    assert not pc.fallback_counts()
    for got, expected in zip(ours, want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
