"""`compare A.json B.json`: what is slower, larger or no longer right in B, beyond noise.

A time is slower if its fastest sample is above the slowest of before: the spreads do not meet. A
model's time and a compiler's figure have no noise, and may not grow at all.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import results, tables
from benchmarks.results import Saved
from benchmarks.rows import Compiled, Measured, Ran, Replayed, Row, Stepped, Wired
from benchmarks.settings import FlagError
from benchmarks.tables import Screen

# What must not differ, or nothing can be compared.
_SAME = ("chip", "platform", "devices", "mesh", "axes", "chain")
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of two runs.

    Attributes:
      part: the part of the run.
      row: the row of the second run.
      before, after: microseconds, or bytes of a compiled program.
      verdict: "", "faster", "SLOWER", "smaller", "LARGER", "right again", or what is wrong now.
    """

    part: str
    row: Row
    before: float | None
    after: float | None
    verdict: str

    @property
    def is_regression(self) -> bool:
        """Whether the second run is worse."""
        return self.verdict[:1].isupper()


def main(argv: Sequence[str]) -> int:
    """Prints the changes; 1 if any is a regression."""
    if len(argv) != 3:
        raise FlagError("compare", "it needs two files of results", "write compare A.json B.json")
    before, after = map(results.load, argv[1:])
    for name in _SAME:
        a, b = ((of.environment | of.settings).get(name) for of in (before, after))
        if a != b:
            rule = f"their {name} differs: {a} and {b}"
            raise FlagError(
                " and ".join(argv[1:]), rule, "compare runs of the same devices, axes and clock"
            )
    changes = list(compare(before, after))
    if not changes:
        rule = "the two have no row in common"
        raise FlagError(" and ".join(argv[1:]), rule, "compare runs of the same flags")
    _show(Screen(), before, after, changes)
    return int(any(change.is_regression for change in changes))


def compare(before: Saved, after: Saved) -> Iterator[Change]:
    """The rows that both runs have."""
    for part, rows in after.parts.items():
        old = {row.key: row for row in before.parts.get(part, [])}
        for row in rows:
            if row.key in old:
                yield _change(part, old[row.key], row)


def _change(part: str, old: Row, new: Row) -> Change:
    a, b = _figure(old), _figure(new)
    verdict = ""
    if new.failed and not old.failed:
        verdict = f"WRONG: {new.reason or 'elements'}"
    elif old.failed and not new.failed:
        verdict = "right again"
    elif new.refused and not old.refused:
        verdict = f"REFUSED: {new.refused}"
    elif a is not None and b is not None:
        verdict = _against(old, new)
    return Change(part, new, a, b, verdict)


def _figure(row: Row) -> float | None:
    """What is held against another run's; None of parts that have no such figure."""
    figure: float | None = getattr(row, "temp" if isinstance(row, Compiled) else "time_us", None)
    return figure


def _against(old: Any, new: Any) -> str:
    match new:
        case Measured() | Ran():
            if new.time_us_min > old.time_us_max:
                return "SLOWER"
            return "faster" if new.time_us_max < old.time_us_min else ""
        case Wired() if None in (old.passes_us, new.passes_us):
            return ""  # measured, and its spread is not kept
        case Replayed() | Stepped() | Wired():
            words, a, b = ("faster", "SLOWER"), old.time_us, new.time_us
        case Compiled():
            if old.ops != new.ops:
                return f"OTHER PROGRAM: {old.ops} -> {new.ops}"
            words, a, b = ("smaller", "LARGER"), old.temp, new.temp
        case _:
            raise AssertionError(new)
    if abs(b - a) <= _ROUNDING * a:
        return ""
    return words[b > a]


def _show(screen: Screen, before: Saved, after: Saved, changes: Sequence[Change]) -> None:
    for name in sorted({*before.environment, *after.environment} - {"command", "commit"}):
        pair = before.environment.get(name), after.environment.get(name)
        if pair[0] != pair[1]:
            screen.say(f"{name}: {pair[0]} -> {pair[1]}")
    commits = dict.fromkeys((before.environment["commit"], after.environment["commit"]))
    screen.say(f"commit: {' -> '.join(map(str, commits))}")
    told = [change for change in changes if change.verdict]
    if told:
        screen.say(tables.grid(_HEADERS, list(map(_cells, told)), _IS_TEXT))
    worse = sum(change.is_regression for change in changes)
    alone = sum(map(len, after.parts.values())) - len(changes)
    missing = sum(map(len, before.parts.values())) - len(changes)
    screen.say(
        f"{len(changes)} rows in both, {worse} worse, {len(told) - worse} better; "
        f"{missing} only in the first, {alone} only in the second"
    )


_HEADERS = ("part", "row", "type", "size", "before", "after", "change", "verdict")
_IS_TEXT = (True, True, True, False, False, False, False, True)


def _cells(change: Change) -> tuple[str, ...]:
    a, b = change.before, change.after
    unit = "B" if isinstance(change.row, Compiled) else "us"
    return (
        change.part,
        str(change.row),
        change.row.type,
        str(getattr(change.row, "size", "-")),
        "-" if a is None else f"{a:.1f} {unit}",
        "-" if b is None else f"{b:.1f} {unit}",
        f"{100 * (b - a) / a:+.1f}%" if a and b is not None else "-",
        change.verdict,
    )
