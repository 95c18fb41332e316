"""Times of tokens to their experts and back on GPUs (see `experts`).

    dense all-to-alls   two, of as many bytes as all choices have: T * k rows a device each, which
                        is what an exchange of equal blocks would send; by NCCL, and by lax
    ours                dispatch and combine, plan included, each expert answering with what it got
    lax                 the same, with lax's collectives in place of NCCL's calls; dense, and ragged

All in one run, each a chain of dependent calls in one program.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices, timing
from pallas_collectives import moe

Step = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tokens of each device, their width, how many experts in all, and choices of each token."""

    tokens: int
    width: int
    experts: int
    choices: int

    def calls(self) -> dict[str, Step]:
        """What is timed, by name: (tokens, experts) -> tokens."""
        rows = self.tokens * self.choices * 5 // 4
        calls: dict[str, Step] = {
            "dense all-to-alls": functools.partial(self._all_to_alls, "nccl"),
            "dense all-to-alls, lax": functools.partial(self._all_to_alls, "xla"),
        }
        ours: dict[str, Any] = {"ours": {}, "ours, rows bounded": {"rows": rows}}
        lax_s: dict[str, Any] = {"lax, dense": {}, "lax, ragged": {"exchange": "ragged"}}
        lax_s["lax, ragged, rows bounded"] = {"exchange": "ragged", "rows": rows}
        for backend, forms in (("nccl", ours), ("xla", lax_s)):
            for name, options in forms.items():
                calls[name] = functools.partial(self._there_and_back, backend, options)
        return calls

    def _all_to_alls(self, backend: str, x: jax.Array, experts: jax.Array) -> jax.Array:
        del experts
        choices = jnp.concatenate([x] * self.choices)
        for _ in range(2):
            choices = pallas_collectives.all_to_all(choices, "x", 0, 0, tiled=True, backend=backend)
        return choices[: len(x)]

    def _there_and_back(
        self, backend: str, options: dict[str, Any], x: jax.Array, experts: jax.Array
    ) -> jax.Array:
        rows, plan = moe.dispatch(
            x, experts, "x", num_experts=self.experts, backend=backend, **options
        )
        weights = jnp.full(experts.shape, 1 / self.choices, jnp.float32)
        return moe.combine(rows, weights, plan, "x", backend=backend)


def microseconds(
    problem: Problem, call: Step, routing: np.ndarray, mesh: Mesh, iters: int
) -> list[float]:
    """Several times of one call, in a chain less a chain of one turn."""
    spec = PartitionSpec("x")
    sharding = NamedSharding(mesh, spec)

    def chain(turns: int) -> Callable[..., jax.Array]:
        def link(_: object, x: jax.Array, experts: jax.Array) -> jax.Array:
            for i in range(timing.IN_A_ROW):  # each has a routing of its own, and so a plan
                x, other = lax.optimization_barrier((x, (experts + i) % problem.experts))
                x = lax.optimization_barrier(call(x, other))
            return x

        def run(x: jax.Array, experts: jax.Array) -> jax.Array:
            step = functools.partial(link, experts=experts[0])
            return lax.fori_loop(0, turns, step, x[0])[None]

        mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped)

    shape = (mesh.size, problem.tokens, problem.width)
    x = jax.jit(lambda: jnp.ones(shape, jnp.bfloat16), out_shardings=sharding)()
    experts = jax.device_put(routing.astype(np.int32), sharding)
    turns = max(1, iters // timing.IN_A_ROW)
    one, many = (functools.partial(timing.clocked, chain(n), x, experts) for n in (1, 1 + turns))
    calls, warmups = turns * timing.IN_A_ROW, 3
    samples = [timing.difference(one, many, calls) for _ in range(warmups + timing.SAMPLES)]
    return [1e6 * t for t in samples[warmups:]]


def run(problem: Problem, routing: np.ndarray) -> None:
    """Prints the times of each, and what they are of the dense all-to-alls' and of lax's."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    if devices.speaks():
        kind, p = jax.devices()[0].device_kind, problem
        print(f"{mesh.size} x {kind}: {p.tokens} x {p.width} bfloat16 a device, balanced,")
        print(f"{p.choices} of {p.experts} experts; there and back.")
        print(f"{'':30}{'us':>10}{'spread':>16}{'of dense':>10}")
    dense = 0.0
    for name, call in problem.calls().items():
        try:
            times = microseconds(problem, call, routing, mesh, timing.ITERS.value)
        except jax.errors.JaxRuntimeError as error:
            if devices.speaks():
                print(f"{name:30}failed: {str(error).splitlines()[0][:100]}")
            continue
        us = statistics.median(times)
        dense = dense or us
        if devices.speaks():
            spread = f"{min(times):.0f} to {max(times):.0f}"
            print(f"{name:30}{us:10.1f}{spread:>16}{us / dense:10.2f}", flush=True)
