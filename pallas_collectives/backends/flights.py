"""Exchanges under way on NVIDIA GPUs: a primitive that starts one, and one that ends it.

Between the GPUs of one process pushes go to the result (`nccl.copies`), between those of several to
mailboxes (`nccl.posts`). The memory of what is under way is XLA's, so XLA must neither use it again
nor copy it between the two. The second primitive takes operand and result of the first, and gives
the result in its place. That is checked on each call: bytes that lie elsewhere are an error.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat, nccl
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import Dim, Tangent
from pallas_collectives.backends import counters, ordered
from pallas_collectives.backends import nccl as on_gpus
from pallas_collectives.backends.nccl import Addresses
from pallas_collectives.backends.plans import MOVES, How, Plan
from pallas_collectives.nccl import copies, dtypes, ffi, mailboxes, posts, tape
from pallas_collectives.nccl.tape import Address
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group

# Exchanges that a program may have under way at a time; one more waits for the first to be read.
_AT_A_TIME = 4
_names = itertools.count()


@dataclasses.dataclass(frozen=True)
class Flight:
    """What one exchange is.

    Attributes:
      op: "gather", operand (...) to (n, ...); "exchange", (n, ...) to (n, ...); or "permute".
      group: the devices.
      name: a number that joins its halves while they are traced. No program has it in its text,
        which is the same each time a function is traced: see `_number`.
      perm: (source, target) pairs, of a permutation.
      to: what a gather's result is typed as, "varying" or "invarying".
      order: how often it was differentiated. XLA would take a start of tangents for one of the same
        numbers, if both were of one exchange, and copy what is under way for the second `done`.
    """

    op: str
    group: Group
    name: int
    perm: tuple[tuple[int, int], ...] = ()
    to: str = "varying"
    order: int = 0

    def plan(self, rank: int, nbytes: int) -> copies.PushPlan:
        """What a rank does; nbytes: of its operand."""
        if self.op == "permute":
            writers = tuple(s for s, t in self.perm if t == rank != s)
            pushes = tuple(copies.Push(t, 0, 0, nbytes) for s, t in self.perm if s == rank)
            written = any(t == rank for _, t in self.perm)
            clear = 0 if written else nbytes
            return copies.PushPlan(writers, pushes, (0,) * len(writers), nbytes, clear)
        n = self.group.size
        block = nbytes if self.op == "gather" else nbytes // n
        ranks = [(rank + distance) % n for distance in range(n)]
        pushes = tuple(
            copies.Push(p, 0 if self.op == "gather" else p * block, rank * block, block)
            for p in ranks
        )
        targets = tuple(p * block for p in ranks[1:])
        return copies.PushPlan(tuple(ranks[1:]), pushes, targets, block)

    def blocks(self, operand: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the blocks that set out apart, of an operand of this shape: (k, ...)."""
        return operand if self.op == "exchange" else (1, *(operand or (1,)))

    def by_lax(self, x: jax.Array) -> jax.Array:
        """What comes of it."""
        groups = self.group.index_groups
        options: dict[str, Any] = {
            "axis_index_groups": None if groups is None else [*map(list, groups)]
        }
        if self.op == "permute":
            return lax.ppermute(x, self.group.axes, self.perm)
        if self.op == "gather":
            return lax.all_gather(x, self.group.axes, to=self.to, **options)
        return lax.all_to_all(x, self.group.axes, 0, 0, tiled=True, **options)

    def by_nccl(self, x: jax.Array) -> jax.Array:
        """The same, at once."""
        how = How("nccl")
        if self.op == "permute":
            return on_gpus.ppermute(x, self.group, perm=self.perm, how=how)
        if self.op == "gather":
            return on_gpus.all_gather(x[None], self.group, axis=0, how=how)
        return on_gpus.all_to_all(x, self.group, split_axis=0, concat_axis=0, how=how)

    @property
    def differentiated(self) -> "Flight":
        """The exchange of tangents."""
        return dataclasses.replace(self, order=self.order + 1)

    @property
    def transposed(self) -> "Flight":
        """The exchange of cotangents; those of a gather are added up when they are there."""
        if self.op == "permute":
            return dataclasses.replace(self, perm=tuple((t, s) for s, t in self.perm))
        return dataclasses.replace(self, op="exchange", to="varying")


