"""Every difference between JAX versions, and every private JAX name, in one place."""

import dataclasses
import importlib
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import clusters as _clusters
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import effects as _effects
from jax._src import shard_map as _shard_map
from jax._src.interpreters import partial_eval as _partial_eval
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import mlir

from pallas_collectives.errors import BackendError

try:
    _tpu_info = importlib.import_module("jax._src.tpu_info")
except ImportError:  # up to JAX 0.10
    _tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")

# TPU interpret mode runs a kernel as ordered host callbacks. jax.checkpoint refuses their effects
# by default, because replaying a callback may surprise; replaying a collective is what it is for.
_effects.remat_allowed_effects.add_type(_callback.IOEffect)
_effects.remat_allowed_effects.add_type(_callback.OrderedIOEffect)
_effects.custom_derivatives_allowed_effects.add_type(_callback.IOEffect)
_effects.custom_derivatives_allowed_effects.add_type(_callback.OrderedIOEffect)

# The pipeline emitter asks which TPU it tiles for, in interpret mode too; CPU devices simulate one,
# with the SparseCores of another beside it.
_tpu_info.registry.setdefault(
    "cpu",
    lambda: dataclasses.replace(
        pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1),
        sparse_core=pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1).sparse_core,
    ),
)


def _lower_shard_map(ctx: Any, *args: Any, **params: Any) -> Any:
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


if jax.__version_info__ < (0, 11):
    mlir.register_lowering(_shard_map.shard_map_p, _lower_shard_map)


def forced_interpret_params() -> Any:
    """The params of the `pltpu.force_tpu_interpret_mode` in scope, or None."""
    return _config.pallas_tpu_interpret_mode_context_manager.value


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


def mesh_of(ctx: Any) -> Any:
    """The mesh of the shard_map that is being lowered, with its devices where they are known."""
    return getattr(ctx.module_context.axis_context, "mesh", None)


def saved(policy: Any, eqn: Any) -> bool:
    """Whether jax.checkpoint keeps an equation's results; what it would offload, it keeps."""
    types = (var.aval for var in eqn.invars)
    case = _partial_eval.ensure_enum(policy(eqn.primitive, *types, **eqn.params))
    return not isinstance(case, _partial_eval.RecomputeType)
