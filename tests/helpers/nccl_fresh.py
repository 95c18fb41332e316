"""A process whose first NCCL call is captured in a CUDA graph: it prints what came of it, as JSON.

usage: nccl_fresh.py OP SITUATION [PROCESS PROCESSES PORT]

Without the last three it has all GPUs, else one of them. The program runs before lax's but where
the situation is "after lax". Where UNCONNECTED is in the environment, communicators are left as
NCCL makes them; once the program has failed it is run again, as it should be.

XLA (jaxlib 0.11.2) runs most programs once without a graph. It captures on the first run where the
operands of all calls are slices of larger arrays, such as w[i] of a stack of layers' weights, which
its rewriter of dynamic slices makes part of the calls: so they are here.

Prints {"calls": out of the program, of each run; "python": those that Python answered; "captured":
whether the stream was being captured, for each of these; "worst": the largest difference from lax;
"exact": that from lax in float64; "allowed": what `allowed` says of that; "error": of the program,
or null; "failed": the error without connections}. Differences are relative to the largest value.
"""

import functools
import json
import os
import sys
import time
import traceback

op, situation = sys.argv[1:3]
process, processes, port = (int(a) for a in (sys.argv[3:] or (0, 1, 0)))
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
if situation == "no compiler":
    os.environ["CC"] = "no-such-compiler"

import jax  # noqa: E402

import shared_gpu  # noqa: E402

if processes > 1:
    own = [shared_gpu.local_device(process)]
    jax.distributed.initialize(f"localhost:{port}", processes, process, local_device_ids=own)

import ctypes  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import pallas_collectives as pc  # noqa: E402
from pallas_collectives.nccl import connection, cuda, ffi  # noqa: E402

P = jax.sharding.PartitionSpec
N = jax.device_count()
RUNS = 7
ROWS, COLUMNS = 2 * N, 8 * N
NCCL = {"backend": "nccl"}


def halves(n):
    """Groups of devices in an order other than lax's; one where there are but two devices."""
    order = list(range(n))[::-1]
    return [order[: n // 2], order[n // 2 :]] if n >= 4 else [order]


def cut(x):
    """x, as the first slice of a larger array."""
    return jax.lax.optimization_barrier(jnp.stack([x, x + 1]))[0]


@jax.custom_vjp
def sliced(x):
    """x, cut out of an array, and its cotangent as well."""
    return cut(x)


sliced.defvjp(lambda x: (cut(x), None), lambda _, cotangent: (cut(cotangent),))


def collective(m, x, axis, groups, **how):
    """One call of the operation, of x's shape; its operands are slices, its transpose's as well."""
    n = len(groups[0]) if groups else jax.lax.axis_size(axis)
    how |= {"axis_index_groups": groups} if groups else {}
    x = sliced(x)
    if op == "all_gather":
        return sliced(m.all_gather(x, axis, **how)).mean(0)
    if op == "psum":
        return sliced(m.psum(x, axis, **how)) / n
    if op == "pmax":
        return m.pmax(x, axis, **how)
    if op == "psum_scatter":
        part = sliced(m.psum_scatter(x, axis, tiled=True, **how))
        return jnp.concatenate([part] * n) / n
    if op == "all_to_all":
        return sliced(m.all_to_all(x, axis, 0, 0, tiled=True, **how))
    if op == "ragged_all_to_all":  # of equal parts, so that lax's all_to_all does the same
        if m is not pc:
            return m.all_to_all(x, axis, 0, 0, tiled=True)
        each = jnp.full(n, x.shape[0] // n, jnp.int32)
        starts = each * jnp.arange(n)
        lands = each * jax.lax.axis_index(axis)
        return m.ragged_all_to_all(x, x * 0, starts, each, lands, each, axis_name=axis, **how)
    assert op == "ppermute"
    return sliced(m.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)], **how))


