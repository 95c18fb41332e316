"""lax's collectives as they were on import."""

import types

from jax import lax

from pallas_collectives import catalogue

# lax's functions as they were on import: `override_lax` may have put ours in their place since.
LAX = types.SimpleNamespace(
    **{name: getattr(lax, name) for name in catalogue.functions() if hasattr(lax, name)}
)
