"""`python -m benchmarks`: what it prints, writes and returns; and the parts it is made of."""

import csv
import dataclasses
import importlib.util
import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import benchmarking
import harness
from benchmarking import Bench, finish, start
from benchmarks import baseline, compiled, devices, measure, peaks, problem, settings, timing
from benchmarks.cases import CASES, LANES, LAYOUTS, Case
from benchmarks.rows import Measured
from benchmarks.settings import FlagError, Settings
from pallas_collectives.backends.algorithms import ALGORITHMS
from pallas_collectives.errors import CollectiveError

NOTHING_ELSE = ("--compile_for=", "--replay=")
LIBTPU = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Bench:
    return benchmarking.in_process(monkeypatch, capsys)


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


ONE_ROW = ("--mesh=2", "--sizes=8K", "--algorithm=direct", *NOTHING_ELSE)


def instead(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Has the first collective alone, and called so; the rest of the program is the real one."""
    monkeypatch.setattr(settings, "CASES", (dataclasses.replace(CASES[0], call=call),))


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


@LIBTPU
def test_collectives_are_compiled_beside_lax(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, err = bench(
        *("--mesh=2", "--sizes=8K", "--collective=all_gather", "--algorithm=direct"),
        *("--compile_for=v5e:2x2,v99:2x2", "--replay=", f"--json={file}"),
    )
    assert status == 1, err  # for the second topology
    first, last, *unknown = json.loads(file.read_text())["compiled"]
    assert (first["op"], last["op"]) == ("all_gather", "all_gather, axis=-1")
    for row in (first, last):
        assert (row["topology"], row["devices"]) == ("v5e:2x2", 4)
        assert row["ops"] == "kernel" and row["lax_ops"] == "all-gather"
        assert compiled.SIZE <= row["temp"] < 2 * compiled.SIZE  # the result itself, and no copy
    assert "not there" in out and "xla_enable_async_all_gather" in out
    assert all("v99" in row["error"] for row in unknown)
    assert f"{len(unknown)} failed" in out.splitlines()[-1]


def test_without_a_compiler_only_a_run_that_asks_for_it_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    arguments = ("--mesh=2", "--sizes=8K", "--algorithm=direct", "--collective=all_gather")
    status, out, err = bench(*arguments, "--compile_for=v5e:2x2", "--replay=")
    assert status == 1 and not out
    assert "libtpu is not installed" in err
    status, out, _ = bench(*arguments, "--replay=")
    assert status == 0
    assert "libtpu is not installed" in out


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
        assert 0 < row["busbw"] < 45, "a link of a v5e carries no more GB/s"
        assert row["bound_us"] > 0
        assert math.isclose(row["of_bound"], 100 * row["bound_us"] / row["time_us"])
        assert math.isclose(row["algbw"], row["size"] / row["time_us"] / 1e3)
    assert "Modelled" in out and "time(us)" not in out


@LIBTPU
@pytest.mark.parametrize("name", harness.GENERATIONS.values(), ids=list(harness.GENERATIONS))
def test_options_for_lax_are_known_to_the_compiler(name: str) -> None:
    on = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = jax.sharding.Mesh(np.array(on), ("x",))
    x = jax.ShapeDtypeStruct((8 * len(on), 128), "float32", sharding=NamedSharding(mesh, P("x")))
    gather = jax.shard_map(
        lambda x: lax.all_gather(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    lowered = jax.jit(gather).lower(x)
    lowered.compile(compiler_options=baseline.options("tpu", on[0].device_kind))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lowered.compile(compiler_options={"xla_no_such_option": True})


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
        "--dtype=int4",
        "--dtype=float64",
        "--dtype=str",
        "-f=4",
        "--json=/nowhere/out.json",
        "--csv=/",
        "--plot=/nowhere/out.png",
        "--resume",
    ],
)
def test_bad_flags(flag: str, bench: Bench) -> None:
    status, out, err = bench("--compile_for=", flag)
    assert status == 2 and not out
    assert flag.strip("-").partition("=")[0] in err


def test_argument_that_is_no_flag(bench: Bench) -> None:
    status, _, err = bench("all_gather")
    assert status == 2
    assert "argument 'all_gather'" in err and "--help" in err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("certify", "all_gather"), "argument 'all_gather'"),
        (("certify", "--certificate=/nowhere/a"), "--certificate=/nowhere/a.json"),
        (("certify", "--json=a.json"), "--json: all of a certificate is written to NAME.md"),
        (("--mesh=4x2", "--devices=4"), "--devices=4: --mesh=4x2 is one of 8"),
        (("--backend=nccl",), "--backend=nccl: it needs NVIDIA GPUs, and there are none here"),
        (("--backend=xla", "--replay=v5e:4x4"), "--backend=xla: only kernels can be replayed"),
        (("fused", "x"), "argument 'x'"),
        (("fused", "--fused=psum"), "--fused=psum: the products are all_gather_matmul"),
        (("fused", "--shapes=8x8"), "--shapes=8x8: it is ROWSxKxN"),
        (("fused", "--pods=v9:4"), "--pods=v9:4"),
        (("fused", "--pods=v5e:1x4"), "one device along x"),
        (("report", "/nowhere/a.json"), "/nowhere/a.json: it holds no results"),
        (("compare", "a.json"), "compare A.json B.json"),
        (("readme", "x"), "argument 'x'"),
    ],
)
def test_commands_refuse_what_makes_no_sense(
    bench: Bench, arguments: tuple[str, ...], told: str
) -> None:
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "") and told in err


def test_fused_says_what_is_hidden(bench: Bench) -> None:
    status, out, err = bench(
        *("fused", "--pods=v5e:4x4", "--shapes=256x1024x1024", "--fused=all_gather_matmul")
    )
    assert status == 0, err
    title, header, row = out.splitlines()
    assert "Modelled, not measured" in title and header.split()[-2:] == ["overlap", "%"]
    assert row.split()[:3] == ["v5e:4x4", "all_gather_matmul", "256x1024x1024"]


def test_help_is_that_of_the_command() -> None:
    done = finish(start("fused", "--help"))
    assert "products with their collective in one kernel" in done.out
    assert "--shapes" in done.out and "--collective" not in done.out


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


ON_CPU = [case for case in CASES if case.lax_everywhere]


@pytest.mark.parametrize(
    "case", [case for case in LAYOUTS if case.lax_everywhere], ids=lambda case: case.name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_references_agree_with_lax(case: Case, dtype: str) -> None:
    of = problem.Problem(
        case, dtype, 32 << 10, harness.mesh(2, 3), ("y",), np.random.default_rng(0)
    )
    by_lax = of.compile(of.call("xla", None))(of.operands)
    assert of.wrong(by_lax) == 0
    one_off = jax.device_put(
        by_lax.at[1, 0, 0, 0].multiply(0).at[1, 0, 0, 0].add(99), by_lax.sharding
    )
    assert of.wrong(one_off) == 1
    assert of.wrong(by_lax.astype("float16" if dtype == "int8" else "int32")) == by_lax.size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_size_and_count_are_nccl_tests(case: Case) -> None:
    rng = np.random.default_rng(0)
    of = problem.Problem(case, "bfloat16", 10_000, harness.mesh(4), ("x",), rng)
    rows = 10_000 // (4 * LANES * 2)
    assert of.nbytes == 4 * rows * LANES * 2
    assert of.count == rows * LANES * (4 if case.name in ("psum", "ppermute") else 1)


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(FlagError, match="4 devices with 128 elements of float32 each need 2048"):
        problem.Problem(
            CASES[0], "float32", 2047, harness.mesh(4), ("x",), np.random.default_rng(0)
        )


def test_sums_of_random_values_are_exact() -> None:
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        values = problem._random((16, 1000), dtype, 16, np.random.default_rng(0))
        total = values.astype(np.float64).sum(0)
        assert np.array_equal(total.astype(dtype).astype(np.float64), total)
        assert len(np.unique(values.astype(np.float64))) >= 3


def slow(call: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A collective that takes 20 ms more."""

    def slowed(x: jax.Array) -> jax.Array:
        def hold(value: np.ndarray) -> np.ndarray:
            time.sleep(0.02)
            return value

        y = call(x)
        return jax.pure_callback(hold, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    return slowed


@pytest.mark.parametrize("clock", [timing.device_seconds, timing.dispatched_seconds])
@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.name)
def test_time_is_that_of_each_collective(case: Case, clock: Callable[..., list[float]]) -> None:
    rng = np.random.default_rng(0)
    of = problem.Problem(case, "float32", 4096, harness.mesh(2), ("x",), rng)
    seconds = clock(of, slow(of.call("xla", None)), warmup=1, iters=3)
    assert len(seconds) == timing.SAMPLES
    assert 0.02 <= sorted(seconds)[len(seconds) // 2] < 0.2


def test_timed_rows_stand_beside_lax(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way of a run on real devices, here on CPUs that are not taken for simulated TPUs."""
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setattr(devices, "backends", lambda kind: ("pallas",))
    monkeypatch.setattr(peaks, "of_group", lambda mesh, axes: 2.0)
    call = CASES[0].call
    instead(monkeypatch, lambda m, x, axis, **how: slow(lambda x: call(m, x, axis, **how))(x))
    status, out, err = bench(
        *("--mesh=2", "--sizes=4K", "--algorithm=direct", "-n=2", "-w=0"),
        *("--compare=lax", f"--trace={tmp_path / 'trace'}"),
        *(f"--json={tmp_path / 'out.json'}", f"--plot={tmp_path / 'out.png'}", *NOTHING_ELSE),
    )
    assert status == 0, out + err
    by_lax, ours = json.loads((tmp_path / "out.json").read_text())["measured"]
    assert by_lax["backend"] == "xla" and by_lax["wrong"] == ours["wrong"] == 0
    for row in (by_lax, ours):
        assert row["time_us_min"] <= row["time_us"] <= row["time_us_max"]
        assert row["time_us"] > 10_000
        assert math.isclose(row["algbw"], 4096 / row["time_us"] / 1e3)
        assert math.isclose(row["of_peak"], 100 * row["busbw"] / 2)
    assert f"{by_lax['time_us'] / ours['time_us']:.2f}x" in out.splitlines()[3].split()
    assert "xla_gpu_enable_latency_hiding_scheduler" in out
    assert len(list((tmp_path / "trace").glob("*/plugins/profile/*/*.xplane.pb"))) == 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_time_becomes_bandwidth() -> None:
    row = Measured(
        op="psum", backend="xla", size=8_000_000, count=2_000_000, type="float32", time_us=2000.0
    )
    rated = measure.with_rates(row, busbw=1.75, peak=70.0)
    assert math.isclose(rated.algbw or 0, 4) and math.isclose(rated.busbw or 0, 7)
    assert math.isclose(rated.of_peak or 0, 10)
    assert measure.with_rates(row, 1.75, None).of_peak is None


def test_time_within_the_noise_of_dispatch_is_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setattr(timing, "device_seconds", lambda *_, **__: [-1e-6, -1e-6, 1e-6])
    status, out, _ = bench(*ONE_ROW, "--collective=all_gather", "--backend=xla")
    assert status == 1
    assert "raise --iters" in out


@pytest.mark.parametrize(
    "kind, coords, devices_each, gbps",
    [
        ("TPU v5 lite", [(x, 0, 0) for x in range(4)], 1, 90),  # both ways along x
        ("TPU v5 lite", [(x, 0, 0) for x in range(2)], 1, 45),  # one link between two
        ("TPU v5p", [(x, y, z) for x in range(4) for y in range(4) for z in range(4)], 1, 540),
        ("TPU v6e", [(x, y, 0) for x in range(4) for y in range(2)], 1, 270),
        ("TPU7x", [(x, 0, 0) for x in range(4)], 2, 100),  # two devices share a chip's links
        ("TPU v99", [(0, 0, 0), (1, 0, 0)], 1, None),
    ],
)
def test_peak_is_that_of_the_links_within_a_group(
    kind: str, coords: list[tuple[int, ...]], devices_each: int, gbps: float | None
) -> None:
    made = [
        SimpleNamespace(device_kind=kind, platform="tpu", coords=at)
        for at in coords
        for _ in range(devices_each)
    ]
    on = SimpleNamespace(axis_names=("x",), devices=np.array(made, object))
    assert peaks.of_group(on, ("x",)) == gbps  # type: ignore[arg-type]


def test_peak_of_a_gpu_is_its_nvlinks_on_one_host() -> None:
    def group(*hosts: int, kind: str = "NVIDIA H200") -> Any:
        made = [SimpleNamespace(device_kind=kind, platform="gpu", slice_index=h) for h in hosts]
        return SimpleNamespace(axis_names=("x",), devices=np.array(made, object))

    assert peaks.of_group(group(0, 0), ("x",)) == 450
    assert peaks.of_group(group(0, 1), ("x",)) is None
    assert peaks.of_group(group(0, 0, kind="NVIDIA H200 NVL"), ("x",)) is None


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
