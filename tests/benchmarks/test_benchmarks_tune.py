"""`python -m benchmarks tune`: what is measured, and the table that it becomes."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import pallas_collectives as pc
from benchmarks import devices, measure, tune
from benchmarks.rows import Measured
from pallas_collectives.errors import CollectiveError, TableError
from pallas_collectives.replay import Machine
from pallas_collectives.topology import chips
from pallas_collectives.tuning import choice, tables
from pallas_collectives.tuning.tables import Table
from tables_of_times import chosen, content, served

pytestmark = pytest.mark.usefixtures("fresh_counts", "modelled_table_alone")

KIB = 1 << 10


def test_without_tpus_and_gpus_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "prepare", lambda n: None)
    out = tmp_path / "table.json"
    assert tune.main(["--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "Nothing can be measured here" in printed and str(tables.MODELLED) in printed
    assert not out.exists()


def test_one_device_makes_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "prepare", lambda n: None)
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    out = tmp_path / "table.json"
    assert tune.main(["--out", str(out)]) == 2
    assert "JAX finds one device" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--iters=0"],
        ["--iters=1000000000"],
        ["--iters=5", "--model"],
        ["--out=nowhere/table.json"],
        ["--out=/proc/table.json"],
        ["--out="],
        ["--add"],
        ["--renew=psum", "--model"],
        ["--machine=pod.json", "--out=table.json"],
        ["--machine=pod.json", "--model"],
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        tune.main(arguments)
    assert arguments[0].partition("=")[0] in capsys.readouterr().err.partition("error: ")[2]


def timed(op: str, algorithm: str | None, size: int, us: float | None, **more: Any) -> Measured:
    how = {"type": "float32", "backend": "pallas", "count": 1, "devices": 2, "wrong": 0}
    return Measured(op=op, algorithm=algorithm, size=size, time_us=us, **{**how, **more})


def test_measured_rows_become_the_table_that_is_used(tmp_path: Path) -> None:
    rows = [
        timed("all_gather", "direct", 8 * KIB, 50.0),
        timed("all_gather", "direct", 128 * KIB, 60.0),
        timed("all_gather", "unidirectional", 8 * KIB, 40.0),
        timed("all_gather", "unidirectional", 128 * KIB, 70.0),
        timed("all_gather", "bidirectional", 8 * KIB, 1.0, wrong=3),
        timed("psum", "ring", 8 * KIB, None, refused="too far"),
    ]
    table = tune.measured([(row, "line") for row in rows], chips.SIMULATED.name)
    assert [e.key for e in table.entries.values()] == [("all_gather", "simulated TPU", "line", 2)]
    (found,) = table.entries.values()
    assert found.bytes == (4 * KIB, 64 * KIB)
    assert found.us == {"direct": (50.0, 60.0), "unidirectional": (40.0, 70.0)}
    tune._write(table, tmp_path / "table.json")
    with choice.use_table(tmp_path / "table.json"):
        assert served() == {"unidirectional"}
        assert chosen("all_gather", 64 * KIB, 2, chips.SIMULATED, torus="line") == "direct"


def test_candidates_are_measured_for_every_group_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the clock replaced: what is asked of it, and what becomes of its answers."""

    def rows(tasks: list[measure.Task], wanted: Any, mesh: Any) -> Iterator[Measured]:
        for task in tasks:
            us = 1.0 if task.algorithm == "unidirectional" else 2.0
            n = mesh.shape["x"]
            yield timed(task.case.name, task.algorithm, task.size, us, devices=n)

    monkeypatch.setattr(devices, "prepare", lambda n: None)
    monkeypatch.setattr(devices, "kind", lambda: "tpu")
    monkeypatch.setattr(measure, "rows", rows)
    out = tmp_path / "table.json"
    assert tune.main(["--out", str(out)]) == 0
    table = choice.load(out)
    assert table.measured and table.jax == jax.__version__
    assert f"{choice.ENVIRONMENT_VARIABLE}={out}" in capsys.readouterr().out
    assert {e.devices for e in table.entries.values()} == {2, 4, 8}
    for e in table.entries.values():
        assert set(e.us) == set(tune.candidates(e.op, e.torus))


