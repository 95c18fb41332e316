"""Python functions called from XLA programs, through its call frame, on CPU devices."""

import collections
import ctypes
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_collectives.nccl import ffi

P = jax.sharding.PartitionSpec


def copy(stream, ordinal, inputs, outputs):
    ctypes.memmove(outputs[0], inputs[0], 16)


def mark(stream, ordinal, inputs, outputs):
    ctypes.c_float.from_address(outputs[0]).value = ordinal


def test_a_call_reads_its_operands_and_writes_its_results():
    def both(stream, ordinal, inputs, outputs):
        a, b = (np.frombuffer((ctypes.c_char * 16).from_address(i), np.float32) for i in inputs)
        np.frombuffer((ctypes.c_char * 16).from_address(outputs[0]), np.float32)[:] = a + b
        np.frombuffer((ctypes.c_char * 8).from_address(outputs[1]), np.int16)[:] = a * b

    result = (jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((2, 2), "int16"))
    f = jax.jit(lambda a, b: ffi.call("both", both, result, a, b, platform="cpu"))
    total, product = f(jnp.arange(4.0), jnp.full(4, 3.0))
    np.testing.assert_array_equal(total, [3, 4, 5, 6])
    np.testing.assert_array_equal(product, [[0, 3], [6, 9]])


def test_every_device_of_a_shard_map_calls_with_its_own_ordinal():
    mesh = jax.make_mesh((8,), ("x",))
    one = jax.ShapeDtypeStruct((1,), "float32")
    f = jax.jit(
        jax.shard_map(
            lambda x: ffi.call("mark", mark, one, x, platform="cpu"),
            mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )
    )  # fmt: skip
    x = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(f(x), range(8))


def test_calls_are_counted_one_per_device_and_run():
    f = jax.jit(
        lambda x: ffi.call("copy", copy, jax.ShapeDtypeStruct((4,), "float32"), x, platform="cpu")
    )
    before = ffi.counters.calls
    for _ in range(5):
        f(jnp.zeros(4)).block_until_ready()
    assert ffi.counters.calls == before + 5


def test_a_call_whose_result_nobody_uses_still_runs():
    shape = jax.ShapeDtypeStruct((4,), "float32")

    @jax.jit
    def f(x):
        ffi.call("copy", copy, shape, x, platform="cpu")
        return x

    before = ffi.counters.calls
    jax.block_until_ready(f(jnp.zeros(4)))
    jax.effects_barrier()
    assert ffi.counters.calls == before + 1


def test_an_exception_fails_the_program_with_its_text_and_the_next_run_works():
    fail = [True]

    def sometimes(stream, ordinal, inputs, outputs):
        if fail[0]:
            raise ValueError("out of patience")
        copy(stream, ordinal, inputs, outputs)

    shape = jax.ShapeDtypeStruct((4,), "float32")
    f = jax.jit(lambda x: ffi.call("sometimes", sometimes, shape, x, platform="cpu"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: out of patience"):
        f(jnp.ones(4)).block_until_ready()
    fail[0] = False
    np.testing.assert_array_equal(f(jnp.ones(4)), jnp.ones(4))


@pytest.mark.full
def test_calls_are_named_by_text_so_a_cached_program_of_another_process_finds_them(tmp_path):
    program = textwrap.dedent("""
        import ctypes, sys
        import jax, jax.numpy as jnp
        from pallas_collectives.nccl import ffi

        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

        def put(value):
            def function(stream, ordinal, inputs, outputs):
                ctypes.c_float.from_address(outputs[0]).value = value
            return function

        def call(value):
            one = jax.ShapeDtypeStruct((1,), "float32")
            return jax.jit(lambda x: ffi.call(f"put {value}", put(value), one, x, platform="cpu"))

        values = [float(v) for v in sys.argv[2:]]
        print(*(float(call(v)(jnp.zeros(1))[0]) for v in values))
    """)

    def run(*values):
        command = [sys.executable, "-c", program, str(tmp_path), *values]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.split()

    assert run("1.0", "2.0", "3.0") == ["1.0", "2.0", "3.0"]
    assert run("3.0", "1.0") == ["3.0", "1.0"]


def test_a_process_that_called_python_from_xlas_threads_ends_cleanly():
    program = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from pallas_collectives.nccl import ffi

        shape = jax.ShapeDtypeStruct((4,), "float32")
        f = jax.jit(lambda x: ffi.call("n", lambda *a: None, shape, x, platform="cpu"))
        for _ in range(100):
            f(jnp.zeros(4)).block_until_ready()
        print(ffi.counters.calls)
    """)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["100"] and not done.stderr


def test_a_thread_of_xlas_keeps_its_python_state_between_calls():
    """Else every call would make and drop one, at several times the cost of the call."""
    seen = threading.local()
    runs = []

    def note(stream, ordinal, inputs, outputs):
        seen.calls = getattr(seen, "calls", 0) + 1
        runs.append((threading.get_ident(), seen.calls))

    shape = jax.ShapeDtypeStruct((4,), "float32")

    @jax.jit
    def f(x):
        for _ in range(10):
            x = ffi.call("note", note, shape, x, platform="cpu")
        return x

    f(jnp.zeros(4)).block_until_ready()
    threads = collections.Counter(ident for ident, _ in runs)
    for ident, calls in threads.items():
        assert [n for i, n in runs if i == ident] == list(range(1, calls + 1))
    assert max(threads.values()) > 1


def test_long_texts_are_told_apart_too():
    """A group of a thousand devices has a text of many pages; a program holds less of it."""
    one = jax.ShapeDtypeStruct((1,), "float32")

    def program(number):
        def put(stream, ordinal, inputs, outputs):
            ctypes.c_float.from_address(outputs[0]).value = number

        text = f"put over {list(range(1000))} {number}"
        return jax.jit(lambda x: ffi.call(text, put, one, x, platform="cpu"))

    programs, x = [program(i) for i in range(3)], jnp.zeros(1)
    assert [float(f(x)[0]) for f in programs] == [0, 1, 2]
    assert len(programs[0].lower(x).as_text()) < 2000
