"""The verdict of the TPU compiler itself, ahead of time, where libtpu is installed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_collectives.replay.machine import GENERATIONS
from pallas_collectives.topology import chips
from pallas_collectives.verify import asked, programs
from pallas_collectives.verify.asked import AskError, Axes


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What the compiler of one generation made of a program. `ok`: None where it was not asked."""

    generation: str
    ok: bool | None
    said: str


def require_known(generations: Sequence[str]) -> None:
    """Raises AskError for a name that is not a TPU generation's."""
    for generation in generations:
        if generation not in GENERATIONS:
            raise AskError(
                f"generation {generation!r}",
                "TPU generations are known by their topology names",
                f"name some of {', '.join(GENERATIONS)}",
            )


def ask(
    generation: str,
    axes: Axes,
    function: Callable[..., Any],
    given: Sequence[Any],
    inside: bool | None,
) -> Compilation:
    """What a generation's compiler says of the function on a slice of so many devices."""
    if importlib.util.find_spec("libtpu") is None:
        return Compilation(
            generation, None, "not asked: libtpu is not installed (pip install 'jax[tpu]')"
        )
    n = math.prod(axes.values())
    try:
        devices = _devices(generation, n)
    except Exception as error:
        return Compilation(generation, None, f"not asked: {_sentence(error)}")
    if devices is None:
        return Compilation(
            generation, None, f"not asked: no slice of {n} devices that libtpu knows"
        )
    mesh = jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    try:
        args = asked.arguments(given, n)
        program = programs.over_mesh(function, args, mesh, axes, inside)
        if program.mesh != axes:
            return Compilation(generation, None, "not asked: the function has a mesh of its own")
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.result_type(a)), program.args
        )
        jax.jit(program.function).lower(*shapes).compile()
    except Exception as error:
        return Compilation(generation, False, f"refused: {_sentence(error)}")
    return Compilation(generation, True, "compiles")


@functools.cache
def _devices(generation: str, n: int) -> np.ndarray | None:
    """The devices of the generation's smallest slice that has exactly n; None if no slice has."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu compiles only: it need not look for
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a TPU, nor have the machine alone
    for name in asked.slices(generation):
        size = int(np.prod([int(k) for k in name.partition(":")[2].split("x")]))
        if size * 2 < n or size > n:
            continue
        libtpus = chips.compilers_name(name)
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=libtpus)
        except jax.errors.JaxRuntimeError:  # some libtpus know whole hosts of 2x2 chips only
            continue
        if len(found.devices) == n:
            return np.array(found.devices)
    return None


def _sentence(error: Exception) -> str:
    """What matters of an error of the compiler's, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if re.search(r"[a-z]{3}", line)), type(error).__name__)
    return told[:300]
