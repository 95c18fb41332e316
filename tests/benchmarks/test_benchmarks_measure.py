"""What `python -m benchmarks` measures: operands, results, times, and what they are held to."""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import harness
from benchmarking import NOTHING_ELSE, ONE_ROW, Bench, instead
from benchmarks import devices, measure, peaks, problem, replay_rows, timing
from benchmarks.cases import CASES, LANES, Case, layouts
from benchmarks.rows import Measured
from benchmarks.settings import FlagError, Settings
from held_clock import HeldClock
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.replay import Machine, bound
from pallas_collectives.topology import chips


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


@pytest.mark.parametrize("n", [2, 4, 8])
def test_busbw_is_what_every_device_must_send(n: int) -> None:
    """The least number of blocks, of n to the size, that leave a device."""
    factors = {case.name: case.busbw(n) for case in CASES}
    blocks_sent = {  # counted apart from the examples, which are judged by it
        "all_gather": n - 1,
        "psum_scatter": n - 1,
        "psum": 2 * (n - 1),
        "all_to_all": n - 1,
        "ragged_all_to_all": sum((k + 1) / n for k in range(1, n)),
        "ppermute": n,
    }
    for name, factor in factors.items():  # one that was added says itself what it sends
        assert math.isclose(factor, blocks_sent.get(name, factor * n) / n), name
    assert blocks_sent.keys() <= factors.keys()


ON_CPU = [case for case in CASES if case.lax_everywhere]


@pytest.mark.parametrize(
    "case", [case for case in layouts() if case.lax_everywhere], ids=lambda case: case.name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_references_agree_with_lax(case: Case, dtype: str) -> None:
    of = problem.Problem(
        case, dtype, 32 << 10, harness.mesh(2, 3), ("y",), np.random.default_rng(0)
    )
    by_lax = of.compile(of.call("xla", None))(of.operands)
    assert of.wrong(by_lax) == 0
    at = (1, *(0,) * (by_lax.ndim - 1))
    one_off = jax.device_put(by_lax.at[at].multiply(0).at[at].add(99), by_lax.sharding)
    assert of.wrong(one_off) == 1
    assert of.wrong(by_lax.astype("float16" if dtype == "int8" else "int32")) == by_lax.size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_size_and_count_are_nccl_tests(case: Case) -> None:
    rng = np.random.default_rng(0)
    of = problem.Problem(case, "bfloat16", 10_000, harness.mesh(4), ("x",), rng)
    rows = 10_000 // (4 * LANES * 2)
    assert of.nbytes == 4 * rows * LANES * 2
    assert case.whole or case.name not in ("psum", "ppermute")
    assert of.count == rows * LANES * (4 if case.whole else 1)


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


@pytest.mark.parametrize("clock", [timing.device_seconds, timing.dispatched_seconds])
@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.name)
def test_time_is_that_of_each_collective(
    monkeypatch: pytest.MonkeyPatch, case: Case, clock: Callable[..., list[float]]
) -> None:
    rng, held = np.random.default_rng(0), HeldClock(monkeypatch)
    of = problem.Problem(case, "float32", 4096, harness.mesh(2), ("x",), rng)
    call = of.call("xla", None)
    seconds = clock(of, lambda x: held.hold(call(x), 0.01), warmup=1, iters=3)
    assert seconds == pytest.approx([2 * 0.01] * timing.SAMPLES)  # of two devices


def test_a_chain_and_its_dispatch_meet_the_same_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is slower from the sixth sample on changes none of them."""
    now, runs, lengths = 0.0, 0, iter((1, 11))

    def compiled(*_: Any, **__: Any) -> Callable[[Any], Any]:
        length = next(lengths)

        def program(x: Any) -> Any:
            nonlocal now, runs
            now, runs = now + 3.0 * length + (50.0 if runs >= 10 else 0.0), runs + 1
            return x

        return program

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    of: Any = SimpleNamespace(compile=compiled, operands=np.zeros(1))
    samples = timing.device_seconds(of, lambda x: x, warmup=0, iters=10)
    assert samples == [3.0] * timing.SAMPLES


@pytest.mark.full
def test_timed_rows_stand_beside_lax(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way of a run on real devices, here on CPUs that are not taken for simulated TPUs."""
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setattr(devices, "backends", lambda kind: ("pallas",))
    monkeypatch.setattr(peaks, "of_group", lambda mesh, axes: 2.0)
    call, held = CASES[0].call, HeldClock(monkeypatch)
    instead(monkeypatch, lambda m, x, axis, **how: held.hold(call(m, x, axis, **how), 0.01))
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
        assert row["time_us"] == pytest.approx(20_000)  # of two devices
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


