"""What `python -m benchmarks step` reads from schedules, and what it models of them."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pallas_collectives as pc
from benchmarks.cases import CASES
from benchmarks.steps import bound, compiling, learning, schedule, timeline, wires
from benchmarks.steps.schedule import CORE, DMA, SPARSECORE, Collective, Done, Loop, Start, StepWork
from pallas_collectives import catalogue
from pallas_collectives.backends import counters
from pallas_collectives.backends.plans import KernelPlan
from pallas_collectives.replay import Machine, replay, steps

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
  %ragged-dot = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000","transcendentals":"0","bytes_accessed":"300"}}}
  %mine = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/mine/pallas_call"}
  %sends = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/sends/pallas_call"}, backend_config={"custom_call_config":{"has_communication":true}}
  %multiplies = (bf16[32,128]{1,0}, bf16[32,256]{1,0}) custom-call(%x, %w), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[17]{0}, bf16[8,128]{1,0}, bf16[128,256]{1,0}}, metadata={op_name="jit(f)/all_gather_matmul/pallas_call"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"7000","transcendentals":"0","bytes_accessed":"900000"}}}
}
"""  # noqa: E501


def test_events_of_a_schedule() -> None:
    loop, *rest = schedule.events(HLO, lambda flops, nbytes: max(flops // 10, nbytes))
    assert loop == Loop(
        3,
        (
            Start("start", Collective("start", "ppermute", "", DMA, 4096, 3, (), ((0, 1),))),
            StepWork("work.1", 1000),
            Done("start"),
        ),
    )
    scattered = (0, 2, 4, 6), (1, 3, 5, 7)
    key, by_kernel = "s.call-update", "all_gather_bidirectional"
    by_subcores = Collective(
        "v", "reduce_scatter", "reduce_scatter_line", SPARSECORE, 4096, 0, shape=(1, 8, 128)
    )
    assert rest == [
        Start("chain 7", Collective("g", "all_gather", "", DMA, 32 * 128 * 2, 4, ("x",))),
        StepWork("work.2", 2000),
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
        StepWork("fusion.8", 700),
        # Kernels of others: two that send nothing, one with a word of its cost, and one that sends.
        StepWork("ragged-dot", 500),
        StepWork("mine", 2048),
        Start("sends", Collective("sends", "", "sends", CORE, 2048, 0, shape=(8, 128))),
        Done("sends"),
        # One that multiplies while it sends: its bytes are the wire's, and no work of the core.
        Start("multiplies", MULTIPLIES),
        Done("multiplies"),
    ]


MULTIPLIES = Collective(
    *("multiplies", "all_gather", "all_gather_matmul", CORE, 32 * 128 * 2, 0),
    shape=(32, 128),
    operands=((17,), (8, 128), (128, 256)),
    cycles=700,
)


def test_products_within_a_kernel_are_the_cores_work() -> None:
    """At 1.5 GHz: a kernel of 10 us computes 4 of them, and what it waits for is the rest."""
    multiplies = dataclasses.replace(MULTIPLIES, cycles=6000)
    events = [StepWork("w", 3000), Start("m", multiplies), Done("m")]
    machine = Machine.named("v5e:4")
    line = timeline.run(events, machine, machine.default_placement(4), lambda _: 10e-6)
    assert (line.compute_us, line.waits_us) == pytest.approx((2 + 4, 6))
    assert line.hidden_us == pytest.approx(4) and line.step_us == pytest.approx(12)
    assert line.served["multiplies"].each_us == pytest.approx(10)
    # In any order what needs its result comes behind all of it; what does not can be beside.
    own = [StepWork("a", 100), *flight("m", 70, CORE)]
    start = own[1]
    assert isinstance(start, Start)
    own[1] = dataclasses.replace(
        start, name="m", collective=dataclasses.replace(start.collective, cycles=40)
    )
    own[2] = Done("m", "m")
    assert least(own, {"m": ["a"]}) == 30 and least(own, {}) == 0


def test_what_is_exposed_and_hidden() -> None:
    """On v5e, of 1.5 GHz: a collective of 10 us beside work of 4, alone, and two on one engine."""
    beside, alone, queued, later = (
        Collective(name, "all_gather", "", engine, 1, 4)
        for name, engine in (("a", DMA), ("b", CORE), ("c", SPARSECORE), ("d", SPARSECORE))
    )
    events = [
        *(Start("a", beside), StepWork("w", 6000), Done("a")),  # 4 us of 10: 6 are waited for
        *(Start("b", alone), Done("b")),
        *(Start("c", queued), Start("d", later), StepWork("v", 18000), Done("c"), Done("d")),
    ]
    machine = Machine.named("v5e:4")
    line = timeline.run(events, machine, machine.default_placement(4), lambda _: 10e-6)
    assert line.compute_us == pytest.approx(16)
    to_tell = 0.3  # what it takes the core to tell engines, in all
    assert line.exposed_us == pytest.approx(6 + 10 + 0 + 8, abs=to_tell)
    assert line.hidden_us == pytest.approx(4 + 0 + 10 + 2, abs=to_tell)
    assert line.step_us == pytest.approx(line.compute_us + line.exposed_us)
    waits = [line.served[name].waits_us for name in "abcd"]
    assert waits == pytest.approx([6, 10, 0, 8], abs=to_tell)
    assert (line.served["a"].beside, line.served["a"].beside_what) == (6000, "w")
    assert line.served["a"].by == "lax"
    unknown = timeline.run(
        events, machine, machine.default_placement(4), lambda _: timeline.OnOneLink(10e-6)
    )
    assert unknown.served["a"].by == "lax (as its bytes on one link)"
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
    work = [StepWork("a", 100), StepWork("b", 50)]
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


@pytest.mark.parametrize("n", [3, 4, 7])
def test_what_is_compiled_to_learn_takes_any_number_of_devices(n: int) -> None:
    for case in CASES:
        program = learning.program(n, case)
        lowered = compiling.lower(program, np.array(jax.devices()[:n]), "lax")
        assert lowered.out_info.shape == (n, *program.args[1].shape)


def test_the_memory_that_gathers_bring_to() -> None:
    result = "%g = bf16[8,128]{1,0:T(8,128)(2,1)%s} all-gather(%p), dimensions={0}"
    assert learning.near_of(result.replace("%s", "S(3)")) == "CMEM"
    assert learning.near_of(result.replace("%s", "S(1)")) == learning.near_of(HLO) == ""


@pytest.mark.full
@pytest.mark.parametrize(
    "name, op, mib",
    [
        ("v5p:2x2x1", "all_reduce", 96),
        ("7x:2x2x1", "all_reduce", 96),
        ("v5p:2x2x1", "ragged_all_to_all", 48),
    ],
)
def test_large_ones_take_what_their_replay_would(
    name: str, op: str, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not replayed themselves: that would take minutes."""
    machine = Machine.named(name)
    n = machine.n_devices
    c = Collective("a", op, "", CORE, mib << 20, n, ("x",))

    def what() -> Any:
        return wires.programs(machine, np.arange(n), {"x": n}, [])(c)

    told = what()
    monkeypatch.setattr(wires, "_LARGE", mib << 20)
    assert isinstance(told, float)
    assert told == pytest.approx(steps.alone(what(), machine, np.arange(n)), rel=0.01)


def test_the_axes_of_a_listed_group() -> None:
    axes = {"data": 4, "model": 2}

    def over(*said: Any) -> tuple[Any, Any]:
        found = wires._over(Collective("a", "all_gather", "", CORE, 1, 4, *said), axes)
        return found.axes, found.groups

    assert over((), ((0, 2, 4, 6), (1, 3, 5, 7))) == (("data",), None)
    assert over((), ((2, 3), (0, 1), (4, 5), (6, 7))) == (("model",), None)
    assert over((), ((0, 1, 2, 3, 4, 5, 6, 7),)) == (("data", "model"), None)
    assert over(("model",)) == (("model",), None) and over() == ((), None)
    halves = (0, 2), (4, 6), (1, 3), (5, 7)  # of an axis of four
    assert over((), halves) == (("data",), ((0, 1), (2, 3)))
    assert over((), halves[:1]) == (("data",), None)  # a permute's first pair


@pytest.mark.full
def test_groups_within_an_axis_are_replayed_apart() -> None:
    """XLA's by the text, a kernel's by its plan: as on a mesh that has the groups as an axis."""
    machine = Machine.named("v5p:2x2x2")
    groups = tuple((first, first + 1) for first in range(0, 8, 2))
    plan = KernelPlan(
        op="all_reduce",
        backend="pallas",
        algorithm="ring",
        record=catalogue.COLLECTIVES["all_reduce"].algorithms[0],
        vmem=False,
        on_sparsecore=False,
        shape=(1024, 1024),
        nbytes=1 << 21,
        devices=2,
        axes=("x",),
        groups=groups,
        chip="v5p",
        torus="line",
    )

    def takes(c: Collective, mesh: dict[str, int], plans: list[KernelPlan]) -> float:
        what: Any = wires.programs(machine, np.arange(8), mesh, plans)(c)
        return steps.alone(what, machine, np.arange(8))

    by_xla = Collective("a", "all_reduce", "", CORE, 1 << 21, 2, (), groups)
    kernel = Collective("a", "all_reduce", "all_reduce_ring", CORE, 1 << 21, 2)
    of_axis = dataclasses.replace(plan, axes=("y",), groups=None)
    apart = {"x": 4, "y": 2}
    crossed = dataclasses.replace(by_xla, groups=((0, 1, 2, 3), (4, 5, 6, 7)), devices=4)
    square = dataclasses.replace(by_xla, groups=((0, 1, 3, 2), (4, 5, 7, 6)), devices=4)
    assert takes(crossed, {"x": 8}, []) == takes(square, {"x": 8}, [])  # XLA goes by the wires
    assert takes(by_xla, {"x": 8}, []) == pytest.approx(takes(by_xla, apart, []), rel=0.1)
    of_plan = takes(kernel, {"x": 8}, [plan])
    assert of_plan == pytest.approx(takes(kernel, apart, [of_axis]), rel=0.1)


def test_a_kernel_has_the_plan_that_fits_its_result() -> None:
    """Weights and tokens of as many bytes, gathered over axes of as many devices."""

    def plan(
        shape: tuple[int, ...], axis: str, on_sparsecore: bool = False, number: int = 0
    ) -> KernelPlan:
        record = catalogue.COLLECTIVES["all_gather"].algorithms[number]
        return KernelPlan(
            op="all_gather",
            backend="pallas",
            record=record,
            vmem=False,
            on_sparsecore=on_sparsecore,
            shape=shape,
            nbytes=1 << 23,
            devices=4,
            axes=(axis,),
            chip="v6e",
            torus="line",
        )

    plans = [plan((2, 512, 4096), "model"), plan((1024, 4096), "data"), plan((9,), "sc", True)]
    plans += [plan((2, 512, 4096), "other", number=1)]  # which its kernel's name tells apart
    other = f"all_gather_{plans[-1].record.name}"

    def axes(shape: tuple[int, ...], nbytes: int, engine: str = CORE, k: str = "k") -> Any:
        kernel = Collective("a", "all_gather", k, engine, nbytes, 0, shape=shape)
        found = wires._plan(kernel, plans)
        return found.axes if found else ()

    assert axes((4096, 4096), 1 << 25) == ("data",)
    assert axes((2, 2048, 4096), 1 << 25) == ("model",)
    assert axes((2, 2048, 4096), 1 << 25, k=other) == ("other",)
    assert axes((7,), 14) == ("model",)  # the first of the collective
    assert axes((2, 2048, 4096), 1 << 25, SPARSECORE) == ("sc",)


def test_a_kernel_over_a_wire_is_replayed_over_it() -> None:
    """What is packed has a plan of its own beside that of the same algorithm unpacked."""
    machine, n = Machine.named("v5e:2x2"), 4
    x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")

    def gathered(**how: Any) -> Any:
        def body(x: jax.Array) -> jax.Array:
            return pc.all_gather(x, "x", tiled=True, backend="pallas", algorithm="torus", **how)

        mesh, nothing = machine.mesh({"x": n}), PartitionSpec()
        return jax.shard_map(body, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False)

    with counters.recorded() as plans:
        for how in ({}, {"wire": "int8"}):
            replay(gathered(**how), x, machine=machine)
    what_of = wires.programs(machine, np.arange(n), {"x": n}, plans)
    us = [
        steps.alone(
            what_of(
                Collective("g", "all_gather", f"all_gather_{kernel}", CORE, 4 << 21, 0, ("x",))
            ),
            machine,
            np.arange(n),
        )
        for kernel in ("torus", "packed_torus")
    ]
    assert 0.5 < us[1] / us[0] < 0.75


def test_a_sparsecores_sum_is_replayed_as_its_two_kernels() -> None:
    machine, n = Machine.named("v5p:2x2x1"), 4
    x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")

    def body(x: jax.Array) -> jax.Array:
        return pc.psum(x, "x", backend="pallas", algorithm="ring:sc")

    mesh, nothing = machine.mesh({"x": n}), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False)
    with counters.recorded() as plans:
        whole = 1e6 * replay(mapped, x, machine=machine).time
    what_of = wires.programs(machine, np.arange(n), {"x": n}, plans)

    def us(op: str, nbytes: int) -> float:
        kernel = Collective("k", op, f"{op}_bidirectional", SPARSECORE, nbytes, 0)
        return 1e6 * steps.alone(what_of(kernel), machine, np.arange(n))

    halves = us("reduce_scatter", 1 << 19) + us("all_gather", 1 << 21)
    assert halves == pytest.approx(whole, rel=0.25)


def test_a_product_is_replayed_with_its_collective() -> None:
    """The one whose operands a kernel has, of several in a program."""
    machine, n = Machine.named("v6e:2x2"), 4
    x = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    ws = [jax.ShapeDtypeStruct((512, columns), "bfloat16") for columns in (256, 8192)]

    def body(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        return [pc.all_gather_matmul(x, w, "x", algorithm="fused") for w in ws]

    mesh, nothing = machine.mesh({"x": n}), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False)
    with counters.recorded() as plans:
        replay(mapped, x, *ws, machine=machine)
    what_of = wires.programs(machine, np.arange(n), {"x": n}, plans)

    def seconds(columns: int) -> float:
        operands = (17,), (1, 512, 512), (512, columns)
        kernel = dataclasses.replace(MULTIPLIES, operands=operands, nbytes=1 << 21)
        return steps.alone(what_of(kernel), machine, np.arange(n))

    small, large = map(seconds, (256, 8192))
    products = [2 * 2048 * 512 * c / machine.generation.matrix_rate for c in (256, 8192)]
    assert small > 3 * products[0] and products[1] < large < 2 * products[1]


def test_laxs_ragged_exchange_sends_what_ours_does() -> None:
    """Each device's rows once, not once for each device."""
    c = Collective("a", "ragged_all_to_all", "", CORE, 1 << 27, 8, ("x",))
    assert wires._block(c, None, 8) == 1 << 24
