"""What XLA's own products take, as the compiler estimates it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import xla_products
from pallas_collectives.topology import chips


def test_what_is_known_takes_no_less_than_at_the_peak_rate() -> None:
    learned = json.loads(xla_products.PATH.read_text(encoding="utf-8"))["cycles"]
    for chip, sizes in learned.items():
        for size in sizes:
            rows, depth, columns = map(int, size.split("x"))
            took = xla_products.seconds((chip, rows, depth, columns))
            assert took is not None
            assert 1 <= took * chips.BY_NAME[chip].matrix_rate / (2 * rows * depth * columns) < 2.5


def test_what_was_not_asked_is_not_known() -> None:
    assert xla_products.seconds(("v5e", 1, 2, 3)) is None


def test_another_compiler_is_asked_again_for_what_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[Any]] = []

    def elsewhere(_: str, products: list[Any]) -> Iterator[dict[str, Any]]:
        asked.append(products)
        for chip, *size in products:
            yield {"chip": chip, "size": "x".join(map(str, size)), "cycles": len(asked)}

    monkeypatch.setattr(xla_products, "PATH", tmp_path / "products.json")
    monkeypatch.setattr(xla_products.compiled, "elsewhere", elsewhere)
    first, second, third = ("v5p", 1, 2, 3), ("v5p", 4, 5, 6), ("v6e", 1, 2, 3)
    xla_products._learned.cache_clear()
    try:
        for version, product in (("1", first), ("1", second), ("2", third)):
            monkeypatch.setattr(xla_products.metadata, "version", lambda _, v=version: v)
            xla_products.learn([product])
    finally:
        xla_products._learned.cache_clear()
    assert asked == [[first], [second], [first, second, third]]
    assert json.loads(xla_products.PATH.read_text(encoding="utf-8")) == {
        "libtpu": "2",
        "cycles": {"v5p": {"1x2x3": 3, "4x5x6": 3}, "v6e": {"1x2x3": 3}},
    }


@pytest.mark.slow  # the compiler, in a process of its own
def test_what_is_learned_is_kept_beside_what_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = json.loads(xla_products.PATH.read_text(encoding="utf-8"))["cycles"]
    monkeypatch.setattr(xla_products, "PATH", tmp_path / "products.json")
    xla_products._learned.cache_clear()
    try:
        for product in (("v5p", 4096, 4096, 4096), ("v6e", 512, 1024, 512)):
            xla_products.learn([product])
        assert xla_products.seconds(("v6e", 512, 1024, 512))
        cycles = json.loads(xla_products.PATH.read_text(encoding="utf-8"))["cycles"]
        assert cycles["v5p"]["4096x4096x4096"] == known["v5p"]["4096x4096x4096"]
    finally:
        xla_products._learned.cache_clear()
