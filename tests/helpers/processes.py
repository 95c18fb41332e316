"""Real Python processes under jax.distributed, for tests.

    with Processes(4) as processes:
        outcomes = processes.run(function, argument, timeout=30)    # on all of them at once
        assert [outcome.value for outcome in outcomes] == ...

`function` is a module-level function of a test module; it is called in every process, with JAX
ready and `jax.process_index()` its own. A function that raises makes an outcome with an `error`;
a process that dies or does not answer makes `run` fail, with what all of them printed.
Processes stay for the next `run`, so a test module starts them once. Only they are ever signalled.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import shared_gpu

START_TIMEOUT = 90.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function came to in one process: its value, or its error and traceback."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    def unwrap(self) -> Any:
        """The value; raises if there is no value."""
        assert self.error is None, self.traceback
        return self.value


class Processes:
    """`count` processes that have met through jax.distributed on loopback.

    devices: simulated CPU devices of each, or one number per process; None leaves the platform
      alone, and process i takes accelerator i.
    initialize: further arguments of jax.distributed.initialize.
    """

    def __init__(
        self,
        count: int,
        *,
        devices: int | Sequence[int] | None = 1,
        env: Mapping[str, str] = {},
        initialize: Mapping[str, Any] = {},
    ) -> None:
        self._logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 (closed in close)
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        coordinator = f"127.0.0.1:{_free_port()}"
        each = devices if isinstance(devices, Sequence) else [devices] * count
        for index, log in enumerate(self._logs):
            ours, theirs = Pipe()
            settings = {
                "coordinator_address": coordinator,
                "num_processes": count,
                "process_id": index,
                "initialization_timeout": int(START_TIMEOUT),
                "shutdown_timeout_seconds": 5,
            }
            if each[index] is None:
                settings["local_device_ids"] = [shared_gpu.local_device(index)]
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=_environment(index, each[index]) | dict(env),
                )
            )
            theirs.close()
            self._pipes.append(ours)
            ours.send(settings | dict(initialize))
        try:
            self._collect(range(count), START_TIMEOUT, "jax.distributed.initialize")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._processes)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float,
        on: Sequence[int] | None = None,
        during: Callable[[], object] | None = None,
    ) -> list[Outcome]:
        """`function(*args)` in all processes at once, or in those of `on`; their outcomes in order.

        timeout: seconds until all have answered.
        during: called here once all have been told.
        """
        on = range(len(self)) if on is None else on
        self.tell(function, *args, on=on)
        if during:
            during()
        return self._collect(on, timeout, function.__qualname__)

    def tell(self, function: Callable[..., Any], *args: Any, on: Sequence[int]) -> None:
        """Like `run`, without waiting: for processes that will not live to answer."""
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        for index in on:
            self._pipes[index].send_bytes(call)

    def signal(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to one of them."""
        self._processes[index].send_signal(number)

    def output(self) -> str:
        """What they have printed so far."""
        return "".join(
            f"--- process {index}, exit status {process.poll()}\n{_text(log)}"
            for index, (process, log) in enumerate(zip(self._processes, self._logs, strict=True))
        )

    def close(self) -> None:
        """Ends them all, at once: their shutdown is no part of any test."""
        for process in self._processes:
            process.kill()  # SIGTERM would only be a preemption notice to them
            process.wait()
        for closable in (*self._pipes, *self._logs):
            closable.close()

    def _collect(self, on: Sequence[int], timeout: float, what: str) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        outcomes = []
        for index in on:
            try:
                if not self._pipes[index].poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                outcomes.append(pickle.loads(self._pipes[index].recv_bytes()))
            except (EOFError, OSError) as error:  # TimeoutError is an OSError
                fate = "did not answer"
                if not isinstance(error, TimeoutError):
                    fate = "died"
                    self._processes[index].wait(timeout=10)  # its pipe closes a little earlier
                raise AssertionError(
                    f"{what}: process {index} {fate} in {timeout:g} s\n{self.output()}"
                ) from None
        return outcomes


def _environment(index: int, devices: int | None) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    if devices is not None:
        env["JAX_PLATFORMS"] = "cpu"
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return env
    return env | shared_gpu.environment(index)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _text(log: Any) -> str:
    size = os.fstat(log.fileno()).st_size
    # Not seek and read: the process writes at the same file position.
    return os.pread(log.fileno(), size, 0).decode(errors="replace")


# ---- in the process itself ----


def _serve(connection: Connection) -> None:
    import importlib

    import jax

    jax.distributed.initialize(**connection.recv())
    connection.send_bytes(pickle.dumps(Outcome(len(jax.devices()))))
    with contextlib.suppress(EOFError):
        while True:
            module, name, args = pickle.loads(connection.recv_bytes())
            try:
                outcome = Outcome(getattr(importlib.import_module(module), name)(*args))
            except BaseException as error:
                outcome = Outcome(error=error, traceback=traceback.format_exc())
            connection.send_bytes(_pickled(outcome))


def _pickled(outcome: Outcome) -> bytes:
    try:
        text = pickle.dumps(outcome)
        pickle.loads(text)  # an exception with arguments of its own may fail only here
        return text
    except Exception:
        what = repr(outcome.value) if outcome.error is None else repr(outcome.error)
        return pickle.dumps(Outcome(error=RuntimeError(what), traceback=outcome.traceback))


if __name__ == "__main__":
    import processes  # so that Outcome has the same name here as in the test

    processes._serve(Connection(int(sys.argv[1])))
    os._exit(0)  # not through jax.distributed's shutdown barrier: others may be dead
