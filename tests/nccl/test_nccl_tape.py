"""Work recorded as C calls: what is recorded, and XLA's calls answered from it, on CPU devices."""

import concurrent.futures
import ctypes
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import nccl_host
import nccl_wire
import pallas_collectives as pc
from pallas_collectives import nccl
from pallas_collectives.nccl import cuda, ffi, group, library, progress, rank, tape

P = jax.sharding.PartitionSpec
ONES = np.ones((4, 3), np.float32)


def gather(x):
    return pc.all_gather(x, "x", backend="nccl")


def shift(x):
    return pc.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)], backend="nccl")


@pytest.fixture
def wire(monkeypatch):
    nccl_host.serve(monkeypatch)
    return group._options["runtime"].library.bindings


class Handle:
    """As NVIDIA's bindings give: no number, but it has one."""

    def __index__(self):
        return 77


def test_a_recorder_notes_functions_arguments_and_what_cleans_up():
    recorder = tape.Recorder({"ncclGroupStart": 1, "ncclSend": 2, "ncclGroupEnd": 3, "f": 4}.get)
    word, array = ctypes.c_uint64(5), (ctypes.c_void_p * 2)()
    recorder.group_start()
    recorder.send(tape.inputs(2)[1], 12, 1, 3, Handle(), tape.STREAM)
    recorder.group_end()
    recorder.call("f", None, -1, word, array, ctypes.byref(word), tape.outputs(1)[0])
    steps = recorder.steps()
    assert [s.function for s in steps] == [1, 2, 3, 4]
    assert [s.cleanup for s in steps] == [0, 2, 0, 0]
    arguments = [[(a.source, a.value) for a in s.arguments] for s in steps]
    assert arguments[1][:6] == [(2, 1), (0, 12), (0, 1), (0, 3), (0, 77), (1, 0)]
    addresses = [(0, ctypes.addressof(array)), (0, ctypes.addressof(word))]
    assert arguments[3][:6] == [(0, 0), (0, 2**64 - 1), (0, 5), *addresses, (3, 0)]


def test_what_cuda_is_called_for_is_recorded_in_its_gpus_context():
    driver = cuda.Driver.__new__(cuda.Driver)  # there is none here
    driver._contexts = {2: ctypes.c_void_p(5)}
    board = progress.DeviceBoard.__new__(progress.DeviceBoard)
    board._driver, board._ordinal, board._address = driver, 2, 99
    board._enter = ctypes.c_void_p(7)
    recorder = tape.Recorder(lambda name: 1)
    board.recorded(recorder).enter(tape.STREAM, 2**32 - 1)
    driver.recorded(recorder).clear(2, tape.outputs(1)[0], 2**33, tape.STREAM)
    gc.collect()
    steps = recorder.steps()
    assert [s.cleanup for s in steps] == [0, 2, 0, 0, 5, 0]
    assert recorder.names[::3] == ["cuCtxPushCurrent_v2"] * 2
    assert recorder.names[2::3] == ["cuCtxPopCurrent_v2"] * 2
    _, launch, _, push, clear, _ = [[(a.source, a.value) for a in s.arguments] for s in steps]
    assert push[0] == (0, 5)
    assert clear[:4] == [(3, 0), (0, 0), (0, 2**33), (1, 0)]
    assert launch[:9] == [(0, 7), *[(0, 1)] * 6, (0, 0), (1, 0)] and launch[10] == (0, 0)
    pointers = (ctypes.c_void_p * 2).from_address(launch[9][1])
    assert ctypes.c_uint64.from_address(pointers[0]).value == 99
    assert ctypes.c_uint32.from_address(pointers[1]).value == 2**32 - 1


def test_contexts_in_contexts_are_all_left_where_a_call_fails():
    """As `Post.start` has them, in which `clear` makes the GPU current once more."""
    context, fails = [], {}

    def put(name, made):
        def call(word):
            made(word)
            return fails.get(word, 0)

        kept.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(call))
        functions[name] = ctypes.cast(kept[-1], ctypes.c_void_p).value

    kept, functions = [], {}
    put("cuCtxPushCurrent_v2", context.append)
    put("cuCtxPopCurrent_v2", lambda word: context.pop())
    put("call", lambda word: None)

    def nested(recorder):
        recorder.call("cuCtxPushCurrent_v2", 1)
        recorder.call("cuCtxPushCurrent_v2", 2)
        recorder.call("call", 5)
        recorder.call("cuCtxPopCurrent_v2", 3)
        recorder.call("call", 6)
        recorder.call("cuCtxPopCurrent_v2", 4)

    class Nested(Communicator):
        def address(self, name):
            return functions[name]

    tape.publish("nested", {0: tape.record(Nested(lambda word: 0, "nested"), nested)})
    f = one_call("nested", None)
    for failing in (6, 5):
        fails.clear()
        fails[failing] = 1
        with pytest.raises(jax.errors.JaxRuntimeError, match="call of nested returned 1"):
            f(jnp.zeros(1)).block_until_ready()
        assert context == []


