"""Every algorithm through the real TPU compiler, for five generations, without a TPU.

What libtpu rejects here fails on a TPU. Programs have a producer before the collective and a
consumer after it, as in a model: XLA copies what other devices have written before it becomes a
program's own output, for lax's collectives as for ours.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import harness
import pallas_collectives
from pallas_collectives import catalogue
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import AlgorithmError, ReachError

pytest.importorskip("libtpu")


def call_of(op: str) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """How a collective is called over "x", and its operand per device, aligned for 8 devices."""
    if op == "ragged_all_to_all":  # of three dimensions, which are read in place
        return _ragged, (256, 8, 128)
    example = catalogue.COLLECTIVES[op].example
    return lambda m, x, **how: example.call(m, x, "x", **how), (256, 256)


def _shift() -> list[tuple[int, int]]:
    n = jax.lax.axis_size("x")
    return [(d, (d + 1) % n) for d in range(n)]


def _ragged(m: Any, x: jax.Array, **how: Any) -> jax.Array:
    n = jax.lax.axis_size("x")
    sizes = jnp.full(n, len(x) // n, jnp.int32)
    offsets = jnp.arange(n, dtype=jnp.int32) * sizes
    output = jnp.cos(x)  # an array of its own: the kernel writes into it
    return m.ragged_all_to_all(x, output, offsets, sizes, offsets, sizes, axis_name="x", **how)


def compiled(op: str, topology: str, sizes: tuple[int, ...], **how: Any) -> harness.Compiled:
    call, shape = call_of(op)
    fn = functools.partial(call, pallas_collectives, backend="pallas", **how)
    return harness.compile_for_tpu(fn, topology, shape, sizes=sizes)


FORMS = (("", (4, 2)), (":vmem", (4, 2)), ("", (8,)))


def _in_turn() -> Iterator[tuple[str, str, str, str, tuple[int, ...]]]:
    """Any two of algorithm, generation and form meet; a torus on one axis, of each generation."""
    named = [(op, algorithm) for op, algorithms in ALGORITHMS.items() for algorithm in algorithms]
    for i, (op, algorithm) in enumerate(named):
        for j, generation in enumerate(harness.GENERATIONS):
            for k, (space, sizes) in enumerate(FORMS):
                if (i + j) % len(FORMS) == k or (algorithm == "torus" and sizes == (8,)):
                    yield op, algorithm, generation, space, sizes


@pytest.mark.parametrize("op, algorithm, generation, space, sizes", [*_in_turn()])
def test_compiles_for_every_generation(
    op: str, algorithm: str, generation: str, space: str, sizes: tuple[int, ...]
) -> None:
    try:
        program = compiled(op, harness.GENERATIONS[generation], sizes, algorithm=algorithm + space)
    except AlgorithmError as error:
        assert generation == "v5e" and "power-of-two" in str(error)
    else:
        assert "custom-call" in program.ops
        added = {"copy", "transpose", "pad", "all-gather", "all-reduce"} & set(program.ops)
        assert not added, (
            f"{op} by {algorithm} on {generation}: XLA adds {sorted(added)}. For aligned shapes "
            "the program holds the kernel alone: slice and lay out within the kernel"
        )


@pytest.mark.full
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_no_pass_over_memory_beside_the_kernel(op: str) -> None:
    program = compiled(op, "v5p:2x2x1", (4,))
    free = ("parameter", "get-tuple-element", "bitcast")
    around = [name for name in program.ops if name not in free]
    assert around == ["fusion", "custom-call", "fusion"], program.ops


@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_a_sum_is_scaled_in_the_loop_that_uses_it(generation: str) -> None:
    """XLA moved the scale to before our last reshape: one more pass over memory."""

    def program(x: jax.Array) -> jax.Array:
        total = pallas_collectives.psum(x.astype(jnp.bfloat16), "x", backend="pallas")
        return x - total.astype(jnp.float32) * 0.125

    found = harness.compile_for_tpu(program, harness.GENERATIONS[generation], (1024, 512)).ops
    assert [op for op in found if op in ("fusion", "custom-call")] == [
        *("fusion", "custom-call", "fusion")
    ]


@pytest.mark.parametrize(
    "op, extra_blocks",
    # The producer's result (4 blocks), the collective's, and the slots that the kernel says it has.
    [("all_gather", 4 + 16), ("reduce_scatter", 4 + 1 + 6), ("all_reduce", 4 + 4 + 6)],
)
def test_temporary_memory_is_what_the_docstring_says(op: str, extra_blocks: int) -> None:
    program = compiled(op, "v5p:2x2x1", (4,), algorithm=ALGORITHMS[op][0])
    block = 256 * 256 * 4 // 4
    assert program.temp_bytes <= extra_blocks * block + (64 << 10)


@pytest.mark.full
@pytest.mark.parametrize("op, result_blocks", [("reduce_scatter", 1), ("all_reduce", 8)])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_sums_of_a_gibibyte_take_three_blocks_a_direction(
    op: str, result_blocks: int, generation: str
) -> None:
    call, _ = call_of(op)
    how = {"backend": "pallas", "algorithm": ALGORITHMS[op][0]}
    topology = harness.GENERATIONS[generation]
    n = len(harness._topology(topology).devices)
    assert n == 8
    block = (1 << 30) // n
    fn = functools.partial(call, pallas_collectives, **how)
    program = harness.compile_for_tpu(fn, topology, (block // 512 * n, 128))
    assert program.temp_bytes <= (n + result_blocks + 2 * 3) * block + (4 << 20)


def test_terms_of_two_thousand_devices_are_added_in_vmem() -> None:
    """A tile of each at a time, which is more than the compiler gives a kernel by itself."""
    program = functools.partial(pallas_collectives.psum, axis_name="x", algorithm="one_shot")
    harness.compile_for_tpu(program, "v5p:8x16x16", (8, 128), sizes=(2048,))


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "ppermute"])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_a_gibibyte_per_device_compiles(op: str, generation: str) -> None:
    """Those that add nothing; sums of as much have their memory looked at besides."""
    call, _ = call_of(op)
    rows = (1 << 30) // (1024 * 2) // (4 if op == "all_gather" else 1)
    compiled = functools.partial(
        harness.compile_for_tpu,
        functools.partial(call, pallas_collectives, backend="pallas"),
        {"v4": "v4:2x2x1", "7x": "tpu7x:2x2x1"}.get(generation, harness.GENERATIONS[generation]),
        (rows, 1024),
        dtype=jnp.bfloat16,
        sizes=(4, 2),
    )
    if (generation, op) == ("v5e", "ppermute"):  # a shift on a line: its last hop is too far
        with pytest.raises(ReachError, match="power-of-two"):
            compiled()
        return
    assert "custom-call" in compiled().ops


@pytest.mark.full
@pytest.mark.parametrize(
    "topology, sizes", [("v5e:16x16", (256,)), ("v5e:16x16", (16, 16)), ("v5p:4x4x4", (64,))]
)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_pod_compiles_in_seconds(op: str, topology: str, sizes: tuple[int, ...]) -> None:
    call, _ = call_of(op)
    program = harness.compile_for_tpu(
        functools.partial(call, pallas_collectives, backend="pallas"),
        topology,
        (sizes[0] * 16, 256),
        sizes=sizes,
    )
    assert "custom-call" in program.ops
    assert program.seconds < 30


@pytest.mark.parametrize("shape", [(5, 7), (1,), (12, 130), (3, 5, 7), ()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_odd_shapes_compile(shape: tuple[int, ...], dtype: str) -> None:
    def program(x: jax.Array) -> Any:
        x = x.astype(dtype)
        gathered = pallas_collectives.all_gather(x, "x", backend="pallas")
        swap = [(0, 1), (1, 0), (2, 3), (3, 2)]
        moved = pallas_collectives.ppermute(x, "x", swap, backend="pallas")
        summed = pallas_collectives.psum(x, "x", backend="pallas")
        return [out.astype(jnp.float32) for out in (gathered, moved, summed)]

    harness.compile_for_tpu(program, "v5e:2x2", shape, sizes=(4,))


@pytest.mark.full
def test_dtypes_that_dmas_do_not_all_take_compile() -> None:
    """All but complex128, on which XLA aborts whoever moves it."""
    narrow = [d for d in harness.DTYPES if d.startswith(("float8", "float4", "int4", "uint4"))]
    dtypes = (*narrow, "float16", "bool", "complex64", "int64", "float64")

    def program(bits: jax.Array) -> Any:
        arrays = [bits.astype(dtype) for dtype in dtypes]
        gathered = pallas_collectives.all_gather(arrays, "x", tiled=True, backend="pallas")
        summed = pallas_collectives.psum(bits.astype(jnp.float32), "x", backend="pallas")
        return [summed, *(jnp.real(out).astype(jnp.float32) for out in gathered)]

    with jax.enable_x64(True):
        found = harness.compile_for_tpu(program, "v5e:2x2", (32, 128), sizes=(4,), dtype=jnp.int32)
    assert found.ops.count("custom-call") > len(dtypes)


def test_groups_that_a_chip_cannot_write_within_are_refused() -> None:
    def program(groups: list[list[int]], x: jax.Array) -> jax.Array:
        return pallas_collectives.psum(x, "x", axis_index_groups=groups, backend="pallas")

    near, far = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 3], [1, 2], [4, 7], [5, 6]]
    for topology, groups in (("v5e:2x4", near), ("v6e:2x4", far)):
        harness.compile_for_tpu(functools.partial(program, groups), topology, (8, 128))
    with pytest.raises(AlgorithmError, match=r"groups \(\(0, 3\).*power-of-two"):
        harness.compile_for_tpu(functools.partial(program, far), "v5e:2x4", (8, 128))
