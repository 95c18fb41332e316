"""Every command, fed flags that make no sense: an exit status, a sentence, and no traceback."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import (
    __main__,
    certify,
    compiled,
    devices,
    experts,
    fused,
    measure,
    norms,
    readme,
    replay_rows,
    tune,
)
from benchmarks.steps import compiling, learning
from pallas_collectives import __main__ as package
from pallas_collectives.verify import judge
from pallas_collectives.verify.verdict import Case

VALUES = [
    *(
        "",
        "0",
        "-1",
        "1",
        "3",
        "64",
        "1000",
        "9" * 30,
        "1.5",
        "nan",
        "inf",
        "1e400",
        "True",
        "None",
    ),
    *("x", "z", "x,x", "y,x", "x=0", "x=2", "x=9999999999", "8x8", "4x2", "0x4", "1000x1000"),
    *("16G", "1:1G:1", "8K:", "8K:8K:0x", "9999999999G", "1..99999999", "2..1", "2,4"),
    *("v5e:0x4", "v5e:4x4", "v5e:1000x1000", "v5p:4x4x4x4", "tpu7x:2x2x1", "v9:2", "v5e", ":"),
    *("/", "..", "/nowhere/a.json", "a.json", "a.md", "missing.json", "é", "[", "(" * 99),
    *(
        "float8",
        "float64",
        "bfloat16",
        "f32[8,128]",
        "f32[2**99]",
        "f32[9**9**9]",
        "f32[n",
        "s32[]",
    ),
    *(
        "psum",
        "all_gather",
        "ring",
        "ring:vmem",
        "fastest",
        "nccl",
        "xla",
        "lax",
        "os:getcwd",
        "os",
    ),
]
ABSL = {"help", "helpfull", "helpshort", "helpxml", "flagfile", "undefok"}
ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def answered(call: Callable[[], Any], capsys: Any) -> None:
    capsys.readouterr()
    try:
        status = call()
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr()
    assert status in (0, 1, 2), status
    assert "Traceback" not in said.out + said.err
    if status == 2:
        assert len(said.err.split()) > 4 and len(said.err) < 4000


def called(*arguments: str) -> Any:
    """A command with its real parser."""
    with flagsaver.flagsaver():
        return __main__.run(arguments, lambda main, argv: main(__main__._parsed(list(argv))))


def own_flags(command: str) -> list[str]:
    module = importlib.import_module(f"benchmarks.{command}")
    if command == "tune":
        return ["model", "add", "machine", "out", "iters"]
    its = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)}
    return sorted((its | {"out"}) - ABSL)


@st.composite
def command_lines(draw: Any, command: str) -> list[str]:
    names = draw(st.lists(st.sampled_from(own_flags(command)), max_size=3, unique=True))
    given = [f"--{name}={draw(st.sampled_from(VALUES))}" for name in names]
    return given + draw(st.lists(st.sampled_from(VALUES), max_size=1))


@pytest.fixture
def without_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All is real but what takes long: rows that are made, and files of the project's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "prepare", lambda *_: None)
    none: Any = lambda *args, **how: (row for row in ())  # noqa: E731
    for module in (measure, replay_rows, compiled, experts, norms, compiling):
        monkeypatch.setattr(module, "rows", none)
    monkeypatch.setattr(fused, "_modelled", lambda *args: pytest.fail("not asked for"))
    monkeypatch.setattr(fused.itertools, "starmap", none)
    for module, name in ((certify, "_run"), (certify, "_asked"), (tune, "_measure")):
        monkeypatch.setattr(module, name, lambda *args: 0)
    monkeypatch.setattr(certify, "_write", lambda *args: None)
    for module, name in ((readme, "recompute"), (learning, "write"), (tune, "_write")):
        monkeypatch.setattr(module, name, lambda *args: "")
    monkeypatch.setattr(tune, "modelled", lambda *args: None)
    monkeypatch.setattr(readme, "rendered", lambda text, saved: text)


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_a_benchmark_answers_with_a_status_and_a_sentence(
    command: str, capsys: Any, without_work: None
) -> None:
    @settings(max_examples=40, deadline=10_000, suppress_health_check=ALLOWED, derandomize=True)
    @given(command_lines(command))
    def answers(arguments: list[str]) -> None:
        answered(lambda: called(command, *arguments), capsys)

    answers()


FLAGS_OF_VERIFY = (
    *("arg", "args", "set", "mesh", "devices", "axis-names", "machine", "as", "compile"),
    *("json", "sarif", "html"),
)


def test_verify_answers_with_a_status_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judge, "_judged", lambda program, pod: Case(program.mesh, pod))
    monkeypatch.setattr(judge.compiled, "ask", lambda g, *_: pytest.fail(f"{g} asked"))

    @settings(max_examples=80, deadline=10_000, suppress_health_check=ALLOWED, derandomize=True)
    @given(
        st.lists(st.sampled_from(FLAGS_OF_VERIFY), max_size=3),
        st.data(),
        st.sampled_from(["verify_kernels:gather", *VALUES]),
    )
    def answers(names: list[str], data: Any, target: str) -> None:
        given = [f"--{name}={data.draw(st.sampled_from(VALUES))}" for name in names]
        answered(lambda: package.main(["verify", target, *given]), capsys)

    answers()
