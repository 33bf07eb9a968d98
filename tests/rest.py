"""Says which tests `make test` leaves to `make test-rest`; both together run all. Others are in the first.

The first is for a stranger: each promise once, the face of each room, each launcher, one fault of each kind, in half of
the processor's time of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

MINUTES = {"not rest": 14, "rest": 22}
"""Minutes of processor that each took where it was last measured (`-m` by its expression), ranks included."""
KEPT = {
    "checkpoint/test_any_to_any.py::test_from_each_to_each": 3,
    "checkpoint/test_any_to_any.py::test_with_each_optimizer": 1,
    "checkpoint/test_newest.py::test_a_claim_ends_with_its_process_and_no_fork_of_it_has_it": 0,
    "checkpoint/test_saving.py::test_the_end_of_the_program_waits_and_tells": 1,
    "commands/test_plan.py::test_gpt3_is_planned_for_many_ranks": 0,
    "commands/test_plan.py::test_json_and_a_profile_that_takes_the_place_of_the_prediction": 0,
    "commands/test_plan.py::test_the_table_lists_choices_fastest_first": 0,
    "compatibility/test_compatibility.py::test_a_script": 6,
    "elastic/test_keeper.py::test_a_standby_process_that_is_killed_is_started_again": 0,
    "elastic/test_restarts.py::test_a_manager_that_was_stopped_says_so_and_blames_no_rank": 0,
    "elastic/test_restarts.py::test_a_python_that_was_built_for_an_older_system_will_do": 0,
    "elastic/test_restarts.py::test_for_what_a_job_left_that_ended_long_ago_nobody_waits": 0,
    "elastic/test_slow_ranks.py::test_what_concerns_all_ranks_or_single_steps_names_nobody": 6,
    "elastic/test_snapshots.py::test_a_run_whose_host_has_no_room_trains_on_and_the_keeper_hears_of_it": 0,
    "elastic/test_snapshots.py::test_snapshots_go_on_while_a_checkpoint_is_written": 0,
    "evidence/test_witness.py::test_a_drawn_model_that_may_mix_samples_is_right_or_refused": 6,
    "evidence/test_witness.py::test_what_a_schedule_brings_in_is_refused_in_that_step": 2,
    "graph/test_batch_dims.py::test_a_language_model_hands_its_state_from_call_to_call": 0,
    "graph/test_batch_values.py::test_a_count_is_that_of_the_whole_batch": 3,
    "graph/test_blocks.py::test_a_stage_a_block_gives_the_bits_of_the_plain_model": 5,
    "graph/test_blocks.py::test_rule_5_users_of_a_value_stay_in_order": 4,
    "graph/test_changed_state.py::test_a_change_of_what_forward_reads_counts": 0,
    "graph/test_changed_state.py::test_what_a_first_call_leaves_is_made_before_the_model_is_wrapped": 1,
    "graph/test_checks.py::test_samples_that_meet_are_refused": 5,
    "graph/test_facts.py::test_padded_places_are_those_of_plain_pytorch": 1,
    "graph/test_facts.py::test_a_library_makes_no_other_mask_for_a_trace": 0,
    "graph/test_idioms.py::test_modules_are_kept_whole": 1,
    "graph/test_idioms.py::test_others_are_refused_by_their_line": 6,
    "graph/test_idioms.py::test_right_numbers": 3,
    "graph/test_kept.py::test_kept_modules_train_like_plain_pytorch": 1,
    "graph/test_kept_functions.py::test_hooks_of_nodes_are_refused": 1,
    "graph/test_kept_functions.py::test_another_needs_the_whole_batch_in_one": 1,
    "graph/test_lengths.py::test_drawn_sizes_and_lengths_are_traced_twice": 0,
    "graph/test_losses.py::test_a_loss_that_is_no_mean_is_refused": 4,
    "graph/test_losses.py::test_a_sum_is_added_up_or_refused": 2,
    "graph/test_losses.py::test_the_size_is_that_of_the_whole_batch": 3,
    "graph/test_losses.py::test_what_is_added_up_is_the_loss_of_the_whole_batch": 2,
    "graph/test_losses.py::test_what_is_no_sum_is_not_added_up": 1,
    "graph/test_row_orders.py::test_rows_in_one_order_are_trained_as_plain": 4,
    "graph/test_row_orders.py::test_rows_of_other_samples_are_refused": 4,
    "hosts/test_emulation.py": 0,
    "hosts/test_morphing.py": 0,
    "hosts/test_odd_faults.py": 0,
    "hosts/test_strangers.py": 0,
    "integrations/test_accelerate.py::test_an_unmodified_gpt2_trains_in_bf16_as_plain": 0,
    "integrations/test_transformers.py::test_ranks_train_evaluate_and_save_as_plain_trainer": 0,
    "mpi/test_checkpoint.py::test_a_model_on_meta_loads_in_parts_from_a_folder_of_hugging_face": 0,
    "mpi/test_failures.py::test_a_failure_ends_every_rank": 7,
    "mpi/test_prediction.py": 0,
    "mpi/test_preempted.py::test_a_setting_saves_and_ends_with_a_status_of_its_own": 0,
    "mpi/test_torchrun.py::test_ranks_of_torchrun_keep_the_laws_of_worlds": 0,
    "mpi/test_torchrun.py::test_torchrun_passes_on_the_signals_that_its_option_names": 0,
    "mpi/test_varuna.py::test_a_run_that_sigusr1_stops_goes_on_on_other_ranks": 0,
    "mpi/test_world.py::test_messages_larger_than_an_int_counts": 0,
    "planner/test_bound.py::test_no_plan_beats_it": 2,
    "planner/test_every_depth.py": 2,
    "planner/test_forced.py::test_more_stages_than_ranks_are_several_a_rank": 0,
    "planner/test_forced.py::test_stage_ranks": 4,
    "planner/test_infeasible.py::test_a_split_that_fits_is_found_whatever_ranks_it_needs": 0,
    "planner/test_placement.py": 0,
    "planner/test_large.py": 0,
    "planner/test_rank_memory.py": 0,
    "planner/test_search.py::test_more_memory_is_never_slower": 0,
    "planner/test_choices.py::test_rows_are_what_the_user_decided_and_what_fits": 0,
    "planner/test_choices.py::test_a_plan_is_summed_up_in_two_lines": 1,
    "profiler/test_bytes.py::test_blocks_add_up_to_the_whole": 2,
    "profiler/test_cache.py::test_every_cost_fits_a_part_or_is_measured_again": 0,
    "profiler/test_measure.py::test_blocks_add_up_to_the_model": 1,
    "profiler/test_measure.py::test_own_time_has_no_turns_of_other_programs_and_pace_tells_what_they_take": 0,
    "profiler/test_roofline.py::test_arithmetic_is_that_of_the_real_forward_and_backward": 1,
    "profiler/test_roofline.py::test_bytes_are_those_that_are_counted_when_a_model_is_measured": 1,
    "schedule/test_laws.py::test_products_of_stages_micro_batches_and_depth": 3,
    "schedule/test_laws.py::test_random_pipelines": 3,
    "session/test_advice.py::test_advice_leads_on": 2,
    "session/test_against_plain.py::test_a_hugging_face_model_trains_as_plain_pytorch": 1,
    "session/test_calls.py::test_backwards_give_their_gradients_up_to_one_that_keeps_nothing": 3,
    "session/test_calls.py::test_methods_count_like_calls": 3,
    "session/test_deployment.py::test_one_that_does_not_fit_is_refused_if_it_must_be_used_else_planned_again": 2,
    "session/test_drawn.py::test_a_drawn_graph_trains_as_plain_pytorch": 2,
    "session/test_drawn.py::test_a_drawn_model_that_may_mix_samples_is_right_or_refused": 5,
    "session/test_drawn.py::test_any_calls_train_as_plain_pytorch": 1,
    "session/test_drawn.py::test_any_setup_trains_as_plain_pytorch": 6,
    "session/test_drawn.py::test_what_compares_samples_or_draws_by_numpy_is_right_or_refused": 1,
    "session/test_given_plan.py::test_numbers_are_those_of_plain_pytorch_and_nothing_is_measured": 2,
    "session/test_hooks.py::test_a_hook_sees_each_sample_once": 1,
    "session/test_optimizers.py::test_its_steps_are_as_in_plain_pytorch": 2,
    "session/test_optimizers.py::test_shared_state_changes_no_bit": 2,
    "session/test_optimizers.py::test_shared_state_ends_in_the_same_weights": 2,
    "session/test_optimizers.py::test_ties_buffers_what_is_not_trained": 2,
    "session/test_optimizers.py::test_what_cannot_be_is_refused_on_every_rank": 6,
    "session/test_ordinary_scripts.py::test_what_needs_all_on_one_rank_or_another_s_wrapper_is_refused": 6,
    "session/test_partitions.py::test_the_partition_changes_no_bit": 14,
    "session/test_precision.py::test_a_plan_measured_in_bfloat16_trains_as_plain_pytorch": 0,
    "session/test_precision.py::test_a_scaler_that_is_not_given_is_found_and_one_of_several_must_be_named": 0,
    "session/test_precision.py::test_a_scaler_made_before_is_found_wherever_it_is_and_one_made_too_late_is_refused": 0,
    "session/test_precision.py::test_no_partition_changes_a_bit": 2,
    "session/test_precision.py::test_one_micro_batch_gives_the_bits_of_plain_pytorch": 2,
    "session/test_precision.py::test_overflow_on_one_rank_skips_the_step_on_all": 2,
    "session/test_precision.py::test_replicas_change_the_order_of_a_sum_alone": 2,
    "session/test_ranks.py::test_a_batch_that_is_not_the_same_on_ranks_that_share_it_is_refused": 1,
    "session/test_ranks.py::test_ranks_may_wait_for_each_other_after_any_call": 1,
    "session/test_ranks.py::test_ranks_that_pass_the_same_samples_are_told_once": 1,
    "stage/test_compiled.py::test_a_backend_that_keeps_the_kernels_keeps_the_bits": 1,
    "stage/test_compiled.py::test_no_batch_size_compiles_again": 0,
    "test_docs.py::test_a_reader_who_follows_a_page_trains": 1,
    "test_examples.py::test_an_example_holds_its_own_assertions": 0,
    "test_hostile_files.py::test_a_hostile_file_is_read_or_refused_in_a_sentence": 0,
    "varuna/test_steps.py::test_a_checkpoint_that_is_not_there_is_an_error_or_the_newest_is_loaded": 0,
    "varuna/test_steps.py::test_a_run_goes_on_on_any_other_grid": 0,
    "varuna/test_profiler.py::test_memory_is_a_limit": 0,
    "varuna/test_profiler.py::test_parts_between_cut_points_are_measured_one_after_the_other": 0,
    "varuna/test_steps.py::test_a_script_has_the_losses_of_plain_pytorch": 1,
    "varuna/test_steps.py::test_a_step_of_many_micro_batches_is_not_cut_off": 0,
}
"""How many of the tests whose names begin so `make test` keeps, evenly spread; the others have the mark `rest`."""


def mark_rest(items: Sequence[pytest.Item]) -> None:
    """Marks what `make test` leaves out."""
    for name, kept in KEPT.items():
        tests = [item for item in items if item.nodeid.startswith(f"tests/{name}")]
        places = {place * len(tests) // kept for place in range(kept)}
        for place, item in enumerate(tests):
            if place not in places:
                item.add_marker("rest")


def duration(config: pytest.Config) -> str:
    """Says how long the tests take that `-m` has chosen; nothing of others."""
    minutes = MINUTES.get(config.option.markexpr)
    if minutes is None:
        return ""
    cores = min(len(os.sched_getaffinity(0)), int(getattr(config.option, "numprocesses", None) or 1))
    took = f"{minutes} minutes of processor where it was measured: about {max(1, round(minutes / cores))}"
    return f"{took} here, on {cores} cores" if cores > 1 else f"{took} here"
