"""Benchmarks read the catalogue: none keeps a list of collectives, but where it makes a choice."""

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.cases import named
from benchmarks.steps import schedule
from pallas_collectives import catalogue
from pallas_collectives.catalogue import COLLECTIVES

BENCHMARKS = Path(readme.__file__).parent
# What is shown where there is room for a few, and XLA's words, which no record has.
CHOICES = {("readme", "SHOWN"), ("schedule", "_OPS")}


def _own_lists(source: str) -> set[str]:
    """The functions and variables of a program that list collectives, or ask which one it is."""
    return {
        getattr(statement, "name", "") or ast.unparse(statement).split()[0]
        for statement in ast.parse(source).body
        if any(map(_is_list, ast.walk(statement)))
    }


def _is_list(node: ast.AST) -> bool:
    parts: list[Any] = []
    match node:
        case ast.Dict():
            parts = [*node.keys, *node.values]
        case ast.Tuple() | ast.List() | ast.Set():
            parts = node.elts
        case ast.Compare():
            parts = [node.left, *node.comparators]
        case ast.Match():
            parts = [part for case in node.cases for part in ast.walk(case.pattern)]
            parts = [part.value for part in parts if isinstance(part, ast.MatchValue)]
    words = {part.value for part in parts if isinstance(part, ast.Constant)}
    names = words & {*COLLECTIVES, *catalogue.functions()}
    return len(names) > (not isinstance(node, ast.Compare | ast.Match))


def test_benchmarks_keep_no_list_of_collectives() -> None:
    files = BENCHMARKS.rglob("*.py")
    found = {(file.stem, name) for file in files for name in _own_lists(file.read_text())}
    assert found == CHOICES, "read the catalogue, or say in a comment why it is a choice"
    assert named(*readme.SHOWN), "KeyError if one is unknown"
    assert {*schedule._OPS.values()} <= {*COLLECTIVES}


@pytest.mark.parametrize(
    "source, found",
    [
        ("SIZES = {'all_gather': 1, 'reduce_scatter': -1}", {"SIZES"}),
        ("XLAS = {'all-gather': 'all_gather', 'all-reduce': 'all_reduce'}", {"XLAS"}),
        ("def f():\n  return [n for n in ('psum', 'ppermute')]", {"f"}),
        ("def g(op):\n  return op == 'all_reduce'", {"g"}),
        ("def h(op):\n  match op:\n    case 'psum':\n      return 2", {"h"}),
        ("def i():\n  return named('psum'), {'psum_us': 1, 'psum': 2}, ('x', 'psum')", set()),
    ],
)
def test_a_list_of_collectives_is_seen(source: str, found: set[str]) -> None:
    assert _own_lists(source) == found