def program(m, mesh, **how):
    """What all devices do, jitted, and how often a run calls the operation."""
    axis, groups, layers, options = "x", None, 16, None
    if situation == "second axis":
        axis = "y"
    if situation == "groups":
        groups = halves(N)
    if situation == "graph of one":
        layers, options = 1, {"xla_gpu_graph_min_graph_size": 1}

    def mixed(x):
        return jnp.matmul(x, jnp.ones((COLUMNS, COLUMNS)) / COLUMNS, precision="highest") + x

    def layer(x, scale):
        y = collective(m, x, axis, groups, **how)
        if situation == "both axes":
            y = collective(m, y, "y", groups, **how)
        return y if situation == "graph of one" else jnp.tanh(mixed(y) * scale) + x

    def forward(x):
        for i in range(layers):
            x = layer(x, 1 + i / layers)
        return x

    def in_scan(x):
        def step(x, scale):
            for i in range(4):
                x = layer(x, scale + i)
            return x, None

        return jax.lax.scan(step, x, jnp.arange(4.0))[0]

    def in_sizes(x):
        """256 bytes to 16 MiB (two devices): NCCL picks algorithms and protocols by the size."""
        total = x
        for i in range(9):
            big = jnp.tile(x, (4**i, 1))
            y = collective(m, big, axis, groups, **how)
            total = jnp.tanh(total + y.reshape(4**i, *x.shape).mean(0))
        return total

    def gradient(x):
        return jax.grad(lambda a: (forward(a) ** 2).sum())(x)

    body = {"gradient": gradient, "scan": in_scan, "sizes": in_sizes}.get(situation, forward)
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda x: body(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped, compiler_options=options)


class Rough:
    """lax's collectives in float64, whose sums are as wrong as float32 sums can be.

    A float32 sum of n terms, in whatever order they are added, makes n - 1 roundings, each of at
    most 2^-24 of a partial sum. So it is off by at most (n - 1) 2^-24 (|x_1| + ... + |x_n|), up to
    higher powers of 2^-24. Each element here is off by just that, up or down at random. Sums of
    derivatives are as wrong: each collective's transpose is one of these as well.
    """

    def __init__(self, seed):
        self._seeds = np.random.default_rng(seed)

    def __getattr__(self, name):
        return getattr(jax.lax, name)

    def _off(self, reduce, x, axis, groups=None, **_):
        n = len(groups[0]) if groups else jax.lax.axis_size(axis)
        total, most = reduce(x), reduce(jnp.abs(x)) * (n - 1) * 2.0**-24
        key = jax.random.key(int(self._seeds.integers(1 << 31)))
        key = jax.random.fold_in(key, jax.lax.axis_index(axis) if reduce.scatters else 0)
        return total + jax.random.rademacher(key, total.shape, total.dtype) * most

    def _both_ways(self, name, back, x, axis, **how):
        """The collective of a name, with `back` as its transpose; both are off if they are sums."""

        def run(name, x):
            def fn(x):
                return getattr(jax.lax, name)(x, axis, **options(name), **how)

            fn.scatters = name == "psum_scatter"
            groups = how.get("axis_index_groups")
            return fn(x) if name == "all_gather" else self._off(fn, x, axis, groups)

        def options(name):
            return {} if name == "psum" else {"tiled": tiled}

        tiled = how.pop("tiled", False)
        both = jax.custom_vjp(lambda x: run(name, x))
        both.defvjp(lambda x: (run(name, x), None), lambda _, ct: (run(back, ct),))
        return both(x)

    def psum(self, x, axis, **how):
        return self._both_ways("psum", "psum", x, axis, **how)

    def psum_scatter(self, x, axis, **how):
        return self._both_ways("psum_scatter", "all_gather", x, axis, **how)

    def all_gather(self, x, axis, **how):
        return self._both_ways("all_gather", "psum_scatter", x, axis, **how)