def serve(how: How) -> bool:
    """Whether a collective that is served so can be under way beside other work.

    If GPUs of several processes cannot reach each other's memory, which its lowering finds out, it
    is done at its start.
    """
    return how.backend == "nccl" and how.algorithm is None


def in_place(how: How) -> bool:
    """Whether what comes is besides written to the result at once: between one process's GPUs."""
    return serve(how) and jax.process_count() == 1


def moves(x: jax.Array) -> bool:
    """Whether x has bytes to move: not where it is empty, or its elements share bytes."""
    try:
        dtypes.moved(jnp.result_type(x))
    except TypeError:
        return False
    return np.size(x) > 0


def new(
    op: str,
    group: Group,
    perm: Iterable[tuple[int, int]] = (),
    to: str = "varying",
) -> Flight:
    """An exchange that may be under way beside the others of its program."""
    return Flight(op, group, next(_names), tuple((s, t) for s, t in perm), to)


def start(flight: Flight, x: jax.Array, *after: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Starts it once x and `after` are there: what `done` takes, and a token, int32[1].

    The token is 0, which XLA does not know: what takes it comes after the start.
    """
    why = "it was started, to be done later"
    counters.note(Plan(op=MOVES[flight.op], backend="nccl", algorithm="copies", why=why))
    *started, token = _start_p.bind(x, *after, flight=flight)
    return started, token


def done(flight: Flight, started: Sequence[jax.Array], *after: jax.Array) -> jax.Array:
    """What came of it, waited for once `after` is there."""
    return _done_p.bind(*started, *after, flight=flight)


def beside(flight: Flight, x: jax.Array) -> list[jax.Array]:
    """Zeros, and the operand, in place of what a start gives, for one that moves x otherwise.

    Their tangents are those of a start.
    """
    return _beside_p.bind(x, flight=flight)


# A start gives the memory under way, its operand, and a token. A gather gives zeros of its result's
# shape besides, which nobody reads: in the backward pass they are the place of an exchange's
# operand.
_start_p = core.Primitive("nccl_start")
_start_p.multiple_results = True
_done_p = core.Primitive("nccl_done")
_beside_p = core.Primitive("nccl_beside")
_beside_p.multiple_results = True


def _parts(flight: Flight) -> int:
    """How many arrays `done` takes."""
    return 3 if flight.op == "gather" else 2


@_start_p.def_abstract_eval
def _start_types(x: Aval, *after: Aval, flight: Flight) -> list[Any]:
    del after
    result = jax.make_jaxpr(flight.by_lax)(x).out_avals[0]
    spare = [result] if flight.op == "gather" else []
    return [result, x, *spare, _compat.array_type((1,), np.int32)]


@_beside_p.def_abstract_eval
def _beside_types(x: Aval, *, flight: Flight) -> list[Any]:
    return _start_types(x, flight=flight)[:-1]


@_done_p.def_abstract_eval
def _done_type(under_way: Aval, *others: Aval, flight: Flight) -> Aval:
    del others, flight
    return under_way


def _start_lowered(
    ctx: mlir.LoweringRuleContext, x: ir.Value, *after: ir.Value, flight: Flight
) -> Sequence[Any]:
    result, operand, *spare, token = ctx.avals_out
    lower = _lowering(ctx, flight, "start", operand)
    if lower is None:
        return _lowered_at_once(ctx, x, *after, flight=flight)
    # XLA would compute what is cheap once for each half, or lay it out twice.
    once = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
    (x,) = once(ctx.replace(avals_in=[operand], avals_out=[operand]), x)
    under_way, started = lower(ctx.avals_in, [result, token], x, *after)
    return [under_way, x, *_zeros(ctx, spare), started]


def _zeros(ctx: mlir.LoweringRuleContext, like: Sequence[Any]) -> Sequence[Any]:
    made = mlir.lower_fun(
        lambda: [jnp.zeros(s.shape, s.dtype) for s in like], multiple_results=True
    )
    return made(ctx.replace(avals_in=[], avals_out=like))


def _beside_lowered(ctx: mlir.LoweringRuleContext, x: ir.Value, *, flight: Flight) -> Sequence[Any]:
    first, _, *spare = ctx.avals_out
    zeros, *others = _zeros(ctx, [first, *spare])
    return [zeros, x, *others]


def _lowered_at_once(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, flight: Flight
) -> Sequence[ir.Value]:
    """A start that is also the end, where GPUs do not reach each other's memory."""
    result, _, *spare, _ = ctx.avals_out

    def whole(x: jax.Array, *after: jax.Array) -> list[jax.Array]:
        come = flight.by_nccl(x).reshape(result.shape)
        first = jnp.ravel(come)[:1]  # the token comes after the result, too
        token = jnp.where(first == first, 0, 0).astype(jnp.int32)
        return [come, x, *(jnp.zeros(s.shape, s.dtype) for s in spare), token]

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *operands)


