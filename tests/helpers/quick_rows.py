"""Which rows of parametrised tests are in the quick tier, where that is not all."""

from collections.abc import Hashable, Iterable

from covers import Covers, Parameters, each, once, only, some


def _some_forms(p: Parameters) -> Iterable[Hashable]:
    """One form of each collective."""
    yield p["form"].split(" ")[0]


def _algorithms(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm on 4 or more devices, each collective on an odd and an even number of them."""
    if p["n"] >= 4:
        yield p["op"], p["algorithm"]
        yield p["op"], p["n"] % 2
    yield p["n"]


def _on_tori(p: Parameters) -> Iterable[Hashable]:
    """Each collective, each algorithm, whichever it is of, and each torus; not the dearest."""
    if p["op"] != "ragged_all_to_all" or p["algorithm"] not in ("torus", "spread"):
        yield from ((name, p[name]) for name in ("op", "algorithm", "torus"))


def _rows(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`; `_algorithms` has each algorithm."""
    yield str(p["row"])


def _recorded(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`, and each number of devices."""
    return p["key"].split(" ")[0], p["key"].split(" on ")[1]


def _dtypes(p: Parameters) -> Iterable[Hashable]:
    """Each collective, and each dtype, whichever it is of."""
    return ("op", p["row"].op), p["dtype"]


def _collectives(p: Parameters) -> Iterable[Hashable]:
    """Each collective, and each algorithm, whichever collective it is of; on few devices."""
    if p["n"] <= 3:
        algorithm, _, space = p["algorithm"].partition(":")
        yield from (("op", p["case"].op), ("algorithm", algorithm), ("space", space))


def _findings(p: Parameters) -> Iterable[Hashable]:
    """Each kind of finding, and a sound kernel, on the fewest devices that show it."""
    if p["n"] <= 2:
        yield from p["case"].finds or {"sound"}


def _planted(p: Parameters) -> Iterable[Hashable]:
    """Each planted fault; that the sound kernel is not caught, conformance says too."""
    if p["fault"] != "none":
        yield p["fault"]


def _lessons(p: Parameters) -> Iterable[Hashable]:
    """A first lesson, and the one that judges kernels."""
    if p["path"].stem[:2] in ("00", "11"):
        yield p["path"]


def _sound_or_not(p: Parameters) -> Iterable[Hashable]:
    """One sound kernel and a faulty one."""
    return (bool(p["case"].finds),)


# "module::test", without parameters, and without the folder that the module lies in.
QUICK: dict[str, Covers] = {
    "test_ahead::test_values_and_gradients_are_the_same_to_the_bit": once,
    "test_all_gather_packed::test_compiles_for_every_generation": only(topology=["v5p:4x4x4"]),
    "test_all_gather_packed::test_faults_are_caught": once,
    "test_all_gather_packed::test_it_takes_sixty_hundredths_of_its_time_in_bfloat16": once,
    "test_all_gather_packed::test_sections_are_within_half_a_step": once,
    "test_all_reduce_gather::test_elements_are_added_in_the_order_of_the_ranks": only(
        dtype=["bfloat16"], vmem=[True]
    ),
    "test_all_reduce_gather::test_sound_kernel_is_not_caught": once,
    "test_all_reduce_gather::test_takes_hardly_longer_than_gathering_the_operands": only(
        machine=["v5p:4x4x4"], nbytes=[16384]
    ),
    "test_all_reduce_grid::test_faults_are_named": once,
    "test_all_reduce_grid::test_scratch_is_16_mib_at_the_most": once,
    "test_all_reduce_line::test_all_devices_have_the_documented_bits_however_late_one_is": once,
    "test_all_reduce_line::test_each_link_carries_the_operand_once_each_way": only(n=[2, 5]),
    "test_all_reduce_line::test_faults_are_named": each("fault"),
    "test_all_reduce_line::test_the_sound_kernel_has_no_fault_on_any_schedule": only(
        n=[3, 8], vmem=[False]
    ),
    "test_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each("algorithm"),
    "test_all_to_all::test_chunks_and_waves_with_a_late_device": once,
    "test_all_to_all::test_dropped_credit_is_caught": once,
    "test_all_to_all::test_fault_in_the_slots_is_caught": _planted,
    "test_all_to_all::test_small_blocks_go_along_a_line": once,
    "test_all_to_all_packed::test_compiles_for_every_generation": only(generation=["v5e"]),
    "test_all_to_all_packed::test_faults_are_caught": once,
    "test_all_to_all_packed::test_it_takes_sixty_hundredths_of_its_time_in_bfloat16": only(
        pod=["v6e:8x8"]
    ),
    "test_all_to_all_packed_ring::test_faults_are_caught": once,
    "test_all_to_all_packed_ring::test_it_takes_sixty_hundredths_of_its_time_in_bfloat16": only(
        pod=["v5e:16x16"], mib=[4]
    ),
    "test_all_to_all_packed_ring::test_what_comes_is_within_half_a_step": only(n=[3], tiles=[3]),
    "test_averaged::test_a_sum_and_what_all_have_lost_are_the_exact_sum": once,
    "test_axes::test_axes_of_vmap_and_of_a_mesh_together": each("op", "axes"),
    "test_axes::test_nested_shard_map": each("op", "in_scope"),
    "test_axes::test_pmap": once,
    "test_axes::test_tuples_of_axes": each("op", "axes"),
    "test_backend_nccl::test_all_gather": each("axis", "dtype"),
    "test_backend_nccl::test_all_to_all": each("split", "tiled", "dtype"),
    "test_backend_nccl::test_conformance_rows_give_what_lax_and_the_tpu_kernels_give": _recorded,
    "test_backend_nccl::test_ppermute_and_zeros_where_nothing_comes": each("perm", "dtype"),
    "test_backend_nccl::test_psum_scatter": each("axis", "dtype"),
    "test_benchmarks_certify::test_soak_goes_numpys_way_through_every_collective": once,
    "test_benchmarks_measure::test_references_agree_with_lax": each("case", "dtype"),
    "test_benchmarks_readme::test_stored_replays_are_what_the_model_says_now": only(
        op=["all_gather"]
    ),
    "test_bodies::test_sums_that_are_held_have_the_same_bits": each("check_vma"),
    "test_bundles::test_a_tree_is_reduced_as_lax_reduces_it": once,
    "test_bundles::test_each_leaf_is_transformed_on_its_own_with_kernels": once,
    "test_chunking::test_a_kernel_sends_in_as_many_chunks_as_its_plan_says": each(
        "op", "algorithm"
    ),
    "test_collective_matmul::test_a_dropped_wait_for_a_tile_is_caught": once,
    "test_collective_matmul::test_dropped_wait_before_a_part_is_used_is_caught": once,
    "test_collective_matmul::test_every_ring_under_both_adversaries": only(n=[3], mode=["eager"]),
    "test_collective_matmul::test_sound_kernels_are_not_caught": once,
    "test_collective_matmul::test_steps_that_share_a_semaphore_are_caught": once,
    "test_collective_matmul::test_the_replay_knows_no_race_of_other_orders": once,
    "test_collective_matmul::test_the_replay_knows_the_race_of_a_tile_that_is_not_waited_for": once,
    "test_collectives::test_whole_arrays_are_summed_as_they_lie": once,
    "test_compiled::test_a_gibibyte_per_device_compiles": each("op"),
    "test_compiled::test_compiles_for_every_generation": each(
        "op x algorithm", "op x generation", "generation x space"
    ),
    "test_compiled::test_odd_shapes_compile": each("shape", "dtype"),
    "test_conformance::test_algorithm_on_n_devices_without_races": _algorithms,
    "test_conformance::test_algorithm_where_neighbours_on_the_ring_are_none_by_rank": _on_tori,
    "test_conformance::test_row_with_every_algorithm": _rows,
    "test_conformance::test_row_with_the_algorithm_chosen": _dtypes,
    "test_explanation::test_explain_is_what_a_call_gets_of_any_shape_on_several_axes": each("op"),
    "test_explanation::test_figures_are_the_replays_within_a_tenth_or_there_is_none": each(
        "pod", "name"
    ),
    "test_fused::test_all_gather_matmul_of_any_layout": once,
    "test_fused::test_bfloat16_sums_round_once_per_hop_and_precise_ones_once": once,
    "test_fused::test_dtypes_are_those_of_matmul": each("op"),
    "test_fused::test_matmul_reduce_scatter_of_any_layout": once,
    "test_fusing::test_a_layer_gives_what_it_gives_by_lax": only(scan=[True], layer=["within"]),
    "test_fusing::test_gradients_are_in_kernels_too": once,
    "test_fusing::test_other_pairs": once,
    "test_gpu_codec::test_the_bits_are_those_of_passes_of_xla": each("name", "shape", "group"),
    "test_gpu_codec::test_what_stays_has_the_bits_of_what_comes": each("blocks", "name"),
    "test_gradient_sums::test_sums_that_check_vma_adds": only(forward=["plain"]),
    "test_gradient_sums::test_values_are_those_of_lax": each("summed", "hidden"),
    "test_hangs::test_rows_that_nobody_sends_are_refused_on_simulated_devices": once,
    "test_hierarchy::test_two_slices_of_a_tpu_are_found_and_compiled_for": once,
    "test_hierarchy::test_values_are_laxs_by_kernels_inside_and_lax_across": only(
        layout=["two-slices-of-four"]
    ),
    "test_in_place::test_loops_give_what_they_give_by_lax": only(loop=["nested"]),
    "test_in_place::test_no_race_where_a_turn_reads_in_place": once,
    "test_in_place::test_what_is_written_in_any_case": once,
    "test_judge::test_mutants_are_caught_or_equivalent_and_all_schedules_agree": only(
        name=["all_gather:line", "all_to_all:direct"]
    ),
    "test_judge::test_the_interpreter_agrees": _sound_or_not,
    "test_judge::test_verdicts": each("case"),
    "test_judge::test_verdicts_are_what_all_schedules_show": _findings,
    "test_kernel_bodies::test_kernel_bodies_compile": once,
    "test_launch::test_operands_are_on_their_way_to_vmem_while_others_are_waited_for": once,
    "test_layer_scan::test_it_equals_a_scan_over_gathered_weights": each("depth"),
    "test_layer_scan::test_weights_and_gradients_go_over_wires": only(backend=["xla"]),
    "test_loops::test_a_kernel_is_told_where_products_alone_read_its_result": each("alone"),
    "test_loops::test_a_scatter_is_left_where_no_product_stands_behind_it": once,
    "test_loops::test_turns_go_in_pairs_where_nothing_is_left_to_run_beside": once,
    "test_matmul_on_tpus::test_the_shorter_of_wire_and_product_is_hidden": each("name", "op"),
    "test_matmul_on_tpus::test_transformer_sizes_compile_to_the_kernel_alone": once,
    "test_matmul_on_tpus::test_weights_that_stay_in_vmem_compile": once,
    "test_megacore::test_no_kernel_is_divided_between_cores": once,
    "test_models::test_model_trains_as_with_lax": once,
    "test_moe::test_hostile_routings_move_nothing_out_of_bounds": once,
    "test_moe::test_nothing_reads_what_no_block_has_brought": some(how=["ragged"]),
    "test_moe::test_numbers_of_64_bits": some(how=["dense", "ragged"]),
    "test_moe::test_values_and_gradients_are_those_of_a_dense_layer": some(
        how=["dense", "ragged kernels"]
    ),
    "test_moe::test_what_fits_and_what_does_not": only(how=("ragged",), rows=(7,)),
    "test_moe_model::test_an_expert_transformer_trains_as_with_lax": only(backend=["xla"]),
    "test_moe_nccl::test_values_and_gradients_are_those_of_a_dense_layer": once,
    "test_moe_transforms::test_vmap": each("mapped"),
    "test_moe_wires::test_vmap_mixes_no_elements_in_a_group": only(how=["ragged"]),
    "test_multihost::test_a_broadcast_has_one_source": each("count"),
    "test_multihost::test_allgather_equals_jax": each("tree", "tiled"),
    "test_multihost::test_allgather_of_a_global_array_equals_jax": each("spec"),
    "test_multihost::test_assert_equal_accepts": each("what"),
    "test_multihost::test_assert_equal_says_where": each("what"),
    "test_multihost::test_broadcast_equals_jax": each("tree", "source"),
    "test_multihost::test_disagreement_is_shown_everywhere": each("what"),
    "test_multihost::test_large_trees_travel_in_bounded_chunks": each("chunk_bytes"),
    "test_multihost::test_local_to_global_and_back_equals_jax": each("spec"),
    "test_multihost::test_nobody_passes_before_the_last_one_comes": each("wait"),
    "test_nccl_mailboxes::test_who_has_waited_in_vain_stands_by_what_it_told": once,
    "test_nccl_tape::test_without_a_compiler_python_answers_and_a_warning_says_so": once,
    "test_nccl_transfer::test_every_dtype_arrives_bit_for_bit": once,
    "test_notebooks::test_notebook_runs_and_its_solutions_are_right": _lessons,
    "test_notebooks::test_wrong_answers_are_not_passed_and_the_mistake_is_named": only(
        answers=["the first three"]
    ),
    "test_operands::test_shapes": each("op", "shape"),
    "test_order::test_values_are_the_same_in_another_order": once,
    "test_ordered::test_ranks_are_numbered_over_several_axes_as_they_are_named": once,
    "test_ordered::test_sums_have_the_documented_bits_in_every_dtype": only(algorithm=["gather"]),
    "test_pipelined_products::test_all_gather_matmul": each("axis", "dtype", "to"),
    "test_pipelined_products::test_laxs_permutes_fly_while_a_tpu_multiplies": once,
    "test_pipelined_products::test_matmul_reduce_scatter": each("axis", "dtype", "to"),
    "test_pipelines::test_kernels_serve_and_do_not_race": once,
    "test_pipelines::test_values": only(n=[2, 3]),
    "test_pipelines_gradients::test_derivatives": each("name", "hops"),
    "test_pipelines_gradients::test_gradients_by_kernels": once,
    "test_places::test_every_algorithm_takes_an_order_of_its_own": once,
    "test_ppermute::test_a_gibibyte_needs_no_scratch": once,
    "test_ppermute::test_any_shape_compiles": each("shape", "dtype"),
    "test_ppermute::test_compiles_with_nothing_around_it": each("everyone", "topology"),
    "test_ppermute_packed::test_compiles_for_every_generation": only(generation=["v5e"]),
    "test_ppermute_packed::test_faults_are_caught": once,
    "test_ppermute_packed::test_it_takes_sixty_hundredths_of_its_time_in_bfloat16": once,
    "test_ppermute_packed::test_what_comes_is_within_half_a_step": once,
    "test_primitives::test_derived": each("op", "transformation"),
    "test_primitives::test_transformation": each("op", "transformation"),
    "test_probes::test_the_figures_of_a_machine_are_found_again": only(
        name=["v5e:2x4", "7x:2x2x1"]
    ),
    "test_probes::test_the_space_probe_is_right_and_sees_zeros": once,
    "test_product::test_products_of_tiles_that_stick_out": each("keep", "transposed"),
    "test_products_wires::test_values_and_gradients_have_the_bits_of_both_apart": once,
    "test_ragged_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": once,
    "test_ragged_all_to_all::test_chunks_and_waves": once,
    "test_ragged_all_to_all::test_routings_of_one_program": only(algorithm=["direct"]),
    "test_ragged_all_to_all::test_slices_out_of_range_are_clipped_and_moved": once,
    "test_ragged_all_to_all::test_tables_that_do_not_fit_are_refused": only(algorithm=["ring"]),
    "test_reach::test_no_kernel_writes_or_signals_beyond_reach": only(
        op=["all_gather", "all_to_all"], slices=[2]
    ),
    "test_reach::test_some_kernel_serves_every_axis_of_a_slice": only(shape=[(4, 4)]),
    "test_reduce_scatter::test_dropped_barrier_is_caught": each("barrier"),
    "test_reduce_scatter::test_dropped_credit_is_caught": once,
    "test_reduce_scatter::test_sound_kernel_is_not_caught": once,
    "test_remat::test_residuals_and_kernels_are_the_same_by_lax_simulated_and_on_tpus": each(
        "policy", "body", "inside"
    ),
    "test_replay_known::test_tables_of_a_kernel_compile_nothing": once,
    "test_replay_races::test_our_all_gathers_are_clean": each("algorithm"),
    "test_replay_races::test_the_all_gather_that_jax_ships_races": once,
    "test_replay_rows::test_lines_come_near_the_bound_at_every_size": each("machine"),
    "test_replay_rows::test_our_collectives_have_no_fault_on_any_schedule": each("algorithm"),
    "test_replay_rules::test_memory_is_counted_with_its_padding_to_tiles": once,
    "test_replay_rules::test_semaphores_are_counted_as_the_compiler_does": once,
    "test_replay_rules::test_vmem_is_counted_as_scopes_nest": once,
    "test_replay_truth::test_events_of_our_collectives_equal_the_interpreters": _collectives,
    "test_residual_norm::test_compiles_to_the_kernel_alone": once,
    "test_residual_norm::test_one_kernel_and_three_passes_give_the_same": once,
    "test_row_passes::test_the_bits_are_those_of_passes_of_xla": each("dtype"),
    "test_spaces::test_one_element_goes_among_others": once,
    "test_sparsecore::test_a_fault_in_a_sum_is_caught": once,
    "test_sparsecore::test_a_tile_comes_while_another_is_added": once,
    "test_sparsecore::test_compiles_to_an_asynchronous_call": each("generation"),
    "test_sparsecore::test_replayed_as_a_second_engine": once,
    "test_sparsecore::test_subcores_add_any_dtype_and_shape_as_the_tensorcore_does": once,
    "test_sparsecore::test_the_same_kernel_gives_what_it_gives_on_the_tensorcore": some(
        op=["all_gather", "all_to_all", "ppermute", "ragged_all_to_all", "reduce_scatter"]
    ),
    "test_sparsecore::test_what_subcores_add_is_reckoned": once,
    "test_split::test_batched_values_are_laxs": each("form"),
    "test_split::test_by_kernels_a_collective_is_one_call_where_it_starts": _some_forms,
    "test_split::test_values_are_laxs": each("form", "dtype"),
    "test_split_on_tpus::test_compiled_it_is_beside_products_where_anything_can_run_it_there": only(
        generation=["v5e", "7x"]
    ),
    "test_sums_in_two::test_a_layer_gives_what_it_gives_by_lax": each("layer"),
    "test_sums_in_two::test_gradients_are_those_of_lax": once,
    "test_sums_in_two::test_no_kernel_races_in_its_turn": each("mode", "dtype"),
    "test_tiles::test_exchanged_blocks_of_few_rows_are_packed_as_tiles_in_a_row": once,
    "test_tiles::test_exchanged_blocks_that_no_kernel_packs_go_by_passes": once,
    "test_torus::test_in_sections_each_phase_comes_in_its_turn": once,
    "test_torus_all_to_all::test_compiles_with_nothing_around_it": only(
        topology=["v5e:4x4", "tpu7x:2x2x1"], split=[0], concat=[0]
    ),
    "test_torus_all_to_all::test_links_of_v5e_are_at_work_almost_all_the_time": only(
        axes=[("x",)], name=["v5e:4x4"]
    ),
    "test_torus_all_to_all::test_missing_wait_is_caught": once,
    "test_torus_all_to_all::test_no_schedule_races": once,
    "test_torus_all_to_all::test_values_are_laxs_without_races": once,
    "test_torus_kernels::test_gathers_along_any_axis_as_lax": once,
    "test_torus_kernels::test_values_without_races": once,
    "test_torus_on_tpus::test_compiles_for_every_generation": each("op", "topology"),
    "test_torus_ragged::test_missing_wait_is_caught": once,
    "test_torus_ragged_spread::test_compiles_on_all_that_reach_all": once,
    "test_torus_ragged_spread::test_routings_of_one_program": only(sizes=[(2,)]),
    "test_tuning_tables::test_times_made_again_agree": once,
    "test_two_batches::test_it_equals_the_layer": once,
    "test_two_rings::test_products_use_all_links": once,
    "test_verify_scale::test_devices_of_a_pod_are_judged_in_time": only(name=["all_gather"]),
    "test_verify_scale::test_many_rounds_are_judged_in_time": only(everyone=[True]),
    "test_visits::test_a_fault_is_caught": _planted,
    "test_visits::test_rows_come_home_in_the_order_of_the_list": once,
    "test_visits::test_rows_come_to_their_slots_with_everyones_notes": once,
    "test_wire_passes::test_draws_have_the_bits_of_passes_of_xla": each("shape", "dtype", "wire"),
    "test_wire_passes::test_draws_know_their_place_in_every_step": once,
    "test_wire_passes::test_the_bits_are_those_of_passes_of_xla": each("shape", "dtype", "wire"),
    "test_wire_passes::test_values_and_scales_are_those_of_passes_of_xla": each("shape", "wire"),
    "test_wired::test_kernels_give_the_bits_that_lax_gives": once,
    "test_wired::test_nccl_gives_the_bits_that_lax_gives": only(by=["kernels"]),
    "test_wired::test_sums_are_within_the_stated_bound": only(n=[3]),
    "test_wired::test_what_is_moved_is_within_half_a_step": once,
    "test_wired_derivatives::test_gradients_pass_straight_through": each("op", "check_vma"),
    "test_wired_derivatives::test_vmap_groups_each_element_by_itself": each("op", "where"),
    "test_wired_maxima::test_backends_give_the_same_bits": only(dtype=["bfloat16"]),
    "test_wired_maxima::test_each_number_is_within_the_stated_bound": only(n=[3]),
    "test_wired_maxima::test_groups_and_several_axes": each("axes"),
    "test_wired_maxima::test_nccl_gives_the_bits_that_lax_gives": once,
    "test_wired_refusals::test_what_is_refused": only(backend=["pallas"]),
    "test_wired_rings::test_a_psum_adds_half_a_step_and_gives_everyone_the_same_bits": once,
    "test_wired_rings::test_faults_are_caught": once,
    "test_wired_rings::test_faults_of_a_psum_are_caught": once,
    "test_wired_rings::test_sums_are_within_the_bound_that_grows_with_hops": once,
    "test_wired_rows::test_in_order_a_row_has_the_same_bits_alone": only(n=[2]),
    "test_wired_rows::test_sums_are_within_half_a_step_of_each_row": only(n=[2]),
    "test_wires::test_one_buffer_has_values_and_scales": each("wire", "shape"),
}
