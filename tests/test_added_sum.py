"""A sum that is added to the catalogue is a sum wherever that matters."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import harness
import in_order
import pallas_collectives as pc
from benchmarks.cases import CASES
from benchmarks.steps import schedule
from pallas_collectives import catalogue, collectives, wires
from pallas_collectives.backends import algorithms, choice, pallas
from pallas_collectives.backends.wire_ways import error_in_words
from pallas_collectives.catalogue import COLLECTIVES
from pallas_collectives.catalogue.records import (
    ON_LINE,
    ON_RING,
    Primitive,
)
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.lowering import primitives
from pallas_collectives.lowering.primitives import LAX

ANYWHERE = (ON_RING, ON_LINE)


def _sum_by_lax(x: jax.Array, *, axis_name: Any) -> jax.Array:
    return LAX.psum(x, axis_name)


_sum_p = primitives.defined("sum_rows", _sum_by_lax)


def _sum_rows(x: Any, axis_name: Any, *, order: Any = None, algorithm: Any = "auto") -> Any:
    how = choice.settle(axis_name, None, None, algorithm, order=order)
    return primitives.with_twins(how, lambda x: _sum_p.bind(x, axis_name=axis_name), x)


def _sum_by_kernels(x: jax.Array, group: Any, *, how: Any) -> jax.Array:
    plan = algorithms.choose("sum_rows", how, x, group)
    return algorithms.launch(plan, x[None], group, op="sum", interpret=how.interpret)[0]


def _sum_record(*names: str) -> catalogue.Collective:
    """By algorithms of psum's that take operands as they lie; the first is preferred."""
    of_psum = COLLECTIVES["all_reduce"]
    chosen = [of_psum.algorithm(name) for name in names]
    return dataclasses.replace(
        of_psum,
        name="sum_rows",
        functions={"sum_rows": ("sum_rows", lambda x, axes, n, axis: ((x,), {"axis_name": axes}))},
        primitives=(Primitive("sum_rows"),),
        algorithms=tuple(dataclasses.replace(a, lies=ANYWHERE) for a in chosen if a),
        ordered_steps=(),
    )


@pytest.fixture
def with_a_sum(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (pc, collectives):
        monkeypatch.setattr(module, "sum_rows", _sum_rows, raising=False)
    monkeypatch.setattr(pallas, "sum_rows", _sum_by_kernels, raising=False)
    with catalogue.added(_sum_record("line", "gather")):
        yield


@pytest.mark.usefixtures("with_a_sum", "fresh_counts")
@pytest.mark.parametrize("order, algorithm", [(None, "line"), ("rank", "gather")])
def test_an_added_sum_is_added_in_the_order_that_is_asked_for(
    order: str | None, algorithm: str
) -> None:
    x = in_order.numbers((3, 8, 128), "float32")
    got = harness.per_device(lambda a: pc.sum_rows(a, "x", order=order), harness.mesh(3))(x)
    assert pc.counts() == {("sum_rows", "pallas", algorithm): 1}
    if order == "rank":
        np.testing.assert_array_equal(got, in_order.everywhere(x))
    told = pc.explain("sum_rows", shape=(8, 128), mesh=harness.mesh(3), axis_name="x", order=order)
    assert told.algorithm == algorithm


@pytest.mark.usefixtures("with_a_sum")
def test_an_added_sum_refuses_an_order_that_none_of_its_algorithms_has() -> None:
    def call(**how: Any) -> None:
        run = harness.per_device(lambda a: pc.sum_rows(a, "x", **how), harness.mesh(2))
        run(np.zeros((2, 8, 128), np.float32))

    with pytest.raises(AlgorithmError, match=r"'line' for sum_rows in order='rank'.* of gather"):
        call(order="rank", algorithm="line")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(catalogue._records, "sum_rows", _sum_record("line"))
        message = r"order='rank' for sum_rows: none of its algorithms adds .*; leave order=None"
        with pytest.raises(AlgorithmError, match=message):
            call(order="rank")


@pytest.mark.usefixtures("with_a_sum")
def test_an_added_sum_is_a_sum_wherever_that_matters() -> None:
    assert "in each of the 8 terms" in error_in_words("sum_rows", wires.Wire("int8"), 8)
    attributes = '%x), metadata={op_name="jit(f)/sum_rows_line/pallas_call"}'
    call = schedule.Instruction("c", "f32[8,128]{1,0}", "custom-call", attributes)
    assert schedule._by_kernel(call, schedule.CORE).op == "sum_rows"
    (case,) = (case for case in CASES if case.op == "sum_rows")
    assert case.adds
