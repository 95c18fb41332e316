"""`python -m benchmarks`: what it prints, writes and returns; and the parts it is made of."""

import csv
import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import harness
from benchmarks import compiled, measure, settings
from benchmarks.cases import CASES, LANES, LAYOUTS, Case
from benchmarks.settings import FlagError, Settings
from pallas_collectives.backends.algorithms import ALGORITHMS

REPOSITORY = Path(__file__).resolve().parent.parent

# A run in which the first collective is called wrongly; the rest of the program is the real one.
BROKEN = """
import dataclasses, sys
from absl import app
from benchmarks import __main__, cases, settings
case = cases.CASES[0]
wrong = dataclasses.replace(case, call=lambda m, x, axis, **how: {call})
settings.CASES = (wrong,)
app.run(__main__.main, argv=["benchmarks", *sys.argv[1:]])
"""
OURS_IS_OFF = "case.call(m, x, axis, **how) + ('backend' in how)"
BOTH_ARE_OFF = "case.call(m, x, axis, **how) + 1"


def start(*arguments: str, program: str | None = None) -> "subprocess.Popen[str]":
    how = ("-m", "benchmarks") if program is None else ("-c", program)
    return subprocess.Popen(
        (sys.executable, *how, *arguments),
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, program: str | None = None) -> tuple[int, str, str]:
    with start(*arguments, program=program) as process:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
    return process.returncode, out, err


def test_run_verifies_every_collective_and_algorithm(tmp_path: Path) -> None:
    files = tmp_path / "out.json", tmp_path / "out.csv"
    status, out, err = run(
        "--devices=4",
        "--sizes=8K",
        "--compile_for=",
        "--replay=",
        f"--json={files[0]}",
        f"--csv={files[1]}",
    )
    assert status == 0, err
    results = json.loads(files[0].read_text())
    seen = [(row["op"], row["algorithm"], row["size"]) for row in results["measured"]]
    assert seen == [(case.name, name, 8192) for case in CASES for name in ALGORITHMS[case.op]]
    for row in results["measured"]:
        assert (row["wrong"], row["devices"], row["backend"]) == (0, 4, "pallas")
        assert row["interpret_ms"] > 0
        assert row["time_us"] is row["algbw"] is row["busbw"] is None  # no TPU took this time
    environment = results["environment"]
    assert environment["platform"] == "simulated"
    assert environment["mesh"] == {"x": 4}
    assert environment["versions"]["jax"] == jax.__version__
    assert "interp ms" in out and "time(us)" not in out
    assert out.count("\n") > len(seen)
    with files[1].open() as file:
        kept = [(row["op"], row["algorithm"], int(row["size"])) for row in csv.DictReader(file)]
    assert kept == seen


