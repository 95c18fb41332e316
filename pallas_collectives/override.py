"""`jax.lax`'s collectives replaced by ours, for code that you do not want to edit."""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core

from pallas_collectives import _compat, catalogue, collectives, validation, wires
from pallas_collectives.annotations import Tangent
from pallas_collectives.backends import choice, overrides
from pallas_collectives.errors import CollectiveError, WireError
from pallas_collectives.lowering import ahead as lowering_ahead
from pallas_collectives.lowering import bodies, fusing, primitives
from pallas_collectives.overlap import primitives as products
from pallas_collectives.overlap import split
from pallas_collectives.wires import Wire

# The names of lax's functions that are ours. JAX keeps this value per thread and in the key of its
# caches: what was traced without ours is traced again with them.
_overridden = jax.make_user_context(frozenset())

# Such a name, the argument that takes a wire, and the wire of its calls.
_over = jax.make_user_context(frozenset())

_lock = threading.Lock()
_entered = 0  # contexts open, in all threads together; at 0 `jax.lax` is as it was
_found: dict[str, Callable[..., Any]] = {}  # what it had then, which others may have put there


@contextlib.contextmanager
def override_lax(
    *,
    everything: bool = False,
    only: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    wire: Mapping[str, Any] | None = None,
    wire_backward: Mapping[str, Any] | None = None,
    fuse: bool = True,
    ahead: bool = True,
) -> Iterator[None]:
    """Within this context `jax.lax`'s collectives are ours, for code that calls `jax.lax.x`.

    `jax.lax.psum` and the others of `pallas_collectives.collectives` are ours whenever they are
    called in this thread, by the model or by a library it uses. So are the sums over devices that
    differentiation adds under `check_vma=True`, for an operand that is equal on all devices and was
    combined with one that is not. Use `use_backend` with it to name the backend. Contexts nest, end
    on exceptions too, and may be open in several threads; a thread without one keeps lax's.

    A function under `jax.jit` is traced again inside, even if it has been traced outside.

    It makes no step longer. lax keeps the collectives that XLA runs beside compute
    (`tuning.overlaps`), where ours would stop the core: permutes and ragged exchanges on all chips;
    gathers on v5e; gathers and sums on 7x; and on v4 gathers that XLA puts in CMEM. It keeps large
    gathers of float32, of which XLA sends half the bytes where products read them; sums whose
    results a loop's turns only add up, which XLA runs once, behind the loop; on v5e and v6e sums by
    name of 4 to 32 MiB, and on v6e exchanges between products, which XLA has in VMEM; and what
    kernels cannot read as it lies and XLA would pad or move for them (`backends.pallas.packing`).
    On GPUs it keeps gathers of weights with the sums of their gradients, `psum` and permutes, of 4
    MiB and more: XLA runs these beside compute, and NCCL's calls of ours stop it. On v5p and v6e
    XLA would stop the core for them, and a SparseCore runs our kernels that move much data. Of
    gathers it runs those of weights, which are asked for ahead, and of sums these gathers'
    derivatives and those of gradients: a `psum` of what a scan has stacked runs in its turns, as a
    psum_scatter and one all_gather behind them all, and of several arrays each is summed where it
    is made (`lowering.gradient_sums`; on 7x by XLA). Products wait for tokens' exchanges at once; a
    SparseCore runs those beside which a turn has other products, as with `two_batch_overlap`
    (`lowering.order`). Or a gather of tokens and the products behind it, or a product and the
    psum_scatter behind it, run in one kernel, and a psum of products as that kernel and a gather,
    where a model of the chip says that this is quicker (`lowering.fusing`). So does, with its
    psum_scatter where that would stop the core, as on v4 and v5e, the product that makes a weight's
    gradient (`lowering.fusing_gradients`). `override_report()` says what was replaced, and why the
    rest was not.

    Args:
      everything: replace also what XLA would run beside compute; and run all on the TensorCore,
        each on its own, in no kernel with products.
      only: the functions to replace, by lax's names ("all_gather", ...); all by default. What a
        psum becomes, a psum_scatter and an all_gather, is ours with "psum" alone.
      keep: functions to leave to lax.
      wire: in what narrower numbers functions send floats, by lax's names: {"psum": "int8"} (see
        `wires`). That of psum is pmean's too, unless "pmean" is named. Where a wire would be
        slower, or cannot serve, it is left out, and counted (`wire_counts`): so for gathers of
        weights that run beside products as they are, and where a turn's order is as short without,
        on 7x with XLA's own calls in it. The sums that `check_vma=True` adds to gradients use
        psum's wire.
      wire_backward: likewise, of these calls' derivatives, by the names of the calls. Without it
        they travel as they are.
      fuse: whether products may run in one kernel with the exchange of tokens before or behind
        them, or with the scatter of the gradient that they make. Such a kernel multiplies as
        `all_gather_matmul` and `matmul_reduce_scatter` do, for which weights are (K, N) or (N, K):
        it adds up in float32 as XLA does, but in an order of its own. With False XLA multiplies
        all.
      ahead: whether a turn of a scan (one iteration) may gather the weights that the next turn
        needs first, and leave the scatter of its last gradient to the next turn, where a SparseCore
        runs these, or XLA such gathers beside products (on 7x, and on v5e what a turn reads once),
        and their own turn has little to run beside them. This holds a second layer's weights and
        gradients in memory; `override_report()` says which, and how much. Other scatters on a
        SparseCore are kept under way until later products are done, gradients may be summed in the
        turns that make them, and a turn may be put in another order. With False each turn stays as
        it was written.

    Raises:
      CollectiveError: a name that is not a collective's, or a flag that is not True or False.
      WireError: an unknown wire, or a wire for a function that takes no wire.

    It does not reach:

    * names bound to lax's functions earlier, as by `from jax.lax import psum`: see `overridden`;
    * halves of a collective, which only XLA joins: `psend` and `precv` between GPUs (JAX 0.10); but
      JAX 0.12's `psum_scatter_start` is ours (`overlap.split`), and so is what it gives;
    * code that runs or is traced outside: a vjp function made inside but first called outside runs
      our collectives where the forward pass did, and lax's for the sums that it adds;
    * the sums that differentiating `jax.shard_map` with `check_vma=False` adds for operands that
      its `in_specs` replicate, or a `jax.lax.pcast` to "reduced", because JAX makes them without
      `jax.lax`: see `overridden`;
    * collectives in a partition of `jax.experimental.custom_partitioning`, where no mesh is known;
    * collectives that nobody calls: those that XLA adds under `jax.jit` with shardings.

    Example, with `jax.vmap` in place of a mesh:
      >>> with pc.override_lax():
      ...     print(jax.vmap(lambda x: jax.lax.psum(x, "x"), axis_name="x")(jnp.ones(2)))
      [2. 2.]
    """
    names, _ = _names(everything=everything, only=only, keep=keep, fuse=fuse, ahead=ahead)
    over = _checked_wires("wire", wire, names)
    over |= _checked_wires("wire_backward", wire_backward, names)
    if unused := sorted({name for name, _, _ in over} - names):
        rule = "lax keeps that function, by `only` or `keep`"
        raise WireError(f"a wire for {unused[0]!r}", rule, "replace it, or leave its wire out")
    wired = {name for name, argument, _ in over if argument == "wire" and name in (wire or ())}
    with (
        _installed(),
        _overridden(names),
        _over(over),
        choice.beside_compute(not everything),
        choice.fuse(fuse),
        choice.ahead(ahead),
        overrides.told(wired),
    ):
        yield


