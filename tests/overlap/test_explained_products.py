"""`explain` of a product is the plan that a call of it follows."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import harness
import pallas_collectives as pc
from pallas_collectives.errors import CollectiveError

pytestmark = pytest.mark.usefixtures("fresh_counts", "modelled_table_alone")

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def lowered(op: str, on: Mesh, shape: tuple[int, ...], columns: int, dtype: str, axis: int) -> None:
    """Lowers a call of the product with such operands, for the counters to note."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        if op == GATHER:
            return pc.all_gather_matmul(x, w, "x", gather_axis=axis)
        return pc.matmul_reduce_scatter(x, w, "x", scatter_axis=axis)

    devices = PartitionSpec("x")
    n = on.shape["x"]
    depth = shape[-1] * (n if op == GATHER and axis == len(shape) - 1 else 1)
    shard = lambda x, w: call(x[0], w[0])[None]  # noqa: E731
    run = jax.shard_map(shard, mesh=on, in_specs=devices, out_specs=devices, check_vma=False)
    operands = [
        jax.ShapeDtypeStruct((n, *s), dtype, sharding=NamedSharding(on, devices))
        for s in (shape, (depth, columns))
    ]
    jax.jit(run).lower(*operands)


@pytest.mark.parametrize(
    "op, topology, shape, columns, dtype, axis, algorithm, why",
    [
        (GATHER, "v6e:2x2", (4096, 4096), 4096, "bfloat16", 0, "fused", "in one kernel against"),
        (SCATTER, "v6e:2x2", (4096, 4096), 4096, "bfloat16", 0, "fused", "in one kernel against"),
        (GATHER, "v6e:2x2", (16, 128), 128, "bfloat16", 0, "unfused", "by the model"),
        (SCATTER, "v6e:2x2", (64, 128), 100, "float32", 0, "unfused", "by the model"),
        (GATHER, "v6e:2x2", (512, 128), 128, "bfloat16", 1, "unfused", "contracted"),
        (SCATTER, "v6e:2x2", (512, 128), 128, "bfloat16", 1, "unfused", "weights' own"),
        # Tracing finds that it pays; only a lowering knows that these devices reach no ring.
        (GATHER, "v5e:2x4", (4096, 4096), 4096, "bfloat16", 0, "unfused", "as they are placed"),
    ],
)
def test_explain_is_what_a_call_of_a_product_gets(
    op: str,
    topology: str,
    shape: tuple[int, ...],
    columns: int,
    dtype: str,
    axis: int,
    algorithm: str,
    why: str,
) -> None:
    on = harness.tpu_mesh(topology, {"x": 4, "y": 2} if topology == "v5e:2x4" else {"x": 4})
    found = pc.explain(
        op, shape=shape, dtype=dtype, columns=columns, mesh=on, axis_name="x", axis=axis
    )
    assert not pc.counts() and not pc.fusion_counts()
    lowered(op, on, shape, columns, dtype, axis)
    ((_, way, reason),) = pc.fusion_counts()
    assert found.algorithm == way == algorithm
    assert why in found.why and reason == ("" if way == "fused" else found.why)
    served = {name for _, _, name in pc.counts()}
    assert served == {step.algorithm for step in found.inside}
    assert bool(found.inside) == (way == "unfused")


def test_explain_prints_both_times_and_what_serves_the_collective() -> None:
    large, small = (
        pc.explain(GATHER, shape=shape, dtype=jnp.bfloat16, columns=width, devices=16, chip="v5e")
        for shape, width in (((512, 4096), (2048, 2048)), ((16, 128), 128))
    )
    assert [c.algorithm for c in large.candidates] == ["fused", "unfused"]
    assert [c.algorithm for c in small.candidates] == ["unfused", "fused"]
    for found in (large, small):
        first, second = (c.us for c in found.candidates)
        assert first is not None and second is not None and 0 < first < second
    assert f"{large.candidates[0].us:.1f}" in str(large) and "16 x v5e: fused" in str(large)
    assert "all_gather of 4096 bytes a device" in str(small) and not large.inside


def test_a_simulated_devices_product_and_gather_are_timed_by_the_same_links() -> None:
    """Its tables are another chip's, whose links are faster than those of its kernels' model."""
    found = pc.explain(GATHER, shape=(1024, 256), columns=256, devices=8)
    assert found.algorithm == "fused", found


def test_explain_takes_the_order_of_a_product_and_of_its_sum() -> None:
    of: dict[str, Any] = {"shape": (2048, 4096), "dtype": "bfloat16", "columns": 4096}
    free, ranked = (
        pc.explain(SCATTER, **of, devices=16, chip="v5e", order=order) for order in (None, "rank")
    )
    assert (free.algorithm, ranked.algorithm) == ("fused", "unfused")
    (scattered,) = ranked.inside
    assert "order='rank'" in ranked.why and scattered.algorithm == "exchange"


def test_explain_of_a_product_across_slices() -> None:
    mesh = AbstractMesh((2, 4), ("dcn", "x"))
    with pc.across_slices("dcn"):
        found = pc.explain(
            SCATTER, shape=(512, 512), columns=512, mesh=mesh, axis_name=("dcn", "x")
        )
    assert (found.algorithm, found.why) == ("unfused", "the devices lie in several slices")
    (scattered,) = found.inside
    assert [step.op for step in scattered.inside] == ["psum_scatter"]


@pytest.mark.parametrize(
    "op, given, said",
    [
        ("psum", {"nbytes": 8, "columns": 128}, "no right-hand side"),
        (GATHER, {"nbytes": 8, "columns": 128}, "give shape and dtype of x"),
        (GATHER, {"shape": (8, 128)}, "columns=None"),
        (GATHER, {"shape": (8, 128), "columns": ()}, r"columns=\(\)"),
        (GATHER, {"shape": (8, 128), "columns": 0}, "columns=0"),
        (SCATTER, {"shape": (8, 128), "columns": (8, 8)}, r"columns=\(8, 8\).*multiplied with"),
        (SCATTER, {"shape": (9, 128), "columns": 8}, "multiple of the 4 devices"),
        (GATHER, {"shape": (128,), "columns": 8}, "two dimensions or more"),
        (GATHER, {"shape": (8, 128), "columns": 8, "axis": 2}, "gather_axis=2"),
    ],
)
def test_explain_refuses_products_that_a_call_refuses(
    op: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(CollectiveError, match=said):
        pc.explain(op, devices=4, **given)
