"""Connects a new communicator to its peers, for everything that may be asked of it later.

NCCL connects when it first needs to. While a CUDA graph is being captured that fails: CUDA refuses
to enable peer access between two GPUs of one process, and network plugins may allocate memory
(aws-ofi-nccl#1342). Two things wait for a first use (NCCL 2.28 to 2.30: group.cc, enqueue.cc):

  * An algorithm (ring, tree, PAT, NVLS, CollNet) is connected when a collective first uses it. NCCL
    picks it by the collective's function, size and type. NCCL_RUNTIME_CONNECT=0 connects all when
    a communicator is made, but for all of the process's, XLA's too, and only if it is set before
    the first of them. No field of `ncclConfig_t` says it for one communicator.
  * Two ranks are connected when they first exchange a message, whatever that variable says.

So every algorithm is asked for here, and every pair. `ncclGroupSimulateEnd` has NCCL plan a
collective, which connects its algorithm, and puts nothing on a stream: it needs no operands, so all
sizes can be asked for. The pairs are connected by an all-to-all of one byte. It runs, so everything
that NCCL has copied to the GPUs meanwhile is there when it ends, and the communicator has worked.

What it takes on two H200 with NVLink (NCCL 2.28.9; 24 channels for collectives, 32 for messages):
0.06 s in one process, 0.3 s with a process each, beside 0.4 s for making the communicator. Memory
on each GPU: 290 MiB for the algorithms, and for messages 250 MiB and 12 MiB a channel and peer. That
is what NCCL takes anyway once it is used for them. n GPUs on NVLink so hold n - 1 times 380 MiB:
NCCL_MAX_P2P_NCHANNELS=4 makes that 50, at the cost of the bandwidth of messages.
"""

import functools
from collections.abc import Callable, Iterator

from pallas_collectives.nccl.communicator import Communicator

_LARGEST = 2**38  # bytes: more than a GPU's memory
_STEPS = 4  # sizes in every doubling
_SIZES = sorted({round(2 ** (i / _STEPS)) for i in range(_STEPS * _LARGEST.bit_length())})


def connect(communicator: Communicator) -> None:
    """Connects all that collectives, exchanges and transfers may use; returns once it is used.

    Every rank of the group calls this, from a thread of its own. Raises CallError.
    """
    n = communicator.size
    if n == 1:  # NCCL copies
        return
    with communicator.driver.workspace(communicator.ordinal, 2 * n) as (address, stream):
        for call in _collectives(communicator, address, stream):
            communicator.plan(call)
        communicator.all_to_all(address, address + n, 1, "int8", stream)


def _collectives(c: Communicator, at: int, stream: int) -> Iterator[Callable[[], None]]:
    """A call for each choice that NCCL makes: by function, size, and who can add the type.

    NVLink switches and networks add bfloat16 but not int8.
    """
    call = functools.partial
    yield call(c.broadcast, at, at, 1, "int8", 0, stream)
    for size in _SIZES:
        block = max(1, size // c.size)
        yield call(c.all_gather, at, at, block, "int8", stream)
        for dtype in ("int8", "bfloat16"):
            yield call(c.all_reduce, at, at, size, dtype, "sum", stream)
            yield call(c.reduce_scatter, at, at, block, dtype, "sum", stream)
