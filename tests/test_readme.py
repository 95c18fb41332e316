"""The README's examples run as they stand, and its two commands are where they are promised."""

import os
import re
import shlex
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


SESSION = """
import code, sys
console = code.InteractiveConsole()
for line in sys.stdin.read().splitlines():
    console.push(line)
"""


@pytest.mark.full
def test_examples_run_as_pasted_in_one_session_and_print_what_they_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    examples = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        input="\n".join(examples),
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(README.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = re.findall(r"^print.*  # (.*)", "\n".join(examples), re.M)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr
    for comment in said:  # a value, or in words what is printed
        if comment[0] in "{(T":
            assert comment in done.stdout.splitlines(), comment
    assert said.count("True") == 5 == done.stdout.splitlines().count("True")
    assert "override_lax: 3 replaced, 0 left to lax" in done.stdout
    assert "psum of 65536 bytes a device on a ring of 16 x v5p: gather" in done.stdout
    assert "v5e:16x1, modelled: " in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"lanes.png", "ring.gif", "perfetto.json"}


def test_replays_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"\n\n((?:    .*\n)+)\n", replay.__doc__ or "")
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "P": PartitionSpec}
    assert example
    exec(textwrap.dedent(example[1]), names | {"replay": replay, "all_gather": all_gather})
    assert capsys.readouterr().out.startswith("v5e:16x16, modelled: ")


def test_each_block_of_shell_is_one_command_and_the_first_three_are_what_ci_runs() -> None:
    first, second, third, *_ = blocks("bash")
    assert all(len(block.splitlines()) == 1 for block in blocks("bash"))
    assert first.strip().endswith("-m benchmarks")
    assert second.strip().endswith("&& .venv/bin/python -m pytest -q -n auto"), "quick, in a venv"
    assert third.startswith(".venv/bin/python -m pytest -q -n auto -m full"), "in that venv"


TOOL = """#!/usr/bin/env bash
echo "$(basename "$0") $*"
case "$*" in *BROKEN*) exit 1 ;; esac
"""


def continuous_integration(tmp_path: Path, broken: str) -> tuple[int, list[str]]:
    """`.ci/run` where tools only say how they were called; its exit status, and what was called."""
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    (tree / ".ci" / "run").write_text((README.parent / ".ci" / "run").read_text())
    (tree / "tool").write_text(TOOL)
    tools = "for t in python ruff mypy; do cp tool .venv/bin/$t; chmod +x .venv/bin/$t; done"
    lines = [
        "no",
        f"mkdir -p .venv/bin; {tools} && .venv/bin/python quick",
        ".venv/bin/python full",
    ]
    lines = [line.replace(broken, "BROKEN") if broken else line for line in lines]
    (tree / "README.md").write_text("\n".join(["```bash", *lines, "```", ""]))
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        name = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tree), *name, *command], check=True)
    done = subprocess.run(["bash", str(tree / ".ci" / "run")], capture_output=True, text=True)
    return done.returncode, [x for x in done.stdout.splitlines() if not x.startswith("==")]


def test_ci_runs_the_readmes_commands_and_fails_with_the_first_that_fails(tmp_path: Path) -> None:
    quick, lint = ["python quick"], ["ruff check .", "ruff format --check .", "mypy "]
    status, [*said, last] = continuous_integration(tmp_path / "a", "")
    assert (status, said) == (0, [*quick, *lint])
    assert re.fullmatch(r"python full --part=[1-3]/3", last), "the commit chooses"
    status, said = continuous_integration(tmp_path / "b", "quick")
    assert status and said == ["python BROKEN"]
    status, said = continuous_integration(tmp_path / "c", "full")
    assert status and said[:-1] == [*quick, *lint] and said[-1].startswith("python BROKEN ")


def section(title: str) -> str:
    return README.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_what_verify_prints_is_what_stands_there() -> None:
    (shown,) = re.findall(r"```\n\$ (.*?)```", section("Prove a kernel of yours"), re.DOTALL)
    command, *lines = shown.splitlines()
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=README.parent,
    )
    assert done.returncode == 1, done.stderr
    printed = iter(done.stdout.splitlines())
    for line in lines:
        assert line.strip() == "..." or line in printed, (
            f"not printed, or not in this order: {line}"
        )
