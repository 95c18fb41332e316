"""Learns which of its own collectives XLA runs beside compute: `overlaps.json`, by compiling.

For each chip and collective a program is compiled in which products stand beside a collective, and
the next product takes what it brings. Where XLA starts it and lets the core go on, it runs beside
compute, as far as a model has some for it.
"""

import collections
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies

from benchmarks import compiled
from benchmarks.steps import compiling, schedule, timeline
from benchmarks.steps.programs import Program
from pallas_collectives.tuning import overlaps

_SIDE, _LAYERS = 2048, 4


def write(topologies: Sequence[str]) -> str:
    """Learns for the chips of these topologies, and writes it beside what is known of others."""
    known = overlaps.learned()._asdict() if overlaps.PATH.exists() else {}
    engines, near = dict(known.get("engines", {})), dict(known.get("near", {}))
    for found in compiled.elsewhere("benchmarks.steps.learning", list(topologies)):
        engines[found["chip"]] = found["engines"]
        near |= {found["chip"]: found["near"]} if found["near"] else {}
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    content = {**versions, "engines": engines, "near": near}
    overlaps.PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return f"{overlaps.PATH}: {content}"


def main() -> None:
    """Prints a line of JSON for each topology."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for topology in json.loads(sys.argv[1]):
        chip = timeline.chip_of(topology).name
        engines, near = _learned(topology)
        print(json.dumps({"chip": chip, "engines": engines, "near": near}), flush=True)


def _learned(topology: str) -> tuple[dict[str, str], str]:
    devices: Any = np.array(
        topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    )
    found, near = {}, ""
    for op, collective in _collectives(devices.size).items():
        program = _program(devices.size, collective)
        text = compiling.lower(program, devices, "lax").compile().as_text()
        if engine := engine_of(op, schedule.events(text)):
            found[op] = engine
        near = near or near_of(text)
    return found, near


def near_of(text: str) -> str:
    """The memory nearer than HBM that XLA's gathers bring to, and a kernel cannot; "" if none."""
    return "CMEM" if re.search(r" = \S+S\(3\)\S* all-gather\(", text) else ""


def engine_of(op: str, events: Iterable[schedule.Event]) -> str:
    """The engine that runs most of a collective's calls; "" where that is the core."""
    of = [e.collective for e in events if isinstance(e, schedule.Start)]
    engines = collections.Counter(c.engine for c in of if c.op == op)
    (engine, _), *_ = engines.most_common(1) or [(schedule.CORE, 0)]
    return "" if engine == schedule.CORE else engine


def _collectives(n: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Calls that take and give a square of `_SIDE`, or a part of it."""
    shift = [(d, (d + 1) % n) for d in range(n)]
    part = _SIDE // n
    return {
        "all_gather": lambda w: lax.all_gather(w[:part], "x", tiled=True),
        "reduce_scatter": lambda w: jnp.tile(lax.psum_scatter(w, "x", tiled=True), (n, 1)),
        "all_reduce": lambda w: lax.psum(w, "x"),
        "all_to_all": lambda w: lax.all_to_all(w, "x", 0, 0, tiled=True),
        "ppermute": lambda w: lax.ppermute(w, "x", shift),
        "ragged_all_to_all": lambda w: _exchanged(w, n),
    }


def _exchanged(w: jax.Array, n: int) -> jax.Array:
    """Equal shares to all, as a ragged exchange; its result is memory that nothing has filled."""
    share = len(w) // n
    sizes, starts = jnp.full(n, share, jnp.int32), jnp.arange(n, dtype=jnp.int32) * share
    there = jnp.broadcast_to(lax.axis_index("x") * share, (n,)).astype(jnp.int32)
    room = lax.empty(w.shape, w.dtype)
    return lax.ragged_all_to_all(w, room, starts, sizes, there, sizes, axis_name="x")


def _program(n: int, collective: Callable[[jax.Array], jax.Array]) -> Program:
    """Layers whose weights a collective brings, as independent of the products as can be."""

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(_LAYERS):
            x = jnp.tanh(x @ collective(weights[number]))
        return x

    args = (
        jax.ShapeDtypeStruct((_LAYERS, _SIDE, _SIDE), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * _SIDE, _SIDE), jnp.bfloat16),
    )
    return Program(step, args, {"x": n})


if __name__ == "__main__":
    main()