def _done_lowered(
    ctx: mlir.LoweringRuleContext,
    under_way: ir.Value,
    x: ir.Value,
    *others: ir.Value,
    flight: Flight,
) -> Sequence[Any]:
    spare = _parts(flight) - 2
    types = [*ctx.avals_in[:2], *ctx.avals_in[2 + spare :]]
    lower = _lowering(ctx, flight, "done", types[1], in_place=True)
    if lower is None:
        return [under_way]
    return lower(types, ctx.avals_out, under_way, x, *others[spare:])


def _number(ctx: mlir.LoweringRuleContext, flight: Flight) -> int:
    """Its number in the order of the program: exchanges take turns in the slots for them.

    Processes of one program, and runs on other days, which share its compiled form, so agree. Texts
    have it, for XLA would take two starts with one operand for the same, and copy what is under way
    if their ends differ.
    """
    numbers = _compat.kept_in_module(ctx, "pallas_collectives flights", dict)
    return numbers.setdefault((flight.name, flight.order), len(numbers))


def _lowering(
    ctx: mlir.LoweringRuleContext, flight: Flight, half: str, x: Any, in_place: bool = False
) -> Callable[..., Any] | None:
    """(types of operands and results, *operands) -> results of a call of one half.

    None where GPUs do not reach each other's memory.
    """
    nbytes, number = x.size * x.dtype.itemsize, _number(ctx, flight)
    # Who does it on each device; for which of the two ways; and what.
    at: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    members = placement.device_groups(_compat.mesh_of(ctx), flight.group)
    for devices in members:
        if any(d.process_index == jax.process_index() for d in devices):
            group = nccl.get(devices, name="copies", uses=())
            try:
                at.update(_workers(group, flight, number, nbytes))
            except mailboxes.MailboxError as error:
                _tell(str(error))
                return None
    ids = [[d.id for d in devices] for devices in members]
    text = f"{flight.op} {half} {nbytes} {number} {flight.perm} over {ids}"

    def enqueue(
        worker: Any, ordinal: int, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        what = at[ordinal][1]
        if half == "start":
            worker.start(*what, text, inputs[0], outputs[0], outputs[1], stream)
        else:
            worker.finish(*what, inputs[1], inputs[0], stream)

    def function(stream: int, ordinal: int, inputs: Addresses, outputs: Addresses) -> None:
        enqueue(at[ordinal][0], ordinal, stream, inputs, outputs)

    def recorded(ordinal: int) -> tape.Tape:
        gaps = tape.inputs(2), tape.outputs(2)
        return tape.record(at[ordinal][0], lambda c: enqueue(c, ordinal, tape.STREAM, *gaps))

    def lower(
        takes: Sequence[Any], gives: Sequence[Any], *operands: ir.Value
    ) -> Sequence[ir.Value]:
        return ffi.lower(
            ctx.replace(avals_in=takes, avals_out=gives), text, function, *operands,
            graph=False, has_effect=False, aliases={0: 0} if in_place else {},
            tapes={ordinal: recorded(ordinal) for ordinal in at},
        )  # fmt: skip

    return lower


def _in_one_process(group: nccl.Group) -> bool:
    return len(group.communicators) == len(group.devices)


@functools.cache
def _tell(why: str) -> None:
    logging.warning("pallas_collectives: collectives are done where they are started: %s", why)


def _workers(
    group: nccl.Group, flight: Flight, number: int, nbytes: int
) -> dict[int, tuple[Any, tuple[Any, ...]]]:
    """What exchanges on this process's devices of a group, by ordinal, and how it is told to."""
    if _in_one_process(group):
        return {
            copier.ordinal: (copier, (slot, flight.plan(rank, nbytes)))
            for rank, (copier, slot) in copies.slots(group, number % _AT_A_TIME).items()
        }
    return {
        ordinal: (post, (flight.plan(post.rank, nbytes),))
        for ordinal, post in posts.get(group, number, flight.plan(0, nbytes).nbytes).items()
    }


# Rules: both halves are linear in what they move, and `after` moves nothing.


def _start_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, flight: Flight
) -> tuple[Any, Any]:
    outs = _start_p.bind(*primals, flight=flight)
    if isinstance(tangents[0], ad.Zero):
        return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    *moved, token = _start_p.bind(tangents[0], flight=flight.differentiated)
    return outs, [*moved, ad.Zero(jax.typeof(token).to_tangent_aval())]


