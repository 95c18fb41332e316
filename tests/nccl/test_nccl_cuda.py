"""The driver's calls, in order, where some fail: nothing temporary stays."""

import collections
import contextlib
import ctypes
from typing import Any

import pytest

from pallas_collectives.nccl import cuda
from pallas_collectives.nccl.errors import CallError


class Driver(cuda.Driver):
    """One whose calls do nothing; that of the name `failing` fails."""

    def __init__(self, failing: str) -> None:
        self._contexts = {0: ctypes.c_void_p()}
        self._failing = failing
        self.done: list[str] = []

    def _call(self, name: str, *args: Any) -> None:
        if name == self._failing:
            raise CallError(name, 2, "out of memory")
        self.done.append(name)


def use(driver: Driver) -> None:
    with driver.workspace(0, 8):
        driver._call("body")


def fill(driver: Driver) -> None:
    driver.fill_words(0, 64, 1, 2)


def put(driver: Driver) -> None:
    driver.put(0, 64, b"data")


@pytest.mark.parametrize("calls", [use, fill, put])
@pytest.mark.parametrize(
    "failing",
    ["", "cuMemAlloc_v2", "cuStreamCreateWithPriority", "body", "cuMemsetD32Async",
     "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"],
)  # fmt: skip
def test_whatever_fails_no_stream_or_memory_stays(calls: Any, failing: str) -> None:
    driver = Driver(failing)
    with contextlib.suppress(CallError):
        calls(driver)
    done = collections.Counter(driver.done)
    for begin, end in (
        ("cuStreamCreateWithPriority", "cuStreamDestroy_v2"),
        ("cuMemAlloc_v2", "cuMemFree_v2"),
        ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
    ):
        assert done[begin] == done[end]


def test_memory_is_freed_once_the_work_is_done() -> None:
    driver = Driver("")
    use(driver)
    order = ["cuMemAlloc_v2", "body", "cuStreamSynchronize", "cuMemFree_v2"]
    assert [name for name in driver.done if name in order] == order
