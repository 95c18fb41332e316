"""Tables of each algorithm's times, by collective, chip, torus, devices and bytes.

A table is a JSON file:

    {"kind": "modelled",                          or "measured"
     "jax": "0.12.0",                             the JAX version it was made with
     "about": "what the times are of",
     "entries": [
       {"op": "all_gather", "chip": "v5e", "torus": "ring", "devices": 16,
        "bytes": [4096, 32768],                   of one block, ascending (see `choice`)
        "us": {"bidirectional": [12.1, 14.9],     microseconds, one for each of bytes
               "direct": [9.2, null]}}]}          null where the algorithm cannot run

An algorithm with ":packed" behind it sends numbers of one byte, packed in its kernel: bytes are
those of the block in bfloat16.

The package comes with one modelled by `replay` for every TPU generation (`MODELLED`);
`python -m benchmarks tune` writes both kinds.
"""

import dataclasses
import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import TableError

MODELLED = Path(__file__).with_name("modelled.json")
KINDS = ("modelled", "measured")
ONE_AXIS = ("line", "ring")
# Of several axes, with their sizes before it: "2x4 grid". Of the axes longer than two devices none
# closes to a ring, some do, or all.
OF_SEVERAL_AXES = ("grid", "cylinder", "torus")
PACKED = "packed"
NO_TPU = ("nccl", "xla")  # what stands for algorithms on GPUs: the backends
_TORUS = re.compile(rf"{'|'.join(ONE_AXIS)}|\d+(x\d+)+ ({'|'.join(OF_SEVERAL_AXES)})")
_KEYS = ("op", "chip", "torus", "devices", "bytes", "us")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The times of one collective over one group.

    Attributes:
      op: the canonical collective.
      chip: as `chips.Chip.name`; for GPUs the device_kind.
      torus: how the group lies on the links: one of `ONE_AXIS`, or as `torus_of_axes`.
      devices: devices in the group.
      bytes: bytes of one block, ascending.
      us: algorithm -> microseconds at each of `bytes`, None where it cannot run.
    """

    op: str
    chip: str
    torus: str
    devices: int
    bytes: tuple[int, ...]
    us: dict[str, tuple[float | None, ...]]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The fields by which entries of one table differ."""
        return self.op, self.chip, self.torus, self.devices


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A table of times, modelled or measured; see the module for its fields as a file has them."""

    path: str
    kind: str
    jax: str
    about: str
    entries: dict[tuple[str, str, str, int], Entry]

    @property
    def measured(self) -> bool:
        """Whether the times are of real devices."""
        return self.kind == "measured"

    @property
    def current(self) -> bool:
        """Whether it may serve: a measured table serves only under the JAX it was measured with."""
        return not self.measured or self.jax == jax.__version__

    @functools.cached_property
    def families(self) -> dict[tuple[str, str, str], dict[int, Entry]]:
        """(op, chip, `family` of the torus) -> the entries, by their number of devices."""
        found: dict[tuple[str, str, str], dict[int, Entry]] = defaultdict(dict)
        for entry in self.entries.values():
            found[entry.op, entry.chip, family(entry.torus)][entry.devices] = entry
        return dict(found)


def torus_of_axes(axes: Iterable[tuple[int, bool]]) -> str:
    """What a table calls a torus of several axes, each given by its devices and whether it is a
    line: "2x4 grid", "8x16 cylinder", "4x4 torus"."""
    sizes, lines = zip(*sorted(axes), strict=True)
    closing = [not line for size, line in zip(sizes, lines, strict=True) if size > 2]
    none, some, every = OF_SEVERAL_AXES
    word = none if not any(closing) else every if all(closing) else some
    return f"{'x'.join(map(str, sizes))} {word}"


def sizes_and_word(torus: str) -> tuple[tuple[int, ...], str]:
    """The parts of a `torus_of_axes`: (2, 4) and "grid"; no sizes for "ring" and "line"."""
    sizes, _, word = torus.rpartition(" ")
    return tuple(map(int, sizes.split("x"))) if sizes else (), word


def family(torus: str) -> str:
    """A torus without its sizes ("2-axis grid"), within which times are interpolated."""
    sizes, word = sizes_and_word(torus)
    return f"{len(sizes)}-axis {word}" if sizes else word


def families_like(torus: str) -> tuple[str, ...]:
    """The family of a torus, then the others with as many axes, then rings and lines."""
    sizes, _ = sizes_and_word(torus)
    alike = [f"{len(sizes)}-axis {word}" for word in OF_SEVERAL_AXES] if sizes else []
    return tuple(dict.fromkeys([family(torus), *alike, *reversed(ONE_AXIS)]))


def load(path: str | os.PathLike[str]) -> Table:
    """Reads a table.

    Raises:
      TableError: there is no file, or it is not a table; says which key breaks which rule.
    """
    try:
        status = os.stat(os.fspath(path))
    except TypeError:
        raise _error(repr(path), "the file", "it must be named by a path") from None
    except OSError as error:
        raise _error(path, "the file", str(error.strerror).lower()) from None
    return _load(os.path.abspath(path), status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _load(path: str, modified: int) -> Table:
    del modified  # part of the key: a file that has been written anew is read anew
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(path, "the file", f"it cannot be read as JSON ({error})") from None
    return parse(content, path)


def parse(content: Any, path: str) -> Table:
    """The table that a file at `path` holds.

    Raises:
      TableError: as `load`.
    """
    if not isinstance(content, dict):
        raise _error(path, "the file", "it must hold an object with kind, jax, about and entries")
    for key, expected in (("kind", str), ("jax", str), ("about", str), ("entries", list)):
        if not isinstance(content.get(key), expected):
            raise _error(path, key, f"it must be there, as a {expected.__name__}")
    if content["kind"] not in KINDS:
        raise _error(path, f"kind {content['kind']!r}", f"it must be one of {', '.join(KINDS)}")
    found: dict[tuple[str, str, str, int], Entry] = {}
    for number, raw in enumerate(content["entries"]):
        entry = _entry(raw, path, f"entries[{number}]")
        if entry.key in found:
            raise _error(path, f"entries[{number}]", f"{entry.key} has an entry already")
        found[entry.key] = entry
    return Table(path, content["kind"], content["jax"], content["about"], found)


def _entry(raw: Any, path: str, where: str) -> Entry:
    if not isinstance(raw, dict):
        raise _error(path, where, "it must be an object of " + ", ".join(_KEYS))
    op, chip, torus, devices, sizes, us = (raw.get(key) for key in _KEYS)
    if not isinstance(op, str) or op not in ALGORITHMS:
        raise _error(path, f"{where}.op {op!r}", f"it must be one of {', '.join(ALGORITHMS)}")
    if not isinstance(chip, str) or not chip:
        raise _error(path, f"{where}.chip {chip!r}", "it must be the name of a chip")
    if not isinstance(torus, str) or not _TORUS.fullmatch(torus):
        several = ", ".join(f"'2x4 {kind}'" for kind in OF_SEVERAL_AXES)
        rule = f"it must be one of {', '.join(ONE_AXIS)}, or like one of {several}"
        raise _error(path, f"{where}.torus {torus!r}", rule)
    if type(devices) is not int or devices < 2:
        raise _error(path, f"{where}.devices {devices!r}", "it must be a whole number above 1")
    if not isinstance(sizes, list) or not _are_sizes(sizes):
        raise _error(
            path, f"{where}.bytes {sizes!r}", "they must be ascending whole numbers above 0"
        )
    if not isinstance(us, dict) or not us:
        raise _error(path, f"{where}.us", "it must name the times of at least one algorithm")
    for name, times in us.items():
        base, _, space = name.partition(":")
        known = base in ALGORITHMS[op] and space in ("", "vmem", "hbm", PACKED)
        if not known and name not in NO_TPU:
            rule = (
                f"{op} has {', '.join(ALGORITHMS[op])}, alone or with ':vmem' or ':packed' behind"
            )
            raise _error(path, f"{where}.us {name!r}", rule)
        if not isinstance(times, list) or len(times) != len(sizes) or not all(map(_is_time, times)):
            rule = f"{len(sizes)} times, one for each of bytes: numbers above 0, or null"
            raise _error(path, f"{where}.us.{name}", rule)
    by_name = {name: tuple(times) for name, times in us.items()}
    return Entry(op, chip, torus, devices, tuple(sizes), by_name)


def _are_sizes(value: list[Any]) -> bool:
    if not value or any(type(size) is not int for size in value):
        return False
    return value[0] > 0 and value == sorted(set(value))


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 < value < float("inf"))


def _error(path: Any, key: str, rule: str) -> TableError:
    return TableError(
        f"{key} of the table {os.fspath(path)!r}",
        rule,
        "write the table with `python -m benchmarks tune`, or leave it out for the modelled one",
    )


def dump(table: Table) -> str:
    """The table as JSON, one line for each entry's algorithm."""
    head = {"kind": table.kind, "jax": table.jax, "about": table.about}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    entries = []
    for entry in table.entries.values():
        named = {k: v for k, v in dataclasses.asdict(entry).items() if k != "us"}
        times = ",\n    ".join(f"{json.dumps(a)}: {json.dumps(t)}" for a, t in entry.us.items())
        entries.append(f'  {json.dumps(named)[:-1]}, "us": {{\n    {times}}}}}')
    return "{" + "\n ".join(lines) + '\n "entries": [\n' + ",\n".join(entries) + "]}\n"
