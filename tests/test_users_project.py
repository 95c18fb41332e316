"""A project of a user's: its kernel, its tests, its types, and a CI that has the kernel judged."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import jax
import pytest

import pallas_collectives

ROOT = Path(pallas_collectives.__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

FILES = {
    "pyproject.toml": f"""
        [project]
        name = "rings"
        version = "1.0"
        dependencies = ["jax=={jax.__version__}", "pallas-collectives=={VERSION}"]
        """,
    "rings/__init__.py": "",
    "rings/shift.py": '''
        """One kernel, one collective of the library, and what serves it."""

        from typing import Any

        import jax
        from jax import lax
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        import pallas_collectives as pc


        def shift(x: jax.Array, wait: bool = True) -> jax.Array:
            """Gives each device the x of its left neighbour."""
            n = lax.axis_size("x")

            def kernel(x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any) -> None:
                right = lax.rem(lax.axis_index("x") + 1, n)
                copy = pltpu.make_async_remote_copy(
                    x_ref, o_ref, send_sem, recv_sem, device_id={"x": right}
                )
                copy.start()
                if wait:
                    copy.wait()

            anywhere = pl.BlockSpec(memory_space=pl.ANY)
            shifted: jax.Array = pl.pallas_call(
                kernel,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                in_specs=[anywhere],
                out_specs=anywhere,
                scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            )(x)
            return shifted


        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, int]:
            product = pc.all_gather_matmul(x, w, "x")
            with pc.override_lax(), pc.use_backend("pallas"):
                total: jax.Array = pc.psum(product, "x")
            started = pc.all_gather_start(total, "x")
            print(pc.explain("psum", 1 << 20, devices=8, chip="v5e").algorithm, started.done())
            return total, sum(pc.counts().values())
        ''',
    "tests/test_shift.py": """
        import functools

        from pallas_collectives import verify
        from rings.shift import shift


        def test_shift_is_sound() -> None:
            assert verify.assert_sound(shift, "f32[8,128]", devices=(2, 4)).ok


        def test_without_its_wait_it_is_not() -> None:
            faulty = verify.check(functools.partial(shift, wait=False), "f32[8,128]", devices=2)
            assert {finding.rule for finding in faulty.findings} == {"entry", "leftover"}
        """,
    "ci.sh": """
        python -m pytest -q tests
        python -m pallas_collectives verify rings.shift:shift --arg=f32[8,128] --sarif=a.sarif
        """,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("users")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    return folder


def run(project: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    paths = f"{ROOT}{os.pathsep}{project}"
    return subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env={**os.environ, "PYTHONPATH": paths, "MYPYPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.full
def test_its_ci_runs_its_tests_and_has_its_kernel_judged(project: Path) -> None:
    for line in (project / "ci.sh").read_text().splitlines():
        python, *command = shlex.split(line)
        assert python == "python"
        done = run(project, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    log = json.loads((project / "a.sarif").read_text())
    assert log["runs"][0]["invocations"] == [{"executionSuccessful": True}]
    fault = run(project, *command, "--set", "wait=False")
    assert fault.returncode == 1 and "rings/shift.py:" in fault.stdout
    (result, *_) = json.loads((project / "a.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == "rings/shift.py"


@pytest.mark.full
def test_a_strict_checker_takes_its_files(project: Path) -> None:
    """But for calls of JAX's own that have no types."""
    pytest.importorskip("mypy")
    strict = ("-m", "mypy", "--strict", "--follow-imports=silent", "--untyped-calls-exclude=jax")
    done = run(project, *strict, "rings", "tests")
    assert done.returncode == 0, done.stdout
    (project / "wrong.py").write_text("import pallas_collectives as pc\n\npc.simulate('8')\n")
    wrong = run(project, *strict, "wrong.py")
    assert wrong.returncode == 1 and 'incompatible type "str"; expected "int"' in wrong.stdout


NO_DEVICE = """
import pallas_collectives as pc
assert all(getattr(pc, name) for name in pc.PUBLIC) and pc.verify.check and pc.replay.draw
import jax
try:
    jax.devices()
except RuntimeError as error:
    assert "nowhere" in str(error)
    print("none was looked for before")
"""


@pytest.mark.full
def test_no_device_is_touched_by_any_name(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_DEVICE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "none was looked for before\n", done.stderr
