"""Which devices behave identically: a colouring of devices and links that replay may step one of
each class of.

Colour refinement to the coarsest equitable partition: two devices share a colour while they perform
the same instructions, send to and receive from devices of equal colours at the same points, over
links of equal colours, on semaphores that are signalled and awaited alike; two links while the same
copies of equally coloured devices cross them. The model is deterministic and treats equals equally,
so devices of one colour keep one timeline and stepping one of them is exact (up to collisions of
64-bit hashes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_collectives.replay.machine import Machine
from pallas_collectives.replay.program import Instruction, Program, Signal, Start, Wait


@dataclasses.dataclass(frozen=True)
class Classes:
    """Colours as class numbers: of each mesh position, and of each link."""

    of_device: np.ndarray
    of_link: np.ndarray
    representatives: np.ndarray  # one device of each class
    device_count: np.ndarray  # devices in each class
    link_count: np.ndarray


def discrete(n_devices: int, n_links: int) -> Classes:
    """Every device on its own: the plain simulation."""
    devices, links = np.arange(n_devices), np.arange(n_links)
    return Classes(devices, links, devices, np.ones(n_devices, int), np.ones(n_links, int))


def refine(program: Program, machine: Machine, placement: np.ndarray) -> Classes:
    """The coarsest equitable partition of `program`'s devices at `placement` on `machine`."""
    placement = np.tile(placement, program.cores)
    device = _by_own_instructions(program)
    link = _number(machine.link_capacity)
    groups = list(_groups(program))
    shared = _shared_semaphores(program)
    counts = (0, 0)
    while True:
        device, link = _round(program, machine, placement, groups, shared, device, link)
        now = (int(device.max()) + 1, int(link.max()) + 1)
        if now == counts or now[0] == program.n_devices:
            break
        counts = now
    if int(device.max()) + 1 == program.n_devices:
        return discrete(program.n_devices, machine.n_links)
    _, first = np.unique(device, return_index=True)
    of_device, of_link = device.astype(int), link.astype(int)
    return Classes(of_device, of_link, first, np.bincount(of_device), np.bincount(of_link))


def _mix(x: np.ndarray, salt: int) -> np.ndarray:
    """SplitMix64's finaliser: 64-bit values to well-spread 64-bit values."""
    x = x.astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _by_own_instructions(program: Program) -> np.ndarray:
    """First colours: devices that perform different instructions, or with other sizes, differ."""
    colour = np.zeros(program.n_devices, np.uint64)
    for k, column in enumerate(program.columns):
        if len(column.lanes) < program.n_devices:
            colour[column.lanes] += _mix(np.array([k]), 1)
        for salt, name in enumerate(("nbytes", "value")):
            field = getattr(column, name, None)
            if isinstance(field, np.ndarray):
                colour[column.lanes] += _mix(
                    field.astype(np.int64).view(np.uint64), 2 + salt + 8 * k
                )
    return _number(colour)


def _number(colour: np.ndarray) -> np.ndarray:
    return np.unique(colour, return_inverse=True)[1].reshape(colour.shape).astype(np.uint64)


def _groups(program: Program) -> Iterator[tuple[int, np.ndarray, np.ndarray, bool]]:
    """Each distinct pattern (lanes, targets, moves data) of communication: (salt, lanes, targets,
    is a copy).
    """
    seen: dict[Any, None] = {}
    for column in program.columns:
        if not isinstance(column, (Start, Signal)) or column.target is None:
            continue
        target = column.target
        key = (
            id(target) if isinstance(target, np.ndarray) else target,
            column.lanes.tobytes() if len(column.lanes) < program.n_devices else None,
            isinstance(column, Start),
        )
        if key in seen:
            continue
        seen[key] = None
        targets = np.broadcast_to(np.asarray(target), column.lanes.shape)
        yield len(seen), column.lanes, targets, isinstance(column, Start)


def _shared_semaphores(program: Program) -> np.ndarray:
    """The semaphores that some instruction names per device: their roles must be told apart by
    colour.
    """
    mask = np.zeros(len(program.semaphores), bool)
    for column in program.columns:
        for name in ("sem", "src_sem", "dst_sem"):
            field = getattr(column, name, None)
            if isinstance(field, np.ndarray):
                mask[field] = True
    return mask


def _round(
    program: Program,
    machine: Machine,
    placement: np.ndarray,
    groups: list[tuple[int, np.ndarray, np.ndarray, bool]],
    shared: np.ndarray,
    device: np.ndarray,
    link: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    new_device, new_link = _mix(device, 0), _mix(link, 0)
    for salt, lanes, targets, is_copy in groups:
        salt *= 4
        new_device[lanes] += _mix(device[targets], salt)
        np.add.at(new_device, targets, _mix(device[lanes], salt + 1))
        hops = np.zeros(len(lanes), np.uint64)
        for links in machine.routes(placement[lanes], placement[targets]):
            used = np.nonzero(links >= 0)[0]
            hops[used] += np.uint64(1)
            if is_copy:
                at = links[used]
                new_device[lanes[used]] += _mix(link[at], salt + 2)
                np.add.at(new_link, at, _mix(device[lanes[used]], salt + 2))
        new_device[lanes] += _mix(hops, salt + 3)
    if shared.any():
        new_device += _semaphore_roles(program, shared, device)
    return _number(new_device), _number(new_link)


def _semaphore_roles(program: Program, shared: np.ndarray, device: np.ndarray) -> np.ndarray:
    """A hash per device of how each semaphore it names is used by others: renaming semaphores must
    not matter.
    """
    number = np.cumsum(shared) - 1
    roles = np.zeros((program.n_devices, int(shared.sum())), np.uint64)
    uses: list[
        tuple[int, np.ndarray, np.ndarray, np.ndarray]
    ] = []  # salt, lanes, device, semaphore
    for k, column in enumerate(program.columns):
        lanes = column.lanes
        for salt, owner, sem in _semaphore_uses(column):
            sems = np.broadcast_to(np.asarray(sem), lanes.shape)
            owners = np.broadcast_to(np.asarray(lanes if owner is None else owner), lanes.shape)
            if not isinstance(sem, np.ndarray) and not shared[sem]:
                continue
            at = number[sems]
            uses.append((4 * k + salt, lanes, owners, at))
            np.add.at(roles, (owners, at), _mix(device[lanes], 4 * k + salt))
    out = np.zeros(program.n_devices, np.uint64)
    for salt, lanes, owners, at in uses:
        np.add.at(out, lanes, _mix(roles[owners, at], salt))
    return out


def _semaphore_uses(column: Instruction) -> Iterator[tuple[int, Any, Any]]:
    """(which field, the semaphore's device or None for here, the semaphore) of one column."""
    if isinstance(column, Start):
        yield 0, column.target, column.dst_sem
        if column.src_sem is not None:
            yield 1, None, column.src_sem
    elif isinstance(column, Signal):
        yield 2, column.target, column.sem
    elif isinstance(column, Wait):
        yield 3, None, column.sem
