"""`check(answer)`: says "right", or what is wrong. One function here for each exercise.

An exercise is a function that the reader fills in; the function here that bears its name returns
what is wrong with it, or "". As long as it returns nothing (`...`), it is not yet done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import lesson
import miniatures
import pallas_collectives as pc
from pallas_collectives import verify
from pallas_collectives.kernels.machinery import launch
from pallas_collectives.topology import groups
from pallas_collectives.topology.groups import Group
from pallas_collectives.verify import findings
from pallas_collectives.verify.findings import Finding


class NotYet(Exception):
    """The exercise is as it was found."""


def check(answer: Callable[..., Any]) -> None:
    """Says whether the answer to the exercise of this name is right, or what is wrong."""
    try:
        problem = EXERCISES[answer.__name__](answer)
    except NotYet:
        print(f"not yet: {answer.__name__} returns nothing so far; your turn")
    except Exception as error:
        print(f"wrong: it raises {type(error).__name__}: {error}")
    else:
        print(f"wrong: {problem}" if problem else "right")


def given(value: Any) -> Any:
    """An answer, if there is one."""
    if value is None:
        raise NotYet
    return value


def _differs(answer: Callable[..., Any], right: Callable[..., Any], cases: list[Any]) -> str:
    """The first case in which an answer is not the right one; "" if there is none."""
    for case in cases:
        got, want = given(answer(*case)), right(*case)
        if not np.allclose(got, want, rtol=1e-6, atol=0):
            return f"{answer.__name__}{case} is {want}, not {got}"
    return ""


# 00: a remote copy -----------------------------------------------------------------------------


def reversal(answer: Any) -> str:
    n = 5
    pairs = given(answer(n))
    if len(pairs) != n:
        return f"{len(pairs)} pairs for {n} devices"
    x = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, 8, 128))
    got = lesson.per_device(lambda x: pc.ppermute(x, "x", pairs), n)(x)[:, 0, 0].astype(int)
    return "" if list(got) == list(range(n))[::-1] else f"arrays end in the order {list(got)}"


def two_to_the_right(answer: Any) -> str:
    n, shape = 4, (8, 128)

    def program(x: jax.Array, interpret: Any = False) -> jax.Array:
        return launch.call(
            lambda ring, x_ref, o_ref, scratch: answer(ring, x_ref, o_ref, *scratch),
            Group(("x",), (n,)),
            x,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch=(pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA),
            barrier="everyone",
            name="exercise",
            interpret=interpret,
        )

    report = lesson.replayed(program, n, shape, races=True)
    if not lesson.copies(report):
        raise NotYet
    if problem := _fault(report):
        return problem
    x = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, *shape))
    run = lesson.per_device(lambda x: program(x, lesson.adversary()), n)
    outcome = lesson.watch(lambda: run(x))
    want = np.roll(x, 2, axis=0)
    return "" if not outcome.wrong(want) and not outcome.races else outcome.say(want)


def _fault(report: Any) -> str:
    """The first thing that a replay found wrong, and what would mend it; "" if it is sound."""
    found = findings.of_report(report)
    return _mistake(found[0]) if found else ""


def _mistake(finding: Finding) -> str:
    """What is wrong, why, and what would help, in a sentence."""
    kinds = {
        "early-read": "a race",
        "entry": "a race",
        "race": "a race",
        "deadlock": "it never ends",
    }
    kind = kinds.get(finding.rule, f"a fault ({finding.rule})")
    return f"{kind}: {finding.what}; {finding.why}. To mend it: {finding.remedy}"


def _judged(program: Callable[..., Any], *operands: str, devices: tuple[int, ...]) -> str:
    """The first mistake on the first size that shows one; "" if the program is sound on all."""
    for case in verify.check(program, *operands, devices=devices).cases:
        for finding in case.findings:
            return f"on {case.devices} devices {_mistake(finding)}"
        if case.unjudged:
            return case.unjudged
    return ""


# 01: the ring ----------------------------------------------------------------------------------


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


# 02: races -------------------------------------------------------------------------------------


def semaphore_of(answer: Any) -> str:
    window = 3
    for step in range(7):
        number = int(given(answer(step, window)))
        if not 0 <= number < window:
            return f"step {step} uses semaphore {number}, and there are 0 to {window - 1}"
    return _judged(miniatures.windowed(answer, window), "f32[8,128]", devices=(8,))


def a_fault(answer: Any) -> str:
    n, kernel = 6, given(answer())
    x = np.random.default_rng(0).integers(0, 100, (n, 16, 128)).astype(np.float32)
    if fault := _judged(kernel, "f32[16,128]", devices=(n,)):
        print(f"caught by the judge: {fault}")
        return ""
    run = lesson.per_device(lambda x: kernel(x, interpret=lesson.adversary()), n)
    outcome = lesson.watch(lambda: run(x))
    if outcome.races or outcome.error:
        print(f"caught by the simulator: {outcome.say(x)}")
        return ""
    if outcome.wrong(np.broadcast_to(x, (n, *x.shape))):
        print("not caught as a race, but the answer is wrong: a fault of arithmetic, not of order")
        return ""
    return "the kernel is still sound, and its answer right"


# 03: reduce-scatter ----------------------------------------------------------------------------


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


# 04: all-reduce --------------------------------------------------------------------------------

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


# 05: all-to-all --------------------------------------------------------------------------------


def _counts(n: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 5, (n, n))


def offsets(answer: Any) -> str:
    n = 4
    counts = _counts(n)
    given(answer(counts, 0))
    lists = [answer(counts, me) for me in range(n)]
    if any(len(four) != 4 or any(len(each) != n for each in four) for four in lists):
        return f"four lists of {n} numbers each are wanted"
    names = ("where the rows begin", "how many are sent", "where they go", "how many come")
    for k, right in ((1, counts), (3, counts.T)):
        if not np.array_equal([four[k] for four in lists], right):
            return f"list {k + 1}, {names[k]}"  # others would wait for ever
    rows = int(max(counts.sum(0).max(), counts.sum(1).max()))
    tokens = np.zeros((n, rows, 128), np.float32) - 1
    want = np.zeros_like(tokens) - 1
    for me in range(n):
        senders = np.repeat(np.arange(n), counts[:, me])
        want[me, : len(senders)] = 10 * senders[:, None] + me
        receivers = np.repeat(np.arange(n), counts[me])
        tokens[me, : len(receivers)] = 10 * me + receivers[:, None]

    def program(x: jax.Array, *four: jax.Array) -> jax.Array:
        return pc.ragged_all_to_all(x, x * 0 - 1, *four, axis_name="x")

    columns = [np.array([four[k] for four in lists], np.int32) for k in range(4)]
    got = lesson.per_device(program, n)(tokens, *columns)
    if np.array_equal(got, want):
        return ""
    device = int(np.argmax((got != want).any(axis=(1, 2))))
    rows = f"rows {got[device, :, 0]}, not {want[device, :, 0]}"
    return f"device {device} ends with {rows} (10 * from + to)"


def padded_rows(answer: Any) -> str:
    cases = [(_counts(n),) for n in (2, 4, 8)]
    return _differs(answer, lambda c: c.max() * (c.size - len(c)), cases)


def balanced(answer: Any) -> str:
    rng = np.random.default_rng(5)
    wishes = np.argsort(rng.exponential(size=(64, 8)) * (1 + np.arange(8)), axis=1)
    for room in (8, 16):
        chosen = np.asarray(given(answer(wishes.copy(), room)))
        if chosen.shape != (64,):
            return f"an expert for each of 64 tokens is wanted, not an array of {chosen.shape}"
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


# 06: tori --------------------------------------------------------------------------------------


def round_trip(answer: Any) -> str:
    for rows, columns in ((2, 4), (4, 4), (2, 2), (6, 5)):
        chips = [tuple(map(int, chip)) for chip in given(answer(rows, columns))]
        if sorted(chips) != [(r, c) for r in range(rows) for c in range(columns)]:
            return f"on {rows} x {columns} chips: each is to be visited once"
        for (r, c), (s, d) in zip(chips, (*chips[1:], chips[0]), strict=True):
            if abs(r - s) + abs(c - d) != 1:
                return f"on {rows} x {columns} chips: from {r, c} to {s, d} there is no link"
    return ""


def bytes_per_link(answer: Any) -> str:
    cases = [(n, d, 1 << 20) for n, d in ((4, 1), (16, 2), (64, 3), (256, 2))]
    return _differs(answer, lambda n, d, nbytes: (n - 1) * nbytes / (2 * d), cases)


# 07: hiding the wire ---------------------------------------------------------------------------


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


# 08: into a model ------------------------------------------------------------------------------


def _on_device(answer: Any, x: np.ndarray) -> list[np.ndarray]:
    """Every device's answer, under lax and under our collectives alike."""
    n = len(x)
    traced: list[bool] = []

    def shard(part: jax.Array) -> jax.Array:
        got = answer(part)
        traced.append(got is not None)
        return jax.numpy.zeros(()) if got is None else got

    results = []
    for context in (contextlib.nullcontext(), pc.override_lax()):
        with context:
            results.append(lesson.per_device(lambda part: shard(part), n)(x))
    if not all(traced):
        raise NotYet
    return results


