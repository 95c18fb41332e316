"""Runs steps on the devices there are: their time, and what is exposed by the profiler."""

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import timing
from benchmarks.rows import Ran
from benchmarks.steps import compiling, exposed, programs
from benchmarks.steps.programs import Form, Program


def rows(names: Sequence[str], forms: Sequence[Form], unders: Sequence[str]) -> Iterator[Ran]:
    """A row for each program, form, and one of `unders`, as `compiling.Task` has them."""
    devices = np.array(jax.devices())
    for name in names:
        for form in forms:
            for under in unders:
                base = Ran(op=f"{name}, {form}", under=under, type="bfloat16", devices=devices.size)
                try:
                    program = programs.named(name)(devices.size, form)
                    yield measured(base, program, devices)
                except Exception as error:  # the other rows are wanted all the same
                    yield dataclasses.replace(base, error=f"{type(error).__name__}: {error}")


def measured(base: Ran, program: Program, devices: np.ndarray) -> Ran:
    """The row with its figures: times of runs without the profiler, shares of one with it."""
    mapped = compiling.lower(program, devices, base.under).compile()
    run = functools.partial(timing.clocked, mapped, *_arguments(program, devices))
    run()
    samples = [1e6 * run() for _ in range(timing.SAMPLES)]
    with tempfile.TemporaryDirectory() as folder:
        with timing.traced(folder, "step"):
            run()
        found = list(exposed.of(folder).values())
    middle = {
        name: statistics.median(getattr(share, name) for share in found)
        for name in exposed.Share._fields
    }
    return dataclasses.replace(
        base,
        time_us=statistics.median(samples),
        time_us_min=min(samples),
        time_us_max=max(samples),
        **middle,
    )


def _arguments(program: Program, devices: np.ndarray) -> Any:
    """Small random numbers in the places of shapes, each device's own part."""
    mesh = compiling.mesh_of(program, devices)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(program.axes)))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(program.args))))

    def numbers(s: Any) -> jax.Array:
        shape, key = (devices.size, *s.shape), next(keys)
        make = jax.jit(lambda: jax.random.normal(key, shape, s.dtype) / 64, out_shardings=sharding)
        return make()

    return jax.tree.map(numbers, program.args)
