"""What runs in the processes of test_multihost.py; each function returns what its test judges."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils as theirs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_collectives
from pallas_collectives import multihost as ours
from pallas_collectives.multihost import votes

# Inputs by name: the tree of one process.
TREES = {
    "float32": lambda rank: np.arange(6, dtype=np.float32).reshape(2, 3) / (rank + 1),
    "one device array": lambda rank: jnp.arange(5) * (rank + 1),
    "bfloat16": lambda rank: jnp.full((3, 2), 1.5 + rank, jnp.bfloat16),
    "float8_e4m3fn": lambda rank: jnp.full((5,), 1 + rank, jnp.float8_e4m3fn),
    "float8_e5m2": lambda rank: jnp.full((2, 2), 2.0**rank, jnp.float8_e5m2),
    "bool": lambda rank: np.array([True, False, rank % 2 == 0]),
    "complex64": lambda rank: np.array([[1 + 2j, 3j]], np.complex64) * (rank + 1),
    "int8": lambda rank: np.full((3,), -rank, np.int8),
    "scalar": lambda rank: np.float32(rank + 0.5),
    "no rows": lambda rank: np.zeros((0, 3), np.float32),
    "no columns": lambda rank: np.zeros((3, 0), np.float32),
    "tree": lambda rank: {
        "w": [np.full((2, 2), rank, np.float32), jnp.float16(rank)],
        "b": (np.arange(7, dtype=np.uint8) + rank, None),
    },
}

# Global arrays by name: the mesh axes are processes × devices of each.
SPECS = {
    "rows over processes": P("processes"),
    "columns over processes": P(None, "processes"),
    "over all devices": P(("processes", "lanes")),
    "both axes": P("lanes", "processes"),
    "replicated": P(),
    "over devices of each process": P("lanes"),
}


def global_mesh():
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return jax.sharding.Mesh(
        np.array(devices).reshape(jax.process_count(), -1), ("processes", "lanes")
    )


def global_array(spec, dtype=jnp.float32):
    values = np.arange(16 * 8).reshape(16, 8).astype(dtype)
    sharding = NamedSharding(global_mesh(), spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def error_of(function, *args, **kwargs):
    """(type, processes, message) of the error that the call must raise."""
    try:
        result = function(*args, **kwargs)
    except (ours.ProcessError, AssertionError) as error:
        return type(error).__name__, getattr(error, "processes", None), str(error)
    raise RuntimeError(f"{function} returned {result}")


def ready():
    """Called first: this module is imported by then, and processes no longer start apart."""


def broadcast(tree, source):
    tree = TREES[tree](jax.process_index())
    is_source = None if source is None else jax.process_index() == source
    return ours.broadcast_one_to_all(tree, is_source), theirs.broadcast_one_to_all(tree, is_source)


def allgather(tree, tiled):
    tree = TREES[tree](jax.process_index())
    return ours.process_allgather(tree, tiled), theirs.process_allgather(tree, tiled)


def allgather_global(spec):
    x = global_array(SPECS[spec])
    return ours.process_allgather(x, True), theirs.process_allgather(x, True)


def exact_values():
    rank = jax.process_index()
    tree = {
        "float64": np.array([np.pi, -0.0, np.nan]),
        "int64": np.int64(2**40 + 1),
        "text": np.array(["left", "right"]),
        "key": jax.random.key(7 + rank),
        "rbg": jax.random.split(jax.random.key(rank, impl="rbg"), 3),
    }
    gathered = ours.process_allgather(tree), ours.process_allgather(tree, tiled=True)
    bare = jax.tree.map(
        lambda x: np.asarray(jax.random.key_data(x)) if isinstance(x, jax.Array) else x,
        (ours.broadcast_one_to_all(tree), *gathered),
    )
    draws = jax.random.uniform(ours.broadcast_one_to_all(tree)["key"])
    return bare, float(draws), gathered[0]["rbg"].shape, gathered[1]["rbg"].shape


def chunks(chunk_bytes):
    rank = jax.process_index()
    tree = [np.full((1000,), rank, np.float32), np.full((3, 333), rank, np.uint8)]
    steps = {"broadcast": [], "allgather": []}
    broadcast = ours.broadcast_one_to_all(
        tree, chunk_bytes=chunk_bytes, progress=lambda *step: steps["broadcast"].append(step)
    )
    gathered = ours.process_allgather(
        tree, chunk_bytes=chunk_bytes, progress=lambda *step: steps["allgather"].append(step)
    )
    return broadcast, gathered, steps


def chunks_alike(chunk_bytes):
    broadcast, gathered, _ = chunks(chunk_bytes)
    ours.sync_global_devices("unequal")
    return all((x == 0).all() for x in broadcast) and all(
        (x[rank] == rank).all() for x in gathered for rank in range(jax.process_count())
    )


def local_to_global(spec):
    mesh, spec = global_mesh(), SPECS[spec]
    local = {"a": np.arange(32, dtype=np.float32).reshape(8, 4), "b": jnp.ones((4, 8), bool)}
    pair = [u.host_local_array_to_global_array(local, mesh, spec) for u in (ours, theirs)]
    back = [
        u.global_array_to_host_local_array(x, mesh, spec)
        for u, x in zip((ours, theirs), pair, strict=True)
    ]
    shards = [
        jax.tree.map(
            lambda x: [(str(s.index), np.asarray(s.data)) for s in x.addressable_shards], x
        )
        for x in (*pair, *back)
    ]
    same = jax.tree.map(
        lambda a, b: a.sharding == b.sharding, pair + back[:1], pair[::-1] + back[1:]
    )
    return [jax.tree.map(lambda x: x.shape, x) for x in (*pair, *back)], shards, same


def reshard():
    mesh, x = global_mesh(), global_array(P("processes"))
    pair = [
        u.global_array_to_host_local_array(x, mesh, P(None, "processes")) for u in (ours, theirs)
    ]
    return [np.asarray(x) for x in pair]


def convert_keys():
    mesh = global_mesh()
    keys = jax.random.split(jax.random.key(jax.process_index()), 4)
    whole = ours.host_local_array_to_global_array(keys, mesh, P("processes"))
    back = ours.global_array_to_host_local_array(whole, mesh, P("processes"))
    gathered = ours.process_allgather(whole, tiled=True)
    return [np.asarray(jax.random.key_data(k)) for k in (keys, back, gathered)], whole.shape


def sharded():
    x = global_array(P("processes"))
    messages = []
    for call in (ours.broadcast_one_to_all, ours.assert_equal, ours.process_allgather):
        try:
            call({"x": x})
        except ValueError as error:
            messages.append(str(error))
    return messages


def arrive_apart(wait):
    """When this process came and when it left; the last process comes late."""
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(0.5)
    came = time.monotonic()
    getattr(ours, wait)("apart")
    return came, time.monotonic()


def sync_behind_work():
    """Whether work given to a device was done before and after the devices were waited for."""
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ x / 4096, x))
    x = jnp.ones((4096, 4096))
    step(x).block_until_ready()
    ours.sync_global_devices("compiled")
    y = step(x) if jax.process_index() == 1 else None
    given = time.monotonic()
    before = y is None or y.is_ready()
    ours.sync_global_devices("behind work")
    return before, y is None or y.is_ready(), given, time.monotonic()


def other_name():
    name = f"step {jax.process_index() == 1}"
    return error_of(ours.sync_global_devices, name), error_of(theirs.sync_global_devices, name)


def late():
    """Process 1 comes when both waits of the others have run out."""
    ours.barrier("together")
    if jax.process_index() == 1:
        time.sleep(3)
    late = error_of(ours.sync_global_devices, "late", timeout=1)
    at_barrier = error_of(ours.barrier, "late", timeout=1)
    ours.barrier("late")  # in step again, both on its channel and on the others'
    return late, at_barrier, ours.process_allgather(jax.process_index()).tolist()


def disagree(what):
    odd = jax.process_index() == 1
    tree = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.int32)}
    if odd:
        tree |= {
            "structure": {"c": np.zeros(1)},
            "dtype": {"b": np.zeros((2, 2), np.float32)},
            "shape": {"a": np.zeros(4, np.float32)},
        }[what]
    errors = [
        error_of(call, tree)
        for call in (ours.broadcast_one_to_all, ours.process_allgather, ours.assert_equal)
    ]
    return errors, ours.process_allgather(jax.process_index()).tolist()


def other_function():
    if jax.process_index() == 1:
        return error_of(ours.process_allgather, 1)
    return error_of(ours.broadcast_one_to_all, 1)


def sources(count):
    try:
        ours.broadcast_one_to_all(1, is_source=jax.process_index() < count)
    except ValueError as error:
        return str(error)


def assert_equal(what):
    odd = jax.process_index() == 1
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = jnp.arange(5, dtype=jnp.bfloat16)
    if what == "values" and odd:
        a[1, 2] = 0.5
        b = b.at[4].set(jnp.nan)
    if what == "later leaf" and odd:
        b = b.at[4].set(7)
    if what == "zeros":
        a[0, 0] = -0.0 if odd else 0.0
    if what == "nan":
        a[0, 0] = np.nan
    if what == "replica" and jax.process_count() > 1:
        mesh = global_mesh()
        parts = [jax.device_put(np.float32(odd), d) for d in mesh.local_devices]
        a = jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), parts)
    tree = {"a": a, "b": b, "key": jax.random.key(3)}
    try:
        ours.assert_equal(tree, f"checkpoint of {jax.process_index()}")
    except AssertionError as error:
        return error.processes, str(error)


def everything():
    """Which collectives served, by our counters."""
    pallas_collectives.reset_counts()
    jax.clear_caches()  # a program that was traced before is not counted again
    ours.broadcast_one_to_all(1)
    ours.process_allgather(1)
    ours.sync_global_devices("counted")
    return sorted(pallas_collectives.counts()), sorted(pallas_collectives.fallback_counts())


def everything_by_lax():
    """The same, of calls for which lax is asked by name."""
    with pallas_collectives.use_backend("xla"):
        return everything()


def keys_left():
    ours.barrier("before looking")
    client = votes.coordination_client()
    for _ in range(100):  # the last to leave a round clears it away, after others have returned
        if not (left := client.key_value_dir_get(votes.ROOT)):
            break
        time.sleep(0.05)
    return left