def _names(*, only: Any, keep: Any, **flags: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The functions to replace, and those of `keep`; all these arguments checked."""
    for name, value in flags.items():
        validation.check_flag(name, value)
    kept = _checked("keep", keep)
    if only is None:
        return frozenset(_CHOOSING) - kept, kept
    wanted = _checked("only", only)
    if not wanted - kept:
        rule = f"with keep={keep!r} no function is left to replace"
        raise CollectiveError(
            f"only={only!r}", rule, "name functions that keep does not, or leave the context out"
        )
    return wanted - kept, kept


def _checked(argument: str, names: Any) -> frozenset[str]:
    """The names of lax's functions that an argument has: one, or several."""
    if not isinstance(names, Iterable):
        rule = "it must name one or more of lax's collectives"
        raise CollectiveError(f"{argument}={names!r}", rule, f"write it like {argument}=['psum']")
    found = [names] if isinstance(names, str) else [*names]
    for name in found:
        if not isinstance(name, str) or name not in _CHOOSING:
            rule = f"{name!r} is not one of lax's collectives ({', '.join(sorted(_CHOOSING))})"
            raise CollectiveError(f"{argument}={names!r}", rule, "use names from that list")
    return frozenset(found)


def _checked_wires(
    argument: str, given: Mapping[str, Any] | None, replaced: frozenset[str]
) -> frozenset[tuple[str, str, Wire]]:
    """The wires of functions by name, for an argument of theirs; each may be left out."""
    if given is not None and not isinstance(given, Mapping):
        rule = "it must map names of functions to wires"
        raise WireError(f"{argument}={given!r}", rule, "write it like {'psum': 'int8'}")
    checked, given = [], dict(given or {})
    if "psum" in given and "pmean" in replaced:
        given.setdefault("pmean", given["psum"])
    for name, value in given.items():
        takes = [f for f in _CHOOSING if argument in inspect.signature(_ours(f)).parameters]
        if name not in takes:
            rule = f"the functions that take one are {', '.join(sorted(takes))}"
            raise WireError(f"{argument}={{{name!r}: {value!r}}}", rule, "use names from that list")
        found = wires.named(value)
        if found is None:  # as in a call: no wire
            continue
        if found.key is not None:
            rule = "it must round to nearest, as a context has no key for each call"
            value = f"{argument}={{{name!r}: {value!r}}}"
            raise WireError(value, rule, "write it like {'psum': 'int8'}")
        checked.append((name, argument, dataclasses.replace(found, optional=True)))
    return frozenset(checked)


def _ours(name: str) -> Callable[..., Any]:
    return _BOTH[name][1]


def overridden(
    fn: Callable[..., Any],
    *,
    everything: bool = False,
    only: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    fuse: bool = True,
    ahead: bool = True,
) -> Callable[..., Any]:
    """Returns fn with lax's collectives replaced by ours, wherever fn gets them from.

    Where `override_lax` replaces functions of `jax.lax`, this replaces what they bind: also names
    bound before, as by `from jax.lax import psum`, also what JAX itself adds in derivatives, in
    scans, loops, branches, checkpoints, nested shard_maps and custom derivatives. Transform inside,
    `overridden(jax.grad(loss))`: what is traced later, outside of fn, is not reached, such as the
    backward rule of a `jax.custom_vjp`. The result may be jitted, and called from any thread.
    A tree is summed in one call where fn calls `jax.lax.psum`; by a name bound before, lax has
    taken it apart already, and its leaves are summed one by one.

    Args:
      fn: any function.
      everything, only, keep, fuse, ahead: as `override_lax`'s; what binds psum's primitive, such as
        pmean, goes by "psum". Within an `override_lax` its functions are replaced, too, and `keep`
        leaves out of these.

    Raises:
      CollectiveError: as `override_lax`; or fn is not a function, or a generator or async one.

    Example, with `jax.vmap` in place of a mesh:
      >>> jax.vmap(pc.overridden(lambda x: jax.lax.psum(x, "x")), axis_name="x")(jnp.ones(2))
      Array([2., 2.], dtype=float32)
    """
    if not callable(fn):
        raise CollectiveError(
            f"fn={fn!r}", "it must be a function", "pass the one that calls collectives"
        )
    if any(runs_later(f) for runs_later in _RUN_LATER for f in (fn, type(fn).__call__)):
        rule = "a generator or async function runs after its call, where lax's are lax's again"
        raise CollectiveError(f"fn={fn!r}", rule, "pass the functions in it that call collectives")
    names, kept = _names(everything=everything, only=only, keep=keep, fuse=fuse, ahead=ahead)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            _installed(),
            # By lax's names, a tree's leaves go together; those of a context around stay ours.
            _overridden(_overridden.value - kept | names),
            choice.rebound(names),
            choice.beside_compute(not everything),
            choice.fuse(fuse),
            choice.ahead(ahead),
        ):
            return fn(*args, **kwargs)

    return run


