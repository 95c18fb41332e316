"""The README's example runs as it stands, and its two commands are where they are promised."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_example_runs_as_it_stands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "True {('all_gather', 'pallas', " in done.stdout


def test_first_two_lines_of_shell_are_the_two_commands() -> None:
    first, second, *_ = blocks("bash")[0].splitlines()
    assert first.endswith("-m benchmarks")
    assert "pytest" in second
