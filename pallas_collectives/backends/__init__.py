"""Which backend serves a call, decided once per call while tracing; and how often each served.

* `pallas`: our kernels; compiled on TPUs, in TPU interpret mode on simulated ones (CPU devices);
* `nccl`: NCCL on NVIDIA GPUs;
* `xla`: lax's own collective.

A backend asked for by name, in the call, by `use_backend` or by the environment, never falls back.
Without a name the mesh in scope decides, and where its own backend cannot serve, `xla` does,
with a warning the first time and a count for each (`fallback_counts`).
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

from pallas_collectives import _compat, catalogue, simulation
from pallas_collectives.errors import (
    AlgorithmError,
    BackendError,
    DtypeError,
    ReachError,
    SliceError,
    SlowerError,
    UnservedError,
)

NAMES = ("pallas", "nccl", "xla")
ENVIRONMENT_VARIABLE = "PALLAS_COLLECTIVES_BACKEND"

# What a backend raises for a call that lax can serve in its place.
UNSERVABLE = (DtypeError, ReachError, SliceError, SlowerError, UnservedError)

_GPU = ("gpu", "cuda", "rocm")
_named_backend = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class How:
    """What is settled of a call while tracing; a parameter of its primitive and its transpose's.

    What serves in the end is a `Plan`, made while lowering, when the devices are known.

    Attributes:
      backend: one of `NAMES`.
      named: whether the caller named the backend, so that nothing else may serve.
      fallback: why lax serves a call whose backend was not named; "" where it does not.
      algorithm: the caller's choice, or None for the backend's own.
      precise: sums travel in float32 where the operand is a narrower float.
      interpret: False, or the `pltpu.InterpretParams` to simulate the TPU with.
      across: the mesh axes that lead to other slices; None to ask the devices (see `hierarchy`).
    """

    backend: str
    named: bool = False
    fallback: str = ""
    algorithm: str | None = None
    precise: bool = False
    interpret: Any = False
    across: tuple[str, ...] | None = None

    @property
    def strict(self) -> bool:
        """Whether the call must be served as it says, or not at all."""
        return self.named or self.algorithm is not None or self.precise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What serves one collective, and why: made once, followed, counted and explained as it is.

    Attributes:
      op: the canonical collective; where lax serves, lax's.
      backend: one of `NAMES`.
      algorithm: its name, with the memory space behind it; None where the backend itself chooses.
      why: in a sentence; where lax serves, what no other backend can, and "" if lax was named.
    """

    op: str
    backend: str
    algorithm: str | None = None
    why: str = ""


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within this context calls use the named backend; None gives the choice back to the mesh.

    Raises:
      BackendError: no such backend.
    """
    if name is not None:
        _check_name(name)
    with _named_backend(name):
        yield


def choose(
    axes: tuple[Any, ...], backend: str | None, algorithm: str | None, precise: bool = False
) -> How:
    """Settles how a collective over `axes` is served under the mesh in scope.

    An `algorithm` of None or "auto" is the backend's to choose.

    Raises:
      BackendError: the named backend does not exist, or it, or the algorithm or precision asked
        for, cannot be had here.
    """
    from pallas_collectives import hierarchy

    algorithm = None if algorithm == "auto" else algorithm
    name = backend or _named_backend.value or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None:
        _check_name(name)
    if name == "xla":
        if algorithm is not None or precise:
            raise AlgorithmError(
                f"algorithm={algorithm!r}, precise={precise} with backend 'xla'",
                "lax's own collectives offer no choice",
                "leave them out, or name another backend",
            )
        return How("xla", named=True)
    platform = _platform()
    chosen = name or ("nccl" if platform in _GPU else "pallas")
    if obstacle := _obstacle(axes, platform) or _missing(chosen, platform):
        if name is not None or algorithm is not None or precise:
            asked = {"backend": name, "algorithm": algorithm, "precise": precise or None}
            value = ", ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
            raise BackendError(value, obstacle, "leave backend=None and the like to use lax here")
        return How("xla", fallback=obstacle)
    how = How(chosen, name is not None, "", algorithm, precise)
    if chosen != "pallas":
        return how
    return dataclasses.replace(how, interpret=_interpret(platform), across=hierarchy.marked())


def lower(lax_p: core.Primitive, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    """Runs a lax collective as `how` says, or by lax where the backend cannot.

    Raises:
      DtypeError, ReachError, SliceError: as `run`, where the backend or its algorithm was named.
    """
    return served(lax_p.name, how, lax_p.bind, *args, **params)


def served(op: str, how: How, by_lax: Callable[..., Any], *args: jax.Array, **params: Any) -> Any:
    """Runs the lax collective named `op` on the backend, or `by_lax` where that cannot."""
    if how.backend != "xla":
        try:
            return run(op, how, *args, **params)
        except UNSERVABLE as error:
            if how.strict:
                raise
            how = How("xla", fallback=str(error))
    note(Plan(op=op, backend="xla", why=how.fallback))
    return by_lax(*args, **params)


def run(op: str, how: How, *args: jax.Array, **params: Any) -> jax.Array:
    """Runs the lax collective named `op` on the backend.

    Raises:
      DtypeError, ReachError, SliceError: the backend cannot take the dtype, or not write to the
        devices.
    """
    from pallas_collectives import hierarchy
    from pallas_collectives.backends import canonical, measured, untyped
    from pallas_collectives.kernels import entry

    module: Any = importlib.import_module(f"pallas_collectives.backends.{how.backend}")
    collective, _ = catalogue.primitives()[op]
    if not hasattr(module, collective.name):
        raise UnservedError(
            f"{collective.name} by backend {how.backend!r}",
            "that backend has no function for it",
            "leave the backend to be chosen: lax, then, serves",
        )
    operands = [untyped.untyped(x) for x in args]
    if how.backend == "pallas":
        with entry.in_slices(functools.partial(hierarchy.slices, axes=how.across)):
            return canonical.run(hierarchy.InSlices(module), op, how, *operands, **params)
    if not how.strict:
        module = measured.Measured(module, how.backend)
    return canonical.run(module, op, how, *operands, **params)


def _check_name(name: str) -> None:
    if name not in NAMES:
        environment = os.environ.get(ENVIRONMENT_VARIABLE) == name
        where = f" (from {ENVIRONMENT_VARIABLE})" if environment else ""
        raise BackendError(
            f"backend {name!r}{where}", f"it is one of {', '.join(NAMES)}", "name one"
        )


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _obstacle(axes: tuple[Any, ...], platform: str) -> str:
    """Why no kernel can serve a collective over `axes` under the mesh in scope; "" if one can."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) & set(mesh.axis_names):
        return f"{axes} are axes of vmap, not of a mesh"  # lax's vmap rules take those away
    automatic = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
    if automatic:
        return f"mesh axis {automatic[0]!r} is not manual, and XLA cannot partition a kernel"
    if platform == "cpu" and jax.process_count() > 1:
        return "TPU devices are simulated within one process only"
    return simulation.obstacle() if platform == "cpu" else ""


