"""A backend without algorithms to choose from, compared with lax by a measured table.

NCCL chooses its algorithms itself. The only choice left is whether NCCL serves: if lax is faster on
these devices by the table in scope (see `tuning.choice`), lax serves, and is counted.
"""

from collections.abc import Callable
from typing import Any

import jax

from pallas_collectives import catalogue
from pallas_collectives.backends.plans import How
from pallas_collectives.errors import SlowerError
from pallas_collectives.topology.groups import Group
from pallas_collectives.tuning import choice


class Measured:
    """A backend module's functions; those refuse that lax does faster."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, op: str) -> Callable[..., jax.Array]:
        function = getattr(self._module, op)

        def serve(*args: Any, how: How, **params: Any) -> jax.Array:
            group = next(a for a in args if isinstance(a, Group))
            block = catalogue.COLLECTIVES[op].block_bytes(args[0].nbytes, group.size)
            self._check(op, block, group.size)
            return function(*args, how=how, **params)

        return serve

    def _check(self, op: str, block_bytes: int, devices: int) -> None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        if device is None:
            return
        times = choice.measured_times(op, block_bytes, devices, device.device_kind)
        ours, of_lax = times.get(self._name), times.get("xla")
        if ours is not None and of_lax is not None and of_lax < ours:
            raise SlowerError(
                f"{op} over {devices} x {device.device_kind} by {self._name}",
                "lax is faster here by the measured table",
                f"name backend={self._name!r} to use it all the same",
            )
