"""The fused kernels: products by tiles, all rings, faults, the compiler, the modelled time."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from benchmarks.replay_rows import mesh_axes
from pallas_collectives.errors import VmemError
from pallas_collectives.kernels import collective_matmul, matmul_plan, pipelines
from pallas_collectives.kernels.machinery import channel, product, sync
from pallas_collectives.kernels.machinery.product import Problem, Tiles
from pallas_collectives.replay import Machine, bound, replay
from pallas_collectives.topology import chips
from pallas_collectives.topology.groups import Group, wrap_step

F32 = jnp.dtype(jnp.float32)
BF16 = jnp.dtype(jnp.bfloat16)


# A product by itself ------------------------------------------------------------------------------


def multiply(
    problem: Problem, tiles: Tiles, x: Any, w: Any, *terms: Any, adds: bool = True, **options: Any
) -> Any:
    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *term_refs, out_ref, sum_ref, w_vmem_ref = refs
        if tiles.keep == "all":
            pltpu.sync_copy(w_ref, product.resident(problem, w_vmem_ref))
            w_ref = w_vmem_ref
        options["adds"] = adds or jnp.zeros((), jnp.int32) > 0  # as kernels have it: traced
        product.multiply(
            x_ref, w_ref, out_ref, *term_refs,
            sum_ref=sum_ref, problem=problem, tiles=tiles, **options,
        )  # fmt: skip

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((*x.shape[:2], problem.columns), problem.out_dtype),
        in_specs=[hbm] * (2 + len(terms)),
        out_specs=hbm,
        scratch_shapes=[
            pltpu.VMEM(product.sum_shape(tiles), product.accumulator_dtype(x.dtype)),
            pltpu.VMEM(product.resident_shape(problem, tiles), w.dtype),
        ],
        interpret=pltpu.InterpretParams(uninitialized_memory="nan"),
    )(x, w, *terms)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", ["all", "panel", "tile"])
def test_products_of_tiles_that_stick_out(keep: str, transposed: bool) -> None:
    """Rows and columns that are no multiple of a tile; K in several tiles, and those in slabs."""
    problem = Problem(2, 40, 512, 384, F32, F32, F32, terms=1, transposed=transposed)
    tiles = Tiles(rows=16, depth=256, columns=256, inner=128, keep=keep)
    x, w = harness.random((2, 40, 512), F32), harness.random((512, 384), F32, 1)
    term = harness.random((2, 40, 384), F32, 2)
    given = w.T if transposed else w
    adds = keep != "panel"
    got = multiply(problem, tiles, x, given, term, adds=adds, scale=0.5)
    np.testing.assert_array_equal(got, (x @ w + (term if adds else 0)) * 0.5)


@pytest.mark.parametrize(
    "x_dtype, w_dtype, out_dtype",
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("int8", "int8", "int32"),
        ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ],
)
def test_products_are_added_up_wide(x_dtype: str, w_dtype: str, out_dtype: str) -> None:
    x_dtype, w_dtype, out_dtype = map(jnp.dtype, (x_dtype, w_dtype, out_dtype))
    problem = Problem(1, 32, 256, 128, x_dtype, w_dtype, out_dtype)
    tiles = Tiles(rows=32, depth=128, columns=128, inner=128, keep="tile")
    x, w = harness.random((1, 32, 256), x_dtype), harness.random((256, 128), w_dtype, 1)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    got = np.asarray(multiply(problem, tiles, x, w))
    np.testing.assert_array_equal(got, exact.astype(out_dtype))  # rounded once


@pytest.mark.parametrize("chip", chips.BY_NAME)
@pytest.mark.parametrize("columns", [8192, 11008, 28672, 29568])
def test_tiles_fit_and_feed_the_matrix_unit(chip: str, columns: int) -> None:
    problem = Problem(1, 2048, 8192, columns, BF16, BF16, BF16)
    budget = int(chips.BY_NAME[chip].vmem_bytes * matmul_plan.VMEM_SHARE)
    tiles = product.choose_tiles(problem, budget, chips.BY_NAME[chip])
    assert tiles is not None
    assert product.vmem(problem, tiles) <= budget
    assert problem.depth % tiles.depth == tiles.depth % tiles.inner == 0
    rates = chips.BY_NAME[chip]
    least = problem.flops * rates.cores / rates.matrix_rate
    assert least <= product.seconds(problem, tiles, rates) <= 1.25 * least


@pytest.mark.parametrize("chip", chips.BY_NAME)
def test_weights_stay_in_vmem_where_they_fit(chip: str) -> None:
    budget = int(chips.BY_NAME[chip].vmem_bytes * matmul_plan.VMEM_SHARE)

    def kept(depth: int, columns: int) -> str:
        problem = Problem(1, 1024, depth, columns, BF16, BF16, BF16)
        tiles = product.choose_tiles(problem, budget, chips.BY_NAME[chip])
        assert tiles is not None
        return tiles.keep

    assert kept(2048, 2048) == "all"
    assert kept(8192, 11008) != "all"


def test_what_no_tile_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chips, "SIMULATED", dataclasses.replace(chips.SIMULATED, vmem_bytes=1 << 16)
    )
    with pytest.raises(VmemError, match="MiB of VMEM"):
        matmul_plan.plan(
            (1, 64, 1024),
            [(1024, BF16)],
            BF16,
            BF16,
            group=Group(("x",), (4,)),
            block_bytes=1 << 17,
            cores=1,
        )


# Rings --------------------------------------------------------------------------------------------


def both(x: Any, w: Any, n: int, params: Any, *, transposed: bool = False) -> Any:
    """The gathered x and its product, and the scattered sum of that product with w transposed."""
    group = Group(("x",), (n,))
    options = {"precision": None, "interpret": params}
    gathered, y = collective_matmul.all_gather_matmul(
        x, [w], group, out_dtype=F32, transposed=transposed, **options
    )
    back = collective_matmul.matmul_reduce_scatter(
        y, w, group, wire_dtype=F32, scale=0.5, transposed=not transposed, **options
    )
    return gathered, y, back


def references(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    n = len(x)
    gathered = np.broadcast_to(
        np.concatenate(x, axis=1), (n, x.shape[1], n * x.shape[2], x.shape[3])
    )
    wide = w.astype(np.float64)[:, None]
    y = gathered.astype(np.float64) @ wide
    total = (y @ wide.swapaxes(2, 3)).sum(axis=0) / 2
    return gathered, y, np.stack(np.split(total, n, axis=1))


def small(n: int, rows: int = 16, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return harness.random((n, batch, rows, 128), F32), harness.random((n, 128, 128), F32, 1)


@pytest.mark.parametrize(
    "n, mode",
    [
        *((n, "on_wait") for n in (2, 3, 4, 8)),
        (3, "eager"),
        *(
            pytest.param(n, mode, marks=pytest.mark.slow)
            for n, mode in [
                *((n, "on_wait") for n in (5, 6, 7)),
                *((n, "eager") for n in (2, 4, 5, 8)),
            ]
        ),
    ],
)
def test_every_ring_under_both_adversaries(
    n: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are exact; on the smallest rings also with four parts a block."""
    if n < 4:
        monkeypatch.setattr(matmul_plan, "CHUNKS", (4,))
    assert_exact(n, harness.ADVERSARIES[mode], rows=32 if n < 4 else 16, batch=2 if n == 3 else 1)


