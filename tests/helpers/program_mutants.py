"""Breaks the kernels' stepped programs, one small fault at a time, and has the judge judge each.

    python tests/helpers/program_mutants.py        all kernels of `stepped`, on its meshes
    python tests/helpers/program_mutants.py all_gather --devices=2,3 --search

A mutant is a program with one change: a wait, signal, barrier or credit left out or elsewhere in
the order, a semaphore, neighbour or slice in place of another. It counts as

* caught, if the judge finds a deadlock, a race, something left over, or a device that is early;
* another result, if it finds nothing, but the program leaves other bytes than the kernel's: what a
  comparison of values notices, on any schedule;
* equivalent, if it finds nothing and the program leaves the same bytes. A program without a race
  has one result on all schedules, so that is the kernel's on all of them.

`--search` goes through all schedules of each mutant and compares: a race, deadlock or leftover on
one of them that the judge does not report would be missed, one that it reports on none a false
alarm. The exit status is 1 if there is any of either.
"""

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np

import schedules
import stepped
import tokens
from pallas_collectives.replay import Machine, rules, symmetry
from pallas_collectives.replay.engine import Engine
from pallas_collectives.replay.order import Order
from pallas_collectives.replay.program import Enter, Leave, Program, Signal, Start, Wait
from pallas_collectives.replay.races import find_races
from pallas_collectives.replay.report import report