@pytest.mark.parametrize("made_of_a_gap", [lambda g: g + 8, lambda g: g * 2, str])
def test_work_that_calculates_with_an_address_cannot_be_recorded(made_of_a_gap):
    recorder = tape.Recorder({"ncclSend": 2}.get)
    with pytest.raises(TypeError):
        recorder.send(made_of_a_gap(tape.inputs(1)[0]), 12, 1, 3, 7, tape.STREAM)


def test_only_functions_that_take_the_same_arguments_in_c_are_recorded():
    with pytest.raises(AttributeError, match="comm_abort cannot be recorded"):
        tape.Recorder({}.get).comm_abort(1)
    with pytest.raises(ValueError, match="f has 17 arguments, more than 16"):
        tape.Recorder({"f": 1}.get).call("f", *range(17))


def test_calls_are_made_without_python(wire):
    f = harness.per_device(gather, harness.mesh(4))
    python, taped = ffi.counters.python, ffi.counters.tape
    for _ in range(3):
        np.testing.assert_array_equal(f(ONES), np.ones((4, 4, 3)))
    assert (ffi.counters.python - python, ffi.counters.tape - taped) == (0, 12)


def test_with_a_watchdog_too_whose_boards_see_every_call(wire, monkeypatch):
    monkeypatch.setitem(group._options, "watchdog", 20)
    f = harness.per_device(lambda x: shift(gather(x).sum(0)), harness.mesh(4))
    python, taped = ffi.counters.python, ffi.counters.tape
    for _ in range(3):
        np.testing.assert_array_equal(f(ONES), ONES * 4)
    assert (ffi.counters.python - python, ffi.counters.tape - taped) == (0, 24)
    made = {name: each for (name, _), each in group._groups.items()}
    assert set(made) == {"collectives", "messages"}
    for name, call in ("collectives", "all_gather"), ("messages", "exchange"):
        for communicator in made[name].communicators.values():
            seen = communicator.board.read()
            assert seen.begun == seen.ended == 3
            words = [progress.text_of(s).split()[0] for s in seen.latest.values()]
            assert words == [call] * 3
        made[name].close()


