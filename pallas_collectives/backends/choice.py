"""Which backend serves a call, decided once per call while it is traced.

* `pallas`: our kernels; compiled on TPUs, in TPU interpret mode on simulated ones (CPU devices);
* `nccl`: NCCL on NVIDIA GPUs;
* `xla`: lax's own collective.

A backend asked for by name never falls back, whether the call, `use_backend` or the environment
names it. Without a name the mesh in scope decides. If that mesh's backend cannot serve, `xla` does,
with a warning the first time and a count each time (`fallback_counts`).
"""

import contextlib
import contextvars
import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_collectives import _compat, simulation, validation, wires
from pallas_collectives.annotations import Interpret
from pallas_collectives.backends import slices
from pallas_collectives.backends.plans import MAY_BE_AHEAD, NAMES, How
from pallas_collectives.errors import (
    AlgorithmError,
    BackendError,
    CollectiveError,
    WireError,
)
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import WireLike

ENVIRONMENT_VARIABLE = "PALLAS_COLLECTIVES_BACKEND"


_GPU = ("gpu", "cuda", "rocm")


# The backend that `use_backend` names.
named_backend = jax.make_user_context(None)

# Whether the step around a call matters (`How.beside`): True or False by `override_lax`, STARTED
# for a call that is started ahead of the use of its result, None otherwise.
STARTED = "started"
beside_compute = jax.make_user_context(None)

# Whether a loop's turn may ask for what the next one needs first, by `override_lax`.
ahead = jax.make_user_context(False)

# Whether products and tokens' exchanges may be one kernel, by `override_lax`.
fuse = jax.make_user_context(False)

# The functions of lax's whose primitives are ours, whoever binds them; set by `overridden`. None
# are where our own code means lax's, and says so by `meaning_lax`.
rebound = jax.make_user_context(frozenset())
means_lax: contextvars.ContextVar[bool] = contextvars.ContextVar("means_lax", default=False)


@contextlib.contextmanager
def meaning_lax() -> Iterator[None]:
    """Within this context our own code binds lax's collectives, and means these."""
    token = means_lax.set(True)
    try:
        with rebound(frozenset()):
            yield
    finally:
        means_lax.reset(token)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within this context calls use the named backend; None lets the mesh decide again.

    Raises:
      BackendError: an unknown backend.

    Example, with `jax.vmap` in place of a mesh:
      >>> with pc.use_backend("xla"):
      ...     print(jax.vmap(lambda x: pc.psum(x, "x"), axis_name="x")(jnp.ones(2)))
      [2. 2.]
    """
    if name is not None:
        _check_name(name)
    with named_backend(name):
        yield


def settle(
    axis_name: AxisName,
    groups: Groups,
    backend: str | None,
    algorithm: str | None,
    precise: bool = False,
    order: str | None = None,
    wire: WireLike = None,
    wire_backward: WireLike = None,
    alike: bool = True,
) -> How:
    """Checks axis names and groups against the mesh in scope, and settles what serves.

    Groups must be of equal size if `alike`.
    """
    size = validation.size_of(axis_name)
    axes = validation.named(axis_name)
    if groups is not None:
        validation.check_groups(groups, size, alike)
    validation.check_flag("precise", precise)
    validation.check_order_of_sum(order, axes)
    how = choose(axes, backend, algorithm, precise, order, groups)
    return how if wire is wire_backward is None else over_wires(how, wire, wire_backward)


def over_wires(how: How, wire: WireLike, backward: WireLike) -> How:
    """The same, sent as narrower numbers, and derivatives as theirs.

    Raises:
      WireError: an unknown wire.
      CollectiveError: precise=True, which widens what travels, and a wire, which narrows it.
    """
    there, back = wires.named(wire), wires.named(backward)
    if how.precise and (there or back):
        rule = "precise=True widens what travels and wire= narrows it"
        raise CollectiveError(f"precise=True with wire={wire!r}", rule, "leave one of them out")
    if back is not None and back.key is not None:
        rule = "derivatives are rounded to nearest: they have no key of their own"
        raise WireError(f"wire_backward={backward!r}", rule, "leave rounding and key out")
    once = there is not None and there.key is not None
    return dataclasses.replace(how, wire=there and there.fixed, wire_backward=back, once=once)


def choose(
    axes: tuple[Any, ...],
    backend: str | None,
    algorithm: str | None,
    precise: bool = False,
    order: str | None = None,
    groups: Groups = None,
) -> How:
    """Settles what serves a collective over `axes` under the mesh in scope.

    With an `algorithm` of None or "auto" the backend chooses one.

    Raises:
      BackendError: the named backend does not exist, or this mesh cannot have the backend,
        algorithm or precision asked for.
    """

    _compat.prepare()
    algorithm = None if algorithm == "auto" else algorithm
    name = backend or named_backend.value or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None:
        _check_name(name)
    if name == "xla":
        if algorithm is not None or precise:
            raise AlgorithmError(
                f"algorithm={algorithm!r}, precise={precise} with backend 'xla'",
                "lax's own collectives have no algorithms to choose from",
                "leave them out, or name another backend",
            )
        return How("xla", named=True, order=order)
    platform = simulation.platform()
    chosen = name or _usual(platform)
    if obstacle := _obstacle(axes, platform, groups) or _missing(chosen, platform):
        if name is not None or algorithm is not None or precise:
            asked = {"backend": name, "algorithm": algorithm, "precise": precise or None}
            asked = {k: v for k, v in asked.items() if v is not None}
            value = ", ".join(f"{k}={v!r}" for k, v in asked.items())
            raise BackendError(value, obstacle, _remedy(name, platform, [*asked]))
        return How("xla", fallback=obstacle, order=order)
    how = in_step(How(chosen, name is not None, "", algorithm, precise, order))
    how = dataclasses.replace(how, fuses=how.beside and fuse.value and bool(_ahead()))
    if chosen != "pallas":
        return how
    return dataclasses.replace(
        how, interpret=_interpret(platform), across=slices.marked(), ahead=_ahead()
    )


def in_step(how: How) -> How:
    """The same, told whether the step around the call matters (`How.beside`)."""
    free = not how.strict and how.order is None
    return dataclasses.replace(how, beside=free and bool(beside_compute.value))


def asked(how: How, x: Any, *, adds: bool) -> How:
    """The same, of these operands: told whether products wait for the result (`How.awaited`).

    So they do for sums that are called by name, or that `check_vma` adds, until a whole turn is
    known (`lowering.gradient_sums`); or it is the end of a step, where a SparseCore has nothing
    beside it either.
    """
    if not how.beside or beside_compute.value == STARTED:
        return how
    awaited = adds or all(map(_compat.is_computed, jax.tree.leaves(x)))
    return dataclasses.replace(how, awaited=awaited)


def _check_name(name: str) -> None:
    if name not in NAMES:
        environment = os.environ.get(ENVIRONMENT_VARIABLE) == name
        said = ENVIRONMENT_VARIABLE if environment else "backend"
        rule = "it must be 'pallas' (TPUs, also simulated), 'nccl' (GPUs) or 'xla' (lax's own)"
        raise BackendError(f"{said}={name!r}", rule, "name one of them, or leave it out")


def _remedy(name: str | None, platform: str, asked: list[str]) -> str:
    """What to leave out, so that something serves."""
    if name is not None and _missing(name, platform) and not _missing(_usual(platform), platform):
        return f"leave backend= out: {_usual(platform)!r} then serves {platform} devices"
    return f"leave {' and '.join(f'{what}=' for what in asked)} out: lax then serves"


def on_gpus() -> bool:
    """Whether the mesh in scope is of GPUs."""
    return _usual(simulation.platform()) == "nccl"


def _usual(platform: str) -> str:
    """The backend of a platform's devices."""
    return "nccl" if platform in _GPU else "pallas"


