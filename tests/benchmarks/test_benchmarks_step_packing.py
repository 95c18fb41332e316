"""`python -m benchmarks step`: what a core computes for collectives alone is exposed."""

from collections.abc import Sequence

import pytest

from benchmarks.steps import packing, schedule, timeline
from benchmarks.steps.schedule import (
    CORE,
    SPARSECORE,
    Collective,
    Done,
    Event,
    Loop,
    Start,
    StepWork,
)
from pallas_collectives.replay import Machine

_LINE = "  %{name} = f32[8,128]{{1,0}} {op}({reads}){named}, {cycles}"


def line(name: str, reads: str, op: str = "add", *, by: str = "", **attributes: str) -> str:
    """An instruction of a thousand cycles."""
    named = f', metadata={{op_name="jit(f)/{by}"}}' if by else ""
    named += "".join(f", {key}=%{value}" for key, value in attributes.items())
    cycles = 'backend_config={"estimated_cycles":"1000"}'
    operands = ", ".join(f"%{operand}" for operand in reads.split())
    return _LINE.format(name=name, op=op, reads=operands, named=named, cycles=cycles)


def program(*lines: str) -> str:
    return "\n".join(
        [
            "%moving (p: f32[8,128]) -> f32[8,128] {",
            "  %m = f32[8,128]{1,0} copy(%p)",
            "  ROOT %n = f32[8,128]{1,0} transpose(%m)",
            "}",
            "%masking (p: f32[8,128]) -> f32[8,128] {",
            "  %o = f32[8,128]{1,0} copy(%p)",
            "  ROOT %s = f32[8,128]{1,0} select(%o, %o)",
            "}",
            "%slicing (p: f32[8,128]) -> f32[8,128] {",
            line("d", "p", "dynamic-slice", by="while/body/dynamic_slice"),
            line("r", "d", "reshape", by="while/body/all_gather/reshape"),
            "}",
            "ENTRY %main (x: f32[8,128]) -> f32[8,128] {",
            *lines,
            "}",
        ]
    )


def start_of(operands: str) -> str:
    reads = ", ".join(f"%{operand}" for operand in operands.split())
    return f"  %e-start = (f32[8,128], f32[8,128], u32[]) ragged-all-to-all-start({reads})"


DONE = "  %e-done = f32[8,128]{1,0} ragged-all-to-all-done(%e-start)"
FREE = "  %{name} = f32[8,128]{{1,0}} bitcast(%{reads})"


def names(events: Sequence[Event]) -> set[str]:
    """The work that is packing."""
    inner = [names(event.events) for event in events if isinstance(event, Loop)]
    return {e.name for e in events if isinstance(e, StepWork) and e.packs}.union(*inner)


def packs(*lines: str) -> set[str]:
    hlo = program(*lines)
    return names(packing.marked(schedule.events(hlo), hlo))


def test_what_only_serves_a_collective() -> None:
    """XLA's exchange: a buffer's zeros, blocks laid out for it, its result moved."""
    found = packs(
        line("product", "x"),
        line("zeros", "zero", "broadcast"),
        line("laid", "product", "copy"),
        FREE.format(name="cast", reads="laid"),
        line("turned", "product", "fusion", calls="moving"),
        start_of("zeros cast turned"),
        DONE,
        FREE.format(name="come", reads="e-done"),
        line("moved", "come", "copy"),
        line("again", "moved", "transpose"),
        line("next", "again"),
    )
    assert found == {"zeros", "laid", "turned", "moved", "again"}


def test_what_serves_the_program_too() -> None:
    """Arithmetic; copies that others read; copies of others' results; a mask with a layout."""
    found = packs(
        line("sum", "x"),
        line("kept", "x", "copy"),
        line("masked", "x", "fusion", calls="masking"),
        line("layer", "x", "dynamic-slice"),
        start_of("sum kept masked layer"),
        DONE,
        line("beside", "kept"),
        line("both", "e-done beside", "concatenate"),
        line("unread", "x", "copy"),
        line("for_product", "e-done", "copy", by="while/body/dot_general"),
        line("product", "both for_product"),
    )
    assert found == set()


def test_what_bears_a_collectives_name() -> None:
    """What XLA makes of one, and what surrounds our kernels; not what names it in a word."""
    found = packs(
        line("expanded", "x", "multiply", by="while/body/ragged_all_to_all"),
        line("table", "x", "add", by="psum/jit(cumsum)/add"),
        line("fused", "x", "fusion", by="psum/stack;while/body/psum/reshape", calls="masking"),
        line("shared", "x", "fusion", by="psum/stack;while/body/mul", calls="masking"),
        line("sliced", "x", "fusion", by="while/body/all_gather/reshape", calls="slicing"),
        line("users", "x", by="my_psum/add"),
        line("copied", "table", "copy"),
    )
    assert found == {"expanded", "table", "fused", "copied"}


def test_in_a_loop() -> None:
    hlo = program("  %loop = (s32[]) while(%t), condition=%condition, body=%body")
    turn = [
        "%condition (p: (s32[])) -> pred[] {",
        "  %three = s32[] constant(3)",
        "}",
        "%body (p: (s32[])) -> (s32[]) {",
        line("zeros", "zero", "broadcast"),
        start_of("zeros"),
        line("product", "x"),
        DONE,
        "}",
    ]
    hlo = "\n".join([*turn, hlo])
    (loop,) = packing.marked(schedule.events(hlo), hlo)
    assert isinstance(loop, Loop) and loop.times == 3
    assert [e.packs for e in loop.events if isinstance(e, StepWork)] == [True, False]
    assert schedule.cycles_of((loop,)) == 6000


def test_packing_is_exposed_and_hides_nothing() -> None:
    """On v5e, of 1.5 GHz: 4 us of compute and 2 of packing beside a collective of 10; 3 before."""
    c = Collective("c", "all_gather", "", SPARSECORE, 1, 4)
    events = [
        StepWork("zeros", 4500, packs=True),
        *(Start("c", c), StepWork("w", 6000), StepWork("layout", 3000, packs=True), Done("c")),
    ]
    machine = Machine.named("v5e:4")
    line = timeline.run(events, machine, machine.default_placement(4), lambda _: 10e-6)
    to_tell = 0.2  # what it takes the core to tell the engine
    assert line.compute_us == pytest.approx(4)
    assert line.packing_us == pytest.approx(5)
    assert line.waits_us == pytest.approx(4, abs=to_tell)
    assert line.exposed_us == line.waits_us + line.packing_us
    assert line.step_us == line.compute_us + line.exposed_us
    assert line.hidden_us == pytest.approx(4, abs=to_tell)
    assert (line.served["c"].beside, line.served["c"].beside_what) == (6000, "w")
    kinds = [span.kind for span in line.spans if span.lane == CORE]
    assert kinds.count("packing") == 2 and kinds.count("compute") == 1
