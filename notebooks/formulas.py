"""Exercises whose answer is a formula, or a plain function of numbers; `exercises` has the others.

As there, each function returns what is wrong with the answer to the exercise of its name, or "".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import mistakes
import pallas_collectives as pc
from pallas_collectives import catalogue, wires
from pallas_collectives.topology import groups


class NotYet(Exception):
    """The exercise is as it was found."""


def given(value: Any) -> Any:
    """An answer, if there is one."""
    if value is None:
        raise NotYet
    return value


def begun(answer: Callable[..., Any]) -> None:
    """Raises NotYet for a kernel whose body is empty."""

    def empty() -> None: ...

    if answer.__code__.co_code == empty.__code__.co_code:
        raise NotYet


def _differs(answer: Callable[..., Any], right: Callable[..., Any], cases: list[Any]) -> str:
    """The first case in which an answer is wrong, and by which mistake; "" if it is right."""
    want, got = [right(*case) for case in cases], []
    for case, one in zip(cases, want, strict=True):
        got.append(given(answer(*case)))
        if kind := other_kind(got[-1], one):
            return f"{answer.__name__}{case} must be {kind}, not {got[-1]!r}"
    for case, mine, one in zip(cases, got, want, strict=True):
        if not np.allclose(mine, one, rtol=1e-6, atol=0):
            mistake = mistakes.named(answer.__name__, cases, got, want)
            said = f"{answer.__name__}{case} must be {one}, and yours is {mine}"
            return f"{said}: {mistake}" if mistake else said
    return ""


def other_kind(got: Any, want: Any) -> str:
    """What is wanted, in words, where an answer is something else; "" if it is of that kind."""
    try:
        array = np.asarray(list(got) if isinstance(got, range | zip | map) else got)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind in "iufb" and array.shape == np.shape(want):
        return ""
    shape = np.shape(want)
    if not shape:
        return "a number"
    return f"a list of {shape[0]} {'numbers' if len(shape) == 1 else 'lists of numbers'}"


# 01: the ring -----------------------------------------------------------------------------------


def block_sent(answer: Any) -> str:
    cases = [(me, step, n) for n in (2, 5, 8) for me in range(n) for step in range(n - 1)]
    return _differs(answer, lambda me, step, n: (me - step) % n, cases)


def steps(answer: Any) -> str:
    def right(n: int, bidirectional: bool) -> int:
        streams = groups.streams(n, bidirectional=bidirectional, chunks=2)
        return max(stream.hops for stream in streams)

    return _differs(answer, right, [(n, both) for n in range(2, 10) for both in (False, True)])


def bytes_to_the_right(answer: Any) -> str:
    def right(n: int, nbytes: int) -> float:
        to_right = groups.streams(n, bidirectional=True, chunks=2)[0]
        return sum(to_right.hops_of(chunk) for chunk in range(2)) * nbytes / 2

    return _differs(answer, right, [(n, nbytes) for n in (2, 4, 8) for nbytes in (1024, 1 << 20)])


# 03: reduce-scatter -----------------------------------------------------------------------------


def block_summed(answer: Any) -> str:
    cases = [(me, step, n) for n in (2, 5, 8) for me in range(n) for step in range(n - 1)]
    return _differs(answer, lambda me, step, n: (me + n - 1 - step) % n, cases)


def credits_given(answer: Any) -> str:
    def right(hops: int, slots: int) -> int:
        return sum(step >= slots for step in range(hops))

    return _differs(answer, right, [(hops, slots) for hops in range(1, 9) for slots in (1, 2, 3)])


def order_of_terms(answer: Any) -> str:
    def right(me: int, n: int) -> list[int]:
        return [(me - hops) % n for hops in range(n - 1, -1, -1)]

    return _differs(answer, right, [(me, n) for n in (2, 3, 8) for me in range(n)])


# 04: all-reduce ---------------------------------------------------------------------------------

_LINKS = [(n, nbytes, 1e-6, 90e9) for n in (2, 4, 8, 16) for nbytes in (0.0, 1e5, 1e8)]


def ring_seconds(answer: Any) -> str:
    def right(n: int, nbytes: float, hop: float, bandwidth: float) -> float:
        streams = groups.streams(n, bidirectional=True, chunks=2)
        steps = max(stream.hops for stream in streams)
        return 2 * (steps * hop + (n - 1) / 2 * (nbytes / n) / bandwidth)

    return _differs(answer, right, _LINKS)


def _one_shot(n: int, nbytes: float, hop: float, bandwidth: float) -> float:
    distances = sum(min(d, n - d) for d in range(1, n))  # of one device's n-1 sends
    return hop + n * distances * nbytes / (2 * n) / bandwidth


def one_shot_seconds(answer: Any) -> str:
    return _differs(answer, _one_shot, _LINKS)


def crossing(answer: Any) -> str:
    def right(n: int, hop: float, bandwidth: float) -> float:
        per_byte = _one_shot(n, 1.0, 0.0, bandwidth) - (n - 1) / n / bandwidth
        return (2 * (n // 2) - 1) * hop / per_byte

    return _differs(answer, right, [(n, 1e-6, 90e9) for n in (4, 8, 16)])


# 05: all-to-all ---------------------------------------------------------------------------------


def random_counts(n: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 5, (n, n))


def padded_rows(answer: Any) -> str:
    cases = [(random_counts(n),) for n in (2, 4, 8)]
    return _differs(answer, lambda c: c.max() * (c.size - len(c)), cases)


def balanced(answer: Any) -> str:
    rng = np.random.default_rng(5)
    wishes = np.argsort(rng.exponential(size=(64, 8)) * (1 + np.arange(8)), axis=1)
    for room in (8, 16):
        chosen = np.asarray(given(answer(wishes.copy(), room)))
        if chosen.shape != (64,) or chosen.dtype.kind not in "iu":
            kind = f"an array of {chosen.dtype}, {chosen.shape}"
            return f"a whole number, an expert's, for each of 64 tokens is wanted, not {kind}"
        if ((chosen < 0) | (chosen >= 8)).any():
            return "experts are numbered from 0 to 7"
        busiest = np.bincount(chosen, minlength=8).max()
        if busiest > room:
            return f"an expert has {busiest} tokens, and room for {room}"
        taken = np.zeros(8, int)
        for token, (expert, order) in enumerate(zip(chosen, wishes, strict=True)):
            first = next(e for e in order if taken[e] < room)
            if expert != first:
                return f"room {room}: token {token} could have expert {first}, and gets {expert}"
            taken[expert] += 1
    return ""


# 06: tori ---------------------------------------------------------------------------------------


def round_trip(answer: Any) -> str:
    for rows, columns in ((2, 4), (4, 4), (2, 2), (6, 5)):
        got = given(answer(rows, columns))
        if kind := other_kind(got, np.zeros((rows * columns, 2))):
            return f"on {rows} x {columns} chips: {kind} is wanted, of (row, column), not {got!r}"
        chips = [tuple(map(int, chip)) for chip in got]
        if sorted(chips) != [(r, c) for r in range(rows) for c in range(columns)]:
            return f"on {rows} x {columns} chips: each must be visited once"
        for (r, c), (s, d) in zip(chips, (*chips[1:], chips[0]), strict=True):
            if abs(r - s) + abs(c - d) != 1:
                return f"on {rows} x {columns} chips: from {r, c} to {s, d} there is no link"
    return ""


def bytes_per_link(answer: Any) -> str:
    cases = [(n, d, 1 << 20) for n, d in ((4, 1), (16, 2), (64, 3), (256, 2))]
    return _differs(answer, lambda n, d, nbytes: (n - 1) * nbytes / (2 * d), cases)


# 07: hiding the wire ----------------------------------------------------------------------------


def speedup_at_best(answer: Any) -> str:
    def right(wire: float, product: float) -> float:
        return 1 + min(wire, product) / max(wire, product)

    return _differs(answer, right, [(1e-4, 1e-4), (3e-4, 1e-4), (1e-4, 4e-4)])


def columns_to_hide(answer: Any) -> str:
    def right(itemsize: int, flops: float, bandwidth: float) -> float:
        wire = itemsize / (2 * bandwidth)  # of one element of x, half the blocks each way
        product_per_column = 2 / flops
        return wire / product_per_column

    cases = [(2, 920e12, 90e9), (1, 1840e12, 90e9), (2, 197e12, 45e9)]
    return _differs(answer, right, cases)


# 09: reading a benchmark ------------------------------------------------------------------------


def _busbw(op: str, size: float, seconds: float, n: int) -> float:
    return size / seconds * catalogue.functions()[op].example.busbw(n)


# A choice: those of which the lesson speaks.
_OPS = ("all_gather", "psum_scatter", "psum", "all_to_all")


def busbw(answer: Any) -> str:
    cases = [(op, size, 1e-4, n) for op in _OPS for size in (1e6, 1e8) for n in (2, 4, 8)]
    return _differs(answer, _busbw, cases)


def impossible(answer: Any) -> str:
    link, size = 90e9, 1e8
    shares = zip(_OPS * 2, (0.5, 0.9, 1.1, 0.99, 1.01, 0.02, 0.7, 2.0), strict=True)
    rows = [(op, size, _busbw(op, size, 1.0, 4) / (2 * link * share), 4) for op, share in shares]
    got = given(answer(rows, link))
    if not isinstance(got, list | tuple):
        return f"a list of rows is wanted, not {got!r}"
    if strange := [row for row in got if row not in rows]:
        return f"{strange[0]!r} is none of the rows that were given"
    for row in rows:
        share = _busbw(*row) / (2 * link)
        if (row in got) != (share > 1):
            return f"{row}: its busbw is {share:.0%} of what two links carry"
    return ""


# 10: fewer bytes --------------------------------------------------------------------------------


def bytes_of_row(answer: Any) -> str:
    cases = [(columns, group) for columns in (128, 4096, 1000, 100) for group in (128, 256)]
    return _differs(answer, lambda columns, group: columns + 4 * -(-columns // group), cases)


def most_off(answer: Any) -> str:
    def right(n: int, largest: float, ring: bool) -> float:
        return largest / 254 * (n * (n - 1) / 2 if ring else n)

    cases = [(n, m, ring) for n in (2, 4, 16) for m in (1.0, 40.0) for ring in (False, True)]
    return _differs(answer, right, cases)


def choose_group(answer: Any) -> str:
    rng, groups = np.random.default_rng(3), ("row", 256, 128)
    smooth = rng.normal(size=(64, 1024)).astype(np.float32)
    few, many = smooth.copy(), smooth.copy()
    few[::4, 700] = 200.0
    many[:, ::128] = 200.0
    asked = [
        ("numbers without outliers", smooth, 0.02),
        ("numbers without outliers", smooth, 1e-4),
        ("a large number in every fourth row", few, 0.15),
        ("a large number in every fourth row", few, 0.09),
        ("a large number in each 128", many, 0.2),
        ("a large number in each 128", many, 0.5),
    ]
    for name, x, most in asked:
        case = f"{name}, and {most} at most"
        got = given(answer(x.copy(), most))
        if not isinstance(got, str | int) or got not in (*groups, "bfloat16"):
            return f"{case}: 'row', 256, 128 or 'bfloat16' is wanted, not {got!r}"
        off = {group: _root_mean_square(x, group) for group in groups}
        right = next((group for group in groups if off[group] <= most), "bfloat16")
        if got == right:
            continue
        if got in groups and off[got] > most:
            return f"{case}: by groups of {got} they are off by {off[got]:.2g}"
        return f"{case}: groups of {right} are off by {off[right]:.2g} only, with fewer bytes"
    return ""


def _root_mean_square(x: np.ndarray, group: int | str) -> float:
    sent = wires.as_sent(jnp.asarray(x), pc.Wire("int8", group=group))
    return float(np.sqrt(np.mean((np.asarray(sent) - x) ** 2)))
