"""Compiles collectives for TPUs that are not there, ours and lax's side by side.

libtpu holds the whole TPU compiler and needs no TPU for it. It runs in a process of its own: it
takes JAX on a CPU, warns on a machine without TPUs, and must not take a benchmark down with it.

Around each collective stand a producer and a consumer, as in a model. What is shown belongs to the
collective: as the very output of a program, a result that other devices write would carry a copy,
ours and lax's alike.
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import baseline, devices
from benchmarks.cases import LANES, Case, chosen, layouts
from benchmarks.rows import Compiled
from benchmarks.settings import FlagError, Settings
from pallas_collectives.errors import CollectiveError

SIZE = 256 << 20  # bytes of the full array, by default: more than any TPU's VMEM
# This process may hold libtpu's lock; the other only compiles, and touches no TPU.
_ENVIRONMENT = {
    **devices.WITHOUT_TPU,
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
INSTALL = "libtpu is not installed: `pip install -e '.[tpu]'` brings the TPU compiler"


class CompilerError(RuntimeError):
    """There is no compiler, or its process failed; what it said is on standard error."""


class Task(NamedTuple):
    """One row to be."""

    topology: str
    layout: str
    dtype: str
    size: int
    algorithm: str | None


def plan(settings: Settings, size: int = SIZE) -> list[Task]:
    """The rows to compile, for so many bytes of the full array."""
    ops = {case.op for case in settings.cases}
    of_ops = [layout for layout in layouts() if layout.op in ops]
    return [
        Task(topology, layout.name, dtype, size, algorithm)
        for topology, layout, dtype in itertools.product(
            settings.topologies, of_ops, settings.dtypes
        )
        for algorithm in chosen(layout, settings.algorithms)
    ]


def is_available() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def rows(tasks: Sequence[Task]) -> Generator[Compiled]:
    """Compiles in another process; its rows as they come.

    Raises:
      CompilerError: that process failed.
    """
    for row in elsewhere("benchmarks.compiled", tasks):
        yield Compiled(**row)


def elsewhere(module: str, tasks: Sequence[Any]) -> Generator[dict[str, Any]]:
    """What a module prints of tasks, a line of JSON each, in a process that may hold libtpu.

    Raises:
      CompilerError: that process failed.
      FlagError: it refuses a flag.
      KeyboardInterrupt: it was interrupted.
    """
    if not tasks:
        return
    with subprocess.Popen(
        (sys.executable, "-m", module, json.dumps(tasks)),
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            if "flag" in row:
                raise FlagError(*row["flag"])
            yield row
    if process.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if process.returncode:
        raise CompilerError(f"the TPU compiler's process ended with {process.returncode}")


def answer(rows: Callable[[list[Any]], Iterable[dict[str, Any]]]) -> None:
    """Prints, in that process, the rows of its tasks; a FlagError is a line, too.

    What a user's program prints, and libtpu, goes to standard error: it is no row.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is for the other process to tell
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for row in rows(json.loads(sys.argv[1])):
            print(json.dumps(row), file=out, flush=True)
    except FlagError as error:
        print(json.dumps({"flag": error.said}), file=out, flush=True)


def _row(task: Task) -> Compiled:
    pallas_collectives.reset_counts()
    topology, name, dtype, size, asked = task
    (layout,) = (layout for layout in layouts() if layout.name == name)
    base = Compiled(topology=topology, op=name, type=dtype, size=size, asked=asked or "")
    try:
        mesh = _mesh(topology)
        ours = _compile(layout, task, mesh)
        counts = pallas_collectives.counts()
        by_lax = _compile(layout, task, mesh, by_lax=True)
    except CollectiveError as error:
        return dataclasses.replace(base, refused=str(error))
    except Exception as error:  # the other rows are wanted all the same
        return dataclasses.replace(base, error=f"{type(error).__name__}: {error}")
    served = dict.fromkeys(algorithm or backend for _, backend, algorithm in counts)
    return dataclasses.replace(
        base,
        algorithm=" + ".join(served),
        devices=mesh.size,
        temp=ours.memory_analysis().temp_size_in_bytes,
        ops=summary(ours.as_text(), smallest(size)),
        lax_temp=by_lax.memory_analysis().temp_size_in_bytes,
        lax_ops=summary(by_lax.as_text(), smallest(size)),
    )


@functools.cache
def _mesh(topology: str) -> Mesh:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(described.devices), ("x",))


def smallest(size: int) -> int:
    """Elements that make an array one of the program's, and no table of positions and offsets: a
    thousandth of the full array, in 32 bits, and less in fewer.
    """
    return max(size >> 14, 64)


def _compile(layout: Case, task: Task, mesh: Mesh, *, by_lax: bool = False) -> Any:
    how = {"algorithm": task.algorithm} if task.algorithm else {}

    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("producer"):
            x = _touch(x[0])
        y = layout.by_lax(x, "x") if by_lax else layout.call(pallas_collectives, x, "x", **how)
        with jax.named_scope("consumer"):
            return _touch(y)[None]

    spec = PartitionSpec("x")
    rows = max(1, task.size // (mesh.size * LANES * jnp.dtype(task.dtype).itemsize))
    shape = (mesh.size, *layout.operand(mesh.size, rows))
    x = jax.ShapeDtypeStruct(shape, task.dtype, sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    chip = mesh.devices.flat[0].device_kind
    options = baseline.options("tpu", chip) if by_lax else {}
    return jax.jit(mapped, compiler_options=options).lower(x).compile()


def _touch(x: jax.Array) -> jax.Array:
    """An elementwise pass that XLA can neither see through nor drop."""
    return ~x if x.dtype == jnp.bool_ else x + jnp.ones((), x.dtype)


_TOUCH = {"add", "convert", "not"}
_DIMENSIONS = re.compile(r"\w\[(\d[\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (.*?) ([a-z][\w\-]*)\(")
_FREE = {"bitcast", "broadcast", "constant", "fusion", "get-tuple-element", "parameter", "tuple"}


def summary(hlo: str, smallest: int) -> str:
    """The array instructions of a compiled program, those of producer and consumer left out.

    Instructions inside fusions count, the fusions themselves do not; asynchronous pairs count once;
    arrays of less than `smallest` elements are positions and offsets, and do not count.
    """
    found: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        type_, op = match.groups()
        op = "kernel" if "tpu_custom_call" in line else re.sub("-start$", "", op)
        sizes = [math.prod(map(int, dims.split(","))) for dims in _DIMENSIONS.findall(type_)]
        is_touch = re.search(r'op_name="[^"]*(producer|consumer)/', line) and op in _TOUCH
        is_free = op in _FREE or op.endswith(("-done", "-update"))
        if max(sizes, default=0) >= smallest and not is_touch and not is_free:
            found[op] += 1
    return ", ".join(op if times == 1 else f"{times} {op}" for op, times in sorted(found.items()))


if __name__ == "__main__":
    answer(lambda tasks: (dataclasses.asdict(_row(Task(*task))) for task in tasks))
