"""What `python -m benchmarks host` times: three forms of one call. Here over a wire on the host."""

import jax
import numpy as np
import pytest

import harness
import nccl_host
from benchmarks import host
from benchmarks.cases import CASES, Case
from pallas_collectives import nccl

N = 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_forms_of_a_call_are_alike(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(nccl.Communicator, case.op):
        pytest.skip("a callback has no one function of NCCL's to call")
    nccl_host.serve(monkeypatch)
    (runtime,) = nccl_host.runtimes()
    devices = [nccl_host.Device(i, 0, i) for i in range(N)]
    with nccl.create(devices, runtime=runtime) as group:
        ours, theirs, plain = host.calls(case, group)
    x = harness.random((N, host.COUNT), "float32")
    got, want = (np.asarray(harness.per_device(f, harness.mesh(N))(x)) for f in (ours, theirs))
    np.testing.assert_array_equal(got, want)
    assert jax.eval_shape(plain, x[0]).shape == got.shape[1:]
