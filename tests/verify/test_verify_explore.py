"""`explore`: schedules in the interpreter, beside what the judge says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import harness
import judged_public
import verify_kernels as kernels
from pallas_collectives import verify

X = "f32[8,128]"


def test_a_sound_kernel_has_one_result_on_all_schedules() -> None:
    x = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None], (3, 8, 128))
    operand = jax.ShapeDtypeStruct((8, 128), "float32")

    def body(x: Any) -> Any:
        return kernels.to_the_right(x * 0 + jax.lax.axis_index("x").astype(x.dtype))

    found = verify.explore(body, operand, devices=(3,), expected=np.roll(x, 1, axis=0), late=1)
    assert found.ok, found
    assert [(run.mode, run.late) for run in found.runs] == [
        (mode, late) for late in (None, 0) for mode in ("on_wait", "eager")
    ]
    with jax.set_mesh(harness.mesh(2)):
        wrong = verify.explore(body, operand, devices=(3,), expected=x, late=0)
    assert not wrong.ok and "100% of the result" in str(wrong)


@pytest.mark.full
def test_a_shared_semaphore_shows_in_runs_too() -> None:
    found = verify.explore(kernels.gather, X, devices=(4,), late=1, seconds=0.3)
    assert not found.ok and "SOUND" in str(found)
    shown = {run.mode for run in found.runs if run.wrong}
    assert shown  # by a report, or by values that differ from those of the other


# Each race that the page on proofs reports of public kernels, in miniature: what the judge finds,
# the run that shows it, by its mode and late device, and what is wrong there.
RACES = {
    "two_rings": ({"early-read"}, "on_wait", 0, r"a race is reported|\d+% of the result is wrong"),
    "asks_one_side": ({"entry"}, "eager", 0, "device 0's memory is used before it enters a kernel"),
    "zeroed": ({"race"}, "eager", None, "a race is reported"),
    "zeroed_by_turns": ({"race"}, "eager", None, "a race is reported"),
    "gather_in_halves": ({"race"}, "eager", None, "a race is reported"),
    "scatter_in_two_steps": ({"race"}, "eager", None, "a race is reported"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RACES)
def test_a_schedule_shows_the_race_of_a_public_kernel(name: str) -> None:
    rules, mode, late, wrong = RACES[name]
    gathered = np.broadcast_to(np.arange(4.0)[:, None, None], (4, 4, 32, 128))

    def body(x: Any) -> Any:
        position = jax.lax.axis_index("x").astype(x.dtype)
        return getattr(judged_public, name)(x * 0 + position, 4)

    found = verify.explore(
        body,
        "f32[32,128]",
        devices=(4,),
        late=1,
        seconds=0.3,
        expected=gathered if name == "two_rings" else None,
    )
    assert {finding.rule for finding in found.verdict.findings} == rules
    (run,) = (run for run in found.runs if (run.mode, run.late) == (mode, late))
    assert re.match(wrong, run.wrong), found


def test_what_never_ends_is_not_run() -> None:
    found = verify.explore(kernels.stuck, X, devices=(2,))
    assert not found.ok
    assert [run.mode for run in found.runs] == ["not run"]


def test_what_the_replay_cannot_follow_is_run() -> None:
    def body(x: Any) -> Any:
        rows = (x[:1, 0] * 0 + 8).astype(jax.numpy.int32)
        return kernels.depends_on_data(rows, x)

    found = verify.explore(body, X, devices=(2,), late=1)
    assert found.verdict.status == "cannot be judged", found
    assert found.ok and len(found.runs) == 4


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(verify.AskError, match=r"simulate\(64\)"):
        verify.explore(kernels.gather, X, devices=(64,))


_HANGS = """
import pallas_collectives as pc
pc.simulate(2)
import verify_kernels as kernels
def body(x):
    rows = (x[:1, 0] * 0 + 8).astype("int32")
    return kernels.to_the_right(kernels.depends_on_data(rows, x), fault="stuck")
found = pc.verify.explore(body, "f32[8,128]", devices=(2,), late=1, timeout=8)
print(found.ok, len(found.runs), found.runs[0].wrong, flush=True)
import os
os._exit(0)
"""


@pytest.mark.full
def test_a_run_that_hangs_is_given_up() -> None:
    here = Path(kernels.__file__)
    paths = {"PYTHONPATH": f"{here.parents[2]}{os.pathsep}{here.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", _HANGS],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **paths},
    )
    assert done.stdout.startswith("False 1 did not end within 8 s"), done.stderr
