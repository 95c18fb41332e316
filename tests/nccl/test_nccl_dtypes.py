"""The dtype table."""

import jax.numpy as jnp
import pytest

from pallas_collectives.nccl import dtypes

NARROW = ["int1", "uint1", "int2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn"]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("bool", 1), ("int16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("complex128", 16)],
)
def test_moving_is_of_bytes(dtype, width):
    assert dtypes.moved(jnp.dtype(dtype)) == (1, width)


@pytest.mark.parametrize("dtype", NARROW)
def test_types_narrower_than_a_byte_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"{dtype}.*not whole bytes.*cast to int8"):
        dtypes.moved(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("float32", "sum", (7, 1, 0)),
        ("bfloat16", "max", (9, 1, 2)),
        ("float8_e4m3fn", "sum", (10, 1, 0)),
        ("float8_e5m2", "min", (11, 1, 3)),
        ("complex64", "sum", (7, 2, 0)),
        ("complex128", "avg", (8, 2, 4)),
        ("bool", "max", (1, 1, 2)),
        ("uint64", "prod", (5, 1, 1)),
    ],
)
def test_reducing(dtype, op, expected):
    assert dtypes.reduced(jnp.dtype(dtype), op) == expected


@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [
        ("bool", "sum", "cannot sum bool: use 'max'.*int32"),
        ("complex64", "max", "cannot max complex64"),
        ("int16", "sum", "cannot reduce int16: cast to int32"),
        ("float8_e4m3b11fnuz", "sum", "cannot reduce float8_e4m3b11fnuz: cast to float32"),
    ],
)
def test_what_nccl_cannot_reduce(dtype, op, message):
    with pytest.raises(TypeError, match=message):
        dtypes.reduced(jnp.dtype(dtype), op)


def test_an_unknown_reduction_is_named():
    with pytest.raises(ValueError, match=r"'mean'.*sum, prod, max, min, avg"):
        dtypes.reduced("float32", "mean")
