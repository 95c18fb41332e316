"""Simulated TPU devices: CPU devices on which kernels run in interpret mode."""

import os
import re

import jax
from absl import logging

from pallas_collectives import _compat
from pallas_collectives.errors import BackendError

_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def simulate(devices: int = 8) -> None:
    """Makes JAX see this many simulated TPU devices; call it before anything else uses JAX.

    Sets `JAX_PLATFORMS=cpu` and the flag of `XLA_FLAGS` that splits the CPU into devices, unless
    that is set already. Once JAX has started their number stays: a call for fewer leaves it as it
    is, and warns.

    Raises:
      BackendError: not a positive whole number, or JAX has already started with fewer devices.

    Example:
      >>> pc.simulate(2)
      >>> jax.devices()[0].platform
      'cpu'
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        rule = "it must be a whole number of 1 or more"
        raise BackendError(f"devices={devices!r}", rule, "pass 8, for example")
    _compat.prepare()
    asked = _DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    split_cpu(int(asked[-1]) if asked else devices)
    os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that this one starts
    jax.config.update("jax_platforms", "cpu")
    if jax.device_count() < devices:
        raise BackendError(
            f"{devices} simulated devices",
            f"JAX has started with {jax.device_count()}",
            "call simulate() before anything else uses JAX; XLA_FLAGS may ask for fewer",
        )
    if jax.device_count() > devices:
        logging.warning(
            "pallas_collectives: simulate(%d) has no effect: there are %d simulated devices, since "
            "JAX has started with them or XLA_FLAGS asks for them; a mesh may take some of them",
            *(devices, jax.device_count()),
        )


def split_cpu(devices: int) -> None:
    """Asks for this many CPU devices in the environment, which XLA reads when JAX looks for any.

    XLA takes the last of several such flags in `XLA_FLAGS`. JAX still chooses the platform.
    """
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["PJRT_NPROC"] = str(max(_threads(), 2 * devices))  # see `obstacle`


def obstacle() -> str:
    """Why a simulated kernel might never end in this process; "" if it will.

    Up to JAX 0.10 every simulated device holds one of the CPU client's threads while it waits for
    another, and copies into the simulator take a thread too: with none to spare, all wait.
    """
    devices = jax.device_count()
    if not _compat.callbacks_hold_threads() or max(_threads(), devices) > devices:
        return ""
    return (
        f"JAX {jax.__version__} runs {devices} simulated devices on {_threads()} threads, "
        f"and needs {devices + 1}; set PJRT_NPROC={2 * devices} before JAX starts, or call "
        "pallas_collectives.simulate()"
    )


def _threads() -> int:
    """Threads of XLA's CPU client: one per processor, or what the environment says."""
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return int(asked) if asked else len(os.sched_getaffinity(0))


def platform() -> str:
    """That of the mesh in scope, or JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
