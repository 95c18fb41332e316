"""Kernels with scopes, sound and faulty, whose memory and semaphores are theirs for so long.

Each is a `judged.Case`.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from judged import hop, launch
from judged_features import case
from replay_kernels import DMA, barrier, neighbours


def _scopes(
    x: Any,
    n: int,
    *,
    at: str = "in it",
    to: str = "o",
    early: bool = False,
    nested: bool = False,
    space: Any = pltpu.VMEM,
) -> Any:
    """Two scopes in turn, twice: the second sends from or to its memory, and waits in or after it.

    `early`: the barrier is before the first; `nested`: the first is in the second.
    """
    scope = space(x.shape, x.dtype)

    def kernel(x_ref: Any, o_ref: Any, kept: Any, send: Any, recv: Any) -> None:
        _, right, left = neighbours(n)

        def through(ref: Any) -> None:
            pltpu.sync_copy(x_ref, ref)  # has a scope of its own, of a semaphore alone
            pltpu.sync_copy(ref, kept)

        def inside(ref: Any) -> None:
            if to == "o":
                pltpu.sync_copy(x_ref, ref)
            if not early:
                barrier(left, right)
            goal = {"o": o_ref, "scope": ref}[to]
            copy = hop(ref if to == "o" else x_ref, goal, send, recv, right)
            copy.start()
            if nested:
                pl.run_scoped(through, scope)
            if at == "in it":
                copy.wait()

        def turn(i: Any, _: Any) -> Any:
            if early:
                barrier(left, right)
            if not nested:
                pl.run_scoped(through, scope)
            pl.run_scoped(inside, scope)
            if at == "after":
                hop(x_ref, o_ref, send, recv, right).wait()
            return _

        lax.fori_loop(0, 2, turn, 0)

    return launch(kernel, x, pltpu.VMEM(x.shape, x.dtype), DMA, DMA)


def _scoped(name: str, *finds: str, **how: Any) -> None:
    case(name, lambda x, n: _scopes(x, n, **how), *finds)


_scoped("from a scope")
_scoped("from a scope, awaited after it", "race", at="after")
_scoped("from a scope around another", nested=True)
_scoped("into a scope", to="scope")
_scoped("into a scope, awaited after it", "race", to="scope", at="after")
_scoped("into a scope that is another's as yet", "race", to="scope", early=True)

_scoped("from a scope of SMEM", space=pltpu.SMEM)
_scoped("from a scope of SMEM, awaited after it", "race", at="after", space=pltpu.SMEM)


def _signalled_scopes(x: Any, n: int, *, told: bool = True, late: bool = False) -> Any:
    """Two turns with a semaphore each, which the left neighbour signals.

    `told`: all have done with a turn before the next; `late`: the second waits for both signals.
    """

    def kernel(x_ref: Any, o_ref: Any) -> None:
        _, right, left = neighbours(n)

        def turn(i: Any, _: Any) -> Any:
            def inside(sem: Any) -> None:
                pl.semaphore_signal(sem, 1, device_id={"x": right})
                if not late:
                    pl.semaphore_wait(sem, 1)

                @pl.when(late & (i == 1))
                def _() -> None:
                    pl.semaphore_wait(sem, 2)

            pl.when(told | (i == 0))(lambda: barrier(left, right))
            pl.run_scoped(inside, pltpu.SemaphoreType.REGULAR)
            return _

        lax.fori_loop(0, 2, turn, 0)

    return launch(kernel, x)


case("signals in a scope", _signalled_scopes)
case(
    "signals in a scope, taken in the next",
    lambda x, n: _signalled_scopes(x, n, late=True),
    "leftover",
)
case(
    "signals in a scope of the next turn",
    lambda x, n: _signalled_scopes(x, n, told=False),
    "leftover",
)
