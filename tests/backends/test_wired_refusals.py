"""What is refused over narrower wires, left out, or stays as it is; and what compiles."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives import wires
from pallas_collectives.backends import wire_choice
from pallas_collectives.errors import AlgorithmError, CollectiveError, DtypeError, WireError
from pallas_collectives.wires import Wire
from wired_calls import BY_XLA, data, moves, run, sums


def test_without_a_wire_programs_are_what_they_were() -> None:
    x = jnp.zeros((2, 16, 128))

    def text(**how: Any) -> str:
        def program(x: jax.Array) -> Any:
            return [*moves(x, 2, **how), *sums(x, **how)]

        return harness.per_device(program, harness.mesh(2)).lower(x).as_text()  # type: ignore[attr-defined]

    for backend in ("xla", "pallas"):
        assert text(wire=None, wire_backward=None, backend=backend) == text(backend=backend)
    assert "i8" not in text(backend="xla") and "i8" in text(wire="int8", backend="xla")


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda x: pc.psum(x, "x", wire="int4"), WireError, "int8"),
        (lambda x: pc.psum(x[0, :1], "x", wire="int8"), WireError, "in place of 4"),
        (lambda x: pc.psum(x[0, :1], "x", wire="int8"), WireError, "more numbers at a time"),
        (lambda x: pc.all_gather(x[:, :1], "x", wire="int8"), WireError, "in place of"),
        (lambda x: pc.all_gather(x[:, :1], "x", wire="int8"), WireError, "make rows longer"),
        (lambda x: pc.psum(x.astype(int), "x", wire="int8"), DtypeError, "a wire takes"),
        (lambda x: pc.psum(x.astype("bfloat16"), "x", wire="bfloat16"), DtypeError, "no narrower"),
        (
            lambda x: pc.psum(x, "x", wire="int8", algorithm="one_shot"),
            AlgorithmError,
            "name 'gather': it quantises each term once",
        ),
        (
            lambda x: pc.psum_scatter(x, "x", tiled=True, wire="int8", algorithm="one_shot"),
            AlgorithmError,
            "name 'exchange': it quantises each term once",
        ),
        (
            lambda x: pc.psum_scatter(x, "x", tiled=True, wire="int8", algorithm="direct"),
            AlgorithmError,
            "name 'exchange': it quantises each term once",
        ),
        (
            lambda x: pc.all_gather(jnp.tile(x, 64), "x", wire="int8", algorithm="exchange"),
            AlgorithmError,
            "algorithm=.exchange.*one of",
        ),
        (lambda x: pc.psum(x, "x", wire="int8", precise=True), CollectiveError, "widens"),
        (lambda x: pc.psum(x, "x", wire="int8", order="rank"), WireError, "different rows"),
        (lambda x: pc.psum(x, "x", wire=np.ones(3)), WireError, "a dtype or its name"),
        (lambda x: pc.psum(x, "x", wire=jnp.int32), WireError, "dtype='int32' of a wire"),
        (lambda x: pc.psum(x, "x", wire={"psum": "int8"}), WireError, "a dtype or its name"),
        (lambda x: pc.all_gather(x, "x", dequantize="no"), CollectiveError, "True or False"),
        (lambda x: pc.pshuffle(x, "x", [1, 2, 0], dequantize="no"), CollectiveError, "or False"),
        (lambda x: pc.pswapaxes(x[:3], "x", 0, dequantize="no"), CollectiveError, "or False"),
        (lambda x: pc.psum(x, "x", return_residue="no"), CollectiveError, "True or False"),
        (
            lambda x: pc.all_gather(x, "x", wire="int8", wire_backward="int8", dequantize=False),
            WireError,
            "no derivative",
        ),
        (
            lambda x: pc.ppermute(x[:0], "x", [(0, 1)], wire="int8", dequantize=False),
            CollectiveError,
            "an empty array has no scales",
        ),
        (lambda x: pc.all_gather(x, "x", dequantize=False), WireError, "has scales"),
        (lambda x: pc.all_gather(x, "x", wire="auto", dequantize=False), WireError, "has scales"),
    ],
)
@pytest.mark.parametrize("backend", [None, "pallas"])
def test_what_is_refused(backend: Any, call: Any, error: Any, match: str) -> None:
    x = jnp.zeros((3, 6, 4))
    with pc.use_backend(backend), pytest.raises(error, match=match):
        harness.per_device(call, harness.mesh(3)).lower(x)  # type: ignore[attr-defined]


def test_keys_are_of_the_forward_pass() -> None:
    wire = Wire("int8", rounding="stochastic", key=jax.random.key(0))
    with pytest.raises(WireError, match="nearest"):
        run(lambda x: pc.psum(x, "x", wire_backward=wire), data(2), n=2)


@pytest.mark.usefixtures("fresh_counts")
def test_an_optional_wire_gives_way_to_the_order_of_the_ranks() -> None:
    x = data(4)
    ranked = lambda x, **how: pc.psum(x, "x", order="rank", **how, **BY_XLA)  # noqa: E731
    got, exact = run(lambda x: (ranked(x, wire="auto"), ranked(x)), x)
    np.testing.assert_array_equal(got, exact)
    ((_, _, why),) = pc.wire_counts()
    assert "depends on the operand's size" in why


def test_empty_arrays_are_neither_drawn_nor_sent() -> None:
    def program(x: jax.Array) -> Any:
        for group in (128, "row"):
            wire = Wire("int8", group, rounding="stochastic", key=jax.random.key(0))
            how: Any = {"wire": wire, **BY_XLA}
            yield pc.all_gather(x[:, :0], "x", **how)
            yield pc.all_to_all(x[:0], "x", 0, 0, tiled=True, **how)
            none = jnp.zeros(2, jnp.int32)
            yield pc.ragged_all_to_all(x[:0], x, none, none, none, none, axis_name="x", **how)
            yield pc.psum_scatter(x[:, :0], "x", tiled=True, return_residue=True, **how)

    got = run(lambda x: list(program(x)), data(2), n=2, check_vma=False)
    assert [y.size for y in jax.tree.leaves(got)] == [0, 0, data(2).size, 0, 0] * 2


def test_what_is_started_takes_a_wire_as_its_whole_does() -> None:
    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "int8", **BY_XLA}
        return [
            (pc.pshuffle_start(x, "x", [1, 0], **how).done(), pc.pshuffle(x, "x", [1, 0], **how)),
            (pc.pswapaxes_start(x[:2], "x", 0, **how).done(), pc.pswapaxes(x[:2], "x", 0, **how)),
        ]

    for got, want in run(program, data(2), n=2):
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("fresh_counts")
def test_a_way_over_a_wire_is_left_out_with_it() -> None:
    how: Any = {"wire": "auto", "algorithm": "exchange", "backend": "pallas"}
    run(lambda x: pc.psum(x, "x", **how), np.zeros((4, 8, 128), np.float32))
    ((op, wire, why),) = pc.wire_counts()
    assert (op, wire) == ("all_reduce", "") and why


@pytest.mark.usefixtures("fresh_counts")
def test_auto_is_left_out_where_it_would_lose_and_counted() -> None:
    x = data(2)
    got, exact = run(
        lambda x: (pc.psum(x, "x", wire="auto", **BY_XLA), pc.psum(x, "x", **BY_XLA)), x, n=2
    )
    np.testing.assert_array_equal(got, exact)
    ((op, wire, why),) = pc.wire_counts()
    assert (op, wire) == ("all_reduce", "") and "smaller than 2 MiB" in why
    large = np.zeros((2, 1 << 10, 1 << 10), np.float32)
    run(lambda x: pc.psum(x, "x", wire="auto", **BY_XLA), large, n=2)
    assert ("all_reduce", "int8", "") in pc.wire_counts()


@pytest.mark.full
@pytest.mark.usefixtures("fresh_counts", "by_nccl")
def test_between_gpus_of_one_process_auto_takes_wires_where_they_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where the operand is small."""

    def program(x: jax.Array) -> Any:
        how: Any = {"wire": "auto", "backend": "nccl"}
        blocks = pc.all_to_all(x, "x", 0, 0, tiled=True, **how)
        return pc.all_gather(x, "x", **how).sum(), pc.psum(x, "x", **how).sum(), blocks.sum()

    for least, taken in ((wire_choice.LINKED_BYTES, False), (4 << 20, True)):
        monkeypatch.setattr(wire_choice, "LINKED_BYTES", least)
        pc.reset_counts()
        run(lambda x: program(x), np.zeros((2, 1 << 10, 1 << 11), np.float32), n=2)
        told = {op: (wire, why) for op, wire, why in pc.wire_counts()}
        for op in ("all_gather", "all_reduce", "all_to_all"):
            wire, why = told[op]
            if taken:
                assert (wire, why) == ("int8", "")
            else:
                assert wire == "" and why.startswith("between GPUs of one host")


