"""The README's examples run as they stand, and its two commands are where they are promised."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_collectives import all_gather, replay

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_examples_run_as_they_stand() -> None:
    first, _, beside, *_ = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", first + beside], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "True {('all_gather', 'pallas', " in done.stdout
    assert "True {('all_gather_matmul', " in done.stdout
    assert "v5e:16x1, modelled: " in done.stdout


def test_replays_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"\n\n((?:    .*\n)+)\n", replay.__doc__ or "")
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "P": PartitionSpec}
    assert example
    exec(textwrap.dedent(example[1]), names | {"replay": replay, "all_gather": all_gather})
    assert capsys.readouterr().out.startswith("v5e:16x16, modelled: ")


def test_first_two_lines_of_shell_are_the_two_commands() -> None:
    first, second, *_ = blocks("bash")[0].splitlines()
    assert first.endswith("-m benchmarks")
    assert "pytest" in second
