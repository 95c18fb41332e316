"""Tables fit a terminal; piped they have every column."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from benchmarks import columns
from benchmarks.rows import Compiled, Measured, Replayed, Row
from benchmarks.tables import Screen

MEASURED = Measured(
    op="ragged_all_to_all",
    algorithm="unidirectional",
    type="bfloat16",
    devices=256,
    backend="pallas",
    size=1 << 28,
    count=1 << 26,
    wrong=0,
    time_us=12345.6,
    time_us_min=12000.0,
    time_us_max=13000.0,
    algbw=123.45,
    busbw=123.45,
    of_peak=99.0,
    model_us=12000.0,
)
REPLAYED = Replayed(
    op="ragged_all_to_all",
    served="unidirectional",
    kernel="ragged_all_to_all_unidirectional",
    type="float32",
    devices=16,
    machine="v5p:16x16",
    size=16 << 20,
    count=1 << 20,
    time_us=12345.6,
    algbw=1.0,
    busbw=1.0,
    bound_us=9.0,
    of_bound=100.0,
    of_wire=100.0,
)
COMPILED = Compiled(
    op="all_to_all, 0 to -1",
    algorithm="direct",
    type="float32",
    devices=8,
    topology="tpu7x:2x2x1",
    temp=1 << 29,
    ops="kernel",
    lax_temp=1 << 29,
    lax_ops="all-to-all, call, copy, reshape",
)


def shown(row: Row, monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    file, screen = io.StringIO(), Screen()
    screen._stdout = Console(file=file, width=1000, force_terminal=terminal, no_color=True)
    with screen.table("a table") as table:
        table.add(row)
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("row", [MEASURED, REPLAYED, COMPILED], ids=lambda row: type(row).__name__)
def test_a_row_is_a_line_on_80_columns(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = shown(row, monkeypatch, 80, terminal=True)
    assert max(map(len, narrow)) <= 80
    (line,) = (line for line in narrow if row.op in line)
    assert ("unidirectional" in line) == (not isinstance(row, Compiled))
    for wide in (
        shown(row, monkeypatch, 300, terminal=True),
        shown(row, monkeypatch, 80, terminal=False),
    ):
        header = next(line for line in wide if row.op not in line and "op" in line)
        assert all(column.header in header for column in columns.of([row]))


def test_piped_rows_come_as_they_are_made_below_headers_that_hold() -> None:
    file, screen = io.StringIO(), Screen()
    screen._stdout = Console(file=file, width=1000)
    refused = dataclasses.replace(MEASURED, time_us=None, wrong=None, refused="too far")
    with screen.table("a table") as table:
        for row, lines in ((refused, 3), (MEASURED, 5), (MEASURED, 6)):  # with times a new header
            table.add(row)
            assert len(file.getvalue().splitlines()) == lines
    title, without, _, header, first, second, reason = file.getvalue().splitlines()
    assert title == "a table" and first == second and "too far" in reason
    assert "time(us)" in header and "time(us)" not in without
    assert header.index("algorithm") == first.index("unidirectional")
    assert header.index("time(us)") + len("time(us)") == first.index("12345.6") + len("12345.6")


def test_no_row_no_table() -> None:
    file, screen = io.StringIO(), Screen()
    screen._stdout = Console(file=file)
    with screen.table("a table"):
        pass
    assert not file.getvalue()


def test_one_name_for_an_algorithm_and_sizes_as_flags_take_them() -> None:
    cells = {column.header: column.cell(REPLAYED) for column in columns.of([REPLAYED])}
    assert cells["algorithm"] == "unidirectional"
    few = {column.header: column.cell(MEASURED) for column in columns.few([MEASURED])}
    assert (few["size"], few["#wrong"], few["us"]) == ("256M", "0", "12345.6")
