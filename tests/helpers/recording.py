"""What the TPU kernels give in interpret mode, recorded for machines where they do not run.

`python tests/helpers/recording.py` runs every conformance row on the Pallas backend and rewrites
the file.
"""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu

import conformance
import harness
import pallas_collectives
from pallas_collectives.errors import CollectiveError
from pallas_collectives.simulation import simulate

FILE = pathlib.Path(__file__).parent / "recorded_pallas.json"
DEVICES = (2, 4)


REFUSED = "refused"


def how(row: conformance.Row, dtype: str, backend: str) -> dict[str, Any]:
    """How to call a row: sums of 8-bit floats have one right answer only if added in float32."""
    return {"backend": backend} | ({"precise": True} if sums_float8(row, dtype) else {})


def sums_float8(row: conformance.Row, dtype: str) -> bool:
    return row.op in ("reduce_scatter", "all_reduce") and "float8" in dtype


def digest(row: conformance.Row, n: int, dtype: str, backend: str) -> str:
    """A hash of the results of all devices, with their dtype and shape, for seed 0."""
    x = harness.random((n, *row.shape(n)), dtype)
    options = how(row, dtype, backend)
    run = harness.per_device(lambda a: row.call(pallas_collectives, a, **options), harness.mesh(n))
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            y = np.asarray(run(x))
    except CollectiveError:
        return REFUSED  # some rows need more devices
    return hashlib.sha256(f"{y.dtype} {y.shape} ".encode() + y.tobytes()).hexdigest()[:16]


def key(row: conformance.Row, dtype: str, n: int) -> str:
    return f"{row} {dtype} on {n}"


KEYS = {
    key(row, dtype, n): (row, n, dtype)
    for row in conformance.ROWS
    for dtype in row.dtypes
    for n in DEVICES
}

if __name__ == "__main__":
    simulate(max(DEVICES))
    digests = {key: digest(*arguments, "pallas") for key, arguments in KEYS.items()}
    FILE.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} results in {FILE}")
