"""Which tests are in which tier.

    pytest                  the quick tier: minutes on two cores
    pytest -m full          all of them, but for those that are marked `slow` or `gpu`
    pytest FILE::TEST       tests that are named so run, whichever tier they are in

Every test is quick unless `QUICK` says otherwise. It names tests that compile or simulate a program
for each row of parameters: some of their rows are quick, the product is not. Some costly tests of
what others test too have no quick row.
"""

import operator
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import pytest

Parameters = dict[str, Any]
# What one row of parameters covers; the quick rows cover together all that any row does.
Covers = Callable[[Parameters], Iterable[Hashable]]


def each(*names: str) -> Covers:
    """Each value of these parameters is in a quick row; of `a x b`, each combination."""
    getters = [(name, operator.itemgetter(*name.split(" x "))) for name in names]

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        return ((name, str(get(parameters))) for name, get in getters)

    return covers


def only(**values: Container[Any]) -> Covers:
    """The rows with these values are quick."""

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        if all(parameters[name] in among for name, among in values.items()):
            yield str(parameters)

    return covers


def once(_: Parameters) -> Iterable[Hashable]:
    """One row is quick."""
    return ("a row",)


def never(_: Parameters) -> Iterable[Hashable]:
    """No row is quick."""
    return ()


def _some_forms(p: Parameters) -> Iterable[Hashable]:
    """One form of each collective."""
    yield p["form"].split(" ")[0]