def whole_by_sum(answer: Any) -> str:
    n = 4
    w = np.arange(n * 2 * 3, dtype=np.float32).reshape(n, 2, 3)
    want = w.reshape(n * 2, 3)
    for got in _on_device(answer, w):
        if got[0].shape != want.shape:
            return f"the shape is {got[0].shape}, that of the whole is {want.shape}"
        if not np.array_equal(got, np.broadcast_to(want, got.shape)):
            return "right shape, wrong values: does each device's slice begin at its own row?"
    return ""


def sum_in_two_steps(answer: Any) -> str:
    n = 4
    y = np.random.default_rng(1).integers(-9, 9, (n, 2 * n, 3)).astype(np.float32)
    want = y.sum(0)
    pc.reset_counts()
    for got in _on_device(answer, y):
        if got[0].shape != want.shape:
            return f"the shape is {got[0].shape}, that of the sum is {want.shape}"
        if not np.array_equal(got, np.broadcast_to(want, got.shape)):
            return "right shape, wrong values"
    used = {op for op, _, _ in pc.counts()}
    return "" if used == {"reduce_scatter", "all_gather"} else f"it uses {', '.join(sorted(used))}"


# 09: reading a benchmark -----------------------------------------------------------------------


def _busbw(op: str, size: float, seconds: float, n: int) -> float:
    return size / seconds * (n - 1) / n * {"psum": 2}.get(op, 1)


