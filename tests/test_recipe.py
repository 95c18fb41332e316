"""The recipe for an algorithm: what it adds is found wherever collectives are listed."""

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import test_catalogue
import test_examples
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import against_lax
import benchmarking
import conformance
import harness
import pallas_collectives as pc
from benchmarks import measure, readme, replay_rows, tune
from benchmarks.cases import CASES, layouts, named
from benchmarks.probes import spaces
from benchmarks.probes.rig import Rig
from benchmarks.results import Saved
from benchmarks.rows import Asked
from benchmarks.settings import Settings
from benchmarks.steps import compiling, learning, schedule
from benchmarks.steps import wires as step_wires
from pallas_collectives import catalogue
from pallas_collectives.catalogue import ALGORITHMS, COLLECTIVES
from pallas_collectives.errors import AlgorithmError
from pallas_collectives.replay import Machine
from pallas_collectives.replay.program import Program
from pallas_collectives.tuning import tables

ROOT = Path(__file__).parent.parent
PAGE = ROOT / ".github/adding-an-algorithm.md"
NEW = {("all_gather", "in_turn"), ("rotate", "neighbour")}


def recipe() -> list[tuple[str, str]]:
    """The recipe's blocks of code: where each belongs, as its first line says, and the code."""
    return re.findall(r"```python\n# (\S+\.py).*?\n(.*?)```", PAGE.read_text(), re.S)


