"""`python -m benchmarks step`: schedules read, time lines, and programs through the compiler."""

import dataclasses
import importlib.util
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

from benchmarking import Bench
from benchmarks import compare, compiled
from benchmarks.results import Saved
from benchmarks.rows import Ran, Stepped
from benchmarks.steps import (
    bound,
    compiling,
    exposed,
    keeping,
    lanes,
    learning,
    programs,
    running,
    schedule,
    timeline,
    wires,
)
from benchmarks.steps.programs import BUILT_IN, Form, Program
from benchmarks.steps.schedule import CORE, DMA, SPARSECORE, Collective, Done, Loop, Start, Work
from pallas_collectives import catalogue
from pallas_collectives.backends.plans import KernelPlan
from pallas_collectives.replay import Machine, steps

LIBTPU = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
)

HLO = """
%async (p: bf16[8,128]) -> (bf16[8,128], bf16[32,128]) {
  %g = bf16[32,128]{1,0} all-gather(%p), replica_groups=mesh['y'=2,'x'=4] {'x'}, frontend_attributes={chain_id="7"}
  ROOT %c = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%ended (p: bf16[8,128]) -> bf16[32,128] {
  %g.1 = bf16[32,128]{1,0} all-gather(%p), replica_groups=mesh['y'=2,'x'=4] {'x'}, frontend_attributes={chain_id="7"}
  ROOT %c.1 = bf16[32,128]{1,0} custom-call(%g.1), custom_call_target="AsyncCollectiveDone"
}
%called (p: f32[8,128]) -> f32[64,128] {
  ROOT %k = f32[64,128]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/all_gather_bidirectional/mpmd_map"}
}
%tile (p: f32[64,128]) -> f32[1,8,128] {
  ROOT %v = f32[1,8,128]{2,1,0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/reduce_scatter_line/mpmd_map"}
}
%tiles (p: f32[64,128]) -> f32[1,8,128] {
  %tile.call-start = ((f32[64,128]{1,0}), f32[1,8,128]{2,1,0}, u32[]{:S(8)}) call-start(%p), async_execution_thread="sparsecore", to_apply=%tile
  ROOT %tile.call-done = f32[1,8,128]{2,1,0} call-done(%tile.call-start)
}
%condition (p: (s32[], f32[8,128])) -> pred[] {
  %three = s32[]{:T(128)} constant(3), metadata={op_name="x"}
  ROOT %less = pred[] compare(%i, %three), direction=LT
}
%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %start = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,0}}
  %work.1 = f32[8,128]{1,0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"1000"}}
  %done = f32[8,128]{1,0} collective-permute-done(%start)
}
%scattered (p: bf16[8,128]) -> bf16[2,128] {
  %a = bf16[8,128]{1,0} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %d = bf16[2,128]{1,0} dynamic-slice(%a, %i, %j)
}
%carried (p: bf16[8,128]) -> bf16[8,128] {
  %a.1 = bf16[8,128]{1,0} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %w = bf16[8,128]{1,0} add(%a.1, %p)
}
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %loop = (s32[], f32[8,128]{1,0}) while(%t), condition=%condition, body=%body
  %async-collective-start = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) fusion(%x), kind=kCustom, calls=%async
  %work.2 = f32[8,128]{1,0} fusion(%x), kind=kOutput, calls=%other, backend_config={"window_config":{"estimated_cycles":"2000"}}
  %async-collective-done = bf16[32,128]{1,0} fusion(%y), kind=kCustom, calls=%ended
  %s.call-start = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%called, frontend_attributes={kernel_metadata={
"mesh_axes":"[]"
}}
  %s.call-update = ((f32[8,128]{1,0}), f32[64,128]{1,0}) call-update(%s.call-start, %x)
  %s.call-done = f32[64,128]{1,0} call-done(%s.call-update)
  %t.call-start = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%tiles
  %t.call-update = ((f32[8,128]{1,0}), f32[1,8,128]{2,1,0}) call-update(%t.call-start, %x)
  %t.call-done = f32[1,8,128]{2,1,0} call-done(%t.call-update)
  %sum = bf16[8,128]{1,0} all-reduce(%z), replica_groups=[2,4]<=[8], to_apply=%add
  %fusion.9 = bf16[2,128]{1,0} fusion(%x), kind=kCustom, calls=%scattered
  %fusion.8 = bf16[8,128]{1,0} fusion(%x), kind=kOutput, calls=%carried, backend_config={"window_config":{"estimated_cycles":"700"}}
}
"""  # noqa: E501