def _missing(name: str, platform: str) -> str:
    """Why a backend is not there on a platform; "" if it is."""
    match name:
        case "nccl" if platform not in _GPU:
            return f"NCCL needs NVIDIA GPUs, and the mesh in scope is of {platform} devices"
        case "nccl" if not importlib.util.find_spec("nccl"):
            return "nccl4py is not installed (pip install 'pallas-collectives[gpu]')"
        case "pallas" if platform not in ("tpu", "cpu"):
            return f"the kernels are for TPUs, and the mesh in scope is of {platform} devices"
    return ""


def _interpret(platform: str) -> Any:
    forced = _compat.forced_interpret_params()
    if forced is not None:
        return forced
    return pltpu.InterpretParams() if platform == "cpu" else False


_counts: collections.Counter[tuple[str, str, str | None]] = collections.Counter()
_fallbacks: collections.Counter[str] = collections.Counter()
_fusions: collections.Counter[tuple[str, str, str]] = collections.Counter()
_counts_lock = threading.Lock()
_counting = contextvars.ContextVar("counting", default=True)
_made: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("made", default=None)


def counts() -> dict[tuple[str, str, str | None], int]:
    """How often each (collective, backend, algorithm) was built into a program.

    Since `reset_counts`. A program built once and run often counts once, as do small arrays of a
    tree that are reduced together.
    """
    return dict(_counts)


def fallback_counts() -> dict[str, int]:
    """How often a call without a named backend went to lax, by reason, since `reset_counts`."""
    return dict(_fallbacks)


def fusion_counts() -> dict[tuple[str, str, str], int]:
    """How often each (fused product, way, reason) was built into a program, since `reset_counts`.

    The way is "fused" (one kernel), "pipelined" (permutes and products of XLA) or "unfused" (a
    collective and a product), with the reason for the last. Backward passes count as well.
    """
    return dict(_fusions)


def reset_counts() -> None:
    """Sets all counters to zero."""
    _counts.clear()
    _fallbacks.clear()
    _fusions.clear()


def count_fusion(op: str, way: str, reason: str) -> None:
    """Notes that a fused product is being built, this way."""
    if _counting.get():
        with _counts_lock:
            _fusions[op, way, reason] += 1


def note(plan: Plan) -> None:
    """Notes that a plan is being followed: it is counted, and told to who records."""
    if (plans := _made.get()) is not None:
        plans.append(plan)
    if not _counting.get():
        return
    fallback = plan.backend == "xla" and plan.why
    with _counts_lock:
        _counts[plan.op, plan.backend, plan.algorithm] += 1
        _fallbacks.update([fallback] if fallback else [])
        first = fallback and _fallbacks[fallback] == 1
    if first:
        logging.warning("pallas_collectives: lax serves this collective, because %s", fallback)


@contextlib.contextmanager
def recorded() -> Iterator[list[Plan]]:
    """The plans that are followed within this context, in their order."""
    plans: list[Plan] = []
    token = _made.set(plans)
    try:
        yield plans
    finally:
        _made.reset(token)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """For traces that only ask what a lowering would do."""
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)
