"""Our own collectives on modelled pods: the benchmark's rows, and no fault on any schedule."""

from typing import Any

import pytest

from benchmarks import columns, replay_rows
from benchmarks.cases import CASES, Case
from benchmarks.rows import Replayed
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.replay import MachineError, bound
from pallas_collectives.replay.bound import Bound

_BY_NAME = {case.name: case for case in CASES}
_ALL = [
    (case, algorithm + space)
    for case in CASES
    for algorithm in ALGORITHMS[case.op]
    for space in ("", ":vmem")
]


@pytest.mark.parametrize("machine", ["v5p:8x4x4", "v5e:8x2"])
@pytest.mark.parametrize(("case", "algorithm"), _ALL, ids=lambda v: getattr(v, "name", v))
def test_our_collectives_have_no_fault_on_any_schedule(
    case: Case, algorithm: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def recorded(*args: Any) -> Bound:
        bounds.append(bound(*args))
        return bounds[-1]

    monkeypatch.setattr(replay_rows, "bound", recorded)
    (task,) = replay_rows.plan([machine], [case], [1 << 18], algorithms=[algorithm])
    (row,) = replay_rows.rows([task], races=True)
    if row.refused:
        assert machine.startswith("v5e")
        assert "power-of-two offsets" in row.refused
        return
    assert not row.error
    assert not row.faults
    assert row.devices == 8
    assert row.time_us is not None
    assert row.of_bound is not None and row.of_bound > 5
    assert bounds
    assert all(1.000001 * row.time_us >= 1e6 * b.time for b in bounds)


def _row(machine: str, name: str, size: int, **keywords: tuple) -> Replayed:
    (row,) = replay_rows.rows(replay_rows.plan([machine], [_BY_NAME[name]], [size], **keywords))
    return row


def test_bandwidths_follow_from_time_and_size() -> None:
    row = _row("v5e:16x16", "all_gather", 64 << 20)
    assert row.time_us is not None
    assert row.algbw == pytest.approx(row.size / row.time_us / 1e3)
    assert row.busbw == pytest.approx(row.algbw * 15 / 16)
    assert row.busbw < 2 * 45
    assert row.count == row.size // 4 // 16
    assert row.kernel == "all_gather_bidirectional"


@pytest.mark.parametrize("machine", ["v5e:16x16", "v5p:4x4x4", "v6e:4x4", "7x:4x4x4"])
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_large_messages_come_near_the_bound(name: str, machine: str) -> None:
    """4 MiB a block and more."""
    n = 16 if machine == "v5e:16x16" else 4
    row = _row(machine, name, n << 22)
    assert row.of_bound is not None
    assert row.of_bound > 95


# By the bound a small sum takes as long as a signal and a DMA from end to end, 4.6 us: no time for
# terms that wait for one another. So its time is held against the bound of before, which added the
# wire to the latency, and for psum a gather to a scatter; in us.
TERMS_ON_A_LINE = {
    ("psum_scatter", "v5e:4x4"): 5.5,
    ("psum_scatter", "v6e:4x4"): 4.5,
    ("psum", "v5e:4x4"): 9.0,
    ("psum", "v6e:4x4"): 6.9,
}


@pytest.mark.parametrize("machine", ["v5e:4x4", "v6e:4x4"])
@pytest.mark.parametrize(
    "name, latency",
    [("all_gather", "line"), ("psum_scatter", "line:vmem"), ("psum", "line")],
)
def test_lines_come_near_the_bound_at_every_size(name: str, latency: str, machine: str) -> None:
    """Blocks of 8 KiB and of 4 MiB, over an axis whose ends share no link."""
    small = _row(machine, name, 4 << 13, algorithms=(latency,))
    large = _row(machine, name, 4 << 22, algorithms=("line",))
    assert not small.faults and not large.faults
    assert large.of_bound is not None and large.of_bound > 95
    assert small.time_us is not None and small.of_bound is not None
    if (name, machine) in TERMS_ON_A_LINE:
        assert TERMS_ON_A_LINE[name, machine] / small.time_us > 0.75
    else:
        assert small.of_bound > 75


def test_a_physical_ring_comes_near_the_bound() -> None:
    """All of a grid as one axis: lax's own order would run back over a row at its end."""
    row = _row("v5e:4x4", "all_gather", 64 << 20, axes=("x", "y"), algorithms=("bidirectional",))
    assert row.of_bound is not None
    assert row.of_bound > 99


@pytest.mark.full
@pytest.mark.parametrize(
    "machine, way",
    [("v5e:2x4", "bidirectional"), ("v5e:4x4", "bidirectional"), ("v5p:2x2x2", "torus")],
)
def test_a_grid_whose_corners_have_two_links_is_gone_round(machine: str, way: str) -> None:
    axes = ("x", "y", "z")[: 3 if machine.startswith("v5p") else 2]
    n = 16 if machine == "v5e:4x4" else 8
    rows = {
        algorithm: _row(machine, "all_gather", n << 20, axes=axes, algorithms=(algorithm,))
        for algorithm in ("bidirectional", "torus")
    }
    times = {name: row.time_us for name, row in rows.items() if row.time_us is not None}
    assert min(times, key=lambda name: times[name]) == way
    assert _row(machine, "all_gather", n << 20, axes=axes).time_us == times[way]


def test_what_cannot_run_says_why() -> None:
    row = _row("v5e:16x16", "all_to_all", 1 << 20, algorithms=("direct",))
    assert "power-of-two" in row.refused
    assert not row.failed
    row = _row("v5e:4x4", "all_gather", 1 << 20, axes=("z",))
    assert "has axes x, y" in row.refused
    with pytest.raises(MachineError, match="v9"):
        replay_rows.plan(["v9:4x4"], CASES, [1024])


def test_several_axes_and_chips_of_two_devices() -> None:
    row = _row("v5p:4x4x4", "all_gather", 64 << 20, axes=("x", "y"))
    assert row.devices == 16
    row = _row("7x:4x4x4", "all_gather", 32 << 20, axes=("x", "core"))
    assert row.devices == 8
    assert not row.failed


def test_every_column_has_a_cell_for_every_kind_of_row() -> None:
    rows = [
        _row("v5e:16x16", "all_gather", 1 << 20),
        _row("v5e:16x16", "ppermute", 1 << 20),
        _row("v5e:16x16", "all_to_all", 1 << 20, algorithms=("direct",)),
    ]
    cells = [{c.header: c.cell(row) for c in columns.of(rows)} for row in rows]
    assert [c["sound"] for c in cells] == ["ok", "ok", "refused"]
    assert [c["% of bound"] == "-" for c in cells] == [False, False, True]
    assert cells[0]["algorithm"] == "bidirectional"


@pytest.mark.full
def test_an_operand_of_any_size_is_added_in_large_tiles() -> None:
    """Two times 16 thirds of a MiB a device: padded, for as they are they make 1365 1/3 tiles."""
    row = _row("v5e:3", "psum", 16 << 20, algorithms=("line",))
    assert row.of_bound is not None
    assert row.of_bound > 95