@pytest.mark.parametrize("asked", [ONE_ROW, ("--wire=int8", "--mesh=2", "--sizes=8K")])
def test_time_within_the_noise_of_dispatch_is_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setattr(timing, "device_seconds", lambda *_, **__: [-1e-6, -1e-6, 1e-6])
    status, out, _ = bench(*asked, "--collective=all_gather", "--backend=xla")
    assert status == 1
    assert "raise --iters" in out


@pytest.mark.parametrize(
    "kind, coords, devices_each, gbps",
    [
        ("TPU v5 lite", [(x, 0, 0) for x in range(4)], 1, 90),  # both ways along x
        ("TPU v5 lite", [(x, 0, 0) for x in range(2)], 1, 45),  # one link between two
        ("TPU v5p", [(x, y, z) for x in range(4) for y in range(4) for z in range(4)], 1, 540),
        ("TPU v6e", [(x, y, 0) for x in range(4) for y in range(2)], 1, 270),
        ("TPU7x", [(x, 0, 0) for x in range(4)], 2, 200 * (7 / 8) / (3 / 4)),
        ("TPU7x", [(0, 0, 0)], 2, 0),  # two devices of one chip need no link
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
    assert peaks.of_group(on, ("x",)) == pytest.approx(gbps)  # type: ignore[arg-type]


@pytest.mark.parametrize("pod", ["v5e:4x4", "v5p:2x2x1", "v6e:16x16", "7x:2x2x1", "7x:4x4x4"])
def test_no_schedule_has_a_bus_bandwidth_above_the_peak(pod: str) -> None:
    machine = Machine.named(pod)
    sizes = replay_rows.mesh_axes(machine)
    places = np.ndindex(*machine.shape, machine.generation.devices_per_chip)
    kind = chips.BY_NAME[machine.generation.name].device_kind
    made = [SimpleNamespace(device_kind=kind, platform="tpu", coords=at[:-1]) for at in places]
    grid = np.array(made, object).reshape(tuple(sizes.values()))
    on = SimpleNamespace(axis_names=tuple(sizes), devices=grid)
    for count in range(1, 1 + len(sizes)):
        for axes in itertools.combinations(sizes, count):
            peak = peaks.of_group(on, axes)  # type: ignore[arg-type]
            for case in (case for case in CASES if case.rows_sent is None and peak):
                task = replay_rows.Task(machine, case, "float32", 1 << 30, None, axes)
                groups = replay_rows._groups(task, sizes)
                n = groups.shape[1]
                least = bound(case.op, machine, groups, (1 << 30) / n).wire
                assert (1 << 30) / least / 1e9 * case.busbw(n) <= 1.0001 * (peak or 0), (axes, case)


def test_peak_of_a_gpu_is_its_nvlinks_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(*hosts: int, kind: str = "NVIDIA H200") -> Any:
        made = [SimpleNamespace(device_kind=kind, platform="gpu", slice_index=h) for h in hosts]
        return SimpleNamespace(axis_names=("x",), devices=np.array(made, object))

    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert peaks.of_group(group(0, 0), ("x",)) == 450
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # sums have up to twice the wires' bandwidth
    assert peaks.of_group(group(0, 0), ("x",)) is None
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert peaks.of_group(group(0, 1), ("x",)) is None
    assert peaks.of_group(group(0, 0, kind="NVIDIA H200 NVL"), ("x",)) is None
