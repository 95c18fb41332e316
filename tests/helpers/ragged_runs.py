"""The ragged all-to-all kernel in small chunks, and replayed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import conformance
from pallas_collectives import replay
from pallas_collectives.kernels import ragged_all_to_all
from pallas_collectives.topology.groups import Group

TILE_BYTES = 8 * 128 * 4


def in_small_chunks(patch: pytest.MonkeyPatch) -> None:
    """The ring's chunks are of two rows of a tile, one distance at a time, through two slots."""
    patch.setattr(ragged_all_to_all, "CHUNK_BYTES", 2 * TILE_BYTES)
    patch.setattr(ragged_all_to_all, "SLOT_BYTES", 8 * TILE_BYTES)


def of_all(tables: Any) -> tuple[Any, Any, Any]:
    """What the ring's kernel takes of each device's tables: rows of all senders are one table."""
    n = len(tables[0])
    return tables[0], *(np.tile(table.reshape(-1), (n, 1)) for table in tables[1:3])


def replayed(
    algorithm: str, machine: replay.Machine, axes: dict[str, int], races: bool
) -> replay.Report:
    """Replays what `ragged_arguments` says, along axis "x", with rows of a tile."""
    n, rows = axes["x"], 2 + 3 * axes["x"]
    tables = conformance.ragged_arguments(n)
    given = tables if algorithm == "direct" else of_all(tables)

    def shard(x: jax.Array, o: jax.Array, *tables: jax.Array) -> jax.Array:
        kernel = getattr(ragged_all_to_all, algorithm)
        return kernel(x, o, *tables, Group(("x",), (n,)), vmem=False, interpret=False)

    spec = PartitionSpec("x")
    mapped = jax.shard_map(
        shard, mesh=machine.mesh(axes), in_specs=spec, out_specs=spec, check_vma=False
    )
    array = jax.ShapeDtypeStruct((n * rows, 8, 128), jnp.float32)
    tables = [t.reshape(-1) for t in given]
    return replay.replay(mapped, array, array, *tables, machine=machine, races=races)
