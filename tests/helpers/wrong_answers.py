"""Wrong answers to the notebooks' exercises, ten for each, and a word of what is said of them.

Answers to formulas are the mistakes that `mistakes` knows, and those that can be made of any
formula; answers to the other exercises stand here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import mistakes
import pallas_collectives as pc
import verify_kernels
from pallas_collectives import wires
from pallas_collectives.kernels.machinery import sync

Answer = tuple[Callable[..., Any], str]


def of_any_formula(right: Callable[..., Any]) -> list[Answer]:
    """What can be wrong with any formula, by the right one; with what is said of it."""

    def raises(*case: Any) -> Any:
        raise ValueError(f"not for {case[0]}")

    return [
        (lambda *case: np.multiply(right(*case), 3), "it is always 3 times the right answer"),
        (lambda *case: np.multiply(right(*case), -1.0), "the sign is wrong, always"),
        (lambda *case: np.multiply(right(*case), 0), "it is always 0"),
        (lambda *case: np.multiply(right(*case), np.nan), "yours is "),
        (lambda *case: str(right(*case)), "must be "),
        (lambda *case: [[1], [2, 3]], "must be "),
        (raises, "it raises ValueError: not for "),
    ]


def of_formula(name: str, right: Callable[..., Any]) -> list[Answer]:
    """All wrong answers to an exercise that `mistakes` knows."""
    return [*mistakes.KNOWN[name], *of_any_formula(right)]


# Kernels and functions ----------------------------------------------------------------------------


def _pushes(offset: int = 2, *, first: bool = False, waits: str = "rs", same: bool = False) -> Any:
    """A kernel that sends `offset` to the right, with what it waits for: r, s, both or none."""

    def answer(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
        if first:
            sync.wait(recv_sem, o_ref)
        arrived = send_sem if same else recv_sem
        sync.remote_copy(x_ref, o_ref, send_sem, arrived, ring.peer(offset))
        for which in waits:
            sync.wait({"r": recv_sem, "s": send_sem}[which], x_ref)

    return answer


def _half(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    source, target = x_ref.at[pl.ds(0, 4)], o_ref.at[pl.ds(0, 4)]
    sync.remote_copy(source, target, send_sem, recv_sem, ring.peer(2))
    sync.wait(recv_sem, target)
    sync.wait(send_sem, source)


def _to_one(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    sync.remote_copy(x_ref, o_ref, send_sem, recv_sem, {"x": 2})
    sync.wait(send_sem, x_ref)


def _keeps(ring: Any, x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    pltpu.sync_copy(x_ref, o_ref)


def _greets(*distances: int) -> Callable[[Any, Any], None]:
    """A barrier with the devices so far to the right."""

    def answer(me: Any, n: int) -> None:
        barrier = pltpu.get_barrier_semaphore()
        for distance in distances:
            pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + distance + n, n)})
        pl.semaphore_wait(barrier, len(distances))

    return answer


def _counts_wrongly(much: int) -> Callable[[Any, Any], None]:
    """A barrier with everyone that waits for so many more signals than come."""

    def answer(me: Any, n: int) -> None:
        barrier = pltpu.get_barrier_semaphore()
        for distance in range(1, n):
            pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + distance, n)})
        pl.semaphore_wait(barrier, n - 1 + much)

    return answer


def _to_zero(me: Any, n: int) -> None:
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"x": 0})
    pl.semaphore_wait(barrier, 1)


def _beyond(me: Any, n: int) -> None:
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"x": me + 1})
    pl.semaphore_wait(barrier, 1)


def _cumulated(counts: np.ndarray, me: int) -> tuple[np.ndarray, ...]:
    at_home, away = np.cumsum(counts, axis=1) - counts, np.cumsum(counts, axis=0) - counts
    return at_home[me], counts[me], away[me], counts[:, me]


def _offsets(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda counts, me: change(counts, me, *_cumulated(counts, me))


def _rms(off: np.ndarray) -> float:
    return float(np.sqrt(np.mean(off**2)))


def _first_within(
    measure: Callable[[np.ndarray], float], groups: tuple[Any, ...] = ("row", 256, 128)
) -> Callable[..., Any]:
    """The first group whose errors a measure finds small enough."""

    def answer(x: np.ndarray, most: float) -> Any:
        def sent(group: Any) -> np.ndarray:
            return np.asarray(wires.as_sent(jnp.asarray(x), pc.Wire("int8", group=group)))

        return next((g for g in groups if measure(sent(g) - x) <= most), "bfloat16")

    return answer


def _snake(rows: int, columns: int) -> list[tuple[int, int]]:
    return [
        (r, c)
        for r in range(rows)
        for c in (range(columns) if r % 2 == 0 else range(columns)[::-1])
    ]


def _placed(w: jax.Array, row: Any) -> jax.Array:
    n, rows = lax.axis_size("x"), w.shape[0]
    zeros = lax.pcast(jnp.zeros((n * rows, *w.shape[1:]), w.dtype), "x", to="varying")
    return lax.dynamic_update_slice_in_dim(zeros, w, row, 0)


def _two_steps(y: jax.Array) -> jax.Array:
    return lax.all_gather(lax.psum_scatter(y, "x", tiled=True), "x", tiled=True)


def _busbw(row: Any) -> float:
    op, size, seconds, n = row
    return float(size / seconds * (n - 1) / n * (2 if op == "psum" else 1))


def _first_wishes(wishes: np.ndarray, room: int) -> np.ndarray:
    taken, chosen = np.zeros(wishes.shape[1], int), []
    for order in wishes[::-1]:  # the last token first
        expert = next(e for e in order if taken[e] < room)
        taken[expert] += 1
        chosen.append(expert)
    return np.array(chosen[::-1])


OTHERS: dict[str, list[Answer]] = {
    "reversal": [
        (lambda n: [(d, (d + 1) % n) for d in range(n)], "order [4, 0, 1, 2, 3]"),
        (lambda n: [(d, d) for d in range(n)], "order [0, 1, 2, 3, 4]"),
        (lambda n: [(d, n - d) for d in range(n)], "'to' once"),
        (lambda n: [(d, n - 1 - d) for d in range(n - 1)], "a list of 5 pairs"),
        (lambda n: [(0, n - 1 - d) for d in range(n)], "'from' once"),
        (lambda n: list(range(n))[::-1], "a list of 5 pairs"),
        (lambda n: [(d, -d) for d in range(n)], "'to' once"),
        (lambda n: "reversed", "a list of 5 pairs"),
        (lambda n: [(d, (d - 1) % n) for d in range(n)], "order [1, 2, 3, 4, 0]"),
        (lambda n: [(d, 4 - d, 0) for d in range(n)], "a list of 5 pairs"),
    ],
    "two_to_the_right": [
        (_pushes(waits="s"), "device 3 never waits for that"),
        (_pushes(waits="rrs"), "it never ends: device 0 waits for ever for recv_sem"),
        (_pushes(first=True), "it never ends: device 0 waits for ever for recv_sem"),
        (_pushes(waits="r"), "x_ref of device"),
        (_pushes(waits=""), "a race"),
        (_pushes(1), "o_ref holds what devices [3, 0, 1, 2] had"),
        (_pushes(-1), "o_ref holds what devices [1, 2, 3, 0] had"),
        (
            _pushes(same=True, waits="s"),
            "the 8192 bytes that 2 copies may have brought",
        ),
        (_half, "o_ref is written in part only"),
        (_to_one, "a race"),
        (_keeps, "o_ref holds what devices [0, 1, 2, 3] had"),
    ],
    "semaphore_of": [
        (lambda step, window: 0, "copies may have brought to recv_sems[0]"),
        (lambda step, window: step, "step 3 uses semaphore 3, and there are 0 to 2"),
        (lambda step, window: step % 2, "copies may have brought to recv_sems[0]"),
        (lambda step, window: step % (window + 1), "step 3 uses semaphore 3"),
        (lambda step, window: window - step, "uses semaphore 3"),
        (lambda step, window: window, "uses semaphore 3"),
        (lambda step, window: -step, "uses semaphore -1"),
        (lambda step, window: "step", "must be a number"),
        (lambda step, window: step // window, "a race"),
        (lambda step, window: 1, "recv_sems[1]"),
    ],
    "a_fault": [
        (lambda: verify_kernels.sound_gather, "still sound"),
        (lambda: "a dropped wait", "give the changed kernel back"),
        (lambda: 0, "give the changed kernel back"),
        (lambda: [verify_kernels.sound_gather], "give the changed kernel back"),
        (lambda: verify_kernels.sound_gather(3), "it raises"),
        (lambda: undefined_name, "it raises NameError"),  # type: ignore[name-defined]  # noqa: F821
        (lambda wanted: None, "it raises TypeError"),
        (lambda: ..., "give the changed kernel back"),
        (lambda: {}, "give the changed kernel back"),
        (lambda: functools.partial(verify_kernels.sound_gather), "still sound"),
    ],
    "offsets": [
        (_offsets(lambda counts, me, a, b, c, d: (a, b, a, d)), "ends with rows"),
        (_offsets(lambda counts, me, a, b, c, d: (c, b, a, d)), "ends with rows"),
        (_offsets(lambda counts, me, a, b, c, d: (0 * a, b, c, d)), "ends with rows"),
        (_offsets(lambda counts, me, a, b, c, d: (a + b, b, c, d)), "ends with rows"),
        (_offsets(lambda counts, me, a, b, c, d: (a, b, 0 * c, d)), "ends with rows"),
        (_offsets(lambda counts, me, a, b, c, d: (a, d, c, b)), "list 2, how many are sent"),
        (_offsets(lambda counts, me, a, b, c, d: (a, b, c, b)), "list 4, how many come"),
        (_offsets(lambda counts, me, a, b, c, d: (a, b, c)), "four lists of 4 numbers"),
        (_offsets(lambda counts, me, a, b, c, d: (a[1:], b, c, d)), "four lists of 4 numbers"),
        (lambda counts, me: counts, "list 2, how many are sent"),
        (lambda counts, me: 0, "four lists of 4 numbers"),
    ],
    "balanced": [
        (lambda wishes, room: wishes[:, 0], "room for 8"),
        (lambda wishes, room: np.arange(64) % 8, "could have expert"),
        (_first_wishes, "could have expert"),
        (lambda wishes, room: wishes, "an expert's, for each of 64 tokens"),
        (lambda wishes, room: wishes[:, 0] / 1.0, "a whole number"),
        (lambda wishes, room: np.full(64, 8), "numbered from 0 to 7"),
        (lambda wishes, room: np.full(64, -1), "numbered from 0 to 7"),
        (lambda wishes, room: np.zeros(64, int), "has 64 tokens, and room for 8"),
        (lambda wishes, room: wishes[:, -1], "room for 8"),
        (lambda wishes, room: "the first", "a whole number"),
    ],
    "round_trip": [
        (lambda rows, columns: [*np.ndindex(rows, columns)], "there is no link"),
        (_snake, "there is no link"),
        (lambda rows, columns: _snake(rows, columns)[:-1], "is wanted"),
        (lambda rows, columns: [(0, 0)] * rows * columns, "visited once"),
        (lambda rows, columns: [*range(rows * columns)], "is wanted"),
        (lambda rows, columns: [(c, r) for r in range(rows) for c in range(columns)], "once"),
        (lambda rows, columns: [(r + 1, c) for r, c in _snake(rows, columns)], "once"),
        (lambda rows, columns: [], "is wanted"),
        (lambda rows, columns: "a snake", "is wanted"),
        (lambda rows, columns: [(r, c) for c in range(columns) for r in range(rows)], "no link"),
    ],
    "impossible": [
        (lambda rows, link: [], "two links carry"),
        (lambda rows, link: rows, "two links carry"),
        (lambda rows, link: [row for row in rows if _busbw(row) > link], "two links carry"),
        (lambda rows, link: [row for row in rows if _busbw(row) < 2 * link], "two links carry"),
        (lambda rows, link: [row for row in rows if row[1] / row[2] > 2 * link], "two links carry"),
        (lambda rows, link: rows[:1], "two links carry"),
        (lambda rows, link: True, "a list of rows is wanted"),
        (lambda rows, link: [True for row in rows], "is none of the rows"),
        (lambda rows, link: [_busbw(row) for row in rows], "is none of the rows"),
        (lambda rows, link: [row for row in rows if _busbw(row) > 3 * link], "two links carry"),
    ],
    "choose_group": [
        (lambda x, most: 128, "groups of row are off by 0.0078 only, with fewer bytes"),
        (lambda x, most: "row", "by groups of row they are off by"),
        (lambda x, most: 256, "with fewer bytes"),
        (lambda x, most: "bfloat16", "groups of row are off by 0.0078 only"),
        (lambda x, most: 512, "is wanted, not 512"),
        (lambda x, most: "128", "is wanted, not '128'"),
        (lambda x, most: ("row", 256, 128), "is wanted, not ('row', 256, 128)"),
        (_first_within(lambda off: np.abs(off).max()), "with fewer bytes"),
        (_first_within(lambda off: abs(off.mean())), "by groups of row they are off by"),
        (_first_within(lambda off: np.mean(off**2)), "they are off by"),
        (_first_within(_rms, (128, 256, "row")), "with fewer bytes"),
    ],
    "whole_by_sum": [
        (lambda w: w, "each device ends with shape (2, 3)"),
        (lambda w: lax.psum(w, "x"), "each device ends with shape (2, 3)"),
        (lambda w: lax.all_gather(w, "x", tiled=True), "it must use all_reduce"),
        (lambda w: lax.psum(_placed(w, 0), "x"), "wrong values on device 0"),
        (lambda w: lax.psum(_placed(w, lax.axis_index("x")), "x"), "wrong values on device 0"),
        (lambda w: _placed(w, lax.axis_index("x") * 2), "wrong values on device 0"),
        (lambda w: lax.psum(_placed(w, lax.axis_index("x") * 2), "x") / 4, "wrong values"),
        (lambda w: lax.psum(jnp.concatenate([w] * 4), "x"), "wrong values"),
        (lambda w: lax.all_gather(w, "x"), "each device ends with shape (4, 2, 3)"),
        (lambda w: lax.psum(_placed(w, lax.axis_index("x") * 2), "y"), "it raises NameError"),
    ],
    "sum_in_two_steps": [
        (lambda y: y, "wrong values on device 0"),
        (lambda y: lax.psum(y, "x"), "uses all_reduce"),
        (lambda y: lax.psum_scatter(y, "x", tiled=True), "each device ends with shape (2, 3)"),
        (lambda y: lax.all_gather(y, "x", tiled=True), "each device ends with shape (32, 3)"),
        (lambda y: lax.all_gather(lax.psum_scatter(y, "x", tiled=True), "x"), "(4, 2, 3)"),
        (lambda y: _two_steps(y) / 4, "wrong values"),
        (lambda y: _two_steps(y)[::-1], "wrong values"),
        (lambda y: lax.all_gather(y[:2], "x", tiled=True), "wrong values"),
        (lambda y: jnp.sum(y, 0), "each device ends with shape (3,)"),
        (lambda y: lax.all_gather(y, "x").sum(0), "it must use all_gather, reduce_scatter"),
    ],
    "all_are_here": [
        (_greets(1, -1), "on 4 devices a race: "),
        (_greets(1), "on 3 devices a race: "),
        (_greets(-1), "on 3 devices a race: "),
        (_greets(1, 2), "on 4 devices a race: "),
        (_greets(), "on 2 devices"),
        (_counts_wrongly(1), "it never ends"),
        (_counts_wrongly(-1), "on 2 devices"),
        (_to_zero, "on 2 devices it never ends"),
        (_beyond, "wrap the number round"),
        (lambda me, n: pl.semaphore_wait(pltpu.get_barrier_semaphore(), n - 1), "it never ends"),
    ],
    "whom_to_greet": [
        (lambda me, n: [(me + 1) % n, (me + n - 1) % n], "on 8 devices a race: "),
        (lambda me, n: [], "has entered kernel"),
        (lambda me, n: [(me + 1) % n], "on 4 devices"),
        (lambda me, n: [me ^ 1], "on 4 devices"),
        (lambda me, n: [me], "on 2 devices"),
        (lambda me, n: [0], "on 2 devices it never ends"),
        (lambda me, n: [me + 1], "wrap the number round"),
        (lambda me, n: n - 1, "a list of devices is wanted"),
        (lambda me, n: "all", "a list of devices is wanted"),
        (lambda me, n: [me ^ (1 << k) for k in range(n.bit_length() - 2)], "on 2 devices"),
    ],
    "collective_ids": [
        (lambda offsets: [0] * len(offsets), "with the ids [0, 0]"),
        (lambda offsets: [0], "for 2 calls it must be a list of 2 numbers"),
        (lambda offsets: offsets, "with the ids [1, 1]"),
        (lambda offsets: 0, "for 1 calls it must be a list of 1 numbers"),
        (lambda offsets: "01", "it must be a list"),
        (lambda offsets: [min(k, 1) for k in range(len(offsets))], "with the ids [0, 1, 1]"),
        (lambda offsets: [k // 2 for k in range(len(offsets))], "with the ids [0, 0]"),
        (lambda offsets: [*range(len(offsets) + 1)], "it must be a list"),
        (lambda offsets: [], "it must be a list"),
        (lambda offsets: [7] * len(offsets), "with the ids [7, 7]"),
    ],
}
