"""Which tests are in which tier.

    pytest                  the quick tier: minutes on two cores
    pytest -m full          all of them, but for those that are marked `slow` or `gpu`
    pytest -m full --part=2/6    the quick ones, and the second sixth of the others
    pytest -m slow          what takes many devices or minutes, and products of everything
    pytest FILE::TEST       tests that are named so run, in the quick tier or in the full one

Every test is quick but those that are marked `full`, costly tests of what others test too, and
rows that `quick_rows.QUICK` leaves out: it names tests that compile or simulate a program for each
row of parameters, of which some rows are quick, and the product is not. `full_rows.FULL` does the
same for the full tier: what it leaves out is slow.
"""

import contextlib
import re
import zlib
from collections.abc import Container, Hashable, Iterable, Iterator
from pathlib import Path

import pytest

from covers import Covers, Parameters, dead
from full_rows import FULL
from quick_rows import QUICK


def name_of(item: pytest.Item) -> str:
    """The test's name as `QUICK` has it."""
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"


def full(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those of the items that the full tier runs; the quick ones are among them."""
    return _by(FULL, items, quick(items))


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those of the items that the quick tier runs."""
    return _by(QUICK, [item for item in items if not any(item.iter_markers("full"))])


def part(items: Iterable[pytest.Item], which: str) -> set[pytest.Item]:
    """Those of the items that lie in this part; in each run of pytest they are the same.

    Args:
      which: `K/N`, the Kth of N parts: N of them have every item once.

    Raises:
      pytest.UsageError: `which` is not of that form, or K is not from 1 to N.
    """
    form = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", which)
    if form is None or int(form[1]) > int(form[2]):
        raise pytest.UsageError(f"--part={which}: wants K/N, a part K from 1 to N; say --part=1/6")
    k, n = int(form[1]), int(form[2])
    return {item for item in items if zlib.crc32(item.nodeid.encode()) % n == k - 1}


def _by(
    rules: dict[str, Covers], items: list[pytest.Item], among: Container[pytest.Item] = ()
) -> set[pytest.Item]:
    """Items of tests without a rule, and rows that cover what the rule wants covered.

    Rows that are `among` the chosen ones in any case cover what they do before others are sought.
    """
    chosen, left = set(), {}
    for item in items:
        covers = rules.get(name_of(item))
        if covers is None:
            chosen.add(item)
        else:
            left.setdefault(name_of(item), []).append((item, _covered(item, covers)))
    for rows in left.values():
        given = [row for row in rows if row[0] in among]
        chosen.update(item for item, _ in given)
        chosen.update(_covering(rows, set().union(*(covered for _, covered in given))))
    return chosen


def _covered(item: pytest.Item, covers: Covers) -> set[Hashable]:
    parameters = _parameters(item)
    with _told(name_of(item), parameters):
        return set(covers(parameters))


def _parameters(item: pytest.Item) -> Parameters:
    return item.callspec.params if hasattr(item, "callspec") else {}


@contextlib.contextmanager
def _told(name: str, parameters: Parameters) -> Iterator[None]:
    """Within this context a parameter that a test lacks is told as such."""
    try:
        yield
    except KeyError as error:
        raise pytest.UsageError(
            f"tests/helpers, quick_rows.py or full_rows.py: {name}: has no parameter"
            f" {error}; it has {[*parameters]}"
        ) from None


def _covering(
    rows: list[tuple[pytest.Item, set[Hashable]]], done: set[Hashable]
) -> Iterable[pytest.Item]:
    """Few rows that cover what all of them do: always the first of those that add most."""
    open_ = set().union(*(covered for _, covered in rows)) - done
    while open_:
        item, covered = max(rows, key=lambda row: len(row[1] & open_))
        open_ -= covered
        yield item


def check(items: list[pytest.Item]) -> None:
    """Refuses rules that no test has or no row obeys, of the modules that the items are from.

    Raises:
      pytest.UsageError: a test, a row of parameters or a module was renamed or removed.
    """
    rows: dict[str, list[Parameters]] = {}
    for item in items:
        rows.setdefault(name_of(item), []).append(_parameters(item))
    modules = {name.partition("::")[0] for name in rows}
    gone = {name.partition("::")[0] for name in (*QUICK, *FULL)} - modules
    gone -= {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    for name, covers in sorted((*QUICK.items(), *FULL.items()), key=lambda rule: rule[0]):
        module = name.partition("::")[0]
        if name in rows:
            with _told(name, rows[name][0]):
                why = dead(covers, rows[name])
        else:
            why = "no test has this name" if module in modules | gone else ""
        if why:
            raise pytest.UsageError(
                f"tests/helpers, quick_rows.py or full_rows.py: {name}: {why};"
                " rename or remove it there"
            )
