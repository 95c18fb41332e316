"""What the tests of sums over a torus share."""

import pytest

from pallas_collectives.kernels.torus import sections


@pytest.fixture
def in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little scratch that the smallest operands go by in sections, and in many of them."""
    monkeypatch.setattr(sections, "SCRATCH_BYTES", 1 << 17)
    monkeypatch.setattr(sections, "SECTION_BYTES", 1)
