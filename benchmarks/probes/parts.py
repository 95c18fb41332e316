"""The probes as parts of a certificate: their rows, and the machine that comes of them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jax.experimental.pallas import tpu as pltpu

from benchmarks.probes import clock, estimates, rigs
from benchmarks.probes.rig import Probe, Rig
from benchmarks.rows import Asked, Probed
from pallas_collectives.replay import Machine

SIMULATED = (
    "\nFigures of the model. Probes ran on simulated devices, where its data were looked at and "
    "times\nmean nothing: what stands as measured was found again by the probes in a replay of the "
    "model."
)
MEASURED = "\nFigures of the model: assumed, and measured here"


def figures(rig: Rig) -> Iterator[Probed]:
    """Each figure, measured; on simulated devices found again in a replay, if data are right."""
    if not rig.interpret:
        for figure in estimates.figures(rig, clock.by_hardware):
            yield _row(rig, figure)
        return
    failures: list[str] = []

    def interpreted(rig: Rig, this: Probe) -> float:
        try:
            clock.check(rig, this, clock.runner(rig, this), 3)
        except Exception as error:
            pltpu.reset_tpu_interpret_mode_state()
            failures.append(f"{type(error).__name__}: {error}")
        return clock.by_replay(rigs.modelled(rig.machine), this)

    ran = estimates.figures(rig, interpreted)
    found = estimates.figures(rigs.modelled(rig.machine), clock.by_replay)
    for _, figure in zip(ran, found, strict=True):
        error = "; ".join(failures) or figure.error
        failures.clear()
        yield _row(rig, figure._replace(error=error))


def _row(rig: Rig, figure: estimates.Figure) -> Probed:
    return Probed(
        op=figure.name,
        type="float32",
        devices=rig.size,
        machine=str(rig.machine),
        unit=figure.unit,
        assumed=figure.assumed,
        measured=figure.measured,
        how=figure.how,
        error=figure.error,
    )


def machine(figures: Sequence[Probed], asked: Sequence[Asked]) -> Machine:
    """The slice with what was measured.

    A remote DMA reaches all devices if it reached all that were asked about, others than at powers
    of two among them.
    """
    known = Machine.named(figures[0].machine)
    found = {row.op: row.measured for row in figures if row.measured is not None}
    measured = estimates.machine(rigs.modelled(known), found)
    works = {row.over: row.answer == "works" for row in asked if row.op == "reach"}
    reaches = known.generation.reaches_all
    if not all(works.values()):
        reaches = False
    elif any(re.search("[35679]|[xyz].*[xyz]", over) for over in works):
        reaches = True
    generation = dataclasses.replace(measured.generation, reaches_all=reaches)
    return dataclasses.replace(measured, generation=generation)


def summary(asked: Sequence[Asked]) -> str:
    """What the answers come to, in a line."""
    ids = [row for row in asked if row.op == "barrier id"]
    work = [int(row.over.removeprefix("id ")) for row in ids if row.answer == "works"]
    reached = [row.over for row in asked if row.op == "reach" and row.answer == "works"]
    missed = [row.over for row in asked if row.op == "reach" and row.answer != "works"]
    return (
        f"Barrier ids up to {max(work, default=-1)} work. A DMA reaches {', '.join(reached) or '-'}"
        f", and not {', '.join(missed) or '-'}."
    )