def test_flags_choose_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, _, err = run(
        *(
            "--mesh=2x3",
            "--axis=y",
            "--sizes=12K:24K:2x",
            "--dtype=bfloat16,int8",
            "--compile_for=",
            "--replay=",
        ),
        *("--collective=all_gather", "--algorithm=direct:vmem", "--backend=xla,pallas"),
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


@pytest.mark.parametrize("call", [OURS_IS_OFF, BOTH_ARE_OFF])
def test_wrong_results_are_counted_and_fail_the_run(tmp_path: Path, call: str) -> None:
    file = tmp_path / "out.json"
    arguments = "--devices=2", "--sizes=8K", "--algorithm=direct", "--compile_for=", "--replay="
    program = BROKEN.format(call=call)
    status, out, err = run(*arguments, f"--json={file}", program=program)
    assert status == 1, err
    (row,) = json.loads(file.read_text())["measured"]
    assert row["wrong"] == 2 * 8192 // 4  # every element on both devices
    assert str(row["wrong"]) in out.splitlines()[2].split()


def test_crash_of_one_collective_is_reported_and_fails_the_run() -> None:
    program = BROKEN.format(call="1 / 0")
    status, out, _ = run(
        "--devices=2", "--sizes=8K", "--compile_for=", "--replay=", program=program
    )
    assert status == 1
    assert "ZeroDivisionError" in out and "error" in out.splitlines()[2]


def test_run_in_which_nothing_could_run_fails() -> None:
    status, out, _ = run(
        "--devices=2", "--sizes=8K", "--backend=nccl", "--compile_for=", "--replay="
    )
    assert status == 1
    assert "refused" in out and "NCCL needs NVIDIA GPUs" in out


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with start(
        "--sizes=8K:512M:2x", "--devices=2", "--compile_for=", "--replay=", f"--json={file}"
    ) as process:
        deadline = time.monotonic() + 100
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    rows = json.loads(file.read_text())["measured"]
    assert rows and rows[0]["wrong"] == 0
    assert rows[0]["op"] in out


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_collectives_are_compiled_beside_lax(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, err = run(
        *("--devices=2", "--sizes=8K", "--collective=all_gather", "--algorithm=direct"),
        *("--compile_for=v5e:2x2", "--replay=", f"--json={file}"),
    )
    assert status == 0, err
    first, last = json.loads(file.read_text())["compiled"]
    assert (first["op"], last["op"]) == ("all_gather", "all_gather, axis=-1")
    for row in (first, last):
        assert (row["topology"], row["devices"]) == ("v5e:2x2", 4)
        assert row["ops"] == "kernel" and row["lax_ops"] == "all-gather"
        assert compiled.SIZE <= row["temp"] < 2 * compiled.SIZE  # the result itself, and no copy
    assert "not there" in out


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_unknown_topology_fails_the_run() -> None:
    arguments = (
        "--devices=2",
        "--sizes=8K",
        "--algorithm=direct",
        "--compile_for=v99:2x2",
        "--replay=",
    )
    status, out, _ = run(*arguments)
    assert status == 1
    assert "v99" in out and "error" in out


def test_replay_models_instead_of_measuring(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, err = run(
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
        assert row["time_us"] > row["bound_us"] > 0
        assert math.isclose(row["algbw"], row["size"] / row["time_us"] / 1e3)
    assert "Modelled" in out and "time(us)" not in out


def test_summary_of_a_program_names_what_stands_around_the_collective() -> None:
    hlo = """
%fused (p: f32[8,128]) -> f32[1,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %c = f32[] constant(1)
  %slice = f32[1,128]{1,0} dynamic-slice(%p, %i), metadata={op_name="jit(f)/consumer/add"}
  ROOT %add = f32[1,128]{1,0} add(%slice, %c), metadata={op_name="jit(f)/consumer/add"}
}
ENTRY %main {
  %x = f32[8,128]{1,0} parameter(0)
  %index = s32[] multiply(%replica, %eight)
  %offsets = s32[64]{0} add(%iota, %iota)
  %start = (f32[8,128]{1,0}, u32[]) all-reduce-start(%x), metadata={op_name="jit(f)/psum"}
  %done = f32[8,128]{1,0} all-reduce-done(%start), metadata={op_name="jit(f)/psum"}
  %copy.1 = f32[8,128]{1,0:T(8,128)} copy(%done)
  %copy.2 = f32[8,128]{0,1} copy(%copy.1), metadata={op_name="jit(f)/producer/add"}
  %sum = f32[8,128]{0,1} add(%copy.1, %copy.2), metadata={op_name="jit(f)/psum"}
  %k = f32[8,128]{1,0} custom-call(%sum), custom_call_target="tpu_custom_call"
  ROOT %f = f32[1,128]{1,0} fusion(%k), kind=kLoop, calls=%fused
}
"""
    around = "add, all-reduce, 2 copy, dynamic-slice, kernel"
    assert compiled.summary(hlo, smallest=128) == around


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("8192", (8192,)),
        ("8K", (8192,)),
        ("1m", (1 << 20,)),
        ("2G", (2 << 30,)),
        ("8K:64K:2x", (8192, 16384, 32768, 65536)),
        ("8K:60K:2X", (8192, 16384, 32768)),
        ("8K:24K:8K", (8192, 16384, 24576)),
        ("8K:8K:2x", (8192,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert settings.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "0", "8Q", "-8K", "1.5K", "8K:", "8K:64K", "64K:8K:2x", "8K:64K:1x", "8K:64K:0x",
     "8K:64K:0", "8K:64K:x", "8K:64K:2x:2x"],
)  # fmt: skip
def test_bad_sizes(text: str) -> None:
    with pytest.raises(FlagError, match=r"--sizes=.*: .*write it like 8"):
        settings.parse_sizes(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--mesh=4y2",
        "--mesh=64",
        "--axis=z",
        "--dtype=flaot",
        "--collective=gather",
        "--algorithm=fastest",
        "--backend=mpi",
        "--compile_for=v5e",
        "--replay=v9:4x4",
        "--sizes=1K",
    ],
)
def test_bad_flags(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from absl import flags

    from benchmarks import __main__, devices

    monkeypatch.setattr(devices, "prepare", lambda simulated: None)  # JAX has started already
    saved = flags.FLAGS.flag_values_dict()
    try:
        flags.FLAGS(["benchmarks", "--compile_for=", flag])
        assert __main__.main(["benchmarks"]) == 2
    finally:
        for name in flags.FLAGS.flags_by_module_dict()["benchmarks.__main__"]:
            name.value = saved[name.name]
    assert flag.removeprefix("--").partition("=")[0] in capsys.readouterr().err


def test_argument_that_is_no_flag() -> None:
    status, _, err = run("all_gather")
    assert status == 2
    assert "argument 'all_gather'" in err and "--help" in err


def test_meshes_and_axes() -> None:
    assert settings.parse_mesh("4x2") == (4, 2)
    assert settings.parse_axis("y,x", (4, 2)) == ("y", "x")
    with pytest.raises(FlagError, match="x, y"):
        settings.parse_axis("x,x", (4, 2))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_busbw_is_what_every_device_must_send(n: int) -> None:
    """The least number of blocks, of n to the size, that leave a device."""
    factors = {case.name: case.busbw(n) for case in CASES}
    blocks_sent = {
        "all_gather": n - 1,
        "psum_scatter": n - 1,
        "psum": 2 * (n - 1),
        "all_to_all": n - 1,
        "ragged_all_to_all": sum((k + 1) / n for k in range(1, n)),
        "ppermute": n,
    }
    for name, factor in factors.items():
        assert math.isclose(factor, blocks_sent[name] / n), name


ON_CPU = [case for case in CASES if case.lax_on_cpu]


@pytest.mark.parametrize(
    "case", [case for case in LAYOUTS if case.lax_on_cpu], ids=lambda case: case.name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_references_agree_with_lax(case: Case, dtype: str) -> None:
    problem = measure.Problem(
        case, dtype, 32 << 10, harness.mesh(2, 3), ("y",), np.random.default_rng(0)
    )
    by_lax = problem.compile(problem.call("xla", None))(problem.operands)
    assert problem.wrong(by_lax) == 0
    one_off = jax.device_put(
        by_lax.at[1, 0, 0, 0].multiply(0).at[1, 0, 0, 0].add(99), by_lax.sharding
    )
    assert problem.wrong(one_off) == 1
    assert problem.wrong(by_lax.astype("float16" if dtype == "int8" else "int32")) == by_lax.size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_size_and_count_are_nccl_tests(case: Case) -> None:
    rng = np.random.default_rng(0)
    problem = measure.Problem(case, "bfloat16", 10_000, harness.mesh(4), ("x",), rng)
    rows = 10_000 // (4 * LANES * 2)
    assert problem.nbytes == 4 * rows * LANES * 2
    assert problem.count == rows * LANES * (4 if case.name in ("psum", "ppermute") else 1)


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(FlagError, match="4 devices with 128 elements of float32 each need 2048"):
        measure.Problem(
            CASES[0], "float32", 2047, harness.mesh(4), ("x",), np.random.default_rng(0)
        )


def test_sums_of_random_values_are_exact() -> None:
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        values = measure._random((16, 1000), dtype, 16, np.random.default_rng(0))
        total = values.astype(np.float64).sum(0)
        assert np.array_equal(total.astype(dtype).astype(np.float64), total)
        assert len(np.unique(values.astype(np.float64))) >= 3


@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.name)
def test_chain_runs_the_collective_in_every_link(case: Case) -> None:
    """A chain's time is that of its links: a collective that takes 20 ms shows as 20 ms."""

    def slow(x: jax.Array) -> jax.Array:
        def hold(value: np.ndarray) -> np.ndarray:
            time.sleep(0.02)
            return value

        y = case.call(lax, x, ("x",))
        return jax.pure_callback(hold, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    rng = np.random.default_rng(0)
    problem = measure.Problem(case, "float32", 4096, harness.mesh(2), ("x",), rng)
    seconds = problem.time(slow, warmup=1, iters=3)
    assert len(seconds) == measure.SAMPLES
    assert 0.02 <= sorted(seconds)[len(seconds) // 2] < 0.2


def test_time_becomes_bandwidth() -> None:
    row = measure.Row("psum", None, "xla", 8_000_000, 2_000_000, "float32", 8)
    timed = measure._timed(row, 0, [1e-3, 2e-3, 4e-3], busbw=1.75)
    assert (timed.time_us, timed.time_us_min, timed.time_us_max) == (2000, 1000, 4000)
    assert math.isclose(timed.algbw or 0, 4) and math.isclose(timed.busbw or 0, 7)
    noise = measure._timed(row, 0, [-1e-6, -1e-6, 1e-6], busbw=1.75)
    assert noise.time_us is None and "--iters" in noise.refused


def test_plan_runs_each_algorithm_for_pallas_and_others_once() -> None:
    wanted = Settings(CASES[:1], backends=("pallas", "xla"), sizes=(8192,), mesh=(4,))
    offered = ALGORITHMS[CASES[0].op]
    tasks = measure.plan(wanted)
    assert [(t.backend, t.algorithm) for t in tasks] == [
        *(("pallas", a) for a in offered),
        ("xla", None),
    ]
    named = dataclasses.replace(wanted, algorithms=("direct:vmem",), backends=("pallas",))
    assert [task.algorithm for task in measure.plan(named)] == ["direct:vmem"]


def test_every_collective_with_kernels_has_a_record() -> None:
    recorded = {case.op for case in CASES}
    assert recorded == set(ALGORITHMS)
