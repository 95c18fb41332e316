"""How long a verdict takes, races included: processor time of whole verdicts."""

import functools
import time
from typing import Any

import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_collectives as pc
import verify_kernels as kernels
from pallas_collectives import verify

OURS = {
    "all_gather": lambda x: pc.all_gather(x, "x", tiled=True),
    "all_reduce": lambda x: pc.psum(x, "x"),
    "all_to_all": lambda x: pc.all_to_all(x, "x", 0, 0, tiled=True),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    ("n", "seconds"), [(64, 10), pytest.param(256, 60, marks=pytest.mark.slow)]
)
def test_devices_of_a_pod_are_judged_in_time(name: str, n: int, seconds: float) -> None:
    start = time.process_time()
    verdict = verify.check(OURS[name], "f32[8*n,128]", devices=(n,))
    assert verdict.ok, verdict
    assert time.process_time() - start < seconds
    report: Any = verdict.cases[0].report
    assert "at least" in str(verdict) if report.least else report.time > 0


def _rounds(x: Any, n_rounds: int, *, everyone: bool) -> Any:
    """A ring shift again and again: after a barrier of everyone, or with no order between two."""
    n = lax.axis_size("x")

    def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
        me, barrier = lax.axis_index("x"), pltpu.get_barrier_semaphore()

        def meet() -> None:
            for other in range(n):
                pl.semaphore_signal(barrier, 1, device_id={"x": other})
            pl.semaphore_wait(barrier, n)

        def turn(_: Any, carry: Any) -> Any:
            if everyone:
                meet()
            right = {"x": lax.rem(me + 1, n)}
            hop = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=right)
            hop.start()
            hop.wait()
            return carry

        if not everyone:
            meet()
        lax.fori_loop(0, n_rounds, turn, 0)

    return kernels.launched(kernel, x, x.shape, [kernels.DMA, kernels.DMA])


@pytest.mark.parametrize(("everyone", "n_rounds"), [(True, 100), (False, 1000)])
def test_many_rounds_are_judged_in_time(everyone: bool, n_rounds: int) -> None:
    """Barriers of everyone leave each question to the exact test; and races are many."""
    start = time.process_time()
    shifts = functools.partial(_rounds, n_rounds=n_rounds, everyone=everyone)
    assert verify.check(shifts, "f32[8,128]", devices=8).ok == everyone
    assert time.process_time() - start < 15
