"""`certify`: all of its parts, on what there is here."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

import harness
from benchmarking import Bench
from benchmarks import certify, devices, measure, replay_rows, settings, soak
from benchmarks.cases import CASES, Case
from benchmarks.rows import Measured
from benchmarks.settings import Settings
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.replay import Machine

BY_NAME = {case.name: case for case in CASES}
GATHER = BY_NAME["all_gather"]


@pytest.mark.full
def test_without_an_accelerator_it_says_what_it_would_run_and_does_what_it_can(
    bench: Bench, tmp_path: Path
) -> None:
    name = str(tmp_path / "cert")
    arguments = ("certify", "--mesh=2", "--collective=all_gather", "--algorithm=direct")
    arguments = (*arguments, "--sizes=32K", f"--certificate={name}")
    status, out, err = bench(*arguments)
    assert status == 0, out + err
    assert "neither TPU nor GPU" in out and "a sweep of 64K:64M:32x" in out
    results = json.loads(Path(f"{name}.json").read_text())
    (row,) = results["conformance"]
    assert (row["op"], row["algorithm"], row["over"], row["wrong"]) == (
        "all_gather", "direct", "x of 2", 0,
    )  # fmt: skip
    (soaked,) = results["soak"]
    assert soaked["op"].split(", ") == ["all_gather direct"] * certify.SIMULATED.length
    assert soaked["wrong"] == 0
    assert {row["machine"].split(":")[0] for row in results["replayed"]} == {
        "v4", "v5e", "v5p", "v6e", "7x",
    }  # fmt: skip
    modelled = {(row["algorithm"], row["size"]) for row in results["replayed"]}
    assert modelled == {("direct", 32 << 10)}, "what the flags name"
    text = Path(f"{name}.md").read_text()
    for told in (
        "# Certificate",
        "## Conformance",
        "## Soak",
        "## Modelled",
        "all right (1 refused)**",  # v5e's axis of 4 is beyond the reach of `direct`
        "commit",
    ):
        assert told in text, told
    assert "## Measured" not in text
    assert Path(f"{name}.png").exists()
    assert {row["op"] for row in results["figures"]} >= {"hop_latency", "link_efficiency"}
    assert [row["wrong"] for row in results["spaces"]] == [0] * (1 + len(CASES))
    assert "mean nothing" in out and "| v5e:2x1 | hop_latency | 0.6 us | 0.6 us | +0.0% |" in text
    asked = json.loads(Path(f"{name}.json").read_text())["asked"]
    assert [(row["over"], row["answer"]) for row in asked] == [("id 15", "works"), ("+1x", "works")]
    measured = Machine.load(f"{name}.machine.json")
    assert measured.generation.hop_latency == pytest.approx(0.6e-6)
    assert not measured.generation.reaches_all  # simulated devices say nothing of that

    del results["soak"], results["replayed"][3:]  # as if it had been interrupted
    results["asked"] = asked
    Path(f"{name}.json").write_text(json.dumps(results))
    status, out, err = bench(*arguments, "--resume")
    assert status == 0, out + err
    again = json.loads(Path(f"{name}.json").read_text())
    assert len(again["soak"]) == 1 and len(again["replayed"]) == 5 and again["asked"] == asked
    for part in ("figures", "spaces", "conformance"):  # their times are those of the first run
        assert again[part] == results[part]


def test_no_row_begins_when_time_is_up(bench: Bench, tmp_path: Path) -> None:
    name = tmp_path / "cert"
    status, out, err = bench("certify", "--mesh=2", "--minutes=0", f"--certificate={name}")
    assert status == 0, out + err
    assert "Time is up" in out and "rows are left: the same command with --resume" in out
    assert not Path(f"{name}.json").exists()


def test_on_a_tpu_what_is_safe_runs_elsewhere_and_before_what_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that the process that asks what could hang finds the TPU free."""
    calls: list[list[str]] = []
    monkeypatch.setattr(devices, "may_be_tpus", lambda: True)
    monkeypatch.setattr(certify.subprocess, "call", lambda command: calls.append(command) or 1)
    name = tmp_path / "cert"
    status, out, _ = bench("certify", f"--certificate={name}")
    assert status == 1 and not out  # as the other said; without its file there is nothing to ask
    (command,) = calls
    assert command[1:3] == ["-m", "benchmarks"]
    assert command[-2:] == ["--stage=safe", "--minutes=12.0"]


