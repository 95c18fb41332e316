"""NVIDIA's own bindings, nccl4py, over a libnccl of ours whose functions fail as they are told.

They need no GPU. Every call that the package makes through them is made to fail.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("nccl.bindings", reason="needs nccl4py")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

FUNCTIONS = [
    "AllGather", "AllReduce", "ReduceScatter", "AlltoAll", "Broadcast", "Reduce", "Send", "Recv",
    "GroupEnd", "GroupSimulateEnd", "CommDestroy", "CommAbort", "CommGetAsyncError",
    "GetUniqueId", "CommInitRankScalable",
]  # fmt: skip
SOURCE = """
#include <string.h>
static int result; static char failing[100], warning[1000];
void fail(const char *name, int r, const char *w) {
  strcpy(failing, name); result = r; strcpy(warning, w);
}
int ncclGetVersion(int *v) { *v = 22809; return 0; }
const char *ncclGetErrorString(int r) { return r == 4 ? "invalid argument" : "internal error"; }
const char *ncclGetLastError(void *comm) { return warning; }
int ncclGroupStart(void) { return 0; }
""" + "".join(
    f"int nccl{name}(void *a, void *b, void *c, void *d, void *e, void *f)"
    f'{{ return strcmp(failing, "nccl{name}") ? 0 : result; }}\n'
    for name in FUNCTIONS
)
PROGRAM = textwrap.dedent("""
    import ctypes, json, sys
    sys.path.insert(0, "tests/helpers")
    import nccl_host
    from pallas_collectives import nccl
    from pallas_collectives.nccl import runtime
    from pallas_collectives.nccl.communicator import Communicator, Messages, exchange
    from pallas_collectives.nccl.store import LocalStore

    path, result, warning = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    library = nccl.load(path)
    stub = ctypes.CDLL(path)
    here = runtime.Runtime(library, nccl_host.Driver(), LocalStore(), 0)

    def init():
        return here.init_rank(0, 2, 1, b"i" * 128, "rank 1 of 2 of group 'g' of devices [0, 1]")

    def fresh():
        return Communicator(library, here.driver, init(), 1, 2, 0, "group 'g' of devices [0, 1]")

    def sent(c):
        exchange([Messages(c, [(0, 1, 0)], [], 0)], "int8", "x")

    def received(c):
        exchange([Messages(c, [], [(0, 1, 0)], 0)], "int8", "x")

    CALLS = {
        "ncclAllGather": lambda c: c.all_gather(0, 0, 1, "int8", 0),
        "ncclAllReduce": lambda c: c.all_reduce(0, 0, 1, "float32", "sum", 0),
        "ncclReduceScatter": lambda c: c.reduce_scatter(0, 0, 1, "float32", "sum", 0),
        "ncclAlltoAll": lambda c: c.all_to_all(0, 0, 1, "int8", 0),
        "ncclBroadcast": lambda c: c.broadcast(0, 0, 1, "int8", 0, 0),
        "ncclReduce": lambda c: c.reduce(0, 0, 1, "float32", "sum", 0, 0),
        "ncclSend": sent, "ncclRecv": received, "ncclGroupEnd": sent,
        "ncclGroupSimulateEnd": lambda c: c.plan(lambda: None),
        "ncclCommDestroy": lambda c: c.destroy(),
        "ncclCommAbort": lambda c: c.abort(),
        "ncclCommGetAsyncError": lambda c: c.async_error(),
        "ncclGetUniqueId": lambda c: library.unique_id(),
        "ncclCommInitRankScalable": lambda c: init(),
    }
    told = {}
    for name, call in CALLS.items():
        c = fresh()
        stub.fail(name.encode(), result, warning.encode())
        try:
            call(c)
        except Exception as error:
            told[name] = [type(error).__name__, str(error), c.unusable.value]
        stub.fail(b"", 0, b"")
    # From tapes, NCCL's C functions are called without the bindings.
    c = fresh()
    stub.fail(b"", 0, warning.encode())
    error = c.failed("ncclAllGather", result, 0)
    told["tape"] = [type(error).__name__, str(error), c.unusable.value]
    print(json.dumps(told))
""")


def told(tmp_path, result, warning=""):
    (tmp_path / "lib.c").write_text(SOURCE)
    path = str(tmp_path / "libnccl.so.2")
    command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", path]
    subprocess.run([*command, str(tmp_path / "lib.c")], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, str(result), warning],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120,
        cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def named(name):
    return {"tape": "ncclAllGather"}.get(name) or (
        "ncclSend and ncclRecv" if name in ("ncclSend", "ncclRecv", "ncclGroupEnd") else name
    )


def test_every_call_that_fails_names_function_words_communicator_and_remedy(tmp_path):
    answers = told(tmp_path, 3, "the wire is cut")
    assert len(answers) == len(FUNCTIONS) + 1
    for name, (kind, text, unusable) in answers.items():
        assert kind == "CallError", (name, text)
        assert text.startswith(
            f"{named(name)} returned 3: internal error; NCCL's latest warning: the wire is cut"
        ), (name, text)
        assert "make its group anew in every process, by jax.clear_caches()" in text
        if name != "ncclGetUniqueId":
            assert ", on rank 1 of 2 of group 'g' of devices [0, 1]. " in text, (name, text)
        of_a_call = name in ("tape", "ncclGroupEnd", "ncclSend", "ncclRecv") or not (
            name.startswith(("ncclComm", "ncclGet", "ncclGroup"))
        )
        assert bool(unusable) == of_a_call, name


def test_a_call_that_nccl_refuses_says_so_and_its_communicator_stays(tmp_path):
    for name, (kind, text, unusable) in told(tmp_path, 4).items():
        assert kind == "CallError" and not unusable, (name, text)
        assert text.startswith(f"{named(name)} returned 4: invalid argument")
        assert text.endswith(
            "NCCL has done nothing of this call: NCCL_DEBUG=WARN prints what is wrong with it"
        )


def test_connecting_while_captured_is_told_with_what_helps(tmp_path):
    warning = "failed to peer: operation not permitted when stream is capturing"
    _, text, _ = told(tmp_path, 3, warning)["ncclAllGather"]
    assert "set NCCL_RUNTIME_CONNECT=0 before JAX first uses its GPUs" in text
    assert 'compiler_options={"xla_gpu_enable_command_buffer": ""}' in text