def test_events_of_a_schedule() -> None:
    loop, *rest = schedule.events(HLO)
    assert loop == Loop(
        3,
        (
            Start("start", Collective("start", "ppermute", "", DMA, 4096, 3, (), (0, 1))),
            Work("work.1", 1000),
            Done("start"),
        ),
    )
    scattered = (0, 2, 4, 6)
    key, by_kernel = "s.call-update", "all_gather_bidirectional"
    by_subcores = Collective(
        "v", "reduce_scatter", "reduce_scatter_line", SPARSECORE, 4096, 0, shape=(1, 8, 128)
    )
    assert rest == [
        Start("chain 7", Collective("g", "all_gather", "", DMA, 32 * 128 * 2, 4, ("x",))),
        Work("work.2", 2000),
        Done("chain 7"),
        Start(
            key, Collective("k", "all_gather", by_kernel, SPARSECORE, 64 * 512, 0, shape=(64, 128))
        ),
        Done(key),
        # On vector subcores: the scalar one calls them.
        Start("t.call-update", by_subcores),
        Done("t.call-update"),
        Start("sum", Collective("sum", "all_reduce", "", CORE, 2048, 4)),
        Done("sum"),
        Start(
            "fusion.9", Collective("fusion.9", "reduce_scatter", "", CORE, 512, 4, (), scattered)
        ),
        Done("fusion.9"),
        Work("fusion.8", 700),
    ]


def test_what_is_exposed_and_hidden() -> None:
    """On v5e, of 1.5 GHz: a collective of 10 us beside work of 4, alone, and two on one engine."""
    beside, alone, queued, later = (
        Collective(name, "all_gather", "", engine, 1, 4)
        for name, engine in (("a", DMA), ("b", CORE), ("c", SPARSECORE), ("d", SPARSECORE))
    )
    events = [
        *(Start("a", beside), Work("w", 6000), Done("a")),  # 4 us of 10: 6 are waited for
        *(Start("b", alone), Done("b")),
        *(Start("c", queued), Start("d", later), Work("v", 18000), Done("c"), Done("d")),
    ]
    machine = Machine.named("v5e:4")
    line = timeline.run(events, machine, machine.default_placement(4), lambda _: 10e-6)
    assert line.compute_us == pytest.approx(16)
    to_tell = 0.3  # what it takes the core to tell engines, in all
    assert line.exposed_us == pytest.approx(6 + 10 + 0 + 8, abs=to_tell)
    assert line.hidden_us == pytest.approx(4 + 0 + 10 + 2, abs=to_tell)
    assert line.step_us == pytest.approx(line.compute_us + line.exposed_us)
    exposed = [line.served[name].exposed_us for name in "abcd"]
    assert exposed == pytest.approx([6, 10, 0, 8], abs=to_tell)
    assert (line.served["a"].beside, line.served["a"].beside_what) == (6000, "w")
    lanes_of = {span.lane for span in line.spans}
    assert lanes_of == {CORE, DMA, "wire", SPARSECORE}


def least(events: list[Any], needs: dict[str, list[str]]) -> float:
    """What is exposed in any order; a cycle takes as long as a collective's byte."""
    return bound.exposed(events, needs, lambda c: float(c.nbytes), 1.0)


def flight(name: str, takes: int, engine: str = SPARSECORE) -> tuple[Start, Done]:
    c = Collective(name, "all_gather", "", engine, takes, 4)
    return Start(name, c, f"{name}-start"), Done(name, f"{name}-done")


def test_what_no_order_hides() -> None:
    """Awaited at once; too little beside; a chain; two on one engine; loops; v5e's carriers."""
    work = [Work("a", 100), Work("b", 50)]
    needs = {"g-done": ["g-start"], "b": ["a"]}
    both = [*work, *flight("g", 70)]
    assert least(both, needs) == 0
    assert least(both, needs | {"g-start": ["a"]}) == 20
    assert least(both, needs | {"g-start": ["a"], "b": ["tuple"], "tuple": ["g-done"]}) == 70
    assert least([*work, *flight("g", 200)], needs) == 50
    # On the core it is awaited, and could run beside what it does not need all the same.
    alone = Start("g", flight("g", 70, CORE)[0].collective, "g"), Done("g", "g")
    assert least([*work, *alone], {"g": ["a"], "b": ["a"]}) == 20
    later = {"h-done": ["h-start"], "h-start": ["g-done"], "b": ["h-done"]}
    assert least([*both, *flight("h", 90)], needs | later) == 60
    queue = needs | {"h-done": ["h-start"], "h-start": ["a"], "g-start": ["a"]}
    assert least([*both, *flight("h", 90)], queue) == 110
    assert least([*both, *flight("h", 90, DMA)], queue) == 40
    loop = Loop(3, tuple(both), "loop")
    awaited = needs | {"g-start": ["a"]}
    assert least([loop], awaited) == 60
    assert least([loop, *flight("h", 500)], awaited | {"h-done": ["h-start"]}) == 60
    carried = {"b": ["g-start"], "g-done": ["b"], "g-start": []}
    assert least([*work[1:], *flight("g", 30, DMA)], carried) == 0


def test_the_engine_that_runs_a_collective() -> None:
    beside, alone = (Collective("a", "all_gather", "", engine, 1, 4) for engine in (DMA, CORE))
    assert learning.engine_of("all_gather", [Start("a", beside)] * 2 + [Start("b", alone)]) == DMA
    assert learning.engine_of("all_gather", [Start("a", beside)] + [Start("b", alone)] * 2) == ""
    assert learning.engine_of("all_to_all", [Start("a", beside)]) == ""


