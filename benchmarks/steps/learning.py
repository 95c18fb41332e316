"""Learns which of its own collectives XLA runs beside compute: `overlaps.json`, by compiling.

For each chip and collective a program is compiled in which products stand beside a collective, and
the next product takes what it brings. Where XLA starts it and lets the core go on, it runs beside
compute, as far as a model has some for it.
"""

import collections
import json
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import compiled
from benchmarks.cases import CASES, Case
from benchmarks.steps import compiling, schedule, timeline
from benchmarks.steps.programs import Program
from pallas_collectives.tuning import overlaps

_SIDE, LAYERS = 2048, 4


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


def _learned(topology: str) -> dict[str, Any]:
    devices = compiling.devices_of(topology)
    found, near = {}, ""
    for case in CASES:
        text = compiling.lower(program(devices.size, case), devices, "lax").compile().as_text()
        if engine := engine_of(case.op, schedule.events(text)):
            found[case.op] = engine
        near = near or near_of(text)
    return {"chip": timeline.chip_of(topology).name, "engines": found, "near": near}


def near_of(text: str) -> str:
    """The memory nearer than HBM that XLA's gathers bring to, and a kernel cannot; "" if none."""
    return "CMEM" if re.search(r" = \S+S\(3\)\S* all-gather\(", text) else ""


def engine_of(op: str, events: Iterable[schedule.Event]) -> str:
    """The engine that runs most of a collective's calls; "" where that is the core."""
    of = [e.collective for e in events if isinstance(e, schedule.Start)]
    engines = collections.Counter(c.engine for c in of if c.op == op)
    (engine, _), *_ = engines.most_common(1) or [(schedule.CORE, 0)]
    return "" if engine == schedule.CORE else engine


def program(n: int, case: Case) -> Program:
    """Layers whose weights a collective brings, as independent of the products as can be.

    It takes a square, or a part of it, and what it gives is as often as it fits in one. The square
    has a side of `_SIDE`, or near it where devices do not divide that.
    """
    each = max(1, _SIDE // n)
    side, (blocks, rows, _) = n * each, case.operand(n, each)

    def brought(w: jax.Array) -> jax.Array:
        operand = w[: blocks * rows].reshape(blocks, rows, side)
        result = case.by_lax(operand, "x").reshape(-1, side)
        return jnp.tile(result, (side // len(result), 1))

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(LAYERS):
            x = jnp.tanh(x @ brought(weights[number]))
        return x

    args = (
        jax.ShapeDtypeStruct((LAYERS, side, side), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * side, side), jnp.bfloat16),
    )
    return Program(step, args, {"x": n})


if __name__ == "__main__":
    compiled.answer(lambda asked: map(_learned, asked))
