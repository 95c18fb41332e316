"""Every private JAX name, and most of what differs between JAX versions, in one place.

Comments name the versions that need something. What names no version is needed by all that the
package runs on, JAX 0.10 to 0.12, because JAX has no public way to do it.

Importing the package changes nothing of JAX's. `prepare` does, when the package is used first.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import callback as _callback
from jax._src import clusters as _clusters
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import effects as _effects
from jax._src import shard_map as _shard_map
from jax._src import source_info_util as _source_info
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.interpreters.mlir import ir

from pallas_collectives.annotations import DTypeLike
from pallas_collectives.errors import BackendError

try:  # from JAX 0.11 on
    _tpu_info = importlib.import_module("jax._src.tpu_info")
except ImportError:  # up to JAX 0.10
    _tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")

Rule = Callable[..., Any]
Aval: TypeAlias = jax.core.ShapedArray  # an array's type, in a rule of a primitive

# JAX's tables of rules by primitive. It has functions to fill some of them and none to read them.
_TABLES: dict[str, Any] = {
    "jvp": ad.primitive_jvps,
    "transpose": ad.primitive_transposes,
    "batch": batching.fancy_primitive_batchers,
    "batch_alone": batching.primitive_batchers,  # of rules that need not know the mapped axis
    "partial_eval": partial_eval.custom_partial_eval_rules,
    "checkpoint": partial_eval.partial_eval_jaxpr_custom_rules,
    "dce": partial_eval.dce_rules,
}
_BEFORE_0_11 = jax.__version_info__ < (0, 11)
shard_map_p = _shard_map.shard_map_p
_waiting: list[tuple[core.Primitive, dict[str, Rule]]] = []
_prepared = False


def prepare() -> None:
    """Changes in JAX what the package needs, once; whatever traces or launches calls it first."""
    global _prepared
    if _prepared:
        return
    # TPU interpret mode runs a kernel as ordered host callbacks. jax.checkpoint refuses their
    # effects by default, because replaying a callback may surprise; replaying a collective is what
    # it is for.
    for allowed in (_effects.remat_allowed_effects, _effects.custom_derivatives_allowed_effects):
        allowed.add_type(_callback.IOEffect)
        allowed.add_type(_callback.OrderedIOEffect)
    # The pipeline emitter asks which TPU it tiles for, in interpret mode too; CPU devices simulate
    # one, with the SparseCores of another beside it.
    _tpu_info.registry.setdefault("cpu", _simulated_info)
    for kind in ("io_callback_impl", "pure_callback_impl"):
        if by_jax := getattr(_callback, kind, None):
            setattr(_callback, kind, functools.partial(_called_back, by_jax))
    if _BEFORE_0_11:
        mlir.register_lowering(shard_map_p, _lower_shard_map)
    for primitive, rules in _waiting:
        _register(primitive, rules)
    _waiting.clear()
    _prepared = True


def _called_back(by_jax: Any, *operands: Any, callback: Any, **how: Any) -> Any:
    """What a callback returns; those of Pallas' interpreter are given NumPy arrays as they are.

    JAX first puts each operand on a device, for functions that compute with its arrays. The
    interpreter's make Python's integers and NumPy's arrays of them, most of whose time that takes.
    """
    function = callback.callback_func
    function = getattr(function, "func", function)  # of a functools.partial
    if str(getattr(function, "__module__", "")).startswith("jax._src.pallas."):
        return tuple(map(np.asarray, callback(*operands)))
    return by_jax(*operands, callback=callback, **how)


def _simulated_info() -> Any:
    v5e, v6e = (
        pltpu.get_tpu_info_for_chip(version, 1)
        for version in (pltpu.ChipVersion.TPU_V5E, pltpu.ChipVersion.TPU_V6E)
    )
    return dataclasses.replace(v5e, sparse_core=v6e.sparse_core)


def tensorcore_mesh(axis_name: str, cores: int) -> Any:
    """The mesh of a device's TensorCores, for `pl.kernel`; JAX 0.11 has a class of its own."""
    if hasattr(pltpu, "TensorCoreMesh"):
        return pltpu.TensorCoreMesh(axis_name=axis_name, num_cores=cores)
    return pltpu.create_tensorcore_mesh(axis_name, num_cores=cores)


