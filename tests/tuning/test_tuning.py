"""The choice of algorithm: the lookup, and a table in place of the modelled one."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

import harness
import pallas_collectives as pc
from pallas_collectives.backends import fastest as by_times
from pallas_collectives.backends.measured import Measured as Measured_
from pallas_collectives.backends.plans import How
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import SlowerError, TableError
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import choice, tables
from tables_of_times import (
    chosen,
    content,
    entry,
    fastest,
    reachable,
    served,
    slow_direct,
    stays_off_lines,
    written,
)

pytestmark = pytest.mark.usefixtures("fresh_counts", "modelled_table_alone")

KIB, MIB = 1 << 10, 1 << 20
V5P, V6E = chips.BY_NAME["v5p"], chips.BY_NAME["v6e"]


def test_small_messages_go_in_few_hops_and_large_ones_over_few_links() -> None:
    assert chosen("all_gather", 4 * KIB, 8, torus="line") in ("line", "direct")
    assert chosen("all_gather", 4 * KIB, 2) == "direct"
    assert chosen("all_gather", 8 * MIB, 8, torus="line") != "direct"
    assert chosen("all_reduce", 4 * KIB, 8) == "gather:vmem"
    assert chosen("all_reduce", 64 * MIB, 8) == "ring"
    assert chosen("all_gather", 4 * KIB, 8, torus="ring") in ("bidirectional", "direct")
    assert chosen("all_gather", 8 * MIB, 8, torus="ring") == "bidirectional"


@given(
    op=st.sampled_from([op for op in ALGORITHMS if op != "ragged_all_to_all"]),
    block=st.integers(1, 1 << 32),
    n=st.integers(2, 512),
    chip=st.sampled_from([*chips.BY_NAME.values(), chips.SIMULATED]),
    torus=st.sampled_from([None, *tables.ONE_AXIS, "2x2x2 grid", "8x16 cylinder", "4x4x2x2 torus"]),
)
@settings(max_examples=100, deadline=None)
def test_the_fastest_that_is_allowed_is_chosen_everywhere(
    op: str, block: int, n: int, chip: Any, torus: str | None
) -> None:
    reach = reachable(op, n, chip, torus)
    longest = {"all_reduce": 64, "all_to_all": 32}.get(op, n)
    if not reach and not chip.reaches_all and (n > longest or stays_off_lines(op)):
        return  # no kernel sums or exchanges on so long a line: lax serves
    predicted = choice.predict(op, block, n, chip, reach, torus)
    best = fastest(op, block, n, chip, reach, torus)
    assert best.partition(":")[0] in reach
    assert predicted[best].us == min(p.us for p in predicted.values())
    assert all(p.us >= 0 for p in predicted.values())
    if block > MIB:
        assert ":vmem" not in best


def test_a_table_that_prefers_the_slowest_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = choice.load(tables.MODELLED)
    swapped = copy.deepcopy(table.entries)
    for e in swapped.values():
        if e.op == "all_reduce" and {"ring:vmem", "gather:vmem"} <= e.us.keys():
            e.us["ring:vmem"], e.us["gather:vmem"] = e.us["gather:vmem"], e.us["ring:vmem"]
    monkeypatch.setattr(tables, "load", lambda path: dataclasses.replace(table, entries=swapped))
    with pytest.raises(AssertionError):
        test_small_messages_go_in_few_hops_and_large_ones_over_few_links()


def test_a_group_between_those_of_the_table_lies_between_their_times() -> None:
    times = [choice.predict("all_gather", MIB, n, V5P, ("direct",), "line") for n in (4, 6, 8)]
    four, six, eight = (t["direct"] for t in times)
    assert six.us == pytest.approx((four.us + eight.us) / 2) and six.devices == (4, 8)


def test_a_torus_between_those_of_the_table_lies_between_their_times() -> None:
    """3x4 devices between 2x4 and 4x4; a small cylinder, which does not exist, as a grid."""
    on = {"2x4 grid": 8, "3x4 grid": 12, "4x4 grid": 16, "3x4 cylinder": 12}
    found = {t: choice.predict("all_gather", MIB, n, V6E, ("torus",), t) for t, n in on.items()}
    less, between, more, cylinder = (times["torus"] for times in found.values())
    assert between.us == pytest.approx((less.us + more.us) / 2)
    assert between.devices == (8, 16) and cylinder.us == between.us


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_blocks_that_cannot_be_cut_go_from_axis_to_axis(op: str) -> None:
    """One tile on 4 x 4 x 4: by rings it would be 32 hops. A sum on 2 x 2 x 2 is one hop."""
    one_hop = op == "all_reduce"
    for n, lies, over_all in ((64, "4x4x4 torus", True), (8, "2x2x2 grid", not one_hop)):
        on = Group(("x",), (n,), torus=(Group(("x",), (2,)),) * 3)
        reach = {*by_times.reachable(op, on, V5P)} - {"gather"}  # it does so by itself
        name = fastest(op, 4 * KIB, n, V5P, tuple(reach), lies)
        assert name.startswith("torus") == over_all, name


# A table in place of the modelled one -------------------------------------------------------------


def test_a_measured_table_takes_the_place_of_the_modelled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "table.json", slow_direct())
    assert served() == served(algorithm="auto") == served(algorithm=None) == {"direct"}
    with choice.use_table(path):
        assert served() == {"unidirectional"}
        with choice.use_table(None):
            assert served() == {"direct"}
    monkeypatch.setenv(choice.ENVIRONMENT_VARIABLE, str(path))
    assert served() == {"unidirectional"}
    assert served(algorithm="direct") == {"direct"}


def test_a_jitted_function_is_traced_again_under_a_table(tmp_path: Path) -> None:
    x = np.zeros((2, 8, 128), np.float32)
    run = harness.per_device(lambda a: pc.all_gather(a, "x"), harness.mesh(2))
    run(x)
    with choice.use_table(written(tmp_path / "table.json", slow_direct())):
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
    with choice.use_table(written(tmp_path / "table.json", {**slow_direct(), "us": us, **changes})):
        assert served() == {"direct"}


def test_a_table_of_another_jax_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with (
        choice.use_table(written(tmp_path / "table.json", slow_direct(), jax="0.0.1")),
        pytest.raises(TableError, match=r"with JAX 0\.0\.1.*measure anew with `python -m bench"),
    ):
        served()


def test_a_bad_table_in_the_environment_is_refused_while_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(choice.ENVIRONMENT_VARIABLE, str(tmp_path / "none.json"))
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
    with jax.sharding.use_abstract_mesh(mesh), choice.use_table(tables.parse(content(row), "x")):
        for rows in (1, 16 * KIB):
            x = np.zeros((rows, 1), np.float32)
            try:
                found.append(backend.all_reduce(x, Group(("x",), (2,)), op="sum", how=How("nccl")))
            except SlowerError as error:
                found.append("lax faster" if "lax is faster here" in str(error) else str(error))
    assert found == answer


def test_packed_gathers_go_with_plain_ones_where_fewer_bytes_cannot_be_packed() -> None:
    us: dict[str, tuple[float | None, ...]] = {
        "torus": (10.0, 40.0, 280.0),
        f"torus:{tables.PACKED}": (None, None, 140.0),
    }
    entry = tables.Entry("all_gather", "v5p", "4x4x4 torus", 64, (1 << 15, 1 << 18, 1 << 21), us)
    for nbytes in (1 << 18, 1 << 20, 1 << 21, 1 << 22):
        plain, packed = (choice._at(entry, name, nbytes) for name in us)
        expected = None if nbytes == 1 << 18 else plain and plain / 2
        assert packed == (None if expected is None else pytest.approx(expected)), nbytes
    # What has to wait for hops, as sums of a small block do, takes as long with fewer bytes.
    for other in ({"op": "all_reduce"}, {"torus": "ring", "devices": 16}):
        small = choice._at(dataclasses.replace(entry, **other), f"torus:{tables.PACKED}", 1 << 20)
        assert small == 140.0
