"""The same command on every host of several: they find each other, and one speaks."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarking
from benchmarks import measure
from benchmarks.rows import Measured


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _two(arguments: Callable[[int], list[str]], **how: Any) -> list[benchmarking.Done]:
    """Two processes of a cluster, with the arguments of each."""
    cluster = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": str(_free_port()),
    }
    processes = [
        benchmarking.start(
            *arguments(i),
            env={**cluster, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            **how,
        )
        for i in range(2)
    ]
    return [benchmarking.finish(process) for process in processes]


@pytest.mark.full
def test_processes_of_a_cluster_run_together_and_the_first_prints(tmp_path: Path) -> None:
    def flags(process: int) -> list[str]:
        asked = ["--devices=2", "--backend=xla", "--collective=all_gather,psum", "--sizes=8K"]
        return [
            *asked,
            *more,
            "--compile_for=",
            "--replay=",
            f"--json={tmp_path / str(process)}.json",
        ]

    more: list[str] = []
    first, second = _two(flags)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "2 rows, all right" in first.out
    # Gloo says who "is connected to 1 peer ranks", and its threads print in pieces.
    assert not [line for line in second.out.splitlines() if not re.search("Gloo|peer ranks", line)]
    results = json.loads((tmp_path / "0.json").read_text())
    assert not (tmp_path / "1.json").exists()
    assert (results["environment"]["processes"], results["environment"]["devices"]) == (2, 4)
    assert [(row["devices"], row["wrong"]) for row in results["measured"]] == [(4, 0), (4, 0)]
    # The second has no file, and goes on where the first does.
    whole = results["measured"]
    (tmp_path / "0.json").write_text(json.dumps(results | {"measured": whole[:1]}))
    more.append("--resume")
    assert [done.status for done in _two(flags)] == [0, 0]
    assert json.loads((tmp_path / "0.json").read_text())["measured"] == whole


_IN_TIME = """
import sys, time, jax
from benchmarks import certify, devices, measure
from benchmarks.cases import named
from benchmarks.settings import Settings

devices.prepare(2)
mesh = devices.make_mesh((4,))
wanted = Settings(named("psum"), backends=("xla",), sizes=(8192,) * 1000, mesh=(4,))
until = time.monotonic() + float(sys.argv[1])
print(len([*certify._in_time(measure.rows(measure.plan(wanted), wanted, mesh), until)]), "rows")
"""


@pytest.mark.full
def test_no_process_begins_a_row_alone_when_time_is_up() -> None:
    """The second's clock says at once that time is up."""
    ends = _two(lambda process: [str(3 - 3 * process)], program=("-c", _IN_TIME))
    assert [done.status for done in ends] == [0, 0], ends
    first, second = (re.findall(r"^(\d+) rows", done.out, re.M) for done in ends)
    assert first == second and int(*first) > 0


ROW = Measured(op="psum", type="float32", backend="pallas", size=8, count=1, wrong=2)


def test_a_row_is_what_all_processes_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other(*other: int) -> Measured:
        monkeypatch.setattr(
            measure.multihost,
            "process_allgather",
            lambda mine: np.stack([mine, np.array(other, np.int32)]),
        )
        return measure.agreed(ROW)

    assert with_other(3, 0, 0).wrong == 5
    assert "process 1" in with_other(0, 1, 0).error
    assert "process 1" in with_other(0, 0, 1).refused
    assert with_other(0, 0, 0) == ROW
