"""The README's tables are those that `python -m benchmarks readme` makes."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import benchmarking
import pallas_collectives
from benchmarks import compiled, readme, replay_rows, results
from benchmarks.cases import CASES, LANES
from benchmarks.rows import Replayed
from benchmarks.settings import FlagError
from pallas_collectives import catalogue
from pallas_collectives.catalogue import ALGORITHMS, COLLECTIVES
from tables_of_times import stays_off_lines


@pytest.fixture(scope="module")
def stored() -> results.Saved:
    return results.load(str(readme.STORED))


def test_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    done = benchmarking.in_process(monkeypatch, capsys)("readme", "--only_check")
    assert done.status == 0, f"run python -m benchmarks readme\n{done.out}"


@pytest.mark.full
def test_a_table_out_of_date_is_told_and_mended(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    run = benchmarking.in_process(monkeypatch, capsys)
    copy, (page, *others) = tmp_path / "README.md", readme.PAGES
    right = page.read_text()
    copy.write_text(right.replace("| `one_shot` |", "| `no_shot` |"))
    monkeypatch.setattr(readme, "PAGES", (copy, *others))
    status, out, _ = run("readme", "--only_check")
    assert status == 1
    assert "-" in out and "no_shot" in out and "one_shot" in out
    assert "no_shot" in copy.read_text()
    assert run("readme").status == 0
    assert copy.read_text() == right


def test_what_is_stored_outlasts_a_recomputation_that_ends_early(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, stored: results.Saved
) -> None:
    run, copy = benchmarking.in_process(monkeypatch, capsys), tmp_path / "readme.json"
    copy.write_bytes(readme.STORED.read_bytes())

    def interrupted(_: Any) -> Iterator[Replayed]:
        yield stored.parts["replayed"][0]
        raise KeyboardInterrupt

    monkeypatch.setattr(readme, "STORED", copy)
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    monkeypatch.setattr(replay_rows, "rows", interrupted)
    assert run("readme", "--recompute").status == 130
    assert run("readme", "--only_check").status == 0


def test_markers_and_tables_must_fit(stored: results.Saved) -> None:
    page, *others = (page.read_text() for page in readme.PAGES)
    with pytest.raises(FlagError, match="table 'prices'"):
        readme.rendered([page.replace("table: replayed", "table: prices"), *others], stored)
    with pytest.raises(FlagError, match="has replayed"):
        readme.rendered(
            [page.replace("<!-- table: replayed", "<!-- once: replayed"), *others], stored
        )


def test_every_algorithm_has_its_cost_and_its_row() -> None:
    for record in catalogue.COLLECTIVES.values():
        assert all(algorithm.sent and algorithm.steps for algorithm in record.algorithms)
    rows = readme.algorithms(results.Saved({}, {}, {})).splitlines()[2:]
    assert len(rows) == sum(map(len, ALGORITHMS.values()))


@pytest.mark.parametrize("pod, op", [("v5e:4x4", "psum"), ("v5p:4x4x4", "all_gather")])
def test_stored_replays_are_what_the_model_says_now(
    pod: str, op: str, stored: results.Saved
) -> None:
    now = [task for task in readme.tasks(pod) if task.case.name == op]
    assert len(now) == len(readme.BLOCKS)
    rows = {row.key: row for row in stored.parts["replayed"]}
    for row in replay_rows.rows(now):
        assert row.refused == rows[row.key].refused
        assert row.refused or row.of_bound == pytest.approx(rows[row.key].of_bound, abs=0.1), (
            "run python -m benchmarks readme --recompute"
        )


@pytest.mark.full
def test_stored_replays_are_of_the_algorithms_that_are_chosen_now(stored: results.Saved) -> None:
    cases = {case.name: case for case in CASES}
    for row in (*stored.parts["replayed"], *stored.parts["small"]):
        rows = row.size // (row.devices * LANES * 4)
        operand = 4 * math.prod(cases[row.op].operand(row.devices, rows))
        chip = row.machine.partition(":")[0]
        now = pallas_collectives.explain(row.op, operand, devices=row.devices, chip=chip).algorithm
        name = now.partition(":")[0]
        assert row.refused or row.served.partition(":")[0] == name, (
            f"{row} of {row.size}, {row.kernel}: run python -m benchmarks readme --recompute"
        )


def test_stored_results_are_right_and_whole(stored: results.Saved) -> None:
    without = {
        (getattr(row, "machine", ""), row.op)
        for rows in stored.parts.values()
        for row in rows
        if row.reason
    }
    # The ends of a line are three links apart.
    assert without == {("v5e:4x4", op) for op in COLLECTIVES if stays_off_lines(op)}
    assert {row.topology for row in stored.parts["compiled"]} == set(readme.TOPOLOGIES)
    wanted = len(readme.PODS) * len(CASES) * len(readme.BLOCKS)
    assert len(stored.parts["replayed"]) == wanted, "run python -m benchmarks readme --recompute"
    for part, pods, blocks in readme.PARTS:
        asked = {(pod, axes if "," in axes else "") for pod, axes in pods}
        rows = stored.parts[part]
        assert {(row.machine, row.over) for row in rows} == asked
        assert len(rows) == len([*readme.tasks_over(pods, blocks)])
    on_gpus = results.load(str(readme.GPUS))
    assert not [str(row) for row in on_gpus.parts["measured"] if row.reason or not row.time_us]


def test_measured_times_are_ours_and_laxs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = results.load(str(readme.GPUS))
    rows = on_gpus.parts["measured"]
    ours, by_lax = (
        next(
            row
            for row in rows
            if (row.op, row.backend) == ("all_gather", backend)
            and row.count * 4 == readme.GPU_BLOCKS[0]
        )
        for backend in ("nccl", "xla")
    )
    times = {id(ours): 99.0, id(by_lax): 24.0}
    other = [dataclasses.replace(row, time_us=times.get(id(row), row.time_us)) for row in rows]
    changed = dataclasses.replace(on_gpus, parts={**on_gpus.parts, "measured": other})
    monkeypatch.setattr(results, "load", lambda path: changed)
    header, _, gather, *others = readme.measured(results.Saved({}, {}, {})).splitlines()
    assert header.startswith(
        "| 4 × NVIDIA H200, JAX 0.11.2, NCCL 2.28.9 | 4 KiB | 64 KiB | 1 MiB |"
    )
    assert gather.startswith("| all_gather, block of | 99 / 24 |")
    assert [line.partition(",")[0] for line in others] == [
        "| psum_scatter", "| psum", "| all_to_all", "| ppermute",
    ]  # fmt: skip


def test_texts_that_differ_name_their_tpus(stored: results.Saved) -> None:
    row = next(row for row in stored.parts["compiled"] if row.topology == "tpu7x:2x2x1")
    other = dataclasses.replace(row, topology="v5e:2x4", ops="copy, kernel")
    assert readme._grouped([row, row], lambda row: row.ops) == row.ops
    assert (
        readme._grouped([row, other], lambda row: row.ops) == f"{row.ops} (7x); copy, kernel (v5e)"
    )
