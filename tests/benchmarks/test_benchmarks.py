"""`python -m benchmarks`: what it prints, writes and returns."""

import csv
import json
import math
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from benchmarking import NOTHING_ELSE, ONE_ROW, Bench, finish, instead, start
from benchmarks import compiled, measure, readme, replay_rows
from benchmarks.cases import CASES
from benchmarks.compiled import CompilerError
from benchmarks.steps import compiling
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError


@pytest.mark.full
def test_run_verifies_every_collective_and_algorithm(tmp_path: Path) -> None:
    files = tmp_path / "out.json", tmp_path / "out.csv"
    arguments = ("--devices=2", "--sizes=8K", f"--json={files[0]}", f"--csv={files[1]}")
    status, out, err = finish(start(*arguments, *NOTHING_ELSE))
    assert status == 0, err
    results = json.loads(files[0].read_text())
    seen = [(row["op"], row["algorithm"], row["size"]) for row in results["measured"]]
    assert seen == [(case.name, name, 8192) for case in CASES for name in ALGORITHMS[case.op]]
    for row in results["measured"]:
        assert (row["wrong"], row["devices"], row["backend"]) == (0, 2, "pallas")
        assert row["interpret_ms"] > 0
        assert row["time_us"] is row["algbw"] is row["busbw"] is None  # no TPU took this time
    environment = results["environment"]
    assert environment["platform"] == "simulated"
    assert environment["mesh"] == {"x": 2}
    assert environment["versions"]["jax"] == jax.__version__
    assert "interp ms" in out and "time(us)" not in out
    assert out.splitlines()[-1] == f"{len(seen)} rows, all right"
    with files[1].open() as file:
        kept = [(row["op"], row["algorithm"], int(row["size"])) for row in csv.DictReader(file)]
    assert kept == seen


def test_flags_choose_what_runs(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, _, err = bench(
        *("--mesh=2x3", "--axis=y", "-b", "12K", "-e", "24K", "-f", "2", "--dtype=bfloat16,int8"),
        *("--collective=all_gather", "--algorithm=direct:vmem", "--compare=lax"),
        *NOTHING_ELSE,
        f"--json={file}",
    )
    assert status == 0, err
    rows = json.loads(file.read_text())["measured"]
    assert [(row["type"], row["size"], row["backend"], row["algorithm"]) for row in rows] == [
        (dtype, size, backend, algorithm)
        for dtype in ("bfloat16", "int8")
        for size in (12288, 24576)
        for backend, algorithm in (("xla", None), ("pallas", "direct:vmem"))
    ]
    assert {row["devices"] for row in rows} == {3}
    assert rows[0]["count"] == 12288 // 3 // 2
    assert rows[0]["interpret_ms"] is None  # lax is not interpreted


@pytest.mark.parametrize("last, warned", [("8K", False), ("64M", True)])
def test_a_long_simulation_is_told_of_before_it_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, last: str, warned: bool
) -> None:
    monkeypatch.setattr(measure, "rows", lambda tasks, *_: iter(()))
    _, out, _ = bench("--mesh=8", f"--sizes=8K:{last}:2x", *NOTHING_ELSE)
    assert ("Simulating these" in out and "--sizes" in out) == warned


@pytest.mark.parametrize("both", [False, True], ids=["ours", "both"])
def test_wrong_results_are_counted_and_fail_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, both: bool
) -> None:
    def off(module: Any, x: jax.Array, axis: Any, **how: Any) -> jax.Array:
        return CASES[0].call(module, x, axis, **how) + (both or "backend" in how)

    instead(monkeypatch, off)
    status, out, err = bench(*ONE_ROW, f"--json={tmp_path / 'out.json'}")
    assert status == 1, err
    (row,) = json.loads((tmp_path / "out.json").read_text())["measured"]
    assert row["wrong"] == 2 * 8192 // 4  # every element on both devices
    assert str(row["wrong"]) in out.splitlines()[2].split()
    assert out.splitlines()[-1] == "1 row, NOT all right: 1 wrong"
    status, out, _ = bench(*ONE_ROW, "--nocheck")
    assert status == 0
    assert out.splitlines()[2].split()[-1] == "-"


