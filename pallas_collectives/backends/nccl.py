"""Canonical collectives on NVIDIA GPUs: NCCL's, on XLA's own stream, inside `jax.jit`.

Each is one call out of the program (`nccl.ffi`), which only puts work on the stream: NCCL's C
functions, recorded when the program was lowered (`nccl.tape`). XLA captures runs of five or more
operations into CUDA graphs by itself, these calls included, with one process for each GPU and with
one for all: calls are then made in a program's first runs, and again when XLA captures anew because
buffers have moved, but not in replays. Shorter programs are captured with
`jax.jit(f, compiler_options={"xla_gpu_graph_min_graph_size": 1})`.

Communicators are made while a program is lowered, in every process that lowers it, and come
connected: XLA may capture a program's first run. A set of devices has one for gathers and sums, and
one for messages, for NCCL before 2.29.2 must not register the same memory for both on one: there
`ipcRegisterBuffer` gives the GPU its peers' addresses only if a gather or a sum comes first, and
kernels write to address 0 and up. In CUDA graphs NCCL registers all operands, which is worth
1.2 to 1.4 times the speed from 16 MiB on, on two H200. Their timeout and watchdog are
`nccl.configure`'s, and `nccl.check()` tells whether one has failed.

NCCL moves and adds contiguous blocks, so gathering, scattering and exchanging along any but the
first dimension costs a transpose, which XLA does.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat, nccl
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import DType
from pallas_collectives.backends import counters, ordered
from pallas_collectives.backends.layout import blocks, side_by_side
from pallas_collectives.backends.plans import How, Plan
from pallas_collectives.errors import AlgorithmError, DtypeError
from pallas_collectives.nccl import dtypes, ffi, mailboxes, tape
from pallas_collectives.nccl.connection import COLLECTIVES, MESSAGES
from pallas_collectives.nccl.tape import Address
from pallas_collectives.topology import placement
from pallas_collectives.topology.groups import Group

# NCCL adds no 16-bit integers; modulo 2**16 the wider sums are the same.
_WIDER = {"int16": "int32", "uint16": "uint32"}


def all_gather(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The group's blocks side by side along `axis`."""
    _serves("all_gather", x.dtype, how)

    def enqueue(
        c: nccl.Communicator, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        c.all_gather(inputs[0], outputs[0], x.size, x.dtype, stream)

    work = _Work(f"all_gather {x.dtype} {x.size}", enqueue)
    return side_by_side(_call(work, group, (group.size, *x.shape), x.dtype, x), axis)


def reduce_scatter(x: jax.Array, group: Group, *, axis: int, how: How) -> jax.Array:
    """The sum of everyone's block `me`."""
    dtype = _summed("reduce_scatter", x.dtype, "sum", how)
    if how.order is not None:
        return ordered.reduce_scatter(x, group, axis=axis, how=how)
    terms = blocks(x, axis, group.size).astype(dtype)
    shape = terms.shape[1:]

    def enqueue(
        c: nccl.Communicator, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        c.reduce_scatter(inputs[0], outputs[0], math.prod(shape), dtype, "sum", stream)

    work = _Work(f"reduce_scatter sum {dtype} {math.prod(shape)}", enqueue)
    return _call(work, group, shape, dtype, terms).astype(x.dtype)


def all_reduce(x: jax.Array, group: Group, *, op: str, how: How) -> jax.Array:
    """The sum, maximum or minimum, everywhere."""
    dtype = _summed("all_reduce", x.dtype, op, how)
    if how.order is not None and op == "sum":
        return ordered.all_reduce(x, group, how=how)

    def enqueue(
        c: nccl.Communicator, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        c.all_reduce(inputs[0], outputs[0], x.size, dtype, op, stream)

    work = _Work(f"all_reduce {op} {dtype} {x.size}", enqueue)
    return _call(work, group, x.shape, dtype, x.astype(dtype)).astype(x.dtype)


def all_to_all(
    x: jax.Array, group: Group, *, split_axis: int, concat_axis: int, how: How
) -> jax.Array:
    """Block p goes to p and lands as block `me`."""
    _serves("all_to_all", x.dtype, how)
    return side_by_side(_exchanged(blocks(x, split_axis, group.size), group), concat_axis)


def others_blocks(blocks: jax.Array, group: Group, *, how: How) -> jax.Array:
    """(n, ...), exchanged as by `all_to_all`; a device's own place holds anything."""
    _serves("all_to_all", blocks.dtype, how)
    return _exchanged(blocks, group, own=False)


def ppermute(x: jax.Array, group: Group, *, perm: Sequence[tuple[int, int]], how: How) -> jax.Array:
    """What the source sends; zeros on devices without a source."""
    _serves("ppermute", x.dtype, how)
    target_of, source_of = dict(perm), {target: source for source, target in perm}

    text = f"ppermute {list(perm)} {x.dtype} {x.size}"

    def enqueue(
        c: nccl.Communicator, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        sends = [(inputs[0], x.size, target_of[c.rank])] if c.rank in target_of else []
        recvs = [(outputs[0], x.size, source_of[c.rank])] if c.rank in source_of else []
        nccl.exchange([nccl.Messages(c, sends, recvs, stream)], x.dtype, text)
        if not recvs:
            c.clear(outputs[0], x.nbytes, stream)

    return _call(_Work(text, enqueue, uses=MESSAGES), group, x.shape, x.dtype, x)


def ragged_all_to_all(
    operand: jax.Array, output: jax.Array, tables: Sequence[jax.Array], group: Group, *, how: How
) -> jax.Array:
    """Rows of runtime-chosen counts to each device, as lax.

    NCCL takes counts from the host, so Python waits for the stream, once a call, and the call
    cannot be part of a graph.
    """
    _serves("ragged_all_to_all", operand.dtype, how)
    input_offsets, send_sizes, output_offsets, recv_sizes = tables
    to_peers = output_offsets.reshape(group.size, -1)
    landing = _exchanged(to_peers, group).reshape(-1)  # the senders know where our rows begin
    plan = jnp.stack([input_offsets, send_sizes, landing, recv_sizes]).astype(jnp.int32)
    row, dtype = math.prod(operand.shape[1:]), operand.dtype
    each = plan.shape[1] // group.size
    text = f"ragged_all_to_all {dtype} {operand.shape} to {output.shape} by {plan.shape}"

    def enqueue(
        c: nccl.Communicator, stream: int, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        words = c.read_back(inputs[2], 4 * plan.size, stream)
        table = np.array(struct.unpack(f"{plan.size}i", words)).reshape(plan.shape)
        send_from, send, land_at, receive = table
        _check_rows("send", send_from, send, operand.shape[0])
        _check_rows("receive", land_at, receive, output.shape[0])

        def parts(base: int, first: np.ndarray, count: np.ndarray) -> list[nccl.Part]:
            pitch = row * dtype.itemsize
            return [
                (base + int(first[i]) * pitch, int(count[i]) * row, i // each)
                for i in range(len(count))
                if count[i]
            ]

        sends = parts(inputs[0], send_from, send)
        recvs = parts(outputs[0], land_at, receive)
        nccl.exchange([nccl.Messages(c, sends, recvs, stream)], dtype, text)

    work = _Work(text, enqueue, uses=MESSAGES, graph=False, aliases=((1, 0),))
    return _call(work, group, output.shape, dtype, operand, output, plan)


def _check_rows(what: str, first: np.ndarray, count: np.ndarray, rows: int) -> None:
    """Nothing may be read or written outside the arrays."""
    if (first < 0).any() or (count < 0).any() or ((first + count > rows) & (count > 0)).any():
        raise ValueError(
            f"ragged_all_to_all would {what} rows outside [0, {rows}): offsets {first.tolist()}, "
            f"sizes {count.tolist()}"
        )


def _serves(op: str, dtype: DType, how: How) -> None:
    """Raises unless NCCL can move `dtype`, and counts the call."""
    if how.algorithm is not None:
        raise AlgorithmError(
            f"algorithm={how.algorithm!r} for {op}",
            "NCCL chooses its algorithms itself",
            "leave algorithm=None; NCCL_ALGO and NCCL_PROTO in the environment restrict it",
        )
    _checked(dtype, lambda: dtypes.moved(dtype))
    counters.note(Plan(op=op, backend="nccl", why="NCCL chooses its algorithms itself"))


def _summed(op: str, dtype: DType, reduction: str, how: How) -> DType:
    """The dtype in which NCCL reduces `dtype`; raises unless it can, and counts the call."""
    name = np.dtype(dtype).name
    if how.precise and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4:
        name = "float32"
    wide = jnp.dtype(_WIDER.get(name, name))
    _checked(dtype, lambda: dtypes.reduced(wide, reduction))
    _serves(op, dtype, how)
    return wide


def _checked(dtype: DType, check: Callable[[], Any]) -> None:
    try:
        check()
    except TypeError as error:
        raise DtypeError(f"dtype {dtype}", str(error), "cast before the collective") from error


def _exchanged(blocks: jax.Array, group: Group, own: bool = True) -> jax.Array:
    """(n, ...): block p to device p, device p's to place p; its own where it is wanted."""
    count = blocks.size // group.size
    text = f"all_to_all {blocks.dtype} {count}{'' if own else ' of others'}"

    def enqueue(
        c: nccl.Communicator, stream: Address, inputs: Addresses, outputs: Addresses
    ) -> None:
        if own:
            c.all_to_all(inputs[0], outputs[0], count, blocks.dtype, stream)
            return
        pitch = count * blocks.dtype.itemsize
        sends, recvs = (
            [(tape.behind(base, p * pitch), count, p) for p in range(group.size) if p != c.rank]
            for base in (inputs[0], outputs[0])
        )
        nccl.exchange([nccl.Messages(c, sends, recvs, stream)], blocks.dtype, text)

    work = _Work(text, enqueue, uses=MESSAGES)
    return _call(work, group, blocks.shape, blocks.dtype, blocks)


# --- from a trace to the call -------------------------------------------------------------------

Worker = TypeVar("Worker")
_Work_contra = TypeVar("_Work_contra", contravariant=True)
Addresses = Sequence[Address]
# (communicator, stream, operands, results): numbers, or gaps where it is recorded.
Enqueue = Callable[[nccl.Communicator, Any, Sequence[Any], Sequence[Any]], None]


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one call puts on the stream.

    Attributes:
      text: names it, dtypes, counts and all: equal texts, equal work.
      enqueue: does it, for this device's communicator.
      uses: what of NCCL, of `connection.USES`.
      graph: whether it is the same every time: it may be recorded, and replayed as captured.
      aliases: (operand, result) pairs that share their memory.
    """

    text: str
    enqueue: Enqueue = dataclasses.field(compare=False)
    uses: str = COLLECTIVES
    graph: bool = True
    aliases: tuple[tuple[int, int], ...] = ()


_call_p = core.Primitive("nccl_call")


def _call(
    work: _Work, group: Group, shape: Sequence[int], dtype: DType, *operands: jax.Array
) -> jax.Array:
    _compat.prepare()
    return _call_p.bind(*operands, work=work, group=group, shape=tuple(shape), dtype=dtype)


@_call_p.def_abstract_eval
def _abstract_eval(
    *operands: Aval, work: _Work, group: Group, shape: tuple[int, ...], dtype: DType
) -> Aval:
    return _compat.array_type(shape, dtype)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, work: _Work, group: Group, **params: Any
) -> Sequence[ir.Value]:
    """Makes the communicators and names the work for the program."""
    del params
    members = placement.device_groups(_compat.mesh_of(ctx), group)
    at: dict[int, nccl.Communicator] = {}
    for devices in members:
        if any(d.process_index == jax.process_index() for d in devices):
            communicators = nccl.get(devices, name=work.uses, uses=[work.uses]).communicators
            at.update({c.ordinal: c for c in communicators.values()})

    def function(stream: int, ordinal: int, inputs: Addresses, outputs: Addresses) -> None:
        work.enqueue(at[ordinal], stream, inputs, outputs)

    def recorded(communicator: nccl.Communicator) -> None:
        gaps = tape.inputs(len(operands)), tape.outputs(1)
        work.enqueue(communicator, tape.STREAM, *gaps)

    tapes = {o: tape.record(c, recorded) for o, c in at.items()} if work.graph else None
    ids = [[d.id for d in devices] for devices in members]
    return ffi.lower(
        ctx, f"{work.text} over {ids}", function, *operands,
        graph=work.graph, aliases=dict(work.aliases), tapes=tapes,
    )  # fmt: skip


_compat.register(_call_p, lowering=_lower)


def by_mailboxes(
    groups: Sequence[Sequence[jax.Device]], make: Callable[[nccl.Group], dict[int, Worker]]
) -> dict[int, Worker]:
    """What `make` makes for this process's devices of each group, by ordinal.

    Raises:
      MailboxError: `make` does; or, in every process alike, some group has GPUs of several hosts.
    """
    for devices in groups:
        if not placement.are_of_one_host(devices):
            ids = [d.id for d in devices]
            raise mailboxes.MailboxError(f"GPUs {ids} are not all of one host")
    at: dict[int, Worker] = {}
    for devices in groups:
        if any(d.process_index == jax.process_index() for d in devices):
            at.update(make(nccl.get(devices, name="copies", uses=())))
    return at


class Runner(tape.Recordable, Protocol[_Work_contra]):
    """What puts a work of its kind on one GPU's stream."""

    def run(
        self,
        work: _Work_contra,
        text: str,
        inputs: Sequence[Address],
        outputs: Sequence[Address],
        stream: Address,
    ) -> None: ...


def run_by(
    ctx: mlir.LoweringRuleContext,
    text: str,
    work: _Work_contra,
    at: Mapping[int, Runner[_Work_contra]],
    *operands: ir.Value,
) -> Sequence[ir.Value]:
    """A call in a program of what runners, by ordinal, do of a work."""

    def function(stream: int, ordinal: int, inputs: Addresses, outputs: Addresses) -> None:
        at[ordinal].run(work, text, inputs, outputs, stream)

    def recorded(runner: Runner[_Work_contra]) -> None:
        gaps = tape.inputs(len(operands)), tape.outputs(len(ctx.avals_out))
        runner.run(work, text, *gaps, tape.STREAM)

    tapes = {ordinal: tape.record(runner, recorded) for ordinal, runner in at.items()}
    return ffi.lower(ctx, text, function, *operands, has_effect=False, tapes=tapes)


ordered.exchanges["nccl"] = sys.modules[__name__]
