"""Chips with two cores a device (v4, v5p): a kernel runs on one of them, so no DMA starts twice."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks import replay_rows
from benchmarks.cases import CASES
from pallas_collectives.catalogue import ALGORITHMS
from pallas_collectives.errors import CollectiveError
from pallas_collectives.replay import Machine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_kernel_is_divided_between_cores(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """Only a grid with parallel dimensions, or a pipeline over a core axis, ever is."""
    launches: list[dict[str, Any]] = []
    pipelines: list[dict[str, Any]] = []

    def recording(function: Any, record: list[dict[str, Any]]) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            record.append(kwargs)
            return function(*args, **kwargs)

        return recorded

    monkeypatch.setattr(pl, "pallas_call", recording(pl.pallas_call, launches))
    monkeypatch.setattr(pltpu, "emit_pipeline", recording(pltpu.emit_pipeline, pipelines))
    machine, traced = Machine.named("v5p:4x1x1"), 0
    for algorithm in ALGORITHMS[case.op]:
        try:
            replay_rows.run(replay_rows.Task(machine, case, "float32", 8 << 10, algorithm, ("x",)))
        except CollectiveError:  # made for another torus
            continue
        traced += 1
    assert traced and sum("name" in launch for launch in launches) >= traced
    for launch in launches:
        assert not launch.get("grid") and "grid_spec" not in launch
        if "name" in launch:  # what asks for the effects of any kernel, once, is an empty one
            assert launch["compiler_params"].dimension_semantics is None
    for pipeline in pipelines:
        assert pipeline.get("core_axis") is None and pipeline.get("core_axis_name") is None
        assert not set(pipeline.get("dimension_semantics") or ()) & {"parallel", pltpu.PARALLEL}


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import pallas_collectives as pc
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
mesh = Mesh(np.array(topology.devices), ("x",))
gather = lambda x: pc.all_gather(2 * x, "x", tiled=True, algorithm="direct") + 1
mapped = jax.shard_map(gather, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
rows = jax.ShapeDtypeStruct((2048, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))
jax.jit(mapped).lower(rows).compile()
"""


@pytest.mark.slow  # a process of its own, for libtpu reads its flags once
def test_the_second_core_skips_the_compiled_kernel(tmp_path: Path) -> None:
    """By the compiler's last form of the program, which both cores of a v5p run."""
    flags = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true"
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags},
        check=True,
        capture_output=True,
        timeout=240,
    )
    (path,) = (
        p
        for p in tmp_path.glob("*all_gather_direct*-final_bundles.txt")
        if "analysis" not in p.name
    )
    bundles = path.read_text().splitlines()
    starts = [i for i, line in enumerate(bundles) if re.search(r"= (dma|vsyncadd\.remote)", line)]
    core_id = next(i for i, line in enumerate(bundles) if "core id */" in line)
    register = re.search(r"(%\w+) = sld \S+ /\* (?:megacore core id :: )?core id", bundles[core_id])
    assert register and starts
    other = re.search(
        rf"(%\w+) = scmp\.ne\.s32\.totalorder {register[1]}, 0", "\n".join(bundles[: starts[0]])
    )
    assert other
    skips = rf"sbr\.rel \({other[1]}\) target = "
    branch = next(i for i, line in enumerate(bundles) if re.search(skips, line))
    lands = [i for i, line in enumerate(bundles) if re.match(r"\s*0x[0-9a-f]+ PF:", line)]
    assert core_id < branch < starts[0] and lands and starts[-1] < lands[-1] == len(bundles) - 1
