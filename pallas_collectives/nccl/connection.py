"""Connects a new communicator to its peers, for everything that may be asked of it later.

NCCL connects when it first needs to, which fails where a CUDA graph is being captured: enabling
peer access between two GPUs of one process is refused then, and a network plugin may allocate
(aws-ofi-nccl#1342). What waits for a first use, in NCCL's sources (2.28 to 2.30; `groupLaunch` in
group.cc, `ncclPrepareTasks` and `p2pTaskAppend` in enqueue.cc):

  * each algorithm (ring, tree, PAT, NVLS, CollNet) of each communicator: `ncclPrepareTasks`
    connects it, all channels at once, for the first collective of whose size, type and operation
    the cost model or a tuner plugin picks it. NCCL_RUNTIME_CONNECT=0 in the environment has them
    connected in ncclCommInitRank instead, for every communicator of the process, XLA's too, if it
    is there before the process's first communicator; no field of `ncclConfig_t` says it for one.
  * each pair of ranks, each way: at its first message, whatever that variable says.

So every algorithm is asked for here, and every pair. `ncclGroupSimulateEnd` makes NCCL's plan for a
collective, connecting included, and puts nothing on a stream: it takes no memory for operands and
tells of any size. One all-to-all of a byte connects the pairs; it runs, so a new communicator has
worked once, and what NCCL copied to the GPUs while it connected is there when it ends.
"""

import functools
from collections.abc import Callable, Iterator

from pallas_collectives.nccl.communicator import Communicator

_LARGEST = 2**38  # bytes: more than a GPU's memory
_STEPS = 4  # sizes in every doubling; an algorithm's sizes span more than that
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