def _obstacle(axes: tuple[Any, ...], platform: str, groups: Groups) -> str:
    """Why no kernel can serve a collective over `axes` under the mesh in scope; "" if one can."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        partitioning = "jax.experimental.custom_partitioning"
        return f"no mesh is known here: {axes} are axes of vmap, or of {partitioning}"
    if not set(axes) & set(mesh.axis_names):
        return f"{axes} are axes of vmap, not of a mesh"  # lax's vmap rules take those away
    others = [a for a in mesh.axis_names if a not in mesh.manual_axes]
    # A simulated kernel is a host callback, of which XLA refuses a partition of one, too.
    if automatic := [a for a in others if mesh.shape[a] > 1 or platform == "cpu"]:
        return f"mesh axis {automatic[0]!r} is not manual, and XLA cannot partition a kernel"
    if groups is not None and len({*map(len, groups)}) > 1:
        return f"axis_index_groups={groups!r} are of unequal size, and no kernel takes those"
    if platform == "cpu" and jax.process_count() > 1:
        return "TPU devices are simulated within one process only"
    return simulation.obstacle() if platform == "cpu" else ""


def _missing(name: str, platform: str) -> str:
    """Why a backend is not there on a platform; "" if it is."""
    match name:
        case "nccl" if platform not in _GPU:
            return f"NCCL needs NVIDIA GPUs, and the mesh in scope is of {platform} devices"
        case "nccl" if not importlib.util.find_spec("nccl"):
            return "nccl4py is not installed (pip install -e '.[gpu]' in the clone)"
        case "pallas" if platform not in ("tpu", "cpu"):
            return f"the kernels are for TPUs, and the mesh in scope is of {platform} devices"
    return ""


def _ahead() -> str:
    return MAY_BE_AHEAD if ahead.value and beside_compute.value is True else ""


def _interpret(platform: str) -> Interpret:
    forced = _compat.forced_interpret_params()
    if forced is not None:
        return forced
    return pltpu.InterpretParams() if platform == "cpu" else False
