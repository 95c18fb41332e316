"""Runs a kernel's own DMA program on a modelled torus: time, link loads, deadlocks, leftovers,
races, and what the hardware forbids.

    machine = replay.Machine.named("v5e:16x16")
    mesh = machine.mesh({"x": 16, "y": 16})
    f = jax.shard_map(lambda x: all_gather(x, "x", tiled=True, to="invarying"),
                      mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y"))
    report = replay.replay(f, jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16), machine=machine)
    print(report)

Every figure is modelled, not measured: see `topology.chips` for the constants and where they
come from. `draw` makes pictures of a report, `trace` a file for Perfetto; both are imported when
asked for.
"""

import importlib
from typing import Any

from pallas_collectives.replay.api import replay as replay
from pallas_collectives.replay.bound import bound as bound
from pallas_collectives.replay.machine import GENERATIONS as GENERATIONS
from pallas_collectives.replay.machine import Generation as Generation
from pallas_collectives.replay.machine import Machine as Machine
from pallas_collectives.replay.machine import MachineError as MachineError
from pallas_collectives.replay.races import Race as Race
from pallas_collectives.replay.report import Report as Report
from pallas_collectives.replay.rules import Fault as Fault
from pallas_collectives.replay.views import DataDependent as DataDependent


def __getattr__(name: str) -> Any:
    if name not in ("calibration", "draw", "trace"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
