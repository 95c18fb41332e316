"""Our own collectives within a program: from a primitive's equation to the kernels it is lowered
to.

A program traced from `pallas_collectives.all_gather(...)` holds our primitive, whose lowering runs
only when XLA compiles. Replay runs the same lowering as a trace, under the program's own mesh.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat, catalogue
from pallas_collectives.annotations import AnyMesh
from pallas_collectives.backends import canonical, counters
from pallas_collectives.backends.plans import How
from pallas_collectives.lowering import bundles, placed
from pallas_collectives.replay import jaxprs
from pallas_collectives.replay.values import Known
from pallas_collectives.validation import AxisName, Groups


def is_twin(eqn: JaxprEqn) -> bool:
    """Whether an equation is one of our collectives, served by a backend of ours."""
    return isinstance(how := _how(eqn), How) and how.backend != "xla"


def _how(eqn: JaxprEqn) -> Any:
    by = eqn.params.get("spec", eqn.params.get("ways"))
    return eqn.params.get("how", getattr(by, "how", None))


def expand(eqn: JaxprEqn, mesh: AnyMesh) -> core.ClosedJaxpr:
    """The closed jaxpr of one device's part of the equation: layout work and `pallas_call`s."""
    params = dict(eqn.params)
    op = eqn.primitive.name.removeprefix("pallas_")
    how = _how(eqn)
    if how.backend != "pallas":
        raise jaxprs.UnsupportedEquation(
            f"{eqn.primitive.name} at {jaxprs.where(eqn)} is served by {how.backend!r}: "
            "replay runs Pallas kernels"
        )
    if op not in catalogue.primitives():
        return _local(functools.partial(placed.program_of(eqn.primitive.name), **params), eqn, mesh)
    del params["how"]
    module = importlib.import_module(f"pallas_collectives.backends.{how.backend}")
    if not eqn.primitive.multiple_results:
        return _local(functools.partial(canonical.run, module, op, how, **params), eqn, mesh)

    def run(x: Any, how: How) -> Any:
        return canonical.run(module, op, how, x, **params)

    return _local(lambda *xs: bundles.reduced(run, xs, how, params["axes"]), eqn, mesh)


def _local(run: Callable[..., Any], eqn: JaxprEqn, mesh: AnyMesh) -> core.ClosedJaxpr:
    replicated = jax.sharding.PartitionSpec()
    local = jax.shard_map(
        run, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    types = map(_compat.type_of, eqn.invars)
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
    with counters.uncounted():
        return jax.make_jaxpr(local)(*shapes)


def gathered(
    operand: Known,
    axes: dict[str, int],
    *,
    axis_name: AxisName,
    all_gather_dimension: int,
    tiled: bool,
    axis_index_groups: Groups = None,
    **_: object,
) -> Known:
    """An all-gather's result on each device of a mesh of `axes`."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    order = [*(a for a in axes if a not in names), *names]
    devices = np.arange(np.prod(list(axes.values()))).reshape(tuple(axes.values()))
    rows = devices.transpose([list(axes).index(a) for a in order])
    rows = rows.reshape(-1, np.prod([axes[a] for a in names]))
    if axis_index_groups is not None:
        rows = np.concatenate([rows[:, list(group)] for group in axis_index_groups])
    join = np.concatenate if tiled else np.stack
    results: list[Any] = [None] * devices.size
    for row in rows:
        result = join([operand.of_lane(device) for device in row], axis=all_gather_dimension)
        for device in row:
            results[device] = result
    return Known(np.stack(results), True)
