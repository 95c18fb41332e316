"""One of several processes, with one GPU each, that go through the scenarios of test_nccl_gpu.

usage: nccl_gpu_worker.py PROCESS PROCESSES PORT. Prints a line of JSON for every scenario:
{"scenario", "seconds", "error" (class and text, or null), ...}.
"""

import contextlib
import json
import os
import sys
import time
import traceback

process, processes, port = (int(a) for a in sys.argv[1:4])
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax  # noqa: E402

import shared_gpu  # noqa: E402

jax.distributed.initialize(
    f"localhost:{port}", processes, process,
    local_device_ids=[shared_gpu.local_device(process)], initialization_timeout=60,
)  # fmt: skip

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import nccl_gpu  # noqa: E402
import pallas_collectives as pc  # noqa: E402
from pallas_collectives import nccl  # noqa: E402
from pallas_collectives.nccl import ffi, store  # noqa: E402

P = jax.sharding.PartitionSpec
LATE = processes - 1  # the rank that errs
SECONDS = 3.0  # the watchdog's


def group(name, watchdog=SECONDS, devices=None):
    return nccl.create(devices or jax.devices(), name=name, timeout=60, watchdog=watchdog)


def collectives():
    with group("collectives") as g:
        for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
            nccl_gpu.gather(g, 1000, dtype)
        text = g.runtime.library.version
    with group("collectives", watchdog=None) as g:  # the same name again, and no watchdog
        nccl_gpu.gather(g)
    return {"version": text}


def two_groups_at_once():
    with group("one") as one, group("two", devices=jax.devices()[::-1]) as two:
        nccl_gpu.gather(one)
        nccl_gpu.gather(two)
        nccl_gpu.gather(one)


def sharded(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def transfers():
    devices = np.array(jax.devices())
    half = processes // 2
    first = jax.NamedSharding(jax.sharding.Mesh(devices[:half], ("x",)), P("x"))
    last = jax.NamedSharding(jax.sharding.Mesh(devices[half:], ("x",)), P("x"))
    whole = jax.NamedSharding(jax.sharding.Mesh(devices, ("x",)), P("x"))
    columns = jax.NamedSharding(jax.sharding.Mesh(devices, ("x",)), P(None, "x"))
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "complex64", "float8_e5m2"):
        host = rng.integers(0, 3, (16, 12)).astype(jnp.dtype(dtype))
        shape = jax.ShapeDtypeStruct(host.shape, host.dtype)
        if process < half:  # one half sends, the other receives
            nccl.send(sharded(host, first), last, watchdog=SECONDS).wait(20)
        else:
            check(nccl.recv(shape, last, first, watchdog=SECONDS).array(), host)
        for source, target in ((whole, first), (first, whole), (whole, columns), (columns, last)):
            own = any(d.process_index == process for d in source.device_set)
            x = sharded(host, source) if own else shape
            handle = nccl.send_or_recv(x, target, source, watchdog=SECONDS)
            handle.wait(20)
            if any(d.process_index == process for d in target.device_set):
                check(handle.array(), host)


