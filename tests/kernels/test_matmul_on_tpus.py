"""The fused kernels on TPUs that are not there: the compiler, the modelled time."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import harness
import pallas_collectives
from benchmarks import fused
from benchmarks.replay_rows import mesh_axes
from pallas_collectives.backends import choice
from pallas_collectives.backends.pallas import products
from pallas_collectives.backends.pallas.products import SCATTER, Spec
from pallas_collectives.kernels.machinery import launch, multiply
from pallas_collectives.replay import Machine, bound, replay
from pallas_collectives.topology.groups import Group

BF16 = jnp.dtype(jnp.bfloat16)
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


@pytest.mark.full
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


@pytest.mark.parametrize(
    "generation, depth, columns",
    [
        *((generation, 2048, 2944) for generation in harness.GENERATIONS),
        # Of two tiles that bring all weights, the narrower, for what the first sum waits.
        pytest.param("7x", 4096, 4096, marks=pytest.mark.full),
    ],
)
def test_weights_that_stay_in_vmem_compile(generation: str, depth: int, columns: int) -> None:
    """They come tile by tile; the last tile of 2944 columns is a narrower one."""
    found = harness.compile_for_tpu(
        lambda x, w: pallas_collectives.matmul_reduce_scatter(x, w, "x", algorithm="fused"),
        harness.GENERATIONS[generation],
        (4096, depth),
        (depth, columns),
        dtype=BF16,
    )
    assert found.ops.count("custom-call") == 1, found.ops


@pytest.mark.parametrize(
    "generation, rows, depth, columns",
    [
        ("v6e", 256, 8192, 7168),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                *(("v4", 128, 2048, 4096), ("v5e", 256, 8192, 7168)),
                *(("v5p", 256, 4096, 7168), ("7x", 256, 4096, 7168)),
            )
        ),
    ],
)
def test_weights_of_which_most_stay_compile(
    generation: str, rows: int, depth: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, so that what is fetched anew would bound the time."""
    kept: list[str] = []
    of = multiply.Scratch.of

    def noted(problem: Any, tiles: Any) -> Any:
        kept.append(tiles.keep)
        return of(problem, tiles)

    monkeypatch.setattr(multiply.Scratch, "of", noted)
    found = harness.compile_for_tpu(
        lambda x, w: pallas_collectives.all_gather_matmul(x, w, "x", algorithm="fused"),
        harness.GENERATIONS[generation],
        (rows, depth),
        (depth, columns),
        dtype=BF16,
    )
    assert {*kept} == {"some"}
    assert found.ops.count("custom-call") == 1, found.ops


def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
    """The scattered sum of x transposed @ y."""
    how = choice.choose(("x",), None, None)
    spec = Spec("x", 0, x.dtype, False, None, how, turned=True)
    (found,) = products.kernel(x, y, op=SCATTER, spec=spec)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_gradients_of_weights_compile_to_the_kernel_alone(generation: str, dtype: str) -> None:
    """x is turned tile by tile, and not by XLA."""
    shapes = (4096, 8192), (4096, 2944)
    assert_nothing_else(
        harness.compile_for_tpu(gradient, harness.GENERATIONS[generation], *shapes, dtype=dtype)
    )


@pytest.mark.full
@pytest.mark.parametrize("of_gradients", [False, True])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_what_the_compiler_keeps_is_counted(
    generation: str, of_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a MiB besides is enough, for registers that it spills."""
    monkeypatch.setattr(launch, "_vmem_limit", lambda needed, *_: needed + (1 << 19))
    if of_gradients:
        shapes = (8192, 8192), (8192, 11008)
        harness.compile_for_tpu(gradient, harness.GENERATIONS[generation], *shapes, dtype=BF16)
    else:
        compiled(generation, 11008, "matmul_reduce_scatter")


@pytest.mark.full
@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_float32_in_full_compiles(op: str, generation: str) -> None:
    """Its passes take parts of what is multiplied at once, which the compiler keeps, too."""
    with jax.default_matmul_precision("highest"):
        compiled(generation, 2816, op, jnp.float32)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_bfloat16_in_full_is_one_pass(op: str) -> None:
    with jax.default_matmul_precision("highest"):
        assert_nothing_else(compiled("v5e", 2816, op))


@pytest.mark.full
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_two_rings_compile(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a torus; the compiler need not know whether hops are links."""

    def with_second(group: Group) -> Group:
        devices = range(group.size)
        second = (*devices[::2], *devices[1::2])
        return dataclasses.replace(group, order=tuple(devices), second=second)

    monkeypatch.setattr(products, "on_wires", with_second)

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        y = pallas_collectives.all_gather_matmul(x, w, "x", algorithm="fused")
        return pallas_collectives.matmul_reduce_scatter(y, w.T, "x", algorithm="fused")

    found = harness.compile_for_tpu(
        program, harness.GENERATIONS[generation], (2048, 2048), (2048, 1024), dtype=BF16
    )
    assert found.text.count('custom_call_target="tpu_custom_call"') == 2


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


@pytest.mark.full
def test_scatter_compiles() -> None:
    assert_nothing_else(compiled("v5e", 11008, "matmul_reduce_scatter"))


def test_the_first_message_of_a_gather_has_the_wire_to_itself() -> None:
    """Modelled: it comes while own chunks are multiplied; beside the next one it would be late."""
    [row] = fused.modelled(["v4:4x4x4"], ["all_gather_matmul"], [(2048, 4096, 4096)])
    assert row.fused <= 1.08 * row.least


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