_OPS = ("all_gather", "psum_scatter", "psum", "all_to_all")


def busbw(answer: Any) -> str:
    cases = [(op, size, 1e-4, n) for op in _OPS for size in (1e6, 1e8) for n in (2, 4, 8)]
    return _differs(answer, _busbw, cases)


def impossible(answer: Any) -> str:
    link, size = 90e9, 1e8
    shares = zip(_OPS * 2, (0.5, 0.9, 1.1, 0.99, 1.01, 0.02, 0.7, 2.0), strict=True)
    rows = [(op, size, _busbw(op, size, 1.0, 4) / (2 * link * share), 4) for op, share in shares]
    got = given(answer(rows, link))
    for row in rows:
        share = _busbw(*row) / (2 * link)
        if (row in got) != (share > 1):
            return f"{row}: its busbw is {share:.0%} of what two links carry"
    return ""


# 11: prove your own kernel ---------------------------------------------------------------------


def all_are_here(answer: Any) -> str:
    with mock.patch.object(pl, "semaphore_wait", wraps=pl.semaphore_wait) as waits:
        fault = _judged(miniatures.dispatch(answer), "f32[n,8,128]", devices=(2, 3, 4, 8))
    if fault and not waits.called:  # nothing is waited for: it is as it was found
        raise NotYet
    return fault


def whom_to_greet(answer: Any) -> str:
    given(answer(0, 2))
    return _judged(miniatures.butterfly(answer), "f32[8,128]", devices=(2, 4, 8))


def collective_ids(answer: Any) -> str:
    for offsets in ([1], [1, 2], [2, 2], [1, 3, 1]):
        ids = list(given(answer(offsets)))
        if len(ids) != len(offsets):
            return f"{len(ids)} ids for {len(offsets)} calls"
        if fault := _judged(miniatures.shifts(offsets, ids), "f32[8,128]", devices=(8,)):
            return f"with the ids {ids} for the offsets {offsets}, {fault}"
    return ""


EXERCISES: dict[str, Callable[[Any], str]] = {
    exercise.__name__: exercise
    for exercise in (
        reversal,
        two_to_the_right,
        block_sent,
        steps,
        bytes_to_the_right,
        semaphore_of,
        a_fault,
        block_summed,
        credits_given,
        order_of_terms,
        ring_seconds,
        one_shot_seconds,
        crossing,
        offsets,
        padded_rows,
        balanced,
        round_trip,
        bytes_per_link,
        speedup_at_best,
        columns_to_hide,
        whole_by_sum,
        sum_in_two_steps,
        busbw,
        impossible,
        all_are_here,
        whom_to_greet,
        collective_ids,
    )
}
