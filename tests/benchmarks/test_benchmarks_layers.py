"""Layers gathered ahead: every form of the program gives the same bits."""

import jax
import numpy as np
import pytest

import harness
import nccl_host
from benchmarks import layers
from pallas_collectives.nccl import copies

N = min(4, jax.device_count())


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)], autouse=True)
def where(request, monkeypatch):
    if request.param == "gpu":
        if jax.default_backend() != "gpu" or N < 2:
            pytest.skip("needs two GPUs")
        return
    nccl_host.serve(monkeypatch)
    monkeypatch.setattr(copies, "_copiers", {})


def test_all_forms_give_the_same_bits():
    mesh, size = harness.mesh(N), {"layers": 6, "width": 128, "tokens": 8}
    results = {
        name: np.asarray(
            layers.compiled(form, mesh, 6)(*layers.arrays(mesh, **size, form=name)), np.float32
        )
        for name, form in layers.forms().items()
    }
    for name, result in results.items():
        np.testing.assert_array_equal(result, results["lax"], err_msg=name)
    assert np.abs(results["lax"]).max() > 0.1
