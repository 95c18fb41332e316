"""Matrix products by cuBLASLt, XLA's own library for them, as C calls that a tape can hold.

A product is described once for each GPU, `prepared`: cuBLASLt's descriptors, and the kernel that
its heuristic ranks first. Each call then puts it on a stream. Matrices are row-major here and
column-major there, so that cuBLASLt is asked for the transposed product, W^T X^T.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pallas_collectives.nccl import cuda
from pallas_collectives.nccl.errors import CallError, LibraryError
from pallas_collectives.nccl.library import installed, loaded
from pallas_collectives.nccl.tape import Address, address_in

# cuBLASLt's numbers for what is named here.
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3
_BATCH_COUNT, _BATCH_PITCH = 5, 6
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_COMPUTE_TYPE = 2  # partial sums, where a product is cut along its depth, are of float32

ALIGNED = 16  # bytes: of every address, row and pitch
_WORKSPACE = 32 << 20  # bytes on each GPU; what NVIDIA recommends for Hopper
MULTIPLIED = ("bfloat16", "float16")
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)

Call = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Product:
    """D = X W, or D = C + X W, of row-major matrices; C, D and what is added up are in one dtype.

    Attributes:
      batch: how many X there are, for one W.
      rows, depth, columns: X is (rows, depth) and W (depth, columns).
      transposed: W is (columns, depth).
      dtype, result: the dtypes of X and W, and of C and D.
      pitches: elements from one X of the batch to the next, and so of C and of D.
    """

    batch: int
    rows: int
    depth: int
    columns: int
    transposed: bool
    dtype: str
    result: str
    pitches: tuple[int, int, int]

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest of its matrices."""
        last = self.batch - 1
        x, _, d = (last * pitch for pitch in self.pitches)
        operands = max(x + self.rows * self.depth, self.depth * self.columns)
        result = d + self.rows * self.columns
        return max(operands * _BYTES[self.dtype], result * _BYTES[self.result])


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A product on one GPU.

    Attributes:
      handle, description, layouts, algorithm: cuBLASLt's; layouts of W, X, C and D.
      workspace: an address.
    """

    handle: ctypes.c_void_p
    description: ctypes.c_void_p
    layouts: Sequence[ctypes.c_void_p]
    algorithm: _Algorithm
    workspace: int

    def multiply(
        self, call: Call, x: Address, w: Address, c: Address | None, d: Address, stream: Address
    ) -> None:
        """D = X W on `stream`, or D = C + X W; call: (name of a C function, *arguments).

        x, w, c, d: addresses; c may be d, and is None where nothing is added.
        """
        of_w, of_x, of_c, of_d = self.layouts
        adds = c is not None
        call(
            "cublasLtMatmul", self.handle, self.description, ctypes.byref(_ONE), w, of_w, x, of_x,
            ctypes.byref(_ONE if adds else _ZERO), c if adds else d, of_c if adds else of_d, d,
            of_d, ctypes.byref(self.algorithm), self.workspace, _WORKSPACE, stream,
        )  # fmt: skip


class Library:
    """A loaded cuBLASLt."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)

    def address(self, function: str) -> int:
        """The address of a C function."""
        return address_in(self._lib, function)

    def failed(self, function: str, result: int, where: str = "") -> CallError:
        """A result that is not success."""
        self._lib.cublasLtGetStatusString.restype = ctypes.c_char_p
        text = self._lib.cublasLtGetStatusString(result) or b"unknown status"
        return CallError(function, result, text.decode(), where)

    def call(self, name: str, *args: Any) -> None:
        """Makes a call; raises CallError for a result that is not success."""
        words = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        if result := getattr(self._lib, name)(*words):
            raise self.failed(name, result)

    def prepare(self, driver: cuda.Driver, ordinal: int, product: Product) -> Prepared:
        """Describes a product, and takes the kernel that cuBLASLt ranks first for it."""
        p, code, to = product, _TYPES[product.dtype], _TYPES[product.result]
        handle, workspace = _room(driver, ordinal)
        description = ctypes.c_void_p()
        make = ctypes.byref(description)
        self.call("cublasLtMatmulDescCreate", make, _COMPUTE_FLOAT32, _TYPES["float32"])
        self._set("MatmulDesc", description, _TRANSPOSE_A, ctypes.c_int32(p.transposed))
        of_w = (p.depth, p.columns) if p.transposed else (p.columns, p.depth)
        sizes = [(code, *of_w, 0), (code, p.depth, p.rows, p.pitches[0])]
        sizes += [(to, p.columns, p.rows, pitch) for pitch in p.pitches[1:]]
        layouts = [self._layout(p.batch, *size) for size in sizes]
        wish, found = ctypes.c_void_p(), _Found()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(wish))
        most = ctypes.c_uint64(_WORKSPACE)
        self._set("MatmulPreference", wish, _MOST_WORKSPACE, most)
        self._set("MatmulPreference", wish, _REDUCTIONS, ctypes.c_uint32(_IN_COMPUTE_TYPE))
        for alignment in _ALIGNMENTS:
            self._set("MatmulPreference", wish, alignment, ctypes.c_uint32(ALIGNED))
        with driver.device(ordinal):
            count = ctypes.c_int()
            self.call(
                "cublasLtMatmulAlgoGetHeuristic", handle, description, *layouts, wish, 1,
                ctypes.byref(found), ctypes.byref(count),
            )  # fmt: skip
        if not count.value:
            raise LibraryError(f"cuBLASLt has no kernel for {product}: name algorithm='unfused'")
        prepared = Prepared(handle, description, layouts, found.algorithm, workspace)
        # Its kernels are loaded by being run, before a stream is there that waits for another's:
        # beside programs that are under way, which have the workspace.
        room = _WORKSPACE + p.most_bytes + ALIGNED
        with driver.outside_captures(), driver.workspace(ordinal, room) as (own, stream):
            alone, at = dataclasses.replace(prepared, workspace=own), own + _WORKSPACE
            for c in (None, at + ALIGNED):  # C in D's place would have to be laid out as D
                alone.multiply(self.call, at, at, c, at, stream)
        return prepared

    def _layout(
        self, batch: int, code: int, rows: int, columns: int, pitch: int
    ) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        make = ctypes.byref(layout)
        self.call("cublasLtMatrixLayoutCreate", make, code, rows, columns, rows)
        self._set("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(batch))
        self._set("MatrixLayout", layout, _BATCH_PITCH, ctypes.c_int64(pitch))
        return layout

    def _set(
        self,
        kind: str,
        of: ctypes.c_void_p,
        attribute: int,
        value: ctypes.c_int32 | ctypes.c_int64 | ctypes.c_uint32 | ctypes.c_uint64,
    ) -> None:
        size = ctypes.sizeof(value)
        self.call(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), size)


@functools.cache
def library() -> Library:
    """The cuBLASLt of this process: XLA's, if it has one, else that of NVIDIA's wheel.

    Raises LibraryError where there is neither.
    """
    wheels = (installed(wheel, "libcublasLt.so.*") for wheel in ("nvidia.cu13", "nvidia.cublas"))
    path = loaded("libcublasLt.so") or next(filter(None, wheels), None)
    if path is None:
        raise LibraryError("no libcublasLt found: install JAX with its CUDA wheels, 'jax[cuda13]'")
    return Library(path)


@functools.cache
def _room(driver: cuda.Driver, ordinal: int) -> tuple[ctypes.c_void_p, int]:
    """cuBLASLt's handle on a GPU, and the workspace of its products, one after the other."""
    handle = ctypes.c_void_p()
    with driver.outside_captures(), driver.device(ordinal):
        library().call("cublasLtCreate", ctypes.byref(handle))
        return handle, driver.allocate(ordinal, _WORKSPACE)


@functools.cache
def prepared(driver: cuda.Driver, ordinal: int, product: Product) -> Prepared:
    """A product on one GPU, made ready once."""
    return library().prepare(driver, ordinal, product)