def _algorithms(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm on 4 or more devices, each collective on an odd and an even number of them."""
    if p["n"] >= 4:
        yield p["op"], p["algorithm"]
        yield p["op"], p["n"] % 2
    yield p["n"]


def _rows(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`; `_algorithms` has each algorithm."""
    yield str(p["row"])


def _in_either_space(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm in HBM or in VMEM, each space, and each value of all else."""
    algorithm, _, space = p["algorithm"].partition(":")
    others = ((name, str(value)) for name, value in p.items() if name not in ("algorithm", "case"))
    return ((p["case"].op, algorithm), (p["case"].op, space), *others)


def _recorded(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`, and each number of devices."""
    return p["key"].split(" ")[0], p["key"].split(" on ")[1]


def _dtypes(p: Parameters) -> Iterable[Hashable]:
    """Each collective, and each dtype, whichever it is of."""
    return ("op", p["row"].op), p["dtype"]


def _square(p: Parameters) -> Iterable[Hashable]:
    """Each generation, each form of program, and each kernel; v5e cannot run them all."""
    yield p["generation"]
    yield p["form"]
    if p["generation"] != "v5e":
        yield from (kernel.name for kernel in p["kernels"])


def _sound_or_not(p: Parameters) -> Iterable[Hashable]:
    """One sound kernel and a faulty one."""
    return (bool(p["case"].finds),)


# "module::test", without parameters, and without the folder that the module lies in.
QUICK: dict[str, Covers] = {
    "test_all_reduce_gather::test_elements_are_added_in_the_order_of_the_ranks": each(
        "dtype", "vmem"
    ),
    "test_all_reduce_gather::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_all_reduce_gather::test_takes_hardly_longer_than_gathering_the_operands": each(
        "machine", "nbytes"
    ),
    "test_all_reduce_line::test_all_devices_have_the_documented_bits_however_late_one_is": each(
        "dtype", "vmem"
    ),
    "test_all_reduce_line::test_compiles_to_the_kernel_alone": each("generation", "dtype"),
    "test_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each("algorithm"),
    "test_all_to_all::test_calls_in_one_program_do_not_disturb_each_other": never,
    "test_all_to_all::test_chunks_and_waves_with_a_late_device": each("mode"),
    "test_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_all_to_all::test_dropped_credit_is_caught": each("dropped"),
    "test_all_to_all::test_small_blocks_go_along_a_line": once,
    "test_axes::test_axes_of_vmap_and_of_a_mesh_together": each("op", "axes"),
    "test_axes::test_nested_shard_map": each("op", "in_scope"),
    "test_axes::test_pmap": once,
    "test_axes::test_tuples_of_axes": each("op", "axes"),
    "test_backend_nccl::test_all_gather": each("axis", "dtype"),
    "test_backend_nccl::test_all_to_all": each("split", "tiled", "dtype"),
    "test_backend_nccl::test_conformance_rows_give_what_lax_and_the_tpu_kernels_give": _recorded,
    "test_backend_nccl::test_ppermute_and_zeros_where_nothing_comes": each("perm", "dtype"),
    "test_backend_nccl::test_psum_scatter": each("axis", "dtype"),
    "test_benchmarks::test_run_verifies_every_collective_and_algorithm": never,
    "test_benchmarks_experts::test_rows_of_a_prefill_are_near_the_wires_bound": each("name"),
    "test_benchmarks_measure::test_references_agree_with_lax": each("case", "dtype"),
    "test_bundles::test_each_leaf_is_transformed_on_its_own_with_kernels": once,
    "test_collective_matmul::test_every_ring_under_both_adversaries": each("mode"),
    "test_product::test_products_of_tiles_that_stick_out": each("keep", "transposed"),
    "test_matmul_on_tpus::test_scatter_compiles": never,
    "test_matmul_on_tpus::test_the_shorter_of_wire_and_product_is_hidden": each("name", "op"),
    "test_matmul_on_tpus::test_transformer_sizes_compile_to_the_kernel_alone": once,
    "test_compiled::test_a_gibibyte_per_device_compiles": each("op"),
    "test_compiled::test_a_pod_compiles_in_seconds": each("op", "topology"),
    "test_compiled::test_compiles_for_every_generation": each(
        "op x algorithm", "op x generation", "generation x space x sizes"
    ),
    "test_compiled::test_odd_shapes_compile": each("shape", "dtype"),
    "test_compiled::test_sums_of_a_gibibyte_take_three_blocks_a_direction": only(
        op=["all_reduce"], generation=["v5e"]
    ),
    "test_conformance::test_algorithm_on_n_devices_without_races": _algorithms,
    "test_conformance::test_row_with_every_algorithm": _rows,
    "test_conformance::test_row_with_the_algorithm_chosen": _dtypes,
    "test_explanation::test_figures_are_the_replays_within_a_tenth_or_there_is_none": each(
        "pod", "name"
    ),
    "test_fused::test_all_gather_matmul_of_any_layout": once,
    "test_fused::test_dtypes_are_those_of_matmul": each("op"),
    "test_fused::test_matmul_reduce_scatter_of_any_layout": once,
    "test_hierarchy::test_an_axis_over_two_slices_as_its_devices_lie": once,
    "test_hierarchy::test_dtypes": once,
    "test_hierarchy::test_every_form_of_the_calls": never,
    "test_hierarchy::test_gradients_are_laxs": once,
    "test_hierarchy::test_minima_means_and_broadcasts": never,
    "test_hierarchy::test_values_are_laxs_by_kernels_inside_and_lax_across": only(
        layout=("two-slices-of-four", "named-in-another-order", "two-outer-axes")
    ),
    "test_judge::test_mutants_are_caught_or_equivalent_and_all_schedules_agree": only(
        name=["all_gather:line", "all_to_all:direct"]
    ),
    "test_judge::test_the_interpreter_agrees": _sound_or_not,
    "test_judge::test_verdicts": each("case"),
    "test_judge::test_verdicts_are_what_all_schedules_show": each("case"),
    "test_kernel_bodies::test_kernel_bodies_compile": once,
    "test_megacore::test_no_kernel_is_divided_between_cores": once,
    "test_memory_spaces::test_kernels_find_in_hbm_what_they_take_for_it": _square,
    "test_models::test_mixture_of_experts_trains_as_without_devices": never,
    "test_models::test_model_trains_as_with_lax": once,
    "test_moe::test_compiles_for_every_generation": each("generation", "exchange x wire"),
    "test_moe::test_hostile_routings_move_nothing_out_of_bounds": each("how"),
    "test_moe::test_values_and_gradients_are_those_of_a_dense_layer": each("how"),
    "test_moe::test_what_fits_and_what_does_not": only(how=("ragged",), rows=(7,)),
    "test_moe_transforms::test_checkpoint_in_a_scan_keeps_nothing_and_differentiates": only(
        how=("kernels",)
    ),
    "test_moe_transforms::test_second_order_and_forward": only(how=("ragged", "kernels")),
    "test_moe_transforms::test_vmap": each("mapped"),
    "test_moe_wires::test_values_are_those_that_the_wire_can_say": only(
        how=("kernels", "ragged kernels")
    ),
    "test_moe_wires::test_derivatives_pass_straight_through_by_a_wire_of_their_own": only(
        how=("kernels",)
    ),
    "test_multihost::test_a_broadcast_has_one_source": each("count", "processes"),
    "test_multihost::test_a_dead_process_is_named": only(doomed=[("cpu", 2)]),
    "test_multihost::test_a_process_that_lives_and_does_not_come_is_named": only(
        doomed=[("cpu", 2)]
    ),
    "test_multihost::test_a_process_that_never_enters_is_named": only(doomed=[("cpu", 2)]),
    "test_multihost::test_allgather_of_a_global_array_equals_jax": each("spec", "processes"),
    "test_multihost::test_assert_equal_accepts": each("what", "processes"),
    "test_multihost::test_assert_equal_says_where": each("what", "processes"),
    "test_multihost::test_disagreement_is_shown_everywhere": each("what", "processes"),
    "test_multihost::test_large_trees_travel_in_bounded_chunks": each("chunk_bytes", "processes"),
    "test_multihost::test_local_to_global_and_back_equals_jax": each("spec", "processes"),
    "test_multihost::test_nobody_passes_before_the_last_one_comes": each("wait", "processes"),
    "test_multihost::test_allgather_equals_jax": each("tree", "tiled", "processes"),
    "test_multihost::test_broadcast_equals_jax": each("tree", "source", "processes"),
    "test_multihost::test_preemption_equals_jax": only(doomed=[("cpu", 2)]),
    "test_multihost::test_preemption_of_one_process_stops_all_at_one_step": only(
        doomed=[("cpu", 2)]
    ),
    "test_multihost::test_the_others_go_on_without_a_process_that_dies": only(count=[2]),
    "test_nccl_transfer::test_every_dtype_arrives_bit_for_bit": once,
    "test_notebooks::test_wrong_answers_are_not_passed_and_the_mistake_is_named": only(
        answers=["three"]
    ),
    "test_operands::test_every_dtype_of_laxs": once,
    "test_operands::test_float0_tangents_and_integer_gradients": never,
    "test_operands::test_shapes": each("op", "shape"),
    "test_ordered::test_a_row_has_the_same_bits_in_any_batch": once,
    "test_ordered::test_groups_add_in_the_order_that_they_are_given_in": once,
    "test_ordered::test_ranks_are_numbered_over_several_axes_as_they_are_named": once,
    "test_ordered::test_scattered_sums_and_means": only(algorithm=[None]),
    "test_ordered::test_sums_have_the_documented_bits_in_every_dtype": only(algorithm=["gather"]),
    "test_packaging::test_the_sdist_holds_the_package_and_what_builds_it": never,
    "test_packaging::test_the_wheel_holds_the_package_alone": never,
    "test_packaging::test_the_wheel_runs_where_it_is_installed": never,
    "test_pipelined_products::test_all_gather_matmul": each("axis", "dtype", "to"),
    "test_pipelined_products::test_laxs_permutes_fly_while_a_tpu_multiplies": once,
    "test_pipelined_products::test_matmul_reduce_scatter": each("axis", "dtype", "to"),
    "test_pipelines_gradients::test_derivatives": each("name", "hops"),
    "test_places::test_every_algorithm_takes_an_order_of_its_own": once,
    "test_places::test_results_are_in_laxs_order_whatever_the_torus": never,
    "test_ppermute::test_a_gibibyte_needs_no_scratch": once,
    "test_ppermute::test_any_shape_compiles": each("shape", "dtype"),
    "test_ppermute::test_compiles_with_nothing_around_it": each("everyone", "topology"),
    "test_primitives::test_derived": each("op", "transformation"),
    "test_primitives::test_transformation": each("op", "transformation"),
    "test_primitives::test_transformation_without_check_vma": each("op", "transformation"),
    "test_probes::test_everything_compiles_for_tpus": only(chip=["v5e"]),
    "test_properties::test_ragged_value_and_gradient": never,
    "test_properties::test_value_and_gradient": once,
    "test_ragged_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each("algorithm"),
    "test_ragged_all_to_all"
    "::test_calls_of_which_a_device_takes_no_part_do_not_disturb_each_other": never,
    "test_ragged_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_ragged_all_to_all::test_groups_exchange_by_themselves": once,
    "test_ragged_all_to_all::test_routings_of_one_program": only(algorithm=["direct"]),
    "test_ragged_all_to_all::test_tables_of_any_integer_type": once,
    "test_ragged_all_to_all::test_chunks_and_waves": each("algorithm"),
    "test_reduce_scatter::test_bfloat16_sums_round_once_per_hop_and_precise_ones_once": once,
    "test_reduce_scatter::test_sharded_sums_of_whole_arrays": once,
    "test_replay_races::test_our_all_gathers_are_clean": each("algorithm"),
    "test_replay_races::test_the_all_gather_that_jax_ships_races": once,
    "test_replay_rows::test_lines_come_near_the_bound_at_every_size": each("name", "machine"),
    "test_replay_rows::test_our_collectives_have_no_fault_on_any_schedule": _in_either_space,
    "test_replay_truth::test_events_of_our_collectives_equal_the_interpreters": _in_either_space,
    "test_residual_norm::test_compiles_to_the_kernel_alone": once,
    "test_residual_norm::test_gradients_are_those_apart": once,
    "test_residual_norm::test_one_kernel_and_three_passes_give_the_same": once,
    "test_sparsecore::test_compiles_to_an_asynchronous_call": each("op x algorithm", "generation"),
    "test_sparsecore::test_a_fault_in_a_sum_is_caught": only(mode=["eager"]),
    "test_sparsecore::test_narrow_sums_and_groups_compile": each("generation"),
    "test_sparsecore::test_subcores_add_any_dtype_and_shape_as_the_tensorcore_does": once,
    "test_sparsecore::test_the_same_kernel_gives_what_it_gives_on_the_tensorcore": each("op"),
    "test_sparsecore::test_replayed_as_a_second_engine": each("op"),
    "test_split::test_batched_values_are_laxs": each("form"),
    "test_split::test_by_kernels_a_collective_is_one_call_where_it_starts": _some_forms,
    "test_split::test_values_are_laxs": each("form", "dtype"),
    "test_torus_ragged_spread::test_compiles_on_all_that_reach_all": once,
    "test_torus_ragged_spread::test_faults_are_caught": each("fault"),
    "test_torus_ragged_spread::test_routings_of_one_program": only(sizes=[(2, 3)]),
    "test_torus_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": once,
    "test_torus_all_to_all::test_compiles_with_nothing_around_it": only(
        topology=["v4:2x2x1", "v5e:4x4", "v6e:4x4", "tpu7x:2x2x1"], split=[0], concat=[0]
    ),
    "test_torus_all_to_all::test_links_of_v5e_are_at_work_almost_all_the_time": only(
        axes=[("x",)], name=["v5e:4x4"]
    ),
    "test_torus_all_to_all::test_missing_wait_is_caught": once,
    "test_torus_all_to_all::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_torus_all_to_all::test_slots_that_serve_again_with_a_late_device": once,
    "test_torus_all_to_all::test_values_are_laxs_without_races": only(sizes=[(2, 4), (2, 2)]),
    "test_torus_ragged::test_compiles_for_every_generation": only(sizes=[(4, 4)]),
    "test_torus_ragged::test_devices_that_are_numbered_in_any_order": once,
    "test_torus_ragged::test_missing_wait_is_caught": once,
    "test_torus_ragged::test_values_without_races": only(sizes=[(3, 2)]),
    "test_torus_on_tpus::test_compiles_for_every_generation": each("op", "topology"),
    "test_torus_kernels::test_gathers_along_any_axis_as_lax": once,
    "test_torus_kernels::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_torus_kernels::test_sections_add_up_without_races": each("op"),
    "test_torus_on_tpus::test_sections_compile_for_every_generation": never,
    "test_torus_kernels::test_values_without_races": each("op"),
    "test_users_project::test_a_strict_checker_takes_its_files": never,
    "test_verify_explore::test_a_schedule_shows_the_race_of_a_public_kernel": never,
    "test_wired_refusals::test_compiles_for_every_generation": only(
        generation=["v5e"], wire=["float8_e4m3fn"]
    ),
    "test_wired_derivatives::test_gradients_pass_straight_through": each("op", "check_vma"),
    "test_wired::test_kernels_give_the_bits_that_lax_gives": once,
    "test_wired::test_sums_are_within_the_stated_bound": only(n=[3]),
    "test_wired_derivatives::test_vmap_groups_each_element_by_itself": each("op", "where"),
    "test_wired::test_what_is_moved_is_within_half_a_step": only(n=[3]),
    "test_torus_packed::test_compiles_for_every_generation": only(
        op=["all_reduce"], topology=["v5e:4x4"]
    ),
    "test_torus_packed::test_faults_are_caught_on_some_schedule": never,
    "test_torus_packed::test_sections_are_within_the_bound": never,
    "test_wired_rings::test_a_psum_adds_half_a_step_and_gives_everyone_the_same_bits": once,
    "test_wired_rings::test_a_sum_takes_sixty_hundredths_of_its_time_in_bfloat16": each("op"),
    "test_wired_rings::test_compiles_for_every_generation": once,
    "test_wired_rings::test_sections_of_a_large_psum_are_safe_on_every_schedule": never,
    "test_wired_rings::test_sections_of_a_large_sum_are_safe_on_every_schedule": never,
    "test_wired_rings::test_sums_are_within_the_bound_that_grows_with_hops": once,
    "test_wired_training::test_int8_gradient_sums_end_within_a_percent_of_the_exact_loss": never,
    "test_wired_refusals::test_what_is_refused": only(backend=["pallas"]),
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
            f"tests/helpers/tiers.py: {name_of(item)}: has no parameter {error};"
            f" it has {[*parameters]}"
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
                f"tests/helpers/tiers.py: {name}: no test has this name; rename or remove it there"
            )
