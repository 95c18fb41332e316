"""Every collective, algorithm, dtype and device count against jax.lax and numpy."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import conformance
import harness
from conformance import ROWS, Row


def first_rows() -> dict[str, Row]:
    """A row of each collective."""
    return {row.op: row for row in reversed(conformance.rows())}


FIRST_ROWS = first_rows()


@pytest.mark.parametrize(
    "row, dtype", [(row, dtype) for row in ROWS for dtype in row.dtypes], ids=str
)
def test_row_with_the_algorithm_chosen(row: Row, dtype: str) -> None:
    conformance.check(row, 4, dtype, {})


def _race_rows() -> Iterator[Any]:
    """Every algorithm on 2 to 8 devices; tori of several axes are test_torus_kernels' matter."""
    for op in first_rows():
        for algorithm in conformance.ALGORITHMS[op]:
            # Two kernels of many steps: 20 s each.
            relayed = op == "ragged_all_to_all" and algorithm != "direct"
            slow_from = 6 if relayed else 9
            for n in (4, 5) if algorithm == "torus" else range(2, 9):
                marks = pytest.mark.slow if n >= slow_from else ()
                yield pytest.param(op, algorithm, n, marks=marks)


@pytest.mark.parametrize("op, algorithm, n", [*_race_rows()])
def test_algorithm_on_n_devices_without_races(op: str, algorithm: str, n: int) -> None:
    how = {"algorithm": algorithm}
    conformance.check(FIRST_ROWS[op], n, "float32", how, adversaries=True, seed=n)


@pytest.mark.parametrize(
    "row, algorithm",
    [(row, algorithm) for row in ROWS for algorithm in conformance.algorithms(row)],
    ids=str,
)
def test_row_with_every_algorithm(row: Row, algorithm: str) -> None:
    conformance.check(row, 3, row.dtypes[-1], {"algorithm": algorithm}, seed=1)


@pytest.mark.parametrize("op", [op for op, row in FIRST_ROWS.items() if row.in_lax])
def test_xla_backend(op: str) -> None:
    conformance.check(FIRST_ROWS[op], 4, "float32", {"backend": "xla"})


def test_every_collective_has_rows() -> None:
    assert set(FIRST_ROWS) == set(conformance.ALGORITHMS)
    names = [str(row) for row in ROWS]
    assert not [a for a, b in itertools.pairwise(sorted(names)) if a == b]


def test_one_compiled_program_runs_under_each_adversary() -> None:
    """A DMA for which nobody waits runs only where it runs at once."""
    traced, params = [], harness.Adversaries(detect_races=False)

    def kernel(x_ref: Any, o_ref: Any, sem: Any) -> None:
        traced.append(True)
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), "float32"),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        interpret=params,
    )
    run, x = jax.jit(call), harness.random((8, 128), "float32")
    done = {
        mode: params.under(mode, lambda: not harness.caught(lambda: run(x), x))
        for mode in harness.ADVERSARIES
    }
    assert done == {"on_wait": False, "eager": True}
    assert len(traced) == 1