def backend_like_lax():
    """Every collective inside jit over processes, bit for bit what lax gives."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.NamedSharding(mesh, P("x"))
    ring = [(i, (i + 1) % processes) for i in range(processes)]
    swapped = [list(range(processes // 2)), list(range(processes // 2, processes))]
    sizes = np.arange(processes, dtype=np.int32)

    def on_me(fn, x):
        mapped = jax.shard_map(
            lambda a: fn(a[0])[None], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        (shard,) = jax.jit(mapped)(x).addressable_shards
        return np.asarray(shard.data)[0]

    def ragged(m, x, **how):  # everyone sends j rows to j, which keeps them in order of sender
        me = jax.lax.axis_index("x")
        starts, lands = np.cumsum(sizes) - sizes, me * sizes
        output = jnp.full((processes * processes, x.shape[1]), -1, x.dtype)
        received = jnp.full(processes, me)
        return m.ragged_all_to_all(
            x, output, jnp.asarray(starts), sizes, lands, received, axis_name="x", **how
        )

    cases = {  # a choice: other dimensions, groups and partners than the examples have
        "all_gather": lambda m, x, **how: m.all_gather(x, "x", axis=1, tiled=True, **how),
        "groups": lambda m, x, **how: m.all_gather(x, "x", axis_index_groups=swapped, **how),
        "psum": lambda m, x, **how: m.psum(x, "x", **how),
        "pmax": lambda m, x, **how: m.pmax(x, "x", **how),
        "psum_scatter": lambda m, x, **how: m.psum_scatter(x, "x", tiled=True, **how),
        "all_to_all": lambda m, x, **how: m.all_to_all(x, "x", 0, 1, tiled=True, **how),
        "ppermute": lambda m, x, **how: m.ppermute(x, "x", ring[1:], **how),
    }
    host = np.random.default_rng(0).integers(-4, 4, (processes, 4 * processes, 6))
    for dtype in ("float32", "bfloat16", "int8"):
        x = sharded(host.astype(jnp.dtype(dtype)), sharding)
        for name, fn in cases.items():
            got, want = (
                on_me(lambda a, fn=fn, m=module, how=how: fn(m, a, **how), x)
                for module, how in ((pc, {"backend": "nccl"}), (jax.lax, {}))
            )
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want, err_msg=f"{name} {dtype}")
        got = on_me(lambda a: ragged(pc, a, backend="nccl"), x)  # lax's asks for a flag here
        want = np.full_like(got, -1)
        start = process * (process - 1) // 2
        for i in range(processes):
            rows = host[i, start : start + process].astype(got.dtype)
            want[i * process :][:process] = rows
        np.testing.assert_array_equal(got, want)


def check(array, host):
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes()


def captured(name, watchdog):
    """Calls are made at capture only; results stay right."""
    g = group(name, watchdog)
    repeat, runs = 20, 10
    f, sharding = nccl_gpu.gather_in_jit(g, name, repeat)
    host = np.arange(processes * 1024, dtype=np.float32) % 13
    x = sharded(host, sharding)
    counts = []
    for _ in range(runs):
        before = ffi.counters.calls
        y = f(x)
        y.block_until_ready()
        counts.append(ffi.counters.calls - before)
        expected = nccl_gpu.expected_chain(host, processes, repeat)
        for shard in y.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-4)
    begin = time.perf_counter()
    for _ in range(20):
        y = f(x)
    y.block_until_ready()
    per_call = (time.perf_counter() - begin) / 20 / repeat * 1e6
    g.check()
    return {"calls": counts, "microseconds_per_call": per_call}, (g, f, x)


def captured_without_watchdog():
    return captured("plain graph", None)[0]


def captured_with_watchdog():
    return captured("watched graph", SECONDS)[0]


def independent_calls():
    """Calls of one program that do not wait for each other, over two sets of devices, captured."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    halves = np.arange(processes).reshape(2, -1).tolist()
    ring = [(i, (i + 1) % processes) for i in range(processes)]

    def program(m, **how):
        def f(x):
            parts = [x + i for i in range(4)]
            return (
                [m.psum(part, "x", **how) for part in parts],
                [m.all_gather(part, "x", axis_index_groups=halves, **how) for part in parts],
                [m.ppermute(part, "x", ring, **how) for part in parts],
                [m.all_to_all(part, "x", 0, 0, tiled=True, **how) for part in parts],
            )

        spec = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
        return jax.jit(jax.shard_map(f, **spec))

    host = np.arange(processes * processes * 256, dtype=np.float32) % 11
    x = sharded(host, jax.NamedSharding(mesh, P("x")))
    ours, want = program(pc, backend="nccl"), program(jax.lax)(x)
    for i in range(300):
        before, got = ffi.counters.calls, ours(x)
        if i % 10 == 0:
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(*(y.addressable_shards[0].data for y in (a, b)))
    jax.block_until_ready(got)
    return {"calls": [ffi.counters.calls - before]}


