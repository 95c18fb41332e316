"""What tests of products with their collective share: how they run, and what must come of it."""

from typing import Any

import jax
import numpy as np

import harness
import pallas_collectives as pc

N = 2  # devices, where their number is of no matter


def ran(op: str) -> set[str]:
    """The ways in which a fused product has been built."""
    return {way for name, way, _ in pc.fusion_counts() if name == op}


def reasons() -> str:
    return "; ".join(reason for _, _, reason in pc.fusion_counts())


def per_device(fn: Any, *args: Any, n: int = N, check_vma: bool = True) -> list[np.ndarray]:
    run = harness.per_device(fn, harness.mesh(n), check_vma=check_vma)
    return [np.asarray(y) for y in jax.tree.leaves(run(*args))]


def gathered(x: np.ndarray, axis: int) -> np.ndarray:
    whole = np.concatenate(x, axis=axis)
    return np.broadcast_to(whole, (len(x), *whole.shape))


def multiplied(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Each device's x @ w, in float64."""
    wide = w.astype(np.float64).reshape(len(w), *(1,) * (x.ndim - 3), *w.shape[1:])
    return x.astype(np.float64) @ wide


def scattered(x: np.ndarray, w: np.ndarray, axis: int) -> np.ndarray:
    total = multiplied(x, w).sum(axis=0)
    return np.stack(np.split(total, len(x), axis=axis))
