"""A clock that only goes on while calls are held: times are exact, however busy the machine is."""

import math
import types

import jax
import numpy as np
import pytest

from benchmarks import timing


class HeldClock:
    """The clock of `benchmarks.timing`; each device that holds a value adds to its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: list[float] = []
        now = types.SimpleNamespace(perf_counter=lambda: math.fsum(self._held))
        monkeypatch.setattr(timing, "time", now)

    def hold(self, x: jax.Array, seconds: float) -> jax.Array:
        """x, so many seconds later."""

        def held(value: np.ndarray) -> np.ndarray:
            self._held.append(seconds)
            return value

        return jax.pure_callback(held, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
