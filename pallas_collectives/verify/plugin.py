"""A plugin for pytest: the fixture `assert_sound`. Imports neither JAX nor kernels until used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def assert_sound() -> Callable[..., Any]:
    """`pallas_collectives.verify.assert_sound`: fails unless a kernel is sound on all schedules."""
    from pallas_collectives import verify

    return verify.assert_sound
