"""`python -m benchmarks step`: programs through the compiler, kept rows, and runs."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harness
import pallas_collectives as pc
from benchmarking import Bench
from benchmarks import compare, compiled
from benchmarks.results import Saved
from benchmarks.rows import Ran, Stepped
from benchmarks.settings import FlagError
from benchmarks.steps import (
    compiling,
    exposed,
    keeping,
    lanes,
    programs,
    running,
)
from benchmarks.steps.programs import BUILT_IN, Form, Program
from pallas_collectives.backends import counters
from pallas_collectives.replay import Machine

LIBTPU = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
)


def small(devices: int, form: Form) -> Program:
    """Two layers whose weights are gathered."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(2):
            x = jnp.tanh(x @ lax.all_gather(w[number], "x", tiled=True))
        return x

    args = (
        jax.ShapeDtypeStruct((2, 1024 // devices, 1024), "bfloat16"),
        jax.ShapeDtypeStruct((1024, 1024), "bfloat16"),
    )
    return Program(step, args, {"x": devices})


@pytest.mark.parametrize("topology, devices", [("v4:2x2x2", 8), ("tpu7x:2x2x1", 8)])
def test_devices_are_those_that_jax_has(topology: str, devices: int) -> None:
    """Both cores of a v4 are one, and those of a 7x two."""
    pytest.importorskip("libtpu")
    assert compiling.devices_of(topology).size == Machine.named(topology).n_devices == devices


@pytest.mark.full
@LIBTPU
def test_a_program_of_a_users(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the compiler's process
    file, plot = tmp_path / "step.json", tmp_path / "step.png"
    name = "test_benchmarks_step:small"
    monkeypatch.setattr(keeping, "PATH", tmp_path / "kept.json")
    status, out, err = bench(
        *("step", "--topology=v6e:2x2", f"--program={name}", "--pass=forward"),
        *(f"--json={file}", f"--plot={plot}", "--save"),
    )
    assert status == 0, err
    assert "Left out: --topology=v4:2x2x2" in out and "--pass=gradient" in out
    assert "Modelled, not measured" in out and plot.stat().st_size > 1000
    rows = [Stepped(**row) for row in json.loads(file.read_text())["steps"]]
    assert [row.under for row in rows] == list(compiling.UNDER)
    by_lax, _, forced = rows
    assert {of["by"] for of in by_lax.collectives} == {"lax"}
    assert all(of["by"].startswith("all_gather_") for of in forced.collectives)
    for row in rows:
        assert row.exposed_us == pytest.approx(row.waits_us + row.packing_us)
        assert row.time_us == pytest.approx(row.compute_us + row.exposed_us)
        assert sum(of["times"] for of in row.collectives) == 2
        under_way = sum(of["times"] * of["each_us"] for of in row.collectives)
        assert row.hideable_us is not None and row.exposed_us is not None
        # The second gather could have the first product beside it, and the first has nothing.
        assert under_way / 3 < row.hideable_us < 2 * under_way / 3
        assert under_way - row.exposed_us <= 1.01 * row.hideable_us
        assert row.compute_us > 0 and row.temp is not None
        figures = keeping.load()[f"v6e:2x2, {name}, forward, scan, {row.under}"]
        assert figures.time_us == pytest.approx(row.time_us, abs=0.1)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("unrolled", [False, True])
def test_built_in_programs_call_lax(
    name: str, unrolled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "LAYERS", 2)
    form = Form(gradient=name == "data", unrolled=unrolled)
    program = programs.named(name)(8, form)
    auto = (jax.sharding.AxisType.Auto,) * len(program.axes)
    sizes, names = tuple(program.axes.values()), tuple(program.axes)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=auto)
    nothing = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        program.step, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False
    )
    with compiling.UNDER["lax"]():
        text = str(jax.make_jaxpr(mapped)(*program.args))
    wanted = {"data": "psum", "ring_attention": "ppermute", "tensor": "reduce_scatter"}
    wanted["experts"] = "moe_route"
    assert f" {wanted.get(name, 'all_gather')}" in text


@LIBTPU
@pytest.mark.parametrize(
    "name, wanted",
    [
        ("tensor", {"all_gather_matmul", "matmul_reduce_scatter"}),
        ("benchmarks.steps.sums:tensor", {"matmul_reduce_scatter"}),
    ],
)
def test_products_of_a_step_that_are_fused(name: str, wanted: set[str]) -> None:
    devices: Any = np.array(harness._topology("v5p:2x2x2").devices)
    form = Form(gradient=name != "tensor", unrolled=False)
    program = programs.named(name)(devices.size, form)
    pc.reset_counts()
    compiling.lower(program, devices, "override")
    fused = {op for op, way, _ in pc.fusion_counts() if way == "fused"}
    assert fused == wanted


@LIBTPU
def test_a_step_over_a_wire_has_it_in_all_functions_and_derivatives_that_take_one() -> None:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jax.grad(lambda x: jnp.sin(lax.all_gather(x, "x", tiled=True)).sum())(x)
        return gathered, lax.pmax(x, "x")

    devices: Any = np.array(harness._topology("v6e:2x2").devices)
    program = Program(step, (jax.ShapeDtypeStruct((4096, 1024), "float32"),), {"x": 4})
    pc.reset_counts()
    compiling.lower(program, devices, "int8")
    found = {op: wire or why for op, wire, why in pc.wire_counts()}
    assert found == {
        **dict.fromkeys(("all_gather", "all_reduce"), "int8"),
        "reduce_scatter": "a SparseCore runs it beside products",
    }


@LIBTPU
def test_layers_whose_weights_are_arrays_of_their_own_are_summed_apart() -> None:
    devices: Any = np.array(harness._topology("v6e:2x2").devices)
    program = programs.named("benchmarks.steps.sums:data")(4, Form(gradient=True, unrolled=True))
    compiling.lower(program, devices, "override")
    replaced = pc.override_report().replaced
    beside = sum(line.times for line in replaced if line.by == "pallas ring:sc")
    assert beside == 4  # of four shapes; equal ones are built once


def test_a_program_says_for_how_many_devices_it_is() -> None:
    form = Form(gradient=False, unrolled=False)
    for name in ("fsdp_tensor", "benchmarks.steps.two_batches:fsdp_tensor"):
        with pytest.raises(FlagError, match="a multiple of 4 devices, and there are 2"):
            programs.named(name)(2, form)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--program=fsdpp"], "it must be one of fsdp, tensor"),
        (["--topology=v9:2x2"], "it must be a slice of a pod of v4, v5e"),
        (["--topology=v5e:4x4x4"], "it must be a slice of a pod of v4, v5e"),
        (["--pass=backward"], "it must be one of forward, gradient"),
        (["--under=ours"], "it must be one of lax, override"),
        (["--program=os:getcwd"], "(devices, form) and return a benchmarks.steps.programs.Program"),
        (["--program=os:sep"], "it must take (devices, form)"),
        (["--program=..steps:f"], "or package.module:function (TypeError: "),
        (["--program=test_benchmarks_step_packing.:f"], "(ModuleNotFoundError: "),
    ],
)
def test_flags_are_checked(bench: Bench, flags: list[str], message: str) -> None:
    status, _, err = bench("step", *flags)
    assert status == 2 and message in err