_STATES = 4_000


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a program: `columns` take the place of the kernel's."""

    fault: str
    line: str
    columns: list[Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A mutant's verdict: `found`, the kinds of findings; `same`, whether it leaves the same bytes;
    `searched`, what all schedules show, or None.
    """

    found: frozenset[str]
    same: bool
    searched: frozenset[str] | None = None

    @property
    def name(self) -> str:
        if self.found:
            return "caught"
        return "equivalent" if self.same else "another result"

    @property
    def agrees(self) -> bool:
        """Whether the search, if there was one, shows what the judge says."""
        return self.searched is None or self.searched == self.found & SEARCHED


SEARCHED = frozenset({"deadlock", "race", "left over"})


# The faults ---------------------------------------------------------------------------------------


def _own(column: Any) -> bool:
    """Whether the kernel's author wrote the instruction, not Pallas."""
    return not getattr(column, "implicit", False) and not column.source.line.startswith("JAX's")


def _kernel_end(columns: list[Any], k: int) -> int:
    return next(i for i in range(k, len(columns)) if isinstance(columns[i], Leave))


def _moved(columns: list[Any], k: int, to: int) -> list[Any]:
    """Column k before the one that is number `to` now."""
    rest = [*columns[:k], *columns[k + 1 :]]
    place = to - (to > k)
    return [*rest[:place], columns[k], *rest[place:]]


def _replaced(columns: list[Any], k: int, **fields: Any) -> list[Any]:
    return [*columns[:k], dataclasses.replace(columns[k], **fields), *columns[k + 1 :]]


def _neighbour(columns: list[Any], k: int, step: int, kinds: Any) -> int | None:
    """The next column, or the one before, that some of column k's devices take part in."""
    i = k + step
    while 0 <= i < len(columns):
        if np.intersect1d(columns[i].lanes, columns[k].lanes).size:
            return i if isinstance(columns[i], kinds) else None
        i += step
    return None


def _drop(kind: Any) -> Callable[..., Iterator[list[Any]]]:
    def mutants(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
        if isinstance(columns[k], kind):
            yield [*columns[:k], *columns[k + 1 :]]

    return mutants


def _drop_on_one(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    """One device alone leaves a wait out."""
    column = columns[k]
    if isinstance(column, Wait) and len(column.lanes) > 1:
        rest = np.arange(1, len(column.lanes))
        fields = {
            name: value[rest]
            for name in ("lanes", "sem", "value")
            if isinstance(value := getattr(column, name), np.ndarray)
        }
        yield _replaced(columns, k, **fields)


def _late_wait(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    if isinstance(columns[k], Wait):
        yield _moved(columns, k, _kernel_end(columns, k))


def _wait_after_next(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    following = _neighbour(columns, k, 1, (Start, Signal))
    if isinstance(columns[k], Wait) and following is not None:
        yield _moved(columns, k, following + 1)


def _early(kind: Any) -> Callable[..., Iterator[list[Any]]]:
    def mutants(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
        before = _neighbour(columns, k, -1, Wait)
        if isinstance(columns[k], kind) and before is not None:
            yield _moved(columns, k, before)

    return mutants


def _all_of_a_semaphore(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    """All signals of a semaphore and all waits for it: a barrier, or all credits of one kind."""
    column = columns[k]
    if isinstance(column, Signal) and isinstance(column.sem, int):
        end = _kernel_end(columns, k)
        begin = max(i for i in range(k) if isinstance(columns[i], Enter))
        inside = [
            c
            for c in columns[begin:end]
            if not (isinstance(c, (Signal, Wait)) and np.all(c.sem == column.sem))
        ]
        yield [*columns[:begin], *inside, *columns[end:]]


def _swap_semaphores(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    column = columns[k]
    if isinstance(column, Start) and column.src_sem is not None:
        yield _replaced(columns, k, src_sem=column.dst_sem, dst_sem=column.src_sem)


def _share_semaphore(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    """Two semaphores of a kernel that copies arrive on become one, its waits with them."""
    column = columns[k]
    if not isinstance(column, Start) or not isinstance(column.dst_sem, int):
        return
    others = sorted(
        {c.dst_sem for c in columns if isinstance(c, Start) and isinstance(c.dst_sem, int)}
        - {column.dst_sem}
    )
    owner = program.semaphores[column.dst_sem].kernel
    others = [s for s in others if program.semaphores[s].kernel == owner]
    if others:
        yield [_renamed(c, column.dst_sem, others[0]) for c in columns]


def _renamed(column: Any, old: int, new: int) -> Any:
    fields = {
        name: np.where(value == old, new, value) if isinstance(value, np.ndarray) else new
        for name in ("sem", "src_sem", "dst_sem")
        if (value := getattr(column, name, None)) is not None and np.any(value == old)
    }
    return dataclasses.replace(column, **fields) if fields else column


def _wrong_neighbour(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
    """What is meant for one side goes to the other."""
    column = columns[k]
    if isinstance(column, (Start, Signal)) and isinstance(column.target, np.ndarray):
        other = (2 * column.lanes - column.target) % program.n_devices
        if not np.array_equal(other, column.target):
            yield _replaced(columns, k, target=other.astype(column.target.dtype))


def _wrong_slice(side: str) -> Callable[..., Iterator[list[Any]]]:
    def mutants(program: Program, columns: list[Any], k: int) -> Iterator[list[Any]]:
        column = columns[k]
        if not isinstance(column, Start):
            return
        view = getattr(column, side)
        for other in columns:
            if other is column or not isinstance(other, Start):
                continue
            theirs = getattr(other, side)
            if (
                theirs.buffer is view.buffer
                and len(other.lanes) == len(column.lanes)
                and _plain(view.dims) == _plain(theirs.dims) is not None
                and not np.array_equal(theirs.base, view.base)
            ):
                yield _replaced(columns, k, **{side: theirs})
                return

    return mutants


def _plain(dims: Any) -> Any:
    """A view's dimensions, or None where they differ between devices."""
    return None if any(isinstance(size, np.ndarray) for size, _ in dims) else dims


FAULTS: dict[str, Callable[..., Iterator[list[Any]]]] = {
    "drop-wait": _drop(Wait),
    "drop-wait-on-one": _drop_on_one,
    "drop-signal": _drop(Signal),
    "drop-barrier-or-credits": _all_of_a_semaphore,
    "late-wait": _late_wait,
    "wait-after-next": _wait_after_next,
    "early-signal": _early(Signal),
    "early-copy": _early(Start),
    "swap-semaphores": _swap_semaphores,
    "share-semaphore": _share_semaphore,
    "wrong-neighbour": _wrong_neighbour,
    "wrong-source": _wrong_slice("src"),
    "wrong-goal": _wrong_slice("dst"),
}


def mutants_of(program: Program) -> Iterator[Mutant]:
    """One for each fault and line that it fits: of its first instruction, and of its last."""
    places: dict[tuple[str, str], list[list[Any]]] = {}
    for k, column in enumerate(program.columns):
        if _own(column):
            for fault, change in FAULTS.items():
                for columns in change(program, program.columns, k):
                    places.setdefault((fault, column.source.line), []).append(columns)
    for (fault, line), found in places.items():
        for columns in found[:1] + found[1:][-1:]:
            yield Mutant(fault, line, columns)


# Judging ------------------------------------------------------------------------------------------


def machine_of(n: int) -> Machine:
    """A pod whose chips all reach each other."""
    return Machine.named(f"v5p:{n}x1x1")


def judged(program: Program, order: Order) -> frozenset[str]:
    """The kinds of findings that replay reports for a program."""
    n = program.n_devices // program.cores
    machine, where = machine_of(n), np.arange(n)
    engine = Engine(program, machine, where, symmetry.discrete(program.n_devices, machine.n_links))
    engine.run()
    faults = rules.find_faults(program, machine.generation, machine.places(where))
    faults += rules.find_early(order)
    found = report(engine, faults, find_races(order, limit=1))
    return frozenset(
        {fault.name for fault in found.faults}
        | ({"deadlock"} if found.stuck else set())
        | ({"left over"} if found.leftovers else set())
        | ({"race"} if found.races else set())
    )


def verdict(program: Program, mutant: Mutant, *, search: bool = False) -> Verdict:
    """Judges a mutant of a program."""
    broken = dataclasses.replace(program, columns=mutant.columns)
    order = Order(broken)
    found = judged(broken, order)
    same = not found and tokens.same(tokens.results(Order(program)), tokens.results(order))
    if not search:
        return Verdict(found, same)
    try:
        outcome = schedules.search(broken, _STATES)
    except schedules.TooMany:
        return Verdict(found, same)
    return Verdict(found, same, shown(outcome))


def shown(outcome: schedules.Outcome) -> frozenset[str]:
    """The kinds of findings that some schedule shows."""
    kinds = {"race": outcome.races, "deadlock": outcome.deadlock}
    kinds |= {"left over": outcome.leftovers and not outcome.deadlock}
    return frozenset(kind for kind, is_so in kinds.items() if is_so)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help="kernels whose name holds one of these")
    parser.add_argument("--devices", help="2,3 or, of a torus, 2x2x2; else as `stepped` says")
    parser.add_argument("--search", action="store_true", help="go through all schedules, too")
    parser.add_argument("--list", action="store_true", help="print each that is not caught")
    asked = parser.parse_args(arguments)
    count: Counter[tuple[str, str]] = Counter()
    searched = wrong = 0
    for name, kernel in stepped.kernels().items():
        if asked.name and not any(part in name for part in asked.name):
            continue
        for mesh in asked.devices.split(",") if asked.devices else kernel.meshes:
            program = stepped.program_of(name, *map(int, mesh.split("x")))
            for mutant in mutants_of(program) if program else ():
                found = verdict(program, mutant, search=asked.search)
                count[mutant.fault, found.name] += 1
                searched += found.searched is not None
                wrong += not found.agrees
                if not found.agrees or (asked.list and found.name != "caught"):
                    line = re.sub(r"\s+", " ", mutant.line)
                    shows = "" if found.agrees else f"  schedules: {sorted(found.searched)}"
                    print(name, mesh, mutant.fault, line, found.name, sorted(found.found), shows)
    kinds = ("caught", "another result", "equivalent")
    print(f"{'fault':24}" + "".join(f"{kind:>16}" for kind in kinds))
    for fault in FAULTS:
        print(f"{fault:24}" + "".join(f"{count[fault, kind]:16}" for kind in kinds))
    total = [sum(count[fault, kind] for fault in FAULTS) for kind in kinds]
    print(f"{'all':24}" + "".join(f"{n:16}" for n in total))
    if asked.search:
        print(f"all schedules of {searched} of these were searched: {wrong} verdicts differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