def test_a_wrong_collective_gets_no_certificate(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def off(module: Any, x: jax.Array, axis: Any, **how: Any) -> jax.Array:
        y = GATHER.call(module, x, axis, **how)
        return y.at[0, 0, 0].add(1) if how else y

    monkeypatch.setattr(settings, "CASES", (dataclasses.replace(GATHER, call=off),))
    monkeypatch.setattr(certify, "_rig", lambda *_: None)  # the probes are another test's
    status, out, _ = bench(
        *("certify", "--mesh=2", "--algorithm=direct", f"--certificate={tmp_path / 'cert'}")
    )
    assert status == 1
    results = json.loads((tmp_path / "cert.json").read_text())
    assert results["conformance"][0]["wrong"] == 2
    assert results["soak"][0]["wrong"] > 2  # it spreads
    assert "NOT all right: 2 wrong" in out.splitlines()[-1]


def test_conformance_on_real_devices_covers_every_axis_dtype_and_algorithm() -> None:
    wanted = Settings(CASES, backends=("pallas", "xla"), sizes=(1 << 20,), mesh=(8,))
    runs = list(certify.conformance(wanted, "tpu"))
    assert [(run.mesh, run.axes) for run in runs] == [
        ((8,), ("x",)), ((2, 4), ("x",)), ((2, 4), ("y",)), ((2, 4), ("x", "y")),
        ((2, 4), ("y", "x")),
    ]  # fmt: skip
    for run in runs:
        assert not run.timed and run.check
        seen = {(task.case.op, task.algorithm, task.dtype) for task in measure.plan(run)}
        assert seen == {
            (op, name + space, dtype)
            for op, names in ALGORITHMS.items()
            for name in names
            for space in ("", ":vmem")
            for dtype in ("float32", "bfloat16", "int8", "uint32")
        }


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_prediction_stands_beside_kernels_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    as_it_lies = sorted(made, key=lambda device: device.coords)
    mesh = jax.sharding.Mesh(np.array(as_it_lies).reshape(2, 4), ("x", "y"))
    machine = replay_rows.machine_of(mesh)
    assert str(machine) == "v5e:2x4"
    monkeypatch.setattr(devices, "kind", lambda: "tpu")
    about: dict[str, Any] = {"op": "all_gather", "type": "float32", "devices": 4, "count": 1}
    rows = [
        Measured(**about, backend="pallas", algorithm="line", size=1 << 20, time_us=30.0),
        Measured(**about, backend="xla", size=1 << 20, time_us=40.0),
        Measured(**about, backend="pallas", algorithm="direct", size=1 << 20, refused="too far"),
    ]
    wanted = Settings((GATHER,), mesh=(2, 4), axes=("y",))
    ours, by_lax, refused = certify.predicted(iter(rows), wanted, mesh)
    assert by_lax.model_us is refused.model_us is None
    (task,) = replay_rows.plan(["v5e:2x4"], [GATHER], [1 << 20], axes=("y",))
    by_itself = replay_rows.run(dataclasses.replace(task, algorithm="line"))
    assert ours.model_us == pytest.approx(by_itself.time * 1e6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_soak_goes_numpys_way_through_every_collective(case: Case) -> None:
    """The sums wrap round, as int32 does on a device."""
    wanted = Settings((case,), backends=("pallas", "xla"), mesh=(2,))
    wanted = dataclasses.replace(wanted, algorithms=ALGORITHMS[case.op][-1:])
    mesh = harness.mesh(2)
    for row in soak.rows(wanted, mesh, 1, runs=2, length=2):
        assert not row.error
        assert (row.wrong, row.calls, row.devices) == (0, 4, 2)
        assert case.name in row.op


def test_a_machine_file_can_be_replayed_on(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    for latency in (0.6e-6, 60e-6):
        Machine.named("v5e:4x4", hop_latency=latency).save(path)
        status, out, err = bench(
            *("--collective=all_gather", "--sizes=64K", f"--replay={path}"),
            f"--json={tmp_path / 'rows.json'}",
        )
        assert status == 0, out + err
        (row,) = json.loads((tmp_path / "rows.json").read_text())["replayed"]
        assert (row["machine"], row["time_us"] > 60) == ("v5e:4x4", latency > 1e-6)
    path.write_text("{}")
    status, out, err = bench(f"--replay={path}")
    assert status == 2 and "pod.json holds no machine" in err
