"""How JAX's dtypes travel through NCCL: as bytes when moved, as numbers when reduced.

NCCL itself turns a copying collective of any type into one of bytes, so moving serves every
dtype that has whole bytes. A reduction needs a type that NCCL can add: complex numbers are added
as pairs of reals; bool knows only "any" (max) and "all" (min).
"""

import functools

import jax
import numpy as np

from pallas_collectives.annotations import DType

# ncclDataType_t and ncclRedOp_t of nccl.h (NCCL 2.28).
_BYTE = 1
_NUMBERS = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
_REALS_OF = {"complex64": "float32", "complex128": "float64"}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


def width(dtype: str) -> int:
    """Bytes of an element."""
    return np.dtype(dtype).itemsize


@functools.cache
def moved(dtype: DType | str) -> tuple[int, int]:
    """(ncclDataType_t, NCCL elements per element) for a collective that only moves `dtype`.

    Raises TypeError for types narrower than a byte, which XLA packs two or more to a byte.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject or jax.dtypes.itemsize_bits(dtype) < 8:
        raise TypeError(
            f"cannot move {dtype.name} through NCCL: its elements are not whole bytes; "
            "cast to int8 or uint8 first"
        )
    return _BYTE, dtype.itemsize


@functools.cache
def reduced(dtype: DType | str, op: str) -> tuple[int, int, int]:
    """(ncclDataType_t, NCCL elements per element, ncclRedOp_t) for reducing `dtype` by `op`.

    op: "sum", "prod", "max", "min" or "avg".
    Raises ValueError for another op and TypeError where NCCL cannot reduce `dtype` by `op`.
    """
    if op not in _OPS:
        raise ValueError(f"unknown reduction {op!r}: must be one of {', '.join(_OPS)}")
    name = np.dtype(dtype).name
    if name == "bool":
        if op not in ("max", "min"):
            raise TypeError(
                f"cannot {op} bool: use 'max' (any) or 'min' (all), or cast to int32 to count"
            )
        return _BYTE, 1, _OPS[op]
    if name in _REALS_OF:
        if op not in ("sum", "avg"):
            raise TypeError(f"cannot {op} {name}: complex numbers are summed as pairs of reals")
        return _NUMBERS[_REALS_OF[name]], 2, _OPS[op]
    if name not in _NUMBERS:
        wider = {"int16": "int32", "uint16": "uint32"}.get(name, "float32")
        raise TypeError(f"NCCL cannot reduce {name}: cast to {wider} first")
    return _NUMBERS[name], 1, _OPS[op]
