"""`report A.json ...`: JSON results as a Markdown page, with plots beside it.

`report --gallery --out=PAGE.md` shows every kind of picture that there is, with what to see in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import baseline, plots, results, tables
from benchmarks.results import Saved
from benchmarks.rows import PARTS
from benchmarks.settings import FlagError

_OUT = flags.DEFINE_string(
    "out", "", "The page, *.md, with PAGE-RESULTS.png beside it; by default printed."
)

_GALLERY = flags.DEFINE_bool(
    "gallery", False, "Add every kind of picture once, with what to see in it; wants --out."
)

_VERSIONS = ("jax", "jaxlib", "libtpu", "nccl", "nccl4py", "pallas-collectives")


def main(argv: Sequence[str]) -> int:
    """Prints or writes the page."""
    if not argv[1:] and not _GALLERY.value:
        raise FlagError("report", "it needs files of results", "name some that --json has written")
    if _GALLERY.value and not _OUT.value:
        raise FlagError("--gallery", "its pictures need a page beside them", "add --out=gallery.md")
    saved = {path: results.load(path) for path in argv[1:]}
    if not _OUT.value:
        print("\n".join(page(Path(path).stem, of) for path, of in saved.items()))
        return 0
    out = Path(results.check_writable(_OUT.value, "--out"))
    if out.suffix != ".md":
        raise FlagError(f"--out={out}", "the page is Markdown", "name a file that ends in .md")
    plots.check_installed()
    pages = []
    for path, of in saved.items():
        text = page(Path(path).stem, of)
        picture = out.with_name(f"{out.stem}-{Path(path).stem}.png")
        if plots.save(str(picture), of.parts, of.environment):
            text += f"\n![bandwidth and time against size]({picture.name})\n"
        pages.append(text)
    if _GALLERY.value:
        pages.append(_gallery(out))
    results.write(str(out), lambda file: file.write("\n".join(pages)))
    print(f"written: {out}")
    return 0


def _gallery(out: Path) -> str:
    from benchmarks import devices, gallery  # all of the replay, which a page of results needs not

    devices.prepare(2)
    return gallery.page_of(out.parent, out.stem)


def page(title: str, saved: Saved) -> str:
    """Results as Markdown: what they depend on, and a table for each part."""
    lines = [f"# {title}", "", *(f"* {line}" for line in about(saved.environment)), ""]
    for part, rows in saved.parts.items():
        if rows:
            _, name = PARTS[part]
            if part == "measured" and saved.environment["platform"] == "simulated":
                name = "Simulated: verified in interpret mode, not timed"
            lines += [f"## {name}", "", tables.markdown(rows)]
    return "\n".join(lines)


def about(environment: dict[str, Any]) -> list[str]:
    """What results depend on, a line for each."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in environment["mesh"].items())
    versions = environment["versions"]
    known = [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]
    link = environment["link_gbps"]
    along = zip(*environment["coordinates"], strict=True)
    chips = "x".join(str(len(set(places))) for places in along)
    changed = ", with changes" if environment["modified"] else ""
    options = baseline.named(environment["lax_options"])
    return [
        f"{environment['devices']} x {environment['chip']} ({environment['platform']}), "
        f"mesh {mesh}, processes: {environment['processes']}",
        *([f"chips as they lie: {chips}"] if chips else []),
        *([f"one link (a GPU's NVLinks together): {link:g} GB/s one way"] if link else []),
        f"Python {environment['python']}, {', '.join(known)}",
        f"commit {environment['commit'] or 'unknown'}{changed}",
        *([f"lax's collectives compiled with {options}"] if options else []),
        *(f"{name}={value}" for name, value in environment["variables"].items()),
        f"`python -m benchmarks {' '.join(environment['command'])}`",
    ]
