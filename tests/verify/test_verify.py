"""The judge: what it finds in kernels with one fault each, and where it points."""

import functools
from typing import Any

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import judged_cores
import verify_kernels as kernels
from pallas_collectives import verify
from pallas_collectives.replay import lines
from pallas_collectives.verify import written
from pallas_collectives.verify.verdict import FAULTY, SOUND

X = "f32[64,128]"


def test_a_sound_kernel_is_sound_on_every_mesh_and_schedule() -> None:
    verdict = verify.check(kernels.sound_gather, X, devices=(2, 3, 4, 8))
    assert verdict.ok and verdict.status == SOUND
    assert [case.devices for case in verdict.cases] == [2, 3, 4, 8]
    assert all(case.report is not None and case.report.time > 0 for case in verdict.cases)
    assert verdict.taken_as == "the function of one device"
    text = str(verdict)
    assert "8 devices, x=8 on v5p:2x2x2  SOUND; modelled" in text and "busiest link" in text
    assert verify.assert_sound(kernels.sound_gather, X, mesh={"x": 4}).ok
    one = verify.assert_sound(kernels.sound_gather, X, devices=1)
    assert "1 device, x=1 on v5p:1x1x1  SOUND" in str(one)


@pytest.mark.parametrize(
    ("function", "rule", "says", "remedy"),
    [
        (kernels.without_barrier, "entry", "has entered kernel", "signal the barrier semaphore"),
        (
            kernels.stuck,
            "deadlock",
            "waits for ever for recv_sem",
            "leave this wait out, or let recv_sem be signalled 32,768 bytes more",
        ),
        (kernels.unwaited, "entry", "device 1 never waits for that", "wait for recv_sem before"),
        (
            kernels.unwaited,
            "leftover",
            "is 32,768 at the end, not 0 (and 3 more like it)",
            "32,768 bytes",
        ),
        (
            kernels.half_waited,
            "bytes",
            "is 28,672 at the end, not 0 (and 3 more like it)",
            "28,672 bytes",
        ),
        (kernels.past_the_end, "bounds", "device", "wrap the number round"),
        (kernels.gather, "early-read", "98304 bytes that 3 copies", "a semaphore each"),
    ],
)
def test_each_fault_is_named_at_the_readers_line(
    function: Any, rule: str, says: str, remedy: str
) -> None:
    verdict = verify.check(function, X, devices=(4,))
    assert verdict.status == FAULTY
    found = [finding for finding in verdict.findings if finding.rule == rule]
    assert found, verdict
    text = " ".join("\n".join(map(str, found)).split())
    assert says in text
    assert remedy in text
    for finding in found:
        line = finding.places[0].line
        assert line and line.path == kernels.__file__
        assert f"verify_kernels.py:{line.number}" in text
        assert finding.places[0].source in text
    with pytest.raises(AssertionError, match="NOT SOUND"):
        verify.assert_sound(function, X, devices=(4,))


def test_refs_bear_the_names_that_the_author_gave_them() -> None:
    """A kernel that takes `*refs`, with a record among its scratch."""
    (finding,) = verify.check(kernels.gather, X, devices=(4,)).findings
    text = str(finding)
    assert "o_ref[" in text and "sems.arrived[0]" in text and "sems.sent" in text
    assert "refs[" not in text
    assert "wait own_sem" in finding.drawing


def test_a_race_is_drawn_as_a_schedule_with_both_accesses_marked() -> None:
    (finding,) = verify.check(kernels.gather, X, devices=(4,)).findings
    rows = finding.drawing.splitlines()
    marks = [row[:5].strip() for row in rows]
    begins, second, over = (marks.index(mark) for mark in ("A>", "B", ">A"))
    assert begins < second < over
    assert "only now" in rows[over]
    assert rows[0].split() == ["device", "0", "device", "1", "device", "2", "device", "3"]
    assert all("verify_kernels.py:" in row for row in rows if row[:5].strip())
    first, other = finding.places
    device, reader = (int(place.text.split("device ")[1].split("'")[0]) for place in (first, other))
    column = rows[0].index(f"device {device}")
    assert rows[begins][column:].startswith("copy o_ref[")
    assert rows[second][rows[0].index(f"device {reader}") :].startswith("copy o_ref[")
    waits = [number for number, row in enumerate(rows) if "wait sems.arrived[0]" in row]
    assert begins < waits[-1] < second, "it passes a wait that other copies satisfy"


