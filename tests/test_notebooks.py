"""The notebooks: as saved, as executed with their solutions, and their checks of wrong answers."""

import ast
import base64
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nbclient")
import nbclient
import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))
SECONDS = 300  # for one cell, on a machine that is busy with other things

# "<details> ... ```python": a solution, folded; and the exercises that a cell asks to have checked.
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)
CHECK = re.compile(r"^check\((\w+)\)", re.MULTILINE)
# A path of the machine on which a notebook was run.
MACHINE = re.compile(r"(?<![\w.])/[\w.-]+/\S+\.py|ipykernel_\d|0x[0-9a-f]{6}")


@functools.cache
def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(cell: Any) -> str:
    return "".join(out.get("text", "") for out in cell.get("outputs", ()))


def pictures(notebook: Any) -> list[bytes]:
    shown = (out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ()))
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def exercises(notebook: Any) -> list[str]:
    found = (CHECK.findall(cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return [name for names in found for name in names]


def with_solutions(notebook: Any) -> tuple[Any, dict[int, str]]:
    """A copy in which each solution is run and checked after its cell; where, and which."""
    solved, where = nbformat.v4.new_notebook(metadata=notebook.metadata), {}
    for cell in notebook.cells:
        solved.cells.append(cell.copy())
        for source in SOLUTION.findall(cell.source) if cell.cell_type == "markdown" else ():
            (name,) = re.findall(r"^def (\w+)", source, re.MULTILINE)
            where[len(solved.cells)] = name
            solved.cells.append(nbformat.v4.new_code_cell(f"{source}\n\ncheck({name})"))
    return solved, where


def test_all_notebooks_are_here() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{k:02}" for k in (*range(10), 11)]


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
        elif "inspect" not in cell.source:
            assert len(outputs(cell).splitlines()) <= 24, "a wall of text"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_source_that_it_ends_with_is_the_shipped_one(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last cell, by itself: with the imports of the others, and nothing else of them."""
    monkeypatch.syspath_prepend(FOLDER)
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    lines = [node for cell in code for node in ast.parse(cell.source).body]
    imports = [node for node in lines if isinstance(node, ast.Import | ast.ImportFrom)]
    here: dict[str, Any] = {}
    exec("\n".join(map(ast.unparse, imports)), here)
    capsys.readouterr()
    exec(code[-1].source, here)
    assert capsys.readouterr().out == outputs(code[-1]), "execute it anew, and save it"


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_solutions_are_right(path: Path) -> None:
    notebook = read(path)
    solved, where = with_solutions(notebook)
    assert sorted(where.values()) == sorted(exercises(notebook)), "a solution for every exercise"
    client = nbclient.NotebookClient(
        solved, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}
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


def _never_waits(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    from pallas_collectives.kernels.machinery import sync

    sync.remote_copy(x_ref, o_ref, send_sem, recv_sem, ring.peer(2))
    sync.wait(send_sem, x_ref)


def _waits_for_ever(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    from pallas_collectives.kernels.machinery import sync

    _never_waits(ring, x_ref, o_ref, send_sem, recv_sem)
    sync.wait(recv_sem, o_ref, times=2)


def _nothing_broken() -> Any:
    import verify_kernels

    return verify_kernels.sound_gather


def _greets_neighbours(me: Any, n: int) -> None:
    import verify_kernels

    verify_kernels.greet(n)


def _offsets_out_of_order(counts: np.ndarray, me: int) -> Any:
    at_home = np.cumsum(counts, axis=1) - counts
    return at_home[me], counts[me], at_home[me], counts[:, me]


# Exercise, a wrong answer, a word of what is said of it.
WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("reversal", lambda n: [(d, (d + 1) % n) for d in range(n)], "order"),
    ("two_to_the_right", _never_waits, "race"),
    ("two_to_the_right", _waits_for_ever, "never ends"),
    ("block_sent", lambda me, step, n: (me + step) % n, "block_sent(0, 1, 5) is 4, not 1"),
    ("steps", lambda n, bidirectional: n - 1, "steps"),
    ("bytes_to_the_right", lambda n, nbytes: n / 2 * nbytes, "not"),
    ("semaphore_of", lambda step, window: 0, "copies may have brought to recv_sems[0]"),
    ("semaphore_of", lambda step, window: step, "step 3 uses semaphore 3, and there are 0 to 2"),
    ("a_fault", _nothing_broken, "still sound"),
    ("block_summed", lambda me, step, n: (me - step) % n, "block_summed"),
    ("credits_given", lambda hops, slots: hops, "credits_given(1, 1) is 0, not 1"),
    ("order_of_terms", lambda me, n: list(range(n)), "order_of_terms"),
    ("ring_seconds", lambda n, nbytes, hop, bandwidth: hop + nbytes / bandwidth, "ring_seconds"),
    ("one_shot_seconds", lambda n, nbytes, hop, bandwidth: n * hop, "one_shot_seconds"),
    ("crossing", lambda n, hop, bandwidth: hop * bandwidth, "crossing"),
    ("offsets", _offsets_out_of_order, "ends with rows"),
    ("offsets", lambda counts, me: (counts[me],) * 4, "list 4"),
    ("padded_rows", lambda counts: counts.sum(), "padded_rows"),
    ("balanced", lambda wishes, room: wishes[:, 0], "room for 8"),
    ("balanced", lambda wishes, room: np.arange(64) % 8, "could have expert"),
    ("round_trip", lambda rows, columns: [*np.ndindex(rows, columns)], "there is no link"),
    ("bytes_per_link", lambda n, d, nbytes: (n - 1) * nbytes / d, "bytes_per_link"),
    ("speedup_at_best", lambda wire, product: 2.0, "speedup_at_best"),
    ("columns_to_hide", lambda itemsize, flops, bandwidth: flops / bandwidth, "columns_to_hide"),
    ("whole_by_sum", lambda w: w, "shape"),
    ("sum_in_two_steps", lambda y: y, "wrong values"),
    ("busbw", lambda op, size, seconds, n: size / seconds, "busbw"),
    ("impossible", lambda rows, link: [], "two links carry"),
    ("all_are_here", _greets_neighbours, "on 4 devices a race: "),
    ("whom_to_greet", lambda me, n: [(me + 1) % n, (me + n - 1) % n], "on 8 devices a race: "),
    ("whom_to_greet", lambda me, n: [], "has entered kernel"),
    ("collective_ids", lambda offsets: [0] * len(offsets), "with the ids [0, 0]"),
    ("collective_ids", lambda offsets: [0], "1 ids for 2 calls"),
]


@pytest.mark.parametrize(
    ("name", "answer", "said"), WRONG, ids=[f"{k}-{name}" for k, (name, _, _) in enumerate(WRONG)]
)
def test_a_wrong_answer_is_not_passed(
    name: str, answer: Callable[..., Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = functools.update_wrapper(lambda *args: answer(*args), answer)
    named.__name__ = name
    checks().check(named)
    out = capsys.readouterr().out
    assert out.startswith("wrong: ") and said in out


def test_every_exercise_is_tried_with_a_wrong_answer_and_with_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = checks()
    asked = [name for path in NOTEBOOKS for name in exercises(read(path))]
    assert sorted(asked) == sorted(module.EXERCISES)
    assert {name for name, _, _ in WRONG} == set(asked)
    for name in asked:
        untouched = functools.partial(lambda *args: None)
        untouched.__name__ = name  # type: ignore[attr-defined]
        module.check(untouched)
        assert capsys.readouterr().out.startswith("not yet"), name