def test_a_table_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    bad = tables.parse(content(), "x")
    bad = Table(
        "", "measured", "", "", {k: dataclasses.replace(e, us={}) for k, e in bad.entries.items()}
    )
    with pytest.raises(TableError):
        tune._write(bad, tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


@pytest.mark.full
def test_a_machines_measured_figures_make_a_table_for_the_choice(tmp_path: Path) -> None:
    slow = Machine.named("v5e:2x4", hop_latency=50e-6)
    path = tmp_path / "pod.json"
    slow.save(path)
    measured_on = Machine.load(path).generation
    (fast,) = tune.model("v5e", "line", 4, ["all_gather"])
    (entry,) = tune.model("v5e", "line", 4, ["all_gather"], measured_on=measured_on)
    assert all(b > a + 45 for a, b in zip(fast.us["line"], entry.us["line"], strict=True))
    table = Table("", "modelled", jax.__version__, "", {entry.key: entry})
    with choice.use_table(table):
        told = pc.explain("all_gather", nbytes=4 << 10, devices=4, chip="v5e", torus="line")
    line = next(c for c in told.candidates if c.algorithm == "line")
    assert line.us == pytest.approx(entry.us["line"][0], rel=0.01)


def test_a_machine_file_that_is_none_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "pod.json"
    path.write_text("{}")
    assert tune.main(["--model", f"--machine={path}", f"--out={tmp_path / 'table.json'}"]) == 2
    assert "holds no machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--model", f"--machine={path}"])
    assert "name an --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "torus, machine, wraps, axes",
    [
        ("4x4 torus", "7x:4x4x1", (True, True, False), ("x", "y")),
        ("2x4 grid", "7x:4x1x1", (False, False, False), ("x", "core")),
    ],
)
def test_the_two_devices_of_a_chip_are_an_axis_of_two_or_none(
    torus: str, machine: str, wraps: tuple[bool, ...], axes: tuple[str, ...]
) -> None:
    on, over = tune.machine_of("7x", torus, 16)
    assert (str(on), on.wraps, over) == (machine, wraps, axes)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_large_blocks_go_along_both_axes_of_a_7x(op: str) -> None:
    nbytes = 16 * KIB * KIB if op == "all_reduce" else KIB * KIB
    found = choice.predict(
        op, nbytes, 16, chips.BY_NAME["7x"], ("bidirectional", "ring", "torus"), "4x4 torus"
    )
    assert choice.fastest_first(op, found)[0] == "torus"


@pytest.mark.parametrize(
    "name, lost",
    [
        ("all_to_all", lambda op, way: op == "all_to_all"),
        ("ring", lambda op, way: way.startswith("ring")),
        ("packed", lambda op, way: way.endswith(":packed")),
    ],
)
def test_times_that_are_renewed_are_forgotten(name: str, lost: Callable[[str, str], bool]) -> None:
    table = tables.load(tables.MODELLED)
    left = tune.without(table, name)
    for key, entry in table.entries.items():
        kept = {way: us for way, us in entry.us.items() if not lost(entry.op, way)}
        assert left.entries[key].us == kept


def test_a_name_that_has_no_times_is_refused() -> None:
    with pytest.raises(CollectiveError, match=r"--renew=rings: .* has no times of that name"):
        tune.without(tables.load(tables.MODELLED), "rings")


def test_a_size_that_an_entry_lacks_is_replayed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tables.load(tables.MODELLED)
    key = ("all_reduce", "v5e", "ring", 16)
    whole = known.entries[key]
    lacking = dataclasses.replace(
        whole, bytes=whole.bytes[1:], us={name: us[1:] for name, us in whole.us.items()}
    )
    known = dataclasses.replace(known, entries={key: lacking})
    replayed: list[int] = []  # sizes, of the algorithms that have times

    def counted(*of: Any) -> float:
        if of[3] in lacking.us:
            replayed.append(of[4])
        return 1.0

    monkeypatch.setattr(tune, "_replayed", counted)
    (entry,) = tune.model("v5e", "ring", 16, ["all_reduce"], known)
    assert set(replayed) == {whole.bytes[0]} and entry.bytes == whole.bytes
    assert all(entry.us[name][1:] == us for name, us in lacking.us.items())
