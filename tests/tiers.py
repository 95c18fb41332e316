"""Which tests are in which tier.

    pytest                  the quick tier: minutes on two cores
    pytest -m full          all of them, but for those that are marked `slow` or `gpu`
    pytest FILE::TEST       tests that are named so run, whichever tier they are in

Every test is quick unless `QUICK` says otherwise. What stands there are tests with many parameters
of which each costs a program to compile or to simulate: some of their rows are quick, the product
is not.
"""

import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

Parameters = dict[str, Any]
# What one row of parameters covers; the quick rows cover together all that any row does.
Covers = Callable[[Parameters], Iterable[Hashable]]


def each(*names: str) -> Covers:
    """Each value of these parameters is in a quick row; of a tuple of them, each combination."""
    getters = [(name, operator.itemgetter(*name.split(" x "))) for name in names]

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        return ((name, str(get(parameters))) for name, get in getters)

    return covers


def once(_: Parameters) -> Iterable[Hashable]:
    """One row is quick."""
    return ("a row",)


def never(_: Parameters) -> Iterable[Hashable]:
    """No row is quick."""
    return ()


def _algorithms(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm on 4 or more devices, each collective on an odd and an even number of them."""
    if p["n"] >= 4:
        yield p["op"], p["algorithm"]
        yield p["op"], p["n"] % 2
    yield p["n"]


def _rows(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`, and each algorithm of its collective."""
    return str(p["row"]), (p["row"].op, p["algorithm"])


def _recorded(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`, and each number of devices."""
    return p["key"].split(" ")[0], p["key"].split(" on ")[1]


def _dtypes(p: Parameters) -> Iterable[Hashable]:
    """Each dtype of each collective."""
    return [(p["row"].op, p["dtype"])]


# "module::test", without parameters, and without the folder that the module lies in.
QUICK: dict[str, Covers] = {
    "test_conformance::test_algorithm_on_n_devices_without_races": _algorithms,
    "test_conformance::test_row_with_every_algorithm": _rows,
    "test_conformance::test_row_with_the_algorithm_chosen": _dtypes,
    "test_backend_nccl::test_conformance_rows_give_what_lax_and_the_tpu_kernels_give": _recorded,
    "test_compiled::test_compiles_for_every_generation": each(
        "op x algorithm", "op x generation", "generation x space x sizes"
    ),
    "test_compiled::test_sums_of_a_gibibyte_take_three_blocks_a_direction": each("op"),
    "test_compiled::test_a_gibibyte_per_device_compiles": each("op"),
    "test_compiled::test_a_pod_compiles_in_seconds": each("op", "topology"),
    "test_compiled::test_odd_shapes_compile": each("shape", "dtype"),
    "test_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each("algorithm"),
    "test_all_to_all::test_chunks_and_waves_with_a_late_device": each("mode"),
    "test_ragged_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_ragged_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each("algorithm"),
    "test_ppermute::test_compiles_with_nothing_around_it": each("everyone", "topology"),
    "test_ppermute::test_any_shape_compiles": each("shape", "dtype"),
    "test_ppermute::test_a_gibibyte_needs_no_scratch": once,
    "test_collective_matmul::test_transformer_sizes_compile_to_the_kernel_alone": once,
    "test_collective_matmul::test_the_shorter_of_wire_and_product_is_hidden": each(
        "name", "op", "ratio"
    ),
    "test_primitives::test_transformation": each("op", "transformation"),
    "test_primitives::test_derived": each("op", "transformation"),
    "test_replay_truth::test_events_of_our_collectives_equal_the_interpreters": each(
        "case x algorithm", "n"
    ),
    "test_replay_rows::test_our_collectives_have_no_fault_on_any_schedule": each(
        "case x algorithm", "machine"
    ),
    "test_pipelined_products::test_all_gather_matmul": each("axis", "dtype", "to"),
    "test_pipelined_products::test_matmul_reduce_scatter": each("axis", "dtype", "to"),
    "test_multihost::test_broadcast_equals_jax": each("tree", "source", "processes"),
    "test_packaging::test_the_sdist_holds_the_package_and_what_builds_it": never,
    "test_packaging::test_the_wheel_holds_the_package_alone": never,
    "test_packaging::test_the_wheel_runs_where_it_is_installed": never,
    "test_multihost::test_allgather_equals_jax": each("tree", "tiled", "processes"),
}


def name_of(item: pytest.Item) -> str:
    """The test's name as `QUICK` has it."""
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those of the items that the quick tier runs."""
    chosen, left = set(), {}
    for item in items:
        covers = QUICK.get(name_of(item))
        if covers is None:
            chosen.add(item)
        else:
            left.setdefault(name_of(item), []).append((item, _covered(item, covers)))
    for rows in left.values():
        chosen.update(_covering(rows))
    return chosen


def _covered(item: pytest.Item, covers: Covers) -> set[Hashable]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    try:
        return set(covers(parameters))
    except KeyError as error:
        raise pytest.UsageError(
            f"tests/tiers.py: {name_of(item)}: has no parameter {error}; it has {[*parameters]}"
        ) from None


def _covering(rows: list[tuple[pytest.Item, set[Hashable]]]) -> Iterable[pytest.Item]:
    """Few rows that cover what all of them do: always the first of those that add most."""
    open_ = set().union(*(covered for _, covered in rows))
    while open_:
        item, covered = max(rows, key=lambda row: len(row[1] & open_))
        open_ -= covered
        yield item


def check(items: list[pytest.Item]) -> None:
    """Refuses names in `QUICK` that no test has, of the modules that the items are from.

    Raises:
      pytest.UsageError: a test was renamed or removed.
    """
    names = {name_of(item) for item in items}
    modules = {name.partition("::")[0] for name in names}
    for name in sorted(set(QUICK) - names):
        if name.partition("::")[0] in modules:
            raise pytest.UsageError(
                f"tests/tiers.py: {name}: no test has this name; rename or remove it there"
            )
