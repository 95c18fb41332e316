"""A compiled program's schedule: what its core does, in order, and what runs beside it.

XLA's text of a scheduled program holds each computation's instructions in their order, with the
cycles that it estimates for each. Collectives come in four forms:

    form                                       engine        beside what lies between
    all-gather, ..., a kernel that sends       core          nothing: the core waits
    fusion of an all-reduce and a slice        core          nothing: XLA's reduce-scatter
    x-start ... x-done                         DMA           start and done
    async-collective-start ... -done           DMA           start and done (v5e: fusions that carry
                                                             the collective on, step by step)
    call-start, call-update ... call-done      SparseCore    update, which hands over operands, and
                                                             done

A kernel that sends nothing is the core's own work, of which XLA knows operations and bytes, and no
cycles.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from pallas_collectives import catalogue

CORE, DMA, SPARSECORE = "core", "DMA", "SparseCore"

# XLA's name -> the canonical collective: the words of XLA's text, which no record has.
_OPS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "all_reduce",
}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)", re.DOTALL)
_HEADER = re.compile(r"(ENTRY )?%?(\S+) \(.*\) -> .* \{$", re.DOTALL)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SENDS = '"has_communication":true'  # in the attributes of a kernel
_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective in a program.

    Attributes:
      name: the instruction's.
      op: the canonical collective; "" for a kernel that is not ours.
      kernel: the kernel's name where one serves; "" for XLA's own.
      engine: `CORE`, `DMA` or `SPARSECORE`.
      nbytes: bytes of one device's result.
      devices: that take part together; 0 where the text does not say.
      axes: the mesh axes that they lie along, where the text names them.
      groups: the numbers of such devices, where it lists them; of a permute, the first pair's.
      shape: the shape of a kernel's first result.
      operands: the shapes of a kernel's operands.
      cycles: of the products that a kernel computes while it sends.
    """

    name: str
    op: str
    kernel: str
    engine: str
    nbytes: int
    devices: int
    axes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = ()
    operands: tuple[tuple[int, ...], ...] = ()
    cycles: int = 0


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The core computes; `packs`: for collectives alone (see `steps.packing`)."""

    name: str
    cycles: int
    packs: bool = False


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective sets out, and the core goes on; `engine` CORE: it waits for the end at once."""

    key: str
    collective: Collective
    name: str = dataclasses.field(default="", compare=False)  # the instruction's


@dataclasses.dataclass(frozen=True)
class Done:
    """The core waits for the collective that set out under this key."""

    key: str
    name: str = dataclasses.field(default="", compare=False)  # the instruction's


@dataclasses.dataclass(frozen=True)
class Loop:
    """Events that happen so many times."""

    times: int
    events: tuple[Any, ...]
    name: str = dataclasses.field(default="", compare=False)  # the instruction's


Event = StepWork | Start | Done | Loop
Cycles = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    type: str
    op: str
    rest: str  # operands and attributes

    def named(self, attribute: str) -> str:
        """The computation that an attribute names; "" if none."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def operands(self) -> list[str]:
        """The instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])


def events(hlo: str, cycles: Cycles = lambda flops, nbytes: 0) -> tuple[Event, ...]:
    """The events of a scheduled program, as the text of its compiled form has them.

    cycles: of a kernel that sends nothing, by its operations and the bytes of its memory traffic.
    """
    computations, entry = parsed(hlo)
    return tuple(_Walk(computations, cycles).of(entry))


def needs(hlo: str) -> dict[str, list[str]]:
    """The operands of each instruction, whose name is one in the whole program."""
    computations, _ = parsed(hlo)
    return {i.name: i.operands for found in computations.values() for i in found}


