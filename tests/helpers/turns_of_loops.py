"""Loops whose turns begin collectives of other turns: faked times, and what reports say of them."""

from typing import Any

import jax
import pytest
from jax import lax

import pallas_collectives as pc
from benchmarks.steps import schedule
from pallas_collectives.lowering import collective_times, questions

SAYS = "a loop's turn asks for it for the next one"
LEAVES = "a loop's turn leaves it to the next one"
BARRIERS_SINCE = "0.0.50"  # older compilers put no products beside some scatters


def fake(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """Products take a second each, and collectives that many."""
    patch.setattr(questions, "seconds", lambda eqn, _: float(eqn.primitive.name == "dot_general"))
    patch.setattr(collective_times, "under_way", lambda step, chip: seconds)
    patch.setattr(collective_times, "on_core", lambda step: seconds)


def whole(w: jax.Array) -> jax.Array:
    return lax.all_gather(w, "x", tiled=True)


def asked(says: str = SAYS) -> int:
    """How many collectives of the last context another turn begins, kernels or lax's."""
    report = pc.override_report()
    return sum(line.times for line in (*report.replaced, *report.left) if says in line.why)


def meanwhile(loop: schedule.Loop, op: str) -> list[int]:
    """The core's cycles while each collective of a turn is under way."""
    order = [getattr(e, "key", "") for e in loop.events]
    begins = [i for i, e in enumerate(loop.events) if is_start_of(e, op)]
    ends = [order.index(order[i], i + 1) for i in begins]
    return [schedule.cycles_of(loop.events[i:j]) for i, j in zip(begins, ends, strict=True)]


def is_start_of(event: Any, op: str) -> bool:
    return isinstance(event, schedule.Start) and event.collective.op == op


def is_loop_with(event: Any, op: str) -> bool:
    return isinstance(event, schedule.Loop) and any(is_start_of(e, op) for e in event.events)
