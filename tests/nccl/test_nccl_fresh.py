"""Fresh processes whose first NCCL call is captured in a CUDA graph: every collective, in every
place of a program, with one process for all GPUs and with one for each. Results against lax.

python -m pytest -m gpu tests/nccl/test_nccl_fresh.py

Twelve programs run at a time, so no workers of pytest-xdist (`-n`): each would start all of them.
"""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

import shared_gpu

pytestmark = pytest.mark.gpu
SCRIPT = str(pathlib.Path(__file__).parents[1] / "helpers" / "nccl_fresh.py")
AT_A_TIME = 12  # processes start slowly, and the programs are small
OPS = ["all_gather", "psum", "pmax", "psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all"]
SITUATIONS = [
    "forward", "gradient", "scan", "groups", "second axis", "both axes", "after lax",
    "graph of one", "no compiler", "sizes", "two meshes",
]  # fmt: skip
LAYOUTS = ["one process", "a process each"]
# lax has no gradient of pmax and no groups for these two; the counts of a ragged exchange come from
# the host, so it is never part of a graph, and its program makes graphs of the rest.
LEFT_OUT = {
    ("pmax", "gradient"), ("ppermute", "groups"), ("ragged_all_to_all", "groups"),
    ("ragged_all_to_all", "gradient"), ("ragged_all_to_all", "graph of one"),
}  # fmt: skip
# The failure is that of GPUs of one process.
UNCONNECTED = {"UNCONNECTED": "1"}
CASES = [
    (op, situation, layout)
    for op in OPS
    for situation in SITUATIONS
    for layout in LAYOUTS
    if (op, situation) not in LEFT_OUT
]

# XLA runs the gradient of psum_scatter once without a graph, as the counts of calls tell.
NOT_CAPTURED_AT_FIRST = {("psum_scatter", "gradient"), *((OPS[-1], s) for s in SITUATIONS)}
UNCONNECTED_CASES = [
    c for c in CASES if c[:2] not in NOT_CAPTURED_AT_FIRST and c[2] == "one process"
]


def reports(op, situation, layout, **environment):
    """What the process, or each of the processes, of a case printed."""
    n = shared_gpu.ranks() if layout == "a process each" else 1
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, SCRIPT, op, situation]
    started = [
        subprocess.Popen(
            command + ([str(p), str(n), port] if n > 1 else []),
            env=os.environ | environment | shared_gpu.environment(p),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for p in range(n)
    ]  # fmt: skip
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=150)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            assert lines, f"status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
            found.append(json.loads(lines[-1]) | {"log": out + err})
    finally:
        for process in started:
            process.kill()
    return found


@pytest.fixture(scope="module")
def started(request, ranks):
    """(case, whether connected) -> future of its reports, for what this run has selected."""
    wanted = [
        (item.callspec.params["case"], "unconnected" not in item.name)
        for item in request.session.items
        if item.module is request.module
        and (item.callspec.params["case"][2] == "a process each" or jax.device_count() > 1)
    ]
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {
            (case, connected): pool.submit(reports, *case, **({} if connected else UNCONNECTED))
            for case, connected in wanted
        }


@pytest.mark.parametrize("case", CASES, ids=" - ".join)
@pytest.mark.timeout(600)
def test_the_first_call_is_captured_and_gives_what_lax_gives(started, case):
    if case[2] == "one process" and jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    for report in started[case, True].result():
        check(case, report)


@pytest.mark.parametrize("case", UNCONNECTED_CASES, ids=" - ".join)
@pytest.mark.timeout(600)
def test_unconnected_the_same_programs_fail_and_say_why(started, devices, case):
    """So what is tested above is the first call, and is captured. A new group then does it."""
    (report,) = started[case, False].result()
    told = report.get("failed", "it ran")
    print(told)
    use = "messages" if case[0] in ("all_to_all", "ppermute") else "collectives"
    for part in (
        "CallError: nccl", " returned 3: internal error", "failed to peer with device",
        "900 operation not permitted when stream is capturing", f"group '{use}' of devices [",
        "set NCCL_RUNTIME_CONNECT=0", "jax.clear_caches()",
    ):  # fmt: skip
        assert part in told
    check(case, report)


def check(case, report):
    op, situation, _ = case
    print({k: v for k, v in report.items() if k != "log"})
    assert report["error"] is None, report.get("trace")
    if shared_gpu.ranks() == 2:  # of two terms all orders give one sum
        assert report["worst"] < 1e-5
    # Of more, NCCL's order for us and for lax may differ: each is within the bound of any order.
    assert report["exact"] <= report["allowed"]
    for calls in filter(None, (report["calls"], report.get("first"))):
        assert calls[0] > 0
        if op != "ragged_all_to_all":  # replays of a graph make no calls
            assert calls[-2:] == [0, 0]
    if situation == "no compiler":
        assert report["python"] == sum(report["calls"])
        if op != "ragged_all_to_all":
            assert set(report["captured"]) == {1}
    elif op != "ragged_all_to_all":
        assert report["python"] == 0
