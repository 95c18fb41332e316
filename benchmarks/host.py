"""`host`: what a small call costs on GPUs when the host issues it: ours, lax's, a plain callback's.

At some KiB the wire costs next to nothing: a call takes what the host needs to issue it, and the
GPU to start it. XLA captures most programs in CUDA graphs, which issue their calls at once; others
pay for each call, the more where one process drives several GPUs. A row holds, in µs a call in a
chain of dependent ones within one program, both as XLA would have it and with graphs turned off:

    ours        NCCL, recorded when the program is lowered and issued without Python
    lax         XLA's own
    callback    the same call of NCCL from a function of `jax.experimental.buffer_callback`

Run it once for all GPUs of a host, or as one process for each.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices, timing
from benchmarks.cases import CASES, Case
from benchmarks.settings import check_no_arguments
from pallas_collectives import catalogue, nccl

WARMUPS = 5
SAMPLES = 101
COUNT = 1024  # float32 elements of a device's block
SHORT, LONG = 10, 100  # calls in the chains whose times are compared
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

Call = Callable[[jax.Array], jax.Array]


def main(argv: Sequence[str]) -> int:
    """Prints the rows."""
    check_no_arguments(argv)
    devices.prepare(1)
    devices.check_gpus("host", "NCCL")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    with nccl.create(jax.devices(), name="callback") as group:
        if devices.speaks():
            kind = jax.devices()[0].device_kind
            print(f"{mesh.size} x {kind}, {jax.process_count()} processes, {4 * COUNT} bytes")
            print(
                f"{'collective':14}{'programs':14}{'ours':>8}{'lax':>8}{'callback':>10}  us a call"
            )
        for case in (case for case in CASES if hasattr(nccl.Communicator, case.op)):
            forms = calls(case, group)
            for programs, options in (("no graphs", NO_GRAPHS), ("as XLA's", {})):
                ours, theirs, plain = (microseconds(mesh, form, options) for form in forms)
                if devices.speaks():
                    print(
                        f"{case.name:14}{programs:14}{ours:8.1f}{theirs:8.1f}{plain:10.1f}",
                        flush=True,
                    )
    return 0


def calls(case: Case, group: nccl.Group) -> tuple[Call, Call, Call]:
    """Our form of a collective, lax's, and a plain callback's; block to block."""
    n = len(group.devices)
    blocks, *_ = case.operand(n, 1)
    count = COUNT if case.whole else COUNT // blocks
    elements = catalogue.COLLECTIVES[case.op].result_bytes(COUNT, n)
    at = {c.ordinal: c for c in group.communicators.values()}

    def enqueue(context: Any, out: Any, x: Any) -> None:
        communicator = at[x.__dlpack_device__()[1]]
        where = (b.__cuda_array_interface__["data"][0] for b in (x, out))
        reduction = ("sum",) if case.adds else ()
        getattr(communicator, case.op)(*where, count, jnp.float32, *reduction, context.stream)

    def plain(x: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((elements,), x.dtype)
        return buffer_callback(enqueue, result, has_side_effect=True)(x)

    def theirs(x: jax.Array) -> jax.Array:
        return case.by_lax(x.reshape(blocks, 1, -1), "x").reshape(-1)

    def ours(x: jax.Array) -> jax.Array:
        x = x.reshape(blocks, 1, -1)
        return case.call(pallas_collectives, x, "x", backend="nccl").reshape(-1)

    return ours, theirs, plain


def microseconds(mesh: Mesh, call: Call, options: dict[str, str]) -> float:
    """The time of one call more in a chain of dependent ones; `options` are XLA's."""
    spec = PartitionSpec("x")

    def chain(length: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(length):
                y = call(x)[: COUNT // mesh.size] * 0.25
                x = jnp.concatenate([y, x[y.size :]])
            return x

        mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, compiler_options=options)

    ones = functools.partial(jnp.ones, mesh.size * COUNT, jnp.float32)
    x = jax.jit(ones, out_shardings=NamedSharding(mesh, spec))()

    short, long = (functools.partial(timing.clocked, chain(n), x) for n in (SHORT, LONG))
    samples = [timing.difference(short, long, LONG - SHORT) for _ in range(WARMUPS + SAMPLES)]
    return 1e6 * statistics.median(samples[WARMUPS:])
