"""Groups in the order of TPU tiles: the same groups, and nothing that the compiler moves for it."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from pallas_collectives import tiles, wires
from pallas_collectives.backends.pallas import packed
from pallas_collectives.topology.groups import Group
from pallas_collectives.wires import Wire
from wired_calls import run, within


@pytest.mark.parametrize("count, size", [(6, 128), (3, 256), (1, 768)])
@pytest.mark.parametrize("shape", [(16, 768), (2, 8, 768), (3, 5, 768)])
def test_groups_are_those_of_rows(shape: tuple[int, ...], count: int, size: int) -> None:
    x, cut = jnp.arange(np.prod(shape)).reshape(shape), tiles.Cut(shape, count, size)
    assert cut.tiled == (shape[-2] % 8 == 0)
    want = x.reshape(*shape[:-1], count, size).max(axis=-1)
    groups = cut.groups(x)
    np.testing.assert_array_equal(cut.by_row(groups.max(axis=cut.axes)), want)
    np.testing.assert_array_equal(cut.by_group(want), groups.max(axis=cut.axes))
    np.testing.assert_array_equal(cut.whole(groups), x)


@pytest.mark.full
@pytest.mark.parametrize("wire", [Wire("int8"), Wire("int8", "row")], ids=str)
def test_no_pass_over_whole_tiles_moves_numbers(wire: Wire) -> None:
    """By the compiler's cycles packing and unpacking take less than six copies of what is packed.

    Of rows that are no whole tiles it takes more than three times that.
    """
    pytest.importorskip("libtpu")

    def cycles(rows: int) -> int:
        def there_and_back(x: jax.Array) -> jax.Array:
            sent = jax.lax.optimization_barrier(wires.pack(*wires.quantize(x[None], wire)))
            return wires.dequantize(*wires.unpack(sent, x.shape, wire), x.dtype)[0]

        on = harness.tpu_mesh("v5e:2x2", {"x": 4})
        x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16", sharding=jax.NamedSharding(on, P()))
        mapped = jax.shard_map(there_and_back, mesh=on, in_specs=P(), out_specs=P())
        text = jax.jit(mapped).lower(x).compile().as_text()
        return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))

    of_copy = 152_000 / 2048  # of a row of 4096 bfloat16 on v5e
    assert cycles(2048) < 6 * of_copy * 2048
    assert cycles(2044) > 18 * of_copy * 2044


@pytest.mark.parametrize("shape, split, concat", [((32, 2048), 0, 0), ((1, 32, 2048), 1, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exchanged_blocks_of_few_rows_are_packed_as_tiles_in_a_row(
    shape: tuple[int, ...], split: int, concat: int, dtype: Any
) -> None:
    n, wire = 4, Wire("int8")
    x = np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)
    at: Any = {"split_axis": split, "concat_axis": concat}
    packs = packed.exchange_bytes(
        "direct", wire, x=jnp.zeros(shape, dtype), group=Group(("x",), (n,)), **at
    )
    assert packs == n * (8 * 2048 + 4 * 8 * 16)

    def program(x: jax.Array) -> Any:
        exchange = functools.partial(pc.all_to_all, axis_name="x", tiled=True, **at)
        x, ours = x.astype(dtype), {"backend": "pallas", "algorithm": "direct"}
        return exchange(x, wire=wire, **ours), exchange(x, **ours), exchange(within(x, wire))

    got, exact, bounds = (each.astype(np.float64) for each in run(program, x, n=n))
    assert got.shape == exact.shape and (got != exact).any()
    assert (np.abs(got - exact) <= bounds * (1 + 2.0**-6) + np.abs(exact) * 2.0**-8).all()


@pytest.mark.parametrize("wire", [Wire("int8", "row"), Wire("int8", 256), "bfloat16"], ids=str)
def test_exchanged_blocks_that_no_kernel_packs_go_by_passes(wire: Any) -> None:
    """Rows with a scale each, groups wider than a tile, and numbers without scales."""
    x = np.random.default_rng(0).normal(size=(4, 32, 2048)).astype(np.float32)
    exchange = functools.partial(pc.all_to_all, axis_name="x", split_axis=0, concat_axis=0)
    of_lax, ours = (
        run(functools.partial(exchange, tiled=True, wire=wire, backend=by), x, n=4)
        for by in ("xla", "pallas")
    )
    np.testing.assert_array_equal(of_lax, ours)


@pytest.mark.full
def test_tiles_in_a_row_are_exchanged_as_they_lie() -> None:
    """Blocks of 32 rows: between two products the kernel packs them, and nothing is moved."""
    pytest.importorskip("libtpu")

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        sent = pc.all_to_all(x @ w, "x", 0, 0, tiled=True, wire="int8")
        return sent @ w

    on = harness.tpu_mesh("v6e:2x2", {"x": 4})
    mapped = jax.shard_map(program, mesh=on, in_specs=(P("x"), P()), out_specs=P("x"))
    operands = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(on, spec))
        for shape, spec in (((4 * 128, 1024), P("x")), ((1024, 1024), P()))
    ]
    text = jax.jit(mapped).lower(*operands).compile().as_text()
    assert "all_to_all_packed" in text
    assert not re.findall(r"(?:copy|transpose|reshape)[.\d]* = ", text)
