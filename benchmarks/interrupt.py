"""Ctrl-C between rows, not within one."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

STATUS = 130  # as a shell reports SIGINT


@contextlib.contextmanager
def between_rows() -> Iterator[Callable[[], None]]:
    """Holds SIGINT back; yields a function that raises KeyboardInterrupt if one has come.

    An exception thrown in the midst of a simulated kernel, whose devices are threads, can leave the
    other devices waiting for ever. A second SIGINT ends the process at once; files are up to date.
    """
    asked = threading.Event()

    def handle(_signal: int, _frame: object) -> None:
        if asked.is_set():
            os._exit(STATUS)
        asked.set()
        print("stopping after this row; once more to stop at once", file=sys.stderr)

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
