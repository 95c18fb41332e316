"""Host bytes between processes, through the devices, in bounded chunks.

The mesh has one row of devices per process. A chunk is cut into as many shares as a row has
devices, so each device carries its share of the traffic, and no share is sent twice:

    process 0   share 0 | share 1      all_gather along each column leaves every process
    process 1   share 0 | share 1      with all rows; psum, where only the source's row is
    process 2   share 0 | share 1      not zero, leaves it with that row

What travels is 32-bit words, so every dtype arrives bit for bit. The words per share are a power
of two, so a handful of programs serves all the trees of a run.
"""

import collections
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_collectives import collectives
from pallas_collectives.errors import CollectiveError
from pallas_collectives.multihost.agreement import Agreement, check_whole
from pallas_collectives.multihost.leaves import Bytes

DEFAULT_CHUNK_BYTES = 64 << 20
Progress = Callable[[int, int], None]  # (bytes here so far, bytes in all)

_WORD = np.dtype(np.uint32)


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """processes × lanes; where processes own unequal numbers of devices, the fewest make a row."""
    rows: dict[int, list[jax.Device]] = collections.defaultdict(list)
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        rows[device.process_index].append(device)
    lanes = min(len(row) for row in rows.values())
    return Mesh(np.array([row[:lanes] for row in rows.values()]), ("processes", "lanes"))


@functools.cache
def _mesh() -> Mesh:
    return mesh_of(jax.devices())


def all_gather(
    agreement: Agreement,
    send: Bytes,
    receive: Sequence[Bytes],
    *,
    chunk_bytes: int,
    progress: Progress | None,
) -> None:
    """Every process's `send` into `receive[process]` on all of them.

    chunk_bytes: on the devices of a process at a time, all processes' parts together.
    """
    total = sum(part.size for part in receive)
    longest = max(part.size for part in receive)
    start = 0
    while start < longest:
        chunk = _chunk(longest - start, chunk_bytes // len(receive))
        send.read(start, chunk)
        rows = _collective(agreement, all_gather_program(_mesh()), chunk)
        for part, row in zip(receive, rows, strict=True):
            part.write(start, row)
        start += chunk.size
        if progress:
            progress(sum(min(start, part.size) for part in receive), total)


def broadcast(
    agreement: Agreement,
    data: Bytes,
    *,
    is_source: bool,
    chunk_bytes: int,
    progress: Progress | None,
) -> None:
    """The source's `data` into that of all processes."""
    start = 0
    while start < data.size:
        chunk = _chunk(data.size - start, chunk_bytes)
        if is_source:
            data.read(start, chunk)
        (row,) = _collective(agreement, psum_program(_mesh()), chunk)
        if not is_source:
            data.write(start, row)
        start += chunk.size
        if progress:
            progress(min(start, data.size), data.size)


def wait_for_devices(agreement: Agreement) -> None:
    """Returns when every device of every process has come to this point in its work."""
    program, sharding = _wait_program()

    def meet() -> None:
        ones = [jax.device_put(np.ones(1, _WORD), device) for device in jax.local_devices()]
        shape = (jax.device_count(),)
        here = jax.make_array_from_single_device_arrays(shape, sharding, ones)
        jax.block_until_ready(program(here))

    agreement.run(meet)


def check_chunk_bytes(chunk_bytes: int, operation: str) -> None:
    """CollectiveError unless so many bytes, at least a word for each device, make a chunk."""
    check_whole(operation, "chunk_bytes", chunk_bytes)
    least = _mesh().size * _WORD.itemsize
    if chunk_bytes < least:
        raise CollectiveError(
            f"{operation} with chunk_bytes={chunk_bytes}",
            f"a chunk holds at least one word for each device: {least} bytes on these",
            f"leave it out for the default of {DEFAULT_CHUNK_BYTES}",
        )


def _chunk(wanted: int, limit: int) -> np.ndarray:
    """Zeros for `wanted` bytes, or the most under `limit`: a power of two of words per share."""
    lanes = _mesh().shape["lanes"]
    most = 1 << ((limit // (lanes * _WORD.itemsize)).bit_length() - 1)
    words = 1 << (-(-wanted // (lanes * _WORD.itemsize)) - 1).bit_length()
    return np.zeros(lanes * min(words, most) * _WORD.itemsize, np.uint8)


def _collective(agreement: Agreement, program: Callable, chunk: np.ndarray) -> np.ndarray:
    """The rows that `program` leaves on this process, as bytes, for its `chunk`."""
    mesh = _mesh()
    processes, lanes = mesh.devices.shape
    sharding = NamedSharding(mesh, P("processes", "lanes"))
    words = chunk.view(_WORD).reshape(lanes, 1, -1)

    def move() -> np.ndarray:
        parts = [
            jax.device_put(share[None], device)
            for share, device in zip(words, mesh.devices[jax.process_index()], strict=True)
        ]
        shape = (processes, lanes, words.shape[-1])
        out = program(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        shards = sorted(out.addressable_shards, key=lambda shard: shard.index[1].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards], axis=1)

    rows = agreement.run(move)
    return rows.reshape(len(rows), -1).view(np.uint8)


@functools.cache
def all_gather_program(mesh: Mesh) -> Callable:
    """(processes, lanes, words) -> the rows of all processes, on each of them."""
    return _program(mesh, lambda x: collectives.all_gather(x, "processes", axis=0, tiled=True))


@functools.cache
def psum_program(mesh: Mesh) -> Callable:
    """(processes, lanes, words) -> the sum of the rows of all processes, on each of them."""
    return _program(mesh, lambda x: collectives.psum(x, "processes"))


def _program(mesh: Mesh, collective: Callable) -> Callable:
    # Each process keeps rows of its own, equal to those of the others: the result does not claim
    # to be replicated, so nothing has to prove that it is.
    specs = P("processes", "lanes")
    return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=specs, out_specs=specs))


@functools.cache
def _wait_program() -> tuple[Callable, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    specs = P("devices")
    program = jax.shard_map(
        lambda one: collectives.psum(one, "devices"), mesh=mesh, in_specs=specs, out_specs=specs
    )
    return jax.jit(program), NamedSharding(mesh, specs)
