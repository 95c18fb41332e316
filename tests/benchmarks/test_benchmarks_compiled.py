"""What `python -m benchmarks` compiles for TPUs that are not there, and what it says of it."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import harness
from benchmarking import Bench
from benchmarks import baseline, compiled

LIBTPU = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
)


@pytest.mark.full
@LIBTPU
def test_sizes_and_algorithms_that_are_named_reach_every_table(
    bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    status, out, err = bench(
        *("--mesh=2", "-b", "16K", "-e", "32K", "--collective=all_gather"),
        *("--algorithm=direct", "--compile_for=v5p:2x2x1,v5e:2x4", f"--json={file}"),
    )
    assert status == 0, err
    saved = json.loads(file.read_text())
    for part in ("measured", "replayed"):
        assert {row["size"] for row in saved[part]} == {16 << 10, 32 << 10}, part
        assert {row["algorithm"] for row in saved[part]} == {"direct"}, part
    served, _, refused, _ = saved["compiled"]  # the second is of another layout
    assert "Compiled for TPUs that are not there, 32K on one axis" in out
    assert (served["size"], served["asked"], served["algorithm"]) == (32 << 10, "direct", "direct")
    assert "kernel" in served["ops"] and served["temp"] < 1 << 20
    assert "v5e" in refused["refused"] and not refused["error"]


@pytest.mark.full
@LIBTPU
def test_collectives_are_compiled_beside_lax(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, err = bench(
        *("--mesh=2", "--collective=all_gather", "--backend=xla"),
        *("--compile_for=v5e:2x2,v5e:3x3", "--replay=", f"--json={file}"),
    )
    assert status == 1, err  # for the second topology
    first, last, *unknown = json.loads(file.read_text())["compiled"]
    assert (first["op"], last["op"]) == ("all_gather", "all_gather, axis=-1")
    for row in (first, last):
        assert (row["topology"], row["devices"]) == ("v5e:2x2", 4)
        assert row["ops"] == "kernel" and row["lax_ops"] == "all-gather"
        assert compiled.SIZE <= row["temp"] < 2 * compiled.SIZE  # the result itself, and no copy
    assert "not there" in out and "xla_enable_async_all_gather" in out
    assert all("v5e:3x3" in row["error"] for row in unknown)
    assert f"{len(unknown)} failed" in out.splitlines()[-1]


def test_without_a_compiler_only_a_run_that_asks_for_it_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    arguments = ("--mesh=2", "--sizes=8K", "--algorithm=direct", "--collective=all_gather")
    status, out, err = bench(*arguments, "--compile_for=v5e:2x2", "--replay=")
    assert status == 1 and not out
    assert "libtpu is not installed" in err
    status, out, _ = bench(*arguments, "--replay=")
    assert status == 0
    assert "libtpu is not installed" in out


_ANSWERS = """
import os, signal
from benchmarks import compiled

def rows(tasks):
    for task in tasks:
        print("traced"), os.system("echo compiled")
        yield {"task": task}
        if task == "last":
            signal.raise_signal(signal.SIGINT)

compiled.answer(rows)
"""


def test_the_other_process_may_print_and_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers.py").write_text(_ANSWERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    rows = compiled.elsewhere("answers", ["first", "last", "never"])
    assert [next(rows), next(rows)] == [{"task": "first"}, {"task": "last"}]
    with pytest.raises(KeyboardInterrupt):
        next(rows)


@LIBTPU
@pytest.mark.parametrize("name", harness.GENERATIONS.values(), ids=list(harness.GENERATIONS))
def test_options_for_lax_are_known_to_the_compiler(name: str) -> None:
    on = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = jax.sharding.Mesh(np.array(on), ("x",))
    x = jax.ShapeDtypeStruct((8 * len(on), 128), "float32", sharding=NamedSharding(mesh, P("x")))
    gather = jax.shard_map(
        lambda x: lax.all_gather(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    lowered = jax.jit(gather).lower(x)
    lowered.compile(compiler_options=baseline.options("tpu", on[0].device_kind))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lowered.compile(compiler_options={"xla_no_such_option": True})


def test_summary_of_a_program_names_what_stands_around_the_collective() -> None:
    hlo = """
%fused (p: f32[8,128]) -> f32[1,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %c = f32[] constant(1)
  %slice = f32[1,128]{1,0} dynamic-slice(%p, %i), metadata={op_name="jit(f)/consumer/add"}
  ROOT %add = f32[1,128]{1,0} add(%slice, %c), metadata={op_name="jit(f)/consumer/add"}
}
ENTRY %main {
  %x = f32[8,128]{1,0} parameter(0)
  %index = s32[] multiply(%replica, %eight)
  %offsets = s32[64]{0} add(%iota, %iota)
  %start = (f32[8,128]{1,0}, u32[]) all-reduce-start(%x), metadata={op_name="jit(f)/psum"}
  %done = f32[8,128]{1,0} all-reduce-done(%start), metadata={op_name="jit(f)/psum"}
  %copy.1 = f32[8,128]{1,0:T(8,128)} copy(%done)
  %copy.2 = f32[8,128]{0,1} copy(%copy.1), metadata={op_name="jit(f)/producer/add"}
  %sum = f32[8,128]{0,1} add(%copy.1, %copy.2), metadata={op_name="jit(f)/psum"}
  %k = f32[8,128]{1,0} custom-call(%sum), custom_call_target="tpu_custom_call"
  ROOT %f = f32[1,128]{1,0} fusion(%k), kind=kLoop, calls=%fused
}
"""
    around = "add, all-reduce, 2 copy, dynamic-slice, kernel"
    assert compiled.summary(hlo, smallest=128) == around
