"""What `import pallas_collectives` costs beside JAX's own import, and what it leaves alone."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pallas_collectives as pc

ROOT = Path(__file__).parents[1]

# CPU time, which waiting for other programs does not lengthen. A platform that is none would be an
# error as soon as anything asked for a device.
PROGRAM = """
import json, sys, time

def cost(what):
    begin, before = time.process_time(), set(sys.modules)
    what()
    return time.process_time() - begin, sorted(set(sys.modules) - before)

def package():
    global pc
    import pallas_collectives as pc

def jax_and_pallas():
    import jax.experimental.pallas.tpu

costs = {"package": cost(package), "jax": cost(jax_and_pallas), "psum": cost(lambda: pc.psum)}
costs["all"] = cost(lambda: [getattr(pc, name) for name in pc.PUBLIC])
print(json.dumps(costs))
"""


def measured() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAX_PLATFORMS": "none-such", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_public_name_is_there_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "pallas_collectives/__init__.py").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {
        name.asname or name.name
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert names == set(pc.PUBLIC), "what is in _MODULES is to stand under TYPE_CHECKING"


def test_import_touches_no_device_and_takes_little_beside_jaxs_own() -> None:
    runs = [measured() for _ in range(3)]
    first = runs[0]
    loaded = {name.partition(".")[0]: name for name in first["package"][1]}
    begun = {full for name, full in loaded.items() if name not in sys.stdlib_module_names}
    assert begun == {"pallas_collectives"}, "nothing before a name is asked for"
    outside = {
        name.partition(".")[0]
        for part in ("psum", "all")
        for name in first[part][1]
        if not name.startswith(("pallas_collectives.", "jax."))
    }
    assert outside <= sys.stdlib_module_names | {"absl"}, "what JAX needs, and no more"
    ours = [name for name in first["psum"][1] if name.startswith("pallas_collectives.")]
    assert 20 < len(ours) < 80, "a collective needs no replay, no NCCL and no tables of times"
    # JAX takes 0.5 s of a core that takes 0.11 to 0.16 for ours, and 0.4 for all there is.
    shares = [(run["package"][0] + run["psum"][0]) / run["jax"][0] for run in runs]
    assert min(shares) < 0.6, shares
