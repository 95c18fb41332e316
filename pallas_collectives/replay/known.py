"""Computes equations of known operands on the host: for one device, or for all lanes at once.

numpy computes what tables are made of: of each new shape JAX would compile a program, which takes
longer than all else that a replay does with it. JAX computes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.replay.values import SCALAR, Known


def evaluate(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """The results of an equation: once, or for all lanes where its operands differ."""
    varies = [isinstance(a, np.ndarray) or (isinstance(a, Known) and a.per_lane) for a in args]
    operands = [
        np.asarray(a.values if isinstance(a, Known) else a, _compat.type_of(v).dtype)
        for a, v in zip(args, eqn.invars, strict=True)
    ]
    by_numpy = _BY_NUMPY.get(eqn.primitive.name)
    if by_numpy is None:
        outs = _by_jax(eqn, operands, varies)
    else:
        lanes = [a if v else a[None] for a, v in zip(operands, varies, strict=True)]
        with np.errstate(all="ignore"):  # JAX warns of no overflow either
            made = by_numpy(eqn, *lanes)
        made = made if eqn.primitive.multiple_results else [made]
        outs = [
            (out if any(varies) else out[0]).astype(_compat.type_of(var).dtype, copy=False)
            for out, var in zip(made, eqn.outvars, strict=True)
        ]
    if any(varies):
        return [Known(o, True) if o.ndim > 1 else o for o in outs]
    return [Known(o, False) if o.ndim else o.item() for o in outs]


def _by_jax(eqn: JaxprEqn, operands: list[np.ndarray], varies: list[bool]) -> list[np.ndarray]:
    def bind(*operands: Any) -> Any:
        out = eqn.primitive.bind(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    mapped = jax.vmap(bind, [0 if v else None for v in varies]) if any(varies) else bind
    return [np.asarray(out) for out in mapped(*operands)]


# By numpy: arrays have the lanes, or one for all of them, along a first dimension of their own.


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    return _compat.type_of(eqn.outvars[0]).shape


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray:
        rank = len(_shape(eqn))
        whole = (a.reshape(len(a), *[1] * rank) if a.ndim == 1 else a for a in operands)
        return function(*whole)

    return compute


def _reduced(function: Callable[..., Any], unit: Callable[[Any], Any]) -> Callable[..., Any]:
    """By NumPy's function; `unit`: of a dtype's range, the result of nothing."""

    def compute(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
        return function(
            x, axis=tuple(axis + 1 for axis in eqn.params["axes"]), initial=unit(_range(x.dtype))
        )

    return compute


def _range(dtype: np.dtype) -> tuple[Any, Any]:
    """The least number and the largest."""
    if dtype.kind == "b":
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return -np.inf, np.inf


def _iota(eqn: JaxprEqn) -> np.ndarray:
    shape, along = _shape(eqn), eqn.params["dimension"]
    numbers = np.arange(shape[along]).reshape([-1 if d == along else 1 for d in range(len(shape))])
    return np.broadcast_to(numbers, (1, *shape))


def _broadcast(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    shape = _shape(eqn)
    extents = [1] * len(shape)
    for dimension, extent in zip(eqn.params["broadcast_dimensions"], x.shape[1:], strict=True):
        extents[dimension] = extent
    return np.broadcast_to(x.reshape(len(x), *extents), (len(x), *shape))


def _slice(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return x[(slice(None), *map(slice, starts, limits, strides))]


def _dynamic_slice(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray:
    x, *starts = _on_all_lanes(operands)
    index = [np.arange(len(x))]
    for start, extent, size in zip(starts, x.shape[1:], eqn.params["slice_sizes"], strict=True):
        index.append(np.clip(start, 0, extent - size)[:, None] + np.arange(size))
    rank = x.ndim
    return x[
        tuple(
            a.reshape([len(x), *[a.size // len(x) if d == k else 1 for d in range(1, rank)]])
            for k, a in enumerate(index)
        )
    ]


def _on_all_lanes(operands: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    lanes = max(map(len, operands))
    return [np.broadcast_to(a, (lanes, *a.shape[1:])) for a in operands]


_BY_NUMPY: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(function) for name, function in SCALAR.items()},
    "reduce_max": _reduced(np.max, lambda of: of[0]),
    "reduce_min": _reduced(np.min, lambda of: of[1]),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda eqn, x: x.reshape(len(x), *_shape(eqn)),
    "squeeze": lambda eqn, x: x.reshape(len(x), *_shape(eqn)),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "stack": lambda eqn, *xs: np.stack(_on_all_lanes(xs), axis=eqn.params["axis"] + 1),
    "unstack": lambda eqn, x: np.moveaxis(x, eqn.params["axis"] + 1, 0),
    "concatenate": lambda eqn, *xs: np.concatenate(
        _on_all_lanes(xs), axis=eqn.params["dimension"] + 1
    ),
}
