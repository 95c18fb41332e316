"""What `explain` refuses: too little to go on, bad operands, and what the call refuses."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError, DtypeError

pytestmark = pytest.mark.usefixtures("fresh_counts", "modelled_table_alone")

MESH = AbstractMesh((2,), ("x",))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"op": "scan", "nbytes": 1, "devices": 2}, "op='scan': it must be one of all_gather"),
        ({"op": "moe.dispatch", "nbytes": 1, "devices": 2}, "pallas_collectives.moe.explain"),
        ({"op": "psum", "devices": 2}, "nbytes or as shape"),
        ({"op": "psum", "nbytes": 1, "shape": (1,), "devices": 2}, "give one of them"),
        ({"op": "psum", "nbytes": 1}, "mesh and axis_name or by a number"),
        ({"op": "psum", "nbytes": 1, "devices": 1}, "2 or more"),
        (
            {"op": "psum", "nbytes": 1, "devices": 2, "chip": "v9"},
            "chip='v9': it must be one of v4, v5e, v5p, v6e, 7x; name one of them",
        ),
        (
            {"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": "x", "chip": "v5e"},
            "chip='v5e' with a mesh: .*; leave chip out",
        ),
        (
            {"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": "x", "torus": "ring"},
            "torus='ring' with a mesh: .*; leave torus out",
        ),
        ({"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": ["x"]}, "or a tuple of different"),
        ({"op": "psum", "nbytes": 1, "devices": 2, "torus": "knot"}, "'ring' or 'line'"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH}, "mesh and axis_name"),
        (
            {"op": "psum", "nbytes": 1, "devices": "8"},
            "devices='8': it must be a whole number of 2 or more; write it like devices=8",
        ),
        (
            {"op": "psum", "nbytes": -5, "devices": 8},
            "nbytes=-5: it must be a whole number of 0 or more",
        ),
        ({"op": "psum", "nbytes": True, "devices": 8}, "nbytes=True: it must be a whole number"),
        ({"op": "psum", "shape": 5, "devices": 8}, "a tuple of sizes"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": "q"}, "axis_name='q'"),
        ({"op": "psum", "nbytes": 1, "mesh": MESH, "axis_name": ("x", "x")}, "different ones"),
    ],
)
def test_explain_refuses_too_little_to_go_on(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        pc.explain(**arguments)


@pytest.mark.parametrize(
    "op, given, said",
    [
        ("psum", {"shape": (2.5,)}, "whole numbers"),
        ("psum", {"shape": (-3, 4)}, "0 or more"),
        ("psum", {"shape": (True, 4)}, "whole numbers"),
        ("psum", {"shape": (8, 128), "dtype": "nope"}, "dtype='nope': .*write it like 'bfloat16'"),
        ("psum", {"shape": (8, 128), "dtype": None}, "dtype=None: it must be a dtype of numbers"),
        ("psum", {"nbytes": 8, "dtype": "str"}, "dtype='str': it must be a dtype of numbers"),
        ("psum", {"shape": (1 << 40, 1 << 20)}, f"operand of {1 << 62} bytes: .* 128 GiB"),
        ("psum", {"nbytes": 2 << 37}, "no TPU has more.*one device's operand"),
        (
            "ragged_all_to_all",
            {"shape": ()},
            r"operand of float32\[\]: it must have rows; .*x\[None\]",
        ),
        ("psum", {"shape": (8, 128), "axis": 1}, "axis=1 for psum: psum has no such argument"),
        ("ppermute_start", {"nbytes": 512, "order": "rank"}, "order='rank' for ppermute"),
        ("pmax", {"nbytes": 512, "order": "rank"}, "order='rank' for pmax: .*; leave order out"),
    ],
)
def test_bad_operands_are_refused(op: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(CollectiveError, match=said):
        pc.explain(op, devices=4, **given)


TILED: dict[str, Any] = {"tiled": True}


BLOCKS: dict[str, Any] = {"split_axis": 0, "concat_axis": 0, "tiled": True}


AROUND: dict[str, Any] = {"perm": [(d, (d + 1) % 4) for d in range(4)]}


@pytest.mark.parametrize(
    "op, options, shape, dtype, more",
    [
        ("psum_scatter", TILED, (8, 128), "bool", {}),
        ("psum_scatter", TILED, (3,), "float32", {}),
        ("psum_scatter", TILED | {"scatter_dimension": 1}, (4, 7), "float32", {"axis": 1}),
        ("all_gather", TILED | {"axis": 5}, (8,), "int8", {"axis": 5}),
        ("all_gather", TILED | {"axis": "x"}, (8, 128), "float32", {"axis": "x"}),
        ("all_gather", TILED | {"wire": "int8"}, (8, 1), "bfloat16", {"wire": "int8"}),
        ("all_to_all", BLOCKS, (6, 4), "float32", {}),
        ("all_to_all", BLOCKS, (), "float32", {}),
        ("pswapaxes", {"axis": 0}, (8, 128), "float32", {}),
        ("pmax", {}, (8, 128), "complex64", {}),
        ("pmin", {"wire": "int8"}, (8,), "float32", {"wire": "int8"}),
        ("psum", {"order": "size"}, (8,), "float32", {"order": "size"}),
        ("psum", {"wire": "int8"}, (8, 128), "int32", {"wire": "int8"}),
        ("ppermute", AROUND | {"wire": "i8"}, (8,), "float32", {"wire": "i8"}),
    ],
)
def test_what_a_call_refuses_explain_refuses_with_the_same_error(
    op: str, options: dict[str, Any], shape: tuple[int, ...], dtype: str, more: dict[str, Any]
) -> None:
    call = harness.per_device(lambda x: getattr(pc, op)(x, "x", **options), harness.mesh(4))
    with pytest.raises(CollectiveError) as refused:
        jax.jit(call).lower(np.zeros((4, *shape), dtype))
    said = str(refused.value).partition("\n")[0]
    for name in (op, f"{op}_start"):
        with pytest.raises(type(refused.value), match=f"^{re.escape(said)}"):
            pc.explain(name, shape=shape, dtype=dtype, devices=4, **more)


def test_bools_in_bytes_are_not_added_either() -> None:
    with pytest.raises(DtypeError, match="psum_scatter of bool: bools are not added"):
        pc.explain("psum_scatter", 4096, dtype="bool", devices=4)


def test_a_mesh_is_a_mesh() -> None:
    with pytest.raises(CollectiveError, match="mesh=5"):
        pc.explain("psum", 1024, mesh=5, axis_name="x")
