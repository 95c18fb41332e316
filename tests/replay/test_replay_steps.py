"""A step on the modelled pod: kernels on several engines, compute between them."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_collectives as pc
from pallas_collectives.replay import Machine, replay, steps
from pallas_collectives.replay.program import Program
from pallas_collectives.replay.steps import CORE, Await, Compute, Launch

MACHINE = Machine.named("v6e:4")
PLACEMENT = MACHINE.default_placement(4)


def gather(algorithm: str, rows: int = 4096) -> tuple[Any, jax.ShapeDtypeStruct]:
    def body(x: jax.Array) -> jax.Array:
        return pc.all_gather(x, "x", tiled=True, backend="pallas", algorithm=algorithm)

    mapped = jax.shard_map(
        body, mesh=MACHINE.mesh({"x": 4}), in_specs=P(), out_specs=P(), check_vma=False
    )
    return mapped, jax.ShapeDtypeStruct((rows, 128), "float32")


def program(algorithm: str) -> Program:
    mapped, x = gather(algorithm)
    return steps.program(mapped, x, machine=MACHINE, placement=PLACEMENT)


def alone(algorithm: str) -> float:
    mapped, x = gather(algorithm)
    return replay(mapped, x, machine=MACHINE).time


def run(*parts: steps.Part) -> steps.Course:
    course = steps.run(parts, MACHINE, PLACEMENT)
    assert not course.report.stuck and not course.report.leftovers
    assert course.report.link_use.max() <= 1
    return course


def test_a_kernel_of_the_core_is_waited_for() -> None:
    course = run(
        Compute("a", 50e-6),
        Launch("g", "gather", CORE, program("bidirectional")),
        Await("g"),
        Compute("b", 20e-6),
    )
    assert course.time == pytest.approx(70e-6 + alone("bidirectional"))
    assert [span.part for span in course.spans] == [0, 1, 3]


def test_what_a_sparsecore_runs_is_hidden_as_far_as_there_is_compute() -> None:
    takes = alone("bidirectional:sc")
    for compute in (3 * takes, takes / 2):
        course = run(
            Launch("g", "gather", "SparseCore", program("bidirectional:sc")),
            Compute("product", compute),
            Await("g"),
        )
        assert course.time == pytest.approx(max(compute, takes), rel=0.01)
        (under_way,) = (span for span in course.spans if span.engine == "SparseCore")
        assert under_way.end - under_way.begin == pytest.approx(takes, rel=0.02)


def test_an_engine_serves_one_at_a_time() -> None:
    kernel = program("bidirectional:sc")
    course = run(
        Launch("g", "gather", "SparseCore", kernel),
        Launch("h", "gather", "SparseCore", kernel),
        Await("g"),
        Await("h"),
    )
    assert course.time == pytest.approx(2 * alone("bidirectional:sc"), rel=0.02)


def test_engines_share_the_links() -> None:
    """Two gathers under way at once take as long as one after the other."""
    one = run(Launch("g", "gather", "SparseCore", program("bidirectional:sc")), Await("g"))
    both = run(
        Launch("g", "gather", "SparseCore", program("bidirectional:sc")),
        Launch("h", "gather", "DMA", program("bidirectional:sc")),
        Await("g"),
        Await("h"),
    )
    assert both.time > 1.7 * one.time
    assert np.isclose(both.report.link_bytes, 2 * one.report.link_bytes).all()


def test_what_cannot_be_stepped_takes_its_time() -> None:
    course = run(Launch("g", "exchange", "DMA", 30e-6), Compute("a", 10e-6), Await("g"))
    assert course.time == pytest.approx(30e-6, rel=0.01)
    assert {span.engine for span in course.spans} == {CORE, "DMA"}
