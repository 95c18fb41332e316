"""A process whose first program is a scan of products beside copies, captured in a CUDA graph.

usage: products_fresh.py PROCESS PROCESSES PORT

With one process it has all GPUs, else each has the GPU of its number. It prints "as lax" where all
is well.
"""

import functools
import os
import sys

process, processes, port = map(int, sys.argv[1:])
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax  # noqa: E402

if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, process, local_device_ids=[process])

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import pallas_collectives as pc  # noqa: E402

P, N = jax.sharding.PartitionSpec, jax.device_count()
mesh = jax.make_mesh((N,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def loss(ws, x, **how):
    def layer(x, w):  # slices of a stack: XLA makes them part of the calls
        y = jnp.tanh(pc.all_gather_matmul(x, w, "x", **how))
        return pc.matmul_reduce_scatter(y, w.T, "x", **how), None

    y, _ = jax.lax.scan(jax.checkpoint(layer), x, ws)
    return jax.lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), "x")


def program(**how):
    step = jax.value_and_grad(functools.partial(loss, **how), argnums=(0, 1))
    specs = {"in_specs": (P(), P("x")), "out_specs": (P(), (P(), P("x")))}
    mapped = jax.shard_map(step, mesh=mesh, **specs, check_vma=True)
    return jax.jit(mapped, compiler_options={"xla_gpu_graph_min_graph_size": 1})


draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
ws = jax.device_put(
    np.asarray(draw(jax.random.key(0), (6, 256, 256))) / 24, jax.NamedSharding(mesh, P())
)
rows = jax.make_array_from_callback(
    (N * 128, 256), jax.NamedSharding(mesh, P("x")),
    lambda index: np.random.default_rng(0).normal(size=(N * 128, 256)).astype(jnp.bfloat16)[index],
)  # fmt: skip
ours = [program(backend="nccl", algorithm="fused")(ws, rows) for _ in range(6)][-1]
assert pc.fusion_counts(), "nothing was fused"
assert all(way == "fused" for _, way, _ in pc.fusion_counts()), pc.fusion_counts()
lax = program(backend="xla", algorithm="unfused")(ws, rows)
for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(lax), strict=True):
    got, want = (np.asarray(a.addressable_data(0)).astype(np.float32) for a in (got, want))
    worst = np.abs(got - want).max() / np.abs(want).max()
    assert worst < 0.05, worst
print("as lax", flush=True)
