"""What a sum in the order of the ranks is, by numpy."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers whose sum hangs on the order in which they are added, where the dtype rounds."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(-100, 100, shape).astype(dtype)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def added(terms: np.ndarray) -> np.ndarray:
    """The sum over the first dimension, term by term, in float32 at least, rounded once."""
    narrow = jnp.issubdtype(terms.dtype, jnp.floating) and terms.dtype.itemsize < 4
    total = terms[0].astype(np.float32) if narrow else terms[0]
    for term in terms[1:]:
        total = total + term.astype(total.dtype)
    return total.astype(terms.dtype)


def everywhere(terms: np.ndarray) -> np.ndarray:
    """That sum, on every device."""
    return np.broadcast_to(added(terms), terms.shape)