def nothing(devices: int, form: Form) -> Any:
    """No program."""


def choosy(devices: int, form: Form) -> Program:
    """A program for few devices."""
    raise FlagError("--program=choosy", f"it takes 3 devices, and there are {devices}", "take 3")


def broken(devices: int, form: Form) -> Any:
    """A program that goes wrong by itself."""
    raise TypeError(f"{devices} are too many")


@LIBTPU
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--topology=v6e:2x2,v5e:3x3"], "--topology=v5e:3x3: it must be a slice that the TPU"),
        (["--topology=v5e:3x3", "--learn"], "--topology=v5e:3x3: it must be a slice that the TPU"),
        (["--program=fsdp,test_benchmarks_step:nothing"], "Program, not None; write it as"),
        (["--program=fsdp,test_benchmarks_step:choosy"], "it takes 3 devices, and there are 4"),
    ],
)
def test_what_the_compiler_and_programs_refuse_is_said_before_anything_is_compiled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the compiler's process
    status, out, err = bench("step", *flags)
    assert (status, out) == (2, "") and message in err
    assert len(err.splitlines()) == 1


@LIBTPU
def test_what_goes_wrong_within_a_program_is_said_by_its_rows() -> None:
    programs.check("test_benchmarks_step:broken", 4, Form(gradient=False, unrolled=False))
    (row,) = compiling.rows_of(
        compiling.Task("v6e:2x2", "test_benchmarks_step:broken", False, False, ["lax"])
    )
    assert row.error == "TypeError: 4 are too many"


def _row(under: str, us: float, **others: Any) -> Stepped:
    parts = {"compute_us": us / 2, "waits_us": us / 4, "packing_us": us / 4}
    figures = {**parts, "exposed_us": us / 2, "hidden_us": 0.0, "time_us": us}
    base = {"topology": "v5e:4x4", "op": "tensor, forward, scan", "type": "bfloat16"}
    return Stepped(**{**base, "under": under, "hideable_us": 0.0, "temp": 0, **figures, **others})


