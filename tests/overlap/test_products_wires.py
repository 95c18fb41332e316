"""Products with their collective over narrower wires: apart, with the bits of the two calls."""

from typing import Any

import jax
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives.errors import AlgorithmError, WireError

N, WIRES = 4, {"wire": "int8", "wire_backward": "float8_e4m3fn"}


def operands(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, rows, 256)).astype(np.float32)
    return x, rng.standard_normal((N, 256, 128)).astype(np.float32)


def gathered(x: Any, w: Any, **over: Any) -> Any:
    return pc.all_gather_matmul(x, w, "x", **over)


def scattered(x: Any, w: Any, **over: Any) -> Any:
    return pc.matmul_reduce_scatter(x, w, "x", **over)


def gathered_apart(x: Any, w: Any) -> Any:
    return pc.all_gather(x, "x", tiled=True, **WIRES) @ w


def scattered_apart(x: Any, w: Any) -> Any:
    return pc.psum_scatter(x @ w, "x", tiled=True, **WIRES)


@pytest.mark.parametrize(
    "fused, apart, rows", [(gathered, gathered_apart, 16), (scattered, scattered_apart, 64)]
)
def test_values_and_gradients_have_the_bits_of_both_apart(
    fused: Any, apart: Any, rows: int
) -> None:
    def both(call: Any, **over: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            y = call(x, w, **over)
            return (y**2).sum(), y

        return harness.per_device(jax.grad(loss, (0, 1), has_aux=True), harness.mesh(N))

    pc.reset_counts()
    ours = both(fused, **WIRES)(*operands(rows))
    served = {(op, wire) for op, wire, _ in pc.wire_counts()}
    there, back = ("all_gather", "reduce_scatter")[:: 1 if fused is gathered else -1]
    assert served >= {(there, "int8"), (back, "float8_e4m3fn")}
    two_calls = both(apart)(*operands(rows))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(two_calls), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = both(fused)(*operands(rows))
    assert not np.array_equal(ours[1], plain[1])  # something was rounded


@pytest.mark.parametrize("call, rows", [(gathered, 16), (scattered, 64)])
def test_what_cannot_be_had_is_refused(call: Any, rows: int) -> None:
    def run(**over: Any) -> Any:
        return harness.per_device(lambda x, w: call(x, w, **over), harness.mesh(N))(*operands(rows))

    with pytest.raises(AlgorithmError, match="over a wire"):
        run(wire="int8", algorithm="fused")
    with pytest.raises(WireError, match="int3"):
        run(wire="int3")
