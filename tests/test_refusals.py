"""What makes no sense is refused when it is said, with what to say instead."""

from typing import Any

import numpy as np
import pytest

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
    with pytest.raises(CollectiveError, match=r"size 15: it is laid over 2 devices.*pad it"):
        call(ROWS, mesh=harness.mesh(2), axis_name="x")
    with pytest.raises(CollectiveError, match=r"it is a jax.sharding.Mesh"):
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