def captured_and_one_stays_away():
    _, (g, f, x) = captured("graph to break", SECONDS)
    if process == LATE:
        time.sleep(2 * SECONDS)
    else:
        f(x).block_until_ready()
    wait_until_unusable(g)
    g.check()


def wait_until_unusable(g, limit=20):
    deadline = time.monotonic() + limit
    while g.usable and time.monotonic() < deadline:
        time.sleep(0.05)


def one_sleeps():
    g = group("sleeper")
    nccl_gpu.gather(g)
    if process == LATE:
        time.sleep(2.5 * SECONDS)
    nccl_gpu.gather(g)


def use_after_abort():
    g = group("aborted")
    g.abort()
    nccl_gpu.gather(g)


def other_count():
    mismatch("count", count=4096 if process == LATE else 64)


def other_dtype():
    mismatch("dtype", dtype="float16" if process == LATE else "bfloat16")


def mismatch(name, **changed):
    g = group(name)
    with contextlib.suppress(AssertionError):  # NCCL goes through with some: the watchdog tells
        nccl_gpu.gather(g, **changed)
    wait_until_unusable(g)
    g.check()


def other_op():
    g = group("op")
    if process == LATE:
        inputs = {r: np.ones(64, np.float32) for r in g.communicators}
        outputs = dict.fromkeys(g.communicators, ((64,), "float32"))
        work = nccl_gpu.UnderWay(
            g, inputs, outputs, lambda c, x, y, s: c.all_reduce(x, y, 64, "float32", "sum", s)
        )
        work.results()
    else:
        nccl_gpu.gather(g, 64)
    wait_until_unusable(g)
    g.check()


def raising_callback():
    """One rank's function raises inside jit: its program fails, and the others hear of it."""
    g = group("raising")

    def fails(stream, ordinal, inputs, outputs):
        raise ValueError("a bug of the user's")

    f, sharding = nccl_gpu.gather_in_jit(g, "raising", function=fails if process == LATE else None)
    host = np.ones(processes * 8, np.float32)
    f(sharded(host, sharding)).block_until_ready()
    wait_until_unusable(g)
    g.check()


def stale_key():
    """An earlier attempt's answer lies where this group's will."""
    import hashlib

    ids = ",".join(str(d.id) for d in jax.devices())
    key = f"pallas_collectives/nccl/stale/{hashlib.sha256(ids.encode()).hexdigest()[:16]}"
    stale = {"token": "old", "nonce": "old", "id": "00" * 128, "wrong": ""}
    store.default().set(f"{key}/answer/{process}", json.dumps(stale))
    with group("stale") as g:
        nccl_gpu.gather(g)


def works_again():
    with group("again") as g:
        nccl_gpu.gather(g)


def one_is_killed():
    g = group("killed")
    nccl_gpu.gather(g)
    if process == LATE:
        os.kill(os.getpid(), 9)
    nccl_gpu.gather(g)


def survivors_work():
    with group("survivors", devices=jax.devices()[:-1]) as g:
        nccl_gpu.gather(g)


SCENARIOS = [
    collectives, two_groups_at_once, transfers, backend_like_lax, stale_key,
    captured_without_watchdog, captured_with_watchdog, independent_calls, one_sleeps,
    use_after_abort, other_count, other_dtype, other_op, raising_callback, works_again,
    captured_and_one_stays_away, one_is_killed, survivors_work,
]  # fmt: skip
only = sys.argv[4:]
for scenario in SCENARIOS:
    if only and scenario.__name__ not in only:
        continue
    begin = time.monotonic()
    line = {"scenario": scenario.__name__, "process": process, "error": None}
    try:
        line |= scenario() or {}
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"
        line["missing"] = getattr(error, "missing", None)
        if not isinstance(error, nccl.NcclError):
            line["trace"] = traceback.format_exc()[-1500:]
    line["seconds"] = time.monotonic() - begin
    print(json.dumps(line), flush=True)
print(json.dumps({"scenario": "end", "process": process}), flush=True)
os._exit(0)  # the killed process would keep jax.distributed's shutdown waiting
