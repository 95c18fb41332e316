"""Rows packed by kernels one by one: the bits of `wires`, and rows that stay."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import harness
from packed_rows import WIRES, numbers, on_one
from pallas_collectives import wires
from pallas_collectives.kernels import row_passes
from pallas_collectives.kernels.row_passes import Rows
from pallas_collectives.wires import Wire
from wired_calls import ragged


def check(rows: int, columns: int, wire: Wire, dtype: Any, stay: Any) -> None:
    """That rows arrive with the bits of `wires`, but for those that stay."""
    x = numbers((1, max(1 << 14, rows * columns)), dtype)[0, : rows * columns].reshape(
        rows, columns
    )
    format = Rows.of((columns,), dtype, wire)
    assert format and format.nbytes < columns * x.dtype.itemsize
    stays = np.isin(np.arange(rows), stay)[:, None]

    def program(x: jax.Array) -> jax.Array:
        packed = row_passes.pack(x, format, interpret=True)
        assert packed.nbytes == rows * format.nbytes
        nothing = row_passes.blank(rows, format, interpret=True)
        come = jnp.where(stays[..., None, None], nothing, packed)
        return row_passes.unpack(come, jnp.full_like(x, 7), format, interpret=True)

    want = jnp.where(stays, 7, jax.jit(lambda x: wires.as_sent(x, wire))(x).astype(dtype))
    got = on_one(program, x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bits_are_those_of_passes_of_xla(dtype: Any, wire: Wire) -> None:
    check(48, 4096, wire, dtype, [0, 17, 47])


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(2, 9),
    st.sampled_from(WIRES),
    st.sampled_from(["bfloat16", "float32"]),
    st.lists(st.integers(0, 69)),
)
def test_any_rows(rows: int, words: int, wire: Wire, dtype: Any, stay: list[int]) -> None:
    check(rows, 512 * words, wire, dtype, stay)


@pytest.mark.full
def test_rows_of_several_steps() -> None:
    check(300, 4096, WIRES[0], "bfloat16", [])


@pytest.mark.parametrize(
    "columns, dtype, wire",
    [
        (640, "float32", Wire("int8")),  # no whole words of 128 lanes
        (512, "bfloat16", Wire("int8")),  # scales would take as much as values
        (1024, "float16", Wire("int8")),
        (1 << 15, "float32", Wire("int8", group="row")),  # more than scratch has room for
        (0, "float32", Wire("int8")),
        (1024, "float32", Wire("bfloat16")),
    ],
)
def test_what_is_left_to_passes_of_xla(columns: int, dtype: str, wire: Wire) -> None:
    assert Rows.of((columns,), dtype, wire) is None


@pytest.mark.full
@pytest.mark.parametrize("generation", sorted(harness.GENERATIONS))
def test_whole_programs_compile_for_tpus(generation: str) -> None:
    """An exchange and its gradient in a scan, with remat, of all formats; and XLA fills nothing."""
    pytest.importorskip("libtpu")
    on = harness.tpu_mesh(harness.GENERATIONS[generation], {"x": 8})

    def program(x: jax.Array) -> Any:
        def loss(x: jax.Array, wire: Wire) -> Any:
            def turn(x: jax.Array, _: None) -> Any:
                come = ragged(x, x, 8, wire=wire, wire_backward=wire, backend="pallas")
                return x + come, None

            y, _ = jax.lax.scan(jax.checkpoint(turn), x, length=2)
            return (y.astype(jnp.float32) ** 2).sum()

        return [jax.grad(loss)(x, wire) for wire in WIRES]

    for dtype, columns in (("bfloat16", 7168), ("float32", 1024)):
        x = jax.ShapeDtypeStruct((8 * 100, columns), dtype, sharding=jax.NamedSharding(on, P("x")))
        mapped = jax.shard_map(program, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        text = jax.jit(mapped).lower(x).compile().as_text()
        names = set(re.findall(r"(wire_\w+)/pallas_call", text))
        assert names == {"wire_pack_rows", "wire_blank_rows", "wire_unpack_rows"}