def register(primitive: core.Primitive, **rules: Rule) -> None:
    """Gives a primitive rules, at once or when `prepare` runs.

    Rules have the names of their tables; `lowering` is for all platforms.
    """
    if _prepared:
        _register(primitive, rules)
    else:
        _waiting.append((primitive, rules))


def _register(primitive: core.Primitive, rules: dict[str, Rule]) -> None:
    for table, rule in rules.items():
        if table == "lowering":
            mlir.register_lowering(primitive, rule)
        else:
            _TABLES[table][primitive] = rule


# Results of a kernel on a mesh of cores, of types that operations take. Up to JAX 0.10 theirs
# name the memory that the kernel asked for, which no operation knows.
_plain_p = core.Primitive("pallas_plain_result")
_plain_p.def_abstract_eval(lambda aval: aval.update(memory_space=jax.memory.Space.Device))
register(_plain_p, lowering=lambda ctx, x: [x])


def plain(x: jax.Array) -> jax.Array:
    """A result of a kernel on a mesh of cores, as an array like any other."""
    return _plain_p.bind(x) if _BEFORE_0_11 else x


def has_rule(primitive: core.Primitive, table: str) -> bool:
    """Whether a table of JAX's has a rule for a primitive."""
    return primitive in _TABLES[table]


def rule(primitive: core.Primitive, table: str) -> Rule:
    """A primitive's rule in a table of JAX's."""
    return _TABLES[table][primitive]


def lowering(primitive: core.Primitive) -> Rule:
    """How a primitive is lowered on all platforms that have no rule of their own."""
    rule: Rule = _mlir._lowerings[primitive].rule
    return rule


