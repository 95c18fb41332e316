"""Devices and cores that wait for each other, but not by the kernel's own doing: at the entry of
kernels without a barrier, and around kernels on several cores.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from pallas_collectives.replay import jaxprs, operations
from pallas_collectives.replay.program import Signal, Wait
from pallas_collectives.replay.stepper import Stepper


def on_entry(stepper: Stepper, eqn: JaxprEqn, lanes: np.ndarray) -> None:
    """The barrier of all devices that the compiler puts before a kernel, if it does.

    It does where a kernel communicates, takes no barrier semaphore and has no collective id, unless
    it is told not to (JAX's docs/pallas/tpu/distributed.md, `CompilerParams.skip_device_barrier`).
    In round k each device tells the one 2**k after it, so that after all of them all have come.
    """
    if not _has_default_barrier(eqn) or stepper.n_devices == 1:
        return
    source, distance = stepper.source(eqn), 1
    while distance < stepper.n_devices:
        sem = _semaphore(stepper, "default barrier", stepper.kernel_number, distance)
        targets = stepper.devices.named((lanes + distance) % stepper.n_devices)
        busy = stepper.take_busy()
        stepper.emit(Signal(lanes, busy, source, sem, targets, 1, implicit=True))
        stepper.emit(Wait(lanes, 0.0, source, sem, 1, is_dma=False, implicit=True))
        distance *= 2


def gather(stepper: Stepper, eqn: JaxprEqn, first: np.ndarray, others: np.ndarray) -> None:
    """The first cores wait until the others have come here."""
    sem, source = _semaphore(stepper, "gather of cores"), stepper.source(eqn)
    targets, count = np.tile(first, len(others) // len(first)), len(others) // len(first)
    stepper.emit(Signal(others, stepper.take_busy(), source, sem, targets, 1, implicit=True))
    stepper.emit(Wait(first, 0.0, source, sem, count, is_dma=False, implicit=True))


def release(stepper: Stepper, eqn: JaxprEqn, first: np.ndarray, others: np.ndarray) -> None:
    """The others wait until the first cores have come here."""
    sem, source = _semaphore(stepper, "release of cores"), stepper.source(eqn)
    for targets in others.reshape(-1, len(first)):
        stepper.emit(Signal(first, 0.0, source, sem, targets, 1, implicit=True))
    stepper.emit(Wait(others, 0.0, source, sem, 1, is_dma=False, implicit=True))


def _semaphore(stepper: Stepper, name: str, *which: int) -> int:
    """One that is there at all times, as barrier semaphores are."""
    scalar = jax.ShapeDtypeStruct((), np.int32)
    view = stepper.allocate(("barrier", name, *which), scalar, name, "semaphore_mem")
    return int(view.buffer.id)


def _has_default_barrier(eqn: JaxprEqn) -> bool:
    """Whether the compiler begins a kernel with a barrier of all devices."""
    if jaxprs.collective_id(eqn) is not None or jaxprs.skips_device_barrier(eqn):
        return False
    bodies = [eqn.params["jaxpr"]] if "jaxpr" in eqn.params else eqn.params["jaxprs"]
    inside = [inner for body in bodies for inner in jaxprs.equations(body)]
    if any(inner.primitive.name == "get_barrier_semaphore" for inner in inside):
        return False
    return any(_communicates(inner) for inner in inside)


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether an operation names a device."""
    op = operations.operation(eqn)
    return isinstance(op, (operations.DmaStart, operations.Signal)) and op.device_id is not None
