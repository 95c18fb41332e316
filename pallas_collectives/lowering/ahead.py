"""The weights that a loop's turn needs first, asked for in the turn before.

XLA keeps the turns of a loop apart: what a turn starts it ends. So of the gathers of a layer's
weights, those that its first products need have nothing beside them, though a SparseCore could run
them beside the products of the layer before:

    turn      gathers                                         computes
    (before)  the first weights of layer 0
    0         the other weights of 0, the first ones of 1     layer 0
    1         the other weights of 1, the first ones of 2     layer 1
    ...
    n - 1     the others; the first ones of n - 1 once more   layer n - 1

This is done while a scan is lowered, which is behind derivatives, vmap and remat: they see the scan
as it was written, a backward pass is a scan of its own, and nothing more is saved for one. Values
are the same to the last bit. What is carried on from turn to turn is memory for the first weights
of a second layer.

Where a turn scatters gradients, as in a backward pass, XLA would leave what is carried on, and all
of the scatters, to its end, one behind the other. So the first scatter is held until the weights of
the next turn have come, and each one until the one before it is done: a SparseCore serves one at a
time anyhow, and each has the products between it and the next beside it. On chips where that was
seen to gain nothing such turns stay as they are (`overlaps.holds_scatters`).

A gather can be asked for so where its operand is a part of the scan's `xs`: nothing that the turn
before computes. It is where a SparseCore runs it, and the products before its first use take less
time than it does (modelled); the others find enough beside them within their turn.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn
from jax.interpreters import mlir

from pallas_collectives import _compat, catalogue
from pallas_collectives.backends import algorithms, canonical, slices
from pallas_collectives.backends.plans import IS_AHEAD, MAY_BE_AHEAD, How
from pallas_collectives.topology import chips, placement
from pallas_collectives.tuning import overlaps

# What runs another program in its place, by the parameter that holds it.
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call"), "call_jaxpr"),
    "custom_vjp_call": "call_jaxpr",
}


@functools.cache
def register() -> None:
    """Has scans lowered so."""
    scan = _compat.ruled(["scan"])["scan"]
    by_jax = _compat.lowering(scan)

    def lowering(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        length = params["length"]  # a symbol in `jax.export`, where it may be any
        if not isinstance(length, int) or length < 2 or not _holds_gathers(params["jaxpr"]):
            return by_jax(ctx, *args, **params)
        loop, mesh = Loop.of(params, len(args)), _compat.mesh_of(ctx)
        with placement.scope(placement.of_mesh(mesh)), slices.scope(mesh):
            early = loop.early()
        if not early:
            return by_jax(ctx, *args, **params)
        return mlir.lower_fun(functools.partial(loop.run, early), multiple_results=True)(ctx, *args)

    _compat.register(scan, lowering=lowering)


class _Value(NamedTuple):
    """A value that an equation names by no variable."""

    val: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """An equation of a turn, whatever it stood within; values have numbers.

    `eqn` is None for a barrier, which hands on what it reads, once all of it is there.
    """

    eqn: JaxprEqn | None
    reads: tuple[Any, ...]  # numbers, or `_Value`s
    writes: tuple[int, ...]

    @property
    def how(self) -> How | None:
        """What a gather that may be asked for ahead asks for; None of all others."""
        return _how(self.eqn) if self.eqn is not None else None

    @property
    def scatters(self) -> bool:
        """Whether it sums gradients of gathered weights, for a SparseCore."""
        if self.eqn is None or self.eqn.primitive.name not in _twins_of("reduce_scatter"):
            return False
        how: How = self.eqn.params["how"]
        return how.ahead == MAY_BE_AHEAD and not how.awaited and isinstance(self.reads[0], int)

    @property
    def hands_on(self) -> bool:
        """Whether it only hands on parts of what it reads."""
        return self.eqn is None or self.eqn.primitive.name in _compat.PARTS

    def run(self, values: dict[int, Any], how: How | None = None) -> None:
        """Adds its results; of a gather by other wishes, where these are named."""
        read = [x.val if isinstance(x, _Value) else values[x] for x in self.reads]
        if self.eqn is None:
            results = lax.optimization_barrier(read)
        elif how is not None:
            results = [self.eqn.primitive.bind(*read, **{**self.eqn.params, "how": how})]
        else:
            primitive = self.eqn.primitive
            with self.eqn.ctx.manager:
                found = primitive.bind(*read, **primitive.get_bind_params(self.eqn.params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(self.writes, results, strict=True))


def _how(eqn: JaxprEqn) -> How | None:
    if eqn.primitive.name not in _twins_of("all_gather"):
        return None
    how: How = eqn.params["how"]
    return how if how.ahead == MAY_BE_AHEAD and not how.awaited else None


@functools.cache
def _twins_of(collective: str) -> frozenset[str]:
    known = catalogue.primitives().items()
    return frozenset(f"pallas_{n}" for n, (record, _) in known if record.name == collective)


def _inner(eqn: JaxprEqn) -> Any:
    """The program that an equation runs in its place, closed; None of all others."""
    inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    return core.ClosedJaxpr(inner, ()) if isinstance(inner, core.Jaxpr) else inner


def _holds_gathers(closed: Any) -> bool:
    """Whether a turn has gathers that may be asked for ahead."""
    inner = ((eqn, _inner(eqn)) for eqn in closed.jaxpr.eqns)
    return any(_how(eqn) or (x is not None and _holds_gathers(x)) for eqn, x in inner)


def _asked_for(closed: Any) -> list[bool]:
    """Which operands of a program such gathers bring."""
    wanted: set[Any] = set()
    for eqn in reversed(closed.jaxpr.eqns):
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        inner = _inner(eqn)
        if inner is not None:
            pairs = zip(eqn.invars, _asked_for(inner), strict=True)
            wanted |= {v for v, asked in pairs if asked and isinstance(v, core.Var)}
        elif _how(eqn) or (eqn.primitive.name in _compat.PARTS and wanted & {*eqn.outvars}):
            wanted |= {*operands}
    return [v in wanted for v in closed.jaxpr.invars]


class _Flat:
    """The equations of a turn, those within calls among them where gathers are."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._new = itertools.count()

    def numbers(self, count: int) -> tuple[int, ...]:
        """Of so many new values."""
        return tuple(itertools.islice(self._new, count))

    def add(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Adds a program's equations; the numbers of its results."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, map(_Value, closed.consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return known[atom] if isinstance(atom, core.Var) else _Value(atom.val)

        for eqn in jaxpr.eqns:
            reads = tuple(map(read, eqn.invars))
            inner = _inner(eqn)
            if inner is not None and _holds_gathers(inner):
                if eqn.params.get("differentiated") and eqn.params["prevent_cse"]:
                    reads = self._behind_barriers(reads, _asked_for(inner))
                writes: Sequence[Any] = self.add(inner, reads)
            else:
                writes = self.numbers(len(eqn.outvars))
                self.steps.append(_Step(eqn, reads, tuple(writes)))
            known.update(zip(eqn.outvars, writes, strict=True))
        return list(map(read, jaxpr.outvars))

    def _behind_barriers(self, reads: Sequence[Any], asked: Sequence[bool]) -> tuple[Any, ...]:
        """What a checkpoint computes from, kept apart from the forward pass.

        What gathers bring has a barrier of its own, so that it waits for nothing else.
        """
        behind = list(reads)
        own = [[i] for i, alone in enumerate(asked) if alone]
        others = [i for i, alone in enumerate(asked) if not alone]
        for together in filter(None, [*own, others]):
            numbers = self.numbers(len(together))
            self.steps.append(_Step(None, tuple(reads[i] for i in together), numbers))
            for i, number in zip(together, numbers, strict=True):
                behind[i] = number
        return tuple(behind)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan; the values of a turn have numbers."""

    params: dict[str, Any]
    steps: list[_Step]
    consts: tuple[int, ...]
    carry: tuple[int, ...]
    x: tuple[int, ...]
    results: list[Any]  # the new carry, and y

    @classmethod
    def of(cls, params: dict[str, Any], count: int) -> "Loop":
        """The scan of a primitive with so many operands."""
        n_consts, n_carry = _compat.scan_parts(params, count)
        flat = _Flat()
        reads = flat.numbers(count)
        results = flat.add(params["jaxpr"], reads)
        carry_to = n_consts + n_carry
        parts = reads[:n_consts], reads[n_consts:carry_to], reads[carry_to:]
        return cls(params, flat.steps, *parts, results)

    def early(self) -> list[_Step]:
        """The gathers to ask for a turn ahead."""
        before, chip = 0.0, chips.current()
        if any(step.scatters for step in self.steps) and not overlaps.holds_scatters(chip):
            return []
        elapsed: list[float] = []  # what products take before each step
        for step in self.steps:
            elapsed.append(before)
            before += seconds(step.eqn, chip) if step.eqn is not None else 0.0
        found, busy = [], 0.0
        gathers = [(elapsed[self._first_use(s)], s) for s in self.steps if s.how]
        for needed, step in sorted(gathers, key=lambda pair: pair[0]):
            takes = _under_way(step, chip)
            if takes and busy + takes > needed and before > needed and self._of_xs([step]):
                found.append(step)
            else:
                busy += takes
        return found

    def _first_use(self, gather: _Step) -> int:
        """The number of the first step that computes with what a gather brings."""
        brought = {*gather.writes}
        for number, step in enumerate(self.steps):
            if brought.intersection(_numbers(step.reads)):
                if not step.hands_on:
                    return number
                brought |= {*step.writes}
        return len(self.steps) - 1

    def _of_xs(self, gathers: Iterable[_Step]) -> list[_Step]:
        """The steps that bring gathers' operands, and these; none where they need more."""
        wanted = {*gathers}
        needed = {x for gather in wanted for x in _numbers(gather.reads)}
        chain = []
        for step in reversed(self.steps):
            if step in wanted or needed.intersection(step.writes):
                if step not in wanted and not step.hands_on:
                    return []
                chain.append(step)
                needed |= {*_numbers(step.reads)}
        of_xs = needed.intersection(self.x) and not needed.intersection(self.carry)
        return chain[::-1] if of_xs else []

    def run(self, early: Sequence[_Step], *args: jax.Array) -> list[jax.Array]:
        """The results, of consts, carry and xs, with these gathers asked for a turn ahead."""
        n_consts, n_carry = len(self.consts), len(self.carry)
        consts = dict(zip(self.consts, args[:n_consts], strict=True))
        xs = dict(zip(self.x, args[n_consts + n_carry :], strict=True))
        chain, length = self._of_xs(early), self.params["length"]
        needed = {x for step in chain for x in _numbers(step.reads)}
        brought = [number for step in early for number in step.writes]
        asked = [-1 - k for k in range(len(brought))]  # the numbers of those of the next turn

        def ask(turn: Any) -> list[jax.Array]:
            values = consts | {
                number: lax.dynamic_index_in_dim(x, turn, keepdims=False)
                for number, x in xs.items()
                if number in needed
            }
            for step in chain:
                how = step.how if step in early else None
                step.run(values, how and dataclasses.replace(how, ahead=IS_AHEAD))
            return [values[number] for number in brought]

        def turn(state: Any, x: Any) -> Any:
            (carry, whole), (following, here) = state, x
            values = consts | dict(zip(self.carry, carry, strict=True)) | here
            values.update(zip(brought, whole, strict=True))
            values.update(zip(asked, ask(following), strict=True))
            latest: Sequence[int] = asked
            for step in self.steps:
                if step in early:
                    continue
                if step.scatters:
                    _Step(None, (step.reads[0], *latest), (step.reads[0], *latest)).run(values)
                    latest = step.writes
                step.run(values, _kept_here(step.how))
            results = [x.val if isinstance(x, _Value) else values[x] for x in self.results]
            return (results[:n_carry], [values[k] for k in asked]), results[n_carry:]

        backwards = self.params["reverse"]
        turns = jnp.arange(length, dtype=jnp.int32)
        following = jnp.clip(turns + (-1 if backwards else 1), 0, length - 1)
        first = ask(jnp.int32(length - 1 if backwards else 0))
        (carry, _), ys = lax.scan(
            turn,
            ([*args[n_consts : n_consts + n_carry]], first),
            (following, xs),
            length=length,
            reverse=backwards,
            unroll=self.params["unroll"],
        )
        return [*carry, *ys]


def _kept_here(how: How | None) -> How | None:
    return how and dataclasses.replace(how, ahead="")


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    return (x for x in values if not isinstance(x, _Value))


def _under_way(step: _Step, chip: chips.Chip) -> float:
    """What a gather takes on a SparseCore (modelled); 0 where none is to run it."""
    assert step.eqn is not None
    params, aval = step.eqn.params, _type(step.eqn.invars[0])
    if not overlaps.gathers_on_sparsecore(chip) or params["how"].wire is not None:
        return 0.0
    group = canonical.group_of(params["axis_name"], params["axis_index_groups"])
    nbytes = _nbytes(aval)
    found = algorithms.predicted("all_gather", nbytes, group, cuts=nbytes)
    us = min(found.values(), default=None)
    return (us or 0.0) * 1e-6 if overlaps.by_sparsecore(us, chip) else 0.0


def _type(x: Any) -> Any:
    return x.aval


def _nbytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)


def seconds(eqn: JaxprEqn, chip: chips.Chip) -> float:
    """What an equation's products take at the least, in those of loops as often as these turn."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        types = [_type(v) for v in (*eqn.invars, *eqn.outvars)]
        flops = 2.0 * types[-1].size * math.prod(types[0].shape[d] for d in contracted)
        nbytes = sum(map(_nbytes, types))
        return max(flops / chip.matrix_rate, nbytes / chip.hbm_bandwidth)
    inner = [v for value in eqn.params.values() for v in _programs(value)]
    each = sum(seconds(e, chip) for jaxpr in inner for e in jaxpr.eqns)
    return each * eqn.params["length"] if eqn.primitive.name == "scan" else each


def _programs(value: Any) -> Iterator[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _programs(each)
