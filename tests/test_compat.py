"""What is private to JAX, or differs between its versions, stands in `_compat`, and waits there."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

import pallas_collectives
from pallas_collectives import _compat

PACKAGE = Path(pallas_collectives.__file__).parent

PRIVATE = re.compile(
    r"jax\._src"
    r"|core\.(Tracer|ShapedArray)"
    r"|\.mat\b|manual_axis_type"
    r"|\.(primitive_jvps|primitive_transposes|fancy_primitive_batchers|primitive_batchers)"
    r"|\.(custom_partial_eval_rules|partial_eval_jaxpr_custom_rules|dce_rules)"
    r"|register_lowering"
    r"|config\.values"
    r"|__version_info__"
)


def found(text: str) -> list[str]:
    """What is private in a module's text."""
    return [match[0] for match in PRIVATE.finditer(text)]


@pytest.mark.parametrize(
    "line, name",
    [
        ("from jax._src import config", "jax._src"),
        ("isinstance(x, jax.core.Tracer)", "core.Tracer"),
        ("jax.typeof(x).mat.varying", ".mat"),
        ("ad.primitive_jvps[p] = rule", ".primitive_jvps"),
        ("if jax.__version_info__ < (0, 11):", "__version_info__"),
    ],
)
def test_a_private_name_is_found(line: str, name: str) -> None:
    assert found(line) == [name] and not found("t.rows * t.depth; x.matmul")


def test_private_names_of_jax_stand_in_one_module() -> None:
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    private = modules.pop("_compat.py")
    assert set(found(private.read_text())) >= {"jax._src", "core.Tracer", "__version_info__"}
    elsewhere = {name: found(path.read_text()) for name, path in modules.items()}
    assert {name: names for name, names in elsewhere.items() if names} == {}


UNUSED = """
import importlib
import jax
import jax.experimental.multihost_utils, jax.experimental.pallas.tpu, jax.extend, jax.ffi
from jax._src import effects, shard_map
from jax.interpreters import ad, batching, mlir, partial_eval as pe

try:
    tpu_info = importlib.import_module("jax._src.tpu_info")
except ImportError:
    tpu_info = importlib.import_module("jax._src.pallas.mosaic.tpu_info")

def tables():
    sets = [effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects]
    return [
        *(dict(table) for table in (
            ad.primitive_jvps, ad.primitive_transposes, batching.fancy_primitive_batchers,
            pe.custom_partial_eval_rules,
            pe.partial_eval_jaxpr_custom_rules, pe.dce_rules, tpu_info.registry,
            mlir._lowerings, *mlir._platform_specific_lowerings.values(),
        )),
        *(set(allowed._effect_types) for allowed in sets),
        {name: getattr(jax.lax, name) for name in dir(jax.lax)},
        dict(jax.config.values),
    ]

before = tables()
import pallas_collectives as pc
import pallas_collectives.backends.nccl, pallas_collectives.moe, pallas_collectives.multihost
import pallas_collectives.replay, pallas_collectives.verify
assert tables() == before, "an import changed JAX"
pc.simulate(2)
assert tables() != before, "nothing is ever prepared"
"""


def test_importing_the_package_changes_nothing_of_jax() -> None:
    subprocess.run([sys.executable, "-c", UNUSED], check=True, timeout=120)


@pytest.mark.parametrize(
    "module, given",
    [("jax._src.pallas.mosaic.interpret", np.ndarray), ("mine", jax.Array), (None, jax.Array)],
)
def test_callbacks_of_the_interpreter_alone_are_given_arrays_as_they_are(module, given):
    _compat.prepare()
    seen = []

    def function(x):
        seen.append(x)
        return x

    function.__module__ = module
    called = jax.jit(lambda x: io_callback(function, jax.ShapeDtypeStruct((), np.int32), x))
    assert called(np.int32(3)) == 3 and isinstance(seen[0], given)


def test_a_star_imports_what_is_public():
    program = "from pallas_collectives import *; psum, all_gather_start, moe.dispatch, torus"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
