"""Every difference between JAX versions, and every private JAX name, in one place."""

import importlib
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import effects as _effects
from jax.experimental.pallas import tpu as pltpu

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

# The pipeline emitter asks which TPU it tiles for, in interpret mode too; CPU devices simulate one.
_tpu_info.registry.setdefault(
    "cpu", lambda: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
)


def forced_interpret_params() -> Any:
    """The params of the `pltpu.force_tpu_interpret_mode` in scope, or None."""
    return _config.pallas_tpu_interpret_mode_context_manager.value


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