def sharded(mesh, dtype=np.float32):
    host = np.random.default_rng(0).normal(size=(N, ROWS, COLUMNS)).astype(np.float32).astype(dtype)
    sharding = jax.NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def watched(report):
    """Has Python's answers say whether the stream is captured."""
    ask = cuda.driver()._lib.cuStreamIsCapturing
    answer = ffi._functions.__class__.__getitem__

    class Watched(dict):
        def __getitem__(self, name):
            function = answer(self, name)

            def wrapped(stream, *args):
                status = ctypes.c_int()
                ask(ctypes.c_void_p(stream), ctypes.byref(status))
                report["captured"].append(status.value)
                function(stream, *args)

            return wrapped

    ffi._functions = Watched(ffi._functions)


def compare(report, mesh):
    x = sharded(mesh)
    ours, lax = program(pc, mesh, **NCCL), program(jax.lax, mesh)
    if situation == "after lax":
        want = jax.block_until_ready(lax(x))
    begin, python = time.perf_counter(), ffi.counters.python
    for _ in range(RUNS):
        before = ffi.counters.calls
        got = jax.block_until_ready(ours(x))
        report["calls"].append(ffi.counters.calls - before)
    report["seconds"].append(time.perf_counter() - begin)
    report["python"] = ffi.counters.python - python
    if situation != "after lax":
        want = jax.block_until_ready(lax(x))
    report["worst"] = max(report["worst"], apart(got, want))
    with jax.enable_x64(True):
        exact = jax.block_until_ready(program(jax.lax, mesh)(sharded(mesh, np.float64)))
        report["exact"] = max(report["exact"], apart(got, exact))
        report["allowed"] = max(report["allowed"], allowed(mesh, want, exact))


def apart(got, want):
    """The largest difference on a device of this process, relative to its largest value."""
    shards = zip(got.addressable_shards, want.addressable_shards, strict=True)
    pairs = [(np.asarray(a.data), np.asarray(b.data)) for a, b in shards]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def allowed(mesh, of_lax, exact):
    """How far our float32 result may be from float64's.

    It is as far as lax's own, and then as far from lax's as two orders of addition can be: sums in
    either are within the bound of `Rough` around exact ones. The worst of some such ways counts.
    """
    x = sharded(mesh, np.float64)
    rough = [apart(program(Rough(seed), mesh)(x), exact) for seed in range(3)]
    return 2 * max(rough) + apart(of_lax, exact)


def fail(report, mesh):
    """Runs the program without connections, and makes way for the group to be made anew."""
    connect, connection.connect = connection.connect, lambda *_: None
    x = sharded(mesh)
    try:
        if situation == "after lax":
            jax.block_until_ready(program(jax.lax, mesh)(x))
        jax.block_until_ready(program(pc, mesh, **NCCL)(x))
    except jax.errors.JaxRuntimeError as error:
        report["failed"] = str(error)
    connection.connect = connect
    jax.clear_caches()


def main():
    shapes = {"second axis": (1, N), "both axes": (N // 2, 2)}
    shape = shapes.get(situation, (N,))
    devices = np.array(jax.devices())
    mesh = functools.partial(jax.sharding.Mesh, axis_names=("x", "y")[: len(shape)])
    report = {"calls": [], "captured": [], "seconds": [], "error": None}
    report |= dict.fromkeys(("worst", "exact", "allowed"), 0.0)
    watched(report)
    try:
        if "UNCONNECTED" in os.environ:
            fail(report, mesh(devices.reshape(shape)))
        compare(report, mesh(devices.reshape(shape)))
        if situation == "two meshes":  # another communicator, later
            first, report["calls"] = report["calls"], []
            compare(report, mesh(devices[::-1].reshape(shape)))
            report["first"] = first
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["trace"] = traceback.format_exc()[-3000:]
    print(json.dumps(report), flush=True)


main()
os._exit(0)  # not through jax.distributed's shutdown: a peer may have failed
