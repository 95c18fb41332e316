"""The launcher of tests/helpers/processes.py."""

import os
import signal
import time

import jax
import pytest

from processes import Processes


def rank_plus(number):
    return jax.process_index() + number


def fail_on(rank):
    print(f"here is process {jax.process_index()}", flush=True)
    if jax.process_index() == rank:
        raise KeyError("of mine")


def die_on(rank):
    print(f"here is process {jax.process_index()}", flush=True)
    if jax.process_index() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def shape_of_the_world():
    return jax.process_count(), jax.device_count(), jax.local_device_count()


@pytest.mark.full
def test_values_and_errors_come_back_in_order():
    with Processes(2, devices=3) as processes:
        assert [o.unwrap() for o in processes.run(rank_plus, 10, timeout=60)] == [10, 11]
        assert [o.unwrap() for o in processes.run(rank_plus, 10, timeout=60, on=[1])] == [11]
        assert [o.unwrap() for o in processes.run(shape_of_the_world, timeout=60)] == [
            (2, 6, 3)
        ] * 2
        fine, failed = processes.run(fail_on, 1, timeout=60)
        assert fine.unwrap() is None
        assert isinstance(failed.error, KeyError) and "fail_on" in failed.traceback
        assert "here is process 1" in processes.output()


@pytest.mark.full
def test_death_and_silence_fail_with_the_output():
    with Processes(2) as processes:
        start = time.monotonic()
        with pytest.raises(AssertionError, match=r"sleep: process 0 did not answer in 0\.2 s"):
            processes.run(time.sleep, 2, timeout=0.2)
        assert time.monotonic() - start < 2
    with Processes(2) as processes:
        with pytest.raises(AssertionError, match="process 1 died") as e:
            processes.run(die_on, 1, timeout=60)
        assert "here is process 0" in str(e.value) and "exit status -9" in str(e.value)
