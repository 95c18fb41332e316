"""The devices to run on, and what a reader of the results must know of them."""

import glob
import importlib.metadata
import importlib.util
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from benchmarks import baseline, peaks
from benchmarks.settings import AXES, FlagError
from pallas_collectives import _compat, nccl, simulation
from pallas_collectives.topology import chips

# Tells libtpu that this machine is not a TPU VM: it then neither asks a metadata server nor warns.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
_REPOSITORY = Path(__file__).resolve().parent.parent


def prepare(simulated: int, distributed: bool | None = None) -> None:
    """Starts JAX: on several hosts with the other processes, else on this machine's devices.

    Unlike `pallas_collectives.simulate` it leaves JAX the choice between simulated and real ones.

    Args:
      simulated: TPU devices to simulate where there is no accelerator.
      distributed: whether to call `jax.distributed.initialize()`; None where a cluster of several
        processes is found.
    """
    if distributed or (distributed is None and _compat.in_cluster()):
        jax.distributed.initialize()
    if not may_be_tpus():
        for name, value in WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    # Multicast over NVLink can hang hosts that others share.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    simulation.split_cpu(simulated)


def may_be_tpus() -> bool:
    """Whether the machine has devices that could be TPUs; asks the file system, not JAX."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))


def speaks() -> bool:
    """Whether this process prints and writes: the first of all."""
    return jax.process_index() == 0


def kind() -> str:
    """ "tpu", "gpu", or "simulated" for CPU devices that run the kernels in interpret mode."""
    found = jax.devices()[0].platform
    return "simulated" if found == "cpu" else found


def check_gpus(command: str, timed: str) -> None:
    """Refuses a command, and what it times, where there are not two GPUs."""
    if kind() != "gpu" or jax.device_count() < 2:
        rule = f"it times {timed}, and JAX finds {jax.device_count()} devices of kind {kind()}"
        raise FlagError(command, rule, "run it where two GPUs are")


def backends(kind: str) -> tuple[str, ...]:
    """The backends to run by default: the platform's own, and lax beside it."""
    match kind:
        case "tpu":
            return ("pallas", "xla")
        case "gpu":
            has_nccl = importlib.util.find_spec("pallas_collectives.backends.nccl")
            return ("nccl", "xla") if has_nccl else ("xla",)
        case _:
            return ("pallas",)


def make_mesh(sizes: Sequence[int]) -> Mesh:
    """A mesh of the first devices, laid along the wires where JAX knows them.

    Raises:
      FlagError: there are fewer devices.
    """
    needed, devices = math.prod(sizes), jax.devices()
    if needed > len(devices):
        rule = f"it needs {needed} devices and there are {len(devices)}"
        raise FlagError(f"--mesh={'x'.join(map(str, sizes))}", rule, "name a smaller mesh")
    names = AXES[: len(sizes)]
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes), names, automatic, devices=devices[:needed])


def lax_options(mesh: Mesh) -> dict[str, bool]:
    """The compiler options for lax's own collectives on these devices."""
    return baseline.options(kind(), mesh.devices.flat[0].device_kind)


def environment(mesh: Mesh) -> dict[str, Any]:
    """What the results depend on beside the flags: chips, topology, versions, commit."""
    device = mesh.devices.flat[0]
    coordinates = [tuple(d.coords) for d in mesh.devices.flat if hasattr(d, "coords")]
    packages = ("jax", "jaxlib", "libtpu", "numpy", "nccl4py", "pallas-collectives")
    return {
        "chip": device.device_kind,
        "platform": kind(),
        "host_cpus": os.cpu_count(),
        "devices": mesh.size,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "coordinates": coordinates,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages} | {"nccl": _nccl()},
        "link_gbps": _link(device),
        "lax_options": lax_options(mesh),
        "platform_version": device.client.platform_version,
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_", "PALLAS_COLLECTIVES_"))
        },
        "command": sys.argv[1:],
    }


def _link(device: jax.Device) -> float | None:
    """GB/s one way of one ICI link, or of all NVLinks of a GPU; None where that is not known."""
    if device.platform == "gpu":
        return peaks.nvlink(device.device_kind)
    chip = chips.listed(device.device_kind)
    return chip.link_bandwidth / 1e9 if chip else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    """The version of the NCCL that GPUs are served by."""
    if kind() != "gpu":
        return None
    try:
        return nccl.load().version
    except nccl.LibraryError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", *arguments), cwd=_REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
