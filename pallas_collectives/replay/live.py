"""Programs whose course depends on time: a kernel that reads a semaphore's value is stepped while
it is simulated.

Each device steps its own jaxpr in a thread that stops at every read until the engine has reached
that moment and answers. No devices are taken as alike here, and races are not looked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
from jax.extend import core

from pallas_collectives.annotations import AnyMesh
from pallas_collectives.replay.equations import compile_equation
from pallas_collectives.replay.program import Kernel, Read, Semaphore
from pallas_collectives.replay.stepper import Stepper
from pallas_collectives.replay.values import Lanes
from pallas_collectives.replay.views import Buffer
from pallas_collectives.topology.chips import Chip

_END = object()


class _Abandoned(Exception):
    """The simulation ended (in a deadlock) while this device waited for an answer."""


class LiveProgram:
    """Like `program.Program`, its instructions made on demand; `of_device` is sent the value after
    each `Read`.
    """

    def __init__(
        self, mesh: AnyMesh, generation: Chip, body: core.Jaxpr | core.ClosedJaxpr, args: list[Any]
    ) -> None:
        self._mesh, self._generation, self._body, self._args = mesh, generation, body, args
        self._shared = Stepper(mesh, generation, compile_equation)
        self._steppers: list[Stepper] = []
        self._lock = threading.Lock()
        self.n_devices = self._shared.n_devices
        self.cores = 1
        self.unmodelled: dict[str, int] = {}
        self.columns: list[Any] = []

    @property
    def buffers(self) -> list[Buffer]:
        return self._shared.buffers

    @property
    def semaphores(self) -> list[Semaphore]:
        return self._shared.semaphores

    @property
    def kernels(self) -> list[Kernel]:
        """Those of the device that came furthest: all call the same."""
        return max((stepper.kernels for stepper in self._steppers), key=len, default=[])

    def of_device(self, device: int) -> Generator[tuple[int, int, Any], int | None, None]:
        """(column number, 0, column) of each instruction of `device`, as it comes to be."""
        columns: queue.Queue[Any] = queue.Queue()
        answers: queue.Queue[int | None] = queue.Queue()
        threading.Thread(target=self._step, args=(device, columns, answers), daemon=True).start()
        try:
            while True:
                column = columns.get()
                if column is _END:
                    return
                if isinstance(column, BaseException):
                    raise column
                self.columns.append(column)
                answer = yield len(self.columns) - 1, 0, column
                if isinstance(column, Read):
                    answers.put(answer)
        finally:
            answers.put(None)

    def _step(
        self, device: int, columns: queue.Queue[Any], answers: queue.Queue[int | None]
    ) -> None:
        def read_semaphore(sem: Lanes) -> int:
            answer = answers.get()
            if answer is None:
                raise _Abandoned
            return answer

        stepper = Stepper(
            self._mesh, self._generation, compile_equation, columns.put, read_semaphore
        )
        stepper.share_memory(self._shared, self._lock)
        self._steppers.append(stepper)
        lanes = np.array([device])
        try:
            stepper.run(self._body, self._args, lanes)
            with self._lock:
                self.unmodelled = dict(stepper.unmodelled)
            columns.put(_END)
        except _Abandoned:
            pass
        except (
            BaseException
        ) as error:  # raised again where the engine asks for the next instruction
            columns.put(error)
