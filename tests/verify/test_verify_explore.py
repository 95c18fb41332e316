"""`explore`: schedules in the interpreter, beside what the judge says."""

from typing import Any

import jax
import numpy as np
import pytest

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
    wrong = verify.explore(body, operand, devices=(3,), expected=x, late=0)
    assert not wrong.ok and "100% of the result" in str(wrong)


def test_a_shared_semaphore_shows_in_runs_too() -> None:
    found = verify.explore(kernels.gather, X, devices=(4,), late=0)
    assert not found.ok and "SOUND" in str(found)
    shown = {run.mode for run in found.runs if run.wrong}
    assert shown  # by a report, or by values that differ from those of the other


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
