"""What is done with results: kept and gone on with, reported, plotted, compared."""

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from benchmarking import NOTHING_ELSE, Bench
from benchmarks import compare, measure, plots, report, results, tables
from benchmarks.results import Saved
from benchmarks.rows import PARTS, Compiled, Measured, Replayed, Row, Wired
from benchmarks.settings import FlagError
from pallas_collectives.replay import draw

SMALL = (
    "--mesh=2",
    "--sizes=8K",
    "--collective=all_gather,ppermute",
    "--algorithm=direct,partners",
)


def test_a_run_goes_on_where_it_was_interrupted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    arguments = (*SMALL, *NOTHING_ELSE, f"--json={file}")
    assert bench(*arguments, "--resume").status == 0  # there is nothing to keep yet
    whole = json.loads(file.read_text())
    kept = [{**row, "interpret_ms": 12345.0} for row in whole["measured"][:1]]
    file.write_text(json.dumps({**whole, "measured": kept}))
    ran: list[Row] = []

    def attempt(step: Any, row: Measured, *rest: Any) -> Measured:
        ran.append(row)
        return real(step, row, *rest)

    real = measure._attempt
    monkeypatch.setattr(measure, "_attempt", attempt)
    status, out, _ = bench(*arguments, "--resume")
    assert status == 0
    assert "2 rows, all right" in out
    again = json.loads(file.read_text())["measured"]
    assert [row.op for row in ran] == ["ppermute"]
    assert again[:1] == kept
    assert [(row["op"], row["wrong"]) for row in again] == [("all_gather", 0), ("ppermute", 0)]
    status, _, err = bench(*arguments, "--resume", "--seed=1")
    assert status == 2
    assert "other settings: seed" in err
    other = {**whole, "environment": {**whole["environment"], "chip": "TPU v99"}}
    file.write_text(json.dumps(other))
    status, _, err = bench(*arguments, "--resume")
    assert status == 2
    assert "other environment: chip" in err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": {}, "settings": {}, "x": []}'])
def test_a_file_without_results_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FlagError, match=r"a\.json: it holds no results"):
        results.load(str(tmp_path / "a.json"))


