"""The probes: their data, the figures that they find again, and what the compiler says of them."""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import harness
from benchmarks.cases import CASES
from benchmarks.probes import clock, estimates, local, parts, rigs, risky, spaces, wire
from benchmarks.probes.rig import DIE, TILE, Probe, Rig, shapes
from benchmarks.rows import Asked, Probed
from pallas_collectives.replay import Machine, replay

TINY = 8192
# Unlike what is assumed of any generation.
OTHER: dict[str, float] = {
    "link_efficiency": 0.87,
    "hop_latency": 0.83e-6,
    "dma_latency": 0.27e-6,
    "issue_cost": 0.071e-6,
    "launch_cost": 2.3e-6,
    "hbm_bandwidth": 1.9e12,
    "vmem_bandwidth": 11e12,
    "vector_rate": 5e12,
    "die_bandwidth": 410e9,
    "sparsecore_issue_cost": 0.33e-6,
    "sparsecore_launch_cost": 5.7e-6,
    "subcore_rate": 11e9,
}
CHOSEN = {"v4": "CMEM", "v5e": "VMEM", "v5p": "HBM", "v6e": "VMEM", "7x": "VMEM"}
PODS = (
    "v4:4x4x4",
    "v5e:4x4",
    "v5e:2x4",
    "v5e:16x16",
    "v5p:2x2x2",
    "v6e:2x2",
    "7x:2x2x1",
    "7x:4x4x4",
)


def other(name: str) -> dict[str, float]:
    """Those of them that a machine has."""
    g = Machine.named(name).generation
    die, there = g.devices_per_chip > 1, not g.no_sparsecore
    missing = {"die_bandwidth": not die} | {
        figure: not there for figure in OTHER if figure.startswith(("sparsecore", "subcore"))
    }
    return {figure: value for figure, value in OTHER.items() if not missing.get(figure)}


def all_probes(rig: Rig) -> Iterator[Probe]:
    """All that the figures are made of."""
    seen: dict[str, Probe] = {}

    def note(rig: Rig, this: Probe) -> float:
        seen[this.name] = this
        return clock.by_replay(rigs.modelled(rig.machine), this)

    for figure in estimates.figures(rig, note):
        assert not figure.error
    yield from seen.values()


@pytest.mark.parametrize("name", PODS)
def test_the_figures_of_a_machine_are_found_again(name: str) -> None:
    """The replay stands in for the hardware: the probes' programs run on a known machine."""
    machine = Machine.named(name, **other(name))
    found = {f.name: f for f in estimates.figures(rigs.modelled(machine), clock.by_replay)}
    assert not [f.error for f in found.values() if f.error]
    for field, value in other(name).items():
        assert found[field].measured == pytest.approx(value, rel=0.01), field
    for n in range(2, sum(size > 1 for size in machine.shape) + 1):
        assert found[f"link_efficiency_{n}_axes"].measured == pytest.approx(0.87, rel=0.01)
    g = machine.generation
    latency = g.issue_cost + g.dma_latency + g.hop_latency
    expected = latency * g.link_bandwidth * g.link_efficiency
    assert found["bytes_in_flight"].measured == pytest.approx(expected, rel=0.01)


@pytest.mark.full
def test_noise_of_a_percent_leaves_the_figures_within_a_few() -> None:
    machine = Machine.named("v5p:4x4x4", **other("v5p:4x4x4"))
    rng = np.random.default_rng(3)

    def noisy(rig: Rig, this: Probe) -> float:
        return clock.by_replay(rig, this) * (1 + 0.005 * rng.standard_normal())

    for figure in estimates.figures(rigs.modelled(machine), noisy):
        if figure.assumed is not None:
            assert figure.measured == pytest.approx(figure.assumed, rel=0.06), figure.name


@pytest.mark.full
def test_probes_are_right_and_free_of_races() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    rig = Rig(Machine.named("v5e:2x2"), mesh, harness.EITHER, TINY)
    for this in all_probes(rig):
        run = clock.runner(rig, this)
        for mode in harness.ADVERSARIES:
            harness.EITHER.under(mode, functools.partial(clock.check, rig, this, run, 5))
            assert not harness.race_reported()


