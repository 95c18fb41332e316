"""What goes over a wire between GPUs that reach each other's memory: whose block lands where."""

import dataclasses
import functools
import logging
import time
from typing import Any

import jax
import numpy as np
import pytest

import harness
import nccl_kernels
import pallas_collectives as pc
from nccl_wire import SECONDS, WireError
from pallas_collectives import wires
from pallas_collectives.backends import nccl_packed
from pallas_collectives.nccl import codec, mailboxes, packed, tape
from pallas_collectives.wires import Wire

N, WIRE = 3, Wire("int8")
pytestmark = pytest.mark.usefixtures("by_nccl")


def run(program: Any, x: np.ndarray) -> np.ndarray:
    if jax.device_count() < N:
        pytest.skip(f"needs {N} devices")
    return np.asarray(harness.per_device(program, harness.mesh(N))(x))


def blocks() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 8, 256)).astype(np.float32)


def sent(x: np.ndarray) -> np.ndarray:
    """What arrives of it."""
    return np.asarray(wires.as_sent(jax.numpy.asarray(x), WIRE))


@pytest.mark.parametrize(
    "perm",
    [[(0, 1)], [(0, 2), (2, 0)], [(0, 0), (1, 2)], [(0, 1), (1, 2), (2, 0)]],
    ids=["one", "two swap", "to itself", "ring"],
)
def test_a_permute_brings_the_source_s_block_or_zeros(perm: list[tuple[int, int]]) -> None:
    x = blocks()
    ppermute = functools.partial(pc.ppermute, axis_name="x", perm=perm, wire=WIRE, backend="nccl")
    want = np.zeros_like(x)
    for source, target in perm:
        want[target] = sent(x[source])
    np.testing.assert_array_equal(run(ppermute, x), want)


def test_a_gather_and_a_permute_of_one_program_do_not_meet() -> None:
    """They share mailboxes, where each source has a place and words of its own."""
    x, ring = blocks(), [(0, 1), (1, 2), (2, 0)]
    how: Any = {"axis_name": "x", "wire": WIRE, "backend": "nccl"}

    def program(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = pc.ppermute(x, perm=ring, **how)
            x = pc.all_gather(x, **how)[0]
        return x

    # Rank 0 gets 2's block and gives it to all; 0's that 2 gets next is this one.
    want = sent(sent(sent(sent(x[2]))))
    np.testing.assert_array_equal(run(program, x), np.stack([want] * N))


def test_a_sum_is_in_the_order_of_the_ranks() -> None:
    """1e8, 1 and -1e8: each number is its group's only one, so that none is rounded."""
    x = np.zeros((N, N * 8, 128), np.float32)
    x[:, :, 5] = np.array([1e8, 1.0, -1e8], np.float32)[:, None]
    scatter = functools.partial(
        pc.psum_scatter, axis_name="x", tiled=True, wire=WIRE, backend="nccl"
    )
    terms = [sent(block) for block in x]
    want = ((terms[0] + terms[1]) + terms[2]).reshape(N, 8, 128)
    np.testing.assert_array_equal(run(scatter, x), want)


@pytest.mark.full
def test_where_memory_is_not_reached_nccl_moves_it_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_reach(*_: Any) -> Any:
        raise mailboxes.MailboxError("GPU 1 cannot reach its peers' memory: rank 2 is elsewhere")

    monkeypatch.setattr(packed, "ready", out_of_reach)
    nccl_packed._tell.cache_clear()
    x = blocks()
    gather = functools.partial(pc.all_gather, axis_name="x", wire=WIRE, backend="nccl")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.clear_caches()
            np.testing.assert_array_equal(run(gather, x), np.stack([sent(x)] * N))
    told = [record.message for record in caplog.records if "over a wire" in record.message]
    assert told == [
        "pallas_collectives: NCCL moves what goes over a wire: GPU 1 cannot reach its peers' "
        "memory: rank 2 is elsewhere"
    ]


def test_more_than_mailboxes_are_kept_for_goes_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "MOST_MAIL", 1 << 10)
    work = packed.PackedWork(packed.GATHER, N, 2048, "float32", "float32", "int8", 128)
    with pytest.raises(mailboxes.MailboxError, match="3 MiB come to a GPU, more than 0 are kept"):
        nccl_packed._packers(work, [])
    x = blocks()
    gather = functools.partial(pc.all_gather, axis_name="x", wire=WIRE, backend="nccl")
    np.testing.assert_array_equal(run(gather, x), np.stack([sent(x)] * N))


@pytest.mark.usefixtures("fresh_counts")
def test_it_is_counted_as_a_call_of_the_backend() -> None:
    gather = functools.partial(pc.all_gather, axis_name="x", wire=WIRE, backend="nccl")
    run(gather, blocks())
    assert pc.counts() == {("all_gather", "nccl", "packed"): 1}


def test_the_largest_of_the_result_is_the_most_that_arrives() -> None:
    """Sums are float32 on their way to all; where a half would be inf, its largest number comes."""
    x = np.zeros((N, 8 * N, 128), np.float16)
    x[:] = np.array([65504.0, 15.9921875, 0.00390625], np.float16)[:, None, None]
    total = functools.partial(pc.psum, axis_name="x", wire=Wire("float8_e4m3fn"))
    ours, by_xla = (run(functools.partial(total, backend=b), x) for b in ("nccl", "xla"))
    assert np.isfinite(by_xla).all()
    np.testing.assert_array_equal(ours, by_xla)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_launch_that_fails_ends_the_call_on_every_gpu(
    by_nccl: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for words that are not given, nor without a C compiler to make calls by."""
    if by_nccl == "gpu":
        pytest.skip("no launch fails on GPUs")
    if not compiled:
        monkeypatch.setattr(tape, "_library", lambda: None)
    whole, failed = nccl_kernels.run, []
    reads = {nccl_kernels.load(k.name) for k in nccl_kernels.codecs() if k.kind == codec.READ}

    def launched(handle: int, *given: int) -> None:
        if handle in reads and given[-1] and not failed:
            failed.append(handle)
            raise WireError(1)
        whole(handle, *given)

    monkeypatch.setattr(nccl_kernels, "run", launched)
    gather = functools.partial(pc.all_gather, axis_name="x", wire=WIRE, backend="nccl")
    begin = time.monotonic()
    x = np.tile(blocks(), (1, 1 if compiled else 2, 1))  # another call than the one with a tape
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(pc_launch|cuLaunchKernel) returned 1"):
        run(gather, x)
    assert time.monotonic() - begin < SECONDS
    np.testing.assert_array_equal(run(gather, x), np.stack([sent(x)] * N))


def test_gpus_of_several_hosts_are_told_apart_in_every_process_alike() -> None:
    """Each process looks at all groups, not at its own alone."""

    @dataclasses.dataclass
    class Gpu:
        id: int
        slice_index: int
        process_index: int = 0

    work = packed.PackedWork(packed.GATHER, 2, 1024, "float32", "float32", "int8", 128)
    near, far = [Gpu(0, 0, 9), Gpu(1, 0, 9)], [Gpu(2, 0, 9), Gpu(3, 1, 9)]
    assert nccl_packed._packers(work, [near]) == {}
    with pytest.raises(mailboxes.MailboxError, match=r"GPUs \[2, 3\] are not all of one host"):
        nccl_packed._packers(work, [near, far])