@pytest.mark.parametrize(
    "n, mode",
    [
        *((2, "on_wait"), (4, "eager")),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [(3, "on_wait"), (2, "eager")]),
    ],
)
def test_both_cores_of_a_device_have_a_ring_each(n: int, mode: str) -> None:
    """Each core of each device takes the half of every block; none waits for the other's."""
    assert_exact(n, on_cores(mode), rows=64, batch=2 if n == 3 else 1)


def on_cores(mode: str) -> Any:
    """An adversary on devices of two cores."""
    return dataclasses.replace(harness.ADVERSARIES[mode], num_cores_or_threads=2)


def assert_exact(n: int, params: Any, rows: int, batch: int) -> None:
    x, w = small(n, rows, batch)
    run = functools.partial(both, n=n, params=params)
    got = harness.per_device(run, harness.mesh(n), check_vma=False)(x, w)
    for a, b in zip(got, references(x, w), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    assert not harness.race_reported()


def is_caught(
    mode: str, n: int = 4, hold: int | None = None, scatter: bool = False, cores: int = 1
) -> bool:
    """Whether a fault shows in the gathering half, or in the scattering one."""
    x, w = small(n, rows=32 if cores > 1 else 16)
    group, params = Group(("x",), (n,)), on_cores(mode) if cores > 1 else harness.ADVERSARIES[mode]

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x if hold is None else harness.delayed(x, hold)
        options = {"transposed": False, "precision": None, "interpret": params}
        if not scatter:
            return collective_matmul.all_gather_matmul(x, [w], group, out_dtype=F32, **options)[1]
        rows = jnp.concatenate([x] * n, axis=1)
        return collective_matmul.matmul_reduce_scatter(
            rows, w, group, wire_dtype=F32, scale=1.0, **options
        )

    _, y, _ = references(x, w)
    want = np.broadcast_to((x @ w[:, None]).sum(axis=0), x.shape) if scatter else y
    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught(lambda: run(x, w), want)


@pytest.mark.parametrize("scatter", [False, True])
def test_sound_kernels_are_not_caught(scatter: bool) -> None:
    assert not is_caught("on_wait", hold=1, scatter=scatter)


@pytest.mark.parametrize("scatter", [False, True])
def test_dropped_wait_before_a_part_is_used_is_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = sync.wait

    def for_sends_only(semaphore: Any, ref: Any, times: Any = 1) -> None:
        if len(semaphore.ref.shape) != 3:  # `arrived` is the 3-D one
            wait(semaphore, ref, times)

    monkeypatch.setattr(sync, "wait", for_sends_only)
    assert is_caught("on_wait", scatter=scatter)


def test_dropped_wait_for_the_own_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own block is consumed from its place before it is there."""
    make = pltpu.make_async_copy

    class Unwaited:
        def __init__(self, *args: Any) -> None:
            self.start = make(*args).start

        def wait(self) -> None:
            pass

    monkeypatch.setattr(pipelines.pltpu, "make_async_copy", Unwaited)
    monkeypatch.setattr(sync.pltpu, "make_async_copy", Unwaited)
    assert is_caught("on_wait", n=2)


@pytest.mark.parametrize("scatter", [False, True])
def test_steps_that_share_a_semaphore_are_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (channel, pipelines):
        monkeypatch.setattr(module, "wrap_step", lambda step, slots: wrap_step(step, 1))
    assert is_caught("on_wait", n=6, scatter=scatter)


@pytest.mark.parametrize("scatter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cores_that_see_to_the_same_chunks_are_caught(
    scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan.Plan, "on", lambda plan, core: plan)
    assert is_caught("on_wait", n=2, scatter=scatter, cores=2)


def test_dropped_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "barrier_with_neighbours", lambda ring: pltpu.get_barrier_semaphore())
    assert is_caught("eager", hold=1)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_dropped_credits_are_caught_on_every_schedule(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals of two steps meet in one semaphore, or a sum in a slot that is still being sent."""

    def only_in_barriers(signal_or_wait: Any) -> Any:
        def replaced(semaphore: Any, *args: Any, **kwargs: Any) -> None:
            if not getattr(semaphore, "transforms", ()):  # the barrier's is a bare one
                signal_or_wait(semaphore, *args, **kwargs)

        return replaced

    monkeypatch.setattr("pallas_collectives.kernels.all_gather.WINDOW", 2)
    pod, spec = Machine.named("v5e:16x16"), jax.sharding.PartitionSpec("x")

    def is_sound() -> bool:
        def program(x: jax.Array, w: jax.Array) -> jax.Array:
            return getattr(pallas_collectives, op)(x, w, "x", algorithm="fused")

        on = pod.mesh({"x": 16})
        mapped = jax.shard_map(
            program, mesh=on, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )
        shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((16 * 128, 128), (16 * 128, 256))]
        return replay(mapped, *shapes, machine=pod, races=True).ok

    assert is_sound()
    monkeypatch.setattr(pl, "semaphore_wait", only_in_barriers(pl.semaphore_wait))
    monkeypatch.setattr(pl, "semaphore_signal", only_in_barriers(pl.semaphore_signal))
    assert not is_sound()


