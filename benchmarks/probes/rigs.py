"""The rig of the devices there are, and the model's of the same slice."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from benchmarks import replay_rows
from benchmarks.probes.rig import Rig, machine_mesh
from benchmarks.settings import FlagError
from pallas_collectives.replay import Machine

_TINY = 8192  # bytes of a block where every element is interpreted
_SIMULATED = "v5e"


def here(simulated: int) -> Rig:
    """All TPUs of this machine; without TPUs so many simulated ones, in a row.

    Raises:
      FlagError: the devices make up no slice that the model knows.
    """
    found = jax.devices()
    if found[0].platform != "tpu":
        found = found[:simulated]
        machine = Machine.named(f"{_SIMULATED}:{len(found)}")
        interpret = pltpu.InterpretParams()
        return Rig(machine, Mesh(np.array(found), ("x",)), interpret, _TINY)
    whole = Mesh(np.array(found), ("x",))
    known = replay_rows.machine_of(whole)
    if known is None or known.n_devices != len(found):
        rule = "they must be a whole slice that the model of a pod knows"
        raise FlagError(f"{len(found)} devices", rule, "run it on all devices of a slice")
    return of(known, found)


def of(machine: Machine, found: Sequence[jax.Device]) -> Rig:
    """All devices of a machine, real or ahead of time, in its order."""
    order = np.argsort(machine.placement_of(found))
    return Rig(machine, Mesh(np.array(found)[order], ("x",)))


def modelled(machine: Machine) -> Rig:
    """The model's."""
    return Rig(machine, machine_mesh(machine))