def test_a_function_that_fails_is_named_with_its_text_after_cleaning_up(wire, monkeypatch):
    """And the call is over: the group is not taken for one that hangs."""
    monkeypatch.setitem(group._options, "watchdog", 20)
    ended = []

    def group_end():
        ended.append(wire._grouped.pop(threading.get_ident()))

    def send(*args):
        raise nccl_wire.WireError(5)

    monkeypatch.setattr(wire, "send", send)
    monkeypatch.setattr(wire, "group_end", group_end)
    f = harness.per_device(shift, harness.mesh(4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ncclSend returned 5: invalid usage"):
        jax.block_until_ready(f(ONES))
    assert len(ended) == 4
    (made,) = group._groups.values()
    boards = [c.board.words for c in made.communicators.values()]
    deadline = time.monotonic() + 10  # the first failure may be told before the others
    while sum(words.ended for words in boards) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(words.begun, words.ended) for words in boards] == [(1, 1)] * 4
    made.close()


def test_an_unusable_communicator_gives_its_reason_not_nccls_echo(wire):
    f = harness.per_device(gather, harness.mesh(4))
    jax.block_until_ready(f(ONES))
    (made,) = group._groups.values()
    made.abort(nccl.CommunicatorError("somebody pulled the plug"))
    taped = ffi.counters.tape
    with pytest.raises(jax.errors.JaxRuntimeError, match="somebody pulled the plug"):
        jax.block_until_ready(f(ONES))
    assert ffi.counters.tape == taped
    communicator = made.communicators[0]
    assert str(communicator.failed("ncclSend", 5, 0)) == "somebody pulled the plug"


class Communicator:
    """One whose only C function is `function`, of an address."""

    unusable = ctypes.c_int32(0)

    def __init__(self, function, name):
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(function)
        self.name = name

    def address(self, name):
        return ctypes.cast(self.function, ctypes.c_void_p).value

    def recorded(self, recorder):
        return recorder

    def failed(self, function, result, stream):
        return RuntimeError(f"{function} of {self.name} returned {result}")


def publish(text, function, name=""):
    def put(recorder):
        recorder.call("put", tape.outputs(1)[0])

    tape.publish(text, {0: tape.record(Communicator(function, name), put)})


def one_call(text, python):
    one = jax.ShapeDtypeStruct((1,), "float32")
    return jax.jit(lambda x: ffi.call(text, python, one, x, platform="cpu"))


def bucket(text):
    value = 14695981039346656037
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value % 4096


def test_works_are_told_apart_by_their_whole_text_and_the_latest_serves():
    """Two texts in one bucket, and one text published twice."""
    texts: dict[int, str] = {}
    for i in range(10000):
        first = texts.setdefault(bucket(f"work {i}"), f"work {i}")
        if first != f"work {i}":
            second = f"work {i}"
            break

    def put(value):
        def function(address):
            ctypes.c_float.from_address(address).value = value
            return 0

        return function

    def never(*args):
        raise AssertionError("Python was called")

    programs = one_call(first, never), one_call(second, never)
    publish(first, put(1))
    publish(second, put(2))
    assert [float(f(jnp.zeros(1))[0]) for f in programs] == [1, 2]
    publish(first, put(3))
    assert [float(f(jnp.zeros(1))[0]) for f in programs] == [3, 2]


def test_lowering_again_on_the_same_communicators_takes_no_more_memory(wire):
    harness.per_device(shift, harness.mesh(4)).lower(ONES)  # what a process keeps once, it has now
    for published in (1, 0):
        before = len(tape._keep)
        harness.per_device(lambda x: gather(x) * 2, harness.mesh(4)).lower(ONES)
        assert len(tape._keep) - before == published


def test_a_failure_is_told_by_the_communicator_that_failed_not_by_the_texts_latest():
    def fail(address):
        publish("fails", lambda address: 0, "later")
        return 6

    publish("fails", fail, "first")
    f = one_call("fails", None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="put of first returned 6"):
        f(jnp.zeros(1)).block_until_ready()
    f(jnp.zeros(1)).block_until_ready()


def product(x):
    """Beside copies between GPUs, which take functions of tape.c's own."""
    x, w = jnp.outer(x, jnp.ones(16)), jnp.ones((16, 8), "bfloat16")
    x = x.astype(w.dtype)
    return pc.all_gather_matmul(x, w, "x", backend="nccl", algorithm="fused")


def later(x):
    """A gather whose two halves take such functions, too."""
    return pc.all_gather_start(x, "x", backend="nccl").done()


@pytest.mark.parametrize(
    ("call", "calls", "each"),
    [("lambda x: shift(gather(x).sum(0))", 8, 4), ("product", 4, 16), ("later", 8, 1)],
)
def test_without_a_compiler_python_answers_and_a_warning_says_so(call, calls, each):
    program = textwrap.dedent(f"""
        import os, sys
        import numpy as np
        sys.path[:0] = ["tests/helpers", "tests/nccl"]
        import pytest
        with pytest.MonkeyPatch.context() as patch:
            import harness, nccl_host
            from test_nccl_tape import *
            from pallas_collectives.nccl import ffi
            nccl_host.serve(patch)
            result = np.asarray(harness.per_device({call}, harness.mesh(4))(ONES))
            np.testing.assert_array_equal(result, np.full_like(result, {each}))
            print(ffi.counters.python, ffi.counters.tape, ffi.counters.calls)
    """)
    environment = os.environ | {"CC": "no-such-compiler -m64"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
        cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split() == [str(calls), "0", str(calls)], done.stdout
    assert "no-such-compiler -m64 failed" in done.stderr
    assert "Install a C compiler, or name one in the environment variable CC" in done.stderr


@pytest.fixture
def fresh():
    """The module as it is before it has compiled anything."""
    spec = importlib.util.spec_from_file_location("fresh_tape", tape.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_threads_that_come_first_at_the_same_time_share_one_library(fresh):
    first, *others = nccl_host.in_threads(*[fresh._library] * 4)
    assert first is not None
    assert all(other is first for other in others)


def test_a_compiler_that_writes_rubbish_or_cannot_be_named_is_no_compiler(
    fresh, monkeypatch, tmp_path, caplog
):
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo rubbish > "$2"\n')
    script.chmod(0o755)
    for compiler, wrong in ((str(script), "tape.so: "), ('cc "', "No closing quotation")):
        monkeypatch.setenv("CC", compiler)
        fresh._compiled.cache_clear()
        caplog.clear()
        assert not fresh.available()
        assert f"{compiler} failed" in caplog.text and wrong in caplog.text


def test_where_no_file_can_be_written_python_answers(fresh, monkeypatch, caplog):
    def nowhere():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(fresh.tempfile, "TemporaryDirectory", nowhere)
    assert not fresh.available()
    assert "no usable temporary directory" in caplog.text


def test_a_failure_that_is_not_nccls_is_not_its_own_cause():
    """JAX follows causes to their end, while it lowers a program: a cycle would hang it."""

    def broken():
        raise TypeError("not NCCL's")

    lib = library.Library(nccl_wire.Wire(), "", "2.28.9")
    with pytest.raises(TypeError) as error:
        lib.call("broken", broken)
    assert error.value.__cause__ is None


def test_threads_that_lower_at_once_get_one_and_the_same():
    """Two of a mailbox would put work on two streams, which nothing orders."""
    made = []

    @rank.once
    def make(box):
        time.sleep(0.05)
        made.append(box)
        return object()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [*pool.map(make, "aaaa")]
    assert made == ["a"] and len({*map(id, found)}) == 1 and make("b") is not found[0]
