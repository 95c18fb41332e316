"""The all-reduce along a line: its sums' order and rounding, its faults, its time and memory."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives
import replay_kernels
from channel_faults import Patch, no_credits, no_wait, one_semaphore
from pallas_collectives.kernels import all_reduce_line
from pallas_collectives.kernels.all_reduce_line import IN_FLIGHT, SLOTS, Scratch
from pallas_collectives.kernels.machinery.channel import Channel
from pallas_collectives.kernels.machinery.combine import wide
from pallas_collectives.replay import Machine, Report, bound, replay
from pallas_collectives.topology.groups import Group, only_if, wrap_step

TILE = 4 << 10  # bytes
OPS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def reduced(
    x: jax.Array, n: int, params: Any = False, *, op: str = "sum", vmem: bool = False
) -> jax.Array:
    return all_reduce_line.line(x, Group(("x",), (n,)), op=op, vmem=vmem, interpret=params)


def in_order(x: np.ndarray, op: str) -> np.ndarray:
    """What the docstring says: a term at a time from either end, rounded once per hop."""
    dtype, middle = x.dtype, len(x) // 2
    terms = x.astype(wide(dtype))

    def from_end(*places: int) -> np.ndarray:
        total = terms[places[0]]
        for place in places[1:]:
            total = OPS[op](total, terms[place]).astype(dtype).astype(total.dtype)
        return total

    total = OPS[op](from_end(*range(middle)), terms[middle])
    if middle + 1 < len(x):
        total = OPS[op](total, from_end(*range(len(x) - 1, middle, -1)))
    return total.astype(dtype)


def found_wrong(
    x: np.ndarray, *modes: str, hold: int | None = None, op: str = "sum", vmem: bool = False
) -> list[str]:
    """The modes in which a race or other bits than `in_order` has are found, on any device."""
    n = len(x)

    def program(block: jax.Array) -> jax.Array:
        block = block if hold is None else harness.delayed(block, hold)
        return reduced(block, n, harness.EITHER, op=op, vmem=vmem)

    run = harness.per_device(program, harness.mesh(n), check_vma=False)
    return harness.caught_under(modes, lambda: run(x), np.broadcast_to(in_order(x, op), x.shape))


def operand(n: int, tiles: int, dtype: Any = "float32") -> np.ndarray:
    """Numbers whose sum depends on the order in which they are added."""
    rows = tiles * TILE // (128 * jnp.dtype(dtype).itemsize)
    return (100 * np.random.default_rng(n).standard_normal((n, 1, rows, 128))).astype(dtype)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile is a chunk."""
    monkeypatch.setattr(all_reduce_line, "chunk_bytes", lambda: TILE)
    monkeypatch.setattr(all_reduce_line, "SMALLEST_CHUNK", TILE)


def chunks_and_window(x: np.ndarray) -> tuple[int, int]:
    """How many chunks an operand is cut into, and how many finished ones have a semaphore each."""
    chunks = all_reduce_line.chunks_of(x.shape[1:], x.dtype, len(x))
    scratch = Scratch.of(chunks.chunk_shape, x.dtype, len(x))
    return chunks.chunks, scratch.outwards.arrived.shape[-1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "n, tiles, dtype, op, vmem, hold",
    [
        (2, 12, "bfloat16", "sum", False, 0),
        (3, 14, "float32", "sum", True, 0),
        (4, 20, "int32", "max", False, 2),
        (5, 20, "bfloat16", "sum", True, 2),
        (5, 20, "float32", "sum", False, 4),
        (8, 36, "bfloat16", "sum", False, 1),
        (3, 12, "int32", "min", True, 1),
    ],
)
def test_all_devices_have_the_documented_bits_however_late_one_is(
    n: int, tiles: int, dtype: str, op: str, vmem: bool, hold: int
) -> None:
    """More chunks than slots, and than semaphores for finished ones."""
    x = operand(n, tiles, dtype)
    chunks, window = chunks_and_window(x)
    assert chunks == tiles > max(SLOTS, window)
    assert not found_wrong(x, *harness.ADVERSARIES, hold=hold, op=op, vmem=vmem)