@pytest.mark.parametrize(
    "given, compiled_for",
    [("v5e:2x2", "v5e:2x2"), ("7x:2x2x1", "tpu7x:2x2x1"), ("tpu7x:2x2x1", "tpu7x:2x2x1")],
)
def test_only_what_is_named_is_compiled(
    given: str, compiled_for: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[compiling.Task] = []

    def rows(tasks: list[compiling.Task]) -> Iterator[Stepped]:
        asked.extend(tasks)
        return (_row(under, 1.0) for under in tasks[0].under)

    monkeypatch.setattr(compiling, "rows", rows)
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    flags = "--program=tensor", f"--topology={given}", "--under=lax,forced"
    status, out, _ = bench("step", *flags)
    assert status == 0 and "--under=override" in out
    for word in ("forced is", "beside compute:", "hideable:", "kcycles beside:", "; of:"):
        assert out.count(word) == 1
    assert asked == [compiling.Task(compiled_for, "tensor", False, False, ["lax", "forced"])]


@pytest.mark.parametrize("flag", ["--topology=v5e:4x4", "--plot=a.png"])
def test_on_devices_too_what_needs_the_compiler_is_refused_without(
    flag: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    monkeypatch.setattr(running.jax, "device_count", lambda: pytest.fail("it runs"))
    monkeypatch.setattr("benchmarks.devices.kind", lambda: "gpu")
    status, _, err = bench("step", flag)
    assert status == 2 and "libtpu is not installed" in err


@LIBTPU
def test_kept_rows_make_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell needs a row of lax's and one of ours; what is kept anew takes the old one's place."""
    monkeypatch.setattr(keeping, "PATH", tmp_path / "kept.json")
    assert keeping.load() == {}

    first = keeping.saved(iter([_row("lax", 2000.0), _row("override", 9000.0)]))
    next(first)
    assert list(keeping.load()) == ["v5e:4x4, tensor, forward, scan, lax"]  # as they come
    next(first)
    failed = _row("override", 1.0, op="fsdp, forward, scan", error="it does not compile")
    alone = _row("lax", 3000.0, topology="v4:2x2x2")
    assert len(list(keeping.saved(iter([_row("override", 1000.0), failed, alone])))) == 3
    header, _, *rows = keeping.table(keeping.load()).splitlines()
    assert header.startswith(f"| libtpu {metadata.version('libtpu')} | `fsdp` | `tensor` |")
    assert [line.split("|")[1].strip() for line in rows] == [
        *("v4:2x2x2, forward", "v4:2x2x2, gradient"),
        *("v5e:4x4, forward", "v5e:4x4, gradient"),
    ]
    assert rows[2].split("|")[2:4] == [" – ", " 2.0 (0.5) → 1.0 (0.2) "]
    assert "→" not in "".join(rows[:2] + rows[3:])

    *_, forward, _ = keeping.parts(keeping.load(), "tensor").splitlines()
    assert forward.split("|")[2:6] == [
        *(" 1.0 → 0.5 ", " 0.5 → 0.2 ", " 0.5 → 0.2 ", " 1.0 → 0.5 "),
    ]

    halved = _row("override", 750.0, op="benchmarks.steps.two_batches:tensor, forward, scan")
    list(keeping.saved(iter([halved])))
    halves = functools.partial(keeping.ways, columns=keeping.HALVES)
    _, _, forward, gradient = halves(keeping.load()).splitlines()  # v4 has none
    assert forward == "| v5e:4x4, forward | 2.0 (0.5) | 1.0 (0.2) | 0.8 (0.2) | – |"
    assert gradient.count("–") == 4
    narrow = functools.partial(keeping.ways, columns=keeping.NARROW)
    assert len(narrow(keeping.load()).splitlines()) == 2
    list(keeping.saved(iter([_row("int8", 800.0)])))
    *_, forward, _ = narrow(keeping.load()).splitlines()
    assert forward == "| v5e:4x4, forward | 2.0 (0.5) | 1.0 (0.2) | 0.8 (0.2) |" + 4 * " – |"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping.metadata, "version", lambda _: "another")
        list(keeping.saved(iter([_row("override", 1000.0)])))
    assert "1.0" not in halves(keeping.load())
    assert "→" not in keeping.table(keeping.load())  # two compilers' steps do not compare


def test_no_kept_step_is_longer_than_laxs_and_in_none_more_is_exposed() -> None:
    """By more than 0.2%: of all generations, programs and passes, but for what fits no memory."""
    kept, chips_of, missing = keeping.load(), set(), []
    for topology in sorted({key.partition(",")[0] for key in kept}):
        chips_of.add(topology.partition(":")[0])
        for program, form in itertools.product(BUILT_IN, keeping._FORMS):
            step = f"{topology}, {program}, {form}"
            if not (found := keeping._both(kept, step)):
                missing.append(step)
                continue
            by_lax, ours = found
            assert ours.time_us <= 1.002 * by_lax.time_us, step
            exposed_us = [of.waits_us + of.packing_us for of in found]
            assert exposed_us[1] <= 1.002 * exposed_us[0], step
            assert ours.waits_us <= 1.002 * by_lax.waits_us, step
    assert chips_of == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert missing == ["v5e:4x4, ring_attention, gradient, scan"]


@pytest.mark.parametrize("text", ['{"v5e:4x4, tensor": {"libtpu"', "[]", '{"v5e:4x4": {}}'])
def test_broken_rows_are_said_before_anything_compiles(
    text: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PATH", tmp_path / "kept.json")
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "rows", lambda _: pytest.fail("it compiles"))
    keeping.PATH.write_text(text)
    status, _, err = bench("step", "--save")
    assert status == 2 and str(keeping.PATH) in err and "restore it" in err
    assert keeping.PATH.read_text() == text


def test_a_longer_step_is_a_regression() -> None:
    about: dict[str, Any] = {"environment": {}, "settings": {}}
    row = Stepped(op="fsdp", topology="v5e:4x4", under="override", type="bfloat16", time_us=10.0)
    slower = dataclasses.replace(row, time_us=11.0)
    (change,) = compare.compare(
        Saved(**about, parts={"steps": [row]}), Saved(**about, parts={"steps": [slower]})
    )
    assert change.verdict == "SLOWER" and change.is_regression


def test_nothing_is_drawn_of_what_failed(tmp_path: Path) -> None:
    row = Stepped(op="fsdp", topology="v5e:4x4", under="lax", type="bfloat16", error="no")
    lanes.save(str(tmp_path / "none.png"), [row])
    assert not list(tmp_path.iterdir())


# On devices ---------------------------------------------------------------------------------------


def test_what_is_exposed_is_what_has_no_compute_beside_it() -> None:
    """A core that waits in a loop, a SparseCore beside it, and another device with nothing."""
    found = [
        exposed.Event("TPU:0", "core", "while.1", 0, 100),
        exposed.Event("TPU:0", "core", "fusion.1", 0, 40),
        exposed.Event("TPU:0", "core", "all-gather-done.2", 40, 60),
        exposed.Event("TPU:0", "core", "reduce_scatter_bidirectional.3", 60, 90),
        exposed.Event("TPU:0", "core", "fusion.4", 90, 100),
        exposed.Event("TPU:0", "aside", "all-gather-start.2", 10, 60),
        exposed.Event("TPU:1", "core", "fusion.5", 0, 7),
    ]
    assert exposed.shares(found) == {
        "TPU:0": exposed.Share(50, 50, 30),
        "TPU:1": exposed.Share(7, 0, 0),
    }


@pytest.mark.parametrize("rows", ["few_rows", "rows", "many_rows"])
def test_small_steps_are_the_longer_the_more_rows(rows: str) -> None:
    program = programs.named(f"benchmarks.steps.small:{rows}")(4, Form(True, False))
    shapes = [a.shape for a in jax.tree.leaves(program.args)]
    tokens = {"few_rows": 256, "rows": 2048, "many_rows": 16384}[rows]
    assert shapes == [(8, 1024, 4096), (tokens, 4096)] and program.axes == {"x": 4}


@pytest.mark.full
def test_sums_of_a_large_layers_gradients_run_beside_products() -> None:
    """A SparseCore runs those of 56 MiB a device, too: it takes twice as long as the core does."""
    pytest.importorskip("libtpu")
    devices = compiling.devices_of("v5p:2x2x2")
    program = programs.named("benchmarks.steps.large:fsdp_tensor")(devices.size, Form(True, False))
    with counters.recorded(built=True) as plans:
        compiling.lower(program, devices, "override")
    sums = [plan for plan in plans if plan.op == "reduce_scatter"]
    assert len(sums) > 1 and all(plan.on_sparsecore for plan in sums)


def test_a_folder_without_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no profile"):
        exposed.of(str(tmp_path))


@pytest.mark.full
def test_a_step_is_run_and_profiled() -> None:
    """On CPU devices, as on TPUs: the clock's time, and shares of a recorded profile."""
    program = small(4, Form(False, True))
    base = Ran(op="small", under="lax", type="bfloat16", devices=4)
    row = running.measured(base, program, np.array(jax.devices()[:4]))
    assert row.time_us and row.time_us_min and row.time_us_max
    assert row.time_us_min <= row.time_us <= row.time_us_max
    assert row.compute_us and row.exposed_us and row.hidden_us is not None
    slower = dataclasses.replace(row, time_us_min=2 * row.time_us_max, time_us_max=1e9)
    about: dict[str, Any] = {"environment": {}, "settings": {}}
    (change,) = compare.compare(
        Saved(**about, parts={"ran": [row]}), Saved(**about, parts={"ran": [slower]})
    )
    assert change.verdict == "SLOWER"
