"""A collective that another one needs, bound as a primitive of its own, which replay can follow.

`lowering.primitives` makes the primitives. It stands above the backends, so it hands its function
down, in place of an import that would point up.
"""

from collections.abc import Callable
from typing import Any

from pallas_collectives.backends.plans import How

WithTwins = Callable[..., Any]  # (how, fn, *args) -> fn(*args), its collectives by `how`
_with_twins: list[WithTwins] = []


def provide(with_twins: WithTwins) -> WithTwins:
    """Makes this the function that `run` calls."""
    _with_twins[:] = [with_twins]
    return with_twins


def run(how: How, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), with a primitive of ours in place of each collective of lax's that fn binds."""
    (with_twins,) = _with_twins
    return with_twins(how, fn, *args)