@pytest.mark.parametrize("credit", [True, False], ids=["as it is", "written to too early"])
def test_a_slot_of_a_stream_that_is_written_to_too_early_is_a_race(credit: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rig = Rig(Machine.named("v5e:2"), mesh, harness.ADVERSARIES["eager"], TINY)
    this = wire.stream(rig, (0,), rows=TILE, slots=None if credit else 1)
    run = clock.runner(rig, this)
    want = this.expected(5, this.pattern(2)).reshape(-1, 128)
    tries = 1 if credit else 3  # on few cores a device may chance to be out of the other's way
    assert any(harness.caught(lambda: run(5), want) for _ in range(tries)) != credit


def test_on_chips_of_two_devices_they_are_right() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    rig = Rig(Machine.named("7x:2x1x1"), mesh, pltpu.InterpretParams(), TINY)
    for this in (wire.stream(rig, (DIE,)), wire.stream(rig, (0,)), risky.reach(rig, 3, "+1x")):
        clock.check(rig, this, clock.runner(rig, this), 3)


def test_on_sparsecores_they_are_right() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rig = Rig(Machine.named("v6e:2"), mesh, pltpu.InterpretParams(), TINY)
    for this in (local.there(rig, local.FEW), local.launch_there(rig), local.subcore(rig)):
        clock.check(rig, this, clock.runner(rig, this), 3)


def test_wrong_data_are_seen() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rig = Rig(Machine.named("v5e:2"), mesh, pltpu.InterpretParams(), TINY)
    good = local.batch(rig, 4)

    def off(count: Any, peers: Any, x: Any) -> Any:
        return good.program(count, peers, x).at[3, 5].set(0.0)

    bad = dataclasses.replace(good, program=off)
    with pytest.raises(
        clock.ProbeError, match=r"1 of 4096 elements on .* are wrong, 1 of them zero"
    ):
        clock.check(rig, bad, clock.runner(rig, bad), 3)


@pytest.mark.full
@pytest.mark.parametrize("chip", harness.GENERATIONS)
def test_everything_compiles_for_tpus(chip: str) -> None:
    """Ahead of time: probes, questions, and the programs in which XLA chooses the memory."""
    topology = harness.GENERATIONS[chip]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    machine = Machine.named(topology.removeprefix("tpu"))
    per_chip = machine.generation.devices_per_chip
    rig = rigs.of(machine, [d for d in devices if d.core_on_chip < per_chip])
    asked = risky.questions(rig)
    first = next(q for q in asked if q.kind == "barrier id")
    reach = next(q for q in asked if q.kind == "reach")
    for this in (
        *all_probes(rig),
        risky.barrier(rig, first.number),
        risky.reach(rig, reach.number, reach.over),
    ):
        jax.jit(this.program).lower(*shapes(rig, this)).compile()
    copy = spaces.programs(rig)["copy within a device"]
    text = spaces.lowered(rig, copy, spaces.SIZES[0]).compile().as_text()
    # XLA chooses for a kernel that says HBM and does not bind it: what the probe is there to judge.
    assert spaces.where(text or "") == f"from {CHOSEN[chip]} to {CHOSEN[chip]}"


def test_where_reads_memories_off_a_compiled_program() -> None:
    program = """
  %made = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x), kind=kOutput
  %table = s32[9]{0:T(128)S(6)} fusion(%y), kind=kLoop
  %k.1 = f32[8,128]{1,0:T(8,128)} custom-call(%table, %made), custom_call_target="tpu_custom_call"
  %k.2 = f32[8,128]{1,0:T(8,128)S(3)} custom-call(%k.1), custom_call_target="tpu_custom_call"
  ROOT %k.3 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8]{0}) custom-call(%k.1), custom_call_target="tpu_custom_call"
"""  # noqa: E501
    assert spaces.where(program) == "from VMEM to HBM, from HBM to CMEM, from HBM to VMEM"
    assert spaces.where("") == "no compiled kernel"


@pytest.mark.parametrize("op", [case.name for case in CASES])
def test_the_space_probe_is_right_and_sees_zeros(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rig = Rig(Machine.named("v5e:2"), mesh, pltpu.InterpretParams(), TINY)
    example = spaces.programs(rig)[op]
    base = Asked(op=op, type="float32", size=TINY)
    good = spaces.row_of(rig, example, base)
    assert (good.wrong, good.error) == (0, "")
    if op == "ppermute":
        off = dataclasses.replace(
            example, call=lambda *args, **how: example.call(*args, **how).at[0, :2].set(0.0)
        )
        bad = spaces.row_of(rig, off, base)
        assert (
            bad.wrong == 2 * 2 * 128
            and bad.failed
            and "512 elements were read as zero" in bad.answer
        )


# What could hang ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:4x4x4", "7x:2x2x1", "v5e:2x4", "v6e:1x4"])
def test_all_meet_along_a_path_of_neighbours(name: str) -> None:
    rig = rigs.modelled(Machine.named(name))
    path = risky.path_through(rig)
    assert sorted(path) == list(range(rig.size))
    assert rig.machine.distance(path[:-1], path[1:]).max() <= 1
    asked = risky.questions(rig)[-4]
    if asked.kind == "reach":
        this = risky.reach(rig, asked.number, asked.over)
        x = shapes(rig, this)[2]
        report = replay(
            this.program, np.ones(1, np.int32), this.peers, x, machine=rig.machine, races=True
        )
        # What cannot be reached is asked for all the same: that is the question.
        assert not [found for found in report.findings if getattr(found, "name", "") != "reach"]


def test_questions_come_in_order_of_risk() -> None:
    asked = [q.over for q in risky.questions(rigs.modelled(Machine.named("v5e:4x4")))]
    assert asked[0] == "id 15" and asked[-1] == "id 63"
    order = [asked.index(over) for over in ("+1x", "+2y", "+3x", "+1x+1y", "+3x+3y")]
    assert order == sorted(order)
    ring = [q.over for q in risky.questions(rigs.modelled(Machine.named("v5e:16x16")))]
    assert "+8x" in ring and "+9x" not in ring  # nearer the other way round


CHILD = """
import json, sys, time
out, first = (a.partition("=")[2] for a in sys.argv[1:])
fates = ["works", "hang", "die", "works"]
with open(out, "w") as file:
    for n, fate in list(enumerate(fates))[int(first):]:
        row = {"op": "reach", "type": "float32", "over": f"+{n}x"}
        print(json.dumps({"asking": row}), file=file, flush=True)
        if fate == "hang":
            time.sleep(600)
        if fate == "die":
            sys.exit(7)
        print(json.dumps({"answer": {**row, "answer": "works"}}), file=file, flush=True)
"""


@pytest.mark.full
def test_a_question_that_hangs_or_kills_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    out, until = tmp_path / "asked", time.monotonic() + 100
    command = [sys.executable, "-c", CHILD]
    rows = list(risky.watched(command, out, 4, until))
    told = [(row.over, row.answer) for row in rows]
    assert told == [
        ("+0x", "works"), ("+1x", "hung"), ("+2x", "ended the process (7)"), ("+3x", "works"),
    ]  # fmt: skip
    assert not out.exists()
    assert [row.over for row in risky.watched(command, out, 4, until, done=3)] == ["+3x"]
    assert not list(risky.watched(command, out, 4, time.monotonic() - 1))


def test_a_process_that_asks_nothing_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    (row,) = risky.watched(command, tmp_path / "asked", 30, time.monotonic() + 60)
    assert row.failed and "ended the process (3), and asked nothing" in row.error


# The machine --------------------------------------------------------------------------------------


def test_the_machine_has_what_was_measured_and_what_was_reached() -> None:
    def figure(name: str, measured: float | None) -> Probed:
        return Probed(op=name, type="float32", machine="v5p:2x2x2", measured=measured)

    def reach(over: str, answer: str) -> Asked:
        return Asked(op="reach", type="float32", over=over, answer=answer)

    figures = [figure("hop_latency", 2e-6), figure("issue_cost", None), figure("signal_cost", 1.0)]
    assumed = Machine.named("v5p:2x2x2").generation
    got = parts.machine(figures, [reach("+1x", "works"), reach("+1x+1y", "works")]).generation
    assert got == dataclasses.replace(assumed, hop_latency=2e-6)
    missed = parts.machine(figures, [reach("+1x", "works"), reach("+1x+1y", "hung")])
    assert not missed.generation.reaches_all
    v5e = dataclasses.replace(figures[0], machine="v5e:2x4")
    assert not parts.machine([v5e], [reach("+1x", "works")]).generation.reaches_all
    assert parts.machine(
        [v5e], [reach("+1x", "works"), reach("+3y", "works")]
    ).generation.reaches_all
    asked = [reach("+1x", "works"), reach("+3x", "hung")]
    asked += [
        Asked(op="barrier id", type="float32", over=f"id {n}", answer=a)
        for n, a in ((15, "works"), (31, "refused"))
    ]
    assert parts.summary(asked) == "Barrier ids up to 15 work. A DMA reaches +1x, and not +3x."


def test_pairs_are_apart_and_of_the_distance_asked() -> None:
    rig = rigs.modelled(Machine.named("7x:4x4x4"))
    every = np.arange(rig.size)
    for axis, distance in ((0, 1), (1, 2), (2, 1), (DIE, 1)):
        partners = rig.partners(axis, distance)
        assert (partners[partners] == every).all() and (partners != every).all()
        if axis != DIE:
            assert (rig.machine.distance(every, partners) == distance).all()
    odd = rigs.modelled(Machine.named("v5e:3x1")).partners(0)
    assert odd.tolist() == [1, 0, 2]  # the last has nobody


def test_a_rig_is_of_all_devices_in_the_machines_order() -> None:
    rig = rigs.here(2)
    assert (rig.size, rig.mesh.size, str(rig.machine)) == (2, 2, "v5e:2x1")
    assert rig.block_bytes // (128 * 4) >= 2 * TILE and json.dumps(rig.block_bytes)
