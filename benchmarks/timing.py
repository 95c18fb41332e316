"""How long a collective takes: on the device, or with its dispatch.

Device time: a chain of collectives runs inside one program, each waiting for the one before through
one row of 128 elements that it overwrites in its operand, and the time of a chain of one is taken
off. With dispatch: each collective is a program of its own, started one after another without
waiting, as code outside of `jit` would.
"""

import contextlib
import functools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax import lax

from benchmarks import devices, settings
from benchmarks.problem import Problem, Step
from pallas_collectives.errors import CollectiveError

ITERS = flags.DEFINE_integer(
    "iters", 20, "Calls in one timed chain.", 1, settings.MOST_RUNS, short_name="n"
)
# Calls in one turn of a chain's loop on GPUs. XLA makes CUDA graphs of five operations or more in a
# row, as a model's step has them; one call and its link to the next are fewer.
IN_A_ROW = 10
SAMPLES = 9  # their median is the time, the fastest and the slowest its spread


def clocked(program: Callable[..., Any], *operands: object) -> float:
    """Seconds until one run's results are there."""
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return time.perf_counter() - start


def difference(few: Callable[[], float], many: Callable[[], float], more: int) -> float:
    """Seconds of one call, by how much longer `many` takes than `few`, of `more` calls fewer.

    They run right behind each other, so that both meet the same load of the host.
    """
    short = few()
    return (many() - short) / more


def median(seconds: Sequence[float]) -> float:
    """The median of samples.

    Raises:
      CollectiveError: it makes no sense as a time.
    """
    found = statistics.median(seconds)
    if found <= 0:
        rule = "a time must be longer than dispatch takes to vary"
        raise CollectiveError(f"{1e6 * found:.3g} us", rule, "raise --iters")
    return found


def device_seconds(
    problem: Problem, call: Step, warmup: int, iters: int, *, by_xla: bool = False
) -> list[float]:
    """Seconds of one collective on the device, several times over."""

    def chain(length: int) -> Step:
        def link(_: object, x: jax.Array) -> jax.Array:
            y = call(x)
            row = y[(slice(0, 1),) * (y.ndim - 1)].reshape(1, 1, -1)
            return lax.dynamic_update_slice(x, row.astype(x.dtype), (0, 0, 0))

        unroll = min(length, IN_A_ROW) if devices.kind() == "gpu" else 1
        links = functools.partial(lax.fori_loop, 0, length, link, unroll=unroll)
        return problem.compile(links, by_xla=by_xla)

    x = problem.operands

    def clock(program: Step) -> float:
        nonlocal x
        start = time.perf_counter()
        x = jax.block_until_ready(program(x))
        return time.perf_counter() - start

    one, many = (functools.partial(clock, chain(length)) for length in (1, 1 + iters))
    for _ in range(warmup):
        one(), many()
    return [difference(one, many, iters) for _ in range(SAMPLES)]


def dispatched_seconds(
    problem: Problem, call: Step, warmup: int, iters: int, *, by_xla: bool = False
) -> list[float]:
    """Seconds from one dispatch to the next, the last result waited for, several times over."""
    program = problem.compile(call, by_xla=by_xla)

    def clock(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            result = program(problem.operands)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / times

    for _ in range(warmup):
        clock(iters)
    return [clock(iters) for _ in range(SAMPLES)]


def traced(directory: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """JAX's profiler round what follows, into a folder of that name; "" for none."""
    if not directory:
        return contextlib.nullcontext()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the device's timeline is wanted, and little in its way
    folder = str(Path(directory) / re.sub(r"[^\w.]+", "-", name))
    return jax.profiler.trace(folder, profiler_options=options)
