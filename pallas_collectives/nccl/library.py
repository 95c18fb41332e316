"""Which libnccl this process uses, and NVIDIA's own bindings (nccl4py) over it.

One process uses one NCCL: the bindings, like XLA, take the library by its name, and the first one
loaded answers to it. So the choice is made once, in this order:

  1. the `path` given to `load`;
  2. the environment variable PALLAS_COLLECTIVES_NCCL_SO;
  3. the library already in the process, which is XLA's once JAX has used its GPUs;
  4. the one of the wheel `nvidia-nccl-cu12` or `-cu13`, a dependency of JAX's.

A file that is not in the process yet is loaded in another process first, so that a broken one
gives an error here instead of taking this process down.

NCCL's own environment variables are left alone. One to know: kernels of several communicators that
run on one GPU at a time, on streams that nothing orders, must all fit on it or start in the same
order everywhere. A few fit. NCCL_LAUNCH_ORDER_IMPLICIT=1 (set it before JAX uses its GPUs) has NCCL
keep the host's order; on 4 H200 in one process it cost 8 to 25 µs a call inside CUDA graphs.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from pallas_collectives.nccl.errors import HARMLESS, CallError, LibraryError, raise_for
from pallas_collectives.nccl.tape import address_in

ENVIRONMENT = "PALLAS_COLLECTIVES_NCCL_SO"
OLDEST = 22800  # the first with ncclAlltoAll

# Runs in the other process: prints the version, or ends with what is wrong.
_PROBE = """
import ctypes, sys
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(f"the loader refused it: {error}")
version = ctypes.c_int()
try:
    result = library.ncclGetVersion(ctypes.byref(version))
except AttributeError:
    sys.exit("it is not NCCL: it has no function ncclGetVersion")
if result:
    sys.exit(f"ncclGetVersion returned {result}")
print(version.value)
"""


@dataclasses.dataclass(frozen=True)
class Library:
    """A loaded NCCL.

    Attributes:
      bindings: the functions, named and called as in nccl4py's `nccl.bindings.nccl`.
      path: the file.
      version: as NCCL prints it, "2.28.9".
    """

    bindings: Any
    path: str
    version: str

    def unique_id(self) -> bytes:
        """A new id (128 bytes) under which ranks can meet."""
        unique_id = self.call("ncclGetUniqueId", "", self.bindings.get_unique_id)
        return ctypes.string_at(unique_id.ptr, 128)

    def call(self, name: str, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, its failure as `failed` gives it."""
        try:
            return function(*args)
        except Exception as error:
            raise_for(error, self.error(name, error, where))

    def error(self, name: str, error: Exception, where: str) -> Exception:
        """`error` as a CallError where it is NCCL's, else itself."""
        result = getattr(error, "status", None)
        return error if result is None else self.failed(name, int(result), where)

    def failed(self, function: str, result: int, where: str) -> CallError:
        """A result that is not success: NCCL's words for it and its latest warning, and a remedy.

        where: the communicator it was called on, or "".
        """
        # NCCL keeps one warning for the process and does not look at the communicator.
        warning = self.bindings.get_last_error(self.bindings.Comm())
        text = self.bindings.get_error_string(result)
        if warning:
            text += f"; NCCL's latest warning: {warning}"
        return CallError(function, result, text, where, _remedy(result, warning))

    def address(self, function: str) -> int:
        """The address of NCCL's C function of this name."""
        loaded = ctypes.CDLL(self.path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)  # no second NCCL
        return address_in(loaded, function)


def _remedy(result: int, warning: str) -> str:
    """What to do about a result of NCCL's that is not success."""
    if result in HARMLESS:
        return "NCCL has done nothing of this call: NCCL_DEBUG=WARN prints what is wrong with it"
    cause = "NCCL_DEBUG=INFO prints what led to this"
    if "capturing" in warning:
        cause = (
            "NCCL tried to connect peers while a CUDA graph was being captured: set "
            "NCCL_RUNTIME_CONNECT=0 before JAX first uses its GPUs, or keep the program out of "
            'graphs, jax.jit(f, compiler_options={"xla_gpu_enable_command_buffer": ""})'
        )
    return (
        f"{cause}. The communicator cannot be used any more: make its group anew in every process, "
        "by jax.clear_caches() for collectives inside jit, by create() else"
    )