def _as_new_file(path: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, file = path.removesuffix(".py").replace("/", "."), folder / Path(path).name
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


def _into(module: ModuleType, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(module))
    names = {**before}
    exec(code, names)
    for name in names.keys() - before.keys() - {"__builtins__"}:
        monkeypatch.setattr(module, name, names[name], raising=False)


@pytest.fixture
def with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recipe, followed: a kernel file, a record; a record and a function here and there."""
    records = []
    for path, code in recipe():
        if path == "pallas_collectives/catalogue/__init__.py":
            record = eval(code, dict(vars(catalogue)))
            is_algorithm = isinstance(record, catalogue.Algorithm)
            records.append(("all_gather", record) if is_algorithm else record)
        elif not (ROOT / path).exists():
            _as_new_file(path, code, tmp_path, monkeypatch)
        else:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            _into(importlib.import_module(name), code, monkeypatch)
    with catalogue.added(*records):
        yield


def test_the_recipe_names_few_places() -> None:
    places = [path.removeprefix("pallas_collectives/") for path, _ in recipe()]
    assert places == [
        *("kernels/all_gather_in_turn.py", "catalogue/__init__.py"),
        *(
            "catalogue/__init__.py",
            "collectives/__init__.py",
            "backends/pallas/__init__.py",
            "backends/nccl.py",
        ),
        "__init__.py",
    ]
    for _, code in recipe():
        ast.parse(code)


@pytest.mark.usefixtures("with_both", "fresh_counts")
def test_both_serve_without_races() -> None:
    (gather, *_) = (row for row in conformance.rows() if row.op == "all_gather")
    (rotate,) = (row for row in conformance.rows() if row.op == "rotate")
    for row, algorithm in ((gather, "in_turn"), (rotate, "neighbour")):
        conformance.check(row, 4, "float32", {"algorithm": algorithm}, adversaries=True)
        with pc.torus("v5e:2x4"):
            conformance.check(row, 8, "float32", {"algorithm": algorithm})
        assert (row.op, "pallas", algorithm) in pc.counts()
    conformance.check(rotate, 3, "float32", {"backend": "xla"})
    for shape in ((3, 0, 128), (3, 8, 0)):
        empty = np.zeros(shape, np.float32)
        turned = harness.per_device(lambda a: pc.rotate(a, "x"), harness.mesh(3))(empty)
        np.testing.assert_array_equal(turned, empty)


@pytest.mark.usefixtures("with_both", "fresh_counts")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_collective_of_ours_has_types_derivatives_and_batching(check_vma: bool) -> None:
    x = harness.random((2, *against_lax.SHAPE), "float32")

    def by_lax(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])

    def both(rotate: Any, x: jax.Array) -> Any:
        y = rotate(x)
        assert against_lax.type_of(y) == against_lax.type_of(by_lax(x))
        return y, jax.grad(against_lax.loss(rotate))(x), jax.vmap(rotate)(x)

    ours, of_lax = (
        harness.per_device(lambda a, f=f: both(f, a), harness.mesh(2), check_vma=check_vma)(x)
        for f in (lambda a: pc.rotate(a, "x"), by_lax)
    )
    against_lax.compare(ours, of_lax)
    assert not pc.fallback_counts()


@pytest.mark.usefixtures("with_both", "modelled_table_alone")
def test_explain_and_tuning_find_both() -> None:
    gather = pc.explain("all_gather", 4096, devices=4, chip="v5p")
    (new,) = (c for c in gather.candidates if c.algorithm == "in_turn")
    assert new.us is None and new.source == "no table has it"
    rotate = pc.explain("rotate", 4096, devices=4, chip="v5p")
    assert rotate.algorithm == "neighbour" and rotate.why.startswith("no other algorithm can serve")
    for torus in (*tables.ONE_AXIS, "2x2 grid"):
        assert "in_turn" in tune.candidates("all_gather", torus)
    (entry,) = tune.model("v5p", "line", 2, ops=("rotate",))
    assert set(entry.us) == {"neighbour"} and all(entry.us["neighbour"])
    with pytest.raises(AlgorithmError, match="in_turn, alone"):
        _choose("nothing")


def _choose(algorithm: str) -> Any:
    call = harness.per_device(lambda a: pc.all_gather(a, "x", algorithm=algorithm), harness.mesh(2))
    return call(np.zeros((2, 8, 128), np.float32))


@pytest.mark.usefixtures("with_both")
def test_the_readmes_table_finds_both() -> None:
    rows = readme.algorithms(Saved({}, {}, {})).splitlines()
    assert "|  | `in_turn` | as the wires lie | n−1 |  |" in rows
    assert rows[-1] == "| `rotate` | `neighbour` | the operand | 1 | yes |"


@pytest.mark.usefixtures("with_both")
def test_what_was_not_replayed_yet_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: replayed -->\n<!-- end of table -->\n")
    monkeypatch.setattr(readme, "PAGES", (page,))
    monkeypatch.setattr(readme, "TABLES", {"replayed": readme.replayed})
    done = benchmarking.in_process(monkeypatch, capsys)("readme")
    assert done.status == 0 and "--recompute" in done.out
    (_, *_, row, _) = page.read_text().splitlines()
    assert row.endswith(f" {readme.NOT_RECOMPUTED} |") and row.count(readme.NOT_RECOMPUTED) == 1


@pytest.mark.usefixtures("with_both")
def test_conformance_finds_both() -> None:
    import test_conformance

    named = {row.values[:2] for row in test_conformance._race_rows()}
    assert named >= NEW and {op for op, _ in named} == set(COLLECTIVES)
    (row,) = (row for row in conformance.rows() if row.op == "rotate")
    assert conformance.algorithms(row) == ["neighbour"]


@pytest.mark.usefixtures("with_both")
def test_the_compile_tests_find_both() -> None:
    test_compiled = pytest.importorskip("test_compiled")
    forms = [form for form in test_compiled._in_turn() if form[:2] in NEW]
    assert {form[:2] for form in forms} == NEW
    assert {form[2] for form in forms} == set(harness.GENERATIONS)
    for form in {form[0]: form for form in forms if form[2] == "v6e"}.values():
        test_compiled.test_compiles_for_every_generation(*form)


@pytest.mark.usefixtures("with_both")
def test_benchmarks_and_replays_find_both() -> None:
    wanted = Settings(tuple(CASES), backends=("pallas",), sizes=(8192,), mesh=(4,))
    assert {(t.case.op, t.algorithm) for t in measure.plan(wanted)} >= NEW
    assert "rotate" in [layout.name for layout in layouts()]
    cases = {case.op: case for case in CASES}
    for op, algorithm in NEW:
        (task,) = replay_rows.plan(["v5p:4x1x1"], [cases[op]], [1 << 18], algorithms=[algorithm])
        (row,) = replay_rows.rows([task], races=True)
        assert not row.error and not row.faults and row.of_bound
        (row,) = replay_rows.rows([dataclasses.replace(task, algorithm=None)])
        assert row.served in ALGORITHMS[op]  # not by the kernel's name, which another may share


@pytest.mark.usefixtures("with_both")
def test_probes_and_what_is_learned_of_steps_find_a_collective() -> None:
    devices, machine = np.array(jax.devices()[:2]), Machine.named("v5e:2")
    rig = Rig(machine, Mesh(devices, ("x",)), pltpu.InterpretParams())
    asked = Asked(op="rotate", type="float32", size=8192)
    row = spaces.row_of(rig, spaces.programs(rig)["rotate"], asked)
    assert (row.wrong, row.error) == (0, "")
    (rotate,) = named("rotate")
    text = compiling.lower(learning.program(2, rotate), devices, "lax").as_text()
    assert text.count("stablehlo.collective_permute") == learning.LAYERS
    call = schedule.Collective("c", "rotate", "", schedule.CORE, 1 << 16, 2, ("x",))
    assert isinstance(step_wires.programs(machine, np.arange(2), {"x": 2}, [])(call), Program)


@pytest.mark.usefixtures("with_both")
def test_the_recipes_records_pass_the_tests_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a reader who follows the recipe for good finds nothing amiss in these."""
    rotate = COLLECTIVES["rotate"]
    test_catalogue.test_what_a_record_names_is_there(rotate)
    test_examples.test_what_is_sent_is_what_the_results_hold_of_others(rotate)
    test_examples.test_links_carry_what_is_sent(rotate)
    for op, name in sorted(NEW):
        test_catalogue.test_a_kernels_barrier_is_among_the_devices_that_its_record_reaches(
            op, name, monkeypatch
        )


def test_nothing_of_it_is_left() -> None:
    test_of = {name for _, name in NEW}
    assert not test_of & set(itertools.chain(*ALGORITHMS.values()))
    assert "rotate" not in COLLECTIVES and not hasattr(pc, "rotate")