def test_bfloat16_of_float32_is_a_cast() -> None:
    x = data(2)

    def program(x: jax.Array) -> Any:
        over: Any = {"wire": "bfloat16", **BY_XLA}
        narrow = [*moves(x, 2, **over), *sums(x, **over)]
        return narrow, [*moves(x, 2, **BY_XLA), *sums(x, **BY_XLA)]

    for got, exact in zip(*run(program, x, n=2), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, rtol=2**-8, atol=0.03)


WIRED = ("int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.full
@pytest.mark.parametrize(
    "generation, wire",
    [
        pytest.param(generation, wire, marks=() if (i - j) % 3 == 0 else pytest.mark.slow)
        for i, generation in enumerate(harness.GENERATIONS)
        for j, wire in enumerate(WIRED)
    ],
)
def test_compiles_for_every_generation(generation: str, wire: str) -> None:
    """Chips without float8 units too: XLA converts there."""

    def program(x: jax.Array) -> Any:
        values, scales = pc.all_gather(x, "x", wire=wire, dequantize=False)
        summed = pc.psum(x, "x", wire=wire, algorithm="exchange")
        return summed, wires.dequantize(values, scales)

    compiled = harness.compile_for_tpu(
        program, harness.GENERATIONS[generation], (256, 512), dtype=jnp.bfloat16
    )
    names = re.findall(r"%(\w+)\.\d+ = .* custom_call_target=\"tpu_custom_call\"", compiled.text)
    kernels = Counter("_".join(name.split("_")[:2]) for name in names)
    # A gather of what a kernel packs, and its values; an exchange, and a gather of the sums.
    assert kernels == {"wire_pack": 1, "all_gather": 2, "wire_values": 1, "all_to": 1}