def test_long_rings_reuse_semaphores_under_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of two makes a ring of seven a long one."""
    monkeypatch.setattr("pallas_collectives.kernels.all_gather.WINDOW", 2)
    assert not is_caught("on_wait", n=7, hold=3)


# The compiler -------------------------------------------------------------------------------------

WIDTHS = (11008, 28672, 29568, 8192, 11008)


def compiled(generation: str, columns: int, op: str, dtype: Any = BF16) -> harness.Compiled:
    """A product of 8192 x 8192 a device with weights of `columns`, with its collective."""
    options: dict[str, Any] = {"algorithm": "fused"}
    if jnp.issubdtype(dtype, jnp.integer):
        options["preferred_element_type"] = jnp.int32
    function = getattr(pallas_collectives, op)
    return harness.compile_for_tpu(
        lambda x, w: function(x, w, "x", **options),
        harness.GENERATIONS[generation],
        (8192, 8192),
        (8192, columns),
        dtype=dtype,
    )


MEGACORE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import pallas_collectives as pc
def program(x, w):
    y = pc.all_gather_matmul(2 * x, w, "x", algorithm="fused")
    return pc.matmul_reduce_scatter(y, w.T, "x", algorithm="fused") + 1
for name, options in (("v4:2x2x1", {"chip_config_name": "megacore"}), ("v5p:2x2x1", {})):
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    mesh = Mesh(np.array(found.devices), ("x",))
    spec = lambda *shape: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    run = jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    text = jax.jit(run).lower(spec(4 * 2048, 1024), spec(4 * 1024, 2048)).compile().as_text()
    lines = [line.partition(" custom-call(") for line in text.splitlines()]
    kernels = [result for result, call, _ in lines if call]
    assert len(kernels) == 2 and not any("S(" in kernel for kernel in kernels), kernels
"""


