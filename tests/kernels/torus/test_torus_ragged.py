"""Ragged all-to-all in jumps over all axes of a torus: values, faults, links, the compiler."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import conformance
import harness
import pallas_collectives
from benchmarks import replay_rows
from benchmarks.cases import CASES
from conformance import routed
from pallas_collectives.kernels.torus import ragged_jumps
from pallas_collectives.topology import placement

MIB = 1 << 20
NAMES = ("x", "y", "z")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row of a tile: slots serve again and again."""
    monkeypatch.setattr(ragged_jumps, "SCRATCH_BYTES", 1 << 10)


def is_caught(sizes: tuple[int, ...], send: np.ndarray, *modes: str, devices: Any = None) -> bool:
    """Whether a fault shows in any of the modes."""
    n = math.prod(sizes)
    on = harness.mesh(*sizes) if devices is None else jax.sharding.Mesh(devices, ("x",))
    operand, output = (harness.random((n, 8 * n, 8, 128), "float32", seed) for seed in (1, 2))
    tables = routed(send)

    def program(*args: jax.Array) -> jax.Array:
        return pallas_collectives.ragged_all_to_all(
            *args, axis_name=on.axis_names, algorithm="torus"
        )

    run = harness.per_device(program, on)
    with pltpu.force_tpu_interpret_mode(harness.EITHER):
        want = conformance.ragged_reference(operand, output, tables)
        return bool(harness.caught_under(modes, lambda: run(operand, output, *tables), want))


def random_sizes(n: int) -> np.ndarray:
    """Some slices are empty, one device gets nothing, and one sends nothing."""
    rng = np.random.default_rng(n)
    send = rng.integers(0, 8, (n, n)) * rng.integers(0, 2, (n, n))
    send[:, -1] = 0
    send[0] = 0
    return send.astype(np.int32)


@pytest.mark.full
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sizes", [(4,), (7,), (2, 2), (2, 4), (3, 2), (2, 2, 2)])
def test_values_without_races(sizes: tuple[int, ...]) -> None:
    assert not is_caught(sizes, random_sizes(math.prod(sizes)), *harness.ADVERSARIES)


@pytest.mark.full
@pytest.mark.parametrize(
    "torus, order", [("v5p:2x2x1", [2, 0, 3, 1]), ("v5p:2x2x2", [5, 0, 3, 6, 1, 7, 2, 4])]
)
def test_devices_that_are_numbered_in_any_order(torus: str, order: list[int]) -> None:
    n, devices = len(order), np.array(jax.devices())[order]
    with placement.torus(torus):
        assert not is_caught((n,), random_sizes(n), "on_wait", devices=devices)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("fault", ["arrived", "left"])
def test_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    class Deaf(ragged_jumps.Rows):
        def wait(self, semaphore: Any, move: Any) -> None:
            is_left = harness.is_of(semaphore, self.scratch.semaphores.left)
            if (fault == "left") != is_left:
                super().wait(semaphore, move)

    monkeypatch.setattr(ragged_jumps, "Rows", Deaf)
    assert is_caught((2, 2), random_sizes(4), "on_wait")


@pytest.mark.parametrize(
    "name, axes, share",
    [
        ("v5e:4x4", ("x",), 0.9),
        pytest.param("v5e:4x4", ("x", "y"), 0.84, marks=pytest.mark.slow),
    ],
)
def test_links_of_v5e_are_at_work(name: str, axes: tuple[str, ...], share: float) -> None:
    """Chosen by itself; rows that everyone sends to everyone, more to some than to others."""
    case = next(case for case in CASES if case.op == "ragged_all_to_all")
    (row,) = replay_rows.rows(replay_rows.plan([name], [case], [16 * MIB], axes=axes))
    assert row.kernel.endswith("ragged_all_to_all_torus")
    assert not row.faults and not row.error
    assert row.of_wire >= 100 * share


@pytest.mark.full
@pytest.mark.parametrize(
    "topology, sizes",
    [
        ("v4:2x2x1", (2, 2, 2)),
        ("v5e:4x4", (4, 4)),
        ("v5e:16x16", (16, 16)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v6e:4x4", (16,)),
        ("tpu7x:2x2x1", (2, 2, 2)),
    ],
)
def test_compiles_for_every_generation(topology: str, sizes: tuple[int, ...]) -> None:
    pytest.importorskip("libtpu")
    n, axes = math.prod(sizes), NAMES[: len(sizes)]

    def program(x: jax.Array, output: jax.Array) -> jax.Array:
        i = jnp.arange(n, dtype=jnp.int32) + jax.lax.axis_index(axes)
        how: Any = {"axis_name": axes, "algorithm": "torus", "backend": "pallas"}
        return pallas_collectives.ragged_all_to_all(x, output, i, i % 3, i, i % 3, **how)

    shape = (4096, 16, 128)
    compiled = harness.compile_for_tpu(
        program, topology, shape, shape, dtype=jnp.bfloat16, sizes=sizes
    )
    assert "custom-call" in compiled.ops
