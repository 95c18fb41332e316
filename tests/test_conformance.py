"""Every collective, algorithm, dtype and device count against jax.lax and numpy."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import conformance
import harness
import pallas_collectives as pc
from conformance import ROWS, Row
from pallas_collectives import catalogue, examples
from pallas_collectives.backends import algorithms, choice, pallas
from pallas_collectives.catalogue.records import RING, Algorithm, Collective, Primitive
from pallas_collectives.kernels.machinery import entry, launch, sync
from pallas_collectives.lowering import primitives
from pallas_collectives.lowering.primitives import LAX
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group


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


# On a torus whose ring goes another way than lax counts -------------------------------------------

TORI = ("v5e:2x4", "v5p:2x2x2")


def _check_on_torus(row: Row, algorithm: str, torus: str) -> None:
    with pc.torus(torus):
        conformance.check(row, 8, "float32", {"algorithm": algorithm})


@pytest.mark.parametrize("torus", TORI)
@pytest.mark.parametrize(
    "op, algorithm", [(op, a) for op in FIRST_ROWS for a in conformance.ALGORITHMS[op]]
)
def test_algorithm_where_neighbours_on_the_ring_are_none_by_rank(
    op: str, algorithm: str, torus: str
) -> None:
    _check_on_torus(FIRST_ROWS[op], algorithm, torus)


def _flanks_by_lax(x: jax.Array, *, axis_name: Any) -> jax.Array:
    n = jax.lax.axis_size(axis_name)
    before = LAX.ppermute(x, axis_name, [(d, (d + 1) % n) for d in range(n)])
    behind = LAX.ppermute(x, axis_name, [((d + 1) % n, d) for d in range(n)])
    return jnp.stack([before, behind])


_flanks_p = primitives.defined("flanks", _flanks_by_lax)


def _flanks(x: jax.Array, axis_name: Any, *, algorithm: str) -> Any:
    """The x of the device before and of the one behind."""
    how = choice.settle(axis_name, None, None, algorithm)
    return primitives.with_twins(how, lambda x: _flanks_p.bind(x, axis_name=axis_name), x)


def _flanks_kernel(ring: Any, x_ref: Any, o_ref: Any, scratch: Any) -> None:
    send_sem, recv_sem = scratch
    for i, to in enumerate((1, -1)):
        sync.remote_copy(x_ref, o_ref.at[i], send_sem, recv_sem, ring.peer(to))
    sync.wait(recv_sem, x_ref, times=2)
    sync.wait(send_sem, x_ref, times=2)


def _launched(x: jax.Array, group: Group, *, vmem: bool, interpret: Any) -> jax.Array:
    return launch.call(
        _flanks_kernel,
        group,
        x,
        out_shape=jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        scratch=(pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA),
        barrier=entry.WIDE,
        name="flanks_both",
        vmem=vmem,
        interpret=interpret,
    )


_FLANKS = Collective(
    name="flanks",
    functions={"flanks": ("flanks", lambda x, axes, n, axis: ((x,), {"axis_name": axes}))},
    primitives=(Primitive("flanks"),),
    algorithms=(
        Algorithm(name="both", launcher=_launched, reach=RING, sent="the operand", steps="1"),
    ),
    example=dataclasses.replace(
        examples.PPERMUTE,
        call=lambda m, x, axis, **how: _flanks(x, axis, **how),
        reference=lambda xs: np.stack([np.roll(xs, 1, 0), np.roll(xs, -1, 0)], axis=1),
    ),
)


@pytest.mark.parametrize("torus", TORI)
def test_neighbours_by_rank_that_are_sought_along_the_ring_are_caught(
    torus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are others there. Elsewhere the values are right: no test but that above tells."""

    def by_kernel(arrange: Callable[[Group], Group]) -> Callable[..., jax.Array]:
        def flanks(x: jax.Array, group: Group, *, how: Any) -> jax.Array:
            group = arrange(group)
            plan = algorithms.choose("flanks", how, x, group)
            return algorithms.launch(plan, x, group, interpret=how.interpret)

        return flanks

    with catalogue.added(_FLANKS):
        (row,) = (row for row in conformance.rows() if row.op == "flanks")
        monkeypatch.setattr(pallas, "flanks", by_kernel(lambda group: group), raising=False)
        _check_on_torus(row, "both", torus)
        monkeypatch.setattr(pallas, "flanks", by_kernel(placement.arranged))
        conformance.check(row, 8, "float32", {"algorithm": "both"})
        with pytest.raises(AssertionError, match="Mismatched elements"):
            _check_on_torus(row, "both", torus)


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
