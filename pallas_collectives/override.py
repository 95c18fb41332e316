"""`jax.lax`'s collectives replaced by ours, for code that you do not want to edit."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_collectives import _compat, collectives
from pallas_collectives.backends import choice
from pallas_collectives.lowering import primitives

# JAX keeps this value per thread and in the key of its caches: what was traced without ours is
# traced again with them.
_overridden = jax.make_user_context(False)

_lock = threading.Lock()
_entered = 0  # contexts open, in all threads together; `jax.lax` is as it was while there are none


@contextlib.contextmanager
def override_lax() -> Iterator[None]:
    """Within this context `jax.lax`'s collectives are ours, for code that calls `jax.lax.x`.

    `jax.lax.psum` and the others of `pallas_collectives.collectives` are ours whenever they are
    called in this thread, by the model or by a library it uses. So are the sums over devices that
    differentiation adds under `check_vma=True`, for an operand that is equal on all devices and was
    combined with one that is not. Use `use_backend` with it to name the backend. Contexts nest, end
    on exceptions too, and may be open in several threads; a thread without one keeps lax's.

    A function under `jax.jit` is traced again inside, even if it has been traced outside.

    It does not reach:

    * names bound to lax's functions earlier, as by `from jax.lax import psum`;
    * halves of a collective, which only XLA joins: `psum_scatter_start`, whose result is a future
      (JAX 0.12), and `psend` and `precv` between GPUs (JAX 0.10);
    * code that runs or is traced outside: a vjp function made inside but first called outside runs
      our collectives where the forward pass did, and lax's for the sums that it adds;
    * the sums that differentiating `jax.shard_map` with `check_vma=False` adds for operands that
      its `in_specs` replicate, because JAX makes them without `jax.lax`.
    """
    with _installed(), _overridden(True):
        yield


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Keeps the functions that choose by thread in `jax.lax` while any thread needs them."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            for name, function in _CHOOSING.items():
                setattr(jax.lax, name, function)
            _compat.prepare()
            _compat.register(_PVARY, transpose=_pvary_transpose)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                for name, function in vars(collectives.LAX).items():
                    setattr(jax.lax, name, function)
                _compat.register(_PVARY, transpose=_LAX_PVARY_TRANSPOSE)


def _choosing(name: str) -> Callable[..., Any]:
    """lax's function in threads outside of all contexts, ours in others."""
    of_lax, ours = getattr(collectives.LAX, name), getattr(collectives, name)

    @functools.wraps(of_lax)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if _overridden.value else of_lax)(*args, **kwargs)

    return function


_CHOOSING = {name: _choosing(name) for name in vars(collectives.LAX)}

# What types an equal operand as different on every device; JAX inserts it, and its transpose sums.
_PVARY = _compat.transposed("pvary")
_LAX_PVARY_TRANSPOSE = _compat.rule(_PVARY, "transpose")


def _pvary_transpose(cotangent: Any, *args: Any, axes: Any) -> Any:
    if not _overridden.value:
        return _LAX_PVARY_TRANSPOSE(cotangent, *args, axes=axes)
    rule = functools.partial(_LAX_PVARY_TRANSPOSE, axes=axes)
    return primitives.with_twins(choice.choose(axes, None, None), rule, cotangent, *args)
