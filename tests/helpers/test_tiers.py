"""Which rows are quick: few that cover what all do; and names that no test has are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covers
import tiers

ROOT = Path(__file__).parents[2]


class Item:
    """A test with parameters, as pytest has it, where `tiers` looks at it."""

    def __init__(self, module: str, name: str, **parameters: Any) -> None:
        self.path, self.name = Path(f"tests/some/folder/{module}.py"), name
        self.originalname = name
        self.callspec = type("CallSpec", (), {"params": parameters})
        self.marks: set[str] = set()

    def iter_markers(self, name: str) -> set[str]:
        return self.marks & {name}


def product(name: str) -> list[Any]:
    return [Item("test_a", name, n=n, op=op, mode=m) for n in (2, 3) for op in "gsp" for m in "ew"]


def quick(monkeypatch: pytest.MonkeyPatch, covers: covers.Covers) -> list[dict[str, Any]]:
    monkeypatch.setattr(tiers, "QUICK", {"test_a::test_b": covers})
    items = product("test_b")
    chosen = tiers.quick(items)
    return [item.callspec.params for item in items if item in chosen]


def test_each_value_is_in_a_quick_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = quick(monkeypatch, covers.each("n", "op", "mode"))
    assert len(rows) == 3
    assert [{row[name] for row in rows} for name in ("n", "op", "mode")] == [
        {2, 3},
        {*"gsp"},
        {*"ew"},
    ]


def test_each_combination_is_in_a_quick_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = quick(monkeypatch, covers.each("n x op"))
    assert len(rows) == 6
    assert {(row["n"], row["op"]) for row in rows} == {(n, op) for n in (2, 3) for op in "gsp"}


def test_one_row_or_none_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick(monkeypatch, covers.once) == [{"n": 2, "op": "g", "mode": "e"}]
    assert quick(monkeypatch, covers.only(op=())) == []


def test_some_values_are_in_a_quick_row_and_a_row_marked_full_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = quick(monkeypatch, covers.some(op="gs"))
    assert [row["op"] for row in rows] == ["g", "s"]
    monkeypatch.setattr(tiers, "QUICK", {})
    items = product("test_b")
    items[0].marks.add("full")
    assert tiers.quick(items) == set(items[1:])


def test_what_no_rule_names_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "QUICK", {})
    assert len(tiers.quick(product("test_b"))) == 12


def test_the_full_tier_has_pairs_of_values_and_all_that_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "FULL", {"test_a::test_b": covers.pairs("n", "op", "mode")})
    last = {"n": [3], "op": "p", "mode": "w"}
    monkeypatch.setattr(tiers, "QUICK", {"test_a::test_b": covers.only(**last)})
    items = product("test_b")
    full = [item.callspec.params for item in items if item in tiers.full(items)]
    assert 6 <= len(full) < 12 and {"n": 3, "op": "p", "mode": "w"} in full
    for one, other in (("n", "op"), ("n", "mode"), ("op", "mode")):
        met = {(row[one], row[other]) for row in full}
        assert met == {(item.callspec.params[one], item.callspec.params[other]) for item in items}


def test_a_rule_for_no_test_or_no_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tiers, "QUICK", {"test_a::gone": covers.once, "test_torus::elsewhere": covers.once}
    )
    with pytest.raises(pytest.UsageError, match="test_a::gone: no test has this name"):
        tiers.check(product("test_b"))
    with pytest.raises(pytest.UsageError, match=r"no parameter 'size'.*'n', 'op', 'mode'"):
        quick(monkeypatch, covers.each("size"))


@pytest.mark.parametrize(
    "name, rule, why",
    [
        ("test_no_such_module::test_b", covers.once, "no test has this name"),
        ("test_a::test_b", covers.only(op="gx"), "no row has op='x'"),
        ("test_a::test_b", covers.some(n=[2, 4]), "no row has n=4"),
        ("test_a::test_b", covers.apart_from(covers.once, mode="q"), "no row has mode='q'"),
        ("test_a::test_b", covers.only(op=()), "it covers no row"),
        ("test_a::test_b", covers.each("size"), "no parameter 'size'"),
    ],
)
def test_a_rule_that_no_row_obeys_is_refused(
    name: str, rule: covers.Covers, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "QUICK", {"test_torus::elsewhere": covers.once, name: rule})
    monkeypatch.setattr(tiers, "FULL", {})
    with pytest.raises(pytest.UsageError, match=f"{name}: .*{why}"):
        tiers.check(product("test_b"))
    with monkeypatch.context() as sound:
        sound.setattr(tiers, "QUICK", {"test_torus::elsewhere": covers.once})
        tiers.check(product("test_b"))


def collected(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return sum("::" in line for line in done.stdout.splitlines())


@pytest.mark.full
def test_the_full_tier_is_more_and_a_named_test_runs_in_any_tier() -> None:
    file = next(path.as_posix() for path in (ROOT / "tests").rglob("test_packaging.py"))
    counts = (
        collected(file),
        collected("-m", "full", file),
        collected(f"{file}::test_the_wheel_holds_the_package_alone"),
    )
    assert counts == (2, 5, 1)


def test_parts_have_every_item_once() -> None:
    items = product("test_b")
    for i, item in enumerate(items):
        item.nodeid = f"tests/test_a.py::test_b[{i}]"
    parts = [tiers.part(items, f"{k}/3") for k in (1, 2, 3)]
    assert all(parts) and sum(map(len, parts)) == len(items) and set().union(*parts) == {*items}
    assert tiers.part(items, "2/3") == parts[1]


@pytest.mark.parametrize("which", ["", "1", "0/3", "4/3", "1/0", "a/b", "1/3/3"])
def test_a_part_is_one_of_some(which: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"wants K/N, a part K from 1 to N"):
        tiers.part([], which)
