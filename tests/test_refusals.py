"""What makes no sense is refused when it is said, with what to say instead."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError, SliceError, UnboundAxisError
from pallas_collectives.replay import Machine, MachineError

ROWS = np.ones((15, 8), np.float32)


@pytest.mark.parametrize("axes", [(3,), ("x", "x"), (("x", "y"),)])
def test_across_slices_takes_names(axes: tuple[Any, ...]) -> None:
    with pytest.raises(SliceError, match="write it like across_slices"), pc.across_slices(*axes):
        pass


@pytest.mark.parametrize("function", ["all_gather", "psum", "pmax"])
def test_whole_arrays_are_laid_over_axes_that_are_there_and_divide_them(function: str) -> None:
    call = getattr(pc.sharded, function)
    with pytest.raises(UnboundAxisError, match="the mesh has the axes x; name one"):
        call(ROWS, mesh=harness.mesh(2), axis_name="z")
    refusal = r"size 15: it must be a multiple of the 2 devices .* laid over; pad it to 16"
    with pytest.raises(CollectiveError, match=refusal):
        call(ROWS, mesh=harness.mesh(2), axis_name="x")
    with pytest.raises(CollectiveError, match=r"it must be a jax.sharding.Mesh"):
        call(ROWS, mesh=None, axis_name="x")


@pytest.mark.parametrize("devices", [0, -1, "8", True, 2.0])
def test_numbers_of_simulated_devices(devices: Any) -> None:
    with pytest.raises(pc.errors.BackendError, match="a whole number of 1 or more"):
        pc.simulate(devices)


@pytest.mark.parametrize("name", ["v5e:0x4", "v5e:32x32", "v4:17x16x16", "v5p:9999999x1x1", "v5e"])
def test_pods_are_of_sizes_that_are_built(name: str) -> None:
    with pytest.raises(MachineError, match=r"v5e \(2 torus axes, 256 chips at the most\)"):
        Machine.named(name)
    assert Machine.named("v5e:16x16").n_chips == 256


def test_explain_takes_names_of_topologies_and_hints_at_meshes() -> None:
    how = {"nbytes": 1 << 20, "devices": 8}
    assert pc.explain("psum", chip="tpu7x", **how) == pc.explain("psum", chip="7x", **how)
    with pytest.raises(CollectiveError, match="or mesh= and axis_name= for devices on several"):
        pc.explain("psum", nbytes=1 << 20, devices=(4, 4), chip="v5p")  # type: ignore[arg-type]
    mesh = Machine.named("v5p:4x4x1").mesh({"x": 4, "y": 4})
    assert pc.explain("psum", nbytes=1 << 20, mesh=mesh, axis_name=("x", "y")).devices == 16


def test_fewer_simulated_devices_than_there_are_say_that_nothing_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("PJRT_NPROC", os.environ.get("PJRT_NPROC", "16"))
    pc.simulate(8)
    assert not caplog.records
    pc.simulate(4)
    assert "simulate(4) has no effect: there are 8 simulated devices" in caplog.text


@pytest.mark.parametrize("backend", [None, "pallas", "xla"])
def test_a_wire_for_numbers_that_it_cannot_carry_is_refused_and_nothing_else_is_said(
    backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    total = jax.shard_map(
        lambda x: pc.psum(x, "x", wire="int8", backend=backend),
        mesh=harness.mesh(2), in_specs=P("x"), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(pc.errors.DtypeError, match="psum of int32 by wire int8: a wire takes f"):
        jax.jit(total)(np.ones((8, 128), np.int32))
    assert not caplog.records


@pytest.mark.parametrize(
    "op, columns, told",
    [
        ("all_gather_matmul", None, r"number of columns .* write columns=4096, or \(4096, 1024\)"),
        ("matmul_reduce_scatter", "4", "number of columns .* write columns=4096[.]"),
        ("matmul_reduce_scatter", (4, 4), "number of columns "),
    ],
)
def test_explain_asks_for_the_columns_of_a_product(op: str, columns: Any, told: str) -> None:
    with pytest.raises(CollectiveError, match=told):
        pc.explain(op, shape=(1024, 4096), devices=16, chip="v5e", columns=columns)


@pytest.mark.parametrize(
    "how, told",
    [
        (lambda: {"device_id": (0,)}, "device_id has 1 of the indices along x, y, and a tuple has"),
        (
            lambda: {"device_id": [0], "device_id_type": pl.DeviceIdType.LOGICAL},
            "device_id has 1 indices and is LOGICAL, which is one number",
        ),
    ],
    ids=["too few", "logical"],
)
def test_verify_names_device_ids_that_name_no_device(how: Callable[[], Any], told: str) -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, **how())
        pl.semaphore_wait(barrier, 1)

    def function(x: jax.Array) -> jax.Array:
        params = pltpu.CompilerParams(collective_id=0)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, compiler_params=params)(x)

    verdict = pc.verify.check(function, "f32[8,128]", mesh={"x": 2, "y": 2})
    assert verdict.status == "cannot be judged" and told in str(verdict)


@pytest.mark.parametrize("kind", [CollectiveError, UnboundAxisError])
def test_an_error_passes_between_processes(kind: type[CollectiveError]) -> None:
    """A pool of workers pickles what they raise."""
    raised = kind("x=3", "it is an array", "pass one")
    come = pickle.loads(pickle.dumps(raised))
    assert type(come) is kind and str(come) == str(raised)