def jaxprs_of(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs that an equation holds, without their constants."""
    for value in eqn.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr: Any = getattr(held, "jaxpr", held)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def type_of(x: core.Var | core.Literal) -> Any:
    """The type of what an equation reads or writes; an array's has a shape and a dtype."""
    return x.aval


def scan_parts(params: dict[str, Any], count: int) -> tuple[int, int]:
    """How many of a scan's operands, so many in all, are constants, and how many are carried on."""
    if "num_consts" in params:  # up to JAX 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update([*range(count)]).unpack()
    return len([*consts]), len([*carry])


def ruled(names: Iterable[str]) -> dict[str, core.Primitive]:
    """JAX's primitives of these names, of those that can be differentiated or batched."""
    tables, wanted = (_TABLES[name] for name in ("jvp", "transpose", "batch")), set(names)
    return {p.name: p for table in tables for p in table if p.name in wanted}


def transposed(name: str) -> core.Primitive:
    """JAX's primitive of a name, of those that have a transpose."""
    return next(p for p in ad.primitive_transposes if p.name == name)


def _lower_shard_map(
    ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any
) -> Sequence[ir.Value]:
    """JAX's own lowering; an error in place of XLA's abort of the process.

    The order of host callbacks is an operand of each shard_map around them. XLA up to JAX 0.10
    cannot pass it into one shard_map that makes axes manual inside another that has.
    """
    outer, inner = params["mesh"].manual_axes, params["newly_manual_axes"]
    if outer and inner and _effects.ordered_effects.filter_in(params["jaxpr"].effects):
        raise BackendError(
            f"a simulated kernel in a shard_map over {set(inner)} within one over {set(outer)}",
            f"XLA of JAX {jax.__version__} cannot order host callbacks in nested shard_maps",
            "make all axes manual in one jax.shard_map, or use backend='xla' or JAX 0.11",
        )
    return _shard_map._shard_map_lowering(ctx, *args, **params)


def has_effects(eqn: core.JaxprEqn) -> bool:
    """Whether an equation has effects that others of the program could see."""
    return not all(isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def keeps_order(eqn: core.JaxprEqn) -> bool:
    """Whether an equation must stay behind those before it, whatever it reads: as with refs."""
    in_order = _effects.ordered_effects.contains
    return any(isinstance(e, _effects.JaxprInputEffect) or in_order(e) for e in eqn.effects)


_SCOPES = {"remat2": "checkpoint"}  # names of calls in profiles, by their primitives


def named_as(
    eqn: core.JaxprEqn, within: Iterable[core.JaxprEqn]
) -> contextlib.AbstractContextManager[Any]:
    """Within this context what is traced has the source and the scopes of an equation.

    within: the calls around the equation, which are scopes, too.
    """
    scopes = _source_info.current_name_stack()
    for call in within:
        name, kind = call.params.get("name"), call.primitive.name
        called = f"{kind}({name})" if name else _SCOPES.get(kind, kind)
        scopes = (scopes + call.source_info.name_stack).extend(called)
    scopes += eqn.source_info.name_stack
    return _source_info.user_context(eqn.source_info.traceback, name_stack=scopes)


def forced_interpret_params() -> Any:
    """The params of the `pltpu.force_tpu_interpret_mode` in scope, or None."""
    return _config.pallas_tpu_interpret_mode_context_manager.value


def unforced() -> contextlib.AbstractContextManager[Any]:
    """Within this context kernels are interpreted as they say themselves."""
    return pltpu.force_tpu_interpret_mode(None)  # type: ignore[arg-type]


def in_cluster() -> bool:
    """Whether `jax.distributed.initialize()` finds a cluster of several processes around it."""
    kinds = (kind for kind in _clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    return found is not None and found.get_process_count() > 1


def coordination_client() -> Any:
    """JAX's client of the coordination service; None before jax.distributed.initialize()."""
    return _distributed.global_state.client


def preemption_noticed(client: Any) -> bool:
    """Whether JAX's preemption service has had a notice (SIGTERM, as a rule), on any process."""
    try:
        client.key_value_try_get("RECEIVED_PREEMPTION_NOTICE")  # XLA's own key
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("NOT_FOUND"):
            raise
        return False
    return True


def mesh_of(ctx: mlir.LoweringRuleContext) -> Any:
    """The mesh of the shard_map that is being lowered, with its devices where they are known."""
    return getattr(ctx.module_context.axis_context, "mesh", None)


def kept_in_module(ctx: mlir.LoweringRuleContext, key: str, make: Callable[[], Any]) -> Any:
    """What a key stands for while one program is lowered; made when it is first asked for."""
    return ctx.module_context.cached_primitive_lowerings.setdefault(key, make())


def saved(policy: Callable[..., Any], eqn: core.JaxprEqn) -> bool:
    """Whether jax.checkpoint keeps an equation's results; what it would offload, it keeps."""
    types = (var.aval for var in eqn.invars)
    case = _partial_eval.ensure_enum(policy(eqn.primitive, *types, **eqn.params))
    return not isinstance(case, _partial_eval.RecomputeType)


def races_reported() -> bool:
    """Whether the interpreter of TPU kernels has reported a race; from JAX 0.11 on it raises."""
    module = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    races = getattr(module, "races", None)
    return bool(races is not None and races.races_found)


def simulated_failure(error: Exception) -> str:
    """What a failure of the interpreter of TPU kernels tells of the kernel; "" of another error."""
    text = str(error)
    if "race detected" in text.lower():
        return "a race is reported"
    buffer = error.args[0] if isinstance(error, KeyError) else None
    if isinstance(buffer, tuple) and len(buffer) == 4:  # memory space, number, device, core
        return f"device {buffer[2]}'s memory is used before it enters a kernel, or after it leaves"
    return ""


@contextlib.contextmanager
def watched_simulation(on_wait: Callable[[int], None]) -> Iterator[list[Exception]]:
    """Calls on_wait(core) whenever a core that the interpreter simulates begins to wait.

    Yields a list to which failures are added, in the order in which they happen. The one that JAX
    raises may be that of a device that was ended because of another's.
    """
    module = importlib.import_module("jax._src.pallas.mosaic.interpret.shared_memory")
    wait, set_failed = module.Semaphore.wait, module.SharedMemory.set_failed
    failures: list[Exception] = []

    def told_wait(semaphore: Any, value: Any, core: Any, **how: Any) -> None:
        on_wait(int(core))
        wait(semaphore, value, core, **how)

    def told_failure(memory: Any, failure: Exception, *args: Any, **how: Any) -> None:
        failures.append(failure)
        set_failed(memory, failure, *args, **how)

    module.Semaphore.wait, module.SharedMemory.set_failed = told_wait, told_failure
    try:
        yield failures
    finally:
        module.Semaphore.wait, module.SharedMemory.set_failed = wait, set_failed


def forget_simulated_failures() -> None:
    """Clears what a failed kernel leaves behind: the interpreter's state, JAX's failed tokens."""
    pltpu.reset_tpu_interpret_mode_state()
    _dispatch.runtime_tokens.clear()


def default_matmul_precision() -> Any:
    """The precision of products whose caller names none."""
    return jax.config.values["jax_default_matmul_precision"]


def is_traced(x: object) -> bool:
    """Whether x stands for an array that a program is being traced with."""
    return isinstance(x, jax.core.Tracer)


# What hands on a part of its operand, or all of it in another form.
PARTS = frozenset(
    {
        *("slice", "dynamic_slice", "squeeze", "split", "unstack", "reshape", "transpose"),
        *("copy", "convert_element_type", "broadcast_in_dim", "pvary"),
        *("optimization_barrier", "layout_constraint"),
    }
)


def is_computed(x: object) -> bool:
    """Whether a traced x is more than an argument of what is being traced, or a part of one.

    False also where that is not known: of other tracers than those of a jaxpr.
    """
    x = _traced_for_jaxpr(x)
    while (equation := getattr(x, "parent", None)) is not None:
        if equation.primitive.name not in PARTS:
            return True
        x = equation.in_tracers[0]
    return False


def _traced_for_jaxpr(x: Any) -> Any:
    """The tracer of a jaxpr within those of differentiation and vmap."""
    while True:
        if hasattr(x, "primal"):
            x = x.primal
        elif hasattr(x, "batch_dim"):
            x = x.val
        else:
            return x


def array_type(shape: Iterable[int], dtype: DTypeLike) -> Aval:
    """The type that a primitive's abstract evaluation gives a result."""
    return jax.core.ShapedArray(tuple(shape), dtype)


def manual_type(x: Any) -> Any:
    """What check_vma knows of an array: over which axes it varies, is reduced or unreduced."""
    return jax.typeof(x).mat


def only_varying(aval: Aval) -> Aval:
    """An array's type without what is reduced and unreduced of it."""
    return aval.update(manual_axis_type=type(aval.mat)(varying=aval.mat.varying))


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which devices may hold different values of x."""
    return frozenset(manual_type(x).varying)


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """x, typed as different along these axes too."""
    missing = tuple(sorted(set(axes) - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """An array of whatever values.

    Before 0.11 `lax.empty` is mapped wherever there is a vmap, and so is what is made of it.
    """
    return jax.lax.full(shape, 0, dtype) if _BEFORE_0_11 else jax.lax.empty(shape, dtype)


def triton_params(**options: Any) -> Any:
    """Parameters of a kernel that Pallas compiles by Triton; None where JAX has that no more.

    JAX 0.12 says that a later version will not.
    """
    try:
        module = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None
    return module.CompilerParams(**options)


def takes_computed_sources() -> bool:
    """Whether lax broadcasts from a device whose number an array holds: from 0.12 on."""
    return jax.__version_info__ >= (0, 12)


def callbacks_hold_threads() -> bool:
    """Whether a device that runs a host callback holds a thread of the CPU client: before 0.11."""
    return _BEFORE_0_11
