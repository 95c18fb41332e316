"""When a loop's sums start, and what barriers join them with."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.steps import compiling, programs
from pallas_collectives.lowering.chain import Chain, Sum
from pallas_collectives.lowering.turns import Step

FIRST, SECOND, PRODUCT, CARRY = 1, 2, 3, 4  # numbers of two gradients and of a turn's values
NUMBERS = FIRST, SECOND, PRODUCT, CARRY
GATHERED = 5  # the other result of a product that is a kernel
SUMS = {FIRST: 11, SECOND: 12}


def joined(product_size: int, product_ends: float, *others: int) -> list[Any]:
    """What runs, in order: sums by their gradient, and what each barrier joins.

    The first sum takes two seconds from the turn's start. The second one's gradient is there after
    one, and a product has been computed at `product_ends`, with other and larger results if named.
    """
    done: list[Any] = []

    def turn(first: jax.Array, second: jax.Array, product: jax.Array, carry: jax.Array) -> Any:
        values = dict(zip(NUMBERS, (first, second, product, carry), strict=True))
        values[GATHERED] = jnp.ones(100)

        def ends(gradient: int) -> Sum:
            def run() -> None:
                values[SUMS[gradient]] = values[gradient] + 1
                done.append(gradient)

            return Sum(gradient, [SUMS[gradient]], 2.0, run)

        def joins(self: Step, values: dict[int, Any]) -> None:
            assert self.eqn is None and self.reads == self.writes
            done.append([*self.reads])
            by_jax(self, values)

        with pytest.MonkeyPatch.context() as patch:
            by_jax = Step.run
            patch.setattr(Step, "run", joins)
            chain = Chain(values, ends=8.0)
            chain.add(ends(FIRST), 0.0)
            chain.add(ends(SECOND), 1.0)
            chain.passed(Step(None, (), (*others, PRODUCT)), product_ends)
            chain.end([CARRY])
        return values[SUMS[FIRST]], values[SUMS[SECOND]], values[CARRY]

    one = jnp.ones(4)
    jaxpr = jax.make_jaxpr(turn)(one, one, jnp.ones(product_size), one)
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert [len(eqn.invars) for eqn in barriers] == [len(x) for x in done if isinstance(x, list)]
    return done


@pytest.mark.parametrize(
    "size, ends, behind",
    [
        (4, 2.5, [PRODUCT]),
        (4, 1.7, [PRODUCT]),  # products take longer than is counted
        (4, 1.5, []),  # the first sum is still under way
        (8, 2.5, []),  # it would be kept for the barrier alone
        (4, 6.5, []),  # the products to come take less time than the second sum
    ],
)
def test_a_sum_starts_behind_the_one_before_it(size: int, ends: float, behind: list[int]) -> None:
    assert joined(size, ends) == [
        FIRST,
        [SECOND, SUMS[FIRST], *behind],
        SECOND,
        [CARRY, SUMS[SECOND]],
    ]


def test_of_a_kernels_results_the_smallest_is_joined() -> None:
    assert joined(4, 2.5, GATHERED) == joined(4, 2.5)


@pytest.mark.full
def test_a_sum_starts_behind_a_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradient for v5p, whose last products are in kernels."""
    pytest.importorskip("libtpu")
    by_chain, behind = Chain.passed, []

    def passed(self: Chain, product: Step, now: float) -> None:
        waited = len(self._waiting)
        by_chain(self, product, now)
        if len(self._waiting) < waited:
            behind.append(product)

    monkeypatch.setattr(Chain, "passed", passed)
    devices = compiling.devices_of("v5p:2x2x2")
    form = programs.Form(gradient=True, unrolled=False)
    compiling.lower(programs.named("fsdp_tensor")(devices.size, form), devices, "override")
    assert any(not product.is_product for product in behind)


def test_a_sum_that_finds_no_other_under_way_starts_at_once() -> None:
    values = {FIRST: jnp.ones(4), SECOND: jnp.ones(4)}
    started: list[int] = []

    def ends(gradient: int) -> Sum:
        def run() -> None:
            values[SUMS[gradient]] = values[gradient]
            started.append(gradient)

        return Sum(gradient, [SUMS[gradient]], 2.0, run)

    chain = Chain(values, ends=8.0)
    chain.add(ends(FIRST), 0.0)
    chain.add(ends(SECOND), 2.0)
    assert started == [FIRST, SECOND]


def test_a_turn_without_sums_has_no_barrier() -> None:
    chain = Chain({}, ends=8.0)
    chain.end([CARRY])  # which would need its value
