"""NCCL on real GPUs: one process with all of them, and one process for each.

python -m pytest -m gpu tests/nccl/test_nccl_gpu.py
"""

import collections
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nccl_gpu
import shared_gpu
from nccl_host import HostBoard
from pallas_collectives import nccl
from pallas_collectives.nccl import ffi, library, progress

pytestmark = pytest.mark.gpu
P = jax.sharding.PartitionSpec
HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip
REDUCIBLE = [d for d in DTYPES if d not in ("bool", "int16")]


@pytest.fixture(scope="module")
def group(devices):
    with nccl.create(devices, name="module", timeout=60, watchdog=10) as g:
        yield g


def values(dtype, *shape):
    return np.random.default_rng(0).integers(0, 2, shape).astype(jnp.dtype(dtype))


def run(group, inputs, shape, dtype, call):
    ranks = group.communicators
    work = nccl_gpu.UnderWay(
        group, {r: inputs[r] for r in ranks}, dict.fromkeys(ranks, (shape, dtype)), call
    )
    return work.results()


@pytest.mark.parametrize("dtype", DTYPES)
def test_moving(group, dtype):
    n = len(group.devices)
    x = values(dtype, n, n, 3)
    size = n * 3
    gathered = run(
        group, x, (n, n, 3), dtype, lambda c, a, b, s: c.all_gather(a, b, size, dtype, s)
    )
    swapped = run(group, x, (n, 3), dtype, lambda c, a, b, s: c.all_to_all(a, b, 3, dtype, s))
    sent = run(group, x, (n, 3), dtype, lambda c, a, b, s: c.broadcast(a, b, size, dtype, 1, s))
    for r in range(n):
        assert gathered[r].tobytes() == x.tobytes()
        assert swapped[r].tobytes() == x[:, r].tobytes()
        assert sent[r].tobytes() == x[1].tobytes()


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_reducing(group, dtype):
    n = len(group.devices)
    x = values(dtype, n, n * 3)
    wide = np.complex64 if "complex" in dtype else np.float32
    total = x.astype(wide).sum(0)
    everywhere = run(
        group, x, (n * 3,), dtype, lambda c, a, b, s: c.all_reduce(a, b, n * 3, dtype, "sum", s)
    )
    parts = run(
        group, x, (3,), dtype, lambda c, a, b, s: c.reduce_scatter(a, b, 3, dtype, "sum", s)
    )
    rooted = run(
        group, x, (n * 3,), dtype, lambda c, a, b, s: c.reduce(a, b, n * 3, dtype, "sum", 1, s)
    )
    for r in range(n):
        np.testing.assert_array_equal(everywhere[r].astype(wide), total)
        np.testing.assert_array_equal(parts[r].astype(wide), total[3 * r : 3 * r + 3])
    np.testing.assert_array_equal(rooted[1].astype(wide), total)


@pytest.mark.parametrize("op", ["prod", "max", "min", "avg"])
def test_other_reductions(group, op):
    n = len(group.devices)
    x = np.random.default_rng(1).normal(size=(n, 5)).astype(np.float32)
    function = {"prod": np.prod, "max": np.max, "min": np.min, "avg": np.mean}[op]
    y = run(group, x, (5,), "float32", lambda c, a, b, s: c.all_reduce(a, b, 5, "float32", op, s))
    for r in range(n):
        np.testing.assert_allclose(y[r], function(x, axis=0), rtol=1e-5)


def test_the_kernels_write_what_the_reference_writes(group):
    c = group.communicators[0]
    device, host = group.runtime.board(c.ordinal), HostBoard()
    stream = group.runtime.driver.new_stream(c.ordinal)
    for i in range(progress.SLOTS + 300):
        for board in (device, host):
            board.enter(stream, i * 2654435761 & 0xFFFFFFFF)
            if i % 5:
                board.leave(stream)
    event = group.runtime.driver.record(c.ordinal, stream)
    while not event.done():
        time.sleep(0.001)
    assert device.read() == host.read()


