"""Errors, docstrings and Markdown in plain English: what nobody should have to read twice.

A rule says what must be: "it is a function" of a value that is not one states what is false. A
remedy says what to write. A docstring names the thing first: "Bytes of a block", not "Of a block".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("pallas_collectives", "benchmarks", "notebooks", "tests")
PAGES = ("CHANGELOG", "CONTRIBUTING", "adding-an-algorithm", "proving-a-kernel")
MARKDOWN = ("README.md", "benchmarks/README.md", *(f".github/{name}.md" for name in PAGES))

# Files whose old texts still stand; each goes from here when it is rewritten.
# "it is 2.19.3, and at least 2.28 is needed" states a fact, and so is no rule.
FALSE = re.compile(r"(it|they) (is|are) (?!not |\{)")
EMPTY = {
    *("correct it", "correct one of them", "use fewer", "give another number", "give it numbers"),
    *("make one", "pass one", "pass that", "write one", "reshape them", "name another"),
}
TWICE = re.compile(r"\b(had better|(is|are|takes) none|of one's own)\b|, which see\b")


def text_of(node: ast.AST | None) -> str:
    """A string, with {} for what is filled in; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return ""


def errors(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """("rule" or "remedy", its text, its line): arguments of errors, and variables so named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else text(node.func)
            if name.endswith("Error") or name == "_error":
                for kind, argument in zip(("rule", "remedy"), node.args[1:3], strict=False):
                    yield kind, text_of(argument), node.lineno
                if name == "_error":
                    yield "rule", text_of(node.args[-1]), node.lineno
        elif isinstance(node, ast.Assign):
            (target, value) = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=False)]
            for to, given in pairs:
                if text(to) in ("rule", "remedy"):
                    yield text(to), text_of(given), node.lineno


def text(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield found, getattr(node, "lineno", 1)


def faults(source: str) -> list[str]:
    """The places of a Python file that must be read twice, with their lines."""
    tree = ast.parse(source)
    found = []
    for kind, said, line in errors(tree):
        if kind == "rule" and FALSE.match(said):
            found.append(f"{line}: a rule says what must be: {said!r}")
        if kind == "remedy" and said in EMPTY:
            found.append(f"{line}: a remedy says what to write: {said!r}")
        if TWICE.search(said):
            found.append(f"{line}: {said!r}")
    for said, line in docstrings(tree):
        if re.match(r"Of\b", said):
            found.append(f"{line}: name the thing first: {said.splitlines()[0]!r}")
        if hit := TWICE.search(said):
            found.append(f"{line}: {hit[0]!r} in a docstring")
    return found


def sources(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if ".ipynb" not in str(p)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_errors_and_docstrings_are_read_once(folder: str) -> None:
    found = []
    for path in sources(folder):
        name = path.relative_to(ROOT).as_posix()
        if path != Path(__file__):
            found += [f"{name}:{fault}" for fault in faults(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source, says",
    [
        ('raise CollectiveError(f"fn={fn!r}", "it is a function", "pass it")', "what must be"),
        ('raise E.FlagError("--n", f"it is from 1 to {most}", "write --n=1")', "what must be"),
        ('rule = "they are different names"', "what must be"),
        ('rule, remedy = "it is True or False", "pass True"', "what must be"),
        ('raise MeshError("x", "too many rows", "use fewer")', "what to write"),
        ('raise TableError("x", "it takes none, or has no figures", "leave it out")', "none"),
        ('def nbytes():\n    """Of a block on the wire."""', "name the thing first"),
        ('def wire():\n    """The wire.\n\n    WireError: it is none of these."""', "none"),
    ],
)
def test_what_is_read_twice_is_found(source: str, says: str) -> None:
    (fault, *_) = faults(source)
    assert says in fault


def test_facts_and_rules_are_not_refused() -> None:
    assert not faults('raise LibraryError("it is 2.19, and at least 2.28 is needed")')
    assert not faults('raise CollectiveError("fn=3", "it must be a function", "pass fn itself")')
    assert not faults('def cores():\n    """The cores of a chip; None for none of them."""')


@pytest.mark.parametrize("name", MARKDOWN)
def test_prose_has_lines_of_at_most_120_characters(name: str) -> None:
    """Not tables, nor blocks of code."""
    code, long, twice = False, [], []
    for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if len(line) > 120 and not code and not line.lstrip().startswith("|"):
            long.append(f"{name}:{number}: {len(line)}")
        if not code and (hit := TWICE.search(line)):
            twice.append(f"{name}:{number}: {hit[0]!r}")
    assert not long, "\n".join(long)
    assert not twice, "\n".join(twice)
