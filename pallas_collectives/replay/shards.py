"""Steps `jax.shard_map`: what is around it works on whole arrays, what is inside on each device's
part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from pallas_collectives.replay import jaxprs
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN, Known, take


def shard_map(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    body, specs, mesh = (eqn.params[key] for key in ("jaxpr", "in_specs", "mesh"))

    def step(env: list[Any], lanes: np.ndarray) -> None:
        args = [env[i] for i in ins]
        if stepper.inside:  # one within another
            results = stepper.run(body, args, lanes)
        else:
            if mesh != stepper.mesh:
                raise jaxprs.UnsupportedEquation(
                    f"replay wants one mesh: this one is {dict(mesh.shape)}, the first "
                    f"{stepper.devices.axes}, of the same devices or not; judge them one by one",
                    eqn,
                )
            axes = stepper.devices.axes
            parts = [_shard(a, spec, axes) for a, spec in zip(args, specs, strict=True)]
            stepper.inside = True
            stepper.run(body, [take(part, lanes) for part in parts], lanes)
            stepper.inside = False
            results = [UNKNOWN] * len(outs)
        for o, value in zip(outs, results, strict=True):
            env[o] = value

    return step


def _shard(value: Any, spec: PartitionSpec, axes: dict[str, int]) -> Any:
    """Each device's part of a global array under a PartitionSpec."""
    if not isinstance(value, Known) or not any(spec):
        return value
    n = math.prod(axes.values())
    shape = tuple(axes.values())
    coordinates = dict(zip(axes, np.unravel_index(np.arange(n), shape), strict=True))
    shards = []
    for device in range(n):
        part = value.values
        for dim, entry in enumerate(spec):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            index, count = 0, 1
            for name in names:
                index = index * axes[name] + int(coordinates[name][device])
                count *= axes[name]
            size = part.shape[dim] // count
            part = np.take(part, range(index * size, (index + 1) * size), axis=dim)
        shards.append(part)
    return Known(np.stack(shards), True)
