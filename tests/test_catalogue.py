"""The records: what they name is there, and kernels do as they say."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import test_layers

import harness
import pallas_collectives as pc
from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives import catalogue
from pallas_collectives.backends import canonical, counters, nccl, pallas
from pallas_collectives.catalogue import ALGORITHMS, COLLECTIVES
from pallas_collectives.catalogue.records import (
    EVERYONE,
    JUMPS,
    LINE,
    NEIGHBOURS,
    PARTNERS,
    RING,
    TORUS,
    Kernel,
)
from pallas_collectives.errors import BackendError
from pallas_collectives.kernels.machinery import entry, launch
from pallas_collectives.overlap import split
from pallas_collectives.replay import Machine, bound

BARRIERS = {
    RING: "neighbours",
    NEIGHBOURS: "neighbours",
    LINE: "line",
    TORUS: "neighbours on a torus",
    JUMPS: "jumps on a torus",
    EVERYONE: "everyone",
    PARTNERS: "shift right",
}


def test_the_catalogue_stands_on_nothing_of_the_package() -> None:
    """But on how devices lie, of which a record says who writes to whom."""
    imported = test_layers.graph_of(test_layers.sources())
    of_topology = {f"topology.{name}" for name in ("groups", "placement", "reach")}
    assert imported["catalogue"] == {"examples", "catalogue.records"} and not imported["examples"]
    assert imported["catalogue.records"] == {"examples", *of_topology}


def test_a_name_that_is_taken_is_refused() -> None:
    before = ALGORITHMS["all_gather"]
    with (
        pytest.raises(ValueError, match="'all_gather' is in the catalogue already"),
        catalogue.added(COLLECTIVES["all_gather"]),
    ):
        pass
    direct = COLLECTIVES["all_gather"].algorithm("direct")
    with (
        pytest.raises(ValueError, match="all_gather has an algorithm 'direct' already"),
        catalogue.added(("all_gather", direct)),
    ):
        pass
    assert ALGORITHMS["all_gather"] == before


def test_names_are_looked_up_in_a_table_that_is_made_when_a_record_is_added() -> None:
    before = catalogue.primitives()
    assert catalogue.primitives() is before  # it is asked for every equation of a program
    record = COLLECTIVES["all_gather"]
    other = dataclasses.replace(record, name="b", functions={"f": ("p", None)}, primitives=())
    with catalogue.added(other):
        assert catalogue.functions()["f"] is other
    assert "f" not in catalogue.functions() and catalogue.primitives() == before


@pytest.mark.parametrize("record", COLLECTIVES.values(), ids=lambda record: record.name)
def test_what_a_record_names_is_there(record: catalogue.Collective) -> None:
    assert all(hasattr(pc, name) for name in record.functions)
    for backend in (pallas, nccl):
        assert hasattr(backend, record.name), f"{backend.__name__} needs a {record.name}"
    served = {primitive.name for primitive in record.primitives}
    assert {primitive for primitive, _ in record.functions.values()} <= served
    for primitive in record.primitives:
        assert not primitive.by or hasattr(canonical, f"_{primitive.by}")
    names = [algorithm.name for algorithm in record.algorithms]
    assert len(set(names)) == len(names)


def test_what_is_started_is_a_function_of_a_record() -> None:
    assert {*split.NAMES} <= {f"{name}_start" for name in catalogue.functions()}
    assert "psum_start" in split.NAMES


@pytest.mark.parametrize("op, name", [(op, name) for op in COLLECTIVES for name in ALGORITHMS[op]])
def test_a_kernels_barrier_is_among_the_devices_that_its_record_reaches(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the kernel's name is that of the first collective and algorithm that it serves."""
    record, launched = COLLECTIVES[op].algorithm(name), {}

    class Found(Exception):
        pass

    def recorded(*args: Any, **options: Any) -> Any:
        launched[options["name"]] = options["barrier"]
        if options["name"] == kernel:
            raise Found
        return call_many(*args, **options)

    call_many = launch.call_many
    monkeypatch.setattr(launch, "call_many", recorded)
    of_all = [(r.name, a) for r in COLLECTIVES.values() for a in r.algorithms]
    (kernel, *_) = (f"{o}_{a.name}" for o, a in of_all if a.launcher == record.launcher)
    (case,) = (case for case in CASES if case.op == op)
    (task,) = replay_rows.plan(["v5p:4x4x1"], [case], [1 << 13], algorithms=[name], axes=("x", "y"))
    with contextlib.suppress(Found):  # before the kernel is traced
        replay_rows.run(task)
    assert kernel in launched, f"the launcher is to name its kernel {kernel}, not {[*launched]}"
    barrier = launched[kernel]
    name = barrier if isinstance(barrier, str) else barrier[0]
    if record.reach in (NEIGHBOURS, RING):  # wherever they are; a ring is a torus of one axis
        name = name.partition(" on a torus")[0]
    reach, differ = record.reach.__name__, f"{kernel} has barrier={barrier!r}; its record"
    assert name in (BARRIERS[record.reach], entry.WIDE), f"{differ} reach {reach}"
    assert (name == BARRIERS[PARTNERS]) == record.shifts_alone, f"{differ} {record.shifts_alone=}"


def test_a_collective_that_a_backend_lacks_is_laxs(
    monkeypatch: pytest.MonkeyPatch, fresh_counts: None
) -> None:
    monkeypatch.delattr(pallas, "ppermute")
    x = np.zeros((2, 8, 128), np.float32)

    def shifted(**how: Any) -> None:
        call = lambda a: pc.ppermute(a, "x", [(0, 1)], **how)  # noqa: E731
        harness.per_device(call, harness.mesh(2))(x)

    shifted()
    ((reason, _),) = pc.fallback_counts().items()
    assert "has no function for it" in reason
    assert pc.counts() == {("ppermute", "xla", None): 1}
    with pytest.raises(BackendError, match="ppermute by backend 'pallas'"):
        shifted(backend="pallas")


def test_bounds_are_known_for_collectives_alone() -> None:
    with pytest.raises(ValueError, match="bounds are known for all_gather"):
        bound("scan", Machine.named("v5e:4x4"), np.arange(4)[None], 1.0)


def test_a_plan_says_why_it_was_made() -> None:
    run = harness.per_device(
        lambda a: pc.all_gather(a, "x", algorithm="direct:vmem"), harness.mesh(2)
    )
    with counters.recorded() as plans:
        jax.jit(run).lower(np.zeros((2, 8, 128), np.float32))
    plan = plans[-1]
    assert (plan.algorithm, plan.record.name, plan.vmem) == ("direct:vmem", "direct", True)
    assert plan.nbytes == 4096 and plan.why == "it was asked for by name"


@pytest.mark.parametrize(
    "kernel, message",
    [
        (Kernel("nowhere", "ring"), r"'nowhere', 'ring'.*: there is no module .*nowhere; name"),
        (Kernel("ppermute", "rings"), r"'ppermute', 'rings'.*ppermute has no such function; name"),
    ],
)
def test_a_record_that_names_no_launcher_says_so(kernel: Kernel, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kernel()