def measured(size: int, us: float | None = None, spread: float = 0.1, **more: Any) -> Measured:
    times: dict[str, Any] = {}
    if us is not None:
        times = {"time_us": us, "time_us_min": us * (1 - spread), "time_us_max": us * (1 + spread)}
        times |= {"algbw": size / us / 1e3, "busbw": size / us / 1e3 * 0.75}
    about = {"op": "all_gather", "type": "float32", "devices": 4, "backend": "pallas"}
    return Measured(**{**about, "size": size, "count": size // 16, "wrong": 0, **times, **more})


def saved(*rows: Row, part: str = "measured", **environment: Any) -> Saved:
    about = {
        "chip": "TPU v5e",
        "platform": "tpu",
        "devices": 4,
        "mesh": {"x": 4},
        "processes": 1,
        "coordinates": [(x, y, 0) for x in range(2) for y in range(2)],
        "python": "3.12.0",
        "versions": {"jax": "0.12.0", "libtpu": None},
        "commit": "c0ffee",
        "modified": False,
        "link_gbps": 45.0,
        "lax_options": {"xla_x": True},
        "variables": {"LIBTPU_INIT_ARGS": "--a"},
        "command": ["--json=a.json"],
    }
    return Saved({**about, **environment}, {}, {part: list(rows)})


def kept(path: Path, of: Saved) -> str:
    parts = {part: [dataclasses.asdict(row) for row in rows] for part, rows in of.parts.items()}
    about = {"environment": of.environment, "settings": of.settings}
    path.write_text(json.dumps({**about, **parts}))
    return str(path)


def test_report_says_what_results_depend_on_and_shows_every_row(
    bench: Bench, tmp_path: Path
) -> None:
    rows = [
        measured(size, us * factor, backend=backend, algorithm=algorithm)
        for size, us in ((8192, 4.0), (1 << 20, 50.0), (1 << 24, 700.0))
        for backend, algorithm, factor in (("pallas", "direct", 1), ("xla", None, 2))
    ]
    file = kept(tmp_path / "run.json", saved(*rows))
    status, out, err = bench("report", file)
    assert status == 0, err
    for told in (
        "4 x TPU v5e",
        "jax 0.12.0",
        "commit c0ffee",
        "xla_x=true",
        "45 GB/s",
        "mesh x=4",
        "lie: 2x2x1",
    ):
        assert told in out
    table = [line for line in out.splitlines() if line.startswith("|")]
    header, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    assert len(lines) == len(rows)
    first = dict(zip(header, lines[0], strict=True))
    assert first["vs lax"] == "2.00x"
    assert first["min-max"] == "3.6-4.4"
    status, out, err = bench("report", file, f"--out={tmp_path / 'page.md'}")
    assert (status, out) == (0, f"written: {tmp_path / 'page.md'}\n")
    assert "(page-run.png)" in (tmp_path / "page.md").read_text()
    picture = matplotlib.image.imread(tmp_path / "page-run.png")
    assert picture.shape[0] > 300 and np.ptp(picture) > 0.5
    status, _, err = bench("report")
    assert status == 2 and "files of results" in err


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_reported_and_compared(bench: Bench, tmp_path: Path, part: str) -> None:
    kind, title = PARTS[part]
    given = {f.name: EXAMPLE.get(f.name, 1.0) for f in dataclasses.fields(kind)}
    file = kept(tmp_path / "run.json", saved(kind(**given), part=part))
    status, out, err = bench("report", file)
    assert status == 0 and f"## {title}\n" in out, err
    status, out, err = bench("compare", file, file)
    assert status == 0 and "1 rows in both, 0 worse, 0 better" in out, err


WORDS = "op algorithm type backend over topology asked ops lax_ops under machine kernel served"
EXAMPLE: dict[str, Any] = {
    **dict.fromkeys([*WORDS.split(), "where", "wire", "unit", "how", "answer"], "a"),
    **dict.fromkeys(["refused", "error", "faults"], ""),
    **{"collectives": [], "spans": [], "wrong": 0},
}


@pytest.mark.full
def test_gallery_shows_every_kind_of_picture(bench: Bench, tmp_path: Path) -> None:
    status, out, err = bench("report", "--gallery", f"--out={tmp_path / 'gallery.md'}")
    assert (status, out) == (0, f"written: {tmp_path / 'gallery.md'}\n"), err
    text = (tmp_path / "gallery.md").read_text()
    files = re.findall(r"^!?\[.*\]\((gallery-.*)\)$", text, re.M)
    assert {file.name for file in tmp_path.iterdir()} == {"gallery.md", *files}
    assert all((tmp_path / file).stat().st_size > 4000 for file in files)
    kinds = re.findall(r"^## `(.*)`\n\n(.+)$", text, re.M)
    assert len(kinds) == len(files) and all(len(see.split()) > 8 for _, see in kinds)
    drawn = {kind.split(".")[-1] for kind, _ in kinds}
    notebooks = Path(__file__).parents[2] / "notebooks"
    for module in (draw.__file__, notebooks / "pictures.py", notebooks / "films.py"):
        tree = ast.parse(Path(module).read_text())
        public = [f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
        returned = {name for name in public if name not in HELPERS}
        assert returned <= drawn, f"{module} draws more: {returned - drawn}"
    status, _, err = bench("report", "--gallery")
    assert status == 2 and "--out=gallery.md" in err


# What pictures are put together from.
HELPERS = {"cells", "boxes", "film", "terms_of"}


def test_plot_has_a_line_for_each_algorithm_lax_and_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    names = (("pallas", "direct"), ("pallas", "ring"), ("xla", None))
    of = saved(
        *(
            measured(size, size / 1e3, backend=backend, algorithm=algorithm)
            for backend, algorithm in names
            for size in (8192, 1 << 20)
        )
    )
    assert plots.save(str(tmp_path / "a.png"), of.parts, of.environment)
    bandwidth, time = drawn.pop().axes
    assert (bandwidth.get_xscale(), bandwidth.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in bandwidth.lines] == ["direct", "ring", "lax"]
    assert list(bandwidth.lines[0].get_xdata()) == [8192, 1 << 20]
    assert time.lines[0].get_label() == "direct: 8.19 µs at 8 KiB"  # latency at the small end
    rows = [
        Replayed(op="psum", type="float32", devices=4, machine=machine, size=size, count=1,
                 time_us=2.0, algbw=1.0, busbw=1.0, bound_us=1.0)
        for machine in ("v5e:4x4", "v5p:4x4x4")
        for size in (8192, 1 << 20)
    ]  # fmt: skip
    assert plots.save(str(tmp_path / "a.png"), {"replayed": rows}, {})
    bandwidth, time = drawn.pop().axes  # a panel a collective, a line a pod
    pods = [line for line in bandwidth.lines if not line.get_label().startswith(("_", "bound"))]
    assert [line.get_label() for line in pods] == ["v5e:4x4, 4", "v5p:4x4x4, 4"]
    assert "bound" in [line.get_label() for line in time.lines]
    assert [label.get_text() for label in time.get_xticklabels()] == ["8 KiB", "1 MiB"]
    assert not plots.save(str(tmp_path / "a.png"), {"measured": [measured(8192)]}, {})


COMPILED = Compiled(
    op="psum", type="float32", devices=4, topology="v5e:2x2", temp=100, ops="kernel"
)
REPLAYED = Replayed(
    op="psum", type="float32", devices=4, machine="v5e:4x4", size=8192, count=1, time_us=10.0
)

WIRED = Wired(
    op="psum", type="bfloat16", devices=4, where="v5e:4x4", wire="int8", size=8192,
    time_us=10.0, passes_us=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "before, after, verdict",
    [
        (measured(8192, 10.0), measured(8192, 10.0), ""),
        (measured(8192, 10.0), measured(8192, 11.9), ""),  # 9-11 meets 10.7-13.1
        (measured(8192, 10.0), measured(8192, 12.3), "SLOWER"),
        (measured(8192, 10.0, spread=0.5), measured(8192, 12.3), ""),
        (measured(8192, 12.3), measured(8192, 10.0), "faster"),
        (measured(8192, 10.0), measured(8192, 10.0, wrong=3), "WRONG: elements"),
        (measured(8192, 10.0), measured(8192, error="E: boom"), "WRONG: E: boom"),
        (measured(8192, error="E: boom"), measured(8192, 10.0), "right again"),
        (measured(8192, 10.0), measured(8192, refused="too far"), "REFUSED: too far"),
        (measured(8192), measured(8192), ""),
        (REPLAYED, dataclasses.replace(REPLAYED, time_us=10.01), "SLOWER"),
        (REPLAYED, dataclasses.replace(REPLAYED, time_us=9.0, kernel="other"), "faster"),
        (REPLAYED, dataclasses.replace(REPLAYED, faults="deadlock"), "WRONG: deadlock"),
        (WIRED, dataclasses.replace(WIRED, time_us=10.01), "SLOWER"),
        (dataclasses.replace(WIRED, passes_us=None), dataclasses.replace(WIRED, time_us=99.0), ""),
        (COMPILED, dataclasses.replace(COMPILED, temp=101), "LARGER"),
        (COMPILED, dataclasses.replace(COMPILED, temp=99, algorithm="ring"), "smaller"),
        (COMPILED, dataclasses.replace(COMPILED, ops="copy"), "OTHER PROGRAM: kernel -> copy"),
    ],
)  # fmt: skip
def test_compare_tells_a_change_from_noise(before: Row, after: Row, verdict: str) -> None:
    part = type(before).__name__.lower()
    (change,) = compare.compare(saved(before, part=part), saved(after, part=part))
    assert change.verdict == verdict
    assert change.is_regression == (verdict != "" and verdict not in "faster, smaller, right again")


def test_compare_fails_on_a_regression_and_refuses_other_devices(
    bench: Bench, tmp_path: Path
) -> None:
    a = kept(tmp_path / "a.json", saved(measured(8192, 10.0), measured(1 << 20, 50.0)))
    b = kept(
        tmp_path / "b.json",
        saved(measured(8192, 20.0), measured(1 << 20, 50.0), measured(4096, 1.0), commit="decaf"),
    )
    status, out, _ = bench("compare", a, b)
    assert status == 1
    assert "+100.0% | SLOWER" in out and "c0ffee -> decaf" in out
    assert "2 rows in both, 1 worse, 0 better; 0 only in the first, 1 only in the second" in out
    status, out, _ = bench("compare", b, a)
    assert status == 0 and "faster" in out
    status, out, _ = bench("compare", a, a)
    assert status == 0 and out.splitlines()[0] == "commit: c0ffee"
    other = kept(tmp_path / "c.json", saved(measured(8192, 10.0), chip="TPU v4"))
    status, _, err = bench("compare", a, other)
    assert status == 2 and "chip differs" in err
    alike = dataclasses.replace(saved(measured(8192, 10.0)), settings={"chain": False})
    status, _, err = bench("compare", a, kept(tmp_path / "e.json", alike))
    assert status == 2 and "chain differs: None and False" in err
    none = kept(tmp_path / "d.json", saved(measured(2048, 10.0)))
    status, _, err = bench("compare", a, none)
    assert status == 2 and "no row in common" in err
    assert bench("compare", a).status == 2


def test_markdown_tables_escape_what_would_break_them() -> None:
    assert tables.grid(["a"], [["x|y"]], [True]) == "| a |\n|---|\n| x\\|y |"
    text = tables.markdown([measured(8192, wrong=None, refused="it is a | b")])
    assert text.endswith("\n* all_gather pallas: it is a | b\n") and "refused" in text


def test_report_does_not_call_simulated_results_measured() -> None:
    about = {"platform": "simulated", "link_gbps": None, "lax_options": {}, "commit": None}
    about["coordinates"] = []
    text = report.page("a", saved(measured(8192), modified=True, **about))
    assert "not timed" in text and "Measured" not in text
    assert "commit unknown, with changes" in text
