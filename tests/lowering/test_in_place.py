"""Weights that kernels read where a scan has those of all turns."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

import harness
from layers_in_kernels import (
    FUSED,
    Arrays,
    Layer,
    close,
    counted,
    forward,
    gathered,
    like_laxs,
    loss,
    lowered,
    on_devices,
    one,
    scattered,
)
from pallas_collectives.kernels import collective_matmul
from pallas_collectives.lowering import fusing, in_place
from pallas_collectives.overlap import fusion


@pytest.fixture(autouse=True)
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are quicker than products and exchanges apart, whatever their sizes."""
    monkeypatch.setattr(fusion, "cost", lambda *_: fusion.Cost(1e-6, 3e-3))


def reversed_(x: jax.Array, w: Arrays) -> jax.Array:
    return lax.scan(lambda x, w: (one(x, w), None), x, w, reverse=True)[0]


def unrolled(x: jax.Array, w: Arrays) -> jax.Array:
    """Four turns, two at once."""
    w = jax.tree.map(lambda each: jnp.concatenate([each, each[::-1] / 2]), w)
    return lax.scan(lambda x, w: (one(x, w), None), x, w, unroll=2)[0]


def nested(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights of the inner loop are parts of the outer one's."""
    w = jax.tree.map(lambda each: jnp.stack([each, each[::-1] / 2]), w)
    return lax.scan(lambda x, of: (forward(one, scan=True)(x, of), None), x, w)[0]


def shared(x: jax.Array, w: Arrays) -> jax.Array:
    """What a kernel reads, other steps read, too."""

    def turn(x: jax.Array, w: Arrays) -> Any:
        return one(x, w) + jnp.sum(w["up"]) * 1e-3, jnp.max(w["down"], 0)

    x, most = lax.scan(turn, x, w)
    return x + jnp.sum(most) * 1e-3


def mixed(x: jax.Array, w: Arrays) -> jax.Array:
    """One of a kernel's weights is a constant of the loop, another is turned within it."""
    fixed, turned = w["up"][0], w | {"down": jnp.swapaxes(w["down"], 1, 2)}

    def turn(x: jax.Array, w: Arrays) -> Any:
        seen = gathered(x)
        hidden = jnp.tanh(seen @ w["up"]) * (seen @ fixed)
        return x + scattered(jnp.einsum("btn,kn->btk", hidden, w["down"])), None

    return lax.scan(turn, x, turned)[0]


LOOPS = {loop.__name__: loop for loop in (reversed_, unrolled, nested, shared, mixed)}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_give_what_they_give_by_lax(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = harness.results_of(in_place, "read_in_place", monkeypatch)
    assert like_laxs(LOOPS[loop]) == {"gathers": 1, "scatters": 1}
    assert [len(each.stacks) for each in found] == [2]  # of up and of down


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [False, True], ids=["", "vma"])
def test_a_backward_pass_reads_in_place_behind_barriers(
    check_vma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = harness.results_of(in_place, "read_in_place", monkeypatch)
    run = functools.partial(loss, forward(jax.checkpoint(one), scan=True))
    like_laxs(jax.grad(run, (0, 1)), check_vma=check_vma)
    assert [len(each.stacks) for each in found] == [2, 2]  # forward and backward


@pytest.mark.parametrize("mode", harness.ADVERSARIES)
def test_no_race_where_a_turn_reads_in_place(mode: str) -> None:
    want = on_devices(reversed_, "bfloat16")
    with pltpu.force_tpu_interpret_mode(harness.ADVERSARIES[mode]), counted() as kernels:
        got = on_devices(reversed_, "bfloat16")
    close(got, want, "bfloat16")
    assert all(kernels.values())


@pytest.mark.full
def test_another_turns_weights_give_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: every turn reads the first one's."""
    monkeypatch.setattr(
        collective_matmul,
        "_of_turn",
        lambda ref, _: ref if len(ref.shape) == 2 else ref.at[0],
    )
    with pytest.raises(AssertionError):
        like_laxs(forward(one, scan=True))


def narrow(x: jax.Array, w: Arrays) -> jax.Array:
    """Weights are not of whole lanes."""
    return one(x, w | {"up": w["up"][:, :120], "down": w["down"][:120]})


def converted(x: jax.Array, w: Arrays) -> jax.Array:
    return one(x, jax.tree.map(lambda each: (2 * each).astype(x.dtype), w))


def summed(x: jax.Array, w: Arrays) -> jax.Array:
    """Two products are summed; only the gather's kernel reads in place."""
    hidden = jnp.tanh(gathered(x) @ w["up"])
    return x + scattered(hidden @ w["down"] + hidden**2 @ w["down"])


@pytest.mark.parametrize("layer, stacks", [(narrow, 0), (converted, 0), (summed, 1)])
def test_what_is_written_in_any_case(
    layer: Layer, stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = harness.results_of(in_place, "read_in_place", monkeypatch)
    assert all(like_laxs(forward(layer, scan=True)).values())
    assert [len(each.stacks) for each in found] == [stacks]


def test_products_apart_take_their_turn_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it turns out late that no kernel serves."""
    lie = fusion.as_devices_lie

    def late(plan: Any, spec: Any) -> Any:
        return fusion.refused(plan.op, spec, "a test says so") if spec.stacked else lie(plan, spec)

    monkeypatch.setattr(fusion, "as_devices_lie", late)
    assert like_laxs(forward(one, scan=True)) == {"gathers": 0, "scatters": 0}


def left_apart(x: jax.Array, w: Arrays) -> jax.Array:
    """Another product reads what a kernel reads."""
    return one(x, w) + jnp.mean(x @ w["up"], -1, keepdims=True)


@pytest.mark.parametrize("topology, stacks", [("v5p:2x2x2", 1), ("v6e:2x4", 2)])
def test_v5p_copies_what_xlas_products_read_too(
    topology: str, stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = harness.results_of(in_place, "read_in_place", monkeypatch)
    lowered(topology, forward(left_apart, scan=True))
    assert [len(each.stacks) for each in found] == [stacks]


def slices_written(text: str) -> list[str]:
    """Instructions of a compiled program that write weights of one turn of `lowered`'s layers."""
    shapes = "bf16[4096,2048]", "bf16[2048,4096]", "bf16[1,4096,2048]", "bf16[1,2048,4096]"
    lines = (line.split(" = ", 1)[1] for line in text.splitlines() if " = " in line)
    made = (line for line in lines if line.startswith(shapes))
    return [line for line in made if " fusion(" in line or " copy(" in line or "-slice(" in line]


@pytest.mark.full
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_no_turn_writes_its_weights(topology: str, gradient: bool) -> None:
    run: Callable[..., Any] = forward(jax.checkpoint(one) if gradient else one, scan=True)
    program = jax.grad(functools.partial(loss, run)) if gradient else run
    text = lowered(topology, program).compile().as_text()
    assert all(kernel in text for kernel, *_ in FUSED.values())
    assert not slices_written(text)


@pytest.mark.full
def test_turns_write_weights_that_kernels_do_not_read_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_place.Slices, "of", lambda *_: None)
    monkeypatch.setattr(fusing, "_COPIED", 0)
    text = lowered("v5p:2x2x2", forward(one, scan=True)).compile().as_text()
    assert all(kernel in text for kernel, *_ in FUSED.values())
    assert slices_written(text)
