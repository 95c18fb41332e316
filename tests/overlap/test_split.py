"""Collectives in two halves: values, gradients, batching, order, on GPUs and over a host's wire."""

import copy
import functools
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from in_halves import AT_ONCE, EVERY, FORMS, SHIFT, N, on_devices, split, whole
from pallas_collectives.backends import flights, ordered
from pallas_collectives.errors import CollectiveError
from pallas_collectives.overlap.started import Started
from pallas_collectives.topology.groups import Group


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_laxs(by_nccl, form, dtype):
    if form == "pmean" and dtype == "int8":
        pytest.skip("a mean is a float")
    x = harness.random((N, 2 * N, 3 * N), dtype)
    got = on_devices(lambda x: split(form, x)[0], x)
    want = on_devices(functools.partial(whole, form), x)
    assert got.dtype == want.dtype
    if form.startswith(("psum", "pmean")):  # lax adds in another order
        bound = {"bfloat16": 4e-2}.get(dtype, 1e-5)
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_laxs(by_nccl, form):
    x = harness.random((N, 2 * N, 3 * N), "float32")

    def loss(collective, x):
        def scalar(x):
            y = collective(x)
            return jnp.sum(jnp.sin(y) * jnp.arange(y.size).reshape(y.shape))

        return jax.grad(scalar)(x)

    got = on_devices(functools.partial(loss, lambda x: split(form, x)[0]), x)
    want = on_devices(functools.partial(loss, functools.partial(whole, form)), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_batched_values_are_laxs(by_nccl, form):
    x = harness.random((N, 2 * N, 3 * N, 5), "float32")
    batched = functools.partial(jax.vmap, in_axes=2, out_axes=-1)
    got = on_devices(batched(lambda x: split(form, x)[0]), x)
    want = on_devices(batched(functools.partial(whole, form)), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_large_sum_is_scattered_and_its_blocks_are_gathered_when_it_is_done(by_nccl, monkeypatch):
    monkeypatch.setattr(ordered, "CALL_BYTES", 0)
    x = harness.random((N, 3, 5), "float32")  # not a multiple of the devices

    def both(collective, x):
        return collective(x), jax.grad(lambda x: jnp.sum(jnp.sin(collective(x))))(x)

    pc.reset_counts()
    per = functools.partial(harness.per_device, on=harness.mesh(N))
    got = per(functools.partial(both, lambda x: split("psum", x)[0]))(x)
    if N > 2:
        assert pc.counts()[("all_to_all", "nccl", "copies")]
    want = per(functools.partial(both, lambda x: jax.lax.psum(x, "x")))(x)
    for ours, lax in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, lax, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", AT_ONCE)
def test_what_copy_engines_do_not_do_is_one_call_of_nccl(by_nccl, form):
    x = harness.random((N, 2 * N, 3 * N), "float32")
    pc.reset_counts()
    got = on_devices(lambda x: split(form, x)[0], x)
    np.testing.assert_array_equal(got, on_devices(functools.partial(whole, form), x))
    assert set(pc.counts()) == {("all_reduce", "nccl", None)}


def test_a_ragged_exchange_is_one_call(by_nccl):
    x = harness.random((N, N, 1 << 18), "float32")  # XLA's own is quicker for 1 MiB and less

    def exchange(module_call, x):
        one = jnp.ones(N, jnp.int32)
        numbers, mine = jnp.arange(N), jnp.full(N, jax.lax.axis_index("x"))
        tables = [t.astype(jnp.int32) for t in (numbers, one, mine, one)]
        return module_call(x, jnp.zeros_like(x), *tables, axis_name="x")

    ours = functools.partial(exchange, lambda *a, **k: pc.ragged_all_to_all_start(*a, **k).done())
    np.testing.assert_array_equal(on_devices(ours, x), np.swapaxes(x, 0, 1))


def test_groups_and_several_axes(by_nccl):
    if N < 4:
        pytest.skip("needs four devices")
    x = harness.random((N, 4, 6), "float32")
    groups = [[0, 2], [3, 1]]
    grouped = {
        "all_gather": {"axis": 1, "tiled": True},
        "psum_scatter": {"tiled": True},
        "psum": {},
    }
    for name, options in grouped.items():
        options = {**options, "axis_index_groups": groups}
        run = functools.partial(harness.per_device, on=harness.mesh(N), check_vma=False)
        got = run(lambda x, n=name, o=options: getattr(pc, f"{n}_start")(x, "x", **o).done())(x)
        want = run(lambda x, n=name, o=options: getattr(jax.lax, n)(x, "x", **o))(x)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    on = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = functools.partial(harness.per_device, on=on)
    started = run(lambda x: pc.all_gather_start(x, ("y", "x"), to="invarying").done())(x)
    want = run(lambda x: jax.lax.all_gather(x, ("y", "x")))(x)
    np.testing.assert_array_equal(started, want)


def test_what_comes_may_be_typed_as_equal_everywhere(by_nccl):
    x = harness.random((N, 3, 4), "float32")

    def both(gather, x):
        def scalar(x):
            y = gather(x)
            assert not jax.typeof(y).mat.varying
            return jnp.sum(jnp.sin(y) * jnp.arange(y.size).reshape(y.shape))

        return jax.grad(scalar)(x)

    options = {"axis_name": "x", "tiled": True, "to": "invarying"}
    pc.reset_counts()
    got = on_devices(functools.partial(both, lambda x: pc.all_gather_start(x, **options).done()), x)
    assert pc.counts() == {("all_gather", "nccl", "copies"): 1}, "each has the whole cotangent"
    want = on_devices(functools.partial(both, functools.partial(pc.all_gather, **options)), x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_started_collectives_can_be_checkpointed(by_nccl):
    x = harness.random((N, 2 * N, 3 * N), "float32")

    def gradient(wrap, form, x):
        body = wrap(lambda x: split(form, jnp.sin(x))[0])
        return jax.grad(lambda x: jnp.sum(body(x) ** 2))(x)

    for form in ("all_gather", "psum_scatter"):
        got, want = (
            on_devices(functools.partial(gradient, wrap, form), x)
            for wrap in (jax.checkpoint, lambda f: f)
        )
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_narrower_numbers_go_as_by_the_whole_collective():
    x = harness.random((2, 16, 512), "float32")
    for name, options in (("all_gather", {"tiled": True}), ("psum_scatter", {"tiled": True})):
        got, want = (
            harness.per_device(call, harness.mesh(2))(x)
            for call in (
                lambda x, n=name, o=options: getattr(pc, f"{n}_start")(
                    x, "x", wire="bfloat16", **o
                ).done(),
                lambda x, n=name, o=options: getattr(pc, n)(x, "x", wire="bfloat16", **o),
            )
        )
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="wires"):
        harness.per_device(lambda x: pc.psum_start(x, "x", wires="int8").done(), harness.mesh(2))(x)


def test_left_out_in_words_narrower_numbers_change_nothing(by_nccl, fresh_counts):
    x = harness.random((N, 2 * N, 3 * N), "float32")
    full = {"wire": None, "wire_backward": None}
    for form in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute"):
        got = on_devices(lambda x, f=form: split(f, x, **full)[0], x)
        np.testing.assert_allclose(got, on_devices(functools.partial(whole, form), x), rtol=1e-6)
    assert {algorithm for _, _, algorithm in pc.counts()} == {"copies"}


def test_a_result_may_be_asked_for_again(by_nccl):
    def twice(x):
        started = pc.all_gather_start(x, "x", tiled=True)
        return started.done(), started.done(after=x)

    x = harness.random((N, 2, 3), "float32")
    first, again = harness.per_device(twice, harness.mesh(N))(x)
    np.testing.assert_array_equal(first, again)


def test_a_result_that_is_never_asked_for_is_told_of(by_nccl, caplog):
    def followed(x, *, done):
        started = pc.all_gather_start(x, "x")
        x = started.before(x)
        return x + started.done().sum() if done else x

    for done, told in ((True, 0), (False, 1)):
        harness.per_device(functools.partial(followed, done=done), harness.mesh(N))(
            jnp.ones((N, 3))
        )
        gc.collect()
        assert sum("done() was not called" in message for message in caplog.messages) == told


def test_a_tree_of_many_arrays_is_under_way_at_once(by_nccl):
    x = harness.random((N, 70), "float32")
    got = on_devices(lambda x: jnp.stack(pc.ppermute_start([*x], "x", SHIFT).done()), x)
    np.testing.assert_array_equal(got, np.roll(x, 1, axis=0))


def test_several_are_under_way_at_once_and_in_loops(by_nccl):
    """More than there are slots, the next one started before the last is done; in a scan too."""
    x = harness.random((N, 8, 6, 5), "float32")

    def ahead(x):
        started = [pc.all_gather_start(block, "x", tiled=True) for block in x]
        return jnp.stack([s.done() for s in started])

    def looped(x):
        def turn(carry, block):
            started = pc.all_gather_start(block, "x", tiled=True, after=carry)
            carry = jnp.tanh(started.before(carry) + block.sum())
            return carry, started.done(after=carry)

        return jax.lax.scan(turn, x[0], x)[1]

    want = on_devices(lambda x: jax.lax.all_gather(x, "x", axis=1, tiled=True), x)
    np.testing.assert_array_equal(on_devices(ahead, x), want)
    np.testing.assert_array_equal(on_devices(looped, x), want)


def test_what_serves_is_counted(by_nccl):
    pc.reset_counts()
    x = harness.random((N, 4, 3), "float32")
    on_devices(lambda x: pc.all_gather_start(x, "x").done(), x)
    assert pc.counts() == {("all_gather", "nccl", "copies"): 1}


def test_memory_that_xla_has_copied_is_an_error(by_nccl):
    """What is under way must not move: a copy of it would hold bytes that had not come."""
    if jax.process_count() > 1:
        pytest.skip("what comes waits in a mailbox, which is not XLA's")
    x = harness.random((N, 4, 3), "float32")

    def moved(x):
        flight = flights.new("gather", Group(("x",), (N,)))
        (under_way, operand, spare), _ = flights.start(flight, x)
        elsewhere = jnp.flip(under_way, -1)
        return flights.done(flight, [elsewhere, operand, spare])

    with pytest.raises(Exception, match="lies elsewhere"):
        on_devices(moved, x)


@pytest.mark.parametrize("form", EVERY)
def test_by_kernels_a_collective_is_one_call_where_it_starts(form):
    x = harness.random((N, 2 * N, 3 * N), "float32")
    pc.reset_counts()
    got = on_devices(lambda x: split(form, x)[0], x)
    want = on_devices(functools.partial(whole, form), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert {backend for _, backend, _ in pc.counts()} == {"pallas"}


def test_bad_input_is_refused_as_by_the_whole_collective():
    x = harness.random((N, 3, 5), "float32")
    for start in (
        lambda x: pc.all_gather_start(x, "x", axis=4),
        lambda x: pc.psum_scatter_start(x, "x", tiled=True, scatter_dimension=1),
        lambda x: pc.all_to_all_start(x, "x", 0, 1, tiled=True),
        lambda x: pc.all_to_all_start(x, "x", 0, 1),
        lambda x: pc.psum_start(x, "x", order="size"),
        lambda x: pc.psum_scatter_start(x, "x", tiled=True, precise=1),
        lambda x: pc.pbroadcast_start(x, "x", N),
        lambda x: pc.ppermute_start(x, "x", [(0, 1), (0, 2)]),
    ):
        with pytest.raises(CollectiveError):
            on_devices(lambda x, start=start: start(x).done(), x)
    with pytest.raises(CollectiveError, match="after='y': it must be arrays"):
        on_devices(lambda x: pc.psum_start(x, "x").done(after="y"), x)


TOO_EARLY = {
    "operator": lambda started, x: started + 1,
    "operator of an array": lambda started, x: x * started,
    "product of a constant": lambda started, x: np.ones((5, 3), np.float32) @ started,
    "comparison": lambda started, x: started < 1,
    "index": lambda started, x: started[0],
    "unpacked": lambda started, x: [*started],
    "function of jax": lambda started, x: jnp.sin(started),
    "function of numpy": lambda started, x: np.sin(started),
    "conversion": lambda started, x: np.asarray(started),
    "collective": lambda started, x: pc.psum(started, "x"),
    "argument of jit": lambda started, x: jax.jit(jnp.sin)(started),
    "carry": lambda started, x: jax.lax.fori_loop(0, 2, lambda _, c: c, started),
    "result": lambda started, x: started,
    "shape": lambda started, x: started.shape,
    "method": lambda started, x: started.astype("float32"),
}


@pytest.mark.parametrize("use", TOO_EARLY)
def test_a_result_that_is_used_before_it_is_asked_for_is_refused(use):
    x = harness.random((N, 3, 5), "float32")
    with pytest.raises(CollectiveError, match=r"before it is used; call .done\(\) first"):
        on_devices(lambda x: TOO_EARLY[use](pc.psum_start(x, "x"), x), x)


def test_a_started_collective_is_an_object_like_others():
    started = Started.of(np.ones(3))
    assert not any(hasattr(started, name) for name in ("shape", "_repr_html_", "__len__"))
    assert started in [started] and {started: 1}[started] == 1 and started != Started.of(np.ones(3))
    for copied in (copy.copy(started), copy.deepcopy(started), pickle.loads(pickle.dumps(started))):
        np.testing.assert_array_equal(copied.done(), np.ones(3))
    assert jax.tree.leaves([started]) == [started]


BOTH_AT_ONCE = {
    "called twice": lambda g, x: jnp.sin(jax.jit(g)(x)) + jax.jit(g)(2 * x),
    "tangents of gradients": lambda g, x: jax.jvp(
        jax.grad(lambda x: jnp.sum(jnp.sin(g(x)) ** 3)), (x,), (jnp.cos(x),)
    )[1],
    "batched tangents": lambda g, x: jax.vmap(jax.linearize(lambda x: jnp.sin(g(x)), x)[1])(
        jnp.stack([x, x + 1])
    ),
}


@pytest.mark.parametrize("program", BOTH_AT_ONCE)
def test_one_start_may_be_under_way_twice(by_nccl, program):
    x = harness.random((N, 2 * N, 3 * N), "float32")
    program = BOTH_AT_ONCE[program]
    got = on_devices(functools.partial(program, lambda x: split("all_gather", x)[0]), x)
    want = on_devices(functools.partial(program, functools.partial(whole, "all_gather")), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["all_gather", "psum_scatter"])
def test_tangents_may_be_the_operand_itself(by_nccl, form):
    """XLA merges calls of the same text and operands, and would copy what one start has brought."""
    x = harness.random((N, 2 * N, 3 * N), "float32")

    def both(collective, x):
        return jnp.stack(jax.jvp(collective, (x,), (x,)))

    got = on_devices(functools.partial(both, lambda x: split(form, x)[0]), x)
    want = on_devices(functools.partial(both, functools.partial(whole, form)), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_of_an_operand_that_xla_would_compute_twice(by_nccl):
    x = harness.random((N, 2 * N, 3 * N), "float32")
    got = on_devices(lambda x: split("all_to_all", jnp.eye(2 * N)[:, :N])[0], x)
    want = on_devices(lambda x: whole("all_to_all", jnp.eye(2 * N)[:, :N]), x)
    np.testing.assert_array_equal(got, want)
    if jax.__version_info__ < (0, 11):
        return  # XLA lays out a transposed operand twice: an error, see copies.Copier.failed

    def derivatives(gather, x):
        return jax.jacrev(lambda y: gather(jnp.concatenate([y] * N)))(x[:2, :4])

    got = on_devices(functools.partial(derivatives, lambda x: split("all_gather", x)[0]), x)
    want = on_devices(functools.partial(derivatives, functools.partial(whole, "all_gather")), x)
    np.testing.assert_array_equal(got, want)


def test_elements_that_share_bytes_go_as_by_the_whole_collective(by_nccl):
    x = harness.random((N, 2 * N, 3 * N), "int4")
    pc.reset_counts()
    for form in FORMS:
        if "scatter" not in form:
            got = on_devices(lambda x, form=form: split(form, x)[0].astype("int8"), x)
            want = on_devices(lambda x, form=form: whole(form, x).astype("int8"), x)
            np.testing.assert_array_equal(got, want)
    assert not any(algorithm == "copies" for _, _, algorithm in pc.counts())


def test_a_program_has_one_text_whenever_it_is_traced(by_nccl):
    """Processes share compiled programs by their text: a history of traces must not enter it."""
    x = jax.ShapeDtypeStruct((N, 2 * N, 3 * N), "float32")

    def text():
        def program(x):
            both = sum(split("all_gather", x + k)[0].sum() for k in range(2))
            return jax.grad(lambda x: jnp.sum(split("psum_scatter", x)[0] * both))(x)

        return harness.per_device(program, harness.mesh(N)).lower(x).as_text()

    first = text()
    between = harness.per_device(lambda x: [split(f, x)[0] for f in FORMS], harness.mesh(N))
    between.lower(jax.ShapeDtypeStruct((N, 2 * N, 3 * N), "float32"))
    assert text() == first
    assert all(f"gather start {24 * N * N} {place} " in first for place in range(2))
