"""Arguments that no collective can serve are refused while a program is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import pallas_collectives as pc
from pallas_collectives.errors import (
    AlgorithmError,
    BackendError,
    CollectiveError,
    DtypeError,
    UnboundAxisError,
    WireError,
)


def tables(n: int = 4, dtype: Any = np.int32) -> list[np.ndarray]:
    return [np.zeros(n, dtype)] * 4


# name: (call with x of (16, 128) on 4 devices, the error, the value, rule and remedy it names)
REFUSED: dict[str, tuple[Callable[[jax.Array], Any], type[Exception], tuple[str, str, str]]] = {
    "unbound axis": (
        lambda x: pc.psum(x, "data"),
        UnboundAxisError,
        ("axis name 'data'", "bound are ['x']", "jax.shard_map"),
    ),
    "axis named twice": (
        lambda x: pc.all_gather(x, ("x", "x")),
        CollectiveError,
        ("axis_name=('x', 'x')", "twice", "once"),
    ),
    "axis out of range": (
        lambda x: pc.all_gather([x], "x", axis=3),  # a tree of one leaf, which needs no name
        CollectiveError,
        ("axis=3: ", "[-3, 3)", "count dimensions from 0"),
    ),
    "scatter_dimension out of range": (
        lambda x: pc.psum_scatter(x, "x", scatter_dimension=2, tiled=True),
        CollectiveError,
        ("scatter_dimension=2", "[-2, 2)", "count"),
    ),
    "scatter of a scalar": (
        lambda x: pc.psum_scatter(x[0, 0], "x"),
        CollectiveError,
        ("scatter_dimension=0 of a scalar", "no dimensions", "x[None]"),
    ),
    "scatter of uneven blocks": (
        lambda x: pc.psum_scatter({"a": x, "b": x[:6]}, "x", tiled=True),
        CollectiveError,
        ("scatter_dimension=0 of size 6 in leaf ['b']: ", "multiple of the 4 devices", "pad it"),
    ),
    "untiled scatter": (
        lambda x: pc.psum_scatter(x, "x"),
        CollectiveError,
        ("scatter_dimension=0 of size 16", "number of devices, 4", "tiled=True"),
    ),
    "scatter of truth values": (
        lambda x: pc.psum_scatter((x, {"mask": x > 0}), "x", tiled=True),
        DtypeError,
        ("psum_scatter of bool in leaf [1]['mask']", "not added", "int32"),
    ),
    "scatter within groups": (
        lambda x: pc.psum_scatter(x[:3], "x", axis_index_groups=[[0, 1], [2, 3]], tiled=True),
        CollectiveError,
        ("size 3", "multiple of the 2 devices", "pad it"),
    ),
    "uneven exchange": (
        lambda x: pc.all_to_all(x[:6], "x", 0, 1, tiled=True),
        CollectiveError,
        ("split_axis=0 of size 6", "multiple of the 4 devices", "pad it"),
    ),
    "untiled exchange": (
        lambda x: pc.all_to_all(x, "x", 0, 1),
        CollectiveError,
        ("split_axis=0 of size 16", "number of devices, 4", "tiled=True"),
    ),
    "concat_axis out of range": (
        lambda x: pc.all_to_all([x[None], x], "x", -1, 2, tiled=True),
        CollectiveError,
        ("concat_axis=2 in leaf [1]", "[-2, 2)", "count"),
    ),
    "swap of another size": (
        lambda x: pc.pswapaxes(x, "x", 1),
        CollectiveError,
        ("axis=1 of size 128", "number of devices, 4", "reshape"),
    ),
    "groups that leave a device out": (
        lambda x: pc.psum(x, "x", axis_index_groups=[[0, 1], [2]]),
        CollectiveError,
        (
            "axis_index_groups=[[0, 1], [2]]",
            "4 device numbers",
            "list each number from 0 to 3 once",
        ),
    ),
    "groups of different sizes": (
        lambda x: pc.all_gather(x, "x", axis_index_groups=[[0, 1, 2], [3]]),
        CollectiveError,
        ("axis_index_groups=[[0, 1, 2], [3]]", "equal size", "list each number from 0 to 3 once"),
    ),
    "groups that are numbers": (
        lambda x: pc.pmax(x, "x", axis_index_groups=[0, 1, 2, 3]),
        CollectiveError,
        (
            "axis_index_groups=[0, 1, 2, 3]",
            "exactly one group",
            "list each number from 0 to 3 once",
        ),
    ),
    "groups of floats": (
        lambda x: pc.psum(x, "x", axis_index_groups=[[0.0, 1.0], [2.0, 3.0]]),
        CollectiveError,
        ("[[0.0, 1.0], [2.0, 3.0]]", "4 device numbers", "list each number from 0 to 3 once"),
    ),
    "axes in no order": (
        lambda x: pc.psum(x, {"x"}),
        CollectiveError,
        ("axis_name={'x'}", "whose order numbers the devices", "a tuple of them"),
    ),
    "a gather to what lax has no word for": (
        lambda x: pc.all_gather(x, "x", to="invariant"),
        CollectiveError,
        ("to='invariant'", "'varying', 'invarying' or 'reduced'", "leave it out"),
    ),
    "a source twice": (
        lambda x: pc.ppermute(x, "x", [(0, 1), (0, 2)]),
        CollectiveError,
        ("perm=[(0, 1), (0, 2)]", "source twice", "at most once as a source"),
    ),
    "a target that does not exist": (
        lambda x: pc.ppermute(x, "x", [(0, 7)]),
        CollectiveError,
        ("perm=[(0, 7)]", "[0, 4)", "at most once as a target"),
    ),
    "a target twice, counted from either end": (
        lambda x: pc.ppermute(x, "x", [(0, 3), (1, -1)]),
        CollectiveError,
        ("perm=[(0, 3), (1, -1)]", "target twice", "at most once as a target"),
    ),
    "threes": (
        lambda x: pc.ppermute(x, "x", [(0, 1, 2)]),
        CollectiveError,
        ("perm=[(0, 1, 2)]", "pairs of device numbers", "(source, target)"),
    ),
    "no pairs": (
        lambda x: pc.ppermute(x, "x", [1, 2, 3, 0]),
        CollectiveError,
        ("perm=[1, 2, 3, 0]", "pairs of device numbers", "(source, target)"),
    ),
    "shuffle from one device twice": (
        lambda x: pc.pshuffle(x, "x", [0, 0, 1, 2]),
        CollectiveError,
        ("perm=[0, 0, 1, 2]", "of all 4 devices, each once", "where its x comes from"),
    ),
    "broadcast from nowhere": (
        lambda x: pc.pbroadcast(x, "x", 4),
        CollectiveError,
        ("source=4", "[0, 4)", "name a device"),
    ),
    **{
        f"broadcast from {source!r}": (
            lambda x, source=source: pc.pbroadcast(x, "x", source),
            CollectiveError,
            (f"source={source!r}", "[0, 4)", "name a device"),
        )
        for source in (1.5, "1", True, np.int32(7))
    },
    "broadcast from a computed float": (
        lambda x: pc.pbroadcast(x, "x", x[0, 0]),
        CollectiveError,
        ("source of float32[]", "an int32", ".astype(jnp.int32)"),
    ),
    **(
        {}
        if jax.__version_info__ >= (0, 12)
        else {
            "broadcast from a computed device": (
                lambda x: pc.pbroadcast(x, "x", jnp.argmax(x)),
                CollectiveError,
                (f"JAX {jax.__version__}", "must be an int", "a number that is known"),
            )
        }
    ),
    "complex maximum": (
        lambda x: pc.pmax({"a": x, "b": x + 1j}, "x"),
        DtypeError,
        ("complex64 in leaf ['b']", "no order", "reduce its magnitude"),
    ),
    "ragged rows of different shapes": (
        lambda x: pc.ragged_all_to_all(x, x[:, :8], *tables(), axis_name="x"),
        CollectiveError,
        ("float32[16,8]", "same shape", "reshape"),
    ),
    "ragged scalar": (
        lambda x: pc.ragged_all_to_all(x[0, 0], x[0, 0], *tables(), axis_name="x"),
        CollectiveError,
        ("float32[]", "rows", "x[None]"),
    ),
    "ragged tables of floats": (
        lambda x: pc.ragged_all_to_all(x, x, *tables(dtype=np.float32), axis_name="x"),
        CollectiveError,
        ("input_offsets of float32", "integers", "int32"),
    ),
    "ragged tables of other lengths": (
        lambda x: pc.ragged_all_to_all(x, x, *tables(3), axis_name="x"),
        CollectiveError,
        ("input_offsets of shape (3,)", "multiple of the 4 devices", "size 0"),
    ),
    "unknown algorithm": (
        lambda x: pc.psum(x, "x", algorithm="fastest"),
        AlgorithmError,
        ("algorithm='fastest' for psum", "one of ring, ", "auto"),
    ),
    "unknown backend": (
        lambda x: pc.psum(x, "x", backend="mpi"),
        BackendError,
        ("backend='mpi'", "'pallas' (TPUs, also simulated), 'nccl' (GPUs) or 'xla'", "name one"),
    ),
    "backend of another platform": (
        lambda x: pc.psum(x, "x", backend="nccl"),
        BackendError,
        ("backend='nccl'", "NVIDIA GPUs", "leave backend= out: 'pallas' then serves cpu devices"),
    ),
    "tiled that is no flag": (
        lambda x: pc.all_gather(x, "x", tiled="no"),
        CollectiveError,
        ("tiled='no'", "True or False", "pass one"),
    ),
    "tiled that is no flag, of a sum": (
        lambda x: pc.psum_scatter(x, "x", tiled="no"),
        CollectiveError,
        ("tiled='no'", "True or False", "pass one"),
    ),
    "groups that are a string": (
        lambda x: pc.psum(x, "x", axis_index_groups="all"),
        CollectiveError,
        ("axis_index_groups='all'", "exactly one group", "list each number from 0 to 3 once"),
    ),
    "an algorithm that is no string": (
        lambda x: pc.ppermute(x, "x", [(0, 1)], algorithm=7),
        AlgorithmError,
        ("algorithm=7 for ppermute", "one of partners, everyone", "name one of them, or 'auto'"),
    ),
    "a maximum with a wire of derivatives": (
        lambda x: pc.pmax(x, "x", wire_backward="int8"),
        WireError,
        ("wire_backward='int8' for pmax", "no derivative", "leave it out"),
    ),
    "a minimum that is started with a wire of derivatives": (
        lambda x: pc.pmin_start(x, "x", wire_backward="int8"),
        WireError,
        ("wire_backward='int8' for pmin", "no derivative", "leave it out"),
    ),
    "a residue of a wire that may be left out": (
        lambda x: pc.psum(x, "x", wire="auto", return_residue=True),
        WireError,
        ("return_residue=True with wire='auto'", "this one is optional", "write wire='int8'"),
    ),
    "a residue without a wire": (
        lambda x: pc.psum_scatter(x, "x", tiled=True, return_residue=True),
        WireError,
        ("return_residue=True with wire=None", "a residue needs a wire", "write wire='int8'"),
    ),
    "layers of unequal numbers": (
        lambda x: pc.scan_gathered(lambda c, w: c, x, {"up": x, "down": x[:2]}, "x"),
        CollectiveError,
        ("(2, 128) in leaf ['down'], (16, 128) in leaf", "equal in all", "stack the layers"),
    ),
    "no layers": (
        lambda x: pc.scan_gathered(lambda c, w: c, x, {}, "x"),
        CollectiveError,
        ("weights={}", "there are no arrays", "give arrays"),
    ),
    "layers in turns of none": (
        lambda x: pc.scan_gathered(lambda c, w: c, x, x[None], "x", unroll=0),
        CollectiveError,
        ("unroll=0", "1 or more", "leave it out"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_tracing(name: str) -> None:
    call, error, parts = REFUSED[name]
    x = jax.ShapeDtypeStruct((4, 16, 128), jnp.float32)
    with pytest.raises(error) as caught:
        jax.eval_shape(harness.per_device(call, harness.mesh(4), check_vma=False), x)
    assert isinstance(caught.value, CollectiveError)
    for part in parts:
        assert part in str(caught.value)
