"""What could hang a TPU: which devices a DMA and a signal reach, and how many barriers there are.

Each question is a program. They are asked in order of risk, by a process of their own, which says
before each what it is about to do: so one that hangs is known and ended, and the next process goes
on behind it.

    python -m benchmarks.probes.risky --out=FILE [--first=N] [--simulate=N]
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.probes import clock, wire
from benchmarks.probes.rig import TILE, Probe, Rig, probe
from benchmarks.rows import Asked
from pallas_collectives.annotations import Ref, Semaphore

IDS = (15, 19, 20, 23, 24, 25, 27, 28, 29, 30, 31)  # of barriers; ids count from 0
FAR_IDS = (32, 47, 63)
MOST_OFFSETS = 24  # that are asked about
_MEETING_ID = 14


class Question(NamedTuple):
    """What is asked: `kind` is "barrier id", of `number`, or "reach", from device 0 to `number`."""

    kind: str
    number: int
    over: str


def questions(rig: Rig) -> list[Question]:
    """All of them, in order of risk."""
    ids, far_ids = (
        [Question("barrier id", n, f"id {n}") for n in numbers] if rig.axes else []
        for numbers in (IDS, FAR_IDS)
    )
    offsets = [asked for *_, asked in sorted(_offsets(rig))[:MOST_OFFSETS]]
    if rig.interpret:  # a simulated device has as many ids as one likes, and reaches all
        return [*ids[:1], *offsets[:3]]
    return [*ids, *offsets, *far_ids]


def _offsets(rig: Rig) -> Iterator[tuple[bool, bool, int, Question]]:
    """(not along one axis, not by a power of two, hops, the question) for each chip but the first;
    on a ring those nearer the other way round are like others, and left out.
    """
    machine = rig.machine
    for place in itertools.product(*(range(n) for n in machine.shape)):
        sides = zip(place, machine.shape, machine.wraps, strict=True)
        steps = [step for step in place if step]
        if not steps or any(wraps and at > n // 2 for at, n, wraps in sides):
            continue
        chip = int(np.ravel_multi_index(place, machine.shape))
        over = "".join(f"+{step}{'xyz'[axis]}" for axis, step in enumerate(place) if step)
        asked = Question("reach", chip * machine.generation.devices_per_chip, over)
        yield len(steps) > 1, any(step & (step - 1) for step in steps), sum(steps), asked


def reach(rig: Rig, target: int, over: str) -> Probe:
    """Device 0 sends a tile to `target`, and then a signal.

    All devices meet before: a token goes from neighbour to neighbour along a path through all of
    them, and back. Each waits for one thing at a time, so one semaphore does.
    """
    path = path_through(rig)
    at = np.argsort(path)
    before = np.where(at > 0, path[at - 1], -1)
    after = np.where(at < len(path) - 1, path[np.minimum(at + 1, len(path) - 1)], -1)
    size = rig.size

    def kernel(
        _: Ref,
        peers_ref: Ref,
        x_ref: Ref,
        o_ref: Ref,
        send_sem: Semaphore,
        recv_sem: Semaphore,
        told: Semaphore,
    ) -> None:
        me = lax.axis_index("x")
        before, after = peers_ref[me], peers_ref[size + me]
        token = pltpu.get_barrier_semaphore()

        def passed(source: jax.Array, goal: jax.Array) -> None:
            pl.when(source >= 0)(lambda: pl.semaphore_wait(token, 1))
            pl.when(goal >= 0)(lambda: pl.semaphore_signal(token, 1, device_id={"x": goal}))

        passed(before, after)
        passed(after, before)
        pltpu.sync_copy(x_ref, o_ref.at[pl.ds(0, TILE)])
        sent = pltpu.make_async_remote_copy(
            x_ref,
            o_ref.at[pl.ds(TILE, TILE)],
            send_sem,
            recv_sem,
            device_id={"x": jnp.int32(target)},
        )

        @pl.when(me == 0)
        def send() -> None:
            sent.start()
            sent.wait_send()
            pl.semaphore_signal(told, 1, device_id={"x": jnp.int32(target)})

        @pl.when(me == target)
        def receive() -> None:
            sent.wait_recv()
            pl.semaphore_wait(told, 1)

    def expected(count: int, x: np.ndarray) -> np.ndarray:
        o = np.concatenate([x, np.full_like(x, np.nan)], 1)
        o[target, TILE:] = x[0]
        return o

    return probe(
        rig,
        f"reach_{over}",
        kernel,
        rows=TILE,
        out_rows=2 * TILE,
        expected=expected,
        guess=1e-6,
        scratch=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR],
        peers=np.concatenate([before, after]),
        barrier=_MEETING_ID,
    )


def barrier(rig: Rig, number: int) -> Probe:
    """Neighbours meet at the barrier semaphore of an id, and exchange a tile behind it."""
    made = wire.stream(rig, rig.axes[:1], in_flight=1, rows=TILE, barrier=number)
    return dataclasses.replace(made, name=f"barrier_{number}")


def path_through(rig: Rig) -> np.ndarray:
    """All devices, each next to the one before: to and fro along each axis."""
    places: list[tuple[int, ...]] = [()]
    for n in (*rig.machine.shape, rig.machine.generation.devices_per_chip):
        places = [
            (*place, i)
            for number, place in enumerate(places)
            for i in (range(n) if number % 2 == 0 else range(n - 1, -1, -1))
        ]
    sizes = (*rig.machine.shape, rig.machine.generation.devices_per_chip)
    return np.array([np.ravel_multi_index(place, sizes) for place in places])


def answered(rig: Rig, question: Question) -> Asked:
    """The row of one question."""
    base = Asked(op=question.kind, type="float32", over=question.over, devices=rig.size)
    try:
        made = (
            barrier(rig, question.number)
            if question.kind == "barrier id"
            else reach(rig, question.number, question.over)
        )
        clock.check(rig, made, clock.runner(rig, made), 1)
    except clock.ProbeError as error:
        return dataclasses.replace(base, answer=f"wrong: {error}")
    except Exception as error:  # the compiler's or the runtime's no
        return dataclasses.replace(base, answer=f"refused: {str(error).splitlines()[0][:200]}")
    return dataclasses.replace(base, answer="works")


# The process that asks, and the one that watches it ----------------------------------------------


def watched(
    command: Sequence[str], out: Path, patience: float, until: float, done: int = 0
) -> Iterator[Asked]:
    """Rows as the process of `command` writes them to `out`; one that hangs is ended.

    Args:
      command: the program, which takes --out and --first.
      out: its file: a line of JSON before each question, and one with its answer after it.
      patience: seconds for one question, and for the start.
      until: when to stop, by `time.monotonic()`.
      done: how many questions are answered already.
    """
    while True:
        out.unlink(missing_ok=True)
        # A session of its own: Ctrl-C is for those who watch.
        ask = [*command, f"--out={out}", f"--first={done}"]
        with subprocess.Popen(ask, start_new_session=True) as child:
            asking: Asked | None = None
            try:
                for now, answer in _heard(child, out, patience, until):
                    asking = now
                    if answer:
                        done += 1
                        yield answer
            finally:
                hung = child.poll() is None
                child.kill()
        out.unlink(missing_ok=True)
        if time.monotonic() > until or (asking is None and child.returncode == 0):
            return  # time is up, or all is answered
        fate = "hung" if hung else f"ended the process ({child.returncode})"
        if asking is None:
            error = f"the process {fate}, and asked nothing"
            yield Asked(op=f"question {done}", type="float32", error=error)
            return
        done += 1
        yield dataclasses.replace(asking, answer=fate)


def _heard(
    child: subprocess.Popen[bytes], out: Path, patience: float, until: float
) -> Iterator[tuple[Asked | None, Asked | None]]:
    """(what is being asked now, an answer) for each line, until the process ends or is silent."""
    seen, quiet_at = 0, time.monotonic() + patience
    while time.monotonic() < min(quiet_at, until):
        over = child.poll() is not None
        lines = out.read_text().splitlines(keepends=True) if out.exists() else []
        for line in (line for line in lines[seen:] if line.endswith("\n")):
            seen, quiet_at = seen + 1, time.monotonic() + patience
            ((what, said),) = json.loads(line).items()
            row = Asked(**said)
            yield (row, None) if what == "asking" else (None, row)
        if over:
            return
        time.sleep(0.05)


def main(argv: Sequence[str]) -> int:
    """Asks from the question --first on, and says so in --out."""
    from benchmarks import devices
    from benchmarks.probes import rigs

    parser = argparse.ArgumentParser(prog="python -m benchmarks.probes.risky")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--simulate", type=int, default=8)
    wanted = parser.parse_args(argv)
    devices.prepare(wanted.simulate)
    rig = rigs.here(wanted.simulate)
    with wanted.out.open("w") as file:
        for question in questions(rig)[wanted.first :]:
            base = Asked(op=question.kind, type="float32", over=question.over, devices=rig.size)
            _say(file, "asking", base)
            _say(file, "answer", answered(rig, question))
    return 0


def _say(file: TextIO, what: str, row: Asked) -> None:
    file.write(json.dumps({what: dataclasses.asdict(row)}) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