def _beside_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, flight: Flight
) -> tuple[Any, Any]:
    outs = beside(flight, *primals)
    if isinstance(tangents[0], ad.Zero):
        return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    return outs, start(flight.differentiated, tangents[0])[0]


def _start_transpose(
    cotangents: Sequence[Any], x: ad.UndefinedPrimal, *after: jax.Array, flight: Flight
) -> list[Any]:
    under_way, operand = cotangents[0], cotangents[_parts(flight) - 1]
    nothing = [None] * len(after)
    if isinstance(under_way, ad.Zero):
        return [ad.Zero(x.aval.to_ct_aval()), *nothing]
    if flight.to == "invarying":  # as lax: everyone has the whole cotangent already
        me = lax.axis_index(flight.group.axes)
        return [lax.dynamic_index_in_dim(under_way, me, keepdims=False), *nothing]
    blocks = done(flight.transposed, [under_way, operand])
    if flight.op != "gather":
        return [blocks, *nothing]
    return [ordered.added(blocks, flight.group.size, 0)[0], *nothing]


def _done_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, flight: Flight
) -> tuple[Any, Any]:
    out = _done_p.bind(*primals, flight=flight)
    moved = tangents[: _parts(flight)]
    if isinstance(moved[0], ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    there = map(ad.instantiate_zeros, moved)
    return out, _done_p.bind(*there, flight=flight.differentiated)


def _done_transpose(cotangent: Tangent, *operands: Any, flight: Flight) -> list[Any]:
    parts = _parts(flight)
    nothing = [None] * (len(operands) - parts)
    if isinstance(cotangent, ad.Zero):
        return [*(ad.Zero(o.aval.to_ct_aval()) for o in operands[:parts]), *nothing]
    if flight.to == "invarying":
        return [cotangent, *(ad.Zero(o.aval.to_ct_aval()) for o in operands[1:parts]), *nothing]
    (under_way, x), _ = start(flight.transposed, cotangent)
    if flight.op != "gather":
        return [under_way, x, *nothing]
    return [under_way, ad.Zero(operands[1].aval.to_ct_aval()), x, *nothing]


def _batch(
    primitive: core.Primitive, operands: Sequence[jax.Array], dims: Sequence[Dim], *, flight: Flight
) -> tuple[Any, Any]:
    """A mapped dimension lies behind the devices' dimension, which a gather's operand lacks."""
    first, behind = {"gather": (0, 1), "exchange": (1, 1), "permute": (0, 0)}[flight.op]
    if primitive is _done_p:  # what it takes came of a start, all of it batched or none
        return _done_p.bind(*operands, flight=flight), dims[0]
    spare = [behind] if flight.op == "gather" else []
    places: list[int | None] = [behind, first, *spare]
    x = operands[0]
    if dims[0] is None:  # only of `after`
        places = [None] * len(places)
    else:
        x = jnp.moveaxis(x, dims[0], first)
    if primitive is _beside_p:
        return beside(flight, x), places
    return _start_p.bind(x, *operands[1:], flight=flight), [*places, None]


_compat.register(_start_p, lowering=_start_lowered, jvp=_start_jvp, transpose=_start_transpose)
_compat.register(_done_p, lowering=_done_lowered, jvp=_done_jvp, transpose=_done_transpose)
_compat.register(_beside_p, lowering=_beside_lowered, jvp=_beside_jvp)
for _p in (_start_p, _done_p, _beside_p):
    _compat.register(_p, batch_alone=functools.partial(_batch, _p))
