"""Collectives over narrower wires on GPUs, in parts: one is on the wire, another in a kernel.

Kernels of one pass (`gpu_codec`) pack what leaves, and unpack or add what comes; what a device
keeps is only rounded. NCCL brings everything at once, but for large gathers between GPUs of one
process. Copy engines carry these, in two parts: kernels need multiprocessors, and copies from GPU
to GPU none.

    main stream      pack 0 | pack 1 |        unpack 0     |        unpack 1
    copy engines            | part 0 ~~~~~~~~~~~~ | part 1 ~~~~~~~~~~~~ |

Exchanges and permutes leave too little to hide: there the host takes longer to issue the copies,
which CUDA graphs cannot hold, than they gain (measured on two H100, 64 MiB of bfloat16 a device:
exchanges 132 us at once and 146 in two parts, permutes 189 and 198, gathers 260 and 234).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives import simulation
from pallas_collectives.backends import flights, nccl
from pallas_collectives.backends.wire_ways import Move
from pallas_collectives.kernels import gpu_codec
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire

# Bytes of an operand from which a gather goes in parts.
LEAST_BYTES = 32 << 20
_PARTS = 2


def by_kernels(
    read: Callable[..., jax.Array], blocks: jax.Array, wire: Wire, move: Move, dtype: Any
) -> jax.Array:
    """What a kernel makes of the blocks that have come: `gpu_codec`'s `unpack` or `added`.

    Args:
      read: the kernel.
      blocks: (k, ...), which `gpu_codec` serves.
      wire: with scales.
      move: what brings them.
      dtype: of the result.
    """
    beside = move.op == "gather" and flights.in_place(move.how) and blocks.nbytes >= LEAST_BYTES
    simulated = simulation.platform() == "cpu"
    parts = gpu_codec.Part.all_of(blocks.shape, wire, _PARTS if beside else 1, simulated)
    me, nobody = _rank(move.group), jnp.full(1, -1, jnp.int32)
    left_out = me if move.op == "exchange" else nobody
    own = nobody if move.op == "permute" else me
    flight = functools.partial(flights.new, move.op, move.group, own=False)
    at_once = move.at_once
    if move.op == "exchange":
        at_once = functools.partial(nccl.others_blocks, group=move.group, how=move.how)
    # Each step takes what the one before it gives, so that XLA keeps to this order.
    token: list[jax.Array] = []
    under_way: list[Any] = []
    for part in parts:
        pack = functools.partial(gpu_codec.pack, part)
        packed = launch.unchecked(pack)(blocks, left_out, *token)
        if beside:
            started, *token = flights.start(each := flight(), packed)
            under_way.append((each, started))
        else:
            under_way.append(at_once(packed))
    result: list[jax.Array] = []
    for part, come in zip(parts, under_way, strict=True):
        there = flights.done(*come, *token, *result) if beside else come
        unpack = functools.partial(read, part, dtype)
        there = there.reshape(-1, part.nbytes)
        result = [launch.unchecked(unpack)(there, blocks, own, *result)]
    return result[0]


def _rank(group: Group) -> jax.Array:
    """This device's place in the group, int32 (1,)."""
    members = group.members()
    me = lax.axis_index(group.axes) if members is None else members[0]
    return jnp.asarray(me, np.int32).reshape(1)
