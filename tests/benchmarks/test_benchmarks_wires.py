"""`--wire`: time beside error, modelled and on the devices there are."""

import csv
import dataclasses
from pathlib import Path

import jax
import pytest

import harness
from benchmarking import Bench
from benchmarks import columns, plots, replay_rows, settings, wired_rows
from benchmarks.cases import CASES
from benchmarks.settings import FlagError, Settings
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import WirePlan
from pallas_collectives.wires import Wire

WIRES = ("int8", "float8_e4m3fn")


def wanted(*names: str, **options: object) -> Settings:
    cases = tuple(case for case in CASES if case.name in names)
    plain = Settings(cases, dtypes=("bfloat16",), wires=WIRES)
    return dataclasses.replace(plain, **options)  # type: ignore[arg-type]


@pytest.mark.full
def test_pods_have_modelled_times_with_xlas_passes() -> None:
    asked = wanted("all_gather", "psum_scatter", pods=("v6e:4x4",), sizes=(16 << 20,))
    tasks = wired_rows.plan(asked)
    rows = list(wired_rows.rows(tasks, asked, harness.mesh(2)))
    assert [(row.op, row.wire) for row in rows] == [
        (op, wire) for op in ("all_gather", "psum_scatter") for wire in ("none", *WIRES)
    ]
    for row in rows:
        assert not row.reason and row.time_us and row.off is not None
        if row.wire == "none":
            assert row.of_bytes == 100 and not row.passes_us and row.off < 0.5
            continue
        assert row.of_bytes and row.of_bytes <= 52
        assert not row.passes_us, "packed in their kernels"
        assert row.of_plain and row.off > 0.1
    gather = rows[1]
    assert gather.of_plain and gather.of_plain < 75  # the bytes, and a pass over the result
    assert rows[2].off > rows[1].off  # type: ignore[operator]  # 3 bits of mantissa
    assert all(len(column.cell(gather)) for column in columns.of(rows))


@pytest.mark.full
@pytest.mark.parametrize("pod, most", [("v6e:4x4", 55), ("v5e:4x4", 75)])
def test_exchanges_have_no_passes_of_xlas(pod: str, most: float) -> None:
    """v5e cannot write to everyone: others of our kernels pack before and behind, in replayed time.

    Direct exchanges are packed in their kernels.
    """
    asked = wanted("all_to_all", pods=(pod,), sizes=(16 << 20,))
    plain, *wired = wired_rows.rows(wired_rows.plan(asked), asked, harness.mesh(2))
    assert plain.wire == "none" and not plain.passes_us
    for row in wired:
        assert row.time_us and row.of_plain and plain.time_us
        assert row.of_plain < most and not row.passes_us


@pytest.mark.full
def test_error_against_time_is_drawn_for_each_collective_and_wire(tmp_path: Path) -> None:
    asked = wanted("all_gather", "psum_scatter", pods=("v6e:4x4",), sizes=(1 << 20,))
    rows = list(wired_rows.rows(wired_rows.plan(asked), asked, harness.mesh(2)))
    assert plots.save(str(tmp_path / "wires.png"), {"wired": rows}, {})
    assert (tmp_path / "wires.png").stat().st_size > 10_000
    panels = plots.error_against_time(rows).axes
    assert [panel.get_title() for panel in panels] == ["all_gather", "psum_scatter"]
    for panel, of_op in zip(panels, (rows[:3], rows[3:]), strict=True):
        drawn, without = panel.get_lines()
        points = sorted((row.of_plain, row.off) for row in of_op if row.wire != "none")
        assert sorted(zip(*drawn.get_data(), strict=True)) == points
        assert without.get_xdata()[0] == 100
        assert {text.get_text() for text in panel.texts} == set(WIRES)
    simulated = [dataclasses.replace(row, of_plain=None, time_us=None) for row in rows]
    assert not plots.save(str(tmp_path / "none.png"), {"wired": simulated}, {})


