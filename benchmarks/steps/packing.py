"""What a core computes for its collectives alone: their packing.

A collective costs its core more than the wait: buffers are filled with zeros, blocks laid out as it
wants them, results moved to where they are read, tables of ragged exchanges reckoned. Without the
collective a step would not do that. By one rule, for XLA's collectives and for ours, such is
an instruction

    named    that bears a collective's name: XLA gives it to what it makes of one, and
             `backends.serving` to all that ours computes around a kernel
    moving   that fills, copies or arranges, and whose every reader is a collective, its packing, or
             again one that moves; or that moves so what none but these bring, and bears no name: a
             layout that a product wants of what came bears the product's

What XLA fuses is one instruction: it is named if all bears such a name that it computes. So where
packing is fused with a product, a mask or a slice of the program's, that is the program's work,
lax's and ours alike.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from benchmarks.steps import schedule
from benchmarks.steps.schedule import Done, Event, Instruction, Loop, Start, StepWork
from pallas_collectives import catalogue

_MOVES = frozenset({"broadcast", "concatenate", "copy", "pad", "reshape", "slice", "transpose"})
# What takes no time of the core's, and hands on one array as it is.
_FREE = frozenset({"bitcast", "copy-done", "copy-start", "get-tuple-element"})
_CONSTANT = frozenset({"constant", "iota"})
_NAME = re.compile(r'op_name="([^"]*)"')


def marked(events: Sequence[Event], hlo: str) -> tuple[Event, ...]:
    """The events, with `packs` for the work that is packing.

    Args:
      events: the events of the program.
      hlo: its text, as `schedule.events` takes it.
    """
    collectives = frozenset(_instructions(events))
    computations, _ = schedule.parsed(hlo)
    found = {
        name
        for inner in computations.values()
        for name in _Computation(computations, inner, collectives).packing()
    }
    return tuple(_marked(events, found))


def _marked(events: Sequence[Event], found: set[str]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Loop):
            yield dataclasses.replace(event, events=tuple(_marked(event.events, found)))
        elif isinstance(event, StepWork):
            yield dataclasses.replace(event, packs=event.name in found)
        else:
            yield event


def _instructions(events: Sequence[Event]) -> Iterator[str]:
    """Those that start or end a collective."""
    started = {event.key for event in events if isinstance(event, Start)}
    for event in events:
        if isinstance(event, Loop):
            yield from _instructions(event.events)
        elif isinstance(event, Start) or (isinstance(event, Done) and event.key in started):
            yield event.name


class _Computation:
    def __init__(
        self,
        computations: dict[str, list[Instruction]],
        inner: Sequence[Instruction],
        collectives: frozenset[str],
    ) -> None:
        self._computations, self._collectives = computations, collectives
        self._of = {i.name: i for i in inner}
        self._readers: dict[str, list[str]] = {name: [] for name in self._of}
        for i in inner:
            for operand in i.operands:
                self._readers.get(operand, []).append(i.name)

    def packing(self) -> Iterator[str]:
        """The names of instructions that pack."""
        for name in self._of:
            if self._is_named(name) or (
                self._moves(name) and (self._feeds(name) or self._is_brought(name))
            ):
                yield name

    @functools.cache  # noqa: B019 - lives as long as its computation
    def _is_named(self, name: str) -> bool:
        computes = [x for x in self._inside(name) if x.op not in _FREE and _NAME.search(x.rest)]
        return all(map(_bears_name, [self._of[name], *computes]))

    def _moves(self, name: str) -> bool:
        i, inside = self._of[name], self._inside(name)
        if i.op != "fusion":
            return i.op in _MOVES
        return bool(inside) and all(x.op in _MOVES | _FREE for x in inside)

    def _inside(self, name: str) -> list[Instruction]:
        """What a fusion computes."""
        i = self._of[name]
        inside = self._computations.get(i.named("calls"), []) if i.op == "fusion" else []
        return [x for x in inside if x.op not in _CONSTANT | {"parameter"}]

    def _is_for_collectives(self, name: str) -> bool:
        return name in self._collectives or self._is_named(name)

    def _hands_on(self, name: str) -> bool:
        return self._of[name].op in _FREE or self._moves(name)

    @functools.cache  # noqa: B019 - lives as long as its computation
    def _feeds(self, name: str) -> bool:
        """Whether all readers of a result are collectives, or what hands it on to these alone."""
        readers = self._readers[name]
        return bool(readers) and all(
            self._is_for_collectives(reader) or (self._hands_on(reader) and self._feeds(reader))
            for reader in readers
        )

    def _is_brought(self, name: str) -> bool:
        return not _NAME.search(self._of[name].rest) and self._is_fed(name)

    @functools.cache  # noqa: B019 - lives as long as its computation
    def _is_fed(self, name: str) -> bool:
        """Whether all that it reads is collectives' results, or what hands on these alone."""
        read = [o for o in self._of[name].operands if o in self._of]
        read = [o for o in read if self._of[o].op not in _CONSTANT]
        return bool(read) and all(
            self._is_for_collectives(o) or (self._hands_on(o) and self._is_fed(o)) for o in read
        )


def _bears_name(i: Instruction) -> bool:
    """Whether a collective is on the path of each operation that it lists."""
    found = _NAME.search(i.rest)
    paths = found[1].split(";") if found else [""]
    return all(not _names().isdisjoint(path.split("/")) for path in paths)


@functools.cache
def _names() -> frozenset[str]:
    """What lax calls collectives: each primitive's name."""
    return frozenset(catalogue.primitives())