def test_the_order_shows_in_the_bits() -> None:
    """Else the test above could not tell one order, or one rounding, from another."""
    x = operand(5, 20)
    for other in (in_order(x[::-1], "sum"), x.sum(axis=0)):
        assert not np.array_equal(in_order(x, "sum"), other)
    x = operand(5, 20, "bfloat16")
    rounded_once = x.astype(np.float32).sum(axis=0).astype(x.dtype)
    assert not np.array_equal(in_order(x, "sum"), rounded_once)


@pytest.mark.full
@pytest.mark.parametrize("tiles", [1, 13])
def test_one_tile_and_a_prime_number_of_them(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_line, "chunk_bytes", lambda: 2 * TILE)
    monkeypatch.setattr(all_reduce_line, "SMALLEST_CHUNK", 2 * TILE)
    x = operand(4, tiles)
    assert chunks_and_window(x)[0] == 1  # 13 tiles would be one chunk if they were not padded
    assert not found_wrong(x, *harness.ADVERSARIES, hold=1)
    assert run_on(4, tiles * TILE).vmem_bytes == 22 * min(tiles, 2) * TILE


@pytest.mark.full
def test_odd_shapes_are_those_of_lax() -> None:
    shapes = {"float32": (3, 1, 5), "bfloat16": (33, 7), "int8": (130,), "int32": ()}
    x = {name: harness.random((3, *shape), name) for name, shape in shapes.items()}

    def run(by: Callable[[Any], Any]) -> Any:
        return jax.tree.map(np.asarray, harness.per_device(by, harness.mesh(3))(*x.values()))

    got = run(lambda *a: pallas_collectives.psum(a, "x", backend="pallas", algorithm="line"))
    jax.tree.map(np.testing.assert_array_equal, got, run(lambda *a: jax.lax.psum(a, "x")))


# Faults -------------------------------------------------------------------------------------------

_Device = all_reduce_line._Device


def freed_before_it_has_left(patch: pytest.MonkeyPatch) -> None:
    push, release = _Device._push, Channel.release

    def push_and_free(self: Any, to: Channel, *what: Any) -> None:
        push(self, to, *what)
        *_, chunk, side = what
        if isinstance(side, int):  # in the middle
            release(self._both[side], chunk)
        else:
            only_if(~self._at_end, lambda: release(self._inwards, chunk))

    patch.setattr(_Device, "_push", push_and_free)
    patch.setattr(Channel, "release", lambda *_: None)


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    harness.drop_barrier(patch, "barrier_along_line")


def term_before_it_is_here(patch: pytest.MonkeyPatch) -> None:
    """It is waited for too late: behind the sum."""
    own = _Device._end_sends

    def at_once(self: Any, chunk: Any) -> Any:
        return self._s.terms_ref.at[wrap_step(chunk, 2)]

    def end_sends(self: Any, chunk: Any) -> None:
        own(self, chunk)
        summed = chunk + IN_FLIGHT
        only_if(~self._at_end & (summed < self._count), lambda: self._term_copy(summed).wait())

    patch.setattr(_Device, "_term", at_once)
    patch.setattr(_Device, "_end_sends", end_sends)


# What is planted, and a race that it makes: the buffer, and what is done to it at the same time.
SLOTS_REF, TERMS_REF = "own.slots_ref (vmem)", "own.terms_ref (vmem)"
RESULT_REF = "result_refs[0] (hbm)"
USES = ("a copy's write", "a copy's read", "the core's read", "the device's entry")
WRITE, READ, CORE, ENTRY = USES
FAULTS: dict[str, tuple[Patch, str, set[str]]] = {
    "no wait for a sum": (no_wait(of_sums=True), SLOTS_REF, {WRITE, CORE}),
    "no wait for a finished chunk": (no_wait(of_sums=False), RESULT_REF, {WRITE, READ}),
    "no credits": (no_credits, SLOTS_REF, {WRITE, READ}),
    "one semaphore for all sums": (one_semaphore(of_sums=True), SLOTS_REF, {WRITE, CORE}),
    "one for all finished chunks": (one_semaphore(of_sums=False), RESULT_REF, {WRITE, READ}),
    "a slot freed before its sum has left": (freed_before_it_has_left, SLOTS_REF, {WRITE, READ}),
    "no barrier": (no_barrier, SLOTS_REF, {WRITE, ENTRY}),
    "a term added before it is here": (term_before_it_is_here, TERMS_REF, {WRITE, CORE}),
}