def version_text(code: int) -> str:
    """NCCL's version number as text: 22809 is "2.28.9"; before 2.9 the factor was 100 (2804)."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def probe(path: str, timeout: float = 60.0) -> int:
    """Loads `path` in another process and returns its version code, e.g. 22809.

    timeout: seconds. Raises LibraryError if it cannot be loaded, crashes, hangs, is not NCCL or
    is older than 2.28.
    """

    def wrong(what: str) -> LibraryError:
        return LibraryError(
            f"{path} cannot serve as NCCL: {what}. Name another file in {ENVIRONMENT} or in "
            "load(path), or unset it to use the one that JAX installs (nvidia-nccl-cu12 or -cu13)"
        )

    if not os.path.isfile(path):
        raise wrong("there is no such file")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE, path],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise wrong(f"loading it did not end within {timeout:g} s") from None
    if done.returncode < 0:
        raise wrong(f"loading it killed the process that tried, by signal {-done.returncode}")
    if done.returncode:
        raise wrong(done.stderr.strip() or f"loading it ended with status {done.returncode}")
    code = int(done.stdout.split()[-1])
    if code < OLDEST:
        raise wrong(f"it is {version_text(code)}, and at least {version_text(OLDEST)} is needed")
    return code


def loaded(name: str = "libnccl.so") -> str | None:
    """The library already in this process whose file is named so, or None."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if os.path.basename(path[2]).startswith(name):
                return "/" + path[2]
    return None


def installed(wheel: str = "nvidia.nccl", name: str = "libnccl.so.2") -> str | None:
    """The library of a wheel of NVIDIA's whose file is named so, "*" as in a shell; or None."""
    try:
        spec = importlib.util.find_spec(wheel)
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(pathlib.Path(folder, "lib").glob(name)):
            if file.is_file():
                return str(file)
    return None


def choose(path: str | os.PathLike[str] | None, in_process: str | None) -> str:
    """The file that the order at the top of this module names.

    in_process: the libnccl already in this process, as `loaded` finds it.
    Raises LibraryError if there is no library, or if the wish comes too late.
    """
    wish = os.fspath(path) if path is not None else os.environ.get(ENVIRONMENT) or None
    if wish is None:
        chosen = in_process or installed()
        if chosen is None:
            raise LibraryError(
                "no libnccl found: install JAX with its CUDA wheels (pip install "
                f"'jax[cuda13]'), or name the file in {ENVIRONMENT}"
            )
        return chosen
    if in_process is not None and os.path.realpath(wish) != os.path.realpath(in_process):
        raise LibraryError(
            f"asked for {wish}, but this process already uses {in_process}, and one NCCL serves "
            "a process. Call pallas_collectives.nccl.load before JAX first uses its GPUs: JAX then "
            "uses that file as well"
        )
    return wish


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """Chooses, checks and loads NCCL; later calls give the same library.

    path: the file, e.g. "/opt/nccl/libnccl.so.2"; see the top of this module for what None means.
    Raises LibraryError; this process is left as it was.

    Example, which needs NVIDIA's library:
      >>> pc.nccl.load().version  # doctest: +SKIP
      '2.28.9'
    """
    in_process = loaded()
    return _load(os.path.realpath(choose(path, in_process)), in_process is not None)


@functools.cache
def _load(path: str, in_process: bool) -> Library:
    try:
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise LibraryError(
            f"NVIDIA's NCCL bindings are missing ({error}): pip install -e '.[gpu]' in the clone"
        ) from error
    if not in_process:
        probe(path)
    ctypes.CDLL(path)
    try:
        code, taken = bindings.get_version(), bindings.get_library_path()
    except Exception as error:  # the bindings know the library by its soname, libnccl.so.2, alone
        raise LibraryError(f"NVIDIA's bindings cannot use {path}: {error}") from error
    if os.path.realpath(taken) != path:
        raise LibraryError(f"asked for {path}, but the bindings took {taken}")
    if code < OLDEST:
        raise LibraryError(
            f"{path} is NCCL {version_text(code)}, and at least {version_text(OLDEST)} is needed"
        )
    return Library(bindings, path, version_text(code))
