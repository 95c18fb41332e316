"""What the catalogue's examples say is sent: bounds and busbw go by it."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks import replay_rows
from benchmarks.cases import CASES, LANES
from pallas_collectives.catalogue import COLLECTIVES
from pallas_collectives.catalogue.records import Collective


def _sent(record: Collective, n: int, rows: int) -> np.ndarray:
    """Rows that each device of an example sends each other, as bounds take them."""
    by_record = record.example.rows_sent or (lambda source, target, n, rows: rows)
    rows_of = np.broadcast_to(by_record(*np.ogrid[:n, :n], n, rows), (n, n))
    return np.where(np.eye(n), 0, rows_of)


@pytest.mark.parametrize("record", COLLECTIVES.values(), ids=lambda record: record.name)
def test_what_is_sent_is_what_the_results_hold_of_others(record: Collective) -> None:
    """So `rows_sent`, which bounds go by, and `busbw` are what must leave a device."""
    n, rows, example = 4, 8, record.example
    sent = _sent(record, n, rows)
    if not record.adds:
        shape = (n, *example.operand(n, rows))
        xs = 1 + np.arange(np.prod(shape)).reshape(shape)
        results = example.reference(xs)
        held = [[np.intersect1d(x, result).size / LANES for result in results] for x in xs]
        np.testing.assert_array_equal(sent, np.where(np.eye(n), 0, held), "rows_sent")
    most = len(record.phases) * (n - 1) * rows if record.phases else sent.sum(axis=1).max()
    assert example.busbw(n) == pytest.approx(most / (n * rows)), f"busbw({n})"


@pytest.mark.parametrize(
    "record", [c for c in COLLECTIVES.values() if not c.phases], ids=lambda record: record.name
)
def test_links_carry_what_is_sent(record: Collective) -> None:
    """Over all the links of its way; an algorithm that passes it on may take longer ways."""
    n, rows, (case,) = 8, 64, (case for case in CASES if case.op == record.name)
    names = [algorithm.name for algorithm in record.algorithms]
    tasks = replay_rows.plan([f"v5p:{n}"], [case], [n * rows * 4 * LANES], algorithms=names)
    carried = {task.algorithm: replay_rows.run(task).link_bytes.sum() for task in tasks}
    distance = tasks[0].machine.distance(*np.indices((n, n)).reshape(2, -1)).reshape(n, n)
    sent = (4 * LANES * _sent(record, n, rows) * distance).sum()
    told = f"bytes on all links, and {sent} by rows_sent: {carried}"
    assert min(carried.values()) >= sent, told
    if straight := [carried[a.name] for a in record.algorithms if a.one_hop]:
        assert min(straight) == sent, told


@pytest.mark.parametrize(
    "wrong, also_by_links",
    [
        ({"rows_sent": None}, True),
        ({"rows_sent": lambda source, target, n, rows: rows * (target == (source + 1) % n)}, True),
        ({"rows_sent": lambda s, t, n, rows: n * rows * (s == (t + 1) % n)}, False),
        ({"busbw": lambda n: 2.0}, False),
    ],
)
def test_what_is_sent_wrongly_is_caught(wrong: dict[str, Any], also_by_links: bool) -> None:
    right = COLLECTIVES["ppermute"]
    record = dataclasses.replace(right, example=dataclasses.replace(right.example, **wrong))
    with pytest.raises(AssertionError):
        test_what_is_sent_is_what_the_results_hold_of_others(record)
    with pytest.raises(AssertionError) if also_by_links else contextlib.nullcontext():
        test_links_carry_what_is_sent(record)
