"""Whether devices expect the rows that the others send, which no device can tell alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_collectives.backends import choice
from pallas_collectives.errors import CollectiveError
from pallas_collectives.topology.groups import Group


def checked(sizes: jax.Array, received: jax.Array, most: int, group: Group) -> jax.Array:
    """`received`, once it is known that each device expects what the others send.

    For simulated devices, where one that waits in vain cannot even be interrupted. All devices of
    the mesh compare all tables: none enters a kernel, whose end all wait for, if any is refused.

    Args:
      sizes, received: int32[n * slices]: what this device sends to each, and expects of each.
      most: the rows to which kernels clip both.
      group: the n devices.

    Raises:
      JaxRuntimeError: they differ, as the program runs; with a CollectiveError's text.
    """
    mine = jnp.clip(jnp.stack([sizes, received]), 0, most)
    mesh = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    with choice.meaning_lax():
        tables = lax.all_gather(mine, group.axes, axis_index_groups=group.index_groups)
        tables = lax.all_gather(tables, mesh)
    return jax.pure_callback(_compare, received, tables, received, vmap_method="sequential")


def _compare(everyones: jax.Array, received: jax.Array) -> np.ndarray:
    for tables in np.asarray(everyones):
        n = len(tables)
        sent, expected = tables.reshape(n, 2, n, -1).swapaxes(0, 1)  # by device, by peer
        for device, (coming, wanted) in enumerate(zip(sent.swapaxes(0, 1), expected, strict=True)):
            if not np.array_equal(coming, wanted):
                raise CollectiveError(
                    f"recv_sizes={wanted.reshape(-1).tolist()} of device {device}",
                    f"they must be what is sent to it, {coming.reshape(-1).tolist()}",
                    "make them of everyone's send_sizes, by jax.lax.all_to_all of (n, slices)",
                )
    return np.asarray(received)
