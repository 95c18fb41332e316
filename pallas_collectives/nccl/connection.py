"""Connects a new communicator to its peers, for everything that may be asked of it later.

NCCL connects when it first needs to. While a CUDA graph is being captured that fails: CUDA refuses
to enable peer access between two GPUs of one process, and network plugins may allocate memory
(aws-ofi-nccl#1342). Two things wait for a first use (NCCL 2.28 to 2.30: group.cc, enqueue.cc):

  * An algorithm (ring, tree, PAT, NVLS, CollNet) is connected when a collective first uses it. NCCL
    picks it by the collective's function, size and type. NCCL_RUNTIME_CONNECT=0 connects all when
    a communicator is made, but for all of the process's, XLA's too, and only if it is set before
    the first of them. No field of `ncclConfig_t` says it for one communicator.
  * Two ranks are connected when they first exchange a message, whatever that variable says.

So every algorithm is asked for here, and every pair, as far as the communicator is to be used for
them. `ncclGroupSimulateEnd` has NCCL plan a
collective, which connects its algorithm, and puts nothing on a stream: it needs no operands, so all
sizes can be asked for. The pairs are connected by an all-to-all of one byte. It runs, or else
a gather does, so everything that NCCL has copied to the GPUs meanwhile is there when it ends, and
the communicator has worked.

What it takes on H200s with NVLink (NCCL 2.28.9; 24 channels for collectives, 32 for messages):
0.06 s for two in one process, 0.25 s for four, 0.3 s for two with a process each, beside 0.4, 0.9
and 0.4 s for making the communicator. Memory of each GPU, of two as of four: 290 MiB for the
algorithms, and for messages 250 MiB and 12 MiB a channel and peer. NCCL would take it at first use.
So n GPUs on NVLink hold n - 1 times 380 MiB each for messages; NCCL_MAX_P2P_NCHANNELS=4 makes that
50 for each peer, at the cost of the bandwidth of messages.
"""

import functools
from collections.abc import Callable, Collection

from pallas_collectives.nccl.communicator import Communicator
from pallas_collectives.nccl.errors import CallError

_LARGEST = 2**38  # bytes: more than a GPU's memory
_STEPS = 4  # sizes in every doubling
_SIZES = sorted({round(2 ** (i / _STEPS)) for i in range(_STEPS * _LARGEST.bit_length())})


COLLECTIVES, MESSAGES = "collectives", "messages"
USES = (COLLECTIVES, MESSAGES)


def connect(communicator: Communicator, uses: Collection[str]) -> None:
    """Connects all that is asked for; returns once it is used.

    Every rank of the group calls this, from a thread of its own.

    Args:
      uses: some of `USES`: gathers, sums and broadcasts; messages, which all-to-alls are too.

    Raises CallError.
    """
    n = communicator.size
    if n == 1 or not uses:  # one rank: NCCL copies
        return
    with communicator.driver.workspace(communicator.ordinal, 2 * n) as (address, stream):
        if COLLECTIVES in uses:
            for collective in _collectives(communicator, address, stream):
                _plan(communicator, collective)
        run = communicator.all_to_all if MESSAGES in uses else communicator.all_gather
        run(address, address + n, 1, "int8", stream)


def _plan(communicator: Communicator, collective: Callable[[int], None]) -> None:
    """Plans one collective of every size."""
    for size in _SIZES:
        try:
            communicator.plan(functools.partial(collective, size))
        except CallError as error:
            if error.leaves_nccl_half_done:
                raise
            return  # NCCL_ALGO or NCCL_PROTO leaves nothing for it: whoever calls it will be told


def _collectives(c: Communicator, at: int, stream: int) -> list[Callable[[int], None]]:
    """Calls of a number of bytes, by all that NCCL looks at besides: function, and who can add.

    NVLink switches and networks add bfloat16 but not int8. Reductions to one rank go as broadcasts.
    """

    def block(size: int) -> int:
        return max(1, size // c.size)

    return [
        lambda size: c.broadcast(at, at, size, "int8", 0, stream),
        lambda size: c.all_gather(at, at, block(size), "int8", stream),
        lambda size: c.all_reduce(at, at, size, "int8", "sum", stream),
        lambda size: c.all_reduce(at, at, size, "bfloat16", "sum", stream),
        lambda size: c.reduce_scatter(at, at, block(size), "int8", "sum", stream),
        lambda size: c.reduce_scatter(at, at, block(size), "bfloat16", "sum", stream),
    ]
