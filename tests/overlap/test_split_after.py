"""Collectives in two halves: what comes after a start or an end, on GPUs and over a host's wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import pallas_collectives as pc
from in_halves import AT_ONCE, EVERY, N, on_devices
from jaxprs import primitives_in
from pallas_collectives.errors import CollectiveError


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_what_surely_comes_after_a_start_keeps_its_bits(by_nccl, dtype):
    """Nor does XLA fold it, when it comes to the program as XLA gets it."""
    numbers = np.array([[-0.0, 0.0, 1.5, -2.0], [3.0, -0.0, 0.25, 4.0]], np.float32)
    x = np.asarray(numbers.astype(dtype))

    def held(x):
        started = pc.ppermute_start(x, "x", [(0, 1), (1, 0)])
        kept = started.before(x, surely=True)
        return kept, started.done(after=kept)

    mapped = harness.per_device(held, harness.mesh(2))
    kept, came = mapped(x)
    assert np.asarray(kept).tobytes() == x.tobytes()
    assert np.asarray(came).tobytes() == x[::-1].tobytes()
    name = {"bfloat16": "bf16", "float32": "f32", "int8": "i8"}.get(dtype, "f8E4M3FN")
    shape = f"tensor<4x{name}>"
    lowered = mapped.lower(x).as_text()
    assert any("stablehlo.subtract" in line and shape in line for line in lowered.splitlines())


def test_what_has_no_zero_keeps_its_bits_too(by_nccl):
    def held(x):
        started = pc.ppermute_start(x, "x", [(0, 1), (1, 0)])
        scales = jax.lax.bitcast_convert_type(x, jnp.float8_e8m0fnu)
        kept = started.before(scales, surely=True)
        return jax.lax.bitcast_convert_type(kept, jnp.uint8), started.done(after=kept)

    x = np.arange(254, dtype=np.uint8).reshape(2, 127)
    kept, came = harness.per_device(held, harness.mesh(2))(x)
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(came, x[::-1])


AFTER = {
    **{form: lambda x, form=form, **o: EVERY[form](x, **o) for form in ("psum", *AT_ONCE)},
    "wire": lambda x, **o: ("psum", (x, "x"), {"wire": "int8", "wire_backward": "int8", **o}),
    "groups": lambda x, **o: ("psum", (x, "x"), {"axis_index_groups": [[*range(N)]], **o}),
    "ragged": lambda x, **o: (
        "ragged_all_to_all",
        (x, x, *[jnp.ones(N, int)] * 4),
        {"axis_name": "x", **o},
    ),
}


@pytest.mark.parametrize("form", AFTER)
def test_after_is_checked_by_every_collective(form):
    def started(x):
        name, args, options = AFTER[form](x, after="y")
        return getattr(pc, f"{name}_start")(*args, **options).done()

    with pytest.raises(CollectiveError, match="after='y': it must be arrays"):
        harness.per_device(started, harness.mesh(N)).lower(jnp.ones((N, 2 * N)))


@pytest.mark.parametrize("form", [form for form in AFTER if form != "psum"])
def test_what_is_one_call_comes_after_what_is_named_on_gpus(by_nccl, form):
    """By a barrier in front of it, which else it has not."""

    def program(x, ahead):
        other = jnp.sin(x)
        name, args, options = AFTER[form](x, **({"after": other} if ahead else {}))
        return getattr(pc, f"{name}_start")(*args, **options).done() + other

    for ahead in (False, True):
        on = {"mesh": harness.mesh(N), "in_specs": P("x"), "out_specs": P("x")}
        mapped = jax.shard_map(functools.partial(program, ahead=ahead), check_vma=False, **on)
        names = primitives_in(jax.make_jaxpr(mapped)(jnp.ones((N * N, 512))).jaxpr)
        assert ("optimization_barrier" in names) == ahead


def test_what_comes_after_a_batch_need_not_be_batched_itself(by_nccl):
    x = harness.random((N, 2, 3), "float32")

    def program(x):
        return jax.vmap(lambda a: pc.all_gather_start(x, "x", after=a).done(after=a) + a)(x)

    want = on_devices(lambda x: jax.vmap(lambda a: jax.lax.all_gather(x, "x") + a)(x), x)
    np.testing.assert_array_equal(on_devices(program, x), want)
