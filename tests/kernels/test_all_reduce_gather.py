"""Sums of gathered operands: their bits, their ways over the links, their faults."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import harness
import in_order
import pallas_collectives
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.kernels import all_reduce_gather
from pallas_collectives.kernels.machinery import combine
from pallas_collectives.topology import chips, placement, torus_axes
from pallas_collectives.topology.groups import Group

RING, LINE = Group(("x",), (4,)), Group(("x",), (4,), line=True)
PLAIN = Group(("x", "y"), (2, 4))
TORUS = dataclasses.replace(PLAIN, torus=torus_axes.of_mesh(PLAIN, chips.SIMULATED))
GROUPS = {"ring": RING, "line": LINE, "torus": TORUS}


def summed(x: jax.Array, group: Group, params: Any, vmem: bool = True) -> jax.Array:
    return all_reduce_gather.gather(x, group, op="sum", vmem=vmem, interpret=params)


def is_caught(group: Group, *modes: str, hold: int | None = None) -> list[str]:
    """The modes in which something is found wrong with a sum."""
    x = in_order.numbers((group.size, 1, 32, 128), "float32")

    def program(operand: jax.Array) -> jax.Array:
        operand = operand if hold is None else harness.delayed(operand, hold)
        return summed(operand, group, harness.EITHER)

    run = harness.per_device(program, harness.mesh(*group.sizes), check_vma=False)
    return harness.caught_under(modes, lambda: run(x), in_order.everywhere(x))


@pytest.mark.parametrize("name", GROUPS)
def test_sound_kernel_is_not_caught(name: str) -> None:
    assert not is_caught(GROUPS[name], *harness.ADVERSARIES, hold=1)


@pytest.mark.parametrize(
    "name, barrier",
    [
        ("ring", "barrier_with_neighbours"),
        ("line", "barrier_along_line"),
    ],
)
def test_dropped_barrier_is_caught(
    name: str, barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.drop_barrier(monkeypatch, barrier)
    assert is_caught(GROUPS[name], "eager", hold=1)


@pytest.mark.parametrize("name", GROUPS)
def test_adding_before_all_is_there_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = all_reduce_gather._kernel

    def hasty(rings: Any, *refs: Any, after: Callable[..., None], **static: Any) -> None:
        *others, scratch = refs
        after(scratch.stack_ref, *others[-1:])
        kernel(rings, *refs, after=lambda *_: None, **static)

    monkeypatch.setattr(all_reduce_gather, "_kernel", hasty)
    assert is_caught(GROUPS[name], "on_wait")


def test_layers_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        combine, "combined", lambda op, stack, shape: sum(stack[3 - i] for i in range(4))
    )
    assert is_caught(RING, "on_wait")


@pytest.mark.parametrize("vmem", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_elements_are_added_in_the_order_of_the_ranks(dtype: str, vmem: bool) -> None:
    """On devices whose ring goes round in another order."""
    group = Group(("x",), (8,), order=(0, 3, 5, 1, 7, 6, 2, 4))
    x = in_order.numbers((8, 1, 64, 256), dtype)
    program = functools.partial(
        summed, group=group, vmem=vmem, params=harness.ADVERSARIES["on_wait"]
    )
    got = np.asarray(harness.per_device(program, harness.mesh(8), check_vma=False)(x))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, in_order.everywhere(x))


@pytest.mark.full
@pytest.mark.parametrize("torus", ["v5e:2x4", "v5p:2x2x2", "7x:2x2x1"])
def test_one_mesh_axis_laid_over_a_torus_in_any_order(torus: str) -> None:
    """8 devices in arbitrary order: blocks of a torus go to their ranks' places one by one."""
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    x = in_order.numbers((8, 48, 128), "float32")
    params = harness.ADVERSARIES["on_wait"]
    with placement.torus(torus), pltpu.force_tpu_interpret_mode(params):
        program = harness.per_device(
            lambda a: pallas_collectives.psum(a, "x", algorithm="gather:vmem"),
            jax.sharding.Mesh(devices, ("x",)),
        )
        got = np.asarray(program(x))
    assert not harness.race_reported()
    np.testing.assert_array_equal(got, in_order.everywhere(x))


@pytest.mark.parametrize(
    "machine, axes",
    [("v5e:16x16", ("x",)), ("v5e:8x8", ("x",)), ("v5p:4x4x4", ("x", "y")), ("7x:4x4x4", ("x",))],
)
@pytest.mark.parametrize("nbytes", [4 << 10, 16 << 10])
def test_takes_hardly_longer_than_gathering_the_operands(
    machine: str, axes: tuple[str, ...], nbytes: int
) -> None:
    by_name = {case.name: case for case in CASES}
    size_of = replay_rows.Machine.named(machine).shape
    n = math.prod(size_of["xyz".index(axis)] for axis in axes)

    def seconds(case: str, size: int) -> float:
        (task,) = replay_rows.plan([machine], [by_name[case]], [size], axes=axes)
        report = replay_rows.run(task, races=n == 16)
        assert not report.findings
        return report.time

    gathered = seconds("all_gather", n * nbytes)
    assert seconds("psum", nbytes) < 1.15 * gathered


def test_operands_that_the_compiler_cannot_count_the_bytes_of_are_refused() -> None:
    """It would end the process."""
    with pytest.raises(AlgorithmError, match="8 operands of 512 MiB"):
        harness.compile_for_tpu(
            lambda x: pallas_collectives.psum(x, "x", algorithm="gather"),
            "v5p:2x2x2",
            (1 << 15, 1 << 12),
        )