_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Keeps what chooses by thread in JAX while any thread needs it."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            for name, function in _CHOOSING.items():
                _found[name] = getattr(jax.lax, name)
                setattr(jax.lax, name, function)
            _compat.prepare()
            lowering_ahead.register()
            bodies.register()
            fusing.provide(products.in_one_kernel)
            for primitive in _bindable().values():
                primitive.bind = functools.partial(_bind, primitive)  # hides the class's own
            _compat.register(_PVARY, transpose=_pvary_transpose)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                for name, function in _found.items():
                    setattr(jax.lax, name, function)
                for primitive in _bindable().values():
                    del primitive.bind
                _compat.register(_PVARY, transpose=_LAX_PVARY_TRANSPOSE)


@functools.cache
def _bindable() -> dict[str, Any]:
    """lax's primitives that ours serve, by name."""
    return _compat.ruled(catalogue.primitives())


@functools.cache
def _function_of(primitive: str) -> str:
    """The function of lax's by which `only` and `keep` name a primitive."""
    return catalogue.primitives()[primitive][0].function_of(primitive)


def _bind(primitive: core.Primitive, *args: Any, **params: Any) -> Any:
    """lax's bind, or the twin's within `overridden`."""
    by_lax = functools.partial(type(primitive).bind, primitive)
    names = choice.rebound.value
    axes = params.get("axes", params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    if (function := _function_of(primitive.name)) not in names:
        on_mesh = {*validation.named(axes)} & {*jax.sharding.get_abstract_mesh().axis_names}
        if on_mesh and function in _overridden.value and not choice.means_lax.get():
            overrides.note_unreached(function)
        return by_lax(*args, **params)
    with choice.meaning_lax():  # what the twin's rules bind is meant
        groups = params.get("axis_index_groups")
        how = choice.choose(validation.named(axes), None, None, groups=groups)
        record = catalogue.primitives()[primitive.name][0]
        if record.adds or record.name == "all_gather":
            how = choice.asked(how, args, adds=record.adds)
        return primitives.with_twins(how, functools.partial(by_lax, **params), *args)


def _choosing(name: str) -> Callable[..., Any]:
    """lax's function in threads outside of all contexts, ours in others."""
    of_lax, ours = _BOTH[name]

    @functools.wraps(of_lax)
    def function(*args: Any, **kwargs: Any) -> Any:
        if choice.means_lax.get():
            return of_lax(*args, **kwargs)
        if name not in _overridden.value:
            overrides.note_kept(name)
            return of_lax(*args, **kwargs)
        return ours(*args, **{**_wires_of(name), **kwargs})

    return function


def _wires_of(name: str) -> dict[str, Wire]:
    """The wires of a function's calls, by argument."""
    return {argument: wire for function, argument, wire in _over.value if function == name}


# Name -> lax's function and ours.
_BOTH = {
    name: (of_lax, getattr(collectives, name)) for name, of_lax in vars(collectives.LAX).items()
}
_BOTH |= {
    name: (getattr(jax.lax, name), getattr(split, name))
    for name in split.NAMES
    if hasattr(jax.lax, name)
}
_CHOOSING = {name: _choosing(name) for name in _BOTH}

# What types an equal operand as different on every device; JAX inserts it, and its transpose sums.
_PVARY = _compat.transposed("pvary")
_LAX_PVARY_TRANSPOSE = _compat.rule(_PVARY, "transpose")


def _pvary_transpose(cotangent: Tangent, *args: Any, axes: Any) -> Any:
    if "psum" not in _overridden.value | choice.rebound.value:
        overrides.note_kept("psum")
        return _LAX_PVARY_TRANSPOSE(cotangent, *args, axes=axes)
    rule = functools.partial(_LAX_PVARY_TRANSPOSE, axes=axes)
    how = choice.asked(choice.choose(axes, None, None), cotangent, adds=True)
    how = choice.over_wires(how, _wires_of("psum").get("wire"), None)
    return primitives.with_twins(how, rule, cotangent, *args)
