"""The step tables in kernels' docstrings are those of the schedules that the kernels run."""

import types

import pytest

import step_tables
from pallas_collectives.kernels import all_reduce, all_reduce_line, all_to_all, ppermute
from pallas_collectives.topology import groups

PAIRS = ((0, 2), (2, 1), (3, 3))
BOTH_WAYS = groups.streams(4, bidirectional=True, chunks=2)


@pytest.mark.parametrize(
    "module, table",
    [
        (all_reduce, step_tables.all_reduce(4, BOTH_WAYS)),
        (all_reduce_line, step_tables.all_reduce_line(5)),
        (all_to_all, step_tables.exchange_directly(4)),
        (all_to_all, step_tables.exchange_round_a_ring(5)),
        (ppermute, step_tables.permute(4, PAIRS)),
    ],
)
def test_docstring_has_the_table(module: types.ModuleType, table: str) -> None:
    lines = [line.strip() for line in (module.__doc__ or "").splitlines()]
    found = [line for line in table.splitlines() if any(doc.startswith(line) for doc in lines)]
    assert "\n".join(found) == table


@pytest.mark.parametrize("n", [3, 5, 9])
def test_every_message_goes_round_the_ring_by_the_shorter_side(n: int) -> None:
    """To the right here, and to the left as many."""
    passed: dict[str, int] = {}
    for line in step_tables.exchange_round_a_ring(n).splitlines():
        for message in line.split()[1:]:
            passed[message] = passed.get(message, 0) + 1
    want = {f"{s}>{(s + d) % n}": d for s in range(n) for d in range(1, (n - 1) // 2 + 1)}
    assert passed == want


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_every_device_of_a_line_ends_with_all_terms(n: int) -> None:
    *earlier, last = (line.split()[1:] for line in step_tables.all_reduce_line(n).splitlines())
    whole = f"[{''.join(map(str, range(n)))}]"
    assert last == [whole] * n
    assert [row.count(whole) for row in earlier[: n // 2]] == [0] * (n // 2)
