"""Choosing, probing and naming libnccl."""

import os
import shutil
import subprocess
import sys

import pytest

from pallas_collectives.nccl import library
from pallas_collectives.nccl.errors import LibraryError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def compiled(tmp_path, source: str) -> str:
    (tmp_path / "lib.c").write_text(source)
    path = str(tmp_path / "libnccl_fake.so")
    command = ["cc", "-shared", "-fPIC", "-o", path, str(tmp_path / "lib.c")]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    ("code", "text"), [(22809, "2.28.9"), (21903, "2.19.3"), (2804, "2.8.4"), (23000, "2.30.0")]
)
def test_version_as_nccl_prints_it(code, text):
    assert library.version_text(code) == text


def test_argument_comes_before_environment_before_process_before_wheel(monkeypatch):
    monkeypatch.setattr(library, "installed", lambda: "/wheel/libnccl.so.2")
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    assert library.choose(None, None) == "/wheel/libnccl.so.2"
    assert library.choose(None, "/jax/libnccl.so.2") == "/jax/libnccl.so.2"
    monkeypatch.setenv(library.ENVIRONMENT, "/env/libnccl.so.2")
    assert library.choose(None, None) == "/env/libnccl.so.2"
    assert library.choose("/mine/libnccl.so.2", None) == "/mine/libnccl.so.2"


def test_a_wish_that_comes_too_late_is_refused_by_name(monkeypatch):
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    with pytest.raises(LibraryError, match=r"/mine/.*already uses /jax/.*before JAX first uses"):
        library.choose("/mine/libnccl.so.2", "/jax/libnccl.so.2")
    assert library.choose("/jax/libnccl.so.2", "/jax/libnccl.so.2") == "/jax/libnccl.so.2"


def test_without_any_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "installed", lambda: None)
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    with pytest.raises(LibraryError, match=r"pip install 'jax\[cuda13\]'"):
        library.choose(None, None)


def test_a_missing_file_is_named():
    with pytest.raises(LibraryError, match=r"/no/such\.so cannot serve.*no such file"):
        library.probe("/no/such.so")


def test_a_file_that_is_no_library(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_text("not ELF")
    with pytest.raises(LibraryError, match=r"the loader refused it.*PALLAS_COLLECTIVES_NCCL_SO"):
        library.probe(str(path))


def test_a_library_that_is_not_nccl():
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if "libc.so" in line or "libc-" in line)
    with pytest.raises(LibraryError, match="it is not NCCL: it has no function ncclGetVersion"):
        library.probe(libc)


@needs_compiler
def test_one_that_crashes_takes_only_the_other_process_down(tmp_path):
    path = compiled(
        tmp_path, "#include <stdlib.h>\n__attribute__((constructor)) void f(void) { abort(); }"
    )
    with pytest.raises(LibraryError, match=r"libnccl_fake\.so.*killed the process.*signal 6"):
        library.probe(path)


@needs_compiler
def test_one_that_hangs(tmp_path):
    path = compiled(
        tmp_path, "#include <unistd.h>\n__attribute__((constructor)) void f(void) { sleep(60); }"
    )
    with pytest.raises(LibraryError, match="did not end within 1 s"):
        library.probe(path, timeout=1.0)


@needs_compiler
def test_one_that_is_too_old_and_one_that_serves(tmp_path):
    source = "int ncclGetVersion(int *v) {{ *v = {}; return 0; }}"
    with pytest.raises(LibraryError, match=r"it is 2\.19\.3, and at least 2\.28\.0"):
        library.probe(compiled(tmp_path, source.format(21903)))
    assert library.probe(compiled(tmp_path, source.format(22809))) == 22809


@needs_compiler
def test_loaded_finds_the_one_in_the_process(tmp_path):
    path = compiled(tmp_path, "int ncclGetVersion(int *v) { *v = 22809; return 0; }")
    target = tmp_path / "libnccl.so.2"
    os.rename(path, target)
    program = (
        "import ctypes, sys\n"
        "from pallas_collectives.nccl import library\n"
        "before = library.loaded()\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(before, library.loaded())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", str(target)]
