"""Every collective, algorithm, dtype and device count against jax.lax and numpy."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import conformance
import harness
from conformance import ROWS, Row

FIRST_ROWS = {row.op: row for row in reversed(ROWS)}


@pytest.mark.parametrize(
    "row, dtype", [(row, dtype) for row in ROWS for dtype in row.dtypes], ids=str
)
def test_row_with_the_algorithm_chosen(row: Row, dtype: str) -> None:
    conformance.check(row, 4, dtype, {})


def _race_rows() -> Iterator[Any]:
    """Every algorithm on 2 to 8 devices; tori of several axes are test_torus_kernels' matter."""
    for op in FIRST_ROWS:
        for algorithm in conformance.ALGORITHMS[op]:
            # Two kernels of many steps: 20 s each.
            slow_from = 6 if (op, algorithm) == ("ragged_all_to_all", "ring") else 9
            for n in (4, 5) if algorithm == "torus" else range(2, 9):
                marks = pytest.mark.slow if n >= slow_from else ()
                yield pytest.param(op, algorithm, n, marks=marks)


@pytest.mark.parametrize("mode", harness.ADVERSARIES)
@pytest.mark.parametrize("op, algorithm, n", _race_rows())
def test_algorithm_on_n_devices_without_races(op: str, algorithm: str, n: int, mode: str) -> None:
    row, params = FIRST_ROWS[op], harness.ADVERSARIES[mode]
    conformance.check(row, n, "float32", {"algorithm": algorithm}, params, seed=n)


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
