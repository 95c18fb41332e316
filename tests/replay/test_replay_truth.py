"""Replay's events against those of TPU interpret mode on the same kernel: every DMA, signal and
wait, in order.
"""

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_collectives
import replay_kernels as kernels
from benchmarks.cases import CASES, Case
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.replay import operations
from pallas_collectives.replay.machine import GENERATIONS
from pallas_collectives.replay.program import Program, Signal, Start, Wait, at
from pallas_collectives.replay.trace_program import trace

# The interpreter's own functions, which it calls once per event. Private to JAX: there is no public
# record of them.
_INTERPRETER = "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
_RECORDED = ("dma_start", "dma_wait", "semaphore_signal", "semaphore_wait")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[Any]]]:
    """Per device, the interpreter's calls as (name, arguments)."""
    module = importlib.import_module(_INTERPRETER)
    events: dict[int, list[Any]] = defaultdict(list)

    def recording(name: str, function: Any) -> Any:
        signature = inspect.signature(function)

        def record(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            events[int(given["device_id"])].append((name, given))
            return function(*args, **kwargs)

        return record

    for name in _RECORDED:
        monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    yield events
    pltpu.reset_tpu_interpret_mode_state()


def _same(calls: list[Any], program: Program, device: int) -> int:
    """Asserts that the interpreter's calls are what replay steps for a device; returns how many.

    Buffers and semaphores have other numbers there, and new ones at every visit of a scope: each of
    its numbers must stand for one of replay's, and for a scope's several may.
    """
    columns = [
        (position, column)
        for _, position, column in program.of_device(device)
        if isinstance(column, Start | Signal | Wait) and not getattr(column, "implicit", False)
    ]
    numbers: dict[Any, int] = {}

    def same_thing(kind: str, theirs: Any, ours: Any, name: str) -> None:
        if theirs is None or ours is None:
            assert theirs is ours
            return
        known = numbers.setdefault((kind, int(theirs)), int(ours))
        assert known == int(ours)
        others = [k for k, v in numbers.items() if k[0] == kind and v == known]
        assert len(others) == 1 or "(scoped)" in name

    def same_view(buffer_id: Any, transforms: Any, ours: Any, position: int) -> None:
        same_thing("buffer", buffer_id, ours.buffer.id, ours.buffer.name)
        view = ours.buffer.view()
        for transform in transforms:
            decoded = operations._transform(jax.tree.map(int, transform))
            view = view.transformed(decoded, lambda item: item)
        assert _extent(view, 0) == _extent(ours, position)

    def same_semaphore(theirs: Any, ours: Any) -> None:
        if theirs is None or ours is None:
            assert theirs is ours
            return
        semaphore = program.semaphores[ours]  # the next kernel's have the same numbers again there
        same_thing(f"semaphore of {semaphore.kernel}", theirs, ours, semaphore.name)

    assert [name for name, _ in calls] == [_kind(column) for _, column in columns]
    for (name, given), (position, column) in zip(calls, columns, strict=True):
        target = at(getattr(column, "target", None), position)
        if name == "dma_start":
            same_view(given["src_id"], given["src_transforms"], column.src, position)
            same_view(given["dst_id"], given["dst_transforms"], column.dst, position)
            same_semaphore(given["src_sem_id"], at(column.src_sem, position))
            same_semaphore(given["dst_sem_id"], at(column.dst_sem, position))
            theirs = given["dst_device_id"]
        else:
            same_semaphore(given["sem_id"], at(column.sem, position))
            key = {"dma_wait": "size", "semaphore_wait": "value", "semaphore_signal": "inc"}[name]
            assert int(given[key]) == at(column.value, position)
            theirs = given.get("target_device_id")
        assert (device if theirs is None else int(theirs)) == (device if target is None else target)
    return len(columns)


def _kind(column: Any) -> str:
    if isinstance(column, Wait):
        return "dma_wait" if column.is_dma else "semaphore_wait"
    return "dma_start" if isinstance(column, Start) else "semaphore_signal"


def _extent(view: Any, position: int) -> Any:
    """A view's first byte and its dimensions of more than one element."""
    dims = [(at(size, position), stride) for size, stride in view.dims if at(size, position) != 1]
    return int(at(view.base, position)), dims


def _mesh(n: int) -> jax.sharding.Mesh:
    auto = jax.sharding.AxisType.Auto
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(auto,))


_KERNELS: dict[str, Any] = {
    "ring": lambda x, n, i: kernels.ring(x, n, interpret=i),
    "unrolled": lambda x, n, i: kernels.ring(x, n, unrolled=True, interpret=i),
    "relay": lambda x, n, i: kernels.relay(x, n, rounds=5, interpret=i),
    "uneven": lambda x, n, i: kernels.uneven(x, n, interpret=i),
}


# In VMEM on three devices, in HBM on two and eight; the rest is the same program elsewhere.
_OURS = [
    pytest.param(
        case,
        algorithm + space,
        n,
        marks=() if (space == ":vmem") == (n == 3) else pytest.mark.slow,
        id=f"{case.name}-{algorithm}{space}-{n}",
    )
    for case in CASES
    for algorithm in ALGORITHMS[case.op]
    for space in ("", ":vmem")
    for n in (2, 3, 8)
]


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", _KERNELS)
def test_events_equal_the_interpreters(name: str, n: int, interpreted: Any) -> None:
    params = pltpu.InterpretParams()
    function = kernels.sharded(lambda x: _KERNELS[name](x, n, params), _mesh(n))
    _compare(function, np.ones((16 * n, 128), np.float32), n, interpreted)


@pytest.mark.parametrize(("case", "algorithm", "n"), _OURS)
def test_events_of_our_collectives_equal_the_interpreters(
    case: Case, algorithm: str, n: int, interpreted: Any
) -> None:
    mesh = _mesh(n)

    def body(x: Any) -> Any:
        return case.call(pallas_collectives, x[0], "x", backend="pallas", algorithm=algorithm)[None]

    x = np.ones((n, *case.operand(n, 32)), np.float32)
    _compare(kernels.sharded(body, mesh), x, n, interpreted)


def _compare(function: Any, x: np.ndarray, n: int, interpreted: Any) -> None:
    jax.block_until_ready(jax.jit(function)(x))
    program, _ = trace(function, x, generation=GENERATIONS["v5e"])
    assert sorted(interpreted) == list(range(n))
    for device in range(n):
        assert _same(interpreted[device], program, device) > 0


def test_sizes_in_scalar_memory_are_followed(interpreted: Any) -> None:
    n = 4
    sizes = np.array([[8, 32], [16, 8], [24, 16], [32, 24]], np.int32)  # own rows, the left's rows
    params = pltpu.InterpretParams()
    body = lambda rows, x: kernels.ragged(rows[0], x, n, interpret=params)  # noqa: E731
    function = kernels.sharded(body, _mesh(n), n_args=2)
    x = np.ones((32 * n, 128), np.float32)
    jax.block_until_ready(jax.jit(function)(sizes, x))
    program, _ = trace(function, sizes, x, generation=GENERATIONS["v5e"])
    for device in range(n):
        assert _same(interpreted[device], program, device) > 0
        waits = [given["size"] for name, given in interpreted[device] if name == "dma_wait"]
        assert [int(w) for w in waits] == [512 * rows for rows in sizes[device]]
