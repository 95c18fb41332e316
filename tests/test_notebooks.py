"""The notebooks: as saved, as executed with their solutions, and their checks of wrong answers."""

import ast
import base64
import functools
import importlib
import importlib.util
import json
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nbclient")
import nbclient
import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.util import run_sync

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))
HELPERS = str(Path(__file__).parent / "helpers")
# What a kernel does first: no name of it is left in the notebook's own.
QUICKLY = (
    f"__import__('sys').path.append({HELPERS!r}); __import__('interpreter').call_back_with_arrays()"
)
SECONDS = 300  # for one cell, on a machine that is busy with other things

# "<details> ... ```python": a solution, folded; and the exercises that a cell asks to have checked.
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)
CHECK = re.compile(r"^check\((\w+)\)", re.MULTILINE)
# A path of the machine on which a notebook was run.
MACHINE = re.compile(r"(?<![\w.])/[\w.-]+/\S+\.py|ipykernel_\d|0x[0-9a-f]{6}")


@functools.cache
def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def python(cell: Any) -> str:
    """A cell's source, its magics as calls."""
    return TransformerManager().transform_cell(cell.source)


def outputs(cell: Any) -> str:
    return "".join(out.get("text", "") for out in cell.get("outputs", ()))


def pictures(notebook: Any) -> list[bytes]:
    shown = (out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ()))
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def exercises(notebook: Any) -> list[str]:
    found = (CHECK.findall(cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return [name for names in found for name in names]


# The notebooks share a kernel, which has imported JAX: each finds it without names and without the
# modules and the paths that another has brought.
AS_NEW = """
get_ipython().reset()
import os, sys

for name, module in [*sys.modules.items()]:
    file = getattr(module, "__file__", None) or ""
    if name.split(".")[0] == "benchmarks" or os.path.dirname(file) == os.getcwd():
        del sys.modules[name]
sys.path[:] = [path for path in sys.path if path != ".."]
del os, sys, name, module, file
"""


def with_solutions(notebook: Any) -> tuple[Any, dict[int, str]]:
    """A copy in which each solution is run and checked after its cell; where, and which."""
    solved, where = nbformat.v4.new_notebook(metadata=notebook.metadata), {}
    solved.cells.append(nbformat.v4.new_code_cell(AS_NEW))
    for cell in notebook.cells:
        solved.cells.append(cell.copy())
        for source in SOLUTION.findall(cell.source) if cell.cell_type == "markdown" else ():
            (name,) = re.findall(r"^def (\w+)", source, re.MULTILINE)
            where[len(solved.cells)] = name
            solved.cells.append(nbformat.v4.new_code_cell(f"{source}\n\ncheck({name})"))
    return solved, where


def test_all_notebooks_are_here() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{k:02}" for k in range(12)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_notebook_is_readable_as_it_is(path: Path) -> None:
    notebook = read(path)
    first, *_, last = notebook.cells
    assert re.match(rf"# {path.name[:2]} · .*\n\nAfter this notebook you can ", first.source), (
        "it begins with what the reader will be able to do"
    )
    assert "inspect.getsource" in last.source and "def " in outputs(last)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {out.output_type for cell in code for out in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}, "no errors"
    assert all(out.get("name") != "stderr" for cell in code for out in cell.outputs)
    assert pictures(notebook), "a picture made by the code"
    assert 2 <= len(exercises(notebook)) <= 3
    assert path.stat().st_size < 1_000_000
    for cell in code:
        text = json.dumps([out for out in cell.outputs if "text" in out])
        assert not MACHINE.search(text), f"a path of one machine in the output of {cell.id}"
        if CHECK.search(cell.source):
            assert outputs(cell).startswith("not yet"), "exercises are saved undone"
        elif "inspect" not in cell.source and "find_spec" not in cell.source:
            assert len(outputs(cell).splitlines()) <= 24, "a wall of text"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_source_that_it_ends_with_is_the_shipped_one(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last cell, by itself: with the imports of the others, and nothing else of them."""
    monkeypatch.syspath_prepend(FOLDER)
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    lines = [node for cell in code for node in ast.parse(python(cell)).body]
    imports = [node for node in lines if isinstance(node, ast.Import | ast.ImportFrom)]
    here: dict[str, Any] = {}
    exec("\n".join(map(ast.unparse, imports)), here)
    capsys.readouterr()
    exec(code[-1].source, here)
    assert capsys.readouterr().out == outputs(code[-1]), "execute it anew, and save it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_the_cell_that_installs_where_it_is_hosted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It installs the clone that the notebook lies in, and nothing where the package is there."""
    first, *others = (cell for cell in read(path).cells if cell.cell_type == "code")
    assert not first.outputs and not any("%pip" in cell.source for cell in others)
    ran: list[tuple[str, str]] = []
    shell = types.SimpleNamespace(run_line_magic=lambda *magic: ran.append(magic))
    exec(python(first), {"get_ipython": lambda: shell})
    assert not ran
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(python(first), {"get_ipython": lambda: shell})
    assert ran == [("pip", 'install -q "..[notebooks]"')]
    project = tomllib.loads((path.parent / ".." / "pyproject.toml").read_text())["project"]
    assert "notebooks" in project["optional-dependencies"]


def test_colours_are_those_that_mean_something() -> None:
    """They have names in `replay.style`; greys, black and white may be written out."""
    written = re.compile(r"['\"](#[0-9a-fA-F]{6}|tab:\w+|C\d)['\"]")
    root = FOLDER.parent
    texts = {
        path: "\n".join(c.source for c in read(path).cells if c.cell_type == "code")
        for path in NOTEBOOKS
    }
    for folder in ("notebooks", "benchmarks", "pallas_collectives"):
        texts |= {path: path.read_text() for path in (root / folder).rglob("*.py")}
    del texts[root / "pallas_collectives" / "replay" / "style.py"]
    for path, text in texts.items():
        found = [colour for colour in written.findall(text) if len({*colour[1::2]}) > 1]
        assert not found, f"{path}: {found}"
        assert not re.search(r'color="(?!black|white)[a-z]', text), path


@pytest.fixture(scope="module")
def kernel() -> Iterator[AsyncKernelManager]:
    """What runs the notebooks, one after the other; the first starts it."""
    manager = AsyncKernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        run_sync(manager.shutdown_kernel)(now=True)


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_solutions_are_right(path: Path, kernel: AsyncKernelManager) -> None:
    notebook = read(path)
    solved, where = with_solutions(notebook)
    assert sorted(where.values()) == sorted(exercises(notebook)), "a solution for every exercise"
    client = nbclient.NotebookClient(
        solved,
        km=kernel,
        timeout=SECONDS,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=[f"--IPKernelApp.exec_lines={QUICKLY}"],
    )
    client.execute()  # raises where a cell does
    for number, name in where.items():
        said = outputs(solved.cells[number])
        assert said.splitlines()[-1:] == ["right"], f"{name}: {said}"
    assert len(pictures(solved)) == len(pictures(notebook)), "saved by another version of itself"
    for cell in solved.cells:
        assert "Traceback" not in outputs(cell)


# Checks with wrong answers ---------------------------------------------------------------------


def checks() -> Any:
    """The module that the notebooks import from beside them."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("exercises")
    finally:
        sys.path.remove(str(FOLDER))


def _solution(name: str) -> Callable[..., Any]:
    """The solution that a notebook gives, alone with what formulas need."""
    for path in NOTEBOOKS:
        for cell in read(path).cells:
            for source in SOLUTION.findall(cell.source) if cell.cell_type == "markdown" else ():
                names: dict[str, Any] = {"np": np}
                exec(source, names)
                if name in names:
                    return names[name]
    raise LookupError(name)


def _called(answer: Any, name: str) -> Callable[..., Any]:
    """An answer by the name of its exercise, as a reader writes it."""
    if not isinstance(answer, types.FunctionType):
        return answer
    called = types.FunctionType(
        answer.__code__, answer.__globals__, name, answer.__defaults__, answer.__closure__
    )
    return called


EXERCISES = sorted(name for path in NOTEBOOKS for name in exercises(read(path)))


@pytest.mark.parametrize("answers", ["the first three", "the others"])
@pytest.mark.parametrize("name", EXERCISES)
def test_wrong_answers_are_not_passed_and_the_mistake_is_named(
    name: str, answers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import mistakes
    import wrong_answers

    is_formula = name in mistakes.KNOWN
    wrong = (
        wrong_answers.of_formula(name, _solution(name))
        if is_formula
        else wrong_answers.OTHERS[name]
    )
    assert len(wrong) >= 10
    for answer, said in wrong[3:] if answers == "the others" else wrong[:3]:
        checks().check(_called(answer, name))
        out = capsys.readouterr().out
        assert out.startswith("wrong: ") and said in out
        assert "np." not in out and not MACHINE.search(out), out


def test_every_exercise_says_not_yet_as_long_as_it_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = checks()
    assert sorted(module.EXERCISES) == EXERCISES
    for name in EXERCISES:
        module.check(_called(lambda *args: None, name))
        assert capsys.readouterr().out.startswith("not yet"), name


def test_lines_of_a_cell_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "def block_sent(me, step, n):\n    return nothing\n"
    names: dict[str, Any] = {}
    exec(compile("\n" + cell, "/tmp/ipykernel_17/1234567.py", "exec"), names)
    fault = f"{checks()._by_cell('waits at 1234567.py:3 (block_sent)')}"
    assert fault == "waits at line 3 of your cell (block_sent)"
    checks().check(names["block_sent"])
    assert capsys.readouterr().out == (
        "wrong: it raises NameError: name 'nothing' is not defined, at line 3 of your cell\n"
    )
