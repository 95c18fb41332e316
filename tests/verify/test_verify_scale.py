"""How long a verdict takes, races included: processor time of whole verdicts."""

import time
from typing import Any

import pytest

import pallas_collectives as pc
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