def parsed(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, in their order, and the name of the first to run."""
    computations: dict[str, list[Instruction]] = {}
    lines: list[str] = []
    entry = name = ""
    for line in [*hlo.splitlines(), "}"]:
        if header := _HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}") and not line.startswith("}}"):
            matches = map(_INSTRUCTION.match, lines)
            computations[name] = [Instruction(*m.groups()) for m in matches if m]
        elif line.startswith(("  %", "  ROOT %")):
            lines.append(line)
        elif lines:
            lines[-1] += line  # an attribute of several lines
    return computations, entry


class _Walk:
    def __init__(self, computations: dict[str, list[Instruction]], cycles: Cycles) -> None:
        self._computations, self._cycles = computations, cycles

    def of(self, computation: str) -> Iterator[Event]:
        """The events of a computation."""
        for instruction in self._computations[computation]:
            yield from self._event(instruction)

    def _event(self, i: Instruction) -> Iterator[Event]:
        plain = re.sub(r"-(start|update|done)$", "", i.op)
        ends = i.op[len(plain) :]
        if i.op == "while":
            turn = tuple(self.of(i.named("body")))
            yield Loop(self._times(i.named("condition")), turn, i.name)
        elif i.op == "conditional":
            names = re.findall(r"%([\w.\-]+)", i.rest.partition("branch_computations=")[2])
            branches = [tuple(self.of(name)) for name in names if name in self._computations]
            yield from max(branches, key=cycles_of, default=())
        elif plain in ("call", "async") and ends:
            yield from self._asynchronous(i, ends)
        elif i.op == "call":
            yield from self.of(i.named("to_apply"))
        elif plain in _OPS:
            yield from self._own(i, ends)
        elif i.op == "fusion" and (inner := self._collective_fusion(i)):
            start, chain, collective = inner
            ours = self._by_xla(collective, DMA)
            yield Start(chain, ours, i.name) if start else Done(chain, i.name)
        elif i.op == "fusion" and (summed := self._fused_sum(i)):
            yield Start(i.name, summed, i.name)
            yield Done(i.name, i.name)
        elif "tpu_custom_call" in i.rest and i.op == "custom-call":
            kernel = _by_kernel(i, CORE)
            cost = _COST.search(i.rest)
            flops, nbytes = map(int, cost.groups()) if cost else (0, kernel.nbytes)
            if kernel.op or _SENDS in i.rest:  # then the bytes are those of the wire
                kernel = dataclasses.replace(kernel, cycles=self._cycles(flops, 0))
                yield Start(i.name, kernel, i.name)
                yield Done(i.name, i.name)
            else:
                yield StepWork(i.name, self._cycles(flops, nbytes))
        elif cycles := _CYCLES.search(i.rest):
            yield StepWork(i.name, int(cycles[1]))

    def _own(self, i: Instruction, ends: str) -> Iterator[Event]:
        """A collective of XLA's whose instructions are its own."""
        if ends == "-done":
            yield Done(i.operands[0], i.name)
            return
        yield Start(i.name, self._by_xla(i, DMA if ends else CORE), i.name)
        if not ends:
            yield Done(i.name, i.name)

    def _asynchronous(self, i: Instruction, ends: str) -> Iterator[Event]:
        """A call of a computation, which runs elsewhere."""
        if ends == "-done":
            yield Done(i.operands[0], i.name)
            return
        starts = i if ends == "-start" else self._by_name(i.operands[0])
        handed_over = ends == "-update" or i.operands or not i.type.startswith("((), ()")
        if not handed_over:
            return
        engine = SPARSECORE if '"sparsecore"' in starts.rest else DMA
        for inner in self._called(starts):
            if inner.op in _OPS:
                yield Start(i.name, self._by_xla(inner, engine), i.name)
            elif "tpu_custom_call" in inner.rest:
                yield Start(i.name, _by_kernel(inner, engine), i.name)

    def _called(self, i: Instruction) -> Iterator[Instruction]:
        """What a call runs, through calls: a SparseCore's scalar subcore calls the vector ones."""
        for inner in self._computations.get(i.named("to_apply") or i.named("calls"), []):
            yield inner
            if inner.op == "call-start":
                yield from self._called(inner)

    def _by_name(self, name: str) -> Instruction:
        of_all = (i for instructions in self._computations.values() for i in instructions)
        return next(i for i in of_all if i.name == name)

    def _collective_fusion(self, i: Instruction) -> tuple[bool, str, Instruction] | None:
        """Whether a fusion starts or ends a collective, its chain, and the collective."""
        inner = self._computations.get(i.named("calls"), [])
        ends = [re.search(r'"AsyncCollective(Start|Done)"', x.rest) for x in inner]
        found = next((end[1] for end in ends if end), None)
        if found is None:
            return None
        collective = next(x for x in inner if x.op in _OPS)
        chain = re.search(r'chain_id="(\w+)"', collective.rest)
        return found == "Start", f"chain {chain[1] if chain else ''}", collective

    def _fused_sum(self, i: Instruction) -> Collective | None:
        """The collective of a fusion that is all of it: a sum and the part that is wanted of it.

        Other fusions of v5e hold a collective that they carry on beside their own work; those have
        cycles.
        """
        inner = self._computations.get(i.named("calls"), [])
        found = next((x for x in inner if x.op == "all-reduce"), None)
        if found is None or _CYCLES.search(i.rest):
            return None
        of_sum = self._by_xla(found, CORE)
        part = sum(_arrays(i.type))
        op = "reduce_scatter" if part < of_sum.nbytes else of_sum.op
        return dataclasses.replace(of_sum, name=i.name, op=op, nbytes=part)

    def _by_xla(self, i: Instruction, engine: str) -> Collective:
        op = _OPS[re.sub("-(start|done)$", "", i.op)]
        # The type of a start holds the operand before the result.
        arrays = _arrays(i.type)
        nbytes = arrays[min(1, len(arrays) - 1)] if i.op.endswith("-start") else sum(arrays)
        said = _devices(i.rest), _axes(i.rest), _groups(i.rest)
        return Collective(i.name, op, "", engine, nbytes, *said)

    def _times(self, condition: str) -> int:
        """How often a loop turns: the number that its counter is compared with."""
        constants = [
            int(i.rest.partition(")")[0])
            for i in self._computations[condition]
            if i.op == "constant" and i.type.startswith("s32[]")
        ]
        return max(constants, default=1)


def _by_kernel(i: Instruction, engine: str) -> Collective:
    found = re.search(r'op_name="[^"]*?([^/"]+)/(?:pallas_call|mpmd_map)', i.rest)
    kernel = found[1] if found else i.name
    ops = [op for op in catalogue.COLLECTIVES if kernel.startswith((op, f"matmul_{op}"))]
    _, shape = next(_typed(i.type), ("", ()))
    operands = re.search(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}", i.rest)
    return Collective(
        *(i.name, max(ops, key=len, default=""), kernel, engine, _arrays(i.type)[0], 0),
        shape=shape,
        operands=tuple(shape for _, shape in _typed(operands[1])) if operands else (),
    )


def _typed(types: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each array."""
    for dtype, dims in _ARRAY.findall(types):
        yield dtype, tuple(int(d) for d in dims.split(",") if d)


def cycles_of(found: tuple[Event, ...]) -> int:
    """Cycles of the core's own work in all events."""
    return sum(
        e.cycles if isinstance(e, StepWork) else e.times * cycles_of(e.events)
        for e in found
        if isinstance(e, StepWork | Loop)
    )


_BITS = re.compile(r"(?:pred|[a-z]+?(\d+))")


def _arrays(type_: str) -> list[int]:
    """Bytes of each array of a type."""
    sizes = []
    for dtype, shape in _typed(type_):
        bits = _BITS.match(dtype)
        width = int(bits[1] or 8) if bits else 8
        sizes.append(math.prod(shape) * width // 8)
    return sizes or [0]


_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


def _axes(rest: str) -> tuple[str, ...]:
    """The mesh axes of the groups that an instruction names."""
    named = _MESH.search(rest)
    return tuple(re.findall(r"'(\w+)'", named[2])) if named else ()


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    """The devices of each group that an instruction lists, or of its first pair."""
    listed = re.search(r"replica_groups=\{\{([\d,{}]+)\}\}", rest)
    listed = listed or re.search(r"source_target_pairs=\{\{([\d,]+)\}", rest)
    return tuple(tuple(map(int, g.split(","))) for g in listed[1].split("},{")) if listed else ()


def _devices(rest: str) -> int:
    """How many devices take part together, from the groups that an instruction names."""
    if named := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(shaped[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    pairs = re.search(r"source_target_pairs=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", rest)
    return len(pairs[1].split("},{")) if pairs else 0
