"""What is built and installed is the package: all of it, and nothing else."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import pallas_collectives

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"pallas_collectives-{PYPROJECT['project']['version']}"


def files_of_the_package() -> set[str]:
    """Paths that belong into the package, from the root of the tree."""
    paths = (ROOT / "pallas_collectives").rglob("*")
    kept = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in kept}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={folder}", str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.full
def test_the_sdist_holds_the_package_and_what_builds_it(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    beside = {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names == files_of_the_package() | beside


@pytest.mark.full
def test_the_wheel_holds_the_package_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_package()


@pytest.mark.full
def test_the_wheel_runs_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, f"--target={target}", str(wheel)], check=True, timeout=120)
    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
import pallas_collectives as pc
assert pc.__file__.startswith({str(target)!r}), pc.__file__
print(pc.__version__, pc.explain("psum", nbytes=4 << 20, devices=16, chip="v5e"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith(PYPROJECT["project"]["version"])
    assert "ring" in done.stdout


def test_versions_are_said_once() -> None:
    assert pallas_collectives.__version__ == PYPROJECT["project"]["version"]
    pinned = set(re.findall(r"[\w-]+==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert pinned and pinned <= set(PYPROJECT["project"]["optional-dependencies"]["test"])


def test_the_urls_that_the_package_shows_are_whole() -> None:
    assert all(url.startswith("https://") for url in PYPROJECT["project"]["urls"].values())
