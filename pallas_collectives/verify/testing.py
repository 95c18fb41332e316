"""`assert_sound`: the judge in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_collectives.verify import judge
from pallas_collectives.verify.verdict import Verdict


def assert_sound(function: Callable[..., Any] | str, *args: Any, **how: Any) -> Verdict:
    """Fails the test unless `function(*args)` is judged and sound on every mesh asked for.

    Arguments are those of `check`: `mesh=`, `devices=(2, 4, 8)`, `machine=`, `inside=`, `compile=`.

    Raises:
      AssertionError: it is not, or cannot be judged; the message is the verdict.
      AskError: what is asked for makes no sense.

    Example:
      >>> def kernel(block):  # what stands inside shard_map
      ...     return pc.all_gather(block, "x", tiled=True)
      >>> pc.verify.assert_sound(kernel, "f32[64,128]", devices=4).ok
      True
    """
    __tracebackhide__ = True
    verdict = judge.check(function, *args, **how)
    if not verdict.ok:
        raise AssertionError(f"\n{verdict}")
    return verdict
