"""Collectives over narrower wires on NVIDIA GPUs: kernels that quantise, whatever moves the bytes.

Between GPUs that reach each other's memory, of one process or of several on one host, it is one
call out of the program (`nccl.packed`), which XLA may capture in a CUDA graph: what quantises
writes to the peer. Elsewhere kernels of one pass (`gpu_codec`) pack what leaves, NCCL moves it, and
others unpack or add what comes. The bits are the same.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pallas_collectives import _compat, simulation, wires
from pallas_collectives._compat import Aval
from pallas_collectives.annotations import DTypeLike
from pallas_collectives.backends import counters
from pallas_collectives.backends import nccl as on_gpus
from pallas_collectives.backends.nccl import run_by
from pallas_collectives.backends.plans import MOVES, Plan
from pallas_collectives.backends.wire_ways import Move
from pallas_collectives.kernels import gpu_codec
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.nccl import mailboxes, packed
from pallas_collectives.nccl.packed import EXCHANGE, GATHER, PERMUTE, REDUCE, PackedWork, Packer
from pallas_collectives.topology import placement
from pallas_collectives.wires import Wire

_OPS = {**MOVES, REDUCE: "all_reduce"}


def moved(blocks: jax.Array, wire: Wire, *moves: Move, dtype: DTypeLike, adds: bool) -> jax.Array:
    """The blocks that come, (n, numbers), or their sum, (numbers,).

    Args:
      blocks: (k, ...), which `gpu_codec` serves.
      wire: with scales.
      moves: what brings them; or an exchange, whose blocks are added, and a gather of the sums.
      dtype: of the result.
      adds: whether it is the sum.
    """
    move = moves[0]
    work = PackedWork(
        op=move.op if len(moves) == 1 else REDUCE,
        size=move.group.size,
        numbers=blocks.size // len(blocks),
        dtype=jnp.dtype(blocks.dtype).name,
        result=jnp.dtype(dtype).name,
        wire=wire.dtype,
        group=int(wire.group),
        adds=adds,
        perm=tuple(sorted(move.perm)),
    )
    _compat.prepare()
    return _packed_p.bind(blocks, work=work, moves=moves, wire=wire)


_packed_p = core.Primitive("nccl_packed")


@_packed_p.def_abstract_eval
def _type(blocks: Aval, *, work: PackedWork, moves: tuple[Move, ...], wire: Wire) -> Aval:
    del blocks, moves, wire
    shape = (work.numbers,) if work.adds else (work.blocks, work.numbers)
    return _compat.array_type(shape, jnp.dtype(work.result))


def _lower(
    ctx: mlir.LoweringRuleContext,
    blocks: ir.Value,
    *,
    work: PackedWork,
    moves: tuple[Move, ...],
    wire: Wire,
) -> Sequence[ir.Value]:
    members = placement.device_groups(_compat.mesh_of(ctx), moves[0].group)
    try:
        at = _packers(work, members)
    except mailboxes.MailboxError as error:
        _tell(str(error))
        by_nccl = functools.partial(_by_nccl, work=work, moves=moves, wire=wire)
        return mlir.lower_fun(by_nccl, multiple_results=False)(ctx, blocks)
    told = "a kernel quantises into the peer's memory"
    counters.note(Plan(op=_OPS[work.op], backend="nccl", algorithm="packed", why=told))
    ids = [[d.id for d in devices] for devices in members]
    return run_by(ctx, f"packed {work} over {ids}", work, at, blocks)


def _packers(work: PackedWork, members: list[list[jax.Device]]) -> dict[int, Packer]:
    """What does the work on each of this process's devices, by ordinal."""
    if work.mail_bytes > (most := mailboxes.MOST_MAIL):
        raise mailboxes.MailboxError(
            f"{work.mail_bytes >> 20} MiB come to a GPU, more than {most >> 20} are kept for"
        )
    return on_gpus.by_mailboxes(members, lambda group: packed.ready(group, work))


_compat.register(_packed_p, lowering=_lower)


@functools.cache
def _tell(why: str) -> None:
    logging.warning("pallas_collectives: NCCL moves what goes over a wire: %s", why)


def _by_nccl(
    blocks: jax.Array, *, work: PackedWork, moves: tuple[Move, ...], wire: Wire
) -> jax.Array:
    if work.op == REDUCE:
        terms = dataclasses.replace(work, op=EXCHANGE, result="float32", adds=True)
        sums = _by_nccl(blocks, work=terms, moves=moves[:1], wire=wire)
        whole = dataclasses.replace(work, op=GATHER, dtype="float32")
        return _by_nccl(sums[None], work=whole, moves=moves[1:], wire=wire)
    (move,) = moves
    me, nobody = move.group.position[None], _nobody()
    bring = move.at_once
    if work.op == EXCHANGE:
        bring = functools.partial(on_gpus.others_blocks, group=move.group, how=move.how)
    if not work.adds:
        blocks = wires.overflown(blocks, work.result)
    come = bring(packed_of(blocks, wire, me if work.op == EXCHANGE else nobody))
    own = nobody if work.op == PERMUTE else me
    return read(come, blocks, wire, work.result, own, adds=work.adds)


def _nobody() -> jax.Array:
    return jnp.full(1, -1, jnp.int32)


def packed_of(blocks: jax.Array, wire: Wire, left_out: jax.Array | None = None) -> jax.Array:
    """int8 (k, bytes) of blocks (k, ...), which `gpu_codec` serves, by its kernels.

    left_out: int32 (1,), of a block that is not written, if any.
    """
    pack = functools.partial(gpu_codec.pack, _format(blocks, wire))
    return launch.unchecked(pack)(blocks, _nobody() if left_out is None else left_out)


def read(
    come: jax.Array,
    blocks: jax.Array,
    wire: Wire,
    dtype: DTypeLike,
    own: jax.Array | None = None,
    *,
    adds: bool,
) -> jax.Array:
    """The blocks that come, (n, numbers) in a dtype, or their sum, (numbers,), by kernels.

    Args:
      come: what `packed_of` made of them.
      blocks: what was packed here.
      wire: with scales.
      dtype: of the result.
      own: int32 (1,), whose place this device's own block has, if it is to be read from `blocks`.
      adds: whether it is the sum.
    """
    format, make = _format(blocks, wire), gpu_codec.added if adds else gpu_codec.unpack
    made = functools.partial(make, format, jnp.dtype(dtype))
    come = come.reshape(-1, format.nbytes)
    result = launch.unchecked(made)(come, blocks, _nobody() if own is None else own)
    return result.reshape((-1,) if adds else (len(come), -1))


def _format(blocks: jax.Array, wire: Wire) -> gpu_codec.Format:
    return gpu_codec.Format(wire, blocks.size // len(blocks), simulation.platform() == "cpu")