def test_the_memory_that_gathers_bring_to() -> None:
    result = "%g = bf16[8,128]{1,0:T(8,128)(2,1)%s} all-gather(%p), dimensions={0}"
    assert learning.near_of(result.replace("%s", "S(3)")) == "CMEM"
    assert learning.near_of(result.replace("%s", "S(1)")) == learning.near_of(HLO) == ""


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


def test_a_v4_has_two_devices_ahead_of_time() -> None:
    assert compiling.machine_of("v4:2x2x2", 16).n_devices == 16
    assert compiling.machine_of("tpu7x:2x2x1", 8) == Machine.named("tpu7x:2x2x1")


@pytest.mark.full
@pytest.mark.parametrize("name", ["v5p:2x2x1", "7x:2x2x1"])
def test_large_ones_take_what_their_replay_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not replayed themselves: that would take minutes."""
    machine, mib = Machine.named(name), 96
    n = machine.n_devices
    psum = Collective("a", "all_reduce", "", CORE, mib << 20, n, ("x",))

    def what() -> Any:
        return wires.programs(machine, np.arange(n), {"x": n}, [])(psum)

    told = what()
    monkeypatch.setattr(wires, "_LARGE", mib << 20)
    assert isinstance(told, float)
    assert told == pytest.approx(steps.alone(what(), machine, np.arange(n)), rel=0.01)


def test_the_axes_of_a_listed_group() -> None:
    axes = {"data": 4, "model": 2}

    def over(*said: Any) -> tuple[str, ...]:
        return wires._over(Collective("a", "all_gather", "", CORE, 1, 4, *said), axes)

    assert over((), (0, 2, 4, 6)) == ("data",)
    assert over((), (2, 3)) == ("model",)
    assert over((), (0, 1, 2, 3, 4, 5, 6, 7)) == ("data", "model")
    assert over(("model",)) == ("model",) and over() == ()


def test_a_kernel_has_the_plan_that_fits_its_result() -> None:
    """Weights and tokens of as many bytes, gathered over axes of as many devices."""

    def plan(shape: tuple[int, ...], axis: str) -> KernelPlan:
        record = catalogue.COLLECTIVES["all_gather"].algorithms[0]
        return KernelPlan(
            op="all_gather",
            backend="pallas",
            record=record,
            vmem=False,
            on_sparsecore=False,
            shape=shape,
            nbytes=1 << 23,
            cuts=1,
            devices=4,
            axes=(axis,),
            chip="v6e",
            torus="line",
        )

    plans = [plan((2, 512, 4096), "model"), plan((1024, 4096), "data")]

    def axes(shape: tuple[int, ...], nbytes: int) -> tuple[str, ...]:
        found = wires._plan(Collective("a", "all_gather", "k", CORE, nbytes, 0, shape=shape), plans)
        return found.axes if found else ()

    assert axes((4096, 4096), 1 << 25) == ("data",)
    assert axes((2, 2048, 4096), 1 << 25) == ("model",)
    assert axes((7,), 14) == ("model",)  # the first of the collective


def test_laxs_ragged_exchange_sends_what_ours_does() -> None:
    """Each device's rows once, not once for each device."""
    c = Collective("a", "ragged_all_to_all", "", CORE, 1 << 27, 8, ("x",))
    assert wires._block(c, None, {"x": 8}, ("x",)) == 1 << 24


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
    by_lax, _, _, forced = rows
    assert {of["by"] for of in by_lax.collectives} == {"lax"}
    assert all(of["by"].startswith("all_gather_") for of in forced.collectives)
    for row in rows:
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


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--program=fsdpp"], "it is one of fsdp, tensor"),
        (["--topology=v9:2x2"], "there is no such slice of v4, v5e"),
        (["--topology=v5e:4x4x4"], "there is no such slice of v4, v5e"),
        (["--pass=backward"], "it is one of forward, gradient"),
        (["--under=ours"], "it is one of lax, override"),
    ],
)
def test_flags_are_checked(bench: Bench, flags: list[str], message: str) -> None:
    status, _, err = bench("step", *flags)
    assert status == 2 and message in err


def _row(under: str, us: float, **others: Any) -> Stepped:
    figures = {"compute_us": us, "exposed_us": us / 4, "hidden_us": 0.0, "time_us": us}
    base = {"topology": "v5e:4x4", "op": "tensor, forward, scan", "type": "bfloat16"}
    return Stepped(**{**base, "under": under, "hideable_us": 0.0, "temp": 0, **figures, **others})


def test_only_what_is_named_is_compiled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[compiling.Task] = []

    def rows(tasks: list[compiling.Task]) -> Iterator[Stepped]:
        asked.extend(tasks)
        return (_row(under, 1.0) for under in tasks[0].under)

    monkeypatch.setattr(compiling, "rows", rows)
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    status, out, _ = bench("step", "--program=tensor", "--topology=v5e:2x2", "--under=lax,forced")
    assert status == 0 and "--under=override,grouped" in out
    assert asked == [compiling.Task("v5e:2x2", "tensor", False, False, ["lax", "forced"])]


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping.metadata, "version", lambda _: "another")
        list(keeping.saved(iter([_row("override", 1000.0)])))
    assert "→" not in keeping.table(keeping.load())  # two compilers' steps do not compare


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
