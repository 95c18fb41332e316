"""Processes that share one GPU, where a host has no more: each is a rank, as with a GPU of its own.

    SHARED_GPU=2 python -m pytest -m gpu tests/nccl tests/multihost    tests that start processes
    python tests/helpers/shared_gpu.py 2 -m gpu tests/backends         pytest itself in each process

NCCL refuses two ranks on one GPU of one host. These name hosts of their own (NCCL_HOSTID), so it
takes them, and they send through sockets. What programs give, and whether they are captured, is
tested so; copies between GPUs' memory, and how long anything takes, are not.

The second form is for tests of programs over all devices: every process runs the same tests in the
same order, and what the first prints is shown. A value that lies in several processes is gathered
where a test looks at it. A test that fails in one process alone leaves the others waiting, until
the time limit of pytest ends them.
"""

import os
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np

_PROCESS = "SHARED_GPU_PROCESS"  # "process count port", of a process that runs pytest


def ranks() -> int:
    """How many processes with a GPU each a test can start."""
    if jax.default_backend() != "gpu":
        return 0
    return int(os.environ.get("SHARED_GPU", "0")) or jax.device_count()


def environment(process: int) -> dict[str, str]:
    """What a process adds to its environment to be a rank; nothing with a GPU of its own."""
    if "SHARED_GPU" not in os.environ:
        return {}
    return {
        "NCCL_HOSTID": f"process {process}",
        "NCCL_SOCKET_IFNAME": "lo",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def local_device(process: int) -> int:
    """The number of its GPU."""
    return 0 if "SHARED_GPU" in os.environ else process


def join() -> None:
    """Makes this process one of those that run pytest together, if it is."""
    if _PROCESS not in os.environ:
        return
    process, count, port = map(int, os.environ[_PROCESS].split())
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process, local_device_ids=[0])
    from jax._src import array
    from jax.experimental import multihost_utils

    value = array.ArrayImpl._value.fget

    def gathered(self: Any) -> np.ndarray:
        if self.is_fully_addressable or self.is_fully_replicated:
            return value(self)
        return np.asarray(multihost_utils.process_allgather(self, tiled=True))

    array.ArrayImpl._value = property(gathered)


def main(count: int, arguments: list[str]) -> int:
    """Runs pytest with these arguments in so many processes; the first one's exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["SHARED_GPU"] = str(count)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            env=os.environ | environment(p) | {_PROCESS: f"{p} {count} {port}"},
            stdout=subprocess.DEVNULL if p else None,
        )
        for p in range(count)
    ]
    try:
        return started[0].wait()
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
