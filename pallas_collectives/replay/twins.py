"""Our own collectives within a program: from a primitive's equation to the kernels it is lowered
to.

A program traced from `pallas_collectives.all_gather(...)` holds our primitive, whose lowering runs
only when XLA compiles. Replay runs the same lowering as a trace, under the program's own mesh.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from pallas_collectives import backends
from pallas_collectives.backends import canonical
from pallas_collectives.kernels import launch
from pallas_collectives.replay import jaxprs


def is_twin(eqn: Any) -> bool:
    """Whether an equation is one of our collectives, served by a backend of ours."""
    how = eqn.params.get("how")
    return isinstance(how, backends.How) and how.backend != "xla"


def expand(eqn: Any, mesh: Any) -> Any:
    """The closed jaxpr of one device's part of the equation: layout work and `pallas_call`s."""
    params = dict(eqn.params)
    how = params.pop("how")
    if how.backend != "pallas":
        raise jaxprs.UnsupportedEquation(
            f"{eqn.primitive.name} at {jaxprs.where(eqn)} is served by {how.backend!r}: "
            "replay runs Pallas kernels"
        )
    module = importlib.import_module(f"pallas_collectives.backends.{how.backend}")
    op = eqn.primitive.name.removeprefix("pallas_")
    run = functools.partial(canonical.run, module, op, how, **params)
    replicated = jax.sharding.PartitionSpec()
    local = jax.shard_map(
        run, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with backends.uncounted(), launch.ids_of_its_own():
        return jax.make_jaxpr(local)(*shapes)
