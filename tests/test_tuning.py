"""The choice of algorithm: its tables, the lookup, what is measured, and what `explain` says."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

import harness
import pallas_collectives as pc
from benchmarks import devices, measure, replay_rows, tune
from benchmarks.cases import CASES
from benchmarks.rows import Measured
from pallas_collectives import chips, tables, tuning
from pallas_collectives.backends import How, algorithms
from pallas_collectives.backends.algorithms import ALGORITHMS
from pallas_collectives.backends.measured import Measured as Measured_
from pallas_collectives.errors import CollectiveError, SlowerError, TableError
from pallas_collectives.kernels.topology import Group
from pallas_collectives.replay import Machine
from pallas_collectives.tables import Table

KIB, MIB = 1 << 10, 1 << 20
V5P, V5E = chips.BY_NAME["v5p"], chips.BY_NAME["v5e"]


@pytest.fixture(autouse=True)
def _from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.ENVIRONMENT_VARIABLE, raising=False)
    pc.reset_counts()


def entry(**changes: Any) -> dict[str, Any]:
    us = {"bidirectional": [9.0, 20.0], "direct": [5.0, 50.0]}
    plain = {"op": "all_gather", "chip": chips.SIMULATED.name, "torus": "line", "devices": 2}
    return {**plain, "bytes": [4096, 65536], "us": us, **changes}


def content(*entries: Any, **changes: Any) -> dict[str, Any]:
    head = {"kind": "measured", "jax": jax.__version__, "about": "a test's"}
    return {**head, "entries": list(entries or [entry()]), **changes}


def written(path: Path, *entries: Any, **changes: Any) -> Path:
    path.write_text(json.dumps(content(*entries, **changes)))
    return path


# Tables -------------------------------------------------------------------------------------------


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
        tuning.load(path)
    message = str(caught.value)
    assert message.startswith(f"{key} of the table") or message.startswith(key)
    assert str(path) in message and rule in message and "python -m benchmarks tune" in message


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no such file"):
        tuning.load(tmp_path / "none.json")
    with pytest.raises(TableError, match="named by a path"):
        tuning.load({})  # type: ignore[arg-type]
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(TableError, match="read as JSON"):
        tuning.load(tmp_path / "text.json")


def test_tables_survive_being_written_and_read(tmp_path: Path) -> None:
    for table in (
        tables.parse(content(entry(), entry(devices=4)), "x"),
        tuning.load(tables.MODELLED),
    ):
        read = tables.parse(json.loads(tables.dump(table)), table.path)
        assert dataclasses.asdict(read) == dataclasses.asdict(table)


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "table.json")
    before = tuning.load(path)
    assert tuning.load(path) is before
    written(path, entry(devices=4))
    assert [entry.devices for entry in tuning.load(path).entries.values()] == [4]


def test_the_modelled_table_has_every_chip_group_and_algorithm() -> None:
    table = tuning.load(tables.MODELLED)
    assert table.kind == "modelled" and "not measured" in table.about
    for chip, op in itertools.product(chips.BY_NAME.values(), ALGORITHMS):
        entries = [e for e in table.entries.values() if (e.op, e.chip) == (op, chip.name)]
        if op == "ragged_all_to_all":
            assert not entries
            continue
        groups = set(tune.groups(chip.name))
        if op in ("all_to_all", "ppermute"):
            groups = {(torus, n) for torus, n in groups if n <= 16}
        assert {(e.torus, e.devices) for e in entries} == groups
        for e in entries:
            reached = set(reachable(op, e.devices, chip, e.torus))
            if e.devices > 16:
                reached = {"torus"}
            offered = {c for c in tune.candidates(op, e.torus) if c.partition(":")[0] in reached}
            assert set(e.us) == offered, e.key


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
    ],
)
def test_times_made_again_agree(chip: str, torus: str, n: int, op: str, algorithm: str) -> None:
    """If not: the kernels have changed since `python -m benchmarks tune --model`."""
    table = tuning.load(tables.MODELLED)
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
    predicted = tuning.predict(op, block, n, V5P, (algorithm,), "ring")[algorithm]
    assert predicted.us == pytest.approx(replay_rows.run(task).time * 1e6, rel=0.15)


# The lookup ---------------------------------------------------------------------------------------


def chosen(op: str, block: int, n: int, chip: Any = V5P, **on: str) -> str:
    reach = reachable(op, n, chip)
    return tuning.choose(op, block, n, chip, reach, **on)


def reachable(op: str, n: int, chip: Any, torus: str | None = None) -> tuple[str, ...]:
    """The algorithms that a group of all n devices can choose from, of one axis or of several."""
    several = (Group(("y",), (2,)),) * 2 if torus and " " in torus else ()
    return algorithms.reachable(op, Group(("x",), (n,), torus=several), chip, cuts=512)


def test_small_messages_go_in_few_hops_and_large_ones_over_few_links() -> None:
    assert chosen("all_gather", 4 * KIB, 8, torus="line") in ("line", "direct")
    assert chosen("all_gather", 4 * KIB, 2) == "direct"
    assert chosen("all_gather", 8 * MIB, 8, torus="line") != "direct"
    assert chosen("all_reduce", 4 * KIB, 8) == "one_shot:vmem"
    assert chosen("all_reduce", 64 * MIB, 8) == "ring"
    assert chosen("all_gather", 4 * KIB, 8, torus="ring") in ("bidirectional", "direct")
    assert chosen("all_gather", 8 * MIB, 8, torus="ring") == "bidirectional"


@given(
    op=st.sampled_from([op for op in ALGORITHMS if op != "ragged_all_to_all"]),
    block=st.integers(1, 1 << 32),
    n=st.integers(2, 512),
    chip=st.sampled_from([*chips.BY_NAME.values(), chips.SIMULATED]),
    torus=st.sampled_from([None, *tables.TORI, "2x2x2 grid", "8x16 cylinder", "4x4x2x2 torus"]),
)
@settings(max_examples=100, deadline=None)
def test_the_fastest_that_is_allowed_is_chosen_everywhere(
    op: str, block: int, n: int, chip: Any, torus: str | None
) -> None:
    reach = reachable(op, n, chip, torus)
    predicted = tuning.predict(op, block, n, chip, reach, torus)
    best = tuning.choose(op, block, n, chip, reach, torus)
    assert best.partition(":")[0] in reach
    assert predicted[best].us == min(p.us for p in predicted.values())
    assert all(p.us >= 0 for p in predicted.values())
    if block > MIB:
        assert ":vmem" not in best


def test_a_table_that_prefers_the_slowest_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tuning.load(tables.MODELLED)
    swapped = copy.deepcopy(table.entries)
    for e in swapped.values():
        if e.op == "all_reduce" and {"ring:vmem", "one_shot:vmem"} <= e.us.keys():
            e.us["ring:vmem"], e.us["one_shot:vmem"] = e.us["one_shot:vmem"], e.us["ring:vmem"]
    monkeypatch.setattr(tables, "load", lambda path: dataclasses.replace(table, entries=swapped))
    with pytest.raises(AssertionError):
        test_small_messages_go_in_few_hops_and_large_ones_over_few_links()


def test_a_group_between_those_of_the_table_lies_between_their_times() -> None:
    times = [tuning.predict("all_gather", MIB, n, V5P, ("direct",), "line") for n in (4, 6, 8)]
    four, six, eight = (t["direct"] for t in times)
    assert six.us == pytest.approx((four.us + eight.us) / 2) and six.devices == (4, 8)


def test_a_torus_is_named_by_its_axes_and_by_which_of_them_close() -> None:
    assert tables.torus_of_axes([(4, True), (2, False)]) == "2x4 grid"
    assert tables.sizes_and_word("2x4 grid") == ((2, 4), "grid")
    assert tables.sizes_and_word("ring") == ((), "ring")
    assert tables.torus_of_axes([(2, False), (2, False), (2, False)]) == "2x2x2 grid"
    assert tables.torus_of_axes([(8, True), (16, False)]) == "8x16 cylinder"
    assert tables.torus_of_axes([(4, False), (2, False)]) == "2x4 torus"


def test_a_torus_between_those_of_the_table_lies_between_their_times() -> None:
    """3x4 devices between 2x4 and 4x4; a small cylinder, of which there is none, as a grid."""
    on = {"2x4 grid": 8, "3x4 grid": 12, "4x4 grid": 16, "3x4 cylinder": 12}
    found = {t: tuning.predict("all_gather", MIB, n, V5E, ("torus",), t) for t, n in on.items()}
    less, between, more, cylinder = (times["torus"] for times in found.values())
    assert between.us == pytest.approx((less.us + more.us) / 2)
    assert between.devices == (8, 16) and cylinder.us == between.us


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_blocks_that_cannot_be_cut_go_from_axis_to_axis_on_large_tori(op: str) -> None:
    """One tile on 4 x 4 x 4: by rings it would be 32 hops. On 2 x 2 x 2 rings are short."""
    for n, lies, over_all in ((64, "4x4x4 torus", True), (8, "2x2x2 grid", False)):
        on = Group(("x",), (n,), torus=(Group(("x",), (2,)),) * 3)
        reach = algorithms.reachable(op, on, V5P, cuts=1)
        name = tuning.choose(op, 4 * KIB, n, V5P, reach, lies)
        assert name.startswith("torus") == over_all, name


# A table in place of the modelled one -------------------------------------------------------------


def served(**how: Any) -> set[str | None]:
    """The algorithms that a gather of one 4 KiB block on two simulated devices was built with."""
    x = np.zeros((2, 8, 128), np.float32)
    run = harness.per_device(lambda a: pc.all_gather(a, "x", **how), harness.mesh(2))
    jax.block_until_ready(run(x))
    found = {algorithm for _, _, algorithm in pc.counts()}
    pc.reset_counts()
    return found


def slow_direct() -> dict[str, Any]:
    return entry(us={"unidirectional": [1.0, 2.0], "direct": [5.0, 50.0]})


def test_a_measured_table_takes_the_place_of_the_modelled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "table.json", slow_direct())
    assert served() == served(algorithm="auto") == served(algorithm=None) == {"direct"}
    with tuning.use_table(path):
        assert served() == {"unidirectional"}
        with tuning.use_table(None):
            assert served() == {"direct"}
    monkeypatch.setenv(tuning.ENVIRONMENT_VARIABLE, str(path))
    assert served() == {"unidirectional"}
    assert served(algorithm="direct") == {"direct"}


def test_a_jitted_function_is_traced_again_under_a_table(tmp_path: Path) -> None:
    x = np.zeros((2, 8, 128), np.float32)
    run = harness.per_device(lambda a: pc.all_gather(a, "x"), harness.mesh(2))
    run(x)
    with tuning.use_table(written(tmp_path / "table.json", slow_direct())):
        run(x)
    run(x)
    assert pc.counts() == {
        ("all_gather", "pallas", "direct"): 1,
        ("all_gather", "pallas", "unidirectional"): 1,
    }


@pytest.mark.parametrize(
    "changes", [{"devices": 4}, {"chip": "v5p"}, {"torus": "ring"}, {"op": "ppermute"}]
)
def test_what_was_not_measured_is_modelled(tmp_path: Path, changes: dict[str, Any]) -> None:
    us = {"partners": [1.0, 2.0]} if "op" in changes else slow_direct()["us"]
    with tuning.use_table(written(tmp_path / "table.json", {**slow_direct(), "us": us, **changes})):
        assert served() == {"direct"}


def test_a_table_of_another_jax_is_not_used(tmp_path: Path) -> None:
    with tuning.use_table(written(tmp_path / "table.json", slow_direct(), jax="0.0.1")):
        assert served() == {"direct"}


def test_a_bad_table_in_the_environment_is_refused_while_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.ENVIRONMENT_VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(TableError, match=r"none\.json.*no such file"):
        served()


class Sums:
    """A backend module that says that it has served."""

    def all_reduce(self, x: jax.Array, group: Group, *, op: str, how: How) -> str:
        return "served"


@pytest.mark.parametrize(
    "us, changes, answer",
    [
        ({"nccl": [5.0, 50.0], "xla": [9.0, 40.0]}, {}, ["served", "lax faster"]),
        ({"nccl": [5.0, 50.0]}, {}, ["served", "served"]),
        ({"nccl": [9.0, 9.0], "xla": [1.0, 1.0]}, {"devices": 4}, ["served", "served"]),
        ({"nccl": [9.0, 9.0], "xla": [1.0, 1.0]}, {"chip": "another"}, ["served", "served"]),
    ],
)
def test_lax_serves_on_gpus_where_it_was_measured_faster(
    us: dict[str, Any], changes: dict[str, Any], answer: list[str]
) -> None:
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((2,), ("x",), axis_types=auto, abstract_device=device)
    row = {**entry(op="all_reduce", chip="NVIDIA H200", us=us), **changes}
    backend, found = Measured_(Sums(), "nccl"), []
    with jax.sharding.use_abstract_mesh(mesh), tuning.use_table(tables.parse(content(row), "x")):
        for rows in (1, 16 * KIB):
            x = np.zeros((rows, 1), np.float32)
            try:
                found.append(backend.all_reduce(x, Group(("x",), (2,)), op="sum", how=How("nccl")))
            except SlowerError as error:
                found.append("lax faster" if "lax faster" in str(error) else str(error))
    assert found == answer


# explain ------------------------------------------------------------------------------------------


def test_explain_names_all_candidates_their_times_and_the_reason() -> None:
    small = pc.explain("psum", 4 * KIB, devices=8, chip="v5p")
    large = pc.explain("psum", shape=(4096, 4096), dtype=jnp.bfloat16, devices=8, chip="v5p")
    assert (small.algorithm, large.algorithm) == ("one_shot:vmem", "ring")
    assert large.nbytes == 32 * MIB
    assert "latency, so hops" in small.why and "busiest link" in large.why
    names = {c.algorithm.partition(":")[0] for c in small.candidates}
    assert names == set(ALGORITHMS["all_reduce"])
    times = [c.us for c in small.candidates if c.us is not None]
    assert times == sorted(times) and small.candidates[0].algorithm == small.algorithm
    assert all(c.source.startswith("modelled") for c in small.candidates if c.us is not None)
    assert "one_shot:vmem" in str(small) and "modelled" in str(small)


def test_explain_is_what_a_call_gets() -> None:
    on = harness.mesh(2, 4)
    for shape, op in itertools.product([(8, 128), (1024, 1024)], ["all_gather", "psum"]):
        call: Callable[..., Any] = getattr(pc, op)
        pc.reset_counts()
        run = harness.per_device(lambda a, call=call: call(a, "y"), on)
        jax.eval_shape(run, np.zeros((8, *shape), np.float32))
        jax.jit(run).lower(np.zeros((8, *shape), np.float32))
        (key,) = pc.counts()
        assert pc.explain(op, shape=shape, mesh=on, axis_name="y").algorithm == key[2]


@pytest.mark.parametrize("op, n, rows", [("psum", 2, 0), ("psum", 1, 8), ("ppermute", 1, 8)])
def test_explain_sends_nothing_where_calls_do(op: str, n: int, rows: int) -> None:
    call = {"psum": pc.psum, "ppermute": lambda a, axis: pc.ppermute(a, axis, [(0, 0)])}[op]
    on = harness.mesh(n)
    jax.jit(harness.per_device(lambda a: call(a, "x"), on)).lower(np.zeros((n, rows, 128)))
    found = pc.explain(op, shape=(rows, 128), mesh=on, axis_name="x")
    assert (found.algorithm == "nothing") == (not pc.counts()) == (op == "psum")
    assert ("empty" if rows == 0 else "one device" if op == "psum" else "only one") in found.why


def test_explain_says_what_cannot_serve_and_what_was_measured(tmp_path: Path) -> None:
    far = pc.explain("all_gather", 4 * KIB, devices=8, chip="v5e")
    direct = next(c for c in far.candidates if c.algorithm == "direct")
    assert direct.us is None and "cannot write" in direct.source
    with tuning.use_table(written(tmp_path / "table.json", slow_direct())):
        measured = pc.explain("all_gather", 4 * KIB, devices=2)
    assert measured.algorithm == "unidirectional" and measured.why.startswith("measured 1.0 us")
    assert f"measured with JAX {jax.__version__}" in str(measured)
    ragged = pc.explain("ragged_all_to_all", MIB, devices=4, chip="v5p")
    assert ragged.algorithm == "direct" and "only one" in ragged.why


def test_explain_across_slices_gives_the_steps() -> None:
    mesh = AbstractMesh((2, 4), ("dcn", "x"))
    with pc.across_slices("dcn"):
        steps = pc.explain("psum", MIB, mesh=mesh, axis_name=("dcn", "x"))
        assert [step.op for step in steps.inside] == ["reduce_scatter", "all_gather"]
        assert [step.nbytes for step in steps.inside] == [MIB, MIB // 4]
        assert "lax between them" in str(steps)
        gather = pc.explain("all_gather", KIB, mesh=mesh, axis_name=("dcn", "x"))
        assert [step.nbytes for step in gather.inside] == [2 * KIB]
        assert (
            pc.explain("all_to_all", MIB, mesh=mesh, axis_name=("dcn", "x")).algorithm
            == "lax's own"
        )
        assert pc.explain("psum", MIB, mesh=mesh, axis_name="dcn").algorithm == "lax's own"
        assert not pc.explain("psum", MIB, mesh=mesh, axis_name="x").inside
        assert pc.explain("psum", 0, mesh=mesh, axis_name=("dcn", "x")).algorithm == "nothing"
        scalar = pc.explain("psum", shape=(), mesh=mesh, axis_name=("dcn", "x"))
        assert [step.nbytes for step in scalar.inside] == [4, 1]


def test_explain_goes_by_the_tiles_that_there_are_to_cut() -> None:
    """One tile a block, of which six links cannot each have a part."""
    on = harness.mesh(2, 2, 2)
    axes = ("x", "y", "z")
    with pc.torus("v5p:2x2x2"):
        found = pc.explain("all_gather", shape=(8, 128), mesh=on, axis_name=axes)
        run = harness.per_device(lambda a: pc.all_gather(a, axes, tiled=True), on)
        jax.jit(run).lower(np.zeros((8, 8, 128), np.float32))
    assert set(pc.counts()) == {("all_gather", "pallas", found.algorithm)}
    (torus_row,) = (c for c in found.candidates if c.algorithm == "torus")
    assert torus_row.us is None and "too few tiles" in torus_row.source


def test_explain_goes_over_all_axes_where_calls_do() -> None:
    on = harness.mesh(2, 4)
    with pc.torus("v5p:2x2x2"):
        found = pc.explain("all_gather", 4 * MIB, mesh=on, axis_name=("x", "y"))
        run = harness.per_device(lambda a: pc.all_gather(a, ("x", "y"), tiled=True), on)
        jax.jit(run).lower(np.zeros((8, 8192, 128), np.float32))
    assert found.algorithm == found.candidates[0].algorithm == "torus"
    assert found.torus == "2x2x2 grid" and "us against" in found.why
    assert set(pc.counts()) == {("all_gather", "pallas", "torus")}


@pytest.mark.parametrize("torus, lies", [("v5p:2x2x2", "2x2x2 grid"), ("v5e:2x4", "2x4 grid")])
def test_explain_says_where_one_axis_is_laid_over_several_of_the_torus(
    torus: str, lies: str
) -> None:
    with pc.torus(torus):
        found = pc.explain("all_gather", 4 * MIB, mesh=harness.mesh(8), axis_name="x")
    assert f"on a {lies} of 8" in str(found)
    assert found.algorithm == ("torus" if lies == "2x2x2 grid" else "bidirectional")
    (torus_row,) = (c for c in found.candidates if c.algorithm == "torus")
    assert torus_row.us and torus_row.source == "modelled by replay, for 8 devices"


@pytest.mark.parametrize(
    "dtype, served", [("float64", False), ("complex128", False), ("complex64", True)]
)
@pytest.mark.parametrize("op", ["psum", "psum_scatter", "all_gather"])
def test_explain_leaves_to_lax_what_calls_do(op: str, dtype: str, served: bool) -> None:
    found = pc.explain(op, shape=(8, 128), dtype=dtype, devices=4)
    assert (found.algorithm == "lax's own") == (not served and op != "all_gather")
    assert served or op == "all_gather" or "at most 32 bits" in found.why


MESH = AbstractMesh((2,), ("x",))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"op": "scan", "nbytes": 1, "devices": 2}, "op='scan': it is one of all_gather"),
        ({"op": "psum", "devices": 2}, "nbytes or as shape"),
        ({"op": "psum", "nbytes": 1, "shape": (1,), "devices": 2}, "give one of them"),
        ({"op": "psum", "nbytes": 1}, "mesh and axis_name or by a number"),
        ({"op": "psum", "nbytes": 1, "devices": 1}, "2 or more"),
        ({"op": "psum", "nbytes": 1, "devices": 2, "chip": "v9"}, "chip='v9': it is one of v4"),
        ({"op": "psum", "nbytes": 1, "devices": 2, "torus": "knot"}, "'ring' or 'line'"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH}, "mesh and axis_name"),
        ({"op": "psum", "nbytes": 1, "devices": "8"}, "devices='8': it is a whole number"),
        ({"op": "psum", "nbytes": -5, "devices": 8}, "nbytes=-5: it is a whole number"),
        ({"op": "psum", "shape": 5, "devices": 8}, "a tuple of sizes"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": "q"}, "axis_name='q'"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": ("x", "x")}, "different ones"),
    ],
)
def test_explain_refuses_too_little_to_go_on(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        pc.explain(**arguments)


# python -m benchmarks tune ------------------------------------------------------------------------


def test_without_tpus_and_gpus_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "prepare", lambda n: None)
    out = tmp_path / "table.json"
    assert tune.main(["--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "Nothing can be measured here" in printed and str(tables.MODELLED) in printed
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["--iters=0"], ["--out=nowhere/table.json"]])
def test_arguments_that_make_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def timed(op: str, algorithm: str | None, size: int, us: float | None, **more: Any) -> Measured:
    how = {"type": "float32", "backend": "pallas", "count": 1, "devices": 2, "wrong": 0}
    return Measured(op=op, algorithm=algorithm, size=size, time_us=us, **{**how, **more})


def test_measured_rows_become_the_table_that_is_used(tmp_path: Path) -> None:
    rows = [
        timed("all_gather", "direct", 8 * KIB, 50.0),
        timed("all_gather", "direct", 128 * KIB, 60.0),
        timed("all_gather", "unidirectional", 8 * KIB, 40.0),
        timed("all_gather", "unidirectional", 128 * KIB, 70.0),
        timed("all_gather", "bidirectional", 8 * KIB, 1.0, wrong=3),
        timed("psum", "ring", 8 * KIB, None, refused="too far"),
    ]
    table = tune.measured([(row, "line") for row in rows], chips.SIMULATED.name)
    assert [e.key for e in table.entries.values()] == [("all_gather", "simulated TPU", "line", 2)]
    (found,) = table.entries.values()
    assert found.bytes == (4 * KIB, 64 * KIB)
    assert found.us == {"direct": (50.0, 60.0), "unidirectional": (40.0, 70.0)}
    tune._write(table, tmp_path / "table.json")
    with tuning.use_table(tmp_path / "table.json"):
        assert served() == {"unidirectional"}
        assert chosen("all_gather", 64 * KIB, 2, chips.SIMULATED, torus="line") == "direct"


def test_candidates_are_measured_for_every_group_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the clock replaced: what is asked of it, and what becomes of its answers."""

    def rows(tasks: list[measure.Task], wanted: Any, mesh: Any) -> Iterator[Measured]:
        for task in tasks:
            us = 1.0 if task.algorithm == "unidirectional" else 2.0
            n = mesh.shape["x"]
            yield timed(task.case.name, task.algorithm, task.size, us, devices=n)

    monkeypatch.setattr(devices, "prepare", lambda n: None)
    monkeypatch.setattr(devices, "kind", lambda: "tpu")
    monkeypatch.setattr(measure, "rows", rows)
    out = tmp_path / "table.json"
    assert tune.main(["--out", str(out)]) == 0
    table = tuning.load(out)
    assert table.measured and table.jax == jax.__version__
    assert f"{tuning.ENVIRONMENT_VARIABLE}={out}" in capsys.readouterr().out
    assert {e.devices for e in table.entries.values()} == {2, 4, 8}
    for e in table.entries.values():
        assert set(e.us) == set(tune.candidates(e.op, e.torus))


def test_a_table_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    bad = tables.parse(content(), "x")
    bad = Table(
        "", "measured", "", "", {k: dataclasses.replace(e, us={}) for k, e in bad.entries.items()}
    )
    with pytest.raises(TableError):
        tune._write(bad, tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()
