"""All axes of a torus at once: the kernels' values and faults."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import channel_faults
import harness
import pallas_collectives
from pallas_collectives.kernels.machinery import channel
from pallas_collectives.kernels.torus import all_gather, reduce_scatter, windows
from pallas_collectives.kernels.torus.shares import Shares
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group
from tori import group_of

SLOW = pytest.mark.slow

# Values and races.

CASES: dict[str, tuple[Callable[..., jax.Array], Callable[[np.ndarray], np.ndarray]]] = {
    "all_gather": (
        lambda m, x, axes, **how: m.all_gather(x, axes, tiled=True, **how),
        lambda xs: np.broadcast_to(np.concatenate(list(xs)), (len(xs), xs.size // 128, 128)),
    ),
    "psum_scatter": (
        lambda m, x, axes, **how: m.psum_scatter(x, axes, tiled=True, **how),
        lambda xs: np.stack(np.split(xs.astype(np.float64).sum(0), len(xs))),
    ),
    "psum": (
        lambda m, x, axes, **how: m.psum(x, axes, **how),
        lambda xs: np.broadcast_to(xs.astype(np.float64).sum(0), xs.shape),
    ),
}


def run(
    op: str, sizes: tuple[int, ...], params: Any, dtype: str = "float32", space: str = ""
) -> None:
    call, reference = CASES[op]
    n, on = math.prod(sizes), harness.mesh(*sizes)
    rows = 8 * 2 * len(sizes) * (4 // jnp.dtype(dtype).itemsize)
    x = harness.random((n, rows * (1 if op == "all_gather" else n), 128), dtype)
    pallas_collectives.reset_counts()
    with pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: call(pallas_collectives, a, on.axis_names, algorithm=f"torus{space}"), on
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    assert {name for _, _, name in pallas_collectives.counts()} == {f"torus{space}"}
    np.testing.assert_array_equal(got, reference(x).astype(got.dtype))


TORI = [(2, 4), (4, 2), (2, 2, 2)]

QUICK = {  # the others take minutes together
    ("all_gather", (2, 4), "on_wait"),
    ("all_gather", (2, 2, 2), "eager"),
    ("psum", (4, 2), "on_wait"),
    ("psum_scatter", (2, 2, 2), "on_wait"),
}


@pytest.mark.parametrize(
    "op, sizes, mode",
    [
        pytest.param(*case, marks=() if case in QUICK else SLOW)
        for case in itertools.product(CASES, TORI, harness.ADVERSARIES)
    ],
)
def test_values_without_races(op: str, sizes: tuple[int, ...], mode: str) -> None:
    run(op, sizes, harness.ADVERSARIES[mode], space="" if op == "all_gather" else ":vmem")


def test_bfloat16_in_hbm() -> None:
    run("psum", (2, 2), pltpu.InterpretParams(), "bfloat16")


@pytest.mark.full
@pytest.mark.parametrize(
    "shape, axis, dtype, mode",
    [
        ((64, 2048), 0, "float32", "on_wait"),
        pytest.param((64, 2048), 0, "bfloat16", "eager", marks=SLOW),
        pytest.param((3, 128, 2048), 1, "float32", "eager", marks=SLOW),
        pytest.param((8, 16, 2048), 0, "bfloat16", "on_wait", marks=SLOW),
    ],
)
def test_wide_rows_are_cut_between_tiles(
    shape: tuple[int, ...], axis: int, dtype: str, mode: str, in_sections: None
) -> None:
    on = harness.mesh(2, 2)
    x = harness.random((4, *shape), dtype)
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]):
        program = harness.per_device(
            lambda a: pallas_collectives.psum_scatter(
                a, on.axis_names, scatter_dimension=axis, tiled=True, algorithm="torus"
            ),
            on,
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    want = np.stack(np.split(x.astype(np.float64).sum(0), 4, axis=axis))
    np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("axis, dtype", [(0, "float32"), (1, "int8"), (2, "bfloat16")])
def test_gathers_along_any_axis_as_lax(axis: int, dtype: str) -> None:
    x, on = harness.random((4, 3, 64, 256), dtype), harness.mesh(2, 2)

    def gather(m: Any, **how: Any) -> np.ndarray:
        body = functools.partial(m.all_gather, axis_name=("y", "x"), axis=axis, tiled=True, **how)
        return np.asarray(harness.per_device(body, on)(x))

    np.testing.assert_array_equal(
        gather(pallas_collectives, algorithm="torus"), gather(jax.lax), strict=True
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "op, space, name",
    [
        ("all_gather", "", "v5p:2x2x2"),
        pytest.param("psum", ":vmem", "v5p:2x2x2", marks=SLOW),
        ("all_gather", "", "7x:2x2x1"),
        pytest.param("psum", ":vmem", "7x:2x2x1", marks=SLOW),
    ],
)
def test_one_mesh_axis_laid_over_a_torus_in_any_order(op: str, space: str, name: str) -> None:
    """8 devices that lie as 2 x 2 x 2, in arbitrary order: blocks go one by one."""
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    call, reference = CASES[op]
    x = harness.random((8, 48 * (1 if op == "all_gather" else 8), 128), "float32")
    params = harness.ADVERSARIES["on_wait"]
    with placement.torus(name), pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: call(pallas_collectives, a, "x", algorithm=f"torus{space}"),
            jax.sharding.Mesh(devices, ("x",)),
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, reference(x).astype(got.dtype))


# Faults.


def gather_is_caught(mode: str, sizes: tuple[int, ...] = (2, 4), hold: int | None = None) -> bool:
    n, on = math.prod(sizes), harness.mesh(*sizes)
    x = harness.random((n, 32, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        params = harness.ADVERSARIES[mode]
        return all_gather.all_axes(block, group_of(*sizes), axis=0, vmem=False, interpret=params)

    run = harness.per_device(program, on, check_vma=False)
    return harness.caught(lambda: run(x), np.broadcast_to(x.reshape(-1, 128), (n, 32 * n, 128)))


def sum_is_caught(mode: str, sizes: tuple[int, ...] = (4, 2), vmem: bool = True) -> bool:
    n, on = math.prod(sizes), harness.mesh(*sizes)
    x = harness.random((n, n * 32, 128), "float32")

    def program(block: jax.Array) -> jax.Array:
        return reduce_scatter.reduce_scatter(
            block,
            group_of(*sizes),
            axis=0,
            op="sum",
            vmem=vmem,
            interpret=harness.ADVERSARIES[mode],
        )

    run = harness.per_device(program, on, check_vma=False)
    return harness.caught(lambda: run(x), x.sum(0).reshape(n, 32, 128))


def on_lines(sizes: tuple[int, ...], lines: Sequence[int]) -> Group:
    """A group on a mesh some of whose axes are lines."""
    whole = group_of(*sizes)
    torus = (dataclasses.replace(a, line=k in lines) for k, a in enumerate(whole.torus))
    return dataclasses.replace(whole, torus=tuple(torus))


SECTIONED = [
    ("psum", (4, 2), (), "on_wait"),
    ("psum", (2, 4), (1,), "on_wait"),
    ("psum_scatter", (3, 2), (0,), "on_wait"),
    ("psum_scatter", (2, 2, 2), (), "on_wait"),
    ("psum_scatter", (2, 4), (), "eager"),
    ("psum", (3, 2), (0,), "eager"),
    ("psum", (8,), (), "on_wait"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "op, sizes, lines, mode",
    [pytest.param(*case, marks=() if k < 3 else SLOW) for k, case in enumerate(SECTIONED)],
)
def test_sections_add_up_without_races(
    op: str, sizes: tuple[int, ...], lines: Sequence[int], mode: str, in_sections: None
) -> None:
    run, xs, want = summed_in_sections(op, sizes, lines, mode)
    got = np.asarray(run(xs))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def summed_in_sections(
    op: str, sizes: tuple[int, ...], lines: Sequence[int], mode: str
) -> tuple[Callable[[np.ndarray], jax.Array], np.ndarray, np.ndarray]:
    """A sum by the kernel, its operands, and what it is."""
    n, on, group = math.prod(sizes), harness.mesh(*sizes), on_lines(sizes, lines)
    how: Any = {"op": "sum", "vmem": False, "interpret": harness.ADVERSARIES[mode]}
    xs = harness.random((n, n, 13 * 8, 128), "float32")

    def program(x: jax.Array) -> jax.Array:
        if op == "psum":
            return reduce_scatter.all_reduce(x, group, **how)
        return reduce_scatter.reduce_scatter(x, group, axis=0, **how)

    total = xs.astype(np.float64).sum(0).astype(xs.dtype)
    want = np.broadcast_to(total, xs.shape) if op == "psum" else total.reshape(n, 1, 13 * 8, 128)
    return harness.per_device(program, on, check_vma=False), xs, want


def test_sound_gather_is_not_caught() -> None:
    assert not gather_is_caught("on_wait", hold=1)


@pytest.mark.full
def test_few_semaphores_do_under_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "WINDOW", 2)
    assert not gather_is_caught("on_wait")
    monkeypatch.setattr(windows, "SLOTS", 2)
    assert not sum_is_caught("on_wait")


def test_hops_that_share_a_semaphore_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "wrap_step", lambda hop, window: 0)
    assert gather_is_caught("on_wait")


def test_phases_that_share_semaphores_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = all_gather.Gather

    def faulty(plan: Shares, rings: Any, o: Any, semaphores: list[Any], **own: Any) -> Any:
        phases = len(plan.sizes)
        first = [semaphores[k - k % phases] for k in range(len(semaphores))]
        return sound(plan, rings, o, first, **own)

    monkeypatch.setattr(all_gather, "Gather", faulty)
    assert gather_is_caught("on_wait", (4, 2))


def test_a_window_too_small_without_credits_is_caught(
    monkeypatch: pytest.MonkeyPatch, in_sections: None
) -> None:
    """Upstream is up to two messages ahead of what we have waited for, and no more."""
    monkeypatch.setattr(all_gather, "WINDOW_WITHOUT_CREDITS", 1)
    run, xs, want = summed_in_sections("psum", (4, 2), (), "on_wait")
    assert harness.caught(lambda: run(xs), want)


def test_missing_receive_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.drop_receives(monkeypatch, dimensions=2)
    assert gather_is_caught("on_wait", (2, 2))
    assert sum_is_caught("on_wait", (2, 2))


def test_dropped_credit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    channel_faults.drop_credits(monkeypatch)
    monkeypatch.setattr(windows, "SLOTS", 1)
    assert sum_is_caught("on_wait")


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(monkeypatch, "barrier_on_torus")
    assert gather_is_caught("eager", (2, 2), hold=1)
