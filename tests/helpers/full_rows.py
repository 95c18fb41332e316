"""Which rows of the dearest parametrised tests are in the full tier; the others are slow."""

from collections.abc import Hashable, Iterable

from covers import Covers, Parameters, apart_from, each, once, only, pairs


def _devices(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm; each collective on 2, 3 and 8 devices; each number of devices."""
    yield p["op"], p["algorithm"]
    yield p["n"]
    if p["n"] in (2, 3, 8):
        yield p["op"], p["n"]


def _layouts(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py`; each algorithm with and without groups; each space."""
    row = p["row"]
    algorithm, _, space = p["algorithm"].partition(":")
    return str(row), (row.op, algorithm, "groups" in row.name), (row.op, space)


def _collectives_and_dtypes(p: Parameters) -> Iterable[Hashable]:
    """Each dtype with each collective, and each with groups and without."""
    row = p["row"]
    return (row.op, p["dtype"]), (row.op, "groups" in row.name)


def _mutated(p: Parameters) -> Iterable[Hashable]:
    """Kernels of their own, on the core: SparseCores, pipelines, and sums after others, run alike.

    `visits` is judged without notes, and a ring of sums both ways at once.
    """
    alike = (
        *("gather_and_consume", "produce_and_scatter", "matmul_reduce_scatter"),
        *("visits, noted", "all_reduce:ring", "all_reduce:torus"),
        "reduce_scatter:unidirectional",
    )
    if not p["name"].endswith(":sc") and p["name"] not in alike:
        yield p["name"]


def _layouts_of_experts(p: Parameters) -> Iterable[Hashable]:
    """Each layout, and each way; kernels on one axis without groups and with more than that."""
    return p["layout"], p["how"], ("kernels" in p["how"], p["layout"].isdigit())


def _events(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm of each collective; each space and number of devices with each collective."""
    algorithm, _, space = p["algorithm"].partition(":")
    op = p["case"].op
    return (op, algorithm), (op, "in", space), (op, p["n"]), str(p["case"].name)


def _in_each_space(p: Parameters) -> Iterable[Hashable]:
    """Each algorithm in each space, and each algorithm and collective on each machine."""
    algorithm, op = p["algorithm"], p["case"].op
    base = algorithm.partition(":")[0]
    return (op, algorithm), (op, p["machine"]), (base, p["machine"]), str(p["case"])


def _recorded_dtypes(p: Parameters) -> Iterable[Hashable]:
    """Each row of `conformance.py` in each dtype, and each number of devices with each row."""
    row, _, n = p["key"].partition(" on ")
    return row, (row.split(" ")[0], n)


def _few_states(p: Parameters) -> Iterable[Hashable]:
    """Each kernel but the one whose schedules take as long as those of all others."""
    if p["case"].name != "passed on by another chunk's number":
        yield str(p["case"])


def _far(p: Parameters) -> Iterable[Hashable]:
    """Each collective on two slices, and one on three."""
    if p["slices"] == 2 or p["op"] == "all_to_all":
        yield p["op"], p["slices"]


def _a_scatter_and_a_sum(p: Parameters) -> Iterable[Hashable]:
    """A scatter on each pod, and a sum, which is twice as long, on one."""
    if p["op"] == "psum_scatter" or p["pod"] == "v5e:16x16":
        yield p["op"], p["pod"]


# Named as in `quick_rows.QUICK`.
FULL: dict[str, Covers] = {
    "test_loops::test_products_run_beside_a_scatter": only(topology=["v5p:2x2x1"]),
    "test_ahead::test_values_and_gradients_are_the_same_to_the_bit": apart_from(
        each("name", "check_vma"), name=["reverse=False, unroll=2", "reverse=True, unroll=1"]
    ),
    "test_all_reduce_gather::test_elements_are_added_in_the_order_of_the_ranks": each(
        "dtype", "vmem"
    ),
    "test_all_reduce_gather::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_all_reduce_gather::test_takes_hardly_longer_than_gathering_the_operands": each(
        "machine", "nbytes"
    ),
    "test_all_reduce_grid::test_large_sums_keep_all_links_of_a_grid_busy": only(
        machine=["v5e:3x3"]
    ),
    "test_all_reduce_grid::test_no_fault_on_any_schedule_and_each_link_carries_the_same": only(
        sizes=[(2, 3), (3, 3)]
    ),
    "test_all_reduce_line::test_all_devices_have_the_documented_bits_however_late_one_is": (
        apart_from(each("n", "dtype", "op", "vmem"), n=[8])
    ),
    "test_all_reduce_line::test_compiles_to_the_kernel_alone": each("generation", "dtype"),
    "test_all_reduce_line::test_faults_are_named": each("fault", "n"),
    "test_all_reduce_line::test_large_operands_keep_the_links_busy": only(n=[4]),
    "test_all_reduce_line::test_the_sound_kernel_has_no_fault_on_any_schedule": each("n", "vmem"),
    "test_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each(
        "algorithm", "topology"
    ),
    "test_all_to_all::test_chunks_and_waves_with_a_late_device": each("n", "mode"),
    "test_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_all_to_all_packed::test_it_takes_sixty_hundredths_of_its_time_in_bfloat16": each(
        "pod", "axes"
    ),
    "test_backend_nccl::test_conformance_rows_give_what_lax_and_the_tpu_kernels_give": (
        _recorded_dtypes
    ),
    "test_benchmarks_fused::test_products_over_two_axes_hide_the_wire": each("pod", "shape"),
    "test_benchmarks_measure::test_references_agree_with_lax": each("case", "dtype"),
    "test_benchmarks_step_schedules::test_large_ones_take_what_their_replay_would": only(
        name=["v5p:2x2x1"]
    ),
    "test_benchmarks_wires::test_small_blocks_are_cut_for_both_axes_and_packed_together": each(
        "pod"
    ),
    "test_collective_matmul::test_both_cores_of_a_device_have_a_ring_each": each("n", "mode"),
    "test_collective_matmul::test_either_order_of_sums": each("mode", "furthest_first"),
    "test_collective_matmul::test_every_ring_under_both_adversaries": apart_from(
        each("n", "mode"), n=[8]
    ),
    "test_collective_matmul::test_messages_that_wait_behind_own_chunks": each("ahead", "mode"),
    "test_collective_matmul::test_weights_that_stay_come_tile_by_tile": each("n", "mode"),
    "test_compiled::test_a_gibibyte_per_device_compiles": each("op", "generation"),
    "test_compiled::test_a_pod_compiles_in_seconds": each("op", "topology", "sizes"),
    "test_compiled::test_compiles_for_every_generation": each(
        "op x algorithm", "op x generation", "algorithm x generation", "generation x space"
    ),
    "test_compiled::test_sums_of_a_gibibyte_take_three_blocks_a_direction": each(
        "op", "generation"
    ),
    "test_conformance::test_algorithm_on_n_devices_without_races": _devices,
    "test_conformance::test_row_with_every_algorithm": _layouts,
    "test_conformance::test_row_with_the_algorithm_chosen": _collectives_and_dtypes,
    "test_explanation::test_figures_are_the_replays_within_a_tenth_or_there_is_none": pairs(
        "pod", "name", "block"
    ),
    "test_fused::test_gradients_of_8_bit_floats_that_are_added_up_wide": each("op", "result"),
    "test_hierarchy::test_an_axis_over_two_slices_as_its_devices_lie": each("call", "places"),
    "test_hierarchy::test_gradients_are_laxs": each("layout", "check_vma"),
    "test_judge::test_mutants_are_caught_or_equivalent_and_all_schedules_agree": _mutated,
    "test_judge::test_verdicts_are_what_all_schedules_show": _few_states,
    "test_matmul_on_tpus::test_float32_in_full_compiles": each("op", "generation"),
    "test_matmul_on_tpus::test_the_shorter_of_wire_and_product_is_hidden": each(
        "name x op", "ratio x op"
    ),
    "test_matmul_on_two_rings::test_the_replay_knows_no_race": each("n", "chunks"),
    "test_matmul_on_two_rings::test_values": apart_from(
        each("mode", "n", "cores", "chunks"), chunks=[4]
    ),
    "test_memory_spaces::test_kernels_find_in_hbm_what_they_take_for_it": each(
        "generation", "form"
    ),
    "test_moe::test_compiles_for_every_generation": each("exchange x wire", "generation"),
    "test_moe::test_hostile_routings_move_nothing_out_of_bounds": each("how", "dtype"),
    "test_moe::test_values_and_gradients_are_those_of_a_dense_layer": _layouts_of_experts,
    "test_moe::test_what_fits_and_what_does_not": each("how", "rows"),
    "test_moe_transforms::test_checkpoint_in_a_scan_keeps_nothing_and_differentiates": only(
        how=["dense", "ragged", "ragged kernels"]
    ),
    "test_moe_transforms::test_second_order_and_forward": only(
        how=["dense", "ragged", "ragged kernels"]
    ),
    "test_moe_transforms::test_vmap": each("how", "mapped"),
    "test_multihost::test_a_dead_process_is_named": once,
    "test_multihost::test_a_late_process_is_named_everywhere": once,
    "test_multihost::test_a_process_that_lives_and_does_not_come_is_named": once,
    "test_multihost::test_a_process_that_never_enters_is_named": each("how"),
    "test_multihost::test_allgather_equals_jax": each("tree", "tiled", "processes"),
    "test_multihost::test_broadcast_equals_jax": each("tree", "source", "processes"),
    "test_multihost::test_preemption_equals_jax": once,
    "test_multihost::test_preemption_of_one_process_stops_all_at_one_step": once,
    "test_multihost::test_the_others_go_on_without_a_process_that_dies": once,
    "test_ordered::test_a_row_has_the_same_bits_in_any_batch": once,
    "test_ppermute::test_any_shape_compiles": each("shape", "dtype"),
    "test_product::test_products_with_some_panels_that_stay": each("columns", "every", "times"),
    "test_ragged_all_to_all::test_a_gibibyte_needs_no_more_scratch_than_stated": each(
        "algorithm", "topology"
    ),
    "test_ragged_all_to_all::test_compiles_with_nothing_around_it": each("algorithm", "topology"),
    "test_ragged_all_to_all::test_groups_exchange_by_themselves": once,
    "test_ragged_all_to_all::test_tables_of_any_integer_type": only(dtype=["int8", "int64"]),
    "test_ragged_faults::test_fault_in_the_ring_is_caught": each("fault", "mode"),
    "test_reach::test_no_kernel_writes_or_signals_beyond_reach": _far,
    "test_reach::test_some_kernel_serves_every_axis_of_a_slice": each("op x axes", "shape x axes"),
    "test_reduce_scatter::test_sharded_sums_of_whole_arrays": each("name", "n"),
    "test_remat::test_residuals_and_kernels_are_the_same_by_lax_simulated_and_on_tpus": pairs(
        "policy", "body", "inside"
    ),
    "test_replay_races::test_our_all_gathers_are_clean": each("n", "algorithm"),
    "test_replay_races::test_the_all_gather_that_jax_ships_races": once,
    "test_replay_rows::test_lines_come_near_the_bound_at_every_size": only(machine=["v6e:4x4"]),
    "test_replay_rows::test_our_collectives_have_no_fault_on_any_schedule": _in_each_space,
    "test_replay_rules::test_memory_is_counted_with_its_padding_to_tiles": each(
        "generation", "space"
    ),
    "test_replay_truth::test_events_of_our_collectives_equal_the_interpreters": _events,
    "test_residual_norm::test_one_kernel_and_three_passes_give_the_same": each(
        "rows", "depth", "dtype", "wide", "mode"
    ),
    "test_sparsecore::test_compiles_to_an_asynchronous_call": each(
        "op x algorithm", "op x generation"
    ),
    "test_sparsecore::test_large_sums_have_semaphores_enough": each("generation", "algorithm"),
    "test_sparsecore::test_narrow_sums_and_groups_compile": each("generation", "dtype"),
    "test_sparsecore::test_replayed_as_a_second_engine": each("op", "name"),
    "test_sparsecore::test_the_same_kernel_gives_what_it_gives_on_the_tensorcore": each(
        "op", "algorithm"
    ),
    "test_split::test_values_are_laxs": each("form", "dtype"),
    "test_torus_all_to_all::test_compiles_with_nothing_around_it": each(
        "topology", "split x concat"
    ),
    "test_torus_all_to_all::test_links_of_v5e_are_at_work_almost_all_the_time": each("axes"),
    "test_torus_all_to_all::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_torus_all_to_all::test_slots_that_serve_again_with_a_late_device": each("mode"),
    "test_torus_kernels::test_one_mesh_axis_laid_over_a_torus_in_any_order": once,
    "test_torus_on_tpus::test_wide_rows_are_summed_where_they_lie": each("op", "topology"),
    "test_torus_packed::test_compiles_for_every_generation": each("op", "topology"),
    "test_torus_ragged::test_devices_that_are_numbered_in_any_order": once,
    "test_torus_ragged::test_values_without_races": only(sizes=[(4,), (7,), (2, 2), (3, 2)]),
    "test_torus_ragged_spread::test_compiles_on_all_that_reach_all": each("topology", "rows"),
    "test_torus_ragged_spread::test_faults_are_caught": each("fault", "mode"),
    "test_torus_ragged_spread::test_routings_of_one_program": only(sizes=[(2,), (2, 3)]),
    "test_torus_ragged_spread::test_shares_by_what_links_carry": only(sizes=[(2, 2)]),
    "test_wire_ways::test_predictions_are_near_the_replay_and_the_quickest_way_is_taken": each(
        "op", "pod", "axes", "mib"
    ),
    "test_wired::test_nccl_gives_the_bits_that_lax_gives": each("n", "by", "wire"),
    "test_wired::test_sums_are_within_the_stated_bound": apart_from(each("wire", "n"), n=[5, 6, 7]),
    "test_wired::test_what_is_moved_is_within_half_a_step": apart_from(
        each("wire", "n"), n=[5, 6, 7]
    ),
    "test_wired_maxima::test_each_number_is_within_the_stated_bound": apart_from(
        each("wire", "n"), n=[5, 6, 7]
    ),
    "test_wired_rings::test_a_psum_adds_half_a_step_and_gives_everyone_the_same_bits": apart_from(
        each("wire", "line", "n"), n=[5, 6, 8]
    ),
    "test_wired_rings::test_a_sum_takes_sixty_hundredths_of_its_time_in_bfloat16": (
        _a_scatter_and_a_sum
    ),
    "test_wired_rings::test_compiles_for_every_generation": each("wire", "generation"),
    "test_wired_rings::test_sections_of_a_large_psum_are_safe_on_every_schedule": each(
        "mode", "line"
    ),
    "test_wired_rings::test_sections_of_a_large_sum_are_safe_on_every_schedule": each(
        "mode", "line"
    ),
    "test_wired_rings::test_sums_are_within_the_bound_that_grows_with_hops": apart_from(
        each("wire", "line", "n"), n=[4, 6, 7]
    ),
}
