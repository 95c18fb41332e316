"""`python -m benchmarks fused` on devices: what is timed is computed, whole, by each call."""

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import harness
from benchmarking import Bench
from benchmarks import devices, fused, fused_timed, timing
from held_clock import HeldClock
from pallas_collectives.backends.choice import use_backend
from pallas_collectives.backends.pallas.products import GATHER, SCATTER

ROWS, DEPTH, COLUMNS = SHAPE = (16, 128, 256)
N = 2


def body_of(text: str) -> dict[str, tuple[str, str, list[str]]]:
    """A compiled program's only loop, name -> (type, operation, operands); "ROOT" is its last.

    Types are without layouts.
    """
    (name,) = set(re.findall(r"\bbody=%?([\w.\-]+)", text))
    _, _, rest = text.partition(f"\n%{name} (")
    found = {}
    for line in rest.partition("\n}")[0].splitlines()[1:]:
        match = re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(,|$)", line)
        assert match, line
        root, name, type_, operation, operands, _ = match.groups()
        type_ = re.sub(r"\{[\d,]*\}", "", type_)
        node = type_, operation, re.findall(r"%([\w.\-]+)", operands)
        found[name] = node
        if root:
            found["ROOT"] = node
    return found


def before(body: dict[str, tuple[str, str, list[str]]], name: str) -> set[str]:
    """What a value is computed from, in this turn of the loop."""
    seen, open_ = set(), [name]
    while open_:
        if (at := open_.pop()) not in seen:
            seen.add(at)
            open_ += body[at][2]
    return seen


@pytest.mark.parametrize("form", ["apart", "product", "collective"])
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_each_call_is_computed_whole_and_after_the_one_before(
    op: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    mesh = harness.mesh(N)
    call, left = fused_timed.forms(op, SHAPE, N)[form]
    shapes = [jax.ShapeDtypeStruct((N, *s), jnp.float32) for s in (left, (DEPTH, COLUMNS))]
    with use_backend("xla"):
        program = fused_timed.chain(call, mesh, 1 + 2 * timing.IN_A_ROW)
        body = body_of(program.lower(*shapes).compile().as_text())
    gathers = op == GATHER
    whole = f"f32[{N * ROWS},{DEPTH}]" if gathers else f"f32[{ROWS},{COLUMNS}]"
    result = {
        "apart": f"f32[{N * ROWS if gathers else ROWS},{COLUMNS}]",
        "product": f"f32[{N * ROWS},{COLUMNS}]",
        "collective": whole,
    }[form]
    (last,) = (name for name in body["ROOT"][2] if body[name][0] == result)  # the loop carries it
    made = before(body, last)
    called = "all-gather" if gathers else "reduce-scatter"
    collectives = [name for name in made if body[name][1] == called]
    assert len(collectives) == (0 if form == "product" else timing.IN_A_ROW)
    assert {body[name][0] for name in collectives} <= {whole}
    # Each link is computed from the result before it, and each overwrites an operand in place.
    links = [name for name in made if "dynamic-update-slice" in name]
    assert len(links) == timing.IN_A_ROW
    chained = sorted(links, key=lambda name: len(before(body, name)))
    assert all(a in before(body, b) for a, b in itertools.pairwise(chained))
    assert not [name for name, (_, operation, _) in body.items() if operation == "copy"]


def test_each_form_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HeldClock(monkeypatch)
    monkeypatch.setattr(timing, "SAMPLES", 3)

    def lasting(seconds: float) -> tuple[fused_timed.Call, tuple[int, int]]:
        def call(x: jax.Array, w: jax.Array) -> jax.Array:
            return clock.hold(jnp.matmul(x, w), seconds / N)

        return call, (ROWS, DEPTH)

    slow = {"collective": lasting(0.03), "product": lasting(0.01)}
    monkeypatch.setattr(fused_timed, "forms", lambda *_: slow)
    found = fused_timed.seconds(harness.mesh(N), GATHER, SHAPE, 2, "normal")
    assert found == pytest.approx({"collective": 0.03, "product": 0.01})


@pytest.mark.full
@pytest.mark.parametrize(
    "pod, shape",
    [
        pytest.param("v4:4x4x4", "16384x1024x8192", marks=pytest.mark.slow),
        ("v5p:4x4x4", "2048x4096x4096"),
        ("7x:4x4x4", "1024x4096x4096"),
    ],
)
def test_products_over_two_axes_hide_the_wire(pod: str, shape: str) -> None:
    """Modelled: what is wanted of each row of the command, at the smallest shape that has it.

    Two cores that share HBM (v4, v5p) wait for first rows and weights: smaller shapes hide less.
    """
    rows = [*fused.modelled([pod], fused.OPS, [fused.shape_of(shape)], ("x", "y"))]
    assert len(rows) == 2
    assert [row.line() for row in rows if row.verdict] == []


def test_devices_have_rows_of_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a run on real devices, here on CPUs that are not taken for simulated TPUs."""
    monkeypatch.setattr(devices, "kind", lambda: "gpu")
    monkeypatch.setenv("PALLAS_COLLECTIVES_BACKEND", "xla")
    asked: list[Any] = []

    def seconds(
        mesh: Any, op: str, shape: fused_timed.Shape, iters: int, values: str
    ) -> dict[str, float]:
        asked.append((op, shape, iters, values))
        return {"fused": 4e-6, "apart": 6e-6, "product": 3e-6, "collective": 2e-6}

    monkeypatch.setattr(fused_timed, "seconds", seconds)
    status, out, err = bench("fused", "-n=2", "--values=ones")
    assert status == 0, err
    title, header, *rows = out.splitlines()
    assert "Measured" in title and "--values=ones" in title and header.endswith("apart us")
    assert {row.split(maxsplit=2)[2].split(maxsplit=2)[2] for row in rows} == {
        "4.0         3.0         2.0      50.0      1.33         6.0  below what is wanted"
    }
    assert [*map(fused.shape_of, fused.TIMED_SHAPES)] == [s for op, s, *_ in asked if op == GATHER]
    assert (SCATTER, (2048, 4096, 8192), 2, "ones") in asked


@pytest.mark.parametrize("text", ['[{"where": "v5e:16", ', "[3]", '[{"shape": []}]'])
def test_broken_rows_are_said_before_anything_is_replayed(
    text: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "SAVED", tmp_path / "fused.json")
    monkeypatch.setattr(fused, "modelled", lambda *_: pytest.fail("it replays"))
    fused.SAVED.write_text(text)
    status, _, err = bench("fused", "--save")
    assert status == 2 and str(fused.SAVED) in err and "restore it" in err
