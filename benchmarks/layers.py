"""`layers`: layers whose weights are gathered, each when it is needed or one layer ahead.

A layer is tanh(h @ w), and each GPU holds one part of each w. A row is a form of the same program;
but for wires they give the same bits, or it says so:

    compute    the weights are there
    lax        lax's all_gather before each layer
    ours       ours before each layer
    ahead      `all_gather_start` of the next layer's weights, done after this layer
    int8, ...  that, over a wire of --narrow, whose rounding changes bits

with milliseconds for all layers (the least of some runs of several in a row), and those exposed:
more than compute alone takes.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_collectives
from benchmarks import devices
from benchmarks.settings import FlagError, check_no_arguments, check_wires

_STACK = flags.DEFINE_string(
    "stack", "16x4096x4096", "LAYERSxWIDTHxTOKENS: w is bfloat16[width, width]; tokens on each GPU."
)
_WIRE = flags.DEFINE_list("narrow", [], "Wires for weights that are gathered ahead.")
SAMPLES, RUNS = 15, 20

Form = Callable[..., jax.Array]


def main(argv: Sequence[str]) -> int:
    """Prints the rows."""
    check_no_arguments(argv)
    devices.prepare(1)
    n = jax.device_count()
    layers, width, tokens = sizes(_STACK.value, n)
    devices.check_gpus("layers", "GPUs")
    narrow = check_wires(_WIRE.value, ["bfloat16"])
    mesh = Mesh(np.array(jax.devices()), ("x",))
    programs = {name: compiled(form, mesh, layers) for name, form in forms(narrow).items()}
    operands = {name: arrays(mesh, layers, width, tokens, name) for name in programs}
    results = {name: np.asarray(programs[name](*operands[name])) for name in programs}
    if devices.speaks():
        kind = jax.devices()[0].device_kind
        print(f"{n} x {kind}: {layers} layers of {width} x {width} bfloat16, {tokens} tokens each")
        print(f"{'form':10}{'ms':>8}{'exposed':>9}  bits")
    alone = 0.0
    for name, program in programs.items():
        ms = milliseconds(program, operands[name])
        alone = alone or ms
        same = "as lax's" if (results[name] == results["lax"]).all() else "NOT lax's"
        if devices.speaks():
            print(f"{name:10}{ms:8.3f}{ms - alone:9.3f}  {same}", flush=True)
    exact = (result for name, result in results.items() if name not in narrow)
    return 0 if all((result == results["lax"]).all() for result in exact) else 1


def sizes(stack: str, n: int) -> tuple[int, int, int]:
    """Layers, width and tokens, as --stack has them."""
    numbers = [int(part) if part.isdecimal() else 0 for part in stack.split("x")]
    if len(numbers) != 3 or min(numbers) < 1 or numbers[1] % n:
        rule = f"it must be LAYERSxWIDTHxTOKENS, the width a multiple of {n} devices"
        raise FlagError(f"--stack={stack}", rule, "write it like 16x4096x4096")
    return numbers[0], numbers[1], numbers[2]


def forms(narrow: Sequence[str] = ()) -> dict[str, Form]:
    """The forms: (h, *weights) -> h, on one device; `ahead` over wires, too."""

    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w)

    def gathered(gather: Callable[[jax.Array], jax.Array]) -> Form:
        return lambda h, *ws: functools.reduce(lambda h, w: layer(h, gather(w)), ws, h)

    def ahead(h: jax.Array, *ws: jax.Array, wire: str | None = None) -> jax.Array:
        started = pallas_collectives.all_gather_start
        start = functools.partial(started, axis_name="x", tiled=True, wire=wire)
        coming = start(ws[0])
        for shard in ws[1:]:
            following = start(shard, after=h)
            # This layer comes after the start, for it needs weights that are done after it.
            w = coming.done(after=(h, following.tokens))
            h, coming = layer(h, w), following
        return layer(h, coming.done(after=h))

    return {
        "compute": gathered(lambda w: w),
        "lax": gathered(lambda w: jax.lax.all_gather(w, "x", tiled=True)),
        "ours": gathered(lambda w: pallas_collectives.all_gather(w, "x", tiled=True)),
        "ahead": ahead,
        **{wire: functools.partial(ahead, wire=wire) for wire in narrow},
    }


def compiled(form: Form, mesh: Mesh, layers: int) -> Callable[..., Any]:
    """The program of a form; "compute" gets whole weights, the others their parts."""
    rows = PartitionSpec("x")

    def of(spec: PartitionSpec) -> Any:
        mapped = jax.shard_map(
            form, mesh=mesh, in_specs=(rows, *[spec] * layers), out_specs=rows, check_vma=False
        )
        return jax.jit(mapped)

    by_spec = {True: of(PartitionSpec()), False: of(rows)}
    return lambda h, *ws: by_spec[ws[0].is_fully_replicated](h, *ws)


def arrays(mesh: Mesh, layers: int, width: int, tokens: int, form: str) -> tuple[jax.Array, ...]:
    """h, and the weights: whole on each device for "compute", in parts for the others."""
    rows = PartitionSpec("x")
    keys = jax.random.split(jax.random.key(0), layers + 1)

    def put(key: jax.Array, shape: tuple[int, int], scale: float, spec: PartitionSpec) -> jax.Array:
        x = jax.random.normal(key, shape, jnp.bfloat16) * scale
        return jax.device_put(x, NamedSharding(mesh, spec))

    spec = PartitionSpec() if form == "compute" else rows
    scale = width**-0.5
    ws = (put(key, (width, width), scale, spec) for key in keys[1:])
    return (put(keys[0], (mesh.size * tokens, width), 1.0, rows), *ws)


def milliseconds(program: Callable[..., Any], operands: tuple[jax.Array, ...]) -> float:
    """Milliseconds of one run among several in a row: the least of some samples."""

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(RUNS):
            result = program(*operands)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / RUNS

    return 1e3 * min(sample() for _ in range(SAMPLES))