def test_a_deadlock_says_who_waits_and_is_drawn_to_the_end() -> None:
    (finding,) = verify.check(kernels.stuck, X, devices=(4,)).findings
    assert finding.rule == "deadlock" and finding.alike == 3
    assert "(and 3 more like it)" in str(finding)
    assert "has signalled it at verify_kernels.py" in finding.why
    ends = [row for row in finding.drawing.splitlines() if row[:5].strip() == "X"]
    assert len(ends) == 4 and all("wait recv_sem for" in row for row in ends)


def test_a_wait_that_stands_too_late_is_said_to() -> None:
    def body(x: Any) -> Any:
        n = jax.lax.axis_size("x")

        def kernel(x_ref: Any, o_ref: Any, landing: Any, send: Any, recv: Any, own: Any) -> None:
            kernels.greet(n)
            right = jax.lax.rem(jax.lax.axis_index("x") + 1, n)
            hop = kernels.pltpu.make_async_remote_copy(
                x_ref, landing, send, recv, device_id={"x": right}
            )
            hop.start()
            kernels.pltpu.async_copy(landing, o_ref, own).wait()
            hop.wait()

        scratch = [kernels.pltpu.VMEM(x.shape, x.dtype), kernels.DMA, kernels.DMA, kernels.DMA]
        return kernels.launched(kernel, x, x.shape, scratch)

    finding = next(f for f in verify.check(body, X, devices=(2,)).findings if "read" in f.rule)
    assert "waits for that only afterwards, at test_verify.py" in finding.why
    assert "come before test_verify.py" in finding.remedy


def test_barrier_ids_shared_by_calls_in_a_row_are_found() -> None:
    def two_calls(x: Any) -> Any:
        return kernels.to_the_right(kernels.to_the_right(x))

    assert verify.check(two_calls, X, devices=(2, 4)).ok
    verdict = verify.check(two_calls, X, devices=(5,))
    assert {finding.rule for finding in verdict.findings} == {"entry"}
    assert "next call" in str(verdict)


# For programs -------------------------------------------------------------------------------------


def test_json_holds_all_of_it() -> None:
    out = written.as_json(verify.check(kernels.gather, X, devices=(2, 4)))
    assert out["status"] == "faulty" and out["exit"] == 1
    assert [case["status"] for case in out["cases"]] == ["sound", "faulty"]
    (finding,) = out["cases"][1]["findings"]
    assert finding["places"][0]["line"]["path"] == kernels.__file__
    assert finding["schedule"] and out["cases"][1]["modelled"]["seconds"] > 0


def test_lines_of_jax_and_of_this_package_are_not_the_readers() -> None:
    """A loop's body that a helper of this package traces is found at the kernel's line."""
    import pallas_collectives as pc

    verdict = verify.check(lambda x: pc.all_gather(x, "x"), X, devices=(4,))
    report = verdict.cases[0].report
    assert verdict.ok and report is not None
    places = [column.source.place for column in report.engine.program.columns]
    assert {place.rank for place in places if place} <= {lines.OURS, lines.OUR_MACHINERY}
    copies = [c.source.place for c in report.engine.program.columns if hasattr(c, "dst")]
    assert all(place and place.rank == lines.OURS for place in copies)


def test_two_kernels_of_several_cores_follow_each_other_soundly() -> None:
    """A core that has left one does not count for another at the end of the next."""
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="sub", num_cores=1, num_subcores=4
    )

    def copied(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, o_ref: Any, rows_ref: Any, sem: Any) -> None:
            rows = pl.ds(8 * lax.axis_index("sub"), 8)
            pltpu.async_copy(x_ref.at[rows], rows_ref, sem).wait()
            pltpu.async_copy(rows_ref, o_ref.at[rows], sem).wait()

        return judged_cores.on_cores(
            body, x, mesh, pltpu.VMEM((8, 128), x.dtype), pltpu.SemaphoreType.DMA
        )

    verify.assert_sound(lambda x: copied(copied(x)), "f32[32,128]", devices=(2,), machine="v5p")


def test_a_barrier_semaphore_without_a_collective_id_is_a_fault() -> None:
    def program(x: jax.Array, **params: Any) -> jax.Array:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            kernels.greet(2)
            pltpu.sync_copy(x_ref, o_ref)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        compiler_params = pltpu.CompilerParams(**params)
        return pl.pallas_call(
            kernel, out_shape=x, in_specs=[anywhere], out_specs=anywhere,
            compiler_params=compiler_params,
        )(x)  # fmt: skip

    verify.assert_sound(functools.partial(program, collective_id=3), X, devices=(2,))
    (finding,) = verify.check(program, X, devices=(2,)).cases[0].findings
    assert finding.rule == "barrier" and "no collective id" in finding.what
    assert "collective_id=0" in finding.remedy
