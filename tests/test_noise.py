"""Noise: uniform, and independent."""

import numpy as np
import pytest

from pallas_collectives import noise


@pytest.mark.parametrize("shape", [(64, 1024), (61, 1000)], ids=str)
def test_noise_is_uniform_and_independent(shape: tuple[int, ...]) -> None:
    """Neighbours along rows and columns, and noise of two keys, have nothing in common."""
    keys = [(0, 0), (0, 1), (1, 0), (12345, -7), (-7, 12345)]
    each = [np.asarray(noise.of(key, shape), np.float64) for key in keys]
    size = each[0].size
    for one in each:
        assert ((one >= 0) & (one < 1)).all()
        counts = np.histogram(one, 64, (0, 1))[0]
        assert ((counts - size / 64) ** 2).sum() / (size / 64) < 63 + 5 * np.sqrt(2 * 63)
    pairs = [(a, b) for i, a in enumerate(each) for b in each[:i]]
    pairs += [(one[:, step:], one[:, :-step]) for one in each for step in (1, 128)]
    pairs += [(one[step:], one[:-step]) for one in each for step in (1, 8)]
    for a, b in pairs:
        correlation = ((a - 0.5) * (b - 0.5)).mean() * 12
        assert abs(correlation) < 5 / np.sqrt(a.size)
