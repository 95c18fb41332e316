"""The other engine: kernels that run on a SparseCore while the TensorCore computes.

v5p, v6e and 7x have SparseCores beside each TensorCore. The scalar subcore of one starts DMAs,
signals, waits and loops as a TensorCore does, so the very same kernel runs there: the engine is a
property of the launch. XLA makes of it an asynchronous call (`call-start`, `call-done`, execution
thread "sparsecore"), and moves what does not need the result in between.

What differs from a launch on the TensorCore:

* operands are in HBM alone, so tables are copied to the core's scalar memory first;
* there is no VMEM that a scalar subcore can use, so nothing is added there;
* a result that begins with an operand's contents is a copy of it, made before the barrier: another
  device may write over it as soon as we have signalled that we are here.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import tpu_sc as plsc

from pallas_collectives.errors import EngineError
from pallas_collectives.topology.chips import Chip

# The name of a SparseCore among a device's, an axis of size 1 within kernels.
_CORES = "sparsecores"

_wanted = contextvars.ContextVar("on_sparsecore", default=False)


@contextlib.contextmanager
def wanted(here: bool = True) -> Iterator[None]:
    """Within this context kernels are launched on a SparseCore, if `here`."""
    token = _wanted.set(here)
    try:
        yield
    finally:
        _wanted.reset(token)


def is_wanted() -> bool:
    """Whether kernels are to be launched on a SparseCore."""
    return _wanted.get()


def check(what: str, chip: Chip, *, adds: bool) -> None:
    """Refuses what no SparseCore can run.

    Raises:
      EngineError: the chip has none that Pallas reaches, or sums are wanted of it.
    """
    remedy = "leave ':sc' out: the TensorCore then runs it"
    if chip.no_sparsecore:
        raise EngineError(f"{what} on a SparseCore", f"{chip.name}: {chip.no_sparsecore}", remedy)
    if adds:
        rule = "it adds, and a SparseCore's scalar subcore has no vector memory to add in"
        raise EngineError(f"{what} on a SparseCore", rule, remedy)


def mesh() -> Any:
    """The scalar subcore of one SparseCore, for `cores.kernel`."""
    return plsc.ScalarSubcoreMesh(axis_name=_CORES, num_cores=1)
