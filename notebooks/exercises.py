"""`check(answer)`: says "right", or what is wrong. One function here for each exercise.

An exercise is a function that the reader fills in; the function here that bears its name returns
what is wrong with it, or "". As long as it returns nothing (`...`), it is not yet done.
"""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import formulas
import lesson
import miniatures
import pallas_collectives as pc
from pallas_collectives import verify
from pallas_collectives.verify import findings
from pallas_collectives.verify.findings import Finding


def check(answer: Callable[..., Any]) -> None:
    """Says whether the answer to the exercise of this name is right, or what is wrong."""
    if answer.__name__ not in EXERCISES:
        print(f"no exercise is called {answer.__name__}: keep the name that the function had")
        return
    try:
        problem = EXERCISES[answer.__name__](answer)
    except formulas.NotYet:
        print(f"not yet: {answer.__name__} returns nothing so far; your turn")
    except Exception as error:
        print(_by_cell(f"wrong: it raises {type(error).__name__}: {error}{_where(answer, error)}"))
    else:
        print(_by_cell(f"wrong: {problem}") if problem else "right")


def _where(answer: Callable[..., Any], error: Exception) -> str:
    """The line of the answer that an error comes from; "" if it does not say, or says it itself."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f"{os.path.basename(str(file))}:{frames[-1].lineno}" if frames else ""
    return f", at {where}" if where and where not in str(error) else ""


def _by_cell(said: str) -> str:
    """Lines of a cell, which Jupyter keeps under a number, called what the reader calls them."""
    return re.sub(r"(?:\S*/)?\d{4,}\.py:(\d+)", r"line \1 of your cell", said)


# 00: a remote copy -----------------------------------------------------------------------------


def reversal(answer: Any) -> str:
    n = 5
    pairs = formulas.given(answer(n))
    if formulas.other_kind(pairs, [(0, 0)] * n) or len(pairs) != n:
        return f"a list of {n} pairs of devices is wanted, (from, to), not {pairs!r}"
    for position, name in enumerate(("from", "to")):
        devices = sorted(int(pair[position]) for pair in pairs)
        if devices != list(range(n)):
            return f"each of the devices 0 to {n - 1} must be {name!r} once; they are {devices}"
    x = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, 8, 128))
    got = lesson.per_device(lambda x: pc.ppermute(x, "x", pairs), n)(x)[:, 0, 0].astype(int)
    return "" if list(got) == list(range(n))[::-1] else f"arrays end in the order {got.tolist()}"


def two_to_the_right(answer: Any) -> str:
    n, shape = 4, (8, 128)
    formulas.begun(answer)
    program = miniatures.pushed(answer)
    if problem := _fault(lesson.replayed(program, n, shape, races=True)):
        return problem
    x = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, *shape))
    run = lesson.per_device(lambda x: program(x, lesson.adversary()), n)
    outcome = lesson.watch(lambda: run(x))
    want = np.roll(x, 2, axis=0)
    if outcome.races or outcome.error or outcome.result is None:
        return outcome.say(want)
    if not outcome.wrong(want):
        return ""
    rows = outcome.result.reshape(n, -1)
    came = [sorted({int(v) if v == v else None for v in held}, key=str) for held in rows]
    if any(len(values) > 1 for values in came):
        return "o_ref is written in part only"
    senders = [value for (value,) in came]
    return f"o_ref holds what devices {senders} had; two to the left of 0 to 3 are [2, 3, 0, 1]"


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


# 02: races -------------------------------------------------------------------------------------


def semaphore_of(answer: Any) -> str:
    window = 3
    for step in range(7):
        number = formulas.given(answer(step, window))
        if kind := formulas.other_kind(number, 0):
            return f"semaphore_of({step}, {window}) must be {kind}, not {number!r}"
        if not 0 <= number < window:
            return f"step {step} uses semaphore {number}, and there are 0 to {window - 1}"
    return _judged(miniatures.windowed(answer, window), "f32[8,128]", devices=(8,))


def a_fault(answer: Any) -> str:
    n, kernel = 6, formulas.given(answer())
    if not callable(kernel):
        return f"give the changed kernel back, a function, not a {type(kernel).__name__}"
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


# 05: all-to-all --------------------------------------------------------------------------------


def offsets(answer: Any) -> str:
    n = 4
    counts = formulas.random_counts(n)
    formulas.given(answer(counts, 0))
    lists = [answer(counts, me) for me in range(n)]
    for four in lists:
        if formulas.other_kind(four, np.zeros((4, n))):
            return f"four lists of {n} numbers each are wanted, not {four!r}"
    names = ("where the rows begin", "how many are sent", "where they go", "how many come")
    for k, right in ((1, counts), (3, counts.T)):
        for me, four in enumerate(lists):
            if not np.array_equal(four[k], right[me]):  # others would wait for ever
                mine, wanted = np.asarray(four[k]).tolist(), right[me].tolist()
                return f"list {k + 1}, {names[k]}: device {me} has {wanted}, not {mine}"
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
        raise formulas.NotYet
    return results


def _not_it(answer: Any, x: np.ndarray, want: np.ndarray, hint: str, ops: set[str]) -> str:
    """What is wrong with a sum or a gather of x, or with what it is made of; or ""."""
    pc.reset_counts()
    for got in _on_device(answer, x):
        if got[0].shape != want.shape:
            return f"each device ends with shape {got[0].shape}, and {want.shape} is wanted"
        if not np.array_equal(got, np.broadcast_to(want, got.shape)):
            device = int(np.argmax((got != want).any(axis=tuple(range(1, got.ndim)))))
            return f"right shape, wrong values on device {device}: {hint}"
    used = {op for op, _, _ in pc.counts()}
    made_of = ", ".join(sorted(ops))
    return "" if used == ops else f"it must use {made_of}, and uses {', '.join(sorted(used))}"


def whole_by_sum(answer: Any) -> str:
    w = np.arange(1, 1 + 4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)
    hint = "does each device's slice begin at its own row, and nothing else lie there?"
    return _not_it(answer, w, w.reshape(4 * 2, 3), hint, {"all_reduce"})


def sum_in_two_steps(answer: Any) -> str:
    y = np.random.default_rng(1).integers(-9, 9, (4, 8, 3)).astype(np.float32)
    hint = "every device must have the sum of all devices' y, rows in their order"
    return _not_it(answer, y, y.sum(0), hint, {"reduce_scatter", "all_gather"})


# 11: prove your own kernel ---------------------------------------------------------------------


def all_are_here(answer: Any) -> str:
    formulas.begun(answer)
    return _judged(miniatures.dispatch(answer), "f32[n,8,128]", devices=(2, 3, 4, 8))


def whom_to_greet(answer: Any) -> str:
    for n in (2, 4, 8):
        greeted = formulas.given(answer(0, n))
        if not isinstance(greeted, list | tuple | range | set | np.ndarray):
            return f"a list of devices is wanted, not {greeted!r}"
    return _judged(miniatures.butterfly(answer), "f32[8,128]", devices=(2, 4, 8))


def collective_ids(answer: Any) -> str:
    for offsets in ([1], [1, 2], [1, 1], [2, 2], [1, 3, 1]):
        ids = formulas.given(answer(offsets))
        if kind := formulas.other_kind(ids, offsets):
            return f"for {len(offsets)} calls it must be {kind}, an id each, not {ids!r}"
        ids = list(map(int, ids))
        if fault := _judged(miniatures.shifts(offsets, ids), "f32[8,128]", devices=(8,)):
            return f"with the ids {ids} for the offsets {offsets}, {fault}"
    return ""


EXERCISES: dict[str, Callable[[Any], str]] = {
    exercise.__name__: exercise
    for exercise in (
        reversal,
        two_to_the_right,
        formulas.block_sent,
        formulas.steps,
        formulas.bytes_to_the_right,
        semaphore_of,
        a_fault,
        formulas.block_summed,
        formulas.credits_given,
        formulas.order_of_terms,
        formulas.ring_seconds,
        formulas.one_shot_seconds,
        formulas.crossing,
        offsets,
        formulas.padded_rows,
        formulas.balanced,
        formulas.round_trip,
        formulas.bytes_per_link,
        formulas.speedup_at_best,
        formulas.columns_to_hide,
        whole_by_sum,
        sum_in_two_steps,
        formulas.busbw,
        formulas.impossible,
        formulas.bytes_of_row,
        formulas.most_off,
        formulas.choose_group,
        all_are_here,
        whom_to_greet,
        collective_ids,
    )
}
