"""How the judge understands functions, operands and meshes, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import replay_kernels
import verify_kernels as kernels
from pallas_collectives import verify
from pallas_collectives.replay import Machine
from pallas_collectives.verify import asked
from pallas_collectives.verify.verdict import FAULTY, SOUND, UNJUDGED

X = "f32[64,128]"


def test_whole_programs_and_meshes_of_their_own() -> None:
    verdict = verify.check(kernels.whole, "f32[8*n,128]", devices=(2, 8))
    assert verdict.ok and verdict.taken_as == "a program of whole arrays"
    assert [case.axes for case in verdict.cases] == [{"x": 2}, {"x": 8}]
    own = verify.check(kernels.over_its_own_mesh, X, devices=(2, 4, 8))
    assert own.ok and [case.axes for case in own.cases] == [{"x": 2}]


def _over_the_mesh_in_scope(x: Any) -> Any:
    rows = P("x")
    return jax.shard_map(kernels.to_the_right, in_specs=rows, out_specs=rows, check_vma=False)(x)


@pytest.mark.parametrize("function", [kernels.to_the_right, kernels.whole, _over_the_mesh_in_scope])
def test_a_mesh_of_other_devices_in_scope_is_not_asked(function: Any) -> None:
    with jax.set_mesh(harness.mesh(8)):
        verdict = verify.check(function, "f32[8*n,128]", devices=4)
    assert verdict.ok and [case.axes for case in verdict.cases] == [{"x": 4}]


def _in_turn(x: Any, mesh: Any, *, bodies: Any, turns: int = 1) -> Any:
    """Whole arrays through a shard_map for each of the bodies, `turns` times."""
    spec = P(mesh.axis_names[0])
    sharded = [
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        for body in bodies
    ]
    return lax.fori_loop(0, turns, lambda _, y: functools.reduce(lambda z, f: f(z), sharded, y), x)


def test_every_shard_map_of_a_program_is_judged() -> None:
    sent, stuck = kernels.to_the_right, kernels.stuck
    program = functools.partial(_in_turn, bodies=[sent, stuck])
    (finding,) = verify.check(program, "f32[8*n,128]", devices=(4,)).findings
    assert finding.rule == "deadlock"
    verdict = verify.check(
        functools.partial(_in_turn, bodies=[sent, sent], turns=3), "f32[8*n,128]", devices=4
    )
    (report,) = (case.report for case in verdict.cases)
    assert verdict.ok and report is not None and len(report.kernels) == 6


def test_shard_maps_over_several_meshes_are_not_judged() -> None:
    def program(x: Any, mesh: Any) -> Any:
        x = kernels.whole(x, mesh)
        return kernels.whole(x, Machine.named("v5p:2x1x1").mesh({"x": 2}))

    verdict = verify.check(program, "f32[8*n,128]", devices=4)
    assert verdict.status == UNJUDGED
    assert "replay wants one mesh: this one is {'x': 2}" in str(verdict)


def _halved_until_small(x: Any) -> Any:
    """Sends what loops and conditionals that depend on data have computed, in a kernel and not."""
    n = lax.axis_size("x")

    def small(y: Any) -> Any:
        y = lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y / 2, y)
        return lax.cond(y[0, 0] > 0, lambda y: y + 1, lambda y: -y, y)

    def kernel(x_ref: Any, o_ref: Any, scratch: Any, send_sem: Any, recv_sem: Any) -> None:
        kernels.greet(n)
        pltpu.sync_copy(x_ref, scratch)
        scratch[...] = small(scratch[...])
        right = lax.rem(lax.axis_index("x") + 1, n)
        hop = pltpu.make_async_remote_copy(
            scratch, o_ref, send_sem, recv_sem, device_id={"x": right}
        )
        hop.start()
        hop.wait()

    return kernels.launched(
        kernel, small(x), x.shape, [pltpu.VMEM(x.shape, x.dtype), kernels.DMA, kernels.DMA]
    )


def test_loops_that_depend_on_data_are_passed_where_they_only_compute() -> None:
    assert verify.assert_sound(_halved_until_small, "f32[8,128]", devices=(2,)).ok


@pytest.mark.parametrize("operand", ["f32[8,0]", "f32[0,128]"])
def test_operands_without_elements_are_judged(operand: str) -> None:
    assert verify.assert_sound(kernels.to_the_right, operand, devices=2).ok


def test_what_is_bound_already_stays() -> None:
    bound = functools.partial(kernels.whole, mesh=Machine.named("v5p:2").mesh({"x": 2}))
    verdict = verify.check(bound, "f32[8,128]", devices=(4,))
    assert verdict.ok and verdict.name == "whole"
    assert [case.axes for case in verdict.cases] == [{"x": 2}]
    partial = functools.partial(kernels.to_the_right, fault="stuck")
    assert verify.check(partial, X, devices=(2,)).status == FAULTY


def test_meshes_of_several_axes() -> None:
    verdict = verify.check(kernels.to_the_right, X, mesh=[{"x": 2, "y": 2}, {"y": 4, "x": 2}])
    assert verdict.ok and [case.devices for case in verdict.cases] == [4, 8]
    split = verify.check(kernels.to_the_right, X, devices=(8,), axis_names=("x", "y"))
    assert split.cases[0].axes == {"x": 4, "y": 2}


def test_an_index_past_its_own_axis_is_found_where_others_follow() -> None:
    """One past the end of y is a device of a mesh of 2 by 2: the next row's first."""

    def function(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
            here = lax.axis_index(("x", "y"))
            hop = pltpu.make_async_remote_copy(
                x_ref, o_ref, send, recv, device_id={"y": lax.axis_index("y") + 1}
            )

            @pl.when(here < 2)
            def _() -> None:
                hop.start()
                hop.wait_send()

            @pl.when((here == 1) | (here == 2))
            def _() -> None:
                hop.wait_recv()

        return kernels.launched(kernel, x, x.shape, [kernels.DMA, kernels.DMA])

    (finding,) = verify.check(function, X, mesh={"x": 2, "y": 2}).findings
    assert finding.rule == "bounds" and "device 2 on axis 'y' of size 2" in finding.what


def test_operands_that_the_kernel_reads_are_followed() -> None:
    assert verify.check(kernels.depends_on_data, np.array([8], np.int32), X, devices=(2,)).ok
    unknown = verify.check(kernels.depends_on_data, "s32[1]", X, devices=(2,))
    assert unknown.status == UNJUDGED
    (case,) = unknown.cases
    assert case.line and case.line.path == kernels.__file__
    assert "verify_kernels.py" in case.unjudged and "array data" in case.unjudged
    assert "as a numpy array" in case.unjudged
    with pytest.raises(AssertionError, match="CANNOT BE JUDGED"):
        verify.assert_sound(kernels.depends_on_data, "s32[1]", X, devices=(2,))


def test_devices_that_are_alike_in_time_need_not_be_in_what_they_know() -> None:
    """On rings of four and of six that do the same: three rounds tell only the four of all."""
    rings = [0, 1, 5, 4], [8, 9, 10, 14, 13, 12]  # neighbours of v5e:4x4
    following = {d: ring[(i + 1) % len(ring)] for ring in rings for i, d in enumerate(ring)}
    table = np.array([following.get(d, d) for d in range(16)], np.int32)

    def function(x: Any, *, rounds: int) -> Any:
        def kernel(x_ref: Any, to_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
            me, barrier = lax.axis_index("x"), pltpu.get_barrier_semaphore()
            to = to_ref[me]

            @pl.when(to != me)
            def _() -> None:
                for _ in range(rounds):
                    pl.semaphore_signal(barrier, 1, device_id={"x": to})
                    pl.semaphore_wait(barrier, 1)
                hop = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id={"x": to})
                hop.start()
                hop.wait()

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[kernels.DMA, kernels.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x, jnp.asarray(table))

    for rounds, rules in ((3, {"entry"}), (5, set())):
        judged = functools.partial(function, rounds=rounds)
        verdict = verify.check(judged, "f32[8,128]", devices=16, machine="v5e:4x4")
        assert {finding.rule for finding in verdict.findings} == rules
        assert verdict.cases[0].report is not None
        assert verdict.cases[0].report.devices_modelled == 2


@pytest.mark.parametrize(("last", "status"), [(2, SOUND), (9, FAULTY)])
def test_tables_that_reach_a_kernel_by_blocks_are_followed(last: int, status: str) -> None:
    def function(table: Any, x: Any) -> Any:
        n = lax.axis_size("x")

        def kernel(row_ref: Any, x_ref: Any, o_ref: Any, send: Any, recv: Any) -> None:
            @pl.when(pl.program_id(0) == 0)
            def _() -> None:
                kernels.greet(n)

            part = pl.ds(row_ref[0, 0], 1)
            right = {"x": lax.rem(lax.axis_index("x") + 1, n)}
            hop = pltpu.make_async_remote_copy(
                x_ref.at[part], o_ref.at[part], send, recv, device_id=right
            )
            hop.start()
            hop.wait()

        return pl.pallas_call(
            kernel,
            grid=(3,),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[
                pl.BlockSpec((1, 128), lambda i: (i, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[kernels.DMA, kernels.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(table, x)

    table = np.zeros((3, 128), np.int32)
    table[:, 0] = 1, 0, last
    verdict = verify.check(function, table, "f32[3,8,128]", devices=2)
    assert verdict.status == status, verdict
    assert [finding.rule for finding in verdict.findings] == ["bounds"] * (status == FAULTY)


def test_a_kernel_that_polls_is_judged_on_one_schedule_alone() -> None:
    polling = verify.check(lambda x: replay_kernels.polling(x, 2), X, devices=(2,))
    assert polling.status == UNJUDGED
    (case,) = polling.cases
    assert "semaphore_read" in case.unjudged and "replay_kernels.py" in case.unjudged
    stuck = verify.check(lambda x: replay_kernels.polling(x, 2, needs=1), X, devices=(2,))
    assert stuck.status == FAULTY and {f.rule for f in stuck.findings} == {"deadlock"}


def test_what_holds_no_kernel_is_not_judged() -> None:
    verdict = verify.check(kernels.no_kernel, X, devices=(2,))
    assert verdict.status == UNJUDGED and "no Pallas TPU kernel" in str(verdict)


def test_what_the_replay_does_not_know_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pallas_collectives.replay import equations

    def strange(stepper: Any, eqn: Any, ins: Any, outs: Any) -> Any:
        def step(env: Any, lanes: Any) -> None:
            raise RuntimeError(f"odd {eqn.primitive.name}")

        return step

    monkeypatch.setitem(equations._SPECIAL, "axis_index", strange)
    (case,) = verify.check(kernels.to_the_right, X, devices=(2,)).cases
    assert "'axis_index'" in case.unjudged and "RuntimeError" in case.unjudged
    assert case.line and case.line.path == kernels.__file__


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"devices": (0,)}, "above 0"),
        ({"devices": (2,), "mesh": {"x": 2, "y": 2}}, "one axis"),
        ({"devices": 0}, "devices=0: it must be a whole number above 0, or several"),
        ({"devices": 2.5}, "devices=2.5"),
        ({"devices": ("8",)}, "above 0"),
        ({"mesh": {"x": 0}}, "sizes above 0"),
        ({"mesh": ["x"]}, "sizes above 0"),
        ({"devices": 4, "axis_names": ("x", "x")}, "different identifiers"),
        ({"machine": "v9:2x2"}, "v5p:4x4x4"),
        ({"machine": "v5p:2x2x1", "devices": (8,)}, "it has 4"),
        ({"devices": (2,), "compile": ("v9",)}, "name some of"),
    ],
)
def test_bad_input_is_a_sentence(how: dict[str, Any], says: str) -> None:
    with pytest.raises(verify.AskError, match=says):
        verify.check(kernels.to_the_right, X, **how)


@pytest.mark.parametrize("text", ["f32", "f32[6q]", "q7[8]", "f32[8,-8]", "f32[1/2]"])
def test_types_of_operands_are_checked(text: str) -> None:
    with pytest.raises(verify.AskError, match="it must be a type"):
        asked.shape_of(text, 4)


def test_types_of_operands() -> None:
    assert asked.shape_of("bf16[64*n, 2n+8]", 4) == jax.ShapeDtypeStruct((256, 16), "bfloat16")
    assert asked.shape_of("s32[]", 4) == jax.ShapeDtypeStruct((), "int32")
    assert asked.shape_of("pred[3]", 4).dtype == bool
    assert asked.parse_devices("2..4,8") == (2, 3, 4, 8)


def test_an_error_of_the_readers_own_is_told_with_its_line() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(
        verify.AskError, match=r"raises KeyError: 'mine' \(at test_verify_programs.py:\d+\)"
    ):
        verify.check(broken, X, devices=(2,))