def test_both_cores_compile_on_chips_that_have_two() -> None:
    """In a process of its own: libtpu's topologies of other layouts are for one each."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    subprocess.run([sys.executable, "-c", MEGACORE], env=environment, check=True, timeout=240)


def assert_nothing_else(found: harness.Compiled) -> None:
    """Between producers and consumer stands the kernel: no copy, no pad, no collective."""
    kernel = [op for op in found.ops if op not in ("parameter", "fusion", "get-tuple-element")]
    assert kernel == ["custom-call"], found.ops
    assert found.ops.count("fusion") == 3, found.ops


@pytest.mark.parametrize("generation, columns", list(zip(harness.GENERATIONS, WIDTHS, strict=True)))
def test_transformer_sizes_compile_to_the_kernel_alone(generation: str, columns: int) -> None:
    assert_nothing_else(compiled(generation, columns, "all_gather_matmul"))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("columns", [8192, 11008, 28672, 29568])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_all_transformer_sizes_compile(generation: str, columns: int, op: str) -> None:
    assert_nothing_else(compiled(generation, columns, op))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_other_dtypes_compile(generation: str, op: str, dtype: str) -> None:
    if generation == "v4" and dtype != "float32":
        with pytest.raises(pallas_collectives.errors.AlgorithmError, match="matrix unit"):
            compiled(generation, 8192, op, jnp.dtype(dtype))
    else:
        compiled(generation, 8192, op, jnp.dtype(dtype))


def test_scatter_compiles() -> None:
    assert_nothing_else(compiled("v5e", 11008, "matmul_reduce_scatter"))


# The modelled time --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("ratio", [0.5, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("v5e:16", "v5p:4x4x4", "7x:4x4x4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("v4:4x4x4", "v6e:16")),
    ],
)
def test_the_shorter_of_wire_and_product_is_hidden(name: str, ratio: float, op: str) -> None:
    """Modelled, with products that take half as long as the wire, or twice: within 15%."""
    machine, size = Machine.named(name), 3072 if name.endswith(":16") else 4096
    rates, axes = machine.generation, mesh_axes(machine)
    n = axes["x"]
    devices = np.arange(int(np.prod(list(axes.values())))).reshape(tuple(axes.values()))
    groups = np.moveaxis(devices, 0, -1).reshape(-1, n)
    gathers = op == "all_gather_matmul"
    collective = "all_gather" if gathers else "reduce_scatter"
    wire = bound(collective, machine, groups, 2 * size * size).wire
    rate = rates.matrix_rate
    free = 256 * round(ratio * wire * rate / (2 * n * size * size) / 256)
    depth, columns = (size, free) if gathers else (free, size)

    function = jax.shard_map(
        lambda x, w: getattr(pallas_collectives, op)(x, w, "x", algorithm="fused"),
        mesh=machine.mesh(axes),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((size if gathers else n * size, depth), BF16)
    w = jax.ShapeDtypeStruct((depth, columns), BF16)
    report = replay(function, x, w, machine=machine)
    assert not report.stuck
    assert not report.leftovers
    assert max(kernel.vmem_bytes for kernel in report.kernels) <= rates.vmem_bytes
    products = 2 * n * size * depth * columns / rate
    assert 1 <= report.time / max(products, wire) <= 1.15


def races(n: int) -> Any:
    """What can race on some schedule, in both kernels on a ring of n."""
    machine = Machine.named(f"v5e:{n}")
    group, options = Group(("x",), (n,)), {"precision": None, "interpret": False}

    def run(x: jax.Array, w: jax.Array) -> Any:
        gathered, y = collective_matmul.all_gather_matmul(
            x, [w], group, out_dtype=F32, transposed=False, **options
        )
        return gathered, collective_matmul.matmul_reduce_scatter(
            y, w, group, wire_dtype=F32, scale=1.0, transposed=True, **options
        )

    everywhere = PartitionSpec()
    function = jax.shard_map(
        run, mesh=machine.mesh({"x": n}), in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((1, 16, 128), (128, 128))]
    return replay(function, *shapes, machine=machine, races=True).races


def test_the_replay_knows_no_race() -> None:
    assert races(8) == []


def test_the_replay_knows_the_race_of_a_dropped_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = sync.wait

    def for_sends_only(semaphore: Any, ref: Any, times: Any = 1) -> None:
        if len(semaphore.ref.shape) != 3:
            wait(semaphore, ref, times)

    monkeypatch.setattr(sync, "wait", for_sends_only)
    assert races(8)


def test_the_replay_knows_the_race_of_a_dropped_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast neighbour writes over sums that are still being sent; that it is fast takes luck."""
    wait = pl.semaphore_wait

    def only_in_barriers(semaphore: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(semaphore, "transforms", ()):  # the barrier's is a bare one
            wait(semaphore, *args, **kwargs)

    monkeypatch.setattr(pl, "semaphore_wait", only_in_barriers)
    assert races(8)
