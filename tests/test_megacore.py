"""Chips with two cores a device (v4, v5p): a kernel runs on one of them, so no DMA starts twice."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

import pallas_collectives as pc
from benchmarks.cases import CASES
from pallas_collectives.backends.algorithms import ALGORITHMS
from pallas_collectives.kernels import launch
from pallas_collectives.replay import Machine

# The dimensions of a grid that a chip divides between its cores.
DIVIDED = ("parallel", "core_parallel")


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    """The parameters of all kernel launches in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params
        else:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from pallas_calls(inner)


def on_one_core(params: Any) -> bool:
    """Whether nothing in a launch can be divided between cores."""
    semantics = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    names = {str(getattr(s, "value", s)).rpartition(".")[2].lower() for s in semantics}
    return params["grid_mapping"].grid == () and not names & set(DIVIDED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_kernel_is_divided_between_cores(case: Any) -> None:
    mesh, spec = Machine.named("v5p:4x1x1").mesh({"x": 4}), jax.sharding.PartitionSpec()
    operand = jax.ShapeDtypeStruct(case.operand(4, 64), jnp.float32)
    for algorithm in ALGORITHMS[case.op]:

        def call(x: jax.Array, algorithm: str = algorithm) -> jax.Array:
            return case.call(pc, x, "x", backend="pallas", algorithm=algorithm)

        mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        with launch.ids_of_its_own():
            lowered = jax.make_jaxpr(_served(mapped))(operand)
        found = list(pallas_calls(lowered.jaxpr))
        assert found and all(map(on_one_core, found))


def _served(mapped: Any) -> Any:
    """A function in which the collectives' primitives are the kernels that serve them."""
    from pallas_collectives.replay import trace_program

    return trace_program.inlined(mapped)