def test_devices_have_errors_of_their_results() -> None:
    asked = wanted("psum", backends=("xla",), sizes=(1 << 16,), timed=False, check=False)
    rows = list(wired_rows.rows(wired_rows.plan(asked), asked, harness.mesh(2)))
    plain, by_int8, by_float8 = rows
    assert plain.off == 0 and plain.time_us is None
    assert by_int8.off and 0.1 < by_int8.off < 1.2
    assert by_float8.off and by_int8.off < by_float8.off < 10
    assert jax.device_count() >= 2


@pytest.mark.parametrize("name, dtype", [("int4", "float32"), ("int8", "int8")])
def test_wires_that_are_none_are_refused(name: str, dtype: str) -> None:
    with pytest.raises(FlagError, match="--wire"):
        settings.check_wires((name,), (dtype,))


def test_a_wire_named_twice_is_one() -> None:
    assert settings.check_wires(("int8", "float8_e5m2", "int8"), ("bfloat16",)) == (
        "int8",
        "float8_e5m2",
    )


def test_a_picture_without_points_is_told_of(bench: Bench, tmp_path: Path) -> None:
    """A wire is refused for so few bytes, so nothing has a time in percent of another."""
    picture = tmp_path / "wires.png"
    asked = ("--wire=int8", "--replay=v5e:4x4", "--collective=psum", "--sizes=1K")
    _, out, _ = bench(*asked, f"--plot={picture}", f"--csv={tmp_path / 'wires.csv'}")
    assert [row["wire"] for row in csv.DictReader((tmp_path / "wires.csv").open())] == [
        *("none", "int8"),
    ]
    assert f"No row has a time, so {picture} is not drawn." in out and not picture.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "pod, size, most", [("v5e:16x16", 16 << 20, 75), ("v6e:8x8", 4 << 20, 105)]
)
def test_small_blocks_are_cut_for_both_axes_and_packed_together(
    pod: str, size: int, most: int
) -> None:
    """A gather of 32 KiB of numbers took 203% and 120% in one piece on the wire alone.

    With kernels that packed block by block 160 and 154%.
    """
    asked = wanted("all_gather", pods=(pod,), sizes=(size,), axes=("x", "y"))
    plain, *wired = wired_rows.rows(wired_rows.plan(asked), asked, harness.mesh(2))
    assert plain.time_us and len(wired) == len(WIRES)
    for row in wired:
        assert not row.passes_us and row.of_plain
        assert row.of_plain < most


@pytest.mark.parametrize("dtype, most", [("bfloat16", 0.52), ("float32", 0.27)])
@pytest.mark.parametrize(
    "name",
    [
        *("all_gather", "psum_scatter", "all_to_all", "ppermute"),
        pytest.param("psum", marks=pytest.mark.full),
    ],
)
def test_the_busiest_link_carries_what_is_packed(name: str, dtype: str, most: float) -> None:
    (case,) = (case for case in CASES if case.name == name)
    (task,) = replay_rows.plan(["v6e:4"], [case], [4 << 20], [dtype])
    plain, wired = (replay_rows.run(task, wire=wire) for wire in (None, Wire("int8")))
    assert wired.link_bytes.max() <= most * plain.link_bytes.max()


def test_a_wire_that_would_lose_is_left_out() -> None:
    """On v5e 16 x 16 a gather of 16 KiB blocks takes its way, however few bytes it sends."""
    (case,) = (case for case in CASES if case.name == "all_gather")
    (task,) = replay_rows.plan(["v5e:16x16"], [case], [4 << 20], ["bfloat16"], axes=("x", "y"))
    with counters.recorded() as plans:
        replay_rows.run(task, wire=Wire("int8", optional=True))
    left_out = {plan.why for plan in plans if isinstance(plan, WirePlan) and not plan.algorithm}
    (why,) = left_out
    assert why.startswith("it would take") and why.endswith("without")