def test_crash_of_one_collective_is_reported_and_fails_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, lambda m, x, axis, **how: 1 / 0)
    status, out, _ = bench(*ONE_ROW)
    assert status == 1
    assert "ZeroDivisionError" in out and "error" in out.splitlines()[2]
    assert "1 failed" in out.splitlines()[-1]


def test_run_in_which_nothing_could_run_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise CollectiveError("this", "it cannot be", "do without")

    instead(monkeypatch, refused)
    status, out, _ = bench(*ONE_ROW)
    assert status == 1
    assert "refused" in out and "this: it cannot be" in out
    assert "nothing of measured could run" in out.splitlines()[-1]


@pytest.mark.full
def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    process = start("--sizes=8K:512M:2x", "--devices=2", *NOTHING_ELSE, f"--json={file}")
    deadline = time.monotonic() + 100
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    rows = json.loads(file.read_text())["measured"]
    assert rows and rows[0]["wrong"] == 0
    assert rows[0]["op"] in out and "--resume" in out


@pytest.mark.parametrize(
    "raised, status, said",
    [
        (CompilerError("it ended"), 1, "it ended\n"),
        (CollectiveError("a", "it must be two", "add b"), 2, "a: it must be two; add b.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
@pytest.mark.parametrize("command", ["step", "readme"])
def test_what_ends_a_command_is_no_traceback(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    raised: BaseException,
    status: int,
    said: str,
) -> None:
    def rows(_: Any) -> NoReturn:
        raise raised

    monkeypatch.setattr(readme, "STORED", tmp_path / "readme.json")
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "rows", rows)
    monkeypatch.setattr(replay_rows, "rows", rows)
    done = bench(command, *(["--recompute"] if command == "readme" else []))
    assert (done.status, done.err) == (status, said)


@pytest.mark.full
def test_replay_models_instead_of_measuring(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, err = bench(
        *("--replay=v5e:4x4", "--collective=all_gather,psum", "--sizes=4M", f"--json={file}")
    )
    assert status == 0, err
    results = json.loads(file.read_text())
    assert "measured" not in results and "compiled" not in results
    assert [(row["op"], row["machine"], row["devices"]) for row in results["replayed"]] == [
        ("all_gather", "v5e:4x4", 4),
        ("psum", "v5e:4x4", 4),
    ]
    for row in results["replayed"]:
        both = 2 * 3 / 4 if row["op"] == "psum" else 1  # a sum goes both ways at once on a line
        assert 0 < row["busbw"] < both * 45, "a link of a v5e carries no more GB/s"
        assert row["bound_us"] > 0
        assert math.isclose(row["of_bound"], 100 * row["bound_us"] / row["time_us"])
        assert math.isclose(row["algbw"], row["size"] / row["time_us"] / 1e3)
        assert row["served"] == "line" and row["kernel"].endswith("_line")
    assert "Modelled" in out and "time(us)" not in out and "all_gather_line" not in out


def test_fused_says_what_is_hidden(bench: Bench) -> None:
    status, out, err = bench(
        *("fused", "--pods=v6e:16x1", "--shapes=1024x4096x4096", "--fused=all_gather_matmul")
    )
    assert status == 0, err
    title, header, row = out.splitlines()
    assert "Modelled, not measured" in title and "hidden %  x longer" in header
    where, over, what, shape, *times, hidden, longer, least = row.split()
    assert (where, over, what) == ("v6e:16x1", "x", "all_gather_matmul")
    assert shape == "1024x4096x4096"
    fused, product, collective = map(float, times)
    assert float(least) <= max(product, collective) < fused < product + collective
    longest = max(product, collective)
    assert 85 <= float(hidden) <= 100 and float(longer) == pytest.approx(fused / longest, abs=0.01)


@pytest.mark.gpu
def test_host_times_small_calls_of_all_kinds() -> None:
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = finish(start("host", env={"JAX_PLATFORMS": "cuda"}))
    assert done.status == 0, done.err
    _, header, *rows = done.out.splitlines()
    assert header.split()[2:5] == ["ours", "lax", "callback"] and len(rows) == 8
    assert all(float(time) > 0 for row in rows for time in row.split()[-3:])
