"""Tables of times made up for tests, and what is chosen by them."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import harness
import pallas_collectives as pc
from pallas_collectives.backends import fastest as by_times
from pallas_collectives.catalogue import COLLECTIVES
from pallas_collectives.catalogue.records import EVERYONE, PARTNERS, RING
from pallas_collectives.topology import chips, placement, ring_orders, torus_axes
from pallas_collectives.topology.groups import Group
from pallas_collectives.topology.placement import Places
from pallas_collectives.topology.ring_orders import Torus
from pallas_collectives.tuning import choice, tables

V5P = chips.BY_NAME["v5p"]


def entry(**changes: Any) -> dict[str, Any]:
    us = {"bidirectional": [9.0, 20.0], "direct": [5.0, 50.0]}
    plain = {"op": "all_gather", "chip": chips.SIMULATED.name, "torus": "line", "devices": 2}
    return {**plain, "bytes": [4096, 65536], "us": us, **changes}


def content(*entries: Any, **changes: Any) -> dict[str, Any]:
    head = {"kind": "measured", "jax": jax.__version__, "about": "a test's"}
    return {**head, "entries": list(entries or [entry()]), **changes}


def written(path: Path, *entries: Any, **changes: Any) -> Path:
    path.write_text(json.dumps(content(*entries, **changes)))
    return path


def slow_direct() -> dict[str, Any]:
    return entry(us={"unidirectional": [1.0, 2.0], "direct": [5.0, 50.0]})


def served(**how: Any) -> set[str | None]:
    """The algorithms that a gather of one 4 KiB block on two simulated devices was built with."""
    x = np.zeros((2, 8, 128), np.float32)
    run = harness.per_device(lambda a: pc.all_gather(a, "x", **how), harness.mesh(2))
    jax.block_until_ready(run(x))
    found = {algorithm for _, _, algorithm in pc.counts()}
    pc.reset_counts()
    return found


def of_partners_alone(op: str) -> bool:
    """Whether its kernels write to the partners of a shift."""
    return reaches(op) == {PARTNERS}


def stays_off_lines(op: str) -> bool:
    """Whether each of its kernels would write from one end of a line to the other."""
    return reaches(op) <= {PARTNERS, RING, EVERYONE}


def reaches(op: str) -> set[Any]:
    """Reaches of a collective's algorithms."""
    return {algorithm.reach for algorithm in COLLECTIVES[op].algorithms}


def chosen(op: str, block: int, n: int, chip: Any = V5P, **on: str) -> str:
    reach = reachable(op, n, chip)
    return fastest(op, block, n, chip, reach, **on)


def fastest(op: str, block: int, n: int, chip: Any, *among: Any, **on: Any) -> str:
    return choice.fastest_first(op, choice.predict(op, block, n, chip, *among, **on))[0]


def reachable(op: str, n: int, chip: Any, torus: str | None = None) -> tuple[str, ...]:
    """The algorithms that a group of all n devices can choose from, of one axis or of several."""
    if torus is None or " " not in torus:
        closes = (torus or choice.torus_of(n, chip)) == "ring"
        there, group = Torus((n,), (closes,)), Group(("x",), (n,), line=not closes)
    else:
        sizes, word = tables.sizes_and_word(torus)
        closing = chip.wraps(sizes) if word == "cylinder" else (word == "torus",) * len(sizes)
        there = Torus(sizes, tuple(size > 2 and c for size, c in zip(sizes, closing, strict=True)))
        names = tuple("abcd"[: len(sizes)])
        group = Group(names, sizes)
        row = [there.place(number) for number in range(group.size)]
        order = ring_orders.ring_order(there, [row])
        along = torus_axes.on_wires(group, there, [row])
        group = dataclasses.replace(group, order=order, torus=along)
    row = [there.place(number) for number in range(group.size)]
    with on_torus(Places(there, tuple(row)), dict(zip(group.axes, group.sizes, strict=True))):
        return by_times.reachable(op, group, chip)


@contextlib.contextmanager
def on_torus(where: Places, sizes: dict[str, int]) -> Iterator[None]:
    """Within this context a mesh of such axes is in scope, and its devices lie there."""
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    with jax.sharding.use_abstract_mesh(mesh), placement.scope(where):
        yield
