"""Moves a sharded array to other devices, also of other processes, and between shardings.

    handle = nccl.send_or_recv(x, target_sharding)                        # where x's devices are
    handle = nccl.send_or_recv(shape, target_sharding, source_sharding)   # where only targets are
    y = handle.array()                                                    # where targets are

Every process that owns a source or a target device makes the same call, and all make their
transfers between the same devices in the same order. Each target gets exactly the boxes of its
shard that it lacks, each from one holder (`boxes.plan`), on streams that only transfers use. Events
order those with XLA's: a send waits on the device for its data, and whatever uses a received array
waits for it there; the host waits only in `wait`.
"""

import collections
import dataclasses
import functools
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from pallas_collectives.annotations import DType
from pallas_collectives.nccl import boxes, dtypes, group
from pallas_collectives.nccl.boxes import Box
from pallas_collectives.nccl.communicator import Messages, exchange

# A stream for each of a group's ranks here: its transfers run on it in the order they are made.
_streams: weakref.WeakKeyDictionary[group.Group, dict[int, int]] = weakref.WeakKeyDictionary()
# Transfers whose memory the device may still use, although nobody may hold their handles.
_pending: "collections.deque[Transfer]" = collections.deque()
_forgetting = threading.Lock()


class Transfer:
    """A transfer under way."""

    def __init__(self, over: group.Group, shape: tuple[int, ...], dtype: DType, sharding: Sharding):
        self._group = over
        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._events: list[Any] = []
        self._held: list[Any] = []  # what the device reads and writes: alive until it is done
        # For each target device here: its box, and the box and array or arrival of every piece.
        self._parts: dict[jax.Device, tuple[Box, list[tuple[Box, Any]]]] = {}
        self._array: jax.Array | None = None

    def done(self) -> bool:
        """Whether this process's part is over; does not wait. Raises if the group failed."""
        over = self._over()
        self._group.check()  # an abort also ends the work: with nothing to show for it
        return over

    def _over(self) -> bool:
        if not all(event.done() for event in self._events):
            return False
        self._held.clear()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits until this process's part is over.

        timeout: seconds, then TimeoutError. Raises the group's PeerError if its watchdog failed it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 1e-5
        while not self.done():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the transfer over {self._group} is not done in {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def array(self) -> jax.Array:
        """The received array, of the target sharding; does not wait: what uses it will.

        Raises TypeError in a process without a target device.
        """
        self._group.check()
        if not self._parts:
            raise TypeError(f"this process sends only: it owns no device of {self._sharding}")
        if self._array is None:
            shards = [
                self._shard(device, box, pieces) for device, (box, pieces) in self._parts.items()
            ]
            self._array = jax.make_array_from_single_device_arrays(
                self._shape, self._sharding, shards
            )
        return self._array

    def _shard(self, device: jax.Device, box: Box, pieces: list[tuple[Box, Any]]) -> jax.Array:
        adopt = self._group.runtime.adopt
        arrays = [adopt(p.buffer, p.event) if isinstance(p, _Arrival) else p for _, p in pieces]
        if len(arrays) == 1 and arrays[0].shape == boxes.shape_of(box):
            return arrays[0]
        places = tuple(tuple(start for start, _ in boxes.within(b, box)) for b, _ in pieces)
        with jax.default_device(device):
            return _assemble(arrays, places, boxes.shape_of(box), np.dtype(self._dtype))


@dataclasses.dataclass
class _Arrival:
    """Memory that NCCL fills: an array of XLA's, its own again once `event` has passed."""

    buffer: jax.Array
    event: Any = None


def send_or_recv(
    x: jax.Array | jax.ShapeDtypeStruct,
    tgt_sharding: Sharding,
    src_sharding: Sharding | None = None,
    *,
    name: str = "transfer",
    **options: Any,
) -> Transfer:
    """Moves `x` to `tgt_sharding`: sends what this process has of it, receives what it needs.

    Like `jax.device_put(x, tgt_sharding)`, over NCCL and between processes, asynchronously.
    x: the array, of any dtype of whole bytes; in a process without a source device its shape and
    dtype. src_sharding: needed there; elsewhere x's own. Equal or not, the two shardings may have
    other devices, numbers of devices and partition specs.
    name, options: of the group over all devices of both, created at the first transfer between
    them (see `create` and `configure`).
    Raises ValueError or TypeError, before anything is sent, for arguments that do not fit.

    Example, rows that four GPUs hold, moved to two others:
      >>> P, devices = jax.sharding.PartitionSpec("x"), np.array(jax.devices())
      >>> four, two = (jax.sharding.Mesh(d, ("x",)) for d in (devices[:4], devices[4:6]))
      >>> x = jax.device_put(np.arange(8), jax.sharding.NamedSharding(four, P))
      >>> y = pc.nccl.send_or_recv(x, jax.sharding.NamedSharding(two, P)).array()
      >>> [shard.data.tolist() for shard in y.addressable_shards]
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    source = _source_sharding(x, src_sharding)
    shape, dtype = tuple(x.shape), np.dtype(x.dtype)
    dtypes.moved(dtype)
    route = _route(shape, source, tgt_sharding)
    over = group.get(route.devices, name=name, **options)
    if isinstance(x, jax.Array):
        shards = {s.device: s.data for s in x.addressable_shards}
    elif any(over.rank(d) in over.communicators for d in route.have):
        raise TypeError(
            "this process owns source devices, so x must be the array itself, not its shape"
        )
    else:
        shards = {}
    return _start(over, route, shape, dtype, tgt_sharding, shards)


def send(x: jax.Array, tgt_sharding: Sharding, **options: Any) -> Transfer:
    """The sender's half of `send_or_recv`, where this process owns no target device.

    Its `wait` says when x's memory has been read. Raises ValueError if this process is a target.

    Example, which needs a second process:
      >>> pc.nccl.send(x, theirs).wait(timeout=60)  # doctest: +SKIP
    """
    _check_half(tgt_sharding, "receives as well", "send_or_recv(x, tgt_sharding)")
    return send_or_recv(x, tgt_sharding, **options)


def recv(
    x: jax.ShapeDtypeStruct, tgt_sharding: Sharding, src_sharding: Sharding, **options: Any
) -> Transfer:
    """The receiver's half of `send_or_recv`, where this process owns no source device.

    Its `array` gives the array. Raises ValueError if this process is a source.

    Example, which needs a second process:
      >>> shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
      >>> y = pc.nccl.recv(shape, mine, theirs).array()  # doctest: +SKIP
    """
    _check_half(src_sharding, "sends as well", "send_or_recv(x, tgt_sharding) with the array")
    return send_or_recv(x, tgt_sharding, src_sharding, **options)


def _check_half(sharding: Sharding, what: str, remedy: str) -> None:
    if sharding.addressable_devices:
        ids = sorted(map(_id, sharding.addressable_devices))
        raise ValueError(f"this process {what} (its devices {ids}): call {remedy}")


def _source_sharding(
    x: jax.Array | jax.ShapeDtypeStruct, src_sharding: Sharding | None
) -> Sharding:
    own = getattr(x, "sharding", None)
    if own is None:
        if src_sharding is None:
            raise ValueError(f"x is {x}, without a sharding: give src_sharding, the sender's")
        return src_sharding
    if src_sharding is not None:
        shape = tuple(x.shape)
        if own.devices_indices_map(shape) != src_sharding.devices_indices_map(shape):
            raise ValueError(f"x has {own}, not src_sharding={src_sharding}: leave it out")
    return own


@dataclasses.dataclass(frozen=True)
class _Route:
    """What goes where between two shardings, the same in every process.

    Attributes:
      have, need: the box of each source and each target device.
      pieces: the plan.
      devices: all of them, in order of rank.
      text: the plan's name.
    """

    have: dict[jax.Device, Box]
    need: dict[jax.Device, Box]
    pieces: list[boxes.Piece[jax.Device]]
    devices: tuple[jax.Device, ...]
    text: str


@functools.lru_cache(maxsize=1024)
def _route(shape: tuple[int, ...], source: Sharding, target: Sharding) -> _Route:
    have, need = _boxes(source, shape, "source"), _boxes(target, shape, "target")
    pieces = boxes.plan(have, need)
    listed = ";".join(f"{_id(p.source)}>{_id(p.target)}:{p.box}" for p in pieces)
    text = f"{list(shape)} by plan {zlib.crc32(listed.encode()):08x}"
    return _Route(have, need, pieces, tuple(sorted({*have, *need}, key=_id)), text)


def _boxes(sharding: Sharding, shape: tuple[int, ...], which: str) -> dict[jax.Device, Box]:
    device: jax.Device = next(iter(sharding.device_set))
    default = device.default_memory().kind
    if sharding.memory_kind not in (None, default):
        raise ValueError(f"the {which} sharding is of {sharding.memory_kind}: NCCL moves {default}")
    try:
        indices = sharding.devices_indices_map(shape)
    except (ValueError, IndexError) as error:
        raise ValueError(f"the {which} sharding does not fit shape {shape}: {error}") from error
    return {device: boxes.box_of(index, shape) for device, index in indices.items()}


def _start(
    over: group.Group,
    route: _Route,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    shards: dict[jax.Device, jax.Array],
) -> Transfer:
    with _forgetting:  # else two threads see one over, and the second drops that behind it
        while _pending and _pending[0]._over():
            _pending.popleft()
    runtime, transfer = over.runtime, Transfer(over, shape, dtype, sharding)
    streams = _streams.setdefault(over, {})
    lanes = {}
    for rank, communicator in over.communicators.items():
        if rank not in streams:
            streams[rank] = runtime.driver.new_stream(communicator.ordinal)
        lanes[over.devices[rank]] = Messages(communicator, [], [], streams[rank])
    transfer._parts = {d: (box, []) for d, box in route.need.items() if d in lanes}
    arrivals: list[tuple[jax.Device, _Arrival]] = []
    for piece in route.pieces:
        count = boxes.size(piece.box)
        part: Any = None
        if piece.source in lanes:
            box = boxes.within(piece.box, route.have[piece.source])
            part = _cut(shards[piece.source], box)
        if piece.source in lanes and piece.source != piece.target:
            lane = lanes[piece.source]
            transfer._held += part, runtime.lend(part, streams[lane.communicator.rank])
            lane.sends.append((part.unsafe_buffer_pointer(), count, over.rank(piece.target)))
        if piece.target in lanes and piece.source != piece.target:
            lane = lanes[piece.target]
            part = _Arrival(_empty(boxes.shape_of(piece.box), dtype, piece.target)())
            # The memory may have been another array's: the stream waits until it is free.
            transfer._held += part, runtime.lend(part.buffer, streams[lane.communicator.rank])
            address = part.buffer.unsafe_buffer_pointer()
            lane.recvs.append((address, count, over.rank(piece.source)))
            arrivals.append((piece.target, part))
        if piece.target in lanes:
            transfer._parts[piece.target][1].append((piece.box, part))
    exchange(list(lanes.values()), dtype, f"{dtype} {route.text}")
    events = {
        device: runtime.driver.record(lane.communicator.ordinal, lane.stream)
        for device, lane in lanes.items()
    }
    for device, arrival in arrivals:
        arrival.event = events[device]
    transfer._events = list(events.values())
    _pending.append(transfer)
    return transfer


def _id(device: jax.Device) -> int:
    return device.id


@functools.lru_cache(maxsize=1024)
def _empty(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Callable[[], jax.Array]:
    """Makes an array on `device`; `jnp.empty(device=...)` makes it on the first and copies it."""
    return jax.jit(lambda: jnp.empty(shape, dtype), out_shardings=SingleDeviceSharding(device))


def _cut(shard: Any, box: Box) -> jax.Array:
    """The box of a shard, in row-major order and memory of its own unless it is the whole shard."""
    whole = boxes.shape_of(box) == shard.shape
    if whole and shard.format.layout.major_to_minor == tuple(range(shard.ndim)):
        return shard
    return jax.lax.slice(shard, [start for start, _ in box], [stop for _, stop in box])


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _assemble(
    pieces: list[jax.Array],
    places: tuple[tuple[int, ...], ...],
    shape: tuple[int, ...],
    dtype: DType,
) -> jax.Array:
    """The pieces, each at its place, as one array."""
    whole = jnp.zeros(shape, dtype)
    for piece, place in zip(pieces, places, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, place)
    return whole
