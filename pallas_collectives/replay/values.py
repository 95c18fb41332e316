"""Values of a stepped program, for many devices at once.

A value is one of
* a Python int, float or bool: the same scalar on every device being stepped;
* a 1-D numpy array: a scalar per device (a lane);
* `Known`: a small array whose contents were given, per device or for all;
* `UNKNOWN`: array data, or anything computed from it. Replay never holds array data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from pallas_collectives import _compat

# A whole number on the lanes: one for all, or one each.
Lanes: TypeAlias = int | np.ndarray
# Any number on the lanes, likewise.
Scalar: TypeAlias = bool | float | np.ndarray


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()


@dataclasses.dataclass(frozen=True)
class Known:
    """An array whose contents are known: `values[lane]`, or `values` itself where `per_lane` is
    False.
    """

    values: np.ndarray
    per_lane: bool

    def of_lane(self, lane: int) -> np.ndarray:
        return self.values[lane] if self.per_lane else self.values


def take(value: Any, positions: np.ndarray) -> Any:
    """`value` on the lanes at `positions` only."""
    if isinstance(value, np.ndarray):
        return value[positions]
    if isinstance(value, Known) and value.per_lane:
        return Known(value.values[positions], True)
    return value.take(positions) if hasattr(value, "take") else value


def merge(parts: list[tuple[np.ndarray, Any]], n_lanes: int) -> Any:
    """One value from its parts on disjoint sets of lanes, `(positions, value)` each."""
    values = [value for _, value in parts]
    if len(parts) == 1:
        return values[0]
    if any(v is UNKNOWN or isinstance(v, Known) for v in values):
        return UNKNOWN
    first = values[0]
    if not isinstance(first, (np.ndarray, int, float)):
        return first  # a ref: branches cannot return different ones
    if not isinstance(first, np.ndarray) and all(
        not isinstance(v, np.ndarray) and v == first for v in values
    ):
        return first
    out = np.empty(n_lanes, np.result_type(*(np.asarray(v).dtype for v in values)))
    for positions, value in parts:
        out[positions] = value
    return out


def settle(value: Scalar, dtype: np.dtype) -> Scalar:
    """`value` wrapped to `dtype`, as the machine's own integers wrap."""
    if isinstance(value, np.ndarray):
        return value if value.dtype == dtype else value.astype(dtype)
    if dtype.kind == "b":
        return bool(value)
    if dtype.kind in "iu":
        value = int(value)
        bits = 8 * dtype.itemsize
        low, high = (0, 1 << bits) if dtype.kind == "u" else (-1 << bits - 1, 1 << bits - 1)
        return value if low <= value < high else (value - low) % (1 << bits) + low
    return float(value)


def _divide(a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, float) or isinstance(b, float):
        with np.errstate(all="ignore"):
            return a / b if np.all(b) else np.divide(a, b)
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        if b == 0:
            return -1  # all bits are ones, as below
        q = abs(a) // abs(b)
        return q if (a < 0) == (b < 0) else -q
    if np.asarray(a).dtype.kind not in "iu":
        return a / b
    by = np.where(b == 0, np.ones_like(b), b)
    quotient = (a - np.fmod(a, by)) // by  # towards zero, as XLA divides
    return np.where(b == 0, ~np.zeros_like(quotient), quotient)


def _remainder(a: Scalar, b: Scalar) -> Scalar:
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        if b == 0:
            return np.nan if isinstance(a, float) else a
        r = abs(a) % abs(b)
        return -r if a < 0 else r
    if np.asarray(a).dtype.kind not in "iu":
        return np.fmod(a, b)
    by = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, a, np.fmod(a, by))  # the sign of the dividend, as XLA's rem


def _maximum(a: Scalar, b: Scalar) -> Scalar:
    both_uniform = not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray)
    return max(a, b) if both_uniform else np.maximum(a, b)


def _minimum(a: Scalar, b: Scalar) -> Scalar:
    both_uniform = not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray)
    return min(a, b) if both_uniform else np.minimum(a, b)


def _invert(a: Lanes) -> Lanes:
    return not a if isinstance(a, bool) else ~a


def _sign(a: Scalar) -> Scalar:
    return np.sign(a) if isinstance(a, np.ndarray) else (a > 0) - (a < 0)


def _select(which: Any, *cases: Any) -> Any:
    if not isinstance(which, np.ndarray):
        return cases[int(which)]
    if any(c is UNKNOWN for c in cases):
        return UNKNOWN
    return np.choose(which.astype(np.intp), cases)


def _shift_right_logical(a: Lanes, b: Lanes) -> Lanes:
    if isinstance(a, np.ndarray):
        return a.view(f"u{a.dtype.itemsize}") >> b
    return (a & 0xFFFFFFFF) >> b


# Scalar primitives by name; each takes Python scalars and per-lane arrays alike. `known` has them
# compute arrays too.
SCALAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": _remainder,
    "neg": lambda a: -a,
    "abs": abs,
    "sign": _sign,
    "max": _maximum,
    "min": _minimum,
    "clamp": lambda low, x, high: _minimum(_maximum(x, low), high),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": _invert,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "shift_left": lambda a, b: a << b,
    "shift_right_arithmetic": lambda a, b: a >> b,
    "shift_right_logical": _shift_right_logical,
    "select_n": _select,
    "square": lambda a: a * a,
}

# Primitives that hand their first operand on.
IDENTITY = frozenset(
    {
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "stop_gradient",
        "multiple_of",
        "copy",
        "pvary",
        "reduce_precision",
        "optimization_barrier",
        "layout_constraint",
        "pallas_plain_result",
        "with_memory_space_constraint",
    }
)


def constant(value: Any, aval: Any) -> Scalar | Known:
    """A constant of a jaxpr as a value: scalars evaluated, integer arrays known, anything
    else unknown.
    """
    if _compat.is_traced(value):  # a captured ref or index: supplied by the equation's operands
        return UNKNOWN
    if not isinstance(aval.dtype, np.dtype):  # a random key
        return UNKNOWN
    array = np.asarray(value)
    if array.ndim == 0:
        numeric = array.dtype.kind in "iubf"
        return settle(array.item(), np.dtype(aval.dtype)) if numeric else UNKNOWN
    return Known(array, False) if array.dtype.kind in "iub" else UNKNOWN
