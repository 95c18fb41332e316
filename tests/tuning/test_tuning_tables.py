"""Tables of times: their files, the modelled one, and the names of tori."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay_rows, tune
from benchmarks.cases import CASES
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import TableError
from pallas_collectives.replay import Machine
from pallas_collectives.topology import chips
from pallas_collectives.tuning import choice, tables
from tables_of_times import (
    content,
    entry,
    of_partners_alone,
    reachable,
    stays_off_lines,
    written,
)

pytestmark = pytest.mark.usefixtures("modelled_table_alone")

KIB, MIB = 1 << 10, 1 << 20
V5P = chips.BY_NAME["v5p"]


@pytest.mark.parametrize(
    "bad, key, rule",
    [
        ([], "the file", "an object"),
        (content(kind="guessed"), "kind 'guessed'", "modelled, measured"),
        ({**content(), "jax": None}, "jax", "must be there"),
        ({**content(), "entries": {}}, "entries", "a list"),
        (content(entry(op="psum")), "entries[0].op 'psum'", "all_gather, reduce_scatter"),
        (content(entry(op=["psum"])), "entries[0].op ['psum']", "all_gather, reduce_scatter"),
        (content(entry(torus="moebius")), "entries[0].torus", "line, ring"),
        (content(entry(torus="4 torus")), "entries[0].torus", "'2x4 grid'"),
        (content(entry(devices=1)), "entries[0].devices 1", "above 1"),
        (content(entry(devices=True)), "entries[0].devices", "above 1"),
        (content(entry(bytes=[8, 4])), "entries[0].bytes", "ascending"),
        (content(entry(bytes=[])), "entries[0].bytes", "ascending"),
        (content(entry(us={"tree": [1, 2]})), "entries[0].us 'tree'", "bidirectional"),
        (content(entry(us={"direct": [1]})), "entries[0].us.direct", "2 times"),
        (content(entry(us={"direct": [1, 0]})), "entries[0].us.direct", "above 0"),
        (content(entry(us={"direct": [1, float("nan")]})), "entries[0].us.direct", "above 0"),
        (content(entry(us={})), "entries[0].us", "at least one"),
        (content(entry(), entry()), "entries[1]", "an entry already"),
        (content(entry(chip="")), "entries[0].chip ''", "name of a chip"),
    ],
)
def test_a_bad_table_is_refused_with_file_key_rule_and_remedy(
    tmp_path: Path, bad: Any, key: str, rule: str
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(TableError) as caught:
        choice.load(path)
    message = str(caught.value)
    assert message.startswith(f"{key} of the table") or message.startswith(key)
    assert str(path) in message and rule in message and "python -m benchmarks tune" in message


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no such file"):
        choice.load(tmp_path / "none.json")
    with pytest.raises(TableError, match="named by a path"):
        choice.load({})  # type: ignore[arg-type]
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(TableError, match="read as JSON"):
        choice.load(tmp_path / "text.json")


def test_tables_survive_being_written_and_read(tmp_path: Path) -> None:
    for table in (
        tables.parse(content(entry(), entry(devices=4)), "x"),
        choice.load(tables.MODELLED),
    ):
        read = tables.parse(json.loads(tables.dump(table)), table.path)
        assert dataclasses.asdict(read) == dataclasses.asdict(table)


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "table.json")
    before = choice.load(path)
    assert choice.load(path) is before
    written(path, entry(devices=4))
    assert [entry.devices for entry in choice.load(path).entries.values()] == [4]


def test_a_torus_is_named_by_its_axes_and_by_which_of_them_close() -> None:
    assert tables.torus_of_axes([(4, True), (2, False)]) == "2x4 grid"
    assert tables.sizes_and_word("2x4 grid") == ((2, 4), "grid")
    assert tables.sizes_and_word("ring") == ((), "ring")
    assert tables.torus_of_axes([(2, False), (2, False), (2, False)]) == "2x2x2 grid"
    assert tables.torus_of_axes([(8, True), (16, False)]) == "8x16 cylinder"
    assert tables.torus_of_axes([(4, False), (2, False)]) == "2x4 torus"


def test_the_modelled_table_has_every_chip_group_and_algorithm() -> None:
    table = choice.load(tables.MODELLED)
    assert table.kind == "modelled" and "not measured" in table.about
    for chip, op in itertools.product(chips.BY_NAME.values(), ALGORITHMS):
        entries = [e for e in table.entries.values() if (e.op, e.chip) == (op, chip.name)]
        if op == "ragged_all_to_all":
            assert not entries
            continue
        groups = set(tune.groups(chip.name))
        straight = op == "all_to_all" and chip.reaches_all
        if of_partners_alone(op) or straight:
            groups = {(torus, n) for torus, n in groups if n <= 16}
        groups = {  # of more than 16 devices times are of all axes at once, where the chip can
            (torus, n) for torus, n in groups if n <= 16 or "torus" in reachable(op, n, chip, torus)
        }
        if chip.name == "v5e" and stays_off_lines(op):  # a shift that is modelled closes a ring
            on_grids = not of_partners_alone(op)
            groups = {
                (torus, n)
                for torus, n in groups
                if torus == "ring" or n <= 3 or (torus != "line" and on_grids)
            }
        hint = f"{op} on {chip.name}: a RING is arranged, and neighbours in rank are PARTNERS"
        assert {(e.torus, e.devices) for e in entries} == groups, hint
        for e in entries:
            reached = set(reachable(op, e.devices, chip, e.torus))
            if e.devices > 16:
                reached = {"torus", "gather"}
            names = tune.candidates(op, e.torus), tune.packed(op, e.torus)
            offered, packed = ({c for c in of if c.partition(":")[0] in reached} for of in names)
            assert offered == {name for name in e.us if not name.endswith(":packed")}, e.key
            # A shift along several axes, and thirds of an operand, are not packed in kernels; nor
            # what of many devices VMEM has no room for.
            if of_partners_alone(op) or e.devices > 8:
                assert set(e.us) <= offered | packed, e.key
            else:
                assert set(e.us) == offered | packed, e.key


# The modelled times are the replay's --------------------------------------------------------------


@pytest.mark.parametrize(
    "chip, torus, n, op, algorithm",
    [
        ("v5p", "ring", 8, "all_gather", "bidirectional"),
        ("v5e", "line", 3, "reduce_scatter", "bidirectional:vmem"),
        ("v6e", "ring", 4, "all_to_all", "ring"),
        ("v5p", "line", 2, "all_reduce", "one_shot"),
        ("v4", "line", 3, "ppermute", "partners"),
        ("v5p", "2x2x2 grid", 8, "all_gather", "torus"),
        ("7x", "2x2 grid", 4, "reduce_scatter", "torus:vmem"),
        ("v5p", "ring", 4, "all_reduce", "ring:packed"),
        pytest.param("v5e", "4x4 grid", 16, "all_reduce", "torus", marks=pytest.mark.slow),
        pytest.param("7x", "2x4x4x4 torus", 128, "all_reduce", "torus", marks=pytest.mark.slow),
    ],
)
def test_times_made_again_agree(chip: str, torus: str, n: int, op: str, algorithm: str) -> None:
    """If not: the kernels have changed since `python -m benchmarks tune --model`."""
    table = choice.load(tables.MODELLED)
    shipped = table.entries[op, chip, torus, n]
    others = {name: times for name, times in shipped.us.items() if name != algorithm}
    known = dataclasses.replace(
        table, entries={shipped.key: dataclasses.replace(shipped, us=others)}
    )
    (made,) = tune.model(chip, torus, n, ops=(op,), known=known)
    assert made.bytes == shipped.bytes and made.us.keys() == shipped.us.keys()
    pairs = list(zip(made.us[algorithm], shipped.us[algorithm], strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    assert [a for a, _ in pairs if a] == pytest.approx([b for _, b in pairs if b], rel=0.05)


@pytest.mark.parametrize(
    "op, algorithm, block, n",
    [
        ("all_gather", "bidirectional", 100 * KIB, 8),
        ("all_gather", "direct", 12 * KIB, 12),
        ("reduce_scatter", "bidirectional", MIB, 4),
        ("all_reduce", "ring", 8 * MIB, 4),
    ],
)
def test_predictions_between_entries_are_near_the_replay(
    op: str, algorithm: str, block: int, n: int
) -> None:
    case = next(case for case in CASES if case.op == op)
    size = block if case.whole else block * n
    machine = Machine.named(f"v5p:{n}", (True, False, False))
    task = replay_rows.Task(machine, case, "float32", size, algorithm, ("x",))
    predicted = choice.predict(op, block, n, V5P, (algorithm,), "ring")[algorithm]
    assert predicted.us == pytest.approx(replay_rows.run(task).time * 1e6, rel=0.15)
