"""One table of collectives: how each is called, and what it must return.

Every row is run on every backend and algorithm against `jax.lax` and against numpy. A row's `call`
takes the module to call (ours or `jax.lax`), so that both get the very same arguments.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

import harness
import pallas_collectives
from pallas_collectives import catalogue
from pallas_collectives.catalogue import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to call a collective over axis "x".

    Attributes:
      op: the canonical collective, a key of `ALGORITHMS`.
      name: what is special about the row.
      call: (module, x, **how) -> this device's result.
      shape: this device's operand, for n devices.
      reference: (operands of all devices) -> results of all devices, in numpy.
      dtypes: the dtypes to run it in.
      in_lax: whether lax runs it on a CPU.
    """

    op: str
    name: str
    call: Callable[..., Any]
    shape: Callable[[int], tuple[int, ...]]
    reference: Callable[[np.ndarray], np.ndarray]
    dtypes: tuple[str, ...] = ("float32",)
    in_lax: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


# One dtype for each way in which they are laid out and added; all of them are test_operands's.
ADDED = ("float32", "bfloat16", "int8", "float8_e5m2", "complex64")
COMPARED = ("float32", "bfloat16", "uint32", "bool")
MOVED = ("float32", "bfloat16", "bool", "complex64")


def _to_all(result: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(result, (n, *result.shape))


def _gather(axis: int, tiled: bool) -> Callable[[np.ndarray], np.ndarray]:
    join = np.concatenate if tiled else np.stack
    return lambda xs: _to_all(join(list(xs), axis=axis), len(xs))


def _gather_row(name: str, shape: tuple[int, ...], axis: int, tiled: bool, *dtypes: str) -> Row:
    return Row(
        "all_gather",
        name,
        lambda m, x, **how: m.all_gather(x, "x", axis=axis, tiled=tiled, **how),
        lambda n: shape,
        _gather(axis, tiled),
        dtypes or ("float32",),
    )


def exchanged(split: int, concat: int, tiled: bool) -> Callable[[np.ndarray], np.ndarray]:
    def reference(xs: np.ndarray) -> np.ndarray:
        n = len(xs)
        if tiled:
            blocks = [np.split(x, n, axis=split) for x in xs]
        else:
            blocks = [[x.take(p, axis=split) for p in range(n)] for x in xs]
        join = np.concatenate if tiled else np.stack
        return np.stack([join([blocks[s][p] for s in range(n)], axis=concat) for p in range(n)])

    return reference


def _exchange_row(
    name: str,
    shape: Callable[[int], tuple[int, ...]],
    split: int,
    concat: int,
    *dtypes: str,
    tiled: bool = True,
) -> Row:
    return Row(
        "all_to_all",
        name,
        lambda m, x, **how: m.all_to_all(x, "x", split, concat, tiled=tiled, **how),
        shape,
        exchanged(split, concat, tiled),
        dtypes or ("float32",),
    )


Perm = list[tuple[int, int]]


def _permute_row(
    name: str, perm: Callable[[int], Perm], shape: tuple[int, ...], *dtypes: str
) -> Row:
    def reference(xs: np.ndarray) -> np.ndarray:
        result = np.zeros_like(xs)
        for source, target in perm(len(xs)):
            result[target] = xs[source]
        return result

    return Row(
        "ppermute",
        name,
        lambda m, x, **how: m.ppermute(x, "x", perm(jax.lax.axis_size("x")), **how),
        lambda n: shape,
        reference,
        dtypes or ("float32",),
    )


def routed(send: np.ndarray, into: int = 0) -> tuple[np.ndarray, ...]:
    """input_offsets, send_sizes, output_offsets, recv_sizes for given sizes (sender, slice).

    Rows are packed, from row `into` of receivers.
    """
    n, slices = len(send), send.shape[1] // len(send)
    received = send.reshape(n, n, slices).transpose(1, 0, 2).reshape(n, -1)
    starts = into + np.cumsum(received, axis=1) - received
    at_receiver = starts.reshape(n, n, slices).transpose(1, 0, 2).reshape(n, -1)
    tables = (np.cumsum(send, axis=1) - send, send, at_receiver, received)
    return tuple(t.astype(np.int32) for t in tables)


def ragged_arguments(n: int, slices: int = 1) -> tuple[np.ndarray, ...]:
    """The four arguments for n devices: 0 to 3 rows a slice."""
    sender, receiver, j = np.ogrid[:n, :n, :slices]
    return routed(((2 * sender + 3 * receiver + j) % 4).reshape(n, -1), into=1)


def ragged_reference(
    operands: np.ndarray, outputs: np.ndarray, arguments: tuple[np.ndarray, ...]
) -> np.ndarray:
    """What `ragged_all_to_all` means, slice by slice."""
    n, results = len(operands), outputs.copy()
    input_offsets, send_sizes, output_offsets, _ = arguments
    slices = send_sizes.shape[1] // n
    most = min(operands.shape[1], outputs.shape[1])
    for device in range(n):
        for i, size in enumerate(np.clip(send_sizes[device], 0, most)):
            start = np.clip(input_offsets[device, i], 0, operands.shape[1] - size)
            to = np.clip(output_offsets[device, i], 0, outputs.shape[1] - size)
            results[i // slices, to : to + size] = operands[device, start : start + size]
    return results


def ragged_gradients(
    weights: np.ndarray, rows: int, arguments: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of (result * weights).sum() with respect to operands (of `rows`) and outputs.

    Of rows that go to one place and are the only ones there; a place's own row gets none.
    """
    n, row = len(weights), weights.shape[2:]
    number = np.arange(1, n * rows + 1, dtype=np.int64).reshape(n, rows)
    came_from = ragged_reference(number, np.zeros(weights.shape[:2], np.int64), arguments)
    flat = np.zeros((1 + n * rows, *row), weights.dtype)
    flat[came_from.reshape(-1)] = weights.reshape(-1, *row)
    kept = came_from.reshape(*came_from.shape, *(1 for _ in row)) == 0
    return flat[1:].reshape(n, rows, *row), np.where(kept, weights, np.zeros_like(weights))


def _ragged_row(name: str, row: tuple[int, ...], slices: int, *dtypes: str) -> Row:
    def call(m: Any, x: jax.Array, **how: Any) -> jax.Array:
        tables = ragged_arguments(jax.lax.axis_size("x"), slices)
        arguments = (jnp.asarray(table)[jax.lax.axis_index("x")] for table in tables)
        return m.ragged_all_to_all(x, x[::-1], *arguments, axis_name="x", **how)

    return Row(
        "ragged_all_to_all",
        name,
        call,
        lambda n: (2 + 3 * n * slices, *row),
        lambda xs: ragged_reference(xs, xs[:, ::-1], ragged_arguments(len(xs), slices)),
        dtypes or ("float32",),
        in_lax=False,
    )


def rotation(n: int) -> Perm:
    return [(p, (p + 1) % n) for p in range(n)]


def _scatter_row(name: str, shape: tuple[int, ...], axis: int, tiled: bool, *dtypes: str) -> Row:
    def operand(n: int) -> tuple[int, ...]:
        full = list(shape)
        full[axis] *= n
        return tuple(full)

    def reference(xs: np.ndarray) -> np.ndarray:
        blocks = np.stack(np.split(_wide(xs).sum(axis=0), len(xs), axis=axis))
        return blocks if tiled else np.squeeze(blocks, 1 + axis)

    return Row(
        "reduce_scatter",
        name,
        lambda m, x, **how: m.psum_scatter(x, "x", scatter_dimension=axis, tiled=tiled, **how),
        operand,
        reference,
        dtypes,
    )


def _reduce_row(function: str, reduce: Any, name: str, shape: tuple[int, ...], *dtypes: str) -> Row:
    return Row(
        "all_reduce",
        f"{function}-{name}",
        lambda m, x, **how: getattr(m, function)(x, "x", **how),
        lambda n: shape,
        lambda xs: _to_all(reduce(_wide(xs), axis=0), len(xs)),
        dtypes,
    )


def _wide(xs: np.ndarray) -> np.ndarray:
    """In a dtype in which the test's small integers add exactly."""
    return xs.astype(np.complex128 if np.iscomplexobj(xs) else np.float64)


WRITTEN = [
    _gather_row("rows", (32, 128), 0, True, *MOVED),
    _gather_row("columns", (8, 256), 1, True, "float32", "uint32"),
    _gather_row("last", (16, 256), -1, True, "bfloat16"),
    _gather_row("stacked", (16, 128), 0, False, "float32", "int8"),
    _gather_row("middle", (2, 16, 128), 1, True, "bfloat16"),
    _gather_row("stacked-last", (4, 6), -1, False, "float32", "bool"),
    _gather_row("odd", (5, 3), 0, True, "float32", "bool"),
    _gather_row("odd-columns", (5, 129), 1, True, "float32", "int8"),
    _gather_row("vector", (2048,), 0, True, "float32", "bfloat16"),
    _gather_row("single", (1,), 0, True, "float32", "complex64"),
    _gather_row("scalar", (), 0, False, "float32", "bool"),
    _gather_row("large", (4096, 256), 0, True, "float32"),
    _gather_row("empty", (4, 0), 0, True, "float32"),
    _scatter_row("rows", (32, 128), 0, True, *ADDED),
    _scatter_row("columns", (16, 256), 1, True, "float32", "bfloat16"),
    _scatter_row("middle", (2, 16, 128), 1, True, "float32"),
    _scatter_row("one-tile", (8, 128), 0, True, "float32"),
    _scatter_row("odd", (5, 3), 0, True, "float32", "int8"),
    _scatter_row("last", (3, 7), 1, True, "int32"),
    _scatter_row("dropped", (1, 5, 6), 0, False, "float32", "complex64"),
    _scatter_row("vector", (2048,), 0, True, "float32"),
    _scatter_row("empty", (4, 0), 0, True, "float32"),
    _reduce_row("psum", np.sum, "tiles", (32, 256), *ADDED),
    _reduce_row("psum", np.sum, "odd", (5, 3), "float32", "bool"),
    _reduce_row("psum", np.sum, "scalar", (), "float32", "int32"),
    _reduce_row("psum", np.sum, "large", (1024, 256), "float32"),
    _reduce_row("pmax", np.max, "tiles", (16, 128), *COMPARED),
    _reduce_row("pmin", np.min, "odd", (7, 9), "float32", "int8"),
    _reduce_row("psum", np.sum, "empty", (0, 4), "float32"),
    _exchange_row("rows", lambda n: (n * 32, 128), 0, 0, *MOVED),
    _exchange_row("rows-to-columns", lambda n: (n * 16, 128), 0, 1, "bfloat16"),
    _exchange_row("columns-to-rows", lambda n: (2, 8, n * 128), 2, 0),
    _exchange_row("only-split-aligned", lambda n: (n * 8, 5), 0, 1),
    _exchange_row("only-concat-aligned", lambda n: (3, n * 5), 1, 0, "int8"),
    _exchange_row("only-concat-aligned-3d", lambda n: (2, 8, n * 3), 2, 1),
    _exchange_row("stacked", lambda n: (n, 8, 128), 0, 1, tiled=False),
    _exchange_row("odd", lambda n: (5, n * 3), 1, 0, "float16", "bool", "complex64"),
    _exchange_row("vector", lambda n: (n * 3,), 0, 0, "float32", "bool"),
    _exchange_row("empty", lambda n: (n, 0), 0, 1),
    _permute_row("rotate", rotation, (8, 128), *MOVED),
    _permute_row(
        "partial", lambda n: [(0, n - 1), (n - 1, n // 2)], (3, 5), "float32", "complex64"
    ),
    _permute_row("reverse", lambda n: [(p, n - 1 - p) for p in range(n)], (7,), "bool"),
    _permute_row("scalar", lambda n: [(0, 1)], (), "float32", "complex64"),
    _permute_row("nothing", lambda n: [], (3,), "float32"),
    _ragged_row("tiles", (8, 128), 1, "float32", "int8"),
    _ragged_row("matrix", (256,), 2, "bfloat16"),
    _ragged_row("vector", (), 1, "int32", "complex64"),
    _ragged_row("odd", (5, 3), 3, "float16", "bool"),
]


def rows() -> list[Row]:
    """The rows above and, of a collective of the catalogue that has none there, its example."""
    written = {row.op for row in WRITTEN}
    others = (c for c in catalogue.COLLECTIVES.values() if c.name not in written)
    return [*WRITTEN, *map(_example_row, others)]


def _example_row(collective: catalogue.Collective) -> Row:
    function, example = next(iter(collective.functions)), collective.example
    return Row(
        collective.name,
        "example",
        lambda m, x, **how: example.call(m, x, "x", **how),
        lambda n: example.operand(n, 8),
        lambda xs: example.reference(_wide(xs) if collective.adds else xs),
        dtypes=ADDED if collective.adds else MOVED,
        in_lax=example.lax_everywhere and hasattr(jax.lax, function),
    )


ROWS = rows()
WITHOUT_RACES = harness.Adversaries(detect_races=False)  # one, for JAX's caches


def check(
    row: Row, n: int, dtype: str, how: dict[str, Any], *, adversaries: bool = False, seed: int = 0
) -> None:
    """Runs a row on n devices and compares it with numpy and, where lax runs on a CPU, with lax.

    With `adversaries`, once under each, of one compiled program.
    """
    x = harness.random((n, *row.shape(n)), dtype, seed)
    program = _program(row, n, pallas_collectives, **how)
    params = harness.EITHER if adversaries else WITHOUT_RACES
    for mode in harness.ADVERSARIES if adversaries else ("on_wait",):
        with pltpu.force_tpu_interpret_mode(params):
            got = params.under(mode, lambda: np.asarray(program(x)))
        assert not harness.race_reported(), mode
        np.testing.assert_array_equal(got, row.reference(x).astype(got.dtype), mode)
        if row.in_lax:
            want = _lax(row, n, dtype, seed)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want, mode)


def _program(row: Row, n: int, module: Any, **how: Any) -> Callable[..., Any]:
    return harness.per_device(lambda a: row.call(module, a, **how), harness.mesh(n))


@functools.lru_cache(maxsize=8)  # every algorithm of a row in turn
def _lax(row: Row, n: int, dtype: str, seed: int) -> np.ndarray:
    x = harness.random((n, *row.shape(n)), dtype, seed)
    return np.asarray(_program(row, n, jax.lax)(x))


def algorithms(row: Row) -> list[str]:
    """Every algorithm of a row's collective, in HBM or in VMEM; of the next row the other way."""
    of_op = [str(other) for other in rows() if other.op == row.op]
    spaces = ("", ":vmem")
    names = [
        f"{a}{spaces[(of_op.index(str(row)) + i) % 2]}" for i, a in enumerate(ALGORITHMS[row.op])
    ]
    # It is no shift by one.
    return [name for name in names if row.name != "reverse" or not name.startswith("partners")]
