"""What a profile says that a device waited for: the time of collectives with no compute beside it.

JAX's profiler writes what each device did as lines of events. A collective is exposed while it is
under way and nothing else runs on its device; the rest of its time is hidden. Where profiles have
which events:

    TPU     planes "/device:TPU:0", lines "XLA Ops" (the core, which waits in `...-done` operations)
            and "Async XLA Ops" (what DMA engines and SparseCores run beside it)
    GPU     planes "/device:GPU:0", a line for each stream
    CPU     the plane "/host:CPU": events of threads, each with the device that it ran for
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

# XLA's collectives, by the names of its instructions and of lax's functions; ours; NCCL's kernels.
_COLLECTIVE = re.compile(
    r"(all|reduce|ragged_all|ragged-all)[-_](gather|reduce|scatter|to[-_]all)"
    r"|collective[-_](permute|broadcast)|psum|pmax|pmin|ppermute|async-collective|nccl",
    re.IGNORECASE,
)
_TPU_LINES = ("XLA Ops", "Async XLA Ops")


class Event(NamedTuple):
    """An operation on a device; times in microseconds, from any zero."""

    device: str
    line: str
    name: str
    begin: float
    end: float


class Share(NamedTuple):
    """What became of one device's time, in microseconds."""

    compute_us: float
    exposed_us: float
    hidden_us: float


def of(folder: str) -> dict[str, Share]:
    """The shares of each device in the profile that was written last into a folder.

    Raises:
      ValueError: there is no profile, or it has no operations of devices.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder} holds no profile: no file *.xplane.pb")
    found = shares(events(jax.profiler.ProfileData.from_file(str(files[-1]))))
    if not found:
        raise ValueError(f"{files[-1]} has no operation of a device")
    return found


def events(profile: Any) -> Iterator[Event]:
    """The operations of devices in a `jax.profiler.ProfileData`."""
    for plane in profile.planes:
        device = re.match(r"/device:(TPU|GPU):\d+", plane.name)
        if device is None and plane.name != "/host:CPU":
            continue
        for number, line in enumerate(plane.lines):
            if device and device[1] == "TPU" and line.name not in _TPU_LINES:
                continue
            if device and device[1] == "GPU" and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                where = device[0] if device else _cpu_device(event)
                if where:
                    begin, took = event.start_ns / 1e3, event.duration_ns / 1e3
                    yield Event(where, f"{number} {line.name}", event.name, begin, begin + took)


def _cpu_device(event: Any) -> str:
    stats = dict(event.stats)
    return f"CPU {stats.get('device_ordinal', 0)}" if "hlo_op" in stats else ""


def shares(found: Iterable[Event]) -> dict[str, Share]:
    """The shares of each device."""
    by_line: dict[tuple[str, str], list[Event]] = {}
    for event in found:
        by_line.setdefault((event.device, event.line), []).append(event)
    kinds: dict[str, tuple[list[Stretch], list[Stretch]]] = {}
    for (device, _), of_line in by_line.items():
        collectives, compute = kinds.setdefault(device, ([], []))
        for event in _innermost(of_line):
            to = collectives if _COLLECTIVE.search(event.name) else compute
            to.append((event.begin, event.end))
    return {device: _share(*both) for device, both in kinds.items()}


Stretch = tuple[float, float]


def _innermost(of_line: list[Event]) -> Iterator[Event]:
    """The events of a line that hold no others: a loop's event spans what runs in it."""
    ordered = sorted(of_line, key=lambda event: (event.begin, -event.end))
    for event, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is None or following.begin >= event.end or following.end > event.end:
            yield event


def _share(collectives: list[Stretch], compute: list[Stretch]) -> Share:
    wire, busy = _union(collectives), _union(compute)
    either = _length(_union([*wire, *busy]))
    computes = _length(busy)
    exposed = either - computes
    return Share(computes, exposed, _length(wire) - exposed)


def _union(stretches: list[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(stretches: list[Stretch]) -> float:
    return sum(end - begin for begin, end in stretches)
