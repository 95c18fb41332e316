"""Layers gathered ahead: every form of the program gives the same bits."""

import jax
import numpy as np

import harness
from benchmarks import layers

N = min(4, jax.device_count())


def test_all_forms_give_the_same_bits(by_nccl):
    mesh, size = harness.mesh(N), {"layers": 6, "width": 128, "tokens": 8}
    results = {
        name: np.asarray(
            layers.compiled(form, mesh, 6)(*layers.arrays(mesh, **size, form=name)), np.float32
        )
        for name, form in layers.forms(["int8"]).items()
    }
    narrow = results.pop("int8")
    assert not np.array_equal(narrow, results["lax"])
    np.testing.assert_allclose(narrow, results["lax"], atol=0.05)
    for name, result in results.items():
        np.testing.assert_array_equal(result, results["lax"], err_msg=name)
    assert np.abs(results["lax"]).max() > 0.1