def run_on(n: int, nbytes: int, *, vmem: bool = False, races: bool = False) -> Report:
    """The replay of float32 on a line of n."""
    pod = Machine.named(f"v5e:{n}x1")
    body = lambda x: reduced(x, n, vmem=vmem)  # noqa: E731
    x = jax.ShapeDtypeStruct((n, nbytes // 512, 128), jnp.float32)
    return replay(replay_kernels.sharded(body, pod.mesh({"x": n})), x, machine=pod, races=races)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, buffer, uses = FAULTS[fault]
    plant(monkeypatch)
    races = run_on(n, 40 * TILE, races=True).races or []
    found = [(r.buffer, {use for use in USES if use in r.first + r.second}) for r in races]
    assert (buffer, uses) in found


@pytest.mark.full
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("fault", ["no wait for a sum", "a term added before it is here"])
def test_faults_are_found_in_the_interpreter(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault][0](monkeypatch)
    assert found_wrong(operand(3, 4), "on_wait")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("vmem", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_the_sound_kernel_has_no_fault_on_any_schedule(n: int, vmem: bool) -> None:
    assert run_on(n, 40 * TILE, vmem=vmem, races=True).ok


# Time and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_each_link_carries_the_operand_once_each_way(n: int) -> None:
    nbytes = 1 << 20
    report = run_on(n, nbytes)
    used = report.link_bytes[report.link_bytes > 0]
    assert used.tolist() == [nbytes] * 2 * (n - 1)
    assert report.time >= least(n, nbytes, report.machine).time


def least(n: int, nbytes: int, machine: Machine) -> Any:
    return bound("all_reduce", machine, np.arange(n)[None], nbytes / n)


@pytest.mark.full
@pytest.mark.parametrize("n, of_wire", [(4, 0.97), (8, 0.95)])
def test_large_operands_keep_the_links_busy(n: int, of_wire: float) -> None:
    nbytes = 16 << 20
    report = run_on(n, nbytes)
    assert report.vmem_bytes == 22 * (16 << 10)
    assert least(n, nbytes, report.machine).wire / report.time > of_wire


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("generation", harness.GENERATIONS)
def test_compiles_to_the_kernel_alone(generation: str, dtype: str) -> None:
    """With the operand and the result in HBM, and nothing beside them, whatever their size."""
    pytest.importorskip("libtpu")
    topology = harness.GENERATIONS[generation]
    n = len(harness._topology(topology).devices)
    free = ("parameter", "get-tuple-element", "bitcast")
    for nbytes in (1 << 20, 64 << 20):
        shape = (1, nbytes // (128 * jnp.dtype(dtype).itemsize), 128)
        program = harness.compile_for_tpu(lambda x: reduced(x, n), topology, shape, dtype=dtype)
        around = [op for op in program.ops if op not in free]
        assert around == ["fusion", "custom-call", "fusion"]
        assert program.temp_bytes <= 2 * nbytes + (64 << 10)


@pytest.mark.parametrize("nbytes", [1 << 20, 64 << 20])
def test_scratch_in_vmem_does_not_grow_with_the_operand(nbytes: int) -> None:
    chunk = all_reduce_line.chunks_of((1, nbytes // 512, 128), "float32", 4).chunk_shape
    slots, terms, *_ = Scratch.of(chunk, "float32", 4)
    chunk_bytes = all_reduce_line.chunk_bytes()
    assert 4 * (math.prod(slots.shape) + math.prod(terms.shape)) == 22 * chunk_bytes
    assert "22 chunks in VMEM" in (all_reduce_line.__doc__ or "")
