"""Replay's own speed (processor time) and memory, in a process of its own, on large pods."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.replay import Machine

_PROGRAM = """
import json, pathlib, re, sys, time
import jax, jax.numpy as jnp
from pallas_collectives.kernels import all_gather
from pallas_collectives.topology.groups import Group
from pallas_collectives.replay import Machine, replay
name, n, symmetric, races = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4] == "1"
rows = int(sys.argv[5])
machine = Machine.named(name)
mesh = machine.mesh({"x": n, "y": machine.n_devices // n})
group = Group(("x",), (n,))
body = lambda x: all_gather.ring(
    x, group, axis=0, bidirectional=True, vmem=False, interpret=False)
spec = jax.sharding.PartitionSpec()
f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
start = time.process_time()
own = pathlib.Path("/proc/self/status")  # what getrusage tells begins with what the parent took
report = replay(f, jax.ShapeDtypeStruct((rows, 128), jnp.float32), machine=machine,
                symmetric=symmetric, races=races)
print(json.dumps({
    "seconds": time.process_time() - start,
    "gigabytes": int(re.search(r"VmHWM:\\s+(\\d+)", own.read_text())[1]) / 1e6,
    "ok": not report.findings, "stepped": report.devices_modelled, "time": report.time,
    "races": report.races is not None,
}))
"""


def _replayed(
    name: str, n: int, *, symmetric: bool = True, races: bool = False, rows: int = 8192
) -> dict:
    arguments = (name, str(n), str(int(symmetric)), str(int(races)), str(rows))
    done = subprocess.run(
        (sys.executable, "-c", _PROGRAM, *arguments),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize(
    "name, algorithm, limit",
    [("v5e:16x16", None, 10), ("v5e:16x16", "bidirectional", 10), ("v5p:16x16x16", None, 300)],
)
def test_all_devices_as_one_group(name: str, algorithm: str | None, limit: float) -> None:
    """All axes at once, and a ring along the wires: 4 MiB of each device, in eight parts."""
    (gather,) = (case for case in CASES if case.name == "all_gather")
    machine = Machine.named(name)
    axes, size = tuple(replay_rows.mesh_axes(machine)), machine.n_devices << 22
    start = time.process_time()
    report = replay_rows.run(replay_rows.Task(machine, gather, "float32", size, algorithm, axes))
    assert not report.findings
    assert time.process_time() - start < limit


@pytest.mark.slow
def test_256_devices_take_seconds_even_one_by_one() -> None:
    along_one_axis = _replayed("v5e:16x16", 16)
    assert along_one_axis["stepped"] == 1
    assert along_one_axis["seconds"] < 10
    one_ring = _replayed("v5e:16x16", 256, symmetric=False, races=True, rows=8)
    assert one_ring["stepped"] == 256
    assert one_ring["races"]
    assert one_ring["ok"]
    assert one_ring["seconds"] < 40
    assert one_ring["gigabytes"] < 4


@pytest.mark.full
@pytest.mark.parametrize(
    "n, rows",
    [(16, 8192), pytest.param(4096, 8, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_4096_devices(n: int, rows: int) -> None:
    """256 rings of one axis; or one ring of 4096 in lax's order, of one tile each."""
    report = _replayed("v5p:16x16x16", n, rows=rows)
    assert report["ok"]
    assert report["seconds"] < 300
    assert report["gigabytes"] < 4
