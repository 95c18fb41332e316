"""What readers take for the answer to an exercise's formula, and what is wrong with it.

`named` looks for the reader's mistake: first among those that are known of the exercise, then among
those of any formula (always twice too much, always one too many).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Exercise -> (a wrong formula, the mistake that it is).
KNOWN: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "block_sent": [
        (
            lambda me, step, n: (me + step) % n,
            "blocks come from the left, so this goes the wrong way",
        ),
        (lambda me, step, n: (me - step - 1) % n, "that is the block which arrives in this step"),
        (lambda me, step, n: me, "a device sends its own block at step 0 only; then what has come"),
        (lambda me, step, n: step, "it depends on the device too: at step 0 each sends its own"),
        (lambda me, step, n: me - step, "blocks are numbered 0 to n-1: take it modulo n"),
    ],
    "steps": [
        (
            lambda n, both: n - 1,
            "both ways round, the farthest block comes from half way round only",
        ),
        (
            lambda n, both: n // 2 if both else n,
            "a device has its own block already: n-1 are missing",
        ),
        (
            lambda n, both: (n - 1) // 2 if both else n - 1,
            "for even n the opposite device is n/2 away",
        ),
        (
            lambda n, both: (n - 1) / 2 if both else n - 1,
            "a step is a whole one: for even n it is n/2",
        ),
        (lambda n, both: n // 2, "one way round there is no shorter way: n-1 steps"),
    ],
    "bytes_to_the_right": [
        (
            lambda n, b: n / 2 * b,
            "the opposite device's block goes half to the right, half to the left",
        ),
        (lambda n, b: (n - 1) * b, "that is one way round; half of it goes to the left"),
        (lambda n, b: (n / 2 - 1) * b, "half of the block for the opposite device is missing"),
        (lambda n, b: (n - 1) / 2, "that is blocks, not bytes"),
        (lambda n, b: n * (n - 1) / 2 * b, "that is all links together, not one"),
    ],
    "block_summed": [
        (
            lambda me, step, n: (me - step) % n,
            "its own block comes last: it begins with its left's",
        ),
        (
            lambda me, step, n: (me + 1 + step) % n,
            "the right neighbour's goes one hop: it is sent last",
        ),
        (
            lambda me, step, n: (me - step - 2) % n,
            "that is the block whose sum arrives in this step",
        ),
        (lambda me, step, n: me + n - 1 - step, "blocks are numbered 0 to n-1: take it modulo n"),
        (lambda me, step, n: (me + step) % n, "sums go to the right, towards the block's device"),
    ],
    "credits_given": [
        (lambda hops, slots: hops, "the first steps find their slots free: they need no credit"),
        (lambda hops, slots: hops - slots, "with more slots than steps it is 0, not less"),
        (lambda hops, slots: slots, "it is the steps that find their slot used which need one"),
        (lambda hops, slots: max(0, hops - slots - 1), "step number `slots` needs one already"),
        (lambda hops, slots: max(0, hops - slots + 1), "step `slots - 1` still finds a free slot"),
    ],
    "order_of_terms": [
        (lambda me, n: list(range(n)), "the order begins beside the owner, so it depends on `me`"),
        (
            lambda me, n: [(me + k) % n for k in range(n)],
            "the owner's own term comes last, not first",
        ),
        (
            lambda me, n: [(me - k) % n for k in range(n)],
            "the sum ends with the owner, and goes right",
        ),
        (
            lambda me, n: [(me - 1 - k) % n for k in range(n)],
            "sums go to the right, so terms do too",
        ),
        (lambda me, n: [me + 1 + k for k in range(n)], "devices are numbered 0 to n-1: modulo n"),
    ],
    "ring_seconds": [
        (
            lambda n, b, h, w: (n // 2) * h + (n - 1) / n * b / w,
            "the ring goes round twice, to scatter and to gather: twice the steps",
        ),
        (
            lambda n, b, h, w: 2 * (n // 2) * h + 2 * (n - 1) / n * b / w,
            "both ways round share the bytes: half of them cross a link each way",
        ),
        (
            lambda n, b, h, w: 2 * (n // 2) * h + b / w,
            "a device does not send its own block: (n-1)/n of the operand",
        ),
        (
            lambda n, b, h, w: 2 * (n - 1) * h + (n - 1) / n * b / w,
            "both ways round there are n/2 steps, not n-1",
        ),
        (lambda n, b, h, w: (n - 1) / n * b / w, "the hops are missing"),
        (lambda n, b, h, w: 2 * (n // 2) * h, "the bytes are missing"),
    ],
    "one_shot_seconds": [
        (lambda n, b, h, w: h + (n - 1) * b / w, "operands for far devices cross several links"),
        (lambda n, b, h, w: h + n * n / 4 * b / w, "both directions share it: n*n/8 a link"),
        (lambda n, b, h, w: n // 2 * h + n * n / 8 * b / w, "count one hop; the way is in it"),
        (lambda n, b, h, w: n * n / 8 * b / w, "the hop is missing"),
        (lambda n, b, h, w: h + b / w, "each device sends its operand to n-1 others"),
    ],
    "crossing": [
        (
            lambda n, h, w: 2 * (n // 2) * h * w / (n * n / 8 - (n - 1) / n),
            "one shot takes a hop too: only the difference counts",
        ),
        (
            lambda n, h, w: (2 * (n // 2) - 1) * h * w / (n * n / 8),
            "the ring's bytes take time too: only the difference counts",
        ),
        (
            lambda n, h, w: (2 * (n // 2) - 1) * h / (n * n / 8 - (n - 1) / n),
            "that is seconds over bytes' factor: multiply by the bandwidth",
        ),
        (
            lambda n, h, w: (n // 2 - 1) * h * w / (n * n / 8 - (n - 1) / n),
            "the ring has twice n/2 steps",
        ),
        (lambda n, h, w: h * w, "it depends on n: the more devices, the sooner the ring wins"),
    ],
    "padded_rows": [
        (lambda c: c.max() * c.size, "what a device keeps does not leave it: n-1 blocks each"),
        (lambda c: c.sum(), "that is what is there; all blocks are padded to the largest"),
        (lambda c: c.sum() - np.trace(c), "that is what ragged_all_to_all sends, without padding"),
        (lambda c: c.max() * (len(c) - 1), "that is one device; n of them send"),
        (
            lambda c: (c - np.diag(np.diag(c))).max() * (c.size - len(c)),
            "the block that a device keeps is as large as the others: it counts for the largest",
        ),
    ],
    "bytes_per_link": [
        (lambda n, d, b: (n - 1) * b / d, "a chip has two links for each axis"),
        (lambda n, d, b: n * b / (2 * d), "a chip has its own block already"),
        (lambda n, d, b: (n - 1) * b / 2, "with d axes there are d times as many links"),
        (
            lambda n, d, b: (n ** (1 / d) - 1) * b / 2,
            "blocks of all axes pass, not of one ring only",
        ),
        (lambda n, d, b: (n - 1) * b, "all links of a chip share them"),
    ],
    "speedup_at_best": [
        (lambda wire, product: 2.0, "only where both take the same"),
        (lambda wire, product: max(wire, product) / (wire + product), "that is its inverse"),
        (lambda wire, product: (wire + product) / min(wire, product), "the longer one stays"),
        (lambda wire, product: wire / product, "compare both one after the other with the longer"),
        (lambda wire, product: (wire + product) / product, "where the wire is longer, it stays"),
    ],
    "columns_to_hide": [
        (lambda i, f, w: i * f / (2 * w), "half of the blocks come each way, at once"),
        (lambda i, f, w: f / (4 * w), "an element has `itemsize` bytes"),
        (lambda i, f, w: i * f / w, "two operations for each element; half the blocks each way"),
        (lambda i, f, w: 4 * w / (i * f), "that is its inverse"),
        (
            lambda i, f, w: f / w,
            "bytes of an element, operations of one, and both directions count",
        ),
    ],
    "busbw": [
        (lambda op, s, t, n: s / t, "that is algbw; busbw counts what must cross the wire"),
        (lambda op, s, t, n: s / t * (n - 1) / n, "a psum sends everything twice"),
        (lambda op, s, t, n: 2 * s / t * (n - 1) / n, "only a psum sends everything twice"),
        (lambda op, s, t, n: s / t * (n - 1), "size is of all blocks together: (n-1)/n of it"),
        (lambda op, s, t, n: s * t, "bytes over seconds"),
    ],
    "bytes_of_row": [
        (lambda c, g: c, "the scales are missing: four bytes for each group"),
        (lambda c, g: c + 4 * (c // g), "the last group has a scale too, if it is a short one"),
        (lambda c, g: c + 4 * c / g, "there are no parts of a scale: round up"),
        (lambda c, g: c + -(-c // g), "a scale is a float32: four bytes"),
        (lambda c, g: 2 * c + 4 * -(-c // g), "a number of int8 takes one byte"),
    ],
    "most_off": [
        (
            lambda n, m, ring: m / 254 * ((n - 1) if ring else n),
            "partial sums grow, and their steps with them: hop k carries the sum of k terms",
        ),
        (
            lambda n, m, ring: m / 254 * (n * (n - 1) / 2 if ring else n - 1),
            "by an exchange the own term is rounded as well",
        ),
        (
            lambda n, m, ring: m / 127 * (n * (n - 1) / 2 if ring else n),
            "to the nearest, a number is off by half a step",
        ),
        (
            lambda n, m, ring: m / 254 * (n * (n + 1) / 2 if ring else n),
            "a ring has n-1 hops: the last sum, of n terms, stays where it is",
        ),
        (lambda n, m, ring: m / 254, "each term is off by that, or the sum at each hop"),
    ],
}


def named(exercise: str, cases: Sequence[Any], got: Sequence[Any], want: Sequence[Any]) -> str:
    """The mistake behind answers to all cases of an exercise; "" if it is not known."""
    for formula, mistake in KNOWN.get(exercise, ()):
        try:
            guess = [formula(*case) for case in cases]
            if _alike(_flat(got), _flat(guess)):
                return mistake
        except ZeroDivisionError:
            continue
    flat, right = _flat(got), _flat(want)
    if not flat.any():
        return "it is always 0"
    factors = flat[right != 0] / right[right != 0]
    if _alike(factors, factors[:1]) and not flat[right == 0].any():
        if np.isclose(factors[0], -1):
            return "the sign is wrong, always"
        return f"it is always {factors[0]:.3g} times the right answer"
    if _alike(flat - right, (flat - right)[:1]):
        much = flat[0] - right[0]
        return f"it is always {abs(much):.3g} too {'much' if much > 0 else 'little'}"
    return ""


def _flat(values: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(value, float)) for value in values])


def _alike(these: Any, those: Any) -> bool:
    return bool(np.allclose(these, those, rtol=1e-6, atol=0))