def shardings(devices):
    mesh = jax.sharding.Mesh
    first, last = devices[: len(devices) // 2], devices[len(devices) // 2 :]
    return {
        "rows": jax.NamedSharding(mesh(np.array(devices), ("x",)), P("x")),
        "columns": jax.NamedSharding(mesh(np.array(devices), ("x",)), P(None, "x")),
        "backwards": jax.NamedSharding(mesh(np.array(devices[::-1]), ("x",)), P("x")),
        "replicated": jax.NamedSharding(mesh(np.array(devices), ("x",)), P()),
        "first": jax.NamedSharding(mesh(np.array(first), ("x",)), P("x")),
        "last": jax.NamedSharding(mesh(np.array(last), ("x",)), P("x")),
        "last columns": jax.NamedSharding(mesh(np.array(last), ("x",)), P(None, "x")),
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [("first", "last"), ("rows", "last"), ("first", "rows"), ("rows", "columns"),
     ("rows", "backwards"), ("replicated", "rows"), ("rows", "replicated"),
     ("first", "last columns")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "complex64", "bool"])
def test_transfer(devices, source, target, dtype):
    host = values(dtype, 8, 12)
    x = jax.device_put(host, shardings(devices)[source])
    y = nccl.send_or_recv(x, shardings(devices)[target], watchdog=10).array()
    assert y.sharding == shardings(devices)[target]
    assert np.asarray(y).tobytes() == host.tobytes()


def test_transfers_are_ordered_with_xla_on_both_sides(devices):
    """The source is still being computed when it is sent, and is dropped at once; the target is
    used at once. Without the events this reads memory too early or after it was reused."""
    to, back = shardings(devices)["last"], shardings(devices)["first"]
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 20, lambda _, b: b @ b / 2048.0, a))
    x = jax.device_put(np.ones((2048, 2048), np.float32), back)
    for i in range(10):
        made = jax.jit(lambda a, i=i: slow(a) * 0 + i)(x)
        handle = nccl.send_or_recv(made, to, watchdog=10)
        del made
        jax.jit(lambda a: a * 0 - 1)(x)  # XLA would like that memory
        y = handle.array()
        assert float(jax.jit(lambda a: (a == a[0, 0]).all() * a[0, 0])(y)) == i


def test_transfer_bandwidth(devices, capsys):
    """Prints, of the largest array only, how fast it moves; must beat a tenth of the wire."""
    source, target = shardings(devices)["first"], shardings(devices)["last"]
    x = jax.device_put(jnp.ones((2**28,), jnp.float32), source)  # 1 GiB
    best = np.inf
    for _ in range(5):
        jax.block_until_ready(x)
        begin = time.perf_counter()
        nccl.send_or_recv(x, target, watchdog=10).wait(30)
        best = min(best, time.perf_counter() - begin)
    per_device = x.nbytes / len(source.device_set) / best / 1e9
    with capsys.disabled():
        print(f"\ntransfer of 1 GiB: {per_device:.0f} GB/s from each source device")
    assert per_device > 45


def test_inside_jit_in_one_process(group):
    n = len(group.devices)
    f, sharding = nccl_gpu.gather_in_jit(group, "one process", 5)
    host = np.arange(n * 256, dtype=np.float32) % 11
    before = ffi.counters.calls
    y = f(jax.device_put(host, sharding)).block_until_ready()
    assert ffi.counters.calls - before >= n
    np.testing.assert_allclose(y, nccl_gpu.expected_chain(host, n, 5), rtol=1e-5)


def test_a_rank_that_does_not_come_is_named_and_the_process_goes_on(devices):
    n = len(devices)
    g = nccl.create(devices, name="lonely", timeout=60, watchdog=2)
    nccl_gpu.gather(g)
    absent = g.communicators.pop(n - 1)
    begin = time.monotonic()
    with pytest.raises(nccl.PeerError) as error:
        nccl_gpu.gather(g)
    assert time.monotonic() - begin < 10
    assert error.value.missing == (n - 1,) and error.value.sequence == 1
    assert error.value.call == "all_gather float32 4"
    absent.abort()
    with pytest.raises(nccl.PeerError):
        nccl_gpu.gather(g)
    with nccl.create(devices, name="lonely", timeout=60) as g:
        nccl_gpu.gather(g)


def test_the_library_is_xlas_and_another_comes_too_late(devices):
    jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=jax.sharding.Mesh(np.array(devices), ("x",)),
        in_specs=P("x"), out_specs=P(),
    ))(jnp.ones(len(devices))).block_until_ready()  # fmt: skip
    loaded = nccl.load()
    assert loaded.path == os.path.realpath(library.loaded())
    assert int(loaded.version.split(".")[0]) == 2
    with pytest.raises(nccl.LibraryError, match="already uses"):
        nccl.load("/some/other/libnccl.so.2")


