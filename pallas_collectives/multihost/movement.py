"""Trees from one process to all, and from all to all."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_collectives import validation
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost import wire
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, agree
from pallas_collectives.multihost.leaves import Bytes, flatten


def broadcast_one_to_all(
    in_tree: Any,
    is_source: bool | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    chunk_bytes: int = wire.DEFAULT_CHUNK_BYTES,
    progress: wire.Progress | None = None,
) -> Any:
    """The tree of one process, on all of them: `jax.experimental.multihost_utils`' function of
    that name.

    Beyond it: keys and fixed-width text may be among the leaves, and every value arrives bit for
    bit, 64-bit ones without `jax_enable_x64` included.

    Args:
      in_tree: pytree of arrays and scalars; the same structure, shapes and dtypes on every
        process. The values count on the source only.
      is_source: True on the one process whose values are sent; None: process 0 is.
      timeout: seconds that each wait may take: for the processes to come, and for each chunk, of
        which the first includes compiling.
      chunk_bytes: the most that is on the devices at a time; the same on every process.
      progress: called as `progress(bytes_so_far, bytes_in_all)` after each chunk; must not raise.

    Returns:
      The tree, with NumPy leaves (keys remain `jax.Array`s).

    Raises:
      ProcessTimeoutError, ProcessMismatchError: on every process, naming the ones at fault.
      CollectiveError: not exactly one source; a leaf sharded over processes; a leaf that is traced.

    Example:
      >>> pc.multihost.broadcast_one_to_all({"seed": 7})  # process 0's, on every process
      {'seed': array(7)}
    """
    operation = "broadcast_one_to_all"
    wire.check_chunk_bytes(chunk_bytes, operation)
    source = jax.process_index() == 0 if is_source is None else bool(is_source)
    leaves, structure = flatten(in_tree, operation)
    # A copy: the caller's array must not change with the result, nor the other way round.
    out = [np.array(leaf.local(operation)) for leaf in leaves]

    terms = [f"chunk_bytes={chunk_bytes}", *(leaf.terms for leaf in leaves)]
    agreement = agree(operation, terms, note="source" if source else "", timeout=timeout)
    sources = agreement.notes.get("source", [])
    if len(sources) != 1:
        raise CollectiveError(
            f"{operation} with {len(sources)} sources (processes {sources})",
            "exactly one process is the source",
            "pass is_source=True on one process and False on all others, or leave it out",
        )
    if jax.process_count() > 1:
        wire.broadcast(
            agreement, Bytes(out), is_source=source, chunk_bytes=chunk_bytes, progress=progress
        )
    return jax.tree.unflatten(
        structure, [leaf.wrap(data) for leaf, data in zip(leaves, out, strict=True)]
    )


def process_allgather(
    in_tree: Any,
    tiled: bool = False,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    chunk_bytes: int = wire.DEFAULT_CHUNK_BYTES,
    progress: wire.Progress | None = None,
) -> Any:
    """Every process's tree, on all of them: `jax.experimental.multihost_utils`' function of that
    name.

    A leaf that one process holds whole, of shape (a, b), becomes (processes, a, b), or with
    `tiled` (processes * a, b); a scalar becomes (processes,) either way. A global array, whose
    shards lie on several processes, becomes the whole array, and demands `tiled=True`; only
    blocks that some process lacks are sent, each once.

    Args:
      in_tree: pytree of arrays and scalars; the same structure, shapes and dtypes on every process.
      tiled: concatenate along axis 0 rather than stack.
      timeout, chunk_bytes, progress: as in `broadcast_one_to_all`; `chunk_bytes` covers the parts
        of all processes together.

    Returns:
      The tree, with NumPy leaves (keys remain `jax.Array`s), bit for bit.

    Raises:
      ProcessTimeoutError, ProcessMismatchError: on every process, naming the ones at fault.
      CollectiveError: a global array without `tiled`; a leaf that is traced.

    Example, on one process; on n the first dimension is n:
      >>> pc.multihost.process_allgather(np.arange(3)).shape
      (1, 3)
    """
    validation.check_flag("tiled", tiled)
    operation = f"process_allgather(tiled={tiled})"
    wire.check_chunk_bytes(chunk_bytes, operation)
    leaves, structure = flatten(in_tree, operation)
    for leaf in leaves:
        if isinstance(leaf.data, jax.Array) and not tiled:
            raise CollectiveError(
                f"{operation} of leaf {leaf.name}, whose shards lie on several processes",
                "a global array is one value and has nothing to stack",
                "pass tiled=True to make it whole on every process",
            )
    terms = [f"chunk_bytes={chunk_bytes}", *(leaf.terms for leaf in leaves)]
    agreement = agree(operation, terms, timeout=timeout)

    send: list[np.ndarray] = []
    receive: list[list[np.ndarray]] = [[] for _ in range(jax.process_count())]
    gather = [
        _gather_blocks(leaf.data, send, receive)
        if isinstance(leaf.data, jax.Array)
        else _gather_whole(leaf.data, tiled and leaf.shape != (), send, receive)
        for leaf in leaves
    ]
    if jax.process_count() > 1:
        wire.all_gather(
            agreement,
            Bytes(send),
            [Bytes(part) for part in receive],
            chunk_bytes=chunk_bytes,
            progress=progress,
        )
    return jax.tree.unflatten(
        structure, [leaf.wrap(finish()) for leaf, finish in zip(leaves, gather, strict=True)]
    )


# Each of these adds what one leaf sends and receives to the lists, and returns the function that
# gives the finished leaf once all has been received.


def _gather_whole(
    data: np.ndarray, tiled: bool, send: list[np.ndarray], receive: list[list[np.ndarray]]
) -> Callable[[], np.ndarray]:
    """An array that each process holds whole."""
    out = np.empty((len(receive), *data.shape), data.dtype)
    out[jax.process_index()] = data
    send.append(data)
    for process, part in enumerate(receive):
        part.append(out[process, ...])
    if tiled:
        return lambda: out.reshape(len(receive) * data.shape[0], *data.shape[1:])
    return lambda: out


def _gather_blocks(
    array: jax.Array, send: list[np.ndarray], receive: list[list[np.ndarray]]
) -> Callable[[], np.ndarray]:
    """A global array. Its sharding tells every process the same: who holds which block, so which
    blocks must be sent, and by whom (of those that hold it, the one with the least to send)."""
    holders: dict[tuple, set[int]] = collections.defaultdict(set)
    indices: Any = array.sharding.devices_indices_map(array.shape)
    for device, index in indices.items():
        holders[_bounds(index, array.shape)].add(device.process_index)
    mine = {_bounds(s.index, array.shape): s.data for s in array.addressable_shards}

    out = np.empty(array.shape, array.dtype)
    arrivals = []
    load = [0] * len(receive)
    for bounds, processes in sorted(holders.items()):
        index = (*(slice(low, high) for low, high in bounds), ...)  # a view, whatever the rank
        if len(processes) == len(receive):
            out[index] = np.asarray(mine[bounds])
            continue
        sender = min(processes, key=lambda process: (load[process], process))
        load[sender] += 1
        # Straight into place where the block is one run of memory.
        place = out[index]
        block = place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)
        receive[sender].append(block)
        arrivals.append((index, block))
        if sender == jax.process_index():
            send.append(np.asarray(mine[bounds]))

    def finish() -> np.ndarray:
        for index, block in arrivals:
            out[index] = block
        return out

    return finish


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A shard's index as (start, stop) per axis: hashable, sortable, and without None."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
