"""Products as cuBLASLt is asked for them, by a library that only notes what it is asked."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import nccl_host
from pallas_collectives.nccl import cublas
from pallas_collectives.nccl.cublas import Product


class Lib:
    """cuBLASLt's C functions; it has a kernel for everything."""

    def __init__(self) -> None:
        self.multiplied: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> int:
        if name == "cublasLtMatmulAlgoGetHeuristic":
            args[-1]._obj.value = 1
        if name == "cublasLtMatmul":
            self.multiplied.append(tuple(getattr(a, "value", a) for a in args))
        return 0


class Driver(nccl_host.Driver):
    """One that tells what memory a workspace is."""

    @contextlib.contextmanager
    def workspace(self, ordinal: int, size: int) -> Iterator[tuple[int, int]]:
        with super().workspace(ordinal, size) as (at, stream):
            self.lent = range(at, at + size)
            yield at, stream


@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_are_loaded_in_memory_that_no_program_uses(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may be under way, and has what partial sums of its products go to."""
    library = cublas.Library.__new__(cublas.Library)
    library._lib = lib = Lib()  # type: ignore[assignment]
    monkeypatch.setattr(cublas, "library", lambda: library)
    driver = Driver()
    product = Product(2, 8, 16, 24, transposed, "bfloat16", "float32", (128, 192, 192))
    prepared = cublas.prepared(driver, 0, product)
    assert prepared.workspace not in driver.lent
    assert len(lib.multiplied) == 2
    for args in lib.multiplied:
        w, x, c, d, workspace = (args[i] for i in (3, 5, 8, 10, 13))
        assert all(address in driver.lent for address in (x, w, c, d, workspace))
        assert workspace + args[14] <= min(x, w, c, d)
        assert max(x, w, c, d) + product.most_bytes <= driver.lent.stop