def test_a_broken_file_in_the_environment_is_refused_and_the_process_lives(devices, tmp_path):
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(b"\x7fELF broken")
    program = (
        "from pallas_collectives import nccl\n"
        "try:\n    nccl.load()\nexcept nccl.LibraryError as error:\n    print(error)\n"
        "import os; del os.environ['PALLAS_COLLECTIVES_NCCL_SO']; print(nccl.load().version)\n"
    )
    environment = os.environ | {library.ENVIRONMENT: str(broken)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert f"{broken} cannot serve as NCCL" in done.stdout, done.stderr
    assert done.stdout.split()[-1].startswith("2."), done.stdout + done.stderr


# --- one process for each GPU -------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(ranks):
    """scenario -> {process: what it printed}, from processes that ran them all."""
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    n = ranks
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(HELPERS / "nccl_gpu_worker.py"), str(p), str(n), str(port)],
            env=environment | shared_gpu.environment(p),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for p in range(n)
    ]  # fmt: skip
    found: dict = collections.defaultdict(dict)
    deadline = time.monotonic() + 240
    try:
        for p, worker in enumerate(workers):
            out, err = worker.communicate(timeout=max(1, deadline - time.monotonic()))
            for line in out.splitlines():
                if line.startswith("{"):
                    found[json.loads(line)["scenario"]][p] = json.loads(line)
            if "end" not in found or (p not in found["end"] and p != n - 1):
                print(f"--- process {p} (status {worker.returncode})\n{out[-3000:]}\n{err[-3000:]}")
    except subprocess.TimeoutExpired:
        pytest.fail(f"processes hang; they reached {sorted(found)}")
    finally:
        for worker in workers:
            worker.kill()
        with open(os.environ.get("OUT", "/tmp") + "/nccl_scenarios.json", "w") as file:
            json.dump(found, file, indent=1)
    return found


def everyone(lines, scenario, ranks, survivors=False):
    reports = lines[scenario]
    assert sorted(reports) == list(range(ranks - survivors)), f"{scenario}: {reports}"
    return reports


@pytest.mark.parametrize(
    "scenario",
    [
        "collectives",
        "two_groups_at_once",
        "transfers",
        "backend_like_lax",
        "stale_key",
        "works_again",
    ],
)
def test_processes_succeed(lines, ranks, scenario):
    for report in everyone(lines, scenario, ranks).values():
        assert report["error"] is None, report


@pytest.mark.parametrize("scenario", ["captured_without_watchdog", "captured_with_watchdog"])
def test_graphs_call_out_at_capture_only(lines, ranks, scenario):
    for report in everyone(lines, scenario, ranks).values():
        assert report["error"] is None, report
        assert sum(report["calls"]) < 3 * 20, report
        assert report["calls"][-5:] == [0] * 5, report


def test_independent_calls_of_a_captured_program(lines, ranks):
    for report in everyone(lines, "independent_calls", ranks).values():
        assert report["error"] is None and report["calls"] == [0], report


@pytest.mark.parametrize(
    ("scenario", "call"),
    [("one_sleeps", "all_gather float32 4"), ("one_is_killed", "all_gather float32 4"),
     ("captured_and_one_stays_away", "all_gather float32 1024")],
)  # fmt: skip
def test_a_missing_process_is_named_in_time(lines, ranks, scenario, call):
    late = ranks - 1
    reports = everyone(lines, scenario, ranks, survivors=scenario == "one_is_killed")
    for process, report in reports.items():
        assert report["error"].startswith("PeerError: group "), report
        assert call in report["error"] and report["missing"] == [late], report
        assert report["seconds"] < (30 if "captured" in scenario else 15), (process, report)


@pytest.mark.parametrize(
    ("scenario", "named"),
    [("other_count", ["all_gather float32 64 by", "all_gather float32 4096 by"]),
     ("other_dtype", ["all_gather bfloat16 4 by", "all_gather float16 4 by"]),
     ("other_op", ["all_gather float32 64 by", "all_reduce sum float32 64 by"])],
)  # fmt: skip
def test_calls_that_do_not_match_are_named(lines, ranks, scenario, named):
    for report in everyone(lines, scenario, ranks).values():
        assert report["error"].startswith("PeerError: group "), report
        assert all(text in report["error"] for text in named), report
        assert report["seconds"] < 20, report


def test_use_after_abort_raises(lines, ranks):
    for report in everyone(lines, "use_after_abort", ranks).values():
        assert report["error"].startswith("CommunicatorError: group 'aborted'"), report


def test_a_raising_callback_fails_its_program_and_is_missed_by_the_others(lines, ranks):
    reports = everyone(lines, "raising_callback", ranks)
    late = ranks - 1
    assert "ValueError: a bug of the user's" in reports.pop(late)["error"]
    for report in reports.values():
        assert "PeerError: group 'raising'" in report["error"], report
        assert f"ranks [{late}] have not come to it" in report["error"], report


def test_survivors_of_a_killed_process_make_a_new_group(lines, ranks):
    for report in everyone(lines, "survivors_work", ranks, survivors=True).values():
        assert report["error"] is None, report
